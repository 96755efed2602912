//! A reserve that is committed piece by piece (policy-R10): granules of a virtual range that are committed without a buffer, and
//! a minimum of committed bytes that releases keep (the floor).
//!
//! ```text
//!   | live | hole | live |  hole  |  uncommitted ...
//!                                  ^^^^ commit_next: the lowest uncommitted granules, one step
//!   committed outside reserves >= kept_bytes, whatever is released
//! ```
//!
//! The floor counts bytes, not addresses: granules that a request commits while the reserve is being built are part of it, and
//! reserve granules may be remapped like any other granules.
//!
//! The floor never exceeds the bytes that are committed (arena-I6): whenever a plan is finished, the floor is lowered to them if
//! necessary.

use super::extent::{Extent, first_bytes};
use super::plan::{Plan, Step};
use super::{Arena, GrowthMode};

impl Arena {
    /// Plans to commit the lowest uncommitted granules, without a buffer: about `bytes` in granules of one size, and at least one
    /// granule. They become a hole when the plan is finished.
    ///
    /// # Errors
    ///
    /// The bytes of the next granule if they exceed `commit_bytes`, or 0 if no granule is uncommitted or the arena grows by
    /// regions.
    pub(crate) fn commit_next(&mut self, bytes: u64, commit_bytes: u64) -> Result<Plan, u64> {
        if self.growth == GrowthMode::Regions {
            return Err(0);
        }
        let run = self.uncommitted.iter().next().ok_or(0_u64)?;
        let (of_size, granule_bytes) = self.granules_of_same_size(run);
        let most = bytes.min(commit_bytes) / granule_bytes * granule_bytes;
        let most = most.max(granule_bytes);
        if most > commit_bytes {
            return Err(granule_bytes);
        }
        let extent = Extent { end: run.end.min(of_size.end).min(run.start.saturating_add(most)), ..run };
        self.take_target(extent);
        Ok(self.plan(None, vec![Step::Commit { extent }], Vec::new()))
    }

    /// Raises the floor by `bytes`, at most to the bytes that are committed outside of reserves.
    pub(crate) fn keep(&mut self, bytes: u64) {
        self.kept_bytes = self.kept_bytes.saturating_add(bytes);
        self.lower_floor();
    }

    /// Returns the floor: the bytes outside of reserves that releases leave committed.
    pub(crate) fn kept_bytes(&self) -> u64 {
        self.kept_bytes
    }

    /// Returns the bytes that are committed outside of the ranges of reserves.
    pub(crate) fn committed_outside_reserves(&self) -> u64 {
        self.stats.committed_bytes - self.stats.reserve_bytes
    }

    /// Returns the bytes of idle granules and regions that may be released without going below the floor.
    pub(crate) fn releasable_bytes(&self) -> u64 {
        let staying = self.committed_outside_reserves() - self.leaving_bytes;
        self.idle.bytes().min(staying.saturating_sub(self.kept_bytes))
    }

    /// Lowers the floor to the bytes that are still committed.
    pub(super) fn lower_floor(&mut self) {
        self.kept_bytes = self.kept_bytes.min(self.committed_outside_reserves());
    }

    /// Returns the first extents of `selected`, at most `most_bytes` in total. The last extent is cut to whole granules.
    pub(super) fn truncate_to(&self, selected: Vec<Extent>, most_bytes: u64) -> Vec<Extent> {
        let down = |extent: Extent, end| self.range_of(extent).map_or(end, |range| range.grid.down(end));
        first_bytes(selected, most_bytes, down)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::{GrowthLimits, Retention, StepOutcome};

    const GRANULE: u64 = 2 << 20;

    fn arena(granules: u64) -> Arena {
        let mut arena = Arena::new(GrowthMode::Granules(GRANULE), Retention::default());
        arena.add_virtual_range(granules * GRANULE).unwrap();
        arena
    }

    fn commit(arena: &mut Arena, granules: u64) {
        let plan = arena.commit_next(granules * GRANULE, u64::MAX).unwrap();
        assert!(arena.finish_succeeded(plan, 0));
        arena.keep(granules * GRANULE);
        arena.validate().unwrap();
    }

    #[test]
    fn reserve_steps_commit_the_lowest_granules() {
        let mut arena = arena(64);
        commit(&mut arena, 4);
        commit(&mut arena, 4);
        assert_eq!((arena.stats().hole_bytes, arena.stats().mappings), (8 * GRANULE, 8));
        let spanning = arena.carve(8 * GRANULE).expect("one hole");
        arena.free(spanning, 0);
        assert!(arena.release_down_to(0).is_none() && arena.release_idle(GRANULE).is_none());
        assert!(arena.release_due(3_600_000_000).is_none() && arena.releasable_bytes() == 0);
        // Only the bytes above the floor are released.
        let plan = arena.plan_growth(12 * GRANULE, GrowthLimits::UNLIMITED).unwrap();
        let buffer = plan.buffer().unwrap();
        assert!(arena.finish_succeeded(plan, 0));
        arena.free(buffer, 0);
        let plan = arena.release_down_to(0).unwrap();
        assert!(arena.finish_succeeded(plan, 0));
        arena.validate().unwrap();
        assert_eq!((arena.stats().committed_bytes, arena.kept_bytes()), (8 * GRANULE, 8 * GRANULE));
    }

    #[test]
    fn a_step_that_fails_changes_nothing_and_one_without_room_names_the_granule() {
        let mut arena = arena(4);
        let before = arena.stats();
        let plan = arena.commit_next(GRANULE, u64::MAX).unwrap();
        assert_eq!(arena.stats().claimed_bytes, GRANULE);
        assert!(!arena.finish_plan(plan, &[StepOutcome::Failed], 0));
        arena.validate().unwrap();
        assert_eq!(arena.stats(), before);
        assert_eq!(arena.commit_next(GRANULE, GRANULE - 1).unwrap_err(), GRANULE);
        commit(&mut arena, 4);
        assert_eq!(arena.commit_next(GRANULE, u64::MAX).unwrap_err(), 0, "no address is left");
    }

    #[test]
    fn a_forced_release_lowers_what_is_kept() {
        let mut arena = arena(8);
        commit(&mut arena, 8);
        let plan = arena.release_idle_of_kept(3 * GRANULE).unwrap();
        assert!(arena.finish_succeeded(plan, 0));
        arena.validate().unwrap();
        assert_eq!((arena.kept_bytes(), arena.stats().committed_bytes), (5 * GRANULE, 5 * GRANULE));
    }
}
