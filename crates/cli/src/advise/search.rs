//! The search: what settings cost in seconds, and the smallest ceiling under which they cost no more.
//!
//! Every setting is judged by a replay of the whole trace: seconds in the back-end, in moves, and waiting. What is advised was played
//! as it is advised, with its headroom, and cost no more than the settings as given; else these are kept. What is not always
//! less under a higher ceiling is searched by halves all the same, so a ceiling is one that was played, and not proven to be
//! the least.

use indicatif::ProgressBar;
use pinpool::{Preset, Rounding};
use pinpool_replay::{Replay, ReplayOutcome, TraceError, Workload};
use serde::Serialize;

use crate::replay::Costs;

/// More idle buffers than any trace has.
const NO_LIMIT: u64 = 1 << 40;
const PAGE_BYTES: u64 = 4096;
/// Ceilings are searched to this part of the peak.
const STEPS: u64 = 128;
/// The highest ceiling that is tried, in times of the peak without one.
const CEILING_TIMES_MAX: u64 = 2;
/// More memory than as given by more than this is advised only where it gains something.
const MORE_MEMORY: f64 = 1.02;
/// What it has to gain: this share of the seconds lost, and of the time of the trace.
const GAIN: f64 = 0.1;
const GAIN_OF_TIME: f64 = 0.001;
/// A ceiling above the one that made gets wait has to end the program earlier by this share.
const EARLIER: f64 = 0.02;

/// What one choice of settings costs.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Cost {
    pub(super) lost_seconds: f64,
    pub(super) driver_seconds: f64,
    pub(super) waited_seconds: f64,
    pub(super) page_locks: u64,
    pub(super) waits: u64,
    /// Gets not served in time.
    pub(super) fallbacks: u64,
    pub(super) peak_pinned_bytes: u64,
    pub(super) mean_pinned_bytes: u64,
    /// When the last buffer was put back.
    pub(super) ended_seconds: f64,
}

impl Cost {
    pub(super) fn of(outcome: &ReplayOutcome, costs: &Costs) -> Self {
        let driver_seconds = costs.driver_seconds(outcome);
        let waited_seconds = outcome.waited_us as f64 / 1e6;
        Self {
            lost_seconds: driver_seconds + waited_seconds,
            driver_seconds,
            waited_seconds,
            page_locks: outcome.report.page_locks,
            waits: outcome.report.waits,
            fallbacks: outcome.report.fallbacks,
            peak_pinned_bytes: outcome.report.peak_pinned_bytes,
            mean_pinned_bytes: outcome.report.mean_pinned_bytes,
            ended_seconds: outcome.ended_us as f64 / 1e6,
        }
    }
}

/// A ceiling that was played, and what it cost.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Point {
    pub(super) max_bytes: u64,
    pub(super) lost_seconds: f64,
}

/// What one set of settings gives without a ceiling.
#[derive(Debug, Serialize)]
pub(super) struct Try {
    /// Beside the settings as given: `NAME=VALUE`, separated by commas.
    pub(super) set: String,
    #[serde(flatten)]
    pub(super) cost: Cost,
}

/// What is advised: the settings beside those as given, and what they cost.
#[derive(Debug, Serialize)]
pub(super) struct Better {
    pub(super) settings: Vec<(&'static str, String)>,
    #[serde(flatten)]
    pub(super) cost: Cost,
}

#[derive(Debug, Serialize)]
pub(super) struct Advice {
    pub(super) gets: u64,
    /// The least that any allocator could hold.
    pub(super) peak_requested_bytes: u64,
    pub(super) as_given: Cost,
    /// `None`: keep what you have.
    pub(super) advised: Option<Better>,
    pub(super) tried: Vec<Try>,
    /// The ceilings that were played under what is advised, or under the settings as given, from the lowest on.
    pub(super) frontier: Vec<Point>,
    pub(super) replays: u64,
}

/// Settings that are tried, without a ceiling.
struct Candidate {
    settings: Vec<(&'static str, String)>,
    replay: Replay,
}

/// Replays of one workload.
pub(super) struct Search<'a> {
    pub(super) workload: &'a Workload,
    pub(super) given: &'a Replay,
    /// Variables that the user has set, which are not searched.
    pub(super) fixed: &'a [(String, String)],
    pub(super) costs: &'a Costs,
    /// A ceiling is advised that is higher by this share than what suffices.
    pub(super) headroom: f64,
    /// Counts replays.
    pub(super) progress: &'a ProgressBar,
}

impl Search<'_> {
    pub(super) fn advise(&self) -> Result<Advice, TraceError> {
        self.progress.set_message("replays under the settings as given");
        let as_given = self.play(self.given)?;
        let mut tried = Vec::new();
        let mut best: Option<(Candidate, Cost)> = None;
        for candidate in self.candidates(&as_given) {
            let set: Vec<_> = candidate.settings.iter().map(|(name, value)| format!("{name}={value}")).collect();
            self.progress.set_message(format!("replays, now under {}", set.join(",")));
            let cost = self.play(&candidate.replay)?;
            tried.push(Try { set: set.join(","), cost: cost.clone() });
            let below = best.as_ref().map_or(as_given.lost_seconds, |(_, best)| best.lost_seconds * (1.0 - GAIN));
            let is_first = best.is_none() && candidate.settings.is_empty();
            if self.is_better(&cost, &as_given) && (is_first || cost.lost_seconds < below) {
                best = Some((candidate, cost));
            }
        }
        let kept = Candidate { settings: Vec::new(), replay: Replay { max_bytes: None, ..self.given.clone() } };
        let (candidate, free) = match best {
            Some(best) => best,
            None => {
                let free = self.play(&kept.replay)?;
                (kept, free)
            }
        };
        let mut frontier = Vec::new();
        let advised = self.smallest(candidate, &free, &as_given, &mut frontier)?;
        frontier.sort_by_key(|point| point.max_bytes);
        Ok(Advice {
            gets: self.workload.gets(),
            peak_requested_bytes: self.workload.peak_requested_bytes(),
            as_given,
            advised,
            tried,
            frontier,
            replays: self.progress.position(),
        })
    }

