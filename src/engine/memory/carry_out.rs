//! Executes the arena's plans on a source, and maps the arena's ranges to addresses.
//!
//! ```text
//!   Plan (numbers) ──▶ Executor: commit, decommit, remap on the source ──▶ Executed (what happened)
//!                       ▲
//!   Mappings: range of the arena ─▶ reserved addresses, or one region
//! ```
//!
//! Owns the mappings. Decides nothing; no lock is held around a source call.

use std::collections::{BTreeMap, HashMap};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

use super::called_source::CalledSource;
use crate::arena::{
    Arena, ArenaPtr, Extent, GranuleSizes, GrowthMode, Plan, PlanOutcome, RANGE_BYTES_MAX, Retention, Step,
};
use crate::backend::{self, AddressRange, PAGE_BYTES, Region, RemapError, SourceError, Subrange};
use crate::stats::SourceCalls;

/// The smallest granule where the ceiling leaves room for it.
pub(in crate::engine) const GRANULE_BYTES: u64 = backend::GRANULE_BYTES as u64;
/// Under a ceiling of fewer granules than this, granules are smaller: the pool must be able to hold several.
const GRANULES_MIN: u64 = 8;
/// Addresses are reserved for this many times the ceiling, so that holes between long-lived buffers cost no memory.
const ADDRESSES_PER_BYTE: u64 = 8;
/// Addresses to reserve at least, for a ceiling that is raised later. They cost nothing but addresses: a process of 4096 pools, as
/// many as the C interface has handles for, needs half of its 128 TiB for them.
const ADDRESS_BYTES_PREFERRED: u64 = 16 << 30;
/// Without this many there is no pool.
const ADDRESS_BYTES_MIN: u64 = 256 << 20;
/// What helps where the system gave fewer addresses than were asked for.
const FEW_ADDRESSES: &str =
    "the system gave this process few addresses: raise its limit (`ulimit -v`, RLIMIT_AS), or ask for less at once";

/// Addresses of the ranges of an arena, in their order, so that the same calls release them in the same order. Kept under
/// the arena's lock.
#[derive(Debug, Default)]
pub(in crate::engine) struct Mappings(BTreeMap<u32, Mapping>);

/// The addresses of one range of the arena.
#[derive(Debug)]
pub(in crate::engine) enum Mapping {
    /// Reserved addresses, in which granules are committed and decommitted.
    Addresses(Arc<AddressRange>),
    /// One acquisition: a discrete region, or a reserve.
    Region(Region),
}

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

impl Mappings {
    pub(in crate::engine) fn add(&mut self, range: u32, mapping: Mapping) {
        self.0.insert(range, mapping);
    }

    /// The address of what the arena carved at `ptr`.
    #[allow(unsafe_code)]
    pub(in crate::engine) fn address(&self, ptr: ArenaPtr) -> Option<NonNull<u8>> {
        let start = self.0.get(&ptr.range())?.extent().0;
        let offset = usize::try_from(ptr.offset()).ok()?;
        // SAFETY: the arena carves inside its ranges (arena-I1), and a range is contiguous: reserved addresses (vm-S1) or
        // one region (source-C1).
        Some(unsafe { start.add(offset) })
    }

    /// What the steps of `plan` work on: the reserved addresses, and the regions to be released, which leave this table.
    pub(in crate::engine) fn executor(&mut self, plan: &Plan) -> Executor {
        let mut executor = Executor { addresses: None, leaving: HashMap::new(), until: None };
        for step in plan.steps() {
            let range = match *step {
                Step::Commit { extent } | Step::Decommit { extent } => extent.range(),
                Step::Remap { from, .. } => from.range(),
            };
            match (self.0.get(&range), step) {
                (Some(Mapping::Addresses(addresses)), _) => executor.addresses = Some(addresses.clone()),
                (Some(Mapping::Region(_)), Step::Decommit { .. }) => {
                    if let Some(Mapping::Region(region)) = self.0.remove(&range) {
                        executor.leaving.insert(range, region);
                    }
                }
                _ => {}
            }
        }
        executor
    }

    /// Address and length of each range.
    pub(in crate::engine) fn extents(&self) -> Vec<(NonNull<u8>, usize)> {
        self.0.values().map(Mapping::extent).collect()
    }

    pub(in crate::engine) fn drain(&mut self) -> impl Iterator<Item = Mapping> + use<> {
        std::mem::take(&mut self.0).into_values()
    }
}

