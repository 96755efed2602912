//! The functions on buffers.

use std::ffi::{c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr::{NonNull, null_mut};
use std::time::Duration;

use pinpool::{PinnedBuf, PinnedBy, Pool, Request};

use crate::buffers_in_use::AfterRecording;
use crate::call::{Failure, guarded, guarded_with, non_null, store};
use crate::pool::str_from_c;
use crate::slots::{self, CallGuard, pp_pool};
use crate::status::pp_status;

/// The target of a CUstream of the CUDA driver and of a cudaStream_t of its runtime.
#[derive(Debug)]
pub struct CUstream_st {
    _private: [u8; 0],
}

/// The target of a CUevent of the CUDA driver and of a cudaEvent_t of its runtime.
#[derive(Debug)]
pub struct CUevent_st {
    _private: [u8; 0],
}

/// Stores the address of the buffer that `take` returns, and keeps the buffer in the table.
#[inline]
fn get(
    pool: *mut pp_pool,
    ptr: *mut *mut c_void,
    take: impl FnOnce(&CallGuard) -> Result<Option<PinnedBuf>, Failure>,
) -> pp_status {
    guarded(|| {
        let ptr = non_null(ptr, "ptr")?;
        store(ptr, null_mut());
        let guard = slots::enter(pool)?;
        match take(&guard)? {
            None => return Ok(pp_status::PP_NONE_IDLE),
            Some(buf) if buf.is_empty() => {}
            Some(buf) => store(ptr, guard.buffers().insert(buf).cast()),
        }
        Ok(pp_status::PP_OK)
    })
}

/// Allocates a buffer of `bytes` bytes and stores its address in `ptr`. Reuses pinned memory, or pins more. Return the buffer
/// with pp_put, pp_put_after_stream or pp_put_after_event.
///
/// The address is a multiple of 4096. The content is undefined, or zero with PINPOOL_ZERO. If the limit leaves no room, or the
/// driver refuses while pools of this process hold memory, the call waits up to PINPOOL_WAIT. Then it fails or, with
/// PINPOOL_ON_FULL=pageable, returns pageable memory (see pp_is_pinned). For 0 bytes the call stores NULL and returns PP_OK.
///
/// - PP_TIMED_OUT: over the limit after the whole wait.
/// - PP_OVER_LIMIT: over the limit, and not after the whole wait, for example if the request is larger than the limit.
/// - PP_MEMORY_REFUSED: the driver or the kernel refused.
/// - PP_DEVICE_RESET: the device was reset.
/// - PP_INVALID_ARGUMENT: `bytes` exceeds PTRDIFF_MAX after rounding.
///
/// # Safety
///
/// Each pointer is null, or valid as its type and the header say (capi-P1).
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn pp_get(pool: *mut pp_pool, bytes: usize, ptr: *mut *mut c_void) -> pp_status {
    get(pool, ptr, |guard| Ok(Some(guard.pool_for_requests()?.get(bytes)?)))
}

/// The `timeout_ms` of a pp_request_options that waits up to PINPOOL_WAIT.
pub const PP_WAIT_DEFAULT: u64 = u64::MAX;

/// The `timeout_ms` of a pp_request_options that waits forever.
pub const PP_WAIT_FOREVER: u64 = u64::MAX - 1;

/// Options of a request. Initialize them with PP_REQUEST_OPTIONS_INIT, and then set members.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct pp_request_options {
    /// sizeof(pp_request_options), by which the library recognizes the version of the header.
    pub struct_size: usize,
    /// The address is a multiple of this number, a power of two of at most 1 GiB. Initially 1, since every address is a
    /// multiple of 4096 anyway.
    pub alignment: usize,
    /// The longest wait for room, in milliseconds. Even with a shorter timeout, the call may wait up to 100 ms for driver calls of
    /// other threads. Initially PP_WAIT_DEFAULT.
    pub timeout_ms: u64,
    /// The buffer is counted under this tag (UTF-8). Errors, the log and `pinpool top` show how much each tag holds, and since
    /// when. Use few tags: one per part of the program, not one per buffer. Initially NULL: no tag. Not for a partition.
    pub tag: *const c_char,
}

