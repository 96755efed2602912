//! Streams and device memory by raw handle, for code that has no cudarc objects.
//!
//! A stream of another framework is wrapped by cudarc: `context.wrap_borrowed_stream(handle)`. Without a context object,
//! [`RawStream`] and [`RawMemory`] take the handle.

// Copies on a CUDA stream of cudarc.
//
// The steps of a copy, with the meaning of a failure:
//
// 1. set aside the errors that others left in cudarc's context object
// 2. make the device memory wait for its earlier work: refused
// 3. check that the stream captures no graph: refused
// 4. enqueue the copy: refused, or failed
// 5. enqueue the fence
// 6. restore the errors
//
// *Refused* means that nothing uses the buffer. A copy that *failed* for a reason other than its arguments may be running, so it
// gets a fence too. A fence is a number that the stream writes (`timeline`), else an event. If the driver refuses both, the
// call waits up to 0.5 s for the stream, unless it is a default stream. If that is not enough, a thread waits for all work of
// the context (`context_fence`).
//
// Step 3 follows step 2, because a wait for captured work makes the stream part of that capture. If the memory waits at all,
// the capture is also checked before the wait, because a capturing stream that waits for work outside of its capture
// invalidates the capture.
//
// Errors that other code left in cudarc's context object are set aside first and restored at the end, for the user's
// next cudarc call. Between these steps, an error in the object comes from this copy.

#![allow(unsafe_code)] // Calls the driver.

use std::borrow::Borrow;
use std::sync::Arc;

use bytemuck::Pod;
use cudarc::driver::{CudaContext, CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop, sys};

use self::context::ContextState;
use self::context_fence::ContextFence;
use self::event::EventFence;
use self::stream::SavedError;
use super::{CopySource, CopyStream, CopyTarget, EnqueueError, Enqueued};
use crate::backend;
use crate::driver::code::{Code, FailedCall};
use crate::driver::{calls, with_one_retry};
use crate::error::{Error, ErrorKind, Result};
use crate::in_flight::SharedFence;

mod context;
mod context_fence;
mod event;
mod final_status;
mod host_slice;
mod own_context;
mod raw;
mod stream;
mod timeline;

pub(crate) use event::fence_after_event;
pub(crate) use host_slice::HostSliceFence;
pub(crate) use raw::fence_after_event_handle;
pub use raw::{RawMemory, RawStream};
pub(crate) use stream::work_id;
pub(crate) use timeline::{held_bytes as timeline_bytes, set_enabled as set_timelines_enabled};

// SAFETY: the fence is enqueued after the copy (event-I1, timeline-I1). Refusals come before the copy, or from the copy call
// itself with an error that it returns for invalid arguments only. The address and the length are cudarc's own.
unsafe impl<E: Pod, S: Borrow<CudaStream>, T: DevicePtrMut<E>> CopyTarget<S, E> for T {
    fn capacity_bytes(&self) -> usize {
        self.num_bytes()
    }

    unsafe fn enqueue_write(&mut self, stream: &S, source: *const u8, len: usize) -> Enqueued {
        let (stream, may_wait) = (stream.borrow(), self.stream().context().is_managing_stream_synchronization());
        // SAFETY: the caller's promise; `len` bytes fit.
        unsafe { copy_on(stream, HostSide::Source(source), len, may_wait, || self.device_ptr_mut(stream)) }
    }
}

// SAFETY: as for `CopyTarget`, in the other direction.
unsafe impl<E: Pod, S: Borrow<CudaStream>, T: DevicePtr<E>> CopySource<S, E> for T {
    fn available_bytes(&self) -> usize {
        self.num_bytes()
    }

    unsafe fn enqueue_read(&self, stream: &S, target: *mut u8, len: usize) -> Enqueued {
        let (stream, may_wait) = (stream.borrow(), self.stream().context().is_managing_stream_synchronization());
        // SAFETY: the caller's promise; there are `len` bytes.
        unsafe { copy_on(stream, HostSide::Target(target), len, may_wait, || self.device_ptr(stream)) }
    }
}

// SAFETY: the fence follows all work enqueued so far (event-I1, timeline-I1).
unsafe impl<S: Borrow<CudaStream>> CopyStream for S {
    fn record_fence(&self) -> Result<SharedFence> {
        let stream = self.borrow();
        let (context, _current) = with_one_retry(|| ContextState::enter_of(stream.context()))?;
        fence_after_work(stream.cu_stream(), context)
    }
}

/// Returns a fence after all work enqueued so far on the stream. The stream's context must be current. Fails permanently if the
/// stream is capturing, because each launch of the graph uses the memory, even after the capture has ended.
fn fence_after_work(stream: sys::CUstream, context: &'static ContextState) -> Result<SharedFence> {
    // SAFETY: the stream is alive.
    if with_one_retry(|| unsafe { calls::is_capturing(stream) })? {
        return Err(Error::capturing_stream());
    }
    Ok(enqueue_fence(stream, context))
}

/// Gives the device with this ordinal access to the memory of a pool for another device. Called before each copy.
pub(crate) fn ensure_access(ordinal: usize, start: *const u8, len: usize) -> Result<(), String> {
    let device = u32::try_from(ordinal).unwrap_or(u32::MAX);
    backend::ensure_access(device, start, len)
        .map_err(|error| format!("device {device} cannot reach the memory of the pool: {error}"))
}

