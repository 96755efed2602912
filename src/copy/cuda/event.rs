//! Events as fences: one owned by pinpool, recorded after the work on a stream, or one that waits for an event of other code.
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
//! query fails or if it was recorded in a capture: the internal stream would become part of that graph.
//!
//! **event-I1**: the event of an [`EventFence`] was recorded after the work, or after the wait for it.
#![allow(unsafe_code)] // Calls the driver.

use std::sync::Arc;

use cudarc::driver::{CudaEvent, sys};

use super::context::{ContextState, Event};
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
    pub(super) answer: FinalStatus,
    /// For a foreign event: the internal stream that waits for it. It lives as long as the fence, so that no other stream has its
    /// number meanwhile.
    waiting_stream: Option<OwnStream>,
}

impl EventFence {
    /// With an event not yet recorded, for a stream with this id if it is known. The stream's context is current.
    pub(super) fn new(stream_id: Option<StreamId>, context: &'static ContextState) -> Result<Self, FailedCall> {
        Ok(Self::of(calls::event_create(calls::WITHOUT_TIMING)?, stream_id, context))
    }

    /// With an event of this context, which the fence destroys.
    pub(super) fn of(event: sys::CUevent, stream_id: Option<StreamId>, context: &'static ContextState) -> Self {
        Self { event: Handle(event), stream_id, context, answer: FinalStatus::default(), waiting_stream: None }
    }

    /// Records the event after all work so far on the stream.
    pub(super) fn record(&self, stream: sys::CUstream) -> Result<(), FailedCall> {
        // SAFETY: both are alive, and of one context.
        unsafe { calls::event_record(self.event.0, stream) }
    }
}

impl Drop for EventFence {
    fn drop(&mut self) {
        // A sweep may run on any thread, and destroying may need the context. Handles of a context that has ended are gone.
        let Ok(_current) = self.context.enter() else { return };
        if let Some(stream) = self.waiting_stream.take() {
            // SAFETY: created for this fence, destroyed once; the driver keeps it until its work has completed.
            let _gone = unsafe { calls::stream_destroy(stream.0) };
        }
        // After a permanent error the handle may be invalid or belong to another object, so it is not used again.
        if !self.answer.is_refused() {
            // SAFETY: created for this fence, destroyed once. Destroying never waits, and an error would only mean that the
            // device is gone, and the event with it.
            let _gone = unsafe { calls::event_destroy(self.event.0) };
        }
    }
}

// SAFETY: event-I1: the event is recorded once. Events of one stream complete in order, and one id is one stream (`id_number`).
unsafe impl Fence for EventFence {
    fn is_complete(&self) -> Result<bool> {
        self.answer.or_query(|| self.context.is_complete(self.event))
    }

    fn wait(&self) -> Result<()> {
        self.answer.or_wait(|| self.context.wait_for(self.event))
    }

    fn stream_id(&self) -> Option<StreamId> {
        self.stream_id
    }
}

/// A fence after all work before the last record of `event`; `None` if that has completed.
pub(crate) fn fence_after_event(event: &CudaEvent) -> Result<Option<SharedFence>> {
    let context = ContextState::for_context(event.context())?;
    // SAFETY: the event lives as long as its owner.
    unsafe { after_event(event.cu_event(), context) }
}

/// A fence after all work before the last record of `event`, on a stream of `context` that waits for it; `None` if that is
/// complete. If the driver refuses that, this call waits for the event.
///
/// # Safety
///
/// The event is alive.
pub(super) unsafe fn after_event(event: sys::CUevent, context: &'static ContextState) -> Result<Option<SharedFence>> {
    // If the query fails, the event is not waited for: it may have been recorded in a capture, which a wait would invalidate.
    if context.query_now(Handle(event))? {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    let fence = unsafe { waiting_fence(event, context) };
    fence.or_else(|error| context.wait_for(Handle(event)).map(|()| None).map_err(|_| error))
}

/// A fence on an internal stream that waits for the event.
///
/// # Safety
///
/// The event is alive, and of no capture.
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
