//! Finds the smallest limit that costs a program no more time, with a longer idle timeout or a reserve if these save time.
//!
//! A replay of the whole trace counts the seconds that settings cost: driver calls, remaps and waiting. `MAX_BYTES` is bisected
//! for the smallest limit that costs no more than the given limit, or than no limit if requests waited. It is not bisected for
//! a program that spends a tenth of its time in calls, unless another setting helps. The advised limit is replayed as it is
//! printed, with its headroom. If the threads of the trace are known, they are also replayed without the delays that the advice
//! removes, because faster threads hold more memory at one time.

use std::error::Error;

use indicatif::ProgressBar;
use pinpool::Preset;
use pinpool_replay::{Replay, Workload};
use serde::Serialize;

use super::costs::{Column, Costs};

const IDLE_TIMEOUT: &str = "PINPOOL_IDLE_TIMEOUT";
const RESERVE: &str = "PINPOOL_RESERVE";
const MAX_BYTES: &str = "PINPOOL_MAX_BYTES";
const PAGE_BYTES: u64 = 4096;
/// Headroom of the advised limit above the smallest limit that costs no more.
const HEADROOM: f64 = 0.1;
/// The bisection ends when the limit is known to within 1/128 of the first limit that it tries.
const STEPS: u64 = 128;
/// Settings that use more memory than the given settings by this factor are advised only if they save time.
const MORE_MEMORY: f64 = 1.02;
/// Advice must gain this share of the seconds lost, and this share of the recorded time.
const GAIN: f64 = 0.1;
const GAIN_OF_TIME: f64 = 0.0002;
/// A reserve must gain this share of the seconds lost, or this share of the recorded time.
const RESERVE_GAIN: f64 = 0.5;
const RESERVE_GAIN_OF_TIME: f64 = 0.02;
/// To a program that spends more than this share of the time in driver calls, a lower limit alone is not advised.
const IN_CALLS: f64 = 0.1;
/// A limit below the given limit must reduce the peak to this share, and by at least this many bytes.
const PEAK_SHARE: f64 = 0.9;
const SAVING_MIN: u64 = 16 << 20;
/// Number of buffers by which threads with fewer delays may run ahead of the replay.
const BUFFERS_AHEAD: u64 = 2;
/// If requests waited, settings that use more memory must end the program earlier by this share. Replays are not precise enough
/// to show less.
const EARLIER: f64 = 0.1;

type SearchResult<T> = Result<T, Box<dyn Error>>;

/// The name of a variable and its value.
type Setting = (String, String);

/// A limit that was replayed, and what it cost.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Point {
    pub(super) max_bytes: u64,
    pub(super) lost_seconds: f64,
}

#[derive(Debug, Serialize)]
pub(super) struct BetterSettings {
    pub(super) settings: Vec<Setting>,
    #[serde(flatten)]
    pub(super) cost: Column,
    /// The smallest limit that suffices, without headroom; `None` if no limit is advised.
    pub(super) smallest_max_bytes: Option<u64>,
}

#[derive(Debug, Serialize)]
pub(super) struct Advice {
    pub(super) requests: u64,
    pub(super) peak_requested_bytes: u64,
    pub(super) as_given: Column,
    /// The advised settings; `None` to keep the given settings.
    pub(super) advised: Option<BetterSettings>,
    /// Other settings that were replayed.
    pub(super) tried: Vec<Column>,
    /// The limits that were replayed, in ascending order.
    pub(super) frontier: Vec<Point>,
    pub(super) replays: u64,
    /// Whether the memory in use grows until the end, so that no limit or reserve is advised.
    pub(super) grows: bool,
    /// Whether the program spends so much time in calls that no limit alone is advised.
    #[serde(skip)]
    pub(super) in_calls: bool,
}

