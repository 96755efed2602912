//! Events as fences: one of ours recorded behind the work on a stream, or one that waits for an event of other code.
//!
//! ```text
//!   own              stream   ──work──[our event]──▶
//!
//!   foreign  other's stream   ──work──[other's event]──▶
//!            one of our streams      └──waits──[our event]──▶
//! ```
//!
//! The owner of a foreign event may record it again or destroy it at any time, so a stream of ours waits for it, one for
//! each event, so that a slow one delays no other. An event that is over needs no stream. One whose query fails is refused,
//! and so is one recorded in a capture: our stream would become part of that graph.
//!
//! **event-I1**: the event of an [`EventFence`] was recorded behind the work, or behind the wait for it, and not since.
#![allow(unsafe_code)] // Calls the driver.

use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaStream, DriverError, result, sys};

use super::context::{ContextState, Event};
use super::stream::{failed, number};
use crate::driver::RelaxedCapture;
use crate::error::{Error, Result};
use crate::in_flight::{Fence, SharedFence, StreamId};
use crate::sync::process::{AtomicBool, Ordering};

/// An event of ours, which the context's state gets back when this is dropped.
#[derive(Debug)]
pub(super) struct EventFence {
    event: Event,
    stream: u64,
    stream_id: Option<StreamId>,
    context: &'static ContextState,
    /// A query found it over; no further query is needed.
    is_over: AtomicBool,
    /// For a foreign event: the stream of ours that waits for it. No other work runs on it while this lives.
    waiting_stream: Option<Arc<CudaStream>>,
}

impl EventFence {
    /// With an event not yet recorded. The stream's context is current.
    pub(super) fn new(stream: &CudaStream, context: &'static ContextState) -> Result<Self, DriverError> {
        let (event, is_over) = (context.take_event()?, AtomicBool::new(false));
        Ok(Self { event, stream: number(stream), stream_id: None, context, is_over, waiting_stream: None })
    }

    /// Records the event behind all work so far on the stream, whose id is `id` if that matters to the fence's purpose.
    pub(super) fn record(mut self, stream: &CudaStream, id: Option<StreamId>) -> Result<Self, DriverError> {
        // SAFETY: both are alive, and of one context.
        unsafe { result::event::record(self.event.0, stream.cu_stream()) }?;
        self.stream_id = id;
        Ok(self)
    }

    fn is_known_over(&self) -> bool {
        // Acquire, pairs with `set_over`: the device's accesses happen before the caller's next ones.
        self.is_over.load(Ordering::Acquire)
    }

    fn set_over(&self) {
        // Release: publishes that this thread saw the event.
        self.is_over.store(true, Ordering::Release);
    }
}

impl Drop for EventFence {
    fn drop(&mut self) {
        if let Some(stream) = self.waiting_stream.take() {
            self.context.put_stream(stream, self.is_known_over());
        }
        self.context.put_event(self.event);
    }
}

// SAFETY: event-I1: the event is recorded again only when this fence is gone. Events of one stream come true in order, and
// one id is one stream (`stream::id`).
unsafe impl Fence for EventFence {
    fn is_done(&self) -> Result<bool> {
        if self.is_known_over() {
            return Ok(true);
        }
        let is_over = self.context.is_over(self.event)?;
        if is_over {
            self.set_over();
        }
        Ok(is_over)
    }

    fn wait(&self) -> Result<()> {
        if !self.is_known_over() {
            self.context.wait_for(self.event)?;
            self.set_over();
        }
        Ok(())
    }

    fn stream(&self) -> u64 {
        self.stream
    }

    fn stream_id(&self) -> Option<StreamId> {
        self.stream_id
    }
}

/// A fence behind all work before the last record of `event`; `None` if that is over.
pub(crate) fn fence_behind_event(event: &CudaEvent) -> Result<Option<SharedFence>> {
    // SAFETY: the event lives as long as its owner.
    unsafe { behind_event(event.cu_event(), ContextState::of(event.context())) }
}

/// As [`fence_behind_event`], waiting in `context`.
///
/// # Safety
///
/// The event is alive.
pub(super) unsafe fn behind_event(event: sys::CUevent, context: &'static ContextState) -> Result<Option<SharedFence>> {
    let failed = |call, error| Error::device(failed(call, error));
    if context.query(Event(event)).map_err(|error| failed("cuEventQuery", error))? {
        return Ok(None);
    }
    let _relaxed = RelaxedCapture::enter();
    let _current = context.enter().map_err(|error| failed("cuCtxSetCurrent", error))?;
    let stream = context.take_stream().map_err(|error| failed("cuStreamCreate", error))?;
    let fence = EventFence::new(&stream, context).map_err(|error| failed("cuEventCreate", error))?;
    let wait = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
    // SAFETY: both are alive.
    unsafe { result::stream::wait_event(stream.cu_stream(), event, wait) }
        .map_err(|error| failed("cuStreamWaitEvent", error))?;
    let mut fence = fence.record(&stream, None).map_err(|error| failed("cuEventRecord", error))?;
    fence.waiting_stream = Some(stream);
    Ok(Some(Arc::new(fence)))
}
