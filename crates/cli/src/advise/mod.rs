//! `pinpool advise`: finds the limit, idle timeout or reserve that costs a recorded program no more time, in the least memory.
//!
//! | file | owns |
//! | --- | --- |
//! | `search.rs` | replays under other settings, and the smallest limit that suffices |
//! | `tries.rs` | `--try`: the costs of named settings |
//! | `costs.rs` | the cost of a replay |
//! | `tests.rs` | programs recorded under several limits, with their advice replayed |

mod costs;
mod search;
#[cfg(test)]
mod tests;
mod tries;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use indicatif::ProgressBar;
use pinpool_observe::diagnosis::words::counted;
use pinpool_observe::diagnosis::{Cause, Lost, PoolDiagnosis, WindowDiagnosis};
use pinpool_replay::{Recording, Replay, SourceKind, Workload};
use serde_json::json;

use self::costs::table;
use self::search::{Advice, BetterSettings, Search};
use crate::diagnosis::recorded;
use crate::files::named;
use crate::input;
use crate::set::Set;
use pinpool_cli::exit::ExitError;
use pinpool_cli::table::grouped;
use pinpool_cli::terminal::{Terminal, Verbosity};

/// Recommend a limit, idle timeout or reserve for a recorded program
///
/// Replays the recording on simulated memory, in virtual time, and counts the seconds that settings cost: driver calls, remaps
/// and waiting. The replay of a recording starts from the recorded settings, and its threads continue as they would under the new
/// ones. The replay of a trace of requests starts from the defaults, without a limit. The command tries PINPOOL_IDLE_TIMEOUT=none
/// and a PINPOOL_RESERVE, unless --set fixes them, then bisects PINPOOL_MAX_BYTES. If nothing costs less, it recommends the
/// present settings, with the reason. Exits with 1 if the trace is truncated, cannot be replayed faithfully, or shows a leak or
/// another cause that no setting removes. With --try it shows the costs of the named settings instead, one column for each.
#[derive(Debug, Args)]
#[command(after_help = "Example: pinpool advise t.gz
  export PINPOOL_RESERVE=536870912
  export PINPOOL_MAX_BYTES=629145600")]
pub(crate) struct AdviseArgs {
    /// Recording or trace, plain or compressed; `-` is stdin
    #[arg(required = true, value_name = "TRACE")]
    traces: Vec<PathBuf>,

    /// Pool to advise [default: the worst]
    #[arg(long, value_name = "NAME")]
    pool: Option<String>,

    /// Show the costs of MAX_BYTES=1GiB,...; repeatable
    #[arg(long = "try", value_name = "SETTINGS", conflicts_with_all = ["set", "pool"])]
    tries: Vec<Set>,

    /// Show the costs of each --set, or of the given settings (the former command `replay`)
    #[arg(long, hide = true, conflicts_with_all = ["pool", "tries"])]
    replay: bool,

    /// Memory below a replayed pool: one virtual range, or separate regions [default: virtual]
    #[arg(long, hide = true, value_enum, requires = "replay")]
    source: Option<SourceKind>,

