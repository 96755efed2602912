//! The CUDA driver: its functions, devices and virtual memory, and the state that calls need.
//!
//! | item | reason |
//! | --- | --- |
//! | [`is_present`] | without a driver there is nothing to call |
//! | [`CurrentContext`] | most calls use the thread's current context, which belongs to the user |
//! | [`RelaxedCapture`] | while a stream captures in global mode, a query or an allocation on any thread fails and invalidates the capture |
//! | [`Context`] | a context that is created after a reset may have the handle of the old context |
//! | [`library`], [`symbol`] | cudarc's bindings depend on the CUDA version of the final build, and mistake a stub for the driver |
//! | [`calls`] | cudarc returns results as a Rust enum, and its functions may come from a stub |
//! | [`code`] | cudarc calls the driver for the text of an error, and the driver may be gone |
//! | [`device`] | the devices, their primary contexts and attributes |
//! | [`watchdog`] | threads do not call a driver that does not return |
//! | [`state`] | whether there is a driver and a device, and if not, why |
//! | [`vmm`] | the driver's virtual memory, found by name, with types of this crate |
//!
//! This module decides nothing about memory. It uses only the types of cudarc, because cudarc's safe layer returns errors that
//! other libraries left in a context to the next caller.
#![allow(unsafe_code)] // Calls the driver.

use std::ffi::c_int;
use std::ptr;

use cudarc::driver::sys;

use self::code::{Code, FailedCall};

pub(crate) mod calls;
pub(crate) mod code;
pub(crate) mod device;
mod library;
pub(crate) mod state;
pub(crate) mod vmm;
pub(crate) mod watchdog;

pub(crate) use self::library::{is_loaded, is_mapped, is_present, symbol};

/// A handle of the driver, which only the driver dereferences.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Handle<T>(pub(crate) *mut T);

// SAFETY: the handles of contexts, streams and events may be used from any thread (CUDA driver API).
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as above; the handle itself is never written to.
unsafe impl<T> Sync for Handle<T> {}

/// A context handle, and the number of the context, which no later context of the process gets. The handle is not unique: a reset
/// of the device ends the context, and the next context may have the same handle.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Context {
    handle: Handle<sys::CUctx_st>,
    /// `None` if the driver has no numbers (before CUDA 12.0).
    pub(crate) id: Option<u64>,
}

impl Context {
    /// Returns the context that has this handle now.
    pub(crate) fn new(handle: sys::CUcontext) -> Result<Self, FailedCall> {
        Ok(Self { handle: Handle(handle), id: context_id(handle).transpose()? })
    }

    pub(crate) fn handle(self) -> sys::CUcontext {
        self.handle.0
    }

    /// Fails if the context has ended, or if the query fails. Succeeds without a check if the driver has no numbers.
    pub(crate) fn check(self) -> Result<(), FailedCall> {
        match (self.id, context_id(self.handle())) {
            (None, _) | (_, None) => Ok(()),
            (Some(id), Some(Ok(now))) if now == id => Ok(()),
            (_, Some(Err(failed))) if !failed.code.is_context_ended() => Err(failed),
            _ => Err(FailedCall { call: "cuCtxGetId", code: Code::CONTEXT_IS_DESTROYED }),
        }
    }

    /// Returns whether the handle now refers to another context. Returns `false` if the context has ended and the handle is unused.
    pub(crate) fn is_replaced(self) -> bool {
        matches!((self.id, context_id(self.handle())), (Some(id), Some(Ok(now))) if now != id)
    }

    /// Returns whether the driver confirms that this context is current on the thread, which implies that the context has not ended.
    /// Takes one driver call.
    pub(crate) fn is_current(self) -> bool {
        let mut current = 0;
        // SAFETY: null is the current context; `current` takes the result.
        self.id.is_some()
            && unsafe { calls::context_id(ptr::null_mut(), &raw mut current) }.is_ok()
            && self.id == Some(current)
    }

