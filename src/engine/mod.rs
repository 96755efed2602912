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
//! | `user_block.rs` | the calls of a buffer on its block |
//! | `recent.rs` | the pools that each thread used last, for the short path of a hit |
//! | `block.rs` | memory with its class, buffer state and owner |
//! | `stock.rs` | idle blocks, and the memory that new ones are made of |
//! | `idle/` | the idle buffers, by the rules of the preset |
//! | `lifetime.rs` | how many blocks exist, and when the pool closes |
//! | `core/account.rs` | a partition: a limit and a wait queue of its own |
//! | `memory/` | where memory comes from and returns to |
//! | `core/waiting.rs` | a get without room, and the put that serves it |
//! | `wait_queue/` | the requests that wait for room |
//! | `shortage.rs` | a time without room, logged once |
//! | `owners.rs` | who holds the buffers that were got under a tag |
//! | `core/report.rs` | the report of a get that found no memory |
//! | `core/figures.rs` | the snapshots of a pool's figures |
//! | `maintenance.rs` | when periodic work is due |
//! | `accounts.rs` | counts beside the idle buffers, and the snapshot of all figures |
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
pub(crate) use self::core::{Account, Core, OutsideClaim, Wanted};
pub(crate) use self::memory::{
    Adopted, ArenaSettings, ArenaSupply, CalledSource, Memory, OneEach, Pageable, granule_bytes,
};
pub(crate) use self::owners::Ledger;
pub(crate) use self::recent::ShardAtHand;
pub(crate) use self::user_block::Block;
pub(crate) use self::wait_queue::WaitTicket;
pub use clock::ManualClock;
