//! The arena against a naive model: every page and granule of a few small ranges in plain arrays, every rule as a
//! search over all of them.

use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner};

use crate::arena::*;

/// The unit of every size here: large, so that walled regions (2 MiB and more) are short arrays.
const PAGE: u64 = 128 << 10;
/// Pages in a granule of the spanning range.
const GRANULE_PAGES: usize = 8;
const GRANULE: u64 = GRANULE_PAGES as u64 * PAGE;
const SPAN_GRANULES: usize = 48;
const RESERVE_PAGES: usize = 20;
const RETAIN: Retention = Retention { retain_us: Some(40), step_us: 5, share: 5 };

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Page {
    Bare,
    Free,
    Live,
    Transit,
}

#[derive(Clone, Debug)]
struct RangeModel {
    kind: Kind,
    shelf: Shelf,
    granule_pages: usize,
    pages: Vec<Page>,
    /// Since when each granule has been wholly free.
    idle_since: Vec<Option<u64>>,
}

impl RangeModel {
    fn new(kind: Kind, shelf: Shelf, granule_pages: usize, pages: usize, page: Page) -> Self {
        let idle_since = vec![None; pages / granule_pages];
        Self { kind, shelf, granule_pages, pages: vec![page; pages], idle_since }
    }

    fn granule(&self, granule: usize) -> &[Page] {
        &self.pages[granule * self.granule_pages..(granule + 1) * self.granule_pages]
    }

    fn restamp(&mut self, now_us: u64) {
        for granule in 0..self.idle_since.len() {
            let idle = self.kind != Kind::Reserve && self.granule(granule).iter().all(|&page| page == Page::Free);
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
    /// What the pages of the buffer were before.
    before: Vec<Page>,
    /// The ages of the idle granules that the plan took.
    idle_before: Vec<(u32, usize, u64)>,
}

/// Preference and age where there are walls; missing granules, length of the run, range, page.
type Rank = (u8, u32, usize, usize, u32, usize);

#[derive(Clone, Debug)]
struct Choice {
    range: u32,
    page: usize,
    missing: usize,
}

#[derive(Clone, Debug)]
enum Op {
    ArenaPtr { pages: usize, align_log: u32, room: Option<usize>, may_release: bool },
    Give(usize),
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
            let id = arena.add_spanning(SPAN_GRANULES as u64 * GRANULE).unwrap();
            let pages = SPAN_GRANULES * GRANULE_PAGES;
            ranges.insert(id, RangeModel::new(Kind::Spanning, Shelf::Shared, GRANULE_PAGES, pages, Page::Bare));
        }
        let id = arena.add_reserve(RESERVE_PAGES as u64 * PAGE).unwrap();
        let reserve = RangeModel::new(Kind::Reserve, Shelf::Shared, RESERVE_PAGES, RESERVE_PAGES, Page::Free);
        ranges.insert(id, reserve);
        Self { arena, ranges, live: Vec::new(), outstanding: Vec::new(), now_us: 0, next_release_us: 0 }
    }

    fn walled(&self) -> bool {
        self.arena.growth == GrowthMode::Regions
    }

    fn shelves(&self, pages: usize) -> [Shelf; 2] {
        [self.arena.own_shelf(pages as u64 * PAGE), Shelf::Shared]
    }

