//! What can go wrong, in numbers.
//!
//! [`Error`] is opaque: its text is for people, its predicates (`is_limit`, `is_backend`, ...) are for code that
//! wants to branch. Every message names the thing, the value, the limit and the remedy.

use std::fmt;

use crate::backend::SourceError;
use crate::size_class::{MAX_ALIGN, MAX_LEN};

/// Result of the fallible calls of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call of the pool failed.
///
/// The kind is boxed so that a `Result<PinnedBuf, Error>` stays small on the path that succeeds.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct Error(Box<Kind>);

/// Bytes of the pool at the moment of an error.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Holdings {
    pub(crate) held_bytes: u64,
    pub(crate) in_use_bytes: u64,
    pub(crate) idle_bytes: u64,
    pub(crate) in_flight_bytes: u64,
    pub(crate) max_bytes: Option<u64>,
}

impl fmt::Display for Holdings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { held_bytes, in_use_bytes, idle_bytes, in_flight_bytes, max_bytes } = self;
        write!(
            f,
            "held {held_bytes} B (in use {in_use_bytes}, idle {idle_bytes}, in flight {in_flight_bytes}), ceiling "
        )?;
        match max_bytes {
            Some(max_bytes) => write!(f, "{max_bytes} B"),
            None => write!(f, "none"),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Kind {
    #[error("asked {len} B: a buffer holds at most {MAX_LEN} B; ask for less")]
    Length { len: usize },
    #[error("asked {len} B at an alignment of {align}: an alignment is a power of two of at most {MAX_ALIGN}")]
    Alignment { len: usize, align: usize },
    #[error("asked {asked_bytes} B ({needed_bytes} B with rounding): over the ceiling; {holdings}; {remedy}")]
    Limit { asked_bytes: u64, needed_bytes: u64, holdings: Holdings, remedy: &'static str },
    #[error("asked {asked_bytes} B: back-end `{backend}` {source}; {holdings}")]
    Backend { backend: &'static str, asked_bytes: u64, holdings: Holdings, source: SourceError },
    #[error("no back-end `{backend}` here: {why}")]
    Unavailable { backend: &'static str, why: String },
    #[error("{name}={value}: {why}")]
    Setting { name: &'static str, value: String, why: String },
    #[error("copy of {len} B: {why}")]
    Copy { len: usize, why: String },
    #[error("completion of a copy is unknown: {why}")]
    Device { why: String },
}

impl Error {
    /// The length or the alignment of the request makes no sense.
    pub fn is_request(&self) -> bool {
        matches!(*self.0, Kind::Length { .. } | Kind::Alignment { .. })
    }

    /// The ceiling (`PINPOOL_MAX_BYTES`) stood in the way.
    pub fn is_limit(&self) -> bool {
        matches!(*self.0, Kind::Limit { .. })
    }

    /// The driver or the kernel refused, or the back-end asked for is not there.
    pub fn is_backend(&self) -> bool {
        matches!(*self.0, Kind::Backend { .. } | Kind::Unavailable { .. })
    }

    /// Two settings contradict each other, or one set by code is out of range.
    pub fn is_setting(&self) -> bool {
        matches!(*self.0, Kind::Setting { .. })
    }

    /// A copy was refused before anything was enqueued.
    pub fn is_copy(&self) -> bool {
        matches!(*self.0, Kind::Copy { .. })
    }

    /// The device failed, so nobody knows whether a copy is over.
    pub fn is_device(&self) -> bool {
        matches!(*self.0, Kind::Device { .. })
    }

    /// A copy refused before anything was enqueued, with the reason. For implementors of
    /// [`CopyTarget`](crate::copy::CopyTarget).
    pub fn copy(len: usize, why: impl Into<String>) -> Self {
        Kind::Copy { len, why: why.into() }.into()
    }

    /// A device failure that leaves the state of a copy unknown. For implementors of [`Fence`](crate::Fence).
    pub fn device(why: impl Into<String>) -> Self {
        Kind::Device { why: why.into() }.into()
    }
}

impl From<Kind> for Error {
    fn from(kind: Kind) -> Self {
        Self(Box::new(kind))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_error_says_asked_held_ceiling_and_remedy() {
        let holdings =
            Holdings { held_bytes: 490, in_use_bytes: 400, idle_bytes: 90, max_bytes: Some(512), ..Default::default() };
        let remedy = "raise PINPOOL_MAX_BYTES";
        let error = Error::from(Kind::Limit { asked_bytes: 64, needed_bytes: 128, holdings, remedy });
        assert!(error.is_limit() && !error.is_backend());
        let text = error.to_string();
        for word in ["64 B", "128 B", "held 490 B", "in use 400", "idle 90", "512 B", "PINPOOL_MAX_BYTES"] {
            assert!(text.contains(word), "{word} is missing in: {text}");
        }
    }
}
