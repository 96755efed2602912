//! Time on the wires: when a copy begins and ends, kept apart from when a thread wakes up to notice.
//!
//! ```text
//!   stream A  enqueued ──┐ begins = latest of (enqueued, end of the work before it)        Pace, one a stream
//!   stream B  enqueued ──┤
//!                        └──► link: starts = latest of (begins, link free), ends = starts + bytes / rate
//! ```
//!
//! The worker that sleeps until an end wakes up late; since the next copy begins at that end and not at the waking, the
//! lateness is not added up, and a queue that is never empty runs at the rate. Never moves a byte.
//!
//! L1: no two copies overlap on one link. L2: nothing ends sooner than its bytes over the rate after it was enqueued,
//! nor after the gate it stood at was opened.

use std::mem;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::call::lock;

/// The wires.
#[derive(Clone, Copy)]
pub(crate) enum Link {
    ToDevice = 0,
    FromDevice = 1,
    Inside = 2,
}

/// Bytes a second on every link; 0 is as fast as memory.
static RATE: AtomicU64 = AtomicU64::new(0);
static WIRES: [Mutex<Wire>; 3] = [const { Mutex::new(Wire { free: None }) }; 3];

/// From now on.
pub(crate) fn set_rate(bytes_per_second: u64) {
    // Relaxed: a copy under way may see the old rate or the new one.
    RATE.store(bytes_per_second, Ordering::Relaxed);
}

impl Link {
    /// Returns when so many bytes are through, with the moment they were. Moving them really `took` so long already,
    /// and when that is longer than the link needs, it is what the link needed.
    pub(crate) fn carry(self, bytes: u64, begins: Instant, took: Duration) -> Instant {
        let rate = RATE.load(Ordering::Relaxed);
        if rate == 0 {
            return Instant::now();
        }
        let ends = lock(&WIRES[self as usize]).book(begins, time_for(bytes, rate).max(took));
        thread::sleep(ends.saturating_duration_since(Instant::now()));
        ends
    }
}

fn time_for(bytes: u64, rate: u64) -> Duration {
    Duration::from_secs_f64(bytes as f64 / rate as f64)
}

/// One direction.
struct Wire {
    free: Option<Instant>,
}

impl Wire {
    fn book(&mut self, begins: Instant, takes: Duration) -> Instant {
        let starts = self.free.map_or(begins, |free| free.max(begins));
        let ends = starts + takes;
        self.free = Some(ends);
        ends
    }
}

/// When the work of one stream begins.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    ended: Option<Instant>,
    delayed: bool,
}

impl Pace {
    /// The next piece of work stands at a gate or waits for another stream: it begins when it is let go.
    pub(crate) fn delay(&mut self) {
        self.delayed = true;
    }

    /// When the next piece of work begins.
    pub(crate) fn begin(&mut self, enqueued: Instant, now: Instant) -> Instant {
        if mem::take(&mut self.delayed) { now } else { self.ended.map_or(enqueued, |ended| ended.max(enqueued)) }
    }

    /// It ended.
    pub(crate) fn end(&mut self, at: Instant) {
        self.ended = Some(at);
    }
}

/// The calling thread's sleeps end when asked and not up to 50 us later.
pub(crate) fn sleep_exactly() {
    // SAFETY: sets the timer slack, in ns, of the calling thread and nothing else; where it fails, sleeps are longer.
    let _inexact = unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1_u64) };
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: Duration = Duration::from_micros(1);

    #[test]
    fn bytes_over_rate() {
        assert_eq!(time_for(1 << 20, 4 << 30), Duration::from_nanos(244_141));
        assert_eq!(time_for(64 << 20, 64 << 20), Duration::from_secs(1));
    }

    #[test]
    fn a_link_carries_one_copy_after_the_other() {
        let start = Instant::now();
        let mut wire = Wire { free: None };
        assert_eq!(wire.book(start, 10 * US), start + 10 * US);
        assert_eq!(wire.book(start, 10 * US), start + 20 * US, "behind the first");
        assert_eq!(wire.book(start + 50 * US, 10 * US), start + 60 * US, "after a pause");
        assert_eq!(wire.book(start + 55 * US, 5 * US), start + 65 * US);
    }

    #[test]
    fn waking_late_is_not_added_up() {
        let start = Instant::now();
        let (mut wire, mut pace) = (Wire { free: None }, Pace::default());
        let mut woken = start;
        for _ in 0..1000 {
            let begins = pace.begin(start, woken);
            let ends = wire.book(begins, 10 * US);
            woken = ends + 7 * US;
            pace.end(ends);
        }
        assert_eq!(woken, start + 10_007 * US, "the lateness of the last one only");
    }

    #[test]
    fn work_begins_when_it_is_enqueued_and_its_turn_has_come() {
        let start = Instant::now();
        let mut pace = Pace::default();
        assert_eq!(pace.begin(start, start + 3 * US), start);
        pace.end(start + 10 * US);
        assert_eq!(pace.begin(start + 2 * US, start + 12 * US), start + 10 * US, "its turn");
        assert_eq!(pace.begin(start + 20 * US, start + 25 * US), start + 20 * US, "enqueued later");
        pace.delay();
        assert_eq!(pace.begin(start + 20 * US, start + 90 * US), start + 90 * US, "let through a gate");
        assert_eq!(pace.begin(start + 20 * US, start + 95 * US), start + 20 * US, "once");
    }
}
