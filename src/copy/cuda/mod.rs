//! Copies on a CUDA stream of cudarc.
//!
//! ```text
//!   others' errors set aside ─▶ mark ready ─▶ device memory waits its turn ─▶ capturing? ─▶ copy ─▶ marked ─▶ errors back
//!                                refused        refused                        refused   refused / unknown   unknown
//! ```
//!
//! *Refused* means that nothing uses the buffer; *unknown* that something may, for ever.
//!
//! Whether the stream captures a graph is asked after the wait of the device memory, for a wait behind captured work draws
//! the stream into that capture. Where the memory waits at all it is asked before as well: a capturing stream that waits
//! for work outside of its capture spoils it.
//!
//! cudarc keeps one error per context object for calls that cannot return one, and hands it to the next call of its safe
//! layer, whosever that is. Left there, it would make the device memory skip its wait for earlier work (and the record of
//! ours), so it is set aside first and put back at the end, where the user's next call of cudarc finds it as before. Errors
//! are ours only between the two.
//!
//! | file | owns |
//! | --- | --- |
//! | `mod.rs` | both directions of a copy, and marks behind other people's work |
//! | `home.rs` | what the copies of one context share |
//! | `names.rs` | what a stream is called, and which streams are the same |
//! | `mark.rs` | an event as a fence |
//! | `timeline.rs`, `sequence.rs` | a word that the stream counts up as a fence |
//! | `foreign.rs` | a fence for what somebody else's event stands for |
//! | `loan.rs` | copies that cudarc makes of a buffer by itself (`HostSlice`) |
//! | `raw.rs` | device memory of other frameworks |
//!
//! A stream of another framework is wrapped by cudarc: `context.wrap_borrowed_stream(handle)`.
#![allow(unsafe_code)] // Calls the driver.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, DevicePtr, DevicePtrMut, DriverError, SyncOnDrop, result, sys};

use self::context::Home;
use self::event::Mark;
use super::{CopyFailure, CopySource, CopyStream, CopyTarget, FencePurpose};
use crate::config::FenceKind;
use crate::driver;
use crate::error::{Error, Result};
use crate::in_flight::{Fence, SharedFence};

mod context;
mod event;
mod foreign_event;
mod host_slice;
mod raw;
mod sequence;
mod stream_id;
mod timeline;

pub(crate) use foreign_event::mark_behind;
pub use raw::RawMem;

const CAPTURING: &str = "the stream is capturing a graph, and each launch would use the buffer again after it was \
                         recycled; copy before the capture begins or after it ends, or on a stream that does not take \
                         part in it";

// SAFETY: the fence is marked behind the copy (mark D1). Refusals come before the copy, or from the copy call itself with
// an error that it gives for bad arguments only.
unsafe impl<T: DevicePtrMut<u8>> CopyTarget<CudaStream> for T {
    fn capacity_bytes(&self) -> usize {
        self.len()
    }

    unsafe fn enqueue(
        &mut self,
        stream: &CudaStream,
        source: *const u8,
        len: usize,
        purpose: FencePurpose,
    ) -> Result<SharedFence, CopyFailure> {
        let waits = self.stream().context().is_managing_stream_synchronization();
        let copy = |address| {
            // SAFETY: the caller promises the source, the target its address; `len` bytes fit (`CopyTarget::enqueue`).
            let copied = unsafe { sys::cuMemcpyHtoDAsync_v2(address, source.cast(), len, stream.cu_stream()) };
            copied.result().map_err(|error| ("cuMemcpyHtoDAsync", error))
        };
        marked(stream, len, purpose, waits, move || self.device_ptr_mut(stream), copy)
    }
}

// SAFETY: as the one above, to which it goes.
unsafe impl<T: DevicePtrMut<u8>> CopyTarget<Arc<CudaStream>> for T {
    fn capacity_bytes(&self) -> usize {
        self.len()
    }

