//! A histogram of durations with power-of-two buckets.
//!
//! The crate `hdrhistogram` is not used, because it allocates. A snapshot of this histogram copies 32 counts.

use std::time::Duration;

/// Upper bound of the first bucket in nanoseconds. Each next bound is twice as large; the last bucket has none.
const FIRST_BOUND_NANOS: u64 = 256;
/// Number of buckets, from below 256 ns to over 275 s.
const BUCKETS: usize = 32;

/// Durations of events, counted in buckets with power-of-two bounds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Histogram {
    count: u64,
    total: Duration,
    min: Duration,
    max: Duration,
    buckets: [u64; BUCKETS],
}

impl Histogram {
    /// Adds an event.
    #[doc(hidden)]
    pub fn record(&mut self, took: Duration) {
        self.min = if self.count == 0 { took } else { self.min.min(took) };
        self.max = self.max.max(took);
        self.count += 1;
        self.total = self.total.saturating_add(took);
        self.buckets[index(took)] += 1;
    }

    /// Adds the events of `other`.
    pub(crate) fn add(&mut self, other: &Self) {
        if other.count == 0 {
            return;
        }
        self.min = if self.count == 0 { other.min } else { self.min.min(other.min) };
        self.max = self.max.max(other.max);
        self.count += other.count;
        self.total = self.total.saturating_add(other.total);
        self.buckets.iter_mut().zip(other.buckets).for_each(|(sum, more)| *sum += more);
    }

    /// Returns the number of events.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Returns the sum of all durations.
    pub fn total(&self) -> Duration {
        self.total
    }

    /// Returns the shortest duration; 0 before the first event.
    pub fn min(&self) -> Duration {
        self.min
    }

    /// Returns the longest duration; 0 before the first event.
    pub fn max(&self) -> Duration {
        self.max
    }

    /// Returns the mean duration; 0 before the first event.
    pub fn mean(&self) -> Duration {
        let nanos = self.total.as_nanos() / u128::from(self.count.max(1));
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    /// Returns the duration that this share of the events did not exceed: `0.5` is the median. 0 before the first event.
    ///
    /// Rounded up to the bound of a bucket: the result is at most twice the exact value, if that is between 256 ns and 275 s.
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)] // A rank.
    pub fn quantile(&self, share: f64) -> Duration {
        let rank = (share.clamp(0.0, 1.0) * self.count as f64).ceil() as u64;
        let mut reached = 0;
        for (bound, count) in self.buckets() {
            reached += count;
            if reached >= rank.max(1) {
                return bound.unwrap_or(self.max).min(self.max);
            }
        }
        self.max
    }

    /// Returns the buckets in ascending order: the exclusive upper bound (`None` for the last) and the number of events. Bounds
    /// double from 256 ns to 275 s.
    pub fn buckets(&self) -> impl Iterator<Item = (Option<Duration>, u64)> + '_ {
        self.buckets
            .iter()
            .enumerate()
            .map(|(at, count)| ((at + 1 < BUCKETS).then(|| Duration::from_nanos(FIRST_BOUND_NANOS << at)), *count))
    }
}

fn index(took: Duration) -> usize {
    let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
    (nanos / FIRST_BOUND_NANOS).checked_ilog2().map_or(0, |log| log as usize + 1).min(BUCKETS - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn nanos(nanos: u64) -> Duration {
        Duration::from_nanos(nanos)
    }

    #[test]
    fn each_duration_is_below_the_bound_of_its_bucket() {
        let bounds: Vec<_> = Histogram::default().buckets().map(|(bound, _)| bound).collect();
        assert_eq!((bounds[0], bounds[30], bounds[31]), (Some(nanos(256)), Some(nanos(256 << 30)), None));
        for took in [0, 1, 255, 256, 257, 511, 512, 1 << 20, (1 << 20) - 1, (256 << 30) - 1, 256 << 30, u64::MAX] {
            let mut one = Histogram::default();
            one.record(nanos(took));
            let at = one.buckets().position(|(_, count)| count == 1).unwrap();
            assert!(bounds[at].is_none_or(|bound| nanos(took) < bound), "{took}");
            assert!(at == 0 || bounds[at - 1].unwrap() <= nanos(took), "{took}");
        }
    }

    #[test]
    fn quantiles_are_bounds_that_the_share_did_not_pass() {
        let mut times = Histogram::default();
        assert_eq!([times.quantile(0.5), times.max(), times.mean()], [Duration::ZERO; 3]);
        (0..990).for_each(|_| times.record(nanos(1000)));
        (0..9).for_each(|_| times.record(nanos(5000)));
        times.record(nanos(1_000_000));
        assert_eq!((times.count(), times.min(), times.max()), (1000, nanos(1000), nanos(1_000_000)));
        assert_eq!(times.total(), nanos(990_000 + 45_000 + 1_000_000));
        assert_eq!(times.mean(), nanos(2035));
        for (share, bound) in [(0.0, 1024), (0.5, 1024), (0.99, 1024), (0.995, 8192), (0.999, 8192)] {
            assert_eq!(times.quantile(share), nanos(bound), "{share}");
        }
        assert_eq!([0.9991, 1.0].map(|share| times.quantile(share)), [nanos(1_000_000); 2]);
    }

    #[test]
    fn sums_of_histograms_are_those_of_their_events() {
        let (mut all, mut parts) = (Histogram::default(), [Histogram::default(); 3]);
        for (at, took) in [7, 300, 9_000_000, 45, 1 << 40].into_iter().enumerate() {
            all.record(nanos(took));
            parts[at % 2].record(nanos(took));
        }
        let mut sum = Histogram::default();
        parts.iter().for_each(|part| sum.add(part));
        assert_eq!(sum, all);
    }
}
