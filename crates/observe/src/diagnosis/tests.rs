//! A scenario for each cause, and scenarios that only resemble one.

use std::time::Duration;

use super::*;

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

    /// The log line, if there is one.
    fn logged(&mut self, change: impl FnOnce(&mut Snapshot)) -> Option<String> {
        let line = self.window(change).to_string();
        self.monitor.should_log(self.now_us).then_some(line)
    }
}

fn held(now: &mut Snapshot, tag: &str, buffers: u64, oldest_s: u64) {
    let oldest = Some(Duration::from_secs(oldest_s));
    now.holders = vec![Holder { tag: tag.to_owned(), buffers, bytes: buffers * MIB, oldest, aged: 0, place: None }];
    (now.used, now.used_bytes) = (buffers, buffers * MIB);
}

#[test]
fn a_pool_warms_up_and_becomes_healthy_with_one_line_each() {
    let mut run = Run::new();
    let growing = |held_bytes: u64, misses: u64| {
        move |of: &mut Snapshot| (of.held_bytes, of.misses) = (held_bytes, of.misses + misses)
    };
    assert_eq!(run.logged(growing(GIB, 50)).unwrap(), "warming_up: held 0B->1.0GiB");
    assert_eq!(run.logged(growing(2 * GIB, 50)), None, "warming up still");
    let line = run.logged(|of| of.pin_calls += 1).unwrap();
    assert_eq!(line, "healthy: 999 of 1000 requests were served immediately, 2.0GiB held");
    // Back and forth below what it had before is no growth.
    for n in 0..1000 {
        assert_eq!(run.logged(|of| of.held_bytes = GIB + n % 2 * GIB), None);
    }
    // Nor is memory for sizes that grow.
    let drifting = |of: &mut Snapshot| (of.held_bytes, of.misses, of.new_lengths) = (3 * GIB, of.misses + 80, 70);
    assert_eq!(run.cause(drifting), Cause::Healthy);
    // The memory of the first requests serves the thousand that follow.
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
    // The same after a window.
    let mut monitor = Monitor::default();
    assert_eq!(monitor.add(WINDOW_US, few(50, GIB)).map(|seen| seen.cause), Some(Cause::WarmingUp));
    assert_eq!([19, 20].map(|second| cause(&monitor, second, few(50, GIB))), [Cause::WarmingUp, Cause::Healthy]);
}

#[test]
fn a_limit_too_small_names_the_need_rounded_up() {
    let mut run = Run::new();
    let short = |of: &mut Snapshot| {
        (of.delayed_requests, of.own_waits) = (of.delayed_requests + 300, of.own_waits + 300);
        (of.used_bytes, of.used) = (4 * GIB, 8);
        of.needed_bytes = 6 * GIB + 200 * MIB;
    };
    let expected = "limit_too_small: 300 of 1000 requests waited; raise PINPOOL_MAX_BYTES to 6.2GiB";
    assert_eq!(run.logged(short).unwrap(), expected);
    assert_eq!(run.window(short).setting, Some((LIMIT, 6 * GIB + 200 * MIB)));
    assert_eq!(run.logged(short), None);
    let more = |of: &mut Snapshot| {
        short(of);
        of.needed_bytes = 7 * GIB;
    };
    assert!(run.logged(more).unwrap().contains("to 7.0GiB"));
    assert_eq!(run.logged(|of| of.delayed_requests += 2), None, "tolerable, and not yet calm");
}

#[test]
fn a_slow_consumer_is_not_advised_to_use_more_memory() {
    let mut run = Run::new();
    let queued = |of: &mut Snapshot| {
        // 32 buffers fill the limit, and 20 a second return; one request waits for the next.
        (of.requests, of.returns) = (of.requests - 800, of.returns - 800);
        of.delayed_requests += 190;
        held(of, "queue", 32, 2);
        (of.used_bytes, of.max_bytes, of.needed_bytes) = (256 * MIB, Some(256 * MIB), 264 * MIB);
    };
    let diagnosis = run.window(queued);
    assert_eq!((diagnosis.cause, diagnosis.is_alarm, diagnosis.setting), (Cause::SlowConsumer, true, None));
    let found =
        "190 of 200 requests waited, and 20.0 buffers are returned per second, each after 1.6s (mostly tag queue)";
    assert_eq!(diagnosis.found, found);
    assert!(diagnosis.advice.as_ref().unwrap().contains("more memory lengthens the queue"));
    assert_eq!(diagnosis.evidence[0], "serving all waiting requests would use 3.1 % more memory");
    let other = |change: fn(&mut Snapshot)| {
        Run::new().cause(|of| {
            queued(of);
            change(of);
        })
    };
    // Six threads that need 96 MiB and have 64: half as much again would be in use.
    let threads = |of: &mut Snapshot| {
        (of.used, of.used_bytes, of.max_bytes, of.needed_bytes) = (4, 64 * MIB, Some(64 * MIB), 96 * MIB);
    };
    assert_eq!(other(threads), Cause::PoolFull);
    // Refused requests: the program continues, and no queue delays it.
    assert_eq!(other(|of| (of.requests, of.failed_requests) = (of.requests + 150, 150)), Cause::LimitTooSmall);
    // Threads that return their own buffers wait for memory, however little is missing.
    assert_eq!(other(|of| of.own_waits = of.delayed_requests), Cause::LimitTooSmall);
    // A device that reads is what they wait for.
    assert_eq!(other(|of| of.in_flight_bytes = 200 * MIB), Cause::PoolFull);
}

