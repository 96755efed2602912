//! The one door to atomics, cells and waiting, so that a model checker can stand in.
//!
//! Under `cfg(loom)` the same names are loom's, which runs every interleaving of the models at the foot of the rooms
//! that use them. Statics that live as long as the process take [`process`]: loom's atomics cannot be statics.

pub(crate) use crossbeam::utils::CachePadded;

#[cfg(not(loom))]
pub(crate) use std::sync::atomic;

#[cfg(loom)]
pub(crate) use loom::sync::atomic;

/// Atomics that are never modelled: statics of the process.
pub(crate) mod process {
    pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
}

#[cfg(not(loom))]
pub(crate) use crossbeam::utils::Backoff;

/// Locks of rooms that no model runs: always the real ones.
pub(crate) mod plain {
    pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard};
}

#[cfg(not(loom))]
pub(crate) use parking_lot::Mutex;

/// loom's mutex without poisoning.
#[cfg(loom)]
#[derive(Debug)]
pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

#[cfg(loom)]
impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(loom::sync::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> loom::sync::MutexGuard<'_, T> {
        match self.0.lock() {
            Ok(guard) => guard,
            Err(poisoned) => poisoned.into_inner(),
        }
    }
}

/// Under the model waiting is a hint to run somebody else.
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

    /// Hands out the address; what may be done with it is the caller's proof.
    #[inline(always)]
    pub(crate) fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}
