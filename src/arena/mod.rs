//! The arena: bookkeeping for the address ranges behind the idle buffers. It records which granules are committed (pinned), finds
//! where a buffer fits, and plans what to commit, remap or decommit. It works on numbers only: it commits no memory, takes no
//! lock, reads no clock, and logs nothing.
//!
//! ```text
//!  virtual range 0 (large, granules of 2 MiB)
//!  +----+-------+----+---------+-------------------+ - - - - - - - - - +
//!  |live| hole  |live|  hole   |   uncommitted     | in transit        |  uncommitted ...
//!  +----+-------+----+---------+-------------------+ - - - - - - - - - +
//!   committed granules ....... : not committed     : an unfinished plan owns it
//!
//!  range 1 (reserve: all committed, kept)      range 2.. (separate regions: one granule each, one acquisition)
//! ```
//!
//! | state of a byte | index | may be carved | may be committed / decommitted / remapped |
//! | --- | --- | --- | --- |
//! | live | none (the holder knows) | | |
//! | hole (free, committed) | `holes` | yes | its idle granules: decommitted, remapped away |
//! | uncommitted | `uncommitted` | only through a plan | committed, remapped into |
//! | in transit | none | no | no: a plan owns it |
//!
//! Extents and the hooks that commit and decommit them follow jemalloc's arenas (`extent_hooks_t`).
//!
//! # Invariants
//!
//! `Arena::validate` recounts them.
//!
//! - **arena-I1**: Holes, uncommitted extents, live buffers and extents in transit tile every range without overlap.
//! - **arena-I2**: The sum of committed bytes, bytes being committed and uncommitted bytes is the length of all ranges.
//! - **arena-I3**: A granule is in the idle index if and only if it is wholly inside a hole of a range that is not a reserve.
//! - **arena-I4**: At any time while a plan is carried out, `claimed_bytes` is at least the bytes that the system holds: the
//!   committed bytes, and the overhead of their regions.
//! - **arena-I5**: A hole is also in `regions` of its set if and only if it is part of a separate region, but not all of it.
//! - **arena-I6** (`reserve`): The floor of a reserve (`kept_bytes`) is at most the bytes that are committed outside of the
//!   ranges of reserves.
//! - **arena-I7**: Uncommitted extents consist of whole granules.

mod compaction;
mod extent;
mod extent_set;
mod finish;
mod gaps;
mod granules;
mod grow;
mod plan;
mod reserve;
mod retain;
mod separate_regions;
mod shrink;
mod size_history;

#[cfg(test)]
mod tests {
    mod ranges;
    mod reference;
    mod zones;
}

use std::collections::BTreeMap;

use extent::{Grid, RANGES_MAX};
use extent_set::ExtentSet;
use retain::{IdleGranules, IdleRun};
use separate_regions::RegionsInUse;

pub(crate) use extent::{Extent, RANGE_BYTES_MAX};
pub(crate) use granules::GranuleSizes;
pub(crate) use grow::GrowthLimits;
pub(crate) use plan::{Plan, Step, StepOutcome};
pub(crate) use retain::Retention;
pub(crate) use size_history::SizeHistory;

/// The set that indexes the holes of a range. Buffers of any size share virtual ranges and reserves. A separate region takes
/// either small or large buffers (policy-R11), so that a long-lived small buffer does not keep a large region committed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum HoleSet {
    Shared,
    Small,
    Large,
}

const HOLE_SETS: usize = 3;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum RangeKind {
    /// Initially uncommitted, and committed granule by granule.
    Virtual,
    /// Always committed.
    Reserve,
    /// One region: committed by one call, decommitted by one call.
    Separate,
}

#[derive(Clone, Copy, Debug)]
struct ArenaRange {
    kind: RangeKind,
    extent: Extent,
    set: HoleSet,
    grid: Grid,
}

