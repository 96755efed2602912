//! A pool has few mappings, however large it is.

use std::sync::Arc;

use pinpool::Pool;
use pinpool_replay::SimSource;

use crate::fixture::over;
use crate::valid_stats::valid_stats;

const GIB: usize = 1 << 30;
const TIB: u64 = 1 << 40;

fn pool(max_bytes: u64) -> Pool {
    over(Arc::new(SimSource::new(max_bytes)), max_bytes).build().unwrap()
}

#[test]
fn a_pool_of_a_terabyte_makes_at_most_8192_mappings() {
    let pool = pool(TIB);
    let held: Vec<_> = std::iter::from_fn(|| pool.get(3 * GIB).ok()).collect();
    let stats = pool.stats();
    let held_bytes = stats.memory.held_bytes;
    assert!(held_bytes > TIB - (4 * GIB) as u64, "{held_bytes} B in {} buffers", held.len());
    assert!((4096..=8192).contains(&stats.memory.mappings), "{} mappings", stats.memory.mappings);
    drop(held);
    pool.clear();
    let stats = pool.stats();
    assert_eq!((stats.memory.held_bytes, stats.memory.mappings), (0, 0));
}

#[test]
fn the_whole_limit_is_available_in_one_piece_or_many() {
    let pool = pool(64 << 30);
    for len in [64 * GIB, 7 * GIB, 64 * GIB, 20 * GIB, 64 * GIB] {
        let held: Vec<_> = std::iter::from_fn(|| pool.get(len).ok()).collect();
        assert!(held.len() >= 64 * GIB / len - 1, "{} buffers of {len} B", held.len());
        valid_stats(&pool);
    }
    assert!(pool.stats().memory.peak_held_bytes <= 64 << 30);
}