/// Replays of one workload.
pub(super) struct Search<'a> {
    workload: &'a Workload,
    /// The same program without the delays that a limit and driver calls caused.
    hurried: Workload,
    /// Variables that the user has set.
    fixed: &'a [Setting],
    costs: Costs,
    progress: &'a ProgressBar,
}

impl<'a> Search<'a> {
    pub(super) fn new(workload: &'a Workload, fixed: &'a [Setting], progress: &'a ProgressBar) -> Self {
        let (hurried, costs) = (workload.without_delays(), Costs::of(workload));
        Self { workload, hurried, fixed, costs, progress }
    }

    pub(super) fn advise(&self) -> SearchResult<Advice> {
        self.progress.set_message("replays");
        let given = self.under(&[])?;
        let as_given = Column { set: "as given".to_owned(), ..self.play(self.workload, &given)? };
        let grows = self.workload.grows();
        let (mut tried, mut bases) = (Vec::new(), Vec::new());
        for (name, value) in self.choices(&given, &as_given, grows)? {
            // The setting in the syntax of `--set`.
            let set = format!("{}={value}", name.trim_start_matches("PINPOOL_"));
            let setting = Some((name, value));
            let cost = Column { set, ..self.play(self.workload, &self.under(setting.as_slice())?)? };
            tried.push(cost.clone());
            if self.gains(&setting, &cost, &as_given) && self.is_better(&cost, &as_given) {
                bases.push((setting, cost));
            }
        }
        bases.sort_by(|one, other| rank(one).total_cmp(&rank(other)));
        let in_calls = as_given.driver_seconds > self.workload.duration_us as f64 / 1e6 * IN_CALLS;
        // A full pool needs a higher limit first. Otherwise a lower limit, which only saves memory, is tried last. It moves
        // calls from returns to requests, so it is not tried for a program that spends its time in calls.
        if as_given.outcome.waits > 0 && self.workload.is_closed {
            let unlimited = self.play(self.workload, &Replay { max_bytes: None, ..given.clone() })?;
            bases.insert(0, (None, unlimited));
        } else if !in_calls {
            bases.push((None, as_given.clone()));
        }
        let (mut advised, mut frontier) = (None, Vec::new());
        for (setting, base) in bases {
            advised = match grows {
                true => setting.map(|one| BetterSettings { settings: vec![one], cost: base, smallest_max_bytes: None }),
                false => self.smallest(setting, &base, &given, &as_given, &mut frontier)?,
            };
            if advised.is_some() {
                break;
            }
        }
        frontier.sort_by_key(|point| point.max_bytes);
        Ok(Advice {
            requests: self.workload.requests,
            peak_requested_bytes: self.workload.peak_requested_bytes(),
            as_given,
            advised,
            tried,
            frontier,
            replays: self.progress.position(),
            grows,
            in_calls,
        })
    }

    /// Returns a replay with the recorded settings, overridden by the user's settings and by `setting`.
    fn under(&self, setting: &[Setting]) -> SearchResult<Replay> {
        Ok(Replay::with_recorded_settings(self.workload, &[self.fixed, setting].concat())?)
    }

    fn play(&self, workload: &Workload, replay: &Replay) -> SearchResult<Column> {
        self.progress.inc(1);
        Ok(Column::play("", workload, replay, &self.costs)?)
    }

    /// Returns the settings to try in addition to the given settings. Each of them keeps memory pinned.
    fn choices(&self, given: &Replay, as_given: &Column, grows: bool) -> SearchResult<Vec<Setting>> {
        let adaptive = given.config()?.preset == Preset::Adaptive;
        let reserve = (RESERVE, as_given.outcome.peak_pinned_bytes.to_string());
        let choices = [(IDLE_TIMEOUT, "none".to_owned()), reserve].into_iter();
        let is_free = |name: &str| !self.fixed.iter().any(|(fixed, _)| fixed == name);
        let is_open = |name: &str| adaptive && is_free(name) && !(grows && name == RESERVE);
        Ok(choices.filter(|(name, _)| is_open(name)).map(|(name, value)| (name.to_owned(), value)).collect())
    }

