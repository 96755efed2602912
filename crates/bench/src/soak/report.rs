//! The report of a soak, and its failures.

use std::time::Duration;

use pinpool::Stats;
use serde::Serialize;

use super::args::SoakArgs;
use super::process::ProcessUse;
use super::worker::Counts;

/// Operations of a run and samples of the process.
pub(super) struct Observed {
    pub(super) threads: usize,
    pub(super) counts: Counts,
    pub(super) took: Duration,
    pub(super) start: ProcessUse,
    pub(super) warm: ProcessUse,
    pub(super) end: ProcessUse,
    pub(super) most_resident_bytes: u64,
}

/// The report; its fields are the keys of the JSON object.
#[derive(Debug, Serialize)]
pub(super) struct SoakReport {
    backend: &'static str,
    preset: &'static str,
    seed: u64,
    threads: usize,
    ops: u64,
    seconds: f64,
    ops_per_s: f64,
    #[serde(flatten)]
    counts: Counts,
    hit_rate: f64,
    fallbacks: u64,
    peak_pinned_bytes: u64,
    start: ProcessUse,
    warm: ProcessUse,
    end: ProcessUse,
    most_resident_bytes: u64,
    /// soak-I1
    resident_limit_bytes: u64,
    pub(super) failures: Vec<String>,
}

impl SoakReport {
    pub(super) fn new(args: &SoakArgs, observed: Observed, stats: &Stats, mut failures: Vec<String>) -> SoakReport {
        let Observed { threads, counts, took, start, warm, end, most_resident_bytes } = observed;
        let held = start.resident_bytes.saturating_add(stats.memory.peak_held_bytes);
        let resident_limit_bytes = warm.resident_bytes.max(held).saturating_add(args.max_growth);
        if counts.bad_checks > 0 {
            failures.push(format!("{} of {} checks found wrong bytes", counts.bad_checks, counts.checks));
        }
        if most_resident_bytes > resident_limit_bytes {
            failures.push(format!(
                "resident memory grew to {most_resident_bytes} B, the limit is {resident_limit_bytes} B (--max-growth {})",
                args.max_growth
            ));
        }
        // After an error buffers may be missing, so the counts prove nothing.
        if failures.is_empty() {
            failures.extend(miscounts(&counts, stats));
        }
        let seconds = took.as_secs_f64();
        SoakReport {
            backend: stats.backend,
            preset: stats.preset,
            seed: args.seed,
            threads,
            ops: counts.ops(),
            seconds,
            ops_per_s: if seconds > 0.0 { counts.ops() as f64 / seconds } else { 0.0 },
            counts,
            hit_rate: stats.requests.hit_rate(),
            fallbacks: stats.requests.fallbacks,
            peak_pinned_bytes: stats.memory.peak_held_bytes,
            start,
            warm,
            end,
            most_resident_bytes,
            resident_limit_bytes,
            failures,
        }
    }
}

/// Counts of the run and of the pool that must not differ, but do.
fn miscounts(counts: &Counts, stats: &Stats) -> Vec<String> {
    let pairs = [
        ("requests of the run and of the pool", counts.gets, stats.requests.served),
        ("returns of the run and of the pool", counts.puts, stats.requests.returned),
        ("requests and returns", counts.gets, counts.puts),
        ("buffers given and taken", counts.given, counts.taken),
        ("buffers in use at the end and none", stats.memory.in_use, 0),
        ("copies in flight at the end and none", stats.copies.in_flight, 0),
        ("buffers lost and none", stats.memory.lost, 0),
        ("failed requests and none", stats.requests.failed, 0),
    ];
    let differ = pairs.into_iter().filter(|(_, left, right)| left != right);
    let mut miscounts: Vec<_> = differ.map(|(what, left, right)| format!("{what} differ: {left}, {right}")).collect();
    miscounts.extend(stats.validate().err().map(|error| error.to_string()));
    miscounts
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use pinpool::{Backend, Pool};

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        soak: SoakArgs,
    }

    /// The failures of a run over an unused pool.
    fn failures(counts: Counts, most_resident_bytes: u64) -> Vec<String> {
        let args = Cli::parse_from(["soak", "--max-growth", "1MiB"]).soak;
        let pool = Pool::builder().without_env().backend(Backend::Heap).build().unwrap();
        let at = |resident_bytes| ProcessUse { resident_bytes, ..ProcessUse::default() };
        let (start, warm, end) = (at(4 << 20), at(6 << 20), at(6 << 20));
        let observed = Observed { threads: 1, counts, took: Duration::ZERO, start, warm, end, most_resident_bytes };
        SoakReport::new(&args, observed, &pool.stats(), Vec::new()).failures
    }

    #[test]
    fn growth_wrong_bytes_and_counts_that_differ_are_failures() {
        assert_eq!(failures(Counts::default(), 7 << 20), Vec::<String>::new());
        let grown = failures(Counts::default(), (7 << 20) + 1);
        assert!(grown.len() == 1 && grown[0].contains("grew to 7340033 B, the limit is 7340032 B"), "{grown:?}");
        let wrong = failures(Counts { checks: 9, bad_checks: 2, ..Counts::default() }, 0);
        assert_eq!(wrong, ["2 of 9 checks found wrong bytes"]);
        let lost = failures(Counts { gets: 3, puts: 2, ..Counts::default() }, 0);
        assert_eq!(lost.len(), 3, "{lost:?}");
    }
}
