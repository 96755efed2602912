//! Replays of several workloads as rows with sums and means.
//!
//! Owns names, units, the means over workloads, and ceilings relative to a workload. Every other number comes from the
//! library.

use pinpool_replay::{ReplayReport, Workload};

use pinpool_cli::table::columns;

/// Smaller pools hold a few granules at most, which makes their ratio of peaks meaningless.
const WORST_RATIO_ABOVE_BYTES: u64 = 16 << 20;
/// Ceilings from a ratio are whole multiples of the arena's granule.
const GRANULE_BYTES: u64 = 2 << 20;

/// A line for each replay, then sums and the means of the ratios.
pub(super) fn rows(replays: &[(String, ReplayReport)]) -> String {
    let heads = "workload|page-locks|late|MiB locked|peak MiB|asked MiB|ratio|mean MiB|60 s MiB|gets|hits|evicted|\
                 reclaimed|raises|lowers|waits|fallbacks|limit|slow|worst us|moved MiB|ahead MiB";
    let mut rows = vec![heads.split('|').map(str::to_owned).collect::<Vec<_>>()];
    rows.extend(replays.iter().map(|(name, r)| {
        let counts = [r.gets, r.front_hits, r.evicted, r.reclaimed, r.raises, r.lowers, r.waits, r.fallbacks];
        [name.clone(), r.page_locks.to_string(), r.late_page_locks.to_string()]
            .into_iter()
            .chain([r.bytes_locked, r.peak_pinned_bytes, r.peak_requested_bytes].map(mib))
            .chain([format!("{:.3}", r.peak_ratio())])
            .chain([r.mean_pinned_bytes, r.pinned_after_60s_bytes].map(mib))
            .chain(counts.map(|count| count.to_string()))
            .chain([r.pool_size_limit, r.slow_gets, r.worst_moves_us].map(|count| count.to_string()))
            .chain([r.moved_bytes, r.prepared_bytes].map(mib))
            .collect()
    }));
    let all = || replays.iter().map(|(_, replayed)| replayed);
    format!(
        "{}{} workloads: {} page-locks, {} late; ratio of the peaks {:.3} (geometric mean), {:.3} at worst (over 16 MiB); \
         {:.1} MiB pinned on average (geometric mean); {} waits, {} fallbacks; {} slow gets\n",
        columns(&rows),
        replays.len(),
        all().map(|r| r.page_locks).sum::<u64>(),
        all().map(|r| r.late_page_locks).sum::<u64>(),
        geometric_mean(all().map(ReplayReport::peak_ratio)),
        worst_ratio(all()),
        geometric_mean(all().map(|r| in_mib(r.mean_pinned_bytes))),
        all().map(|r| r.waits).sum::<u64>(),
        all().map(|r| r.fallbacks).sum::<u64>(),
        all().map(|r| r.slow_gets).sum::<u64>(),
    )
}

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
