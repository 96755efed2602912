//! A buffer lent to cudarc: `stream.memcpy_htod(&buf, &mut device)` and all that is generic over `HostSlice`.
//!
//! ```text
//!   cudarc asks for the slice ──▶ a loan is written down ──▶ the copy ──▶ cudarc drops `SyncOnDrop`: the event is recorded
//!                                  event not yet recorded                  by cudarc, through a stream object of ours
//! ```
//!
//! cudarc says nothing when the copy is enqueued; all it does is to record an event of ours behind it, and that only if the
//! context *object* of the stream handed to it manages several streams and carries no error of anybody. Candle's usual
//! settings fail the first, any failing library the second. So it is given a stream object of our own for the same stream,
//! whose context object is ours alone ([`Home::own`]). Whether the event was recorded is not believed but asked, once: an
//! event made with timing and never recorded has no elapsed time ("invalid handle"), one recorded has, or is "not ready".
//! That is all it is asked for: whether the event is over, only a query says.
//!
//! Invariants:
//!
//! 1. A loan's event is new, is recorded by nobody but cudarc's `SyncOnDrop`, and lives until the borrow of the buffer is
//!    over: `CopyFences` lets go of a loan only through `&mut`.
//! 2. Once that borrow is over, a loan without a record means that nobody knows: an error, never done. So does a record in
//!    a graph, where the copy then is as well.
//! 3. A copy goes unwaited for only if the stream's [id](super::stream_id::id) says that the next one comes behind it.
#![allow(unsafe_code)] // Implements an unsafe interface of cudarc, and calls the driver.

use std::ffi::{c_int, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

use cudarc::driver::{CudaEvent, CudaStream, HostSlice, SyncOnDrop, sys};

use super::context::{Event, Home};
use super::stream_id::{id, number};
use super::{CAPTURING, SetAside, is_capturing, said};
use crate::buffer::PinnedBuf;
use crate::driver::{self, RelaxedCapture};
use crate::error::{Error, Result};
use crate::in_flight::{Fence, SharedFence, StreamId};
use crate::sync::process::{AtomicBool, Ordering};

/// Copies of cudarc itself from and to the buffer are tracked: a buffer dropped after
/// `stream.memcpy_htod(&buf, &mut device)` returns to its pool when the copy is over, and after
/// `stream.memcpy_dtoh(&device, &mut buf)` the bytes are there when [`as_slice`](PinnedBuf::as_slice) returns. Holds for
/// every stream, whether or not the context tracks events.
impl HostSlice<u8> for PinnedBuf {
    fn len(&self) -> usize {
        PinnedBuf::len(self)
    }

    unsafe fn stream_synced_slice<'a>(&'a self, stream: &'a CudaStream) -> (&'a [u8], SyncOnDrop<'a>) {
        // A child of `fork` has nothing to lend.
        let uses = self.uses().filter(|_| self.check_process().is_ok());
        let Some(uses) = uses else { return (&[], SyncOnDrop::Record(None)) };
        self.board();
        let loan = Loan::new(stream);
        // What is being written on this very stream is there before the copy begins (3).
        let is_sound = uses.wait_for_writes(loan.stream_id());
        uses.lend(loan.fence());
        // SAFETY: the loan outlives `'a` (loan 1): it is in `uses`, and letting go of it takes the buffer's `&mut`.
        let guard = unsafe { loan.guard() };
        // SAFETY: cudarc's contract: the bytes are used on `stream` only, behind what this waited for.
        let bytes = unsafe { self.bytes() };
        (if is_sound { bytes } else { &[] }, guard)
    }

    unsafe fn stream_synced_mut_slice<'a>(&'a mut self, stream: &'a CudaStream) -> (&'a mut [u8], SyncOnDrop<'a>) {
        // As above.
        if self.check_process().is_err() {
            return (&mut [], SyncOnDrop::Record(None));
        }
        self.board();
        let Some(uses) = self.uses_mut() else { return (&mut [], SyncOnDrop::Record(None)) };
        let loan = Loan::new(stream);
        let is_sound = uses.wait_for_others(loan.stream_id());
        uses.record_write(loan.fence());
        // SAFETY: as above.
        let guard = unsafe { loan.guard() };
        // SAFETY: as above.
        let bytes = unsafe { self.bytes_for_device() };
        (if is_sound { bytes } else { &mut [] }, guard)
    }
}

/// One copy that cudarc makes, or why nobody will know when it is over.
enum Loan {
    Tracked(Arc<Tracked>),
    Untracked(Arc<Untracked>),
}

impl Loan {
    fn new(stream: &CudaStream) -> Self {
        let _set_aside = SetAside::take(stream.context());
        match Tracked::new(stream) {
            Ok(tracked) => Self::Tracked(Arc::new(tracked)),
            Err(why) => Self::Untracked(Arc::new(Untracked { stream: number(stream), why })),
        }
    }

    fn stream_id(&self) -> Option<StreamId> {
        match self {
            Self::Tracked(tracked) => tracked.stream_id,
            Self::Untracked(_) => None,
        }
    }

    fn fence(&self) -> SharedFence {
        match self {
            Self::Tracked(tracked) => tracked.clone(),
            Self::Untracked(untracked) => untracked.clone(),
        }
    }

