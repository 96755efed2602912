//! Memory that is pinned ahead and kept.

use std::thread;
use std::time::Duration;

use pinpool::{Backend, Error, Pool, Request};

use super::{LONG, MIB, fill, over, over_both, over_virtual_memory, valid_stats};
use crate::counting::CountingSource;

#[test]
fn a_reserve_serves_without_a_pin_and_stays_to_the_end() {
    for builder in over_both() {
        let pool = builder.reserve_bytes(8 << 20).build().unwrap();
        assert_eq!((valid_stats(&pool).memory.reserve_bytes, pool.stats().memory.held_bytes), (8 << 20, 8 << 20));
        let held: Vec<_> = (0..4).map(|_| pool.get(2 * MIB).unwrap()).collect();
        assert_eq!(valid_stats(&pool).memory.pin.count, 1);
        drop(held);
        pool.trim(0);
        pool.clear();
        assert_eq!(valid_stats(&pool).memory.held_bytes, 8 << 20);
    }
}

#[test]
fn reserves_add_up_and_displace_idle_memory() {
    let pool = over_virtual_memory().max_bytes(16 << 20).build().unwrap();
    pool.reserve(0).unwrap();
    drop(fill(&pool, 2 * MIB));
    pool.reserve(4 << 20).unwrap();
    pool.reserve((3 << 20) + 128).unwrap();
    let stats = valid_stats(&pool);
    assert_eq!((stats.memory.reserve_bytes, stats.limits.max_bytes), (8 << 20, Some(16 << 20)));
    assert!(stats.memory.held_bytes <= 16 << 20);
    for bytes in [9 << 20, 1 << 40, u64::MAX] {
        let error = pool.reserve(bytes).unwrap_err();
        assert!(error.is_limit(), "{error}");
    }
    assert_eq!(valid_stats(&pool).memory.reserve_bytes, 8 << 20);
}

#[test]
fn a_reserve_is_pinned_by_as_many_threads_as_were_asked_for() {
    let cores = thread::available_parallelism().unwrap().get();
    for (asked, touching) in [(None, cores), (Some(3), 3), (Some(1), 1)] {
        let source = CountingSource::virtual_memory();
        let mut builder = over(source.clone()).reserve_bytes(2 << 20);
        if let Some(threads) = asked {
            builder = builder.unstable_pin_threads(threads);
        }
        let pool = builder.build().unwrap();
        assert_eq!((source.threads(), valid_stats(&pool).memory.reserve_bytes), (touching, 2 << 20));
    }
}

#[test]
fn a_reserve_may_be_as_large_as_a_small_limit() {
    let pool = over_virtual_memory().max_bytes(1 << 20).reserve_bytes(1 << 20).build().unwrap();
    assert_eq!(valid_stats(&pool).memory.reserve_bytes, 1 << 20);
    assert_eq!(fill(&pool, 4096).len(), 256);
}

#[test]
fn a_reserve_that_no_range_can_hold_or_no_machine_has_is_refused_and_holds_nothing() {
    let source = CountingSource::virtual_memory();
    let pool = over(source.clone()).build().unwrap();
    for bytes in [9 << 40, 2 << 40, u64::MAX] {
        assert!(pool.reserve(bytes).unwrap_err().is_backend() || bytes == u64::MAX);
    }
    assert_eq!((source.held_bytes(), valid_stats(&pool).memory.held_bytes), (0, 0));
}

#[test]
fn without_growth_the_reserve_is_all_the_memory() {
    for builder in over_both() {
        let pool = builder.reserve_bytes(8 << 20).setting("growth", false).wait(LONG).build().unwrap();
        let error = pool.get(9 * MIB).unwrap_err();
        assert!(error.is_limit() && error.to_string().contains("PINPOOL_RESERVE"), "{error}");
        let held: Vec<_> = (0..4).map(|_| pool.get(2 * MIB).unwrap()).collect();
        let error = pool.get_with(Request::new(2 * MIB).wait(Duration::ZERO)).unwrap_err();
        assert!(error.to_string().contains("PINPOOL_GROWTH"), "{error}");
        drop(held);
        assert_eq!(pool.get(8 * MIB).unwrap().len(), 8 * MIB);
        assert_eq!(valid_stats(&pool).memory.pin.count, 1);
    }
}

#[test]
fn a_reserve_near_the_largest_number_is_refused() {
    let builder = |backend| Pool::builder().without_env().backend(backend).max_bytes(None);
    for bytes in [u64::MAX, u64::MAX - 1, u64::MAX - (1 << 20)] {
        let pool = builder(Backend::Heap).build().unwrap();
        let refusal = pool.reserve(bytes).unwrap_err();
        assert!(refusal.is_limit() || refusal.is_backend(), "{refusal}");
        assert_eq!(pool.stats().memory.held_bytes, 0);
        let built = builder(Backend::Mlock).reserve_bytes(bytes).build();
        // Below the first line the report has numbers of the machine, which change.
        let first_line = |error: Error| error.to_string().lines().next().map(str::to_owned);
        assert_eq!(first_line(built.unwrap_err()), first_line(refusal).map(|line| line.replace("`heap`", "`mlock`")));
    }
}
