//! A lock for sections of some ten instructions that leans towards one thread.
//!
//! ```text
//!   leaning   owner: `alone` up, is it shared? no; section; `alone` down             no atomic exchange at all
//!   shared    anybody: exchange on `held`; section; `held` down
//!
//!   a guest finds it leaning: takes `held`, sets `shared`, heavy fence, waits until `alone` is down
//!   the owner has come so often without meeting a guest: it clears `shared`, under `held`
//! ```
//!
//! An exchange costs some twenty cycles, and a get with its put needs two: most of the time of a hit. The owner of a shard
//! comes thousands of times for each visit of somebody else, so the visitor pays: once, a few microseconds, and from then
//! on both take the bit until the owner has long been by itself again. Where the heavy fence cannot be had the lock never
//! leans. A section holds no call out of its room, so whoever is inside can only be late if the kernel took its core
//! away; waiters spin a little and then yield.
//!
//! - (lock I1) Inside is one thread: the owner while `alone` is up and it has then seen `shared` clear, or whoever turned
//!   `held` from false to true, has seen `shared` set and, if it set it itself, has then seen `alone` down.
//! - (lock I2) Whoever comes as the owner does so on one and the same leased seat, so it is one thread at a time (seat I1).
#![allow(unsafe_code)] // The cell in the lock: the two accesses below are the whole of it.

use super::asymmetric_fence;
use super::slot::ThreadSlot;
use crate::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use crate::sync::{Backoff, UnsafeCell};

/// The owner leans again after so many sections in a row: less and frequent guests would pay for the fence too often.
const QUIET: u32 = if cfg!(loom) {
    1
} else if cfg!(miri) {
    8
} else {
    4096
};

/// Who comes.
#[derive(Clone, Copy)]
pub(super) enum Who {
    /// The one thread that the lock may lean to, by its seat (lock I2).
    Owner(#[expect(dead_code, reason = "shown, never asked: who has it is the owner")] ThreadSlot),
    Guest,
}

pub(super) struct BiasedLock<T> {
    content: UnsafeCell<T>,
    alone: AtomicBool,
    shared: AtomicBool,
    held: AtomicBool,
    may_lean: bool,
    /// Sections of the owner since the last guest; under `held`.
    quiet: AtomicU32,
}

// SAFETY: (lock I1) one thread at a time reaches the content, so sharing the lock only ever sends it.
unsafe impl<T: Send> Sync for BiasedLock<T> {}

/// Lowers a flag when the section ends, also by a panic.
struct Lower<'a>(&'a AtomicBool);

impl Drop for Lower<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        // Release: what the section wrote is there for whoever sees the flag down.
        self.0.store(false, Ordering::Release);
    }
}

impl<T> BiasedLock<T> {
    pub(super) fn new(content: T) -> Self {
        let may_lean = asymmetric_fence::available();
        Self {
            content: UnsafeCell::new(content),
            alone: AtomicBool::new(false),
            shared: AtomicBool::new(!may_lean),
            held: AtomicBool::new(false),
            may_lean,
            quiet: AtomicU32::new(0),
        }
    }

    /// Runs `section` alone, after whoever is inside now.
    #[inline]
    pub(super) fn with<R>(&self, who: Who, section: impl FnOnce(&mut T) -> R) -> R {
        let _lower = if matches!(who, Who::Owner(_)) && self.enter_alone() {
            Lower(&self.alone)
        } else {
            self.enter_late(who);
            Lower(&self.held)
        };
        self.run(section)
    }

    /// As the owner, runs `section` with what is `given`, or gives that back at once if somebody is inside.
    #[inline]
    pub(super) fn try_with<A, R>(
        &self,
        owner: ThreadSlot,
        given: A,
        section: impl FnOnce(&mut T, A) -> R,
    ) -> Result<R, A> {
        let _lower = if self.enter_alone() {
            Lower(&self.alone)
        } else if self.take_bit() {
            self.settle(Who::Owner(owner));
            Lower(&self.held)
        } else {
            return Err(given);
        };
        Ok(self.run(|content| section(content, given)))
    }

    #[inline(always)]
    fn enter_alone(&self) -> bool {
        // Relaxed and the fence: either a guest that sets `shared` sees this, or the load below sees `shared` set. What
        // guests wrote came with `held` when the owner itself cleared `shared`.
        self.alone.store(true, Ordering::Relaxed);
        asymmetric_fence::light();
        if self.shared.load(Ordering::Relaxed) {
            // Relaxed: nothing was done.
            self.alone.store(false, Ordering::Relaxed);
            return false;
        }
        true
    }

    #[cold]
    #[inline(never)]
    fn enter_late(&self, who: Who) {
        let backoff = Backoff::new();
        while !self.take_bit() {
            backoff.snooze();
            // Relaxed: only a guess whether the exchange is worth taking the line away from the holder.
            #[cfg(not(loom))]
            while self.held.load(Ordering::Relaxed) {
                backoff.snooze();
            }
        }
        self.settle(who);
    }