/// The sizes of pp_request_options in this version and in all earlier ones, which programs may have been compiled with.
const KNOWN_SIZES: [usize; 1] = [size_of::<pp_request_options>()];

/// Allocates as pp_get does, with these options:
///
///     pp_request_options options = PP_REQUEST_OPTIONS_INIT;
///     options.timeout_ms = 500;
///     pp_status status = pp_get_with(pool, 1 << 20, &options, &batch);
///
/// - PP_INVALID_ARGUMENT: an option is invalid, or `struct_size` is not its size in this version or an earlier one.
/// - The other codes of pp_get.
///
/// # Safety
///
/// Each pointer is null, or valid as its type and the header say (capi-P1). The tag ends in 0.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn pp_get_with(
    pool: *mut pp_pool,
    bytes: usize,
    options: *const pp_request_options,
    ptr: *mut *mut c_void,
) -> pp_status {
    // SAFETY: the caller's promise.
    get(pool, ptr, |guard| unsafe { with_options(guard, bytes, options, |pool, req| pool.get_with(req).map(Some)) })
}

/// Returns the result of `take` for a request with these options, and for a pool that adds their tag.
///
/// # Safety
///
/// Each pointer is null, or valid as its type and the header say (capi-P1). The tag ends in 0.
unsafe fn with_options(
    guard: &CallGuard,
    bytes: usize,
    options: *const pp_request_options,
    take: impl FnOnce(&Pool, Request) -> pinpool::Result<Option<PinnedBuf>>,
) -> Result<Option<PinnedBuf>, Failure> {
    let options = non_null(options.cast_mut(), "options")?;
    // SAFETY: capi-P1: the size comes first in every version.
    let struct_size = unsafe { options.cast::<usize>().read() };
    if !KNOWN_SIZES.contains(&struct_size) {
        let remedy = "initialize with PP_REQUEST_OPTIONS_INIT, or update libpinpool";
        return Err(Failure::argument(format!("struct_size={struct_size}, not one of {KNOWN_SIZES:?}: {remedy}")));
    }
    // SAFETY: capi-P1.
    let pp_request_options { alignment, timeout_ms, tag, .. } = unsafe { options.read() };
    let mut request = Request::new(bytes).align(alignment);
    if timeout_ms != PP_WAIT_DEFAULT {
        request = request.timeout(Duration::from_millis(timeout_ms));
    }
    if tag.is_null() {
        return Ok(take(guard.pool_for_requests()?, request)?);
    }
    // SAFETY: capi-P1.
    Ok(take(&guard.pool()?.tagged(unsafe { str_from_c(tag, "tag") }?), request)?)
}

/// Allocates as pp_get does if a buffer of the size class of `bytes` is idle. Free memory of a reserve is not an idle buffer.
/// Pins no memory and does not wait for room, but may release memory under the preset tensorflow, PINPOOL_MAX_IDLE_BYTES or a
/// shared limit. The first call on a pool may test the backends (see pp_pool_open).
///
/// - PP_NONE_IDLE: no such buffer is idle or, for a partition, its limit leaves no room or earlier requests wait. This is not an
///   error, so pp_last_error does not change.
/// - PP_INVALID_ARGUMENT: `bytes` exceeds PTRDIFF_MAX after rounding.
///
/// # Safety
///
/// Each pointer is null, or valid as its type and the header say (capi-P1).
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn pp_try_get(pool: *mut pp_pool, bytes: usize, ptr: *mut *mut c_void) -> pp_status {
    get(pool, ptr, |guard| Ok(guard.pool_for_requests()?.try_get(bytes)?))
}

