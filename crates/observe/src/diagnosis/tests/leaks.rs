//! Buffers that are never returned, and copies that never complete.

use super::*;

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
fn a_leak_is_reported_within_a_minute_with_tag_rate_age_and_forecast() {
    let mut run = Run::new();
    let mut found = Vec::new();
    for n in 1..=6 {
        let diagnosis = run.window(|of| held(of, "loader/labels", 66 * n, 10 * n));
        found.push(diagnosis.cause == Cause::Leak);
        if n == 6 {
            assert!(diagnosis.is_alarm, "{diagnosis}");
            assert!(diagnosis.found.starts_with("tag loader/labels holds 396 buffers"), "{diagnosis}");
            assert!(diagnosis.found.contains("the oldest for 60.0s, 198 more than it held 30.0s ago"), "{diagnosis}");
            let evidence = "396 buffers more per minute; at this rate the limit is reached in 9.3min";
            assert_eq!(diagnosis.evidence[0], evidence);
        }
    }
    assert_eq!(found, [false, false, true, true, true, true]);
    // At the limit, the tag stops growing, but it is still a leak.
    let full = |of: &mut Snapshot| {
        held(of, "loader/labels", 396, 70);
        of.delayed_requests += 500;
    };
    assert_eq!(run.cause(full), Cause::Leak);
    // Some buffers were returned.
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
            of.holders[0].oldest_age = None;
        }
    };
    let causes: Vec<_> = (1..=7).map(|n| run.cause(untagged(n))).collect();
    assert_eq!(causes.iter().position(|cause| *cause == Cause::Leak), Some(5), "{causes:?}");
}

#[test]
fn a_slow_leak_below_bursts_is_found_by_buffers_older_than_a_minute() {
    // Bursts of up to 40 buffers fall on the ends of the windows. In addition, `kept(n)` buffers remain after `n` windows.
    let leaks = |run: &mut Run, (buffers, oldest_s, aged)| {
        run.cause(|of| {
            held(of, "labels", buffers, oldest_s);
            of.holders[0].aged = aged;
        }) == Cause::Leak
    };
    let found = |kept: fn(u64) -> u64| {
        let mut run = Run::new();
        (1..=20_u64).any(|n| {
            let burst = [40, 3, 17, 0, 25][usize::try_from(n % 5).unwrap()];
            leaks(&mut run, (kept(n) + burst, 10 * n, kept(n.saturating_sub(6))))
        })
    };
    assert!(found(|windows| 4 * windows), "four buffers stay in every window");
    assert!(!found(|windows| 4 * windows.min(5)), "a cache that is full after a minute");
    assert!(!found(|_| 0), "bursts alone");

    // A burst made the leak visible and ends. The leak is reported as long as more of its buffers become old.
    let mut run = Run::new();
    let ends = [(4, 40, 0), (9, 50, 0), (20, 60, 0), (42, 70, 2), (25, 80, 5), (22, 90, 8), (20, 100, 8)];
    assert_eq!(ends.map(|end| leaks(&mut run, end)), [false, false, true, true, true, true, false]);
    let mut run = Run::new();
    ends[..5].iter().for_each(|&end| _ = leaks(&mut run, end));
    let said = "tag labels holds 25 buffers (25.0MiB), the oldest for 80.0s, 3 more than 10.0s ago are over 60s old";
    assert_eq!(run.monitor.latest().unwrap().found, said);
}
