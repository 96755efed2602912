//! Carries out the arena's plans on the source, and knows at which addresses its ranges lie.
//!
//! The arena decides in numbers; here they become calls. Nothing in this room decides, and no lock is held around a call.

use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::Arc;

use super::gate::Closed;
use crate::arena::{self, ArenaPtr, Plan, PlanOutcome, Step};
use crate::backend::{self, Region, RemapError, Source, SourceError, Subrange};

/// Where the ranges of an arena lie. Kept under the ground's lock, beside the arena.
#[derive(Debug, Default)]
pub(super) struct Mappings(HashMap<u32, Mapping>);

/// The memory behind one range of the arena.
#[derive(Debug)]
pub(super) enum Mapping {
    /// Addresses in which granules come and go.
    Spanning(Arc<backend::AddressRange>),
    /// One acquisition: a walled region, or a reserve.
    Region(Region),
}

/// What came of a plan's steps.
#[derive(Debug)]
pub(super) struct Executed {
    pub(super) outcome: PlanOutcome,
    /// Regions acquired, by the number of their range.
    pub(super) regions: Vec<(u32, Region)>,
    /// Why the step after the last one done failed.
    pub(super) error: Option<SourceError>,
    pub(super) locked_bytes: u64,
    pub(super) released_bytes: u64,
    /// Calls that took memory from the system, and that gave it back.
    pub(super) locks: u64,
    pub(super) releases: u64,
}

impl Executed {
    fn nothing() -> Self {
        Self {
            outcome: PlanOutcome::Done,
            regions: Vec::new(),
            error: None,
            locked_bytes: 0,
            released_bytes: 0,
            locks: 0,
            releases: 0,
        }
    }

    fn released(&mut self, bytes: u64) {
        self.releases += 1;
        self.released_bytes += bytes;
    }
}

impl Mappings {
    pub(super) fn add(&mut self, range: u32, site: Mapping) {
        self.0.insert(range, site);
    }

    /// The address of a place that the arena handed out.
    #[allow(unsafe_code)]
    pub(super) fn address(&self, place: ArenaPtr) -> Option<NonNull<u8>> {
        let start = match self.0.get(&place.range())? {
            Mapping::Spanning(range) => range.start(),
            Mapping::Region(region) => region.start(),
        };
        let offset = usize::try_from(place.offset()).ok()?;
        // SAFETY: the arena hands out offsets inside its ranges (arena I1), and a range is one piece of addresses (span
        // S1) or one region (source C1).
        Some(unsafe { start.add(offset) })
    }

    /// The spanning ranges that the steps of `plan` touch; those of regions are taken out, for their release.
    pub(super) fn tools_for(&mut self, plan: &Plan) -> Executor {
        let mut tools = Executor { spanning: None, leaving: HashMap::new() };
        for step in plan.steps() {
            let range = match *step {
                Step::Commit { extent } | Step::Decommit { extent } => extent.range(),
                Step::Remap { from, .. } => from.range(),
            };
            match (self.0.get(&range), step) {
                (Some(Mapping::Spanning(spanning)), _) => tools.spanning = Some(spanning.clone()),
                (Some(Mapping::Region(_)), Step::Decommit { .. }) => {
                    if let Some(Mapping::Region(region)) = self.0.remove(&range) {
                        tools.leaving.insert(range, region);
                    }
                }
                _ => {}
            }
        }
        tools
    }

    /// Puts back what was to leave and did not.
    pub(super) fn keep(&mut self, tools: Executor) {
        self.0.extend(tools.leaving.into_iter().map(|(range, region)| (range, Mapping::Region(region))));
    }

    /// Where each of them lies.
    pub(super) fn places(&self) -> Vec<(NonNull<u8>, usize)> {
        let place = |site: &Mapping| match site {
            Mapping::Spanning(range) => (range.start(), range.len_bytes()),
            Mapping::Region(region) => (region.start(), region.len_bytes()),
        };
        self.0.values().map(place).collect()
    }

    pub(super) fn drain(&mut self) -> impl Iterator<Item = Mapping> + '_ {
        self.0.drain().map(|(_, site)| site)
    }
}

/// What the steps of one plan work on, outside of the lock.
#[derive(Debug)]
pub(super) struct Executor {
    spanning: Option<Arc<backend::AddressRange>>,
    leaving: HashMap<u32, Region>,
}

impl Executor {
    /// Makes the steps of `plan` one after the other, up to the first that fails; opens the gate behind the last release,
    /// since copies need not wait for memory that comes. Slow calls.
    pub(super) fn build(&mut self, source: &dyn Source, plan: &Plan, mut closed: Option<Closed<'_>>) -> Executed {
        let mut built = Executed::nothing();
        let releases =
            plan.steps().iter().rposition(|step| matches!(step, Step::Decommit { .. })).map_or(0, |last| last + 1);
        let mut rest = plan.steps();
        while !rest.is_empty() {
            let done = plan.steps().len() - rest.len();
            if done >= releases {
                closed = None;
            }
            let (now, later) = rest.split_at(made_at_once(rest));
            if let Err(error) = self.make(source, now, &mut built) {
                let (outcome, error) = match error {
                    RemapError::Kept(error) => (PlanOutcome::Failed { done }, error),
                    RemapError::Lost(error) => {
                        now.iter().for_each(|step| built.released(step.remapped_bytes()));
                        (PlanOutcome::Lost { done, remaps: now.len() }, error)
                    }
                };
                (built.outcome, built.error) = (outcome, Some(error));
                break;
            }
            rest = later;
        }
        drop(closed);
        built
    }

