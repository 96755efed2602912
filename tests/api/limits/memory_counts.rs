//! Every byte counts towards its limit: pageable memory, partitions, refused requests and quarantined buffers.

use pinpool_os::format::Size;
use std::time::Duration;

use pinpool::{Backend, Limit, OnFull, PinnedBuf, Pool, PoolBuilder, Preset, Stats};
use pinpool_testing::SourceCall;

use crate::child::alone;
use crate::fixture::{MIB, Requests, faulty_heap, held_sink, over_sim};
use crate::valid_stats::valid_stats;

fn builder() -> PoolBuilder {
    let builder = over_sim(Limit::Auto).wait(Duration::ZERO);
    builder.unstable_settings(|only| only.copies_wait = Some(Duration::ZERO))
}

fn both_presets(set: impl Fn(PoolBuilder) -> PoolBuilder) -> [Pool; 2] {
    [Preset::Adaptive, Preset::TensorFlow].map(|preset| set(builder().preset(preset)).build().unwrap())
}

#[test]
fn pageable_memory_is_counted_under_a_separate_limit() {
    for pool in both_presets(|builder| builder.max_bytes(8 << 20).on_full(OnFull::Pageable)) {
        let held: Vec<PinnedBuf> = std::iter::from_fn(|| pool.get(2 * MIB - 4096).ok()).take(100).collect();
        let stats = valid_stats(&pool);
        assert!(held.len() <= 8, "{} buffers of 2 MiB under 8 MiB, pinned and not", held.len());
        assert_eq!(stats.limits.max_bytes, Some(8 << 20));
        let pageable = stats.requests.pageable * (2 * MIB - 4096) as u64;
        assert!(pageable > 0 && (pageable..=8 << 20).contains(&stats.memory.pageable_bytes), "{stats:?}");
        assert!(stats.memory.in_use_bytes >= (held.len() * (2 * MIB - 4096)) as u64, "{stats:?}");
        assert_eq!(stats.memory.in_use, held.len() as u64);
        let error = pool.get(2 * MIB - 4096).unwrap_err();
        assert!(error.is_limit() && error.to_string().contains("pageable"), "{error}");
        drop(held);
        let stats = valid_stats(&pool);
        assert_eq!((stats.memory.pageable_bytes, stats.memory.in_use_bytes), (0, 0));
    }
}

#[test]
fn pageable_memory_counts_during_copies_and_when_quarantined() {
    let pool = builder().max_bytes(1 << 20).on_full(OnFull::Pageable).build().unwrap();
    let held = pool.get(MIB).unwrap();
    let (stream, mut device, gate) = held_sink(MIB);
    let copy = pool.get(MIB).unwrap().copy_to(&stream, &mut device).unwrap();
    let Stats { copies, memory, .. } = valid_stats(&pool);
    assert_eq!((copies.in_flight_bytes, memory.in_use_bytes, memory.pageable_bytes), (1 << 20, 1 << 20, 1 << 20));
    let columns = |row: pinpool::stats::ClassStats| [row.buffers, row.in_flight, row.in_use, row.quarantined];
    assert_eq!(columns(pool.class_stats()[0]), [1, 0, 1, 0]);
    stream.fail();
    drop(gate);
    assert!(copy.wait().is_err());
    pool.maintain();
    let Stats { copies, memory, .. } = valid_stats(&pool);
    assert_eq!((copies.in_flight_bytes, memory.quarantined_bytes, memory.pageable_bytes), (0, 1 << 20, 1 << 20));
    assert_eq!(columns(pool.class_stats()[0]), [1, 0, 1, 0]);
    assert!(pool.get(MIB).is_err(), "lost bytes count under the limit");
    drop(held);
}

#[test]
fn a_full_partition_may_get_pageable_memory_only_from_a_full_pool() {
    let pool = builder().max_bytes(8 << 20).on_full(OnFull::Pageable).build().unwrap();
    let eval = pool.open_partition("eval", 2 << 20).unwrap();
    let all: Vec<_> = (0..8).map(|_| pool.get(MIB).unwrap()).collect();
    let held: Vec<_> = std::iter::from_fn(|| eval.get(MIB).ok()).collect();
    assert_eq!((held.len(), held.iter().any(|buf| buf.pinned_by().is_some())), (2, false));
    let (of_eval, of_all) = (valid_stats(&eval).memory, valid_stats(&pool).memory);
    assert_eq!((of_eval.in_use_bytes, of_all.pageable_bytes, of_all.in_use_bytes), (2 << 20, 2 << 20, 10 << 20));
    drop((all, held));
    assert_eq!(eval.stats().memory.in_use_bytes, 0);
}

