//! The search: what settings cost in seconds, and the smallest ceiling under which they cost no more.
//!
//! Every setting is judged by a replay of the whole trace: seconds in the back-end, in moves, and waiting. Settings are played without a
//! ceiling and under the one as given, then under smaller ones. What is advised was played as it is advised, settings and ceiling
//! together, with its headroom, and cost no more than the settings as given; else these are kept. What is not always less under a
//! higher ceiling is searched by halves all the same, so a ceiling is one that was played, and not proven to be the least.

use std::cell::Cell;
use std::error::Error;

use indicatif::ProgressBar;
use pinpool::Preset;
use pinpool_replay::{Replay, ReplayOutcome, Workload};
use serde::Serialize;

use crate::replay::Costs;

const PRESET: &str = "PINPOOL_PRESET";
const ROUNDING: &str = "PINPOOL_ROUNDING";
const LIMIT: &str = "PINPOOL_POOL_SIZE_LIMIT";
const IDLE_TIMEOUT: &str = "PINPOOL_IDLE_TIMEOUT";
const RESERVE: &str = "PINPOOL_RESERVE";
const GROWTH: &str = "PINPOOL_GROWTH";
const CEILING: &str = "PINPOOL_MAX_BYTES";
/// More idle buffers than any trace has.
const NO_LIMIT: u64 = 1 << 40;
const PAGE_BYTES: u64 = 4096;
/// Ceilings are searched to this part of the peak.
const STEPS: u64 = 128;
/// The highest ceiling that is tried, in times of the peak without one.
const CEILING_TIMES_MAX: u64 = 2;
/// More memory than as given by more than this is advised only where it gains something.
const MORE_MEMORY: f64 = 1.02;
/// What it has to gain, and what other settings have to: this share of the seconds lost, and of the time of the trace.
const GAIN: f64 = 0.1;
const GAIN_OF_TIME: f64 = 0.0002;
/// What a reserve has to gain: this share of the seconds lost, or of that time.
const GAIN_OF_RESERVE: f64 = 0.5;
const GAIN_OF_RESERVE_OF_TIME: f64 = 0.02;
/// Less memory than as given by less than this share, or than this much, is none.
const LESS_MEMORY: f64 = 0.9;
const LESS_BYTES: u64 = 16 << 20;
/// Threads that are held up less by calls run ahead by so many buffers more than a replay shows.
const BUFFERS_MORE: u64 = 2;
/// A limit above the one that made requests wait has to end the program earlier by this share: a replay is not more exact.
const EARLIER: f64 = 0.2;

type Found<T> = Result<T, Box<dyn Error>>;

