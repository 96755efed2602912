//! The arena against a naive model: plain arrays of the pages and granules of a few small ranges, and each rule as a
//! search over all of them.

use std::collections::BTreeMap;
use std::ops::Range;

use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use crate::arena::*;

/// The unit of every size here: large, so that separate regions are short arrays.
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
        Self { kind, set, granule_pages, pages: vec![page; pages], idle_since: vec![None; pages / granule_pages] }
    }

    fn granule(&self, granule: usize) -> &[Page] {
        &self.pages[granule * self.granule_pages..(granule + 1) * self.granule_pages]
    }

    /// The uncommitted granules that `pages` touch.
    fn uncommitted(&self, pages: Range<usize>) -> impl Iterator<Item = usize> {
        let granules = pages.start / self.granule_pages..pages.end.div_ceil(self.granule_pages);
        granules.filter(|&granule| self.granule(granule)[0] == Page::Uncommitted)
    }

    fn restamp(&mut self, now_us: u64) {
        for granule in 0..self.idle_since.len() {
            let idle = self.kind != RangeKind::Reserve && self.granule(granule).iter().all(|&page| page == Page::Free);
            self.idle_since[granule] = idle.then_some(self.idle_since[granule].unwrap_or(now_us));
        }
    }

    /// The maximal run of pages around `at` that `wanted` accepts.
    fn run_around(&self, at: usize, wanted: impl Fn(Page) -> bool) -> Range<usize> {
        let start = self.pages[..at].iter().rposition(|&page| !wanted(page)).map_or(0, |last| last + 1);
        let end = self.pages[at..].iter().position(|&page| !wanted(page)).map_or(self.pages.len(), |first| at + first);
        start..end
    }
}

/// When a granule became idle, its range, and its number in the range.
type IdleGranule = (u64, u32, usize);

#[derive(Debug)]
struct Outstanding {
    plan: Plan,
    /// The buffer, and the previous states of its pages.
    buffer: Option<(Extent, Vec<Page>)>,
    /// Idle granules that the plan took.
    idle_before: Vec<IdleGranule>,
}

/// Preference and age of a separate region; missing granules, length of the run, range, page.
type Rank = (u8, u32, usize, usize, u32, usize);

#[derive(Clone, Copy, Debug)]
struct Choice {
    buffer: Extent,
    missing: usize,
}

#[derive(Clone, Debug)]
enum Op {
    Place { pages: usize, limits: GrowthLimits },
    Free(usize),
    Finish { which: usize, failed_at: Option<usize>, lost: bool },
    Compact { pages: usize },
    Advance(u64),
    ReleaseDue,
    ReleaseDownTo(usize),
}

struct World {
    arena: Arena,
    ranges: BTreeMap<u32, RangeModel>,
    live: Vec<Extent>,
    outstanding: Vec<Outstanding>,
    now_us: u64,
    next_release_us: u64,
}

fn pages_of(extent: Extent) -> Range<usize> {
    let first = (extent.offset() / PAGE) as usize;
    first..first + (extent.bytes() / PAGE) as usize
}

/// The idle granules that `step` takes, and the uncommitted ones that it fills.
fn source_and_target(step: &Step) -> (Option<Extent>, Option<Extent>) {
    match *step {
        Step::Decommit { extent } => (Some(extent), None),
        Step::Remap { from, to } => (Some(from), Some(to)),
        Step::Commit { extent } => (None, Some(extent)),
    }
}

impl World {
    fn new(growth: GrowthMode) -> Self {
        Self::with(growth, SPAN_GRANULES, RESERVE_PAGES)
    }