    /// Makes the steps of `plan`, all of them releases, whichever of them fail; says which did. Slow calls.
    pub(super) fn release_each(&mut self, source: &dyn Source, plan: &Plan) -> (Executed, Vec<usize>) {
        let (mut built, mut failed) = (Executed::nothing(), Vec::new());
        for (index, step) in plan.steps().iter().enumerate() {
            if let Err(error) = self.make(source, std::slice::from_ref(step), &mut built) {
                failed.push(index);
                // The first says why; the others will say the same.
                built.error.get_or_insert(error.into());
            }
        }
        (built, failed)
    }

    /// One step, or several moves to one place.
    fn make(&mut self, source: &dyn Source, steps: &[Step], built: &mut Executed) -> Result<(), RemapError> {
        match *steps {
            [Step::Commit { extent }] => {
                self.lock(source, extent, built).map_err(RemapError::Kept)?;
                built.locks += 1;
                built.locked_bytes += extent.bytes();
            }
            [Step::Decommit { extent }] => {
                self.release(source, extent).map_err(RemapError::Kept)?;
                built.released(extent.bytes());
            }
            _ => self.relocate(source, steps)?,
        }
        Ok(())
    }

    #[allow(unsafe_code)]
    fn lock(&mut self, source: &dyn Source, extent: arena::Extent, built: &mut Executed) -> Result<(), SourceError> {
        let (offset, bytes) = (as_len(extent.offset())?, as_len(extent.bytes())?);
        match (source.virtual_memory(), &self.spanning) {
            (Some(spans), Some(range)) => {
                // SAFETY: the range is this source's; the granules are bare and in transit, so nobody else touches them
                // until the plan is settled (arena I1).
                unsafe { spans.commit(range, offset, bytes) }
            }
            _ => source.acquire(bytes).map(|region| built.regions.push((extent.range(), region))),
        }
    }

    #[allow(unsafe_code)]
    fn release(&mut self, source: &dyn Source, extent: arena::Extent) -> Result<(), SourceError> {
        if let Some(region) = self.leaving.remove(&extent.range()) {
            let again = Region::new(region.start(), region.len_bytes(), region.id());
            // SAFETY: the region is this source's, wholly free and in transit: no block lies in it, so no reference and no
            // copy does (in_flight invariants 1 and 2).
            return unsafe { source.release(region) }.inspect_err(|_| {
                // It stays what it was: mapped and locked (source C1).
                self.leaving.insert(extent.range(), again);
            });
        }
        let (offset, bytes) = (as_len(extent.offset())?, as_len(extent.bytes())?);
        match (source.virtual_memory(), &self.spanning) {
            (Some(spans), Some(range)) => {
                // SAFETY: the range is this source's; the granules are locked, wholly free and in transit: no block lies in
                // them, so no reference and no copy does (in_flight invariants 1 and 2).
                unsafe { spans.decommit(range, offset, bytes) }
            }
            _ => Err(SourceError::new("release", "the region is not known")),
        }
    }

    #[allow(unsafe_code)]
    fn relocate(&self, source: &dyn Source, moves: &[Step]) -> Result<(), RemapError> {
        let cannot = || RemapError::Kept(SourceError::new("relocate", "granules do not move between ranges"));
        let (mut pieces, mut target) = (Vec::with_capacity(moves.len()), None);
        for step in moves {
            let Step::Remap { from, to } = *step else { return Err(cannot()) };
            if from.range() != to.range() {
                return Err(cannot());
            }
            let piece = || Ok(Subrange { offset: as_len(from.offset())?, bytes: as_len(from.bytes())? });
            pieces.push(piece().map_err(RemapError::Kept)?);
            target.get_or_insert(to);
        }
        match (source.virtual_memory(), &self.spanning, target) {
            (Some(spans), Some(range), Some(target)) => {
                let to = as_len(target.offset()).map_err(RemapError::Kept)?;
                // SAFETY: as for `release` of the granules of the pieces and for `lock` of those at `to`, which the plan has
                // for them, one behind the other (`made_at_once`).
                unsafe { spans.remap(range, &pieces, to) }
            }
            _ => Err(cannot()),
        }
    }
}

/// How many of the steps are made in one call: one, or all moves of the first's range whose targets adjoin.
fn made_at_once(steps: &[Step]) -> usize {
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

fn as_len(bytes: u64) -> Result<usize, SourceError> {
    usize::try_from(bytes).map_err(|_| SourceError::new("arena", format!("{bytes} B are more than an address space")))
}
