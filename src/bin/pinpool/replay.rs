//! `pinpool replay`: traces, played through the public pool on `sim`.
//!
//! Owns the flags and what is printed. The playing is the library's [`trace`](pinpool::trace).

use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueEnum};
use pinpool::config::quantity::{parse_bytes, parse_duration};
use pinpool::trace::{Reader, Replay, Replayed, SourceKind, Workload, expected_text};
use pinpool::{Preset, Rounding};
use serde::Serialize;

use crate::comparison;
use crate::replayed;
use crate::screen::to_stdout;

/// Ceilings made of a ratio are whole multiples of this, the arena's granule.
const GRANULE_BYTES: u64 = 2 << 20;

/// Play workloads on simulated memory, in virtual time
///
/// A workload is a trace of gets and puts; its `t` lines move the clock. The figures depend on the file and the flags
/// alone: neither the machine's memory nor its time nor PINPOOL_* variables have a say. Where a trace's header has
/// settings (limit, rounding, resizing, number of pools), --format conformance alone takes them.
#[derive(Debug, Args)]
pub(crate) struct ReplayArgs {
    /// The traces, plain or packed by gzip
    #[arg(required = true, value_name = "WORKLOAD")]
    workloads: Vec<PathBuf>,

    /// What to print
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,

    /// Print one JSON object for each workload, on a line of its own
    #[arg(long, conflicts_with = "format")]
    json: bool,

    /// Targets to print beside the figures: lines of `workload,page-locks,late,peak,page-locks,peak`, the last two with
    /// walls
    #[arg(long, value_name = "FILE")]
    targets: Option<PathBuf>,

    #[command(flatten)]
    settings: SettingArgs,
}

#[derive(Debug, Default, PartialEq, Args)]
#[command(next_help_heading = "Settings of the pool, with the table and --json")]
struct SettingArgs {
    /// Rules that the pool follows: adaptive or tensorflow
    #[arg(long, value_name = "NAME")]
    preset: Option<Preset>,

    /// How sizes become classes: eighths (adaptive), pow2 or exact (tensorflow)
    #[arg(long, value_name = "NAME")]
    rounding: Option<Rounding>,

    /// Most idle buffers kept at the start; 0 keeps none [default: 100]
    #[arg(long, value_name = "N")]
    pool_size_limit: Option<u64>,

    /// May that limit rise? [default: true, or false for a limit of 0]
    #[arg(long, value_name = "BOOL")]
    auto_resize: Option<bool>,

    /// Memory whose buffers may span what is locked at once, or memory with walls [default: span]
    #[arg(long, value_enum)]
    source: Option<Memory>,

    /// Ceiling on all bytes pinned [default: none]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    max_bytes: Option<u64>,

    /// Ceiling as a multiple of the peak that the workload asks for, rounded up to 2 MiB
    #[arg(long, value_name = "X", value_parser = ratio, conflicts_with = "max_bytes")]
    max_ratio: Option<f64>,

    /// Longest wait for room under the ceiling, in virtual time [default: 100ms]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    wait: Option<Duration>,

    /// How long memory stays idle before it goes back; `none` keeps it [default: 45s]
    #[arg(long, value_name = "TIME", value_parser = retain)]
    retain: Option<Retain>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// The figures; for several workloads a line each, with sums and means
    Table,
    /// The presets and sources beside each other, in Markdown, and the adaptive preset under a ceiling of 1.25 times the
    /// peak requested; takes no settings
    Markdown,
    /// The diagnostics, the figures of each pool as JSON, and the digests of the two outcome streams of one trace, with
    /// the settings of its header
    Conformance,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Memory {
    Span,
    Walls,
}

/// A wrapper, since clap takes an `Option` of an option for something else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Retain(Option<Duration>);

/// A workload under the name that its file gives it.
pub(crate) struct Named {
    pub(crate) name: String,
    pub(crate) workload: Workload,
}

#[derive(Serialize)]
struct Line<'a> {
    workload: &'a str,
    #[serde(flatten)]
    replayed: &'a Replayed,
}