    fn with(growth: GrowthMode, span_granules: usize, reserve_pages: usize) -> Self {
        let mut arena = Arena::new(growth, RETAIN);
        let mut ranges = BTreeMap::new();
        let mut add = |id: Option<u32>, kind, granule_pages, pages, page| {
            ranges.insert(id.unwrap(), RangeModel::new(kind, HoleSet::Shared, granule_pages, pages, page))
        };
        if matches!(growth, GrowthMode::Granules(_)) {
            let id = arena.add_virtual_range(span_granules as u64 * GRANULE);
            add(id, RangeKind::Virtual, GRANULE_PAGES, span_granules * GRANULE_PAGES, Page::Uncommitted);
        }
        if reserve_pages > 0 {
            let id = arena.add_reserve(reserve_pages as u64 * PAGE);
            add(id, RangeKind::Reserve, reserve_pages, reserve_pages, Page::Free);
        }
        Self { arena, ranges, live: Vec::new(), outstanding: Vec::new(), now_us: 0, next_release_us: 0 }
    }

    fn has_regions(&self) -> bool {
        self.arena.growth == GrowthMode::Regions
    }

    /// Applies policy-R5 by trying every page of every range: the fewest missing granules, then the tightest run of free pages
    /// (only committed ones if none is missing), then the lowest address. For separate regions policy-R11 comes first: the
    /// reserve, a run that is exactly as long, the oldest region in use, the tightest empty one.
    fn best(&self, pages: usize) -> Option<Choice> {
        let sets = [self.arena.own_set(pages as u64 * PAGE), HoleSet::Shared];
        let mut best: Option<(Rank, Choice)> = None;
        for (&range, model) in self.ranges.iter().filter(|(_, model)| sets.contains(&model.set)) {
            let free = |page| matches!(page, Page::Free | Page::Uncommitted);
            let mut gap = 0..0;
            for page in (0..model.pages.len()).filter(|&page| free(model.pages[page])) {
                if !gap.contains(&page) {
                    gap = model.run_around(page, free);
                }
                if page + pages > gap.end {
                    continue;
                }
                let buffer = Extent::new(range, page as u64 * PAGE, pages as u64 * PAGE);
                let missing = model.uncommitted(page..page + pages).count();
                let run = if missing == 0 { model.run_around(page, |page| page == Page::Free) } else { gap.clone() };
                let (preference, age) = match model.kind {
                    RangeKind::Separate if run.len() == pages => (1, 0),
                    RangeKind::Separate if run.len() < model.pages.len() => (2, range),
                    RangeKind::Separate => (3, 0),
                    RangeKind::Virtual | RangeKind::Reserve => (0, 0),
                };
                let rank = (preference, age, missing, run.len(), range, page);
                if best.is_none_or(|(best, _)| rank < best) {
                    best = Some((rank, Choice { buffer, missing }));
                }
            }
        }
        best.map(|(_, choice)| choice)
    }

    fn count(&self, wanted: Page) -> u64 {
        self.ranges.values().flat_map(|model| &model.pages).filter(|&&page| page == wanted).count() as u64 * PAGE
    }

    /// Idle granules, the longest idle first.
    fn idle(&self) -> Vec<IdleGranule> {
        let of_ranges = self.ranges.iter().flat_map(|(&range, model)| {
            model.idle_since.iter().enumerate().filter_map(move |(granule, &since)| Some((since?, range, granule)))
        });
        let mut idle: Vec<_> = of_ranges.collect();
        idle.sort_unstable();
        idle
    }

    fn granule_bytes(&self, range: u32) -> u64 {
        self.ranges[&range].granule_pages as u64 * PAGE
    }

    fn pages_mut(&mut self, extent: Extent) -> &mut [Page] {
        &mut self.ranges.get_mut(&extent.range()).unwrap().pages[pages_of(extent)]
    }

    fn set(&mut self, extent: Extent, page: Page) {
        self.pages_mut(extent).fill(page);
    }

    /// The granules that `extent` touches.
    fn granules(&self, extent: Extent) -> Vec<(u32, usize)> {
        let (pages, granule_pages) = (pages_of(extent), self.ranges[&extent.range()].granule_pages);
        let granules = pages.start / granule_pages..pages.end.div_ceil(granule_pages);
        granules.map(|granule| (extent.range(), granule)).collect()
    }

    /// The granules of `extent`, all idle, with their ages.
    fn aged(&self, extent: Extent) -> Vec<IdleGranule> {
        let age = |(range, granule): (u32, usize)| {
            let since = self.ranges[&range].idle_since[granule];
            (since.unwrap_or_else(|| panic!("{extent:?} is not idle")), range, granule)
        };
        self.granules(extent).into_iter().map(age).collect()
    }

