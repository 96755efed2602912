//! Placements that must lock or move granules first (rules 5, 7, 8, 11), and settling the plans they lead to.

use super::discrete::region_bytes;
use super::extent::{ArenaPtr, Extent};
use super::plan::{Plan, PlanOutcome, Step};
use super::retain::IdleRun;
use super::{Arena, GrowthMode, HoleSet, RangeKind};

/// Free bytes beyond one in so many of those in use are moved before others are locked.
const SPARE_SHARE: u64 = 10;

/// How far a placement may go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GrowthLimits {
    /// Bytes that may be locked beyond what is claimed now; `u64::MAX` without a ceiling.
    pub commit_bytes: u64,
    /// Whether regions may be released now: nothing of this pool is in flight. Spanning sources need not ask.
    pub may_decommit_regions: bool,
    /// Longest region that is locked at once unless a single buffer needs more: short while copies are running, since
    /// locking holds them up. Spanning sources need not ask.
    pub step_bytes: u64,
}

/// There is no place for a buffer that keeps within the room given.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoSpace {
    /// Bytes that would have to be locked, beyond what idle granules can give.
    pub missing_bytes: u64,
    /// Bytes of granules in transit: settling their plans may help.
    pub transit_bytes: u64,
}

impl Arena {
    /// Bytes that [`Arena::grow`] would have to lock or move for a buffer: 0 if [`Arena::carve`] has a place, `None` if
    /// the ranges have none at all.
    #[must_use]
    pub fn missing_bytes(&self, bytes: u64, align: u64) -> Option<u64> {
        let own = self.own_set(bytes);
        if [own, HoleSet::Shared].iter().any(|&set| self.holes[set as usize].tightest(bytes, align).is_some()) {
            return Some(0);
        }
        match self.growth {
            GrowthMode::Granules(granule_bytes) => self
                .uncommitted
                .best_fit(&self.holes[HoleSet::Shared as usize], bytes, align, granule_bytes)
                .map(|fit| fit.missing_granules * granule_bytes),
            GrowthMode::Regions => Some(bytes),
        }
    }

    /// Takes a place for `bytes` at `align` that needs granules which are not locked (ask [`Arena::carve`] first), and
    /// says how to get them. From now on the bytes are the buffer's and the granules are in transit.
    ///
    /// # Errors
    ///
    /// [`NoSpace`] where the granules would pass the room, idle ones that could be moved or released taken into account.
    pub fn grow(&mut self, bytes: u64, align: u64, room: GrowthLimits) -> Result<Plan, NoSpace> {
        let plan = match self.growth {
            GrowthMode::Granules(granule_bytes) => self.grow_granules(bytes, align, granule_bytes, room),
            GrowthMode::Regions => self.grow_region(bytes, room),
        }?;
        self.stats.live_bytes += bytes;
        self.stats.claimed_bytes += plan.claim_bytes();
        Ok(plan)
    }

    fn full(&self, missing_bytes: u64) -> NoSpace {
        NoSpace { missing_bytes, transit_bytes: self.stats.transit_bytes }
    }

    fn grow_granules(
        &mut self,
        bytes: u64,
        align: u64,
        granule_bytes: u64,
        room: GrowthLimits,
    ) -> Result<Plan, NoSpace> {
        let holes = &self.holes[HoleSet::Shared as usize];
        let fit = self.uncommitted.best_fit(holes, bytes, align, granule_bytes).ok_or_else(|| self.full(bytes))?;
        let missing = fit.missing_granules * granule_bytes;
        // A granule that the buffer lies in but in part is its own all the same: it stays where it is.
        let hull = self.granules_around(fit.buffer);
        let idle_elsewhere = self.idle.bytes() - self.idle.within(hull).map(|run| run.extent.bytes()).sum::<u64>();

        // Rule 7: what is free beyond a tenth of what is in use is moved. Rule 8: at the ceiling, whatever the room lacks.
        let whole = |bytes: u64| bytes / granule_bytes * granule_bytes;
        let spare = whole(holes.bytes().saturating_sub(self.stats.live_bytes / SPARE_SHARE));
        let no_room = missing.saturating_sub(whole(room.commit_bytes));
        let moved = missing.min(spare.max(no_room)).min(idle_elsewhere);
        if missing - moved > room.commit_bytes {
            return Err(self.full(missing - moved));
        }

        let buffer = fit.buffer;
        let mut idle_before = Vec::new();
        let mut at = buffer.start;
        let targets = self.uncommitted.within(hull);
        // What of the buffer lies in holes: all of it that is not bare.
        for target in targets.iter().copied().chain([Extent { start: buffer.end, end: buffer.end }]) {
            if let Some(part) = Extent::between(at, target.start.min(buffer.end)) {
                if let Some(hole) = self.holes[HoleSet::Shared as usize].around(part) {
                    self.take(HoleSet::Shared, hole, part, |run| idle_before.push(run));
                } else {
                    debug_assert!(false, "{part:?} is neither bare nor a hole");
                }
            }
            at = target.end;
        }
        for &target in &targets {
            self.uncommitted.cut(target);
            self.stats.transit_bytes += target.bytes();
            self.locking_bytes += target.bytes();
        }
        let sources = self.oldest_idle(moved);
        for &source in &sources {
            self.leave(source, &mut idle_before);
        }
        let steps = pair(&targets, sources);
        Ok(Plan { buffer: Some(buffer), steps, idle_before })
    }

