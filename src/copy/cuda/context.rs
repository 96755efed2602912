//! What the copies of one context share: idle events and streams, timelines, and a context object of the pool's own.
//!
//! | kept | why |
//! | --- | --- |
//! | idle events | a copy creates and destroys none |
//! | idle streams | waiting for an event of other code creates and destroys none |
//! | [`Timelines`] | the words that streams increment |
//! | [`OwnContext`] | cudarc records an event only if the context object of its *stream* manages several streams and holds no error; both hold for this object, whatever the user's does |
//!
//! **context-I1**: a `ContextState` is never freed, so its address stands for this context alone. It holds a reference to a
//! context object, so that the context ends only by a reset of its device. Fences may be queried after everything else is gone.
//!
//! **context-I2**: events and streams of a state are used only while its context is there. A reset ends the context with
//! all of them, and the next context of the device may have its handle, but never its number: every use of the state asks for
//! the number first. A driver without numbers (before CUDA 12.0) cannot be asked.
#![allow(unsafe_code)] // Calls the driver.

use std::cell::Cell;
use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use crossbeam::queue::ArrayQueue;
use cudarc::driver::{CudaContext, CudaStream, DriverError, result, sys};

use super::later::{Idle, LaterFences};
use super::stream::{failed, id, number};
use super::timeline::{StreamContext, TimelineFence, Timelines};
use crate::driver::{
    self, CurrentContext, RelaxedCapture, error_code, is_forbidden_by_capture, is_of_ended_context, standstill,
};
use crate::error::{Error, Result};
use crate::in_flight::StreamId;
use pinpool_os::fork::OfProcess;
use pinpool_os::lost;
use pinpool_os::sync::plain::Mutex;

/// More idle events and streams than these are destroyed.
const SPARE_EVENTS: usize = 1024;
const SPARE_STREAMS: usize = 16;
/// Between two attempts to wait for an event while a capture forbids it.
pub(super) const CAPTURE_PAUSE: Duration = Duration::from_millis(1);

static CONTEXTS: OfProcess<Mutex<Vec<&'static ContextState>>> = OfProcess::new(Mutex::default);

std::thread_local! {
    /// The one that this thread used last.
    static LAST: Cell<Option<&'static ContextState>> = const { Cell::new(None) };
}

/// What the copies of one context share.
pub(super) struct ContextState {
    context: Arc<CudaContext>,
    /// `None` if the driver did not tell.
    id: Option<u64>,
    spare_events: ArrayQueue<Event>,
    spare_streams: ArrayQueue<Arc<CudaStream>>,
    own: OnceLock<OwnContext>,
    timelines: Timelines,
    pub(super) later: LaterFences,
}

impl fmt::Debug for ContextState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ContextState").field("context", &self.context.cu_ctx()).finish_non_exhaustive()
    }
}

/// A context object beside the user's, for the same context of the driver. Of a primary context it holds a reference of its
/// own, so that no failure while it is made can destroy the user's.
pub(super) struct OwnContext {
    /// Never dropped: that would destroy the user's context.
    pub(super) context: ManuallyDrop<Arc<CudaContext>>,
    /// The second stream that makes cudarc manage several. No work ever runs on it, so a query returns at once whether the
    /// device is well.
    idle_stream: Arc<CudaStream>,
}

/// An event handle.
#[derive(Debug, Clone, Copy)]
pub(super) struct Event(pub(super) sys::CUevent);

// SAFETY: an event handle may be used from any thread (CUDA driver API).
unsafe impl Send for Event {}
// SAFETY: as above; the handle itself is never written to.
unsafe impl Sync for Event {}