    fn idle_outside(&self, buffer: Extent) -> Vec<IdleGranule> {
        let (mut idle, inside) = (self.idle(), self.granules(buffer));
        idle.retain(|&(_, range, granule)| !inside.contains(&(range, granule)));
        idle
    }

    fn place(&mut self, pages: usize, limits: GrowthLimits) {
        let bytes = pages as u64 * PAGE;
        let choice = self.best(pages);
        let missing_bytes = choice.map(|choice| choice.missing as u64 * GRANULE);
        assert_eq!(self.arena.missing_bytes(bytes), missing_bytes.or(self.has_regions().then_some(bytes)));
        let hole = choice.filter(|choice| choice.missing == 0).map(|choice| choice.buffer);
        assert_eq!(self.arena.carve(bytes), hole, "{choice:?}");
        if let Some(buffer) = hole {
            self.set(buffer, Page::Live);
            return self.live.push(buffer);
        }
        let stats = self.arena.stats();
        let plan = match self.arena.plan_growth(bytes, limits) {
            Some(plan) => plan,
            None => {
                assert_eq!(self.arena.stats(), stats, "a refusal changes nothing");
                return self.check_refusal(choice, bytes, limits);
            }
        };
        let claimed = self.arena.stats().claimed_bytes - stats.claimed_bytes;
        assert!(claimed <= limits.commit_bytes, "claimed {claimed}, limits {limits:?}");
        let buffer = plan.buffer().unwrap();
        if self.has_regions() {
            self.check_region(&plan, bytes, limits);
        } else {
            assert_eq!(Some(buffer), choice.map(|choice| choice.buffer));
            self.check_granules(&plan, choice.unwrap(), limits);
        }
        self.begin(plan, Some(buffer));
    }

    /// From now on the buffer owns its bytes and the granules of the plan are in transit.
    fn begin(&mut self, plan: Plan, buffer: Option<Extent>) {
        let buffer = buffer.map(|extent| (extent, self.pages_mut(extent).to_vec()));
        for (source, target) in plan.steps().iter().map(source_and_target) {
            source.into_iter().chain(target).for_each(|extent| self.set(extent, Page::Transit));
        }
        if let Some((extent, _)) = buffer {
            self.set(extent, Page::Live);
        }
        let mut idle_before = self.idle();
        idle_before
            .retain(|&(_, range, granule)| self.ranges[&range].granule(granule).iter().any(|&p| p != Page::Free));
        self.outstanding.push(Outstanding { plan, buffer, idle_before });
    }

    fn check_refusal(&self, choice: Option<Choice>, bytes: u64, limits: GrowthLimits) {
        if self.has_regions() {
            let idle = if limits.may_decommit_regions { self.idle() } else { Vec::new() };
            let idle: u64 = idle.iter().map(|&(_, range, _)| self.granule_bytes(range)).sum();
            let enough = limits.commit_bytes.saturating_add(idle) >= bytes;
            assert!(!enough, "refused {bytes} bytes with {limits:?} and {idle} idle");
        } else if let Some(Choice { buffer, missing }) = choice {
            let (missing, idle) = (missing as u64 * GRANULE, self.idle_outside(buffer).len() as u64 * GRANULE);
            assert!(missing > limits.commit_bytes + idle, "refused {missing} missing with {limits:?} and {idle} idle");
        }
    }