/// Allocates as pp_try_get does, with the alignment and the tag of these options. Ignores their timeout.
///
/// - PP_NONE_IDLE: no such buffer is idle, as for pp_try_get.
/// - PP_INVALID_ARGUMENT: as pp_get_with.
///
/// # Safety
///
/// Each pointer is null, or valid as its type and the header say (capi-P1). The tag ends in 0.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn pp_try_get_with(
    pool: *mut pp_pool,
    bytes: usize,
    options: *const pp_request_options,
    ptr: *mut *mut c_void,
) -> pp_status {
    // SAFETY: the caller's promise.
    get(pool, ptr, |guard| unsafe { with_options(guard, bytes, options, |pool, req| pool.try_get(req)) })
}

/// Returns adopted memory to its owner, with the `ptr` and `user_data` of pp_adopt.
///
/// Called at most once (see pp_adopt), from any thread, while the library holds no lock. It must not throw or longjmp. It may
/// call functions of the library that do not wait for the pool, such as pp_try_get, pp_put and pp_stats_json. It may call CUDA,
/// but must set the device first, since any context or none may be current. If it waits for the device, other calls on the pool
/// wait, too.
pub type pp_release_fn = Option<unsafe extern "C" fn(ptr: *mut c_void, user_data: *mut c_void)>;

/// The arguments of pp_adopt that return the memory to its owner.
struct Adopted {
    on_release: unsafe extern "C" fn(*mut c_void, *mut c_void),
    ptr: *mut c_void,
    user_data: *mut c_void,
}

// SAFETY: the function may be called with these pointers from any thread (pp_adopt).
unsafe impl Send for Adopted {}

impl Adopted {
    fn release(self) {
        // SAFETY: the caller of pp_adopt permits one call with these pointers, from any thread.
        unsafe { (self.on_release)(self.ptr, self.user_data) };
    }
}

/// Makes the `bytes` bytes at `ptr`, memory of the program or another library, a buffer of the pool. Return it like any
/// other buffer. Once device work with the buffer has completed, the pool calls `on_release` with `ptr` and `user_data`; only
/// `user_data` may be NULL. pp_is_pinned stores `is_pinned` for the buffer. The bytes do not count towards the limit.
///
/// `ptr` must stay valid, and pinned by the driver if `is_pinned` is 1, until `on_release` is called.
///
/// - PP_INVALID_ARGUMENT: 0 bytes or more than PTRDIFF_MAX, `pool` is a partition, or a buffer that starts at `ptr` is in use.
///   Memory that overlaps a buffer is not detected.
///
/// `on_release` is not called after a failure, nor if the end of the work stays unknown (see pp_put_after_stream).
///
/// # Safety
///
/// The memory is initialized. Until `on_release` is called, which may happen on any thread, only the buffer's user uses it.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn pp_adopt(
    pool: *mut pp_pool,
    ptr: *mut c_void,
    bytes: usize,
    is_pinned: c_int,
    on_release: pp_release_fn,
    user_data: *mut c_void,
) -> pp_status {
    guarded(|| {
        let start = non_null(ptr.cast::<u8>(), "ptr")?;
        let on_release = on_release.ok_or_else(|| Failure::argument("the argument `on_release` is NULL"))?;
        if bytes == 0 {
            return Err(Failure::argument("the argument `bytes` is 0: there is nothing to adopt"));
        }
        let guard = slots::enter(pool)?;
        let (pool, buffers) = (guard.pool()?, guard.buffers());
        if !buffers.reserve_entry(ptr.addr()) {
            return Err(Failure::argument(format!("a buffer at {ptr:p} is in use: return it first")));
        }
        let (memory, adopted) = (NonNull::slice_from_raw_parts(start, bytes), Adopted { on_release, ptr, user_data });
        // SAFETY: the caller's promise covers the contract of `adopt`.
        let buf =
            unsafe { pool.adopt(memory, (is_pinned != 0).then_some(PinnedBy::Driver), move || adopted.release()) };
        buffers.put_back(buf.inspect_err(|_| buffers.remove_entry(ptr.addr()))?);
        Ok(pp_status::PP_OK)
    })
}

