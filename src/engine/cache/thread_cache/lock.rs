//! A one-byte lock around short sections: about ten instructions on the fast path.
//!
//! The fast path enters by one atomic exchange, leaves by one store and never waits: if the lock is held or the slow path is
//! required, the thread takes the slow path. A section calls neither user code nor the driver, and allocates only for the first
//! mark of a list. So a thread rarely stays inside for long unless the kernel preempts it. Waiting threads spin, then
//! yield, then sleep, so that a real-time thread lets the holder run.
//!
//! - **lock-I1**: At most one thread is inside: the thread that found a state other than [`HELD`] in its exchange.
//! - **lock-I2**: A thread that leaves restores the state that it found, unless it sets or clears the slow-path flag. So one
//!   exchange tells the fast path whether it may enter.
#![allow(unsafe_code)] // Gives access to the content through a cell.

use std::time::Duration;

use pinpool_os::sync::atomic::{AtomicU8, Ordering};
use pinpool_os::sync::{Backoff, UnsafeCell};

/// Pause between two attempts of a thread that has waited longer than any section takes, because the holder was preempted.
const PAUSE: Duration = Duration::from_micros(50);

const FREE: u8 = 0;
const HELD: u8 = 1;
/// Free, and hits and returns must take the slow path.
const SLOW: u8 = 2;

#[repr(C)] // The state shares a cache line with the first fields of the content.
pub(super) struct Lock<T> {
    state: AtomicU8,
    content: UnsafeCell<T>,
}

// SAFETY: (lock-I1) one thread at a time reaches the content, so sharing the lock only moves the content between threads.
unsafe impl<T: Send> Sync for Lock<T> {}

/// Unlocks when a section ends, even if the section panics.
struct Unlock<'a> {
    state: &'a AtomicU8,
    /// The state to store.
    then: u8,
}

impl Drop for Unlock<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        // Release: the next holder sees what the section wrote.
        self.state.store(self.then, Ordering::Release);
    }
}

impl<T> Lock<T> {
    pub(super) fn new(content: T) -> Self {
        Self { state: AtomicU8::new(FREE), content: UnsafeCell::new(content) }
    }

    /// Waits for the lock, and runs `section` with exclusive access.
    pub(super) fn with<R>(&self, section: impl FnOnce(&mut T) -> R) -> R {
        let _unlock = self.lock();
        // SAFETY: (lock-I1) this thread holds the lock until `_unlock` is dropped, after the borrow.
        self.content.with_mut(|content| section(unsafe { &mut *content }))
    }

    /// Runs `section`, or returns `None` if the lock is held or the slow path is required. The section must not panic.
    #[inline(always)]
    pub(super) fn try_fast<R>(&self, section: impl FnOnce(&mut T) -> Option<R>) -> Option<R> {
        let found = self.exchange();
        if found != FREE {
            if found == SLOW {
                // Release: passes on what the last holder wrote, because this store ends the release sequence of that holder.
                self.state.store(SLOW, Ordering::Release);
            }
            return None;
        }
        // SAFETY: (lock-I1) as in `with`; the borrow ends before the store below.
        let result = self.content.with_mut(|content| section(unsafe { &mut *content }));
        // Release: the next holder sees what the section wrote.
        self.state.store(FREE, Ordering::Release);
        result
    }

    /// Waits for the lock, and runs `section`, which returns whether hits and returns must take the slow path from now on. When
    /// this function returns, no hit or return that began before is still inside.
    pub(super) fn set_slow_path(&self, section: impl FnOnce(&mut T) -> bool) {
        let mut unlock = self.lock();
        // SAFETY: (lock-I1) as in `with`.
        let requires_slow_path = self.content.with_mut(|content| section(unsafe { &mut *content }));
        unlock.then = if requires_slow_path { SLOW } else { FREE };
    }

    /// Returns whether a hit or return would have to take the slow path now: it is required, or another thread is inside.
    pub(super) fn requires_slow_path(&self) -> bool {
        // Relaxed: a hint, which may be outdated when this returns.
        self.state.load(Ordering::Relaxed) != FREE
    }

