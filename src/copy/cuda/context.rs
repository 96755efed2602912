//! The state that the copies of one context share: [`ContextWaits`] for queries and waits, the [`TimelinePages`] that streams
//! write, and the [`OwnContext`] by which slices are lent to cudarc.
//!
//! **context-I1**: a `ContextState` is never freed, so its address identifies only this context. It keeps a context object or a
//! primary context alive. A context that other code created is found by its handle only. The owner of such a context must keep it
//! until its copies have completed.
//!
//! **context-I2**: events and streams of a state are used only while its context exists. A reset destroys the context
//! with its events and streams. The next context of the device may have the same handle, but never the same number, so
//! every use of the state checks the number first, except with drivers without numbers (before CUDA 12.0).
#![allow(unsafe_code)] // Calls the driver.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::thread;

use cudarc::driver::{CudaContext, sys};
use smallvec::SmallVec;

use super::context_fence::{CAPTURE_PAUSE, ContextWaits};
use super::own_context::OwnContext;
use super::stream::id_number;
use super::timeline::TimelinePages;
use crate::driver::code::{Code, FailedCall};
use crate::driver::{Context, CurrentContext, Handle, RelaxedCapture, calls, watchdog, with_one_retry};
use crate::error::{Error, Result};
use crate::in_flight::StreamId;
use pinpool_os::fork::PerProcess;
use pinpool_os::sync::unmodeled::Mutex;

static CONTEXTS: PerProcess<Mutex<SmallVec<[&'static ContextState; 8]>>> = PerProcess::new(Mutex::default);

/// The state that the copies of one context share.
pub(super) struct ContextState {
    pub(super) waits: ContextWaits,
    /// Keeps the context alive as long as this state exists; `None` if the context was found by its handle alone.
    _object: Option<Arc<CudaContext>>,
    device: sys::CUdevice,
    own: OnceLock<OwnContext>,
    pub(super) pages: TimelinePages,
}

impl fmt::Debug for ContextState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ContextState").field("context", &self.waits.context).finish_non_exhaustive()
    }
}

pub(super) type Event = Handle<sys::CUevent_st>;

/// Converts the error of a call with a handle. Only these codes say that the handle is invalid, or the event part of a graph.
pub(super) fn handle_error(failed: FailedCall) -> Error {
    match failed.code {
        Code::CAPTURED_EVENT => Error::capturing_stream(),
        Code::INVALID_HANDLE | Code::INVALID_CONTEXT | Code::CONTEXT_IS_DESTROYED => Error::invalid_handle(failed),
        _ => failed.into(),
    }
}