    /// Checks how the plan obtains the missing granules: it remaps the longest idle ones (policy-R7, policy-R8) and
    /// commits the others, one step per run. It extends the last run to a step of 1/4 of the committed bytes, up to the
    /// recent peak, or else 1/28, but at most nine times the bytes to commit.
    fn check_granules(&self, plan: &Plan, choice: Choice, limits: GrowthLimits) {
        let (mut targets, mut sources, mut committed) = (Vec::new(), Vec::new(), 0);
        for step in plan.steps() {
            let (source, Some(target)) = source_and_target(step) else { panic!("a decommit in {plan:?}") };
            targets.extend(self.granules(target));
            if let Some(source) = source {
                assert_eq!(source.bytes(), target.bytes(), "{step:?} is uneven");
                sources.extend(self.aged(source));
            } else {
                committed += target.bytes();
            }
        }
        let (missing, idle) = (choice.missing as u64, self.idle_outside(choice.buffer));
        let spare = self.count(Page::Free).saturating_sub(self.count(Page::Live) / 10) / GRANULE;
        let over_limit = missing.saturating_sub(limits.commit_bytes / GRANULE);
        let remapped = missing.min(spare.max(over_limit)).min(idle.len() as u64);
        sources.sort_unstable();
        let is_longest_idle = idle.starts_with(&sources) && sources.len() as u64 == remapped;
        assert!(is_longest_idle, "remaps {sources:?} of {idle:?}, expected {remapped}");
        assert!(committed <= limits.commit_bytes, "{plan:?} passes {limits:?}");

        let range = choice.buffer.range();
        let missed = self.ranges[&range].uncommitted(pages_of(choice.buffer)).map(|granule| (range, granule));
        let mut expected: Vec<_> = missed.collect();
        let held = self.arena.stats().committed_bytes;
        let known = (held / 4).min(limits.known_bytes.saturating_sub(held));
        let step = known
            .max(held / 28)
            .min(9 * (missing - remapped) * GRANULE)
            .min(64 << 20)
            .min(limits.step_bytes)
            .min(limits.commit_bytes);
        if let Some(&(_, last)) = expected.last().filter(|_| missing > remapped) {
            let surplus = (step / GRANULE).saturating_sub(missing - remapped);
            let behind = (last + 1..self.ranges[&range].idle_since.len()).take(surplus as usize);
            let is_bare = |&granule: &usize| self.ranges[&range].granule(granule)[0] == Page::Uncommitted;
            expected.extend(behind.take_while(is_bare).map(|granule| (range, granule)));
        }
        targets.sort_unstable();
        assert_eq!(targets, expected);
        assert_eq!(plan.surplus_bytes(), (expected.len() as u64 - missing) * GRANULE);
    }

    /// One step towards a compaction target (policy-R13), found by the same search over all pages.
    fn compact(&mut self, pages: usize) {
        let expected = self.compaction_target(pages);
        let plan = self.arena.compact(pages as u64 * PAGE);
        let Some(plan) = plan else { return assert!(expected.is_none(), "{expected:?}") };
        let [missing, kept] = expected.unwrap_or_else(|| panic!("nothing is to be moved: {plan:?}"));
        let (mut targets, mut sources) = (Vec::new(), Vec::new());
        for step in plan.steps() {
            let (Some(source), Some(target)) = source_and_target(step) else { panic!("no remap in {plan:?}") };
            targets.extend(self.granules(target));
            sources.extend(self.granules(source));
        }
        assert_eq!((targets.len(), sources.len()), (2, 2), "{plan:?}");
        assert!(targets.iter().all(|target| missing.contains(target)), "{plan:?} fills more than {missing:?}");
        // No remaining granule is in a shorter hole than a granule that was taken.
        let hole_of = |&(range, granule): &(u32, usize)| {
            self.ranges[&range].run_around(granule * GRANULE_PAGES, |page| page == Page::Free).len()
        };
        let others = self.idle().into_iter().map(|(_, range, granule)| (range, granule));
        let others = others.filter(|other| !kept.contains(other) && !sources.contains(other));
        let shortest = others.map(|other| hole_of(&other)).min().unwrap_or(usize::MAX);
        assert!(sources.iter().all(|source| !kept.contains(source) && hole_of(source) <= shortest), "{plan:?}");
        self.begin(plan, None);
    }

