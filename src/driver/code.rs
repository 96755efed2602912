//! Results of the driver as numbers. cudarc has them as an enumeration, which must never hold a value that it does not list, and
//! a driver that is newer than the bindings may answer any.

use std::ffi::c_int;
use std::fmt;

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
    pub(crate) const CAPTURED_EVENT: Self = Self(907);

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

/// The name in the driver's header, without a call of the driver, which may be gone.
impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            1 => "CUDA_ERROR_INVALID_VALUE",
            2 => "CUDA_ERROR_OUT_OF_MEMORY",
            3 => "CUDA_ERROR_NOT_INITIALIZED",
            4 => "CUDA_ERROR_DEINITIALIZED",
            34 => "CUDA_ERROR_STUB_LIBRARY",
            46 => "CUDA_ERROR_DEVICE_UNAVAILABLE",
            100 => "CUDA_ERROR_NO_DEVICE",
            101 => "CUDA_ERROR_INVALID_DEVICE",
            201 => "CUDA_ERROR_INVALID_CONTEXT",
            205 => "CUDA_ERROR_MAP_FAILED",
            208 => "CUDA_ERROR_ALREADY_MAPPED",
            214 => "CUDA_ERROR_ECC_UNCORRECTABLE",
            220 => "CUDA_ERROR_NVLINK_UNCORRECTABLE",
            304 => "CUDA_ERROR_OPERATING_SYSTEM",
            400 => "CUDA_ERROR_INVALID_HANDLE",
            401 => "CUDA_ERROR_ILLEGAL_STATE",
            500 => "CUDA_ERROR_NOT_FOUND",
            600 => "CUDA_ERROR_NOT_READY",
            700 => "CUDA_ERROR_ILLEGAL_ADDRESS",
            701 => "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
            702 => "CUDA_ERROR_LAUNCH_TIMEOUT",
            704 => "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED",
            705 => "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED",
            708 => "CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE",
            709 => "CUDA_ERROR_CONTEXT_IS_DESTROYED",
            710 => "CUDA_ERROR_ASSERT",
            711 => "CUDA_ERROR_TOO_MANY_PEERS",
            712 => "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
            713 => "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
            714 => "CUDA_ERROR_HARDWARE_STACK_ERROR",
            715 => "CUDA_ERROR_ILLEGAL_INSTRUCTION",
            716 => "CUDA_ERROR_MISALIGNED_ADDRESS",
            717 => "CUDA_ERROR_INVALID_ADDRESS_SPACE",
            718 => "CUDA_ERROR_INVALID_PC",
            719 => "CUDA_ERROR_LAUNCH_FAILED",
            800 => "CUDA_ERROR_NOT_PERMITTED",
            801 => "CUDA_ERROR_NOT_SUPPORTED",
            802 => "CUDA_ERROR_SYSTEM_NOT_READY",
            803 => "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
            804 => "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",
            900 => "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
            901 => "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
            902 => "CUDA_ERROR_STREAM_CAPTURE_MERGE",
            903 => "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
            904 => "CUDA_ERROR_STREAM_CAPTURE_UNJOINED",
            905 => "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
            906 => "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
            907 => "CUDA_ERROR_CAPTURED_EVENT",
            908 => "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
            909 => "CUDA_ERROR_TIMEOUT",
            910 => "CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE",
            911 => "CUDA_ERROR_EXTERNAL_DEVICE",
            999 => "CUDA_ERROR_UNKNOWN",
            code => return write!(f, "CUDA error {code}"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cudarc::driver::sys::CUresult;

    #[test]
    fn names_are_those_of_the_driver_and_other_codes_keep_their_number() {
        for listed in [
            CUresult::CUDA_ERROR_INVALID_VALUE,
            CUresult::CUDA_ERROR_STUB_LIBRARY,
            CUresult::CUDA_ERROR_INVALID_HANDLE,
            CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED,
            CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,
            CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
            CUresult::CUDA_ERROR_CAPTURED_EVENT,
        ] {
            assert_eq!(Code::from(DriverError(listed)).to_string(), format!("{listed:?}"));
        }
        assert_eq!(Code(9999).to_string(), "CUDA error 9999");
        assert_eq!((Code::check(0), Code::check(-1)), (Ok(()), Err(Code(-1))));
    }
}