    /// Returns whether this setting saves enough, even if all pin calls were as short as the shortest. A reserve pins the same
    /// bytes at the start, so it must save repeated pin calls.
    fn gains(&self, setting: &Option<Setting>, cost: &Column, as_given: &Column) -> bool {
        let seconds = self.workload.duration_us as f64 / 1e6;
        let of_reserve = (seconds * RESERVE_GAIN_OF_TIME).min(as_given.lost_seconds * RESERVE_GAIN);
        cost.lost_seconds <= self.enough_gained(as_given)
            && self.costs.least_lost(cost) <= self.costs.least_lost(as_given) * (1.0 - GAIN)
            && (!is_reserve(setting) || cost.lost_seconds <= as_given.lost_seconds - of_reserve)
    }

    /// Returns the number of lost seconds up to which other settings gain enough to be recommended.
    fn enough_gained(&self, as_given: &Column) -> f64 {
        let of_time = self.workload.duration_us as f64 / 1e6 * GAIN_OF_TIME;
        (as_given.lost_seconds * (1.0 - GAIN)).min(as_given.lost_seconds - of_time)
    }

    /// Returns whether `cost` is no worse than the cost of the given settings.
    fn is_better(&self, cost: &Column, as_given: &Column) -> bool {
        let loses_more = cost.lost_seconds > as_given.lost_seconds || cost.outcome.timeouts > as_given.outcome.timeouts;
        // Waits depend on the timing of the threads, so a program without waits is given no settings with waits.
        if loses_more || (as_given.outcome.waits == 0 && cost.outcome.waits > 0) {
            return false;
        }
        let larger = cost.outcome.peak_pinned_bytes as f64 > as_given.outcome.peak_pinned_bytes as f64 * MORE_MEMORY;
        if larger && as_given.outcome.waits > 0 && self.workload.is_closed {
            // Threads that wait in front of a slow consumer lose nothing, so the time at which the program ends decides.
            return (cost.outcome.ended_us as f64) < as_given.outcome.ended_us as f64 * (1.0 - EARLIER);
        }
        !larger || cost.lost_seconds <= self.enough_gained(as_given)
    }