    /// The granules that a compaction target for `pages` lacks, and the granules that stay in place.
    fn compaction_target(&self, pages: usize) -> Option<[Vec<(u32, usize)>; 2]> {
        let idle = self.idle();
        let mut granules = pages.div_ceil(GRANULE_PAGES).min(idle.len());
        for _ in 0..16 {
            let choice = self.best(granules * GRANULE_PAGES).filter(|choice| granules > 2 && choice.missing > 2)?;
            let range = choice.buffer.range();
            let buffer = self.granules(choice.buffer);
            let missing = self.ranges[&range].uncommitted(pages_of(choice.buffer)).map(|granule| (range, granule));
            let model = &self.ranges[&range];
            let (first, last) = (buffer[0].1 * GRANULE_PAGES, (buffer.last()?.1 + 1) * GRANULE_PAGES);
            // Widened by the free pages on both sides.
            let free = |page| page == Page::Free;
            let start =
                if first > 0 && free(model.pages[first - 1]) { model.run_around(first - 1, free).start } else { first };
            let end = if last < model.pages.len() && free(model.pages[last]) {
                model.run_around(last, free).end
            } else {
                last
            };
            let kept: Vec<_> =
                (start.div_ceil(GRANULE_PAGES)..end / GRANULE_PAGES).map(|granule| (range, granule)).collect();
            let elsewhere = idle.iter().filter(|&&(_, range, granule)| !kept.contains(&(range, granule))).count();
            let short = choice.missing.saturating_sub(elsewhere);
            if short == 0 {
                return Some([missing.collect(), kept]);
            }
            granules = granules.saturating_sub(short);
        }
        None
    }

    fn check_region(&mut self, plan: &Plan, bytes: u64, limits: GrowthLimits) {
        let own = self.arena.own_set(bytes);
        let Some((&Step::Commit { extent: region }, releases)) = plan.steps().split_last() else {
            panic!("the last step commits no region: {plan:?}");
        };
        let (mut too_small, mut others, mut released, mut replaced) = (Vec::new(), 0, 0, 0);
        for step in releases {
            let Step::Decommit { extent } = *step else { panic!("{step:?} before a region") };
            let model = &self.ranges[&extent.range()];
            assert!(model.idle_since[0].is_some(), "{step:?} of {model:?}");
            assert_eq!(pages_of(extent), 0..model.pages.len(), "{step:?} is not a whole region");
            released += extent.bytes();
            if model.set == own && extent.bytes() < bytes {
                replaced += extent.bytes();
                too_small.push(extent.range());
            } else {
                others += 1;
            }
        }
        let mut expected: Vec<_> = self.idle().into_iter().map(|(_, range, _)| range).collect();
        expected.retain(|&range| {
            limits.may_decommit_regions && self.ranges[&range].set == own && self.granule_bytes(range) < bytes
        });
        assert_eq!(too_small, expected, "replaced");
        assert!(others == 0 || limits.commit_bytes != u64::MAX, "{others} regions decommitted without a limit");
        let is_cut = region.bytes() % bytes == 0 || region.bytes() == replaced;
        assert!(region.bytes() >= bytes && is_cut, "{region:?} is neither whole buffers of {bytes} nor {replaced}");
        assert!(region.bytes() <= limits.commit_bytes.saturating_add(released), "{region:?} passes {limits:?}");
        let pages = pages_of(region).end;
        let model = RangeModel::new(RangeKind::Separate, own, pages, pages, Page::Transit);
        assert!(self.ranges.insert(region.range(), model).is_none(), "{region:?} is there already");
    }

