//! Percentiles of many short times, medians and rates.
//!
//! A histogram counts times in ranges of nanoseconds, exact to one part in 32:
//!
//! ```text
//!   ns     0 1 2 ... 31 | 32 33 ... 63 | 64-65 66-67 ... 126-127 | 128-131 ...
//! ```

use std::time::Duration;

/// Ranges in each doubling.
const STEPS: u64 = 32;
const RANGES: usize = 60 * 32;

#[derive(Debug)]
pub(super) struct Histogram {
    /// How many times fell into each range.
    counts: Box<[u64]>,
    total: u64,
    max_ns: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: vec![0; RANGES].into(), total: 0, max_ns: 0 }
    }
}

impl Histogram {
    pub(super) fn add(&mut self, time: Duration) {
        let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        if let Some(count) = self.counts.get_mut(range(ns)) {
            *count += 1;
        }
        self.total += 1;
        self.max_ns = self.max_ns.max(ns);
    }

    pub(super) fn merge(&mut self, other: &Self) {
        self.counts.iter_mut().zip(&other.counts).for_each(|(sum, count)| *sum += count);
        self.total += other.total;
        self.max_ns = self.max_ns.max(other.max_ns);
    }

    /// The longest time among the shortest `per_mille` of all.
    pub(super) fn per_mille(&self, per_mille: u64) -> u64 {
        let wanted = (u128::from(self.total) * u128::from(per_mille)).div_ceil(1000);
        let mut seen = 0;
        let found = self.counts.iter().position(|&count| {
            seen += u128::from(count);
            seen >= wanted
        });
        found.map_or(self.max_ns, |range| longest(range).min(self.max_ns))
    }

    pub(super) fn max_ns(&self) -> u64 {
        self.max_ns
    }
}

fn range(ns: u64) -> usize {
    let doubling = (ns / STEPS).checked_ilog2().unwrap_or(0);
    usize::try_from(STEPS * u64::from(doubling) + (ns >> doubling)).unwrap_or(usize::MAX)
}

fn longest(range: usize) -> u64 {
    let range = range as u64;
    let doubling = (range / STEPS).saturating_sub(1);
    ((range - STEPS * doubling + 1) << doubling) - 1
}

/// 10^9 bytes a second.
pub(super) fn gb_per_s(bytes: u64, took: Duration) -> f64 {
    rounded(bytes as f64 / 1e9 / took.as_secs_f64().max(1e-9))
}

/// Three decimals.
pub(super) fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

/// `value` over `unit`, rounded.
pub(super) fn quotient(value: f64, unit: f64) -> f64 {
    rounded(value / unit.max(1e-9))
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

/// Bytes in MiB, or in KiB below one.
pub(super) fn mib(bytes: u64) -> String {
    let (unit, name) = if bytes < 1 << 20 { (1 << 10, "KiB") } else { (1 << 20, "MiB") };
    let number = format!("{:.1}", bytes as f64 / f64::from(unit));
    format!("{} {name}", number.strip_suffix(".0").unwrap_or(&number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_no_wider_than_a_32nd_of_their_times() {
        for ns in (0..100_000).chain([1 << 30, (1 << 40) + 12_345, u64::MAX / 2]) {
            let end = longest(range(ns));
            assert!(end >= ns && (end - ns) * STEPS <= ns, "{ns} in a range up to {end}");
            assert_eq!(range(end), range(ns));
            assert_eq!(range(end + 1), range(ns) + 1);
        }
        assert!(range(u64::MAX) < RANGES);
    }

    #[test]
    fn percentiles_of_a_known_sequence() {
        let (mut odd, mut all) = <(Histogram, Histogram)>::default();
        for ns in 1..=1000 {
            if ns % 2 == 1 { &mut odd } else { &mut all }.add(Duration::from_nanos(ns));
        }
        all.merge(&odd);
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
