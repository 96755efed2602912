//! Each figure against a scenario whose counts are known.

use std::future::Future;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::thread;
use std::time::Duration;

use pinpool::copy::sink::{SinkMem, SinkStream};
use pinpool::unstable::ManualClock;
use pinpool::{EvictionReasons, MissReasons, OnFull, Preset, Stats};
use pinpool_replay::SimSource;
use pinpool_testing::{FaultSource, SourceCall};

use crate::fixture::{LONG, over, over_sim, until_waits, valid_stats};

const MIB: usize = 1 << 20;

fn simulated() -> Arc<FaultSource> {
    Arc::new(FaultSource::around(Arc::new(SimSource::new(1 << 40))))
}

fn discrete() -> Arc<FaultSource> {
    Arc::new(FaultSource::around(Arc::new(SimSource::discrete(1 << 40))))
}

/// The reasons that are not zero.
fn misses(stats: &Stats) -> Vec<(&'static str, u64)> {
    stats.miss_reasons.by_name().into_iter().filter(|(_, count)| *count > 0).collect()
}

fn left(stats: &Stats) -> Vec<(&'static str, u64)> {
    stats.eviction_reasons.by_name().into_iter().filter(|(_, count)| *count > 0).collect()
}

#[test]
fn the_reason_of_a_miss_follows_from_what_became_of_the_buffers_of_its_class() {
    for preset in [Preset::Adaptive, Preset::TensorFlow] {
        let pool = over(simulated(), 1 << 30).preset(preset).background_poll(false).build().unwrap();
        let first = pool.get(MIB).unwrap();
        assert_eq!(misses(&valid_stats(&pool)), [("first_of_size", 1)], "{preset:?}");
        let second = pool.get(MIB).unwrap();
        assert_eq!(misses(&valid_stats(&pool)), [("first_of_size", 1), ("all_in_use", 1)]);
        drop(pool.get(3 * MIB).unwrap());
        assert_eq!(misses(&valid_stats(&pool))[0], ("first_of_size", 2));
        let (stream, mut device) = (SinkStream::new().unwrap(), SinkMem::new(MIB));
        let gate = stream.hold();
        drop(second.copy_to(&stream, &mut device).unwrap());
        let third = pool.get(MIB).unwrap();
        assert_eq!(misses(&valid_stats(&pool)), [("first_of_size", 2), ("all_in_use", 1), ("in_flight", 1)]);
        drop(gate);
        stream.synchronize().unwrap();
        pool.poll();
        drop((first, third));
        pool.clear();
        let held = [MIB, MIB, 3 * MIB, MIB, MIB].map(|len| pool.get(len).unwrap());
        let stats = valid_stats(&pool);
        let by_name = MissReasons::default().by_name().map(|(name, _)| name);
        assert_eq!(by_name.len(), 7);
        assert_eq!(
            misses(&stats),
            [("first_of_size", 2), ("evicted_earlier", 4), ("all_in_use", 2), ("in_flight", 1)],
            "three of a class were there before"
        );
        assert_eq!((stats.misses, stats.miss_reasons.total()), (9, 9));
        drop(held);
    }
}

#[test]
fn a_get_that_was_refused_before_misses_for_that_reason() {
    // At the ceiling: pageable memory, and memory after a wait.
    let pool = over(simulated(), 4 << 20).on_full(OnFull::Pageable).build().unwrap();
    let held = pool.get(4 * MIB).unwrap();
    drop(pool.get(2 * MIB).unwrap());
    let stats = valid_stats(&pool);
    assert_eq!(misses(&stats), [("first_of_size", 1), ("at_ceiling", 1)]);
    assert_eq!((stats.fallbacks, stats.fallback_buffers, stats.peaks.fallback_buffers), (1, 0, 1));
    drop(held);

    let pool = over_sim(4 << 20).build().unwrap();
    let held = pool.get(4 * MIB).unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| pool.get(2 * MIB).map(drop));
        until_waits(&pool, 1);
        let stats = pool.stats();
        assert_eq!((stats.waiting, stats.wait_time.count()), (1, 0));
        drop(held);
        waiting.join().unwrap().unwrap();
    });
    let stats = valid_stats(&pool);
    assert_eq!(misses(&stats), [("first_of_size", 1), ("at_ceiling", 1)]);
    assert_eq!((stats.waits, stats.waiting, stats.timeouts, stats.wait_time.count()), (1, 0, 0, 1));

    // Behind a get for more than there is, with room for itself.
    let pool = over_sim(4 << 20).build().unwrap();
    let _held = pool.get(2 * MIB).unwrap();
    let mut first = Box::pin(pool.get_async(4 * MIB));
    assert!(first.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    thread::scope(|scope| {
        let behind = scope.spawn(|| pool.get(MIB).map(drop));
        until_waits(&pool, 2);
        drop(first);
        behind.join().unwrap().unwrap();
    });
    let stats = valid_stats(&pool);
    assert_eq!(misses(&stats), [("first_of_size", 1), ("in_line", 1)]);
    assert_eq!((stats.waits, stats.waiting, stats.timeouts, stats.wait_time.count()), (2, 0, 0, 2));

    // The back-end refused once, and then a wait let the get try again.
    let source = discrete();
    source.fail(SourceCall::Acquire, 0);
    source.fail(SourceCall::Acquire, 1);
    let pool = over(source, 1 << 30).wait(LONG).build().unwrap();
    drop(pool.get(MIB).unwrap());
    let stats = valid_stats(&pool);
    assert_eq!(misses(&stats), [("backend_failed", 1)]);
    assert_eq!((stats.pin.failures, stats.pin.count, stats.underlying.failures), (2, 1, 2));
}

