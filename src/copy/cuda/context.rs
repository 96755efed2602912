//! What the copies of one context share: idle events and streams, and timelines.
//!
//! | kept | why |
//! | --- | --- |
//! | idle events | a copy creates and destroys none |
//! | idle streams | waiting for an event of other code creates and destroys none |
//! | [`Words`] | what streams write |
//! | [`ContextWaits`] | waits for work without a fence |
//! | [`OwnContext`] | slices are lent to cudarc by it |
//!
//! **context-I1**: a `ContextState` is never freed, so its address identifies only this context. It holds a reference to a
//! context object, or to a primary context, so that this ends only by a reset of its device. Fences may be queried after
//! everything else is gone.
//!
//! **context-I2**: events and streams of a state are used only while its context is there. A reset ends the context with
//! all of them, and the next context of the device may have its handle, but never its number: every use of the state asks for
//! the number first. A driver without numbers (before CUDA 12.0) cannot be asked.
#![allow(unsafe_code)] // Calls the driver.

use std::cell::Cell;
use std::fmt;
use std::ptr;
use std::sync::{Arc, OnceLock};

use crossbeam::queue::ArrayQueue;
use cudarc::driver::{CudaContext, sys};

use super::idle::{ContextWaits, StreamContext};
use super::own_context::OwnContext;
use super::stream::{OwnStream, Stream, id, number};
use super::timeline::{Timeline, Words};
use crate::driver::code::Code;
use crate::driver::{self, CurrentContext, RelaxedCapture, calls, driver_watchdog};
use crate::error::Result;
use crate::in_flight::StreamId;
use pinpool_os::fork::OfProcess;
use pinpool_os::sync::plain::Mutex;

/// More idle events and streams than these are destroyed.
const SPARE_EVENTS: usize = 1024;
const SPARE_STREAMS: usize = 16;
static CONTEXTS: OfProcess<Mutex<Vec<&'static ContextState>>> = OfProcess::new(Mutex::default);

std::thread_local! {
    /// The one that this thread used last.
    static LAST: Cell<Option<&'static ContextState>> = const { Cell::new(None) };
}

/// What the copies of one context share.
pub(super) struct ContextState {
    context: Handle,
    /// Keeps the context for as long as this lives; `None` if it was found by its handle alone.
    _object: Option<Arc<CudaContext>>,
    device: sys::CUdevice,
    /// `None` if the driver has no numbers.
    id: Option<u64>,
    spare_events: ArrayQueue<Event>,
    spare_streams: ArrayQueue<OwnStream>,
    idle_stream: OnceLock<OwnStream>,
    own: OnceLock<OwnContext>,
    words: Words,
    waits: ContextWaits,
}

impl fmt::Debug for ContextState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ContextState").field("context", &self.context.0).finish_non_exhaustive()
    }
}

/// A context handle.
#[derive(Debug, Clone, Copy)]
struct Handle(sys::CUcontext);

// SAFETY: a context handle may be used from any thread (CUDA driver API).
unsafe impl Send for Handle {}
// SAFETY: as above; the handle itself is never written to.
unsafe impl Sync for Handle {}

/// An event handle.
#[derive(Debug, Clone, Copy)]
pub(super) struct Event(pub(super) sys::CUevent);

// SAFETY: an event handle may be used from any thread (CUDA driver API).
unsafe impl Send for Event {}
// SAFETY: as above; the handle itself is never written to.
unsafe impl Sync for Event {}

