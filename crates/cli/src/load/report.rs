//! The statistics at the end of a load, as a table or as a JSON object.

use std::time::Duration;

use pinpool::Stats;
use pinpool_loader::{LoadOutcome, LoadSummary};
use serde_json::{Value, json};

use super::failures::Failures;
use pinpool_cli::table::{columns_left, grouped};

/// A finished load.
#[derive(Debug)]
pub(crate) struct LoadReport<'a> {
    pub(crate) summary: &'a LoadSummary,
    /// The destination of the batches.
    pub(crate) sink: String,
    pub(crate) verify: bool,
    /// Time to list the files, not part of `seconds`.
    pub(crate) listing: Duration,
    /// Bytes held after the last batch.
    pub(crate) pinned_bytes: u64,
    /// After the idle time.
    pub(crate) stats: Stats,
    pub(crate) failures: &'a Failures,
    /// Pipes, sockets and devices under the paths.
    pub(crate) skipped_special_files: usize,
}

impl LoadReport<'_> {
    pub(crate) fn json(&self) -> Value {
        let Self { summary, stats, .. } = self;
        let ended = match summary.outcome {
            LoadOutcome::Complete => "complete",
            LoadOutcome::Stopped => "interrupted",
            LoadOutcome::Strict => "strict",
            _ => "broken",
        };
        json!({
            "backend": stats.backend,
            "pinned": stats.is_pinned,
            "sink": self.sink,
            "ended": ended,
            "epochs": summary.epochs,
            "files": summary.files,
            "samples": summary.samples,
            "failed_files": summary.failed_files,
            "bytes": summary.bytes,
            "seconds": summary.elapsed.as_secs_f64(),
            "gb_per_s": summary.gb_per_s(),
            "listing_seconds": self.listing.as_secs_f64(),
            "batches": summary.batches,
            "verify": self.verify,
            "verified_batches": summary.verified_batches,
            "max_in_flight_batches": summary.max_in_flight_batches,
            "pinned_bytes": self.pinned_bytes,
            "failures_by_cause": self.failures.by_cause,
            "skipped_special_files": self.skipped_special_files,
            "stats": stats,
        })
    }

    /// One number per line, and the statistics of the pool.
    pub(crate) fn table(&self) -> String {
        let Self { summary, stats, .. } = self;
        let n = grouped;
        let locked = if stats.is_pinned { "pinned" } else { "not pinned" };
        let verified = if self.verify { n(summary.verified_batches) } else { "not requested (--verify)".to_owned() };
        let [elapsed, listing] = [summary.elapsed, self.listing].map(|time| time.as_secs_f64());
        let rows = [
            ("copied to", self.sink.clone()),
            ("epochs", n(summary.epochs)),
            ("files", n(summary.files)),
            ("failed files", n(summary.failed_files)),
            ("samples", n(summary.samples)),
            ("bytes", n(summary.bytes)),
            ("seconds", format!("{elapsed:.3}, and {listing:.3} to list the files")),
            ("GB/s", format!("{:.3}", summary.gb_per_s())),
            ("batches", n(summary.batches)),
            ("verified batches", verified),
            ("most in flight", format!("{} batches", n(summary.max_in_flight_batches))),
            ("pool", format!("{} ({locked})", stats.backend)),
            ("pinned at the end", format!("{} bytes", n(self.pinned_bytes))),
        ];
        let rows = columns_left(&rows.map(|(name, value)| vec![name.to_owned(), value]));
        format!("{rows}\n{stats}\n")
    }
}
