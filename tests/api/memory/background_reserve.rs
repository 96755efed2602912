//! A background reserve: the first step is immediate, the rest runs in parallel with the pool.
//!
//! Most pools here have no thread: each `maintain` makes one step, so that counts and order are exact.

use pinpool_os::format::Size;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use pinpool::{Pool, PoolBuilder};
use pinpool_replay::SimSource;
use pinpool_testing::{FaultSource, SourceCall};

use crate::captured_log::{lines, listen};
use crate::child::{alone, in_a_child};
use crate::fixture::{self, MIB, over};
use crate::until::until;
use crate::valid_stats::valid_stats;

const MI: u64 = 1 << 20;
const GI: u64 = 1 << 30;
const TI: u64 = 1 << 40;
/// Bytes that one step pins.
const STEP: u64 = 8 * MI;
/// Longer than any reserve of these tests takes; a test that waits this long has failed.
const PATIENCE: Duration = Duration::from_secs(60);

fn faulty(separate: bool) -> Arc<FaultSource> {
    fixture::faulty(if separate { SimSource::separate_regions(1 << 44) } else { SimSource::new(1 << 44) })
}

/// A pool that pins a reserve of `bytes`, one step per `maintain`.
fn by_steps(source: Arc<FaultSource>, max_bytes: u64, bytes: u64) -> PoolBuilder {
    over(source, max_bytes).reserve(bytes).reserve_wait(false)
}

fn by_a_thread(source: Arc<FaultSource>, max_bytes: u64, bytes: u64) -> PoolBuilder {
    over(source, max_bytes).reserve(bytes).reserve_wait(false).maintenance_thread(true)
}

#[allow(clippy::float_cmp)] // Fractions of powers of two are exact.
fn fraction_is(pool: &Pool, fraction: f64) -> bool {
    pool.stats().memory.reserve_fraction() == fraction
}

#[test]
fn the_start_pins_one_step_and_each_step_one_more() {
    for separate in [false, true] {
        let source = faulty(separate);
        let pool = by_steps(source.clone(), 256 * MI, 64 * MI).build().unwrap();
        let memory = valid_stats(&pool).memory;
        assert_eq!((memory.held_bytes, memory.reserve_bytes, memory.reserve_target_bytes), (STEP, STEP, 64 * MI));
        assert_eq!(source.calls(SourceCall::Acquire), 1);
        assert!(fraction_is(&pool, 0.125));
        let mut before = pool.stats().memory.reserve_fraction();
        while pool.stats().memory.reserve_bytes < 64 * MI {
            pool.maintain();
            let now = pool.stats().memory.reserve_fraction();
            assert!(now > before, "{before} to {now}");
            before = now;
            valid_stats(&pool);
        }
        assert!(fraction_is(&pool, 1.0));
        let calls = source.calls(SourceCall::Acquire);
        assert_eq!(calls, if separate { 2 } else { 8 });
        pool.maintain();
        assert_eq!((source.calls(SourceCall::Acquire), pool.stats().memory.held_bytes), (calls, 64 * MI));
        // The whole reserve serves buffers; if granules are contiguous, it serves one buffer of its length.
        drop(pool.get(if separate { 56 * MIB } else { 64 * MIB }).unwrap());
        assert_eq!(source.calls(SourceCall::Acquire), calls);
        assert!(pool.wait_for_reserve(Duration::ZERO).unwrap());
        pool.clear();
        pool.trim(0);
        assert_eq!(valid_stats(&pool).memory.held_bytes, 64 * MI, "kept");
        drop(pool);
        assert_eq!(source.calls(SourceCall::Release), if separate { 2 } else { 1 });
    }
}

#[test]
fn a_request_beyond_what_is_there_is_served_and_counts_as_reserve() {
    for growth in [true, false] {
        let pool = by_steps(faulty(false), 256 * MI, 64 * MI).growth(growth).build().unwrap();
        let buf = pool.get(20 * MIB).unwrap();
        let memory = valid_stats(&pool).memory;
        assert!(memory.reserve_bytes >= 20 * MI && memory.reserve_bytes == memory.held_bytes, "{memory:?}");
        assert!(pool.wait_for_reserve(PATIENCE).unwrap());
        assert_eq!(valid_stats(&pool).memory.held_bytes, 64 * MI, "no more than was asked for");
        drop(buf);
        pool.trim(0);
        assert_eq!(valid_stats(&pool).memory.held_bytes, 64 * MI);
        // The whole reserve can be used, and without growth nothing more.
        assert_eq!(pool.get(65 * MIB).is_ok(), growth);
        pool.clear();
        drop(pool.get(64 * MIB).unwrap());
        pool.trim(0);
        assert_eq!(valid_stats(&pool).memory.held_bytes, 64 * MI, "the rest is released");
    }
}

