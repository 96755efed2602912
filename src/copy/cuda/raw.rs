//! Streams, events and device memory by their handles and addresses, for callers that have no cudarc object: C programs and other
//! frameworks.
//!
//! The driver returns the context of a stream. A green context can be current on one thread at a time, so its streams are served
//! through the primary context of the device. The default streams of a green context have no handle there and are refused. The
//! context of an event is unknown, so the wait for the event is enqueued in the context that is current on the thread; a stream
//! may wait for an event of any context.
//!
//! This module refuses a call only before anything is enqueued.
#![allow(unsafe_code)] // Calls the driver.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;

use super::context::{ContextState, handle_error};
use super::event::after_event;
use super::stream::{id_number, is_default};
use super::timeline::Timeline;
use super::{HostSide, copy_with_fence, fence_after_work, refused};
use crate::copy::{CopySource, CopyStream, CopyTarget, EnqueueError, Enqueued};
use crate::driver::code::{Code, FailedCall};
use crate::driver::device::Device;
use crate::driver::{self, CurrentContext, RelaxedCapture, calls, with_one_retry};
use crate::error::{Error, Result};
use crate::in_flight::SharedFence;

/// A stream of other code, without a cudarc object.
///
/// ```no_run
/// use pinpool::{PinnedBuf, copy::cuda::RawStream};
///
/// /// `stream` is a `cudaStream_t` or a `CUstream` with work that uses the buffer. It exists during the call and belongs to a
/// /// primary context, which is never destroyed.
/// unsafe fn release(buf: PinnedBuf, stream: *mut std::ffi::c_void) -> pinpool::Result<()> {
///     // SAFETY: as the caller promises.
///     Ok(buf.release_after(&unsafe { RawStream::new(stream) })?)
/// }
/// ```
#[derive(Debug, Clone, Copy)]
pub struct RawStream {
    handle: sys::CUstream,
    device: Option<u32>,
    /// Whether a default stream of the current context has precedence over `device`.
    prefers_current: bool,
}

// SAFETY: any thread may use a stream handle, and the caller of `new` promises that the stream is alive and that a default
// stream, which the driver resolves when it is used, is used on the right thread.
unsafe impl Send for RawStream {}
// SAFETY: as for `Send`; nothing changes through a shared reference.
unsafe impl Sync for RawStream {}

impl RawStream {
    /// Returns the stream with this handle, of the driver or the runtime. The handles null and 1 (legacy) belong to the context
    /// that is current when the result is used, and 2 (per-thread) also to the thread that uses it.
    ///
    /// # Safety
    ///
    /// The stream must not be destroyed while the result is used. A default stream must be used in the context, and a per-thread one
    /// on the thread, of the work that it is to cover. The stream's context, unless it is a primary context, must not be
    /// destroyed (`cuCtxDestroy`) before the pool has ended: until the last handle and buffer are dropped, another thread may
    /// query the context, even if the work has completed.
    pub unsafe fn new(handle: *mut c_void) -> Self {
        Self { handle: handle.cast(), device: None, prefers_current: false }
    }

    /// Selects the GPU of a default stream: its primary context is used, whatever context is current. Has no effect on other
    /// streams. If a green context of that GPU is current, calls with a default stream fail.
    pub fn on_device(self, ordinal: u32) -> Self {
        Self { device: Some(ordinal), prefers_current: false, ..self }
    }

    /// Selects the GPU of a default stream as [`on_device`](Self::on_device) does, but only for calls on a thread without a current
    /// context.
    pub fn or_on_device(self, ordinal: u32) -> Self {
        Self { device: Some(ordinal), prefers_current: true, ..self }
    }

    /// Returns whether the stream captures a graph; for the legacy stream, whether a blocking stream of its context does. `false`
    /// if the driver does not say.
    pub fn is_capturing(self) -> bool {
        let Ok(_entered) = self.enter() else { return false };
        // SAFETY: alive (`new`).
        unsafe { calls::is_capturing(self.handle) }.unwrap_or_else(|FailedCall { code, .. }| code.is_capture_error())
    }

