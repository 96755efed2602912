//! `pinpool report`: a log or a trace as one page of pictures, or as SVG files.
//!
//! | file | owns |
//! | --- | --- |
//! | `from_log.rs` | the figures of a log |
//! | `from_process.rs` | a process that runs |
//! | `from_recording.rs` | what a pool did, recorded |
//! | `held.rs` | who holds what, and what is still out at the end |
//! | `from_replay.rs` | a trace of gets and puts alone, replayed |
//! | `timeline.rs` | what a trace shows over its time, and the figures of it |
//! | `bars.rs` | sizes by traffic, calls by time |
//! | `frontier.rs` | the picture of an advice |
//! | `figure.rs` | the report as one object: what figures show, whatever draws them |
//! | `svg.rs`, `lines.rs`, `figure.css` | figures as SVG; their panels of lines and areas |
//! | `page.rs`, `page.html`, `page.css` | the page |
//! | `escape.rs` | untrusted text |

mod bars;
mod escape;
mod figure;
mod from_log;
mod from_process;
mod from_recording;
mod from_replay;
mod frontier;
mod held;
mod lines;
mod page;
mod svg;
mod timeline;

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use pinpool_loader::StopFlag;
use pinpool_replay::{Recording, Replay};

use self::figure::Report;
pub(crate) use self::frontier::frontier_svg;
use self::svg::{Place, svg};
use crate::files::{in_file, named, why};
use crate::input::{self, Kind, read_workload};
use crate::interrupt::stop_at_interrupt;
use crate::served::names_process;
use crate::set::Set;
use pinpool_cli::exit::ExitError;
use pinpool_cli::table::grouped;
use pinpool_cli::terminal::Terminal;

/// Draws a log, a trace or a running process as a page: what is held and by whom, time lost, limits and evictions
///
/// A trace is what PINPOOL_TRACE recorded, which also has pin times, or what `pinpool replay` reads. One of gets and puts alone is replayed with the default settings on simulated memory.
/// A process, which was started with PINPOOL_SOCKET=1, is drawn as it was for --seconds, or with --watch until it ends, again and again.
/// The page is one HTML file that needs no network, for light and dark screens, phones and paper. Exits with 1 if there is nothing to draw, the file is cut off, or the process ends meanwhile: then what is there of it is drawn.
#[derive(Debug, Args)]
pub(crate) struct ReportArgs {
    /// A log of TensorFlow or pinpool, as `pinpool inspect` reads it, or a trace; plain or compressed with gzip; `-` is stdin; or the
    /// number of a process, or its socket
    #[arg(value_name = "LOG|TRACE|PID")]
    input: PathBuf,

    /// The page
    #[arg(short, long, value_name = "FILE", required_unless_present = "svg")]
    output: Option<PathBuf>,

    /// Write each figure as an SVG file into this directory, which is made if it is not there
    #[arg(long, value_name = "DIR")]
    svg: Option<PathBuf>,

    /// Play a trace under these variables, as `pinpool replay` does, and draw that: MAX_BYTES=2GiB,POOL_SIZE_LIMIT=200
    #[arg(long, value_name = "NAME=VALUE")]
    set: Vec<Set>,

    /// How long a process is looked at before it is drawn
    #[arg(long, value_name = "N", default_value = "10", value_parser = clap::value_parser!(u64).range(1..))]
    seconds: u64,

    /// Draw a process every two seconds until it ends: a browser shows each page as it comes
    #[arg(long, requires = "output", conflicts_with_all = ["seconds", "svg"])]
    watch: bool,
}

pub(crate) fn run(args: &ReportArgs, terminal: &Terminal) -> Result<(), ExitError> {
    let set = Set::all(&args.set, terminal)?;
    let replay = set.replay(terminal)?;
    let target = args.input.to_string_lossy();
    if names_process(&target) {
        let stop = stop_at_interrupt(terminal);
        return terminal.report(draw_process(args, &target, &stop));
    }
    if args.watch {
        return terminal.report(Err(named(&args.input, &"--watch is for a process that runs").into()));
    }
    terminal.report(draw(args, &set, &replay))
}

fn draw_process(args: &ReportArgs, target: &str, stop: &StopFlag) -> Result<(), Box<dyn Error>> {
    if !args.set.is_empty() {
        return Err("a process has its own settings, so --set has no effect on it: leave it out".into());
    }
    let length = (!args.watch).then(|| Duration::from_secs(args.seconds));
    from_process::follow(target, length, stop, |timeline, is_last| {
        let source = format!("process {target}: {} gets", grouped(timeline.samples.last().map_or(0, |last| last.gets)));
        let report = Report {
            refresh_seconds: (args.watch && !is_last).then_some(2),
            title: "The pools of this process",
            ..timeline.report(source)
        };
        if let Some(output) = &args.output {
            write(output, &report.html()?)?;
        }
        args.svg.as_ref().map_or(Ok(()), |dir| write_figures(dir, &report))
    })
}

fn draw(args: &ReportArgs, set: &Set, replay: &Replay) -> Result<(), Box<dyn Error>> {
    let name = args.input.display().to_string();
    if let Some(output) = &args.output {
        crate::trace::refuse_to_overwrite(&args.input, output)?;
    }
    let (report, warning) = read(&args.input, &name, set, replay)?;
    if let Some(output) = &args.output {
        write(output, &report.html()?)?;
    }
    if let Some(dir) = &args.svg {
        write_figures(dir, &report)?;
    }
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
            let log = crate::inspect::read(input).map_err(|error| named(path, &error))?;
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

fn write_figures(dir: &Path, report: &Report) -> Result<(), Box<dyn Error>> {
    fs::create_dir_all(dir).map_err(|error| named(dir, &why(&error)))?;
    for figure in &report.figures {
        write(&dir.join(format!("{}.svg", figure.id)), &svg(figure, Place::File))?;
    }
    Ok(())
}

fn write(path: &Path, text: &str) -> Result<(), Box<dyn Error>> {
    fs::write(path, text).map_err(|error| named(path, &why(&error)).into())
}