    /// `buffer` widened to the edges of its first and last granule.
    fn granules_around(&self, buffer: Extent) -> Extent {
        self.range_of(buffer.ptr())
            .map_or(buffer, |range| Extent { start: range.grid.down(buffer.start), end: range.grid.up(buffer.end) })
    }

    fn grow_region(&mut self, bytes: u64, room: GrowthLimits) -> Result<Plan, NoSpace> {
        let own = self.own_set(bytes);
        let on = |set: HoleSet| self.ranges.values().filter(move |range| range.set == set);
        let held: u64 = on(own).map(|range| range.extent.bytes()).sum();
        let (mut released, mut replaced, mut given_up) = (Vec::new(), 0, 0);
        if room.may_decommit_regions {
            let is_own = |run: &IdleRun| self.range_of(run.extent.ptr()).is_some_and(|range| range.set == own);
            for run in self.idle.oldest_first().filter(|run| is_own(run) && run.extent.bytes() < bytes) {
                replaced += run.extent.bytes();
                released.push(run);
            }
            // Rule 8: at the ceiling whatever is idle goes, longest empty first, until one buffer has room.
            for run in self.idle.oldest_first() {
                if room.commit_bytes.saturating_add(replaced + given_up) >= bytes {
                    break;
                }
                if !released.contains(&run) {
                    given_up += run.extent.bytes();
                    released.push(run);
                }
            }
        }
        let room_bytes = room.commit_bytes.saturating_add(replaced + given_up);
        let region = region_bytes(held - replaced, bytes, replaced, room_bytes, room.step_bytes)
            .ok_or_else(|| self.full(bytes - room_bytes))?;
        let id = self.add_range(RangeKind::Discrete, region, own).ok_or_else(|| self.full(bytes))?;
        let extent = Extent::new(ArenaPtr::new(id, 0), region);
        let (mut steps, mut idle_before) = (Vec::new(), Vec::new());
        for IdleRun { extent, .. } in released {
            self.leave(extent, &mut idle_before);
            steps.push(Step::Decommit { extent });
        }
        steps.push(Step::Commit { extent });
        self.stats.transit_bytes += region;
        self.locking_bytes += region;
        Ok(Plan { buffer: Some(Extent::new(extent.ptr(), bytes)), steps, idle_before })
    }

