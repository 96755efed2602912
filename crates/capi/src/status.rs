//! What the codes mean, and which error of the library requests which.

use std::ffi::{CStr, c_char, c_int};

use pinpool::Error;

/// What a function returns. The numbers never change; new ones may come.
///
/// After every code but PP_OK and PP_NONE_IDLE, pp_last_error has a text that names the value, the limit and what to do. Unless
/// a function says otherwise, nothing has changed then, and what it would have stored is NULL or 0.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum pp_status {
    /// Done.
    PP_OK = 0,
    /// An argument is NULL, out of range, or no text in UTF-8.
    PP_INVALID_ARGUMENT = 1,
    /// A setting is unknown, cannot be read, or contradicts another.
    PP_BAD_SETTING = 2,
    /// No buffer of this pool begins at this address: it was put already, lies inside a buffer, or comes from elsewhere.
    PP_UNKNOWN_POINTER = 3,
    /// The handle is of a pool that was closed, or of none.
    PP_UNKNOWN_POOL = 4,
    /// Over the limit (PINPOOL_MAX_BYTES) even with all idle memory released and after the wait; or 4096 pools are open.
    PP_LIMIT = 5,
    /// No buffer of this size is idle. Returned by pp_try_get alone.
    PP_NONE_IDLE = 6,
    /// The driver or the kernel refused, or the backend that was set is not available.
    PP_BACKEND = 7,
    /// The device failed or the stream captures a graph, so that the end of its work cannot be known.
    PP_DEVICE = 8,
    /// The pool belongs to the process that forked this one. Nothing was done.
    PP_FORKED = 9,
    /// A defect of the library. The pool continues.
    PP_INTERNAL = 10,
}

/// The name of a status: "PP_LIMIT"; "unknown" for a number that is none. Static, never NULL.
#[unsafe(no_mangle)]
pub extern "C" fn pp_status_name(status: c_int) -> *const c_char {
    let name: &'static CStr = match status {
        0 => c"PP_OK",
        1 => c"PP_INVALID_ARGUMENT",
        2 => c"PP_BAD_SETTING",
        3 => c"PP_UNKNOWN_POINTER",
        4 => c"PP_UNKNOWN_POOL",
        5 => c"PP_LIMIT",
        6 => c"PP_NONE_IDLE",
        7 => c"PP_BACKEND",
        8 => c"PP_DEVICE",
        9 => c"PP_FORKED",
        10 => c"PP_INTERNAL",
        _ => c"unknown",
    };
    name.as_ptr()
}

/// The code of an error of the library.
pub(crate) fn of_error(error: &Error) -> pp_status {
    match () {
        () if error.is_request() => pp_status::PP_INVALID_ARGUMENT,
        () if error.is_setting() => pp_status::PP_BAD_SETTING,
        () if error.is_limit() => pp_status::PP_LIMIT,
        () if error.is_backend() || error.is_thread() => pp_status::PP_BACKEND,
        () if error.is_device() || error.is_copy() => pp_status::PP_DEVICE,
        () if error.is_forked() => pp_status::PP_FORKED,
        () => pp_status::PP_INTERNAL,
    }
}
