//! The arena against a naive model: plain arrays of the pages and granules of a few small ranges, and each rule as a
//! search over all of them.

use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner};

use crate::arena::*;

/// The unit of every size here: large, so that discrete regions are short arrays.
const PAGE: u64 = 128 << 10;
/// Pages in a granule of the virtual range.
const GRANULE_PAGES: usize = 8;
const GRANULE: u64 = GRANULE_PAGES as u64 * PAGE;
const SPAN_GRANULES: usize = 48;
const RESERVE_PAGES: usize = 20;
const RETAIN: Retention = Retention { idle_timeout_us: Some(40), step_us: 5, share: 5 };

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Page {
    Uncommitted,
    Free,
    Live,
    Transit,
}

#[derive(Clone, Debug)]
struct RangeModel {
    kind: RangeKind,
    set: HoleSet,
    granule_pages: usize,
    pages: Vec<Page>,
    /// Since when each granule has been idle.
    idle_since: Vec<Option<u64>>,
}

impl RangeModel {
    fn new(kind: RangeKind, set: HoleSet, granule_pages: usize, pages: usize, page: Page) -> Self {
        let idle_since = vec![None; pages / granule_pages];
        Self { kind, set, granule_pages, pages: vec![page; pages], idle_since }
    }

    fn granule(&self, granule: usize) -> &[Page] {
        &self.pages[granule * self.granule_pages..(granule + 1) * self.granule_pages]
    }

    fn restamp(&mut self, now_us: u64) {
        for granule in 0..self.idle_since.len() {
            let idle = self.kind != RangeKind::Reserve && self.granule(granule).iter().all(|&page| page == Page::Free);
            let since = self.idle_since[granule].unwrap_or(now_us);
            self.idle_since[granule] = idle.then_some(since);
        }
    }

    /// The maximal run of pages around `at` that `wanted` accepts.
    fn run_around(&self, at: usize, wanted: impl Fn(Page) -> bool) -> std::ops::Range<usize> {
        let start = self.pages[..at].iter().rposition(|&page| !wanted(page)).map_or(0, |last| last + 1);
        let end = self.pages[at..].iter().position(|&page| !wanted(page)).map_or(self.pages.len(), |first| at + first);
        start..end
    }
}

#[derive(Debug)]
struct Outstanding {
    plan: Plan,
    buffer: Option<(u32, usize, usize)>,
    /// States of the buffer's pages before.
    before: Vec<Page>,
    /// Ages of the idle granules that the plan took.
    idle_before: Vec<(u32, usize, u64)>,
}

/// Preference and age of a discrete region; missing granules, length of the run, range, page.
type Rank = (u8, u32, usize, usize, u32, usize);

#[derive(Clone, Debug)]
struct Choice {
    range: u32,
    page: usize,
    missing: usize,
}

#[derive(Clone, Debug)]
enum Op {
    Place { pages: usize, align_log: u32, limit: Option<usize>, may_release: bool },
    Free(usize),
    Settle { which: usize, failed_at: Option<usize>, lost: bool },
    Advance(u64),
    ReleaseDue,
    ReleaseDownTo(usize),
}

struct World {
    arena: Arena,
    ranges: BTreeMap<u32, RangeModel>,
    live: Vec<(u32, usize, usize)>,
    outstanding: Vec<Outstanding>,
    now_us: u64,
    next_release_us: u64,
}

macro_rules! check {
    ($condition:expr, $($message:tt)+) => {
        if !$condition { return Err(TestCaseError::fail(format!($($message)+))); }
    };
}

