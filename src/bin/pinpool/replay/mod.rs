//! `pinpool replay`: traces, played through the public pool on `sim` memory.
//!
//! The replay itself is the library's [`trace`](pinpool::trace).

mod comparison;
mod conformance;
mod summary;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueEnum};
use pinpool::config::text::{ParseError, parse_bytes, parse_duration};
use pinpool::trace::{Replay, ReplayReport, SourceKind, TraceReader, Workload};
use pinpool::{Preset, Rounding};
use serde::Serialize;

use crate::terminal::to_stdout;

/// Play workloads on simulated memory, in virtual time
///
/// A workload is a trace of gets and puts; its `t` lines advance the clock. The figures depend on the file and the flags
/// only, not on the machine, its clock or PINPOOL_* variables. Settings in a trace's header (limit, rounding, resizing,
/// number of pools) apply with --format conformance only.
#[derive(Debug, Args)]
pub(crate) struct ReplayArgs {
    /// Traces, plain or compressed with gzip
    #[arg(required = true, value_name = "WORKLOAD")]
    workloads: Vec<PathBuf>,

    /// Output format
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,

    /// Print one JSON object for each workload, one a line
    #[arg(long, conflicts_with = "format")]
    json: bool,

    /// Targets to print beside the figures: lines of `workload,page-locks,late,peak,slow gets,page-locks,peak`, the last two
    /// for discrete regions
    #[arg(long, value_name = "FILE")]
    targets: Option<PathBuf>,

    #[command(flatten)]
    settings: SettingArgs,
}

#[derive(Debug, Default, PartialEq, Args)]
#[command(next_help_heading = "Pool settings, for the table and --json")]
struct SettingArgs {
    /// Rules of the pool: adaptive or tensorflow
    #[arg(long, value_name = "NAME")]
    preset: Option<Preset>,

    /// Size classes: eighths (adaptive), pow2 or exact (tensorflow)
    #[arg(long, value_name = "NAME")]
    rounding: Option<Rounding>,

    /// Initial limit on idle buffers; 0 keeps none [default: 100]
    #[arg(long, value_name = "N")]
    pool_size_limit: Option<u64>,

    /// Whether that limit may rise [default: true, or false for a limit of 0]
    #[arg(long, value_name = "BOOL")]
    auto_resize: Option<bool>,

    /// Memory below the pool: one virtual range, or discrete regions that no buffer may cross [default: span]
    #[arg(long, value_enum)]
    source: Option<SourceKind>,

    /// Ceiling on all pinned bytes [default: none]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    max_bytes: Option<u64>,

    /// Ceiling as a multiple of the workload's peak of requested bytes, rounded up to 2 MiB
    #[arg(long, value_name = "X", value_parser = ratio, conflicts_with = "max_bytes")]
    max_ratio: Option<f64>,

    /// Longest wait for memory under the ceiling, in virtual time [default: 100ms]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    wait: Option<Duration>,

    /// Time after which idle memory is released; `none` keeps it [default: 60s]
    #[arg(long, value_name = "TIME", value_parser = idle_timeout)]
    idle_timeout: Option<IdleTimeout>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// The figures; for several workloads a line each, with sums and means
    Table,
    /// Presets and sources side by side, in Markdown, and the adaptive preset under a ceiling of 1.25 times the requested
    /// peak; takes no settings
    Markdown,
    /// Diagnostics, the figures of each pool as JSON, and digests of the two outcome streams, for one trace with the
    /// settings of its header
    Conformance,
}

/// `None` keeps idle memory. The alias keeps clap from reading `Option<Option<T>>` as an optional value.
pub(crate) type IdleTimeout = Option<Duration>;

#[derive(Serialize)]
struct JsonLine<'a> {
    workload: &'a str,
    #[serde(flatten)]
    replayed: &'a ReplayReport,
}

pub(crate) fn run(args: &ReplayArgs) -> Result<(), Box<dyn Error>> {
    if args.format != Format::Table && args.settings != SettingArgs::default() {
        return Err("settings of the pool go with the table and --json alone".into());
    }
    if args.format != Format::Markdown && args.targets.is_some() {
        return Err("--targets goes with --format markdown".into());
    }
    let text = match args.format {
        Format::Conformance => {
            let [trace] = args.workloads.as_slice() else { return Err("--format conformance takes one trace".into()) };
            let text = TraceReader::open(trace).and_then(|mut trace| conformance::report(&mut trace));
            text.map_err(|error| in_file(trace, &error))?
        }
        Format::Markdown => {
            let workloads = args.workloads.iter().map(|path| open(path)).collect::<Result<Vec<_>, _>>()?;
            comparison::markdown(&workloads, args.targets.as_deref())?
        }
        Format::Table => table(args)?,
    };
    Ok(to_stdout(&text)?)
}

/// The table; empty with `--json`, which prints each workload as soon as it is played.
fn table(args: &ReplayArgs) -> Result<String, Box<dyn Error>> {
    let mut rows = Vec::new();
    for path in &args.workloads {
        let (name, workload) = open(path)?;
        let replayed = args.settings.replay(&workload).play(&workload).map_err(|error| in_file(path, &error))?;
        if args.json {
            let line = serde_json::to_string(&JsonLine { workload: &name, replayed: &replayed })?;
            to_stdout(&format!("{line}\n"))?;
        } else {
            rows.push((name, replayed));
        }
    }
    Ok(match rows.as_slice() {
        [] => String::new(),
        [(_, one)] => summary::list(one),
        rows => summary::rows(rows),
    })
}

/// A workload and its name: that of the file, up to the first dot.
fn open(path: &Path) -> Result<(String, Workload), String> {
    let workload = Workload::open(path).map_err(|error| in_file(path, &error))?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    Ok((name.split('.').next().unwrap_or_default().to_owned(), workload))
}

fn in_file(path: &Path, error: &dyn Error) -> String {
    format!("{}: {error}", path.display())
}

impl SettingArgs {
    fn replay(&self, workload: &Workload) -> Replay {
        let defaults = Replay::default();
        Replay {
            preset: self.preset,
            source: self.source.unwrap_or_default(),
            rounding: self.rounding,
            pool_size_limit: self.pool_size_limit,
            auto_resize: self.auto_resize,
            idle_timeout: self.idle_timeout,
            max_bytes: self.max_ratio.map(|ratio| summary::ceiling_bytes(workload, ratio)).or(self.max_bytes),
            wait: self.wait.unwrap_or(defaults.wait),
        }
    }
}

fn ratio(text: &str) -> Result<f64, ParseError> {
    let ratio = text.trim_end_matches('x').parse().ok().filter(|&ratio| f64::is_finite(ratio) && ratio > 0.0);
    ratio.ok_or_else(|| ParseError::new(text, "not a number above 0 (like 1.25)"))
}

pub(crate) fn idle_timeout(text: &str) -> Result<IdleTimeout, ParseError> {
    if text.eq_ignore_ascii_case("none") { Ok(None) } else { parse_duration(text).map(Some) }
}
