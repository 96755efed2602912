//! The files of recordings.
//!
//! | file | owns |
//! | --- | --- |
//! | `format.rs` | the bytes of a block |
//! | `reader.rs` | a recording read back, truncated or not |
//! | `writer.rs` | the pools that record, the queue, the thread that writes, the open files, and the end of the process |
//! | `names.rs` | the tags and call stacks to which records refer |
//! | `open.rs` | whether the file at a path may be written |

mod format;
mod names;
mod open;
mod reader;
mod writer;

pub use format::TimedSnapshot;
pub use open::check_path;
pub use reader::Recording;
pub use writer::open;

/// The reason that a pool records nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unrecorded {
    /// The file cannot be written, or the thread that writes it cannot be started. The text contains the remedy.
    Failed(String),
    /// Another process writes the file.
    Taken,
}