    unsafe fn enqueue(
        &mut self,
        stream: &Arc<CudaStream>,
        source: *const u8,
        len: usize,
        purpose: FencePurpose,
    ) -> Result<SharedFence, CopyFailure> {
        // SAFETY: the caller's promise.
        unsafe { CopyTarget::<CudaStream>::enqueue(self, stream, source, len, purpose) }
    }
}

// SAFETY: as for `CopyTarget`, in the other direction.
unsafe impl<T: DevicePtr<u8>> CopySource<CudaStream> for T {
    fn available_bytes(&self) -> usize {
        self.len()
    }

    unsafe fn fetch(&self, stream: &CudaStream, target: *mut u8, len: usize) -> Result<SharedFence, CopyFailure> {
        let waits = self.stream().context().is_managing_stream_synchronization();
        let copy = |address| {
            // SAFETY: the caller promises the target, the source its address; it has `len` bytes (`CopySource::fetch`).
            let copied = unsafe { sys::cuMemcpyDtoHAsync_v2(target.cast(), address, len, stream.cu_stream()) };
            copied.result().map_err(|error| ("cuMemcpyDtoHAsync", error))
        };
        marked(stream, len, FencePurpose::Buffer, waits, || self.device_ptr(stream), copy)
    }
}

// SAFETY: as the one above, to which it goes.
unsafe impl<T: DevicePtr<u8>> CopySource<Arc<CudaStream>> for T {
    fn available_bytes(&self) -> usize {
        self.len()
    }

    unsafe fn fetch(&self, stream: &Arc<CudaStream>, target: *mut u8, len: usize) -> Result<SharedFence, CopyFailure> {
        // SAFETY: the caller's promise.
        unsafe { CopySource::<CudaStream>::fetch(self, stream, target, len) }
    }
}

// SAFETY: the mark stands behind all work enqueued so far (mark D1).
unsafe impl CopyStream for CudaStream {
    fn mark(&self) -> Result<SharedFence> {
        let nothing_waits = || (0, SyncOnDrop::Record(None));
        let marked = marked(self, 0, FencePurpose::Pool(FenceKind::Event), false, nothing_waits, |_| Ok(()));
        marked.map_err(|failure| match failure {
            CopyFailure::Refused(error) | CopyFailure::Unknown(error) => Error::device(error.to_string()),
        })
    }
}

// SAFETY: as the one above, to which it goes.
unsafe impl CopyStream for Arc<CudaStream> {
    fn mark(&self) -> Result<SharedFence> {
        CopyStream::mark(&**self)
    }
}

/// Where the device of this context sees page-locked memory.
pub(crate) fn mapped_address(context: &Arc<CudaContext>, start: *const u8, len: usize) -> Result<u64> {
    let failed = |call, error| Error::copy(len, said(call, error));
    let _current = Home::of(context).enter().map_err(|error| failed("cuCtxSetCurrent", error))?;
    let mut address: sys::CUdeviceptr = 0;
    let room = &raw mut address;
    // SAFETY: room for an address; the driver looks the pointer up and reads nothing behind it.
    match unsafe { sys::cuMemHostGetDevicePointer_v2(room, start.cast_mut().cast(), 0) }.result() {
        Ok(()) => Ok(address),
        // It knows what was allocated or registered, but no virtual memory.
        Err(DriverError(sys::CUresult::CUDA_ERROR_INVALID_VALUE)) => {
            let attribute = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_POINTER;
            // SAFETY: as above; the value of this attribute is an address.
            unsafe { sys::cuPointerGetAttribute(room.cast(), attribute, start as sys::CUdeviceptr) }
                .result()
                .map_err(|error| failed("cuPointerGetAttribute", error))?;
            Ok(address)
        }
        Err(error) => Err(failed("cuMemHostGetDevicePointer", error)),
    }
}

/// An error that somebody left in the context object, kept out of the way.
struct SetAside<'a> {
    context: &'a CudaContext,
    error: Result<(), DriverError>,
}

impl<'a> SetAside<'a> {
    fn take(context: &'a CudaContext) -> Self {
        Self { context, error: context.check_err() }
    }
}

