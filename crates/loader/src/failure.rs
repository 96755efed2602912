//! Why something could not be loaded.
//!
//! Owns the causes and their texts, with names and numbers. Never prints, and never decides whether a failure ends the run.

use std::error::Error;
use std::fmt;
use std::io;
use std::sync::Arc;

use super::compression::Compression;

/// Something that a run skipped, and why.
#[derive(Debug)]
#[non_exhaustive]
pub struct Failure {
    /// A path, `container!member`, or a batch with its first sample.
    pub name: String,
    /// Why it was skipped.
    pub cause: FailureCause,
}

impl Failure {
    pub(super) fn new(name: impl fmt::Display, cause: impl Into<FailureCause>) -> Failure {
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
pub enum FailureCause {
    /// The operating system refused.
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
    /// A file is longer than it was when it was listed: somebody is still writing it.
    #[error("grew: {planned_bytes} bytes when it was listed, {found_bytes} when it was read")]
    Grown {
        /// Its length when it was listed.
        planned_bytes: u64,
        /// Its length after it was read.
        found_bytes: u64,
    },
    /// A compressed file cannot be decompressed.
    #[error(transparent)]
    Compressed(#[from] CompressedError),
    /// A tar archive cannot be read from end to end.
    #[error("broken tar: {0}")]
    Tar(#[from] TarError),
    /// The header of a safetensors file does not describe the file.
    #[error("broken safetensors: {0}")]
    Safetensors(#[from] SafetensorsError),
    /// A field cannot be decoded.
    #[error("its {field} cannot be decoded: {why}")]
    Decode {
        /// The names that the field may have.
        field: String,
        /// What the decoder says.
        why: Box<dyn Error + Send + Sync>,
    },
    /// A sample has no field that could be decoded.
    #[error("no field {expected} to decode: it has {found:?}")]
    NoField {
        /// The names that the field may have.
        expected: String,
        /// The fields of the sample, or the ending of the file.
        found: String,
    },
    /// The pool had no buffer for a batch although every other batch was back in it, or the copy failed.
    #[error(transparent)]
    Pool(#[from] Arc<pinpool::Error>),
    /// The bytes on the destination differ from the bytes that were read.
    #[error(
        "{len_bytes} bytes differ at the destination: checksum {arrived:016x} there, {read:016x} when they were read"
    )]
    Corrupted {
        /// Length of the sample.
        len_bytes: usize,
        /// XXH3 checksum of the bytes that were read.
        read: u64,
        /// XXH3 checksum of the bytes on the destination.
        arrived: u64,
    },
}

/// Why a compressed file could not be decompressed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum CompressedError {
    /// The file is not what its name says, or bytes of it were changed.
    #[error(
        "damaged {compression} data at or shortly before byte {offset}, behind {data_bytes} bytes of its contents: {why}; fetch \
         the file again, or compress it again"
    )]
    Damaged {
        /// How it is compressed, by its name.
        compression: Compression,
        /// Bytes of the file that were used.
        offset: u64,
        /// Bytes of data that they gave.
        data_bytes: u64,
        /// What the decoder says.
        why: String,
    },
    /// The file ends in the middle of its data.
    #[error(
        "cut off after byte {file_bytes}: the {compression} data has no end there, behind {data_bytes} bytes of its contents; fetch \
         the file again"
    )]
    CutOff {
        /// How it is compressed.
        compression: Compression,
        /// Length of the file.
        file_bytes: u64,
        /// Bytes of data until there.
        data_bytes: u64,
    },
    /// The file's data is too long for a file of its length.
    #[error(
        "{file_bytes} bytes expand to more than {max_bytes} bytes, which no ordinary data does: decompress the file yourself if \
         you trust it"
    )]
    TooLong {
        /// Length of the file.
        file_bytes: u64,
        /// Most bytes of data that a file of this length may have.
        max_bytes: u64,
    },
    /// The file is another one than the one that was begun.
    #[error("changed while it was read: do not write to files that are loaded")]
    Changed,
}

/// Why a tar archive was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TarError {
    /// A header cannot be read or is malformed.
    #[error(transparent)]
    Header(#[from] io::Error),
    /// The extended records of a member are malformed.
    #[error("{member}: {error}")]
    Records {
        /// Name of the member.
        member: String,
        /// What is wrong with them.
        #[source]
        error: io::Error,
    },
    /// A member is stored without its holes, so that its bytes are not in the file as they are.
    #[error("{member} is stored sparse, which cannot be read in place")]
    Sparse {
        /// Name of the member.
        member: String,
    },
    /// A member is longer than the rest of the file.
    #[error("{member} claims {claimed_bytes} bytes, {left_bytes} are left")]
    PastEnd {
        /// Name of the member.
        member: String,
        /// Its length by its header.
        claimed_bytes: u64,
        /// Bytes of the file behind the header.
        left_bytes: u64,
    },
    /// The file ends without the block of zeros that ends an archive.
    #[error("cut off: no end mark after byte {end}")]
    NoEndMark {
        /// End of the last member.
        end: u64,
    },
}

/// Why a safetensors file was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SafetensorsError {
    /// The file is too short for the length of a header.
    #[error("{file_bytes} bytes are less than the 8 of the header's length")]
    NoHeader {
        /// Length of the file.
        file_bytes: u64,
    },
    /// The header is longer than the file or than is read of a header, which is 16 MiB.
    #[error(
        "the header claims {claimed_bytes} bytes, at most {max_bytes} are possible: the rest of the file, or 16 MiB"
    )]
    HeaderLength {
        /// Length of the header by its first eight bytes.
        claimed_bytes: u64,
        /// Longest header that is read.
        max_bytes: u64,
    },
    /// The header is not JSON, or its tensors overlap, leave gaps, or do not match their shapes.
    #[error("{0}")]
    Header(#[source] Box<dyn Error + Send + Sync>),
    /// The tensors end before or after the end of the file.
    #[error("the header describes {described_bytes} bytes of tensors, {actual_bytes} follow it")]
    DataLength {
        /// Bytes of tensors by the header.
        described_bytes: u64,
        /// Bytes of the file behind the header.
        actual_bytes: u64,
    },
}
