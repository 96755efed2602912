//! A scenario for each cause, and scenarios that only resemble one. This file tests healthy pools and which windows count.

use std::time::Duration;

use super::*;

mod leaks;
mod thrashing;
mod waiting;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const LIMIT: &str = "PINPOOL_MAX_BYTES";

/// A pool with a snapshot every ten seconds; a window has a thousand requests, all hits, unless a test changes that.
struct Run {
    monitor: Monitor,
    now_us: u64,
    now: Snapshot,
}

impl Run {
    fn new() -> Self {
        let now =
            Snapshot { limit: Some(LIMIT.into()), max_bytes: Some(4 * GIB), is_pinned: true, ..Snapshot::default() };
        Self { monitor: Monitor::default(), now_us: 0, now }
    }

    fn window(&mut self, change: impl FnOnce(&mut Snapshot)) -> WindowDiagnosis {
        self.now_us += WINDOW_US;
        self.now.requests += 1000;
        self.now.returns += 1000;
        change(&mut self.now);
        self.monitor.add(self.now_us, self.now.clone()).unwrap().clone()
    }

    fn cause(&mut self, change: impl FnOnce(&mut Snapshot)) -> Cause {
        self.window(change).cause
    }

    /// Returns the log line, if one is logged.
    fn logged(&mut self, change: impl FnOnce(&mut Snapshot)) -> Option<String> {
        let line = self.window(change).to_string();
        self.monitor.should_log(self.now_us).then_some(line)
    }
}

fn held(now: &mut Snapshot, tag: &str, buffers: u64, oldest_s: u64) {
    let oldest_age = Some(Duration::from_secs(oldest_s));
    now.holders = vec![TagUse { tag: tag.to_owned(), buffers, bytes: buffers * MIB, oldest_age, aged: 0, place: None }];
    (now.used, now.used_bytes) = (buffers, buffers * MIB);
}

#[test]
fn a_pool_warms_up_and_becomes_healthy_with_one_line_each() {
    let mut run = Run::new();
    let growing = |held_bytes: u64, misses: u64| {
        move |of: &mut Snapshot| (of.held_bytes, of.misses) = (held_bytes, of.misses + misses)
    };
    assert_eq!(run.logged(growing(GIB, 50)).unwrap(), "warming_up: held 0B->1.0GiB");
    assert_eq!(run.logged(growing(2 * GIB, 50)), None, "still warming up");
    let line = run.logged(|of| of.pin_calls += 1).unwrap();
    assert_eq!(line, "healthy: 999 of 1000 requests were served immediately, 2.0GiB held");
    // Held memory that fluctuates below its earlier maximum does not count as growth.
    for n in 0..1000 {
        assert_eq!(run.logged(|of| of.held_bytes = GIB + n % 2 * GIB), None);
    }
    // Memory for sizes that keep growing does not count as warm-up.
    let drifting = |of: &mut Snapshot| (of.held_bytes, of.misses, of.new_lengths) = (3 * GIB, of.misses + 80, 70);
    assert_eq!(run.cause(drifting), Cause::Healthy);
    // The memory of the first requests serves the other requests of the window.
    assert_eq!(Run::new().cause(growing(GIB, 8)), Cause::Healthy);
    let first = Snapshot { requests: 1, misses: 1, new_lengths: 1, held_bytes: 2 * MIB, ..Snapshot::default() };
    assert_eq!(Monitor::default().why(0, &first).cause, Cause::WarmingUp, "before a window has ended");
}

#[test]
fn a_pool_with_few_requests_is_warm_once_its_memory_stops_growing() {
    let few = |requests, held_bytes| Snapshot { requests, misses: requests, held_bytes, ..Snapshot::default() };
    let mut monitor = Monitor::default();
    for second in 1..30 {
        assert_eq!(monitor.add(second * 1_000_000, few(second.min(12), second.min(12) * MIB)), None, "{second}");
    }
    let cause = |monitor: &Monitor, second: u64, now: Snapshot| monitor.why(second * 1_000_000, &now).cause;
    assert_eq!([21, 22].map(|second| cause(&monitor, second, few(12, 12 * MIB))), [Cause::WarmingUp, Cause::Healthy]);
    assert_eq!(cause(&monitor, 30, few(13, 14 * MIB)), Cause::WarmingUp, "more is held");
    // The same is true after a window has ended.
    let mut monitor = Monitor::default();
    assert_eq!(monitor.add(WINDOW_US, few(50, GIB)).map(|seen| seen.cause), Some(Cause::WarmingUp));
    assert_eq!([19, 20].map(|second| cause(&monitor, second, few(50, GIB))), [Cause::WarmingUp, Cause::Healthy]);
    assert_eq!(monitor.why(20_000_000, &few(50, GIB)).found, "no requests, 1.0GiB held");
}

