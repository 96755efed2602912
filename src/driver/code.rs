//! Driver results as numbers. cudarc returns a Rust enum, which must never have a value that it does not list, but a driver that is
//! newer than the bindings may return such a value.

use std::ffi::{CStr, c_int};
use std::fmt;

use cudarc::driver::DriverError;

use crate::error::{Error, Retry, SourceError};

const SHORT_OF_MEMORY: &str =
    "the host is short of memory that can be pinned: lower PINPOOL_MAX_BYTES, or raise the memory limit of the cgroup";

/// An error of the driver: any number but 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Code(pub(crate) c_int);

impl Code {
    pub(crate) const INVALID_VALUE: Self = Self(1);
    pub(crate) const OUT_OF_MEMORY: Self = Self(2);
    pub(crate) const NOT_INITIALIZED: Self = Self(3);
    pub(crate) const DEINITIALIZED: Self = Self(4);
    pub(crate) const STUB_LIBRARY: Self = Self(34);
    pub(crate) const DEVICE_UNAVAILABLE: Self = Self(46);
    pub(crate) const NO_DEVICE: Self = Self(100);
    pub(crate) const INVALID_CONTEXT: Self = Self(201);
    pub(crate) const INVALID_HANDLE: Self = Self(400);
    /// Also returned for a function that this driver does not have.
    pub(crate) const NOT_FOUND: Self = Self(500);
    pub(crate) const NOT_READY: Self = Self(600);
    pub(crate) const CONTEXT_IS_DESTROYED: Self = Self(709);
    pub(crate) const NOT_SUPPORTED: Self = Self(801);
    pub(crate) const SYSTEM_NOT_READY: Self = Self(802);
    pub(crate) const SYSTEM_DRIVER_MISMATCH: Self = Self(803);
    pub(crate) const COMPAT_NOT_SUPPORTED_ON_DEVICE: Self = Self(804);
    /// The legacy default stream was used while a stream that is ordered with it captures a graph.
    pub(crate) const CAPTURE_IMPLICIT: Self = Self(906);
    pub(crate) const CAPTURED_EVENT: Self = Self(907);

    /// Converts the result of a call.
    pub(crate) fn check(result: c_int) -> Result<(), Self> {
        if result == 0 { Ok(()) } else { Err(Self(result)) }
    }

    /// Returns the number in the type that [`SourceError`] uses.
    pub(crate) fn number(self) -> i64 {
        i64::from(self.0)
    }

    /// Returns whether a call was refused because a stream captures a graph: `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED` or
    /// `CUDA_ERROR_STREAM_CAPTURE_INVALIDATED`. The same call can succeed later, so the error does not mean that any work has failed.
    /// 902 to 905 are about the caller's own capture, and 906 about a capture that is ordered with a default stream: the caller
    /// gets them, and may repeat the call after that capture.
    pub(crate) fn can_succeed_after_capture(self) -> bool {
        matches!(self.0, 900 | 901)
    }

    /// Returns whether this is one of CUDA's errors about stream capture, 900 to 908.
    pub(crate) fn is_capture_error(self) -> bool {
        matches!(self.0, 900..=908)
    }

    /// Returns whether the context has ended.
    pub(crate) fn is_context_ended(self) -> bool {
        matches!(self, Self::INVALID_CONTEXT | Self::CONTEXT_IS_DESTROYED)
    }

    /// Returns whether the driver must not be queried again about the same work. True for three kinds of codes:
    ///
    /// - Errors after which, according to `cuda.h` (CUDA 13.1), "the process must be terminated and relaunched": every later
    ///   call returns the same error.
    /// - The context or the handle is gone. Another object may get the handle, and a later answer would be about that object.
    /// - The event was recorded into a graph (907): each launch of the graph repeats its copy.
    ///
    /// After any other code, including a code that is newer than this list, the query is repeated. That is the safe choice:
    /// whatever this function returns, the memory stays quarantined until the driver confirms the end of the work, and the pool
    /// still owns the handle, so the only cost is the query. If a temporary error counted as permanent, the memory would leak.
    pub(crate) fn is_permanent(self) -> bool {
        // CONTAINED, ILLEGAL_ADDRESS, LAUNCH_TIMEOUT, ASSERT, HARDWARE_STACK_ERROR to LAUNCH_FAILED, TENSOR_MEMORY_LEAK,
        // MPS_CLIENT_TERMINATED, EXTERNAL_DEVICE.
        let ends_process = matches!(self.0, 226 | 700 | 702 | 710 | 714..=719 | 721 | 810 | 911);
        ends_process || self.is_context_ended() || matches!(self, Self::CAPTURED_EVENT | Self::INVALID_HANDLE)
    }
}

/// A driver call that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FailedCall {
    pub(crate) call: &'static str,
    pub(crate) code: Code,
}

impl FailedCall {
    /// Returns the failure of the function with this name. Leaves out a version at the end of the name (`_v2`).
    pub(crate) fn new(name: &'static CStr, code: Code) -> Self {
        Self { call: name.to_str().unwrap_or_default().trim_end_matches("_v2"), code }
    }
}

impl fmt::Display for FailedCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { call, code } = self;
        write!(f, "{call} failed: {code} (code {})", code.number())?;
        let in_capture = "; another stream captures a graph: use the default stream once that capture has ended";
        if *code == Code::CAPTURE_IMPLICIT { f.write_str(in_capture) } else { Ok(()) }
    }
}

impl From<FailedCall> for Error {
    fn from(failed: FailedCall) -> Self {
        Self::device_failed(failed).with_code(failed.code.number())
    }
}

/// Converts the failure, and adds a remedy if the call pins memory and memory is short.
impl From<FailedCall> for SourceError {
    fn from(FailedCall { call, code }: FailedCall) -> Self {
        let retry = match code {
            Code::INVALID_VALUE => Retry::Never,
            code if code.can_succeed_after_capture() => Retry::Soon,
            _ => Retry::Later,
        };
        let error = Self::new(call, code.to_string()).with_code(code.number()).with_retry(retry);
        let pins =
            matches!(call, "cuMemHostAlloc" | "cuMemHostRegister" | "cuMemCreate" | "cuMemMap" | "cuMemSetAccess");
        if pins && code == Code::OUT_OF_MEMORY { error.with_remedy(SHORT_OF_MEMORY) } else { error }
    }
}

/// Converts the error of a call that cudarc itself made.
impl From<DriverError> for FailedCall {
    fn from(error: DriverError) -> Self {
        Self { call: "a cudarc call", code: Code(error.0 as c_int) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_listed_codes_are_permanent() {
        let permanent = [201, 226, 400, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 907, 911];
        assert_eq!((1..2000).filter(|&code| Code(code).is_permanent()).collect::<Vec<_>>(), permanent);
        assert!(!Code(-1).is_permanent() && !Code(c_int::MAX).is_permanent(), "unknown codes are queried again");
    }
}