#[test]
fn a_loader_before_a_busy_device_is_told_both_possibilities_and_loses_nothing() {
    let mut run = Run::new();
    let diagnosis = run.window(|of| {
        (of.delayed_requests, of.waiting_ns) = (1000, 9_900_000_000);
        held(of, "batches", 4, 0);
        (of.held_bytes, of.max_bytes, of.needed_bytes) = (4 * MIB, Some(4 * MIB), 5 * MIB);
    });
    assert!(!diagnosis.is_alarm && diagnosis.setting.is_none() && diagnosis.lost.total_ns() == 0, "{diagnosis}");
    let text = diagnosis.lines().join(" ");
    for both in ["always busy, do nothing", "raise PINPOOL_MAX_BYTES", "buffers are returned per second"] {
        assert!(text.contains(both), "{both} is missing in: {text}");
    }
}

#[test]
fn a_source_refusal_is_not_blamed_on_the_limit() {
    let mut run = Run::new();
    let refused = |of: &mut Snapshot| {
        (of.delayed_requests, of.failed_requests, of.is_by_source) = (of.delayed_requests + 300, 300, true);
        (of.held_bytes, of.used_bytes, of.needed_bytes) = (GIB, GIB, 2 * GIB);
    };
    let diagnosis = run.window(refused);
    assert_eq!((diagnosis.cause, diagnosis.is_alarm, diagnosis.setting), (Cause::MemoryRefused, true, None));
    // Requests that wait for the source through a whole window.
    let waiting =
        |of: &mut Snapshot| (of.requests, of.returns, of.waiting) = (of.requests - 1000, of.returns - 1000, 1);
    assert_eq!(run.cause(waiting), Cause::MemoryRefused);
}

#[test]
fn a_leak_is_reported_within_a_minute_with_tag_rate_age_and_forecast() {
    let mut run = Run::new();
    let mut found = Vec::new();
    for n in 1..=6 {
        let diagnosis = run.window(|of| held(of, "loader/labels", 66 * n, 10 * n));
        found.push(diagnosis.cause == Cause::Leak);
        if n == 6 {
            assert!(
                diagnosis.is_alarm && diagnosis.found.starts_with("tag loader/labels holds 396 buffers"),
                "{diagnosis}"
            );
            assert!(diagnosis.found.contains("the oldest for 60.0s, 198 more than 30.0s ago"), "{diagnosis}");
            let evidence = "396 buffers more per minute; at this rate the limit is reached in 9.3min";
            assert_eq!(diagnosis.evidence[0], evidence);
        }
    }
    assert_eq!(found, [false, false, true, true, true, true]);
    // At the limit it stops growing and is still a leak.
    let full = |of: &mut Snapshot| {
        held(of, "loader/labels", 396, 70);
        of.delayed_requests += 500;
    };
    assert_eq!(run.cause(full), Cause::Leak);
    // Some came back.
    let back = |of: &mut Snapshot| {
        held(of, "loader/labels", 10, 80);
        of.needed_bytes = 5 * GIB;
    };
    assert_ne!(run.cause(back), Cause::Leak);
}

#[test]
fn growth_that_is_no_leak() {
    // A queue that returns its oldest buffers first.
    let mut run = Run::new();
    (1..20).for_each(|n| assert_ne!(run.cause(|of| held(of, "queue", 10 * n, 5 + n)), Cause::Leak, "{n}"));
    // Steps with pauses between.
    let mut run = Run::new();
    (1..20).for_each(|n| assert_ne!(run.cause(|of| held(of, "steps", n / 3 * 10 + 1, 10 * n)), Cause::Leak, "{n}"));
}