    /// Rule 5 by trying every page of every range: where the fewest granules are missing, then the tightest run of
    /// free pages (locked ones alone if none is missing), then the lowest address. Rule 11 before it, where there are
    /// walls: the reserve, a run that is exactly as long, the oldest region in use, the tightest empty one.
    fn best(&self, pages: usize, align_pages: usize) -> Option<Choice> {
        let shelves = self.shelves(pages);
        let mut best: Option<(Rank, Choice)> = None;
        for (&range, model) in self.ranges.iter().filter(|(_, model)| shelves.contains(&model.shelf)) {
            let free = |page| matches!(page, Page::Free | Page::Bare);
            let mut gap = 0..0;
            for page in (0..model.pages.len()).step_by(align_pages).filter(|&page| free(model.pages[page])) {
                if !gap.contains(&page) {
                    gap = model.run_around(page, free);
                }
                if page + pages > gap.end {
                    continue;
                }
                let granules = page / model.granule_pages..(page + pages).div_ceil(model.granule_pages);
                let missing = granules.filter(|&granule| model.granule(granule)[0] == Page::Bare).count();
                let room = if missing == 0 { model.run_around(page, |page| page == Page::Free) } else { gap.clone() };
                let (preference, age) = match model.kind {
                    Kind::Walled if room.len() == pages => (1, 0),
                    Kind::Walled if room.len() < model.pages.len() => (2, range),
                    Kind::Walled => (3, 0),
                    Kind::Spanning | Kind::Reserve => (0, 0),
                };
                let rank = (preference, age, missing, room.len(), range, page);
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

    /// Idle granules as (since, range, granule), longest empty first.
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

    fn set(&mut self, span: Extent, page: Page) {
        let first = (span.offset() / PAGE) as usize;
        let count = (span.bytes() / PAGE) as usize;
        self.ranges.get_mut(&span.range()).unwrap().pages[first..first + count].fill(page);
    }

    fn pages_of(&self, span: Extent) -> &[Page] {
        let first = (span.offset() / PAGE) as usize;
        &self.ranges[&span.range()].pages[first..first + (span.bytes() / PAGE) as usize]
    }

    fn granules_of(&self, span: Extent) -> Vec<(u32, usize)> {
        let granule_pages = self.ranges[&span.range()].granule_pages as u64;
        let granule = |at: u64| (at / PAGE / granule_pages) as usize;
        (granule(span.offset())..granule(span.offset() + span.bytes())).map(|granule| (span.range(), granule)).collect()
    }

    /// The granules of `span`, all idle, with their ages.
    fn aged(&self, span: Extent) -> Result<Vec<(u64, u32, usize)>, TestCaseError> {
        let granules = self.granules_of(span);
        let age = |&(range, granule): &(u32, usize)| Some((self.ranges[&range].idle_since[granule]?, range, granule));
        let aged: Vec<_> = granules.iter().filter_map(age).collect();
        check!(aged.len() == granules.len(), "{span:?} is not idle");
        Ok(aged)
    }

    /// The granules that were idle before the operation at hand and are not any more, with their ages.
    fn taken(&self) -> Vec<(u32, usize, u64)> {
        let idle = self.idle().into_iter();
        let is_taken =
            |range: u32, granule: usize| self.ranges[&range].granule(granule).iter().any(|&page| page != Page::Free);
        let taken = idle.filter(|&(_, range, granule)| is_taken(range, granule));
        taken.map(|(since_us, range, granule)| (range, granule, since_us)).collect()
    }

    fn place(&mut self, pages: usize, align_log: u32, room: Option<usize>, release: bool) -> Result<(), TestCaseError> {
        let (bytes, align) = (pages as u64 * PAGE, PAGE << align_log);
        let choice = self.best(pages, 1 << align_log);
        let missing_bytes = choice.as_ref().map(|choice| choice.missing as u64 * GRANULE);
        let missing_bytes = if self.walled() { missing_bytes.or(Some(bytes)) } else { missing_bytes };
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
        check!(carved.is_none(), "carved {carved:?} where granules are missing");
        let room = GrowthLimits {
            lock_bytes: room.map_or(u64::MAX, |granules| granules as u64 * GRANULE),
            may_release_regions: release,
            step_bytes: u64::MAX,
        };
        let figures = self.arena.figures();
        let plan = match self.arena.grow(bytes, align, room) {
            Ok(plan) => plan,
            Err(_) => {
                check!(self.arena.figures() == figures, "a refusal changed something");
                return self.refused(choice, pages, room);
            }
        };
        let claimed = self.arena.figures().claimed_bytes - figures.claimed_bytes;
        check!(claimed <= room.lock_bytes, "claimed {claimed}, room {room:?}");
        let place = plan.place().unwrap();
        if self.walled() {
            self.check_region(&plan, pages, room)?;
        } else {
            let choice = choice.unwrap();
            let expected = ArenaPtr::new(choice.range, choice.page as u64 * PAGE);
            check!(place == expected, "grown at {place:?}, expected {expected:?}");
            self.check_granules(&plan, &choice, pages, room)?;
        }
        // From here on the buffer owns its bytes and the granules are in transit.
        let (range, first) = (place.range(), (place.offset() / PAGE) as usize);
        let model = &self.ranges[&range];
        let before = model.pages[first..first + pages].to_vec();
        for &step in plan.steps() {
            match step {
                Step::Commit { span } => self.set(span, Page::Transit),
                Step::Remap { from, to } => [from, to].into_iter().for_each(|span| self.set(span, Page::Transit)),
                Step::Decommit { span } => self.set(span, Page::Transit),
            }
        }
        self.set(Extent::new(place, bytes), Page::Live);
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

    fn refused(&self, choice: Option<Choice>, pages: usize, room: GrowthLimits) -> Result<(), TestCaseError> {
        if self.walled() {
            let idle = if room.may_release_regions { self.idle() } else { Vec::new() };
            let idle: u64 = idle.iter().map(|(_, range, _)| self.ranges[range].pages.len() as u64 * PAGE).sum();
            let enough = room.lock_bytes.saturating_add(idle) >= pages as u64 * PAGE;
            check!(!enough, "refused {pages} pages with {room:?} and {idle} idle bytes");
        } else if let Some(choice) = choice {
            let idle = self.idle_outside(Some((choice.range, choice.page, pages))).len() as u64 * GRANULE;
            let missing = choice.missing as u64 * GRANULE;
            check!(missing > room.lock_bytes + idle, "refused {missing} missing with {room:?} and {idle} idle");
        }
        Ok(())
    }

    /// Exactly the missing granules are had, by moves (rule 7, rule 8) of the longest empty ones and one lock a run.
    fn check_granules(
        &self,
        plan: &Plan,
        choice: &Choice,
        pages: usize,
        room: GrowthLimits,
    ) -> Result<(), TestCaseError> {
        let mut targets = Vec::new();
        let mut sources = Vec::new();
        for step in plan.steps() {
            match *step {
                Step::Commit { span } => targets.extend(self.granules_of(span)),
                Step::Remap { from, to } => {
                    check!(from.bytes() == to.bytes(), "{step:?} is uneven");
                    targets.extend(self.granules_of(to));
                    sources.extend(self.aged(from)?);
                }
                Step::Decommit { .. } => check!(false, "a release in {plan:?}"),
            }
        }
        let model = &self.ranges[&choice.range];
        let expected: Vec<_> = (choice.page / GRANULE_PAGES..(choice.page + pages).div_ceil(GRANULE_PAGES))
            .filter(|&granule| model.granule(granule)[0] == Page::Bare)
            .map(|granule| (choice.range, granule))
            .collect();
        targets.sort_unstable();
        check!(targets == expected, "targets {targets:?}, expected {expected:?}");

        let idle = self.idle_outside(Some((choice.range, choice.page, pages)));
        let spare = self.count(Page::Free).saturating_sub(self.count(Page::Live) / 10) / GRANULE;
        let no_room = (choice.missing as u64).saturating_sub(room.lock_bytes / GRANULE);
        let moved = (choice.missing as u64).min(spare.max(no_room)).min(idle.len() as u64);
        let expected: Vec<_> = (0..moved).zip(&idle).map(|(_, &source)| source).collect();
        sources.sort_unstable();
        check!(sources == expected, "moves {sources:?} of {idle:?}, expected {moved}");
        let locks = plan.steps().iter().map(|step| if let Step::Commit { span } = step { span.bytes() } else { 0 });
        check!(locks.sum::<u64>() <= room.lock_bytes, "{plan:?} passes {room:?}");
        Ok(())
    }

    fn check_region(&mut self, plan: &Plan, pages: usize, room: GrowthLimits) -> Result<(), TestCaseError> {
        let bytes = pages as u64 * PAGE;
        let own = self.shelves(pages)[0];
        let Some((Step::Commit { span }, releases)) = plan.steps().split_last() else {
            return Err(TestCaseError::fail("no region is acquired last"));
        };
        let (mut too_small, mut others, mut released, mut replaced) = (Vec::new(), 0, 0, 0);
        for step in releases {
            let Step::Decommit { span } = *step else {
                return Err(TestCaseError::fail(format!("{step:?} before a region")));
            };
            let model = &self.ranges[&span.range()];
            check!(model.idle_since[0].is_some(), "{step:?} of {model:?}");
            check!(model.pages.len() as u64 * PAGE == span.bytes(), "{step:?} is not a whole region");
            released += span.bytes();
            if model.shelf == own && span.bytes() < bytes {
                replaced += span.bytes();
                too_small.push(span.range());
            } else {
                others += 1;
            }
        }
        let expected = self.idle().into_iter().map(|(_, range, _)| range).filter(|range| {
            room.may_release_regions
                && self.ranges[range].shelf == own
                && (self.ranges[range].pages.len() as u64) * PAGE < bytes
        });
        check!(too_small == expected.collect::<Vec<_>>(), "replaced {too_small:?}");
        check!(others == 0 || room.lock_bytes != u64::MAX, "{others} regions given up without a ceiling");
        let is_cut = span.bytes() % bytes == 0 || span.bytes() == replaced;
        check!(span.bytes() >= bytes && is_cut, "{span:?} is neither whole buffers of {bytes} nor {replaced}");
        check!(span.bytes() <= room.lock_bytes.saturating_add(released), "{span:?} passes {room:?}");
        check!(!self.ranges.contains_key(&span.range()), "{span:?} is there already");
        let pages = (span.bytes() / PAGE) as usize;
        self.ranges.insert(span.range(), RangeModel::new(Kind::Walled, own, pages, pages, Page::Transit));
        Ok(())
    }

    fn settle(&mut self, which: usize, failed_at: Option<usize>, lost: bool) -> Result<(), TestCaseError> {
        let Outstanding { plan, buffer, before, idle_before } = self.outstanding.swap_remove(which);
        let steps = plan.steps().to_vec();
        let failed_at = failed_at.map(|step| step % steps.len());
        let lost = lost && failed_at.is_some_and(|step| matches!(steps[step], Step::Remap { .. }));
        // All moves from there on are lost, as those are that are made together.
        let moves = failed_at.map_or(0, |failed| {
            steps[failed..].iter().take_while(|step| lost && matches!(step, Step::Remap { .. })).count()
        });
        let outcome = match failed_at {
            None => PlanOutcome::Done,
            Some(done) if lost => PlanOutcome::Lost { done, moves },
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
            let gone = made || failed_at.is_some_and(|failed| (failed..failed + moves).contains(&index));
            let (source, target) = match step {
                Step::Commit { span } => (None, Some(span)),
                Step::Remap { from, to } => (Some(from), Some(to)),
                Step::Decommit { span } => (Some(span), None),
            };
            if let Some(span) = source {
                self.set(span, if gone { Page::Bare } else { Page::Free });
                dropped.extend((gone && self.walled()).then_some(span.range()));
            }
            if let Some(span) = target {
                self.set(span, if made { Page::Free } else { Page::Bare });
                dropped.extend((!made && self.walled()).then_some(span.range()));
            }
        }
        if let Some((range, first, pages)) = buffer.filter(|_| failed_at.is_none()) {
            self.set(Extent::new(ArenaPtr::new(range, first as u64 * PAGE), pages as u64 * PAGE), Page::Live);
            self.live.push((range, first, pages));
        }
        for range in dropped {
            self.ranges.remove(&range);
        }
        // What was taken and is not gone is as old as before; `restamp` forgets the age of what is not idle.
        // So it does of what was to be released and would not go.
        let refused: Vec<_> = match failed_at.map(|failed| steps[failed]) {
            Some(Step::Decommit { span }) => self.granules_of(span).into_iter().collect(),
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

    /// A plan that only releases: whole granules, `expected` of them, longest empty first.
    fn released(&mut self, plan: Option<Plan>, expected: usize) -> Result<(), TestCaseError> {
        let mut going = Vec::new();
        for step in plan.iter().flat_map(|plan| plan.steps()) {
            let Step::Decommit { span } = *step else {
                return Err(TestCaseError::fail(format!("{step:?} in a release")));
            };
            check!(self.pages_of(span).iter().all(|&page| page == Page::Free), "{step:?} is not free");
            going.extend(self.aged(span)?);
        }
        going.sort_unstable();
        let idle = self.idle();
        check!(going == idle[..expected], "released {going:?} of {idle:?}, expected {expected}");
        if let Some(plan) = plan {
            plan.steps().iter().for_each(|step| {
                if let Step::Decommit { span } = *step {
                    self.set(span, Page::Transit);
                }
            });
            let idle_before = self.taken();
            self.outstanding.push(Outstanding { plan, buffer: None, before: Vec::new(), idle_before });
        }
        Ok(())
    }

    fn apply(&mut self, op: &Op) -> Result<(), TestCaseError> {
        match *op {
            Op::ArenaPtr { pages, align_log, room, may_release } => self.place(pages, align_log, room, may_release)?,
            Op::Give(which) if !self.live.is_empty() => {
                let (range, first, pages) = self.live.swap_remove(which % self.live.len());
                let (place, bytes) = (ArenaPtr::new(range, first as u64 * PAGE), pages as u64 * PAGE);
                self.arena.give(place, bytes, self.now_us);
                self.set(Extent::new(place, bytes), Page::Free);
            }
            Op::Settle { which, failed_at, lost } if !self.outstanding.is_empty() => {
                self.settle(which % self.outstanding.len(), failed_at, lost)?;
            }
            Op::Give(_) | Op::Settle { .. } => {}
            Op::Advance(us) => self.now_us += us,
            Op::ReleaseDue => {
                let due = self.idle().iter().filter(|(since, ..)| since + 40 <= self.now_us).count();
                let expected = if self.now_us < self.next_release_us { 0 } else { due.div_ceil(5) };
                if expected > 0 {
                    self.next_release_us = self.now_us + 5;
                }
                let plan = self.arena.release_due(self.now_us);
                self.released(plan, expected)?;
            }
            Op::ReleaseDownTo(pages) => {
                let to_bytes = pages as u64 * PAGE;
                let figures = self.arena.figures();
                let leaving = figures.transit_bytes - self.arena.locking_bytes;
                let mut locked = figures.locked_bytes - leaving;
                let granules = self.idle().into_iter().take_while(|(_, range, _)| {
                    let go = locked > to_bytes;
                    locked -= if go { self.ranges[range].granule_pages as u64 * PAGE } else { 0 };
                    go
                });
                let expected = granules.count();
                let plan = self.arena.release_down_to(to_bytes);
                self.released(plan, expected)?;
            }
        }
        let now_us = self.now_us;
        self.ranges.values_mut().for_each(|range| range.restamp(now_us));
        Ok(())
    }

    fn compare(&self) -> Result<(), TestCaseError> {
        let figures = self.arena.figures();
        check!(figures.free_locked_bytes == self.count(Page::Free), "free: {figures:?}");
        check!(figures.live_bytes == self.count(Page::Live), "live: {figures:?}");
        let idle = self.idle();
        let idle_bytes: u64 = idle.iter().map(|(_, range, _)| self.ranges[range].granule_pages as u64 * PAGE).sum();
        check!(figures.idle_bytes == idle_bytes, "idle {idle_bytes}: {figures:?}");
        let ages = self.arena.idle.oldest_first().flat_map(|run| {
            self.granules_of(run.span).into_iter().map(move |(range, granule)| (run.since_us, range, granule))
        });
        check!(ages.eq(idle), "ages of the idle granules");
        self.arena.validate().map_err(TestCaseError::fail)
    }
}

fn op(pages_max: usize) -> impl Strategy<Value = Op> {
    let place = (
        prop_oneof![3 => 1..=6usize, 1 => 1..=pages_max],
        prop_oneof![6 => Just(0u32), 1 => 1..=3u32],
        prop_oneof![2 => Just(None), 1 => (0..6usize).prop_map(Some)],
        any::<bool>(),
    );
    let settle = (any::<usize>(), prop_oneof![3 => Just(None), 1 => (0..4usize).prop_map(Some)], any::<bool>());
    prop_oneof![
        10 => place.prop_map(|(pages, align_log, room, may_release)| Op::ArenaPtr { pages, align_log, room, may_release }),
        9 => any::<usize>().prop_map(Op::Give),
        6 => settle.prop_map(|(which, failed_at, lost)| Op::Settle { which, failed_at, lost }),
        2 => (0..30u64).prop_map(Op::Advance),
        2 => Just(Op::ReleaseDue),
        1 => (0..400usize).prop_map(Op::ReleaseDownTo),
    ]
}

const OPS_IN_A_CASE: usize = 500;

/// Random operations in all, over both tests; `PINPOOL_MODEL_OPS` asks for more or fewer.
fn ops_wanted() -> usize {
    let asked = std::env::var("PINPOOL_MODEL_OPS").ok().and_then(|ops| ops.parse().ok());
    asked.unwrap_or(if cfg!(debug_assertions) { 250_000 } else { 1_000_000 })
}

fn run(growth: GrowthMode, pages_max: usize) {
    let cases = u32::try_from(ops_wanted() / 2 / OPS_IN_A_CASE).unwrap().max(1);
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 2000, ..Config::default() };
    // The same operations every time: a failure is found again by running the test again.
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
fn a_spanning_arena_does_what_the_model_does() {
    run(GrowthMode::Granules(GRANULE), 60);
}

#[test]
fn a_walled_arena_does_what_the_model_does() {
    run(GrowthMode::Regions, 60);
}
