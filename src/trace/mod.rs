//! Traces of gets and puts as text: read, checked and replayed on any pool.
//!
//! For the tool and the tests; no part of the public interface.
//!
//! | file | owns |
//! | --- | --- |
//! | `format.rs` | the text format: header, operations, errors with line numbers |
//! | `workload.rs` | a whole trace, checked and measured, to be replayed under many settings |
//! | `priced.rs` | simulated memory that adds up what moves would take on a device |
//! | `replay.rs` | replays a workload on a pool over `sim` in virtual time |
//! | `watch.rs` | the pool's figures during a replay |
//! | `report.rs` | what that cost |

mod format;
mod priced;
mod replay;
mod report;
mod watch;
mod workload;

pub use format::{TraceError, TraceHeader, TraceOp, TraceReader};
pub use replay::{Replay, SourceKind};
pub use report::ReplayReport;
pub use watch::Watch;
pub use workload::Workload;
