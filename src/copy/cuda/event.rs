//! Events as fences. Such a fence owns an event that is recorded after the work on a stream, or after a wait for an event of
//! other code.
//!
//! ```text
//!   own              stream   ──work──[own event]──▶
//!
//!   foreign  other's stream   ──work──[other's event]──▶
//!            an internal stream      └──waits──[own event]──▶
//! ```
//!
//! The owner of a foreign event may record it again or destroy it at any time, so an internal stream waits for it: one stream for
//! each event, so that a slow event delays no other. An event that has completed needs no stream. An event is refused if its
//! query fails or if it was recorded in a capture, because the internal stream would become part of that graph.
//!
//! **event-I1**: the event of an [`EventFence`] was recorded after the work, or after the wait for the foreign event.
#![allow(unsafe_code)] // Calls the driver.

use std::sync::Arc;

use cudarc::driver::{CudaEvent, sys};

use super::context::{ContextState, Event, handle_error};
use super::final_status::FinalStatus;
use super::stream::OwnStream;
use crate::driver::code::FailedCall;
use crate::driver::{Handle, RelaxedCapture, calls};
use crate::error::Result;
use crate::in_flight::{Fence, SharedFence, StreamId};

/// An event owned by pinpool.
#[derive(Debug)]
pub(super) struct EventFence {
    pub(super) event: Event,
    stream_id: Option<StreamId>,
    pub(super) context: &'static ContextState,
    pub(super) final_status: FinalStatus,
    /// The internal stream that waits for a foreign event. It exists as long as the fence, which destroys it.
    waiting_stream: Option<OwnStream>,
}

impl EventFence {
    /// Creates a fence with a new event, which is not recorded yet. `stream_id` is the id of its stream, if known. The stream's
    /// context must be current.
    pub(super) fn new(stream_id: Option<StreamId>, context: &'static ContextState) -> Result<Self, FailedCall> {
        Ok(Self::of(calls::event_create(calls::CU_EVENT_DISABLE_TIMING)?, stream_id, context))
    }

    /// Creates a fence with an event of this context. The fence destroys the event.
    pub(super) fn of(event: sys::CUevent, stream_id: Option<StreamId>, context: &'static ContextState) -> Self {
        Self { event: Handle(event), stream_id, context, final_status: FinalStatus::default(), waiting_stream: None }
    }

    /// Records the event after all work so far on the stream.
    pub(super) fn record(&self, stream: sys::CUstream) -> Result<(), FailedCall> {
        // SAFETY: both are alive, and belong to one context.
        unsafe { calls::event_record(self.event.0, stream) }
    }
}

impl Drop for EventFence {
    fn drop(&mut self) {
        // A sweep may drop the fence on any thread, and the calls below may need the context. If the context has ended, its
        // handles are gone.
        let Ok(_current) = self.context.enter() else { return };
        if let Some(stream) = self.waiting_stream.take() {
            // SAFETY: created for this fence, destroyed once; the driver keeps it until its work has completed.
            let _gone = unsafe { calls::stream_destroy(stream.0) };
        }
        // After a permanent error the handle may be invalid or belong to another object, so it is not used again.
        if !self.final_status.is_refused() {
            // SAFETY: created for this fence, destroyed once. Destroying never waits, and an error would only mean that the
            // device is gone, and the event with it.
            let _gone = unsafe { calls::event_destroy(self.event.0) };
        }
    }
}

// SAFETY: event-I1: the event is recorded once. Events of one stream complete in order, and an id belongs to one stream
// (`id_number`).
unsafe impl Fence for EventFence {
    fn is_complete(&self) -> Result<bool> {
        self.final_status.or_query(|| self.context.is_complete(self.event))
    }

    fn wait(&self) -> Result<()> {
        self.final_status.or_wait(|| self.context.wait_for(self.event))
    }

    fn stream_id(&self) -> Option<StreamId> {
        self.stream_id
    }
}

/// Returns a fence after all work before the last record of `event`, or `None` if that work has completed.
pub(crate) fn fence_after_event(event: &CudaEvent) -> Result<Option<SharedFence>> {
    let context = ContextState::for_context(event.context())?;
    // SAFETY: the event lives as long as its owner.
    unsafe { after_event(event.cu_event(), context) }
}

/// Returns a fence after all work before the last record of `event`, or `None` if that work has completed. The fence is on a
/// stream of `context` that waits for the event. If the driver refuses such a fence, this call waits for the event.
///
/// # Safety
///
/// The event must be alive.
pub(super) unsafe fn after_event(event: sys::CUevent, context: &'static ContextState) -> Result<Option<SharedFence>> {
    // If the query fails, the event is not waited for: it may have been recorded in a capture, which a wait would invalidate.
    if context.query_now(Handle(event)).map_err(handle_error)? {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    let fence = unsafe { waiting_fence(event, context) };
    fence.or_else(|error| context.wait_for(Handle(event)).map(|()| None).map_err(|_| error))
}

/// Returns a fence on an internal stream that waits for the event.
///
/// # Safety
///
/// The event must be alive, and not recorded in a capture.
unsafe fn waiting_fence(event: sys::CUevent, context: &'static ContextState) -> Result<Option<SharedFence>> {
    let (_relaxed, _current) = (RelaxedCapture::enter(), context.enter()?);
    let stream = OwnStream::new()?;
    let mut fence = EventFence::new(None, context)?;
    fence.waiting_stream = Some(stream);
    // SAFETY: both are alive.
    unsafe { calls::stream_wait_event(stream.0, event, 0) }?;
    fence.record(stream.0)?;
    Ok(Some(Arc::new(fence)))
}
