//! Reads statistics of pools that other threads may use at the same time.

use std::thread;
use std::time::{Duration, Instant};

use pinpool::{Partition, Pool, Stats};

/// Longer than any thread of a test needs to finish what it does with a pool.
const LONGEST: Duration = Duration::from_secs(60);

/// A pool or a partition.
pub trait HasStats {
    /// Returns its statistics.
    fn stats(&self) -> Stats;
}

impl HasStats for Pool {
    fn stats(&self) -> Stats {
        Self::stats(self)
    }
}

impl HasStats for Partition {
    fn stats(&self) -> Stats {
        Self::stats(self)
    }
}

/// The statistics, once their sums are equal. A snapshot that is taken while another thread uses the pool, such as the
/// maintenance thread, may count the two sides of a sum a few operations apart.
pub fn valid_stats(pool: &impl HasStats) -> Stats {
    stats_when(pool, |_| true)
}

/// The statistics, once their sums are equal and they satisfy `is_expected`.
pub fn stats_when(pool: &impl HasStats, is_expected: impl Fn(&Stats) -> bool) -> Stats {
    let begun = Instant::now();
    loop {
        let stats = pool.stats();
        let sums = stats.unstable_validate();
        if sums.is_ok() && is_expected(&stats) {
            return stats;
        }
        assert!(begun.elapsed() < LONGEST, "{sums:?} in {stats:?}");
        thread::yield_now();
    }
}
