//! Copies on a CUDA stream of cudarc.
//!
//! ```text
//!   others' errors set aside ─▶ event created ─▶ device memory waits for earlier work ─▶ capturing? ─▶ copy ─▶ fence ─▶ errors restored
//!                                refused          refused                                 refused      refused  unknown
//!                                                                                                      or unknown
//! ```
//!
//! *Refused* means that nothing uses the buffer; *unknown* that a device may be using it for an unknown time. A copy that
//! failed for another reason than its arguments may be running: a fence goes behind it all the same. That is a number that the
//! stream writes (`timeline`), else an event; if the driver refuses both, the stream is waited for (`idle`).
//!
//! Whether the stream captures a graph is checked after the wait of the device memory, since a wait behind captured work
//! makes the stream part of that capture. Where the memory waits at all it is checked before as well: a capturing stream
//! that waits for work outside of its capture invalidates it.
//!
//! Errors that other code left in cudarc's context object are set aside first and put back at the end, where the
//! user's next call of cudarc finds them. Errors are ours only between the two.
//!
//! A stream of another framework is wrapped by cudarc: `context.wrap_borrowed_stream(handle)`. Without a context object,
//! [`RawStream`], [`RawMem`] and [`PinnedBuf::record_stream`](crate::PinnedBuf::record_stream) take the handle.
#![allow(unsafe_code)] // Calls the driver.

use std::borrow::Borrow;
use std::sync::Arc;

use bytemuck::Pod;
use cudarc::driver::{CudaContext, CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop, sys};

use self::context::ContextState;
use self::event::EventFence;
use self::idle::IdleFence;
use self::stream::{CAPTURING, SetAside, Stream, failed, is_capturing, number};
use self::timeline::Timeline;
use super::{CopyFailure, CopySource, CopyStream, CopyTarget};
use crate::backend;
use crate::driver::calls;
use crate::driver::code::Code;
use crate::error::{Error, Result};
use crate::in_flight::{Fence, FenceKind, SharedFence, StreamId};

mod answer;
mod context;
mod event;
mod handle;
mod host_slice;
mod idle;
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
        kind: FenceKind,
    ) -> Result<SharedFence, CopyFailure> {
        let stream = stream.borrow();
        let waits = self.stream().context().is_managing_stream_synchronization();
        let copy = |address| {
            // SAFETY: the caller promises the source, the target its address; `len` bytes fit (`CopyTarget::enqueue`).
            let copied = unsafe { calls::copy_to_device(address, source.cast(), len, stream.cu_stream()) };
            copied.map_err(|error| ("cuMemcpyHtoDAsync", error))
        };
        let_reach(stream.context().ordinal(), source, len).map_err(CopyFailure::Refused)?;
        copy_with_fence(stream, len, kind, waits, move || self.device_ptr_mut(stream), copy)
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
        copy_with_fence(stream, len, FenceKind::Timeline, waits, || self.device_ptr(stream), copy)
    }
}

// SAFETY: the fence follows all work enqueued so far (event-I1).
unsafe impl<S: Borrow<CudaStream>> CopyStream for S {
    fn mark(&self) -> Result<SharedFence> {
        let stream = self.borrow();
        // What the driver refuses once it may do the next time.
        let enter = || ContextState::enter_of(stream.context());
        let entered = enter().or_else(|_| enter());
        let (context, _current) = entered.map_err(|error| Error::device(failed("cuCtxSetCurrent", error)))?;
        mark(stream.into(), context)
    }
}

/// A fence behind all work enqueued so far on the stream; the stream's context is current. The answer that the stream captures
/// is final: a graph that holds the work uses the memory at each launch, also when the capture is over.
fn mark(stream: Stream, context: &'static ContextState) -> Result<SharedFence> {
    // What the driver refuses once it may do the next time.
    match is_capturing(stream).or_else(|_| is_capturing(stream)) {
        Ok(false) => Ok(Prepared::new(stream, context, FenceKind::Timeline).put(stream, context)),
        Ok(true) => Err(Error::device(CAPTURING)),
        Err(error) => Err(Error::device(failed("cuStreamIsCapturing", error))),
    }
}

/// Gives the device with this ordinal access to memory of a pool that has another device. Precedes each copy.
pub(crate) fn let_reach(ordinal: usize, start: *const u8, len: usize) -> Result<()> {
    let device = u32::try_from(ordinal).unwrap_or(u32::MAX);
    backend::let_reach(device, start, len)
        .map_err(|error| Error::copy(len, format!("device {device} cannot reach the memory of the pool: {error}")))
}

