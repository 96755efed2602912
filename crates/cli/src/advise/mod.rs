//! `pinpool advise`: settings that cost a program no more time than those it has, in the least memory.
//!
//! | file | owns |
//! | --- | --- |
//! | `search.rs` | the settings that are tried, what they cost, and the smallest ceiling under the best |
//! | `run.rs` | the promise, measured |
//! | `tests.rs` | programs recorded under ceilings, and their advice played |

mod run;
mod search;
#[cfg(test)]
mod tests;

use std::error::Error;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use indicatif::ProgressBar;
use pinpool::unstable::config::text::ParseError;
use pinpool_observe::judge::words::counted;
use pinpool_observe::judge::{Cause, Lost, PoolJudgement, judge_recording};
use pinpool_replay::{Recording, Replay, Workload};
use serde::Serialize;

use self::search::{Advice, Better, Cost, Point, Search};
use crate::files::{in_file, named, why};
use crate::input::{self, Kind};
use crate::replay::{Costs, Plays, mib};
use crate::set::Set;
use pinpool_cli::exit::ExitError;
use pinpool_cli::table::{columns, grouped};
use pinpool_cli::terminal::{Terminal, Verbosity};

/// Recommend settings for a recorded program
///
/// Replays the recording on simulated memory, in virtual time, under many settings, and counts the seconds that each costs: driver calls,
/// moves and waiting. A recording is replayed as its threads would continue, starting from its own settings; a trace of requests alone
/// from the defaults, without a limit. PINPOOL_PRESET, PINPOOL_ROUNDING, PINPOOL_IDLE_TIMEOUT, PINPOOL_RESERVE, PINPOOL_POOL_SIZE_LIMIT
/// and PINPOOL_MAX_BYTES are searched, unless --set fixes them. If nothing costs less, it says to keep what you have. Exits with 1 if the
/// trace is truncated, cannot be replayed faithfully, or shows a leak. With --try it searches nothing and shows the costs of the settings
/// named, a column each.
#[derive(Debug, Args)]
#[command(after_help = "Example: pinpool advise t.gz
  export PINPOOL_RESERVE=536870912
  export PINPOOL_MAX_BYTES=629145600")]
pub(crate) struct AdviseArgs {
    /// Recording or trace, plain or compressed; `-` is stdin
    #[arg(required_unless_present = "run", value_name = "TRACE")]
    traces: Vec<PathBuf>,

    /// Of several pools, the one to advise [default: the one that lost most]
    #[arg(long, value_name = "NAME")]
    pool: Option<String>,

    /// Show the costs of these settings (MAX_BYTES=1GiB,...) instead; repeatable
    #[arg(long = "try", value_name = "SETTINGS", conflicts_with_all = ["run", "set", "headroom", "pool"])]
    tries: Vec<Set>,

    /// Margin of the limit over the smallest that costs no more: 10% or 0.1
    #[arg(long, value_name = "SHARE", default_value = "10%", value_parser = share)]
    headroom: f64,

    /// Fix a setting (IDLE_TIMEOUT=5min) and search the others; repeatable
    #[arg(long, value_name = "NAME=VALUE")]
    set: Vec<Set>,

    /// Run the program with and without the advice in turns, and measure the gain
    #[arg(long, requires = "command", conflicts_with_all = ["json"])]
    run: bool,

    /// With --run, how long the program runs under each
    #[arg(long, value_name = "N", default_value = "60", value_parser = clap::value_parser!(u64).range(2..))]
    seconds: u64,