    /// Tries to enter, and returns the state that was found. The thread is inside unless this state is [`HELD`].
    #[inline(always)]
    fn exchange(&self) -> u8 {
        // Acquire: sees what the last holder wrote. Loom would mistake a swap of `HELD` for `HELD` for progress, so its models
        // use compare-exchanges.
        #[cfg(pinpool_loom)]
        return [FREE, SLOW]
            .into_iter()
            .find(|&state| self.state.compare_exchange(state, HELD, Ordering::Acquire, Ordering::Relaxed).is_ok())
            .unwrap_or(HELD);
        #[cfg(not(pinpool_loom))]
        self.state.swap(HELD, Ordering::Acquire)
    }

    #[inline]
    fn try_lock(&self) -> Option<Unlock<'_>> {
        let then = self.exchange();
        (then != HELD).then(|| Unlock { state: &self.state, then })
    }

    #[inline]
    fn lock(&self) -> Unlock<'_> {
        self.try_lock().unwrap_or_else(|| self.wait())
    }

    #[cold]
    fn wait(&self) -> Unlock<'_> {
        let backoff = Backoff::new();
        loop {
            if backoff.is_completed() {
                std::thread::sleep(PAUSE);
            } else {
                backoff.snooze();
            }
            // Relaxed: a guess. An exchange takes the cache line from the holder, so it is made only if it may succeed.
            if self.state.load(Ordering::Relaxed) != HELD
                && let Some(unlock) = self.try_lock()
            {
                return unlock;
            }
        }
    }
}

#[cfg(all(test, not(pinpool_loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    #[test]
    fn threads_are_inside_one_at_a_time_by_whichever_way_they_enter() {
        let rounds = if cfg!(miri) { 40 } else { 20_000 };
        let (lock, tried) = (Lock::new((0u32, 0u32)), AtomicU32::new(0));
        let add = |pair: &mut (u32, u32)| {
            // Two numbers that differ if two threads are inside.
            pair.0 += 1;
            pair.1 += 1;
            assert_eq!(pair.0, pair.1);
        };
        let add_fast = |pair: &mut (u32, u32)| {
            add(pair);
            Some(())
        };
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| (0..rounds).for_each(|_| lock.with(add)));
                scope.spawn(|| {
                    let entered = (0..rounds).filter_map(|_| lock.try_fast(add_fast)).count();
                    tried.fetch_add(u32::try_from(entered).unwrap(), Ordering::Relaxed);
                });
            }
        });
        let total = 2 * rounds + tried.load(Ordering::Relaxed);
        assert_eq!(lock.with(|pair| *pair), (total, total));
    }

    #[test]
    fn the_slow_path_flag_keeps_hits_out_and_nothing_else() {
        let lock = Lock::new(0);
        lock.set_slow_path(|_| true);
        assert_eq!(lock.try_fast(|n| Some(*n)), None);
        lock.with(|n| *n += 1);
        assert_eq!(lock.try_fast(|n| Some(*n)), None);
        lock.set_slow_path(|_| false);
        assert_eq!(lock.try_fast(|n| Some(*n)), Some(1));
    }

    /// Binds the calling thread to `core`, and returns it for [`schedule`].
    #[cfg(all(target_os = "linux", not(miri)))]
    fn stay_on(core: usize) -> libc::pthread_t {
        // SAFETY: a bit set, for which all zeros is the empty set.
        let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
        // SAFETY: the kernel named the core, so it is in the set.
        unsafe { libc::CPU_SET(core, &mut set) };
        // SAFETY: the kernel reads a set of this size, for the calling thread.
        assert_eq!(unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set) }, 0);
        // SAFETY: has no precondition.
        unsafe { libc::pthread_self() }
    }

    /// Sets the scheduling policy and priority of `thread`. Returns whether the system allows it.
    #[cfg(all(target_os = "linux", not(miri)))]
    fn schedule(thread: libc::pthread_t, policy: i32, priority: i32) -> bool {
        let priority = libc::sched_param { sched_priority: priority };
        // SAFETY: the thread is live, and the parameters are only read.
        unsafe { libc::pthread_setschedparam(thread, policy, &raw const priority) == 0 }
    }

    #[cfg(all(target_os = "linux", not(miri)))]
    fn sleeps_of_this_thread() -> i64 {
        // SAFETY: integers, for which all zeros is a value.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: the kernel writes one `rusage`.
        assert_eq!(unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) }, 0);
        usage.ru_nvcsw
    }

    /// A thread of a higher real-time class that yields keeps its core: only sleep lets the holder continue.
    #[cfg(all(target_os = "linux", not(miri)))]
    #[test]
    fn a_waiting_real_time_thread_yields_to_the_lock_holder() {
        use std::io::Write as _;
        use std::sync::mpsc::{channel, sync_channel};
        use std::time::Duration;

        // SAFETY: has no precondition.
        let core = usize::try_from(unsafe { libc::sched_getcpu() }).unwrap();
        let (lock, waits) = (Lock::new(0), std::sync::atomic::AtomicBool::new(false));
        let (held, holds) = sync_channel(0);
        let ((announce, thread), (slept, result)) = (channel(), channel());
        std::thread::scope(|scope| {
            let (lock, waits) = (&lock, &waits);
            scope.spawn(move || {
                stay_on(core);
                lock.with(|n| {
                    held.send(()).unwrap();
                    while !waits.load(Ordering::SeqCst) {
                        std::thread::yield_now();
                    }
                    *n += 1;
                });
            });
            scope.spawn(move || {
                let this = stay_on(core);
                holds.recv().unwrap();
                let real_time = schedule(this, libc::SCHED_FIFO, 1);
                announce.send((this, real_time)).unwrap();
                let before = sleeps_of_this_thread();
                waits.store(true, Ordering::SeqCst);
                lock.with(|n| *n += 1);
                slept.send(sleeps_of_this_thread() - before).unwrap();
                schedule(this, libc::SCHED_OTHER, 0);
            });
            let (waiting, real_time) = thread.recv().unwrap();
            if !real_time {
                let _ = writeln!(std::io::stderr(), "\nskipped: this process may not make a thread SCHED_FIFO");
            }
            let result = result.recv_timeout(Duration::from_secs(60));
            if result.is_err() {
                // Lets the test end.
                schedule(waiting, libc::SCHED_OTHER, 0);
            }
            // A kernel that limits the time of real-time threads also ends the wait of a thread that never sleeps, but late.
            assert!(!real_time || result.is_ok_and(|sleeps| sleeps > 0), "it waits without sleeping: {result:?}");
        });
        assert_eq!(lock.with(|n| *n), 2);
    }

    #[test]
    fn a_section_that_panics_unlocks() {
        let lock = Lock::new(1);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| lock.with(|_| panic!("in a section"))));
        assert!(panicked.is_err());
        assert_eq!(lock.try_fast(|n| Some(*n)), Some(1));
    }
}

