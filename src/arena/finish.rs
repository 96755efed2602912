//! Finishes plans: records the completed steps in the state of the arena, and undoes the other steps.

use super::extent::Extent;
use super::plan::{Plan, Step, StepOutcome};
use super::retain::IdleRun;
use super::{Arena, RangeKind};

impl Arena {
    /// Finishes a plan: records the completed steps and undoes the other steps. Returns whether all steps succeeded;
    /// only then is the buffer granted.
    pub(crate) fn finish_plan(&mut self, plan: Plan, outcomes: &[StepOutcome], now_us: u64) -> bool {
        self.planned_bytes -= plan.claim_bytes;
        let is = |step: usize, outcome| outcomes.get(step) == Some(&outcome);
        let granted = (0..plan.steps.len()).all(|step| is(step, StepOutcome::Made));
        // The granules that a plan without a buffer commits or remaps are idle now. All of them get the age of the granules that
        // were idle longest (policy-R13).
        let oldest_us = plan.idle_before.iter().map(|run| run.since_us).min();
        let since_us = oldest_us.filter(|_| plan.buffer.is_none()).unwrap_or(now_us);
        // The part of the buffer that is in none of the plan's targets, because it was committed before the plan.
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
            // Granules that are idle again get their previous age. Granules that could not be decommitted become idle
            // now, so that they are retried last and do not delay other granules.
            let failed = plan.steps.iter().enumerate().filter(|&(index, _)| is(index, StepOutcome::Failed));
            let refused: Vec<_> = failed.filter_map(|(_, step)| step.decommitted()).collect();
            let not_refused = |run: &IdleRun| !refused.iter().any(|refused| refused.contains(run.extent));
            for IdleRun { extent, since_us } in plan.idle_before.into_iter().filter(not_refused) {
                let mut again = Vec::new();
                self.idle.cut(extent, |run| again.push(run.extent));
                again.into_iter().for_each(|extent| self.idle.add(IdleRun { extent, since_us }));
            }
        }
        self.lower_floor();
        granted
    }

    /// Finishes a plan after all of its steps have succeeded.
    #[cfg(test)]
    pub(super) fn finish_succeeded(&mut self, plan: Plan, now_us: u64) -> bool {
        let made = vec![StepOutcome::Made; plan.steps.len()];
        self.finish_plan(plan, &made, now_us)
    }

    /// Ends the transit of granules that a plan should have committed or remapped into. `committed` says whether it did.
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

    /// Ends the transit of idle granules that a plan should have decommitted or remapped away. `gone` says whether they
    /// lost their memory; otherwise they are idle again.
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

    /// Returns the number of granules in `extent`, which is 1 for a region.
    fn mappings(&self, extent: Extent) -> u64 {
        self.range_of(extent).map_or(0, |range| range.grid.count(extent))
    }

    /// Makes granules uncommitted, or removes a separate region.
    fn set_uncommitted(&mut self, extent: Extent) {
        if self.range_of(extent).is_some_and(|range| range.kind == RangeKind::Separate) {
            self.ranges.remove(&extent.range());
        } else {
            self.uncommitted.add(extent);
        }
    }
}