#[test]
fn a_wait_that_ends_without_room_is_timed_and_counted_as_run_out() {
    let pool = over_sim(4 << 20).wait(Duration::from_millis(2)).build().unwrap();
    let _held = pool.get(4 * MIB).unwrap();
    assert!(pool.get(MIB).unwrap_err().is_limit());
    let stats = valid_stats(&pool);
    assert_eq!((stats.waits, stats.timeouts, stats.wait_time.count(), stats.failed_gets), (1, 1, 1, 1));
    assert!(stats.wait_time.max() > Duration::ZERO && stats.wait_time.total() == stats.wait_time.max());
}

#[test]
fn each_way_for_a_buffer_to_leave_has_its_count() {
    let clock = ManualClock::default();
    let pool = over(simulated(), 16 << 20).clock(clock.clone()).background_poll(false).pool_size_limit(3);
    let pool = pool.auto_resize(false).build().unwrap();
    let expect = |reasons: &[(&'static str, u64)]| assert_eq!(left(&valid_stats(&pool)), reasons);
    drop((0..4).map(|_| pool.get(MIB).unwrap()).collect::<Vec<_>>());
    expect(&[("over_limit", 1)]);
    assert_eq!(pool.stats().evicted, 1);
    pool.trim(0);
    expect(&[("over_limit", 1), ("trimmed", 3)]);
    drop(pool.get(MIB).unwrap());
    pool.clear();
    expect(&[("over_limit", 1), ("trimmed", 3), ("cleared", 1)]);
    drop((0..3).map(|_| pool.get(4 * MIB).unwrap()).collect::<Vec<_>>());
    drop(pool.get(16 * MIB).unwrap());
    expect(&[("over_limit", 1), ("reclaimed", 3), ("trimmed", 3), ("cleared", 1)]);
    clock.advance_us(20_000_000);
    pool.poll();
    clock.advance_us(20_000_000);
    pool.poll();
    expect(&[("over_limit", 1), ("reclaimed", 3), ("expired", 1), ("trimmed", 3), ("cleared", 1)]);
    let stats = valid_stats(&pool);
    assert_eq!((stats.reclaimed, stats.aged, stats.evicted), (6, 1, 1));

    let lowered = over(simulated(), 16 << 20).build().unwrap();
    drop(lowered.get(8 * MIB).unwrap());
    lowered.set_max_bytes(Some(4 << 20)).unwrap();
    let stats = valid_stats(&lowered);
    assert_eq!((left(&stats), stats.reclaimed), (vec![("over_bytes", 1)], 1));

    let unpooled = over(simulated(), 16 << 20).pool_size_limit(0).build().unwrap();
    drop(unpooled.get(MIB).unwrap());
    let stats = valid_stats(&unpooled);
    assert_eq!(stats.eviction_reasons.total(), 1);
    let EvictionReasons { over_limit, not_kept, .. } = stats.eviction_reasons;
    assert_eq!(over_limit + not_kept, 1);
}

#[test]
fn calls_that_page_lock_and_calls_that_give_back_are_apart() {
    let source = discrete();
    let pool = over(source.clone(), 64 << 20).preset(Preset::TensorFlow).pool_size_limit(4).build().unwrap();
    drop([1, 2, 3].map(|mib| pool.get(mib * MIB).unwrap()));
    let stats = valid_stats(&pool);
    let class_bytes = stats.idle_bytes;
    assert_eq!((stats.pin.count, stats.pin.bytes, stats.pin.time.count()), (3, class_bytes, 3));
    assert_eq!((stats.unpin.count, stats.unpin.time.count(), stats.remap.time.count()), (0, 0, 0));
    source.fail(SourceCall::Release, 1);
    pool.clear();
    let stats = valid_stats(&pool);
    assert_eq!((stats.unpin.count, stats.unpin.failures, stats.unpin.time.count()), (2, 1, 3));
    assert_eq!((stats.underlying.allocs, stats.underlying.frees, stats.underlying.failures), (3, 2, 1));
    assert_eq!(stats.underlying.time, stats.pin.time.total() + stats.unpin.time.total());
    assert_eq!(stats.lost_bytes, stats.pin.bytes - stats.unpin.bytes);
}

#[test]
fn peaks_stay_where_the_figures_were() {
    let clock = ManualClock::default();
    let pool = over(simulated(), 64 << 20).clock(clock).background_poll(false).build().unwrap();
    let (stream, mut device) = (SinkStream::new().unwrap(), SinkMem::new(MIB));
    let mut held: Vec<_> = (0..5).map(|_| pool.get(MIB).unwrap()).collect();
    let gate = stream.hold();
    for buf in held.drain(..2) {
        drop(buf.copy_to(&stream, &mut device).unwrap());
    }
    drop(gate);
    stream.synchronize().unwrap();
    pool.poll();
    drop(held);
    assert_eq!(valid_stats(&pool).buffers_in_pool, 5);
    pool.clear();
    let (stats, mib) = (valid_stats(&pool), MIB as u64);
    assert_eq!((stats.buffers, stats.in_use, stats.in_flight, stats.buffers_in_pool), (0, 0, 0, 0));
    let peaks = stats.peaks;
    assert_eq!((peaks.buffers, peaks.in_use, peaks.in_use_bytes), (5, 5, 5 * mib));
    assert_eq!((peaks.in_flight, peaks.in_flight_bytes), (2, 2 * mib));
    assert_eq!((peaks.idle, peaks.idle_bytes), (5, 5 * mib), "the snapshot before the clear saw them");
    assert_eq!(stats.in_flight_time.count(), 2);
    assert_eq!(stats.use_time.count(), 5, "each of these gets missed");
}

#[test]
fn what_rounding_adds_is_known_of_the_gets_that_found_nothing_idle() {
    let pool = over(simulated(), 64 << 20).background_poll(false).build().unwrap();
    drop(pool.get(1).unwrap());
    drop(pool.get(1).unwrap());
    let requested = valid_stats(&pool).requested;
    assert_eq!((requested.gets, requested.bytes, requested.class_bytes), (1, 1, 4096));
    assert!((requested.waste() - 4095.0 / 4096.0).abs() < 1e-12);
}

#[test]
fn a_use_is_timed_from_a_miss_to_its_put_and_a_hit_is_not() {
    let clock = ManualClock::default();
    let pool = over(simulated(), 64 << 20).clock(clock.clone()).background_poll(false).build().unwrap();
    let buf = pool.get(MIB).unwrap();
    clock.advance_us(1000);
    drop(buf);
    let hit = pool.get(MIB).unwrap();
    clock.advance_us(5000);
    drop(hit);
    let stats = valid_stats(&pool);
    assert_eq!((stats.hits, stats.use_time.count(), stats.use_time.total()), (1, 1, Duration::from_millis(1)));
    let (stream, mut device) = (SinkStream::new().unwrap(), SinkMem::new(MIB));
    drop(pool.get(MIB).unwrap().copy_to(&stream, &mut device).unwrap());
    stream.synchronize().unwrap();
    clock.advance_us(7000);
    pool.poll();
    let stats = valid_stats(&pool);
    assert_eq!((stats.use_time.count(), stats.in_flight_time.count()), (1, 1));
    assert_eq!(stats.in_flight_time.total(), Duration::from_millis(7));
}

#[test]
fn classes_have_rows_and_partitions_snapshots_of_their_own() {
    let pool = over(simulated(), 64 << 20).name("train").background_poll(false).build().unwrap();
    let eval = pool.partition("eval", 8 << 20).unwrap();
    let gone = pool.partition("gone", 8 << 20).unwrap();
    let held = [MIB, MIB, 4096].map(|len| pool.get(len).unwrap());
    let _in_eval = eval.get(MIB).unwrap();
    drop(gone);
    let rows = pool.class_stats();
    let counted: Vec<_> = rows.iter().map(|row| (row.class_bytes, row.buffers, row.peak_buffers, row.misses)).collect();
    assert_eq!(counted, [(4096, 1, 1, 1), (MIB as u64, 3, 3, 3)], "with those of partitions");
    drop(held);
    pool.clear();
    let after: Vec<_> = pool.class_stats().iter().map(|row| (row.buffers, row.peak_buffers, row.evictions)).collect();
    assert_eq!(after, [(0, 1, 1), (1, 3, 2)]);
    let partitions = pool.partition_stats();
    let names: Vec<_> = partitions.iter().map(|stats| (stats.name.as_deref(), stats.in_use_bytes)).collect();
    assert_eq!(names, [(Some("train/eval"), MIB as u64)]);
    assert_eq!(pool.stats().name.as_deref(), Some("train"));
    assert!(eval.partition_stats().is_empty());
}

#[test]
fn buffers_in_flight_have_a_column_in_the_rows_of_the_classes() {
    let pool = over(simulated(), 64 << 20).background_poll(false).build().unwrap();
    let (stream, mut device) = (SinkStream::new().unwrap(), SinkMem::new(MIB));
    let gate = stream.hold();
    drop(pool.get(MIB).unwrap().copy_to(&stream, &mut device).unwrap());
    let rows = pool.class_stats();
    assert_eq!((rows.len(), rows[0].buffers, rows[0].in_flight), (1, 1, 1));
    drop(gate);
    stream.synchronize().unwrap();
    pool.poll();
    assert_eq!(pool.class_stats()[0].in_flight, 0);
}
