//! Captures in progress. While a stream of a context captures, recording an event after all work of that context fails and
//! invalidates the capture.
//!
//! The thread that records the events of a fence holds the lock meanwhile, and so does a thread that begins a capture, so the
//! two exclude each other. A capture counts until it has ended, its stream is destroyed, or its context ends.

use std::thread::{self, ThreadId};

use crate::driver::{CU_STREAM_PER_THREAD, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, CUDA_SUCCESS, Code, Driver};
use crate::process;
use pinpool_os::sync::unmodeled::Mutex;

/// A stream that captures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Capture {
    stream: usize,
    /// The thread, if the stream is a per-thread default stream.
    thread: Option<ThreadId>,
    /// The number of its context, if that is known.
    context: Option<u64>,
}

impl Capture {
    fn of(stream: usize, context: Option<u64>) -> Self {
        // The legacy stream cannot capture, so each default handle means the thread's stream.
        let is_per_thread = is_default_handle(stream);
        Self {
            stream: if is_per_thread { CU_STREAM_PER_THREAD } else { stream },
            thread: is_per_thread.then(|| thread::current().id()),
            context,
        }
    }

    fn is_same_stream(&self, other: &Self) -> bool {
        (self.stream, self.thread) == (other.stream, other.thread)
    }
}

/// Returns whether the handle refers to a default stream of the current context.
pub(crate) fn is_default_handle(stream: usize) -> bool {
    stream <= CU_STREAM_PER_THREAD
}

static CAPTURES: Mutex<Vec<Capture>> = Mutex::new(Vec::new());

/// Returns whether any stream captures.
pub(crate) fn any_in_progress() -> bool {
    !CAPTURES.lock().is_empty()
}

/// Begins a capture of `stream`, which belongs to the context with this number, by `driver_call`.
pub(crate) fn begin(stream: usize, context: Option<u64>, driver_call: impl FnOnce() -> Code) -> Code {
    let mut captures = CAPTURES.lock();
    let code = driver_call();
    let capture = Capture::of(stream, context);
    if code == CUDA_SUCCESS && !captures.contains(&capture) {
        captures.push(capture);
    }
    code
}

/// Ends the capture of `stream` by `driver_call`. If the call fails and the driver reports that the stream still captures, the
/// capture still counts: another thread may have called. If another thread began a capture on the same stream meanwhile, that
/// capture would not be counted, but programs begin and end the captures of a stream in order.
pub(crate) fn end(stream: usize, driver_call: impl FnOnce() -> Code) -> Code {
    let code = driver_call();
    let ended = Capture::of(stream, None);
    let still_captures = || Driver::get().is_ok_and(|driver| driver.is_captured(ended.stream));
    if matches!(code, CUDA_SUCCESS | CUDA_ERROR_STREAM_CAPTURE_INVALIDATED) || !still_captures() {
        CAPTURES.lock().retain(|capture| !capture.is_same_stream(&ended));
    }
    code
}

/// Destroys `stream` by `driver_call`. If it captures, the capture ends with it.
pub(crate) fn destroy_stream(stream: usize, driver_call: impl FnOnce() -> Code) -> Code {
    if !CAPTURES.lock().iter().any(|capture| capture.stream == stream) {
        return driver_call();
    }
    // The lock was released meanwhile: a capture that begins on a stream while it is destroyed is an error of the program.
    let mut captures = CAPTURES.lock();
    let code = driver_call();
    if code == CUDA_SUCCESS {
        captures.retain(|capture| capture.stream != stream);
    }
    code
}

/// Forgets the captures of a context that is gone, by its number. They have ended with the context.
pub(crate) fn forget(context: u64) {
    CAPTURES.lock().retain(|capture| capture.context != Some(context));
}

/// Runs `record` if no capture is in progress and the process is still served, and lets no capture begin meanwhile. Otherwise
/// returns `None`.
pub(crate) fn without_captures<R>(record: impl FnOnce() -> R) -> Option<R> {
    let captures = CAPTURES.lock();
    (captures.is_empty() && !process::has_stopped_serving()).then(record)
}
