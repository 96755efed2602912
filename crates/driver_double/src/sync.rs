//! Locks that survive a failed test, and waiting threads that cost nothing while there are none.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Locks, whether or not a test panicked with the lock held.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A condition variable that enters the kernel only if a thread waits: an enqueue behind other work must not.
pub(crate) struct Waiters {
    waiting: AtomicU32,
    changed: Condvar,
}

impl Waiters {
    pub(crate) const fn new() -> Self {
        Self { waiting: AtomicU32::new(0), changed: Condvar::new() }
    }

    /// Releases the lock until [`Waiters::wake_all`], or spuriously.
    pub(crate) fn wait<'a, T>(&self, held: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        // Relaxed, all three: the lock is held here and by the thread that wakes.
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let held = self.changed.wait(held).unwrap_or_else(PoisonError::into_inner);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        held
    }

    /// Wakes all waiting threads. Call it with the lock held.
    pub(crate) fn wake_all(&self) {
        if self.waiting.load(Ordering::Relaxed) > 0 {
            self.changed.notify_all();
        }
    }
}