impl ContextState {
    /// The state of a context, made at the first call; the code of `cuCtxGetId` if that is refused.
    pub(super) fn of(context: &Arc<CudaContext>) -> Result<&'static Self, Code> {
        match Self::known(context.cu_ctx()) {
            Some(state) => Ok(state),
            None => Self::made(context.cu_ctx(), context.cu_device(), Some(context.clone())),
        }
    }

    /// The state of the context with this handle, and after a failure the call that failed.
    ///
    /// # Safety
    ///
    /// The context is alive, and is not destroyed while copies through its state run.
    pub(super) unsafe fn of_handle(handle: sys::CUcontext) -> Result<&'static Self, (&'static str, Code)> {
        if let Some(state) = Self::known(handle) {
            return Ok(state);
        }
        let _relaxed = RelaxedCapture::enter();
        // SAFETY: the caller's promise.
        let _current = unsafe { CurrentContext::enter(handle) }.map_err(|error| ("cuCtxSetCurrent", error))?;
        let device = calls::current_device().map_err(|error| ("cuCtxGetDevice", error))?;
        keep_if_primary(device, handle).map_err(|error| ("cuDevicePrimaryCtxRetain", error))?;
        Self::made(handle, device, None).map_err(|error| ("cuCtxGetId", error))
    }

    /// The state of the context with this handle, if there is one.
    fn known(handle: sys::CUcontext) -> Option<&'static Self> {
        let is_it = |state: &&'static Self| state.is_of(handle);
        if let Some(state) = LAST.try_with(Cell::get).ok().flatten().filter(is_it) {
            return Some(state);
        }
        // The latest first: it is the one where the driver does not tell.
        let state = CONTEXTS.get().lock().iter().rev().copied().find(is_it)?;
        // A thread that is ending has no thread-local left, and searches each time.
        let _ = LAST.try_with(|last| last.set(Some(state)));
        Some(state)
    }

    /// The state of the context with this handle: another thread may have made it meanwhile.
    fn made(
        handle: sys::CUcontext,
        device: sys::CUdevice,
        object: Option<Arc<CudaContext>>,
    ) -> Result<&'static Self, Code> {
        // A state without a known number would also be mistaken for the state of the next context.
        let id = number_of(handle).transpose()?;
        let mut states = CONTEXTS.get().lock();
        let is_it = |state: &&'static Self| state.is_of(handle);
        let state = states.iter().rev().copied().find(is_it).unwrap_or_else(|| {
            let state: &'static Self = Box::leak(Box::new(Self {
                context: Handle(handle),
                _object: object,
                device,
                id,
                spare_events: ArrayQueue::new(SPARE_EVENTS),
                spare_streams: ArrayQueue::new(SPARE_STREAMS),
                idle_stream: OnceLock::new(),
                own: OnceLock::new(),
                words: Words::default(),
                waits: ContextWaits::default(),
            }));
            states.push(state);
            state
        });
        let _ = LAST.try_with(|last| last.set(Some(state)));
        Ok(state)
    }

    /// The device's ordinal.
    pub(super) fn device(&self) -> usize {
        usize::try_from(self.device).unwrap_or_default()
    }

    /// A stream of ours as code for all streams takes it.
    pub(super) fn stream(&self, stream: OwnStream) -> Stream {
        Stream::new(stream.handle(), self.context.0, self.device())
    }

    /// Whether this is the state of the context that has this handle now. One of a context that ended without a successor
    /// counts, so that a program which continues to use it does not make a state at each call: those calls fail.
    fn is_of(&self, handle: sys::CUcontext) -> bool {
        let is_other = || matches!((self.id, number_of(handle)), (Some(id), Some(Ok(now))) if now != id);
        self.context.0 == handle && !is_other()
    }

    /// Fails if the context has ended (context-I2).
    pub(super) fn check(&self) -> Result<(), Code> {
        match (self.id, number_of(self.context.0)) {
            (None, _) | (_, None) => Ok(()),
            (Some(id), Some(Ok(now))) if now == id => Ok(()),
            // If it cannot be determined, nothing of the state is used.
            (_, Some(Err(code))) if !code.is_of_ended_context() => Err(code),
            _ => Err(Code::CONTEXT_IS_DESTROYED),
        }
    }

    /// The state of a context, which is current on this thread until the guard is dropped. One call of the driver if it was current
    /// before, and used by this thread last.
    pub(super) fn enter_of(context: &Arc<CudaContext>) -> Result<(&'static Self, CurrentContext), Code> {
        if let Some(state) = LAST.try_with(Cell::get).ok().flatten().filter(|state| state.context.0 == context.cu_ctx())
            && let Some(id) = state.id
            // The context that is current: it has this number, so it is alive, and has this handle.
            && driver::context_id(ptr::null_mut()) == Some(Ok(id))
        {
            return Ok((state, CurrentContext::unchanged()));
        }
        let state = Self::of(context)?;
        state.enter().map(|current| (state, current))
    }

    /// Makes the context current on this thread until the guard is dropped. Fails if it has ended.
    pub(super) fn enter(&self) -> Result<CurrentContext, Code> {
        self.check()?;
        // SAFETY: context-I1.
        unsafe { CurrentContext::enter(self.context.0) }
    }

    /// The identity of a stream of this context; the context is current.
    pub(super) fn stream_id(&'static self, stream: Stream) -> Option<StreamId> {
        id(stream, ptr::from_ref(self).addr())
    }

    /// An event with no other user; an earlier record of it has no meaning any more. The context is current.
    pub(super) fn take_event(&self) -> Result<Event, Code> {
        match self.spare_events.pop() {
            Some(event) => Ok(event),
            None => calls::event_create().map(Event),
        }
    }

    /// Takes an event back that no fence uses any more.
    pub(super) fn put_event(&self, event: Event) {
        if let Err(Event(event)) = self.spare_events.push(event) {
            // A sweep may run on any thread, and destroying may need the context. An event of a context that has ended is gone.
            let Ok(_current) = self.enter() else { return };
            // SAFETY: created by `take_event`, destroyed once. Destroying never waits, and an error would only mean that
            // the device is gone, and the event with it.
            let _gone = unsafe { calls::event_destroy(event) };
        }
    }

    /// A stream of our own with no work on it. The context is current.
    pub(super) fn take_stream(&self) -> Result<OwnStream, Code> {
        self.spare_streams.pop().map_or_else(OwnStream::new, Ok)
    }

    /// Takes a stream back. It is kept if it has no work left; otherwise the driver destroys it when its work is over.
    pub(super) fn put_stream(&self, stream: OwnStream, is_idle: bool) {
        let left = if is_idle { self.spare_streams.push(stream).err() } else { Some(stream) };
        if let Some(stream) = left
            // A stream of a context that has ended is gone.
            && let Ok(_current) = self.enter()
        {
            // SAFETY: created by `take_stream`, destroyed once.
            unsafe { stream.destroy() };
        }
    }

    /// Is the event over? A stalled driver is not queried.
    fn query(&self, event: Event) -> Result<bool, Code> {
        driver_watchdog::ask(|| self.query_now(event)).unwrap_or(Ok(false))
    }

    /// Is the event over? Also queries a stalled driver.
    pub(super) fn query_now(&self, event: Event) -> Result<bool, Code> {
        // SAFETY: a live event (context-I2).
        StreamContext::query(self, &|| unsafe { calls::event_query(event.0) })
    }

    /// Is the event of a fence over? If a capture forbids the query, it is not known to be.
    pub(super) fn is_over(&self, event: Event) -> Result<bool, Code> {
        self.query(event).or_else(|error| match error.is_forbidden_by_capture() {
            true => Ok(false),
            false => Err(error),
        })
    }

    /// Waits until the event is over.
    pub(super) fn wait_for(&self, event: Event) -> Result<()> {
        // SAFETY: an event of a live fence.
        self.wait_by("cuEventSynchronize", &|| unsafe { calls::event_synchronize(event.0) })
    }

    /// The timeline of the stream with this id; `None` if an event has to do. The context is current.
    pub(super) fn timeline(&'static self, stream: Stream, id: StreamId) -> Option<&'static Timeline> {
        self.words.timeline(id, number(stream), self)
    }

    /// The context object of our own.
    pub(super) fn own(&self) -> Result<&OwnContext, Code> {
        match self.own.get() {
            Some(own) => Ok(own),
            None => {
                let (_relaxed, _current) = (RelaxedCapture::enter(), self.enter()?);
                // SAFETY: the handle is valid (context-I1), of this device and current.
                let own = unsafe { OwnContext::new(self.device, self.context.0) }?;
                // Two threads may be here at once: then one drops its stream, once.
                Ok(self.own.get_or_init(|| own))
            }
        }
    }
}

