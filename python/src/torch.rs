//! The functions through which torch's host allocator (`pinpool/torch/host_allocator.cpp`) uses a pool.
//!
//! The structures match that file. Any thread may call the functions, with or without the GIL, which they do not need.
#![allow(unsafe_code)] // Called from C++.

use std::ffi::{c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::ptr;
use std::sync::Once;
use std::time::Duration;

use pinpool::copy::CopyStream;
use pinpool::copy::cuda::RawStream;
use pinpool::stats::CallStats;
use pinpool::{PinnedBuf, Pool};
use pyo3::prelude::*;

use crate::errors::BackendError;
use crate::fences::put_after;
use crate::memory::Memory;

/// `PINPOOL_TORCH_NO_MEMORY` in `host_allocator.cpp`.
const NO_MEMORY: c_int = 1;
/// `PINPOOL_TORCH_FAILED` there.
const FAILED: c_int = 2;

#[repr(C)]
struct Totals {
    held_bytes: i64,
    peak_held_bytes: i64,
    pinned_bytes: i64,
    unpinned_bytes: i64,
    held_buffers: i64,
    pinned_buffers: i64,
    unpinned_buffers: i64,
    pin: Timed,
    unpin: Timed,
}

// `host_allocator.cpp` checks the same size and offset.
const _: () = assert!(size_of::<Totals>() == 120 && std::mem::offset_of!(Totals, pin.max_micros) == 72);

#[repr(C)]
struct Timed {
    calls: i64,
    micros: i64,
    max_micros: i64,
    min_micros: i64,
}

#[repr(C)]
struct Stream {
    handle: *mut c_void,
    device: i32,
}

impl Stream {
    /// # Safety
    ///
    /// The stream must stay alive while the result is used.
    unsafe fn as_raw(&self) -> RawStream {
        // SAFETY: the stream stays alive while the result is used, as the caller promises.
        let stream = unsafe { RawStream::new(self.handle) };
        // A negative number means that the stream has no device.
        u32::try_from(self.device).map_or(stream, |device| stream.on_device(device))
    }
}

#[repr(C)]
struct Functions {
    pool: *const Pool,
    get: unsafe extern "C" fn(*const Pool, usize, *mut *mut PinnedBuf, *mut *mut c_void, *mut c_char, usize) -> c_int,
    put: unsafe extern "C" fn(*mut PinnedBuf, *const Stream, usize) -> c_int,
    trim: unsafe extern "C" fn(*const Pool),
    totals: unsafe extern "C" fn(*const Pool, *mut Totals),
    is_capturing: unsafe extern "C" fn(*const Stream) -> c_int,
    record_foreign_buffer: unsafe extern "C" fn(*const c_void, *const Stream) -> c_int,
}

/// The memory of the cgroup or machine in bytes, and where that number comes from; `None` if the system does not report it.
#[pyfunction]
pub(crate) fn _host_memory() -> Option<(u64, String)> {
    let memory = pinpool_os::host::memory(Path::new("/"))?;
    Some((memory.total_bytes, memory.origin.to_string()))
}

/// The address of a table of functions for `pool`. An installed table is never freed, because torch may use the memory until the
/// process exits.
#[pyfunction]
pub(crate) fn _torch_functions(pool: &Bound<'_, crate::pool::PoolCore>) -> PyResult<usize> {
    let (py, pool) = (pool.py(), pool.get());
    if !py.detach(|| pool.handle.origin().is_cuda_pinned) && pool.pool()?.unstable_config().backend.name() == "auto" {
        let text = "torch's pinned memory needs the backend vmm, register or cuda: Pool(backend=\"gpu\") says why none works here";
        return Err(BackendError::new_err(text));
    }
    let pool = Box::leak(Box::new(pool.tagged_pool()?.clone()));
    let functions = Functions { pool, get, put, trim, totals, is_capturing, record_foreign_buffer };
    Ok(ptr::from_ref(Box::leak(Box::new(functions))).expose_provenance())
}

/// Frees a table from [`_torch_functions`] that was not installed.
#[pyfunction]
pub(crate) fn _free_torch_functions(address: usize) {
    // SAFETY: `_torch_functions` leaked the table, and nothing else uses it.
    let functions = unsafe { Box::from_raw(ptr::with_exposed_provenance_mut::<Functions>(address)) };
    // SAFETY: `_torch_functions` leaked the pool, and only this table used it.
    drop(unsafe { Box::from_raw(functions.pool.cast_mut()) });
}

/// Returns 0, or writes a text and returns [`NO_MEMORY`] if there is no memory within the limit or the driver refused, or else
/// [`FAILED`].
///
/// # Safety
///
/// `pool` comes from [`Functions`]; `block` and `address` can be written; `error` has `error_bytes` bytes.
unsafe extern "C" fn get(
    pool: *const Pool,
    bytes: usize,
    block: *mut *mut PinnedBuf,
    address: *mut *mut c_void,
    error: *mut c_char,
    error_bytes: usize,
) -> c_int {
    // SAFETY: the pool was leaked by `_torch_functions`.
    let outcome = catch_unwind(AssertUnwindSafe(|| unsafe { &*pool }.get(bytes)));
    let (status, report) = match outcome {
        Ok(Ok(mut buf)) => {
            // SAFETY: `address` is the caller's out parameter.
            unsafe { address.write(buf.as_mut_ptr().cast()) };
            // SAFETY: `block` is the caller's out parameter.
            unsafe { block.write(Box::into_raw(Box::new(buf))) };
            return 0;
        }
        Ok(Err(error)) => (if error.is_limit() || error.is_backend() { NO_MEMORY } else { FAILED }, error.report()),
        Err(_) => (FAILED, "internal error of pinpool: please report it with the message on standard error".to_owned()),
    };
    // The text is truncated between characters, because torch decodes it.
    if let Some(end) = (0..error_bytes).rev().find(|&at| report.is_char_boundary(at)) {
        let text = [&report.as_bytes()[..end], b"\0"].concat();
        // SAFETY: the text was truncated to the length of the caller's buffer.
        unsafe { ptr::copy_nonoverlapping(text.as_ptr().cast(), error, text.len()) };
    }
    status
}

/// Returns a block to the pool after the work on `streams`. Returns 0, or 1 if the driver refuses a stream; then the caller
/// keeps the block.
///
/// # Safety
///
/// `block` comes from [`get`] and is not used after this returns 0; `streams` has `count` live streams.
unsafe extern "C" fn put(block: *mut PinnedBuf, streams: *const Stream, count: usize) -> c_int {
    static WARNED: Once = Once::new();
    let put = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: `streams` has `count` elements, as the caller promises.
        let streams = if count == 0 { &[] } else { unsafe { std::slice::from_raw_parts(streams, count) } };
        // SAFETY: torch never destroys its own streams. The owner of an ExternalStream keeps it alive, as torch's own allocator
        // also requires.
        let fences =
            streams.iter().map(|stream| unsafe { stream.as_raw() }.record_fence()).collect::<Result<Vec<_>, _>>();
        let warn = |error: &pinpool::Error| {
            let text = "torch waiting: a freed block is kept, because its stream cannot be recorded";
            // The default target, `_pinpool::torch`, is not forwarded to Python.
            WARNED.call_once(|| log::warn!(target: "pinpool::torch", "{text}: {error}"));
        };
        let Ok(fences) = fences.inspect_err(warn) else { return 1 };
        // SAFETY: `block` is a box from `get` that the caller no longer uses.
        put_after(*unsafe { Box::from_raw(block) }, fences);
        0
    }));
    // After a panic the buffer may be consumed, so the caller must not use the block again.
    put.unwrap_or(0)
}

