//! Gets that wait for room: first come, first served.
//!
//! ```text
//!   line:  [first] ── tries again whenever it is woken ──▶ served: leaves, wakes the next
//!          [second] [third] ...                            out of time: leaves, wakes the next
//! ```
//!
//! Those who do not wait pay one load: [`Queue::is_waiting`]. Only the first in line tries, so a large request is not
//! overtaken by small ones for ever.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::process::AtomicU64;
use crate::sync::{Condvar, Mutex};

/// A line of waiting gets.
#[derive(Debug, Default)]
pub(super) struct Queue {
    waiting: AtomicUsize,
    stood: AtomicU64,
    line: Mutex<VecDeque<Arc<Turn>>>,
}

/// One waiting get.
#[derive(Debug, Default)]
struct Turn {
    woken: Mutex<bool>,
    changed: Condvar,
}

impl Queue {
    /// Is anybody in line?
    #[inline]
    pub(super) fn is_waiting(&self) -> bool {
        // SeqCst, with `wait`: a waiter that this load does not see stood in line after it. Its first attempt sees the put
        // before this, but for the rare one whose store is still on its way; that waiter's patience makes up for it, which
        // is cheaper than a barrier in every put.
        self.waiting.load(Ordering::SeqCst) > 0
    }

    /// All that ever stood in line.
    pub(super) fn stood(&self) -> u64 {
        // Relaxed: a figure.
        self.stood.load(Ordering::Relaxed)
    }

    /// Lets the first in line try again.
    pub(super) fn wake(&self) {
        let first = self.line.lock().front().cloned();
        if let Some(turn) = first {
            turn.wake();
        }
    }

    /// Stands in line until `attempt` succeeds or `deadline` has passed. `patience` bounds each sleep, for news that
    /// nobody brings: a copy that ended on a device.
    pub(super) fn wait<T>(
        &self,
        deadline: Instant,
        patience: impl Fn() -> Duration,
        mut attempt: impl FnMut() -> Option<T>,
    ) -> Option<T> {
        let turn = Arc::new(Turn::default());
        // SeqCst, before the first attempt: a later put sees this count, and wakes us.
        self.waiting.fetch_add(1, Ordering::SeqCst);
        self.line.lock().push_back(turn.clone());
        // Relaxed: a figure; after the place in line is taken, so that who reads it finds the line as long.
        self.stood.fetch_add(1, Ordering::Relaxed);
        let served = loop {
            let is_first = self.line.lock().front().is_some_and(|first| Arc::ptr_eq(first, &turn));
            if is_first && let Some(served) = attempt() {
                break Some(served);
            }
            let now = Instant::now();
            if now >= deadline {
                break None;
            }
            turn.sleep(deadline.min(now + patience()));
        };
        self.line.lock().retain(|other| !Arc::ptr_eq(other, &turn));
        // SeqCst, as above.
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        self.wake();
        served
    }
}

impl Turn {
    fn wake(&self) {
        *self.woken.lock() = true;
        self.changed.notify_one();
    }

    /// Returns when woken, at once if it was since the last sleep, or at `until`.
    fn sleep(&self, until: Instant) {
        let mut woken = self.woken.lock();
        while !*woken {
            let late;
            (woken, late) = self.changed.wait_until(woken, until);
            if late {
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
    fn one_that_is_served_at_once_never_sleeps() {
        let queue = Queue::default();
        assert_eq!(queue.wait(Instant::now() + LONG, || LONG, || Some(7)), Some(7));
        assert!(!queue.is_waiting());
    }

    #[test]
    fn out_of_time_after_one_attempt() {
        let queue = Queue::default();
        let mut attempts = 0;
        let served: Option<()> = queue.wait(
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
    fn those_in_line_are_served_in_the_order_of_arrival() {
        let queue = Queue::default();
        let (room, order) = (Mutex::new(0), Mutex::new(Vec::new()));
        std::thread::scope(|scope| {
            for name in 0..4 {
                let (queue, room, order) = (&queue, &room, &order);
                scope.spawn(move || {
                    let served = queue.wait(
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
                // The next one arrives when this one stands in line.
                while queue.line.lock().len() <= name {
                    std::thread::yield_now();
                }
            }
            for _ in 0..4 {
                *room.lock() += 1;
                queue.wake();
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

    /// A pool as the line sees it: buffers behind a lock, and the order of steps of a put and of a get.
    #[derive(Default)]
    struct Shop {
        queue: Queue,
        idle: Mutex<u32>,
    }

    impl Shop {
        fn put(&self) {
            *self.idle.lock() += 1;
            if self.queue.is_waiting() {
                self.queue.wake();
            }
        }

        fn take(&self) -> Option<()> {
            let mut idle = self.idle.lock();
            *idle = idle.checked_sub(1)?;
            Some(())
        }

        /// Sleeps for ever if nobody wakes it: there is no patience in the model.
        fn get(&self) {
            let far = Instant::now() + Duration::from_secs(1 << 20);
            assert!(self.queue.wait(far, || Duration::from_secs(1 << 20), || self.take()).is_some());
        }
    }

    fn model(check: impl Fn(Arc<Shop>) + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(move || {
            let shop = Arc::new(Shop::default());
            check(shop.clone());
            assert!(!shop.queue.is_waiting());
            assert_eq!(*shop.idle.lock(), 0);
        });
    }

    #[test]
    fn loom_a_put_wakes_who_waits() {
        model(|shop| {
            let putter = shop.clone();
            let putting = thread::spawn(move || putter.put());
            shop.get();
            putting.join().unwrap();
        });
    }

    #[test]
    fn loom_two_puts_wake_two_who_wait() {
        model(|shop| {
            let (putter, other) = (shop.clone(), shop.clone());
            let putting = thread::spawn(move || {
                putter.put();
                putter.put();
            });
            let waiting = thread::spawn(move || other.get());
            shop.get();
            waiting.join().unwrap();
            putting.join().unwrap();
        });
    }

    #[test]
    fn loom_who_gives_up_passes_the_turn_on() {
        model(|shop| {
            let (putter, hasty) = (shop.clone(), shop.clone());
            let putting = thread::spawn(move || putter.put());
            let giving_up = thread::spawn(move || {
                // Its deadline is over when it comes: one attempt, which may take the buffer; then it is put back.
                if hasty.queue.wait(Instant::now(), || Duration::ZERO, || hasty.take()).is_some() {
                    hasty.put();
                }
            });
            shop.get();
            giving_up.join().unwrap();
            putting.join().unwrap();
        });
    }
}
