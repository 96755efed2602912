//! `pinpool why`: what a pool of a process, a recording or a log costs, and what to change.
//!
//! `pinpool_observe::diagnosis` determines the causes. For TensorFlow's lines, `lines` determines them.
//!
//! | file | owns |
//! | --- | --- |
//! | `diff.rs` | two recordings |
//! | `lines` | TensorFlow's lines in a log |

mod diff;
pub(crate) mod lines;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use pinpool_loader::StopFlag;
use pinpool_observe::diagnosis::Cause;
use pinpool_replay::Recording;

use crate::diagnosis::{DiagnosisText, TOO_SHORT};
use crate::files::named;
use crate::input::{self, read_recording};
use crate::series::Series;
use crate::served::names_process;
use pinpool_cli::exit::ExitError;
use pinpool_cli::terminal::Terminal;

/// Maximum number of healthy pools that are named.
const NAMED: usize = 8;

/// Explain what a pool costs and what to change
///
/// TARGET is a running process (started with PINPOOL_SOCKET=1), a recording (PINPOOL_TRACE), or a log (`-` is stdin) of
/// TensorFlow or pinpool. For two recordings it prints what changed: seconds lost, causes, settings. Costs are seconds lost by
/// waiting, pinning and moving memory. With --lines it lists the messages `PoolAllocator: After ...` and
/// `Raising pool_size_limit_ ...` of logs, saved notebooks and compressed logs, each with the limit at that point. Exits with 1
/// if it found a problem, if the second recording loses a larger share of its time, or if a file is truncated or has no such
/// message.
#[derive(Debug, Args)]
#[command(after_help = "Example: pinpool why t.gz
  leak: tag jpeg holds 60 buffers (60.0MiB), 30 more than it held 30.0s ago, ...
    all threads lost 0s in 10.0s
    to do: return them")]
pub(crate) struct WhyArgs {
    /// Process ID, socket, recording or log; two recordings to compare
    #[arg(required = true, value_name = "TARGET")]
    targets: Vec<PathBuf>,

    /// List TensorFlow's lines in logs, with the limit at each
    #[arg(long)]
    lines: bool,

    /// List every pool
    #[arg(long, conflicts_with = "json")]
    all: bool,

    /// Print one JSON object; with --lines, one for each line
    #[arg(long)]
    json: bool,
}

/// Reads a recording or a log, or observes a process for `length` (once if zero).
///
/// # Errors
///
/// If the file cannot be read or contains no pool, or the process serves no pool.
pub(crate) fn read_series(target: &Path, length: Duration, stop: &StopFlag) -> Result<Series, Box<dyn Error>> {
    if names_process(target) {
        let target = target.to_str().ok_or("the path of a socket must be UTF-8")?;
        return Series::of_process(target, length, stop);
    }
    let input = input::open(target)?;
    match Recording::is_begun_by(input.first()) {
        true => Ok(Series::of_recording(&read_recording(target, input)?)),
        false => Ok(lines::series(input).map_err(|error| named(target, &error))?),
    }
}

pub(crate) fn run(args: &WhyArgs, terminal: &Terminal) -> Result<(), Box<dyn Error>> {
    let target = match args.targets.as_slice() {
        targets if args.lines => return lines::run(targets, args.json, terminal),
        [before, after] => return diff::run(before, after, args.json, terminal),
        [target] => target,
        _ => return Err(ExitError::Settings.because("name one target, two recordings to compare, or --lines")),
    };
    let Series { diagnoses, warning, .. } = read_series(target, Duration::ZERO, &StopFlag::new())?;
    if diagnoses.is_empty() {
        let missing = warning.map_or_else(String::new, |warning| format!("; {warning}"));
        return Err(named(target, &format_args!("{TOO_SHORT}{missing}")).into());
    }
    let has_alarm = diagnoses.iter().any(|one| one.is_alarm);
    let text = if args.json {
        serde_json::json!({ "target": target.to_string_lossy(), "pools": diagnoses, "warning": warning }).to_string()
    } else {
        in_words(&diagnoses, args.all)
    };
    terminal.print(text.trim_end())?;
    warning.map_or(Ok(()), |warning| Err(named(target, &warning)))?;
    if has_alarm { Err(ExitError::Failure.into()) } else { Ok(()) }
}

/// Returns the lines of each pool. Without `all`, the healthy pools among several share one line.
fn in_words(diagnoses: &[DiagnosisText], all: bool) -> String {
    // If there is only one pool, it is printed in full.
    let is_brief = |one: &&DiagnosisText| !all && diagnoses.len() > 1 && one.cause == Cause::Healthy.name();
    let (brief, full): (Vec<_>, Vec<_>) = diagnoses.iter().partition(is_brief);
    let mut text = String::new();
    for DiagnosisText { pool, lines, .. } in full {
        let name = if diagnoses.len() > 1 { format!("{pool}: ") } else { String::new() };
        text += &format!("{name}{}\n", lines.join("\n"));
    }
    if !brief.is_empty() {
        let names: Vec<_> = brief.iter().take(NAMED).map(|one| &*one.pool).collect();
        let more = if brief.len() > NAMED { ", ..." } else { "" };
        text += &format!("{} healthy: {}{more}\n", brief.len(), names.join(", "));
    }
    text
}
