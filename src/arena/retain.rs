//! IdleGranules granules: locked, wholly free, and since when. Runs that fell idle together stay together.
//!
//! A run enters when the last byte of its granules comes back and leaves when a buffer, a move or a release takes it;
//! each run that is split or removed was paid for by the return that made it, so a carve or a return stays O(log n)
//! amortised however many granules a buffer covers.
//!
//! Invariants
//! - I1: `runs` and `by_age` hold the same runs; runs do not overlap.
//! - I2: `bytes` is the sum of their lengths.
//!
//! The room reads no clock: times are numbers of microseconds that its callers hand in.

use std::collections::{BTreeMap, BTreeSet};

use super::extent::Extent;

#[derive(Clone, Default, Debug)]
pub(super) struct IdleGranules {
    /// Start of a run -> its end and since when it is idle.
    runs: BTreeMap<u64, (u64, u64)>,
    by_age: BTreeSet<(u64, u64)>,
    bytes: u64,
}

/// A run of idle granules and the time its last byte was freed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct IdleRun {
    pub(super) extent: Extent,
    pub(super) since_us: u64,
}

impl IdleGranules {
    /// IdleGranules bytes in all.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn add(&mut self, run: IdleRun) {
        self.bytes += run.extent.bytes();
        self.runs.insert(run.extent.start, (run.extent.end, run.since_us));
        self.by_age.insert((run.since_us, run.extent.start));
    }

    /// Takes out whatever is idle within `extent` and shows each run of it to `taken`, by address.
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

    /// The idle runs within `extent`, by address.
    pub(super) fn within(&self, extent: Extent) -> impl Iterator<Item = IdleRun> + '_ {
        let first = self.runs.range(..=extent.start).next_back().map_or(extent.start, |(&start, _)| start);
        self.runs.range(first..extent.end).filter_map(move |(&start, &(end, since_us))| {
            Extent::between(start.max(extent.start), end.min(extent.end)).map(|extent| IdleRun { extent, since_us })
        })
    }

    /// All runs, longest empty first, the lowest address of equals first.
    pub(super) fn oldest_first(&self) -> impl Iterator<Item = IdleRun> + '_ {
        self.by_age.iter().filter_map(|&(since_us, start)| {
            self.runs.get(&start).map(|&(end, _)| IdleRun { extent: Extent { start, end }, since_us })
        })
    }

    /// Recounts I1 and I2.
    pub(super) fn validate(&self) -> Result<(), String> {
        let ages: BTreeSet<_> = self.runs.iter().map(|(&start, &(_, since_us))| (since_us, start)).collect();
        if ages != self.by_age {
            return Err("idle I1: the runs and their ages differ".into());
        }
        let mut last_end = 0;
        let mut sum = 0;
        for (&start, &(end, _)) in &self.runs {
            if start < last_end || end <= start {
                return Err(format!("idle I1: run {start}..{end} overlaps or is empty"));
            }
            last_end = end;
            sum += end - start;
        }
        if sum != self.bytes {
            return Err(format!("idle I2: {} bytes counted, {sum} there", self.bytes));
        }
        Ok(())
    }
}

/// Rule 9: when granules go, and how many.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Retention {
    /// How long a granule stays empty before it is due; `None` keeps it for ever.
    pub idle_timeout_us: Option<u64>,
    /// Time between two releases.
    pub step_us: u64,
    /// One in so many of those due goes at a step (at least one).
    pub share: u64,
}

impl Default for Retention {
    /// 45 s, and each second a fifth.
    fn default() -> Self {
        Self { idle_timeout_us: Some(45_000_000), step_us: 1_000_000, share: 5 }
    }
}

impl Retention {
    /// The idle runs whose time has come, longest empty first.
    pub(super) fn due(self, idle: &IdleGranules, now_us: u64) -> impl Iterator<Item = IdleRun> + '_ {
        let is_due = move |run: &IdleRun| {
            self.idle_timeout_us.is_some_and(|idle_timeout_us| run.since_us.saturating_add(idle_timeout_us) <= now_us)
        };
        idle.oldest_first().take_while(is_due)
    }

    /// The idle granules that go at `now_us`, of `granule_bytes` each (`None`: a run is one region, gone as a whole).
    pub(super) fn going(&self, idle: &IdleGranules, granule_bytes: Option<u64>, now_us: u64) -> Vec<Extent> {
        let granules = |extent: Extent| granule_bytes.map_or(1, |granule_bytes| extent.bytes() / granule_bytes);
        let due_granules: u64 = self.due(idle, now_us).map(|run| granules(run.extent)).sum();
        let mut to_go = due_granules.div_ceil(self.share.max(1));
        let mut going = Vec::new();
        for run in idle.oldest_first() {
            if to_go == 0 {
                break;
            }
            let count = granules(run.extent).min(to_go);
            to_go -= count;
            let bytes = granule_bytes.map_or(run.extent.bytes(), |granule_bytes| count * granule_bytes);
            going.extend(Extent::between(run.extent.start, run.extent.start + bytes));
        }
        going
    }
}
