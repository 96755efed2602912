//! The report of a soak, and its failures.

use std::time::Duration;

use pinpool::Stats;
use serde::Serialize;
use serde_json::{Value, json};

use super::worker::Counts;

/// Maximum growth of resident memory. The run fails if memory grows more.
const GROWTH_BYTES_MAX: u64 = 16 << 20;

/// Resident bytes of the process.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(super) struct Resident {
    pub(super) start_bytes: u64,
    /// Resident bytes after the warm-up.
    pub(super) warm_bytes: u64,
    pub(super) end_bytes: u64,
    /// Peak of the resident bytes after the warm-up.
    pub(super) most_bytes: u64,
    /// The limit of soak-I1.
    pub(super) limit_bytes: u64,
}

/// A run and its failures.
#[derive(Debug, Default, Serialize)]
pub(super) struct SoakRun {
    pub(super) seed: u64,
    pub(super) threads: usize,
    #[serde(flatten)]
    pub(super) counts: Counts,
    pub(super) resident: Resident,
    pub(super) failures: Vec<String>,
}

impl SoakRun {
    /// Adds the failures that memory and counts show, and returns the report as one JSON object.
    pub(super) fn check(&mut self, took: Duration, stats: &Stats) -> Value {
        let Self { counts, resident, failures, .. } = self;
        let held_bytes = resident.start_bytes.saturating_add(stats.memory.peak_held_bytes);
        resident.limit_bytes = resident.warm_bytes.max(held_bytes).saturating_add(GROWTH_BYTES_MAX);
        if counts.bad_checks > 0 {
            failures.push(format!("{} of {} checks found wrong bytes", counts.bad_checks, counts.checks));
        }
        if resident.most_bytes > resident.limit_bytes {
            let Resident { most_bytes, limit_bytes, .. } = resident;
            failures.push(format!("resident memory grew to {most_bytes} bytes, the limit is {limit_bytes}"));
        }
        // After an error, buffers may be missing, so the counts may differ.
        if failures.is_empty() {
            failures.extend(miscounts(counts, stats));
        }
        let (ops, seconds) = (counts.ops(), took.as_secs_f64());
        let mut report = json!(self);
        let of_pool = [
            ("backend", json!(stats.backend)),
            ("preset", json!(stats.preset)),
            ("ops", json!(ops)),
            ("seconds", json!(seconds)),
            ("ops_per_s", json!(ops as f64 / seconds.max(1e-9))),
            ("hit_rate", json!(stats.requests.hit_rate())),
            ("pageable", json!(stats.requests.pageable)),
            ("peak_pinned_bytes", json!(stats.memory.peak_held_bytes)),
        ];
        of_pool.into_iter().for_each(|(key, value)| report[key] = value);
        report
    }
}

/// Returns a line for each pair of counts, of the run and of the pool, that must be equal but differ.
fn miscounts(counts: &Counts, stats: &Stats) -> Vec<String> {
    let pairs = [
        ("requests of the run and of the pool", counts.gets, stats.requests.served),
        ("returns of the run and of the pool", counts.puts, stats.requests.returned),
        ("requests and returns", counts.gets, counts.puts),
        ("buffers handed over and received", counts.given, counts.taken),
        ("buffers in use at the end and 0", stats.memory.in_use, 0),
        ("copies in flight at the end and 0", stats.copies.in_flight, 0),
        ("quarantined buffers and 0", stats.memory.quarantined, 0),
        ("failed requests and 0", stats.requests.failed, 0),
    ];
    let differ = pairs.into_iter().filter(|(_, left, right)| left != right);
    let mut miscounts: Vec<_> = differ.map(|(what, left, right)| format!("{what} differ: {left}, {right}")).collect();
    miscounts.extend(stats.unstable_validate().err().map(|error| error.to_string()));
    miscounts
}

#[cfg(test)]
mod tests {
    use pinpool::{Backend, Pool};

    use super::*;

    /// Returns the failures of a run with an unused pool.
    fn failures(counts: Counts, most_bytes: u64) -> Vec<String> {
        let stats = Pool::builder().without_env().backend(Backend::Heap).build().unwrap().stats();
        let resident = Resident { start_bytes: 4 << 20, warm_bytes: 6 << 20, most_bytes, ..Resident::default() };
        let mut run = SoakRun { counts, resident, ..SoakRun::default() };
        run.check(Duration::ZERO, &stats);
        run.failures
    }

    #[test]
    fn growth_wrong_bytes_and_counts_that_differ_are_failures() {
        assert_eq!(failures(Counts::default(), 22 << 20), Vec::<String>::new());
        let grown = failures(Counts::default(), (22 << 20) + 1);
        assert!(grown.len() == 1 && grown[0].contains("grew to 23068673 bytes, the limit is 23068672"), "{grown:?}");
        let wrong = failures(Counts { checks: 9, bad_checks: 2, ..Counts::default() }, 0);
        assert_eq!(wrong, ["2 of 9 checks found wrong bytes"]);
        let lost = failures(Counts { gets: 3, puts: 2, ..Counts::default() }, 0);
        assert_eq!(lost.len(), 3, "{lost:?}");
    }
}
