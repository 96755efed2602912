//! A lock for sections of about ten instructions that is biased to one thread, the owner of the shard.
//!
//! ```text
//!   biased   owner: set `owner_inside`; `shared` clear? section; clear `owner_inside`     no atomic exchange at all
//!   shared   any thread: exchange on `held`; section; clear `held`
//!
//!   a remote thread finds it biased: takes `held`, sets `shared`, heavy fence, waits until `owner_inside` is clear
//!   the owner came often enough without a remote thread: it clears `shared`, while it holds `held`
//! ```
//!
//! An exchange costs some twenty cycles and a take with its put needs two, which is most of the time of a hit. The owner
//! enters thousands of times for each entry of another thread, so the other thread carries the cost: one heavy fence of a
//! few microseconds. After that both use the exchange, until the owner has entered many times in a row. Where the heavy fence is not available the lock is never
//! biased. A section calls nothing outside its module, so a thread inside is late only if the kernel preempted it; waiters
//! spin a little and then yield.
//!
//! Prior art: lock reservation and biased locking (Kawachiya, Koseki, Onodera, OOPSLA 2002).
//!
//! - **lock-I1**: One thread is inside: the owner while `owner_inside` is set and it has then seen `shared` clear, or the
//!   thread that turned `held` from false to true, has seen `shared` set and, if it set it itself, has then seen
//!   `owner_inside` clear.
//! - **lock-I2**: Every owner access uses one and the same leased slot, so it is one thread at a time (slot-I1).
#![allow(unsafe_code)] // The cell in the lock, and one system call.

use super::slot::ThreadSlot;
use crate::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use crate::sync::{Backoff, UnsafeCell};

/// The lock is biased again after this many sections of the owner in a row. Fewer would make frequent remote threads pay
/// for the fence too often.
const REBIAS_AFTER: u32 = if cfg!(loom) {
    1
} else if cfg!(miri) {
    8
} else {
    4096
};

/// How a thread enters.
#[derive(Clone, Copy)]
pub(super) enum LockAccess {
    /// The thread that the lock may be biased to (lock-I2).
    Owner(#[expect(dead_code, reason = "a proof: only the owner has it")] ThreadSlot),
    Remote,
}

pub(super) struct BiasedLock<T> {
    content: UnsafeCell<T>,
    owner_inside: AtomicBool,
    shared: AtomicBool,
    held: AtomicBool,
    can_bias: bool,
    /// Sections of the owner since the last remote one; written under `held`.
    unshared_sections: AtomicU32,
}

// SAFETY: (lock-I1) one thread at a time reaches the content, so sharing the lock only sends the content.
unsafe impl<T: Send> Sync for BiasedLock<T> {}

/// Clears a flag when the section ends, also by a panic.
struct ClearOnDrop<'a>(&'a AtomicBool);

impl Drop for ClearOnDrop<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        // Release: a thread that sees the flag clear sees what the section wrote.
        self.0.store(false, Ordering::Release);
    }
}

impl<T> BiasedLock<T> {
    pub(super) fn new(content: T) -> Self {
        let can_bias = asymmetric_fence::available();
        Self {
            content: UnsafeCell::new(content),
            owner_inside: AtomicBool::new(false),
            shared: AtomicBool::new(!can_bias),
            held: AtomicBool::new(false),
            can_bias,
            unshared_sections: AtomicU32::new(0),
        }
    }

    /// Runs `section` alone; waits for the thread that is inside.
    #[inline]
    pub(super) fn with<R>(&self, access: LockAccess, section: impl FnOnce(&mut T) -> R) -> R {
        let _clear = if matches!(access, LockAccess::Owner(_)) && self.enter_biased() {
            ClearOnDrop(&self.owner_inside)
        } else {
            self.enter_shared(access);
            ClearOnDrop(&self.held)
        };
        self.run(section)
    }

    /// Runs `section` with `argument` as the owner, or returns `argument` at once if another thread is inside.
    #[inline]
    pub(super) fn try_with<A, R>(
        &self,
        owner: ThreadSlot,
        argument: A,
        section: impl FnOnce(&mut T, A) -> R,
    ) -> Result<R, A> {
        let _clear = if self.enter_biased() {
            ClearOnDrop(&self.owner_inside)
        } else if self.try_hold() {
            self.settle(LockAccess::Owner(owner));
            ClearOnDrop(&self.held)
        } else {
            return Err(argument);
        };
        Ok(self.run(|content| section(content, argument)))
    }

