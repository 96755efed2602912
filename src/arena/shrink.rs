//! Giving idle granules back: by time (rule 9), or now, for a trim, under pressure, at the ceiling.

use super::extent::Extent;
use super::plan::{Plan, Step};
use super::retain::{IdleRun, Retention};
use super::{Arena, GrowthMode};

impl Arena {
    /// What is due at `now_us` (rule 9): once each step of time a share of the granules that have been empty for the
    /// retain time, longest empty first.
    pub fn release_due(&mut self, now_us: u64) -> Option<Plan> {
        if now_us < self.next_release_us {
            return None;
        }
        let going = self.retention.going(&self.idle, self.granule_bytes(), now_us);
        if going.is_empty() {
            return None;
        }
        self.next_release_us = now_us + self.retention.step_us;
        self.release(going)
    }

    /// Would [`Arena::release_due`] have something to do?
    #[must_use]
    pub fn is_release_due(&self, now_us: u64) -> bool {
        now_us >= self.next_release_us && self.retention.due(&self.idle, now_us).next().is_some()
    }

    /// Bytes in idle granules whose time has come by `now_us`.
    #[must_use]
    pub fn due_bytes(&self, now_us: u64) -> u64 {
        self.retention.due(&self.idle, now_us).map(|run| run.extent.bytes()).sum()
    }

    /// IdleGranules granules, longest empty first, until what stays locked is at most `to_bytes` or nothing is idle.
    pub fn release_down_to(&mut self, to_bytes: u64) -> Option<Plan> {
        let leaving = self.stats.transit_bytes - self.locking_bytes;
        let locked = self.stats.committed_bytes - leaving;
        self.release(self.oldest_idle(locked.saturating_sub(to_bytes)))
    }

    /// Ends a plan of releases alone, of which the steps numbered in `failed` gave nothing back: none depends on another.
    /// What would not go is idle since `now_us`, so that it is the last to be tried again.
    pub fn settle_releases(&mut self, plan: &Plan, failed: &[usize], now_us: u64) {
        for (index, extent) in plan.steps.iter().enumerate().filter_map(|(index, step)| Some((index, step.released()?)))
        {
            let gone = !failed.contains(&index);
            self.left(extent, gone, now_us);
        }
    }

    /// Changes when granules go.
    pub fn set_retention(&mut self, retention: Retention) {
        self.retention = retention;
    }

    fn granule_bytes(&self) -> Option<u64> {
        match self.growth {
            GrowthMode::Granules(granule_bytes) => Some(granule_bytes),
            GrowthMode::Regions => None,
        }
    }

    fn release(&mut self, going: Vec<Extent>) -> Option<Plan> {
        let (mut steps, mut idle_before) = (Vec::new(), Vec::new());
        for extent in joined(going) {
            self.leave(extent, &mut idle_before);
            steps.push(Step::Decommit { extent });
        }
        (!steps.is_empty()).then_some(Plan { buffer: None, steps, idle_before })
    }

    /// The longest empty granules that make up `bytes`, or all there are, as runs by address.
    pub(super) fn oldest_idle(&self, bytes: u64) -> Vec<Extent> {
        let mut missing = bytes;
        let mut found = Vec::new();
        for IdleRun { extent, .. } in self.idle.oldest_first() {
            if missing == 0 {
                break;
            }
            let granule_bytes = self.granule_bytes().unwrap_or(extent.bytes());
            let bytes = extent.bytes().min(missing.next_multiple_of(granule_bytes));
            missing = missing.saturating_sub(bytes);
            found.push(Extent::new(extent.ptr(), bytes));
        }
        joined(found)
    }

    /// Takes idle granules out of the holes, and their ages to `idle_before`: from now on they are in transit.
    pub(super) fn leave(&mut self, extent: Extent, idle_before: &mut Vec<IdleRun>) {
        let Some(range) = self.range_of(extent.ptr()) else { return };
        if let Some(hole) = self.holes[range.set as usize].around(extent) {
            self.take(range.set, hole, extent, |run| idle_before.push(run));
            self.stats.transit_bytes += extent.bytes();
        } else {
            debug_assert!(false, "{extent:?} is not in a hole");
        }
    }
}

