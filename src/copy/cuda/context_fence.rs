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
use pinpool_os::sync::plain::Mutex;
use pinpool_os::threads;

const LONGEST_STREAM_WAIT: Duration = Duration::from_millis(500);
const QUERY_PAUSE: Duration = Duration::from_micros(50);
const NOT_READY: FailedCall = FailedCall { call: "cuStreamQuery", code: Code::NOT_READY };
/// Pause between two attempts to wait while a capture forbids the wait.
pub(super) const CAPTURE_PAUSE: Duration = Duration::from_millis(1);

/// Waits up to [`LONGEST_STREAM_WAIT`] for all work of the stream, which does not capture.
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
            Err(NOT_READY) if answered.is_some() && begun.elapsed() < LONGEST_STREAM_WAIT => thread::sleep(QUERY_PAUSE),
            answer => return answer,
        }
    }
}

/// Queries and waits for the work of a context. All of them fail once the context has ended.
#[derive(Debug)]
pub(super) struct ContextWork {
    pub(super) context: Context,
    idle_stream: OnceLock<OwnStream>,
    /// The waits for all of its work, each on a dedicated thread, since a wait has no upper bound.
    waits: Mutex<Waits>,
}

impl ContextWork {
    /// The state of a context that is never destroyed, except by a reset (context-I1).
    pub(super) fn new(context: Context) -> Self {
        Self { context, idle_stream: OnceLock::new(), waits: Mutex::default() }
    }

    /// Makes the context current on this thread until the guard is dropped. Fails if it has ended.
    pub(super) fn enter(&self) -> Result<CurrentContext, FailedCall> {
        // SAFETY: context-I1.
        unsafe { self.context.enter() }
    }

    /// The identity of the stream of this context with this number.
    pub(super) fn stream_id(&self, number: u64) -> StreamId {
        StreamId::of_driver(ptr::from_ref(self).addr(), number)
    }

    /// A stream on which no work ever runs, so that a query of it shows at once whether the device works. The context is current
    /// at the first call.
    pub(super) fn idle_stream(&self) -> Result<OwnStream, FailedCall> {
        if let Some(stream) = self.idle_stream.get() {
            return Ok(*stream);
        }
        let stream = OwnStream::new()?;
        if self.idle_stream.set(stream).is_err() {
            // Another thread was faster.
            // SAFETY: created above, and used by nothing.
            let _gone = unsafe { calls::stream_destroy(stream.0) };
        }
        Ok(self.idle_stream.get().copied().unwrap_or(stream))
    }

    /// Queries the driver whether something has completed. Neither an error nor "not ready" counts as completed. According to
    /// the driver API reference, this needs no current context; if a driver requires one, it gets one.
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
        waits.begun += 1;
        let number = waits.begun;
        drop(waits);
        let _relaxed = RelaxedCapture::enter();
        // SAFETY: the call has no arguments, and is refused without a context.
        let waited = self.enter().and_then(|_current| unsafe { calls::context_synchronize() });
        let mut waits = self.waits.lock();
        match waited {
            Ok(()) => waits.ended = waits.ended.max(number),
            Err(FailedCall { code, .. }) if code.is_forbidden_by_capture() => waits.refused = waits.refused.max(number),
            Err(_) => {}
        }
        waited
    }
}

#[derive(Debug, Default)]
struct Waits {
    begun: u64,
    /// The last that has ended without an error.
    ended: u64,
    /// The last that a capture refused. It has invalidated that capture, so the same work is not waited for again.
    refused: u64,
    is_waiting: bool,
}

/// The fence of work that has no other fence.
#[derive(Debug)]
pub(super) struct ContextFence {
    /// The reason.
    refused: String,
    context: &'static ContextWork,
    /// The first wait that begins after the work was enqueued; 0 if the work had completed before.
    first: u64,
}

impl ContextFence {
    /// A fence after all work so far of a stream of this context, which has completed already if `was_complete`. `refused` is the
    /// reason why there is no other fence.
    pub(super) fn new(context: &'static ContextWork, refused: String, was_complete: bool) -> Self {
        let first = if was_complete { 0 } else { context.waits.lock().begun + 1 };
        Self { refused, context, first }
    }

    /// Returns whether a wait for the context that began after the work was enqueued has ended. Begins a wait if none is running.
    fn has_waited(&self) -> bool {
        let context = self.context;
        let mut waits = context.waits.lock();
        if waits.ended >= self.first {
            return true;
        }
        if !waits.is_waiting && waits.refused < self.first {
            waits.is_waiting = true;
            drop(waits);
            let waiting = move || {
                // `None`: the process exits.
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

// SAFETY: done once all work of the stream was seen to have completed, or all work of its context from before the wait began.
unsafe impl Fence for ContextFence {
    fn is_complete(&self) -> Result<bool> {
        if self.has_waited() { Ok(true) } else { Err(Error::device_failed(self.refused.clone())) }
    }

    /// Fails only if the driver refuses: the host could otherwise touch bytes that the work still uses.
    fn wait(&self) -> Result<()> {
        let waits = self.context.waits.lock();
        let (has_ended, is_refused) = (waits.ended >= self.first, waits.refused >= self.first);
        drop(waits);
        match (has_ended, is_refused) {
            (true, _) => Ok(()),
            (_, true) => Err(Error::device_failed(self.refused.clone())),
            _ => Ok(self.context.wait_for_all()?),
        }
    }
}
