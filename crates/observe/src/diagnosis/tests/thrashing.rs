//! Memory that is pinned or carved again and again.

use super::*;

#[test]
fn repeated_pinning_and_unpinning_is_thrashing_but_a_burst_is_not() {
    let mut run = Run::new();
    run.window(|of| of.held_bytes = GIB);
    let again = |of: &mut Snapshot| {
        (of.pinned_bytes, of.unpinned_bytes) = (of.pinned_bytes + 2 * GIB, of.unpinned_bytes + 2 * GIB);
    };
    assert_eq!(run.cause(again), Cause::Healthy, "a burst");
    let line = run.logged(again).unwrap();
    assert!(line.starts_with("thrashing: 2.0GiB pinned and unpinned to hold 1.0GiB; raise PINPOOL_IDLE"), "{line}");
    run.now.pool_size_limit = Some(100);
    let in_tensorflow = run.window(again);
    let remedy = "raise PINPOOL_MAX_BYTES, or batch to fewer sizes; if PINPOOL_MAX_IDLE_BYTES is set, raise it";
    assert_eq!(in_tensorflow.remedy.as_deref(), Some(remedy));
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
    // The recommended limit is the number of recurring buffers, but at most the present limit and the evicted buffers together.
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
    assert_eq!(diagnosis.remedy.as_deref(), Some("raise PINPOOL_MAX_BYTES, or batch to fewer sizes"));
    // Memory that was idle and released is pinned again.
    run.window(|of| of.held_bytes = GIB / 8);
    let again = |of: &mut Snapshot| {
        (of.held_bytes, of.misses) = (GIB, of.misses + 980);
        of.pinning_ns += 6_000_000_000;
    };
    assert_eq!(run.cause(again), Cause::Healthy);
}

#[test]
fn repinning_every_half_minute_is_thrashing_if_it_costs_a_fiftieth_of_the_time() {
    let causes = |ns: u64| {
        let mut run = Run::new();
        let window = |n: u64| {
            run.window(|of| match n % 3 {
                0 => {
                    (of.pinned_bytes, of.pinning_ns) = (of.pinned_bytes + GIB / 2, of.pinning_ns + ns);
                    // An evaluation with mostly new buffers, which the pool holds for less than the window.
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
    // Before the second cycle, nothing is wrong: no other sizes took the memory, and no limit is near.
    assert!(all.iter().all(|one| !one.is_alarm || one.found.contains("pinned again")), "{all:?}");
    // The pin calls end only if the memory of the evaluations' peak stays pinned.
    assert_eq!(last.remedy.as_deref(), Some("set PINPOOL_RESERVE to 768.0MiB, so that this memory stays pinned"));
    assert_eq!(last.setting, Some(("PINPOOL_RESERVE", GIB * 3 / 4)));
    assert!(causes(10_000_000).iter().all(|diagnosis| diagnosis.cause != Cause::Thrashing));
}

#[test]
fn repinning_less_than_is_held_in_each_window_is_thrashing() {
    let mut run = Run::new();
    run.window(|of| (of.held_bytes, of.pinned_bytes, of.most_held_bytes) = (GIB, GIB, GIB));
    let again = |of: &mut Snapshot| {
        (of.pinned_bytes, of.unpinned_bytes) = (of.pinned_bytes + GIB * 3 / 4, of.unpinned_bytes + GIB * 3 / 4);
        of.pinning_ns += 2_000_000_000;
    };
    let causes = [(); 3].map(|()| run.window(again));
    assert_eq!(causes.each_ref().map(|one| one.cause), [Cause::Healthy, Cause::Thrashing, Cause::Thrashing]);
    assert_eq!(causes[2].found, "768.0MiB unpinned and pinned again 3 times in 30.0s, at 2.0s each time");
}

#[test]
fn repinning_long_after_a_release_is_no_alarm() {
    let mut run = Run::new();
    run.window(|of| (of.held_bytes, of.pinned_bytes, of.most_held_bytes) = (GIB, GIB, GIB));
    run.window(|of| of.unpinned_bytes = GIB);
    (0..40).for_each(|_| assert_eq!(run.cause(|_| {}), Cause::Healthy));
    // The unpinning is forgotten, and a little memory unpinned since then does not make the rest a cycle.
    run.window(|of| of.unpinned_bytes += 2 * MIB);
    let again = run.window(|of| (of.pinned_bytes, of.pinning_ns) = (of.pinned_bytes + GIB, 6_000_000_000));
    assert_eq!(again.cause, Cause::Healthy, "{again}");
}
