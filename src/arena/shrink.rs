//! Plans that decommit idle granules: when they are due (policy-R9), or immediately for a trim, under memory pressure or at the
//! limit.

use super::extent::{Extent, first_bytes};
use super::plan::{Plan, Step};
use super::retain::IdleRun;
use super::{Arena, GrowthMode};

impl Arena {
    /// Plans the decommits that are due at `now_us` (policy-R9): a share of the granules that have been idle for the idle
    /// timeout, the longest idle first. Returns at most one plan per `Retention::step_us`.
    pub(crate) fn release_due(&mut self, now_us: u64) -> Option<Plan> {
        if now_us < self.next_release_us {
            return None;
        }
        let by_granules = (self.growth != GrowthMode::Regions).then_some(self.sizes);
        let selected = self.retention.select(&self.idle, by_granules, now_us);
        let selected = self.truncate_to(selected, self.releasable_bytes());
        if selected.is_empty() {
            return None;
        }
        self.next_release_us = now_us.saturating_add(self.retention.step_us);
        self.release(selected)
    }

    /// Returns whether [`Arena::release_due`] would return a plan. It may still return `None` if the floor permits the
    /// release of only part of a granule.
    pub(crate) fn is_release_due(&self, now_us: u64) -> bool {
        now_us >= self.next_release_us
            && self.releasable_bytes() > 0
            && self.retention.due(&self.idle, now_us).next().is_some()
    }

    /// Returns the bytes of the idle granules that are due at `now_us`, without the bytes that the floor keeps.
    pub(crate) fn due_bytes(&self, now_us: u64) -> u64 {
        self.retention.due(&self.idle, now_us).map(|run| run.extent.bytes()).sum::<u64>().min(self.releasable_bytes())
    }

    /// Plans to decommit idle granules, the longest idle first, until `bytes` are decommitted or a further decommit would go
    /// below the floor.
    pub(crate) fn release_idle(&mut self, bytes: u64) -> Option<Plan> {
        let releasable_bytes = self.releasable_bytes();
        self.release(self.truncate_to(self.longest_idle(bytes.min(releasable_bytes)), releasable_bytes))
    }

    /// Plans to decommit idle granules, the longest idle first, until `bytes` are decommitted, even if that goes below the floor.
    /// The floor is lowered when the plan is finished. Used when the limit was lowered.
    pub(crate) fn release_idle_of_kept(&mut self, bytes: u64) -> Option<Plan> {
        self.release(self.longest_idle(bytes))
    }

    /// Plans to decommit idle granules, the longest idle first, until the system holds at most `to_bytes` or a further decommit
    /// would go below the floor.
    pub(crate) fn release_down_to(&mut self, to_bytes: u64) -> Option<Plan> {
        let staying = self.stats.committed_bytes + self.stats.overhead_bytes - self.leaving_bytes;
        self.release_idle(staying.saturating_sub(to_bytes))
    }

    fn release(&mut self, selected: Vec<Extent>) -> Option<Plan> {
        let (mut steps, mut idle_before) = (Vec::new(), Vec::new());
        for extent in joined(selected) {
            self.take_idle(extent, &mut idle_before);
            steps.push(Step::Decommit { extent });
        }
        (!steps.is_empty()).then(|| self.plan(None, steps, idle_before))
    }

    /// Returns the longest idle granules that make up `bytes`, or all idle granules if they have fewer bytes, as
    /// extents by address.
    pub(super) fn longest_idle(&self, bytes: u64) -> Vec<Extent> {
        self.longest_idle_within(Extent { start: 0, end: u64::MAX }, bytes)
    }

    /// Returns the same as [`longest_idle`](Self::longest_idle), but only granules within `bounds`.
    pub(super) fn longest_idle_within(&self, bounds: Extent, bytes: u64) -> Vec<Extent> {
        let idle = self.idle.longest_idle().filter_map(|run| run.extent.common(bounds));
        let up = |extent: Extent, end| self.granules_around(Extent { end, ..extent }).end.min(extent.end);
        joined(first_bytes(idle, bytes, up))
    }

    /// Moves idle granules from the holes into transit, and adds their ages to `idle_before`.
    pub(super) fn take_idle(&mut self, extent: Extent, idle_before: &mut Vec<IdleRun>) {
        self.take_free(extent, |run| idle_before.push(run));
        self.stats.transit_bytes += extent.bytes();
        self.leaving_bytes += extent.bytes();
    }
}

/// Merges adjacent extents, so that granules that became idle at different times are decommitted in one call.
pub(super) fn joined(mut extents: Vec<Extent>) -> Vec<Extent> {
    extents.sort_unstable();
    extents.dedup_by(|next, extent| {
        let touches = extent.end == next.start;
        extent.end = if touches { next.end } else { extent.end };
        touches
    });
    extents
}
