//! The status codes, and the code for each error of the library.

use std::ffi::{c_char, c_int};

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
    /// The handle is invalid, or its pool was destroyed (pp_pool_destroy).
    PP_UNKNOWN_POOL = 4,
    /// The request exceeds the limit of the pool (PINPOOL_MAX_BYTES), of its partition, or of pools that share a limit, or must
    /// wait behind earlier requests. A later call may succeed, unless the request is larger than the limit.
    PP_OVER_LIMIT = 5,
    /// The request needs more pinned memory or a wait. Only from pp_try_get and pp_try_get_with.
    PP_NONE_IDLE = 6,
    /// The driver or the operating system refused memory, pinned or not. A later call may succeed.
    PP_MEMORY_REFUSED = 7,
    /// The driver refused to examine the stream or the event, or the device failed, so the end of the work is unknown.
    PP_DEVICE_FAILED = 8,
    /// The pool belongs to the parent of this forked process. Nothing was done.
    PP_FORKED = 9,
    /// Internal error (a bug in pinpool), or malloc failed for a string. The pool remains usable. Any function may return it.
    PP_INTERNAL = 10,
    /// The backend or the CUDA driver is not available on this machine. Retrying does not help.
    PP_UNAVAILABLE = 11,
    /// The stream is capturing a graph, and launches of that graph may use the buffer at any time. The memory is never reused.
    PP_STREAM_CAPTURING = 12,
    /// The stream or the event is not valid in this call; see pp_put_after_stream and pp_put_after_event.
    PP_INVALID_HANDLE = 13,
    /// 4096 pools and partitions are open or have buffers in use. Destroy one.
    PP_TOO_MANY_POOLS = 14,
    /// The process has already installed a Rust logger. Only from pp_set_log.
    PP_LOGGER_SET = 15,
    /// The pool or partition was closed (pp_pool_close). Later requests fail, too.
    PP_CLOSED = 16,
    /// Internal error (a bug in pinpool) in a return or record: the buffer is gone. Do not return it, since its address may belong
    /// to another buffer. Only from pp_put, pp_put_after_stream, pp_put_after_event, pp_record_stream and pp_record_event.
    PP_BUFFER_LOST = 17,
    /// The device was reset, and the pool's memory is gone. No later request of this pool succeeds: open another.
    PP_DEVICE_RESET = 18,
}

/// The names of the codes in their order, each with a NUL.
const NAMES: &str = "PP_OK\0PP_INVALID_ARGUMENT\0PP_INVALID_SETTING\0PP_UNKNOWN_POINTER\0PP_UNKNOWN_POOL\0PP_OVER_LIMIT\0\
    PP_NONE_IDLE\0PP_MEMORY_REFUSED\0PP_DEVICE_FAILED\0PP_FORKED\0PP_INTERNAL\0PP_UNAVAILABLE\0PP_STREAM_CAPTURING\0\
    PP_INVALID_HANDLE\0PP_TOO_MANY_POOLS\0PP_LOGGER_SET\0PP_CLOSED\0PP_BUFFER_LOST\0PP_DEVICE_RESET\0";

/// The name of a status: "PP_OVER_LIMIT"; "unknown" if it is not a status, since any int is allowed. Static, never NULL.
#[unsafe(no_mangle)]
pub extern "C" fn pp_status_name(status: c_int) -> *const c_char {
    let name = usize::try_from(status).ok().and_then(|status| NAMES.split_inclusive('\0').nth(status));
    name.unwrap_or("unknown\0").as_ptr().cast()
}

/// CUDA_ERROR_CONTEXT_IS_DESTROYED: after a device reset, with this code the pool refuses requests.
const CONTEXT_IS_DESTROYED: i64 = 709;

/// Returns the code for an error of the library. The narrower predicates come first: `is_invalid_handle` implies
/// `is_invalid_request`, and `is_unavailable` implies `is_backend`.
pub(crate) fn status_of(error: &Error) -> pp_status {
    match () {
        () if error.is_invalid_handle() => pp_status::PP_INVALID_HANDLE,
        () if error.is_invalid_request() => pp_status::PP_INVALID_ARGUMENT,
        () if error.is_setting() => pp_status::PP_INVALID_SETTING,
        () if error.is_limit() => pp_status::PP_OVER_LIMIT,
        () if error.is_unavailable() => pp_status::PP_UNAVAILABLE,
        () if error.is_backend() && error.code() == Some(CONTEXT_IS_DESTROYED) => pp_status::PP_DEVICE_RESET,
        () if error.is_backend() => pp_status::PP_MEMORY_REFUSED,
        () if error.is_capturing_stream() => pp_status::PP_STREAM_CAPTURING,
        () if error.is_device_failed() || error.is_copy_refused() || error.is_unmapped() => pp_status::PP_DEVICE_FAILED,
        () if error.is_forked() => pp_status::PP_FORKED,
        () if error.is_closed() => pp_status::PP_CLOSED,
        () => pp_status::PP_INTERNAL,
    }
}
