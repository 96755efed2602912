//! The engine: everything behind a handle.
//!
//! ```text
//!   pool, buffer
//!      │
//!   buffer_calls ─▶ pool_core ─▶ in_flight, wait_queue, meter
//!                   ├───▶ cache, memory
//!                   └───▶ block (generic over the pool, so that it does not depend on the core)
//! ```
//!
//! | folder or file | owns |
//! | --- | --- |
//! | `pool_core` | the order of steps: requests, returns, periodic work, the end |
//! | `cache` | the idle buffers, by the policy of the preset |
//! | `memory` | where memory comes from and returns to |
//! | `wait_queue` | the requests that wait for room |
//! | `meter` | the time, counters, and who holds the buffers of each tag |
//! | `block.rs`, `buffer_calls.rs` | memory with its class, buffer state and pool; what a buffer calls on it |
//! | `classes.rs` | the pinned buffers of each class |

mod block;
mod buffer_calls;
mod cache;
mod classes;
mod memory;
mod meter;
mod pool_core;
mod wait_queue;

pub(crate) use self::meter::clock::Timekeeper;
pub(crate) use self::meter::holders::Tag;
pub(crate) use self::pool_core::{Block, BlockRequest, HostLimit, PartitionCore, PoolCore, ThreadShard};
pub(crate) use self::wait_queue::{FirstAttempt, WaitTicket};
pub(crate) use memory::{Adopted, ArenaSettings, ArenaSupply, Memory, MeteredSource, RegionSupply, granule_bytes};
pub use meter::clock::ManualClock;
