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

use crate::sync::plain::{Condvar, Mutex};
use crate::sync::process::{AtomicU64, AtomicUsize, Ordering};

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
            if self.changed.wait_until(&mut woken, until).timed_out() {
                break;
            }
        }
        *woken = false;
    }
}

#[cfg(test)]
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
