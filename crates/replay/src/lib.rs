//! Traces of gets and puts as text: read, checked and replayed on any pool.
//!
//! For the tool and the tests; no part of the public interface.
//!
//! | file | owns |
//! | --- | --- |
//! | `format.rs` | the text format: header, operations, errors with line numbers |
//! | `input.rs` | a file that is read once, and how it begins |
//! | `open.rs` | a trace of either kind: a recording of a pool, or text |
//! | `threads.rs` | what each thread of a recording did |
//! | `workload.rs` | a whole trace, checked and measured, to be replayed under many settings |
//! | `recorded.rs` | the settings that a recording was made under |
//! | `priced.rs` | simulated memory that adds up what moves would take on a device |
//! | `replay.rs` | how a workload is replayed: the settings of the pool over `sim` |
//! | `sim.rs` | memory that is simulated |
//! | `player.rs`, `player/closed.rs` | plays it in virtual time, and counts; in closed loop |
//! | `watch.rs` | the pool's figures during a replay |
//! | `report.rs` | what that cost, and whether it matches the recording |
//! | `cost.rs` | what calls of a back-end take, fitted to a recording |
//! | `usage.rs` | bytes by state over a recording |

mod cost;
mod format;
mod input;
mod open;
mod player;
mod priced;
mod recorded;
mod replay;
mod report;
mod sim;
mod threads;
mod usage;
mod watch;
mod workload;

pub use cost::{CallCost, TimedCall};
pub use format::{TraceError, TraceHeader, TraceOp, TraceReader};
pub use input::Input;
pub use open::{open_recording, read_recording};
pub use pinpool_observe::record::failed_recordings;
pub use pinpool_observe::record::{Event, PoolDescription, Record, Recording, RecordingError};
pub use replay::Replay;
pub use report::ReplayReport;
pub use sim::{SimSource, SourceKind};
pub use usage::Usage;
pub use watch::Watch;
pub use workload::Workload;