    fn play(&self, replay: &Replay) -> Result<Cost, TraceError> {
        self.progress.inc(1);
        let outcome = replay.play_with_lines(self.workload)?;
        Ok(self.cost(&outcome))
    }

    fn cost(&self, outcome: &ReplayOutcome) -> Cost {
        Cost::of(outcome, self.costs)
    }

    /// Whether `cost` is to be preferred to that as given, or is as good.
    fn is_better(&self, cost: &Cost, as_given: &Cost) -> bool {
        if cost.lost_seconds > as_given.lost_seconds || cost.fallbacks > as_given.fallbacks {
            return false;
        }
        let is_larger = cost.peak_pinned_bytes as f64 > as_given.peak_pinned_bytes as f64 * MORE_MEMORY;
        if as_given.waits > 0 && is_larger && self.workload.is_closed() {
            // Threads that wait in a queue before a slow consumer lose nothing: the end decides.
            return cost.ended_seconds < as_given.ended_seconds * (1.0 - EARLIER);
        }
        let gain = as_given.lost_seconds - cost.lost_seconds;
        let of_time = self.workload.duration_us() as f64 / 1e6 * GAIN_OF_TIME;
        !is_larger || (gain >= as_given.lost_seconds * GAIN && gain >= of_time)
    }

    /// The settings as given and others, none that the user has set, all without a ceiling.
    fn candidates(&self, as_given: &Cost) -> Vec<Candidate> {
        let given = &Replay { max_bytes: None, ..self.given.clone() };
        let mut candidates = vec![Candidate { settings: Vec::new(), replay: given.clone() }];
        let mut add = |settings: &[(&'static str, String)], replay: Replay| {
            candidates.push(Candidate { settings: settings.to_vec(), replay });
        };
        let is_free = |name: &str| !self.fixed.iter().any(|(fixed, _)| fixed == name);
        let is_adaptive = given.preset.is_none_or(|preset| preset == Preset::Adaptive);
        let limit = if is_free("PINPOOL_POOL_SIZE_LIMIT") { Some(NO_LIMIT) } else { given.pool_size_limit };
        let kept = Replay { pool_size_limit: limit, ..given.clone() };
        if !is_adaptive && is_free("PINPOOL_PRESET") && is_free("PINPOOL_ROUNDING") {
            let adaptive = Replay { preset: Some(Preset::Adaptive), rounding: None, ..given.clone() };
            add(&[("PINPOOL_PRESET", "adaptive".to_owned()), ("PINPOOL_ROUNDING", "eighths".to_owned())], adaptive);
        }
        if is_adaptive && is_free("PINPOOL_PRESET") && is_free("PINPOOL_ROUNDING") {
            let preset = ("PINPOOL_PRESET", "tensorflow".to_owned());
            let tensorflow = Replay { preset: Some(Preset::Tensorflow), rounding: None, ..kept };
            add(std::slice::from_ref(&preset), tensorflow.clone());
            let exact = Replay { rounding: Some(Rounding::Exact), ..tensorflow };
            add(&[preset, ("PINPOOL_ROUNDING", "exact".to_owned())], exact);
        } else if !is_adaptive && limit == Some(NO_LIMIT) {
            add(&[("PINPOOL_POOL_SIZE_LIMIT", NO_LIMIT.to_string())], kept);
        }
        if is_adaptive && is_free("PINPOOL_IDLE_TIMEOUT") {
            let kept = Replay { idle_timeout: Some(None), ..given.clone() };
            add(&[("PINPOOL_IDLE_TIMEOUT", "none".to_owned())], kept);
        }
        if is_adaptive && is_free("PINPOOL_RESERVE") {
            let bytes = as_given.peak_pinned_bytes;
            let mut reserved = given.clone();
            reserved.others.reserve_bytes = Some(bytes);
            add(&[("PINPOOL_RESERVE", bytes.to_string())], reserved);
        }
        candidates
    }

    /// The smallest ceiling, and where the limit on idle buffers matters the smallest of these, that cost no more than `free` does.
    fn smallest(
        &self,
        candidate: Candidate,
        free: &Cost,
        as_given: &Cost,
        frontier: &mut Vec<Point>,
    ) -> Result<Option<Better>, TraceError> {
        let Candidate { mut settings, replay } = candidate;
        let whole = |bytes: u64| bytes.max(1).div_ceil(PAGE_BYTES) * PAGE_BYTES;
        let under = |max_bytes: u64, limit: Option<u64>| {
            let limit = limit.or(replay.pool_size_limit);
            Replay { max_bytes: Some(max_bytes), pool_size_limit: limit, ..replay.clone() }
        };
        // Half of what is gained may be given for less memory, and nothing of what as given does.
        let enough =
            (free.lost_seconds + (as_given.lost_seconds - free.lost_seconds).max(0.0) / 2.0).min(as_given.lost_seconds);
        let mut suffices = |max_bytes: u64| -> Result<Option<Cost>, TraceError> {
            let cost = self.play(&under(max_bytes, None))?;
            frontier.push(Point { max_bytes, lost_seconds: cost.lost_seconds });
            let is_enough = cost.lost_seconds <= enough && self.is_better(&cost, as_given);
            Ok(is_enough.then_some(cost))
        };
        let least_bytes = self.workload.peak_requested_bytes().max(replay.others.reserve_bytes.unwrap_or(0));
        let peak_bytes = free.peak_pinned_bytes.max(least_bytes);
        let (step, mut low, mut high) = (whole(peak_bytes / STEPS), whole(least_bytes), whole(peak_bytes));
        // The peak of a pool without a ceiling may be too low for one that has it: its granules are smaller then.
        while suffices(high)?.is_none() {
            if high > peak_bytes.saturating_mul(CEILING_TIMES_MAX) {
                return Ok(None);
            }
            low = high;
            high = whole(high.saturating_add(high / 8));
        }
        while high.saturating_sub(low) > step {
            let middle = whole(low.midpoint(high));
            if suffices(middle)?.is_some() { high = middle } else { low = middle }
        }
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // Rounded anyway; not below 0.
        let ample = whole((high as f64 * (1.0 + self.headroom)) as u64);
        // A little more memory may cost more: then the ceiling is the one that suffices.
        let played = match suffices(ample)? {
            Some(cost) => Some((ample, cost)),
            None => suffices(high)?.map(|cost| (high, cost)),
        };
        let Some((max_bytes, mut cost)) = played else { return Ok(None) };
        if replay.pool_size_limit == Some(NO_LIMIT) {
            let (mut few, mut many) = (0, 1);
            while many < NO_LIMIT && self.play(&under(max_bytes, Some(many)))?.lost_seconds > cost.lost_seconds {
                (few, many) = (many, many * 2);
            }
            while many - few > 1 {
                let middle = few.midpoint(many);
                let is_enough = self.play(&under(max_bytes, Some(middle)))?.lost_seconds <= cost.lost_seconds;
                if is_enough { many = middle } else { few = middle }
            }
            // Threads of another run get and put in another order, so that now and then a buffer more is idle at once.
            let limit = many.saturating_add(1);
            cost = self.play(&under(max_bytes, Some(limit)))?;
            if !self.is_better(&cost, as_given) {
                return Ok(None);
            }
            settings.retain(|(name, _)| *name != "PINPOOL_POOL_SIZE_LIMIT");
            settings.push(("PINPOOL_POOL_SIZE_LIMIT", limit.to_string()));
        }
        let is_as_given = settings.is_empty() && self.given.max_bytes.is_some_and(|given| max_bytes >= given);
        if is_as_given && cost.lost_seconds >= as_given.lost_seconds {
            return Ok(None);
        }
        settings.push(("PINPOOL_MAX_BYTES", max_bytes.to_string()));
        Ok(Some(Better { settings, cost }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_costs_more_time_or_more_memory_for_little_is_not_better() {
        let workload = Workload::default();
        let (given, progress) = (Replay::default(), ProgressBar::hidden());
        let costs = Costs::of(&workload, None);
        let search = Search {
            workload: &workload,
            given: &given,
            fixed: &[],
            costs: &costs,
            headroom: 0.1,
            progress: &progress,
        };
        let cost = |lost_seconds: f64, peak_pinned_bytes: u64, fallbacks: u64| Cost {
            lost_seconds,
            driver_seconds: lost_seconds,
            waited_seconds: 0.0,
            page_locks: 1,
            waits: 0,
            fallbacks,
            peak_pinned_bytes,
            mean_pinned_bytes: 0,
            ended_seconds: 1.0,
        };
        let as_given = cost(10.0, 1000, 1);
        for (lost, peak, fallbacks, is_better) in [
            (10.0, 1000, 1, true),
            (10.0, 1020, 1, true),
            (10.001, 900, 1, false),
            (9.5, 1021, 1, false),
            (9.0, 5000, 1, true),
            (5.0, 900, 2, false),
        ] {
            let found = search.is_better(&cost(lost, peak, fallbacks), &as_given);
            assert_eq!(found, is_better, "{lost} s, {peak} bytes, {fallbacks} not in time");
        }
    }
}