    /// Fix a setting (IDLE_TIMEOUT=5min); repeatable
    #[arg(long, value_name = "NAME=VALUE")]
    set: Vec<Set>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Causes outside the pool, which a replay does not show.
const BEYOND_SETTINGS: [Cause; 5] =
    [Cause::Leak, Cause::StuckCopy, Cause::OtherProcess, Cause::MemoryRefused, Cause::NotPinned];
/// Reasons to advise no limit, or nothing at all.
const GROWS: &str = "use grows until the end, and a longer run would outgrow any limit that this one needs";
const NO_GAIN: &str = "no timeout or reserve saves enough time to matter, no limit a tenth of the memory for free";
const IN_CALLS: &str = "no timeout or reserve saves enough time to matter, and a lower limit moves calls into requests";
const NO_SOONER: &str = "with more memory the program would end less than 10 % sooner";

pub(crate) fn run(args: &AdviseArgs, verbosity: Verbosity, terminal: &Terminal) -> Result<(), Box<dyn Error>> {
    if args.replay || !args.tries.is_empty() {
        return args.show_costs(terminal);
    }
    let set = Set::all(&args.set)?;
    // Invalid settings are refused before any file is read.
    set.check_for_replay()?;
    let bar = terminal.steps(verbosity);
    let advised = advise(args, &set, &bar, terminal);
    bar.finish_and_clear();
    let (text, whole) = advised?;
    terminal.print(text.trim_end())?;
    if whole { Ok(()) } else { Err(ExitError::Failure.into()) }
}

/// Returns the answer, and whether it covers a whole trace.
fn advise(
    args: &AdviseArgs,
    set: &Set,
    bar: &ProgressBar,
    terminal: &Terminal,
) -> Result<(String, bool), Box<dyn Error>> {
    if set.pairs.iter().any(|(name, _)| name == "PINPOOL_MAX_BYTES") {
        let why = "--set MAX_BYTES: advise finds the limit; --try shows the cost of one value";
        return Err(ExitError::Settings.because(why));
    }
    let [path] = args.traces.as_slice() else {
        return Err(ExitError::Settings.because("several traces need --try: name one"));
    };
    let (workload, diagnosis) = open(path, args.pool.as_deref(), terminal)?;
    workload.warning.iter().for_each(|warning| terminal.message(named(path, warning)));
    if let Some(WindowDiagnosis { cause: Cause::LimitTooSmall, remedy: Some(remedy), .. }) = &diagnosis
        && workload.failed_requests > 0
    {
        let failed = counted(workload.failed_requests, "request");
        let why = format!(
            "{failed} failed under the limit, and no replay shows what the program would have done with memory: \
             {remedy}; then record it again"
        );
        return Err(named(path, &why).into());
    }
    bar.enable_steady_tick(Duration::from_millis(100));
    let advice = search(&workload, &set.pairs, bar).map_err(|error| named(path, &error))?;
    // The user's settings are part of the advice.
    let settings = advice.advised.iter().flat_map(|better| set.pairs.iter().chain(&better.settings).cloned());
    let (exports, in_code) = exports(&workload, settings);
    let trace = path.display().to_string();
    let recorded = diagnosis.as_ref().map(|diagnosis| &diagnosis.lost);
    let text = if args.json {
        let mut object = serde_json::to_value(&advice)?;
        object["trace"] = trace.into();
        object["recorded_lost_seconds"] = json!(recorded.map(|lost| lost.total_ns() as f64 / 1e9));
        object["in_code"] = in_code.into();
        object["warnings"] = workload.warning.as_deref().into();
        object.to_string()
    } else {
        format!("{trace}: {} requests\n{}", grouped(workload.requests), in_words(&advice, recorded, &exports))
    };
    Ok((text, workload.warning.is_none()))
}

/// Opens the trace of one pool, which is the named pool or the worst, and returns it with its diagnosis.
fn open(path: &Path, pool: Option<&str>, terminal: &Terminal) -> Result<(Workload, Option<WindowDiagnosis>), String> {
    let mut diagnosis = None;
    let choose = |recording: &mut Recording| {
        let diagnoses = recorded(recording);
        let chosen = diagnoses.iter().find(|one| pool.is_none_or(|pool| one.name == pool));
        if chosen.is_none() && !diagnoses.is_empty() {
            let names: Vec<_> = diagnoses.iter().map(|one| &*one.name).collect();
            return Err(named(path, &format_args!("no such pool with 20 requests; it has {}", names.join(", "))));
        }
        let is_beyond = |one: &&PoolDiagnosis| one.diagnosis.is_alarm && BEYOND_SETTINGS.contains(&one.diagnosis.cause);
        if let Some(PoolDiagnosis { name, diagnosis, .. }) = chosen.filter(is_beyond) {
            recording.warning.iter().for_each(|warning| terminal.message(named(path, warning)));
            return Err(named(path, &format_args!("no setting of {name} helps: {diagnosis}")));
        }
        if let Some(PoolDiagnosis { pool: number, name, .. }) = chosen.filter(|_| recording.pools.len() > 1) {
            let why = if pool.is_none() { ", the worst (--pool names another)" } else { "" };
            let pools = recording.pools.len();
            terminal.message(named(path, &format_args!("it has {pools} pools; the advice is for {name}{why}")));
            recording.pools.retain(|pool| pool.number == *number);
            recording.records.retain(|record| record.pool == *number);
        }
        diagnosis = chosen.map(|one| one.diagnosis.clone());
        Ok(())
    };
    let workload = input::read_workload(path, choose)?;
    match workload.pools_merged() {
        Some(pools) => {
            Err(named(path, &format_args!("it has {pools} pools, and advice is for one: remove the others")))
        }
        None => Ok((workload, diagnosis)),
    }
}

/// Replays `workload` under other settings.
///
/// # Errors
///
/// If the recording cannot be replayed faithfully, or a replay fails.
fn search(workload: &Workload, fixed: &[(String, String)], progress: &ProgressBar) -> Result<Advice, Box<dyn Error>> {
    // Pools of a search are too small on purpose, so their log lines would mislead.
    let level = log::max_level();
    log::set_max_level(log::LevelFilter::Off);
    let advice = Replay::with_recorded_settings(workload, &[]).map_err(Into::into).and_then(|replay| {
        let doubt = if workload.is_closed { workload.doubt(&replay.play(workload)?) } else { None };
        doubt.map_or_else(|| Search::new(workload, fixed, progress).advise(), |doubt| Err(doubt.into()))
    });
    log::set_max_level(level);
    advice
}

/// Returns the rule that decided that nothing is advised.
fn why_kept(Advice { as_given, grows, in_calls, .. }: &Advice) -> String {
    match as_given.outcome.waits {
        _ if *grows => GROWS.to_owned(),
        0 if *in_calls => IN_CALLS.to_owned(),
        0 => NO_GAIN.to_owned(),
        _ => format!("requests wait, and {NO_SOONER}"),
    }
}

/// Returns lines for a shell, and the names of the settings that the program must change in its code because it sets them
/// there.
fn exports(workload: &Workload, settings: impl IntoIterator<Item = (String, String)>) -> (String, Vec<String>) {
    let (in_code, variables): (Vec<_>, Vec<_>) =
        settings.into_iter().partition(|(name, _)| workload.is_set_in_code(name));
    let mut text: String = variables.iter().map(|(name, value)| format!("export {name}={value}\n")).collect();
    if !in_code.is_empty() {
        text += "# in the program's code, which sets these, so that their variables have no effect:\n";
        text.extend(in_code.iter().map(|(name, value)| format!("# {name}={value}\n")));
    }
    (text, in_code.into_iter().map(|(name, _)| name).collect())
}

/// Formats the costs of the given, the advised and other settings, and the lines to export.
fn in_words(advice: &Advice, recorded: Option<&Lost>, exports: &str) -> String {
    let mut text = recorded.map_or_else(String::new, |lost| format!("recorded: {lost}\n"));
    let advised = advice.advised.as_ref();
    let tried = advice.tried.iter();
    let costs: Vec<_> = [&advice.as_given].into_iter().chain(advised.map(|better| &better.cost)).chain(tried).collect();
    text += &table(&costs);
    text += &match advised {
        None => format!("\nkeep what you have: {}\n", why_kept(advice)),
        Some(BetterSettings { smallest_max_bytes: None, .. }) => format!("\nno limit is advised: {GROWS}\n"),
        Some(BetterSettings { smallest_max_bytes: Some(smallest), cost, .. }) => {
            let max_bytes = cost.outcome.max_bytes.unwrap_or(*smallest);
            let percent = 100.0 * (max_bytes as f64 / *smallest as f64 - 1.0);
            let same = cost.lost_seconds >= advice.as_given.lost_seconds;
            let no_gain = if same { "; no setting that was tried saves time" } else { "" };
            format!("\nthe limit is {percent:.0} % above the smallest that costs no more and adds no waits{no_gain}\n")
        }
    };
    text + "\n" + exports
}