    /// Makes the primary context of the selected GPU current for a default stream. Does nothing if the current context has
    /// precedence, or if it is a green context of that GPU, because [`context_of`] refuses the default stream of a green context.
    fn enter(self) -> Result<Option<CurrentContext>> {
        let Some(ordinal) = self.device.filter(|_| is_default(self.handle.addr())) else { return Ok(None) };
        require_driver()?;
        if self.prefers_current && !calls::current_context()?.is_null() {
            return Ok(None);
        }
        let is_current = calls::current_device().is_ok_and(|current| i64::from(current) == i64::from(ordinal));
        // SAFETY: a default stream of the current context, if there is one.
        if is_current && unsafe { calls::stream_context(self.handle) }.is_ok_and(|(_, green)| !green.is_null()) {
            return Ok(None);
        }
        let entered = Device::find(ordinal).and_then(|device| device.enter());
        // Without a code, the driver has no such device.
        entered.map(|(context, _relaxed)| Some(context)).map_err(|error| match error.code() {
            None => Error::invalid_handle(error),
            Some(code) => Error::device_failed(error).with_code(code),
        })
    }
}

// SAFETY: the fence follows all work enqueued so far (event-I1, timeline-I1).
unsafe impl CopyStream for RawStream {
    fn record_fence(&self) -> Result<SharedFence> {
        let _entered = self.enter()?;
        // SAFETY: alive (`new`).
        if let Some(fence) = unsafe { fence_by_timeline(self.handle) } {
            return Ok(fence);
        }
        // SAFETY: alive (`new`).
        let context = unsafe { context_of(self.handle) }?;
        let _current = with_one_retry(|| context.enter())?;
        fence_after_work(self.handle, context)
    }
}

/// Device memory of another framework, for copies from and to it. The type neither owns the memory nor orders its uses; the owner
/// of the memory does.
///
/// ```no_run
/// use pinpool::{Pool, copy::cuda::{RawMemory, RawStream}};
///
/// /// A framework's stream, and 4096 bytes of its memory. Both exist until the copy has completed.
/// unsafe fn send(pool: &Pool, stream: *mut std::ffi::c_void, address: u64) -> pinpool::Result<()> {
///     // SAFETY: as the caller promises.
///     let stream = unsafe { RawStream::new(stream) };
///     // SAFETY: as the caller promises; the framework uses the memory only after the copy.
///     let mut memory = unsafe { RawMemory::new(address, 4096) };
///     pool.get(4096)?.copy_to(&stream, &mut memory)?;
///     Ok(())
/// }
/// ```
#[derive(Debug)]
pub struct RawMemory {
    address: sys::CUdeviceptr,
    len: usize,
}

impl RawMemory {
    /// Returns the `len` bytes at `address` of the device that the copying streams belong to.
    ///
    /// # Safety
    ///
    /// The bytes must stay allocated until every copy made through the result has completed, and all other uses of them must be
    /// ordered with those copies.
    pub unsafe fn new(address: u64, len: usize) -> Self {
        Self { address, len }
    }
}

// SAFETY: as for cudarc's streams (`copy_with_fence`).
unsafe impl CopyTarget<RawStream> for RawMemory {
    fn capacity_bytes(&self) -> usize {
        self.len
    }

    unsafe fn enqueue_write(&mut self, stream: &RawStream, source: *const u8, len: usize) -> Enqueued {
        // SAFETY: the caller promises the source, `new` the target; `len` bytes fit.
        unsafe { copy_on_raw(*stream, self.address, HostSide::Source(source), len) }
    }
}

// SAFETY: as for `CopyTarget`, in the other direction.
unsafe impl CopySource<RawStream> for RawMemory {
    fn available_bytes(&self) -> usize {
        self.len
    }

    unsafe fn enqueue_read(&self, stream: &RawStream, target: *mut u8, len: usize) -> Enqueued {
        // SAFETY: the caller promises the target, `new` the source; there are `len` bytes.
        unsafe { copy_on_raw(*stream, self.address, HostSide::Target(target), len) }
    }
}