impl Drop for SetAside<'_> {
    fn drop(&mut self) {
        if self.error.is_err() {
            self.context.record_err(self.error);
        }
    }
}

/// Has a copy enqueued on the stream, behind what `wait` puts there, with a mark behind it.
fn marked<'a>(
    stream: &CudaStream,
    len: usize,
    purpose: FencePurpose,
    may_wait: bool,
    wait: impl FnOnce() -> (sys::CUdeviceptr, SyncOnDrop<'a>),
    copy: impl FnOnce(sys::CUdeviceptr) -> Result<(), (&'static str, DriverError)>,
) -> Result<Arc<dyn Fence>, CopyFailure> {
    let _set_aside = SetAside::take(stream.context());
    let refused = |call, error| {
        let is_of_device = !(is_about_arguments(error) || is_about_captures_or_memory(error));
        let said = said(call, error);
        CopyFailure::Refused(if is_of_device { Error::device(said) } else { Error::copy(len, said) })
    };
    let unknown = |call, error| CopyFailure::Unknown(Error::device(said(call, error)));
    let refuse_capturing = || match is_capturing(stream) {
        Ok(false) => Ok(()),
        Ok(true) => Err(CopyFailure::Refused(Error::copy(len, CAPTURING))),
        Err(error) => Err(refused("cuStreamIsCapturing", error)),
    };
    let home = Home::of(stream.context());
    let _current = home.enter().map_err(|error| refused("cuCtxSetCurrent", error))?;
    // Whatever can be refused is asked for before the copy.
    let mark = Mark::new(stream, home).map_err(|error| refused("cuEventCreate", error))?;
    if may_wait {
        refuse_capturing()?;
    }
    let (address, note) = wait();
    let waited = stream.context().check_err().map_err(|error| refused("cuStreamWaitEvent", error));
    if let Err(refusal) = waited.and_then(|()| refuse_capturing()) {
        // Nothing uses the memory, so there is nothing to note, least of all in somebody's graph.
        std::mem::forget(note);
        return Err(refusal);
    }
    let id = if purpose == FencePurpose::Pool(FenceKind::Event) { None } else { stream_id::id(stream, home) };
    copy(address).map_err(|(call, error)| match is_about_arguments(error) {
        true => refused(call, error),
        false => unknown(call, error),
    })?;
    // The memory notes our use of it, before the mark, so that the mark is the last of this copy's work. An error of that
    // note is for the memory's next user, and stays in the context for him.
    drop(note);
    if let (FencePurpose::Pool(FenceKind::Timeline), Some(id)) = (purpose, id)
        && let Ok(Some(reached)) = home.count(stream, id)
    {
        return Ok(Arc::new(reached));
    }
    let mark = mark.record(stream, id).map_err(|error| unknown("cuEventRecord", error))?;
    Ok(Arc::new(mark))
}

fn is_capturing(stream: &CudaStream) -> Result<bool, DriverError> {
    // SAFETY: the stream is alive.
    let status = unsafe { result::stream::is_capturing(stream.cu_stream()) }?;
    Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

/// Errors that a copy call gives before it enqueues anything. All others may be left over from earlier work.
fn is_about_arguments(error: DriverError) -> bool {
    use sys::CUresult::{
        CUDA_ERROR_DEINITIALIZED, CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_VALUE,
        CUDA_ERROR_NOT_INITIALIZED,
    };
    matches!(
        error.0,
        CUDA_ERROR_DEINITIALIZED
            | CUDA_ERROR_INVALID_CONTEXT
            | CUDA_ERROR_INVALID_HANDLE
            | CUDA_ERROR_INVALID_VALUE
            | CUDA_ERROR_NOT_INITIALIZED
    )
}

/// Errors after which the device goes on: those of captures, 900 to 999, and no memory for an event.
fn is_about_captures_or_memory(error: DriverError) -> bool {
    error.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY || (900..999).contains(&driver::error_code(error))
}

fn said(call: &str, error: DriverError) -> String {
    format!("{call} failed: {} (code {})", driver::error_name(error), driver::error_code(error))
}
