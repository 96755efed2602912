//! What the front counts, and the window since the last reset.
//!
//! Each shard counts under its own lock, so a hit adds to a line it has anyway; a reader visits the shards in turn and
//! adds up, which is exact when no operation is under way. A reset touches no counter: it notes the sums of the moment,
//! and a window is the difference. Evictions alone are one shared count, since one in a thousand has to be noticed.

use crate::sync::CachePadded;
use crate::sync::atomic::{AtomicU64, Ordering};
use std::ops::Sub;

/// The rates are due for a check at every eviction whose number in the window is a multiple of this.
const CHECK_EVERY: u64 = 1000;

/// TensorFlow's four counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Gets served by an idle buffer.
    pub get_from_pool: u64,
    /// Buffers put back, those included that were evicted later.
    pub put: u64,
    /// Gets that found no idle buffer and were served from below.
    pub allocated: u64,
    /// Buffers that the count limit pushed out.
    pub evicted: u64,
}

impl Sub for Figures {
    type Output = Self;

    /// What was counted between `earlier` and now. A reset that races with operations may have noted one more than a
    /// reader finds, hence the saturation.
    fn sub(self, earlier: Self) -> Self {
        Self {
            get_from_pool: self.get_from_pool.saturating_sub(earlier.get_from_pool),
            put: self.put.saturating_sub(earlier.put),
            allocated: self.allocated.saturating_sub(earlier.allocated),
            evicted: self.evicted.saturating_sub(earlier.evicted),
        }
    }
}

/// Evictions, ever and since the window began.
pub(super) struct Evictions {
    count: CachePadded<AtomicU64>,
    at_reset: AtomicU64,
}

impl Evictions {
    pub(super) fn new() -> Self {
        Self { count: CachePadded::new(AtomicU64::new(0)), at_reset: AtomicU64::new(0) }
    }

    /// Adds one; `true` if it makes a check due.
    pub(super) fn add(&self) -> bool {
        // Relaxed, here and below: numbers on their own.
        let count = self.count.fetch_add(1, Ordering::Relaxed) + 1;
        count.wrapping_sub(self.at_reset.load(Ordering::Relaxed)).is_multiple_of(CHECK_EVERY)
    }

    pub(super) fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    pub(super) fn reset_at(&self, count: u64) {
        self.at_reset.store(count, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_check_is_due_at_each_thousandth_of_the_window() {
        let evictions = Evictions::new();
        let due = |n: u64| (1..=n).filter(|_| evictions.add()).count();
        assert_eq!((due(999), due(1), due(999), due(1)), (0, 1, 0, 1));
        assert_eq!(due(400), 0);
        evictions.reset_at(evictions.count());
        assert_eq!((due(999), due(1)), (0, 1));
        assert_eq!(evictions.count(), 3400);
    }
}