#[test]
fn a_refused_step_keeps_the_pinned_part_of_a_reserve_and_logs_a_warning() {
    for separate in [false, true] {
        for failing in 0..4 {
            let source = faulty(separate);
            source.fail(SourceCall::Acquire, failing);
            listen();
            let built = by_steps(source.clone(), 1 << 30, 512 * MI).build();
            if failing == 0 {
                assert!(built.unwrap_err().is_backend(), "none of it is there");
                continue;
            }
            let pool = built.unwrap();
            let error = pool.wait_for_reserve(PATIENCE).unwrap_err();
            assert!(error.is_backend() && error.to_string().contains("by script"), "{error}");
            let there = valid_stats(&pool).memory.reserve_bytes;
            assert_eq!(there, if separate { STEP + (failing - 1) * 64 * MI } else { failing * STEP });
            let lines = lines();
            let warning = lines.iter().filter(|line| line.contains("reserve_stopped: ")).collect::<Vec<_>>();
            let told = format!("pinned={} of=512.0MiB", Size(there));
            assert!(warning.len() == 1 && warning[0].contains(&told), "{lines:?}");
            assert!(warning[0].contains("PINPOOL_RESERVE"), "{warning:?}");
            // The pool continues, and nothing is retried automatically.
            let calls = source.calls(SourceCall::Acquire);
            pool.maintain();
            assert_eq!(source.calls(SourceCall::Acquire), calls);
            drop(pool.get(MIB).unwrap());
            assert!(pool.wait_for_reserve(Duration::ZERO).is_err());
            // The missing part of the first reserve is not requested twice.
            pool.reserve(512 * MI - there).unwrap();
            assert!(pool.wait_for_reserve(PATIENCE).unwrap() && fraction_is(&pool, 1.0));
            assert_eq!(valid_stats(&pool).memory.reserve_bytes, 512 * MI);
        }
    }
}

#[test]
fn more_than_the_limit_is_refused_at_once() {
    for separate in [false, true] {
        let pool = by_steps(faulty(separate), 64 * MI, 0).build().unwrap();
        [65 * MI, u64::MAX].into_iter().for_each(|bytes| assert!(!pool.reserve(bytes).unwrap_err().is_forked()));
        pool.reserve(40 * MI).unwrap();
        assert!(pool.reserve(40 * MI).unwrap_err().is_limit(), "with the one before it is over the limit");
        assert!(pool.wait_for_reserve(PATIENCE).unwrap());
        assert_eq!(valid_stats(&pool).memory.reserve_bytes, 40 * MI);
    }
}

#[test]
fn a_lower_limit_pauses_and_shrinks_a_reserve_and_a_higher_limit_resumes_it() {
    listen();
    let pool = by_steps(faulty(false), 256 * MI, 128 * MI).build().unwrap();
    (0..7).for_each(|_| pool.maintain());
    assert_eq!(valid_stats(&pool).memory.reserve_bytes, 64 * MI);
    // In the second round the reserve is already complete, so there is nothing to pause.
    for pauses in [1, 0] {
        pool.set_max_bytes(32 * MI).unwrap();
        for _ in 0..3 {
            pool.maintain();
            assert!(valid_stats(&pool).memory.held_bytes <= 32 * MI, "{:?}", pool.stats());
        }
        assert!(!pool.wait_for_reserve(Duration::from_millis(1)).unwrap());
        assert_eq!(lines().iter().filter(|line| line.contains("reserve_paused: ")).count(), pauses);
        assert_eq!(pool.stats().memory.reserve_target_bytes, 128 * MI);
        pool.set_max_bytes(256 * MI).unwrap();
        assert!(pool.wait_for_reserve(PATIENCE).unwrap());
        assert_eq!(valid_stats(&pool).memory.reserve_bytes, 128 * MI);
    }
}

#[test]
fn a_terabyte_is_reserved_in_bounded_steps() {
    let source = faulty(false);
    let pool = by_steps(source.clone(), TI, TI).build().unwrap();
    assert_eq!((source.calls(SourceCall::Acquire), pool.stats().memory.held_bytes), (1, STEP));
    let first = pool.get(6 * MIB).unwrap();
    assert_eq!(source.calls(SourceCall::Acquire), 1, "out of the first step");
    let (mut before, mut longest) = (STEP, 0);
    while pool.stats().memory.reserve_fraction() < 1.0 {
        pool.maintain();
        let now = pool.stats().memory.held_bytes;
        longest = longest.max(now - before);
        assert!(now > before && now <= TI);
        assert!(now - before == STEP || (now - before) * 256 <= before, "{before} to {now}");
        before = now;
    }
    let stats = valid_stats(&pool);
    assert!(stats.memory.mappings <= 8187, "{} mappings", stats.memory.mappings);
    assert!(source.calls(SourceCall::Acquire) < 6000, "{} steps", source.calls(SourceCall::Acquire));
    assert_eq!((longest, stats.memory.reserve_bytes), (512 * MI, TI));
    drop(first);
    drop(pool.get(600 << 30).unwrap());
    assert_eq!(pool.stats().memory.held_bytes, TI);
}

