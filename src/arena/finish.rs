//! Finishes plans: completed steps become the state of the arena, and the others are undone.

use super::extent::Extent;
use super::plan::{Plan, Step, StepOutcome};
use super::retain::IdleRun;
use super::{Arena, RangeKind};

impl Arena {
    /// Finishes a plan: records the completed steps and undoes the rest. Returns whether all were made, so that the
    /// buffer is granted.
    pub(crate) fn finish_plan(&mut self, plan: Plan, outcomes: &[StepOutcome], now_us: u64) -> bool {
        self.planned_bytes -= plan.claim_bytes;
        let is = |step: usize, outcome| outcomes.get(step) == Some(&outcome);
        let granted = (0..plan.steps.len()).all(|step| is(step, StepOutcome::Made));
        // The granules that a plan without a buffer commits or moves are idle. All get the age of the oldest of them
        // (policy-R13).
        let oldest_us = plan.idle_before.iter().map(|run| run.since_us).min();
        let since_us = oldest_us.filter(|_| plan.buffer.is_none()).unwrap_or(now_us);
        // The part of the buffer that was committed before the plan.
        let mut rest: Vec<Extent> = plan.buffer.into_iter().collect();
        for (index, &step) in plan.steps.iter().enumerate() {
            let made = is(index, StepOutcome::Made);
            let target = match step {
                Step::Commit { extent } => extent,
                Step::Remap { from, to } => {
                    self.finish_source(from, made || is(index, StepOutcome::Lost), now_us);
                    to
                }
                Step::Decommit { extent } => {
                    self.finish_source(extent, made, now_us);
                    continue;
                }
            };
            self.finish_target(target, made, since_us);
            rest = rest.into_iter().flat_map(|part| part.without(target)).flatten().collect();
        }
        rest.into_iter().for_each(|part| self.add_hole(part, now_us));
        if let Some(buffer) = plan.buffer.filter(|_| granted) {
            self.take_free(buffer, |_| ());
        } else {
            self.stats.live_bytes -= plan.buffer.map_or(0, Extent::bytes);
        }
        if !granted {
            // Granules that are idle again get their old age back. Granules that failed to decommit are idle since now, so that
            // they are tried again last and block no others.
            let failed = plan.steps.iter().enumerate().filter(|&(index, _)| is(index, StepOutcome::Failed));
            let refused: Vec<_> = failed.filter_map(|(_, step)| step.decommitted()).collect();
            let not_refused = |run: &IdleRun| !refused.iter().any(|refused| refused.contains(run.extent));
            for IdleRun { extent, since_us } in plan.idle_before.into_iter().filter(not_refused) {
                let mut again = Vec::new();
                self.idle.cut(extent, |run| again.push(run.extent));
                again.into_iter().for_each(|extent| self.idle.add(IdleRun { extent, since_us }));
            }
        }
        self.record_kept();
        granted
    }

    /// Finishes a plan with every step made.
    #[cfg(test)]
    pub(super) fn finish_made(&mut self, plan: Plan, now_us: u64) -> bool {
        let made = vec![StepOutcome::Made; plan.steps.len()];
        self.finish_plan(plan, &made, now_us)
    }

    /// Granules that a plan committed or remapped into, or failed to.
    fn finish_target(&mut self, extent: Extent, committed: bool, since_us: u64) {
        self.stats.transit_bytes -= extent.bytes();
        if committed {
            let held_bytes = self.held_bytes(extent.bytes());
            self.stats.committed_bytes += extent.bytes();
            self.stats.mappings += self.mappings(extent);
            self.stats.overhead_bytes += held_bytes - extent.bytes();
            self.add_hole(extent, since_us);
        } else {
            self.set_uncommitted(extent);
        }
    }

    /// Idle granules that a plan took: decommitted, or idle again.
    fn finish_source(&mut self, extent: Extent, gone: bool, now_us: u64) {
        self.stats.transit_bytes -= extent.bytes();
        self.leaving_bytes -= extent.bytes();
        if gone {
            let held_bytes = self.held_bytes(extent.bytes());
            self.stats.committed_bytes -= extent.bytes();
            self.stats.mappings -= self.mappings(extent);
            self.stats.overhead_bytes -= held_bytes - extent.bytes();
            self.set_uncommitted(extent);
        } else {
            self.add_hole(extent, now_us);
        }
    }

    /// The granules of `extent`; 1 for a region.
    fn mappings(&self, extent: Extent) -> u64 {
        self.range_of(extent).map_or(0, |range| range.grid.count(extent))
    }

    /// Granules become uncommitted; a discrete region is removed.
    fn set_uncommitted(&mut self, extent: Extent) {
        if self.range_of(extent).is_some_and(|range| range.kind == RangeKind::Discrete) {
            self.ranges.remove(&extent.range());
        } else {
            self.uncommitted.add(extent);
        }
    }
}