impl ContextState {
    /// The state of a context, made at the first call.
    pub(super) fn of(context: &Arc<CudaContext>) -> &'static Self {
        let is_it = |state: &&'static Self| state.is_of(context.cu_ctx());
        if let Ok(Some(state)) = LAST.try_with(Cell::get)
            && is_it(&state)
        {
            return state;
        }
        let mut states = CONTEXTS.get().lock();
        let state = states.iter().copied().find(is_it).unwrap_or_else(|| {
            let state: &'static Self = Box::leak(Box::new(Self {
                context: context.clone(),
                id: id_of(context.cu_ctx()),
                spare_events: ArrayQueue::new(SPARE_EVENTS),
                spare_streams: ArrayQueue::new(SPARE_STREAMS),
                own: OnceLock::new(),
                timelines: Timelines::default(),
                later: LaterFences::default(),
            }));
            states.push(state);
            state
        });
        // A thread that is ending has no thread-local left, and searches each time.
        let _ = LAST.try_with(|last| last.set(Some(state)));
        state
    }

    /// The state of the context with this handle, and after a failure the call that failed.
    ///
    /// # Safety
    ///
    /// The context is alive, and is not destroyed while copies through its state run.
    pub(super) unsafe fn of_handle(handle: sys::CUcontext) -> Result<&'static Self, (&'static str, DriverError)> {
        let is_it = |state: &&'static Self| state.is_of(handle);
        if let Some(state) = LAST.try_with(Cell::get).ok().flatten().filter(is_it) {
            return Ok(state);
        }
        let known = CONTEXTS.get().lock().iter().copied().find(is_it);
        if let Some(state) = known {
            return Ok(state);
        }
        let _relaxed = RelaxedCapture::enter();
        // SAFETY: the caller's promise.
        let _current = unsafe { CurrentContext::enter(handle) }.map_err(|error| ("cuCtxSetCurrent", error))?;
        let mut device = 0;
        // SAFETY: a place for the device of the context, which is current.
        let found = unsafe { sys::cuCtxGetDevice(&raw mut device) };
        found.result().map_err(|error| ("cuCtxGetDevice", error))?;
        let ordinal = usize::try_from(device).unwrap_or_default();
        // SAFETY: the caller's promise, and its own device.
        let found = unsafe { object_of(ordinal, device, handle) };
        let (context, is_primary) = found.map_err(|error| ("cuDevicePrimaryCtxRetain", error))?;
        if !is_primary {
            // Never dropped: that would destroy the context of other code.
            lost::keep(context.clone());
        }
        Ok(Self::of(&context))
    }

    /// Whether this is the state of the context that has this handle now. One of a context that ended without a successor
    /// counts, so that a program which goes on with it does not make a state at each call: those calls fail.
    fn is_of(&self, handle: sys::CUcontext) -> bool {
        let is_other = || matches!((self.id, driver::context_id(handle)), (Some(id), Some(Ok(now))) if now != id);
        self.context.cu_ctx() == handle && !is_other()
    }

    /// Fails if the context has ended (context-I2).
    pub(super) fn check(&self) -> Result<(), DriverError> {
        let is_there = match (self.id, driver::context_id(self.context.cu_ctx())) {
            (None, _) | (_, None) => true,
            (Some(id), Some(Ok(now))) => now == id,
            // Any other error may be of earlier work.
            (_, Some(Err(code))) => !is_of_ended_context(code),
        };
        if is_there { Ok(()) } else { Err(DriverError(sys::CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED)) }
    }

    /// Makes the context current on this thread until the guard is dropped. Fails if it has ended.
    pub(super) fn enter(&self) -> Result<CurrentContext, DriverError> {
        self.check()?;
        // SAFETY: context-I1.
        unsafe { CurrentContext::enter(self.context.cu_ctx()) }
    }

    /// The identity of a stream of this context; the context is current.
    pub(super) fn stream_id(&'static self, stream: &CudaStream) -> Option<StreamId> {
        id(stream, ptr::from_ref(self).addr())
    }

    /// An event with no other user; an earlier record of it has no meaning any more. The context is current.
    pub(super) fn take_event(&self) -> Result<Event, DriverError> {
        match self.spare_events.pop() {
            Some(event) => Ok(event),
            None => result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING).map(Event),
        }
    }

    /// Takes an event back that no fence uses any more.
    pub(super) fn put_event(&self, event: Event) {
        if let Err(Event(event)) = self.spare_events.push(event) {
            // A sweep may run on any thread, and destroying may need the context. An event of a context that has ended is gone.
            let Ok(_current) = self.enter() else { return };
            // SAFETY: created by `take_event`, destroyed once. Destroying never waits, and an error would only mean that
            // the device is gone, and the event with it.
            let _gone = unsafe { result::event::destroy(event) };
        }
    }

    /// A stream of our own with no work on it. The context is current.
    pub(super) fn take_stream(&self) -> Result<Arc<CudaStream>, DriverError> {
        let Some(stream) = self.spare_streams.pop() else {
            let own = self.own()?;
            // An error left in our object by an earlier copy is not this stream's.
            let _of_an_earlier_copy = own.context.check_err();
            return own.context.new_stream();
        };
        Ok(stream)
    }

    /// Takes a stream back. It is kept if it has no work left; otherwise the driver destroys it when its work is over.
    pub(super) fn put_stream(&self, stream: Arc<CudaStream>, is_idle: bool) {
        // cudarc makes the stream's context current to destroy it; this guard restores the thread's own.
        let Ok(_current) = self.enter() else {
            // Gone with its context.
            return lost::keep(stream);
        };
        let _destroyed = if is_idle { self.spare_streams.push(stream) } else { Err(stream) };
    }

    /// Is the event over? Neither an error nor "not ready" counts as yes, nor a driver that stands still. By the manual this
    /// needs no current context; where a driver asks for one, it gets one.
    pub(super) fn query(&self, event: Event) -> Result<bool, DriverError> {
        standstill::ask(|| self.query_now(event)).unwrap_or(Ok(false))
    }

    /// Is the event over? Asks as [`query`](Self::query) does, but also a driver that stands still.
    pub(super) fn query_now(&self, event: Event) -> Result<bool, DriverError> {
        let _relaxed = RelaxedCapture::enter();
        self.check()?;
        // SAFETY: a live event (context-I2).
        let mut outcome = unsafe { result::event::query(event.0) };
        if outcome == Err(DriverError(sys::CUresult::CUDA_ERROR_INVALID_CONTEXT)) {
            let _current = self.enter()?;
            // SAFETY: as above.
            outcome = unsafe { result::event::query(event.0) };
        }
        match outcome {
            Ok(()) => Ok(true),
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Is the event of a fence over? If a capture forbids the query, it is not known to be.
    pub(super) fn is_over(&self, event: Event) -> Result<bool, DriverError> {
        self.query(event).or_else(|error| match is_forbidden_by_capture(error_code(error)) {
            true => Ok(false),
            false => Err(error),
        })
    }

    /// Waits until the event is over. Unlike a query that needs a current context, which the caller may not have.
    pub(super) fn wait_for(&self, event: Event) -> Result<()> {
        let failed = |call, error| Error::device(failed(call, error));
        let _relaxed = RelaxedCapture::enter();
        let _current = self.enter().map_err(|error| failed("cuCtxSetCurrent", error))?;
        loop {
            // SAFETY: an event of a live fence.
            match unsafe { result::event::synchronize(event.0) } {
                Ok(()) => return Ok(()),
                // Until the capture ends.
                Err(error) if is_forbidden_by_capture(error_code(error)) => thread::sleep(CAPTURE_PAUSE),
                Err(error) => return Err(failed("cuEventSynchronize", error)),
            }
        }
    }

    /// Waits for all work of the context so far.
    pub(super) fn idle(&'static self) -> Idle {
        Box::new(|| self.wait_for_all())
    }

    fn wait_for_all(&self) -> Result<()> {
        let failed = |call, error| Error::device(failed(call, error));
        let _relaxed = RelaxedCapture::enter();
        let _current = self.enter().map_err(|error| failed("cuCtxSetCurrent", error))?;
        loop {
            match result::ctx::synchronize() {
                Ok(()) => return Ok(()),
                // Until the capture ends.
                Err(error) if is_forbidden_by_capture(error_code(error)) => thread::sleep(CAPTURE_PAUSE),
                Err(error) => return Err(failed("cuCtxSynchronize", error)),
            }
        }
    }

    /// A fence behind all work so far on the stream, by its timeline; `None` if an event has to do it. The context is
    /// current.
    pub(super) fn timeline_fence(
        &'static self,
        stream: &CudaStream,
        id: StreamId,
    ) -> Result<Option<TimelineFence>, DriverError> {
        if !self.timelines.are_supported() {
            return Ok(None);
        }
        // Created before any thread waits, since waiters query its idle stream (timeline-I3).
        let own = self.own()?;
        self.timelines.fence(stream, id, number(stream), (self, &own.idle_stream))
    }

    /// The context object of our own.
    pub(super) fn own(&self) -> Result<&OwnContext, DriverError> {
        match self.own.get() {
            Some(own) => Ok(own),
            None => {
                let own = self.make_own()?;
                // Two threads may be here at once: then one drops its stream, once.
                Ok(self.own.get_or_init(|| own))
            }
        }
    }

    fn make_own(&self) -> Result<OwnContext, DriverError> {
        let (_relaxed, _current) = (RelaxedCapture::enter(), self.enter()?);
        let (ordinal, device, handle) = (self.context.ordinal(), self.context.cu_device(), self.context.cu_ctx());
        // SAFETY: the handle is valid (context-I1), of this device and current; the object is never dropped.
        let (context, is_primary) = unsafe { object_of(ordinal, device, handle) }?;
        let context = ManuallyDrop::new(context);
        // The first stream of a context that tracks events makes cudarc wait for the whole device.
        // SAFETY: no device memory is ever made through this object, so none misses its events.
        unsafe { context.disable_event_tracking() };
        let idle_stream = match context.new_stream() {
            Ok(stream) => stream,
            // Dropped, it releases the primary context, which it retained; it would destroy any other.
            Err(error) if is_primary => {
                drop(ManuallyDrop::into_inner(context));
                return Err(error);
            }
            Err(error) => {
                lost::keep(context);
                return Err(error);
            }
        };
        // SAFETY: as above.
        unsafe { context.enable_event_tracking() };
        Ok(OwnContext { context, idle_stream })
    }
}

impl StreamContext for ContextState {
    fn check(&self) -> Result<(), DriverError> {
        Self::check(self)
    }

    fn enter(&self) -> Result<CurrentContext, DriverError> {
        Self::enter(self)
    }
}

/// A context object of cudarc for `handle`, and whether that is the device's primary context, of which the object then holds
/// a reference of its own. Leaves the context current.
///
/// # Safety
///
/// The context is alive, of this device and current. Unless it is primary, the object must never be dropped: that would
/// destroy it.
unsafe fn object_of(
    ordinal: usize,
    device: sys::CUdevice,
    handle: sys::CUcontext,
) -> Result<(Arc<CudaContext>, bool), DriverError> {
    // Not taken for inactive where the driver does not say: of a context that is not primary the object must never be dropped.
    let primary = if is_active(device)? { Some(CudaContext::new(ordinal)?) } else { None };
    if let Some(primary) = primary.filter(|primary| primary.cu_ctx() == handle) {
        return Ok((primary, true));
    }
    // SAFETY: the caller's promise. An error of this call would drop the object and destroy the context, but it comes only
    // where the context cannot be made current, which it is, or the device has no attributes.
    let context = unsafe { CudaContext::from_raw_context(ordinal, device, handle) }?;
    Ok((context, false))
}

/// The number of a context; `None` if the driver does not tell it.
fn id_of(handle: sys::CUcontext) -> Option<u64> {
    // What the driver refuses once it may do the next time.
    (0..2).find_map(|_| driver::context_id(handle)?.ok())
}

/// Whether the primary context of the device exists; retaining it would make it otherwise.
fn is_active(device: sys::CUdevice) -> Result<bool, DriverError> {
    let (mut flags, mut active) = (0, 0);
    // SAFETY: space for both answers.
    let asked = unsafe { sys::cuDevicePrimaryCtxGetState(device, &raw mut flags, &raw mut active) };
    asked.result().map(|()| active != 0)
}