    #[inline(always)]
    fn enter_biased(&self) -> bool {
        // Relaxed, with the fence: either a remote thread that sets `shared` sees this store, or the load below sees
        // `shared` set. The owner acquired `held` when it cleared `shared`, so it has seen what remote threads wrote.
        self.owner_inside.store(true, Ordering::Relaxed);
        asymmetric_fence::light();
        if self.shared.load(Ordering::Relaxed) {
            // Relaxed: no section ran.
            self.owner_inside.store(false, Ordering::Relaxed);
            return false;
        }
        true
    }

    #[cold]
    #[inline(never)]
    fn enter_shared(&self, access: LockAccess) {
        let backoff = Backoff::new();
        while !self.try_hold() {
            backoff.snooze();
            // Relaxed: a guess whether the exchange may succeed; it would take the line from the holder.
            #[cfg(not(loom))]
            while self.held.load(Ordering::Relaxed) {
                backoff.snooze();
            }
        }
        self.settle(access);
    }

    #[inline(always)]
    fn try_hold(&self) -> bool {
        // Acquire: sees what the last holder wrote. Relaxed on failure: no section runs.
        self.held.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Called with `held`: a remote thread ensures that the owner is not inside; the owner may bias the lock again.
    fn settle(&self, access: LockAccess) {
        // Relaxed, except the last load: `shared` and `unshared_sections` are written under `held`.
        if let LockAccess::Owner(_) = access {
            let unshared_sections = self.unshared_sections.load(Ordering::Relaxed) + 1;
            let rebias = self.can_bias && unshared_sections >= REBIAS_AFTER;
            self.unshared_sections
                .store(if rebias { 0 } else { unshared_sections.min(REBIAS_AFTER) }, Ordering::Relaxed);
            if rebias {
                self.shared.store(false, Ordering::Relaxed);
            }
            return;
        }
        self.unshared_sections.store(0, Ordering::Relaxed);
        if self.shared.load(Ordering::Relaxed) {
            return;
        }
        self.shared.store(true, Ordering::Relaxed);
        asymmetric_fence::heavy();
        let backoff = Backoff::new();
        // Acquire: sees what the owner wrote before it cleared the flag.
        while self.owner_inside.load(Ordering::Acquire) {
            backoff.snooze();
        }
    }

    #[inline(always)]
    fn run<R>(&self, section: impl FnOnce(&mut T) -> R) -> R {
        // SAFETY: (lock-I1) the caller set `owner_inside` or `held` and clears it only after the borrow.
        self.content.with_mut(|content| section(unsafe { &mut *content }))
    }
}

/// A fence between a store and a later load, split into a frequent half that costs nothing and a rare half that pays for
/// both (compare folly's `AsymmetricThreadFence`).
///
/// Two threads that each store one flag and then load the other's must not both miss the other's store. That takes a
/// fence in each, some twenty cycles. Where the kernel can interrupt every core that runs this process (`membarrier`), the
/// rare half asks it to, and the frequent half only keeps the compiler from reordering.
#[cfg(all(target_os = "linux", not(any(loom, miri))))]
pub(super) mod asymmetric_fence {
    use std::sync::OnceLock;
    use std::sync::atomic::{Ordering, compiler_fence};
    use std::time::Duration;

    /// Whether [`heavy`] orders [`light`]. Asks the kernel once.
    pub(super) fn available() -> bool {
        static REGISTERED: OnceLock<bool> = OnceLock::new();
        *REGISTERED.get_or_init(|| membarrier(libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED))
    }

    /// The frequent half.
    #[inline(always)]
    pub(super) fn light() {
        // SeqCst, for the compiler alone: `heavy` orders the processors.
        compiler_fence(Ordering::SeqCst);
    }

    /// The rare half: some microseconds.
    #[cold]
    pub(in crate::engine::idle::thread_cache) fn heavy() {
        // After registration the call fails only without memory or under a sandbox set up later. Store buffers drain
        // within a millisecond.
        if !membarrier(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn membarrier(command: libc::c_int) -> bool {
        // SAFETY: the call reads and writes no memory of this process.
        let answer = unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) };
        answer == 0
    }
}

/// Both halves are the plain fence: under a model, and elsewhere, where [`available`](asymmetric_fence::available) is
/// false and no caller relies on it.
#[cfg(not(all(target_os = "linux", not(any(loom, miri)))))]
pub(super) mod asymmetric_fence {
    use crate::sync::atomic::{Ordering, fence};