impl World {
    fn new(growth: GrowthMode) -> Self {
        let mut arena = Arena::new(growth, RETAIN);
        let mut ranges = BTreeMap::new();
        if matches!(growth, GrowthMode::Granules(_)) {
            let id = arena.add_virtual_range(SPAN_GRANULES as u64 * GRANULE).unwrap();
            let pages = SPAN_GRANULES * GRANULE_PAGES;
            ranges.insert(
                id,
                RangeModel::new(RangeKind::Virtual, HoleSet::Shared, GRANULE_PAGES, pages, Page::Uncommitted),
            );
        }
        let id = arena.add_reserve(RESERVE_PAGES as u64 * PAGE).unwrap();
        let reserve = RangeModel::new(RangeKind::Reserve, HoleSet::Shared, RESERVE_PAGES, RESERVE_PAGES, Page::Free);
        ranges.insert(id, reserve);
        Self { arena, ranges, live: Vec::new(), outstanding: Vec::new(), now_us: 0, next_release_us: 0 }
    }

    fn has_regions(&self) -> bool {
        self.arena.growth == GrowthMode::Regions
    }

    fn sets(&self, pages: usize) -> [HoleSet; 2] {
        [self.arena.own_set(pages as u64 * PAGE), HoleSet::Shared]
    }

    /// Applies policy-R5 by trying every page of every range: the fewest missing granules, then the tightest run of free pages
    /// (only committed ones if none is missing), then the lowest address. For discrete regions policy-R11 comes first: the
    /// reserve, a run that is exactly as long, the oldest region in use, the tightest empty one.
    fn best(&self, pages: usize, align_pages: usize) -> Option<Choice> {
        let sets = self.sets(pages);
        let mut best: Option<(Rank, Choice)> = None;
        for (&range, model) in self.ranges.iter().filter(|(_, model)| sets.contains(&model.set)) {
            let free = |page| matches!(page, Page::Free | Page::Uncommitted);
            let mut gap = 0..0;
            for page in (0..model.pages.len()).step_by(align_pages).filter(|&page| free(model.pages[page])) {
                if !gap.contains(&page) {
                    gap = model.run_around(page, free);
                }
                if page + pages > gap.end {
                    continue;
                }
                let granules = page / model.granule_pages..(page + pages).div_ceil(model.granule_pages);
                let missing = granules.filter(|&granule| model.granule(granule)[0] == Page::Uncommitted).count();
                let run = if missing == 0 { model.run_around(page, |page| page == Page::Free) } else { gap.clone() };
                let (preference, age) = match model.kind {
                    RangeKind::Discrete if run.len() == pages => (1, 0),
                    RangeKind::Discrete if run.len() < model.pages.len() => (2, range),
                    RangeKind::Discrete => (3, 0),
                    RangeKind::Virtual | RangeKind::Reserve => (0, 0),
                };
                let rank = (preference, age, missing, run.len(), range, page);
                if best.as_ref().is_none_or(|(best, _)| rank < *best) {
                    best = Some((rank, Choice { range, page, missing }));
                }
            }
        }
        best.map(|(_, choice)| choice)
    }

    fn count(&self, wanted: Page) -> u64 {
        let pages = self.ranges.values().flat_map(|model| &model.pages);
        pages.filter(|&&page| page == wanted).count() as u64 * PAGE
    }

    /// Idle granules as (since, range, granule), the longest idle first.
    fn idle(&self) -> Vec<(u64, u32, usize)> {
        let mut idle: Vec<_> = self
            .ranges
            .iter()
            .flat_map(|(&range, model)| {
                let ages = model.idle_since.iter().enumerate();
                ages.filter_map(move |(granule, since)| since.map(|since| (since, range, granule)))
            })
            .collect();
        idle.sort_unstable();
        idle
    }

    fn set(&mut self, extent: Extent, page: Page) {
        let first = (extent.offset() / PAGE) as usize;
        let count = (extent.bytes() / PAGE) as usize;
        self.ranges.get_mut(&extent.range()).unwrap().pages[first..first + count].fill(page);
    }

    fn pages_of(&self, extent: Extent) -> &[Page] {
        let first = (extent.offset() / PAGE) as usize;
        &self.ranges[&extent.range()].pages[first..first + (extent.bytes() / PAGE) as usize]
    }