    /// What cudarc drops when the copy is enqueued.
    ///
    /// # Safety
    ///
    /// The fence stays alive for `'a`.
    unsafe fn guard<'a>(self) -> SyncOnDrop<'a> {
        match self {
            Self::Untracked(_) => SyncOnDrop::Record(None),
            Self::Tracked(tracked) => {
                // SAFETY: the caller keeps another reference to it for `'a`.
                let tracked: &'a Tracked = unsafe { &*Arc::as_ptr(&tracked) };
                SyncOnDrop::Record(Some((&*tracked.event, &*tracked.stream)))
            }
        }
    }
}

struct Tracked {
    /// Dropped with its context current, lest cudarc change the thread's.
    event: ManuallyDrop<CudaEvent>,
    /// The user's stream under our context object.
    stream: Arc<CudaStream>,
    number: u64,
    stream_id: Option<StreamId>,
    home: &'static Home,
    /// It was asked, and is.
    is_recorded: AtomicBool,
}

impl fmt::Debug for Tracked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tracked").field("stream", &self.number).finish_non_exhaustive()
    }
}

impl Tracked {
    fn new(stream: &CudaStream) -> Result<Self, String> {
        let home = Home::of(stream.context());
        let _current = home.enter().map_err(|error| said("cuCtxSetCurrent", error))?;
        if is_capturing(stream).map_err(|error| said("cuStreamIsCapturing", error))? {
            return Err(CAPTURING.to_owned());
        }
        let own = home.own().map_err(|error| said("cuStreamCreate", error))?;
        // Ours alone, and nobody asks it; an old one would keep the next event from its record.
        let _of_an_old_loan = own.context.check_err();
        let timed = sys::CUevent_flags::CU_EVENT_DEFAULT;
        let event = own.context.new_event(Some(timed)).map_err(|error| said("cuEventCreate", error))?;
        Ok(Self {
            event: ManuallyDrop::new(event),
            // SAFETY: a live stream of this context; the object is used while the caller's borrow of the stream lasts.
            stream: unsafe { own.context.wrap_borrowed_stream(stream.cu_stream()) },
            number: number(stream),
            stream_id: id(stream, home),
            home,
            is_recorded: AtomicBool::new(false),
        })
    }

    /// Fails if cudarc recorded nothing (2). Wants a context, and whoever asks may have none.
    fn check_recorded(&self) -> Result<()> {
        // Relaxed: once true for ever, and nothing is published by it.
        if self.is_recorded.load(Ordering::Relaxed) {
            return Ok(());
        }
        let _relaxed = RelaxedCapture::enter();
        let _current = self.home.enter().map_err(|error| Error::device(said("cuCtxSetCurrent", error)))?;
        match elapsed(&self.event) {
            Some(0 | NOT_READY) => {
                self.is_recorded.store(true, Ordering::Relaxed);
                Ok(())
            }
            Some(INVALID_HANDLE) => Err(Error::device("cudarc recorded no event behind its copy")),
            Some(code) => Err(Error::device(format!("cuEventElapsedTime failed (code {code})"))),
            None => Err(Error::device("the driver has no cuEventElapsedTime")),
        }
    }
}

const INVALID_HANDLE: c_int = sys::CUresult::CUDA_ERROR_INVALID_HANDLE as c_int;
const NOT_READY: c_int = sys::CUresult::CUDA_ERROR_NOT_READY as c_int;

/// The driver's answer to how long it is from an event to itself. Found by name: the form that bindings of CUDA 13 mean is
/// missing in older drivers, this one in none.
fn elapsed(event: &CudaEvent) -> Option<c_int> {
    type Elapsed = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> c_int;
    static ELAPSED: OnceLock<Option<Elapsed>> = OnceLock::new();
    let elapsed = (*ELAPSED.get_or_init(|| {
        let found = driver::symbol(c"cuEventElapsedTime")?;
        // SAFETY: the driver's function of this name has this type.
        Some(unsafe { std::mem::transmute::<NonNull<c_void>, Elapsed>(found) })
    }))?;
    let (mut milliseconds, event) = (0.0, event.cu_event());
    // SAFETY: a live event, and room for a number.
    Some(unsafe { elapsed(&raw mut milliseconds, event, event) })
}

impl Drop for Tracked {
    fn drop(&mut self) {
        let _current = self.home.enter();
        // SAFETY: dropped here, once.
        unsafe { ManuallyDrop::drop(&mut self.event) };
    }
}

// SAFETY: loan 1 and 2. Asked only when the borrow is over, and done only if the event was recorded, behind the copy.
unsafe impl Fence for Tracked {
    fn is_done(&self) -> Result<bool> {
        self.check_recorded()?;
        self.home.is_over(Event(self.event.cu_event()))
    }

    fn wait(&self) -> Result<()> {
        self.check_recorded()?;
        self.home.wait_for(Event(self.event.cu_event()))
    }

    fn stream(&self) -> u64 {
        self.number
    }

    fn stream_id(&self) -> Option<StreamId> {
        self.stream_id
    }
}

/// A copy that nobody can follow: its buffer is never used again.
#[derive(Debug)]
struct Untracked {
    stream: u64,
    why: String,
}

// SAFETY: never done.
unsafe impl Fence for Untracked {
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
