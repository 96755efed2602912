//! Compaction (policy-R13): idle granules are remapped into one contiguous hole before a request needs it, a few at a time.
//!
//! ```text
//!   wanted: 5 granules       | live | hole hole |  uncommitted   | live | hole | live |
//!   one step                                     ^^^^ <──────────────── remap
//! ```
//!
//! The target is where a request would be placed (policy-R5), so the request does not have to remap the granules that a step has
//! already remapped. Granules are taken from the smallest holes first, and never from the hole that is being extended.

use super::extent::{Extent, first_bytes};
use super::grow::pair;
use super::plan::Plan;
use super::{Arena, GrowthMode, HoleSet};

/// A step in a small pool remaps at most this many granules, so that few are in transit. A request that lacks at most this many
/// granules remaps them itself.
const STEP_GRANULES: u64 = 2;

/// A step in a large pool remaps up to this many granules, since each call has a fixed cost, but at most
/// 1/`TRANSIT_SHARE` of the committed bytes.
const LONG_STEP_GRANULES: u64 = 32;
const TRANSIT_SHARE: u64 = 128;

/// Maximum number of attempts to find a place for which the idle granules suffice.
const PLACES_TRIED: usize = 16;

impl Arena {
    /// Returns whether the longest hole is more than `STEP_GRANULES` shorter than `wanted_bytes`, or than all idle bytes if those
    /// are fewer.
    pub(crate) fn lacks_hole(&self, wanted_bytes: u64) -> bool {
        let GrowthMode::Granules(granule_bytes) = self.growth else { return false };
        let most_bytes = wanted_bytes.min(self.idle.bytes()).next_multiple_of(granule_bytes);
        most_bytes > self.holes[HoleSet::Shared as usize].longest_bytes() + STEP_GRANULES * granule_bytes
    }

    /// Plans one step towards a hole for a buffer of `wanted_bytes`, or of all idle bytes if those are fewer. Returns `None` if a
    /// request would have to remap at most `STEP_GRANULES` granules, or if no granule can be remapped. Commits nothing.
    pub(crate) fn compact(&mut self, wanted_bytes: u64) -> Option<Plan> {
        let (targets, kept) = self.compaction_target(wanted_bytes)?;
        // A granule can be remapped only to a place for granules of the same size.
        let (of_size, granule_bytes) = self.granules_of_same_size(*targets.first()?);
        let target_bytes: u64 = targets.iter().map(|target| target.bytes()).sum();
        let granules = self.stats.committed_bytes / TRANSIT_SHARE / granule_bytes;
        let step_bytes = target_bytes.min(granules.clamp(STEP_GRANULES, LONG_STEP_GRANULES) * granule_bytes);
        let sources = self.idle_outside(kept, of_size, step_bytes, granule_bytes);
        let targets = self.next_to_holes(targets, sources.iter().map(|source| source.bytes()).sum());
        let mut idle_before = Vec::new();
        targets.iter().for_each(|&target| self.take_target(target));
        sources.iter().for_each(|&source| self.take_idle(source, &mut idle_before));
        let (mut steps, mut rest) = (Vec::new(), Vec::new());
        pair(&targets, sources, &mut steps, &mut rest);
        (!steps.is_empty()).then(|| self.plan(None, steps, idle_before))
    }

    /// Returns the uncommitted runs that the compaction target lacks, all with granules of one size, and the extent from which no
    /// granules may be remapped.
    fn compaction_target(&self, wanted_bytes: u64) -> Option<(Vec<Extent>, Extent)> {
        let GrowthMode::Granules(smallest_bytes) = self.growth else { return None };
        let holes = &self.holes[HoleSet::Shared as usize];
        let mut bytes = wanted_bytes.min(self.idle.bytes()).next_multiple_of(smallest_bytes);
        for _ in 0..PLACES_TRIED {
            if bytes <= STEP_GRANULES * smallest_bytes || holes.tightest(bytes).is_some() {
                return None;
            }
            let fit = self.best_fit(bytes)?;
            let hull = self.granules_around(fit.buffer);
            let targets = self.uncommitted.within(hull);
            let (of_size, granule_bytes) = self.granules_of_same_size(*targets.first()?);
            if fit.missing_bytes <= STEP_GRANULES * granule_bytes || targets.last()?.end > of_size.end {
                return None;
            }
            let kept = holes.joined_with(hull);
            let in_place = of_size.common(kept).map_or(0, |kept| self.idle.bytes_within(kept));
            let short_bytes = fit.missing_bytes.saturating_sub(self.idle.bytes_within(of_size) - in_place);
            if short_bytes == 0 {
                return Some((targets, kept));
            }
            bytes = bytes.saturating_sub(short_bytes);
        }
        None
    }