    fn granules_of(&self, extent: Extent) -> Vec<(u32, usize)> {
        let granule_pages = self.ranges[&extent.range()].granule_pages as u64;
        let granule = |at: u64| (at / PAGE / granule_pages) as usize;
        (granule(extent.offset())..granule(extent.offset() + extent.bytes()))
            .map(|granule| (extent.range(), granule))
            .collect()
    }

    /// The granules of `extent`, all idle, with their ages.
    fn aged(&self, extent: Extent) -> Result<Vec<(u64, u32, usize)>, TestCaseError> {
        let granules = self.granules_of(extent);
        let age = |&(range, granule): &(u32, usize)| Some((self.ranges[&range].idle_since[granule]?, range, granule));
        let aged: Vec<_> = granules.iter().filter_map(age).collect();
        check!(aged.len() == granules.len(), "{extent:?} is not idle");
        Ok(aged)
    }

    /// The granules that were idle before the current operation and are not now, with their ages.
    fn taken(&self) -> Vec<(u32, usize, u64)> {
        let idle = self.idle().into_iter();
        let is_taken =
            |range: u32, granule: usize| self.ranges[&range].granule(granule).iter().any(|&page| page != Page::Free);
        let taken = idle.filter(|&(_, range, granule)| is_taken(range, granule));
        taken.map(|(since_us, range, granule)| (range, granule, since_us)).collect()
    }

    fn place(
        &mut self,
        pages: usize,
        align_log: u32,
        limit: Option<usize>,
        release: bool,
    ) -> Result<(), TestCaseError> {
        let (bytes, align) = (pages as u64 * PAGE, PAGE << align_log);
        let choice = self.best(pages, 1 << align_log);
        let missing_bytes = choice.as_ref().map(|choice| choice.missing as u64 * GRANULE);
        let missing_bytes = if self.has_regions() { missing_bytes.or(Some(bytes)) } else { missing_bytes };
        check!(
            self.arena.missing_bytes(bytes, align) == missing_bytes,
            "missing {:?}, expected {missing_bytes:?}",
            self.arena.missing_bytes(bytes, align)
        );
        let carved = self.arena.carve(bytes, align);
        if let Some(Choice { range, page, missing: 0 }) = choice {
            let expected = ArenaPtr::new(range, page as u64 * PAGE);
            check!(carved == Some(expected), "carved {carved:?}, expected {expected:?}");
            self.set(Extent::new(expected, bytes), Page::Live);
            self.live.push((range, page, pages));
            return Ok(());
        }
        check!(carved.is_none(), "carved {carved:?} although granules are missing");
        let limits = GrowthLimits {
            commit_bytes: limit.map_or(u64::MAX, |granules| granules as u64 * GRANULE),
            may_decommit_regions: release,
            step_bytes: u64::MAX,
        };
        let stats = self.arena.stats();
        let plan = match self.arena.grow(bytes, align, limits) {
            Ok(plan) => plan,
            Err(_) => {
                check!(self.arena.stats() == stats, "a refusal changed the stats");
                return self.refused(choice, pages, limits);
            }
        };
        let claimed = self.arena.stats().claimed_bytes - stats.claimed_bytes;
        check!(claimed <= limits.commit_bytes, "claimed {claimed}, limits {limits:?}");
        let ptr = plan.ptr().unwrap();
        if self.has_regions() {
            self.check_region(&plan, pages, limits)?;
        } else {
            let choice = choice.unwrap();
            let expected = ArenaPtr::new(choice.range, choice.page as u64 * PAGE);
            check!(ptr == expected, "grown at {ptr:?}, expected {expected:?}");
            self.check_granules(&plan, &choice, pages, limits)?;
        }
        // From now on the buffer owns its bytes and the granules are in transit.
        let (range, first) = (ptr.range(), (ptr.offset() / PAGE) as usize);
        let model = &self.ranges[&range];
        let before = model.pages[first..first + pages].to_vec();
        for &step in plan.steps() {
            match step {
                Step::Commit { extent } => self.set(extent, Page::Transit),
                Step::Remap { from, to } => [from, to].into_iter().for_each(|extent| self.set(extent, Page::Transit)),
                Step::Decommit { extent } => self.set(extent, Page::Transit),
            }
        }
        self.set(Extent::new(ptr, bytes), Page::Live);
        let buffer = Some((range, first, pages));
        let idle_before = self.taken();
        self.outstanding.push(Outstanding { plan, buffer, before, idle_before });
        Ok(())
    }

