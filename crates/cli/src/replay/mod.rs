//! `pinpool replay`: traces, played through the public pool on `sim` memory.
//!
//! The replay itself is the library's [`trace`](pinpool_replay).

mod comparison;
mod conformance;
mod side_by_side;
mod summary;

use std::error::Error;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use pinpool::unstable::config::text::ParseError;
use pinpool_replay::{CallCost, Replay, SourceKind, TraceReader, Workload};
use serde::Serialize;

use self::side_by_side::Column;
pub(crate) use self::side_by_side::Costs;
pub(crate) use self::summary::mib;
use crate::files::{in_file, named};
use crate::input::open_workload;
use crate::set::Set;
use pinpool_cli::exit::ExitError;
use pinpool_cli::terminal::{Terminal, to_stdout};

/// Play workloads on simulated memory, in virtual time
///
/// A workload is a trace of gets and puts; its `t` lines advance the clock. The figures depend on the file and the flags
/// only, not on the machine, its clock or PINPOOL_* variables. A recording of one pool is played under the settings that it was
/// made with, where --set has no others. Settings in a trace's header (limit, rounding, resizing,
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

    /// Play under these settings: MAX_BYTES=2GiB,POOL_SIZE_LIMIT=200; several --set are compared, a column each
    #[arg(long, value_name = "NAME=VALUE")]
    set: Vec<Set>,

    /// What a pin takes, for the driver seconds: time of a call, time of a GiB [default: fitted to the trace's pins, else
    /// 100us,430ms]
    #[arg(long, value_name = "TIME,TIME", value_parser = side_by_side::pin_cost)]
    pin_cost: Option<CallCost>,

    /// Memory below the pool: one virtual range, or discrete regions that no buffer may cross [default: span]
    #[arg(long, value_enum)]
    source: Option<SourceKind>,

    /// Ceiling as a multiple of the workload's peak of requested bytes, rounded up to 2 MiB, in place of MAX_BYTES
    #[arg(long, value_name = "X", value_parser = ratio)]
    max_ratio: Option<f64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// A table for each workload, with a column for each --set
    Table,
    /// Presets and sources side by side, in Markdown, and the adaptive preset under a ceiling of 1.25 times the requested
    /// peak; takes no settings
    Markdown,
    /// Diagnostics, the figures of each pool as JSON, and digests of the two outcome streams, for one trace with the
    /// settings of its header
    Conformance,
}

/// What `--json` prints of a workload under one `--set`.
#[derive(Serialize)]
struct JsonLine<'a> {
    workload: &'a str,
    #[serde(flatten)]
    column: &'a Column,
    costs: &'a Costs,
    #[serde(skip_serializing_if = "Option::is_none")]
    pools_merged: Option<usize>,
}

pub(crate) fn run(args: &ReplayArgs, terminal: &Terminal) -> Result<(), ExitError> {
    let (mut warnings, mut notes) = (Vec::new(), Vec::new());
    // What cannot be read is refused before any file is.
    args.set.iter().try_for_each(|set| set.replay(terminal).map(drop))?;
    let played = play(args, &mut warnings, &mut notes);
    notes.iter().for_each(|note| terminal.message(note));
    warnings.iter().for_each(|warning| terminal.message(warning));
    terminal.report(played)?;
    // The figures are those of a part.
    if warnings.is_empty() { Ok(()) } else { Err(ExitError::Failure) }
}

fn play(args: &ReplayArgs, warnings: &mut Vec<String>, notes: &mut Vec<String>) -> Result<(), Box<dyn Error>> {
    let has_settings = !args.set.is_empty() || args.source.is_some() || args.max_ratio.is_some();
    if args.format != Format::Table && has_settings {
        return Err("settings of the pool go with the table and --json alone".into());
    }
    let sets_ceiling = args.set.iter().flat_map(|set| &set.pairs).any(|(name, _)| name == "PINPOOL_MAX_BYTES");
    if args.max_ratio.is_some() && sets_ceiling {
        return Err("--max-ratio and MAX_BYTES both set the ceiling: leave one of the two out".into());
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
        Format::Table => table(args, warnings, notes)?,
    };
    Ok(to_stdout(&text)?)
}

/// A table for each workload. Empty with `--json`, which prints each workload as soon as it is played.
fn table(args: &ReplayArgs, warnings: &mut Vec<String>, notes: &mut Vec<String>) -> Result<String, Box<dyn Error>> {
    let as_given = [Set { text: "as given".to_owned(), ..Set::default() }];
    let sets = if args.set.is_empty() { &as_given } else { args.set.as_slice() };
    let source = args.source.unwrap_or_default();
    let mut text = String::new();
    for path in &args.workloads {
        let (name, workload) = open(path)?;
        warnings.extend(warning(path, &workload));
        notes.extend(workload.pools_note().map(|note| named(path, &note)));
        let costs = Costs::of(&workload, args.pin_cost);
        let ceiling = args.max_ratio.map(|ratio| summary::ceiling_bytes(&workload, ratio));
        let replays = sets
            .iter()
            .map(|Set { text, pairs }| Ok((text.clone(), Replay { source, ..Replay::as_recorded(&workload, pairs)? })));
        let replays = replays.collect::<Result<Vec<_>, String>>().map_err(|error| named(path, &error))?;
        let columns =
            side_by_side::play(&workload, &replays, ceiling, &costs).map_err(|error| in_file(path, &error))?;
        if let ([as_recorded], true, None, None) = (columns.as_slice(), args.set.is_empty(), ceiling, args.source) {
            notes.extend(workload.doubt(&as_recorded.outcome).map(|doubt| named(path, &doubt)));
        }
        if !args.json {
            text += &side_by_side::table(&name, &workload, &columns, &costs);
            continue;
        }
        for column in &columns {
            let line = JsonLine { workload: &name, column, costs: &costs, pools_merged: workload.pools_merged() };
            to_stdout(&format!("{}\n", serde_json::to_string(&line)?))?;
        }
    }
    Ok(text)
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

fn ratio(text: &str) -> Result<f64, ParseError> {
    let ratio = text.trim_end_matches('x').parse().ok().filter(|&ratio| f64::is_finite(ratio) && ratio > 0.0);
    ratio.ok_or_else(|| ParseError::new(text, "not a number above 0 (like 1.25)"))
}
