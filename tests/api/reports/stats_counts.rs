//! Checks each statistic in a scenario with known counts.

use std::future::Future;
use std::task::{Context, Waker};
use std::thread;
use std::time::Duration;

use pinpool::stats::{EvictionReasons, MissReasons};
use pinpool::{OnFull, Pool, Preset};
use pinpool_replay::SimSource;
use pinpool_testing::{SinkMemory, SinkStream, SourceCall};

use crate::fixture::{LONG, MIB, faulty, faulty_sim, held_sink, over, over_sim, until_waits, with_manual_clock};
use crate::valid_stats::valid_stats;

/// Misses of new sizes, of sizes that once had more buffers, and while all buffers were in use.
fn misses(pool: &Pool) -> [u64; 3] {
    let MissReasons { first_of_size, evicted_earlier, all_in_use, .. } = valid_stats(pool).requests.miss_reasons;
    [first_of_size, evicted_earlier, all_in_use]
}

/// Evictions over the limit, for room, of old buffers, and others.
fn left(pool: &Pool) -> [u64; 4] {
    let EvictionReasons { over_limit, reclaimed, expired, other, .. } = valid_stats(pool).memory.evictions;
    [over_limit, reclaimed, expired, other]
}

#[test]
fn the_reason_of_a_miss_follows_from_what_became_of_the_buffers_of_its_class() {
    for preset in [Preset::Adaptive, Preset::TensorFlow] {
        let pool = over(faulty_sim(), 1 << 30).preset(preset).build().unwrap();
        let first = pool.get(MIB).unwrap();
        assert_eq!(misses(&pool), [1, 0, 0], "{preset:?}");
        let second = pool.get(MIB).unwrap();
        assert_eq!(misses(&pool), [1, 0, 1]);
        drop(pool.get(3 * MIB).unwrap());
        assert_eq!(misses(&pool), [2, 0, 1]);
        drop((first, second));
        pool.clear();
        let held = [MIB, MIB, 3 * MIB, MIB, MIB].map(|len| pool.get(len).unwrap());
        assert_eq!(misses(&pool), [2, 3, 3], "two of a class existed before");
        drop(held);
    }
}

