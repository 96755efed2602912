//! Work for which the driver refused every fence. It has completed once a query finds its stream idle, or once all work of its
//! context has completed.
//!
//! ```text
//!   write and event refused ──▶ wait a while for the stream ──▶ complete
//!                                      └─ refused, or too long ──▶ quarantined: a thread waits for the context
//! ```
#![allow(unsafe_code)] // Calls the driver.

use std::ptr;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use super::stream::{OwnStream, Stream, is_default};
use crate::driver::code::{Code, Failed};
use crate::driver::{Context, CurrentContext, Handle, RelaxedCapture, calls};
use crate::error::{Error, Result};
use crate::in_flight::{Fence, StreamId};
use crate::maintenance_thread::MaintenanceThread;
use pinpool_os::sync::process::{AtomicBool, Ordering};
use pinpool_os::threads;

const LONGEST_STREAM_WAIT: Duration = Duration::from_millis(500);
const QUERY_PAUSE: Duration = Duration::from_micros(50);
const NOT_READY: Failed = Failed { call: "cuStreamQuery", code: Code::NOT_READY };
/// Pause between two attempts to wait while a capture forbids the wait.
pub(super) const CAPTURE_PAUSE: Duration = Duration::from_millis(1);

/// Waits up to [`LONGEST_STREAM_WAIT`] for all work of the stream, which does not capture.
///
/// # Errors
///
/// The driver refuses, does not answer, or the work takes too long. Always fails for a default stream: a query of the legacy stream
/// would invalidate the captures of all streams that are ordered with it.
pub(super) fn wait_for(stream: Stream) -> Result<(), Failed> {
    if is_default(stream.handle.addr()) {
        return Err(NOT_READY);
    }
    let _relaxed = RelaxedCapture::enter();
    let begun = Instant::now();
    loop {
        // SAFETY: the stream is alive.
        match unsafe { calls::stream_query(stream.handle) } {
            Err(NOT_READY) if begun.elapsed() < LONGEST_STREAM_WAIT => thread::sleep(QUERY_PAUSE),
            answer => return answer,
        }
    }
}

/// Queries and waits for the work of a context. All of them fail once the context has ended.
#[derive(Debug)]
pub(super) struct ContextWork {
    pub(super) context: Context,
    idle_stream: OnceLock<OwnStream>,
    /// Whether a dedicated thread waits for all of its work: a wait has no upper bound.
    is_waiting: AtomicBool,
}

impl ContextWork {
    /// The state of a context that is never destroyed, except by a reset (context-I1).
    pub(super) fn new(context: Context) -> Self {
        Self { context, idle_stream: OnceLock::new(), is_waiting: AtomicBool::new(false) }
    }

    /// Makes the context current on this thread until the guard is dropped. Fails if it has ended.
    pub(super) fn enter(&self) -> Result<CurrentContext, Failed> {
        // SAFETY: context-I1.
        unsafe { self.context.enter() }
    }

    /// The identity of the stream of this context with this number.
    pub(super) fn stream_id(&self, number: u64) -> StreamId {
        StreamId::of_driver(ptr::from_ref(self).addr(), number)
    }

    /// A stream on which no work ever runs, so that a query of it shows at once whether the device works. The context is current at
    /// the first call.
    pub(super) fn idle_stream(&self) -> Result<OwnStream, Failed> {
        if let Some(stream) = self.idle_stream.get() {
            return Ok(*stream);
        }
        let stream = calls::stream_create(calls::NON_BLOCKING).map(Handle)?;
        if self.idle_stream.set(stream).is_err() {
            // Another thread was faster.
            // SAFETY: created above, and used by nothing.
            let _gone = unsafe { calls::stream_destroy(stream.0) };
        }
        Ok(self.idle_stream.get().copied().unwrap_or(stream))
    }

    /// Queries the driver whether something has completed. Neither an error nor "not ready" counts as completed. According to
    /// the driver API reference, this needs no current context; if a driver requires one, it gets one.
    pub(super) fn query(&self, query: impl Fn() -> Result<(), Failed>) -> Result<bool, Failed> {
        let _relaxed = RelaxedCapture::enter();
        let mut answer = self.context.check().and_then(|()| query());
        if matches!(answer, Err(Failed { code: Code::INVALID_CONTEXT, .. })) {
            let _current = self.enter()?;
            answer = query();
        }
        match answer {
            Err(Failed { code: Code::NOT_READY, .. }) => Ok(false),
            answer => answer.map(|()| true),
        }
    }
}

/// The fence of work that has no other fence.
#[derive(Debug)]
pub(super) struct ContextFence {
    /// The reason.
    refused: String,
    context: &'static ContextWork,
    /// Whether the work has completed; empty while that is unknown. False if a capture refused the wait: the wait has invalidated
    /// that capture, so the same work is not waited for again.
    end: Arc<OnceLock<bool>>,
}

impl ContextFence {
    /// A fence after all work so far of a stream of this context, which has completed already if `was_complete`. `refused` is the reason
    /// why there is no other fence.
    pub(super) fn new(context: &'static ContextWork, refused: String, was_complete: bool) -> Self {
        let end = if was_complete { OnceLock::from(true) } else { OnceLock::new() };
        Self { refused, context, end: Arc::new(end) }
    }

    /// Begins a wait on a dedicated thread if none is running.
    fn begin_wait(&self) {
        let (context, end) = (self.context, self.end.clone());
        // Relaxed, here and below: elects one thread, and publishes no other memory.
        if context.is_waiting.swap(true, Ordering::Relaxed) {
            return;
        }
        let waiting = move || {
            // `None`: the process exits.
            let _waited = MaintenanceThread::of_process().enter().map(|_call| wait_for_all(context, &end));
            context.is_waiting.store(false, Ordering::Relaxed);
        };
        if threads::spawn(c"pinpool-wait", waiting).is_err() {
            context.is_waiting.store(false, Ordering::Relaxed);
        }
    }
}

/// Waits for all work of the context so far, and sets `end`.
fn wait_for_all(context: &ContextWork, end: &OnceLock<bool>) -> Result<(), Failed> {
    let (_relaxed, _current) = (RelaxedCapture::enter(), context.enter()?);
    // SAFETY: the call has no arguments, and is refused without a context.
    let waited = unsafe { calls::context_synchronize() };
    if waited.map_or_else(|failed| failed.code.is_forbidden_by_capture(), |()| true) {
        // Another thread may have waited for the same work.
        let _known = end.set(waited.is_ok());
    }
    waited
}

// SAFETY: done once all work of the stream was seen to have completed, or all work of its context from before the wait began.
unsafe impl Fence for ContextFence {
    fn is_complete(&self) -> Result<bool> {
        match self.end.get() {
            Some(true) => return Ok(true),
            Some(false) => {}
            None => self.begin_wait(),
        }
        Err(Error::device_failed(self.refused.clone()))
    }

    /// Fails only if the driver refuses: the host could otherwise touch bytes that the work still uses.
    fn wait(&self) -> Result<()> {
        match self.end.get() {
            Some(true) => Ok(()),
            Some(false) => Err(Error::device_failed(self.refused.clone())),
            None => Ok(wait_for_all(self.context, &self.end)?),
        }
    }
}
