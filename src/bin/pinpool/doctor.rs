//! `pinpool doctor`: what this machine has for pinned memory, and what to do about the rest.
//!
//! The library's [`doctor`](pinpool::doctor) looks; this prints, and turns the verdict into an exit status.

use clap::Args;
use pinpool::config::text::parse_bytes;
use pinpool::doctor::{Diagnosis, Examination, examine};
use serde::Serialize;

use crate::ExitError;
use crate::table::columns_left;
use crate::terminal::Terminal;

/// Looks at GPU, driver, back-ends, limits and settings, and says what to do
///
/// Each back-end pins a little memory and gives it back. Exits with 0 only if pinned memory for the GPU can be had, and the
/// reserve fits; 1 if not; 2 if no pool is built because of the settings.
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Ordinal of the GPU [default: PINPOOL_DEVICE]
    #[arg(long, value_name = "N")]
    device: Option<u32>,

    /// Plan a reserve of this size [default: PINPOOL_RESERVE]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    reserve: Option<u64>,

    /// Print the findings as one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &DoctorArgs, terminal: &Terminal) -> Result<(), ExitError> {
    let diagnosis = examine(&Examination { device: args.device, reserve_bytes: args.reserve });
    let verdict = if diagnosis.has_bad_settings() {
        Err(ExitError::Settings)
    } else if diagnosis.is_ready() {
        Ok(())
    } else {
        Err(ExitError::Failure)
    };
    let text = if args.json { Report::of(&diagnosis, &verdict).json() } else { table(&diagnosis) };
    let printed = terminal.print(text.trim_end());
    verdict.and(printed)
}

/// A line for each finding, and below it what to do.
fn table(diagnosis: &Diagnosis) -> String {
    let mut rows = Vec::new();
    for finding in &diagnosis.findings {
        let found = terminal_safe(&finding.found);
        rows.push(vec![finding.check.to_owned(), finding.level.name().to_owned(), found]);
        let remedy = finding
            .remedy
            .iter()
            .map(|remedy| vec![String::new(), String::new(), format!("-> {}", terminal_safe(remedy))]);
        rows.extend(remedy);
    }
    columns_left(&rows)
}

/// Values of variables and paths are untrusted: nothing of them moves the cursor.
fn terminal_safe(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { c.escape_default().to_string() } else { c.to_string() }).collect()
}

/// The JSON object; the README has its keys.
#[derive(Debug, Serialize)]
struct Report<'a> {
    status: u8,
    device: u32,
    backend: Option<&'a str>,
    pinned: bool,
    gpu: bool,
    max_bytes: Option<u64>,
    reserve: Option<Reserve>,
    findings: Vec<Row<'a>>,
}

#[derive(Debug, Serialize)]
struct Reserve {
    bytes: u64,
    fits: bool,
    seconds: Option<f64>,
}

#[derive(Debug, Serialize)]
struct Row<'a> {
    check: &'a str,
    level: &'a str,
    found: &'a str,
    remedy: Option<&'a str>,
}

impl<'a> Report<'a> {
    fn of(diagnosis: &'a Diagnosis, verdict: &Result<(), ExitError>) -> Self {
        let reserve = diagnosis.reserve.map(|plan| Reserve {
            bytes: plan.bytes,
            fits: plan.fits,
            seconds: plan.estimate.map(|time| time.as_secs_f64()),
        });
        let row = |finding: &'a pinpool::Finding| Row {
            check: finding.check,
            level: finding.level.name(),
            found: &finding.found,
            remedy: finding.remedy.as_deref(),
        };
        Self {
            status: verdict.map_or_else(|error| error as u8, |()| 0),
            device: diagnosis.device,
            backend: diagnosis.backend,
            pinned: diagnosis.is_pinned,
            gpu: diagnosis.serves_gpu,
            max_bytes: diagnosis.max_bytes,
            reserve,
            findings: diagnosis.findings.iter().map(row).collect(),
        }
    }

    fn json(&self) -> String {
        // Numbers and texts alone: there is nothing in it that cannot be written.
        serde_json::to_string(self).unwrap_or_default()
    }
}
