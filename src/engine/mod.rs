//! The engine: everything behind a handle.
//!
//! | file | owns |
//! | --- | --- |
//! | `core.rs` | the order of steps |
//! | `miss.rs` | a get that found nothing idle |
//! | `shutdown.rs` | the end of a pool |
//! | `snapshot.rs` | figures and errors |
//! | `idle/` | the idle buffers, under the rules of the preset |
//! | `supply/` | where a miss gets its memory and a victim leaves it |
//! | `waiters.rs` | gets that wait for room |
//! | `maintenance.rs`, `poller.rs` | what is due by time |
//! | `shortage.rs` | a time without room, logged once |
//! | `block.rs` | what moves between all of them |
//! | `clock.rs` | the time, exact and coarse |

mod block;
mod clock;
mod core;
pub(crate) mod idle;
mod maintenance;
mod miss;
mod poller;
mod reserve;
mod residence;
mod shortage;
mod shutdown;
mod snapshot;
mod supply;
mod waiters;

pub(crate) use self::block::{Block, BufferState};
pub(crate) use self::clock::Timekeeper;
pub(crate) use self::core::Core;
pub(crate) use self::poller::Poller;
pub(crate) use self::supply::{Direct, SharedArena, SharedArenaConfig, Supply};
pub use clock::{Clock, ManualClock};
