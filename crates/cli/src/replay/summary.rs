//! Units, means over workloads, and limits relative to a workload.

use pinpool_replay::{ReplayReport, Workload};

/// Smaller pools hold a few granules at most, which makes their ratio of peaks meaningless.
const WORST_RATIO_ABOVE_BYTES: u64 = 16 << 20;
/// Ceilings from a ratio are whole multiples of the arena's granule.
const GRANULE_BYTES: u64 = 2 << 20;

/// The largest ratio of the peaks among workloads that count for it.
pub(super) fn worst_ratio<'a>(replays: impl Iterator<Item = &'a ReplayReport>) -> f64 {
    replays.filter(|r| counts_for_worst(r)).map(ReplayReport::peak_ratio).fold(0.0, f64::max)
}

pub(super) fn counts_for_worst(replayed: &ReplayReport) -> bool {
    replayed.peak_requested_bytes > WORST_RATIO_ABOVE_BYTES
}

/// `ratio` times the workload's peak of requested bytes, in whole granules.
#[allow(clippy::cast_possible_truncation)] // Saturates.
pub(super) fn ceiling_bytes(workload: &Workload, ratio: f64) -> u64 {
    let bytes = (workload.peak_requested_bytes() as f64 * ratio).ceil() as u64;
    bytes.checked_next_multiple_of(GRANULE_BYTES).unwrap_or(u64::MAX)
}

/// The mean of the numbers above 0; 0 if there are none.
pub(super) fn geometric_mean(numbers: impl Iterator<Item = f64>) -> f64 {
    let logs: Vec<f64> = numbers.filter(|&number| number > 0.0).map(f64::ln).collect();
    if logs.is_empty() { 0.0 } else { (logs.iter().sum::<f64>() / logs.len() as f64).exp() }
}

pub(super) fn in_mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

pub(crate) fn mib(bytes: u64) -> String {
    format!("{:.1}", in_mib(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn geometric_mean_skips_numbers_without_a_logarithm() {
        assert!((geometric_mean([1.0, 4.0, 0.0].into_iter()) - 2.0).abs() < 1e-12);
        assert!(geometric_mean(std::iter::empty()) == 0.0);
    }
}
