//! The search: first the smallest ceiling without a limit on idle buffers that is ever reached, then the smallest limit under
//! that ceiling.
//!
//! Bisects. What meets the target is not always more under a higher ceiling, so the result is one that was played, and not
//! proven to be the least.

use std::collections::HashMap;

use pinpool::trace::{Replay, ReplayReport, TraceError, TraceOp, Workload};
use pinpool::{Preset, Rounding};
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
    /// Misses beside these, waits, and gets not served in time, under the advice.
    pub(super) avoidable: u64,
    /// The same with no ceiling and no limit.
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

struct Search<'a> {
    workload: &'a Workload,
    settings: &'a Replay,
    firsts: u64,
    replays: u64,
}

impl Search<'_> {
    fn play(&mut self, max_bytes: Option<u64>, limit: u64) -> Result<ReplayReport, TraceError> {
        self.replays += 1;
        let settings = self.settings.clone();
        Replay { max_bytes, pool_size_limit: Some(limit), ..settings }.play(self.workload)
    }

    /// Misses that come from settings, and gets that the ceiling kept waiting.
    fn avoidable(&self, report: &ReplayReport) -> u64 {
        misses(report).saturating_sub(self.firsts) + report.waits + report.fallbacks
    }
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
    // Of each class: held now, and at most so far.
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
                // Of one size all but the first are the same.
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

pub(super) fn search(workload: &Workload, settings: &Replay, target: f64) -> Result<Advice, TraceError> {
    let mut search = Search { workload, settings, firsts: 0, replays: 0 };
    let free = search.play(None, NO_LIMIT)?;
    // Memory that lay idle between may be there again for another class.
    search.firsts = firsts(workload, rounding(settings)).min(misses(&free));
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // A part of a count.
    let allowed = (workload.gets() as f64 * target) as u64;
    let least = search.avoidable(&free);
    let mut enough = allowed.max(least);

    let whole = |bytes: u64| bytes.max(1).div_ceil(PAGE_BYTES) * PAGE_BYTES;
    let step = whole(free.peak_pinned_bytes / STEPS);
    let (mut low, mut high) =
        (whole(workload.peak_requested_bytes()).saturating_sub(step), whole(free.peak_pinned_bytes));
    // The ceiling that a pool without one reaches may be too low for one that has it: granules are smaller then.
    loop {
        let avoidable = search.play(Some(high), NO_LIMIT).map(|report| search.avoidable(&report))?;
        if avoidable <= enough {
            break;
        }
        if high > free.peak_pinned_bytes.saturating_mul(CEILING_TIMES_MAX) {
            // No ceiling does as well as none: the smallest is searched that does as well as this one.
            enough = avoidable;
            break;
        }
        low = high;
        high = whole(high.saturating_add(high / 8));
    }
    while high.saturating_sub(low) > step {
        let middle = whole(low.midpoint(high));
        let report = search.play(Some(middle), NO_LIMIT)?;
        if search.avoidable(&report) <= enough { high = middle } else { low = middle }
    }

    let (mut few, mut many) = (0, 1);
    let mut report = search.play(Some(high), many)?;
    while search.avoidable(&report) > enough && many < NO_LIMIT {
        (few, many) = (many, many * 2);
        report = search.play(Some(high), many)?;
    }
    while many - few > 1 {
        let middle = few.midpoint(many);
        let tried = search.play(Some(high), middle)?;
        if search.avoidable(&tried) <= enough { (many, report) = (middle, tried) } else { few = middle }
    }
    let avoidable = search.avoidable(&report);
    Ok(Advice {
        meets_target: avoidable <= allowed,
        gets: workload.gets(),
        allowed,
        firsts: search.firsts,
        avoidable,
        avoidable_without_limits: least,
        misses: misses(&report),
        waits: report.waits,
        fallbacks: report.fallbacks,
        max_bytes: high,
        pool_size_limit: many,
        peak_requested_bytes: workload.peak_requested_bytes(),
        peak_pinned_bytes: report.peak_pinned_bytes,
        replays: search.replays,
    })
}
