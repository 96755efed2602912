//! `pinpool report`: a log, a recording or a process as one page of charts.
//!
//! | file | owns |
//! | --- | --- |
//! | `charts.rs` | the report as one object |
//! | `page.html`, `page.css`, `page.js` | the page that shows this object |
//! | `uplot.js`, `uplot.css`, `uplot.LICENSE` | uPlot 1.6.32, unchanged, which draws the charts |

mod charts;

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use pinpool_loader::StopFlag;
use pinpool_replay::{Recording, Replay};
use serde_json::Value;

use self::charts::{Charts, tables};
use crate::files::{in_file, named, why};
use crate::input::{self, Kind, read_workload};
use crate::interrupt::stop_at_interrupt;
use crate::series::Series;
use crate::served::names_process;
use crate::set::Set;
use pinpool_cli::exit::ExitError;
use pinpool_cli::table::grouped;
use pinpool_cli::terminal::Terminal;

const TITLE: &str = "pinpool report";
const LOG_NOTE: &str = "The counters in a log restart at each raise, and requests between the printed lines are not counted: the x axis is \
                        a lower bound, and unprinted raises are spread evenly. A log has no bytes and no times: PINPOOL_TRACE records them.";

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
    let notes = ["The process sends its statistics once a second: shorter changes are not visible.".to_owned()];
    let report = Charts::new(&series).report(TITLE, &format!("process {target}"), &notes, Vec::new());
    write(&args.output, &html(&report))?;
    ended.map_or(Ok(()), |why| Err(format!("{target}: {why}; the report covers the time before").into()))
}

fn draw(args: &ReportArgs, set: &Set, replay: &Replay) -> Result<(), Box<dyn Error>> {
    let name = args.input.display().to_string();
    crate::trace::refuse_to_overwrite(&args.input, &args.output)?;
    let (report, warning) = read(&args.input, &name, set, replay)?;
    write(&args.output, &html(&report))?;
    let partial = |warning| Err(format!("{name}: {warning}; the report covers the part before").into());
    warning.map_or(Ok(()), partial)
}

/// The report, and why it does not cover the whole file, if it does not.
fn read(path: &Path, name: &str, set: &Set, replay: &Replay) -> Result<(Value, Option<String>), Box<dyn Error>> {
    let input = input::open(path)?;
    let kind = input::kind(input.first());
    let is_set = !set.pairs.is_empty();
    let report = |series: &Series, source: &str, notes: &[String], tables| {
        Charts::new(series).report(TITLE, &format!("{name}: {source}"), notes, tables)
    };
    match kind {
        Kind::Log if is_set => {
            Err(named(path, &"a log cannot be replayed, so --set has no effect: leave it out").into())
        }
        Kind::Log => {
            let log = crate::why::lines::read(input).map_err(|error| named(path, &error))?;
            if log.curves.is_empty() {
                let why =
                    "it has diagnoses but nothing to draw: `pinpool why` prints them, and PINPOOL_TRACE records charts";
                return Err(named(path, &why).into());
            }
            let version = log.tensorflow.map_or_else(String::new, |version| format!(", of TensorFlow {version}"));
            let source = format!("{} messages in {} lines{version}", grouped(log.messages), grouped(log.lines));
            let mut notes = vec![LOG_NOTE.to_owned()];
            notes.extend(log.stopped.iter().map(|stopped| format!("The log is incomplete: {stopped}.")));
            if log.cut > 0 {
                notes.push(format!("{} truncated or damaged messages are not used.", grouped(log.cut)));
            }
            Ok((report(&Series::of_log(&log), &source, &notes, Vec::new()), log.stopped))
        }
        Kind::Recording if !is_set => {
            let recording = Recording::read(input.into_bytes()).map_err(|error| in_file(path, &error))?;
            if recording.records.is_empty() {
                let why = recording.warning.unwrap_or_else(|| "it has no records".to_owned());
                return Err(named(path, &format_args!("nothing to draw: {why}")).into());
            }
            let fact = |fact: &str| recording.pools.first().and_then(|pool| pool.fact(fact)).unwrap_or("?");
            let (records, backend, version) = (recording.records.len() as u64, fact("backend"), fact("version"));
            let source = format!("{} records, backend {backend}, recorded by pinpool {version}", grouped(records));
            let mut notes: Vec<_> =
                recording.warning.iter().map(|warning| format!("The recording is incomplete: {warning}.")).collect();
            if recording.lost > 0 {
                notes.push(format!("{} records were lost during the recording.", grouped(recording.lost)));
            }
            Ok((report(&Series::of_recording(&recording), &source, &notes, tables(&recording)), recording.warning))
        }
        Kind::Recording | Kind::Workload => {
            let workload = read_workload(path, input)?;
            let under = if is_set { set.text.replace(',', ", ") } else { "the default settings".to_owned() };
            let source = format!("{} requests, replayed under {under}", grouped(workload.gets()));
            let played = Series::of_replay("the pool", &workload, replay).map_err(|error| in_file(path, &error))?;
            let (series, preset) = played;
            let limit = if replay.max_bytes.is_some() { "" } else { ", without a limit" };
            let notes =
                [format!("Replayed with the preset {preset} on simulated memory{limit}: there are no pin times.")];
            Ok((report(&series, &source, &notes, Vec::new()), workload.warning().map(str::to_owned)))
        }
    }
}

/// The page: everything that it needs is inside.
fn html(report: &Value) -> String {
    format!(
        include_str!("page.html"),
        title = TITLE,
        version = env!("CARGO_PKG_VERSION"),
        css = [include_str!("uplot.css"), include_str!("page.css")].concat(),
        license = include_str!("uplot.LICENSE"),
        library = include_str!("uplot.js"),
        script = include_str!("page.js"),
        data = embedded(&report.to_string()),
    )
}

/// JSON as the content of a `script` element: ASCII without `<`, so that no name of a file, pool or tag can end the element.
fn embedded(json: &str) -> String {
    let mut safe = String::with_capacity(json.len());
    for c in json.chars() {
        match c {
            '<' | '\u{7f}'.. => {
                c.encode_utf16(&mut [0; 2]).iter().for_each(|unit| safe += &format!("\\u{unit:04x}"));
            }
            c => safe.push(c),
        }
    }
    safe
}

fn write(path: &Path, text: &str) -> Result<(), Box<dyn Error>> {
    fs::write(path, text).map_err(|error| named(path, &why(&error)).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_names_stay_text_and_the_page_fetches_nothing() {
        let name = "</script><!-- \u{202E} \u{1F600} \"\\ \u{1b} ü {{data}}";
        let page = html(&Value::from(name));
        let (_, rest) = page.split_once("id=\"report\">").unwrap();
        let (data, _) = rest.split_once("</script>").unwrap();
        assert!(data.is_ascii(), "{data}");
        assert_eq!(serde_json::from_str::<String>(data).unwrap(), name);
        assert!(page.contains("Copyright (c) 2022 Leon Sorokin") && page.contains("MERCHANTABILITY"));
        for fetch in ["src=", "@import", "url(", "fetch(", "XMLHttpRequest", "innerHTML"] {
            assert!(!page.contains(fetch), "{fetch}");
        }
    }
}
