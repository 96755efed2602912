//! `pinpool report`: a log, a recording or a process as one page of charts.
//!
//! | file | owns |
//! | --- | --- |
//! | `charts.rs` | the charts and tables of a series |
//! | `figure.rs` | the report as one object |
//! | `page.rs`, `page.html`, `page.css`, `page.js` | the page |
//! | `uplot.js`, `uplot.css`, `uplot.LICENSE` | uPlot 1.6.32, unchanged, which draws the charts |
//! | `escape.rs` | untrusted text |

mod charts;
mod escape;
mod figure;
mod page;

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use pinpool_loader::StopFlag;
use pinpool_replay::{Recording, Replay};

use self::charts::{Charts, tables};
use self::figure::Report;
use crate::files::{in_file, named, why};
use crate::input::{self, Kind, read_workload};
use crate::interrupt::stop_at_interrupt;
use crate::series::Series;
use crate::served::names_process;
use crate::set::Set;
use pinpool_cli::exit::ExitError;
use pinpool_cli::table::grouped;
use pinpool_cli::terminal::Terminal;

const LOG_NOTE: &str = "Counters of the log restart at each raise. Requests of windows that the log does not show are not counted, so \
                        the x axis is a lower bound, and raises between two lines are spread evenly. The log has no bytes and no times: \
                        PINPOOL_TRACE records them.";
const TITLE: &str = "The pool in this trace";

/// Draw a page of charts of a log, a recording or a running process
///
/// Shows what is held and by whom, the time lost, limits and evictions. A trace of requests alone is replayed with the default settings on
/// simulated memory. A process (started with PINPOOL_SOCKET=1) is observed for --seconds. The page is one HTML file that needs no network, for
/// light and dark screens and phones. Exits with 1 if there is nothing to draw, the file is truncated, or the process ends while it is
/// observed; the intact part is drawn.
#[derive(Debug, Args)]
#[command(after_help = "Example: pinpool report t.gz -o page.html")]
pub(crate) struct ReportArgs {
    /// Log, recording, trace (plain or compressed; `-` is stdin), process id or socket
    #[arg(value_name = "LOG|TRACE|PID")]
    input: PathBuf,

    /// The page to write
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,

    /// Replay a trace under these variables and draw that: MAX_BYTES=2GiB,...; repeatable
    #[arg(long, value_name = "NAME=VALUE")]
    set: Vec<Set>,

    /// How long a process is observed
    #[arg(long, value_name = "N", default_value = "10", value_parser = clap::value_parser!(u64).range(1..))]
    seconds: u64,
}

pub(crate) fn run(args: &ReportArgs, terminal: &Terminal) -> Result<(), ExitError> {
    let set = Set::all(&args.set, terminal)?;
    let replay = set.replay(terminal)?;
    let target = args.input.to_string_lossy();
    if names_process(&target) {
        let stop = stop_at_interrupt(terminal);
        return terminal.report(draw_process(args, &target, &stop));
    }
    terminal.report(draw(args, &set, &replay))
}

fn draw_process(args: &ReportArgs, target: &str, stop: &StopFlag) -> Result<(), Box<dyn Error>> {
    if !args.set.is_empty() {
        return Err("a process has its own settings, so --set has no effect on it: leave it out".into());
    }
    let (series, ended) = Series::of_process(target, Duration::from_secs(args.seconds), stop)?;
    let notes =
        vec!["The process sends its statistics once a second: changes between two of them are not seen.".to_owned()];
    let report =
        Charts::new(&series).report("The pools of this process", format!("process {target}"), notes, Vec::new());
    write(&args.output, &report.html()?)?;
    ended.map_or(Ok(()), |why| Err(format!("{target}: {why}; drawn is what it sent before").into()))
}

fn draw(args: &ReportArgs, set: &Set, replay: &Replay) -> Result<(), Box<dyn Error>> {
    let name = args.input.display().to_string();
    crate::trace::refuse_to_overwrite(&args.input, &args.output)?;
    let (report, warning) = read(&args.input, &name, set, replay)?;
    write(&args.output, &report.html()?)?;
    match warning {
        Some(warning) => Err(format!("{name}: {warning}; drawn is what was read before").into()),
        None => Ok(()),
    }
}

