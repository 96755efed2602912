//! The settings that are tried, and the one that is advised.
//!
//! If the settings as given cannot meet the target, others are tried that the user has not set: the rules of TensorFlow, whose
//! coarse classes make sizes repeat, memory that is kept while it is idle, and a reserve. Of those that meet the target the
//! smallest ceiling is advised.

use indicatif::ProgressBar;
use pinpool::{Preset, Rounding};
use pinpool_replay::{Replay, TraceError, Workload};
use serde::Serialize;

use super::search::{Advice, Free, Search};

/// What one set of settings gives.
#[derive(Debug, Serialize)]
pub(super) struct Try {
    /// Beside the settings as given: `NAME=VALUE`, separated by commas.
    pub(super) set: String,
    /// Misses and waits beside the first of their size or number, with no ceiling and no limit.
    pub(super) avoidable_without_limits: u64,
    /// What these pin then.
    pub(super) peak_pinned_bytes: u64,
    /// The smallest ceiling and limit that meet the target; `None` where none does, or only one higher than another's.
    pub(super) max_bytes: Option<u64>,
    pub(super) pool_size_limit: Option<u64>,
    pub(super) meets_target: bool,
}

/// The advice, and all that was tried.
#[derive(Debug, Serialize)]
pub(super) struct Advised {
    #[serde(flatten)]
    pub(super) advice: Advice,
    /// The settings that are advised beside those as given.
    pub(super) set: String,
    /// The settings as given, and others if these do not meet the target.
    pub(super) tried: Vec<Try>,
}

/// Searches under `given`, and under other settings if these cannot meet the target.
pub(super) fn advise(
    workload: &Workload,
    given: &Replay,
    target: f64,
    progress: &ProgressBar,
) -> Result<Advised, TraceError> {
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // A part of a count.
    let allowed = (workload.gets() as f64 * target) as u64;
    let search = Search { workload, settings: given, allowed, progress };
    progress.set_message("replays under the settings as given");
    let free = search.free()?;
    let first = if free.avoidable <= allowed { Some(search.smallest(&free)?) } else { None };
    let mut tried = vec![tried_as(String::new(), &free, first.as_ref())];
    if let Some(advice) = first.filter(|advice| advice.meets_target) {
        return Ok(Advised { advice, set: String::new(), tried });
    }
    let mut best: Option<(Advice, String)> = None;
    for (set, settings) in others(given, &free) {
        progress.set_message(format!("replays, now under {set}"));
        let search = Search { workload, settings: &settings, allowed, progress };
        let free = search.free()?;
        // Settings that need no less memory than the best ones found so far are not searched further.
        let below = best.as_ref().map_or(u64::MAX, |(best, _)| best.max_bytes);
        let is_searched = free.avoidable <= allowed && search.is_met_below(&free, below)?;
        let advice = if is_searched { Some(search.smallest(&free)?) } else { None };
        tried.push(tried_as(set.clone(), &free, advice.as_ref()));
        if let Some(advice) = advice.filter(|advice| advice.meets_target && advice.max_bytes < below) {
            best = Some((advice, set));
        }
    }
    let (mut advice, set) = match best {
        Some(best) => best,
        None => (search.smallest(&free)?, String::new()),
    };
    advice.replays = progress.position();
    Ok(Advised { advice, set, tried })
}

fn tried_as(set: String, free: &Free, advice: Option<&Advice>) -> Try {
    Try {
        set,
        avoidable_without_limits: free.avoidable,
        peak_pinned_bytes: free.peak_pinned_bytes(),
        max_bytes: advice.map(|advice| advice.max_bytes),
        pool_size_limit: advice.map(|advice| advice.pool_size_limit),
        meets_target: advice.is_some_and(|advice| advice.meets_target),
    }
}

/// Other settings than `given`, which gives `free`; none that the user has set.
fn others(given: &Replay, free: &Free) -> Vec<(String, Replay)> {
    let mut others = Vec::new();
    let is_adaptive = given.preset.is_none_or(|preset| preset == Preset::Adaptive);
    if given.preset.is_none() && given.rounding.is_none() {
        let tensorflow = Replay { preset: Some(Preset::Tensorflow), ..given.clone() };
        others.push(("PRESET=tensorflow".to_owned(), tensorflow.clone()));
        let exact = Replay { rounding: Some(Rounding::Exact), ..tensorflow };
        others.push(("PRESET=tensorflow,ROUNDING=exact".to_owned(), exact));
    }
    if is_adaptive && given.idle_timeout.is_none() {
        let kept = Replay { idle_timeout: Some(None), ..given.clone() };
        others.push(("IDLE_TIMEOUT=none".to_owned(), kept));
    }
    if is_adaptive && given.others.reserve_bytes.is_none() {
        let bytes = free.peak_pinned_bytes();
        let mut reserved = given.clone();
        reserved.others.reserve_bytes = Some(bytes);
        others.push((format!("RESERVE={bytes}"), reserved));
    }
    others
}