    /// Ends a plan: what was locked is locked, what left is gone, and everything else is as it was. Whether the
    /// buffer of the plan, if it has one, was granted.
    pub fn settle(&mut self, plan: Plan, outcome: PlanOutcome, now_us: u64) -> bool {
        self.stats.claimed_bytes -= plan.claim_bytes();
        let done = outcome.steps_done();
        let granted = done >= plan.steps.len();
        let mut hull = plan.buffer;
        let mut not_free: Vec<Extent> = plan.buffer.filter(|_| granted).into_iter().collect();
        for (index, &step) in plan.steps.iter().enumerate() {
            let made = index < done;
            match step {
                Step::Commit { extent } => {
                    self.arrive(extent, made, &mut hull, &mut not_free);
                }
                Step::Remap { from, to } => {
                    self.stats.remaps += u64::from(made);
                    let gone = made || outcome.has_lost(index);
                    self.left(from, gone, now_us);
                    self.arrive(to, made, &mut hull, &mut not_free);
                }
                Step::Decommit { extent } => {
                    self.left(extent, made, now_us);
                }
            }
        }
        if !granted {
            self.stats.live_bytes -= plan.buffer.map_or(0, Extent::bytes);
        }
        not_free.sort_unstable();
        let mut rest = hull;
        for extent in not_free {
            let Some(before) = rest else { break };
            let [left, right] = before.without(extent);
            if let Some(left) = left {
                self.add_hole(left, now_us);
            }
            rest = right;
        }
        if let Some(last) = rest {
            self.add_hole(last, now_us);
        }
        if !granted {
            // Granules that were idle before, and are again, have waited since then; but what would not go is idle since
            // now, so that it is the last to be tried again and holds back no others.
            let refused = plan.steps.get(done).and_then(Step::released);
            let would_go = |run: &IdleRun| refused.is_none_or(|refused| !refused.contains(run.extent));
            for IdleRun { extent, since_us } in plan.idle_before.into_iter().filter(would_go) {
                let mut again = Vec::new();
                self.idle.cut(extent, |run| again.push(run.extent));
                again.into_iter().for_each(|extent| self.idle.add(IdleRun { extent, since_us }));
            }
        }
        granted
    }

    /// A target of a plan, locked or not after all.
    fn arrive(&mut self, extent: Extent, locked: bool, hull: &mut Option<Extent>, not_free: &mut Vec<Extent>) {
        self.stats.transit_bytes -= extent.bytes();
        self.locking_bytes -= extent.bytes();
        if locked {
            self.stats.committed_bytes += extent.bytes();
            self.stats.claimed_bytes += extent.bytes();
        } else {
            self.vanish(extent);
            not_free.push(extent);
        }
        if let Some(hull) = hull {
            hull.start = hull.start.min(extent.start);
            hull.end = hull.end.max(extent.end);
        }
    }

    /// IdleGranules granules that a plan took: gone, or idle again as before.
    pub(super) fn left(&mut self, extent: Extent, gone: bool, now_us: u64) {
        self.stats.transit_bytes -= extent.bytes();
        if gone {
            self.stats.committed_bytes -= extent.bytes();
            self.stats.claimed_bytes -= extent.bytes();
            self.vanish(extent);
        } else {
            self.add_hole(extent, now_us);
        }
    }

    /// `extent` is not locked any more, or never was: granules are bare, a region is no more.
    fn vanish(&mut self, extent: Extent) {
        match self.range_of(extent.ptr()) {
            Some(range) if range.kind == RangeKind::Discrete => drop(self.ranges.remove(&extent.range())),
            _ => self.uncommitted.add(extent),
        }
    }
}

