//! The time of copies on the links: when one begins and ends, independent of when a thread wakes up.
//!
//! ```text
//!   stream A  enqueued ──┐ begins = latest of (enqueued, end of the work before it)        StreamTimeline, one a stream
//!   stream B  enqueued ──┤
//!                        └──► link: starts = latest of (begins, link free), ends = starts + bytes / rate
//! ```
//!
//! A worker that sleeps until a copy ends wakes up late. The next copy begins at that end, not at the wake-up, so lateness
//! does not accumulate and a queue that is never empty runs at the rate. Never moves bytes.
//!
//! - link-I1: no two copies overlap on one link.
//! - link-I2: a copy ends no sooner than its bytes over the rate after it was enqueued, and after its gate was opened.

use std::mem;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::sync::lock;

/// A direction of copies.
#[derive(Clone, Copy)]
pub(crate) enum Link {
    ToDevice = 0,
    FromDevice = 1,
    Inside = 2,
}

/// Bytes per second on every link; 0 is as fast as memory.
static RATE: AtomicU64 = AtomicU64::new(0);
static LINKS: [Mutex<LinkTimeline>; 3] = [const { Mutex::new(LinkTimeline { free: None }) }; 3];

/// Sets the rate of all links.
pub(crate) fn set_rate(bytes_per_second: u64) {
    // Relaxed: a copy under way may see the old rate or the new one.
    RATE.store(bytes_per_second, Ordering::Relaxed);
}

impl Link {
    /// Sleeps until the bytes have passed the link and returns that time. Moving them `took` so long already; where
    /// that is longer than the rate asks for, it counts instead.
    pub(crate) fn carry(self, bytes: u64, begins: Instant, took: Duration) -> Instant {
        let rate = RATE.load(Ordering::Relaxed);
        if rate == 0 {
            return Instant::now();
        }
        let ends = lock(&LINKS[self as usize]).book(begins, time_for(bytes, rate).max(took));
        thread::sleep(ends.saturating_duration_since(Instant::now()));
        ends
    }
}

fn time_for(bytes: u64, rate: u64) -> Duration {
    Duration::from_secs_f64(bytes as f64 / rate as f64)
}

/// When a link is free.
struct LinkTimeline {
    free: Option<Instant>,
}

impl LinkTimeline {
    fn book(&mut self, begins: Instant, takes: Duration) -> Instant {
        let starts = self.free.map_or(begins, |free| free.max(begins));
        let ends = starts + takes;
        self.free = Some(ends);
        ends
    }
}

/// When the work of one stream begins.
#[derive(Debug, Default)]
pub(crate) struct StreamTimeline {
    ended: Option<Instant>,
    delayed: bool,
}

impl StreamTimeline {
    /// The next operation is held at a gate or waits for another stream: it begins when that ends.
    pub(crate) fn delay(&mut self) {
        self.delayed = true;
    }

    /// When the next operation begins.
    pub(crate) fn begin(&mut self, enqueued: Instant, now: Instant) -> Instant {
        if mem::take(&mut self.delayed) { now } else { self.ended.map_or(enqueued, |ended| ended.max(enqueued)) }
    }

    /// The operation ended.
    pub(crate) fn end(&mut self, at: Instant) {
        self.ended = Some(at);
    }
}

/// Makes sleeps of the calling thread end on time instead of up to 50 us later.
pub(crate) fn sleep_exactly() {
    // SAFETY: sets the timer slack, in ns, of the calling thread and nothing else; where it fails, sleeps are longer.
    let _inexact = unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1_u64) };
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: Duration = Duration::from_micros(1);

    #[test]
    fn a_copy_takes_its_bytes_over_the_rate() {
        assert_eq!(time_for(1 << 20, 4 << 30), Duration::from_nanos(244_141));
        assert_eq!(time_for(64 << 20, 64 << 20), Duration::from_secs(1));
    }

    #[test]
    fn a_link_carries_one_copy_after_the_other() {
        let start = Instant::now();
        let mut link_timeline = LinkTimeline { free: None };
        assert_eq!(link_timeline.book(start, 10 * US), start + 10 * US);
        assert_eq!(link_timeline.book(start, 10 * US), start + 20 * US, "behind the first");
        assert_eq!(link_timeline.book(start + 50 * US, 10 * US), start + 60 * US, "after a pause");
        assert_eq!(link_timeline.book(start + 55 * US, 5 * US), start + 65 * US);
    }

    #[test]
    fn late_wake_ups_do_not_accumulate() {
        let start = Instant::now();
        let (mut link_timeline, mut timeline) = (LinkTimeline { free: None }, StreamTimeline::default());
        let mut woken = start;
        for _ in 0..1000 {
            let begins = timeline.begin(start, woken);
            let ends = link_timeline.book(begins, 10 * US);
            woken = ends + 7 * US;
            timeline.end(ends);
        }
        assert_eq!(woken, start + 10_007 * US, "the lateness of the last one only");
    }

    #[test]
    fn work_begins_when_it_is_enqueued_and_the_work_before_it_has_ended() {
        let start = Instant::now();
        let mut timeline = StreamTimeline::default();
        assert_eq!(timeline.begin(start, start + 3 * US), start);
        timeline.end(start + 10 * US);
        assert_eq!(timeline.begin(start + 2 * US, start + 12 * US), start + 10 * US, "after the work before it");
        assert_eq!(timeline.begin(start + 20 * US, start + 25 * US), start + 20 * US, "enqueued later");
        timeline.delay();
        assert_eq!(timeline.begin(start + 20 * US, start + 90 * US), start + 90 * US, "released by a gate");
        assert_eq!(timeline.begin(start + 20 * US, start + 95 * US), start + 20 * US, "once");
    }
}