/// # Safety
///
/// `pool` comes from [`Functions`].
unsafe extern "C" fn trim(pool: *const Pool) {
    // SAFETY: the pool was leaked by `_torch_functions`.
    let _panic = catch_unwind(AssertUnwindSafe(|| unsafe { &*pool }.clear()));
}

/// # Safety
///
/// `pool` comes from [`Functions`], and `totals` can be written.
unsafe extern "C" fn totals(pool: *const Pool, totals: *mut Totals) {
    let _panic = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: the pool was leaked by `_torch_functions`.
        let stats = unsafe { &*pool }.stats();
        let signed = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
        let other_buffers = stats.memory.pageable + stats.requests.adopted;
        let value = Totals {
            held_bytes: signed(stats.memory.held_bytes),
            peak_held_bytes: signed(stats.memory.peak_held_bytes),
            pinned_bytes: signed(stats.memory.pin.bytes),
            unpinned_bytes: signed(stats.memory.unpin.bytes),
            // These counters are chosen as the documentation of `Stats` describes.
            held_buffers: signed((stats.memory.buffers + stats.memory.quarantined).saturating_sub(other_buffers)),
            pinned_buffers: signed(stats.requests.misses.saturating_sub(stats.requests.pageable)),
            unpinned_buffers: signed(stats.memory.evictions.total()),
            pin: timed(&stats.memory.pin),
            unpin: timed(&stats.memory.unpin),
        };
        // SAFETY: `totals` is the caller's out parameter.
        unsafe { totals.write(value) };
    }));
}

/// # Safety
///
/// `stream` is a live stream.
unsafe extern "C" fn is_capturing(stream: *const Stream) -> c_int {
    // SAFETY: `stream` is the caller's live stream.
    let stream = unsafe { &*stream };
    // SAFETY: the caller's stream is live during this call.
    let answer = catch_unwind(AssertUnwindSafe(|| unsafe { stream.as_raw() }.is_capturing()));
    answer.unwrap_or(false).into()
}

/// Records a copy of memory that torch did not request. Returns whether the memory is in a buffer of a pool.
///
/// # Safety
///
/// `stream` is a live stream.
unsafe extern "C" fn record_foreign_buffer(address: *const c_void, stream: *const Stream) -> c_int {
    // SAFETY: `stream` is the caller's live stream.
    let &Stream { handle, device } = unsafe { &*stream };
    let stream = crate::stream::Stream { handle: handle.addr(), device: device.try_into().ok() };
    // If it fails, the memory is never reused, which the pool logs when the buffer is released.
    let record = || Memory::containing(address.addr()).map(|memory| memory.record_stream(stream));
    catch_unwind(AssertUnwindSafe(record)).is_ok_and(|recorded| recorded.is_some()).into()
}

fn timed(CallStats { time, .. }: &CallStats) -> Timed {
    let micros = |time: Duration| i64::try_from(time.as_micros()).unwrap_or(i64::MAX);
    Timed {
        calls: i64::try_from(time.count()).unwrap_or(i64::MAX),
        micros: micros(time.total()),
        max_micros: micros(time.max()),
        min_micros: micros(time.min()),
    }
}
