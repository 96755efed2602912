//! Carries out the arena's plans on a source. No lock is held meanwhile.
//!
//! ```text
//!   Plan (numbers) ──▶ Executor: commit, decommit, remap on the source ──▶ Executed (what happened)
//! ```
//!
//! Decides nothing.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use super::called_source::CalledSource;
use super::shape::{Mapping, Mappings};
use crate::arena::{Extent, Plan, PlanOutcome, Step};
use crate::backend::{AddressRange, Region, RemapError, SourceError, Subrange};
use crate::stats::SourceCalls;

/// The result of the steps of a plan.
#[derive(Debug, Default)]
pub(in crate::engine) struct Executed {
    /// Regions acquired, by range.
    pub(in crate::engine) regions: Vec<(u32, Region)>,
    /// Regions that were to be released and were not, by range.
    pub(in crate::engine) kept: HashMap<u32, Region>,
    pub(in crate::engine) calls: SourceCalls,
    /// Why the first step that failed did.
    pub(in crate::engine) error: Option<SourceError>,
}

/// The steps of one plan in progress, outside the lock.
#[derive(Debug)]
pub(in crate::engine) struct Executor {
    addresses: Option<Arc<AddressRange>>,
    leaving: HashMap<u32, Region>,
    /// Until when an acquisition may wait for acquisitions of other threads.
    until: Option<Instant>,
}

impl Executor {
    /// For the steps of `plan`. Regions to be released leave `mappings`.
    pub(in crate::engine) fn new(mappings: &mut Mappings, plan: &Plan) -> Self {
        let mut executor = Self { addresses: None, leaving: HashMap::new(), until: None };
        for step in plan.steps() {
            let range = match *step {
                Step::Commit { extent } | Step::Decommit { extent } => extent.range(),
                Step::Remap { from, .. } => from.range(),
            };
            match (mappings.0.get(&range), step) {
                (Some(Mapping::Addresses(addresses)), _) => executor.addresses = Some(addresses.clone()),
                (Some(Mapping::Region(_)), Step::Decommit { .. }) => {
                    if let Some(Mapping::Region(region)) = mappings.0.remove(&range) {
                        executor.leaving.insert(range, region);
                    }
                }
                _ => {}
            }
        }
        executor
    }

    /// Executes the steps of `plan` in order, up to the first that fails. Waits for acquisitions of other threads until
    /// `until`. Slow calls.
    pub(in crate::engine) fn execute(
        mut self,
        source: &CalledSource,
        plan: &Plan,
        until: Instant,
    ) -> (Executed, PlanOutcome) {
        self.until = Some(until);
        let (mut executed, mut outcome) = (Executed::default(), PlanOutcome::Done);
        let mut rest = plan.steps();
        while !rest.is_empty() {
            let done = plan.steps().len() - rest.len();
            let (now, later) = rest.split_at(steps_in_one_call(rest));
            if let Err(error) = self.call(source, now, &mut executed) {
                let (reached, error) = match error {
                    RemapError::Kept(error) => (PlanOutcome::Failed { done }, error),
                    RemapError::Lost(error) => {
                        now.iter().for_each(|step| executed.calls.lost(step.remapped_bytes()));
                        (PlanOutcome::Lost { done, remaps: now.len() }, error)
                    }
                };
                (outcome, executed.error) = (reached, Some(error));
                break;
            }
            rest = later;
        }
        (self.finish(executed), outcome)
    }

    /// Executes every step of `plan`, which has releases only, and returns the indices of those that failed. Slow calls.
    pub(in crate::engine) fn release_each(mut self, source: &CalledSource, plan: &Plan) -> (Executed, Vec<usize>) {
        let (mut executed, mut failed) = (Executed::default(), Vec::new());
        for (index, step) in plan.steps().iter().enumerate() {
            if let Err(error) = self.call(source, std::slice::from_ref(step), &mut executed) {
                failed.push(index);
                // The first error is enough; the others have the same cause.
                executed.error.get_or_insert(error.into());
            }
        }
        (self.finish(executed), failed)
    }

    fn finish(self, executed: Executed) -> Executed {
        Executed { kept: self.leaving, ..executed }
    }

