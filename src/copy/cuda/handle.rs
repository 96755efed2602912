//! Streams and events by their handles alone, for callers that have no object of cudarc: programs in C, other frameworks.
//!
//! The driver tells the context of a stream. A green context can be current on one thread at a time, so its streams are served
//! through the primary context of the device. An event does not tell its own, so the wait for it is made in the context
//! that is current on the thread; a stream may wait for an event of any context.
//!
//! A refusal of this module comes before anything is enqueued.
#![allow(unsafe_code)] // Calls the driver.

use std::sync::Arc;

use cudarc::driver::sys;

use super::context::ContextState;
use super::event::behind_event;
use super::mark;
use super::stream::{Stream, failed, id_number, is_default};
use super::timeline::Timeline;
use crate::driver::code::Code;
use crate::driver::{self, calls};
use crate::error::{Error, ErrorKind, Result};
use crate::in_flight::SharedFence;

/// A fence behind all work so far on `stream`; null is the default stream of the current context.
///
/// # Safety
///
/// The stream is alive, and its context until the fence is over.
pub(crate) unsafe fn fence_behind_stream(stream: sys::CUstream) -> Result<SharedFence> {
    // SAFETY: the caller's promise.
    if let Some(fence) = unsafe { fence_by_timeline(stream) } {
        return Ok(fence);
    }
    // SAFETY: the caller's promise.
    let (stream, context) = unsafe { stream_of(stream) }?;
    // What the driver refuses once it may do the next time.
    let current = context.enter().or_else(|_| context.enter());
    let _current = current.map_err(|error| Error::device(failed("cuCtxSetCurrent", error)))?;
    mark(stream, context)
}

/// A fence behind all work so far on a stream that has a timeline already; `None` if it has none, captures, or the driver refuses. Of
/// a default stream the context has to be known first.
///
/// # Safety
///
/// As for [`fence_behind_stream`].
unsafe fn fence_by_timeline(stream: sys::CUstream) -> Option<SharedFence> {
    // SAFETY: the caller's promise.
    if is_default(stream) || unsafe { calls::is_capturing(stream) } != Ok(false) {
        return None;
    }
    let id = id_number(stream)?;
    Some(Arc::new(Timeline::known(id)?.write(id, stream)?))
}

/// The stream with this handle, and the state of its context.
///
/// # Safety
///
/// As for [`fence_behind_stream`].
pub(super) unsafe fn stream_of(stream: sys::CUstream) -> Result<(Stream, &'static ContextState)> {
    require_driver()?;
    // SAFETY: the caller's promise.
    let of_stream = unsafe { calls::stream_context(stream) };
    let (handle, green) = of_stream.map_err(|error| refused("cuStreamGetCtx", error))?;
    // SAFETY: the context of a live stream.
    let context = unsafe { ContextState::of_handle(handle) }.map_err(|(call, error)| refused(call, error))?;
    Ok((Stream::new(stream, handle, context.device()).in_green(green), context))
}

/// A fence behind all work before the last record of `event`; `None` if that is over.
///
/// # Safety
///
/// The event is alive.
pub(crate) unsafe fn fence_behind_event_handle(event: sys::CUevent) -> Result<Option<SharedFence>> {
    require_driver()?;
    let current = calls::current_context().map_err(|error| refused("cuCtxGetCurrent", error))?;
    if current.is_null() {
        return Err(wrong("no CUDA context is current on this thread, where the wait for the event would be enqueued"));
    }
    // SAFETY: the default stream of the current context, which is not always the context that is current: a green context has
    // the primary one.
    let (_, context) = unsafe { stream_of(std::ptr::null_mut()) }?;
    // SAFETY: the caller's promise.
    unsafe { behind_event(event, context) }
}

/// # Errors
///
/// This machine has no CUDA driver, or it does not start.
pub(crate) fn require_driver() -> Result<()> {
    let unavailable = |why| Error::from(ErrorKind::Unavailable { backend: "cuda", why });
    if !driver::is_present() {
        return Err(unavailable("no CUDA driver (libcuda.so.1) on this machine, so no stream and no event".to_owned()));
    }
    driver::state::init_once().map_err(|(why, _)| unavailable(format!("cuInit failed: {why}")))
}

fn refused(call: &str, error: Code) -> Error {
    wrong(failed(call, error))
}

fn wrong(why: impl Into<String>) -> Error {
    ErrorKind::Handle { why: why.into() }.into()
}