/// Returns the buffer at `ptr`, the address of an allocation or of adopted memory, to its pool. NULL is allowed and does
/// nothing. If device work that is not recorded may still use the buffer, use pp_put_after_stream or pp_put_after_event
/// instead. If one of these fails, pp_put may return the buffer instead (pp_may_put_after); pp_put_after_stream says when the memory
/// is then reused. Any thread may call this function. It waits while another thread records work on the buffer. The last
/// return to a destroyed pool releases the pool's memory and may wait (pp_pool_destroy).
///
/// - PP_UNKNOWN_POINTER: `ptr` was already returned, is being returned by another thread, belongs to another pool, or points
///   into the middle of a buffer; see pp_last_error. Once the address is handed out again, a second return is not detected, and
///   returns the new buffer.
#[unsafe(no_mangle)]
pub extern "C" fn pp_put(pool: *mut pp_pool, ptr: *mut c_void) -> pp_status {
    guarded_with(pp_status::PP_BUFFER_LOST, || {
        let guard = slots::enter_for_buffers(pool)?;
        if !ptr.is_null() {
            let address = ptr.addr();
            drop(guard.buffers().remove(address).map_err(|why| guard.refusal(address, &why))?);
        }
        Ok(pp_status::PP_OK)
    })
}

/// Returns the buffer at `ptr` to its pool, which reuses it once all work enqueued on `stream` so far has completed. `stream` is
/// a CUstream or a cudaStream_t. The stream may be destroyed after this call. Its context, unless it is a primary context, may be
/// destroyed (cuCtxDestroy) only after pp_pool_destroy and the return of every buffer of the pool. Until then another thread may
/// query the context, even if the work has completed.
///
/// NULL is always the legacy default stream (in pinpool.hpp it is the translation unit's default stream): code compiled with
/// `--default-stream per-thread` should pass `cudaStreamPerThread`. With NULL the fence is on the legacy stream, which is safe
/// but slow: the fence and the blocking streams of the context (those without CU_STREAM_NON_BLOCKING) wait for each other.
/// While one of them captures, the driver refuses the fence. The legacy stream belongs to the current context, and
/// `cudaStreamPerThread` also to the calling thread. Make this call on the thread that enqueued the work, with the same device
/// current, or use pp_put_after_event.
///
/// - PP_REFUSED_BY_CAPTURE: a stream captures, for example a blocking stream while `stream` is NULL. After the capture, call
///   this function again with the same stream, which must still exist; if that succeeds, the buffer is reused.
/// - PP_DEVICE_FAILED: the driver refused for another reason. A second call, as above, may succeed, except with a default
///   stream of a green context: pass another stream. If the driver only refuses to record an event, the call succeeds: it waits
///   up to 0.5 s for the stream (not for a default stream), and if that is not enough, the pool waits for all work of the
///   context.
/// - PP_STREAM_CAPTURING: the stream is capturing a graph.
/// - PP_INVALID_HANDLE: the driver reported an invalid stream handle, or `stream` is a default stream and no context is current:
///   make the context of the work current (cudaSetDevice) and repeat the call on this thread. The pool takes the next successful
///   call on this thread with this buffer and this handle as the repetition, even if another context is then current. Passing
///   the handle of a destroyed stream or event is undefined behavior.
/// - PP_UNAVAILABLE: there is no CUDA driver, or cuInit fails, so no work of this process uses the buffer.
/// - PP_UNKNOWN_POINTER: as pp_put.
///
/// NULL for `ptr` is allowed and does nothing. After a code that pp_may_put_after accepts, the caller still has the buffer,
/// and pp_put returns it. After any other code do not return `ptr` to this pool again. After pp_put the memory is:
///
/// - after PP_UNAVAILABLE: reused immediately.
/// - after PP_STREAM_CAPTURING or a NULL event: never reused, even if a second call succeeds.
/// - after PP_REFUSED_BY_CAPTURE, PP_DEVICE_FAILED, or PP_INVALID_HANDLE for another reason: never reused, unless a second call
///   with the same stream or event has succeeded first.
///
/// # Safety
///
/// The stream is alive.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn pp_put_after_stream(
    pool: *mut pp_pool,
    ptr: *mut c_void,
    stream: *mut CUstream_st,
) -> pp_status {
    // SAFETY: the caller promises that the stream is alive.
    record(pool, ptr, AfterRecording::Return, |buf| unsafe { buf.unstable_record_stream(stream.cast()) })
}