impl StreamContext for ContextState {
    fn check(&self) -> Result<(), Code> {
        Self::check(self)
    }

    fn enter(&self) -> Result<CurrentContext, Code> {
        Self::enter(self)
    }

    fn waits(&self) -> &ContextWaits {
        &self.waits
    }

    fn idle_stream(&self) -> Result<OwnStream, Code> {
        if let Some(stream) = self.idle_stream.get() {
            return Ok(*stream);
        }
        let stream = OwnStream::new()?;
        if let Err(second) = self.idle_stream.set(stream) {
            // Another thread was faster.
            // SAFETY: made above, and used by nothing.
            unsafe { second.destroy() };
        }
        Ok(self.idle_stream.get().copied().unwrap_or(stream))
    }
}

/// Takes a reference to the primary context of the device if `handle` is that one: it is never released (context-I1). A context
/// that other code has made is theirs to keep.
fn keep_if_primary(device: sys::CUdevice, handle: sys::CUcontext) -> Result<(), Code> {
    if calls::is_primary_active(device)? && calls::primary_retain(device)? != handle {
        // SAFETY: taken above, released once.
        unsafe { calls::release_primary(device) }?;
    }
    Ok(())
}

/// The number of a context; `None` if the driver has none.
fn number_of(handle: sys::CUcontext) -> Option<Result<u64, Code>> {
    // What the driver refuses once it may do the next time.
    let told = match driver::context_id(handle)? {
        Err(code) if !code.is_of_ended_context() => driver::context_id(handle)?,
        told => told,
    };
    (told != Err(Code::NOT_SUPPORTED)).then_some(told)
}
