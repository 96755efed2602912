//! Idle memory is released, limits are lowered.

use pinpool_testing::{SinkMemory, SinkStream};

use super::{
    MIB, after_seconds, over_separate_regions, over_virtual_memory, ten_idle_granules, valid_stats, with_manual_clock,
};
use crate::captured_log::{count, lines, listen};

#[test]
fn idle_memory_leaves_the_cache_after_10_s_and_the_arena_after_60() {
    for (builder, granules) in [(over_virtual_memory(), true), (over_separate_regions(), false)] {
        let (pool, clock) = with_manual_clock(builder);
        ten_idle_granules(&pool);
        let pinned = pool.stats().memory.held_bytes;
        assert_eq!(after_seconds(&clock, &pool, 9).memory.idle, 10);
        let stats = after_seconds(&clock, &pool, 1);
        assert_eq!((stats.memory.idle, stats.memory.evictions.expired, stats.memory.held_bytes), (0, 10, pinned));
        assert_eq!(after_seconds(&clock, &pool, 59).memory.held_bytes, pinned);
        let mut left = Vec::new();
        for _ in 0..8 {
            left.push(after_seconds(&clock, &pool, 1).memory.held_bytes >> 21);
            clock.advance_us(20_000);
            pool.maintain();
            assert_eq!(pool.stats().memory.held_bytes >> 21, *left.last().unwrap(), "once a second");
        }
        if granules {
            assert_eq!(left, [8, 6, 4, 3, 2, 1, 0, 0]);
        }
        assert_eq!(valid_stats(&pool).memory.held_bytes, 0);
    }
}

#[test]
fn five_minutes_without_a_miss_lower_a_raised_limit() {
    listen();
    let (pool, clock) = with_manual_clock(over_virtual_memory().pool_size_limit(200));
    // After 200 returns, each return evicts, and the thousandth eviction is a check.
    drop((0..1200).map(|n| pool.get(4096 * (1 + n % 8)).unwrap()).collect::<Vec<_>>());
    assert_eq!(valid_stats(&pool).limits.pool_size_limit, 220);
    lines();
    assert_eq!(after_seconds(&clock, &pool, 299).limits.reductions, 0);
    let stats = after_seconds(&clock, &pool, 1);
    assert_eq!((stats.limits.reductions, stats.limits.pool_size_limit), (1, 200));
    assert_eq!(count(&lines(), "lowered: no miss for five minutes, pool_size_limit=220->200"), 1);
    assert_eq!(after_seconds(&clock, &pool, 300).limits.reductions, 1, "never below the limit at the start");
}

#[test]
fn misses_read_the_clock_and_hits_do_not() {
    let (pool, clock) = with_manual_clock(over_virtual_memory());
    drop((pool.get(100).unwrap(), pool.get(5000).unwrap()));
    clock.advance_us(20_000_000);
    (0..1000).for_each(|_| drop(pool.get(100).unwrap()));
    assert_eq!((pool.stats().memory.idle, pool.stats().memory.evictions.expired), (2, 0), "no hit did anything");
    drop(pool.get(100_000).unwrap());
    assert!(pool.stats().memory.evictions.expired > 0, "the miss looked for what is old");
}

#[test]
fn the_end_of_a_clock_is_no_end_of_a_pool() {
    for builder in [over_virtual_memory(), over_separate_regions()] {
        let (pool, clock) = with_manual_clock(builder);
        drop(pool.get(100).unwrap());
        clock.advance_us(u64::MAX - 2_000_000);
        for _ in 0..8 {
            let (stream, mut device) = (SinkStream::new().unwrap(), SinkMemory::new(5000));
            pool.get(5000).unwrap().copy_to(&stream, &mut device).unwrap().wait().unwrap();
            drop((pool.get(100).unwrap(), pool.get(2 * MIB).unwrap()));
            clock.advance_us(500_000);
            pool.maintain();
            pool.trim(0);
            valid_stats(&pool);
        }
        assert_eq!(clock.now_us(), u64::MAX);
        assert!(pool.get(100).is_ok());
    }
}
