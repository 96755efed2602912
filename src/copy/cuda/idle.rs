//! Work behind which the driver refused every fence: it is over when its stream is seen without work, or later when all work of its
//! context is.
//!
//! ```text
//!   write and event refused ──▶ wait a while for the stream ──▶ over
//!                                      └─ refused, or too long ──▶ quarantined: a thread waits for the context
//! ```
#![allow(unsafe_code)] // Calls the driver.

use std::fmt;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::stream::Stream;
use crate::driver::code::Code;
use crate::driver::{RelaxedCapture, calls, standstill};
use crate::error::{Error, Result};
use crate::in_flight::{Fence, StreamId};
use crate::maintenance_thread::MaintenanceThread;
use pinpool_os::sync::plain::Mutex;
use pinpool_os::sync::process::{AtomicBool, Ordering};
use pinpool_os::threads;

/// Longest wait for a stream.
const PATIENCE: Duration = Duration::from_millis(500);
const PAUSE: Duration = Duration::from_micros(50);

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
        let asked = standstill::ask(|| unsafe { calls::stream_query(stream.handle()) });
        match asked.unwrap_or(Err(Code::NOT_READY)) {
            Err(Code::NOT_READY) if asked.is_some() && begun.elapsed() < PATIENCE => thread::sleep(PAUSE),
            answer => return answer,
        }
    }
}

/// Waits until all work of a context so far is over.
pub(super) type WaitForContext = Arc<dyn Fn() -> Result<()> + Send + Sync>;

/// The waits of one context, each on a thread of its own, since it may take as long as a device likes.
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
pub(super) struct IdleFence {
    stream: u64,
    stream_id: Option<StreamId>,
    /// Why.
    refused: String,
    waits: &'static ContextWaits,
    wait: WaitForContext,
    /// The first wait that begins after the work was enqueued.
    first: u64,
    is_over: AtomicBool,
}

impl IdleFence {
    /// A fence behind all work of the stream with this number so far. `refused` says why there is no other.
    pub(super) fn new(
        (stream, stream_id): (u64, Option<StreamId>),
        refused: String,
        (waits, wait): (&'static ContextWaits, WaitForContext),
        is_over: bool,
    ) -> Self {
        let first = waits.0.lock().begun + 1;
        Self { stream, stream_id, refused, waits, wait, first, is_over: AtomicBool::new(is_over) }
    }
}

impl fmt::Debug for IdleFence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdleFence")
            .field("stream", &self.stream)
            .field("refused", &self.refused)
            .finish_non_exhaustive()
    }
}

impl ContextWaits {
    /// Whether a wait with this number, or a later one, has ended. Begins one if none is under way.
    fn has_ended(&'static self, first: u64, wait: &WaitForContext) -> bool {
        let mut waits = self.0.lock();
        if waits.ended >= first {
            return true;
        }
        if !waits.is_waiting {
            (waits.is_waiting, waits.begun) = (true, waits.begun + 1);
            let (number, wait) = (waits.begun, wait.clone());
            drop(waits);
            let waiting = move || {
                // `None`: the process exits.
                let waited = MaintenanceThread::of_process().enter().map(|_call| wait());
                let mut waits = self.0.lock();
                waits.is_waiting = false;
                if let Some(Ok(())) = waited {
                    waits.ended = number;
                }
            };
            if threads::spawn(c"pinpool-wait", waiting).is_err() {
                self.0.lock().is_waiting = false;
            }
        }
        false
    }
}

// SAFETY: over when all work of the stream was seen to be, or all of its context that was enqueued before the wait began.
unsafe impl Fence for IdleFence {
    fn is_done(&self) -> Result<bool> {
        // Acquire, with the Release in `wait`.
        if self.is_over.load(Ordering::Acquire) || self.waits.has_ended(self.first, &self.wait) {
            return Ok(true);
        }
        Err(Error::device(self.refused.clone()))
    }

    /// The work may still read or write, so an error in place of a wait would let the host touch its bytes.
    fn wait(&self) -> Result<()> {
        if !self.is_over.load(Ordering::Acquire) {
            (self.wait)()?;
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