#[test]
fn buffers_without_ages_are_a_leak_after_longer_growth() {
    let mut run = Run::new();
    let untagged = |n: u64| {
        move |of: &mut Snapshot| {
            held(of, "(untagged)", 10 * n, 0);
            of.holders[0].oldest = None;
        }
    };
    let causes: Vec<_> = (1..=7).map(|n| run.cause(untagged(n))).collect();
    assert_eq!(causes.iter().position(|cause| *cause == Cause::Leak), Some(5), "{causes:?}");
}

#[test]
fn memory_held_by_other_processes_is_blamed_on_them() {
    let mut run = Run::new();
    let short = |of: &mut Snapshot| {
        of.delayed_requests += 100;
        (of.limit, of.others_bytes) = (Some("PINPOOL_LEDGER_MAX_BYTES".into()), Some(3 * GIB));
        of.needed_bytes = GIB;
    };
    let diagnosis = run.window(short);
    assert_eq!(diagnosis.cause, Cause::OtherProcess);
    assert!(diagnosis.found.ends_with("other processes 3.0GiB"), "{diagnosis}");
    // The need exceeds the pool's own limit.
    let own = |of: &mut Snapshot| {
        short(of);
        (of.needed_bytes, of.failed_requests) = (5 * GIB, of.failed_requests + 1);
    };
    assert_eq!(run.cause(own), Cause::LimitTooSmall);
}

#[test]
fn a_pool_that_keeps_most_of_a_shared_limit_names_itself() {
    let short = |of: &mut Snapshot, others_bytes: u64, oldest_s: u64| {
        held(of, "cache", 3072, oldest_s);
        (of.delayed_requests, of.held_bytes) = (of.delayed_requests + 100, 3 * GIB);
        (of.limit, of.others_bytes, of.needed_bytes) = (Some(LIMIT.into()), Some(others_bytes), 3 * GIB);
    };
    let mut run = Run::new();
    let diagnosis = run.window(|of| short(of, GIB, 30));
    assert_eq!((diagnosis.cause, diagnosis.is_alarm), (Cause::LimitTooSmall, true), "{diagnosis}");
    assert!(
        diagnosis.advice.is_some_and(|advice| advice.starts_with("return the buffers of tag cache (3.0GiB) sooner"))
    );
    assert_eq!(run.cause(|of| short(of, GIB, 1)), Cause::OtherProcess, "its buffers return");
    assert_eq!(run.cause(|of| short(of, 4 * GIB, 30)), Cause::OtherProcess, "others hold more");
}

#[test]
fn repeated_pinning_and_unpinning_is_thrashing_but_a_burst_is_not() {
    let mut run = Run::new();
    run.window(|of| of.held_bytes = GIB);
    let again = |of: &mut Snapshot| {
        (of.pinned_bytes, of.unpinned_bytes) = (of.pinned_bytes + 2 * GIB, of.unpinned_bytes + 2 * GIB);
    };
    assert_eq!(run.cause(again), Cause::Healthy, "a burst");
    let line = run.logged(again).unwrap();
    assert!(line.starts_with("thrashing: 2.0GiB pinned and unpinned to hold 1.0GiB; raise "), "{line}");
}

#[test]
fn misses_of_evicted_buffers_are_thrashing_and_the_limit_is_named() {
    let mut run = Run::new();
    run.now.pool_size_limit = Some(100);
    let evicting = |recurring: u64| {
        move |of: &mut Snapshot| {
            (of.misses, of.evicted, of.recurring) = (of.misses + 300, of.evicted + 250, recurring);
        }
    };
    // The recurring buffers, and no more than the evicted ones.
    assert_eq!(run.window(evicting(120)).setting, Some(("PINPOOL_POOL_SIZE_LIMIT", 120)));
    let diagnosis = run.window(evicting(9000));
    assert_eq!((diagnosis.cause, diagnosis.setting), (Cause::Thrashing, Some(("PINPOOL_POOL_SIZE_LIMIT", 350))));
    assert_eq!(diagnosis.found, "300 of 1000 requests missed evicted buffers");
}

#[test]
fn sizes_that_never_recur_are_an_alarm_only_if_they_cost_time() {
    let mut run = Run::new();
    run.window(|of| of.held_bytes = GIB);
    let varied = |of: &mut Snapshot| (of.misses, of.new_lengths) = (of.misses + 980, of.new_lengths + 970);
    let diagnosis = run.window(varied);
    assert_eq!((diagnosis.cause, diagnosis.is_alarm), (Cause::SizesNeverRecur, false));
    let diagnosis = run.window(|of| {
        varied(of);
        of.moving_ns += 600_000_000;
    });
    assert!(diagnosis.is_alarm, "{diagnosis}");
}

