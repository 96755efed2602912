//! What could not be loaded, and why: one sentence with names and numbers.
//!
//! Owns the words of a failure. Never prints and never decides whether a failure ends the run.

use std::fmt;
use std::io;

/// One thing that was skipped: its name and the cause.
#[derive(Debug)]
pub struct Failure {
    /// The path, `container!member`, or batch that is meant.
    pub name: String,
    /// Why it was skipped.
    pub cause: Cause,
}

impl Failure {
    pub(crate) fn new(name: impl fmt::Display, cause: impl Into<Cause>) -> Failure {
        Failure { name: name.to_string(), cause: cause.into() }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name, self.cause)
    }
}

/// Why something was skipped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Cause {
    /// The operating system refused.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// A path named by the caller is a device, a socket or a pipe.
    #[error("neither a regular file nor a directory")]
    NotAFile,
    /// A file ended before the length it had when the run was planned.
    #[error("truncated: {read_bytes} of the {planned_bytes} bytes planned could be read")]
    Truncated {
        /// Bytes that should have been there.
        planned_bytes: u64,
        /// Bytes that were.
        read_bytes: u64,
    },
    /// A tar archive that cannot be walked from end to end.
    #[error("broken tar: {0}")]
    Tar(String),
    /// A safetensors file whose header does not describe it.
    #[error("broken safetensors: {0}")]
    Safetensors(String),
    /// The pool had no buffer for a batch, with every other batch already given back; or the copy failed.
    #[error("{0}")]
    Pool(#[from] crate::Error),
    /// The bytes at the destination are not the bytes that were read.
    #[error(
        "{len_bytes} bytes differ at the destination: checksum {arrived:016x} there, {read:016x} when they were read"
    )]
    Corrupted {
        /// Length of the sample.
        len_bytes: usize,
        /// Checksum taken while the file was read.
        read: u64,
        /// Checksum of what the destination holds.
        arrived: u64,
    },
    /// The run was stopped while this was being read. Never reported: its batch is dropped whole.
    #[error("stopped")]
    Stopped,
}