    /// The program of --run with its arguments
    #[arg(last = true, requires = "run", value_name = "CMD")]
    command: Vec<OsString>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Plays `workload` under many settings.
fn search(
    workload: &Workload,
    fixed: &[(String, String)],
    headroom: f64,
    progress: &ProgressBar,
) -> Result<Advice, Box<dyn Error>> {
    // Pools of a search are too small on purpose: do not log what they find.
    let level = log::max_level();
    log::set_max_level(log::LevelFilter::Off);
    let (costs, hurried) = (Costs::of(workload, None), workload.hurried());
    let advice = Search { workload, hurried: &hurried, fixed, costs: &costs, headroom, progress }.advise();
    log::set_max_level(level);
    advice
}

/// The rule that decided that nothing is advised, with the settings that it decided about.
fn why_kept(advice: &Advice) -> String {
    let Advice { as_given, tried, frontier, grows, .. } = advice;
    if *grows || as_given.waits == 0 {
        return if *grows { GROWS } else { NO_GAIN }.to_owned();
    }
    let limits = frontier.iter().map(|point| (format!("MAX_BYTES={}", point.max_bytes), point.lost_seconds));
    let least = limits.chain(tried.iter().map(|one| (one.set.clone(), one.cost.lost_seconds)));
    let least = least.min_by(|one, other| one.1.total_cmp(&other.1)).filter(|(_, lost)| *lost < as_given.lost_seconds);
    match least {
        Some((set, lost)) => format!(
            "{set} would leave {lost:.1} of {:.1} s lost, but {NO_SOONER}; --try {set} shows it",
            as_given.lost_seconds
        ),
        None => format!("requests wait, and {NO_SOONER}"),
    }
}

/// Why a recording cannot be replayed faithfully; `None` if it can be.
fn doubt(workload: &Workload) -> Result<Option<String>, Box<dyn Error>> {
    match workload.is_closed() {
        true => Ok(workload.doubt(&Replay::as_recorded(workload, &[])?.play_with_lines(workload)?)),
        false => Ok(None),
    }
}

/// What `advise` says of a recording, in lines that replace the recommendation of `why`; the error is why it promises nothing.
///
/// # Errors
///
/// If the recording cannot be played, or not faithfully.
pub(crate) fn recommendation(workload: &Workload) -> Result<Vec<String>, Box<dyn Error>> {
    if let Some(doubt) = doubt(workload)? {
        return Err(doubt.into());
    }
    let advice = search(workload, &[], HEADROOM, &ProgressBar::hidden())?;
    let as_given = &advice.as_given;
    let Some(better) = &advice.advised else {
        return Ok(vec![format!("to do: keep what you have: {}", why_kept(&advice))]);
    };
    let lost = format!("{:.3} s lost -> {:.3} s", as_given.lost_seconds, better.cost.lost_seconds);
    let end = format!("ends after {:.1} s -> {:.1} s", as_given.ended_seconds, better.cost.ended_seconds);
    let held = [as_given, &better.cost].map(|cost| mib(cost.peak_pinned_bytes));
    let [before, after] = held.map(|mib| format!("{mib} MiB held at most"));
    let settings = better.settings.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
    let settings = Settings::of(workload, settings).lines();
    let mut lines = vec![format!("to do: set what follows; replayed: {lost}; {end}; {before} -> {after}")];
    lines.extend(settings.lines().map(str::to_owned));
    Ok(lines)
}

/// Names with their values.
type Variables = Vec<(String, String)>;

/// Why no ceiling is advised.
const GROWS: &str =
    "what is in use at once grows to the end, and a longer run would not fit under a ceiling that this one needs";
const NO_GAIN: &str =
    "nothing that was tried gains a tenth of the time lost, or of the memory held, and costs no more of the other";
const NO_SOONER: &str = "with more memory the program would end less than 20 % sooner";
/// How far an advised limit is above the smallest that costs no more.
const HEADROOM: f64 = 0.1;
/// Ceilings that are printed, about.
const FRONTIER_ROWS: usize = 8;

#[derive(Debug, Serialize)]
struct JsonAdvice<'a> {
    trace: String,
    #[serde(flatten)]
    advice: &'a Advice,
    #[serde(skip_serializing_if = "Option::is_none")]
    recorded_lost_seconds: Option<f64>,
    /// Those of the settings that are for the code of the program.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    in_code: Vec<&'a str>,
    warnings: &'a [String],
}