    fn idle_outside(&self, buffer: Option<(u32, usize, usize)>) -> Vec<(u64, u32, usize)> {
        let mut idle = self.idle();
        if let Some((in_range, first, pages)) = buffer {
            idle.retain(|&(_, range, granule)| {
                range != in_range || (granule + 1) * GRANULE_PAGES <= first || granule * GRANULE_PAGES >= first + pages
            });
        }
        idle
    }

    fn refused(&self, choice: Option<Choice>, pages: usize, limits: GrowthLimits) -> Result<(), TestCaseError> {
        if self.has_regions() {
            let idle = if limits.may_decommit_regions { self.idle() } else { Vec::new() };
            let idle: u64 = idle.iter().map(|(_, range, _)| self.ranges[range].pages.len() as u64 * PAGE).sum();
            let enough = limits.commit_bytes.saturating_add(idle) >= pages as u64 * PAGE;
            check!(!enough, "refused {pages} pages with {limits:?} and {idle} idle bytes");
        } else if let Some(choice) = choice {
            let idle = self.idle_outside(Some((choice.range, choice.page, pages))).len() as u64 * GRANULE;
            let missing = choice.missing as u64 * GRANULE;
            check!(missing > limits.commit_bytes + idle, "refused {missing} missing with {limits:?} and {idle} idle");
        }
        Ok(())
    }

    /// The plan obtains exactly the missing granules: it remaps the longest idle ones (policy-R7, policy-R8) and commits
    /// the others, one step per run.
    fn check_granules(
        &self,
        plan: &Plan,
        choice: &Choice,
        pages: usize,
        limits: GrowthLimits,
    ) -> Result<(), TestCaseError> {
        let mut targets = Vec::new();
        let mut sources = Vec::new();
        for step in plan.steps() {
            match *step {
                Step::Commit { extent } => targets.extend(self.granules_of(extent)),
                Step::Remap { from, to } => {
                    check!(from.bytes() == to.bytes(), "{step:?} is uneven");
                    targets.extend(self.granules_of(to));
                    sources.extend(self.aged(from)?);
                }
                Step::Decommit { .. } => check!(false, "a decommit in {plan:?}"),
            }
        }
        let model = &self.ranges[&choice.range];
        let expected: Vec<_> = (choice.page / GRANULE_PAGES..(choice.page + pages).div_ceil(GRANULE_PAGES))
            .filter(|&granule| model.granule(granule)[0] == Page::Uncommitted)
            .map(|granule| (choice.range, granule))
            .collect();
        targets.sort_unstable();
        check!(targets == expected, "targets {targets:?}, expected {expected:?}");

        let idle = self.idle_outside(Some((choice.range, choice.page, pages)));
        let spare = self.count(Page::Free).saturating_sub(self.count(Page::Live) / 10) / GRANULE;
        let over_limit = (choice.missing as u64).saturating_sub(limits.commit_bytes / GRANULE);
        let remapped = (choice.missing as u64).min(spare.max(over_limit)).min(idle.len() as u64);
        let expected: Vec<_> = (0..remapped).zip(&idle).map(|(_, &source)| source).collect();
        sources.sort_unstable();
        check!(sources == expected, "remaps {sources:?} of {idle:?}, expected {remapped}");
        let commits =
            plan.steps().iter().map(|step| if let Step::Commit { extent } = step { extent.bytes() } else { 0 });
        check!(commits.sum::<u64>() <= limits.commit_bytes, "{plan:?} passes {limits:?}");
        Ok(())
    }