    fn finish_plan(&mut self, which: usize, failed_at: Option<usize>, lost: bool) {
        let Outstanding { plan, buffer, idle_before } = self.outstanding.swap_remove(which);
        let steps = plan.steps().to_vec();
        let failed_at = failed_at.map(|step| step % steps.len());
        // All remaps from there on are lost, because one call makes them.
        let is_remap = |step: &&Step| matches!(step, Step::Remap { .. });
        let remaps = failed_at.filter(|_| lost).map_or(0, |at| steps[at..].iter().take_while(is_remap).count());
        let mut outcomes = vec![StepOutcome::Made; failed_at.unwrap_or(steps.len())];
        outcomes.resize(outcomes.len() + remaps, StepOutcome::Lost);
        outcomes.extend(failed_at.filter(|_| remaps == 0).map(|_| StepOutcome::Failed));
        // Granules that a plan without a buffer remaps all get the age of the oldest of them.
        let oldest_us = idle_before.iter().map(|&(since_us, ..)| since_us).min().filter(|_| buffer.is_none());
        let granted = self.arena.finish_plan(plan, &outcomes, self.now_us);
        assert_eq!(granted, failed_at.is_none(), "{outcomes:?}");

        if let Some((extent, before)) = buffer.as_ref().filter(|_| !granted) {
            self.pages_mut(*extent).copy_from_slice(before);
        }
        let done = failed_at.unwrap_or(steps.len());
        let mut dropped = Vec::new();
        for (index, step) in steps.iter().enumerate() {
            let (source, target) = source_and_target(step);
            let source =
                source.map(|extent| (extent, if index < done + remaps { Page::Uncommitted } else { Page::Free }));
            let target = target.map(|extent| (extent, if index < done { Page::Free } else { Page::Uncommitted }));
            for (extent, page) in source.into_iter().chain(target) {
                self.set(extent, page);
                dropped.extend((page == Page::Uncommitted && self.has_regions()).then_some(extent.range()));
            }
        }
        if let Some((extent, _)) = buffer.filter(|_| granted) {
            self.set(extent, Page::Live);
            self.live.push(extent);
        }
        dropped.iter().for_each(|range| drop(self.ranges.remove(range)));
        for target in steps[..done].iter().filter_map(|step| source_and_target(step).1) {
            for (range, granule) in self.granules(target) {
                self.ranges.get_mut(&range).unwrap().idle_since[granule] = oldest_us;
            }
        }
        // Granules that are idle again keep their previous age, except those that failed to decommit. `restamp` forgets the
        // age of granules that are not idle.
        let refused = match failed_at.map(|failed| steps[failed]) {
            Some(Step::Decommit { extent }) => self.granules(extent),
            _ => Vec::new(),
        };
        for (since_us, range, granule) in idle_before.into_iter().filter(|_| !granted) {
            if let Some(model) = self.ranges.get_mut(&range) {
                model.idle_since[granule] = (!refused.contains(&(range, granule))).then_some(since_us);
            }
        }
    }

    /// Checks a plan that only decommits: `expected` whole granules, the longest idle first, adjacent ones in one step.
    fn check_release(&mut self, plan: Option<Plan>, expected: usize) {
        let (mut leaving, mut last_end) = (Vec::new(), 0);
        for step in plan.iter().flat_map(|plan| plan.steps()) {
            let Step::Decommit { extent } = *step else { panic!("{step:?} in a release plan") };
            assert!(self.pages_mut(extent).iter().all(|&page| page == Page::Free), "{step:?} is not free");
            assert!(leaving.is_empty() || last_end < extent.start, "{plan:?} has steps that touch");
            leaving.extend(self.aged(extent));
            last_end = extent.end;
        }
        leaving.sort_unstable();
        assert_eq!(leaving, self.idle()[..expected]);
        if let Some(plan) = plan {
            self.begin(plan, None);
        }
    }

    fn apply(&mut self, op: &Op) {
        match *op {
            Op::Place { pages, limits } => self.place(pages, limits),
            Op::Compact { pages } => self.compact(pages),
            Op::Free(which) if !self.live.is_empty() => {
                let buffer = self.live.swap_remove(which % self.live.len());
                self.arena.free(buffer, self.now_us);
                self.set(buffer, Page::Free);
            }
            Op::Finish { which, failed_at, lost } if !self.outstanding.is_empty() => {
                self.finish_plan(which % self.outstanding.len(), failed_at, lost);
            }
            Op::Free(_) | Op::Finish { .. } => {}
            Op::Advance(us) => self.now_us += us,
            Op::ReleaseDue => {
                let due = self.idle().iter().filter(|(since, ..)| since + 40 <= self.now_us).count();
                let expected = if self.now_us < self.next_release_us { 0 } else { due.div_ceil(5) };
                if expected > 0 {
                    self.next_release_us = self.now_us + 5;
                }
                let plan = self.arena.release_due(self.now_us);
                self.check_release(plan, expected);
            }
            Op::ReleaseDownTo(pages) => {
                let to_bytes = pages as u64 * PAGE;
                let mut staying = self.arena.stats().committed_bytes - self.arena.leaving_bytes;
                let granules = self.idle().into_iter().take_while(|&(_, range, _)| {
                    let go = staying > to_bytes;
                    staying -= if go { self.granule_bytes(range) } else { 0 };
                    go
                });
                let expected = granules.count();
                let plan = self.arena.release_down_to(to_bytes);
                self.check_release(plan, expected);
            }
        }
        self.ranges.values_mut().for_each(|range| range.restamp(self.now_us));
    }