    #[inline(always)]
    fn take_bit(&self) -> bool {
        // Acquire: sees all that the last holder wrote. Relaxed on failure: nothing is done then.
        self.held.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// With `held` taken: makes sure that the owner is not inside, or, as the owner, thinks of leaning again.
    fn settle(&self, who: Who) {
        // Relaxed, all but one: `shared` is set by guests and cleared by the owner under `held`, as `quiet` is.
        if let Who::Owner(_) = who {
            let quiet = self.quiet.load(Ordering::Relaxed) + 1;
            let lean = self.may_lean && quiet >= QUIET;
            self.quiet.store(if lean { 0 } else { quiet.min(QUIET) }, Ordering::Relaxed);
            if lean {
                self.shared.store(false, Ordering::Relaxed);
            }
            return;
        }
        self.quiet.store(0, Ordering::Relaxed);
        if self.shared.load(Ordering::Relaxed) {
            return;
        }
        self.shared.store(true, Ordering::Relaxed);
        asymmetric_fence::heavy();
        let backoff = Backoff::new();
        // Acquire: what the owner did before it lowered the flag is seen.
        while self.alone.load(Ordering::Acquire) {
            backoff.snooze();
        }
    }

    #[inline(always)]
    fn run<R>(&self, section: impl FnOnce(&mut T) -> R) -> R {
        // SAFETY: (lock I1) the caller came in by `alone` or `held` and lowers it only after the borrow.
        self.content.with_mut(|content| section(unsafe { &mut *content }))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::engine::idle::thread_cache::slot;

    #[test]
    fn the_owner_loses_nothing_to_guests_that_come_again_and_again() {
        let (owned, guests) = (40 * QUIET, 16);
        let done = AtomicU32::new(0);
        let lock = BiasedLock::new((0u32, 0u32));
        let add = |pair: &mut (u32, u32)| {
            // Two numbers that differ if two were ever inside.
            pair.0 += 1;
            pair.1 += 1;
            assert_eq!(pair.0, pair.1);
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let owner = Who::Owner(slot::current());
                for step in 0..owned {
                    lock.with(owner, add);
                    done.store(step + 1, Ordering::Relaxed);
                }
            });
            // Guests come so far apart that it leans in between.
            for guest in 0..guests {
                while done.load(Ordering::Relaxed) < guest * 2 * QUIET {
                    std::thread::yield_now();
                }
                lock.with(Who::Guest, add);
            }
        });
        assert_eq!(lock.with(Who::Guest, |pair| *pair), (owned + guests, owned + guests));
    }

    #[test]
    fn it_leans_again_after_the_owner_was_long_alone() {
        let lock = BiasedLock::new(());
        let owner = Who::Owner(slot::current());
        let shared = || lock.shared.load(Ordering::Relaxed);
        assert_ne!(shared(), asymmetric_fence::available());
        lock.with(Who::Guest, |()| assert!(shared()));
        (1..QUIET).for_each(|_| lock.with(owner, |()| assert!(shared())));
        lock.with(owner, |()| ());
        assert_ne!(shared(), asymmetric_fence::available());
    }
}

#[cfg(all(test, loom))]
mod loom_models {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    fn seat() -> ThreadSlot {
        // SAFETY: (seat I1) only the first thread of each model comes as the owner.
        unsafe { ThreadSlot::pretend(0) }
    }

    fn owner() -> Who {
        Who::Owner(seat())
    }

    #[test]
    fn loom_the_owner_and_a_guest_are_inside_one_at_a_time() {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(4);
        builder.check(|| {
            let lock = Arc::new(BiasedLock::new(0));
            let guest = lock.clone();
            let guest = thread::spawn(move || (0..2).for_each(|_| guest.with(Who::Guest, |n| *n += 1)));
            // Leaning, then perhaps shared, then leaning again.
            lock.with(owner(), |n| *n += 1);
            let tried = lock.try_with(seat(), 10, |n, ten| *n += ten).is_ok();
            lock.with(owner(), |n| *n += 1);
            guest.join().unwrap();
            assert_eq!(lock.with(Who::Guest, |n| *n), if tried { 14 } else { 4 });
        });
    }

    #[test]
    fn loom_two_guests_are_inside_one_at_a_time() {
        loom::model(|| {
            let lock = Arc::new(BiasedLock::new(0));
            let other = lock.clone();
            let other = thread::spawn(move || other.with(Who::Guest, |n| *n += 1));
            lock.with(Who::Guest, |n| *n += 1);
            other.join().unwrap();
            assert_eq!(lock.with(owner(), |n| *n), 2);
        });
    }

    #[test]
    fn loom_an_owner_that_leans_again_meets_the_next_guest() {
        loom::model(|| {
            let lock = Arc::new(BiasedLock::new(0));
            lock.with(Who::Guest, |n| *n += 1);
            let guest = lock.clone();
            let guest = thread::spawn(move || guest.with(Who::Guest, |n| *n += 1));
            for _ in 0..3 {
                lock.with(owner(), |n| *n += 1);
            }
            guest.join().unwrap();
            assert_eq!(lock.with(owner(), |n| *n), 5);
        });
    }
}