    fn check_region(&mut self, plan: &Plan, pages: usize, limits: GrowthLimits) -> Result<(), TestCaseError> {
        let bytes = pages as u64 * PAGE;
        let own = self.sets(pages)[0];
        let Some((Step::Commit { extent }, releases)) = plan.steps().split_last() else {
            return Err(TestCaseError::fail("the last step commits no region"));
        };
        let (mut too_small, mut others, mut released, mut replaced) = (Vec::new(), 0, 0, 0);
        for step in releases {
            let Step::Decommit { extent } = *step else {
                return Err(TestCaseError::fail(format!("{step:?} before a region")));
            };
            let model = &self.ranges[&extent.range()];
            check!(model.idle_since[0].is_some(), "{step:?} of {model:?}");
            check!(model.pages.len() as u64 * PAGE == extent.bytes(), "{step:?} is not a whole region");
            released += extent.bytes();
            if model.set == own && extent.bytes() < bytes {
                replaced += extent.bytes();
                too_small.push(extent.range());
            } else {
                others += 1;
            }
        }
        let expected = self.idle().into_iter().map(|(_, range, _)| range).filter(|range| {
            limits.may_decommit_regions
                && self.ranges[range].set == own
                && (self.ranges[range].pages.len() as u64) * PAGE < bytes
        });
        check!(too_small == expected.collect::<Vec<_>>(), "replaced {too_small:?}");
        check!(others == 0 || limits.commit_bytes != u64::MAX, "{others} regions decommitted without a ceiling");
        let is_cut = extent.bytes() % bytes == 0 || extent.bytes() == replaced;
        check!(extent.bytes() >= bytes && is_cut, "{extent:?} is neither whole buffers of {bytes} nor {replaced}");
        check!(extent.bytes() <= limits.commit_bytes.saturating_add(released), "{extent:?} passes {limits:?}");
        check!(!self.ranges.contains_key(&extent.range()), "{extent:?} is there already");
        let pages = (extent.bytes() / PAGE) as usize;
        self.ranges.insert(extent.range(), RangeModel::new(RangeKind::Discrete, own, pages, pages, Page::Transit));
        Ok(())
    }

    fn settle(&mut self, which: usize, failed_at: Option<usize>, lost: bool) -> Result<(), TestCaseError> {
        let Outstanding { plan, buffer, before, idle_before } = self.outstanding.swap_remove(which);
        let steps = plan.steps().to_vec();
        let failed_at = failed_at.map(|step| step % steps.len());
        let lost = lost && failed_at.is_some_and(|step| matches!(steps[step], Step::Remap { .. }));
        // All remaps from there on are lost: they are made in one call.
        let remaps = failed_at.map_or(0, |failed| {
            steps[failed..].iter().take_while(|step| lost && matches!(step, Step::Remap { .. })).count()
        });
        let outcome = match failed_at {
            None => PlanOutcome::Done,
            Some(done) if lost => PlanOutcome::Lost { done, remaps },
            Some(done) => PlanOutcome::Failed { done },
        };
        let granted = self.arena.settle(plan, outcome, self.now_us);
        check!(granted == failed_at.is_none(), "{outcome:?} granted: {granted}");

        if let Some((range, first, pages)) = buffer {
            let target = &mut self.ranges.get_mut(&range).unwrap();
            if failed_at.is_some() {
                target.pages[first..first + pages].copy_from_slice(&before);
            }
        }
        let mut dropped = Vec::new();
        for (index, &step) in steps.iter().enumerate() {
            let made = failed_at.is_none_or(|failed| index < failed);
            let gone = made || failed_at.is_some_and(|failed| (failed..failed + remaps).contains(&index));
            let (source, target) = match step {
                Step::Commit { extent } => (None, Some(extent)),
                Step::Remap { from, to } => (Some(from), Some(to)),
                Step::Decommit { extent } => (Some(extent), None),
            };
            if let Some(extent) = source {
                self.set(extent, if gone { Page::Uncommitted } else { Page::Free });
                dropped.extend((gone && self.has_regions()).then_some(extent.range()));
            }
            if let Some(extent) = target {
                self.set(extent, if made { Page::Free } else { Page::Uncommitted });
                dropped.extend((!made && self.has_regions()).then_some(extent.range()));
            }
        }
        if let Some((range, first, pages)) = buffer.filter(|_| failed_at.is_none()) {
            self.set(Extent::new(ArenaPtr::new(range, first as u64 * PAGE), pages as u64 * PAGE), Page::Live);
            self.live.push((range, first, pages));
        }
        for range in dropped {
            self.ranges.remove(&range);
        }
        // Granules that are idle again are as old as before, except those that failed to decommit. `restamp` forgets the
        // age of granules that are not idle.
        let refused: Vec<_> = match failed_at.map(|failed| steps[failed]) {
            Some(Step::Decommit { extent }) => self.granules_of(extent).into_iter().collect(),
            _ => Vec::new(),
        };
        refused.iter().for_each(|&(range, granule)| {
            self.ranges.get_mut(&range).unwrap().idle_since[granule] = None;
        });
        let as_before = |&(range, granule, _): &(_, _, _)| failed_at.is_some() && !refused.contains(&(range, granule));
        for (range, granule, since_us) in idle_before.into_iter().filter(as_before) {
            if let Some(model) = self.ranges.get_mut(&range) {
                model.idle_since[granule] = Some(since_us);
            }
        }
        Ok(())
    }