    /// One step, or several moves to adjoining targets.
    fn call(&mut self, source: &CalledSource, steps: &[Step], executed: &mut Executed) -> Result<(), RemapError> {
        let begun = Instant::now();
        match *steps {
            [Step::Commit { extent }] => {
                let (offset, bytes) = place(extent).map_err(RemapError::Kept)?;
                let committed = match &self.addresses {
                    // SAFETY: the range is this source's; the granules are uncommitted and in transit, so no other thread
                    // touches them until the plan is finished (arena-I1).
                    #[allow(unsafe_code)]
                    Some(range) => unsafe { source.commit(range, offset, bytes) },
                    None => {
                        let acquired = source.acquire(bytes, self.until);
                        acquired.map(|region| executed.regions.push((extent.range(), region)))
                    }
                };
                executed.calls.pin.record(extent.bytes(), begun.elapsed(), committed.is_ok());
                committed.map_err(RemapError::Kept)
            }
            [Step::Decommit { extent }] => {
                let released = self.decommit(source, extent);
                executed.calls.unpin.record(extent.bytes(), begun.elapsed(), released.is_ok());
                released.map_err(RemapError::Kept)
            }
            _ => {
                let remapped = self.remap(source, steps);
                let bytes = steps.iter().map(Step::remapped_bytes).sum();
                executed.calls.remap.record(bytes, begun.elapsed(), remapped.is_ok());
                remapped
            }
        }
    }

    #[allow(unsafe_code)]
    fn decommit(&mut self, source: &CalledSource, extent: Extent) -> Result<(), SourceError> {
        if let Some(region) = self.leaving.remove(&extent.range()) {
            let again = Region::new(region.start(), region.len_bytes(), region.id());
            // SAFETY: the region is this source's, wholly free and in transit (arena-I1): no block lies in it, so no
            // reference and no copy uses it (core-I1).
            let released = unsafe { source.release(region) };
            return released.inspect_err(|_| {
                // It stays mapped and pinned (source-C1).
                self.leaving.insert(extent.range(), again);
            });
        }
        let (offset, bytes) = place(extent)?;
        match &self.addresses {
            // SAFETY: the range is this source's; the granules are committed, wholly free and in transit (arena-I1): no
            // block lies in them, so no reference and no copy uses them (core-I1).
            Some(range) => unsafe { source.decommit(range, offset, bytes) },
            None => Err(SourceError::new("release", "the region is not known")),
        }
    }

    #[allow(unsafe_code)]
    fn remap(&self, source: &CalledSource, moves: &[Step]) -> Result<(), RemapError> {
        let cannot = || RemapError::Kept(SourceError::new("remap", "granules do not move between ranges"));
        let (mut sources, mut target) = (Vec::with_capacity(moves.len()), None);
        for step in moves {
            let Step::Remap { from, to } = *step else { return Err(cannot()) };
            if from.range() != to.range() {
                return Err(cannot());
            }
            let subrange = || place(from).map(|(offset, bytes)| Subrange { offset, bytes });
            sources.push(subrange().map_err(RemapError::Kept)?);
            target.get_or_insert(to);
        }
        match (&self.addresses, target) {
            (Some(range), Some(target)) => {
                let to = as_len(target.offset()).map_err(RemapError::Kept)?;
                // SAFETY: as in `decommit` for the granules of `sources`, and as in `commit` for those at `to`, where
                // the plan has one target after the other (`steps_in_one_call`).
                unsafe { source.remap(range, &sources, to) }
            }
            _ => Err(cannot()),
        }
    }
}

/// How many of the steps one source call executes: one, or all remaps in one range with adjacent targets.
fn steps_in_one_call(steps: &[Step]) -> usize {
    let adjoin = |pair: &&[Step]| match **pair {
        [Step::Remap { to: before, .. }, Step::Remap { from, to }] => {
            before.range() == to.range()
                && from.range() == to.range()
                && before.offset() + before.bytes() == to.offset()
        }
        _ => false,
    };
    1 + steps.windows(2).take_while(adjoin).count()
}

/// Offset and length of `extent`.
fn place(extent: Extent) -> Result<(usize, usize), SourceError> {
    Ok((as_len(extent.offset())?, as_len(extent.bytes())?))
}

fn as_len(bytes: u64) -> Result<usize, SourceError> {
    usize::try_from(bytes).map_err(|_| SourceError::new("arena", format!("{bytes} B are more than an address space")))
}
