//! Reads statistics of pools that other threads may use at the same time.

use std::thread;
use std::time::{Duration, Instant};

use pinpool::{Pool, Stats};

/// Longer than any thread of a test needs to finish what it does with a pool.
const LONGEST: Duration = Duration::from_secs(60);

/// The statistics, once their sums are equal. A snapshot that is taken while another thread uses the pool, such as the
/// maintenance thread, may count the two sides of a sum a few operations apart.
pub(crate) fn valid_stats(pool: &Pool) -> Stats {
    stats_when(pool, |_| true)
}

/// The statistics, once their sums are equal and they satisfy `is_expected`.
pub(crate) fn stats_when(pool: &Pool, is_expected: impl Fn(&Stats) -> bool) -> Stats {
    let begun = Instant::now();
    loop {
        let stats = pool.stats();
        let sums = stats.validate();
        if sums.is_ok() && is_expected(&stats) {
            return stats;
        }
        assert!(begun.elapsed() < LONGEST, "{sums:?} in {stats:?}");
        thread::yield_now();
    }
}
