//! The figures at the end of a load, as a table or as a JSON object.
//!
//! Owns names and units; every number comes from the library.

use std::time::Duration;

use pinpool::Stats;
use pinpool::loader::{Ended, Outcome};
use serde::Serialize;

use crate::table::{grouped, list};

/// Results of a load and its cost to the pool. The fields are the keys of the JSON object.
#[derive(Debug, Serialize)]
pub(crate) struct LoadReport {
    backend: &'static str,
    page_locked: bool,
    sink: String,
    ended: &'static str,
    epochs: u64,
    files: u64,
    samples: u64,
    failed_files: u64,
    bytes: u64,
    seconds: f64,
    gb_per_s: f64,
    listing_seconds: f64,
    batches: u64,
    verify: bool,
    verified_batches: u64,
    max_in_flight_batches: u64,
    gets: u64,
    hits: u64,
    hit_rate: f64,
    puts: u64,
    evicted: u64,
    reclaimed: u64,
    waits: u64,
    fallbacks: u64,
    checks: u64,
    raises: u64,
    lowers: u64,
    pool_size_limit: u64,
    pinned_bytes: u64,
    pinned_after_idle_bytes: u64,
    front_idle_bytes: u64,
    reserve_bytes: u64,
    peak_pinned_bytes: u64,
    underlying_allocs: u64,
    underlying_frees: u64,
    underlying_seconds: f64,
}

/// A finished load.
#[derive(Debug)]
pub(crate) struct LoadRun<'a> {
    pub(crate) outcome: &'a Outcome,
    /// The destination of the batches.
    pub(crate) sink: String,
    pub(crate) verify: bool,
    /// Time to list the files, not part of `seconds`.
    pub(crate) listing: Duration,
    /// Pinned when the last batch was complete.
    pub(crate) pinned_bytes: u64,
}

impl LoadReport {
    /// `stats` are taken after the idle time at the end.
    pub(crate) fn new(run: LoadRun<'_>, stats: &Stats) -> LoadReport {
        let LoadRun { outcome, sink, verify, listing, pinned_bytes } = run;
        LoadReport {
            backend: stats.backend,
            page_locked: stats.is_pinned,
            sink,
            ended: match outcome.ended {
                Ended::Complete => "complete",
                Ended::Stopped => "interrupted",
                Ended::Strict => "strict",
                _ => "broken",
            },
            epochs: outcome.epochs,
            files: outcome.files,
            samples: outcome.samples,
            failed_files: outcome.failed_files,
            bytes: outcome.bytes,
            seconds: outcome.elapsed.as_secs_f64(),
            gb_per_s: outcome.gb_per_s(),
            listing_seconds: listing.as_secs_f64(),
            batches: outcome.batches,
            verify,
            verified_batches: outcome.verified_batches,
            max_in_flight_batches: outcome.max_in_flight_batches,
            gets: stats.gets,
            hits: stats.hits,
            hit_rate: stats.hit_rate(),
            puts: stats.puts,
            evicted: stats.evicted,
            reclaimed: stats.reclaimed,
            waits: stats.waits,
            fallbacks: stats.fallbacks,
            checks: stats.checks,
            raises: stats.raises,
            lowers: stats.lowers,
            pool_size_limit: stats.pool_size_limit,
            pinned_bytes,
            pinned_after_idle_bytes: stats.pinned_bytes,
            front_idle_bytes: stats.idle_bytes,
            reserve_bytes: stats.reserve_bytes,
            peak_pinned_bytes: stats.peak_pinned_bytes,
            underlying_allocs: stats.underlying.allocs,
            underlying_frees: stats.underlying.frees,
            underlying_seconds: stats.underlying.time.as_secs_f64(),
        }
    }

    /// One line of JSON.
    pub(crate) fn json(&self) -> String {
        // Numbers and strings under fixed keys: serialization cannot fail.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// A figure a line.
    pub(crate) fn table(&self) -> String {
        let locked = if self.page_locked { "page-locked" } else { "not page-locked" };
        let verified =
            if self.verify { grouped(self.verified_batches) } else { "not asked for (--verify)".to_string() };
        let idle = format!(
            "{} bytes, {} in idle buffers, {} in reserve",
            grouped(self.pinned_after_idle_bytes),
            grouped(self.front_idle_bytes),
            grouped(self.reserve_bytes)
        );
        list(&[
            ("copied to", self.sink.clone()),
            ("epochs", grouped(self.epochs)),
            ("files", grouped(self.files)),
            ("failed files", grouped(self.failed_files)),
            ("samples", grouped(self.samples)),
            ("bytes", grouped(self.bytes)),
            ("seconds", format!("{:.3}, and {:.3} to list the files", self.seconds, self.listing_seconds)),
            ("GB/s", format!("{:.3}", self.gb_per_s)),
            ("batches", grouped(self.batches)),
            ("verified batches", verified),
            ("in flight at most", format!("{} batches", grouped(self.max_in_flight_batches))),
            ("pool", format!("{} ({locked})", self.backend)),
            ("gets", grouped(self.gets)),
            ("fallbacks", format!("{} gets had memory that is not pinned, for want of room", grouped(self.fallbacks))),
            ("hit rate", format!("{:.1} %", 100.0 * self.hit_rate)),
            ("evictions", format!("{} in {} puts", grouped(self.evicted), grouped(self.puts))),
            ("limit", format!("{} buffers", grouped(self.pool_size_limit))),
            (
                "raises",
                format!(
                    "{} in {} checks, {} lowered",
                    grouped(self.raises),
                    grouped(self.checks),
                    grouped(self.lowers)
                ),
            ),
            ("reclaimed", format!("{} buffers", grouped(self.reclaimed))),
            ("waits for room", format!("{} gets", grouped(self.waits))),
            ("pinned at most", format!("{} bytes", grouped(self.peak_pinned_bytes))),
            ("pinned at the end", format!("{} bytes", grouped(self.pinned_bytes))),
            ("pinned when idle", idle),
            ("allocations", format!("{}, {} freed", grouped(self.underlying_allocs), grouped(self.underlying_frees))),
            ("time in those", format!("{:.3} s", self.underlying_seconds)),
        ])
    }
}
