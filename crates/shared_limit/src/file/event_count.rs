//! Waits across processes for a change in shared memory.

use std::time::Duration;

use super::futex::{sleep_while, wake};
use pinpool_os::sync::unmodeled::{AtomicU64, Ordering};

/// An event count: a number that increases with each change, and the number of waiting threads. Initially all bytes are 0.
#[derive(Debug)]
#[repr(C)]
pub struct EventCount {
    events: AtomicU64,
    /// The number of waiting threads. It is too high if threads died while waiting; then each change makes a system call.
    waiting: AtomicU64,
}

impl EventCount {
    /// Wakes at most `threads` waiting threads after a change. Makes no system call if none waits.
    pub fn notify(&self, threads: i32) {
        self.events.fetch_add(1, Ordering::SeqCst);
        if self.waiting.load(Ordering::SeqCst) > 0 {
            wake(&self.events, threads);
        }
    }

    /// Calls `found` immediately, and again after each change or when `slice` has passed, until `found` returns a value or an
    /// error, or `is_late` returns true. No change is missed: a change during or after a call of `found` ends the next sleep.
    pub fn wait<T, E>(
        &self,
        slice: Duration,
        mut is_late: impl FnMut() -> bool,
        mut found: impl FnMut() -> Result<Option<T>, E>,
    ) -> Result<Option<T>, E> {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let outcome = loop {
            let seen = self.events.load(Ordering::SeqCst);
            match found() {
                Ok(None) if !is_late() => sleep_while(&self.events, seen, slice),
                outcome => break outcome,
            }
        };
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        outcome
    }
}