/// What is drawn, and why it is not all of the file, if it is not.
fn read(path: &Path, name: &str, set: &Set, replay: &Replay) -> Result<(Report, Option<String>), Box<dyn Error>> {
    let input = input::open(path)?;
    let kind = input::kind(input.first());
    let is_set = !set.pairs.is_empty();
    let is_replayed = is_set && kind != Kind::Log;
    Ok(match if is_replayed { Kind::Workload } else { kind } {
        Kind::Log if is_set => {
            return Err(named(path, &"a log cannot be played, so --set has no effect on it: leave it out").into());
        }
        Kind::Log => {
            let log = crate::why::lines::read(input).map_err(|error| named(path, &error))?;
            if log.curves.is_empty() {
                let why = "it has diagnoses of pinpool and no line to draw: `pinpool why` prints them, and PINPOOL_TRACE records charts";
                return Err(named(path, &why).into());
            }
            let (messages, lines) = (grouped(log.messages), grouped(log.lines));
            let version = log.tensorflow.map_or_else(String::new, |version| format!(", of TensorFlow {version}"));
            let mut notes = vec![LOG_NOTE.to_owned()];
            notes.extend(log.stopped.iter().map(|stopped| format!("The log is not whole: {stopped}.")));
            if log.cut > 0 {
                notes.push(format!("{} messages are truncated or damaged and not used.", grouped(log.cut)));
            }
            let source = format!("{name}: {messages} messages in {lines} lines{version}");
            let report = Charts::new(&Series::of_log(&log)).report("The pool in this log", source, notes, Vec::new());
            (report, log.stopped)
        }
        Kind::Workload => {
            let workload = read_workload(path, input)?;
            let under = if is_set { format!(" under {}", set.text.replace(',', ", ")) } else { String::new() };
            let source = format!("{name}: {} gets, replayed{under}", grouped(workload.gets()));
            let played = Series::of_replay("the pool", &workload, replay).map_err(|error| in_file(path, &error))?;
            let (series, preset) = played;
            let notes = replay_notes(set, replay, &preset, series.has_time);
            (Charts::new(&series).report(TITLE, source, notes, Vec::new()), workload.warning().map(str::to_owned))
        }
        Kind::Recording => {
            let recording = Recording::read(input.into_bytes()).map_err(|error| in_file(path, &error))?;
            if recording.records.is_empty() {
                let why = recording.warning.unwrap_or_else(|| "it holds no records".to_owned());
                return Err(named(path, &format_args!("nothing to draw: {why}")).into());
            }
            let fact = |fact: &str| recording.pools.first().and_then(|pool| pool.fact(fact)).unwrap_or("?");
            let records = grouped(recording.records.len() as u64);
            let (backend, version) = (fact("backend"), fact("version"));
            let source = format!("{name}: {records} records, backend {backend}, recorded by pinpool {version}");
            let mut notes: Vec<_> =
                recording.warning.iter().map(|warning| format!("The trace is not whole: {warning}.")).collect();
            if recording.lost > 0 {
                notes.push(format!("{} records were lost while it was recorded.", grouped(recording.lost)));
            }
            let series = Series::of_recording(&recording);
            (Charts::new(&series).report(TITLE, source, notes, tables(&recording)), recording.warning)
        }
    })
}

/// What a replay does not show.
fn replay_notes(set: &Set, replay: &Replay, preset: &str, has_time: bool) -> Vec<String> {
    let settings = match &*set.text {
        "" => format!(
            "The trace has gets and puts alone: it was replayed with the default settings of the preset {preset}"
        ),
        text => format!("The trace was replayed under {} with the preset {preset}", text.replace(',', ", ")),
    };
    let limit = if replay.max_bytes.is_some() { "" } else { ", without a limit" };
    let mut notes = vec![format!("{settings} on simulated memory, in virtual time{limit}. So there are no pin times.")];
    if !has_time {
        notes.push("The trace has no time: the x axis counts its gets.".to_owned());
    }
    notes
}

fn write(path: &Path, text: &str) -> Result<(), Box<dyn Error>> {
    fs::write(path, text).map_err(|error| named(path, &why(&error)).into())
}
