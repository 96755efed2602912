//! `pinpool advise`: the smallest ceiling and limit under which a trace meets a target.
//!
//! | file | owns |
//! | --- | --- |
//! | `tries.rs` | the settings that are tried, and the one that is advised |
//! | `search.rs` | the search over replays under one of them |
//! | `batch.rs` | how sizes follow the batch size |

mod batch;
mod search;
mod tries;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use indicatif::ProgressBar;
use pinpool::config::text::ParseError;
use pinpool_replay::{Replay, Workload};
use serde::Serialize;

use self::batch::BatchFit;
use self::search::Advice;
use self::tries::{Advised, Try};
use crate::files::{in_file, named};
use crate::input::open_workload;
use crate::set::Set;
use pinpool_cli::exit::ExitError;
use pinpool_cli::table::{columns, grouped};
use pinpool_cli::terminal::Terminal;
use pinpool_cli::terminal::Verbosity;

/// Find the smallest ceiling and limit under which a trace meets a target
///
/// Plays the trace on simulated memory, in virtual time, under many settings. A miss is a get that no idle buffer serves. The
/// first gets of a size, and those for more buffers of a size at once than before, miss under any setting; the target is for
/// the other misses, and for gets that wait or fail at the ceiling. Where the settings as given cannot meet it, PINPOOL_PRESET,
/// PINPOOL_ROUNDING, PINPOOL_IDLE_TIMEOUT and PINPOOL_RESERVE are tried too, unless --set has them, and what each gives is
/// printed. Exits with 1 if nothing meets the target, or the trace is not whole.
#[derive(Debug, Args)]
pub(crate) struct AdviseArgs {
    /// Recorded trace, workload, or log of RMM, plain or compressed, `-` is stdin; with --batch-size more than one
    #[arg(required = true, value_name = "TRACE")]
    traces: Vec<PathBuf>,

    /// Share of the gets that may miss or wait: 0.1%, or 0.001
    #[arg(long, value_name = "SHARE", default_value = "0.1%", value_parser = share)]
    miss_target: f64,

    /// Other settings, by the names of their variables: IDLE_TIMEOUT=5min
    #[arg(long, value_name = "NAME=VALUE")]
    set: Vec<Set>,

    /// Samples in a batch of each trace, in the order of the traces: gives the advice for batches of twice the first, unless
    /// --new-batch-size names another number
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = clap::value_parser!(u64).range(1..))]
    batch_size: Vec<u64>,

    /// Give the advice for batches of this many samples instead
    #[arg(long, value_name = "N", requires = "batch_size", value_parser = clap::value_parser!(u64).range(1..))]
    new_batch_size: Option<u64>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct JsonAdvice<'a> {
    trace: String,
    #[serde(flatten)]
    advised: &'a Advised,
    #[serde(skip_serializing_if = "Option::is_none")]
    batch: Option<&'a BatchFit>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pools_merged: Option<usize>,
    warnings: &'a [String],
}

pub(crate) fn run(args: &AdviseArgs, verbosity: Verbosity, terminal: &Terminal) -> Result<(), ExitError> {
    let (mut warnings, mut notes) = (Vec::new(), Vec::new());
    let bar = terminal.steps(verbosity);
    let set = Set::all(&args.set, terminal)?;
    let replay = set.replay(terminal)?;
    let advised = advise(args, &set, &replay, &bar, &mut warnings, &mut notes);
    bar.finish_and_clear();
    notes.iter().for_each(|note| terminal.message(note));
    warnings.iter().for_each(|warning| terminal.message(warning));
    let (text, met) = match advised {
        Ok(advised) => advised,
        Err(error) => return terminal.report(Err(error)),
    };
    terminal.print(text.trim_end())?;
    if met && warnings.is_empty() { Ok(()) } else { Err(ExitError::Failure) }
}