#[test]
fn recurring_sizes_are_healthy_unless_calls_take_time() {
    let mut run = Run::new();
    run.window(|of| of.held_bytes = GIB);
    assert_eq!(run.cause(|of| of.misses += 980), Cause::Healthy);
    let diagnosis = run.window(|of| {
        of.misses += 980;
        of.moving_ns += 600_000_000;
    });
    assert_eq!((diagnosis.cause, diagnosis.is_alarm), (Cause::Thrashing, true));
    assert_eq!(diagnosis.advice.as_deref(), Some("raise PINPOOL_MAX_BYTES, or batch to fewer sizes"));
    // Memory that was idle and released is pinned again.
    run.window(|of| of.held_bytes = GIB / 8);
    let again = |of: &mut Snapshot| {
        (of.held_bytes, of.misses) = (GIB, of.misses + 980);
        of.pinning_ns += 6_000_000_000;
    };
    assert_eq!(run.cause(again), Cause::Healthy);
}

#[test]
fn few_waiting_requests_matter_only_for_their_time() {
    let mut run = Run::new();
    run.window(|of| of.held_bytes = GIB);
    let short = |requests: u64, waiting_ns: u64| {
        move |of: &mut Snapshot| {
            (of.requests, of.returns) = (of.requests - 900, of.returns - 900);
            (of.delayed_requests, of.waiting_ns) = (of.delayed_requests + requests, of.waiting_ns + waiting_ns);
            of.needed_bytes = 5 * GIB;
        }
    };
    let causes = [(2, 99_000_000), (2, 100_000_000), (3, 0)]
        .map(|(requests, waiting_ns)| run.cause(short(requests, waiting_ns)));
    assert_eq!(causes, [Cause::Healthy, Cause::PoolFull, Cause::PoolFull]);
}

#[test]
fn a_stuck_copy_takes_precedence() {
    let mut run = Run::new();
    let copy = |seconds: u64| {
        move |of: &mut Snapshot| {
            of.oldest_copy = Some(Duration::from_secs(seconds));
            of.oldest_copy_stream = Some(16);
            of.delayed_requests += 500;
            of.needed_bytes = 6 * GIB;
        }
    };
    assert_eq!(run.cause(copy(29)), Cause::PoolFull);
    assert_eq!(run.cause(copy(30)), Cause::StuckCopy);
}

#[test]
fn unpinned_memory_matters_once_something_is_copied() {
    let mut run = Run::new();
    run.now.is_pinned = false;
    assert_eq!(run.cause(|_| ()), Cause::Healthy);
    let copied = run.window(|of| of.copies += 1);
    assert_eq!((copied.cause, copied.is_alarm), (Cause::NotPinned, false), "without a GPU there is no need");
    let beside_a_gpu = run.window(|of| of.has_driver = true);
    assert_eq!((beside_a_gpu.cause, beside_a_gpu.is_alarm), (Cause::NotPinned, true));
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
    assert!(seen.is_some_and(|seen| seen.found.starts_with("10 of 20 requests")), "they count later");
    // All requests of the window wait, and none is served.
    let waiting = Snapshot { requests: REQUESTS_MIN, waiting: 3, ..sample };
    let seen = monitor.add(3 * WINDOW_US, waiting.clone()).unwrap();
    assert_eq!((seen.cause, seen.found.as_str()), (Cause::LimitTooSmall, "3 requests waiting, none served"));
    // The known need is below the held bytes: the limit that refused must be raised all the same.
    let held = Snapshot { max_bytes: Some(GIB), needed_bytes: GIB / 2, ..waiting };
    let seen = monitor.add(4 * WINDOW_US, held).unwrap();
    assert!(seen.setting.is_some_and(|(name, bytes)| name == LIMIT && bytes > GIB), "{seen}");
}

#[test]
fn an_alternating_diagnosis_is_logged_less_and_less_often() {
    let mut run = Run::new();
    let mut logged = 0;
    // A day in which every second minute is short.
    for n in 0..8640 {
        let is_short = n / 6 % 2 == 0;
        logged += u64::from(run.logged(|of| of.delayed_requests += if is_short { 500 } else { 0 }).is_some());
    }
    assert!((2..=4).contains(&logged), "{logged}");
}