/// Returns the buffer at `ptr` to its pool, which reuses it once the work before the last cudaEventRecord of `event` has completed.
/// `event` is a CUevent or a cudaEvent_t, and may be recorded again or destroyed after this call. An event that was never
/// recorded covers no work. If the work has not completed, a context (the event's or another) must be current on this thread.
/// The call then creates an internal stream that waits for the event. If the driver refuses that stream, the call itself waits
/// until the work has completed. pp_put_after_stream needs fewer driver calls. The event's context, and the context that is
/// current on this thread, must live as long as pp_put_after_stream says. NULL for `ptr` is allowed and does nothing.
///
/// - PP_INVALID_HANDLE: `event` is NULL, the driver reported an invalid event handle, or the work has not completed and no
///   context is current.
/// - PP_STREAM_CAPTURING (also for an event recorded in a capture), PP_DEVICE_FAILED, PP_REFUSED_BY_CAPTURE, PP_UNAVAILABLE,
///   PP_UNKNOWN_POINTER: as pp_put_after_stream. The event must not be recorded again before a second call.
///
/// # Safety
///
/// The event is alive.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn pp_put_after_event(pool: *mut pp_pool, ptr: *mut c_void, event: *mut CUevent_st) -> pp_status {
    // SAFETY: the caller promises that the event is alive.
    record(pool, ptr, AfterRecording::Return, |buf| unsafe { buf.unstable_record_event(event.cast()) })
}

/// Records that the work enqueued so far on `stream` uses the buffer at `ptr`, which stays with the caller. Once the buffer is
/// returned, the pool reuses the memory when this work, too, has completed. For a buffer that several streams use, call this
/// function for each stream, concurrently or not, and then pp_put. pp_put_after_stream describes default streams and how long
/// the context must live. NULL for `ptr` is allowed and does nothing.
///
/// - PP_REFUSED_BY_CAPTURE, PP_DEVICE_FAILED, PP_STREAM_CAPTURING, PP_INVALID_HANDLE, PP_UNAVAILABLE, PP_UNKNOWN_POINTER: as
///   pp_put_after_stream.
///
/// # Safety
///
/// The stream is alive.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn pp_record_stream(pool: *mut pp_pool, ptr: *mut c_void, stream: *mut CUstream_st) -> pp_status {
    // SAFETY: the caller promises that the stream is alive.
    record(pool, ptr, AfterRecording::Keep, |buf| unsafe { buf.unstable_record_stream(stream.cast()) })
}

/// Records that the work before the last cudaEventRecord of `event` uses the buffer at `ptr`, as pp_record_stream does for a
/// stream. pp_put_after_event describes the event. NULL for `ptr` is allowed and does nothing.
///
/// - PP_STREAM_CAPTURING, PP_REFUSED_BY_CAPTURE, PP_DEVICE_FAILED, PP_INVALID_HANDLE, PP_UNAVAILABLE, PP_UNKNOWN_POINTER: as
///   pp_put_after_event.
///
/// # Safety
///
/// The event is alive.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn pp_record_event(pool: *mut pp_pool, ptr: *mut c_void, event: *mut CUevent_st) -> pp_status {
    // SAFETY: the caller promises that the event is alive.
    record(pool, ptr, AfterRecording::Keep, |buf| unsafe { buf.unstable_record_event(event.cast()) })
}

