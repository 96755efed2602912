//! Percentiles of many short times, medians and rates.

use std::time::Duration;

/// Counts of times in nanoseconds, exact to two digits.
#[derive(Debug)]
pub(super) struct Histogram {
    counts: hdrhistogram::Histogram<u64>,
    max_ns: u64,
}

/// A longer time counts as this one: 18 minutes.
const LONGEST_NS: u64 = 1 << 40;

impl Default for Histogram {
    fn default() -> Self {
        let counts = hdrhistogram::Histogram::new_with_bounds(1, LONGEST_NS, 2).expect("the bounds are valid");
        Self { counts, max_ns: 0 }
    }
}

impl Histogram {
    pub(super) fn add(&mut self, time: Duration) {
        let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.counts.saturating_record(ns);
        self.max_ns = self.max_ns.max(ns);
    }

    /// The longest time among the shortest `per_mille` of all.
    #[allow(clippy::cast_precision_loss)] // At most 1000.
    pub(super) fn per_mille(&self, per_mille: u64) -> u64 {
        self.counts.value_at_quantile(per_mille as f64 / 1000.0).min(self.max_ns)
    }

    pub(super) fn max_ns(&self) -> u64 {
        self.max_ns
    }
}

/// 10^9 bytes a second.
pub(super) fn gb_per_s(bytes: u64, took: Duration) -> f64 {
    rounded(bytes as f64 / 1e9 / took.as_secs_f64().max(1e-9))
}

/// Three decimals.
pub(super) fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

/// The lower median; 0 of none.
pub(super) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len().saturating_sub(1) / 2).copied().unwrap_or(0.0)
}

/// Nanoseconds as microseconds, rounded.
pub(super) fn micros(ns: u64) -> f64 {
    rounded(ns as f64 / 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_of_a_known_sequence() {
        let mut all = Histogram::default();
        (1..=1000).for_each(|ns| all.add(Duration::from_nanos(ns)));
        assert!((500..=515).contains(&all.per_mille(500)), "{}", all.per_mille(500));
        assert!((990..=1000).contains(&all.per_mille(990)), "{}", all.per_mille(990));
        assert_eq!((all.per_mille(1000), all.max_ns()), (1000, 1000));
        assert_eq!(all.per_mille(1), 1);
    }

    #[test]
    fn the_median_is_one_of_the_values() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 3.0, 2.0]), 2.0);
        assert_eq!((median(vec![7.0]), median(Vec::new())), (7.0, 0.0));
    }
}
