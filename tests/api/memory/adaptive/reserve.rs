//! Memory that is pinned ahead and kept.

use std::thread;

use super::{MIB, fill, over, over_virtual_memory, valid_stats};
use crate::fixture::{each_sim, faulty_sim};

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
    for (asked, touching) in [(None, thread::available_parallelism().unwrap().get()), (Some(3), 3), (Some(1), 1)] {
        let source = faulty_sim();
        let mut builder = over(source.clone()).reserve(2 << 20);
        if let Some(threads) = asked {
            builder = builder.unstable_settings(|only| only.pin_threads = Some(threads));
        }
        let pool = builder.build().unwrap();
        assert_eq!((source.pin_threads(), valid_stats(&pool).memory.reserve_bytes), (touching, 2 << 20));
    }
}

#[test]
fn an_impossible_reserve_is_refused_and_holds_nothing() {
    let [(sim, source), _] = each_sim();
    let pool = over(source).build().unwrap();
    for bytes in [9 << 40, 2 << 40, u64::MAX - (1 << 20), u64::MAX] {
        assert!(pool.reserve(bytes).unwrap_err().is_backend() || bytes > 9 << 40);
    }
    assert_eq!((sim.sums.lock().pinned_bytes, valid_stats(&pool).memory.held_bytes), (0, 0));
}
