//! The result codes of the mock driver, with the driver's names, which are also their texts.

use std::ffi::{c_char, c_int};

use crate::call::{Out, Outcome, driver_call};

/// A driver result code other than success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Code(pub c_int);

macro_rules! codes {
    ($($name:ident = $value:literal;)*) => {
        #[allow(missing_docs, reason = "named as in the driver's own header")]
        impl Code {
            $(pub const $name: Code = Code($value);)*
        }

        fn put_name(code: c_int, out: Out<*const c_char>) -> Outcome {
            out.put(match code {
                0 => c"CUDA_SUCCESS".as_ptr(),
                $($value => concat!("CUDA_ERROR_", stringify!($name), "\0").as_ptr().cast(),)*
                _ => return Err(Code::INVALID_VALUE),
            })
        }
    };
}

codes! {
    INVALID_VALUE = 1;
    OUT_OF_MEMORY = 2;
    NOT_INITIALIZED = 3;
    DEINITIALIZED = 4;
    STUB_LIBRARY = 34;
    NO_DEVICE = 100;
    INVALID_DEVICE = 101;
    INVALID_CONTEXT = 201;
    MAP_FAILED = 205;
    ALREADY_MAPPED = 208;
    INVALID_HANDLE = 400;
    NOT_FOUND = 500;
    NOT_READY = 600;
    ILLEGAL_ADDRESS = 700;
    CONTEXT_IS_DESTROYED = 709;
    HOST_MEMORY_ALREADY_REGISTERED = 712;
    HOST_MEMORY_NOT_REGISTERED = 713;
    LAUNCH_FAILED = 719;
    NOT_PERMITTED = 800;
    NOT_SUPPORTED = 801;
    STREAM_CAPTURE_UNSUPPORTED = 900;
    STREAM_CAPTURE_INVALIDATED = 901;
    STREAM_CAPTURE_UNMATCHED = 903;
    STREAM_CAPTURE_ISOLATION = 905;
    STREAM_CAPTURE_IMPLICIT = 906;
    CAPTURED_EVENT = 907;
    STREAM_CAPTURE_WRONG_THREAD = 908;
    UNKNOWN = 999;
}

driver_call! { Lookup fn cuGetErrorName(code: c_int, out: Out<*const c_char>) {
    put_name(code, out)
}}

driver_call! { Lookup fn cuGetErrorString(code: c_int, out: Out<*const c_char>) {
    put_name(code, out)
}}