impl Mapping {
    fn extent(&self) -> (NonNull<u8>, usize) {
        match self {
            Self::Addresses(range) => (range.start(), range.len_bytes()),
            Self::Region(region) => (region.start(), region.len_bytes()),
        }
    }

    /// Bytes of a region; `None` for addresses, whose granules are counted one by one.
    pub(in crate::engine) fn region_bytes(&self) -> Option<u64> {
        match self {
            Self::Region(region) => Some(region.len_bytes() as u64),
            Self::Addresses(_) => None,
        }
    }

    /// Returns it to `source`. A slow call.
    ///
    /// # Safety
    ///
    /// It came from `source`, and no block lies in it.
    #[allow(unsafe_code)] // Memory and addresses leave the pool.
    pub(in crate::engine) unsafe fn release(self, source: &CalledSource) -> Result<(), SourceError> {
        match self {
            // SAFETY: the caller's promise.
            Self::Region(region) => unsafe { source.release(region) },
            Self::Addresses(range) => match Arc::into_inner(range) {
                // SAFETY: the caller's promise; granules that are still committed are those whose release failed.
                Some(range) => unsafe { source.unreserve(range) },
                None => Err(SourceError::new("unreserve", "the addresses are still in use")),
            },
        }
    }
}

/// The steps of one plan in progress, outside the lock.
#[derive(Debug)]
pub(in crate::engine) struct Executor {
    addresses: Option<Arc<AddressRange>>,
    leaving: HashMap<u32, Region>,
    /// Acquisitions wait for those of other threads no longer.
    until: Option<Instant>,
}