#[test]
fn unpinned_memory_matters_once_something_is_copied() {
    let mut run = Run::new();
    run.now.is_pinned = false;
    assert_eq!(run.cause(|_| ()), Cause::Healthy);
    let copied = run.window(|of| of.copies += 1);
    assert_eq!((copied.cause, copied.is_alarm), (Cause::NotPinned, false), "without a GPU, pinning is useless");
    let with_a_gpu = run.window(|of| of.has_driver = true);
    assert_eq!((with_a_gpu.cause, with_a_gpu.is_alarm), (Cause::NotPinned, true));
}

#[test]
fn few_requests_show_no_rate_unless_all_wait() {
    let mut monitor = Monitor::default();
    let sample =
        Snapshot { requests: REQUESTS_MIN - 1, delayed_requests: 10, limit: Some(LIMIT.into()), ..Snapshot::default() };
    assert_eq!(monitor.add(WINDOW_US, sample.clone()), None);
    let early = Snapshot { requests: 100, ..sample.clone() };
    assert_eq!(monitor.add(WINDOW_US - 1, early), None, "the window is not over");
    let seen = monitor.add(2 * WINDOW_US, Snapshot { requests: REQUESTS_MIN, ..sample.clone() });
    assert!(seen.is_some_and(|seen| seen.found.starts_with("10 of 20 requests")), "they count in the next window");
    // All requests of the window wait, and none is served.
    let waiting = Snapshot { requests: REQUESTS_MIN, waiting: 3, ..sample };
    let seen = monitor.add(3 * WINDOW_US, waiting.clone()).unwrap();
    assert_eq!((seen.cause, seen.found.as_str()), (Cause::LimitTooSmall, "3 requests waiting, none served"));
    // The known need is below the limit, but the limit has refused requests, so it must be raised all the same.
    let held = Snapshot { max_bytes: Some(GIB), needed_bytes: GIB / 2, ..waiting };
    let seen = monitor.add(4 * WINDOW_US, held).unwrap();
    assert!(seen.setting.is_some_and(|(name, bytes)| name == LIMIT && bytes > GIB), "{seen}");
}

#[test]
fn an_alternating_diagnosis_is_logged_less_and_less_often() {
    let mut run = Run::new();
    let mut logged = 0;
    // A day in which memory is short in every second minute.
    for n in 0..8640 {
        let is_short = n / 6 % 2 == 0;
        logged += u64::from(run.logged(|of| of.delayed_requests += if is_short { 500 } else { 0 }).is_some());
    }
    assert!((2..=4).contains(&logged), "{logged}");
}

#[test]
fn a_past_alarm_is_reported_for_five_minutes() {
    let mut run = Run::new();
    let short = |of: &mut Snapshot| {
        (of.delayed_requests, of.own_waits) = (of.delayed_requests + 300, of.own_waits + 300);
        (of.waiting_ns, of.needed_bytes) = (of.waiting_ns + 5_000_000_000, 5 * GIB);
    };
    assert_eq!(run.cause(short), Cause::LimitTooSmall);
    (0..3).for_each(|_| assert_eq!(run.cause(|_| ()), Cause::Healthy));
    let why = run.monitor.why(run.now_us, &run.now);
    assert_eq!((why.cause, why.is_alarm), (Cause::LimitTooSmall, true));
    assert!(why.found.starts_with("in 1 of the last 4 windows (now healthy): 300 of "), "{why}");
    (0..30).for_each(|_| _ = run.cause(|_| ()));
    assert_eq!(run.monitor.why(run.now_us, &run.now).cause, Cause::Healthy);
}
