//! `pinpool replay`: traces, played through the public pool on `sim` memory.
//!
//! The replay itself is the library's [`trace`](pinpool_replay).

mod comparison;
mod conformance;
mod side_by_side;
mod summary;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueEnum};
use pinpool::config::text::{ParseError, parse_bytes, parse_duration};
use pinpool::{Preset, Rounding};
use pinpool_replay::{CallCost, Replay, ReplayReport, SourceKind, TraceReader, Workload};
use serde::Serialize;

use self::side_by_side::{Column, Costs};
use crate::files::{in_file, named};
use crate::input::open_workload;
use pinpool_cli::exit::ExitError;
use pinpool_cli::terminal::{Terminal, to_stdout};

/// Play workloads on simulated memory, in virtual time
///
/// A workload is a trace of gets and puts; its `t` lines advance the clock. The figures depend on the file and the flags
/// only, not on the machine, its clock or PINPOOL_* variables. Settings in a trace's header (limit, rounding, resizing,
/// number of pools) apply with --format conformance only.
#[derive(Debug, Args)]
pub(crate) struct ReplayArgs {
    /// Traces, plain or compressed with gzip; `-` is stdin
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

    /// Play under these variables, a column for each --set: MAX_BYTES=2GiB,POOL_SIZE_LIMIT=200 (with or without PINPOOL_)
    #[arg(long, value_name = "A=1,B=2")]
    set: Vec<String>,

    /// What a pin takes, for the driver seconds of --set: time of a call, time of a GiB [default: fitted to the trace's pins,
    /// else 100us,430ms]
    #[arg(long, value_name = "TIME,TIME", value_parser = side_by_side::pin_cost, requires = "set")]
    pin_cost: Option<CallCost>,

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
    #[arg(long, value_name = "TIME", value_parser = time_or_none)]
    idle_timeout: Option<TimeOrNone>,
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

/// `None` is without end. The alias keeps clap from reading `Option<Option<T>>` as an optional value.
pub(crate) type TimeOrNone = Option<Duration>;

#[derive(Serialize)]
struct JsonLine<'a> {
    workload: &'a str,
    #[serde(flatten)]
    replayed: &'a ReplayReport,
    #[serde(skip_serializing_if = "Option::is_none")]
    pools_merged: Option<usize>,
}

pub(crate) fn run(args: &ReplayArgs, terminal: &Terminal) -> Result<(), ExitError> {
    let (mut warnings, mut notes) = (Vec::new(), Vec::new());
    let played = play(args, &mut warnings, &mut notes);
    notes.iter().for_each(|note| terminal.message(note));
    warnings.iter().for_each(|warning| terminal.message(warning));
    terminal.report(played)?;
    // The figures are those of a part.
    if warnings.is_empty() { Ok(()) } else { Err(ExitError::Failure) }
}

fn play(args: &ReplayArgs, warnings: &mut Vec<String>, notes: &mut Vec<String>) -> Result<(), Box<dyn Error>> {
    if !args.set.is_empty() && (args.format != Format::Table || args.settings != SettingArgs::default()) {
        return Err("--set takes the place of the other settings, and goes with the table and --json alone".into());
    }
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
        Format::Table if !args.set.is_empty() => columns(args, warnings, notes)?,
        Format::Table => table(args, warnings, notes)?,
    };
    Ok(to_stdout(&text)?)
}

/// The table; empty with `--json`, which prints each workload as soon as it is played.
fn table(args: &ReplayArgs, warnings: &mut Vec<String>, notes: &mut Vec<String>) -> Result<String, Box<dyn Error>> {
    let mut rows = Vec::new();
    for path in &args.workloads {
        let (name, workload) = open(path)?;
        warnings.extend(warning(path, &workload));
        notes.extend(workload.pools_note().map(|note| named(path, &note)));
        let replayed = args.settings.replay(&workload).play(&workload).map_err(|error| in_file(path, &error))?;
        if args.json {
            let line = serde_json::to_string(&JsonLine {
                workload: &name,
                replayed: &replayed,
                pools_merged: workload.pools_merged(),
            })?;
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

/// A table for each trace with a column for each `--set`; empty with `--json`.
fn columns(args: &ReplayArgs, warnings: &mut Vec<String>, notes: &mut Vec<String>) -> Result<String, Box<dyn Error>> {
    let replay = |set: &String| {
        let pairs: Vec<_> = set.split(',').filter(|pair| !pair.trim().is_empty()).collect();
        if pairs.is_empty() {
            return Err(format!("--set \"{set}\": no variable is named; give one, as in --set MAX_BYTES=2GiB"));
        }
        Ok((set.clone(), Replay::under(pairs).map_err(|error| format!("--set {set}: {error}"))?))
    };
    let sets = args.set.iter().map(replay).collect::<Result<Vec<_>, String>>()?;
    let mut text = String::new();
    for path in &args.workloads {
        let (name, workload) = open(path)?;
        warnings.extend(warning(path, &workload));
        notes.extend(workload.pools_note().map(|note| named(path, &note)));
        let costs = Costs::of(&workload, args.pin_cost);
        let columns = side_by_side::play(&workload, &sets, &costs).map_err(|error| in_file(path, &error))?;
        if args.json {
            for column in &columns {
                let pools_merged = workload.pools_merged();
                let line = serde_json::to_string(&JsonColumn { workload: &name, column, costs: &costs, pools_merged })?;
                to_stdout(&format!("{line}\n"))?;
            }
        } else {
            text += &side_by_side::table(&name, &workload, &columns, &costs);
        }
    }
    Ok(text)
}

#[derive(Serialize)]
struct JsonColumn<'a> {
    workload: &'a str,
    #[serde(flatten)]
    column: &'a Column,
    costs: &'a Costs,
    #[serde(skip_serializing_if = "Option::is_none")]
    pools_merged: Option<usize>,
}

/// Why the figures are those of a part of the trace, if they are.
fn warning(path: &Path, workload: &Workload) -> Option<String> {
    workload.warning().map(|warning| named(path, &warning))
}

/// A workload and its name: that of the file, up to the first dot.
fn open(path: &Path) -> Result<(String, Workload), String> {
    let workload = open_workload(path)?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    Ok((name.split('.').next().unwrap_or_default().to_owned(), workload))
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
            others: defaults.others,
        }
    }
}

fn ratio(text: &str) -> Result<f64, ParseError> {
    let ratio = text.trim_end_matches('x').parse().ok().filter(|&ratio| f64::is_finite(ratio) && ratio > 0.0);
    ratio.ok_or_else(|| ParseError::new(text, "not a number above 0 (like 1.25)"))
}

pub(crate) fn time_or_none(text: &str) -> Result<TimeOrNone, ParseError> {
    if text.eq_ignore_ascii_case("none") { Ok(None) } else { parse_duration(text).map(Some) }
}
