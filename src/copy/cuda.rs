//! Copies on a CUDA stream of cudarc, each with an event of its own behind it.
//!
//! ```text
//!   others' errors set aside ─▶ capturing? ─▶ event made ─▶ target waits its turn ─▶ copy ─▶ event recorded ─▶ errors back
//!                                refused       refused        refused          refused / unknown   unknown
//! ```
//!
//! *Refused* means that nothing reads the buffer; *unknown* that something may, for ever.
//!
//! cudarc keeps one error per context for calls that cannot return one, and hands it to the next call of its safe layer,
//! whosever that is. Left there, it would make the target skip its wait for earlier work (and the record of ours), so it is
//! set aside first and put back at the end, where the user's next call of cudarc finds it as before. Errors are ours only
//! between the two.
//!
//! Invariant **D1**: a [`Mark`]'s event was recorded on the copy's stream, behind the copy, and nowhere else.
#![allow(unsafe_code)] // Calls the driver.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, DevicePtrMut, DriverError, result, sys};

use super::{CopyFailure, CopyTarget};
use crate::driver::{self, Current, Relaxed};
use crate::error::{Error, Result};
use crate::in_flight::Fence;
use crate::sync::process::{AtomicU64, Ordering};

/// Handles that name a stream by what the caller is, not by what it is.
const LEGACY_BY_NAME: usize = 1;
const PER_THREAD: usize = 2;
/// Numbers of per-thread streams, above every address.
const PER_THREAD_BIT: u64 = 1 << 63;

const CAPTURING: &str = "the stream is capturing a graph, and each launch would read the buffer again after it was \
                         recycled; copy before the capture begins or after it ends, or on a stream that does not take \
                         part in it";

// SAFETY: the fence is an event recorded behind the copy (D1), and the driver answers success for an event only when all
// work before it is done. Refusals come before the copy, or from the copy call itself with an error that it gives for
// bad arguments only.
unsafe impl<T: DevicePtrMut<u8>> CopyTarget<CudaStream> for T {
    fn capacity_bytes(&self) -> usize {
        self.len()
    }

    unsafe fn enqueue(
        &mut self,
        stream: &CudaStream,
        source: *const u8,
        len: usize,
    ) -> Result<Arc<dyn Fence>, CopyFailure> {
        let _set_aside = SetAside::take(stream.context());
        // SAFETY: the caller's promise.
        unsafe { enqueue(self, stream, source, len) }
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
    ) -> Result<Arc<dyn Fence>, CopyFailure> {
        // SAFETY: the caller's promise.
        unsafe { CopyTarget::<CudaStream>::enqueue(self, stream, source, len) }
    }
}

/// An error that somebody left in the context, kept out of the way.
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

/// # Safety
///
/// As [`CopyTarget::enqueue`].
unsafe fn enqueue<T: DevicePtrMut<u8>>(
    target: &mut T,
    stream: &CudaStream,
    source: *const u8,
    len: usize,
) -> Result<Arc<dyn Fence>, CopyFailure> {
    let refused = |call, error| CopyFailure::Refused(Error::copy(len, said(call, error)));
    let unknown = |call, error| CopyFailure::Unknown(Error::device(said(call, error)));
    let context = stream.context();
    // SAFETY: the stream keeps its context.
    let _current = unsafe { Current::enter(context.cu_ctx()) }.map_err(|error| refused("cuCtxSetCurrent", error))?;
    let handle = stream.cu_stream();
    // SAFETY: the stream is alive.
    let capturing = unsafe { result::stream::is_capturing(handle) };
    if capturing.map_err(|error| refused("cuStreamIsCapturing", error))?
        != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE
    {
        return Err(CopyFailure::Refused(Error::copy(len, CAPTURING)));
    }
    let mark = Mark::new(stream).map_err(|error| refused("cuEventCreate", error))?;

    let (address, tracking) = target.device_ptr_mut(stream);
    // The target's own waits leave their errors here.
    context.check_err().map_err(|error| refused("cuStreamWaitEvent", error))?;
    // SAFETY: the caller promises the source, the target its address; `len` bytes fit (`CopyTarget::enqueue`).
    let copied = unsafe { sys::cuMemcpyHtoDAsync_v2(address, source.cast(), len, handle) }.result();
    copied.map_err(|error| match is_about_arguments(error) {
        true => refused("cuMemcpyHtoDAsync", error),
        false => unknown("cuMemcpyHtoDAsync", error),
    })?;
    // The target notes our use of it, before the mark, so that the mark is the last of this copy's work. An error of that
    // note is for the target's next user, and stays in the context for him.
    drop(tracking);
    // SAFETY: both are alive, and of one context.
    let recorded = unsafe { result::event::record(mark.event, handle) };
    recorded.map_err(|error| unknown("cuEventRecord", error))?;
    Ok(Arc::new(mark))
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

/// An event behind one copy.
#[derive(Debug)]
struct Mark {
    event: sys::CUevent,
    stream: u64,
    /// Keeps the event's context.
    _context: Arc<CudaContext>,
}

// SAFETY: an event handle may be used from any thread (CUDA driver API).
unsafe impl Send for Mark {}
// SAFETY: as above; the handle itself is never written to.
unsafe impl Sync for Mark {}

impl Mark {
    /// An event without timing, not yet recorded. The stream's context is current.
    fn new(stream: &CudaStream) -> Result<Self, DriverError> {
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)?;
        Ok(Self { event, stream: number(stream), _context: stream.context().clone() })
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        // SAFETY: created by `new`, destroyed once. Destroying never waits, and an error would only mean that the device
        // is gone, and the event with it.
        let _gone = unsafe { result::event::destroy(self.event) };
    }
}

// SAFETY: D1, and an event once seen done is never recorded again. Events of one stream come true in order. Neither an
// error nor "not ready" passes for done.
unsafe impl Fence for Mark {
    fn is_done(&self) -> Result<bool> {
        let _relaxed = Relaxed::enter();
        // SAFETY: the event lives as long as `self`.
        match unsafe { result::event::query(self.event) } {
            Ok(()) => Ok(true),
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(error) => Err(Error::device(said("cuEventQuery", error))),
        }
    }

    fn wait(&self) -> Result<()> {
        let _relaxed = Relaxed::enter();
        // SAFETY: the event lives as long as `self`.
        unsafe { result::event::synchronize(self.event) }
            .map_err(|error| Error::device(said("cuEventSynchronize", error)))
    }

    fn stream(&self) -> u64 {
        self.stream
    }
}

/// A number for the stream. A handle is an address, and so is a context's: both are above the sink's numbers, which count
/// from one. The driver keeps a destroyed stream until its work is over, so no handle recurs while a fence of it is open.
fn number(stream: &CudaStream) -> u64 {
    std::thread_local! {
        static THREAD: u64 = {
            static NEXT: AtomicU64 = AtomicU64::new(0);
            // Relaxed: only that no number is given twice matters.
            NEXT.fetch_add(1, Ordering::Relaxed)
        };
    }
    match stream.cu_stream().addr() {
        // One in each context.
        0 | LEGACY_BY_NAME => stream.context().cu_ctx().addr() as u64,
        // One in each context and thread.
        PER_THREAD => PER_THREAD_BIT | THREAD.with(|thread| thread << 8) | (stream.context().ordinal() as u64 & 0xFF),
        handle => handle as u64,
    }
}
