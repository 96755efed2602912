//! Sizes that vary: large buffers merge, and a hole is kept for the next one.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use log::{Level, LevelFilter};
use pinpool::unstable::rate_window;
use pinpool::{Limit, PinnedBuf, Pool, Request, Stats};
use pinpool_replay::SimSource;

use crate::captured_log::{lines_with_levels, listen_from};
use crate::fixture::{self, held_sink};
use crate::until::until;

use super::{
    KIB, MIB, after_seconds, over, over_both, over_separate_regions, over_virtual_memory, valid_stats,
    with_manual_clock,
};

/// Requests sizes that each miss although idle memory of another size would suffice. By the last return, sizes vary.
fn vary(pool: &Pool) {
    [16, 8, 14, 9, 13, 15, 10, 12, 11].into_iter().for_each(|mib| drop(pool.get(mib * MIB).unwrap()));
}

#[test]
fn while_sizes_vary_large_buffers_merge_and_small_ones_keep_their_class() {
    for (pool, clock) in over_both().map(with_manual_clock) {
        vary(&pool);
        let Stats { requests, memory, .. } = valid_stats(&pool);
        assert_eq!((requests.returned, rate_window(&pool).put), (9, 9));
        assert_eq!((memory.evictions.over_limit, requests.hits), (0, 0));
        let held = [256 * KIB, 257 * KIB, 9 * MIB].map(|len| pool.get(len).unwrap());
        let idle = valid_stats(&pool).memory.idle;
        drop(held);
        let stats = valid_stats(&pool);
        assert_eq!((stats.requests.returned, stats.memory.idle), (12, idle + 1), "{stats:?}");
        assert!(stats.memory.pin.count <= 2, "one for the large, one for the small regions");
        // `clear` begins a new rate window.
        pool.clear();
        assert_eq!((rate_window(&pool).put, pool.stats().requests.returned), (0, 12));
        after_seconds(&clock, &pool, 60);
        drop(pool.get(9 * MIB).unwrap());
        assert_eq!(valid_stats(&pool).memory.idle, 1, "a minute later it is kept");
    }
}

/// As when an evaluation with more and smaller batches follows a training.
#[test]
fn after_a_change_from_one_fixed_size_to_another_requests_hit_again() {
    for (pool, _clock) in over_both().map(with_manual_clock) {
        listen_from(LevelFilter::Debug);
        let epochs = |len: usize, buffers: usize| {
            (0..3).for_each(|_| drop((0..buffers).map(|_| pool.get(len).unwrap()).collect::<Vec<_>>()));
        };
        let hits_of_round = || {
            let before = pool.stats().requests.hits;
            for len in [12 * MIB, MIB] {
                (0..10_000).for_each(|_| drop(pool.get(len).unwrap()));
            }
            valid_stats(&pool).requests.hits - before
        };
        epochs(16 * MIB, 8);
        epochs(12 * MIB, 4);
        let hits = [hits_of_round(), hits_of_round(), hits_of_round()];
        assert!(hits[1..].iter().all(|&hits| hits >= 19_990), "{hits:?}");
        let lines = lines_with_levels();
        let sizes: Vec<_> = lines.iter().filter(|(_, line)| line.contains(" sizes_")).collect();
        let [(Level::Debug, begin), (Level::Debug, end)] = sizes.as_slice() else { panic!("two lines: {lines:?}") };
        assert!(begin.contains(" sizes_vary: ") && end.contains(" sizes_recur: "), "{begin}, {end}");
    }
}

/// Each searches every few milliseconds while it is the head of the queue.
#[test]
fn a_request_that_waits_is_one_miss_also_behind_others() {
    let source = Arc::new(SimSource::separate_regions(1 << 40));
    let pool = fixture::over(source, Limit::Bytes(40 << 20)).build().unwrap();
    let [_first, second, _third, fourth] = [(); 4].map(|()| pool.get(10 * MIB).unwrap());
    drop((second, fourth));
    let makes_sizes_vary = |wait_ms| {
        listen_from(LevelFilter::Debug);
        let request = Request::new(20 * MIB).timeout(Duration::from_millis(wait_ms));
        assert!(pool.get_with(request).unwrap_err().is_timeout(), "two holes of 10 MiB");
        lines_with_levels().iter().any(|(_, line)| line.contains(" sizes_vary: "))
    };
    assert!(!makes_sizes_vary(100));
    thread::scope(|scope| {
        let head = scope.spawn(|| makes_sizes_vary(100));
        until("the head waits", || pool.stats().requests.waiting > 0 || head.is_finished());
        assert!(makes_sizes_vary(400), "the third miss");
        assert!(!head.join().unwrap());
    });
}

