//! A lock of one bit for sections of some ten instructions.
//!
//! Taking it is one atomic exchange and leaving it a plain store, half of what a mutex that can sleep needs. A section
//! holds no call to anything outside its room, so a holder can only be late if the kernel took its core away; waiters
//! spin a little and then yield.
//!
//! Invariant (spin I1): whoever turned `held` from false to true is alone with `inside` until it stores false.
#![allow(unsafe_code)] // The cell behind the bit: the two accesses below are the whole of it.

use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Backoff, UnsafeCell};

pub(super) struct SpinLock<T> {
    held: AtomicBool,
    inside: UnsafeCell<T>,
}

// SAFETY: (spin I1) one thread at a time reaches `inside`, so sharing the lock only ever sends the value.
unsafe impl<T: Send> Sync for SpinLock<T> {}

/// Opens the lock when the section ends, also by a panic of a caller's assertion.
struct Release<'a>(&'a AtomicBool);

impl Drop for Release<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        // Release: what the section wrote is there for whoever acquires the bit next.
        self.0.store(false, Ordering::Release);
    }
}

impl<T> SpinLock<T> {
    pub(super) fn new(inside: T) -> Self {
        Self { held: AtomicBool::new(false), inside: UnsafeCell::new(inside) }
    }

    /// Runs `section` alone, after whoever is inside now.
    #[inline]
    pub(super) fn with<R>(&self, section: impl FnOnce(&mut T) -> R) -> R {
        if !self.acquire_now() {
            self.acquire_late();
        }
        // Called in one place only, so that the section is compiled into the caller.
        self.run(section)
    }

    /// Runs `section` with what is `given`, or gives that back at once if somebody is inside.
    #[inline]
    pub(super) fn try_with<A, R>(&self, given: A, section: impl FnOnce(&mut T, A) -> R) -> Result<R, A> {
        if self.acquire_now() { Ok(self.run(|inside| section(inside, given))) } else { Err(given) }
    }

    #[inline(always)]
    fn acquire_now(&self) -> bool {
        // Acquire: sees all that the last holder wrote.
        self.held.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    #[cold]
    fn acquire_late(&self) {
        let backoff = Backoff::new();
        while !self.acquire_now() {
            backoff.snooze();
            // Relaxed: only a guess whether the exchange is worth taking the line away from the holder.
            #[cfg(not(loom))]
            while self.held.load(Ordering::Relaxed) {
                backoff.snooze();
            }
        }
    }

    #[inline(always)]
    fn run<R>(&self, section: impl FnOnce(&mut T) -> R) -> R {
        let _release = Release(&self.held);
        // SAFETY: (spin I1) the bit was turned by this thread just before, and `_release` opens it after the borrow.
        self.inside.with_mut(|inside| section(unsafe { &mut *inside }))
    }
}

#[cfg(all(test, loom))]
mod loom_models {
    use super::*;
    use loom::sync::Arc;

    #[test]
    fn loom_one_at_a_time_and_nothing_lost() {
        loom::model(|| {
            let lock = Arc::new(SpinLock::new(0));
            let other = lock.clone();
            let thread = loom::thread::spawn(move || other.with(|n| *n += 1));
            let tried = lock.try_with(10, |n, ten| *n += ten);
            thread.join().unwrap();
            let expected = if tried.is_ok() { 11 } else { 1 };
            assert_eq!(lock.with(|n| *n), expected);
        });
    }
}