/// Fills `targets` from `sources` as far as they reach, lowest first, and locks the rest, run by run.
fn pair(targets: &[Extent], sources: Vec<Extent>) -> Vec<Step> {
    let mut moves = Vec::new();
    let mut locks = Vec::new();
    let mut sources = sources.into_iter();
    let mut source = sources.next();
    for &target in targets {
        let mut rest = Some(target);
        while let (Some(to), Some(from)) = (rest, source) {
            let bytes = to.bytes().min(from.bytes());
            moves.push(Step::Remap { from: Extent::new(from.ptr(), bytes), to: Extent::new(to.ptr(), bytes) });
            rest = Extent::between(to.start + bytes, to.end);
            source = Extent::between(from.start + bytes, from.end).or_else(|| sources.next());
        }
        locks.extend(rest.map(|extent| Step::Commit { extent }));
    }
    moves.extend(locks);
    moves
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::Retention;

    const PAGE: u64 = 4096;
    const GRANULE: u64 = 2 << 20;
    const NO_CEILING: GrowthLimits =
        GrowthLimits { commit_bytes: u64::MAX, may_decommit_regions: true, step_bytes: u64::MAX };

    fn spanning() -> Arena {
        let mut arena = Arena::new(GrowthMode::Granules(GRANULE), Retention::default());
        arena.add_virtual_range(64 * GRANULE).unwrap();
        arena
    }

    /// A buffer, locked for if need be.
    fn get(arena: &mut Arena, bytes: u64, room: GrowthLimits, now_us: u64) -> ArenaPtr {
        arena.carve(bytes, PAGE).unwrap_or_else(|| {
            let plan = arena.grow(bytes, PAGE, room).unwrap();
            let place = plan.ptr().unwrap();
            assert!(arena.settle(plan, PlanOutcome::Done, now_us));
            place
        })
    }

    #[test]
    fn two_placements_at_once_share_no_granule() {
        let mut arena = spanning();
        let first = arena.grow(PAGE, PAGE, NO_CEILING).unwrap();
        assert_eq!(arena.carve(PAGE, PAGE), None, "the rest of the granule is not locked yet");
        let second = arena.grow(PAGE, PAGE, NO_CEILING).unwrap();
        assert_eq!((first.ptr(), second.ptr()), (Some(ArenaPtr::new(0, 0)), Some(ArenaPtr::new(0, GRANULE))));
        assert!(arena.settle(first, PlanOutcome::Done, 0));
        assert_eq!(arena.carve(PAGE, PAGE), Some(ArenaPtr::new(0, PAGE)), "now it is");
        assert!(arena.settle(second, PlanOutcome::Done, 0));
        arena.validate().unwrap();
    }

    #[test]
    fn a_plan_that_fails_leaves_everything_as_it_was() {
        let mut arena = spanning();
        let place = get(&mut arena, GRANULE, NO_CEILING, 0);
        arena.free(place, GRANULE, 7);
        let before = arena.stats();
        let plan = arena.grow(3 * GRANULE, PAGE, NO_CEILING).unwrap();
        assert_eq!(plan.steps(), [Step::Commit { extent: Extent::new(ArenaPtr::new(0, GRANULE), 2 * GRANULE) }]);
        assert!(!arena.settle(plan, PlanOutcome::Failed { done: 0 }, 9));
        assert_eq!(arena.stats(), before);
        assert_eq!(arena.idle.oldest_first().map(|run| run.since_us).collect::<Vec<_>>(), [7], "its age too");
        arena.validate().unwrap();
    }

    #[test]
    fn the_ceiling_moves_what_is_idle_before_it_refuses() {
        let mut arena = spanning();
        let places: Vec<ArenaPtr> = (0..20).map(|_| get(&mut arena, GRANULE, NO_CEILING, 0)).collect();
        arena.free(places[3], GRANULE, 1);
        // One granule of twenty is free, less than a tenth: without a ceiling others are locked ...
        let plan = arena.grow(2 * GRANULE, PAGE, NO_CEILING).unwrap();
        assert!(matches!(plan.steps(), [Step::Commit { .. }]), "{plan:?}");
        assert!(!arena.settle(plan, PlanOutcome::Failed { done: 0 }, 2));
        // ... at the ceiling it is moved, and what is still missing is refused.
        let room = |granules: u64| GrowthLimits {
            commit_bytes: granules * GRANULE,
            may_decommit_regions: true,
            step_bytes: u64::MAX,
        };
        let plan = arena.grow(2 * GRANULE, PAGE, room(1)).unwrap();
        let from = Extent::new(places[3], GRANULE);
        assert!(matches!(plan.steps(), [Step::Remap { from: moved, .. }, Step::Commit { .. }] if *moved == from));
        let full = arena.grow(2 * GRANULE, PAGE, room(0)).unwrap_err();
        assert_eq!(full.missing_bytes, 2 * GRANULE);
        assert!(full.transit_bytes > 0, "settling the plan may help");
        assert!(arena.settle(plan, PlanOutcome::Done, 3));
        arena.validate().unwrap();
    }

    #[test]
    fn small_buffers_and_large_ones_keep_to_regions_of_their_own() {
        let mut arena = Arena::new(GrowthMode::Regions, Retention::default());
        let small = get(&mut arena, PAGE, NO_CEILING, 0);
        let large = get(&mut arena, 3 << 20, NO_CEILING, 0);
        assert_ne!(small.range(), large.range());
        assert_eq!(get(&mut arena, PAGE, NO_CEILING, 0).range(), small.range());
        arena.free(large, 3 << 20, 1);
        // The empty region is too small for the next buffer and makes way, before the new one is acquired.
        let plan = arena.grow(64 << 20, PAGE, NO_CEILING).unwrap();
        assert!(
            matches!(plan.steps(), [Step::Decommit { extent, .. }, Step::Commit { .. }] if extent.range() == large.range())
        );
        assert!(arena.settle(plan, PlanOutcome::Done, 2));
        arena.validate().unwrap();
    }
}