/// The sizes of the arena, in bytes.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct ArenaStats {
    /// Committed bytes. A plan changes them when it is finished: granules that it decommits count until then, and granules that
    /// it commits do not.
    pub(crate) committed_bytes: u64,
    /// Committed bytes with their overhead, and the most that unfinished plans may add to them at any time.
    pub(crate) claimed_bytes: u64,
    /// Bytes that the system holds for separate regions in addition to their length.
    pub(crate) overhead_bytes: u64,
    /// Bytes in buffers, including the buffers of unfinished plans.
    pub(crate) live_bytes: u64,
    /// Bytes that are free and committed, and not in transit.
    pub(crate) hole_bytes: u64,
    /// Bytes of holes in granules that are wholly free and may be decommitted or remapped.
    pub(crate) free_granule_bytes: u64,
    /// Committed bytes in ranges of reserves.
    pub(crate) reserve_bytes: u64,
    /// Bytes of holes in ranges of reserves, which are kept.
    pub(crate) reserve_hole_bytes: u64,
    /// Bytes in granules of unfinished plans.
    pub(crate) transit_bytes: u64,
    /// Committed granules, separate regions and reserves. Each is one mapping of the process.
    pub(crate) mappings: u64,
}

/// The address ranges and their indices. The [module](self) describes them.
pub(crate) struct Arena {
    growth: GrowthMode,
    /// Sizes of the granules of the virtual ranges. Set before the arena has a range.
    pub(crate) sizes: GranuleSizes,
    /// The bytes that the system holds for a region of the given length: at least that length, and monotonic in it.
    pub(crate) region_cost: Box<dyn Fn(u64) -> u64 + Send>,
    ranges: BTreeMap<u32, ArenaRange>,
    /// Ranges are numbered in the order of their creation, until all numbers have been used once.
    next_range: u32,
    holes: [ExtentSet; HOLE_SETS],
    regions: [RegionsInUse; HOLE_SETS],
    uncommitted: ExtentSet,
    idle: IdleGranules,
    /// When granules are decommitted.
    pub(crate) retention: Retention,
    next_release_us: u64,
    stats: ArenaStats,
    /// Committed bytes that unfinished plans decommit or remap.
    leaving_bytes: u64,
    /// The most bytes that unfinished plans may add to the bytes that the system holds at any time.
    planned_bytes: u64,
    /// Bytes outside of the ranges of reserves that releases leave committed.
    kept_bytes: u64,
}

/// How the arena grows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum GrowthMode {
    /// By granules, anywhere in the virtual ranges. The smallest granules have this many bytes (a power of two), and granules at
    /// higher offsets may be larger (`GranuleSizes`). A buffer may span granules.
    Granules(u64),
    /// By separate regions. Each buffer lies within one region.
    Regions,
}

impl Arena {
    /// Returns an arena without ranges.
    pub(crate) fn new(growth: GrowthMode, retention: Retention) -> Self {
        let smallest_bytes = if let GrowthMode::Granules(bytes) = growth { bytes } else { 1 };
        Self {
            growth,
            sizes: GranuleSizes::for_pool(smallest_bytes, None),
            region_cost: Box::new(|bytes| bytes),
            ranges: BTreeMap::new(),
            next_range: 0,
            holes: Default::default(),
            regions: Default::default(),
            uncommitted: ExtentSet::default(),
            idle: IdleGranules::default(),
            retention,
            next_release_us: 0,
            stats: ArenaStats::default(),
            leaving_bytes: 0,
            planned_bytes: 0,
            kept_bytes: 0,
        }
    }

    /// Returns the bytes that the system holds for granules, or for a region, of `bytes`.
    pub(crate) fn held_bytes(&self, bytes: u64) -> u64 {
        match self.growth {
            GrowthMode::Granules(_) => bytes,
            GrowthMode::Regions => (self.region_cost)(bytes).max(bytes),
        }
    }

    /// Returns the bytes to claim for a buffer of `bytes` if all of its memory must be committed.
    pub(crate) fn grown_bytes(&self, bytes: u64) -> u64 {
        match self.growth {
            GrowthMode::Granules(_) => self.sizes.up(bytes),
            GrowthMode::Regions => self.held_bytes(bytes),
        }
    }