    /// Checks a plan that only decommits: `expected` whole granules, the longest idle first.
    fn check_release(&mut self, plan: Option<Plan>, expected: usize) -> Result<(), TestCaseError> {
        let mut leaving = Vec::new();
        for step in plan.iter().flat_map(|plan| plan.steps()) {
            let Step::Decommit { extent } = *step else {
                return Err(TestCaseError::fail(format!("{step:?} in a release plan")));
            };
            check!(self.pages_of(extent).iter().all(|&page| page == Page::Free), "{step:?} is not free");
            leaving.extend(self.aged(extent)?);
        }
        leaving.sort_unstable();
        let idle = self.idle();
        check!(leaving == idle[..expected], "released {leaving:?} of {idle:?}, expected {expected}");
        if let Some(plan) = plan {
            plan.steps().iter().for_each(|step| {
                if let Step::Decommit { extent } = *step {
                    self.set(extent, Page::Transit);
                }
            });
            let idle_before = self.taken();
            self.outstanding.push(Outstanding { plan, buffer: None, before: Vec::new(), idle_before });
        }
        Ok(())
    }

    fn apply(&mut self, op: &Op) -> Result<(), TestCaseError> {
        match *op {
            Op::Place { pages, align_log, limit, may_release } => self.place(pages, align_log, limit, may_release)?,
            Op::Free(which) if !self.live.is_empty() => {
                let (range, first, pages) = self.live.swap_remove(which % self.live.len());
                let (ptr, bytes) = (ArenaPtr::new(range, first as u64 * PAGE), pages as u64 * PAGE);
                self.arena.free(ptr, bytes, self.now_us);
                self.set(Extent::new(ptr, bytes), Page::Free);
            }
            Op::Settle { which, failed_at, lost } if !self.outstanding.is_empty() => {
                self.settle(which % self.outstanding.len(), failed_at, lost)?;
            }
            Op::Free(_) | Op::Settle { .. } => {}
            Op::Advance(us) => self.now_us += us,
            Op::ReleaseDue => {
                let due = self.idle().iter().filter(|(since, ..)| since + 40 <= self.now_us).count();
                let expected = if self.now_us < self.next_release_us { 0 } else { due.div_ceil(5) };
                if expected > 0 {
                    self.next_release_us = self.now_us + 5;
                }
                let plan = self.arena.release_due(self.now_us);
                self.check_release(plan, expected)?;
            }
            Op::ReleaseDownTo(pages) => {
                let to_bytes = pages as u64 * PAGE;
                let stats = self.arena.stats();
                let leaving = stats.transit_bytes - self.arena.committing_bytes;
                let mut staying = stats.committed_bytes - leaving;
                let granules = self.idle().into_iter().take_while(|(_, range, _)| {
                    let go = staying > to_bytes;
                    staying -= if go { self.ranges[range].granule_pages as u64 * PAGE } else { 0 };
                    go
                });
                let expected = granules.count();
                let plan = self.arena.release_down_to(to_bytes);
                self.check_release(plan, expected)?;
            }
        }
        let now_us = self.now_us;
        self.ranges.values_mut().for_each(|range| range.restamp(now_us));
        Ok(())
    }

