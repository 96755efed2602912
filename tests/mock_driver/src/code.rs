//! The result codes of the mock driver, with the driver's names and texts.

use std::ffi::{CStr, c_char, c_int};

use crate::call::{Out, driver_call};

/// A driver result code other than success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Code(pub c_int);

macro_rules! codes {
    ($($name:ident = $value:literal, $text:literal;)*) => {
        #[allow(missing_docs, reason = "named as in the driver's own header")]
        impl Code {
            $(pub const $name: Code = Code($value);)*
        }

        fn words(code: c_int) -> Option<(&'static CStr, &'static CStr)> {
            let (name, text) = match code {
                0 => ("CUDA_SUCCESS\0", "no error\0"),
                $($value => (concat!("CUDA_ERROR_", stringify!($name), "\0"), concat!($text, "\0")),)*
                _ => return None,
            };
            Some((CStr::from_bytes_with_nul(name.as_bytes()).ok()?, CStr::from_bytes_with_nul(text.as_bytes()).ok()?))
        }
    };
}

codes! {
    INVALID_VALUE = 1, "invalid argument";
    OUT_OF_MEMORY = 2, "out of memory";
    NOT_INITIALIZED = 3, "initialization error";
    DEINITIALIZED = 4, "driver shutting down";
    STUB_LIBRARY = 34, "CUDA driver is a stub library";
    NO_DEVICE = 100, "no CUDA-capable device is detected";
    INVALID_DEVICE = 101, "invalid device ordinal";
    INVALID_CONTEXT = 201, "invalid device context";
    MAP_FAILED = 205, "mapping of buffer object failed";
    ALREADY_MAPPED = 208, "resource already mapped";
    INVALID_HANDLE = 400, "invalid resource handle";
    NOT_FOUND = 500, "named symbol not found";
    NOT_READY = 600, "device not ready";
    ILLEGAL_ADDRESS = 700, "an illegal memory access was encountered";
    CONTEXT_IS_DESTROYED = 709, "context is destroyed";
    HOST_MEMORY_ALREADY_REGISTERED = 712, "part or all of the requested memory range is already mapped";
    HOST_MEMORY_NOT_REGISTERED = 713, "pointer does not correspond to a registered memory region";
    LAUNCH_FAILED = 719, "unspecified launch failure";
    NOT_PERMITTED = 800, "operation not permitted";
    NOT_SUPPORTED = 801, "operation not supported";
    STREAM_CAPTURE_UNSUPPORTED = 900, "operation not permitted when stream is capturing";
    STREAM_CAPTURE_INVALIDATED = 901, "operation failed due to a previous error during capture";
    STREAM_CAPTURE_UNMATCHED = 903, "capture was not initiated in this stream";
    STREAM_CAPTURE_ISOLATION = 905, "dependency created on uncaptured work in another stream";
    STREAM_CAPTURE_IMPLICIT = 906, "operation would make the legacy stream depend on a capturing blocking stream";
    CAPTURED_EVENT = 907, "operation not permitted on an event last recorded in a capturing stream";
    STREAM_CAPTURE_WRONG_THREAD = 908, "attempt to terminate a thread-local capture sequence from another thread";
    UNKNOWN = 999, "unknown error";
}

driver_call! { Lookup fn cuGetErrorName(code: c_int, out: Out<*const c_char>) {
    words(code).ok_or(Code::INVALID_VALUE).and_then(|(name, _)| out.put(name.as_ptr()))
}}

driver_call! { Lookup fn cuGetErrorString(code: c_int, out: Out<*const c_char>) {
    words(code).ok_or(Code::INVALID_VALUE).and_then(|(_, text)| out.put(text.as_ptr()))
}}