pub(crate) fn run(args: &AdviseArgs, verbosity: Verbosity, terminal: &Terminal) -> Result<(), ExitError> {
    if !args.tries.is_empty() {
        return Plays { workloads: &args.traces, json: args.json, sets: &args.tries, ..Plays::default() }.run(terminal);
    }
    let (mut warnings, mut notes) = (Vec::new(), Vec::new());
    let bar = terminal.steps(verbosity);
    let set = Set::all(&args.set, terminal)?;
    // What cannot be read is refused before any file is.
    set.replay(terminal)?;
    let advised = if args.run {
        advise_and_run(args, &set, &bar, &mut warnings, &mut notes)
    } else {
        advise(args, &args.traces, &set, &bar, &mut warnings, &mut notes).map(|(text, _)| text)
    };
    bar.finish_and_clear();
    notes.iter().for_each(|note| terminal.message(note));
    warnings.iter().for_each(|warning| terminal.message(warning));
    let text = match advised {
        Ok(text) => text,
        Err(error) => return terminal.report(Err(error)),
    };
    terminal.print(text.trim_end())?;
    if warnings.is_empty() { Ok(()) } else { Err(ExitError::Failure) }
}

/// The advice, of the trace or of a first run, and what it gains.
fn advise_and_run(
    args: &AdviseArgs,
    set: &Set,
    bar: &ProgressBar,
    warnings: &mut Vec<String>,
    notes: &mut Vec<String>,
) -> Result<String, Box<dyn Error>> {
    let folder = std::env::temp_dir().join(format!("pinpool-advise-{}", std::process::id()));
    std::fs::create_dir(&folder).map_err(|error| named(&folder, &why(&error)))?;
    let length = Duration::from_secs(args.seconds);
    let mut traces = args.traces.clone();
    let mut run = || -> Result<String, Box<dyn Error>> {
        if traces.is_empty() {
            bar.set_message("the program is recorded");
            let trace = folder.join("run.gz");
            let variable = ("PINPOOL_TRACE".to_owned(), trace.display().to_string());
            run::measure(&args.command, &[variable], length, &folder)?;
            traces.push(trace);
        }
        let (text, settings) = advise(args, &traces, set, bar, warnings, notes)?;
        if settings.variables.is_empty() {
            return Ok(text);
        }
        bar.set_message("the program runs as it is and with the advice in turns");
        let gain = run::in_turns(&args.command, &settings.variables, length, &folder)?;
        let without = if settings.in_code.is_empty() {
            ""
        } else {
            "it ran without the part of the advice that is for its code\n"
        };
        Ok(format!("{text}\n{gain}{without}"))
    };
    let text = run();
    // What is left there is of no use; one that cannot be removed is no failure of the advice.
    let _ = std::fs::remove_dir_all(&folder);
    text
}

/// What is advised: variables, and what a program has to change in its code, since it sets that there.
#[derive(Debug, Default)]
struct Settings {
    variables: Variables,
    in_code: Variables,
}

impl Settings {
    fn of(workload: &Workload, settings: Variables) -> Self {
        let (in_code, variables) = settings.into_iter().partition(|(name, _)| workload.is_set_in_code(name));
        Self { variables, in_code }
    }

    /// Lines for a shell, in which those for the code are comments.
    fn lines(&self) -> String {
        let mut text: String = self.variables.iter().map(|(name, value)| format!("export {name}={value}\n")).collect();
        if !self.in_code.is_empty() {
            text += "# in the code of the program, which sets these there, so that their variables have no effect:\n";
            text.extend(self.in_code.iter().map(|(name, value)| format!("# {name}={value}\n")));
        }
        text
    }
}

