//! The status codes, and the code for each error of the library.

use std::ffi::{CStr, c_char, c_int};

use pinpool::Error;

/// The result of a function. The numbers never change; later versions may add codes.
///
/// Every function that takes a pool may return PP_UNKNOWN_POOL or PP_FORKED and, unless its documentation allows NULL,
/// PP_INVALID_ARGUMENT for a NULL argument. Requests, pp_adopt, pp_reserve and pp_partition_open may return PP_CLOSED. Each
/// function documents its other codes. After any code other than PP_OK and PP_NONE_IDLE, pp_last_error returns its text: one or
/// more lines, usually with a remedy. Unless a function documents otherwise, such a call has changed nothing, and its results are
/// stored as NULL or 0.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum pp_status {
    /// Success.
    PP_OK = 0,
    /// An argument is NULL, out of range or invalid UTF-8.
    PP_INVALID_ARGUMENT = 1,
    /// A setting is unknown, invalid or contradicts another, or the shared limit of PINPOOL_LEDGER cannot be joined.
    PP_INVALID_SETTING = 2,
    /// The address is not the start of a buffer in use from this pool.
    PP_UNKNOWN_POINTER = 3,
    /// This is not a pool or a partition, or it was destroyed (pp_pool_destroy).
    PP_UNKNOWN_POOL = 4,
    /// The request exceeds the limit of the pool (PINPOOL_MAX_BYTES), of its partition, or of pools that share a limit, or must
    /// wait behind earlier requests. It did not wait, or stopped waiting when the limit became smaller than the request. A later
    /// call may succeed, unless the request is larger than the limit.
    PP_OVER_LIMIT = 5,
    /// No buffer of the size class is idle. Only from pp_try_get and pp_try_get_with.
    PP_NONE_IDLE = 6,
    /// The driver or the operating system refused memory, pinned or not. A later call may succeed.
    PP_MEMORY_REFUSED = 7,
    /// The device failed, or the driver refused to examine the stream or the event for another reason than a capture, so the end
    /// of the work is unknown.
    PP_DEVICE_FAILED = 8,
    /// The pool belongs to the parent of this forked process. Nothing was done.
    PP_FORKED = 9,
    /// Internal error (a bug in pinpool). The pool remains usable. Any function may return it, except those that return
    /// PP_BUFFER_LOST instead.
    PP_INTERNAL = 10,
    /// The backend or the CUDA driver is not available on this machine. Retrying does not help.
    PP_UNAVAILABLE = 11,
    /// The stream is capturing a graph, or the event was recorded in a capture, and launches of that graph may use the buffer at
    /// any time. The memory is never reused.
    PP_STREAM_CAPTURING = 12,
    /// The stream or the event is not valid in this call; see pp_put_after_stream and pp_put_after_event.
    PP_INVALID_HANDLE = 13,
    /// 4096 pools and partitions are open or have buffers in use. Destroy one.
    PP_TOO_MANY_POOLS = 14,
    /// The process has already installed a Rust logger. Only from pp_set_log.
    PP_LOGGER_SET = 15,
    /// The pool or partition was closed (pp_pool_close). Later requests fail, too.
    PP_CLOSED = 16,
    /// Internal error (a bug in pinpool) in a return or record: the caller no longer has the buffer. Do not return it, since
    /// its address may belong to another buffer. Only from pp_put, pp_put_after_stream, pp_put_after_event, pp_record_stream
    /// and pp_record_event.
    PP_BUFFER_LOST = 17,
    /// The device was reset, and the pool's memory is gone. No later request of this pool succeeds: open another.
    PP_DEVICE_RESET = 18,
    /// As PP_OVER_LIMIT, but after the whole wait (PINPOOL_WAIT or `timeout_ms`), so a longer wait may help. Only from pp_get and
    /// pp_get_with.
    PP_TIMED_OUT = 19,
    /// The driver refused to examine the stream or the event because a stream captures, for example the legacy stream while a
    /// blocking stream does. The same call can succeed after the capture; until then the end of the work is unknown.
    PP_REFUSED_BY_CAPTURE = 20,
}

/// The names of the codes, by number.
#[rustfmt::skip] // It would put each name on a line.
const NAMES: &[&CStr] = &[
    c"PP_OK", c"PP_INVALID_ARGUMENT", c"PP_INVALID_SETTING", c"PP_UNKNOWN_POINTER", c"PP_UNKNOWN_POOL", c"PP_OVER_LIMIT",
    c"PP_NONE_IDLE", c"PP_MEMORY_REFUSED", c"PP_DEVICE_FAILED", c"PP_FORKED", c"PP_INTERNAL", c"PP_UNAVAILABLE",
    c"PP_STREAM_CAPTURING", c"PP_INVALID_HANDLE", c"PP_TOO_MANY_POOLS", c"PP_LOGGER_SET", c"PP_CLOSED", c"PP_BUFFER_LOST",
    c"PP_DEVICE_RESET", c"PP_TIMED_OUT", c"PP_REFUSED_BY_CAPTURE",
];

/// The name of a status: "PP_OVER_LIMIT"; "unknown" if it is not a status, since any int is allowed. Static, never NULL.
#[unsafe(no_mangle)]
pub extern "C" fn pp_status_name(status: c_int) -> *const c_char {
    usize::try_from(status).ok().and_then(|status| NAMES.get(status)).unwrap_or(&c"unknown").as_ptr()
}

/// CUDA_ERROR_CONTEXT_IS_DESTROYED: after a device reset, with this code the pool refuses requests.
const CONTEXT_IS_DESTROYED: i64 = 709;

/// Returns the code for an error of the library. The narrower predicates come first: `is_invalid_handle` implies
/// `is_invalid_request`, `is_timeout` implies `is_limit`, and `is_unavailable` implies `is_backend`.
pub(crate) fn status_of(error: &Error) -> pp_status {
    match () {
        () if error.is_invalid_handle() => pp_status::PP_INVALID_HANDLE,
        () if error.is_invalid_request() => pp_status::PP_INVALID_ARGUMENT,
        () if error.is_setting() => pp_status::PP_INVALID_SETTING,
        () if error.is_timeout() => pp_status::PP_TIMED_OUT,
        () if error.is_limit() => pp_status::PP_OVER_LIMIT,
        () if error.is_unavailable() => pp_status::PP_UNAVAILABLE,
        () if error.is_backend() && error.code() == Some(CONTEXT_IS_DESTROYED) => pp_status::PP_DEVICE_RESET,
        () if error.is_backend() => pp_status::PP_MEMORY_REFUSED,
        () if error.is_capturing_stream() => pp_status::PP_STREAM_CAPTURING,
        // CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED to _IMPLICIT. 907 (an event of a capture) and 908 (another thread's capture) do
        // not mean that the call can succeed later.
        () if error.is_device_failed() && matches!(error.code(), Some(900..=906)) => pp_status::PP_REFUSED_BY_CAPTURE,
        () if error.is_device_failed() || error.is_copy_refused() || error.is_unmapped() => pp_status::PP_DEVICE_FAILED,
        () if error.is_forked() => pp_status::PP_FORKED,
        () if error.is_closed() => pp_status::PP_CLOSED,
        () => pp_status::PP_INTERNAL,
    }
}
