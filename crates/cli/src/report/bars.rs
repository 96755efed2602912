//! Bars of a trace: sizes by traffic, calls by how long they take.

use std::collections::BTreeMap;

use super::figure::{Bar, Unit};
use pinpool_cli::table::grouped;

/// With more classes they are put together by powers of two.
const CLASSES_MAX: usize = 20;

/// Name, gets and bytes of each size, or of each power of two where there are many sizes.
pub(super) fn traffic_rows(traffic: &BTreeMap<u64, (u64, u64)>) -> Vec<(String, u64, u64)> {
    let name = |bytes: u64| Unit::Bytes.text(bytes as f64);
    if traffic.len() <= CLASSES_MAX {
        return traffic.iter().map(|(&size, &(gets, bytes))| (name(size), gets, bytes)).collect();
    }
    let mut powers: BTreeMap<u32, (u64, u64)> = BTreeMap::new();
    for (&size, &(gets, bytes)) in traffic {
        let sum = powers.entry(size.max(1).ilog2()).or_default();
        *sum = (sum.0 + gets, sum.1.saturating_add(bytes));
    }
    let row = |(power, (gets, bytes)): (u32, (u64, u64))| {
        (format!("{} to {}", name(1 << power), name((1_u64 << power).saturating_mul(2))), gets, bytes)
    };
    powers.into_iter().map(row).collect()
}

/// Calls by powers of two of microseconds.
pub(super) fn latency_bars(nanoseconds: &[u64]) -> Vec<Bar> {
    let mut counts: BTreeMap<u32, u64> = BTreeMap::new();
    for time in nanoseconds {
        *counts.entry((time / 1_000).checked_ilog2().map_or(0, |power| power + 1)).or_default() += 1;
    }
    let (Some(first), Some(last)) = (counts.keys().next().copied(), counts.keys().next_back().copied()) else {
        return Vec::new();
    };
    let text = |power: u32| Unit::Seconds.text(2_f64.powi(power.try_into().unwrap_or(0)) * 1e-6);
    let bar = |power: u32| {
        let count = counts.get(&power).copied().unwrap_or(0);
        let name =
            if power == 0 { format!("under {}", text(0)) } else { format!("{} to {}", text(power - 1), text(power)) };
        Bar { name, value: count as f64, text: grouped(count) }
    };
    (first..=last).map(bar).collect()
}

/// Takes sorted numbers.
pub(super) fn percentile(sorted: &[u64], share: f64) -> f64 {
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // Saturates.
    let at = (sorted.len() as f64 * share).ceil() as usize;
    sorted.get(at.saturating_sub(1).min(sorted.len().saturating_sub(1))).map_or(0.0, |&time| time as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_counted_by_powers_of_two_with_the_empty_ones_between() {
        let bars = latency_bars(&[500, 1_500, 1_999, 9_000]);
        let shown: Vec<_> = bars.iter().map(|bar| (bar.name.as_str(), bar.text.as_str())).collect();
        assert_eq!(
            shown,
            [
                ("under 1 us", "1"),
                ("1 us to 2 us", "2"),
                ("2 us to 4 us", "0"),
                ("4 us to 8 us", "0"),
                ("8 us to 16 us", "1")
            ]
        );
        assert!(latency_bars(&[]).is_empty());
        assert_eq!(
            [percentile(&[1, 2, 3, 4], 0.5), percentile(&[1, 2, 3, 4], 0.99), percentile(&[], 0.5)],
            [2.0, 4.0, 0.0]
        );
    }

    #[test]
    fn many_sizes_are_put_together() {
        let few: BTreeMap<_, _> = [(1024, (2, 2048)), (3000, (1, 3000))].into();
        assert_eq!(traffic_rows(&few), [("1 KiB".to_owned(), 2, 2048), ("2.93 KiB".to_owned(), 1, 3000)]);
        let many: BTreeMap<_, _> = (0..30).map(|more| (1024 + more, (1, 1024))).collect();
        assert_eq!(traffic_rows(&many), [("1 KiB to 2 KiB".to_owned(), 30, 30 * 1024)]);
    }
}