    /// Adds an uncommitted virtual range of `bytes`, rounded down to whole granules, and returns its number. Returns `None` if
    /// the arena grows by regions, if the range would be empty or too long, or if there are too many ranges.
    pub(crate) fn add_virtual_range(&mut self, bytes: u64) -> Option<u32> {
        if self.growth == GrowthMode::Regions || bytes > RANGE_BYTES_MAX {
            return None;
        }
        let id = self.add_range(RangeKind::Virtual, self.sizes.down(bytes), HoleSet::Shared)?;
        self.uncommitted.add(self.ranges.get(&id)?.extent);
        Some(id)
    }

    /// Adds a reserve (policy-R10) for buffers of every size. Its `bytes` are committed already, and are kept. Returns the number
    /// of its range.
    pub(crate) fn add_reserve(&mut self, bytes: u64) -> Option<u32> {
        let id = self.add_range(RangeKind::Reserve, bytes, HoleSet::Shared)?;
        let extent = self.ranges.get(&id)?.extent;
        self.stats.committed_bytes += bytes;
        self.stats.reserve_bytes += bytes;
        self.stats.mappings += 1;
        self.add_hole(extent, 0);
        Some(id)
    }

    fn add_range(&mut self, kind: RangeKind, bytes: u64, set: HoleSet) -> Option<u32> {
        if bytes == 0 || bytes > RANGE_BYTES_MAX {
            return None;
        }
        let id = (self.next_range..RANGES_MAX).chain(0..self.next_range).find(|id| !self.ranges.contains_key(id))?;
        self.next_range = (id + 1) % RANGES_MAX;
        let extent = Extent::new(id, 0, bytes);
        let sizes = if kind == RangeKind::Virtual { self.sizes } else { GranuleSizes::uniform(bytes) };
        self.ranges.insert(id, ArenaRange { kind, extent, set, grid: Grid { origin: extent.start, sizes } });
        Some(id)
    }

    /// Returns the range that contains `extent`. For a buffer that the arena returned, the range exists until the buffer is
    /// freed.
    fn range_of(&self, extent: Extent) -> Option<ArenaRange> {
        self.ranges.get(&extent.range()).copied()
    }

    /// Returns the set that serves buffers of `bytes` in addition to the shared set.
    fn own_set(&self, bytes: u64) -> HoleSet {
        match self.growth {
            GrowthMode::Granules(_) => HoleSet::Shared,
            GrowthMode::Regions if bytes <= separate_regions::SMALL_BYTES_MAX => HoleSet::Small,
            GrowthMode::Regions => HoleSet::Large,
        }
    }

    /// Takes a buffer of `bytes` from a committed hole, without a driver call. Chooses the tightest hole, the lowest among equals
    /// (policy-R5), or in separate regions the hole that policy-R11 prescribes. All lengths are multiples of a page, so the
    /// address is, too.
    pub(crate) fn carve(&mut self, bytes: u64) -> Option<Extent> {
        self.carve_in(self.own_set(bytes), bytes)
    }

    /// Carves like [`carve`](Self::carve), but from separate regions for buffers of the other kind (small or large): the last
    /// resort of policy-R11.
    pub(crate) fn carve_in_other_regions(&mut self, bytes: u64) -> Option<Extent> {
        let other = if self.own_set(bytes) == HoleSet::Small { HoleSet::Large } else { HoleSet::Small };
        self.carve_in(other, bytes)
    }

    fn carve_in(&mut self, set: HoleSet, bytes: u64) -> Option<Extent> {
        let shared = self.holes[HoleSet::Shared as usize].tightest(bytes).map(|hole| (HoleSet::Shared, hole));
        let (set, hole) = shared.or_else(|| Some((set, self.best_in_regions(set, bytes)?)))?;
        let buffer = hole.first(bytes);
        self.take(set, hole, buffer, |_| ());
        self.stats.live_bytes += bytes;
        Some(buffer)
    }