/// Returns the device address of pinned memory in this context.
pub(crate) fn mapped_address(context: &Arc<CudaContext>, start: *const u8, len: usize) -> Result<u64> {
    let no_address = |why| Error::from(ErrorKind::Unmapped { len, why });
    let failed = |failed: FailedCall| no_address(failed.to_string());
    ensure_access(context.ordinal(), start, len).map_err(no_address)?;
    let state = ContextState::for_context(context).map_err(failed)?;
    let _current = state.enter().map_err(failed)?;
    // The first call supports allocated and registered memory, but not virtual memory, which drivers refuse with several errors.
    calls::host_device_pointer(start.cast_mut().cast(), 0)
        .or_else(|_| calls::pointer_device_pointer(start.cast()))
        .map_err(failed)
}

/// The pool's memory of a copy, and the direction of the copy.
#[derive(Debug, Clone, Copy)]
enum HostSide {
    Source(*const u8),
    Target(*mut u8),
}

/// Enqueues a copy on the stream, after the work that `enter_device_memory` enqueues there, and a fence after the copy. With
/// `may_wait`, `enter_device_memory` may make the stream wait for earlier work, so a capture is refused before it, too.
///
/// # Safety
///
/// The contract of [`CopyTarget::enqueue_write`] or [`CopySource::enqueue_read`]; the address that `enter_device_memory` returns
/// must have `len` bytes.
unsafe fn copy_on<'a>(
    stream: &CudaStream,
    host: HostSide,
    len: usize,
    may_wait: bool,
    enter_device_memory: impl FnOnce() -> (sys::CUdeviceptr, SyncOnDrop<'a>),
) -> Enqueued {
    let _saved = SavedError::take(stream.context());
    let (context, _current) = ContextState::enter_of(stream.context()).map_err(|failed| refused(len, failed))?;
    let enter_device_memory = || {
        let (address, record) = enter_device_memory();
        (address, record, stream.context().check_err().map_err(FailedCall::from))
    };
    // SAFETY: the caller's promise.
    unsafe { copy_with_fence((stream.cu_stream(), context), host, len, may_wait, enter_device_memory) }
}

/// Returns a refusal of a copy before anything is enqueued.
fn refused(len: usize, failed @ FailedCall { code, .. }: FailedCall) -> EnqueueError {
    // The device continues to work after capture errors, and if memory is short.
    let is_of_device = !(precedes_enqueue(code) || code == Code::OUT_OF_MEMORY || code.is_capture_error());
    let refused = || Error::copy_refused(len, failed).with_code(code.number());
    EnqueueError::Refused(if is_of_device { failed.into() } else { refused() })
}

/// Copies like [`copy_on`]. The context must be current. The record that `enter_device_memory` returns is dropped after the
/// copy.
///
/// # Safety
///
/// The contract of [`copy_on`].
unsafe fn copy_with_fence<R>(
    (stream, context): (sys::CUstream, &'static ContextState),
    host: HostSide,
    len: usize,
    may_wait: bool,
    enter_device_memory: impl FnOnce() -> (sys::CUdeviceptr, R, Result<(), FailedCall>),
) -> Enqueued {
    let refused = |failed| refused(len, failed);
    let refuse_capturing = || {
        // SAFETY: the stream is alive.
        let is_capturing = unsafe { calls::is_capturing(stream) }.map_err(refused)?;
        if is_capturing { Err(EnqueueError::Refused(Error::capturing_stream())) } else { Ok(()) }
    };
    let start = match host {
        HostSide::Source(start) => start,
        HostSide::Target(start) => start.cast_const(),
    };
    let unreached = |why| EnqueueError::Refused(Error::copy_refused(len, why));
    ensure_access(context.device(), start, len).map_err(unreached)?;
    if may_wait {
        refuse_capturing()?;
    }
    let (address, record, waited) = enter_device_memory();
    if let Err(refusal) = waited.map_err(refused).and_then(|()| refuse_capturing()) {
        // Nothing uses the memory, so there is nothing to record, and the record must not become part of a graph.
        std::mem::forget(record);
        return Err(refusal);
    }
    let copied = match host {
        // SAFETY: the caller promises both sides.
        HostSide::Source(source) => unsafe { calls::copy_to_device(address, source.cast(), len, stream) },
        // SAFETY: as above.
        HostSide::Target(target) => unsafe { calls::copy_to_host(target.cast(), address, len, stream) },
    };
    if let Err(failed) = copied
        && precedes_enqueue(failed.code)
    {
        return Err(refused(failed));
    }
    // The device memory records this use before the fence, so that the fence is the last of this copy's work. An error of that
    // record concerns the next user of the device memory, and stays in the context.
    drop(record);
    let fence = enqueue_fence(stream, context);
    match copied {
        Ok(()) => Ok(fence),
        Err(failed) => Err(EnqueueError::Failed(failed.into(), fence)),
    }
}

/// Enqueues a fence after all work so far on the stream, which must not be capturing. The stream's context must be current. If
/// the driver refuses every kind of fence, waits for the stream.
fn enqueue_fence(stream: sys::CUstream, context: &'static ContextState) -> SharedFence {
    let id = context.stream_id(stream);
    if let Some(fence) = id.and_then(|id| context.pages.timeline(id, &context.waits)?.write(id.number(), stream)) {
        return Arc::new(fence);
    }
    match EventFence::new(id, context).and_then(|event| event.record(stream).map(|()| event)) {
        Ok(event) => Arc::new(event),
        Err(failed) => {
            let complete = context_fence::wait_for(stream).is_ok();
            Arc::new(ContextFence::new(&context.waits, failed.to_string(), complete))
        }
    }
}

/// Returns whether a copy call that fails with this error has enqueued nothing. Any other error may come from earlier work.
fn precedes_enqueue(error: Code) -> bool {
    matches!(
        error,
        Code::NOT_INITIALIZED
            | Code::DEINITIALIZED
            | Code::INVALID_CONTEXT
            | Code::INVALID_HANDLE
            | Code::INVALID_VALUE
    )
}
