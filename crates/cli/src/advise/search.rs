//! The search under one set of settings: first the smallest ceiling without a limit on idle buffers that is ever reached, then
//! the smallest limit under that ceiling, and one more where that meets the target too.
//!
//! Bisects. What meets the target is not always more under a higher ceiling, so the result is one that was played, and not
//! proven to be the least. A replay ends as soon as the target is missed.

use std::collections::HashMap;

use indicatif::ProgressBar;
use pinpool::{Preset, Rounding};
use pinpool_replay::{Replay, ReplayReport, TraceError, TraceOp, Workload};
use serde::Serialize;

/// More idle buffers than any trace has.
const NO_LIMIT: u64 = 1 << 40;
const PAGE_BYTES: u64 = 4096;
/// Alignment that adds nothing to a class.
const ALIGN: usize = 4;
/// Sizes of an `s` line that are looked at.
const STEPS_MAX: u64 = 1 << 20;
/// The highest ceiling that is tried, in times of the peak without one.
const CEILING_TIMES_MAX: u64 = 4;
/// Ceilings are searched to this part of the peak.
const STEPS: u64 = 512;

/// What was found.
#[derive(Debug, Serialize)]
pub(super) struct Advice {
    /// Whether the target is met; else the ceiling and the limit do as well as none, or as the best that was found.
    pub(super) meets_target: bool,
    pub(super) gets: u64,
    /// Misses and waits that the target allows, beside `firsts`.
    pub(super) allowed: u64,
    /// Misses under any setting.
    pub(super) firsts: u64,
    /// Misses beside `firsts`, waits, and gets not served in time, under the advice.
    pub(super) avoidable: u64,
    /// Misses beside `firsts`, waits, and gets not served in time, with no ceiling and no limit.
    pub(super) avoidable_without_limits: u64,
    pub(super) misses: u64,
    pub(super) waits: u64,
    pub(super) fallbacks: u64,
    pub(super) max_bytes: u64,
    pub(super) pool_size_limit: u64,
    /// The least that any allocator could hold.
    pub(super) peak_requested_bytes: u64,
    /// What the advice holds at most.
    pub(super) peak_pinned_bytes: u64,
    /// Replays that it took.
    pub(super) replays: u64,
}

/// What the settings give with no ceiling and no limit.
#[derive(Debug)]
pub(super) struct Free {
    report: ReplayReport,
    /// Misses under any ceiling and limit.
    firsts: u64,
    /// Misses beside these.
    pub(super) avoidable: u64,
}

impl Free {
    pub(super) fn peak_pinned_bytes(&self) -> u64 {
        self.report.peak_pinned_bytes
    }
}

/// Replays of one workload under one set of settings.
pub(super) struct Search<'a> {
    pub(super) workload: &'a Workload,
    pub(super) settings: &'a Replay,
    /// Misses and waits that the target allows.
    pub(super) allowed: u64,
    /// Counts replays.
    pub(super) progress: &'a ProgressBar,
}

