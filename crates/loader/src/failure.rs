//! The failures of a load.

use std::{fmt, io};

/// A skipped sample, file or batch, and the cause.
#[derive(Debug, thiserror::Error)]
#[error("{name}: {cause}")]
#[non_exhaustive]
pub struct Failure {
    /// A path, `archive!member`, or a batch with its first sample.
    pub name: String,
    /// The cause.
    pub cause: FailureCause,
    /// The files with the skipped samples.
    pub(super) files: Vec<usize>,
}

impl Failure {
    pub(super) fn new(name: impl fmt::Display, cause: impl Into<FailureCause>) -> Self {
        Self { name: name.to_string(), cause: cause.into(), files: Vec::new() }
    }
}

/// The cause of a failure.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FailureCause {
    /// A system call failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// A path given by the caller is a device, a socket or a pipe.
    #[error("neither a regular file nor a directory")]
    NotAFile,
    /// A file ended before the length it had when it was listed.
    #[error("truncated: {read_bytes} of the {planned_bytes} bytes planned could be read")]
    Truncated {
        /// Bytes of the range when it was listed.
        planned_bytes: u64,
        /// Bytes that could be read.
        read_bytes: u64,
    },
    /// A file is longer than when it was listed: another program is still writing it.
    #[error("grew: {planned_bytes} bytes when it was listed, {found_bytes} when it was read")]
    Grown {
        /// Length of the file when it was listed.
        planned_bytes: u64,
        /// Length of the file after it was read.
        found_bytes: u64,
    },
    /// A compressed file cannot be decompressed.
    #[error("{0}")]
    Compressed(String),
    /// A tar archive cannot be read from end to end.
    #[error("broken tar: {0}")]
    Tar(String),
    /// The header of a safetensors file does not describe the file.
    #[error("broken safetensors: {0}")]
    Safetensors(String),
    /// A field is missing or cannot be decoded.
    #[error("{0}")]
    Decode(String),
    /// The copy failed, or the pool returned an error. If the pool had no memory for a batch, all other buffers had returned,
    /// or the consumer that held them waited for this batch.
    #[error(transparent)]
    Pool(#[from] pinpool::Error),
    /// The bytes on the destination differ from the bytes that were read.
    #[error(
        "{len_bytes} bytes differ at the destination: checksum {arrived:016x} there, {read:016x} when they were read"
    )]
    Corrupted {
        /// Length of the sample, or of the part of it in this batch.
        len_bytes: usize,
        /// XXH3 checksum of the bytes that were read.
        read: u64,
        /// XXH3 checksum of the bytes on the destination.
        arrived: u64,
    },
}
