//! `pinpool report`: a log, a recording or a process as one page of charts.
//!
//! | file | owns |
//! | --- | --- |
//! | `from_log.rs`, `from_process.rs`, `from_recording.rs`, `from_replay.rs` | what each source shows over its time |
//! | `held.rs` | who holds what, and what is still out at the end |
//! | `timeline.rs` | the charts and tables of a recording, a replay or a process |
//! | `figure.rs` | the report as one object |
//! | `page.rs`, `page.html`, `page.css`, `page.js` | the page |
//! | `uplot.js`, `uplot.css`, `uplot.LICENSE` | uPlot 1.6.32, unchanged, which draws the charts |
//! | `escape.rs` | untrusted text |

mod escape;
mod figure;
mod from_log;
mod from_process;
mod from_recording;
mod from_replay;
mod held;
mod page;
mod timeline;

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use pinpool_loader::StopFlag;
use pinpool_replay::{Recording, Replay};

use self::figure::Report;
use crate::files::{in_file, named, why};
use crate::input::{self, Kind, read_workload};
use crate::interrupt::stop_at_interrupt;
use crate::served::names_process;
use crate::set::Set;
use pinpool_cli::exit::ExitError;
use pinpool_cli::table::grouped;
use pinpool_cli::terminal::Terminal;

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
    let (timeline, ended) = from_process::follow(target, Duration::from_secs(args.seconds), stop)?;
    let source = format!("process {target}: {} gets", grouped(timeline.samples.last().map_or(0, |last| last.gets)));
    write(&args.output, &Report { title: "The pools of this process", ..timeline.report(source) }.html()?)?;
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
            (from_log::report(name, &log), log.stopped)
        }
        Kind::Workload => {
            let workload = read_workload(path, input)?;
            let under = if is_set { format!(" under {}", set.text.replace(',', ", ")) } else { String::new() };
            let source = format!("{name}: {} gets, replayed{under}", grouped(workload.gets()));
            let timeline =
                from_replay::timeline(&workload, replay, &set.text).map_err(|error| in_file(path, &error))?;
            (timeline.report(source), workload.warning().map(str::to_owned))
        }
        Kind::Recording => {
            let recording = Recording::read(input.into_bytes()).map_err(|error| in_file(path, &error))?;
            if recording.records.is_empty() {
                let why = recording.warning.unwrap_or_else(|| "it holds no records".to_owned());
                return Err(named(path, &format_args!("nothing to draw: {why}")).into());
            }
            let source = from_recording::source(name, &recording);
            (from_recording::timeline(&recording).report(source), recording.warning)
        }
    })
}

fn write(path: &Path, text: &str) -> Result<(), Box<dyn Error>> {
    fs::write(path, text).map_err(|error| named(path, &why(&error)).into())
}
