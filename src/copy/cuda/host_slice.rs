//! Fences of the copies that cudarc makes by itself of memory lent to it as a `HostSlice`.
//!
//! ```text
//!   cudarc asks for the slice ──▶ a fence is recorded in the ──▶ the copy ──▶ cudarc drops `SyncOnDrop`: it records the
//!                                 buffer, its event is not                   event, through a stream object of ours
//! ```
//!
//! cudarc does not tell when the copy is enqueued. It only records an event of ours behind it, and that only if the context
//! *object* of the stream handed to it manages several streams and holds no error. Candle's usual settings fail the first,
//! any failing library the second. So cudarc gets a stream object of our own for the same stream, whose context object is
//! ours alone ([`OwnContext`](super::context::OwnContext)). Whether cudarc recorded the event is checked once: an event made
//! with timing and never recorded has no elapsed time ("invalid handle"), one recorded has, or is "not ready". That is all
//! it is checked for: only a query shows whether the event is over.
//!
//! Invariants:
//!
//! - **host-slice-I1**: the event of a fence is new, is recorded only by cudarc's `SyncOnDrop`, and lives until the borrow
//!   of the memory is over: `CopyFences` lets go of a fence only through `&mut` (copy-fences-I1).
//! - **host-slice-I2**: once that borrow is over, a fence without a record is an error, never done: the end of the copy is
//!   unknown. If the event was recorded into a graph, so was the copy; that is an error too.
//! - **host-slice-I3**: a copy is not waited for only if the stream's [id](super::stream::id) shows that the next one comes
//!   behind it.
#![allow(unsafe_code)] // Hands an event to cudarc, and calls the driver.

use std::ffi::{c_int, c_void};
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

use cudarc::driver::{CudaEvent, CudaStream, DriverError, SyncOnDrop, sys};

use super::context::{CAPTURE_PAUSE, ContextState, Event};
use super::stream::{CAPTURING, SetAside, failed, is_capturing, number};
use crate::driver::{self, RelaxedCapture};
use crate::error::{Error, Result};
use crate::in_flight::{Fence, SharedFence, StreamId};
use crate::sync::process::{AtomicBool, Ordering};

/// The fence of one copy that cudarc makes.
pub(crate) struct HostSliceFence {
    /// For the list of the buffer.
    pub(crate) shared: SharedFence,
    tracked: Option<Arc<TrackedCopy>>,
}

impl HostSliceFence {
    pub(crate) fn new(stream: &CudaStream) -> Self {
        let _set_aside = SetAside::take(stream.context());
        match TrackedCopy::new(stream).map(Arc::new) {
            Ok(tracked) => Self { shared: tracked.clone(), tracked: Some(tracked) },
            Err(why) => Self { shared: Arc::new(UntrackedCopy { stream: number(stream), why }), tracked: None },
        }
    }

    /// The fence for a watcher that may query it before cudarc has recorded the event; `None` if the copy is not tracked.
    pub(crate) fn watched(&self) -> Option<SharedFence> {
        self.tracked.as_ref().map(|tracked| -> SharedFence { Arc::new(WatchedCopy(tracked.clone())) })
    }

    /// What cudarc drops when the copy is enqueued.
    ///
    /// # Safety
    ///
    /// The `shared` fence stays alive for `'a`.
    pub(crate) unsafe fn guard<'a>(self) -> SyncOnDrop<'a> {
        // SAFETY: the caller keeps another reference to it for `'a`.
        let tracked = self.tracked.map(|tracked| -> &'a TrackedCopy { unsafe { &*Arc::as_ptr(&tracked) } });
        SyncOnDrop::Record(tracked.map(|tracked| (&*tracked.event, &*tracked.stream)))
    }
}

/// Leaves an error in the stream's context object, which the next call of cudarc returns: there is no slice to lend.
pub(crate) fn refuse_host_slice(stream: &CudaStream) {
    stream.context().record_err::<()>(Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_PERMITTED)));
}

#[derive(Debug)]
struct TrackedCopy {
    /// Dropped with its context current, since cudarc would change the thread's otherwise.
    event: ManuallyDrop<CudaEvent>,
    /// The user's stream under our context object.
    stream: Arc<CudaStream>,
    number: u64,
    stream_id: Option<StreamId>,
    context: &'static ContextState,
    /// The record was checked, and is there.
    is_recorded: AtomicBool,
    /// The borrow is over, and there is no record.
    is_unrecorded: AtomicBool,
}

impl TrackedCopy {
    fn new(stream: &CudaStream) -> Result<Self, String> {
        let context = ContextState::of(stream.context());
        let _current = context.enter().map_err(|error| failed("cuCtxSetCurrent", error))?;
        if is_capturing(stream).map_err(|error| failed("cuStreamIsCapturing", error))? {
            return Err(CAPTURING.to_owned());
        }
        let own = context.own().map_err(|error| failed("cuStreamCreate", error))?;
        // An error left in our object by an earlier record would keep cudarc from recording this event.
        let _of_an_earlier_copy = own.context.check_err();
        let timed = sys::CUevent_flags::CU_EVENT_DEFAULT;
        let event = own.context.new_event(Some(timed)).map_err(|error| failed("cuEventCreate", error))?;
        Ok(Self {
            event: ManuallyDrop::new(event),
            // SAFETY: a live stream of this context; the object is used while the caller's borrow of the stream lasts.
            stream: unsafe { own.context.wrap_borrowed_stream(stream.cu_stream()) },
            number: number(stream),
            stream_id: context.stream_id(stream),
            context,
            is_recorded: AtomicBool::new(false),
            is_unrecorded: AtomicBool::new(false),
        })
    }

