//! Gets that wait for room, first in, first out.
//!
//! ```text
//!   line:  [first] ── retries whenever it is woken ──▶ served: leaves, wakes the next
//!          [second] [third] ...                        timed out: leaves, wakes the next
//! ```
//!
//! A put pays one load while no get waits: [`Waiters::has_waiters`]. Only the first in line retries, so that small
//! requests do not overtake a large one forever.
//!
//! Owns the line. Never acquires memory: that is the caller's `attempt`.
//!
//! - waiters-I1: no wake-up is lost. A put made after a get joined the line wakes the first in line, or that get's next
//!   attempt finds the buffer. For the exception see `has_waiters`; `patience` bounds each sleep.
//! - waiters-I2: a get that leaves the line wakes the next.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::process::AtomicU64;
use crate::sync::{Condvar, Mutex};

/// A line of waiting gets.
#[derive(Debug, Default)]
pub(super) struct Waiters {
    waiting: AtomicUsize,
    total: AtomicU64,
    line: Mutex<VecDeque<Arc<Waiter>>>,
}

/// One waiting get.
#[derive(Debug, Default)]
struct Waiter {
    woken: Mutex<bool>,
    changed: Condvar,
}

impl Waiters {
    #[inline]
    pub(super) fn has_waiters(&self) -> bool {
        // SeqCst, with the increment in `wait`: a waiter that this load misses joined after it, so its first attempt sees
        // the put that came before this load. The put's own store may still be in a store buffer then; the waiter's
        // patience covers that rare case, which is cheaper than a barrier in every put.
        self.waiting.load(Ordering::SeqCst) > 0
    }

    /// Gets that have ever joined the line.
    pub(super) fn total(&self) -> u64 {
        // Relaxed: a figure.
        self.total.load(Ordering::Relaxed)
    }

    /// Lets the first in line retry.
    pub(super) fn wake_first(&self) {
        let first = self.line.lock().front().cloned();
        if let Some(waiter) = first {
            waiter.wake();
        }
    }

    /// Waits in line until `attempt` succeeds or `deadline` has passed. `patience` bounds each sleep, for room that no
    /// put announces: a copy that ended on a device.
    pub(super) fn wait<T>(
        &self,
        deadline: Instant,
        patience: impl Fn() -> Duration,
        mut attempt: impl FnMut() -> Option<T>,
    ) -> Option<T> {
        let waiter = Arc::new(Waiter::default());
        // SeqCst, before the first attempt: a later put sees this count, and wakes the line.
        self.waiting.fetch_add(1, Ordering::SeqCst);
        self.line.lock().push_back(waiter.clone());
        // Relaxed: a figure. Counted after the waiter joined, so a reader that sees the count finds the line as long.
        self.total.fetch_add(1, Ordering::Relaxed);
        let served = loop {
            let is_first = self.line.lock().front().is_some_and(|first| Arc::ptr_eq(first, &waiter));
            if is_first && let Some(served) = attempt() {
                break Some(served);
            }
            let now = Instant::now();
            if now >= deadline {
                break None;
            }
            waiter.sleep(deadline.min(now + patience()));
        };
        self.line.lock().retain(|other| !Arc::ptr_eq(other, &waiter));
        // SeqCst, like the increment.
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        self.wake_first();
        served
    }
}

impl Waiter {
    fn wake(&self) {
        *self.woken.lock() = true;
        self.changed.notify_one();
    }

    /// Returns when woken, at once if that happened since the last sleep, or at `until`.
    fn sleep(&self, until: Instant) {
        let mut woken = self.woken.lock();
        while !*woken {
            let timed_out;
            (woken, timed_out) = self.changed.wait_until(woken, until);
            if timed_out {
                break;
            }
        }
        *woken = false;
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(3600);

    #[test]
    fn a_get_that_is_served_at_once_never_sleeps() {
        let waiters = Waiters::default();
        assert_eq!(waiters.wait(Instant::now() + LONG, || LONG, || Some(7)), Some(7));
        assert!(!waiters.has_waiters());
    }

    #[test]
    fn a_deadline_in_the_past_allows_one_attempt() {
        let waiters = Waiters::default();
        let mut attempts = 0;
        let served: Option<()> = waiters.wait(
            Instant::now(),
            || LONG,
            || {
                attempts += 1;
                None
            },
        );
        assert_eq!((served, attempts), (None, 1));
    }

    #[test]
    fn waiters_are_served_in_the_order_of_arrival() {
        let waiters = Waiters::default();
        let (room, order) = (Mutex::new(0), Mutex::new(Vec::new()));
        std::thread::scope(|scope| {
            for name in 0..4 {
                let (waiters, room, order) = (&waiters, &room, &order);
                scope.spawn(move || {
                    let served = waiters.wait(
                        Instant::now() + LONG,
                        || LONG,
                        || {
                            let mut room = room.lock();
                            (*room > 0).then(|| {
                                *room -= 1;
                                order.lock().push(name);
                            })
                        },
                    );
                    assert!(served.is_some());
                });
                // The next one joins after this one.
                while waiters.line.lock().len() <= name {
                    std::thread::yield_now();
                }
            }
            for _ in 0..4 {
                *room.lock() += 1;
                waiters.wake_first();
            }
        });
        assert_eq!(*order.lock(), [0, 1, 2, 3]);
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    /// A pool as the waiters see it: idle buffers behind a lock, and the order of steps of a put and of a get.
    #[derive(Default)]
    struct ModelPool {
        waiters: Waiters,
        idle: Mutex<u32>,
    }

    impl ModelPool {
        fn put(&self) {
            *self.idle.lock() += 1;
            if self.waiters.has_waiters() {
                self.waiters.wake_first();
            }
        }

        fn take(&self) -> Option<()> {
            let mut idle = self.idle.lock();
            *idle = idle.checked_sub(1)?;
            Some(())
        }

        /// Sleeps until it is woken: the model has no patience, so loom reports a lost wake-up as a deadlock.
        fn get(&self) {
            let deadline = Instant::now() + Duration::from_secs(1 << 20);
            assert!(self.waiters.wait(deadline, || Duration::from_secs(1 << 20), || self.take()).is_some());
        }
    }

    fn model(check: impl Fn(Arc<ModelPool>) + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(move || {
            let pool = Arc::new(ModelPool::default());
            check(pool.clone());
            assert!(!pool.waiters.has_waiters());
            assert_eq!(*pool.idle.lock(), 0);
        });
    }

    #[test]
    fn loom_a_put_wakes_a_waiter() {
        model(|pool| {
            let putter = pool.clone();
            let putting = thread::spawn(move || putter.put());
            pool.get();
            putting.join().unwrap();
        });
    }

    #[test]
    fn loom_two_puts_wake_two_waiters() {
        model(|pool| {
            let (putter, other) = (pool.clone(), pool.clone());
            let putting = thread::spawn(move || {
                putter.put();
                putter.put();
            });
            let waiting = thread::spawn(move || other.get());
            pool.get();
            waiting.join().unwrap();
            putting.join().unwrap();
        });
    }

    #[test]
    fn loom_a_waiter_that_times_out_wakes_the_next() {
        model(|pool| {
            let (putter, impatient) = (pool.clone(), pool.clone());
            let putting = thread::spawn(move || putter.put());
            let giving_up = thread::spawn(move || {
                // Its deadline has passed: one attempt, which may take the buffer; then it puts that back.
                if impatient.waiters.wait(Instant::now(), || Duration::ZERO, || impatient.take()).is_some() {
                    impatient.put();
                }
            });
            pool.get();
            giving_up.join().unwrap();
            putting.join().unwrap();
        });
    }
}