#[test]
fn requests_are_served_while_a_reserve_step_hangs() {
    let source = faulty(false);
    let pool = by_a_thread(source.clone(), 256 * MI, 64 * MI).build().unwrap();
    assert!(pool.wait_for_reserve(PATIENCE).unwrap() && fraction_is(&pool, 1.0));
    assert_eq!(source.calls(SourceCall::Acquire), 8);
    let gate = source.hold(SourceCall::Acquire);
    let reserving = thread::spawn({
        let pool = pool.clone();
        move || pool.reserve(64 * MI).unwrap()
    });
    // The first step of the next reserve hangs in the backend.
    gate.wait_for(1);
    // Pinned memory is served meanwhile, and statistics are available.
    let held: Vec<_> = (0..8).map(|_| pool.get(8 * MIB).unwrap()).collect();
    // Statistics balance when no plan is open.
    assert_eq!((pool.stats().memory.in_use, held.len()), (8, 8));
    assert!(pool.stats().memory.reserve_fraction() < 1.0);
    assert!(!pool.wait_for_reserve(Duration::from_millis(5)).unwrap());
    drop(gate);
    assert!(pool.wait_for_reserve(PATIENCE).unwrap());
    until("both are there", || pool.stats().memory.reserve_bytes == 128 * MI);
    reserving.join().unwrap();
    drop(held);
    pool.trim(0);
    assert_eq!(valid_stats(&pool).memory.held_bytes, 128 * MI);
}

#[test]
fn a_refused_first_step_keeps_a_concurrent_reserve() {
    let source = faulty(false);
    let pool = by_steps(source.clone(), 256 * MI, 0).build().unwrap();
    source.fail(SourceCall::Acquire, 0);
    let gate = source.hold(SourceCall::Acquire);
    thread::scope(|scope| {
        let refused = scope.spawn(|| pool.reserve(64 * MI).unwrap_err().is_backend());
        gate.wait_for(1);
        pool.reserve(32 * MI).unwrap();
        drop(gate);
        assert!(refused.join().unwrap());
    });
    assert!(pool.wait_for_reserve(PATIENCE).unwrap() && valid_stats(&pool).memory.reserve_bytes == 32 * MI);
}

/// Ends a pool while a step hangs, and lets the step continue after `patience`. Returns whether no further step followed.
fn end_stops_after_its_step(source: &Arc<FaultSource>, patience: Duration) -> bool {
    let pool = by_a_thread(source.clone(), TI, 512 * GI).build().unwrap();
    let gate = source.hold(SourceCall::Acquire);
    gate.wait_for(1);
    let calls = source.calls(SourceCall::Acquire);
    let ends = thread::spawn(move || drop(pool));
    thread::sleep(patience);
    assert!(!ends.is_finished(), "it waits for the step");
    drop(gate);
    ends.join().unwrap();
    source.calls(SourceCall::Acquire) == calls
}

#[test]
fn the_end_of_the_pool_cancels_it_within_a_step() {
    for separate in [false, true] {
        let source = faulty(separate);
        // On a busy machine the thread that ends the pool may begin late.
        let mut patience = [20, 200, 2_000, 20_000].map(Duration::from_millis).into_iter();
        assert!(patience.any(|patience| end_stops_after_its_step(&source, patience)), "no step after that one");
        let pool = by_a_thread(source.clone(), TI, 512 * GI).build().unwrap();
        until("it pins", || pool.stats().memory.reserve_bytes > STEP);
        drop(pool);
        let calls = source.calls(SourceCall::Acquire);
        thread::sleep(Duration::from_millis(5));
        assert_eq!(source.calls(SourceCall::Acquire), calls);
        // Everything was released: the wrapped source can hold its total again.
        assert_eq!(over(source, TI).build().unwrap().stats().memory.held_bytes, 0);
    }
}

#[test]
fn a_fork_during_a_reserve_leaves_the_parent_unaffected() {
    // A fork while other tests run would copy locks that their threads hold.
    alone(|| {
        let source = faulty(false);
        let pool = by_a_thread(source.clone(), 256 * MI, 64 * MI).build().unwrap();
        let gate = source.hold(SourceCall::Acquire);
        let childs = pool.clone();
        in_a_child(|| {
            let checks = vec![
                ("wait", childs.wait_for_reserve(Duration::ZERO).is_err_and(|error| error.is_forked())),
                ("reserve", childs.stats().memory.reserve_bytes == 0),
                ("reserve", childs.reserve(MI).is_err_and(|error| error.is_forked())),
            ];
            childs.maintain();
            drop(childs);
            checks
        });
        drop(gate);
        assert!(pool.wait_for_reserve(PATIENCE).unwrap());
        assert_eq!(valid_stats(&pool).memory.reserve_bytes, 64 * MI);
    });
}

#[test]
fn a_reserve_that_is_refused_for_its_size_evicts_nothing() {
    let pool = by_steps(faulty(false), 64 * MI, 48 * MI).build().unwrap();
    let _in_use = pool.get(40 * MIB).unwrap();
    drop(pool.get(MIB).unwrap());
    let before = pool.stats().memory;
    assert!(pool.reserve(32 * MI).unwrap_err().is_limit());
    let after = pool.stats().memory;
    assert_eq!((before.idle, after.idle, after.evictions.other), (1, 1, before.evictions.other));
}
