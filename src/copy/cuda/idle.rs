//! Work behind which the driver refused every fence: it is over when its stream is seen without work, or later when all work of its
//! context is.
//!
//! ```text
//!   write and event refused ──▶ wait a while for the stream ──▶ over
//!                                      └─ refused, or too long ──▶ quarantined: a thread waits for the context
//! ```
#![allow(unsafe_code)] // Calls the driver.

use std::ptr;
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use super::stream::{OwnStream, Stream, failed, is_default};
use crate::driver::code::Code;
use crate::driver::{Context, CurrentContext, RelaxedCapture, calls, driver_watchdog};
use crate::error::{Error, Result};
use crate::in_flight::{Fence, StreamId};
use crate::maintenance_thread::MaintenanceThread;
use pinpool_os::sync::plain::Mutex;
use pinpool_os::sync::process::{AtomicBool, Ordering};
use pinpool_os::threads;

/// Longest wait for a stream.
const PATIENCE: Duration = Duration::from_millis(500);
const PAUSE: Duration = Duration::from_micros(50);
/// Between two attempts to wait while a capture forbids it.
pub(super) const CAPTURE_PAUSE: Duration = Duration::from_millis(1);

/// Waits a while for all work of the stream, which does not capture.
///
/// # Errors
///
/// The driver refuses, does not answer, or the work takes too long. Always for a default stream, since its query would spoil a
/// capture of a stream that is ordered with it.
pub(super) fn wait_for(stream: Stream) -> Result<(), Code> {
    if is_default(stream.handle) {
        return Err(Code::NOT_READY);
    }
    let _relaxed = RelaxedCapture::enter();
    let begun = Instant::now();
    loop {
        // SAFETY: the stream is alive.
        let asked = driver_watchdog::ask(|| unsafe { calls::stream_query(stream.handle) });
        match asked.unwrap_or(Err(Code::NOT_READY)) {
            Err(Code::NOT_READY) if asked.is_some() && begun.elapsed() < PATIENCE => thread::sleep(PAUSE),
            answer => return answer,
        }
    }
}

/// A context whose work the driver is asked about. Its calls fail once the context has ended.
#[derive(Debug)]
pub(super) struct StreamContext {
    pub(super) context: Context,
    idle_stream: OnceLock<OwnStream>,
    /// The waits for all of its work, each on a dedicated thread, since a wait has no upper bound.
    waits: Mutex<Waits>,
}

impl StreamContext {
    /// Of a context that is never destroyed, except by a reset (context-I1).
    pub(super) fn new(context: Context) -> Self {
        Self { context, idle_stream: OnceLock::new(), waits: Mutex::default() }
    }

    /// Makes the context current on this thread until the guard is dropped. Fails if it has ended.
    pub(super) fn enter(&self) -> Result<CurrentContext, Code> {
        // SAFETY: context-I1.
        unsafe { self.context.enter() }
    }

    /// The identity of its stream with this number.
    pub(super) fn stream_id(&self, number: u64) -> StreamId {
        StreamId::of_driver(ptr::from_ref(self).addr(), number)
    }

    /// The stream on which no work ever runs, so that a query returns at once whether the device works. The context is current at
    /// the first call.
    pub(super) fn idle_stream(&self) -> Result<OwnStream, Code> {
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

    /// Queries the driver whether something has completed. Neither an error nor "not ready" counts as completed. By the manual this
    /// needs no current context; if a driver requires one, it gets one.
    pub(super) fn query(&self, query: impl Fn() -> Result<(), Code>) -> Result<bool, Code> {
        let _relaxed = RelaxedCapture::enter();
        self.context.check()?;
        let mut answer = query();
        if answer == Err(Code::INVALID_CONTEXT) {
            let _current = self.enter()?;
            answer = query();
        }
        if answer == Err(Code::NOT_READY) { Ok(false) } else { answer.map(|()| true) }
    }

    /// Waits by this call, with the context current. Unlike a query that needs a current context, which the caller may not have.
    pub(super) fn wait_by(&self, call: &str, wait: impl Fn() -> Result<(), Code>) -> Result<()> {
        let failed = |call, error| Error::device(failed(call, error));
        let _relaxed = RelaxedCapture::enter();
        let _current = self.enter().map_err(|error| failed("cuCtxSetCurrent", error))?;
        loop {
            match wait() {
                Ok(()) => return Ok(()),
                // Until the capture ends.
                Err(error) if error.is_forbidden_by_capture() => thread::sleep(CAPTURE_PAUSE),
                Err(error) => return Err(failed(call, error)),
            }
        }
    }

    /// Waits for all work of the context so far.
    fn wait_for_all(&self) -> Result<()> {
        // SAFETY: the call has no arguments, and is refused without a context.
        self.wait_by("cuCtxSynchronize", || unsafe { calls::context_synchronize() })
    }
}

#[derive(Debug, Default)]
struct Waits {
    begun: u64,
    /// The last that has ended without an error.
    ended: u64,
    is_waiting: bool,
}

/// The fence of work that has no other.
#[derive(Debug)]
pub(super) struct IdleFence {
    stream: u64,
    stream_id: Option<StreamId>,
    /// Why.
    refused: String,
    context: &'static StreamContext,
    /// The first wait that begins after the work was enqueued.
    first: u64,
    is_over: AtomicBool,
}

impl IdleFence {
    /// A fence behind all work so far of the stream with this number, which is over already if `is_over`. `refused` says why there
    /// is no other.
    pub(super) fn new(
        (stream, stream_id): (u64, Option<StreamId>),
        context: &'static StreamContext,
        refused: String,
        is_over: bool,
    ) -> Self {
        let first = context.waits.lock().begun + 1;
        Self { stream, stream_id, refused, context, first, is_over: AtomicBool::new(is_over) }
    }

    /// Whether a wait for the context that began behind the work has ended. Begins one if none is under way.
    fn has_waited(&self) -> bool {
        let context = self.context;
        let mut waits = context.waits.lock();
        if waits.ended >= self.first {
            return true;
        }
        if !waits.is_waiting {
            (waits.is_waiting, waits.begun) = (true, waits.begun + 1);
            let number = waits.begun;
            drop(waits);
            let waiting = move || {
                // `None`: the process exits.
                let waited = MaintenanceThread::of_process().enter().map(|_call| context.wait_for_all());
                let mut waits = context.waits.lock();
                waits.is_waiting = false;
                if let Some(Ok(())) = waited {
                    waits.ended = number;
                }
            };
            if threads::spawn(c"pinpool-wait", waiting).is_err() {
                context.waits.lock().is_waiting = false;
            }
        }
        false
    }
}

// SAFETY: over when all work of the stream was seen to be, or all of its context that was enqueued before the wait began.
unsafe impl Fence for IdleFence {
    fn is_done(&self) -> Result<bool> {
        // Acquire, with the Release in `wait`.
        if self.is_over.load(Ordering::Acquire) || self.has_waited() {
            return Ok(true);
        }
        Err(Error::device(self.refused.clone()))
    }

    /// The work may still read or write, so an error in place of a wait would let the host touch its bytes.
    fn wait(&self) -> Result<()> {
        if !self.is_over.load(Ordering::Acquire) {
            self.context.wait_for_all()?;
            self.is_over.store(true, Ordering::Release);
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
