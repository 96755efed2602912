//! Waits of several processes for something that others change in shared memory.

use std::time::Duration;

use super::futex::{sleep_while, wake};
use pinpool_os::sync::process::{AtomicU64, Ordering};

/// A number that each change raises, and how many wait for one: an event count. New when all of its bytes are 0.
#[derive(Debug)]
#[repr(C)]
pub struct EventCount {
    events: AtomicU64,
    /// Too high by those that died waiting, which costs a call of the kernel at each change.
    waiting: AtomicU64,
}

impl EventCount {
    /// After a change: wakes at most `threads` of those that wait. No call of the kernel while nobody does.
    pub fn notify(&self, threads: i32) {
        self.events.fetch_add(1, Ordering::SeqCst);
        if self.waiting.load(Ordering::SeqCst) > 0 {
            wake(&self.events, threads);
        }
    }

    /// Calls `found` until it finds something, after each change or when `slice` has passed; gives up when `is_late`. No change
    /// is missed: one that comes after `found` has looked ends the sleep that follows.
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
