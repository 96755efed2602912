//! Copies on a CUDA stream of cudarc.
//!
//! ```text
//!   others' errors set aside ─▶ event created ─▶ device memory waits for earlier work ─▶ capturing? ─▶ copy ─▶ fence ─▶ errors restored
//!                                refused          refused                                 refused      refused  unknown
//!                                                                                                      or unknown
//! ```
//!
//! *Refused* means that nothing uses the buffer; *unknown* that a device may be using it for an unknown time. A copy that
//! failed for another reason than its arguments may be running: a fence goes behind it all the same. A fence that the driver
//! refuses is tried once more; then a later one of the stream stands for the copy, whenever there is one.
//!
//! Whether the stream captures a graph is checked after the wait of the device memory, since a wait behind captured work
//! makes the stream part of that capture. Where the memory waits at all it is checked before as well: a capturing stream
//! that waits for work outside of its capture invalidates it.
//!
//! Errors that other code left in cudarc's context object are set aside first and put back at the end, where the
//! user's next call of cudarc finds them. Errors are ours only between the two.
//!
//! A stream of another framework is wrapped by cudarc: `context.wrap_borrowed_stream(handle)`. Where there is no context
//! object either, [`RawStream`], [`RawMem`] and [`PinnedBuf::record_stream`](crate::PinnedBuf::record_stream) take the handle.
#![allow(unsafe_code)] // Calls the driver.

use std::borrow::Borrow;
use std::sync::Arc;

use bytemuck::Pod;
use cudarc::driver::{CudaContext, CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop, sys};

use self::context::ContextState;
use self::event::EventFence;
use self::stream::{CAPTURING, SetAside, Stream, failed, is_capturing, number};
use super::{CopyFailure, CopySource, CopyStream, CopyTarget, FencePurpose};
use crate::backend;
use crate::driver::calls;
use crate::driver::code::Code;
use crate::error::{Error, Result};
use crate::in_flight::{FenceKind, SharedFence, StreamId};

mod answer;
mod context;
mod event;
mod handle;
mod host_slice;
mod later;
mod own_context;
mod raw_mem;
mod raw_stream;
mod stream;
mod timeline;

pub(crate) use event::fence_behind_event;
pub(crate) use handle::{fence_behind_event_handle, fence_behind_stream, require_driver};
pub(crate) use host_slice::{HostSliceFence, refuse_host_slice};
pub use raw_mem::RawMem;
pub use raw_stream::RawStream;
pub(crate) use timeline::held_bytes as timeline_bytes;

// SAFETY: the fence is put behind the copy (event-I1, timeline-I1). Refusals come before the copy, or from the copy call itself with
// an error that it gives for bad arguments only.
unsafe impl<E: Pod, S: Borrow<CudaStream>, T: DevicePtrMut<E>> CopyTarget<S, E> for T {
    fn capacity_bytes(&self) -> usize {
        self.num_bytes()
    }

    unsafe fn enqueue(
        &mut self,
        stream: &S,
        source: *const u8,
        len: usize,
        purpose: FencePurpose,
    ) -> Result<SharedFence, CopyFailure> {
        let stream = stream.borrow();
        let waits = self.stream().context().is_managing_stream_synchronization();
        let copy = |address| {
            // SAFETY: the caller promises the source, the target its address; `len` bytes fit (`CopyTarget::enqueue`).
            let copied = unsafe { calls::copy_to_device(address, source.cast(), len, stream.cu_stream()) };
            copied.map_err(|error| ("cuMemcpyHtoDAsync", error))
        };
        let_reach(stream.context().ordinal(), source, len).map_err(CopyFailure::Refused)?;
        copy_with_fence(stream, len, purpose, waits, move || self.device_ptr_mut(stream), copy)
    }
}

// SAFETY: as for `CopyTarget`, in the other direction.
unsafe impl<E: Pod, S: Borrow<CudaStream>, T: DevicePtr<E>> CopySource<S, E> for T {
    fn available_bytes(&self) -> usize {
        self.num_bytes()
    }

    unsafe fn fetch(&self, stream: &S, target: *mut u8, len: usize) -> Result<SharedFence, CopyFailure> {
        let stream = stream.borrow();
        let waits = self.stream().context().is_managing_stream_synchronization();
        let copy = |address| {
            // SAFETY: the caller promises the target, the source its address; it has `len` bytes (`CopySource::fetch`).
            let copied = unsafe { calls::copy_to_host(target.cast(), address, len, stream.cu_stream()) };
            copied.map_err(|error| ("cuMemcpyDtoHAsync", error))
        };
        let_reach(stream.context().ordinal(), target, len).map_err(CopyFailure::Refused)?;
        copy_with_fence(stream, len, FencePurpose::Buffer, waits, || self.device_ptr(stream), copy)
    }
}

