//! Percentiles of many short times, medians and rates.

use std::time::Duration;

/// Returns the longest time among the shortest `per_mille` of the sorted times, 0 if there are none.
pub(super) fn per_mille(sorted_ns: &[u64], per_mille: usize) -> u64 {
    let at = (sorted_ns.len() * per_mille).div_ceil(1000).max(1);
    sorted_ns.get(at - 1).copied().unwrap_or(0)
}

/// Returns the rate in units of 10^9 bytes per second.
pub(super) fn gb_per_s(bytes: u64, took: Duration) -> f64 {
    rounded(bytes as f64 / 1e9 / took.as_secs_f64().max(1e-9))
}

/// Rounds to three decimals.
pub(super) fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

/// Returns the lower median, 0 if there are no values.
pub(super) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len().saturating_sub(1) / 2).copied().unwrap_or(0.0)
}

/// Converts nanoseconds to microseconds, rounded.
pub(super) fn micros(ns: u64) -> f64 {
    rounded(ns as f64 / 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_of_a_known_sequence() {
        let all: Vec<u64> = (1..=1000).collect();
        assert_eq!([1, 500, 990, 1000].map(|at| per_mille(&all, at)), [1, 500, 990, 1000]);
        assert_eq!((per_mille(&[7], 500), per_mille(&[], 500)), (7, 0));
    }

    #[test]
    fn the_median_is_one_of_the_values() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 3.0, 2.0]), 2.0);
        assert_eq!((median(vec![7.0]), median(Vec::new())), (7.0, 0.0));
    }
}