/// Names with their values.
type Settings = Vec<(&'static str, String)>;

/// What one choice of settings costs.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Cost {
    pub(super) lost_seconds: f64,
    /// The same with page-locks as short as the shortest of the recording, and as long as the longest.
    pub(super) lost_seconds_range: (f64, f64),
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
        let (least, most) = costs.driver_seconds_range(outcome);
        Self {
            lost_seconds: driver_seconds + waited_seconds,
            lost_seconds_range: (least + waited_seconds, most + waited_seconds),
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

/// What one set of settings gives, without a ceiling where it names none.
#[derive(Debug, Serialize)]
pub(super) struct Try {
    /// Beside the settings as given, as `--set` takes them.
    pub(super) set: String,
    #[serde(flatten)]
    pub(super) cost: Cost,
}

/// What is advised: the settings beside those as given, and what they cost.
#[derive(Debug, Serialize)]
pub(super) struct Better {
    pub(super) settings: Settings,
    #[serde(flatten)]
    pub(super) cost: Cost,
    /// The smallest ceiling that was played under these settings and costs no more; `None` where none is advised.
    pub(super) smallest_max_bytes: Option<u64>,
}

impl Better {
    pub(super) fn max_bytes(&self) -> Option<u64> {
        let (_, bytes) = self.settings.iter().find(|(name, _)| *name == CEILING)?;
        bytes.parse().ok()
    }
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
    /// Whether what is in use grows to the end, so that nothing is advised that depends on how much that is.
    pub(super) grows: bool,
}

/// Replays of one workload.
pub(super) struct Search<'a> {
    pub(super) workload: &'a Workload,
    /// The same program without the time of backend calls, and without the queue in front of a request that waits: its end shows what
    /// settings gain that spare threads these.
    pub(super) hurried: &'a Workload,
    /// Variables that the user has set, which are not searched.
    pub(super) fixed: &'a [(String, String)],
    pub(super) costs: &'a Costs,
    /// A ceiling is advised that is higher by this share than what suffices.
    pub(super) headroom: f64,
    /// Counts replays.
    pub(super) progress: &'a ProgressBar,
}

impl Search<'_> {
    pub(super) fn advise(&self) -> Found<Advice> {
        self.progress.set_message("replays under the settings as given");
        let given = self.under(&[])?;
        let as_given = self.play(&given)?;
        // What it costs at least: the same replay of the hurried program.
        let hurried_seconds = match self.workload.is_closed() {
            true => self.play_of(self.hurried, &given)?.ended_seconds + as_given.driver_seconds,
            false => 0.0,
        };
        let grows = self.workload.grows();
        let (mut tried, mut bases) = (Vec::new(), Vec::new());
        for settings in self.choices(&given, &as_given, grows) {
            let replay = self.under(&settings)?;
            let mut base: Option<Cost> = None;
            let free = Some(None).filter(|_| !grows || replay.max_bytes.is_none());
            for max_bytes in free.into_iter().chain(replay.max_bytes.map(Some)) {
                let highest =
                    base.as_ref().map_or(u64::MAX, |free| free.peak_pinned_bytes.saturating_mul(CEILING_TIMES_MAX));
                // A ceiling that is never met changes nothing.
                if max_bytes.is_some_and(|max_bytes| max_bytes > highest) {
                    continue;
                }
                let set = text_of(&settings, max_bytes);
                self.progress.set_message(format!("replays, now under {set}"));
                let cost = if settings.is_empty() && max_bytes == given.max_bytes {
                    as_given.clone()
                } else {
                    self.play(&Replay { max_bytes, ..replay.clone() })?
                };
                if !settings.is_empty() {
                    tried.push(Try { set, cost: cost.clone() });
                }
                base = base.filter(|base| base.lost_seconds <= cost.lost_seconds).or(Some(cost));
            }
            bases.extend(base.map(|base| (settings, base)));
        }
        bases.sort_by(|(one, cost), (other, other_cost)| self.rank(one, cost).total_cmp(&self.rank(other, other_cost)));
        // Of a pool that is full the limit is tried first; other rules have to gain as much over a higher one.
        let has_waited = as_given.waits > 0 && self.workload.is_closed();
        bases.sort_by_key(|(settings, _)| has_waited && !settings.is_empty());
        let gain = if has_waited { as_given.lost_seconds * GAIN } else { 0.0 };
        let (mut advised, mut frontier) = (None::<(Better, f64)>, Vec::new());
        for (settings, base) in bases {
            let (is_as_given, rank) = (settings.is_empty(), self.rank(&settings, &base));
            // What gains less than this is no advice.
            let least = advised.as_ref().map(|(_, best)| *best);
            let is_less = |rank: f64| least.map_or(rank <= self.below(&as_given), |least| rank < least - gain);
            if !is_less(rank) || !self.gains_surely(&settings, &base, &as_given) {
                continue;
            }
            let mut points = Vec::new();
            let found = if grows {
                let is_better = !is_as_given && self.is_better(&base, &as_given);
                let better = Better { settings: settings.clone(), cost: base, smallest_max_bytes: None };
                is_better.then_some((better, settings))
            } else {
                self.smallest(settings, &base, &given, (&as_given, hurried_seconds), &mut points)?
            };
            let rank = found.as_ref().map(|(better, settings)| self.rank(settings, &better.cost));
            if rank.is_some_and(is_less) {
                advised = found.map(|(better, _)| better).zip(rank);
                frontier = points;
            } else if is_as_given && advised.is_none() {
                frontier = points;
            }
        }
        frontier.sort_by_key(|point| point.max_bytes);
        Ok(Advice {
            gets: self.workload.gets(),
            peak_requested_bytes: self.workload.peak_requested_bytes(),
            as_given,
            advised: advised.map(|(better, _)| better),
            grows,
            tried,
            frontier,
            replays: self.progress.position(),
        })
    }

    /// A replay as it was recorded, with what the user sets and `settings`, as a program that follows the advice runs.
    fn under(&self, settings: &[(&'static str, String)]) -> Found<Replay> {
        let settings = settings.iter().map(|(name, value)| ((*name).to_owned(), value.clone()));
        let set: Vec<_> = self.fixed.iter().cloned().chain(settings).collect();
        Ok(Replay::as_recorded(self.workload, &set)?)
    }

    fn play(&self, replay: &Replay) -> Found<Cost> {
        self.play_of(self.workload, replay)
    }

    fn play_of(&self, workload: &Workload, replay: &Replay) -> Found<Cost> {
        self.progress.inc(1);
        Ok(Cost::of(&replay.play_with_lines(workload)?, self.costs))
    }

    /// Whether `cost` is to be preferred to that as given, or is as good.
    fn is_better(&self, cost: &Cost, as_given: &Cost) -> bool {
        if cost.lost_seconds > as_given.lost_seconds || cost.fallbacks > as_given.fallbacks {
            return false;
        }
        // Waits depend on how the threads of a run meet: a program that has none is given none.
        if as_given.waits == 0 && cost.waits > 0 {
            return false;
        }
        let is_larger = cost.peak_pinned_bytes as f64 > as_given.peak_pinned_bytes as f64 * MORE_MEMORY;
        if as_given.waits > 0 && is_larger && self.workload.is_closed() {
            // Threads that wait in a queue before a slow consumer lose nothing: the end decides.
            return cost.ended_seconds < as_given.ended_seconds * (1.0 - EARLIER);
        }
        !is_larger || cost.lost_seconds <= self.below(as_given)
    }

    /// What costs less than this gains something.
    fn below(&self, cost: &Cost) -> f64 {
        let of_time = self.workload.duration_us() as f64 / 1e6 * GAIN_OF_TIME;
        (cost.lost_seconds * (1.0 - GAIN)).min(cost.lost_seconds - of_time)
    }

    /// Whether these settings cost less too if the page-locks of the recording were no longer than the shortest of them, as those of a
    /// busy machine are now and then. A reserve makes them all the same, at the start: it has to spare those that come again and again.
    fn gains_surely(&self, settings: &[(&'static str, String)], cost: &Cost, as_given: &Cost) -> bool {
        let of_time = self.workload.duration_us() as f64 / 1e6 * GAIN_OF_RESERVE_OF_TIME;
        let of_reserve = of_time.min(as_given.lost_seconds * GAIN_OF_RESERVE);
        let is_reserve = settings.iter().any(|(name, _)| *name == RESERVE);
        settings.is_empty()
            || (cost.lost_seconds_range.0 <= as_given.lost_seconds_range.0 * (1.0 - GAIN)
                && (!is_reserve || cost.lost_seconds <= as_given.lost_seconds - of_reserve))
    }

    /// Less is better: other settings have to gain something over those as given.
    fn rank(&self, settings: &[(&'static str, String)], cost: &Cost) -> f64 {
        if settings.is_empty() { self.below(cost) } else { cost.lost_seconds }
    }

    /// No settings, and others, none that the user has set; where what is in use `grows`, none that depend on how much that is.
    fn choices(&self, given: &Replay, as_given: &Cost, grows: bool) -> Vec<Settings> {
        let is_free = |name: &str| !self.fixed.iter().any(|(fixed, _)| fixed == name);
        let is_adaptive = given.preset.is_none_or(|preset| preset == Preset::Adaptive);
        // Under tensorflow there is nothing to reserve from, and the pool grows with each buffer.
        let others = &given.others;
        let mut of_arena = Settings::new();
        of_arena.extend(others.reserve_bytes.filter(|&bytes| bytes > 0).map(|_| (RESERVE, "none".to_owned())));
        of_arena.extend(others.growth.filter(|may_grow| !may_grow).map(|_| (GROWTH, "1".to_owned())));
        let no_limit = is_free(LIMIT).then(|| (LIMIT, NO_LIMIT.to_string()));
        let mut choices = vec![Settings::new()];
        if is_free(PRESET) && is_free(ROUNDING) {
            let of = |preset: &str, rounding: &str| vec![(PRESET, preset.to_owned()), (ROUNDING, rounding.to_owned())];
            if is_adaptive && of_arena.iter().all(|(name, _)| is_free(name)) {
                choices.extend(["pow2", "exact"].map(|rounding| {
                    let mut tensorflow = of("tensorflow", rounding);
                    tensorflow.extend(of_arena.iter().cloned().chain(no_limit.clone()));
                    tensorflow
                }));
            } else if !is_adaptive {
                choices.push(of("adaptive", "eighths"));
            }
        }
        choices.extend(no_limit.filter(|_| !is_adaptive).map(|no_limit| vec![no_limit]));
        if is_adaptive && is_free(IDLE_TIMEOUT) {
            choices.push(vec![(IDLE_TIMEOUT, "none".to_owned())]);
        }
        if is_adaptive && is_free(RESERVE) {
            choices.push(vec![(RESERVE, as_given.peak_pinned_bytes.to_string())]);
        }
        choices.retain(|settings| !grows || !settings.iter().any(|(name, _)| [LIMIT, RESERVE].contains(name)));
        choices
    }

    /// The smallest ceiling, and where the limit on idle buffers is searched the smallest of these, that cost hardly more than `base`,
    /// which is what the settings cost without a ceiling or under that as given. Beside it the settings that it is of.
    fn smallest(
        &self,
        settings: Settings,
        base: &Cost,
        given: &Replay,
        (as_given, hurried_seconds): (&Cost, f64),
        frontier: &mut Vec<Point>,
    ) -> Found<Option<(Better, Settings)>> {
        let replay = self.under(&settings)?;
        // A part of what is gained may be given for less memory, and nothing of what as given does.
        let gain = (as_given.lost_seconds - base.lost_seconds).max(0.0);
        let enough = (base.lost_seconds + gain * GAIN).min(as_given.lost_seconds);
        let is_slow = Cell::new(false);
        let is_faster = (!settings.is_empty() || as_given.waits > 0) && self.workload.is_closed();
        let mut suffices = |max_bytes: u64| -> Found<Option<Cost>> {
            let replay = Replay { max_bytes: Some(max_bytes), ..replay.clone() };
            let mut cost = self.play(&replay)?;
            frontier.push(Point { max_bytes, lost_seconds: cost.lost_seconds });
            is_slow.set(cost.lost_seconds > enough);
            if is_faster && !is_slow.get() {
                // Threads that are held up less have more in use at once.
                let hurried = self.play_of(self.hurried, &replay)?;
                is_slow.set(as_given.waits == 0 && hurried.waits > 0);
                // Of both ends the hurried program shows how much sooner the one is.
                let share = (hurried.ended_seconds + cost.driver_seconds) / hurried_seconds.max(1e-9);
                cost.ended_seconds = cost.ended_seconds.min(as_given.ended_seconds * share);
            }
            Ok((!is_slow.get() && self.is_better(&cost, as_given)).then_some(cost))
        };
        let least_bytes = whole(self.workload.peak_requested_bytes().max(replay.others.reserve_bytes.unwrap_or(0)));
        let peak_bytes = whole(base.peak_pinned_bytes).max(least_bytes);
        let starts = [given.max_bytes, Some(as_given.peak_pinned_bytes)].into_iter().flatten().map(whole);
        let mut starts: Vec<_> = starts.filter(|bytes| (least_bytes..peak_bytes).contains(bytes)).collect();
        starts.push(peak_bytes);
        starts.sort_unstable();
        let (mut low, mut found) = (least_bytes, None);
        for high in starts {
            found = suffices(high)?.map(|cost| (high, cost));
            if found.is_some() {
                break;
            }
            low = high;
        }
        // The peak of a pool without a ceiling may be too low for one that has it: its granules are smaller then.
        while found.is_none() && is_slow.get() && low <= peak_bytes.saturating_mul(CEILING_TIMES_MAX) {
            let high = whole(low.saturating_add(low / 8));
            found = suffices(high)?.map(|cost| (high, cost));
            low = high;
        }
        let Some((mut high, mut cost)) = found else { return Ok(None) };
        while high.saturating_sub(low) > whole(peak_bytes / STEPS) {
            let middle = whole(low.midpoint(high));
            match suffices(middle)? {
                Some(found) => (high, cost) = (middle, found),
                None => low = middle,
            }
        }
        let mut max_bytes = high;
        // A little more memory may cost more: then the headroom is less.
        let few_buffers = self.workload.mean_get_bytes().saturating_mul(BUFFERS_MORE) as f64 / high as f64;
        let ahead = if is_faster && !settings.is_empty() { self.headroom.max(few_buffers) } else { self.headroom };
        for headroom in [ahead, self.headroom, self.headroom / 2.0] {
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // Rounded anyway; not below 0.
            let ample = whole((high as f64 * (1.0 + headroom)) as u64);
            if let Some(found) = suffices(ample)? {
                (max_bytes, cost) = (ample, found);
                break;
            }
        }
        // A lower ceiling under which a program takes as long and holds as much is no advice.
        let is_as_given = settings.is_empty() && given.max_bytes.is_some();
        let is_smaller = cost.peak_pinned_bytes as f64 <= as_given.peak_pinned_bytes as f64 * LESS_MEMORY
            && cost.peak_pinned_bytes + LESS_BYTES <= as_given.peak_pinned_bytes;
        if is_as_given && !is_smaller && cost.lost_seconds > self.below(as_given) {
            return Ok(None);
        }
        let mut advised = settings.clone();
        if let Some((_, limit)) = advised.iter_mut().find(|(name, _)| *name == LIMIT) {
            let few = self.fewest(&Replay { max_bytes: Some(max_bytes), ..replay.clone() }, &cost, as_given)?;
            *limit = few.0.to_string();
            cost = Cost { ended_seconds: cost.ended_seconds, ..few.1 };
        }
        advised.push((CEILING, max_bytes.to_string()));
        Ok(Some((Better { settings: advised, cost, smallest_max_bytes: Some(high) }, settings)))
    }

    /// The smallest limit on idle buffers that costs no more than `cost` does without one, and what it costs.
    fn fewest(&self, replay: &Replay, cost: &Cost, as_given: &Cost) -> Found<(u64, Cost)> {
        let under = |limit: u64| self.play(&Replay { pool_size_limit: Some(limit), ..replay.clone() });
        let (mut few, mut many) = (0, 1);
        while many < NO_LIMIT && under(many)?.lost_seconds > cost.lost_seconds {
            (few, many) = (many, many * 2);
        }
        while many - few > 1 {
            let middle = few.midpoint(many);
            if under(middle)?.lost_seconds <= cost.lost_seconds { many = middle } else { few = middle }
        }
        // Threads of another run get and put in another order, so that now and then a buffer more is idle at once.
        let limit = many.saturating_add(1);
        let limited = under(limit)?;
        Ok(if self.is_better(&limited, as_given) { (limit, limited) } else { (NO_LIMIT, cost.clone()) })
    }
}

/// As `--set` takes it; idle buffers without a limit are not named.
fn text_of(settings: &[(&'static str, String)], max_bytes: Option<u64>) -> String {
    let settings = settings.iter().filter(|(_, value)| *value != NO_LIMIT.to_string() || settings.len() == 1);
    let ceiling = max_bytes.map(|max_bytes| (CEILING, max_bytes.to_string()));
    let short = |(name, value): &(&str, String)| format!("{}={value}", name.trim_start_matches("PINPOOL_"));
    settings.chain(&ceiling).map(short).collect::<Vec<_>>().join(",")
}

fn whole(bytes: u64) -> u64 {
    bytes.max(1).div_ceil(PAGE_BYTES) * PAGE_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_costs_more_time_or_more_memory_for_little_is_not_better() {
        let workload = Workload::default();
        let progress = ProgressBar::hidden();
        let costs = Costs::of(&workload, None);
        let search = Search {
            workload: &workload,
            hurried: &workload,
            fixed: &[],
            costs: &costs,
            headroom: 0.1,
            progress: &progress,
        };
        let cost = |lost_seconds: f64, peak_pinned_bytes: u64, fallbacks: u64| Cost {
            lost_seconds,
            lost_seconds_range: (lost_seconds, lost_seconds),
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
