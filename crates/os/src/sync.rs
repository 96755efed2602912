//! Atomics, cells and locks that a model checker can replace.
//!
//! Under `cfg(pinpool_loom)` the same names are loom's types. loom runs every interleaving of the models in the modules that use
//! these types. Statics use [`unmodeled`], because loom's atomics cannot be statics. So does state that no model covers.

pub use crossbeam_utils::CachePadded;

#[cfg(not(pinpool_loom))]
pub use std::sync::atomic;

#[cfg(pinpool_loom)]
pub use loom::sync::atomic;

#[cfg(not(pinpool_loom))]
pub use crossbeam_utils::Backoff;

/// Atomics and locks that are never modeled.
///
/// The locks are `std`'s locks, which on Linux are one futex word each, without a table of waiting threads. A forked child would
/// inherit such a table but not its threads, and would follow pointers into stacks that the child may use for its own threads.
pub mod unmodeled {
    pub use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
    use std::sync::{LockResult, PoisonError, TryLockError};
    use std::time::Instant;

    pub use std::sync::MutexGuard;

    /// A mutex without poisoning: the guarded value is valid at every point at which a thread may unwind.
    #[derive(Debug, Default)]
    pub struct Mutex<T>(std::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub const fn new(value: T) -> Self {
            Self(std::sync::Mutex::new(value))
        }

        pub fn lock(&self) -> MutexGuard<'_, T> {
            unpoisoned(self.0.lock())
        }

        /// Locks the mutex, or returns `None` if the mutex is already locked.
        pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
            match self.0.try_lock() {
                Ok(guard) => Some(guard),
                Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) => None,
            }
        }

        pub fn get_mut(&mut self) -> &mut T {
            unpoisoned(self.0.get_mut())
        }

        pub fn into_inner(self) -> T {
            unpoisoned(self.0.into_inner())
        }
    }

    /// A condition variable. A wait takes the guard and returns it, and may end without a notification.
    #[derive(Debug, Default)]
    pub struct Condvar(std::sync::Condvar);

    impl Condvar {
        pub fn notify_one(&self) {
            self.0.notify_one();
        }

        pub fn notify_all(&self) {
            self.0.notify_all();
        }

        /// Sleeps until it is notified.
        pub fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
            unpoisoned(self.0.wait(guard))
        }

        /// Sleeps until it is notified or `until` has passed. Returns the guard, and whether the wait timed out.
        pub fn wait_until<'a, T>(&self, guard: MutexGuard<'a, T>, until: Instant) -> (MutexGuard<'a, T>, bool) {
            let (guard, waited) =
                unpoisoned(self.0.wait_timeout(guard, until.saturating_duration_since(Instant::now())));
            (guard, waited.timed_out())
        }
    }

    fn unpoisoned<T>(result: LockResult<T>) -> T {
        result.unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(not(pinpool_loom))]
pub use unmodeled::{Condvar, Mutex, MutexGuard};

#[cfg(pinpool_loom)]
pub use modeled::{Condvar, Mutex, MutexGuard};

/// loom's locks with the interface of [`unmodeled`].
#[cfg(pinpool_loom)]
mod modeled {
    use std::sync::PoisonError;
    use std::time::Instant;

    pub use loom::sync::MutexGuard;

    #[derive(Debug, Default)]
    pub struct Mutex<T>(loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub fn new(value: T) -> Self {
            Self(loom::sync::Mutex::new(value))
        }

        pub fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner)
        }
    }

    #[derive(Debug, Default)]
    pub struct Condvar(loom::sync::Condvar);

    impl Condvar {
        pub fn notify_one(&self) {
            self.0.notify_one();
        }

        pub fn notify_all(&self) {
            self.0.notify_all();
        }

        pub fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
            self.0.wait(guard).unwrap_or_else(PoisonError::into_inner)
        }

        /// Waits without a timeout, since time does not pass in a model. loom reports a thread that is never notified.
        pub fn wait_until<'a, T>(&self, guard: MutexGuard<'a, T>, _until: Instant) -> (MutexGuard<'a, T>, bool) {
            (self.wait(guard), false)
        }
    }
}

/// The replacement for crossbeam's `Backoff` in a model: a wait lets loom run another thread.
#[cfg(pinpool_loom)]
pub struct Backoff;

#[cfg(pinpool_loom)]
impl Backoff {
    pub fn new() -> Self {
        Self
    }

    pub fn snooze(&self) {
        loom::thread::yield_now();
    }

    pub fn is_completed(&self) -> bool {
        false
    }
}

#[cfg(pinpool_loom)]
pub use loom::cell::UnsafeCell;

/// `std`'s cell with the interface of loom's.
#[cfg(not(pinpool_loom))]
#[derive(Debug)]
pub struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(pinpool_loom))]
impl<T> UnsafeCell<T> {
    pub fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    /// Passes the address to `f`; the caller proves that its access is sound.
    #[inline(always)]
    pub fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}
