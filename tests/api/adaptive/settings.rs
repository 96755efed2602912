//! Limits, the idle timeout, `try_get`, `trim`, fallbacks.

use std::time::Duration;

use pinpool::copy::sink::{SinkMem, SinkStream};
use pinpool::unstable::window;
use pinpool::{OnFull, PinnedBuf};

use super::{LONG, MIB, after_seconds, fill, over, over_both, over_virtual_memory, valid_stats, with_manual_clock};
use crate::counting::CountingSource;

#[test]
fn a_limit_of_one_evicts_to_the_arena_and_a_limit_of_zero_keeps_nothing() {
    for (limit, kept, evicted) in [(1, 1, 2), (0, 0, 3)] {
        let pool =
            over_virtual_memory().setting("pool_size_limit", limit).setting("auto_resize", false).build().unwrap();
        let three: Vec<_> = [100, 5000, 10_000].iter().map(|&len| pool.get(len).unwrap()).collect();
        drop(three);
        let stats = valid_stats(&pool);
        assert_eq!(
            (stats.memory.idle, stats.memory.evictions.over_limit, stats.memory.unpin.count),
            (kept, evicted, 0)
        );
        drop(pool.get(50_000).unwrap());
        assert_eq!(pool.stats().memory.pin.count, 1, "evicted memory is carved again without a pin call");
    }
}

#[test]
fn a_limit_below_one_granule_can_be_used_up() {
    for (max_bytes, buffers) in [(1 << 20, 256), (100 << 10, 24), (4096, 1)] {
        let pool = over_virtual_memory().max_bytes(max_bytes).build().unwrap();
        let held = fill(&pool, 4096);
        assert_eq!(held.len(), buffers, "{max_bytes}");
        assert!(pool.get(4096).unwrap_err().is_limit());
        assert!(valid_stats(&pool).memory.peak_held_bytes <= max_bytes);
    }
}

#[test]
fn an_idle_timeout_is_about_what_it_says_and_none_keeps_all() {
    // Half of it in the thread cache or more, none of it longer than twice.
    for timeout_us in [0, 300_000, 9_000_000] {
        let (prompt, clock) = with_manual_clock(over_virtual_memory().idle_timeout(Duration::from_micros(timeout_us)));
        super::ten_idle_granules(&prompt);
        let after = |us| {
            clock.advance_us(us);
            prompt.maintain();
            valid_stats(&prompt).memory.held_bytes
        };
        if timeout_us > 0 {
            assert_eq!(after(timeout_us / 2), 20 << 20, "{timeout_us} us");
        }
        // Ticks are 10 ms apart.
        let steps = timeout_us * 2 / 20_000 + 2;
        let held: Vec<_> = (0..steps).map(|_| after(20_000)).collect();
        assert_eq!(held.last(), Some(&0), "{timeout_us} us: {held:?}");
    }
    let (keeping, clock) = with_manual_clock(over_virtual_memory().idle_timeout(None));
    drop(keeping.get(2 * MIB).unwrap());
    assert_eq!(after_seconds(&clock, &keeping, 1_000_000).memory.held_bytes, 2 << 20);
    keeping.trim(0);
    assert_eq!(valid_stats(&keeping).memory.held_bytes, 0);
}

#[test]
fn try_get_takes_an_idle_buffer_and_pins_nothing() {
    let pool = over_virtual_memory().wait(LONG).build().unwrap();
    assert!(pool.try_get(5000).unwrap().is_none());
    drop(pool.get(5000).unwrap());
    let hit = pool.try_get(5001).unwrap().unwrap();
    assert_eq!(hit.len(), 5001);
    assert!(pool.try_get(5000).unwrap().is_none());
    let stats = valid_stats(&pool);
    assert_eq!(
        (stats.requests.served, stats.requests.failed, stats.memory.pin.count, stats.requests.waits),
        (2, 0, 1, 0)
    );
}

#[test]
fn trim_goes_down_to_its_argument_and_spares_what_is_in_use() {
    for builder in over_both() {
        let pool = builder.build().unwrap();
        let mut held: Vec<_> = (0..16).map(|_| pool.get(2 * MIB).unwrap()).collect();
        let used = held.pop();
        drop(held);
        let before = pool.stats().memory.held_bytes;
        pool.trim(u64::MAX);
        assert_eq!(pool.stats().memory.held_bytes, before);
        pool.trim(20 << 20);
        let stats = valid_stats(&pool);
        assert!(stats.memory.held_bytes <= 20 << 20 && stats.memory.in_use == 1, "{stats:?}");
        pool.trim(0);
        // A discrete region stays while one buffer lies in it.
        assert!(valid_stats(&pool).memory.held_bytes <= 16 << 20);
        drop(used);
        pool.clear();
        let stats = valid_stats(&pool);
        assert_eq!((stats.memory.held_bytes, window(&pool), stats.memory.idle), (0, Default::default(), 0));
        assert_eq!(stats.memory.pin.bytes, stats.memory.unpin.bytes);
    }
}

#[test]
fn a_pageable_fallback_is_not_pinned_is_counted_and_is_freed_at_the_put() {
    let builder = over(CountingSource::virtual_memory()).max_bytes(4 << 20).on_full(OnFull::Pageable);
    let pool = builder.build().unwrap();
    let pinned: Vec<_> = (0..2).map(|_| pool.get(2 * MIB).unwrap()).collect();
    assert!(pinned.iter().all(PinnedBuf::is_pinned));
    let mut fallback = pool.get(2 * MIB).unwrap();
    fallback.wait_slice_mut().unwrap().fill(3);
    assert!(!fallback.is_pinned());
    let second = pool.get(2 * MIB).unwrap();
    assert!(!second.is_pinned() && pool.get(4096).unwrap_err().is_limit(), "as much as the limit");
    let stats = valid_stats(&pool);
    assert_eq!(
        (stats.requests.fallbacks, stats.memory.in_use, stats.memory.in_use_bytes, stats.requests.failed),
        (2, 4, 8 << 20, 1)
    );
    assert_eq!((stats.memory.held_bytes, stats.memory.fallback_bytes), (4 << 20, 4 << 20));
    let stream = SinkStream::new().unwrap();
    fallback.copy_to(&stream, &mut SinkMem::new(2 * MIB)).unwrap().wait().unwrap();
    drop(second);
    pool.maintain();
    let stats = valid_stats(&pool);
    assert_eq!((stats.requests.returned, stats.memory.in_use, stats.memory.idle), (2, 2, 0));
}

#[test]
fn without_a_fallback_a_get_at_the_limit_is_an_error() {
    let pool = over_virtual_memory().max_bytes(4 << 20).on_full(OnFull::Error).build().unwrap();
    let _held = fill(&pool, MIB);
    assert!(pool.get(MIB).unwrap_err().is_limit());
    assert_eq!((valid_stats(&pool).requests.failed, pool.stats().requests.fallbacks), (2, 0));
}
