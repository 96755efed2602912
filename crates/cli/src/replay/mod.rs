//! Traces replayed on simulated memory: `pinpool advise --try`, and its former name `pinpool replay`.

mod costs;

use std::error::Error;
use std::path::{Path, PathBuf};

use clap::Args;
use pinpool::unstable::config::text::ParseError;
use pinpool_os::words::Size;
use pinpool_replay::{Replay, SourceKind, Workload};
use serde::Serialize;

pub(crate) use self::costs::{Column, Costs, table};
use crate::files::{in_file, named};
use crate::input;
use crate::set::Set;
use pinpool_cli::exit::ExitError;
use pinpool_cli::terminal::Terminal;

/// Limits from a ratio are whole multiples of the arena's granule.
const GRANULE_BYTES: u64 = 2 << 20;

/// Replay traces under chosen settings (`advise --try` under its former name)
#[derive(Debug, Default, Args)]
pub(crate) struct ReplayArgs {
    /// Traces, plain or compressed with gzip; `-` is stdin
    #[arg(required = true, value_name = "WORKLOAD")]
    pub(crate) workloads: Vec<PathBuf>,

    /// Print one JSON object for each workload and each --set
    #[arg(long)]
    pub(crate) json: bool,

    /// Settings to replay under: MAX_BYTES=2GiB,POOL_SIZE_LIMIT=200; repeatable, one column each
    #[arg(long, value_name = "NAME=VALUE")]
    pub(crate) set: Vec<Set>,

    /// Memory below the pool: one virtual range, or separate regions [default: span]
    #[arg(long, value_enum)]
    pub(crate) source: Option<SourceKind>,

    /// Limit as a multiple of the peak of requested bytes, rounded up to 2 MiB
    #[arg(long, value_name = "X", value_parser = ratio)]
    pub(crate) max_ratio: Option<f64>,
}

/// The JSON object of a workload under one `--set`.
#[derive(Serialize)]
struct JsonLine<'a> {
    workload: &'a str,
    #[serde(flatten)]
    column: &'a Column,
    costs: &'a Costs,
    #[serde(skip_serializing_if = "Option::is_none")]
    pools_merged: Option<usize>,
}

/// Exits with 1 if a trace is truncated.
pub(crate) fn run(args: &ReplayArgs, terminal: &Terminal) -> Result<(), Box<dyn Error>> {
    let sets_limit = args.set.iter().flat_map(|set| &set.pairs).any(|(name, _)| name == "PINPOOL_MAX_BYTES");
    if args.max_ratio.is_some() && sets_limit {
        let why = "--max-ratio and MAX_BYTES both set the limit: omit one of the two";
        return Err(ExitError::Settings.because(why));
    }
    // Invalid settings are refused before any file is read.
    args.set.iter().try_for_each(|set| set.replay().map(drop))?;
    let mut is_whole = true;
    for path in &args.workloads {
        is_whole &= args.play(path, terminal)?;
    }
    if is_whole { Ok(()) } else { Err(ExitError::Failure.into()) }
}

impl ReplayArgs {
    /// Returns whether the trace is whole.
    fn play(&self, path: &Path, terminal: &Terminal) -> Result<bool, Box<dyn Error>> {
        let as_given = [Set { text: "as given".to_owned(), ..Set::default() }];
        let sets = if self.set.is_empty() { &as_given[..] } else { &self.set };
        let source = self.source.unwrap_or_default();
        let workload = input::read_workload(path, input::open(path)?, |_| Ok(()))?;
        // The file name up to the first dot.
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        let name = file.split('.').next().unwrap_or_default();
        let notes = workload.warning.clone().into_iter().chain(workload.pools_note());
        notes.for_each(|note| terminal.message(named(path, &note)));
        let costs = Costs::of(&workload);
        let limit = self.max_ratio.map(|ratio| limit_bytes(&workload, ratio));
        let play = |Set { text, pairs }: &Set| -> Result<Column, Box<dyn Error>> {
            let mut replay =
                Replay { source, ..Replay::as_recorded(&workload, pairs).map_err(|error| named(path, &error))? };
            replay.max_bytes = limit.or(replay.max_bytes);
            Ok(Column::play(text, &workload, &replay, &costs).map_err(|error| in_file(path, &error))?)
        };
        let columns = sets.iter().map(play).collect::<Result<Vec<_>, _>>()?;
        if let ([as_recorded], true, None, None) = (columns.as_slice(), self.set.is_empty(), limit, self.source) {
            workload.doubt(&as_recorded.outcome).iter().for_each(|doubt| terminal.message(named(path, doubt)));
        }
        if self.json {
            for column in &columns {
                let line = JsonLine { workload: name, column, costs: &costs, pools_merged: workload.pools_merged() };
                terminal.print(serde_json::to_string(&line)?)?;
            }
        } else {
            let mut text = format!("{name}: requested at most {} at once\n", Size(workload.peak_requested_bytes()));
            text += &table(&columns.iter().collect::<Vec<_>>());
            text += &costs.line();
            terminal.print(text.trim_end())?;
        }
        Ok(workload.warning.is_none())
    }
}

/// `ratio` times the workload's peak of requested bytes, in whole granules.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // Saturates; above 0.
fn limit_bytes(workload: &Workload, ratio: f64) -> u64 {
    let bytes = (workload.peak_requested_bytes() as f64 * ratio).ceil() as u64;
    bytes.checked_next_multiple_of(GRANULE_BYTES).unwrap_or(u64::MAX)
}

fn ratio(text: &str) -> Result<f64, ParseError> {
    let ratio = text.trim_end_matches('x').parse().ok().filter(|&ratio| f64::is_finite(ratio) && ratio > 0.0);
    ratio.ok_or_else(|| ParseError::new(text, "not a number above 0 (like 1.25)"))
}
