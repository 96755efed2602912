//! A bell that costs nothing when nobody listens: an enqueue behind other work must not enter the kernel.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Condvar, MutexGuard, PoisonError};

/// Threads wait with one lock and are rung with it held.
pub(crate) struct Bell {
    listening: AtomicU32,
    bell: Condvar,
}

impl Bell {
    pub(crate) const fn new() -> Self {
        Self { listening: AtomicU32::new(0), bell: Condvar::new() }
    }

    /// Lets go of the lock until the bell rings, or for no reason.
    pub(crate) fn wait<'a, T>(&self, held: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        // Relaxed, all three: the lock is held here and by who rings.
        self.listening.fetch_add(1, Ordering::Relaxed);
        let held = self.bell.wait(held).unwrap_or_else(PoisonError::into_inner);
        self.listening.fetch_sub(1, Ordering::Relaxed);
        held
    }

    /// Wakes all who listen.
    pub(crate) fn ring(&self) {
        if self.listening.load(Ordering::Relaxed) > 0 {
            self.bell.notify_all();
        }
    }
}