    /// Selects `bytes` of idle granules within `of_size` and outside `kept`, starting with the smallest holes. Returns
    /// them sorted by address.
    fn idle_outside(&self, kept: Extent, of_size: Extent, bytes: u64, granule_bytes: u64) -> Vec<Extent> {
        let holes = self.holes[HoleSet::Shared as usize].of_at_least(granule_bytes);
        let idle = holes.filter(|&hole| !kept.contains(hole)).flat_map(|hole| self.idle.within(hole));
        let mut found = first_bytes(idle.filter_map(|run| run.extent.common(of_size)), bytes, |_, end| end);
        found.sort_unstable();
        found
    }

    /// Returns the first `bytes` of `targets`. A truncated target keeps the end that touches a hole.
    fn next_to_holes(&self, targets: Vec<Extent>, bytes: u64) -> Vec<Extent> {
        let holes = &self.holes[HoleSet::Shared as usize];
        let mut left = bytes;
        let mut chosen = Vec::new();
        for target in targets {
            let bytes = target.bytes().min(left);
            left -= bytes;
            let is_behind = holes.ending_at(target.start).is_some() || holes.starting_at(target.end).is_none();
            let start = if is_behind { target.start } else { target.end - bytes };
            chosen.extend(Extent::between(start, start + bytes));
        }
        chosen
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::{GrowthLimits, Retention, Step, StepOutcome};

    const GRANULE: u64 = 2 << 20;

    fn at(granule: u64) -> Extent {
        Extent::new(0, granule * GRANULE, GRANULE)
    }

    /// Returns an arena with sixteen granules, all in buffers except the granules in `free`. Each of these became idle one second
    /// after the previous one.
    fn with_free(free: &[u64]) -> Arena {
        with_free_of(16, free)
    }

    fn with_free_of(granules: u64, free: &[u64]) -> Arena {
        let mut arena = Arena::new(GrowthMode::Granules(GRANULE), Retention::default());
        arena.add_virtual_range(4 * granules * GRANULE).unwrap();
        let plan =
            arena.plan_growth(granules * GRANULE, GrowthLimits { step_bytes: 0, ..GrowthLimits::UNLIMITED }).unwrap();
        assert!(arena.finish_succeeded(plan, 0));
        for (second, &granule) in (0..).zip(free) {
            arena.free(at(granule), second * 1_000_000);
        }
        arena
    }

    fn moves(plan: &Plan) -> Vec<(u64, u64, u64)> {
        let granule = |extent: Extent| extent.offset() / GRANULE;
        let of_step = |step: &Step| match *step {
            Step::Remap { from, to } => (granule(from), granule(to), from.bytes() / GRANULE),
            _ => panic!("{step:?}"),
        };
        plan.steps().iter().map(of_step).collect()
    }

    #[test]
    fn granules_of_small_holes_are_moved_behind_a_hole_two_at_a_time() {
        let mut arena = with_free(&[1, 3, 4, 7, 9, 15]);
        assert!(arena.lacks_hole(6 * GRANULE) && arena.lacks_hole(100 * GRANULE) && !arena.lacks_hole(4 * GRANULE));
        let plan = arena.compact(6 * GRANULE).unwrap();
        assert_eq!(moves(&plan), [(1, 16, 1), (7, 17, 1)]);
        assert!(arena.finish_succeeded(plan, 9_000_000));
        arena.validate().unwrap();
        // Three granules are in a row now. Both remapped granules have the age of the one that was idle longest.
        assert_eq!(arena.stats().free_granule_bytes, 6 * GRANULE);
        assert_eq!(arena.idle.longest_idle().take(2).map(|run| run.extent).collect::<Vec<_>>(), [at(16), at(17)]);
        let plan = arena.compact(6 * GRANULE).unwrap();
        assert_eq!(moves(&plan), [(3, 18, 1), (9, 19, 1)]);
        assert!(arena.finish_succeeded(plan, 9_000_000));
        // One granule is missing. The request remaps it.
        assert!(arena.compact(6 * GRANULE).is_none() && !arena.lacks_hole(6 * GRANULE));
        assert!(arena.carve(5 * GRANULE).is_some());
        arena.validate().unwrap();
    }

    #[test]
    fn a_step_of_a_large_pool_is_longer() {
        let free: Vec<u64> = (1..40).map(|nth| 2 * nth).collect();
        for (granules, moved) in [(128, 2), (384, 3), (1024, 8), (8192, 32)] {
            let plan = with_free_of(granules, &free).compact(36 * GRANULE).unwrap();
            assert_eq!(moves(&plan).iter().map(|&(_, _, count)| count).sum::<u64>(), moved, "of {granules}");
        }
    }

    #[test]
    fn a_step_that_fails_leaves_all_as_it_was() {
        let mut arena = with_free(&[1, 3, 7, 9, 15]);
        let ages = |arena: &Arena| arena.idle.longest_idle().collect::<Vec<_>>();
        let before = (arena.stats(), ages(&arena));
        let plan = arena.compact(5 * GRANULE).unwrap();
        assert_eq!(arena.stats().transit_bytes, 4 * GRANULE);
        assert!(!arena.finish_plan(plan, &[StepOutcome::Failed], 50_000_000));
        assert_eq!((arena.stats(), ages(&arena)), before);
        let plan = arena.compact(5 * GRANULE).unwrap();
        assert!(!arena.finish_plan(plan, &[StepOutcome::Lost; 2], 50_000_000));
        assert_eq!(arena.stats().committed_bytes, 14 * GRANULE);
        arena.validate().unwrap();
    }

    #[test]
    fn what_could_not_be_released_is_idle_again_and_tried_last() {
        let mut arena = with_free(&[1, 3, 5, 7]);
        let plan = arena.release_idle(3 * GRANULE).unwrap();
        assert!(plan.is_release());
        assert!(!arena.finish_plan(plan, &[StepOutcome::Made, StepOutcome::Failed, StepOutcome::Made], 9_000_000));
        arena.validate().unwrap();
        let idle: Vec<_> = arena.idle.longest_idle().map(|run| (run.extent, run.since_us)).collect();
        assert_eq!(idle, [(at(7), 3_000_000), (at(3), 9_000_000)]);
    }

    #[test]
    fn a_plan_that_is_given_up_leaves_every_granule_as_old_as_it_was() {
        let mut arena = with_free(&[1, 3, 5, 7]);
        let ages = |arena: &Arena| arena.idle.longest_idle().collect::<Vec<_>>();
        let before = (arena.stats(), ages(&arena));
        let plan = arena.release_idle(3 * GRANULE).unwrap();
        assert!(!arena.finish_plan(plan, &[], 0));
        assert_eq!((arena.stats(), ages(&arena)), before);
        // The same for a plan in which a region replaces a smaller one.
        let mut regions = Arena::new(GrowthMode::Regions, Retention::default());
        let limits = GrowthLimits { step_bytes: 0, ..GrowthLimits::UNLIMITED };
        let plan = regions.plan_growth(4 * GRANULE, limits).unwrap();
        let buffer = plan.buffer().unwrap();
        assert!(regions.finish_succeeded(plan, 0));
        regions.free(buffer, 3_000_000);
        let before = (regions.stats(), ages(&regions));
        let plan = regions.plan_growth(8 * GRANULE, limits).unwrap();
        assert!(plan.steps().first().is_some_and(|step| step.decommitted().is_some()), "{plan:?}");
        assert!(!regions.finish_plan(plan, &[], 0));
        assert_eq!((regions.stats(), ages(&regions)), before);
        regions.validate().unwrap();
    }

    #[test]
    fn compaction_skips_holes_that_exist_or_are_too_large() {
        assert!(with_free(&[1, 3, 5]).compact(2 * GRANULE).is_none(), "a request can remap it");
        assert!(with_free(&[1, 2, 3, 4, 9]).compact(4 * GRANULE).is_none(), "the hole exists");
        assert!(with_free(&[]).compact(8 * GRANULE).is_none(), "nothing is idle");
        let plan = with_free(&[1, 3, 5, 7]).compact(60 * GRANULE).unwrap();
        assert_eq!(moves(&plan), [(1, 16, 1), (3, 17, 1)], "as much as is idle");
        let mut regions = Arena::new(GrowthMode::Regions, Retention::default());
        assert!(regions.compact(8 * GRANULE).is_none() && !regions.lacks_hole(8 * GRANULE));
    }
}