// SAFETY: the fence stands behind all work enqueued so far (event-I1).
unsafe impl<S: Borrow<CudaStream>> CopyStream for S {
    fn mark(&self) -> Result<SharedFence> {
        let stream = self.borrow();
        let context = ContextState::of(stream.context()).map_err(|error| Error::device(failed("cuCtxGetId", error)))?;
        mark(stream.into(), context)
    }
}

/// A fence behind all work so far on the stream.
fn mark(stream: Stream, context: &'static ContextState) -> Result<SharedFence> {
    // What the driver refuses once it may do the next time. The answer that the stream captures is final: a graph that holds the
    // work uses the memory at each launch, also when the capture is over.
    let marked = try_mark(stream, context).or_else(|_| try_mark(stream, context))?;
    marked.ok_or_else(|| Error::device(CAPTURING))
}

/// `None` if the stream captures.
fn try_mark(stream: Stream, context: &'static ContextState) -> Result<Option<SharedFence>> {
    let refused = |call, error| Error::device(failed(call, error));
    let _current = context.enter().map_err(|error| refused("cuCtxSetCurrent", error))?;
    if is_capturing(stream).map_err(|error| refused("cuStreamIsCapturing", error))? {
        return Ok(None);
    }
    let event = EventFence::new(stream, context).map_err(|error| ("cuEventCreate", error));
    fence_behind(stream, context, event, None, FencePurpose::Pool(FenceKind::Event)).map(Some)
}

/// Gives the device with this ordinal access to memory of a pool that has another device. Precedes each copy.
pub(crate) fn let_reach(ordinal: usize, start: *const u8, len: usize) -> Result<()> {
    let device = u32::try_from(ordinal).unwrap_or(u32::MAX);
    backend::let_reach(device, start, len)
        .map_err(|error| Error::copy(len, format!("device {device} cannot reach the memory of the pool: {error}")))
}

/// Where the device of this context sees page-locked memory.
pub(crate) fn mapped_address(context: &Arc<CudaContext>, start: *const u8, len: usize) -> Result<u64> {
    let failed = |call, error| Error::copy(len, failed(call, error));
    let_reach(context.ordinal(), start, len)?;
    let state = ContextState::of(context).map_err(|error| failed("cuCtxGetId", error))?;
    let _current = state.enter().map_err(|error| failed("cuCtxSetCurrent", error))?;
    // The first call knows allocated and registered memory, but no virtual memory, and drivers refuse that in several ways.
    calls::host_device_pointer(start.cast_mut().cast())
        .or_else(|_| calls::pointer_device_pointer(start.cast()))
        .map_err(|error| failed("cuPointerGetAttribute", error))
}