/// Where the device of this context sees pinned memory.
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
    kind: FenceKind,
    may_wait: bool,
    wait: impl FnOnce() -> (sys::CUdeviceptr, SyncOnDrop<'a>),
    copy: impl FnOnce(sys::CUdeviceptr) -> Result<(), (&'static str, Code)>,
) -> Result<SharedFence, CopyFailure> {
    let _set_aside = SetAside::take(stream.context());
    let entered = ContextState::enter_of(stream.context());
    let (context, _current) = entered.map_err(|error| refused(len, "cuCtxSetCurrent", error))?;
    let wait = || {
        let (address, record) = wait();
        (address, record, stream.context().check_err().map_err(Code::from))
    };
    copy_behind((stream.into(), context), len, kind, may_wait, wait, copy)
}

/// A refusal before anything is enqueued.
fn refused(len: usize, call: &str, error: Code) -> CopyFailure {
    let is_of_device = !(is_about_arguments(error) || is_about_captures_or_memory(error));
    let text = failed(call, error);
    CopyFailure::Refused(if is_of_device { Error::device(text) } else { Error::copy(len, text) })
}

/// Copies as [`copy_with_fence`] does, with the context current. What `wait` returns besides the address is dropped behind the copy.
fn copy_behind<R>(
    (stream, context): (Stream, &'static ContextState),
    len: usize,
    kind: FenceKind,
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
    // All calls that can be refused come before the copy.
    let prepared = match Prepared::new(stream, context, kind) {
        Prepared::Nothing(call, error) => return Err(refused(call, error)),
        prepared => prepared,
    };
    let copied = match copy(address) {
        Err((call, error)) if is_about_arguments(error) => return Err(refused(call, error)),
        copied => copied.map_err(|(call, error)| Error::device(failed(call, error))),
    };
    // The device memory records our use of it before our fence, so that the fence is the last of this copy's work. An error
    // of that record is for the memory's next user, and stays in the context.
    drop(record);
    let fence = prepared.put(stream, context);
    match copied {
        Ok(()) => Ok(fence),
        Err(error) => Err(CopyFailure::Failed(error, fence)),
    }
}

/// A fence that is not yet behind anything.
enum Prepared {
    Timeline(&'static Timeline, StreamId),
    Event(EventFence),
    /// The driver refused this call.
    Nothing(&'static str, Code),
}

impl Prepared {
    /// A fence for the stream, which does not capture. Its context is current.
    fn new(stream: Stream, context: &'static ContextState, kind: FenceKind) -> Self {
        let id = if kind == FenceKind::Timeline { context.stream_id(stream) } else { None };
        match id.and_then(|id| Some((context.timeline(stream, id)?, id))) {
            Some((timeline, id)) => Self::Timeline(timeline, id),
            None => Self::event(stream, context, id),
        }
    }

    fn event(stream: Stream, context: &'static ContextState, id: Option<StreamId>) -> Self {
        EventFence::new(stream, id, context).map_or_else(|error| Self::Nothing("cuEventCreate", error), Self::Event)
    }

    /// Puts it behind all work so far on the stream. Waits for the stream where the driver refuses that.
    fn put(self, stream: Stream, context: &'static ContextState) -> SharedFence {
        let prepared = match self {
            Self::Timeline(timeline, id) => match timeline.write(id.number(), stream.handle()) {
                Some(fence) => return Arc::new(fence),
                None => Self::event(stream, context, Some(id)),
            },
            prepared => prepared,
        };
        let (id, call, error) = match prepared {
            Self::Event(event) => match event.record(stream) {
                Ok(()) => return Arc::new(event),
                Err(error) => (event.stream_id(), "cuEventRecord", error),
            },
            Self::Nothing(call, error) => (None, call, error),
            Self::Timeline(..) => (None, "cuStreamWriteValue32", Code::NOT_SUPPORTED),
        };
        let is_over = idle::wait_for(stream).is_ok();
        Arc::new(IdleFence::new((number(stream), id), context, failed(call, error), is_over))
    }
}

/// Errors that a copy call gives before it enqueues anything. All others may be left over from earlier work.
fn is_about_arguments(error: Code) -> bool {
    let of_the_driver = matches!(error, Code::DEINITIALIZED | Code::NOT_INITIALIZED);
    let of_a_handle = matches!(error, Code::INVALID_CONTEXT | Code::INVALID_HANDLE);
    of_the_driver || of_a_handle || error == Code::INVALID_VALUE
}

/// Errors after which the device continues to work: capture errors, 900 to 998, and no memory for an event.
fn is_about_captures_or_memory(error: Code) -> bool {
    error == Code::OUT_OF_MEMORY || (900..=998).contains(&error.number())
}
