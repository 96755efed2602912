//! The adaptive preset through the public interface. Time is a clock that the tests advance; no test sleeps.

use std::sync::Arc;

use pinpool::source::Source;
use pinpool::unstable::ManualClock;
use pinpool::{PinnedBuf, Pool, PoolBuilder, Stats};
use pinpool_replay::SimSource;

use crate::fixture::{self, MIB, with_manual_clock};
use crate::valid_stats::valid_stats;

mod failures;
mod partitions;
mod pressure;
mod reserve;
mod settings;
mod sizes;
mod teardown;
mod time;
mod varied;
mod waits;

const KIB: usize = 1 << 10;

fn over(source: Arc<dyn Source>) -> PoolBuilder {
    fixture::over(source, pinpool::Limit::Unlimited)
}

fn over_virtual_memory() -> PoolBuilder {
    over(Arc::new(SimSource::new(1 << 40)))
}

fn over_separate_regions() -> PoolBuilder {
    over(Arc::new(SimSource::separate_regions(1 << 40)))
}

fn over_both() -> [PoolBuilder; 2] {
    [over_virtual_memory(), over_separate_regions()]
}

/// Advances the clock once and maintains once.
fn after_seconds(clock: &ManualClock, pool: &Pool, seconds: u64) -> Stats {
    clock.advance_us(seconds * 1_000_000);
    pool.maintain();
    valid_stats(pool)
}

/// Ten idle buffers of one granule each.
fn ten_idle_granules(pool: &Pool) {
    drop((0..10).map(|_| pool.get(2 * MIB).unwrap()).collect::<Vec<_>>());
}

/// Requests buffers until a request fails.
fn fill(pool: &Pool, len: usize) -> Vec<PinnedBuf> {
    std::iter::from_fn(|| pool.get(len).ok()).collect()
}
