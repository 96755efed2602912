//! Pools that share memory and a ceiling, each with its own ceiling and figures.

use super::{MIB, after_seconds, over, over_virtual_memory, valid_stats, with_manual_clock};
use crate::counting::CountingSource;

#[test]
fn a_partition_has_its_own_ceiling_and_figures() {
    let pool = over_virtual_memory().max_bytes(16 << 20).build().unwrap();
    let eval = pool.partition("eval", 4 << 20).unwrap();
    let held: Vec<_> = (0..2).map(|_| eval.get(2 * MIB).unwrap()).collect();
    let error = eval.get(2 * MIB).unwrap_err();
    assert!(error.is_limit() && error.to_string().contains("ceiling 4194304 B"), "{error}");
    assert!(eval.get(5 * MIB).unwrap_err().to_string().contains("partition"));
    let (of_eval, of_all) = (valid_stats(&eval), valid_stats(&pool));
    assert_eq!((of_eval.in_use_bytes, of_eval.pinned_bytes, of_eval.max_bytes), (4 << 20, 4 << 20, Some(4 << 20)));
    assert_eq!((of_all.in_use_bytes, of_all.partition_bytes, of_all.pinned_bytes), (0, 4 << 20, 4 << 20));
    drop(held);
    assert_eq!((valid_stats(&eval).idle_bytes, valid_stats(&pool).partition_bytes), (4 << 20, 4 << 20));
    assert_eq!(eval.get(4 * MIB).unwrap().len(), 4 * MIB, "its own idle buffers are reclaimed");
}

#[test]
fn idle_buffers_of_a_partition_make_room_for_others_under_the_common_ceiling() {
    let pool = over_virtual_memory().max_bytes(8 << 20).build().unwrap();
    let eval = pool.partition("eval", 8 << 20).unwrap();
    drop((0..4).map(|_| eval.get(2 * MIB).unwrap()).collect::<Vec<_>>());
    assert_eq!(pool.get(8 * MIB).unwrap().len(), 8 * MIB);
    assert_eq!((valid_stats(&eval).reclaimed, valid_stats(&pool).reclaimed), (4, 0));
}

#[test]
fn idle_buffers_of_a_silent_partition_expire_with_those_of_its_pool() {
    let (pool, clock) = with_manual_clock(over_virtual_memory());
    clock.advance_us(3_600_000_000);
    pool.poll();
    let eval = pool.partition("eval", 8 << 20).unwrap();
    drop(eval.get(2 * MIB).unwrap());
    assert_eq!(after_seconds(&clock, &pool, 9).partition_bytes, 2 << 20);
    assert_eq!(after_seconds(&clock, &pool, 1).partition_bytes, 0, "buffers of the silent partition expire too");
    assert_eq!(valid_stats(&eval).aged, 1);
    assert_eq!(
        after_seconds(&clock, &pool, 59).pinned_bytes,
        2 << 20,
        "idle from then on, and not since the partition was made"
    );
    assert_eq!(after_seconds(&clock, &pool, 1).pinned_bytes, 0);
}

#[test]
fn a_partition_outlives_its_pool_and_the_last_handle_releases_everything() {
    let source = CountingSource::virtual_memory();
    let pool = over(source.clone()).reserve_bytes(2 << 20).build().unwrap();
    let eval = pool.partition("eval", 8 << 20).unwrap();
    drop(pool.get(4 * MIB).unwrap());
    drop(pool);
    let buffer = eval.get(2 * MIB).unwrap();
    drop(eval);
    assert_eq!(source.ranges(), 1);
    drop(buffer);
    assert_eq!((source.ranges(), source.held_bytes()), (0, 0));
}