    fn compare(&self) -> Result<(), TestCaseError> {
        let stats = self.arena.stats();
        check!(stats.hole_bytes == self.count(Page::Free), "free: {stats:?}");
        check!(stats.live_bytes == self.count(Page::Live), "live: {stats:?}");
        let idle = self.idle();
        let idle_bytes: u64 = idle.iter().map(|(_, range, _)| self.ranges[range].granule_pages as u64 * PAGE).sum();
        check!(stats.idle_bytes == idle_bytes, "idle {idle_bytes}: {stats:?}");
        let ages = self.arena.idle.longest_idle().flat_map(|run| {
            self.granules_of(run.extent).into_iter().map(move |(range, granule)| (run.since_us, range, granule))
        });
        check!(ages.eq(idle), "ages of the idle granules");
        self.arena.validate().map_err(TestCaseError::fail)
    }
}

fn op(pages_max: usize) -> impl Strategy<Value = Op> {
    let ptr = (
        prop_oneof![3 => 1..=6usize, 1 => 1..=pages_max],
        prop_oneof![6 => Just(0u32), 1 => 1..=3u32],
        prop_oneof![2 => Just(None), 1 => (0..6usize).prop_map(Some)],
        any::<bool>(),
    );
    let settle = (any::<usize>(), prop_oneof![3 => Just(None), 1 => (0..4usize).prop_map(Some)], any::<bool>());
    prop_oneof![
        10 => ptr.prop_map(|(pages, align_log, limit, may_release)| Op::Place { pages, align_log, limit, may_release }),
        9 => any::<usize>().prop_map(Op::Free),
        6 => settle.prop_map(|(which, failed_at, lost)| Op::Settle { which, failed_at, lost }),
        2 => (0..30u64).prop_map(Op::Advance),
        2 => Just(Op::ReleaseDue),
        1 => (0..400usize).prop_map(Op::ReleaseDownTo),
    ]
}

const OPS_IN_A_CASE: usize = 500;

/// Random operations of both tests together; `PINPOOL_MODEL_OPS` sets another number.
fn ops_wanted() -> usize {
    let requested = std::env::var("PINPOOL_MODEL_OPS").ok().and_then(|ops| ops.parse().ok());
    requested.unwrap_or(if cfg!(debug_assertions) { 250_000 } else { 1_000_000 })
}

fn run(growth: GrowthMode, pages_max: usize) {
    let cases = u32::try_from(ops_wanted() / 2 / OPS_IN_A_CASE).unwrap().max(1);
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 2000, ..Config::default() };
    // The same operations every time, so that a failure can be repeated.
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let ops = prop::collection::vec(op(pages_max), OPS_IN_A_CASE);
    let outcome = TestRunner::new_with_rng(config, rng).run(&ops, |ops| {
        let mut world = World::new(growth);
        for op in &ops {
            world.apply(op)?;
            world.compare()?;
        }
        Ok(())
    });
    if let Err(failure) = outcome {
        panic!("{failure}");
    }
}

#[test]
fn an_arena_with_a_virtual_range_equals_the_model() {
    run(GrowthMode::Granules(GRANULE), 60);
}

#[test]
fn an_arena_of_discrete_regions_equals_the_model() {
    run(GrowthMode::Regions, 60);
}