    /// Whether the event is known to be recorded: a capture may forbid to look. Fails if cudarc recorded nothing
    /// (host-slice-I2).
    fn check_recorded(&self) -> Result<bool> {
        if self.find_record()? == Some(false) {
            // Relaxed: as in `find_record`.
            self.is_unrecorded.store(true, Ordering::Relaxed);
            return Err(unrecorded());
        }
        // Relaxed: as in `find_record`.
        Ok(self.is_recorded.load(Ordering::Relaxed))
    }

    /// Whether cudarc has recorded the event; `None` while a capture forbids to look. Needs a current context, which the
    /// caller may not have.
    fn find_record(&self) -> Result<Option<bool>> {
        // Relaxed: set once and never cleared; no other data depends on it.
        if self.is_recorded.load(Ordering::Relaxed) {
            return Ok(Some(true));
        }
        let _relaxed = RelaxedCapture::enter();
        let _current = self.context.enter().map_err(|error| Error::device(failed("cuCtxSetCurrent", error)))?;
        match elapsed(&self.event) {
            Some(0 | NOT_READY) => {
                // Relaxed: as above.
                self.is_recorded.store(true, Ordering::Relaxed);
                Ok(Some(true))
            }
            Some(INVALID_HANDLE) => Ok(Some(false)),
            Some(code) if driver::is_forbidden_by_capture(code.into()) => Ok(None),
            Some(code) => Err(Error::device(format!("cuEventElapsedTime failed (code {code})"))),
            None => Err(Error::device("the driver has no cuEventElapsedTime")),
        }
    }
}

fn unrecorded() -> Error {
    Error::device("cudarc recorded no event behind its copy")
}

const INVALID_HANDLE: c_int = sys::CUresult::CUDA_ERROR_INVALID_HANDLE as c_int;
const NOT_READY: c_int = sys::CUresult::CUDA_ERROR_NOT_READY as c_int;

/// The driver's answer for the time from an event to itself. Found by name: older drivers lack the form that bindings of
/// CUDA 13 mean, and all have this one.
fn elapsed(event: &CudaEvent) -> Option<c_int> {
    type Elapsed = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> c_int;
    static ELAPSED: OnceLock<Option<Elapsed>> = OnceLock::new();
    let elapsed = (*ELAPSED.get_or_init(|| {
        let found = driver::symbol(c"cuEventElapsedTime")?;
        // SAFETY: the driver's function of this name has this type.
        Some(unsafe { std::mem::transmute::<NonNull<c_void>, Elapsed>(found) })
    }))?;
    let (mut milliseconds, event) = (0.0, event.cu_event());
    // SAFETY: a live event, and memory for a number.
    Some(unsafe { elapsed(&raw mut milliseconds, event, event) })
}

impl Drop for TrackedCopy {
    fn drop(&mut self) {
        let _current = self.context.enter();
        // SAFETY: dropped here, once.
        unsafe { ManuallyDrop::drop(&mut self.event) };
    }
}

// SAFETY: host-slice-I1 and host-slice-I2: queried only when the borrow is over, and done only if the event was recorded,
// behind the copy.
unsafe impl Fence for TrackedCopy {
    fn is_done(&self) -> Result<bool> {
        Ok(self.check_recorded()? && self.context.is_over(Event(self.event.cu_event()))?)
    }

    fn wait(&self) -> Result<()> {
        while !self.check_recorded()? {
            std::thread::sleep(CAPTURE_PAUSE);
        }
        self.context.wait_for(Event(self.event.cu_event()))
    }

    fn stream(&self) -> u64 {
        self.number
    }

    fn stream_id(&self) -> Option<StreamId> {
        self.stream_id
    }
}

/// A copy that cudarc may not have enqueued yet.
#[derive(Debug)]
struct WatchedCopy(Arc<TrackedCopy>);

// SAFETY: as `TrackedCopy`, except that it may be queried at any time: without a record it is not over.
unsafe impl Fence for WatchedCopy {
    fn is_done(&self) -> Result<bool> {
        // Relaxed: as in `find_record`.
        match self.0.is_unrecorded.load(Ordering::Relaxed) {
            true => Err(unrecorded()),
            false => Ok(self.0.find_record()? == Some(true) && self.0.context.is_over(Event(self.0.event.cu_event()))?),
        }
    }

    fn wait(&self) -> Result<()> {
        while !self.is_done()? {
            std::thread::yield_now();
        }
        Ok(())
    }

    fn stream(&self) -> u64 {
        self.0.number
    }
}

/// A copy whose end is unknown: its memory is never used again.
#[derive(Debug)]
struct UntrackedCopy {
    stream: u64,
    why: String,
}

// SAFETY: never done.
unsafe impl Fence for UntrackedCopy {
    fn is_done(&self) -> Result<bool> {
        Err(Error::device(self.why.clone()))
    }

    fn wait(&self) -> Result<()> {
        self.is_done().map(drop)
    }

    fn stream(&self) -> u64 {
        self.stream
    }
}