    fn compare(&self) {
        let (stats, idle) = (self.arena.stats(), self.idle());
        let idle_bytes = idle.iter().map(|&(_, range, _)| self.granule_bytes(range)).sum();
        let expected = (self.count(Page::Free), self.count(Page::Live), idle_bytes);
        assert_eq!((stats.hole_bytes, stats.live_bytes, stats.free_granule_bytes), expected, "free, live, idle");
        let aged =
            |run: IdleRun| self.granules(run.extent).into_iter().map(move |(range, at)| (run.since_us, range, at));
        assert_eq!(self.arena.idle.longest_idle().flat_map(aged).collect::<Vec<_>>(), idle);
        self.arena.validate().unwrap();
    }
}

fn op(pages_max: usize) -> impl Strategy<Value = Op> {
    let ptr = (
        prop_oneof![3 => 1..=6usize, 1 => 1..=pages_max],
        prop_oneof![2 => Just(u64::MAX), 1 => (0..6u64).prop_map(|granules| granules * GRANULE)],
        any::<bool>(),
    );
    let known = prop_oneof![1 => Just(u64::MAX), 1 => (0..20u64).prop_map(|granules| granules * GRANULE)];
    let steps =
        (prop_oneof![3 => Just(u64::MAX), 1 => (0..4u64).prop_map(|granules| granules * GRANULE)], 0..9u64, known);
    let place =
        (ptr, steps).prop_map(|((pages, commit_bytes, may_decommit_regions), (step_bytes, largest, known_bytes))| {
            let largest_miss_bytes = largest * GRANULE;
            let limits = GrowthLimits {
                commit_bytes,
                over_bytes: 0,
                may_decommit_regions,
                step_bytes,
                largest_miss_bytes,
                known_bytes,
            };
            Op::Place { pages, limits }
        });
    let finish = (any::<usize>(), prop_oneof![3 => Just(None), 1 => (0..4usize).prop_map(Some)], any::<bool>());
    prop_oneof![
        10 => place,
        9 => any::<usize>().prop_map(Op::Free),
        6 => finish.prop_map(|(which, failed_at, lost)| Op::Finish { which, failed_at, lost }),
        3 => (1..=pages_max).prop_map(|pages| Op::Compact { pages }),
        2 => (0..30u64).prop_map(Op::Advance),
        2 => Just(Op::ReleaseDue),
        1 => (0..400usize).prop_map(Op::ReleaseDownTo),
    ]
}

const OPS_IN_A_CASE: usize = if cfg!(miri) { 20 } else { 500 };

fn run(growth: GrowthMode, pages_max: usize) {
    // Total number of random operations in both tests.
    let ops: usize = std::env::var("PINPOOL_MODEL_OPS").ok().and_then(|ops| ops.parse().ok()).unwrap_or(100_000);
    let cases = u32::try_from(ops / 2 / OPS_IN_A_CASE).unwrap().max(1);
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 2000, ..Config::default() };
    // The operations are the same every time, so that a failure can be repeated.
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let ops = prop::collection::vec(op(pages_max), OPS_IN_A_CASE);
    let outcome = TestRunner::new_with_rng(config, rng).run(&ops, |ops| {
        let mut world = World::new(growth);
        for op in &ops {
            world.apply(op);
            world.compare();
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
fn an_arena_of_separate_regions_equals_the_model() {
    run(GrowthMode::Regions, 60);
}