pub(crate) fn run(args: &ReplayArgs) -> Result<(), Box<dyn Error>> {
    if args.format != Format::Table && args.settings != SettingArgs::default() {
        return Err("settings of the pool go with the table and --json alone".into());
    }
    if args.format != Format::Markdown && args.targets.is_some() {
        return Err("--targets goes with --format markdown".into());
    }
    match args.format {
        Format::Conformance => {
            let [trace] = args.workloads.as_slice() else { return Err("--format conformance takes one trace".into()) };
            let named = |error| format!("{}: {error}", trace.display());
            let text = Reader::open(trace).and_then(|mut reader| expected_text(&mut reader)).map_err(named)?;
            print(&text)
        }
        Format::Markdown => {
            let workloads = args.workloads.iter().map(|path| open(path)).collect::<Result<Vec<_>, _>>()?;
            let text = comparison::markdown(&workloads, args.targets.as_deref())?;
            print(&text)
        }
        Format::Table => figures(args),
    }
}

fn figures(args: &ReplayArgs) -> Result<(), Box<dyn Error>> {
    let mut rows = Vec::new();
    for path in &args.workloads {
        let Named { name, workload } = open(path)?;
        let replayed = args.settings.of(&workload).play(&workload).map_err(|error| in_file(path, &error))?;
        if args.json {
            let line = serde_json::to_string(&Line { workload: &name, replayed: &replayed })?;
            print(&format!("{line}\n"))?;
        }
        rows.push((name, replayed));
    }
    match rows.as_slice() {
        _ if args.json => Ok(()),
        [(_, one)] => print(&replayed::list(one)),
        rows => print(&replayed::rows(rows)),
    }
}

/// The name of a workload: that of its file, up to the first dot.
fn open(path: &Path) -> Result<Named, String> {
    let workload = Workload::open(path).map_err(|error| in_file(path, &error))?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let name = name.split('.').next().unwrap_or_default().to_owned();
    Ok(Named { name, workload })
}

fn in_file(path: &Path, error: &dyn Error) -> String {
    format!("{}: {error}", path.display())
}

fn print(text: &str) -> Result<(), Box<dyn Error>> {
    Ok(to_stdout(text)?)
}

impl SettingArgs {
    fn of(&self, workload: &Workload) -> Replay {
        let defaults = Replay::default();
        let source = self.source.map_or(defaults.source, |memory| match memory {
            Memory::Span => SourceKind::Span,
            Memory::Walls => SourceKind::Walls,
        });
        Replay {
            preset: self.preset,
            source,
            rounding: self.rounding,
            pool_size_limit: self.pool_size_limit,
            auto_resize: self.auto_resize,
            retain: self.retain.map(|Retain(retain)| retain),
            max_bytes: self.max_ratio.map(|ratio| ceiling_bytes(workload, ratio)).or(self.max_bytes),
            wait: self.wait.unwrap_or(defaults.wait),
        }
    }
}

/// `ratio` times the peak that `workload` asks for, in whole granules.
#[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)] // Saturates.
pub(crate) fn ceiling_bytes(workload: &Workload, ratio: f64) -> u64 {
    let bytes = (workload.peak_requested_bytes() as f64 * ratio).ceil() as u64;
    bytes.checked_next_multiple_of(GRANULE_BYTES).unwrap_or(u64::MAX)
}

fn ratio(text: &str) -> Result<f64, String> {
    let ratio = text.trim_end_matches('x').parse().map_err(|_| "not a number (like 1.25)".to_owned())?;
    if f64::is_finite(ratio) && ratio > 0.0 { Ok(ratio) } else { Err("not above 0".to_owned()) }
}

fn retain(text: &str) -> Result<Retain, String> {
    if text.eq_ignore_ascii_case("none") { Ok(Retain(None)) } else { parse_duration(text).map(|t| Retain(Some(t))) }
}
