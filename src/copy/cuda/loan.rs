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
//! whose context object is ours alone ([`Home::own`]). Whether the event was recorded is not believed but asked: an event
//! made with timing and never recorded has no elapsed time ("invalid handle"), one recorded has, or is "not ready".
//!
//! Invariants:
//!
//! 1. A loan's event is new, is recorded by nobody but cudarc's `SyncOnDrop`, and lives until the borrow of the buffer is
//!    over: `Uses` lets go of a loan only through `&mut`.
//! 2. Once that borrow is over, a loan without a record means that nobody knows: an error, never done.
#![allow(unsafe_code)] // Implements an unsafe interface of cudarc, and calls the driver.

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaStream, DriverError, HostSlice, SyncOnDrop, result, sys};

use super::home::Home;
use super::mark::number;
use super::{CAPTURING, SetAside, is_capturing, said};
use crate::buffer::PinnedBuf;
use crate::driver::Relaxed;
use crate::error::{Error, Result};
use crate::in_flight::{Fence, SharedFence};

/// Copies of cudarc itself from and to the buffer are tracked: a buffer dropped after
/// `stream.memcpy_htod(&buf, &mut device)` returns to its pool when the copy is over, and after
/// `stream.memcpy_dtoh(&device, &mut buf)` the bytes are there when [`as_slice`](PinnedBuf::as_slice) returns. Holds for
/// every stream, whether or not the context tracks events.
impl HostSlice<u8> for PinnedBuf {
    fn len(&self) -> usize {
        PinnedBuf::len(self)
    }

    unsafe fn stream_synced_slice<'a>(&'a self, stream: &'a CudaStream) -> (&'a [u8], SyncOnDrop<'a>) {
        let Some(uses) = self.uses() else { return (&[], SyncOnDrop::Record(None)) };
        self.board();
        // What is being written on this very stream is there before the copy begins.
        let is_sound = uses.wait_for_writes(|other| other != number(stream));
        let loan = Loan::new(stream);
        uses.lend(loan.fence());
        // SAFETY: the loan outlives `'a` (loan 1): it is in `uses`, and letting go of it takes the buffer's `&mut`.
        let guard = unsafe { loan.guard() };
        // SAFETY: cudarc's contract: the bytes are used on `stream` only, behind what this waited for.
        let bytes = unsafe { self.bytes() };
        (if is_sound { bytes } else { &[] }, guard)
    }

    unsafe fn stream_synced_mut_slice<'a>(&'a mut self, stream: &'a CudaStream) -> (&'a mut [u8], SyncOnDrop<'a>) {
        self.board();
        let Some(uses) = self.uses_mut() else { return (&mut [], SyncOnDrop::Record(None)) };
        let is_sound = uses.wait_for_others(number(stream));
        let loan = Loan::new(stream);
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
        let untracked = |why: String| Self::Untracked(Arc::new(Untracked { stream: number(stream), why }));
        match is_capturing(stream) {
            Ok(true) => return untracked(CAPTURING.to_owned()),
            Err(error) => return untracked(said("cuStreamIsCapturing", error)),
            Ok(false) => {}
        }
        match Tracked::new(stream) {
            Ok(tracked) => Self::Tracked(Arc::new(tracked)),
            Err(error) => untracked(said("cuEventCreate", error)),
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
    home: &'static Home,
}

impl fmt::Debug for Tracked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tracked").field("stream", &self.number).finish_non_exhaustive()
    }
}

impl Tracked {
    fn new(stream: &CudaStream) -> Result<Self, DriverError> {
        let home = Home::of(stream.context());
        let _current = home.enter()?;
        let own = home.own()?;
        // Ours alone, and nobody asks it; an old one would keep the next event from its record.
        let _of_an_old_loan = own.context.check_err();
        let event = own.context.new_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT))?;
        // SAFETY: a live stream of this context; this object is used while the caller's borrow of the stream lasts.
        let stream_of_ours = unsafe { own.context.wrap_borrowed_stream(stream.cu_stream()) };
        Ok(Self { event: ManuallyDrop::new(event), stream: stream_of_ours, number: number(stream), home })
    }
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
        let _relaxed = Relaxed::enter();
        let event = self.event.cu_event();
        // SAFETY: the event lives as long as `self`.
        match unsafe { result::event::elapsed(event, event) } {
            Ok(_) => Ok(true),
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(DriverError(sys::CUresult::CUDA_ERROR_INVALID_HANDLE)) => {
                Err(Error::device("cudarc recorded no event behind its copy"))
            }
            Err(error) => Err(Error::device(said("cuEventElapsedTime", error))),
        }
    }

    fn wait(&self) -> Result<()> {
        if self.is_done()? {
            return Ok(());
        }
        let _relaxed = Relaxed::enter();
        // SAFETY: the event lives as long as `self`.
        unsafe { result::event::synchronize(self.event.cu_event()) }
            .map_err(|error| Error::device(said("cuEventSynchronize", error)))
    }

    fn stream(&self) -> u64 {
        self.number
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