/// The text, and the settings that are advised.
fn advise(
    args: &AdviseArgs,
    traces: &[PathBuf],
    set: &Set,
    bar: &ProgressBar,
    warnings: &mut Vec<String>,
    notes: &mut Vec<String>,
) -> Result<(String, Settings), Box<dyn Error>> {
    if let Some((name, _)) = set.pairs.iter().find(|(name, _)| name == "PINPOOL_MAX_BYTES") {
        return Err(format!("--set {name}: advise searches it; --try shows the cost of one value").into());
    }
    let workloads =
        traces.iter().map(|path| open(path, args.pool.as_deref(), warnings, notes)).collect::<Result<Vec<_>, _>>()?;
    let first = workloads.first().ok_or("no trace is named")?;
    if workloads.len() > 1 {
        return Err("several traces go with --try only: name one".into());
    }
    let workload = first;
    let leak = workload.judged().iter().find(|judged| judged.judgement.cause == Cause::Leak);
    if let Some(PoolJudgement { name, judgement, .. }) = leak {
        return Err(named(&traces[0], &format_args!("no ceiling helps {name}: {judgement}")).into());
    }
    let short = workload.judged().iter().find(|judged| judged.judgement.cause == Cause::LimitTooSmall);
    if let Some((name, needed_bytes)) = short.and_then(|judged| judged.judgement.setting)
        && workload.failed_gets() > 0
    {
        let failed = counted(workload.failed_gets(), "get");
        let why = format!(
            "{failed} failed under the ceiling, and no replay shows what the program would have done with memory: export \
             {name}={needed_bytes}, and record it again"
        );
        return Err(named(&traces[0], &why).into());
    }
    // Settings that no pool takes are an error of theirs, not of the trace.
    Replay::as_recorded(workload, &set.pairs)?;
    bar.enable_steady_tick(Duration::from_millis(100));
    let doubt = doubt(first).map_err(|error| named(&traces[0], &error))?;
    if let Some(doubt) = doubt {
        return Err(named(&traces[0], &doubt).into());
    }
    let advice = search(workload, &set.pairs, args.headroom, bar).map_err(|error| named(&traces[0], &error))?;
    let better = advice.advised.iter().flat_map(|better| &better.settings);
    let better: Variables = better.map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
    // Settings of the user are part of the advice, and none without one.
    let settings = if better.is_empty() { better } else { [set.pairs.clone(), better].concat() };
    let settings = Settings::of(first, settings);
    let trace = traces.first().map(|path| path.display().to_string()).unwrap_or_default();
    // What the pool itself lost: the difference to its replay is the error of the model.
    let recorded = workload.judged().first().map(|judged| &judged.judgement.lost);
    let text = if args.json {
        let in_code = settings.in_code.iter().map(|(name, _)| &**name).collect();
        serde_json::to_string(&JsonAdvice {
            trace,
            advice: &advice,
            recorded_lost_seconds: recorded.map(|lost| lost.total_ns() as f64 / 1e9),
            in_code,
            warnings,
        })?
    } else {
        format!("{trace}: {} gets\n{}", grouped(workload.gets()), table(&advice, recorded, &settings))
    };
    Ok((text, settings))
}

/// The trace of one pool: of several the one of that name, or the one that lost most.
fn open(
    path: &Path,
    pool: Option<&str>,
    warnings: &mut Vec<String>,
    notes: &mut Vec<String>,
) -> Result<Workload, String> {
    let input = input::open(path)?;
    let workload = if input::kind(input.first()) == Kind::Recording {
        let mut recording = Recording::read(input.into_bytes()).map_err(|error| in_file(path, &error))?;
        let judged = judge_recording(&recording);
        let chosen = judged.iter().find(|judged| pool.is_none_or(|pool| judged.name == pool));
        if chosen.is_none() && !judged.is_empty() {
            let names: Vec<_> = judged.iter().map(|judged| &*judged.name).collect();
            return Err(named(path, &format_args!("it has no such pool with requests; it has {}", names.join(", "))));
        }
        if let Some(PoolJudgement { pool: number, name, .. }) = chosen.filter(|_| judged.len() > 1) {
            let why = if pool.is_none() { ", which lost most (--pool names another)" } else { "" };
            notes.push(named(path, &format_args!("it has {} pools; the advice is for {name}{why}", judged.len())));
            recording.pools.retain(|pool| pool.number == *number);
            recording.records.retain(|record| record.pool == *number);
        }
        input::with_gets(path, Workload::of(&recording).map_err(|error| in_file(path, &error))?)?
    } else {
        input::read_workload(path, input)?
    };
    if let Some(pools) = workload.pools_merged() {
        return Err(named(path, &format_args!("it has {pools} pools, and advice is for one: leave the others out")));
    }
    warnings.extend(workload.warning().map(|warning| named(path, &warning)));
    Ok(workload)
}