/// Calls `record_work` with the buffer at `ptr`. After a failure, but not a panic, the caller keeps the buffer.
fn record(
    pool: *mut pp_pool,
    ptr: *mut c_void,
    then: AfterRecording,
    record_work: impl FnOnce(&mut PinnedBuf) -> pinpool::Result<()>,
) -> pp_status {
    guarded_with(pp_status::PP_BUFFER_LOST, || {
        let guard = slots::enter_for_buffers(pool)?;
        if ptr.is_null() {
            return Ok(pp_status::PP_OK);
        }
        let (buffers, address) = (guard.buffers(), ptr.addr());
        let mut buf = buffers.take(address, then).map_err(|why| guard.refusal(address, &why))?;
        let recorded = catch_unwind(AssertUnwindSafe(|| record_work(&mut buf))).unwrap_or_else(|panic| {
            // It is unknown which work uses the buffer, so its memory is never reused.
            std::mem::forget(std::mem::take(&mut buf));
            buffers.remove_entry(address);
            resume_unwind(panic)
        });
        if recorded.is_err() || then == AfterRecording::Keep {
            buffers.put_back(buf);
            return Ok(recorded.map(|()| pp_status::PP_OK)?);
        }
        // Remove the table entry first: after the drop another thread may get the same address.
        buffers.remove_entry(address);
        drop(buf);
        Ok(pp_status::PP_OK)
    })
}

/// Stores in `is_pinned` whether the driver pinned the buffer at `ptr`, so that copies can be asynchronous: 1 or 0. For
/// adopted memory it is the argument of pp_adopt. For other memory it is 0 with the backends heap and mlock, and for the pageable
/// memory of a full pool (PINPOOL_ON_FULL=pageable).
///
/// - PP_UNKNOWN_POINTER: no buffer in use of this pool begins at `ptr`.
///
/// # Safety
///
/// Each pointer is null, or valid as its type and the header say (capi-P1).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pp_is_pinned(pool: *mut pp_pool, ptr: *const c_void, is_pinned: *mut c_int) -> pp_status {
    guarded(|| {
        let out = non_null(is_pinned, "is_pinned")?;
        store(out, 0);
        let guard = slots::enter_for_buffers(pool)?;
        let address = non_null(ptr.cast_mut(), "ptr")?.addr().get();
        let found = guard.buffers().is_pinned(address).map_err(|why| guard.refusal(address, &why))?;
        store(out, found.into());
        Ok(pp_status::PP_OK)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::{pp_pool_destroy, pp_pool_open};

    #[test]
    fn the_memory_of_a_return_that_panics_is_not_reused() {
        let (mut pool, mut held, mut next) = (null_mut(), null_mut(), null_mut());
        // SAFETY: a C string and places for results, here and below.
        let opened = unsafe { pp_pool_open(c"backend=heap".as_ptr(), &raw mut pool) };
        // SAFETY: as above.
        assert_eq!([opened, unsafe { pp_get(pool, 4096, &raw mut held) }], [pp_status::PP_OK; 2]);
        assert_eq!(record(pool, held, AfterRecording::Return, |_| panic!("in a call")), pp_status::PP_BUFFER_LOST);
        // SAFETY: as above.
        assert!(unsafe { pp_get(pool, 4096, &raw mut next) } == pp_status::PP_OK && next != held);
        assert_eq!([pp_put(pool, next), pp_pool_destroy(pool)], [pp_status::PP_OK; 2]);
        assert_eq!(pp_put(pool, held), pp_status::PP_UNKNOWN_POOL, "with an entry the handle would stay");
    }
}
