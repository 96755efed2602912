//! Calls of a source, which may be a user's: one that panics has failed.

use crate::backend::{RemapError, SourceError};
use pinpool_os::unwind::caught;

/// What a call of a source fails with.
pub(super) trait Failure {
    /// The source panicked in `call`.
    fn of_panic(call: &'static str) -> Self;
}

impl Failure for SourceError {
    fn of_panic(call: &'static str) -> Self {
        Self::new(call, "the back-end panicked")
    }
}

impl Failure for RemapError {
    /// Granules may have lost their memory on the way. As lost ones they are used no more.
    fn of_panic(call: &'static str) -> Self {
        Self::Lost(SourceError::of_panic(call))
    }
}

/// Makes a call of a source.
pub(super) fn call<R, E: Failure>(name: &'static str, call: impl FnOnce() -> Result<R, E>) -> Result<R, E> {
    caught(call).unwrap_or_else(|| Err(E::of_panic(name)))
}