#[test]
fn a_large_request_takes_several_idle_buffers_and_holes_before_it_grows() {
    let (pool, _clock) = with_manual_clock(over_virtual_memory());
    let mut buffers: Vec<_> = (0..8).map(|_| pool.get(2 * MIB).unwrap()).collect();
    buffers.truncate(4);
    assert_eq!(pool.stats().memory.held_bytes, 16 << 20);
    let large = pool.get(8 * MIB).unwrap();
    assert_eq!((valid_stats(&pool).memory.held_bytes, pool.stats().memory.evictions.reclaimed), (16 << 20, 4));
    drop((large, buffers));
}

#[test]
fn growth_is_by_a_quarter_up_to_what_was_held_lately_and_by_little_beyond_that() {
    let (pool, _clock) = with_manual_clock(over_virtual_memory());
    let pinned = |pool: &Pool| valid_stats(pool).memory.held_bytes >> 20;
    let first = pool.get(200 * MIB).unwrap();
    assert_eq!(pinned(&pool), 200);
    let _second = pool.get(2 * MIB).unwrap();
    assert_eq!(pinned(&pool), 206, "a part in 28");
    drop(first);
    pool.trim(0);
    assert_eq!(pinned(&pool), 2);
    let _third = pool.get(100 * MIB).unwrap();
    assert_eq!(pinned(&pool), 102);
    let _small = pool.get(MIB).unwrap();
    assert_eq!(pinned(&pool), 120, "nine granules");
    let _last = pool.get(20 * MIB).unwrap();
    assert_eq!((pinned(&pool), pool.stats().memory.pin.count), (150, 5), "a quarter");
}

#[test]
fn a_step_that_the_backend_refuses_shrinks_to_what_is_needed() {
    let (pool, _clock) = with_manual_clock(over(Arc::new(SimSource::new(162 << 20))));
    let _first = pool.get(160 * MIB).unwrap();
    let _second = pool.get(2 * MIB).unwrap();
    let stats = valid_stats(&pool);
    assert_eq!((stats.memory.held_bytes, stats.memory.pin.failures, stats.memory.smaller_regions), (162 << 20, 1, 0));
}

#[test]
fn regions_hold_four_of_the_largest_that_missed_during_copies_too() {
    let (pool, _clock) = with_manual_clock(over_separate_regions());
    let large = pool.get(10 * MIB).unwrap();
    assert_eq!(valid_stats(&pool).memory.held_bytes, 40 << 20);
    let (stream, mut device, gate) = held_sink(10 * MIB);
    let copy = large.copy_to(&stream, &mut device).unwrap();
    let held = [(); 3].map(|()| pool.get(10 * MIB).unwrap());
    let _next = pool.get(4 * MIB).unwrap();
    assert_eq!(valid_stats(&pool).memory.held_bytes, 80 << 20, "not 8 MiB");
    drop((gate, held));
    copy.wait().unwrap();
}

/// Buffers of one granule in use, and as many holes of one granule between them, while sizes vary.
fn scattered(pool: &Pool, granules: usize) -> Vec<PinnedBuf> {
    vary(pool);
    let mut held: Vec<_> = (0..2 * granules).map(|_| pool.get(2 * MIB).unwrap()).collect();
    let mut is_kept = [false, true].into_iter().cycle();
    held.retain(|_| is_kept.next().unwrap());
    held
}

#[test]
fn a_poll_moves_granules_together_before_a_request_needs_them() {
    let (pool, _clock) = with_manual_clock(over_virtual_memory());
    let held = scattered(&pool, 12);
    let before = valid_stats(&pool);
    assert_eq!(before.memory.remap.count, 0);
    pool.maintain();
    let prepared = valid_stats(&pool);
    assert!(prepared.memory.remap.count >= 2, "{prepared:?}");
    assert_eq!((prepared.memory.held_bytes, prepared.memory.in_use), (before.memory.held_bytes, 12));
    let _large = pool.get(16 * MIB).unwrap();
    let after = valid_stats(&pool).memory;
    assert!(after.remap.count - prepared.memory.remap.count <= 2, "{after:?}");
    assert_eq!(after.held_bytes, before.memory.held_bytes, "{after:?}");
    drop(held);
}
