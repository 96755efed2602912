//! Work for which the driver refused every fence. It has completed once a query finds its stream idle, or once all work of its
//! context has completed.
//!
//! ```text
//!   write and event refused ──▶ wait a while for the stream ──▶ complete
//!                                      └─ refused, or too long ──▶ quarantined: a thread waits for the context
//! ```
#![allow(unsafe_code)] // Calls the driver.

use std::ptr;
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::sys;

use super::stream::{OwnStream, is_default};
use crate::driver::code::{Code, FailedCall};
use crate::driver::{Context, CurrentContext, RelaxedCapture, calls, watchdog};
use crate::error::{Error, Result};
use crate::in_flight::{Fence, StreamId};
use crate::maintenance_thread::MaintenanceThread;
use pinpool_os::sync::unmodeled::Mutex;
use pinpool_os::threads;

const STREAM_WAIT_MAX: Duration = Duration::from_millis(500);
const QUERY_PAUSE: Duration = Duration::from_micros(50);
const NOT_READY: FailedCall = FailedCall { call: "cuStreamQuery", code: Code::NOT_READY };
/// Pause between two attempts of a call that a capture forbids.
pub(super) const CAPTURE_PAUSE: Duration = Duration::from_millis(1);

/// Waits up to [`STREAM_WAIT_MAX`] for all work of the stream, which must not be capturing.
///
/// # Errors
///
/// The driver refuses, does not answer, or the work takes too long. Always fails for a default stream: a query of the legacy
/// stream would invalidate the captures of all streams that are ordered with it.
pub(super) fn wait_for(stream: sys::CUstream) -> Result<(), FailedCall> {
    if is_default(stream.addr()) {
        return Err(NOT_READY);
    }
    let _relaxed = RelaxedCapture::enter();
    let begun = Instant::now();
    loop {
        // SAFETY: the stream is alive.
        let answered = watchdog::query(|| unsafe { calls::stream_query(stream) });
        match answered.unwrap_or(Err(NOT_READY)) {
            Err(NOT_READY) if answered.is_some() && begun.elapsed() < STREAM_WAIT_MAX => thread::sleep(QUERY_PAUSE),
            answer => return answer,
        }
    }
}

/// The queries and waits for the work of a context. All of them fail once the context has ended.
#[derive(Debug)]
pub(super) struct ContextWaits {
    pub(super) context: Context,
    idle_stream: OnceLock<OwnStream>,
    /// The waits for all work of the context. Queries of fences start them on a dedicated thread, since a wait has no upper
    /// bound.
    waits: Mutex<WaitNumbers>,
}

impl ContextWaits {
    /// Returns the state of a context that is never destroyed, except by a reset (context-I1).
    pub(super) fn new(context: Context) -> Self {
        Self { context, idle_stream: OnceLock::new(), waits: Mutex::default() }
    }

    /// Makes the context current on this thread until the guard is dropped. Fails if the context has ended.
    pub(super) fn enter(&self) -> Result<CurrentContext, FailedCall> {
        // SAFETY: context-I1.
        unsafe { self.context.enter() }
    }

    /// Returns the identity of the stream of this context with this number.
    pub(super) fn stream_id(&self, number: u64) -> StreamId {
        StreamId::from_driver(ptr::from_ref(self).addr(), number)
    }

    /// Returns a stream on which no work ever runs, so that a query of the stream shows immediately whether the device works.
    /// At the first call, the context must be current.
    pub(super) fn idle_stream(&self) -> Result<OwnStream, FailedCall> {
        if let Some(stream) = self.idle_stream.get() {
            return Ok(*stream);
        }
        let stream = OwnStream::new()?;
        if self.idle_stream.set(stream).is_err() {
            // Another thread has created the stream first.
            // SAFETY: created above, and used by nothing.
            let _gone = unsafe { calls::stream_destroy(stream.0) };
        }
        Ok(self.idle_stream.get().copied().unwrap_or(stream))
    }

