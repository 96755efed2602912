//! The end of a process whose pools have not ended: what they recorded goes to the file before the process is gone.
//!
//! A handler of `exit` asks the writers of all files for one more look at the queues and waits for it, for at most
//! [`PATIENCE`], by looking at a number: a writer that is at work, or waits for a disk, is not disturbed. What was pushed
//! before `exit` was called is in the file then. A process that ends without its exit handlers (`_exit`, `abort`, a signal)
//! loses what was recorded since the last look, which comes every 50 ms, or later on a busy machine or a slow disk.
#![allow(unsafe_code)] // Registers the handler.

use std::time::{Duration, Instant};

use pinpool_os::sync::process::{AtomicBool, Ordering};

/// Longest wait of an exit.
const PATIENCE: Duration = Duration::from_secs(2);
/// Between two looks at the number.
const PAUSE: Duration = Duration::from_micros(200);

/// What is flushed at the end of the process.
pub(super) trait Flush {
    /// Has all that was recorded before this call written, and returns the number of that flush. Does not wait.
    fn ask(&self) -> u64;

    /// Whether the flush of that number is over.
    fn has_flushed(&self, number: u64) -> bool;
}

/// A file is open from now on: the exit of this process calls `flush_open`, which is to call [`flush`].
pub(super) fn attend(flush_open: extern "C" fn()) {
    static REGISTERED: AtomicBool = AtomicBool::new(false);
    // A child of `fork` has the handlers of its parent. Miri runs none.
    if !cfg!(miri) && !REGISTERED.swap(true, Ordering::Relaxed) {
        // SAFETY: the handler does not unwind. If it cannot be registered for lack of memory, exits do not wait.
        unsafe { libc::atexit(flush_open) };
    }
}

/// Flushes what `open` returns, which may wait for the time that it is given.
pub(super) fn flush<W: Flush>(open: impl FnOnce(Duration) -> Vec<W>) {
    let begun = Instant::now();
    let asked: Vec<_> = open(PATIENCE).into_iter().map(|writer| (writer.ask(), writer)).collect();
    for (number, writer) in asked {
        while !writer.has_flushed(number) && begun.elapsed() < PATIENCE {
            std::thread::sleep(PAUSE);
        }
    }
}
