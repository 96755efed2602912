//! Work behind which the driver refused every fence: it is over when its stream is seen without work, or later when all work of its
//! context is.
//!
//! ```text
//!   write and event refused ──▶ wait a while for the stream ──▶ over
//!                                      └─ refused, or too long ──▶ quarantined: a thread waits for the context
//! ```
#![allow(unsafe_code)] // Calls the driver.

use std::fmt;
use std::thread;
use std::time::{Duration, Instant};

use super::stream::{OwnStream, Stream, failed};
use crate::driver::code::Code;
use crate::driver::{CurrentContext, RelaxedCapture, calls, driver_watchdog};
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
    if stream.is_default() {
        return Err(Code::NOT_READY);
    }
    let _relaxed = RelaxedCapture::enter();
    let begun = Instant::now();
    loop {
        // SAFETY: the stream is alive.
        let asked = driver_watchdog::ask(|| unsafe { calls::stream_query(stream.handle()) });
        match asked.unwrap_or(Err(Code::NOT_READY)) {
            Err(Code::NOT_READY) if asked.is_some() && begun.elapsed() < PATIENCE => thread::sleep(PAUSE),
            answer => return answer,
        }
    }
}

/// The context of streams. Its calls fail once it has ended.
pub(super) trait StreamContext: fmt::Debug + Sync {
    fn check(&self) -> Result<(), Code>;

    fn enter(&self) -> Result<CurrentContext, Code>;

    fn waits(&self) -> &ContextWaits;

    /// The stream on which no work ever runs, so that a query returns at once whether the device is well. The context is current at
    /// the first call.
    fn idle_stream(&self) -> Result<OwnStream, Code>;

    /// Asks the driver whether something is over. Neither an error nor "not ready" counts as yes. By the manual this needs no current
    /// context; if a driver requires one, it gets one.
    fn query(&self, question: &dyn Fn() -> Result<(), Code>) -> Result<bool, Code> {
        let _relaxed = RelaxedCapture::enter();
        self.check()?;
        let mut answer = question();
        if answer == Err(Code::INVALID_CONTEXT) {
            let _current = self.enter()?;
            answer = question();
        }
        if answer == Err(Code::NOT_READY) { Ok(false) } else { answer.map(|()| true) }
    }

    /// Waits by this call, with the context current. Unlike a query that needs a current context, which the caller may not have.
    fn wait_by(&self, call: &str, wait: &dyn Fn() -> Result<(), Code>) -> Result<()> {
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
        self.wait_by("cuCtxSynchronize", &calls::context_synchronize)
    }
}

/// The waits of one context, each on a dedicated thread, since a wait has no upper bound.
#[derive(Debug, Default)]
pub(super) struct ContextWaits(Mutex<Waits>);

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
    context: &'static dyn StreamContext,
    /// The first wait that begins after the work was enqueued.
    first: u64,
    is_over: AtomicBool,
}

impl IdleFence {
    /// A fence behind all work so far of the stream with this number, which is over already if `is_over`. `refused` says why there
    /// is no other.
    pub(super) fn new(
        (stream, stream_id): (u64, Option<StreamId>),
        context: &'static dyn StreamContext,
        refused: String,
        is_over: bool,
    ) -> Self {
        let first = context.waits().0.lock().begun + 1;
        Self { stream, stream_id, refused, context, first, is_over: AtomicBool::new(is_over) }
    }

    /// Whether a wait for the context that began behind the work has ended. Begins one if none is under way.
    fn has_waited(&self) -> bool {
        let context = self.context;
        let mut waits = context.waits().0.lock();
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
                let mut waits = context.waits().0.lock();
                waits.is_waiting = false;
                if let Some(Ok(())) = waited {
                    waits.ended = number;
                }
            };
            if threads::spawn(c"pinpool-wait", waiting).is_err() {
                context.waits().0.lock().is_waiting = false;
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