impl Search<'_> {
    fn under(&self, max_bytes: Option<u64>, limit: u64) -> Replay {
        self.progress.inc(1);
        Replay { max_bytes, pool_size_limit: Some(limit), ..self.settings.clone() }
    }

    /// Plays with no ceiling and no limit.
    pub(super) fn free(&self) -> Result<Free, TraceError> {
        let report = self.under(None, NO_LIMIT).play(self.workload)?;
        // Memory that lay idle between may be there again for another class.
        let firsts = firsts(self.workload, rounding(self.settings)).min(misses(&report));
        Ok(Free { firsts, avoidable: avoidable(&report, firsts), report })
    }

    /// Under a lower ceiling no allocator could serve all gets at once, or the reserve does not fit.
    fn least_bytes(&self) -> u64 {
        self.workload.peak_requested_bytes().max(self.settings.others.reserve_bytes.unwrap_or(0))
    }

    /// Whether a ceiling of less than `bytes` meets the target.
    pub(super) fn is_met_below(&self, free: &Free, bytes: u64) -> Result<bool, TraceError> {
        if bytes > free.report.peak_pinned_bytes {
            return Ok(true);
        }
        let below_bytes = bytes.saturating_sub(PAGE_BYTES);
        if below_bytes < self.least_bytes() {
            return Ok(false);
        }
        let below = self.under(Some(below_bytes), NO_LIMIT);
        Ok(below.play_up_to(self.workload, self.allowed, free.firsts)?.is_some())
    }

    /// The smallest ceiling and limit that meet the target; where nothing does, that do as well as none.
    pub(super) fn smallest(&self, free: &Free) -> Result<Advice, TraceError> {
        let (firsts, peak_bytes) = (free.firsts, free.report.peak_pinned_bytes);
        let mut enough = self.allowed.max(free.avoidable);
        let meets = |max_bytes: u64, limit: u64, enough: u64| {
            self.under(Some(max_bytes), limit).play_up_to(self.workload, enough, firsts)
        };
        let whole = |bytes: u64| bytes.max(1).div_ceil(PAGE_BYTES) * PAGE_BYTES;
        let step = whole(peak_bytes / STEPS);
        let least_bytes = self.least_bytes();
        let (mut low, mut high) = (whole(least_bytes), whole(least_bytes));
        if meets(high, NO_LIMIT, enough)?.is_none() {
            high = high.saturating_add(step).max(whole(peak_bytes));
            // The ceiling that a pool without one reaches may be too low for one that has it: granules are smaller then.
            while meets(high, NO_LIMIT, enough)?.is_none() {
                if high > peak_bytes.max(least_bytes).saturating_mul(CEILING_TIMES_MAX) {
                    // No ceiling does as well as none: the smallest is searched that does as well as this one.
                    enough = avoidable(&self.under(Some(high), NO_LIMIT).play(self.workload)?, firsts);
                    break;
                }
                low = high;
                high = whole(high.saturating_add(high / 8));
            }
        }
        while high.saturating_sub(low) > step {
            let middle = whole(low.midpoint(high));
            if meets(middle, NO_LIMIT, enough)?.is_some() { high = middle } else { low = middle }
        }

        let (mut few, mut many) = (0, 1);
        let mut met = meets(high, many, enough)?;
        while met.is_none() && many < NO_LIMIT {
            (few, many) = (many, many * 2);
            met = meets(high, many, enough)?;
        }
        while many - few > 1 {
            let middle = few.midpoint(many);
            match meets(high, middle, enough)? {
                Some(report) => (many, met) = (middle, Some(report)),
                None => few = middle,
            }
        }
        // Threads of another run get and put in another order, so that now and then a buffer more is idle at once than in the
        // recorded one. Keeping it takes no more memory than the ceiling allows.
        if met.is_some()
            && let Some(report) = meets(high, many + 1, enough)?
        {
            (many, met) = (many + 1, Some(report));
        }
        let report = match met {
            Some(report) => report,
            None => self.under(Some(high), many).play(self.workload)?,
        };
        let avoidable = avoidable(&report, firsts);
        Ok(Advice {
            meets_target: avoidable <= self.allowed,
            gets: self.workload.gets(),
            allowed: self.allowed,
            firsts,
            avoidable,
            avoidable_without_limits: free.avoidable,
            misses: misses(&report),
            waits: report.waits,
            fallbacks: report.fallbacks,
            max_bytes: high,
            pool_size_limit: many,
            peak_requested_bytes: self.workload.peak_requested_bytes(),
            peak_pinned_bytes: report.peak_pinned_bytes,
            replays: self.progress.position(),
        })
    }
}

/// Misses that come from settings, and gets that the ceiling kept waiting.
fn avoidable(report: &ReplayReport, firsts: u64) -> u64 {
    misses(report).saturating_sub(firsts) + report.waits + report.fallbacks
}

fn misses(report: &ReplayReport) -> u64 {
    report.gets.saturating_sub(report.front_hits)
}

/// How a pool under `settings` rounds.
fn rounding(settings: &Replay) -> Rounding {
    settings.rounding.unwrap_or(match settings.preset {
        Some(Preset::Tensorflow) => Rounding::Pow2,
        _ => Rounding::Eighths,
    })
}

/// Gets for more buffers of a class at once than before: misses also where every buffer is kept.
fn firsts(workload: &Workload, rounding: Rounding) -> u64 {
    let class = |bytes: usize| rounding.class_bytes(bytes, ALIGN).unwrap_or(bytes);
    let mut held = HashMap::new();
    // Buffers of each class: held now, and at most so far.
    let mut counts: HashMap<usize, (u64, u64)> = HashMap::new();
    let mut firsts = 0;
    let mut get = |counts: &mut HashMap<usize, (u64, u64)>, class: usize| {
        let (now, most) = counts.entry(class).or_default();
        *now += 1;
        firsts += u64::from(*now > *most);
        *most = (*most).max(*now);
    };
    let put = |counts: &mut HashMap<usize, (u64, u64)>, class: usize| {
        if let Some((now, _)) = counts.get_mut(&class) {
            *now = now.saturating_sub(1);
        }
    };
    for (_, operation) in workload.lines() {
        match *operation {
            TraceOp::Get { bytes: 0, .. } | TraceOp::Pool { .. } | TraceOp::Advance { .. } => {}
            TraceOp::Get { id, bytes, .. } => {
                held.insert(id, class(bytes));
                get(&mut counts, class(bytes));
            }
            TraceOp::Put { id } => held.remove(&id).into_iter().for_each(|class| put(&mut counts, class)),
            TraceOp::Steps { count, bytes, step } => {
                // All gets of one size but the first are the same.
                let count = if step == 0 { count.min(1) } else { count.min(STEPS_MAX) };
                let sizes = (0..count).scan(bytes, |bytes, _| {
                    let now = *bytes;
                    *bytes = bytes.saturating_add(step);
                    Some(now)
                });
                for class in sizes.filter(|&bytes| bytes > 0).map(class) {
                    get(&mut counts, class);
                    put(&mut counts, class);
                }
            }
            TraceOp::Clear => counts.values_mut().for_each(|(now, most)| *most = *now),
        }
    }
    firsts
}