/// The text, and whether the target is met.
fn advise(
    args: &AdviseArgs,
    set: &Set,
    replay: &Replay,
    bar: &ProgressBar,
    warnings: &mut Vec<String>,
    notes: &mut Vec<String>,
) -> Result<(String, bool), Box<dyn Error>> {
    let is_searched = |name: &str| matches!(name, "PINPOOL_MAX_BYTES" | "PINPOOL_POOL_SIZE_LIMIT");
    if let Some((name, _)) = set.pairs.iter().find(|(name, _)| is_searched(name)) {
        return Err(format!("--set {name}: advise searches it; `pinpool replay --set` tries one value").into());
    }
    let workloads = args.traces.iter().map(|path| open(path, warnings)).collect::<Result<Vec<_>, _>>()?;
    let first = workloads.first().ok_or("no trace is named")?;
    let merged = args.traces.iter().zip(&workloads);
    notes.extend(merged.filter_map(|(path, workload)| Some(named(path, &workload.pools_note()?))));
    let fit = match args.batch_size.first() {
        None if workloads.len() > 1 => {
            return Err("several traces go with --batch-size alone: name one".into());
        }
        None => None,
        Some(from) => {
            let to = args.new_batch_size.unwrap_or_else(|| from.saturating_mul(2));
            Some(BatchFit::of(&workloads, &args.batch_size, to)?)
        }
    };
    let resized = fit.as_ref().map(|fit| first.resized(|bytes| fit.size(bytes))).transpose()?;
    let workload = resized.as_ref().unwrap_or(first);
    // Pools of a search are too small on purpose: what they would log is no news.
    let level = log::max_level();
    log::set_max_level(log::LevelFilter::Off);
    bar.enable_steady_tick(Duration::from_millis(100));
    let advised = tries::advise(workload, replay, args.miss_target, bar);
    log::set_max_level(level);
    let advised = advised.map_err(|error| in_file(&args.traces[0], &error))?;
    let trace = args.traces.first().map(|path| path.display().to_string()).unwrap_or_default();
    let text = if args.json {
        let pools_merged = workload.pools_merged();
        serde_json::to_string(&JsonAdvice { trace, advised: &advised, batch: fit.as_ref(), pools_merged, warnings })?
    } else {
        let scaled = fit.as_ref().map(BatchFit::lines).unwrap_or_default();
        format!("{trace}: {} gets\n{scaled}{}", grouped(workload.gets()), table(&advised, set))
    };
    Ok((text, advised.advice.meets_target))
}

fn open(path: &Path, warnings: &mut Vec<String>) -> Result<Workload, String> {
    let workload = open_workload(path)?;
    warnings.extend(workload.warning().map(|warning| named(path, &warning)));
    Ok(workload)
}

fn table(advised: &Advised, set: &Set) -> String {
    let Advised { advice, set: more, tried } = advised;
    let Advice { max_bytes, pool_size_limit, peak_requested_bytes, firsts, .. } = *advice;
    let percent = |part: u64| format!("{:.3} %", 100.0 * part as f64 / advice.gets.max(1) as f64);
    let mut text = String::new();
    if advice.meets_target {
        text += &format!("target met: at most {} misses and waits that could be avoided\n", grouped(advice.allowed));
    } else {
        text += &format!(
            "TARGET NOT MET: at most {} misses and waits that could be avoided; {} are left without any ceiling or limit, and {} \
             ({}) under this one, the smallest found that does {}\n",
            grouped(advice.allowed),
            grouped(advice.avoidable_without_limits),
            grouped(advice.avoidable),
            percent(advice.avoidable),
            if advice.avoidable <= advice.avoidable_without_limits {
                "as well"
            } else {
                "as well as a ceiling of four times the peak"
            }
        );
    }
    if tried.len() > 1 {
        text += &tries_table(tried);
    }
    text += &format!(
        "expected: {} misses of {} gets ({}), of which {} come first of their size or number and miss under any setting; {} \
         waits, {} gets not served in time\n",
        grouped(advice.misses),
        grouped(advice.gets),
        percent(advice.misses),
        grouped(firsts),
        grouped(advice.waits),
        grouped(advice.fallbacks)
    );
    let ratio = max_bytes as f64 / peak_requested_bytes.max(1) as f64;
    text += &format!(
        "ceiling: {} bytes, {ratio:.3} times the least that any allocator could hold ({} bytes in use at once)\n",
        grouped(max_bytes),
        grouped(peak_requested_bytes)
    );
    text += &format!("limit: {} idle buffers\n\n", grouped(pool_size_limit));
    for (name, value) in &set.pairs {
        text += &format!("export {name}={value}\n");
    }
    for setting in more.split(',').filter(|setting| !setting.is_empty()) {
        text += &format!("export PINPOOL_{setting}\n");
    }
    text + &format!("export PINPOOL_MAX_BYTES={max_bytes}\nexport PINPOOL_POOL_SIZE_LIMIT={pool_size_limit}\n")
}

/// What each set of settings gives.
fn tries_table(tried: &[Try]) -> String {
    let head = ["tried", "could be avoided", "pinned at most", "ceiling", "limit"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    rows.extend(tried.iter().map(|one| {
        let searched = |figure: Option<u64>| figure.map_or_else(|| "-".to_owned(), grouped);
        let name = if one.set.is_empty() { "as given" } else { &one.set };
        let (avoidable, peak) = (grouped(one.avoidable_without_limits), grouped(one.peak_pinned_bytes));
        vec![name.to_owned(), avoidable, peak, searched(one.max_bytes), searched(one.pool_size_limit)]
    }));
    columns(&rows)
}

/// `0.1%` or `0.001`.
fn share(text: &str) -> Result<f64, ParseError> {
    let (number, scale) = text.strip_suffix('%').map_or((text, 1.0), |number| (number, 100.0));
    let share = number.trim().parse::<f64>().ok().map(|number| number / scale);
    share.filter(|share| (0.0..=1.0).contains(share)).ok_or_else(|| ParseError::new(text, "not a share from 0 to 100%"))
}
