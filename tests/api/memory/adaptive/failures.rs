//! A failing source: the statistics always match the memory held.

use pinpool_testing::SourceCall;

use super::{MIB, after_seconds, over, valid_stats, with_manual_clock};
use crate::captured_log::{count, lines, listen};
use crate::fixture::each_sim;

#[test]
fn failed_releases_hold_back_no_other_and_are_logged_once() {
    listen();
    for (sim, source) in each_sim() {
        let held_bytes = || sim.sums.lock().pinned_bytes;
        let (pool, clock) = with_manual_clock(over(source.clone()));
        // A used buffer after each idle one, so that no call releases two of them; and a region for each buffer.
        let held: Vec<_> = (0..20).map(|_| pool.get(25 * MIB).unwrap()).collect();
        let mut between = Vec::new();
        for (at, buffer) in held.into_iter().enumerate() {
            if at % 2 == 0 { drop(buffer) } else { between.push(buffer) }
        }
        (0..7).for_each(|index| source.fail(SourceCall::Release, index));
        let before = held_bytes();
        lines();
        for _ in 0..120 {
            after_seconds(&clock, &pool, 1);
            assert_eq!(valid_stats(&pool).memory.held_bytes, held_bytes());
        }
        let logged = lines();
        assert_eq!(count(&logged, "release_delayed"), 1, "{logged:?}");
        let releases = source.calls(SourceCall::Release);
        assert!(held_bytes() < before && releases > 7, "{releases} releases");
        (0..200).for_each(|_| drop(after_seconds(&clock, &pool, 1)));
        drop(between);
        pool.trim(0);
        assert_eq!((valid_stats(&pool).memory.held_bytes, held_bytes()), (0, 0));
    }
}