#[test]
fn the_peak_of_a_partition_is_memory_that_was_there() {
    let source = std::sync::Arc::new(pinpool_replay::SimSource::new(4 << 20));
    let pool = builder().backend(Backend::Source(source)).max_bytes(1 << 50).build().unwrap();
    let eval = pool.open_partition("eval", 1 << 50).unwrap();
    assert!(eval.get(1 << 45).is_err());
    let stats = valid_stats(&eval);
    assert_eq!((stats.memory.peak_held_bytes, stats.memory.held_bytes), (0, 0));
    drop(eval.get(2 * MIB).unwrap());
    let peaks = (valid_stats(&eval).memory.peak_held_bytes, valid_stats(&pool).memory.peak_held_bytes);
    assert_eq!(peaks, (2 << 20, 2 << 20));
}

/// Loses one buffer of 1 MiB to a device that fails.
fn lose_one(pool: &Pool, from: &impl Requests) {
    let (stream, mut device, gate) = held_sink(MIB);
    let copy = from.get(MIB).unwrap().copy_to(&stream, &mut device).unwrap();
    stream.fail();
    drop(gate);
    assert!(copy.wait().is_err());
    pool.maintain();
}

#[test]
fn a_refusal_names_the_bytes_that_are_lost() {
    for preset in [Preset::Adaptive, Preset::TensorFlow] {
        let pool = builder().preset(preset).backend(Backend::Heap).max_bytes(3 << 20).build().unwrap();
        lose_one(&pool, &pool);
        assert_eq!(valid_stats(&pool).memory.quarantined, 1);
        let error = pool.get(3 * MIB - 4096).unwrap_err().to_string();
        assert!(error.contains(", quarantined 1.0MiB") || error.contains(", quarantined 2.0MiB"), "{preset}: {error}");
    }
    let source = faulty_heap();
    let pool = builder().preset(Preset::TensorFlow).backend(Backend::Source(source.clone())).max_bytes(3 << 20);
    let pool = pool.pool_size_limit(0).build().unwrap();
    source.fail(SourceCall::Release, 0);
    drop(pool.get(MIB).unwrap());
    let error = pool.get(3 * MIB - 4096).unwrap_err().to_string();
    assert!(error.contains(&format!(", quarantined {}", Size(valid_stats(&pool).memory.quarantined_bytes))), "{error}");
}

#[test]
fn a_lost_buffer_of_a_partition_stays_claimed_there_and_is_lost_to_its_pool() {
    let pool = builder().backend(Backend::Heap).max_bytes(8 << 20).build().unwrap();
    let eval = pool.open_partition("eval", 1 << 20).unwrap();
    lose_one(&pool, &eval);
    assert_eq!((valid_stats(&pool).memory.quarantined, valid_stats(&pool).memory.quarantined_bytes), (1, 1 << 20));
    assert!(eval.stats().memory.in_use_bytes == 1 << 20 && eval.get(1).unwrap_err().is_limit());
}

#[cfg(target_os = "linux")]
#[test]
fn exhausted_addresses_are_named_in_the_refusal() {
    #[allow(unsafe_code)]
    fn limit_addresses(bytes: u64) {
        let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
        // SAFETY: `limit` is a live `rlimit` for the length of the call.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const limit) }, 0);
    }
    alone(|| {
        limit_addresses(2 << 30);
        let pool = builder().max_bytes(1 << 40).build().unwrap();
        for len in [4 << 30, 64 << 30] {
            let error = pool.get(len).unwrap_err();
            assert!(error.to_string().contains("ulimit -v") && error.is_backend(), "{error}");
            assert!(!error.to_string().contains("PINPOOL_MAX_BYTES"), "{error}");
        }
        assert!(pool.get(1 << 41).unwrap_err().is_limit());
        let pool =
            builder().backend(Backend::Heap).preset(Preset::TensorFlow).max_bytes(Limit::Unlimited).build().unwrap();
        let error = pool.get(4 << 30).unwrap_err().to_string();
        assert!(error.contains("ulimit -v"), "{error}");
    });
}
