//! What the copies of one context share: events to use again, and a context object of the pool's own.
//!
//! | kept | why |
//! | --- | --- |
//! | idle events | a copy makes and destroys none |
//! | idle streams | waiting for an event of somebody else's makes and destroys none |
//! | [`Timelines`] | words in which streams say how far they are |
//! | [`Home::own`] | cudarc records an event only if the context object of the *stream* manages several streams and carries nobody's error; of this object both are true, whatever the user's does |
//!
//! A home lives as long as the process, and its context with it: fences of a pool may be asked after everything else is
//! gone. Invariant **H1**: a home holds a reference to a context object of its context for ever, so the handle stays
//! valid and names nothing else.
#![allow(unsafe_code)] // Calls the driver.

use std::cell::Cell;
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::{Arc, OnceLock};

use crossbeam::queue::ArrayQueue;
use cudarc::driver::{CudaContext, CudaStream, DriverError, result, sys};

use super::said;
use super::timeline::Timelines;
use crate::driver::{CurrentContext, RelaxedCapture};
use crate::error::{Error, Result};
use crate::sync::plain::Mutex;

/// More idle events and streams than these are destroyed.
const SPARE_EVENTS: usize = 1024;
const SPARE_STREAMS: usize = 16;

static HOMES: Mutex<Vec<&'static Home>> = Mutex::new(Vec::new());

std::thread_local! {
    /// The one this thread used last.
    static LAST: Cell<Option<&'static Home>> = const { Cell::new(None) };
}

/// What the copies of one context share.
pub(super) struct Home {
    context: Arc<CudaContext>,
    spare_events: ArrayQueue<Event>,
    spare_streams: ArrayQueue<Arc<CudaStream>>,
    own: OnceLock<Own>,
    pub(super) timelines: Timelines,
}

impl fmt::Debug for Home {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Home").field("context", &self.context.cu_ctx()).finish_non_exhaustive()
    }
}

/// A context object beside the user's, for the same context of the driver.
pub(super) struct Own {
    /// Never dropped: that would destroy the user's context.
    pub(super) context: ManuallyDrop<Arc<CudaContext>>,
    /// The second stream that makes cudarc manage several. Nothing ever runs on it, so it answers at once how the device
    /// is.
    pub(super) stream: Arc<CudaStream>,
}

/// An event of a fence.
#[derive(Debug, Clone, Copy)]
pub(super) struct Event(pub(super) sys::CUevent);

// SAFETY: an event handle may be used from any thread (CUDA driver API).
unsafe impl Send for Event {}
// SAFETY: as above; the handle itself is never written to.
unsafe impl Sync for Event {}

impl Home {
    /// The home of a context, made at the first call.
    pub(super) fn of(context: &Arc<CudaContext>) -> &'static Self {
        let is_it = |home: &&'static Self| home.context.cu_ctx() == context.cu_ctx();
        if let Ok(Some(home)) = LAST.try_with(Cell::get)
            && is_it(&home)
        {
            return home;
        }
        let mut homes = HOMES.lock();
        let home = homes.iter().copied().find(is_it).unwrap_or_else(|| {
            let spare_events = ArrayQueue::new(SPARE_EVENTS);
            let home: &'static Self = Box::leak(Box::new(Self {
                context: context.clone(),
                spare_events,
                spare_streams: ArrayQueue::new(SPARE_STREAMS),
                own: OnceLock::new(),
                timelines: Timelines::default(),
            }));
            homes.push(home);
            home
        });
        // A thread that is ending looks each time.
        let _ = LAST.try_with(|last| last.set(Some(home)));
        home
    }

    /// Makes the context current on this thread for as long as the answer lives.
    pub(super) fn enter(&self) -> Result<CurrentContext, DriverError> {
        // SAFETY: H1.
        unsafe { CurrentContext::enter(self.context.cu_ctx()) }
    }

    /// An event that nobody else uses; what it was recorded behind before is no longer of interest. The context is
    /// current.
    pub(super) fn take_event(&self) -> Result<Event, DriverError> {
        match self.spare_events.pop() {
            Some(event) => Ok(event),
            None => result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING).map(Event),
        }
    }

    /// Gives an event back, by value: nobody asks it any more.
    pub(super) fn put_event(&self, event: Event) {
        if let Err(Event(event)) = self.spare_events.push(event) {
            // SAFETY: created by `take_event`, destroyed once. Destroying never waits, and an error would only mean that
            // the device is gone, and the event with it.
            let _gone = unsafe { result::event::destroy(event) };
        }
    }

    /// A stream of our own with nothing on it. The context is current.
    pub(super) fn take_stream(&self) -> Result<Arc<CudaStream>, DriverError> {
        self.spare_streams.pop().map_or_else(|| self.own()?.context.new_stream(), Ok)
    }

    /// Gives a stream back, which is kept if it has nothing on it. Otherwise it goes when its work is over.
    pub(super) fn put_stream(&self, stream: Arc<CudaStream>, is_idle: bool) {
        // cudarc makes the stream's context current to destroy it; the thread's own comes back with this.
        let _current = self.enter();
        let _one_too_many = if is_idle { self.spare_streams.push(stream) } else { Err(stream) };
    }

    /// Is the event over? Wants no context. Neither an error nor "not ready" passes for yes.
    pub(super) fn is_over(&self, event: Event) -> Result<bool> {
        let _relaxed = RelaxedCapture::enter();
        // SAFETY: an event of a live fence.
        match unsafe { result::event::query(event.0) } {
            Ok(()) => Ok(true),
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(error) => Err(Error::device(said("cuEventQuery", error))),
        }
    }

    /// Waits until the event is over. Unlike a question, that wants a current context, and whoever waits may have none.
    pub(super) fn wait_for(&self, event: Event) -> Result<()> {
        let failed = |call, error| Error::device(said(call, error));
        let _relaxed = RelaxedCapture::enter();
        let _current = self.enter().map_err(|error| failed("cuCtxSetCurrent", error))?;
        // SAFETY: an event of a live fence.
        unsafe { result::event::synchronize(event.0) }.map_err(|error| failed("cuEventSynchronize", error))
    }

    /// The context object of our own.
    pub(super) fn own(&self) -> Result<&Own, DriverError> {
        match self.own.get() {
            Some(own) => Ok(own),
            None => {
                let own = self.make_own()?;
                // Of two threads here at once one throws a stream away, once.
                Ok(self.own.get_or_init(|| own))
            }
        }
    }

    fn make_own(&self) -> Result<Own, DriverError> {
        let (_relaxed, _current) = (RelaxedCapture::enter(), self.enter()?);
        let (ordinal, device, handle) = (self.context.ordinal(), self.context.cu_device(), self.context.cu_ctx());
        // SAFETY: the handle is valid (H1) and of this device; the object is never dropped, so it never destroys what is
        // the user's.
        let context = ManuallyDrop::new(unsafe { CudaContext::from_raw_context(ordinal, device, handle) }?);
        // The first stream of a context that tracks events makes cudarc wait for the whole device.
        // SAFETY: no device memory is ever made through this object, so none misses its events.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream()?;
        // SAFETY: as above.
        unsafe { context.enable_event_tracking() };
        Ok(Own { context, stream })
    }
}