    /// Returns the length of the longest hole.
    pub(crate) fn longest_hole_bytes(&self) -> u64 {
        self.holes.iter().map(ExtentSet::longest_bytes).max().unwrap_or(0)
    }

    /// Returns the hole that policy-R11 chooses: a hole of exactly `bytes`, else a hole in the oldest region in use, else the
    /// tightest empty region.
    fn best_in_regions(&self, set: HoleSet, bytes: u64) -> Option<Extent> {
        // If no region in use has a hole that fits, this hole is an empty region.
        let tightest = self.holes[set as usize].tightest(bytes)?;
        let in_use = if tightest.bytes() == bytes { None } else { self.regions[set as usize].best(bytes) };
        Some(in_use.unwrap_or(tightest))
    }

    /// Frees a buffer. Granules that it leaves wholly free become idle at `now_us`.
    pub(crate) fn free(&mut self, buffer: Extent, now_us: u64) {
        self.stats.live_bytes -= buffer.bytes();
        self.add_hole(buffer, now_us);
    }

    pub(crate) fn stats(&self) -> ArenaStats {
        ArenaStats {
            hole_bytes: self.holes.iter().map(ExtentSet::bytes).sum(),
            free_granule_bytes: self.idle.bytes(),
            claimed_bytes: self.stats.committed_bytes + self.stats.overhead_bytes + self.planned_bytes,
            ..self.stats
        }
    }

    /// Finds the hole that contains `part`, and takes `part` out of it as [`take`](Self::take) does.
    fn take_free(&mut self, part: Extent, idle_before: impl FnMut(IdleRun)) {
        let set = self.range_of(part).map(|range| range.set);
        if let Some((set, hole)) = set.and_then(|set| Some((set, self.holes[set as usize].around(part)?))) {
            self.take(set, hole, part, idle_before);
        } else {
            debug_assert!(false, "{part:?} is not in a hole");
        }
    }

    /// Removes `part` of `hole` from the holes, and the granules that it touches from the idle granules. Passes the removed idle
    /// runs to `idle_before`.
    fn take(&mut self, set: HoleSet, hole: Extent, part: Extent, idle_before: impl FnMut(IdleRun)) {
        self.holes[set as usize].cut(hole, part);
        let Some(range) = self.range_of(part) else { return };
        if range.kind == RangeKind::Reserve {
            self.stats.reserve_hole_bytes -= part.bytes();
            return;
        }
        if range.kind == RangeKind::Separate {
            let regions = &mut self.regions[set as usize];
            regions.remove(hole, range.extent);
            hole.without(part).into_iter().flatten().for_each(|rest| regions.add(rest, range.extent));
        }
        if let Some(granules) = range.grid.touched_granules(hole, part) {
            self.idle.cut(granules, idle_before);
        }
    }

    /// Adds `part`, which is committed and has become free, to the holes. Granules that are now wholly free have been
    /// idle since `since_us`.
    fn add_hole(&mut self, part: Extent, since_us: u64) {
        let Some(range) = self.range_of(part) else {
            debug_assert!(false, "{part:?} lies in no range");
            return;
        };
        let hole = self.holes[range.set as usize].add(part);
        if range.kind == RangeKind::Reserve {
            self.stats.reserve_hole_bytes += part.bytes();
            return;
        }
        if range.kind == RangeKind::Separate {
            let regions = &mut self.regions[range.set as usize];
            hole.without(part).into_iter().flatten().for_each(|old| regions.remove(old, range.extent));
            regions.add(hole, range.extent);
        }
        if let Some(granules) = range.grid.touched_granules(hole, part) {
            self.idle.add(IdleRun { extent: granules, since_us });
        }
    }