/// Enqueues a copy on the stream, behind what `wait` puts there, with a fence behind it.
fn copy_with_fence<'a>(
    stream: &CudaStream,
    len: usize,
    purpose: FencePurpose,
    may_wait: bool,
    wait: impl FnOnce() -> (sys::CUdeviceptr, SyncOnDrop<'a>),
    copy: impl FnOnce(sys::CUdeviceptr) -> Result<(), (&'static str, Code)>,
) -> Result<SharedFence, CopyFailure> {
    let _set_aside = SetAside::take(stream.context());
    let context = ContextState::of(stream.context()).map_err(|error| refused(len, "cuCtxGetId", error))?;
    let wait = || {
        let (address, record) = wait();
        (address, record, stream.context().check_err().map_err(Code::from))
    };
    copy_behind((stream.into(), context), len, purpose, may_wait, wait, copy)
}

/// A refusal before anything is enqueued.
fn refused(len: usize, call: &str, error: Code) -> CopyFailure {
    let is_of_device = !(is_about_arguments(error) || is_about_captures_or_memory(error));
    let text = failed(call, error);
    CopyFailure::Refused(if is_of_device { Error::device(text) } else { Error::copy(len, text) })
}

/// Copies as [`copy_with_fence`] does. What `wait` returns besides the address is dropped behind the copy.
fn copy_behind<R>(
    (stream, context): (Stream, &'static ContextState),
    len: usize,
    purpose: FencePurpose,
    may_wait: bool,
    wait: impl FnOnce() -> (sys::CUdeviceptr, R, Result<(), Code>),
    copy: impl FnOnce(sys::CUdeviceptr) -> Result<(), (&'static str, Code)>,
) -> Result<SharedFence, CopyFailure> {
    let refused = |call, error| refused(len, call, error);
    let refuse_capturing = || match is_capturing(stream) {
        Ok(false) => Ok(()),
        Ok(true) => Err(CopyFailure::Refused(Error::copy(len, CAPTURING))),
        Err(error) => Err(refused("cuStreamIsCapturing", error)),
    };
    let _current = context.enter().map_err(|error| refused("cuCtxSetCurrent", error))?;
    // All calls that can be refused come before the copy.
    let event = EventFence::new(stream, context).map_err(|error| refused("cuEventCreate", error))?;
    if may_wait {
        refuse_capturing()?;
    }
    let (address, record, waited) = wait();
    let waited = waited.map_err(|error| refused("cuStreamWaitEvent", error));
    if let Err(refusal) = waited.and_then(|()| refuse_capturing()) {
        // Nothing uses the memory, so there is nothing to record, and it must not become part of a graph.
        std::mem::forget(record);
        return Err(refusal);
    }
    let id = if purpose == FencePurpose::Pool(FenceKind::Event) { None } else { context.stream_id(stream) };
    let copied = match copy(address) {
        Err((call, error)) if is_about_arguments(error) => return Err(refused(call, error)),
        copied => copied.map_err(|(call, error)| Error::device(failed(call, error))),
    };
    // The device memory records our use of it before our fence, so that the fence is the last of this copy's work. An error
    // of that record is for the memory's next user, and stays in the context.
    drop(record);
    match (copied, fence_behind(stream, context, Ok(event), id, purpose)) {
        (Ok(()), Ok(fence)) => Ok(fence),
        (Err(error), Ok(fence)) => Err(CopyFailure::Failed(error, fence)),
        (Ok(()), Err(error)) | (Err(error), Err(_)) => Err(CopyFailure::Unknown(error)),
    }
}

/// Puts a fence behind all work so far on the stream, whose context is current; `id` is that of the stream if it is known
/// already.
fn fence_behind(
    stream: Stream,
    context: &'static ContextState,
    event: Result<EventFence, (&'static str, Code)>,
    id: Option<StreamId>,
    purpose: FencePurpose,
) -> Result<SharedFence> {
    // Before the fence is put there (later-I1).
    let noted = context.later.noted();
    let timeline = match (purpose, id) {
        (FencePurpose::Pool(FenceKind::Timeline), Some(id)) => context.timeline_fence(stream, id).ok().flatten(),
        _ => None,
    };
    let fence: SharedFence = match timeline {
        Some(fence) => Arc::new(fence),
        None => match event.and_then(|event| recorded(event, stream, id)) {
            Ok(event) => Arc::new(event),
            Err((call, error)) => {
                let why = failed(call, error);
                return match id.or_else(|| context.stream_id(stream)) {
                    Some(id) => Ok(Arc::new(context.later.expect(id, number(stream), why, context.idle()))),
                    None => Err(Error::device(why)),
                };
            }
        },
    };
    if noted > 0
        && let Some(id) = id.or_else(|| context.stream_id(stream))
    {
        context.later.note(noted, id, &fence);
    }
    Ok(fence)
}

/// The event behind all work so far on the stream.
fn recorded(mut event: EventFence, stream: Stream, id: Option<StreamId>) -> Result<EventFence, (&'static str, Code)> {
    let recorded = event.record(stream, id).or_else(|_| event.record(stream, id));
    recorded.map(|()| event).map_err(|error| ("cuEventRecord", error))
}

/// Errors that a copy call gives before it enqueues anything. All others may be left over from earlier work.
fn is_about_arguments(error: Code) -> bool {
    let of_the_driver = matches!(error, Code::DEINITIALIZED | Code::NOT_INITIALIZED);
    let of_a_handle = matches!(error, Code::INVALID_CONTEXT | Code::INVALID_HANDLE);
    of_the_driver || of_a_handle || error == Code::INVALID_VALUE
}

/// Errors after which the device goes on: those of captures, 900 to 998, and no memory for an event.
fn is_about_captures_or_memory(error: Code) -> bool {
    error == Code::OUT_OF_MEMORY || (900..=998).contains(&error.number())
}
