//! The statistics at the end of a load, as a JSON object or as a table.

use pinpool::Stats;
use pinpool_loader::{LoadError, LoadOutcome, LoadSummary};
use serde_json::{Value, json};

use pinpool_cli::table::{columns_left, grouped};

/// Returns the report of a finished load. The command adds the values that only it knows.
pub(super) fn json(summary: &LoadSummary, stats: &Stats) -> Value {
    let ended = match summary.outcome {
        LoadOutcome::Complete => "complete",
        LoadOutcome::Stopped => "interrupted",
        LoadOutcome::Failed(LoadError::StoppedAtFailure) => "strict",
        _ => "broken",
    };
    json!({
        "backend": stats.backend,
        "pinned_by": stats.pinned_by,
        "ended": ended,
        "epochs": summary.epochs,
        "files": summary.files,
        "samples": summary.samples,
        "failed_files": summary.failed_files,
        "bytes": summary.bytes,
        "seconds": summary.elapsed.as_secs_f64(),
        "gb_per_s": summary.gb_per_s(),
        "batches": summary.batches,
        "verified_batches": summary.verified_batches,
        "max_in_flight_batches": summary.max_in_flight_batches,
        "stats": stats,
    })
}

/// Returns a table with one number per line, followed by the statistics of the pool.
pub(super) fn table(report: &Value, stats: &Stats) -> String {
    let count = |name: &str| grouped(report[name].as_u64().unwrap_or(0));
    let number = |name: &str| report[name].as_f64().unwrap_or(0.0);
    let pinned = stats.pinned_by.map_or("not pinned".to_owned(), |by| format!("pinned by the {}", by.name()));
    let is_verified = report["verify"] == true;
    let verified = if is_verified { count("verified_batches") } else { "not requested (--verify)".to_owned() };
    let rows = [
        ("copied to", report["destination"].as_str().unwrap_or_default().to_owned()),
        ("epochs", count("epochs")),
        ("files", count("files")),
        ("failed files", count("failed_files")),
        ("samples", count("samples")),
        ("bytes", count("bytes")),
        ("seconds", format!("{:.3}, and {:.3} to list the files", number("seconds"), number("listing_seconds"))),
        ("GB/s", format!("{:.3}", number("gb_per_s"))),
        ("batches", count("batches")),
        ("verified batches", verified),
        ("most batches in flight", count("max_in_flight_batches")),
        ("pool", format!("{} ({pinned})", stats.backend)),
        ("pinned at the end", format!("{} bytes", count("pinned_bytes"))),
    ];
    let rows = columns_left(&rows.map(|(name, value)| vec![name.to_owned(), value]));
    format!("{rows}\n{stats}\n")
}