    /// Recounts the invariants of the arena and of its indices by walking through all extents.
    ///
    /// # Errors
    ///
    /// The first violated invariant, with its numbers.
    #[cfg(test)]
    pub(crate) fn validate(&self) -> Result<(), String> {
        self.holes.iter().chain([&self.uncommitted]).try_for_each(ExtentSet::validate)?;
        self.idle.validate()?;
        let stats = self.stats();
        let all_bytes: u64 = self.ranges.values().map(|range| range.extent.bytes()).sum();
        let uncommitted_bytes = self.uncommitted.bytes();
        let committing_bytes = stats.transit_bytes - self.leaving_bytes;
        if stats.committed_bytes + committing_bytes + uncommitted_bytes != all_bytes {
            return Err(format!(
                "arena-I2: {} committed, {committing_bytes} committing, {uncommitted_bytes} uncommitted are not {all_bytes}",
                stats.committed_bytes
            ));
        }
        // While a plan is unfinished, bytes of its buffer may lie in granules in transit, so this check of arena-I1 is only a
        // bound.
        let known = stats.hole_bytes + uncommitted_bytes + stats.live_bytes;
        if known > all_bytes || known + stats.transit_bytes < all_bytes {
            return Err(format!("arena-I1: {stats:?} and {uncommitted_bytes} uncommitted do not tile {all_bytes}"));
        }
        if stats.transit_bytes == 0 && self.planned_bytes > 0 {
            return Err(format!("arena-I4: {} are planned by no plan, {stats:?}", self.planned_bytes));
        }
        if self.kept_bytes > self.committed_outside_reserves() {
            return Err(format!("arena-I6: {} kept, {stats:?}", self.kept_bytes));
        }
        self.validate_extents()
    }

    /// Recounts arena-I1 by address, arena-I3, arena-I5 and arena-I7.
    #[cfg(test)]
    fn validate_extents(&self) -> Result<(), String> {
        let (mut idle_bytes, mut reserve_bytes) = (0, 0);
        let mut all: Vec<Extent> = self.uncommitted.iter().collect();
        if let Some(run) = all.iter().find(|&&run| self.granules_around(run) != run) {
            return Err(format!("arena-I7: {run:?} is not whole granules of {:?}", self.sizes));
        }
        for (set, holes) in self.holes.iter().enumerate() {
            let mut in_regions = Vec::new();
            for hole in holes.iter() {
                let range = self.range_of(hole).ok_or_else(|| format!("arena-I1: {hole:?} lies in no range"))?;
                if range.set as usize != set || !range.extent.contains(hole) {
                    return Err(format!("arena-I1: {hole:?} does not lie in {range:?}"));
                }
                all.push(hole);
                reserve_bytes += if range.kind == RangeKind::Reserve { hole.bytes() } else { 0 };
                in_regions.extend((range.kind == RangeKind::Separate).then_some((hole, range.extent)));
                let granules = range.grid.touched_granules(hole, hole).filter(|_| range.kind != RangeKind::Reserve);
                let Some(granules) = granules else { continue };
                let counted: u64 = self.idle.within(granules).map(|run| run.extent.bytes()).sum();
                if counted != granules.bytes() {
                    return Err(format!("arena-I3: {granules:?} is idle, {counted} bytes of it are indexed"));
                }
                idle_bytes += counted;
            }
            self.regions[set].validate(&in_regions).map_err(|error| format!("arena-I5: {error}"))?;
        }
        if reserve_bytes != self.stats.reserve_hole_bytes {
            let counted = self.stats.reserve_hole_bytes;
            return Err(format!("arena-I1: {reserve_bytes} bytes are free in reserves, {counted} are counted"));
        }
        if idle_bytes != self.idle.bytes() {
            return Err(format!("arena-I3: {idle_bytes} bytes are idle, {} are indexed", self.idle.bytes()));
        }
        all.sort_unstable();
        let overlap = all.windows(2).find(|pair| pair[0].end > pair[1].start);
        overlap.map_or(Ok(()), |pair| Err(format!("arena-I1: {pair:?} overlap")))
    }
}
