//! Idle granules, which are committed and wholly free, and the times since which they have been idle. Granules that became idle
//! together are one run.
//!
//! A run is added when the last byte of its granules is freed, and removed when a buffer, a remap or a decommit takes it. Each
//! run that is split or removed was added by one free, so a carve or a free takes O(log n) amortized time, however many granules
//! a buffer spans. At fixed intervals a share of the due granules is decommitted, which resembles the decay of jemalloc's dirty
//! pages.
//!
//! This module reads no clock: callers pass times in microseconds.
//!
//! - **retain-I1**: `runs` and `by_age` contain the same runs, and runs do not overlap.
//! - **retain-I2**: `bytes` is the sum of the lengths of the runs.

use std::collections::{BTreeMap, BTreeSet};

use super::extent::{Extent, Grid, first_bytes};
use super::granules::GranuleSizes;

#[derive(Clone, Default, Debug)]
pub(super) struct IdleGranules {
    /// Start of a run -> its end, and the time since which it has been idle.
    runs: BTreeMap<u64, (u64, u64)>,
    by_age: BTreeSet<(u64, u64)>,
    bytes: u64,
}

/// A run of idle granules and the time since which it counts as idle.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct IdleRun {
    pub(super) extent: Extent,
    pub(super) since_us: u64,
}

impl IdleGranules {
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn add(&mut self, run: IdleRun) {
        self.bytes += run.extent.bytes();
        self.runs.insert(run.extent.start, (run.extent.end, run.since_us));
        self.by_age.insert((run.since_us, run.extent.start));
    }

    /// Removes all idle granules within `extent` and passes each removed run to `taken`, by address.
    pub(super) fn cut(&mut self, extent: Extent, mut taken: impl FnMut(IdleRun)) {
        let first = self.runs.range(..=extent.start).next_back().map_or(extent.start, |(&start, _)| start);
        while let Some((&start, &(end, since_us))) =
            self.runs.range(first..extent.end).find(|&(_, &(end, _))| end > extent.start)
        {
            let whole = Extent { start, end };
            self.runs.remove(&start);
            self.by_age.remove(&(since_us, start));
            self.bytes -= whole.bytes();
            for rest in whole.without(extent).into_iter().flatten() {
                self.add(IdleRun { extent: rest, since_us });
            }
            if let Some(part) = Extent::between(start.max(extent.start), end.min(extent.end)) {
                taken(IdleRun { extent: part, since_us });
            }
        }
    }

    /// Returns the idle runs within `extent`, by address.
    pub(super) fn within(&self, extent: Extent) -> impl Iterator<Item = IdleRun> + '_ {
        let first = self.runs.range(..=extent.start).next_back().map_or(extent.start, |(&start, _)| start);
        self.runs.range(first..extent.end).filter_map(move |(&start, &(end, since_us))| {
            Extent::between(start.max(extent.start), end.min(extent.end)).map(|extent| IdleRun { extent, since_us })
        })
    }

    /// Returns the bytes of the idle granules within `extent`. Needs no search if all idle granules are within `extent`.
    pub(super) fn bytes_within(&self, extent: Extent) -> u64 {
        let starts_before = self.runs.first_key_value().is_some_and(|(&start, _)| start < extent.start);
        let ends_behind = self.runs.last_key_value().is_some_and(|(_, &(end, _))| end > extent.end);
        if starts_before || ends_behind {
            return self.within(extent).map(|run| run.extent.bytes()).sum();
        }
        self.bytes
    }

    /// Returns all runs, the longest idle first, and the lowest address first among equals.
    pub(super) fn longest_idle(&self) -> impl Iterator<Item = IdleRun> + '_ {
        self.by_age.iter().filter_map(|&(since_us, start)| {
            self.runs.get(&start).map(|&(end, _)| IdleRun { extent: Extent { start, end }, since_us })
        })
    }

    /// Recounts retain-I1 and retain-I2.
    #[cfg(test)]
    pub(super) fn validate(&self) -> Result<(), String> {
        let ages: BTreeSet<_> = self.runs.iter().map(|(&start, &(_, since_us))| (since_us, start)).collect();
        if ages != self.by_age {
            return Err("retain-I1: the runs and their ages differ".into());
        }
        let mut last_end = 0;
        let mut sum = 0;
        for (&start, &(end, _)) in &self.runs {
            if start < last_end || end <= start {
                return Err(format!("retain-I1: run {start}..{end} overlaps or is empty"));
            }
            last_end = end;
            sum += end - start;
        }
        if sum != self.bytes {
            return Err(format!("retain-I2: {} bytes counted, the sum is {sum}", self.bytes));
        }
        Ok(())
    }
}

/// When idle granules are decommitted, and how many (policy-R9).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Retention {
    /// How long a granule must be idle before it is due; `None`: it is never due.
    pub(crate) idle_timeout_us: Option<u64>,
    /// Shortest time between two plans of due decommits.
    pub(crate) step_us: u64,
    /// Each plan decommits 1/`share` of the due bytes or regions, but at least one granule or region.
    pub(crate) share: u64,
}

impl Default for Retention {
    /// Returns the retention that decommits, each second, a fifth of the granules that have been idle for 60 s.
    fn default() -> Self {
        Self { idle_timeout_us: Some(60_000_000), step_us: 1_000_000, share: 5 }
    }
}

impl Retention {
    /// Returns the retention for granules that have been idle for `idle_timeout_us`: a fifth is decommitted each second, as by
    /// default, or everything in one step if the timeout is below 10 s, which is less than these steps would take.
    pub(crate) fn after(idle_timeout_us: Option<u64>) -> Self {
        const BRIEF_US: u64 = 10_000_000;
        let default = Self::default();
        match idle_timeout_us {
            Some(us) if us < BRIEF_US => Self { idle_timeout_us, step_us: default.step_us.min(us), share: 1 },
            _ => Self { idle_timeout_us, ..default },
        }
    }

    /// Returns the due runs, the longest idle first.
    pub(super) fn due(self, idle: &IdleGranules, now_us: u64) -> impl Iterator<Item = IdleRun> + '_ {
        let is_due = move |run: &IdleRun| {
            self.idle_timeout_us.is_some_and(|idle_timeout_us| run.since_us.saturating_add(idle_timeout_us) <= now_us)
        };
        idle.longest_idle().take_while(is_due)
    }

    /// Selects the granules to decommit at `now_us`: the share of the due bytes, in granules of `sizes`. If `sizes` is `None`,
    /// each run is a region, which is decommitted as a whole and counts as 1.
    pub(super) fn select(&self, idle: &IdleGranules, sizes: Option<GranuleSizes>, now_us: u64) -> Vec<Extent> {
        let weight = |extent: Extent| if sizes.is_some() { extent.bytes() } else { 1 };
        let share = self.due(idle, now_us).map(|run| weight(run.extent)).sum::<u64>().div_ceil(self.share.max(1));
        let longest_idle = idle.longest_idle().map(|run| run.extent);
        match sizes {
            Some(sizes) => {
                let up = |extent: Extent, end| Grid::around(extent, sizes).up(end).min(extent.end);
                first_bytes(longest_idle, share, up)
            }
            None => longest_idle.zip(0..share).map(|(region, _)| region).collect(),
        }
    }
}
