//! Recording what a pool does, for `pinpool trace`, `replay`, `advise` and `report`.
//!
//! ```text
//!   get, put, pin ... ──▶ queue (bounded, never waits) ──▶ pinpool-trace ──▶ blocks with checksums ──▶ file
//! ```
//!
//! | file | owns |
//! | --- | --- |
//! | `event.rs` | the events |
//! | `format.rs` | the bytes of a block |
//! | `reader.rs` | a recording read back, truncated or not |
//! | `writer.rs` | the queue, the thread that writes, the open files, and the end of the process |
//! | `open.rs` | whether the file at a path may be written |
//! | `output.rs` | one open file |
//! | `recorder.rs` | one pool's part in a file |
//!
//! The format is described in `docs/trace-format.md`. Without the feature `io` nothing is recorded.

use pinpool_os::sync::process::{AtomicU64, Ordering};

mod event;
pub use event::{Event, PoolDescription, Record, SET_IN_CODE};

#[cfg(feature = "io")]
mod format;
#[cfg(feature = "io")]
mod open;
#[cfg(feature = "io")]
mod output;
#[cfg(feature = "io")]
mod reader;
#[cfg(feature = "io")]
mod recorder;
#[cfg(not(feature = "io"))]
mod without;
#[cfg(feature = "io")]
mod writer;

#[cfg(feature = "io")]
pub use format::Taken;
#[cfg(feature = "io")]
pub use reader::{Recording, RecordingError};
#[cfg(feature = "io")]
pub use recorder::Recorder;
#[cfg(not(feature = "io"))]
pub use without::Recorder;

/// Requested recordings of this process that are missing or incomplete.
static FAILED: AtomicU64 = AtomicU64::new(0);

/// Number of pools whose requested recording is missing or incomplete.
pub fn failed_recordings() -> u64 {
    FAILED.load(Ordering::Relaxed)
}

pub fn count_failed() {
    FAILED.fetch_add(1, Ordering::Relaxed);
}

/// Why a pool records nothing.
#[cfg(feature = "io")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unrecorded {
    /// The file cannot be written, or its thread cannot be started. The text contains the remedy.
    Failed(String),
    /// Another process writes it.
    Taken,
    /// Another thread holds the list of open files: it waits for a disk, or does not exist in this forked child.
    Busy,
}

/// The result of a pool's recording.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recorded {
    /// Records of this file so far, including other pools.
    pub records: u64,
    /// Records that found no room in the queue.
    pub lost: u64,
    /// Why the file is not complete, if it is not.
    pub failure: Option<String>,
}
