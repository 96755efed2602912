//! Carries out the arena's plans on a source. No lock is held meanwhile.
//!
//! ```text
//!   Plan (numbers) ──▶ Execution: commit, decommit, remap on the source ──▶ what happened, for the books
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

/// The steps of one plan, outside the lock, and their results.
#[derive(Debug)]
pub(in crate::engine) struct Execution {
    addresses: Option<Arc<AddressRange>>,
    /// Until when an acquisition may wait for acquisitions of other threads.
    until: Instant,
    /// Regions by range: to be released at first, then also acquired. They belong to the mappings afterwards.
    pub(in crate::engine) regions: HashMap<u32, Region>,
    pub(in crate::engine) calls: SourceCalls,
    /// Why the first step that failed did.
    pub(in crate::engine) error: Option<SourceError>,
    pub(in crate::engine) outcome: PlanOutcome,
}

impl Execution {
    /// Of the steps of `plan`. Regions to be released leave `mappings`. Waits for acquisitions of other threads until `until`.
    pub(in crate::engine) fn new(mappings: &mut Mappings, plan: &Plan, until: Instant) -> Self {
        let (calls, outcome) = (SourceCalls::default(), PlanOutcome::Done);
        let mut execution = Self { addresses: None, until, regions: HashMap::new(), calls, error: None, outcome };
        for step in plan.steps() {
            let range = match *step {
                Step::Commit { extent } | Step::Decommit { extent } => extent.range(),
                Step::Remap { from, .. } => from.range(),
            };
            match (mappings.0.get(&range), step) {
                (Some(Mapping::Addresses(addresses)), _) => execution.addresses = Some(addresses.clone()),
                (Some(Mapping::Region(_)), Step::Decommit { .. }) => {
                    if let Some(Mapping::Region(region)) = mappings.0.remove(&range) {
                        execution.regions.insert(range, region);
                    }
                }
                _ => {}
            }
        }
        execution
    }

    /// Executes the steps of `plan` in order: each step of a release, others up to the first that fails. Slow calls.
    pub(in crate::engine) fn execute(&mut self, source: &CalledSource, plan: &Plan) {
        let (mut rest, mut failed) = (plan.steps(), Vec::new());
        while !rest.is_empty() {
            let done = plan.steps().len() - rest.len();
            let (now, later) = rest.split_at(steps_in_one_call(rest));
            rest = later;
            let Err(error) = self.call(source, now) else { continue };
            match error {
                RemapError::Kept(_) if plan.is_release() => failed.push(done),
                RemapError::Kept(_) => {
                    self.outcome = PlanOutcome::Failed { done };
                    rest = &[];
                }
                RemapError::Lost(_) => {
                    now.iter().for_each(|step| self.calls.lost(step.remapped_bytes()));
                    self.outcome = PlanOutcome::Lost { done, remaps: now.len() };
                    rest = &[];
                }
            }
            // The first error is enough; the others have the same cause.
            self.error.get_or_insert(error.into());
        }
        if !failed.is_empty() {
            self.outcome = PlanOutcome::Tried { failed };
        }
    }

    /// One step, or several moves to adjoining targets.
    fn call(&mut self, source: &CalledSource, steps: &[Step]) -> Result<(), RemapError> {
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
                        let acquired = source.acquire(bytes, Some(self.until));
                        acquired.map(|region| {
                            self.regions.insert(extent.range(), region);
                        })
                    }
                };
                self.calls.pin.record(extent.bytes(), begun.elapsed(), committed.is_ok());
                committed.map_err(RemapError::Kept)
            }
            [Step::Decommit { extent }] => {
                let released = self.decommit(source, extent);
                self.calls.unpin.record(extent.bytes(), begun.elapsed(), released.is_ok());
                released.map_err(RemapError::Kept)
            }
            _ => {
                let remapped = self.remap(source, steps);
                let bytes = steps.iter().map(Step::remapped_bytes).sum();
                self.calls.remap.record(bytes, begun.elapsed(), remapped.is_ok());
                remapped
            }
        }
    }

    #[allow(unsafe_code)]
    fn decommit(&mut self, source: &CalledSource, extent: Extent) -> Result<(), SourceError> {
        if let Some(region) = self.regions.remove(&extent.range()) {
            let again = Region::new(region.start(), region.len_bytes(), region.id());
            // SAFETY: the region is this source's, wholly free and in transit (arena-I1): no block lies in it, so no
            // reference and no copy uses it (core-I1).
            let released = unsafe { source.release(region) };
            return released.inspect_err(|_| {
                // It stays mapped and pinned (source-C1).
                self.regions.insert(extent.range(), again);
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
