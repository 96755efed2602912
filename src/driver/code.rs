//! Results of the driver as numbers. cudarc has them as an enumeration, which must never hold a value that it does not list, and
//! a driver that is newer than the bindings may answer any.

use std::ffi::c_int;

use cudarc::driver::DriverError;

/// An error of the driver: any number but 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Code(pub(crate) c_int);

impl Code {
    pub(crate) const INVALID_VALUE: Self = Self(1);
    pub(crate) const OUT_OF_MEMORY: Self = Self(2);
    pub(crate) const NOT_INITIALIZED: Self = Self(3);
    pub(crate) const DEINITIALIZED: Self = Self(4);
    pub(crate) const INVALID_CONTEXT: Self = Self(201);
    pub(crate) const INVALID_HANDLE: Self = Self(400);
    /// Also the answer for a function that this driver does not have.
    pub(crate) const NOT_FOUND: Self = Self(500);
    pub(crate) const NOT_READY: Self = Self(600);
    pub(crate) const CONTEXT_IS_DESTROYED: Self = Self(709);
    pub(crate) const NOT_SUPPORTED: Self = Self(801);

    /// The result of a call.
    pub(crate) fn check(result: c_int) -> Result<(), Self> {
        if result == 0 { Ok(()) } else { Err(Self(result)) }
    }

    /// The number as errors of sources have it.
    pub(crate) fn number(self) -> i64 {
        i64::from(self.0)
    }

    /// Whether a call was refused because a stream captures a graph. The same call succeeds later, so nothing is known to have
    /// failed.
    pub(crate) fn is_forbidden_by_capture(self) -> bool {
        is_forbidden_by_capture(self.number())
    }

    /// Whether a context is there no more.
    pub(crate) fn is_of_ended_context(self) -> bool {
        matches!(self, Self::INVALID_CONTEXT | Self::CONTEXT_IS_DESTROYED)
    }
}

/// Whether a call was refused because a stream captures a graph: `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED` and
/// `CUDA_ERROR_STREAM_CAPTURE_INVALIDATED`. The same call succeeds later, so nothing is known to have failed.
pub(crate) fn is_forbidden_by_capture(code: i64) -> bool {
    matches!(code, 900 | 901)
}

/// An error of a call that cudarc itself made.
impl From<DriverError> for Code {
    fn from(error: DriverError) -> Self {
        Self(error.0 as c_int)
    }
}
