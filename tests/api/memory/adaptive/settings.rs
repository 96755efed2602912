//! Limits, the idle timeout, `try_get`, `trim`, pageable.

use std::time::Duration;

use pinpool::unstable::rate_window;

use super::{MIB, after_seconds, fill, over_both, over_virtual_memory, valid_stats, with_manual_clock};

#[test]
fn a_limit_of_one_evicts_to_the_arena_and_a_limit_of_zero_keeps_nothing() {
    for (limit, kept, evicted) in [(1, 1, 2), (0, 0, 3)] {
        let pool = over_virtual_memory().pool_size_limit(limit).auto_resize(false).build().unwrap();
        let three: Vec<_> = [100, 5000, 10_000].iter().map(|&len| pool.get(len).unwrap()).collect();
        drop(three);
        let memory = valid_stats(&pool).memory;
        assert_eq!((memory.idle, memory.evictions.over_limit, memory.unpin.count), (kept, evicted, 0));
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
    // Idle memory is kept for at least half of the timeout, and for at most twice the timeout.
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
        // A separate region stays while one buffer lies in it.
        assert!(valid_stats(&pool).memory.held_bytes <= 16 << 20);
        drop(used);
        pool.clear();
        let stats = valid_stats(&pool);
        assert_eq!((stats.memory.held_bytes, rate_window(&pool), stats.memory.idle), (0, Default::default(), 0));
        assert_eq!(stats.memory.pin.bytes, stats.memory.unpin.bytes);
    }
}
