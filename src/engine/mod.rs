//! The engine: everything behind a handle.
//!
//! ```text
//!   pool, buffer
//!      │
//!   user_block ─▶ recent, core ─▶ in_flight, wait_queue, shortage, maintenance, accounts
//!                   └───▶ stock ─▶ idle, memory
//!                           └────▶ block (generic over its owner, so that nothing below the core knows it)
//! ```
//!
//! | file | owns |
//! | --- | --- |
//! | `core.rs` | the order of steps |
//! | `user_block.rs` | what a buffer calls on its block |
//! | `recent.rs` | the pools that each thread used last, for the fast path |
//! | `block.rs` | memory with its class, buffer state and owner |
//! | `stock.rs` | idle blocks, and the memory that new ones are made of |
//! | `idle/` | the idle buffers, by the policy of the preset |
//! | `lifetime.rs` | how many blocks exist, and when the pool closes |
//! | `core/account.rs` | a partition: its own limit and wait queue |
//! | `memory/` | where memory comes from and returns to |
//! | `core/get.rs`, `core/put.rs` | requests and returns |
//! | `core/queue.rs` | what the wait queue requires of a pool |
//! | `wait_queue/` | the requests that wait for room |
//! | `shortage.rs` | a shortage, logged once |
//! | `owners.rs` | who holds the buffers of each tag |
//! | `core/report.rs` | statistics, dumps, and the error of a failed request |
//! | `core/tick.rs`, `core/verdicts.rs` | periodic work; the diagnosis |
//! | `maintenance.rs` | when periodic work is due |
//! | `accounts.rs` | counters of buffers that are not idle |
//! | `clock.rs` | the time, exact and coarse |

mod accounts;
mod auto_limit;
mod block;
mod classes;
mod clock;
mod core;
pub(crate) mod idle;
mod lifetime;
mod maintenance;
mod memory;
mod owners;
mod recent;
mod shortage;
mod stock;
mod user_block;
mod wait_queue;

pub(crate) use self::auto_limit::AutoLimit;
pub(crate) use self::block::BufferState;
pub(crate) use self::clock::{Clock, Timekeeper};
pub(crate) use self::core::{Account, BlockRequest, Core, OutsideClaim};
pub(crate) use self::memory::{
    Adopted, ArenaSettings, ArenaSupply, CalledSource, Memory, OneEach, Pageable, granule_bytes,
};
pub(crate) use self::owners::TagAccount;
pub(crate) use self::recent::CachedShard;
pub(crate) use self::user_block::Block;
pub(crate) use self::wait_queue::WaitTicket;
pub use clock::ManualClock;
