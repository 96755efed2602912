//! Atomics, cells and locks that a model checker can replace.
//!
//! Under `cfg(loom)` the same names are loom's, which runs every interleaving of the models in the modules that use them.
//! Statics use [`process`], because loom's atomics cannot be statics; state that no model covers uses `process` and
//! [`plain`].

use std::time::Instant;

pub(crate) use crossbeam::utils::CachePadded;

#[cfg(not(loom))]
pub(crate) use std::sync::atomic;

#[cfg(loom)]
pub(crate) use loom::sync::atomic;

/// Atomics that are never modelled.
pub(crate) mod process {
    pub(crate) use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
}

#[cfg(not(loom))]
pub(crate) use crossbeam::utils::Backoff;

/// Locks that are never modelled.
pub(crate) mod plain {
    pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard};
}

#[cfg(not(loom))]
pub(crate) use parking_lot::{Mutex, MutexGuard};

#[cfg(loom)]
pub(crate) use loom::sync::MutexGuard;

/// A condition variable that takes the guard and returns it.
#[derive(Debug, Default)]
pub(crate) struct Condvar(#[cfg(not(loom))] parking_lot::Condvar, #[cfg(loom)] loom::sync::Condvar);

impl Condvar {
    pub(crate) fn notify_one(&self) {
        self.0.notify_one();
    }

    pub(crate) fn notify_all(&self) {
        self.0.notify_all();
    }

    /// Sleeps until it is notified.
    #[cfg(not(loom))]
    pub(crate) fn wait<'a, T>(&self, mut guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        self.0.wait(&mut guard);
        guard
    }

    #[cfg(loom)]
    pub(crate) fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        self.0.wait(guard).unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Sleeps until it is notified or `until` has passed; `true` if it timed out.
    #[cfg(not(loom))]
    pub(crate) fn wait_until<'a, T>(&self, mut guard: MutexGuard<'a, T>, until: Instant) -> (MutexGuard<'a, T>, bool) {
        let late = self.0.wait_until(&mut guard, until).timed_out();
        (guard, late)
    }

    /// In a model time does not pass: loom reports a thread that is never notified.
    #[cfg(loom)]
    pub(crate) fn wait_until<'a, T>(&self, guard: MutexGuard<'a, T>, _until: Instant) -> (MutexGuard<'a, T>, bool) {
        (self.wait(guard), false)
    }
}

/// loom's mutex without poisoning.
#[cfg(loom)]
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

#[cfg(loom)]
impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(loom::sync::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> loom::sync::MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// In a model a wait lets loom run another thread.
#[cfg(loom)]
pub(crate) struct Backoff;

#[cfg(loom)]
impl Backoff {
    pub(crate) fn new() -> Self {
        Self
    }

    pub(crate) fn snooze(&self) {
        loom::thread::yield_now();
    }

    pub(crate) fn is_completed(&self) -> bool {
        false
    }
}

#[cfg(loom)]
pub(crate) use loom::cell::UnsafeCell;

/// `std`'s cell with the interface of loom's.
#[cfg(not(loom))]
#[derive(Debug)]
pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> UnsafeCell<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    /// Passes the address to `f`; the caller proves that its access is sound.
    #[inline(always)]
    pub(crate) fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}