#[test]
fn a_pausing_consumer_needs_the_buffers_filled_during_a_pause() {
    let mut run = Run::new();
    // 40 buffers of 1 MiB a second; in a pause of 5 s four threads wait for 3.4 s each.
    let paused = |of: &mut Snapshot| {
        (of.requests, of.returns) = (of.requests - 736, of.returns - 736);
        (of.delayed_requests, of.waiting_ns) = (of.delayed_requests + 4, of.waiting_ns + 13_600_000_000);
        (of.used, of.used_bytes) = (4, 4 * MIB);
        (of.max_bytes, of.needed_bytes) = (Some(64 * MIB), 68 * MIB);
    };
    let diagnosis = run.window(paused);
    assert_eq!((diagnosis.cause, diagnosis.is_alarm), (Cause::LimitTooSmall, true), "{diagnosis}");
    let needed = diagnosis.setting.map(|(name, bytes)| (name, bytes / MIB));
    assert_eq!(needed, Some((LIMIT, 64 + 264 * 34 / 66)), "{diagnosis}");
    assert!(diagnosis.to_string().contains("3.4s each, because the consumer pauses"), "{diagnosis}");
    // If most requests wait, the consumer is slow.
    let busy = |of: &mut Snapshot| {
        paused(of);
        of.delayed_requests += 200;
    };
    assert_ne!(run.cause(busy), Cause::LimitTooSmall);
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

#[test]
fn repinning_every_half_minute_is_thrashing_if_it_costs_a_fiftieth_of_the_time() {
    let causes = |ns: u64| {
        let mut run = Run::new();
        let window = |n: u64| {
            run.window(|of| match n % 3 {
                0 => {
                    (of.pinned_bytes, of.pinning_ns) = (of.pinned_bytes + GIB / 2, of.pinning_ns + ns);
                    // An evaluation of mostly new buffers, which the pool holds for less than the window.
                    (of.misses, of.most_held_bytes) = (of.misses + 700, GIB * 3 / 4);
                }
                2 => of.unpinned_bytes += GIB / 2,
                _ => {}
            })
        };
        (0..12).map(window).collect::<Vec<_>>()
    };
    let all = causes(1_900_000_000);
    let last = all.last().unwrap();
    assert_eq!(last.found, "512.0MiB unpinned and pinned again 3 times in 110.0s, at 1.9s each time");
    // Before it has happened twice, nothing is wrong: no other sizes took the memory, and no limit is near.
    assert!(all.iter().all(|one| !one.is_alarm || one.found.contains("pinned again")), "{all:?}");
    // Only the memory that the evaluations hold at their peak ends the pin calls.
    assert_eq!(last.advice.as_deref(), Some("set PINPOOL_RESERVE to 768.0MiB, so that this memory stays pinned"));
    assert_eq!(last.setting, Some(("PINPOOL_RESERVE", GIB * 3 / 4)));
    assert!(causes(10_000_000).iter().all(|diagnosis| diagnosis.cause != Cause::Thrashing));
}

#[test]
fn repinning_within_each_window_is_thrashing_although_less_is_pinned_than_is_held() {
    let mut run = Run::new();
    run.window(|of| (of.held_bytes, of.pinned_bytes) = (GIB, GIB));
    let again = |of: &mut Snapshot| {
        (of.pinned_bytes, of.unpinned_bytes) = (of.pinned_bytes + GIB * 3 / 4, of.unpinned_bytes + GIB * 3 / 4);
        of.pinning_ns += 2_000_000_000;
    };
    let causes: Vec<_> = (0..3).map(|_| run.cause(again)).collect();
    // The memory that a single cycle pins again may belong to two windows.
    assert_eq!(causes, [Cause::Healthy, Cause::Healthy, Cause::Thrashing]);
}

#[test]
fn a_slow_leak_below_bursts_is_found_by_buffers_older_than_a_minute() {
    // Bursts of up to 40 buffers fall on the ends of the windows; of each window one buffer stays, or none after a minute.
    let found = |kept: fn(u64) -> u64| {
        let mut run = Run::new();
        (1..=20_u64).any(|n| {
            let (aged, burst) = (kept(n.saturating_sub(6)), [40, 3, 17, 0, 25][usize::try_from(n % 5).unwrap()]);
            run.cause(|of| {
                held(of, "labels", kept(n) + burst, 10 * n);
                of.holders[0].aged = aged;
            }) == Cause::Leak
        })
    };
    assert!(found(|windows| 4 * windows), "one that stays in every window");
    assert!(!found(|windows| 4 * windows.min(5)), "a cache that is full after a minute");
    assert!(!found(|_| 0), "bursts alone");
}