    /// Returns whether something has completed, according to `query`. Neither an error nor "not ready" counts as completed.
    /// According to the driver API reference, a query needs no current context. If a driver requires one, the context is made
    /// current.
    pub(super) fn query(&self, query: impl Fn() -> Result<(), FailedCall>) -> Result<bool, FailedCall> {
        let _relaxed = RelaxedCapture::enter();
        let mut answer = self.context.check().and_then(|()| query());
        if matches!(answer, Err(FailedCall { code: Code::INVALID_CONTEXT, .. })) {
            let _current = self.enter()?;
            answer = query();
        }
        match answer {
            Err(FailedCall { code: Code::NOT_READY, .. }) => Ok(false),
            answer => answer.map(|()| true),
        }
    }

    /// Waits for all work of the context so far.
    fn wait_for_all(&self) -> Result<(), FailedCall> {
        let mut waits = self.waits.lock();
        waits.last_begun += 1;
        let number = waits.last_begun;
        drop(waits);
        let _relaxed = RelaxedCapture::enter();
        // SAFETY: the call has no arguments, and is refused without a context.
        let waited = self.enter().and_then(|_current| unsafe { calls::context_synchronize() });
        let mut waits = self.waits.lock();
        match waited {
            Ok(()) => waits.last_ended = waits.last_ended.max(number),
            Err(error) if error.code.can_succeed_after_capture() => waits.last_refused = waits.last_refused.max(number),
            Err(_) => {}
        }
        waited
    }
}

#[derive(Debug, Default)]
struct WaitNumbers {
    last_begun: u64,
    /// The number of the last wait that has ended without an error.
    last_ended: u64,
    /// The number of the last wait that a capture refused. The wait has invalidated that capture, so the same work is not waited
    /// for again.
    last_refused: u64,
    is_waiting: bool,
}

/// The fence of work that has no other fence.
#[derive(Debug)]
pub(super) struct ContextFence {
    /// The reason that the work has no other fence.
    reason: String,
    context: &'static ContextWaits,
    /// The number of the first wait that begins after the work was enqueued; 0 if the work had completed before.
    first: u64,
}

impl ContextFence {
    /// Returns a fence for all work so far on a stream of this context. If `was_complete`, that work has already completed.
    /// `reason` says why there is no other fence.
    pub(super) fn new(context: &'static ContextWaits, reason: String, was_complete: bool) -> Self {
        let first = if was_complete { 0 } else { context.waits.lock().last_begun + 1 };
        Self { reason, context, first }
    }

    /// Returns whether a wait for the context that began after the work was enqueued has ended. Begins a wait if none is running.
    fn has_waited(&self) -> bool {
        let context = self.context;
        let mut waits = context.waits.lock();
        if waits.last_ended >= self.first {
            return true;
        }
        if !waits.is_waiting && waits.last_refused < self.first {
            waits.is_waiting = true;
            drop(waits);
            let waiting = move || {
                // `None` if the process is exiting.
                let _waited = MaintenanceThread::of_process().enter().map(|_call| context.wait_for_all());
                context.waits.lock().is_waiting = false;
            };
            if threads::spawn(c"pinpool-wait", waiting).is_err() {
                context.waits.lock().is_waiting = false;
            }
        }
        false
    }
}

// SAFETY: complete only once all work of the stream was seen to have completed, or all work of its context from before the wait
// began.
unsafe impl Fence for ContextFence {
    fn is_complete(&self) -> Result<bool> {
        if self.has_waited() { Ok(true) } else { Err(Error::device_failed(self.reason.clone())) }
    }

    /// Waits until the work has completed. Fails only if the driver refuses, because a caller that gives up could touch bytes that
    /// the work still uses.
    fn wait(&self) -> Result<()> {
        let waits = self.context.waits.lock();
        let (has_ended, is_refused) = (waits.last_ended >= self.first, waits.last_refused >= self.first);
        drop(waits);
        match (has_ended, is_refused) {
            (true, _) => Ok(()),
            (_, true) => Err(Error::device_failed(self.reason.clone())),
            _ => Ok(self.context.wait_for_all()?),
        }
    }
}
