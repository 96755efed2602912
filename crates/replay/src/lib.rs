//! Reads traces of requests and returns, and replays them on a pool in virtual time.
//!
//! Internal to the tool and the tests; not a public interface.
//!
//! | file | owns |
//! | --- | --- |
//! | `format.rs` | the text format: header, operations as records, errors with line numbers |
//! | `input.rs` | a file that is read once, and its first bytes |
//! | `threads.rs` | what each thread of a recording did |
//! | `workload.rs` | a whole trace, checked and measured, to be replayed under many settings |
//! | `replay.rs` | the settings of a replay |
//! | `sim.rs` | simulated memory, and the time that its remaps would take on a device |
//! | `player/mod.rs`, `player/steps.rs` | the player: the pool, virtual time and counters; the schedule of the steps |
//! | `report.rs` | what a replay cost, and whether it matches the recording |
//! | `cost.rs` | the duration of driver calls, fitted to a recording |

#![allow(missing_debug_implementations)] // Internal.

mod cost;
mod format;
mod input;
mod player;
mod replay;
mod report;
mod sim;
mod threads;
mod workload;

pub use cost::{CallCost, TimedCall};
pub use format::{Trace, TraceError, TraceHeader};
pub use input::Input;
pub use pinpool_observe::record::{Event, PoolDescription, Record, Recording};
pub use replay::Replay;
pub use report::ReplayReport;
pub use sim::{SimSource, SourceKind};
pub use workload::Workload;