/// What the settings as given cost and what those that are advised do, and the lines to export.
fn table(advice: &Advice, recorded: Option<&Lost>, settings: &Settings) -> String {
    let Advice { as_given, advised, tried, frontier, .. } = advice;
    let mut text = recorded.map_or_else(String::new, |lost| format!("recorded: {lost}\n"));
    let mut costs = vec![("as given".to_owned(), as_given)];
    costs.extend(advised.iter().map(|better| ("advised".to_owned(), &better.cost)));
    text += &cost_table(&costs);
    let tries: Vec<_> = tried.iter().map(|one| (one.set.clone(), &one.cost)).collect();
    if !tries.is_empty() {
        text += "\ntried, with all idle buffers kept, and without a ceiling where none is named:\n";
        text += &cost_table(&tries);
    }
    if !frontier.is_empty() {
        text += "\nceilings that were played:\n";
        text += &frontier_table(frontier, advised.as_ref());
    }
    let Some(better @ Better { smallest_max_bytes, .. }) = advised else {
        return format!("{text}\nkeep what you have: {}\n", why_kept(advice));
    };
    text += &match smallest_max_bytes {
        Some(smallest) => {
            let percent = 100.0 * (better.max_bytes().unwrap_or(*smallest) as f64 / *smallest as f64 - 1.0);
            format!(
                "\nthe ceiling is {percent:.0} % above the smallest that costs no more and makes no get wait anew\n"
            )
        }
        None => format!("\nno ceiling is advised: {GROWS}\n"),
    };
    let (least, most) = better.cost.lost_seconds_range;
    if most > least {
        text += &format!(
            "page-locks took more and less time when this was recorded: if all are as short or as long, {least:.3} to {most:.3} s \
             are lost; their number does not depend on that\n"
        );
    }
    text + "\n" + &settings.lines()
}

fn cost_table(costs: &[(String, &Cost)]) -> String {
    let head =
        ["", "seconds lost", "waiting", "page-locks", "waits", "not in time", "peak MiB", "mean MiB", "ends after s"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    rows.extend(costs.iter().map(|(name, cost)| {
        vec![
            name.clone(),
            format!("{:.3}", cost.lost_seconds),
            format!("{:.3}", cost.waited_seconds),
            grouped(cost.page_locks),
            grouped(cost.waits),
            grouped(cost.fallbacks),
            mib(cost.peak_pinned_bytes),
            mib(cost.mean_pinned_bytes),
            format!("{:.1}", cost.ended_seconds),
        ]
    }));
    columns(&rows)
}

/// Some of the ceilings, the lowest and the highest among them, with that which is advised marked.
fn frontier_table(frontier: &[Point], advised: Option<&Better>) -> String {
    let ceiling = advised.and_then(Better::max_bytes);
    let every = frontier.len().div_ceil(FRONTIER_ROWS);
    let mut rows = vec![["ceiling MiB", "seconds lost", ""].map(str::to_owned).to_vec()];
    for (at, point) in frontier.iter().enumerate() {
        let is_advised = ceiling == Some(point.max_bytes);
        if is_advised || at % every == 0 || at + 1 == frontier.len() {
            let mark = if is_advised { "advised" } else { "" };
            rows.push(vec![mib(point.max_bytes), format!("{:.3}", point.lost_seconds), mark.to_owned()]);
        }
    }
    columns(&rows)
}

/// `0.1%` or `0.001`.
fn share(text: &str) -> Result<f64, ParseError> {
    let (number, scale) = text.strip_suffix('%').map_or((text, 1.0), |number| (number, 100.0));
    let share = number.trim().parse::<f64>().ok().map(|number| number / scale);
    share.filter(|share| (0.0..=1.0).contains(share)).ok_or_else(|| ParseError::new(text, "not a share from 0 to 100%"))
}
