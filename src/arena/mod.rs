//! The arena: the address ranges behind the store. It knows which granules are locked and where a buffer fits, and says
//! what to lock, move or release. Numbers in, plans out: it locks no memory, takes no lock, reads no clock, logs nothing.
//!
//! ```text
//!  range 0 (spanning, huge, granules of 2 MiB)
//!  +----+-------+----+---------+-------------------+ - - - - - - - - - +
//!  |live| hole  |live|  hole   |   bare            | in transit        |  bare ...
//!  +----+-------+----+---------+-------------------+ - - - - - - - - - +
//!   locked granules .......... : not locked        : a plan is on its way
//!
//!  range 1 (reserve: all locked, kept)       range 2.. (discrete regions: one granule each, one acquisition)
//! ```
//!
//! | state of a byte | index | may be carved | may be locked / released / moved |
//! | --- | --- | --- | --- |
//! | live | none (the holder knows) | | |
//! | hole (free, locked) | `holes` | yes | its idle granules: released, moved away |
//! | bare (free, not locked) | `bare` | only through a plan | locked, moved into |
//! | in transit | none | no | no: a plan holds it |
//!
//! | room | owns |
//! | --- | --- |
//! | `extent` | places and runs as numbers; the walls between ranges |
//! | `holes` | free locked runs, by length and by address |
//! | `bare` | unlocked runs, and the search for the place that needs fewest (rule 5) |
//! | `retain` | idle granules by age, and when they go (rule 9) |
//! | `walls` | regions: how large the next one is (rule 11), and the stats behind their rules |
//! | `regions`, `elders` | the holes of regions, the oldest region first |
//! | `plan` | the steps the pool makes, and how they ended |
//! | `grow` | placements that must lock or move first; settling plans |
//! | `shrink` | giving idle granules back |
//!
//! Invariants, recounted by [`Arena::validate`]
//! - I1: holes, bare runs, live buffers and what is in transit tile every range, without overlap.
//! - I2: locked + locking + bare bytes are the length of all ranges.
//! - I3: a granule is in the idle index exactly if it is wholly inside a hole of a range that is not kept.
//! - I4: `claimed` is never below what is locked at any instant between a plan and its settlement.
//! - I5: the holes of discrete regions, and no others, are also in `regions` of their set.

mod discrete;
mod extent;
mod grow;
mod holes;
mod plan;
mod region_index;
mod regions;
mod retain;
mod shrink;
mod uncommitted;
mod validate;

#[cfg(test)]
mod tests {
    mod model;
}

use std::collections::BTreeMap;

use extent::{Grid, RANGES_MAX, align_up};
use holes::Holes;
use regions::Regions;
use retain::{IdleGranules, IdleRun};
use uncommitted::Uncommitted;

pub use extent::{ArenaPtr, Extent, RANGE_BYTES_MAX};
pub use grow::{GrowthLimits, NoSpace};
pub use plan::{Plan, PlanOutcome, Step};
pub use retain::Retention;

/// Where the holes of a range are kept. Small and large buffers share spanning ranges and the reserve, but discrete
/// regions are for one or the other (rule 11), so that a long-lived small buffer pins no large region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum HoleSet {
    Shared,
    Small,
    Large,
}

const HOLE_SETS: usize = 3;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum RangeKind {
    /// Uncommitted at first, locked granule by granule.
    Virtual,
    /// All locked, for good.
    Reserve,
    /// All locked by one call, released by one call.
    Discrete,
}

#[derive(Clone, Copy, Debug)]
struct ArenaRange {
    kind: RangeKind,
    extent: Extent,
    set: HoleSet,
    grid: Grid,
}

/// What the arena holds, in bytes, and what it has asked for so far.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct ArenaStats {
    /// Locked now, as far as plans are settled; granules that are leaving count until they are gone.
    pub committed_bytes: u64,
    /// Locked, plus what unsettled plans may lock at their worst moment.
    pub claimed_bytes: u64,
    /// In buffers, those of unsettled plans included.
    pub live_bytes: u64,
    /// Free and locked, and not in transit.
    pub hole_bytes: u64,
    /// Of these, in granules that are wholly free and may be released or moved.
    pub idle_bytes: u64,
    /// In granules of plans that are not settled.
    pub transit_bytes: u64,
    /// Runs moved.
    pub remaps: u64,
}

/// The address ranges behind the store.
#[derive(Debug)]
pub struct Arena {
    growth: GrowthMode,
    ranges: BTreeMap<u32, ArenaRange>,
    /// Numbers ascend with the age of what they stand for, until all have been used once.
    next_range: u32,
    holes: [Holes; HOLE_SETS],
    regions: [Regions; HOLE_SETS],
    uncommitted: Uncommitted,
    idle: IdleGranules,
    retention: Retention,
    next_release_us: u64,
    stats: ArenaStats,
    /// Bytes of lock and move targets of unsettled plans.
    locking_bytes: u64,
}

/// How more memory is had.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GrowthMode {
    /// By granules of this many bytes (a power of two), anywhere in the spanning ranges.
    Granules(u64),
    /// By regions with a wall at each edge.
    Regions,
}

impl Arena {
    /// An arena without any range yet.
    #[must_use]
    pub fn new(growth: GrowthMode, retention: Retention) -> Self {
        Self {
            growth,
            ranges: BTreeMap::new(),
            next_range: 0,
            holes: Default::default(),
            regions: Default::default(),
            uncommitted: Uncommitted::default(),
            idle: IdleGranules::default(),
            retention,
            next_release_us: 0,
            stats: ArenaStats::default(),
            locking_bytes: 0,
        }
    }

