//! Plans that decommit idle granules: by time (policy-R9), or at once for a trim, under pressure or at the limit.

use super::extent::{Extent, first_bytes};
use super::plan::{Plan, Step};
use super::retain::IdleRun;
use super::{Arena, GrowthMode};

impl Arena {
    /// A plan for `now_us` (policy-R9): once per step of time it decommits a share of the granules that have been idle for
    /// the idle timeout, the longest idle first.
    pub(crate) fn release_due(&mut self, now_us: u64) -> Option<Plan> {
        if now_us < self.next_release_us {
            return None;
        }
        let by_granules = (self.growth != GrowthMode::Regions).then_some(self.sizes);
        let selected = self.retention.select(&self.idle, by_granules, now_us);
        let selected = self.no_more_than(selected, self.releasable_bytes());
        if selected.is_empty() {
            return None;
        }
        self.next_release_us = now_us.saturating_add(self.retention.step_us);
        self.release(selected)
    }

    /// Whether [`Arena::release_due`] would return a plan. It may still return none if all due memory but a part of a granule is
    /// kept.
    pub(crate) fn is_release_due(&self, now_us: u64) -> bool {
        now_us >= self.next_release_us
            && self.releasable_bytes() > 0
            && self.retention.due(&self.idle, now_us).next().is_some()
    }

    /// Bytes of the idle granules that are due at `now_us`.
    pub(crate) fn due_bytes(&self, now_us: u64) -> u64 {
        let due: u64 = self.retention.due(&self.idle, now_us).map(|run| run.extent.bytes()).sum();
        due.min(self.releasable_bytes())
    }

    /// A plan that decommits idle granules, the longest idle first, until `bytes` are decommitted or only what is kept is idle.
    pub(crate) fn release_idle(&mut self, bytes: u64) -> Option<Plan> {
        let releasable_bytes = self.releasable_bytes();
        self.release(self.no_more_than(self.longest_idle(bytes.min(releasable_bytes)), releasable_bytes))
    }

    /// A plan that decommits idle granules, kept ones too, the longest idle first, until `bytes` are decommitted. Less is kept
    /// from then on. For a lowered limit.
    pub(crate) fn release_idle_of_kept(&mut self, bytes: u64) -> Option<Plan> {
        self.release(self.longest_idle(bytes))
    }

    /// A plan that decommits idle granules, the longest idle first, until at most `to_bytes` stay held or only what is kept is
    /// idle.
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

    /// The longest idle granules that make up `bytes`, or all, as extents by address.
    pub(super) fn longest_idle(&self, bytes: u64) -> Vec<Extent> {
        self.longest_idle_within(Extent { start: 0, end: u64::MAX }, bytes)
    }

    /// The longest idle granules within `bounds` that make up `bytes`, or all, as extents by address.
    pub(super) fn longest_idle_within(&self, bounds: Extent, bytes: u64) -> Vec<Extent> {
        let idle = self.idle.longest_idle().filter_map(|run| run.extent.common(bounds));
        let up = |extent: Extent, end| self.granules_around(Extent { end, ..extent }).end.min(extent.end);
        joined(first_bytes(idle, bytes, up))
    }

    /// Moves idle granules from the holes into transit, and their ages to `idle_before`.
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
