//! Carries out the arena's plans on a source, while the arena's state is unlocked.
//!
//! ```text
//!   Plan (numbers) ──▶ Execution: commit, decommit, remap on the source ──▶ what happened, for the arena state
//! ```
//!
//! This module decides nothing.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use super::metered_source::MeteredSource;
use super::shape::Mappings;
use crate::arena::{Extent, Plan, Step, StepOutcome};
use crate::backend::{AddressRange, BuiltInSource, Region, RemapError, SourceError, Subrange};
use crate::stats::SourceCalls;

/// The steps of one plan, outside the lock, and their results.
#[derive(Debug)]
pub(in crate::engine) struct Execution {
    addresses: Option<Arc<AddressRange>>,
    /// The time until which an acquisition may wait for other threads' acquisitions.
    until: Instant,
    /// Regions by range: at first the regions to release, at the end the regions that were acquired or not released, which then
    /// go to the mappings.
    pub(in crate::engine) regions: HashMap<u32, Region>,
    pub(in crate::engine) calls: SourceCalls,
    /// The error of the first step that failed.
    pub(in crate::engine) error: Option<SourceError>,
    /// The outcomes of the steps that were tried, in order.
    pub(in crate::engine) outcomes: Vec<StepOutcome>,
}

impl Execution {
    /// Prepares the steps of `plan`, and removes the regions to release from `mappings`. Acquisitions wait for other
    /// threads' acquisitions until `until`.
    pub(in crate::engine) fn new(mappings: &mut Mappings, plan: &Plan, until: Instant) -> Self {
        let decommitted = plan.steps().iter().filter_map(Step::decommitted).map(Extent::range);
        let regions = decommitted.filter_map(|range| Some((range, mappings.regions.remove(&range)?))).collect();
        let addresses = mappings.addresses.as_ref().map(|(_, addresses)| addresses.clone());
        Self { addresses, until, regions, calls: SourceCalls::default(), error: None, outcomes: Vec::new() }
    }

    /// Executes the steps of `plan` in order: every step of a release, and otherwise the steps up to the first that fails.
    /// The call may be slow.
    pub(in crate::engine) fn execute(&mut self, source: &MeteredSource, plan: &Plan) {
        let mut rest = plan.steps();
        while !rest.is_empty() && (self.error.is_none() || plan.is_release()) {
            let (now, later) = rest.split_at(steps_in_one_call(rest));
            rest = later;
            let called = match *now {
                [Step::Commit { extent }] => self.commit(source, extent).map_err(RemapError::Kept),
                [Step::Decommit { extent }] => self.decommit(source, extent).map_err(RemapError::Kept),
                _ => self.remap(source, now),
            };
            let outcome = match called {
                Ok(()) => StepOutcome::Made,
                Err(RemapError::Kept(_)) => StepOutcome::Failed,
                Err(RemapError::Lost(_)) => StepOutcome::Lost,
            };
            self.outcomes.extend(now.iter().map(|_| outcome));
            if let Err(error) = called {
                // The first error is enough: later errors usually have the same cause.
                self.error.get_or_insert(error.into());
            }
        }
    }

    #[allow(unsafe_code)]
    fn commit(&mut self, source: &MeteredSource, extent: Extent) -> Result<(), SourceError> {
        let (place, counts) = (place(extent), &mut self.calls.pin);
        match &self.addresses {
            // SAFETY: the range is this source's; the granules are uncommitted and in transit, so no other thread
            // touches them until the plan is finished (arena-I1).
            Some(range) => unsafe { source.commit(range, place, counts) },
            None => {
                let region =
                    source.acquire(place.bytes, counts, |inner| inner.acquire_until(place.bytes, self.until))?;
                self.regions.insert(extent.range(), region);
                Ok(())
            }
        }
    }

    #[allow(unsafe_code)]
    fn decommit(&mut self, source: &MeteredSource, extent: Extent) -> Result<(), SourceError> {
        if let Some(region) = self.regions.get(&extent.range()) {
            // SAFETY: the region is this source's, wholly free and in transit (arena-I1): no block lies in it, so no
            // reference and no copy uses it (core-I1).
            unsafe { source.release(region, &mut self.calls.unpin) }?;
            // After an error the region stays mapped and pinned (source-C1).
            self.regions.remove(&extent.range());
            return Ok(());
        }
        match &self.addresses {
            // SAFETY: the range is this source's; the granules are committed, wholly free and in transit (arena-I1): no
            // block lies in them, so no reference and no copy uses them (core-I1).
            Some(range) => unsafe { source.decommit(range, place(extent), &mut self.calls.unpin) },
            None => Err(SourceError::new("release", "the region is not known")),
        }
    }

    #[allow(unsafe_code)]
    fn remap(&mut self, source: &MeteredSource, moves: &[Step]) -> Result<(), RemapError> {
        let cannot = || RemapError::Kept(SourceError::new("remap", "there are no granules"));
        let (mut sources, mut target) = (Vec::with_capacity(moves.len()), None);
        for step in moves {
            let Step::Remap { from, to } = *step else { return Err(cannot()) };
            sources.push(place(from));
            target.get_or_insert(to);
        }
        match (&self.addresses, target) {
            (Some(range), Some(target)) => {
                let to = place(target).offset;
                // SAFETY: as in `decommit` for the granules of `sources`, and as in `commit` for the target granules, which
                // follow each other from `to` on (`steps_in_one_call`).
                unsafe { source.remap(range, &sources, to, &mut self.calls) }
            }
            _ => Err(cannot()),
        }
    }
}

/// Returns how many of the steps one source call executes: one step, or all remaps from the first on that have adjacent
/// targets. Offsets suffice to compare the targets, since there is only one range of granules.
fn steps_in_one_call(steps: &[Step]) -> usize {
    let adjoin = |pair: &&[Step]| match **pair {
        [Step::Remap { to: before, .. }, Step::Remap { to, .. }] => before.offset() + before.bytes() == to.offset(),
        _ => false,
    };
    1 + steps.windows(2).take_while(adjoin).count()
}

/// Returns `extent` as a subrange. The offset fits, since it is within a range of addresses. If the length of a region does not
/// fit, its source refuses it.
fn place(extent: Extent) -> Subrange {
    let [offset, bytes] = [extent.offset(), extent.bytes()].map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
    Subrange { offset, bytes }
}
