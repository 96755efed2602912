//! Gets and puts as text: read, and played on any pool.
//!
//! | file | owns |
//! | --- | --- |
//! | `format.rs` | the text format: header, operations, errors with line numbers |
//! | `conformance.rs` | plays a trace on pools over `sim` and writes down all that TensorFlow's pool would have done |
//! | `expected.rs` | the text that makes of it: diagnostics, figures, digests |
//! | `workload.rs` | a trace as a whole: checked and measured, to be played under many settings |
//! | `replay.rs` | plays a workload on a pool over `sim` in virtual time, and says what it cost |

mod conformance;
mod expected;
mod format;
mod replay;
mod workload;

pub use conformance::{Conformance, Figures, Streams};
pub use expected::expected_text;
pub use format::{Header, Operation, Reader, TraceError};
pub use replay::{Replay, Replayed, SourceKind};
pub use workload::Workload;