#[test]
fn waits_and_pageable_buffers_are_counted() {
    let pool = over(faulty_sim(), 4 << 20).on_full(OnFull::Pageable).build().unwrap();
    let held = pool.get(4 * MIB).unwrap();
    drop(pool.get(2 * MIB).unwrap());
    let stats = valid_stats(&pool);
    assert_eq!((stats.requests.pageable, stats.requests.misses, stats.memory.pageable), (1, 2, 0));
    drop(held);

    let pool = over_sim(4 << 20).build().unwrap();
    let held = pool.get(4 * MIB).unwrap();
    let mut first = Box::pin(pool.get_async(4 * MIB));
    assert!(first.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    thread::scope(|scope| {
        let behind = scope.spawn(|| pool.get(2 * MIB).map(drop));
        until_waits(&pool, 2);
        let requests = pool.stats().requests;
        assert_eq!((requests.waiting, requests.wait_time.count()), (2, 0));
        drop((held, first));
        behind.join().unwrap().unwrap();
    });
    let requests = valid_stats(&pool).requests;
    assert_eq!((requests.waits, requests.waiting, requests.timeouts, requests.wait_time.count()), (2, 0, 0, 2));

    // The backend refuses twice, and then a wait lets the request try again.
    let source = faulty(SimSource::separate_regions(1 << 40));
    (0..2).for_each(|index| source.fail(SourceCall::Acquire, index));
    let pool = over(source, 1 << 30).wait(LONG).build().unwrap();
    drop(pool.get(MIB).unwrap());
    let stats = valid_stats(&pool);
    assert_eq!((stats.memory.pin.failures, stats.memory.pin.count, stats.requests.misses), (2, 1, 1));
}

#[test]
fn a_wait_that_ends_without_room_is_timed_and_counted_as_timed_out() {
    let pool = over_sim(4 << 20).wait(Duration::from_millis(2)).build().unwrap();
    let _held = pool.get(4 * MIB).unwrap();
    assert!(pool.get(MIB).unwrap_err().is_limit());
    let requests = valid_stats(&pool).requests;
    assert_eq!((requests.waits, requests.timeouts, requests.wait_time.count(), requests.failed), (1, 1, 1, 1));
    let longest = requests.wait_time.max();
    assert!(longest > Duration::ZERO && requests.wait_time.total() == longest);
}

#[test]
fn evictions_are_counted_by_reason() {
    let (pool, clock) = with_manual_clock(over(faulty_sim(), 16 << 20).pool_size_limit(3).auto_resize(false));
    drop((0..4).map(|_| pool.get(MIB).unwrap()).collect::<Vec<_>>());
    assert_eq!(left(&pool), [1, 0, 0, 0]);
    pool.trim(0);
    drop(pool.get(MIB).unwrap());
    pool.clear();
    assert_eq!(left(&pool), [1, 0, 0, 4]);
    drop((0..3).map(|_| pool.get(4 * MIB).unwrap()).collect::<Vec<_>>());
    drop(pool.get(16 * MIB).unwrap());
    assert_eq!(left(&pool), [1, 3, 0, 4]);
    for _ in 0..2 {
        clock.advance_us(20_000_000);
        pool.maintain();
    }
    assert_eq!(left(&pool), [1, 3, 1, 4]);

    let lowered = over(faulty_sim(), 16 << 20).build().unwrap();
    drop(lowered.get(8 * MIB).unwrap());
    lowered.set_max_bytes(4 << 20).unwrap();
    assert_eq!(left(&lowered), [0, 1, 0, 0]);

    let unpooled = over(faulty_sim(), 16 << 20).pool_size_limit(0).build().unwrap();
    drop(unpooled.get(MIB).unwrap());
    assert_eq!(valid_stats(&unpooled).memory.evictions.total(), 1);
}

#[test]
fn pin_calls_and_unpin_calls_are_counted_separately() {
    let source = faulty(SimSource::separate_regions(1 << 40));
    let pool = over(source.clone(), 64 << 20).preset(Preset::TensorFlow).pool_size_limit(4).build().unwrap();
    drop([1, 2, 3].map(|mib| pool.get(mib * MIB).unwrap()));
    let stats = valid_stats(&pool);
    let class_bytes = stats.memory.idle_bytes;
    assert_eq!((stats.memory.pin.count, stats.memory.pin.bytes, stats.memory.pin.time.count()), (3, class_bytes, 3));
    assert_eq!((stats.memory.unpin.count, stats.memory.unpin.time.count(), stats.memory.remap.time.count()), (0, 0, 0));
    source.fail(SourceCall::Release, 1);
    pool.clear();
    let stats = valid_stats(&pool);
    assert_eq!((stats.memory.unpin.count, stats.memory.unpin.failures, stats.memory.unpin.time.count()), (2, 1, 3));
    assert_eq!(stats.memory.quarantined_bytes, stats.memory.pin.bytes - stats.memory.unpin.bytes);
}

#[test]
fn rounding_is_counted_for_misses_only() {
    let pool = over(faulty_sim(), 64 << 20).build().unwrap();
    drop(pool.get(1).unwrap());
    drop(pool.get(1).unwrap());
    let requests = valid_stats(&pool).requests;
    assert_eq!((requests.requested_bytes, requests.granted_bytes), (1, 4096));
}

#[test]
fn a_use_is_timed_from_a_miss_to_its_return_and_a_hit_is_not() {
    let (pool, clock) = with_manual_clock(over(faulty_sim(), 64 << 20));
    let buf = pool.get(MIB).unwrap();
    clock.advance_us(1000);
    drop(buf);
    let hit = pool.get(MIB).unwrap();
    clock.advance_us(5000);
    drop(hit);
    let requests = valid_stats(&pool).requests;
    assert_eq!((requests.hits, requests.use_time.count()), (1, 1));
    assert_eq!(requests.use_time.total(), Duration::from_millis(1));
    let (stream, mut device) = (SinkStream::new().unwrap(), SinkMemory::new(MIB));
    drop(pool.get(MIB).unwrap().copy_to(&stream, &mut device).unwrap());
    stream.synchronize().unwrap();
    clock.advance_us(7000);
    pool.maintain();
    let stats = valid_stats(&pool);
    assert_eq!((stats.requests.use_time.count(), stats.copies.time.count()), (1, 1));
    assert_eq!(stats.copies.time.total(), Duration::from_millis(7));
}

#[test]
fn classes_have_rows_and_partitions_snapshots_of_their_own() {
    let pool = over(faulty_sim(), 64 << 20).name("train").build().unwrap();
    let eval = pool.open_partition("eval", 8 << 20).unwrap();
    let gone = pool.open_partition("gone", 8 << 20).unwrap();
    let held = [MIB, MIB, 4096].map(|len| pool.get(len).unwrap());
    let _in_eval = eval.get(MIB).unwrap();
    drop(gone);
    let rows = pool.class_stats();
    let counted: Vec<_> = rows.iter().map(|row| (row.class_bytes, row.buffers, row.peak_buffers, row.misses)).collect();
    assert_eq!(counted, [(4096, 1, 1, 1), (MIB as u64, 3, 3, 3)], "including partitions");
    drop(held);
    pool.clear();
    let after: Vec<_> = pool.class_stats().iter().map(|row| (row.buffers, row.peak_buffers, row.evictions)).collect();
    assert_eq!(after, [(0, 1, 1), (1, 3, 2)]);
    let partitions = pool.partition_stats();
    let names: Vec<_> = partitions.iter().map(|stats| (stats.name.as_deref(), stats.memory.in_use_bytes)).collect();
    assert_eq!(names, [(Some("train/eval"), MIB as u64)]);
    assert_eq!(pool.stats().name.as_deref(), Some("train"));
}

#[test]
fn idle_buffers_and_buffers_in_flight_have_columns_in_the_rows_of_the_classes() {
    for preset in [Preset::Adaptive, Preset::TensorFlow] {
        let pool = over(faulty_sim(), 64 << 20).preset(preset).build().unwrap();
        let small: Vec<_> = (0..3).map(|_| pool.get(5_000).unwrap()).collect();
        let large: Vec<_> = (0..2).map(|_| pool.get(1 << 20).unwrap()).collect();
        let rows = || {
            pool.class_stats().iter().map(|row| [row.buffers, row.in_use, row.idle, row.in_flight]).collect::<Vec<_>>()
        };
        assert_eq!(rows(), [[3, 3, 0, 0], [2, 2, 0, 0]], "{preset:?}");
        drop(small);
        // Buffers that another thread returns go back to the thread that requested them.
        thread::spawn(|| drop(large)).join().unwrap();
        assert_eq!(rows(), [[3, 0, 3, 0], [2, 0, 2, 0]], "{preset:?}");
        let (stream, mut device, gate) = held_sink(5_000);
        drop(pool.get(5_000).unwrap().copy_to(&stream, &mut device).unwrap());
        let _held = pool.get(5_000).unwrap();
        assert_eq!(rows(), [[3, 1, 1, 1], [2, 0, 2, 0]], "{preset:?}");
        drop(gate);
        stream.synchronize().unwrap();
        pool.maintain();
        assert_eq!(rows(), [[3, 1, 2, 0], [2, 0, 2, 0]], "{preset:?}");
        assert_eq!(pool.class_stats().iter().map(|row| row.idle).sum::<u64>(), pool.stats().memory.idle);
    }
}