/// Enqueues a copy from or to the device memory at `address`, and a fence after the copy.
///
/// # Safety
///
/// The contract of [`CopyTarget::enqueue_write`] or [`CopySource::enqueue_read`]; there must be `len` bytes at `address`.
unsafe fn copy_on_raw(raw: RawStream, address: sys::CUdeviceptr, host: HostSide, len: usize) -> Enqueued {
    let _entered = raw.enter().map_err(EnqueueError::Refused)?;
    // SAFETY: alive (`RawStream::new`).
    let context = unsafe { context_of(raw.handle) }.map_err(EnqueueError::Refused)?;
    let _current = context.enter().map_err(|failed| refused(len, failed))?;
    // SAFETY: the caller's promise.
    unsafe { copy_with_fence((raw.handle, context), host, len, false, || (address, (), Ok(()))) }
}

/// Returns a fence after all work so far on a stream with a timeline. Returns `None` if the stream has no timeline or captures,
/// if the driver refuses, or for a default stream, which needs its context first.
///
/// # Safety
///
/// The stream is alive, and its context stays alive until the fence is complete.
unsafe fn fence_by_timeline(stream: sys::CUstream) -> Option<SharedFence> {
    // SAFETY: the caller's promise.
    if is_default(stream.addr()) || unsafe { calls::is_capturing(stream) } != Ok(false) {
        return None;
    }
    let id = id_number(stream).ok()?;
    Some(Arc::new(Timeline::find(id)?.write(id, stream)?))
}

/// Returns the state of the context of the stream with this handle.
///
/// # Safety
///
/// As for [`fence_by_timeline`].
unsafe fn context_of(stream: sys::CUstream) -> Result<&'static ContextState> {
    require_driver()?;
    // SAFETY: the caller's promise.
    let (handle, green) = unsafe { calls::stream_context(stream) }.map_err(handle_error)?;
    if is_default(stream.addr()) && !green.is_null() {
        return Err(Error::device_failed("a default stream of a green context has no fence: pass another stream"));
    }
    // SAFETY: the context of a live stream.
    unsafe { ContextState::for_handle(handle) }.map_err(handle_error)
}

/// Returns a fence after all work before the last record of `event`, or `None` if that work has completed.
///
/// # Safety
///
/// The event must be alive.
pub(crate) unsafe fn fence_after_event_handle(event: sys::CUevent) -> Result<Option<SharedFence>> {
    require_driver()?;
    if event.is_null() {
        return Err(Error::invalid_handle("the event is null"));
    }
    if calls::current_context()?.is_null() {
        let _relaxed = RelaxedCapture::enter();
        // SAFETY: the caller's promise. A query needs no context.
        return unsafe { calls::event_query(event) }.map(|()| None).map_err(|failed| match failed.code {
            Code::NOT_READY | Code::INVALID_CONTEXT => Error::invalid_handle("no CUDA context is current to wait in"),
            _ => handle_error(failed),
        });
    }
    // SAFETY: the default stream of the current context. The context of that stream may be another context: a green context
    // refers to the primary context.
    let (handle, _) = unsafe { calls::stream_context(ptr::null_mut()) }.map_err(handle_error)?;
    // SAFETY: the context of a live stream.
    let context = unsafe { ContextState::for_handle(handle) }.map_err(handle_error)?;
    // SAFETY: the caller's promise.
    unsafe { after_event(event, context) }
}

/// Initializes the CUDA driver, if that has not happened yet.
///
/// # Errors
///
/// This machine has no CUDA driver, or the driver does not start.
fn require_driver() -> Result<()> {
    if !driver::is_present() {
        return Err(Error::unavailable("the CUDA driver", "no libcuda.so.1 on this machine"));
    }
    driver::state::init().map_err(|(why, _)| Error::unavailable("the CUDA driver", format!("cuInit failed: {why}")))
}
