//! Fences for the copies that cudarc makes from memory that was lent to it as a `HostSlice`.
//!
//! ```text
//!   cudarc requests the slice ──▶ a fence is recorded in the ──▶ the copy ──▶ cudarc drops `SyncOnDrop`: it records the
//!                                 buffer, its event is not                   event, through an internal stream object
//! ```
//!
//! cudarc does not report when the copy is enqueued. It records an event owned by pinpool after the copy, but only if the context
//! *object* of the stream manages several streams and holds no error. Candle's usual settings violate the first condition, and
//! any failing library the second. So cudarc gets a separate stream object for the same stream, with a context object that only
//! pinpool uses ([`OwnContext`](super::own_context::OwnContext)). Whether cudarc recorded the event is checked once: the elapsed
//! time of an event with timing that was never recorded is an error ("invalid handle"), while a recorded event has an elapsed
//! time or is "not ready". This check does not show whether the event has completed: only a query does.
//!
//! Invariants:
//!
//! - **host-slice-I1**: the event of a fence is new, is recorded only by cudarc's `SyncOnDrop`, and lives until the borrow
//!   of the memory has ended: `CopyFences` lets go of a fence only through `&mut` (copy-fences-I1).
//! - **host-slice-I2**: once that borrow has ended, a fence with an unrecorded event is an error until all work of the
//!   [context](super::context_fence) has completed, because the end of the copy is unknown. If the event was recorded into a
//!   graph, so was the copy. Such a fence is an error permanently.
//! - **host-slice-I3**: a copy is waited for unless the stream's [id](super::stream::id_number) shows that the next copy follows
//!   it on the same stream.
#![allow(unsafe_code)] // Hands an event to cudarc, and calls the driver.

use std::mem::ManuallyDrop;
use std::sync::{Arc, OnceLock};

use cudarc::driver::{CudaEvent, CudaStream, SyncOnDrop, sys};

use super::context::ContextState;
use super::context_fence::{CAPTURE_PAUSE, ContextFence};
use super::event::EventFence;
use super::stream::SavedError;
use crate::copy::UnknownEnd;
use crate::driver::code::{Code, FailedCall};
use crate::driver::{Handle, RelaxedCapture, calls, with_one_retry};
use crate::error::{Error, Result};
use crate::in_flight::{Fence, SharedFence, StreamId};

/// The fence of one copy that cudarc makes.
pub(crate) struct HostSliceFence {
    /// The fence that is added to the list of the buffer.
    pub(crate) shared: SharedFence,
    tracked: Option<Arc<TrackedCopy>>,
}

impl HostSliceFence {
    /// Creates the fence for the next copy on `stream`. Fails if the driver refuses what the fence needs: the context, the
    /// capture query or a new event. A copy into a graph gets a fence that is never complete.
    pub(crate) fn new(stream: &CudaStream) -> Result<Self, FailedCall> {
        let _saved = SavedError::take(stream.context());
        Ok(match with_one_retry(|| TrackedCopy::new(stream))?.map(Arc::new) {
            Some(tracked) => Self { shared: tracked.clone(), tracked: Some(tracked) },
            None => Self { shared: Arc::new(UnknownEnd(Error::capturing_stream().to_string())), tracked: None },
        })
    }

    /// Returns the guard that cudarc drops once it has enqueued the copy.
    ///
    /// # Safety
    ///
    /// The `shared` fence must stay alive for `'a`.
    pub(crate) unsafe fn guard<'a>(self) -> SyncOnDrop<'a> {
        // SAFETY: the caller keeps another reference to the fence for `'a`.
        let tracked = self.tracked.map(|tracked| -> &'a TrackedCopy { unsafe { &*Arc::as_ptr(&tracked) } });
        SyncOnDrop::Record(tracked.map(|tracked| (&*tracked.event, &*tracked.stream)))
    }
}

#[derive(Debug)]
struct TrackedCopy {
    /// The fence with the event that cudarc records after its copy.
    fence: EventFence,
    /// The same event as an object. It is never dropped, because the fence destroys the event. The
    /// [`OwnContext`](super::own_context::OwnContext) that it refers to is never freed.
    event: ManuallyDrop<CudaEvent>,
    /// The user's stream under pinpool's context object.
    stream: Arc<CudaStream>,
    /// The fence that replaces the event if cudarc has not recorded it. Empty until the check, which takes place after the borrow.
    replacement: OnceLock<Option<ContextFence>>,
}

impl TrackedCopy {
    /// Creates the fence and the objects for the next copy on `stream`. Returns `None` if the stream is capturing. Fails if no
    /// fence can cover the copy.
    fn new(stream: &CudaStream) -> Result<Option<Self>, FailedCall> {
        let (context, _current) = ContextState::enter_of(stream.context())?;
        // SAFETY: a live stream.
        if unsafe { calls::is_capturing(stream.cu_stream()) }? {
            return Ok(None);
        }
        let own = context.own()?;
        // An error that an earlier record left in pinpool's object would keep cudarc from recording this event.
        let _of_an_earlier_copy = own.context.check_err();
        let event = ManuallyDrop::new(own.context.new_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT))?);
        let fence = EventFence::of(event.cu_event(), context.stream_id(stream.cu_stream()), context);
        // SAFETY: a live stream of this context. The object is used only while the caller's borrow of the stream lasts.
        let stream = unsafe { own.context.wrap_borrowed_stream(stream.cu_stream()) };
        Ok(Some(Self { fence, event, stream, replacement: OnceLock::new() }))
    }

    /// Returns the fence of the copy. Checks, once, whether cudarc has recorded the event. Returns `None` while a capture forbids
    /// the check. Must be called after the borrow has ended. The check needs a current context, which the caller may not have, so
    /// this function makes it current.
    fn checked_fence(&self) -> Result<Option<&dyn Fence>> {
        if self.replacement.get().is_none() {
            let (_relaxed, _current) = (RelaxedCapture::enter(), self.fence.context.enter()?);
            let (Handle(event), mut milliseconds) = (self.fence.event, 0.0);
            // SAFETY: a live event, and memory for a number.
            let replacement = match unsafe { calls::event_elapsed(&raw mut milliseconds, event, event) } {
                Ok(()) | Err(FailedCall { code: Code::NOT_READY, .. }) => None,
                Err(FailedCall { code: Code::INVALID_HANDLE, .. }) => {
                    let why = "cudarc recorded no event after its copy".to_owned();
                    Some(ContextFence::new(&self.fence.context.waits, why, false))
                }
                Err(FailedCall { code, .. }) if code.can_succeed_after_capture() => return Ok(None),
                Err(failed) => return Err(self.fence.final_status.refused(failed)),
            };
            self.replacement.get_or_init(|| replacement);
        }
        let replacement = self.replacement.get().and_then(Option::as_ref);
        Ok(Some(replacement.map_or(&self.fence, |fence| fence as &dyn Fence)))
    }
}

// SAFETY: host-slice-I1 and host-slice-I2: the fence is queried only when the borrow has ended. It is complete only once the
// event, which was recorded after the copy, has completed, or once all work of the context from before the check has completed.
unsafe impl Fence for TrackedCopy {
    fn is_complete(&self) -> Result<bool> {
        self.checked_fence()?.map_or(Ok(false), Fence::is_complete)
    }

    fn wait(&self) -> Result<()> {
        loop {
            if let Some(fence) = self.checked_fence()? {
                return fence.wait();
            }
            std::thread::sleep(CAPTURE_PAUSE);
        }
    }

    fn stream_id(&self) -> Option<StreamId> {
        self.fence.stream_id()
    }
}
