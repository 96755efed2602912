//! A failing source: the statistics always match the memory held.

use std::sync::Arc;

use pinpool_testing::{FaultSource, SourceCall};

use super::{MIB, after_seconds, over, valid_stats, with_manual_clock};
use crate::captured_log::{count, lines, listen};
use crate::counting::CountingSource;

#[test]
fn failed_releases_hold_back_no_other_and_are_logged_once() {
    listen();
    for counting in [CountingSource::virtual_memory(), CountingSource::discrete()] {
        let source = Arc::new(FaultSource::around(counting.clone()));
        let (pool, clock) = with_manual_clock(over(source.clone()));
        // A used buffer after each idle one, so that no two are released by one call; and a region for each.
        let held: Vec<_> = (0..20).map(|_| pool.get(25 * MIB).unwrap()).collect();
        let mut between = Vec::new();
        for (at, buffer) in held.into_iter().enumerate() {
            if at % 2 == 0 { drop(buffer) } else { between.push(buffer) }
        }
        (0..7).for_each(|index| source.fail(SourceCall::Release, index));
        let before = counting.held_bytes();
        lines();
        for _ in 0..120 {
            after_seconds(&clock, &pool, 1);
            assert_eq!(valid_stats(&pool).memory.held_bytes, counting.held_bytes());
        }
        let logged = lines();
        assert_eq!(count(&logged, "release_failed"), 1, "{logged:?}");
        assert!(
            counting.held_bytes() < before && source.calls(SourceCall::Release) > 7,
            "{} releases",
            source.calls(SourceCall::Release)
        );
        for _ in 0..200 {
            after_seconds(&clock, &pool, 1);
        }
        drop(between);
        pool.trim(0);
        assert_eq!((valid_stats(&pool).memory.held_bytes, counting.held_bytes()), (0, 0));
    }
}

#[test]
fn a_step_that_fails_leaves_the_figures_equal_to_what_is_held() {
    for (lose, fail_acquire) in [(true, false), (false, false), (false, true)] {
        let counting = CountingSource::virtual_memory();
        let source = Arc::new(FaultSource::around(counting.clone()));
        let pool = over(source.clone()).max_bytes(16 << 20).build().unwrap();
        // Every other granule is free: the next get must remap them.
        let held: Vec<_> = (0..8).map(|_| pool.get(2 * MIB).unwrap()).collect();
        let kept: Vec<_> =
            held.into_iter().enumerate().filter_map(|(at, buffer)| (at % 2 == 1).then_some(buffer)).collect();
        match (lose, fail_acquire) {
            (true, _) => source.lose_remap(1),
            (_, true) => source.fail(SourceCall::Acquire, 8),
            _ => source.fail(SourceCall::Remap, 1),
        }
        let outcome = pool.get(8 * MIB);
        let stats = valid_stats(&pool);
        assert_eq!(stats.memory.held_bytes, counting.held_bytes());
        assert_eq!(stats.memory.pin.bytes - stats.memory.unpin.bytes, counting.held_bytes());
        drop((outcome, kept));
        pool.clear();
        assert_eq!((valid_stats(&pool).memory.held_bytes, counting.held_bytes()), (0, 0));
    }
}