    /// Finds the smallest limit under which `setting` costs about as little as `base`, and adds headroom to it.
    fn smallest(
        &self,
        setting: Option<Setting>,
        base: &Column,
        given: &Replay,
        as_given: &Column,
        frontier: &mut Vec<Point>,
    ) -> SearchResult<Option<BetterSettings>> {
        let replay = self.under(setting.as_slice())?;
        // A part of the gain may be traded for less memory, but the cost must not exceed the cost of the given settings.
        let gain = (as_given.lost_seconds - base.lost_seconds).max(0.0);
        let enough = (base.lost_seconds + gain * GAIN).min(as_given.lost_seconds);
        let faster = (setting.is_some() || as_given.outcome.waits > 0) && self.workload.is_closed;
        let ends = |hurried: &Column, calls: &Column| hurried.outcome.ended_us as f64 / 1e6 + calls.driver_seconds;
        let before = if faster { ends(&self.play(&self.hurried, given)?, as_given) } else { 1.0 };
        let mut suffices = |max_bytes: u64| -> SearchResult<Option<Column>> {
            let replay = Replay { max_bytes: Some(max_bytes), ..replay.clone() };
            let mut cost = self.play(self.workload, &replay)?;
            frontier.push(Point { max_bytes, lost_seconds: cost.lost_seconds });
            if cost.lost_seconds > enough {
                return Ok(None);
            }
            if faster {
                let hurried = self.play(&self.hurried, &replay)?;
                if as_given.outcome.waits == 0 && hurried.outcome.waits > 0 {
                    return Ok(None);
                }
                let share = ends(&hurried, &cost) / before.max(1e-9);
                #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
                // The result is at most the value that it replaces.
                let ended_us = (as_given.outcome.ended_us as f64 * share) as u64;
                cost.outcome.ended_us = cost.outcome.ended_us.min(ended_us);
            }
            Ok(self.is_better(&cost, as_given).then_some(cost))
        };
        let least = self.workload.peak_requested_bytes().max(replay.config()?.reserve);
        // If requests waited, limits are tried from the given limit upwards, otherwise from the peak downwards.
        let peak = base.outcome.peak_pinned_bytes.max(least);
        let start = if as_given.outcome.waits > 0 { given.max_bytes.unwrap_or(peak).clamp(least, peak) } else { peak };
        let Some((smallest, least_cost)) = bisect(whole(least), whole(start), 2 * whole(peak), &mut suffices)? else {
            return Ok(None);
        };
        let ahead = self.workload.mean_get_bytes().saturating_mul(BUFFERS_AHEAD) as f64 / smallest as f64;
        let ahead = if faster && setting.is_some() { HEADROOM.max(ahead) } else { HEADROOM };
        // A little more memory may cost more. In this case, the headroom is smaller.
        let (mut max_bytes, mut cost) = (smallest, least_cost);
        for headroom in [ahead, HEADROOM / 2.0] {
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // Rounded anyway; not below 0.
            let ample = whole((smallest as f64 * (1.0 + headroom)) as u64);
            if let Some(found) = suffices(ample)? {
                (max_bytes, cost) = (ample, found);
                break;
            }
        }
        let saved_bytes = as_given.outcome.peak_pinned_bytes.saturating_sub(cost.outcome.peak_pinned_bytes);
        let smaller = cost.outcome.peak_pinned_bytes as f64 <= as_given.outcome.peak_pinned_bytes as f64 * PEAK_SHARE;
        let is_change = setting.is_some() || given.max_bytes.is_none() || (smaller && saved_bytes >= SAVING_MIN);
        if !is_change && cost.lost_seconds > self.enough_gained(as_given) {
            return Ok(None);
        }
        let settings = setting.into_iter().chain([(MAX_BYTES.to_owned(), max_bytes.to_string())]).collect();
        cost.set = "advised".to_owned();
        Ok(Some(BetterSettings { settings, cost, smallest_max_bytes: Some(smallest) }))
    }
}

/// Returns the smallest limit above `low` that suffices, and its cost. Tries `high` and then higher limits up to about `most`,
/// and bisects below the first limit that suffices.
fn bisect(
    mut low: u64,
    mut high: u64,
    most: u64,
    suffices: &mut impl FnMut(u64) -> SearchResult<Option<Column>>,
) -> SearchResult<Option<(u64, Column)>> {
    let step = whole(high / STEPS);
    let mut found = suffices(high)?;
    while found.is_none() && high < most {
        (low, high) = (high, whole(high + high / 4));
        found = suffices(high)?;
    }
    let Some(mut cost) = found else { return Ok(None) };
    while high.saturating_sub(low) > step {
        let middle = whole(low.midpoint(high));
        match suffices(middle)? {
            Some(found) => (high, cost) = (middle, found),
            None => low = middle,
        }
    }
    Ok(Some((high, cost)))
}

/// Returns the seconds lost, less a tenth for a reserve. A replay assigns the same cost to each pinned byte, but several
/// threads pin a reserve before the program works, and a reserve also replaces the program's first pin calls.
fn rank((setting, cost): &(Option<Setting>, Column)) -> f64 {
    if is_reserve(setting) { cost.lost_seconds * (1.0 - GAIN) } else { cost.lost_seconds }
}

fn is_reserve(setting: &Option<Setting>) -> bool {
    setting.as_ref().is_some_and(|(name, _)| name == RESERVE)
}

fn whole(bytes: u64) -> u64 {
    bytes.max(1).div_ceil(PAGE_BYTES) * PAGE_BYTES
}
