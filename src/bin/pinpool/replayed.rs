//! What replays cost: one as a list, several as rows with sums and means.
//!
//! Owns names and units, and the means over workloads. What happened in one is the library's word.

use std::fmt::Write;

use pinpool::trace::Replayed;

use crate::table::grouped;

/// A ratio of peaks says nothing about a pool that is smaller than a few granules.
const WORST_COUNTS_FROM_BYTES: u64 = 16 << 20;

/// One replay, a figure a line.
pub(crate) fn list(replayed: &Replayed) -> String {
    let bytes = |bytes: u64| format!("{} bytes", grouped(bytes));
    let rows = [
        ("rules", format!("{}, {}, {}", replayed.preset, replayed.rounding, replayed.source)),
        ("page-locks", grouped(replayed.page_locks)),
        ("in second half", format!("{} (after half of the gets)", grouped(replayed.late_page_locks))),
        ("locked", bytes(replayed.bytes_locked)),
        ("pinned at most", bytes(replayed.peak_pinned_bytes)),
        ("requested at most", bytes(replayed.peak_requested_bytes)),
        ("ratio of the two", format!("{:.3}", replayed.peak_ratio())),
        ("pinned on average", bytes(replayed.mean_pinned_bytes)),
        ("pinned after 60 s", bytes(replayed.pinned_after_60s_bytes)),
        ("gets", grouped(replayed.gets)),
        ("hits", grouped(replayed.front_hits)),
        ("evictions", grouped(replayed.evicted)),
        ("reclaimed", grouped(replayed.reclaimed)),
        ("raises", grouped(replayed.raises)),
        ("lowers", grouped(replayed.lowers)),
        ("waits", grouped(replayed.waits)),
        ("fallbacks", grouped(replayed.fallbacks)),
        ("limit", format!("{} buffers", grouped(replayed.pool_size_limit))),
        ("ceiling", replayed.max_bytes.map_or("none".to_owned(), bytes)),
    ];
    rows.iter().fold(String::new(), |mut text, (name, value)| {
        let _ = writeln!(text, "{name:<18} {value}"); // Writing to a string does not fail.
        text
    })
}

/// A line for each replay, then sums and the means of the ratios.
pub(crate) fn rows(replays: &[(String, Replayed)]) -> String {
    let heads = [
        "page-locks",
        "late",
        "MiB locked",
        "peak MiB",
        "asked MiB",
        "ratio",
        "mean MiB",
        "60 s MiB",
        "gets",
        "hits",
        "evicted",
        "reclaimed",
        "raises",
        "lowers",
        "waits",
        "fallbacks",
        "limit",
    ];
    let mut table = vec![["workload"].iter().chain(&heads).map(|&head| head.to_owned()).collect::<Vec<_>>()];
    table.extend(replays.iter().map(|(name, replayed)| {
        let r = replayed;
        let counts = [r.gets, r.front_hits, r.evicted, r.reclaimed, r.raises, r.lowers, r.waits, r.fallbacks];
        [name.clone(), r.page_locks.to_string(), r.late_page_locks.to_string()]
            .into_iter()
            .chain([r.bytes_locked, r.peak_pinned_bytes, r.peak_requested_bytes].map(mib))
            .chain([format!("{:.3}", r.peak_ratio())])
            .chain([r.mean_pinned_bytes, r.pinned_after_60s_bytes].map(mib))
            .chain(counts.map(|count| count.to_string()))
            .chain([r.pool_size_limit.to_string()])
            .collect()
    }));
    let widths: Vec<usize> =
        (0..table[0].len()).map(|at| table.iter().map(|row| row[at].len()).max().unwrap_or(0)).collect();
    let mut text = String::new();
    for row in &table {
        let cells = row.iter().zip(&widths).enumerate();
        let line: Vec<String> = cells
            .map(|(at, (cell, &width))| if at == 0 { format!("{cell:<width$}") } else { format!("{cell:>width$}") })
            .collect();
        let _ = writeln!(text, "{}", line.join("  "));
    }
    let all = || replays.iter().map(|(_, replayed)| replayed);
    let _ = writeln!(
        text,
        "{} workloads: {} page-locks, {} late; ratio of the peaks {:.3} (geometric mean), {:.3} at worst (over 16 MiB); \
         {:.1} MiB pinned on average (geometric mean); {} waits, {} fallbacks",
        replays.len(),
        all().map(|r| r.page_locks).sum::<u64>(),
        all().map(|r| r.late_page_locks).sum::<u64>(),
        geometric_mean(all().map(Replayed::peak_ratio)),
        worst_ratio(all()),
        geometric_mean(all().map(|r| in_mib(r.mean_pinned_bytes))),
        all().map(|r| r.waits).sum::<u64>(),
        all().map(|r| r.fallbacks).sum::<u64>(),
    );
    text
}

/// The largest ratio of the peaks among workloads of some size.
pub(crate) fn worst_ratio<'a>(replays: impl Iterator<Item = &'a Replayed>) -> f64 {
    replays.filter(|r| is_of_some_size(r)).map(Replayed::peak_ratio).fold(0.0, f64::max)
}

pub(crate) fn is_of_some_size(replayed: &Replayed) -> bool {
    replayed.peak_requested_bytes > WORST_COUNTS_FROM_BYTES
}

/// Of the numbers above 0; 0 if there are none.
#[allow(clippy::cast_precision_loss)] // A count of files.
pub(crate) fn geometric_mean(numbers: impl Iterator<Item = f64>) -> f64 {
    let logs: Vec<f64> = numbers.filter(|&number| number > 0.0).map(f64::ln).collect();
    if logs.is_empty() { 0.0 } else { (logs.iter().sum::<f64>() / logs.len() as f64).exp() }
}

#[allow(clippy::cast_precision_loss)] // Shown with one digit.
pub(crate) fn in_mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

pub(crate) fn mib(bytes: u64) -> String {
    format!("{:.1}", in_mib(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_is_geometric_and_leaves_out_what_has_no_logarithm() {
        assert!((geometric_mean([1.0, 4.0, 0.0].into_iter()) - 2.0).abs() < 1e-12);
        assert!(geometric_mean(std::iter::empty()) == 0.0);
    }
}