impl ContextState {
    /// Returns the state of a context. The first call creates the state, and fails if the driver refuses `cuCtxGetId`.
    pub(super) fn for_context(context: &Arc<CudaContext>) -> Result<&'static Self, FailedCall> {
        let create = || Self::find_or_create(context.cu_ctx(), context.cu_device(), Some(context.clone()));
        Self::find(|state| state.is_of(context.cu_ctx())).map_or_else(create, Ok)
    }

    /// Returns the state of the context with this handle. Fails with the driver call that failed.
    ///
    /// # Safety
    ///
    /// The context must be alive, and must not be destroyed while copies through its state run.
    pub(super) unsafe fn for_handle(handle: sys::CUcontext) -> Result<&'static Self, FailedCall> {
        if let Some(state) = Self::find(|state| state.is_of(handle)) {
            return Ok(state);
        }
        let _relaxed = RelaxedCapture::enter();
        // SAFETY: the caller's promise.
        let _current = unsafe { CurrentContext::enter(handle) }?;
        let device = calls::current_device()?;
        keep_if_primary(device, handle)?;
        Self::find_or_create(handle, device, None)
    }

    /// Returns the latest state for which `is_wanted` returns true. After a reset, several states may have the same handle, and only
    /// the latest of them can belong to the context that has this handle now.
    fn find(is_wanted: impl Fn(&&'static Self) -> bool) -> Option<&'static Self> {
        // Outside the lock, since `is_wanted` may call the driver.
        let states = CONTEXTS.get().lock().clone();
        states.into_iter().rev().find(is_wanted)
    }

    /// Searches again under the lock, since another thread may have created the state, and creates it if there is none.
    fn find_or_create(
        handle: sys::CUcontext,
        device: sys::CUdevice,
        object: Option<Arc<CudaContext>>,
    ) -> Result<&'static Self, FailedCall> {
        // A state without a known number would also be mistaken for the state of the next context, so a failed query of the
        // number is an error. Under the lock the driver is not called: the number shows which state belongs to this context.
        let context = Context::new(handle)?;
        let mut states = CONTEXTS.get().lock();
        let is_same = |one: &&'static Self| (one.waits.context.handle(), one.waits.context.id) == (handle, context.id);
        Ok(states.iter().rev().copied().find(is_same).unwrap_or_else(|| {
            let state: &'static Self = Box::leak(Box::new(Self {
                waits: ContextWaits::new(context),
                _object: object,
                device,
                own: OnceLock::new(),
                pages: TimelinePages::default(),
            }));
            states.push(state);
            state
        }))
    }

    /// Returns the ordinal of the device.
    pub(super) fn device(&self) -> usize {
        usize::try_from(self.device).unwrap_or_default()
    }

    /// Returns whether this is the state of the context that has this handle now. The state of a context that ended without a
    /// successor counts too. Otherwise a program that continues to use the ended context would create a state at each call, and
    /// those calls fail.
    fn is_of(&self, handle: sys::CUcontext) -> bool {
        let Self { waits: ContextWaits { context, .. }, .. } = self;
        context.handle() == handle && !context.is_replaced()
    }

    /// Returns the state of a context, and makes the context current on this thread until the guard is dropped. Needs one driver
    /// call if the context is current already.
    pub(super) fn enter_of(context: &Arc<CudaContext>) -> Result<(&'static Self, CurrentContext), FailedCall> {
        let known = Self::find(|state| state.waits.context.handle() == context.cu_ctx());
        if let Some(state) = known.filter(|state| state.waits.context.is_current()) {
            return Ok((state, CurrentContext::unchanged()));
        }
        let state = Self::for_context(context)?;
        state.enter().map(|current| (state, current))
    }

    pub(super) fn enter(&self) -> Result<CurrentContext, FailedCall> {
        self.waits.enter()
    }

    /// Returns the identity of a stream of this context, which must be current; `None` if the driver has no ids or refuses.
    pub(super) fn stream_id(&self, stream: sys::CUstream) -> Option<StreamId> {
        let number = with_one_retry(|| id_number(stream)).ok()?;
        Some(self.waits.stream_id(number))
    }

    /// Returns whether the event has completed. Queries the driver even if it is stalled.
    pub(super) fn query_now(&self, event: Event) -> Result<bool, FailedCall> {
        // SAFETY: a live event (context-I2).
        self.waits.query(|| unsafe { calls::event_query(event.0) })
    }

    /// Returns whether the event of a fence has completed. Returns `false` if the driver is stalled, or if a capture forbids the
    /// query.
    pub(super) fn is_complete(&self, event: Event) -> Result<bool, FailedCall> {
        match watchdog::query(|| self.query_now(event)).unwrap_or(Ok(false)) {
            Err(FailedCall { code, .. }) if code.can_succeed_after_capture() => Ok(false),
            answer => answer,
        }
    }

    /// Waits until the event has completed. Makes the context current, because the wait may need a current context and the caller
    /// may have none.
    pub(super) fn wait_for(&self, event: Event) -> Result<()> {
        let (_relaxed, _current) = (RelaxedCapture::enter(), self.enter()?);
        loop {
            // SAFETY: an event of a live fence.
            match unsafe { calls::event_synchronize(event.0) } {
                // Repeated until the capture ends.
                Err(FailedCall { code, .. }) if code.can_succeed_after_capture() => thread::sleep(CAPTURE_PAUSE),
                waited => return Ok(waited?),
            }
        }
    }

    /// Returns pinpool's own cudarc context object.
    pub(super) fn own(&self) -> Result<&OwnContext, FailedCall> {
        if let Some(own) = self.own.get() {
            return Ok(own);
        }
        let (_relaxed, _current) = (RelaxedCapture::enter(), self.enter()?);
        // SAFETY: the handle is valid (context-I1), of this device and current.
        let own = unsafe { OwnContext::new(self.device, self.waits.context.handle()) }?;
        // If several threads get here at the same time, all but one of them drop their objects. That destroys only the second
        // stream of such an object.
        Ok(self.own.get_or_init(|| own))
    }
}

/// If `handle` is the primary context of the device, takes a reference to it, which is never released (context-I1). A context
/// that other code created remains its owner's.
fn keep_if_primary(device: sys::CUdevice, handle: sys::CUcontext) -> Result<(), FailedCall> {
    if calls::is_primary_active(device)? && calls::primary_retain(device)? != handle {
        // SAFETY: taken above, released once.
        unsafe { calls::release_primary(device) }?;
    }
    Ok(())
}