    /// Adds a spanning range of `bytes` (rounded down to whole granules), all bare. `None` where the arena grows by
    /// regions, the range would be empty or too long, or there are too many ranges.
    pub fn add_virtual_range(&mut self, bytes: u64) -> Option<u32> {
        let GrowthMode::Granules(granule_bytes) = self.growth else { return None };
        let id = self.add_range(RangeKind::Virtual, bytes / granule_bytes * granule_bytes, HoleSet::Shared)?;
        self.uncommitted.add(self.ranges.get(&id)?.extent);
        Some(id)
    }

    /// Adds a reserve (rule 10): `bytes` that are locked already and are kept. Open to buffers of every size.
    pub fn add_reserve(&mut self, bytes: u64) -> Option<u32> {
        let id = self.add_range(RangeKind::Reserve, bytes, HoleSet::Shared)?;
        let extent = self.ranges.get(&id)?.extent;
        self.stats.committed_bytes += bytes;
        self.stats.claimed_bytes += bytes;
        self.add_hole(extent, 0);
        Some(id)
    }

    fn add_range(&mut self, kind: RangeKind, bytes: u64, set: HoleSet) -> Option<u32> {
        if bytes == 0 || bytes > RANGE_BYTES_MAX {
            return None;
        }
        let id = (self.next_range..RANGES_MAX).chain(0..self.next_range).find(|id| !self.ranges.contains_key(id))?;
        self.next_range = (id + 1) % RANGES_MAX;
        let extent = Extent::new(ArenaPtr::new(id, 0), bytes);
        let granule_bytes = match (kind, self.growth) {
            (RangeKind::Virtual, GrowthMode::Granules(granule_bytes)) => granule_bytes,
            _ => bytes,
        };
        let range = ArenaRange { kind, extent, set, grid: Grid { origin: extent.start, granule_bytes } };
        self.ranges.insert(id, range);
        Some(id)
    }

    /// The range that `place` lies in. Every place the arena hands out has one until its buffer is given back.
    fn range_of(&self, place: ArenaPtr) -> Option<ArenaRange> {
        self.ranges.get(&place.range()).copied()
    }

    /// Where buffers of `bytes` may lie, besides the shared ranges.
    fn own_set(&self, bytes: u64) -> HoleSet {
        match self.growth {
            GrowthMode::Granules(_) => HoleSet::Shared,
            GrowthMode::Regions if bytes <= discrete::SMALL_BYTES_MAX => HoleSet::Small,
            GrowthMode::Regions => HoleSet::Large,
        }
    }

    /// Takes `bytes` at `align` from what is locked already: from the tightest hole, the lowest among equals (rule 5), or
    /// as rule 11 says. No driver call. `bytes` and `align` are multiples of a page, `align` a power of two.
    pub fn carve(&mut self, bytes: u64, align: u64) -> Option<ArenaPtr> {
        let own = self.own_set(bytes);
        let shared = self.holes[HoleSet::Shared as usize].tightest(bytes, align).map(|hole| (HoleSet::Shared, hole));
        let (set, hole) = shared.or_else(|| Some((own, self.best_behind_walls(own, bytes, align)?)))?;
        let start = align_up(hole.start, align);
        let buffer = Extent { start, end: start + bytes };
        self.take(set, hole, buffer, |_| ());
        self.stats.live_bytes += bytes;
        Some(buffer.ptr())
    }

    /// Rule 11: a hole of exactly these bytes, else one in the oldest region in use, else the tightest empty region.
    fn best_behind_walls(&self, own: HoleSet, bytes: u64, align: u64) -> Option<Extent> {
        let tightest = self.holes[own as usize].tightest(bytes, align)?;
        if tightest.bytes() == bytes { Some(tightest) } else { self.regions[own as usize].best(bytes, align) }
    }

    /// Gives the bytes of a buffer back; the granules that are wholly free now are idle since `now_us`.
    pub fn free(&mut self, place: ArenaPtr, bytes: u64, now_us: u64) {
        self.stats.live_bytes -= bytes;
        self.add_hole(Extent::new(place, bytes), now_us);
    }

    /// What is held now.
    #[must_use]
    pub fn stats(&self) -> ArenaStats {
        ArenaStats {
            hole_bytes: self.holes.iter().map(Holes::bytes).sum(),
            idle_bytes: self.idle.bytes(),
            ..self.stats
        }
    }

    /// Takes `part` of `hole` out of the holes and of the idle granules; shows the latter to `idle_before`.
    fn take(&mut self, set: HoleSet, hole: Extent, part: Extent, idle_before: impl FnMut(IdleRun)) {
        self.holes[set as usize].cut(hole, part);
        let Some(range) = self.range_of(part.ptr()) else { return };
        if range.kind == RangeKind::Discrete {
            let regions = &mut self.regions[set as usize];
            regions.remove(hole, range.extent);
            hole.without(part).into_iter().flatten().for_each(|rest| regions.add(rest, range.extent));
        }
        if range.kind != RangeKind::Reserve
            && let Some(granules) = range.grid.granules_decided(hole, part)
        {
            self.idle.cut(granules, idle_before);
        }
    }

    /// Makes `part`, which is locked, free.
    fn add_hole(&mut self, part: Extent, since_us: u64) {
        let Some(range) = self.range_of(part.ptr()) else {
            debug_assert!(false, "{part:?} lies in no range");
            return;
        };
        let hole = self.holes[range.set as usize].add(part);
        if range.kind == RangeKind::Discrete {
            let regions = &mut self.regions[range.set as usize];
            hole.without(part).into_iter().flatten().for_each(|old| regions.remove(old, range.extent));
            regions.add(hole, range.extent);
        }
        if range.kind != RangeKind::Reserve
            && let Some(granules) = range.grid.granules_decided(hole, part)
        {
            self.idle.add(IdleRun { extent: granules, since_us });
        }
    }
}