#[cfg(all(test, pinpool_loom))]
mod models {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    fn add_one(n: &mut usize) -> Option<()> {
        *n += 1;
        Some(())
    }

    /// Fails with a Relaxed exchange in `exchange` or a Relaxed store in `Unlock` or `try_fast`.
    #[test]
    fn loom_one_thread_at_a_time_is_inside() {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(4);
        builder.check(|| {
            let lock = Arc::new(Lock::new(0));
            let other = lock.clone();
            let other = thread::spawn(move || (0..2).for_each(|_| other.with(|n| *n += 1)));
            let mut entered = 0;
            for _ in 0..2 {
                entered += lock.try_fast(add_one).map_or(0, |()| 1);
            }
            other.join().unwrap();
            assert_eq!(lock.with(|n| *n), 2 + entered);
        });
    }

    /// Fails if `set_slow_path` writes the state without the lock.
    #[test]
    fn loom_after_the_slow_path_flag_every_hit_before_it_is_seen_and_none_follows() {
        loom::model(|| {
            let lock = Arc::new(Lock::new(0));
            let hitting = lock.clone();
            let hits = thread::spawn(move || (0..2).filter_map(|_| hitting.try_fast(add_one)).count());
            let mut before = 0;
            lock.set_slow_path(|n| {
                before = *n;
                true
            });
            let hits = hits.join().unwrap();
            assert_eq!((before, lock.with(|n| *n)), (hits, hits));
        });
    }
}