    /// Makes the context current until the result is dropped. Fails if the context has ended.
    ///
    /// # Safety
    ///
    /// The context must be retained for as long as the result lives.
    pub(crate) unsafe fn enter(self) -> Result<CurrentContext, FailedCall> {
        self.check()?;
        // SAFETY: the caller's promise.
        unsafe { CurrentContext::enter(self.handle()) }
    }
}

/// Makes `call`, and repeats it once if it fails. A driver call may return an error from earlier asynchronous work; the
/// repeated call then returns its own result.
pub(crate) fn with_one_retry<R, E>(mut call: impl FnMut() -> Result<R, E>) -> Result<R, E> {
    call().or_else(|_| call())
}

/// Returns the number of a context; `None` if the driver has no numbers.
fn context_id(context: sys::CUcontext) -> Option<Result<u64, FailedCall>> {
    let mut id = 0;
    // SAFETY: `id` takes the result. The driver refuses invalid handles.
    let mut query = || unsafe { calls::context_id(context, &raw mut id) };
    // Repeats the query once, as `with_one_retry` does, unless the context has ended.
    let answer = query().or_else(|failed| if failed.code.is_context_ended() { Err(failed) } else { query() });
    match answer {
        Err(FailedCall { code: Code::NOT_FOUND | Code::NOT_SUPPORTED, .. }) => None,
        answer => Some(answer.map(|()| id)),
    }
}

/// Returns whether the driver has been started in this process. Without a driver, returns `true`.
pub(crate) fn is_started() -> bool {
    !matches!(calls::current_context(), Err(FailedCall { code: Code::NOT_INITIALIZED, .. }))
}

/// A context that was made current on this thread; dropping this value restores the previous context.
#[derive(Debug)]
pub(crate) struct CurrentContext {
    /// The context to restore; `None` if the current context was not changed.
    previous: Option<sys::CUcontext>,
}

impl CurrentContext {
    /// Returns a value that keeps the current context and restores nothing.
    pub(crate) fn unchanged() -> Self {
        Self { previous: None }
    }

    /// Makes `context` current.
    ///
    /// # Safety
    ///
    /// `context` must be retained for as long as the result lives.
    pub(crate) unsafe fn enter(context: sys::CUcontext) -> Result<Self, FailedCall> {
        let previous = calls::current_context()?;
        if previous == context {
            return Ok(Self { previous: None });
        }
        // SAFETY: the caller's promise.
        unsafe { calls::set_current(context) }?;
        Ok(Self { previous: Some(previous) })
    }
}

impl Drop for CurrentContext {
    fn drop(&mut self) {
        if let Some(previous) = self.previous {
            // SAFETY: it was current on this thread before. If the call fails, the pool's context stays current, which
            // misleads a caller that expects another context or none.
            let _ignored = unsafe { calls::set_current(previous) };
        }
    }
}

/// The relaxed capture mode of this thread, until this is dropped. Event queries, allocations and registrations by this
/// thread then invalidate no capture. A query of the legacy stream still invalidates the captures that are ordered with
/// it, and a wait for a context invalidates the captures of its streams.
///
/// A capture in CUDA's default mode forbids event queries and allocations on all threads of the process. This crate's
/// calls touch no capturing stream, so for them the rule protects nothing.
#[derive(Debug)]
pub(crate) struct RelaxedCapture {
    previous: Option<c_int>,
}

impl RelaxedCapture {
    pub(crate) fn enter() -> Self {
        /// `CU_STREAM_CAPTURE_MODE_RELAXED`.
        const RELAXED: c_int = 2;
        // If the driver refuses, the mode has not changed, and nothing is restored.
        Self { previous: calls::exchange_capture_mode(RELAXED).ok() }
    }
}

impl Drop for RelaxedCapture {
    fn drop(&mut self) {
        if let Some(mode) = self.previous.take() {
            let _relaxed = calls::exchange_capture_mode(mode);
        }
    }
}
