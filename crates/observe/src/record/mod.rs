//! Recording what a pool does, for `pinpool trace`, `replay`, `advise` and `report`.
//!
//! ```text
//!   get, put, pin ... ──▶ queue (bounded, never waits) ──▶ pinpool-trace ──▶ blocks with checksums ──▶ file
//! ```
//!
//! | file | owns |
//! | --- | --- |
//! | `event.rs` | what is recorded |
//! | `format.rs` | the bytes of a block |
//! | `reader.rs` | a recording read back, truncated or not |
//! | `writer.rs` | the queue, the thread that writes, the open files, and the end of the process |
//! | `open.rs` | what is at the path of a file, and what of it may be written |
//! | `output.rs` | one file that is open: written, closed |
//! | `recorder.rs` | one pool's part in a file |
//!
//! The format is described in `docs/trace-format.md`. Without the feature `io` there are events and nobody to take them.

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

/// Recordings of this process that were asked for, and are missing or not complete.
static FAILED: AtomicU64 = AtomicU64::new(0);

/// How many pools were to be recorded and are not in a complete file.
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
    /// The file cannot be written, or no thread can be had that writes it. The text says so, and what helps.
    Failed(String),
    /// Another process writes it.
    Taken,
    /// Another thread keeps the list of open files: one that waits for a disk, or one that a child of `fork` does not have.
    Busy,
}

/// What came of a pool's recording.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recorded {
    /// Records of this file so far, those of other pools included.
    pub records: u64,
    /// Records for which a queue had no room.
    pub lost: u64,
    /// Why the file is not complete, if it is not.
    pub failure: Option<String>,
}
