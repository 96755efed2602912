//! Copies on a CUDA stream of cudarc.
//!
//! ```text
//!   others' errors set aside ─▶ capturing? ─▶ mark ready ─▶ device memory waits its turn ─▶ copy ─▶ marked ─▶ errors back
//!                                refused       refused        refused               refused / unknown   unknown
//! ```
//!
//! *Refused* means that nothing uses the buffer; *unknown* that something may, for ever.
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
//! | `mark.rs` | an event as a fence |
//! | `timeline.rs`, `sequence.rs` | a word that the stream counts up as a fence |
//! | `loan.rs` | copies that cudarc makes of a buffer by itself (`HostSlice`) |
//! | `raw.rs` | device memory of other frameworks |
//!
//! A stream of another framework is wrapped by cudarc: `context.wrap_borrowed_stream(handle)`.
#![allow(unsafe_code)] // Calls the driver.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DevicePtr, DevicePtrMut, DriverError, result, sys};

use self::home::Home;
use self::mark::Mark;
use super::{CopyFailure, CopySource, CopyStream, CopyTarget};
use crate::config::FenceKind;
use crate::driver;
use crate::error::{Error, Result};
use crate::in_flight::{Fence, SharedFence};

mod home;
mod loan;
mod mark;
mod raw;
mod sequence;
mod timeline;

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
        kind: FenceKind,
    ) -> Result<SharedFence, CopyFailure> {
        marked(stream, len, kind, || {
            let (address, tracking) = self.device_ptr_mut(stream);
            stream.context().check_err().map_err(|error| (Step::Wait, error))?;
            // SAFETY: the caller promises the source, the target its address; `len` bytes fit (`CopyTarget::enqueue`).
            let copied = unsafe { sys::cuMemcpyHtoDAsync_v2(address, source.cast(), len, stream.cu_stream()) };
            copied.result().map_err(|error| (Step::Copy("cuMemcpyHtoDAsync"), error))?;
            // The target notes our use of it, before the mark, so that the mark is the last of this copy's work. An error
            // of that note is for the target's next user, and stays in the context for him.
            drop(tracking);
            Ok(())
        })
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
        kind: FenceKind,
    ) -> Result<SharedFence, CopyFailure> {
        // SAFETY: the caller's promise.
        unsafe { CopyTarget::<CudaStream>::enqueue(self, stream, source, len, kind) }
    }
}

// SAFETY: as for `CopyTarget`, in the other direction.
unsafe impl<T: DevicePtr<u8>> CopySource<CudaStream> for T {
    fn available_bytes(&self) -> usize {
        self.len()
    }

    unsafe fn fetch(&self, stream: &CudaStream, target: *mut u8, len: usize) -> Result<SharedFence, CopyFailure> {
        marked(stream, len, FenceKind::Event, || {
            let (address, tracking) = self.device_ptr(stream);
            stream.context().check_err().map_err(|error| (Step::Wait, error))?;
            // SAFETY: the caller promises the target, the source its address; it has `len` bytes (`CopySource::fetch`).
            let copied = unsafe { sys::cuMemcpyDtoHAsync_v2(target.cast(), address, len, stream.cu_stream()) };
            copied.result().map_err(|error| (Step::Copy("cuMemcpyDtoHAsync"), error))?;
            drop(tracking);
            Ok(())
        })
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
        marked(self, 0, FenceKind::Event, || Ok(())).map_err(|failure| match failure {
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

/// A fence for what an event of the user's stands for now: he may record it again or destroy it.
pub(crate) fn mark_behind(event: &CudaEvent) -> Result<SharedFence> {
    let failed = |call, error| Error::device(said(call, error));
    let home = Home::of(event.context());
    let _current = home.enter().map_err(|error| failed("cuCtxSetCurrent", error))?;
    // A stream of our own waits for the event, and our mark stands behind that wait.
    let stream = &home.own().map_err(|error| failed("cuStreamCreate", error))?.stream;
    let mark = Mark::new(stream, home).map_err(|error| failed("cuEventCreate", error))?;
    let wait = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
    // SAFETY: both are alive.
    unsafe { result::stream::wait_event(stream.cu_stream(), event.cu_event(), wait) }
        .map_err(|error| failed("cuStreamWaitEvent", error))?;
    mark.record(stream).map_err(|error| failed("cuEventRecord", error))?;
    Ok(Arc::new(mark))
}

/// Where the device of this context sees page-locked memory.
pub(crate) fn mapped_address(context: &Arc<CudaContext>, start: *const u8, len: usize) -> Result<u64> {
    let failed = |call, error| Error::copy(len, said(call, error));
    let _current = Home::of(context).enter().map_err(|error| failed("cuCtxSetCurrent", error))?;
    let mut address = 0;
    // SAFETY: room for an address; the driver looks the pointer up and reads nothing behind it.
    unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut address, start.cast_mut().cast(), 0) }
        .result()
        .map_err(|error| failed("cuMemHostGetDevicePointer", error))?;
    Ok(address)
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

/// Where a copy failed.
enum Step {
    Wait,
    Copy(&'static str),
}

/// Has `work` enqueued on the stream, with a mark behind it.
fn marked(
    stream: &CudaStream,
    len: usize,
    kind: FenceKind,
    work: impl FnOnce() -> Result<(), (Step, DriverError)>,
) -> Result<Arc<dyn Fence>, CopyFailure> {
    let _set_aside = SetAside::take(stream.context());
    let refused = |call, error| CopyFailure::Refused(Error::copy(len, said(call, error)));
    let unknown = |call, error| CopyFailure::Unknown(Error::device(said(call, error)));
    let home = Home::of(stream.context());
    let _current = home.enter().map_err(|error| refused("cuCtxSetCurrent", error))?;
    if is_capturing(stream).map_err(|error| refused("cuStreamIsCapturing", error))? {
        return Err(CopyFailure::Refused(Error::copy(len, CAPTURING)));
    }
    // Whatever can be refused is asked for before the work.
    let mark = Mark::new(stream, home).map_err(|error| refused("cuEventCreate", error))?;
    work().map_err(|(step, error)| match step {
        Step::Wait => refused("cuStreamWaitEvent", error),
        Step::Copy(call) if is_about_arguments(error) => refused(call, error),
        Step::Copy(call) => unknown(call, error),
    })?;
    if kind == FenceKind::Timeline
        && let Ok(Some(reached)) = home.count(stream)
    {
        return Ok(Arc::new(reached));
    }
    mark.record(stream).map_err(|error| unknown("cuEventRecord", error))?;
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

fn said(call: &str, error: DriverError) -> String {
    format!("{call} failed: {} (code {})", driver::words(error), driver::code(error))
}
