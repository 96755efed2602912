//! Locks and waits that survive a failed test.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Locks the mutex, even if a test panicked with the lock held.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Releases the lock until the condition variable is notified, or spuriously.
pub(crate) fn wait<'a, T>(changed: &Condvar, held: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    changed.wait(held).unwrap_or_else(PoisonError::into_inner)
}