impl Executor {
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
                let committed = self.commit(source, extent, executed);
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
    fn commit(&mut self, source: &CalledSource, extent: Extent, executed: &mut Executed) -> Result<(), SourceError> {
        let (offset, bytes) = (as_len(extent.offset())?, as_len(extent.bytes())?);
        match &self.addresses {
            // SAFETY: the range is this source's; the granules are uncommitted and in transit, so no other thread
            // touches them until the plan is settled (arena-I1).
            Some(range) => unsafe { source.commit(range, offset, bytes) },
            None => {
                let acquired = source.acquire(bytes, self.until);
                acquired.map(|region| executed.regions.push((extent.range(), region)))
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
                // It stays mapped and page-locked (source-C1).
                self.leaving.insert(extent.range(), again);
            });
        }
        let (offset, bytes) = (as_len(extent.offset())?, as_len(extent.bytes())?);
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
            let subrange = || Ok(Subrange { offset: as_len(from.offset())?, bytes: as_len(from.bytes())? });
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

/// How many of the steps one source call executes: one, or all moves in one range whose targets adjoin.
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

fn as_len(bytes: u64) -> Result<usize, SourceError> {
    usize::try_from(bytes).map_err(|_| SourceError::new("arena", format!("{bytes} B are more than an address space")))
}

/// An arena for what `source` can do, its mappings, and the shape of its growth. Reserves addresses, pins nothing.
pub(in crate::engine) fn arena_over(
    source: &CalledSource,
    max_bytes: Option<u64>,
    retention: Retention,
) -> Result<(Arena, Mappings, GrowthShape), SourceError> {
    let mut mappings = Mappings::default();
    let Some(memory) = source.virtual_memory() else {
        let shape = GrowthShape {
            sizes: GranuleSizes::uniform(PAGE_BYTES as u64),
            ample_bytes: PAGE_BYTES as u64,
            longest_bytes: RANGE_BYTES_MAX,
            is_discrete: true,
            address_remedy: None,
        };
        let source = source.clone();
        let arena = Arena::new(GrowthMode::Regions, retention)
            .with_region_cost(move |bytes| held(bytes, |len| source.held_bytes(len)));
        return Ok((arena, mappings, shape));
    };
    let granule_bytes = granule_bytes(max_bytes, memory.granule_bytes() as u64);
    let sizes = GranuleSizes::of_pool(granule_bytes, max_bytes);
    let mut arena = Arena::new(GrowthMode::Granules(granule_bytes), retention).with_granule_sizes(sizes);
    let (addresses, address_remedy) = reserve_addresses(|bytes| memory.reserve(bytes), max_bytes, granule_bytes)?;
    let address_bytes = addresses.len_bytes() as u64;
    let range = arena
        .add_virtual_range(address_bytes)
        .ok_or_else(|| SourceError::new("reserve", format!("{address_bytes} B are no range")))?;
    mappings.add(range, Mapping::Addresses(Arc::new(addresses.with_granules(sizes))));
    let shape = GrowthShape {
        sizes,
        ample_bytes: sizes.zone_at(max_bytes.unwrap_or(0).saturating_sub(1)).granule_bytes,
        longest_bytes: sizes.down(address_bytes),
        is_discrete: false,
        address_remedy,
    };
    Ok((arena, mappings, shape))
}

/// What `held_bytes` of a source says for `bytes`.
pub(in crate::engine) fn held(bytes: u64, held_bytes: impl FnOnce(usize) -> usize) -> u64 {
    usize::try_from(bytes).map_or(u64::MAX, |len| held_bytes(len) as u64)
}

/// In which units an arena grows.
#[derive(Debug, Clone, Copy)]
pub(in crate::engine) struct GrowthShape {
    /// The granules; pages for discrete regions.
    pub(in crate::engine) sizes: GranuleSizes,
    /// The largest granules that a pool uses that holds its first ceiling without gaps.
    pub(in crate::engine) ample_bytes: u64,
    /// Longest buffer that there are addresses for.
    pub(in crate::engine) longest_bytes: u64,
    /// Grows by regions of their own, not by granules.
    pub(in crate::engine) is_discrete: bool,
    /// What helps where the system gave fewer addresses than are useful.
    pub(in crate::engine) address_remedy: Option<&'static str>,
}

/// The smallest granule of a pool under that ceiling.
pub(crate) fn granule_bytes(max_bytes: Option<u64>, least_bytes: u64) -> u64 {
    let previous_power_of_two = |n: u64| n.checked_ilog2().map_or(1, |log| 1 << log);
    let fair = max_bytes.map_or(GRANULE_BYTES, |max_bytes| previous_power_of_two(max_bytes / GRANULES_MIN));
    fair.min(GRANULE_BYTES).max(least_bytes)
}

/// Reserves as many addresses as are useful; fewer where the system refuses (`ulimit -v`), down to what a small pool needs.
/// Then also returns what helps.
fn reserve_addresses(
    reserve: impl Fn(usize) -> Result<AddressRange, SourceError>,
    max_bytes: Option<u64>,
    granule_bytes: u64,
) -> Result<(AddressRange, Option<&'static str>), SourceError> {
    let whole = |bytes: u64| (bytes / granule_bytes).max(1) * granule_bytes;
    let wanted = max_bytes.map_or(RANGE_BYTES_MAX / 2, |max_bytes| max_bytes.saturating_mul(ADDRESSES_PER_BYTE));
    let mut bytes = whole(wanted.clamp(ADDRESS_BYTES_PREFERRED, RANGE_BYTES_MAX / 2));
    let least = whole(ADDRESS_BYTES_MIN.min(bytes));
    let mut remedy = None;
    loop {
        let reserved = usize::try_from(bytes)
            .map_err(|_| SourceError::new("reserve", format!("{bytes} B are more than an address space")))
            .and_then(&reserve);
        match reserved {
            Err(_) if bytes > least => {
                bytes = whole(bytes / 2).max(least);
                remedy = Some(FEW_ADDRESSES);
            }
            reserved => return reserved.map(|range| (range, remedy)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_addresses_of_4096_pools_fit_into_a_process() {
        let asked = std::cell::Cell::new(0);
        let refuse = |bytes: usize| {
            asked.set(asked.get().max(bytes as u64));
            Err(SourceError::new("reserve", "as many as there are"))
        };
        for max_bytes in [1 << 20, 64 << 20, 2 << 30] {
            assert!(reserve_addresses(refuse, Some(max_bytes), GRANULE_BYTES).is_err());
        }
        assert!(
            asked.get() * 4096 <= (1 << 47) / 2 && asked.get() >= (2 << 30) * ADDRESSES_PER_BYTE,
            "{}",
            asked.get()
        );
    }

    #[test]
    fn a_granule_is_two_mebibytes_or_an_eighth_of_a_small_ceiling_but_at_least_the_granule_of_the_source() {
        let cases =
            [(None, GRANULE_BYTES), (Some(16 << 20), GRANULE_BYTES), (Some(15 << 20), 1 << 20), (Some(0), 4096)];
        for (max_bytes, granule) in cases {
            assert_eq!(granule_bytes(max_bytes, 4096), granule, "{max_bytes:?}");
        }
        assert_eq!(granule_bytes(Some(1 << 20), GRANULE_BYTES), GRANULE_BYTES);
        assert_eq!(granule_bytes(Some(u64::MAX), 4096), GRANULE_BYTES);
    }
}