/// Neighbours made one: what fell idle at different times still goes in one call.
fn joined(mut extents: Vec<Extent>) -> Vec<Extent> {
    extents.sort_unstable();
    extents.dedup_by(|next, extent| {
        let touches = extent.end == next.start;
        extent.end = if touches { next.end } else { extent.end };
        touches
    });
    extents
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::{ArenaPtr, GrowthLimits, PlanOutcome};

    const GRANULE: u64 = 2 << 20;

    /// Ten granules that fell idle one after the other, the last one first, a second apart.
    fn idle() -> Arena {
        let mut arena = Arena::new(GrowthMode::Granules(GRANULE), Retention::default());
        arena.add_virtual_range(64 * GRANULE).unwrap();
        let room = GrowthLimits { commit_bytes: u64::MAX, may_decommit_regions: true, step_bytes: u64::MAX };
        let plan = arena.grow(10 * GRANULE, GRANULE, room).unwrap();
        assert!(arena.settle(plan, PlanOutcome::Done, 0));
        for second in 0..10 {
            arena.free(ArenaPtr::new(0, (9 - second) * GRANULE), GRANULE, second * 1_000_000);
        }
        arena
    }

    fn released(arena: &mut Arena, plan: Option<Plan>) -> Vec<u64> {
        let Some(plan) = plan else { return Vec::new() };
        let granules = |step: &Step| match *step {
            Step::Decommit { extent } => extent.offset() / GRANULE..(extent.offset() + extent.bytes()) / GRANULE,
            _ => 0..0,
        };
        let extents = plan.steps().iter().flat_map(granules).collect();
        arena.settle(plan, PlanOutcome::Done, 0);
        arena.validate().unwrap();
        extents
    }

    #[test]
    fn a_fifth_of_what_is_due_goes_each_second_longest_empty_first() {
        let mut arena = idle();
        assert!(arena.release_due(44_999_999).is_none(), "not yet");
        // At 54 s all ten are due: two go, then a fifth of eight, rounded up.
        let at = |arena: &mut Arena, now_us| {
            let plan = arena.release_due(now_us);
            released(arena, plan)
        };
        assert_eq!(at(&mut arena, 54_000_000), [8, 9]);
        assert_eq!(at(&mut arena, 54_999_999), [0_u64; 0], "once a second");
        assert_eq!(at(&mut arena, 55_000_000), [6, 7]);
        assert_eq!(at(&mut arena, 56_000_000), [4, 5]);
        assert_eq!(at(&mut arena, 57_000_000), [3]);
    }

    #[test]
    fn a_trim_stops_at_what_it_was_asked_for() {
        let mut arena = idle();
        let plan = arena.release_down_to(7 * GRANULE);
        assert_eq!(plan.as_ref().map(|plan| plan.steps().len()), Some(1), "one call for three neighbours");
        assert_eq!(released(&mut arena, plan), [7, 8, 9]);
        assert_eq!(arena.stats().committed_bytes, 7 * GRANULE);
        assert!(arena.release_down_to(7 * GRANULE).is_none());
        let plan = arena.release_down_to(0);
        released(&mut arena, plan);
        assert_eq!(arena.stats().committed_bytes, 0);
    }

    #[test]
    fn what_would_not_go_holds_back_no_others_and_is_tried_last() {
        let mut arena = idle();
        let due = |arena: &mut Arena, now_us| arena.release_due(now_us).map(|plan| (plan.steps().to_vec(), plan));
        let (steps, plan) = due(&mut arena, 45_000_000).unwrap();
        assert_eq!(steps, [Step::Decommit { extent: Extent::new(ArenaPtr::new(0, 9 * GRANULE), GRANULE) }]);
        arena.settle_releases(&plan, &[0], 45_000_000);
        arena.validate().unwrap();
        assert_eq!(arena.stats().committed_bytes, 10 * GRANULE);
        let (steps, plan) = due(&mut arena, 46_000_000).unwrap();
        assert_eq!(
            steps,
            [Step::Decommit { extent: Extent::new(ArenaPtr::new(0, 8 * GRANULE), GRANULE) }],
            "the next oldest"
        );
        assert!(!arena.settle(plan, PlanOutcome::Failed { done: 0 }, 46_000_000));
        let (steps, plan) = due(&mut arena, 47_000_000).unwrap();
        assert_eq!(
            steps,
            [Step::Decommit { extent: Extent::new(ArenaPtr::new(0, 7 * GRANULE), GRANULE) }],
            "and so on"
        );
        arena.settle_releases(&plan, &[], 47_000_000);
        arena.validate().unwrap();
        assert_eq!(arena.stats().committed_bytes, 9 * GRANULE);
    }

    #[test]
    fn a_retain_time_of_none_keeps_everything() {
        let mut arena = idle();
        arena.set_retention(Retention { idle_timeout_us: None, ..Retention::default() });
        assert!(arena.release_due(u64::MAX).is_none());
    }
}