    pub(super) fn available() -> bool {
        cfg!(any(loom, miri))
    }

    pub(in crate::engine::idle::thread_cache) fn heavy() {
        // SeqCst: the full fence.
        fence(Ordering::SeqCst);
    }

    pub(super) use heavy as light;
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::engine::idle::thread_cache::slot;

    #[test]
    fn owner_and_remote_threads_are_inside_one_at_a_time() {
        let (owned, remotes) = (40 * REBIAS_AFTER, 16);
        let done = AtomicU32::new(0);
        let lock = BiasedLock::new((0u32, 0u32));
        let add = |pair: &mut (u32, u32)| {
            // Two numbers that differ if two threads were ever inside.
            pair.0 += 1;
            pair.1 += 1;
            assert_eq!(pair.0, pair.1);
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let owner = LockAccess::Owner(slot::current());
                for step in 0..owned {
                    lock.with(owner, add);
                    done.store(step + 1, Ordering::Relaxed);
                }
            });
            // Remote threads come so seldom that the lock is biased in between.
            for remote in 0..remotes {
                while done.load(Ordering::Relaxed) < remote * 2 * REBIAS_AFTER {
                    std::thread::yield_now();
                }
                lock.with(LockAccess::Remote, add);
            }
        });
        assert_eq!(lock.with(LockAccess::Remote, |pair| *pair), (owned + remotes, owned + remotes));
    }

    #[test]
    fn the_lock_is_biased_again_after_the_owner_was_long_alone() {
        let lock = BiasedLock::new(());
        let owner = LockAccess::Owner(slot::current());
        let shared = || lock.shared.load(Ordering::Relaxed);
        assert_ne!(shared(), asymmetric_fence::available());
        lock.with(LockAccess::Remote, |()| assert!(shared()));
        (1..REBIAS_AFTER).for_each(|_| lock.with(owner, |()| assert!(shared())));
        lock.with(owner, |()| ());
        assert_ne!(shared(), asymmetric_fence::available());
    }
}

#[cfg(all(test, loom))]
mod loom_models {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    fn slot() -> ThreadSlot {
        // SAFETY: (slot-I1) only the first thread of each model uses it.
        unsafe { ThreadSlot::fake(0) }
    }

    fn owner() -> LockAccess {
        LockAccess::Owner(slot())
    }

    #[test]
    fn loom_the_owner_and_a_remote_thread_are_inside_one_at_a_time() {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(4);
        builder.check(|| {
            let lock = Arc::new(BiasedLock::new(0));
            let remote = lock.clone();
            let remote = thread::spawn(move || (0..2).for_each(|_| remote.with(LockAccess::Remote, |n| *n += 1)));
            // Biased, then perhaps shared, then biased again.
            lock.with(owner(), |n| *n += 1);
            let tried = lock.try_with(slot(), 10, |n, ten| *n += ten).is_ok();
            lock.with(owner(), |n| *n += 1);
            remote.join().unwrap();
            assert_eq!(lock.with(LockAccess::Remote, |n| *n), if tried { 14 } else { 4 });
        });
    }

    #[test]
    fn loom_two_remote_threads_are_inside_one_at_a_time() {
        loom::model(|| {
            let lock = Arc::new(BiasedLock::new(0));
            let other = lock.clone();
            let other = thread::spawn(move || other.with(LockAccess::Remote, |n| *n += 1));
            lock.with(LockAccess::Remote, |n| *n += 1);
            other.join().unwrap();
            assert_eq!(lock.with(owner(), |n| *n), 2);
        });
    }

    #[test]
    fn loom_a_lock_that_is_biased_again_admits_the_next_remote_thread_alone() {
        loom::model(|| {
            let lock = Arc::new(BiasedLock::new(0));
            lock.with(LockAccess::Remote, |n| *n += 1);
            let remote = lock.clone();
            let remote = thread::spawn(move || remote.with(LockAccess::Remote, |n| *n += 1));
            for _ in 0..3 {
                lock.with(owner(), |n| *n += 1);
            }
            remote.join().unwrap();
            assert_eq!(lock.with(owner(), |n| *n), 5);
        });
    }
}
