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
//!  range 1 (reserve: all locked, kept)       range 2.. (walled regions: one granule each, one acquisition)
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
//! | `span` | places and runs as numbers; the walls between ranges |
//! | `holes` | free locked runs, by length and by address |
//! | `bare` | unlocked runs, and the search for the place that needs fewest (rule 5) |
//! | `retain` | idle granules by age, and when they go (rule 9) |
//! | `walls` | regions: how large the next one is (rule 11), and the figures behind their rules |
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
//! - I5: the holes of walled regions, and no others, are also in `regions` of their shelf.

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
use retain::{Idle, IdleRun};
use uncommitted::Bare;

pub use extent::{ArenaPtr, Extent, RANGE_BYTES_MAX};
pub use grow::{GrowthLimits, NoSpace};
pub use plan::{Plan, PlanOutcome, Step};
pub use retain::Retention;

/// Where the holes of a range are kept. Small and large buffers share spanning ranges and the reserve, but walled
/// regions are for one or the other (rule 11), so that a long-lived small buffer pins no large region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Shelf {
    Shared,
    Small,
    Large,
}

const SHELVES: usize = 3;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// Bare at first, locked granule by granule.
    Spanning,
    /// All locked, for good.
    Reserve,
    /// All locked by one call, released by one call.
    Walled,
}

#[derive(Clone, Copy, Debug)]
struct Range {
    kind: Kind,
    span: Extent,
    shelf: Shelf,
    grid: Grid,
}

/// What the arena holds, in bytes, and what it has asked for so far.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct ArenaStats {
    /// Locked now, as far as plans are settled; granules that are leaving count until they are gone.
    pub locked_bytes: u64,
    /// Locked, plus what unsettled plans may lock at their worst moment.
    pub claimed_bytes: u64,
    /// In buffers, those of unsettled plans included.
    pub live_bytes: u64,
    /// Free and locked, and not in transit.
    pub free_locked_bytes: u64,
    /// Of these, in granules that are wholly free and may be released or moved.
    pub idle_bytes: u64,
    /// In granules of plans that are not settled.
    pub transit_bytes: u64,
    /// Calls that locked memory: one for each run of adjacent granules.
    pub page_locks: u64,
    /// Runs moved.
    pub moves: u64,
    /// Runs released.
    pub releases: u64,
}

/// The address ranges behind the store.
#[derive(Debug)]
pub struct Arena {
    growth: GrowthMode,
    ranges: BTreeMap<u32, Range>,
    /// Numbers ascend with the age of what they stand for, until all have been used once.
    next_range: u32,
    holes: [Holes; SHELVES],
    regions: [Regions; SHELVES],
    bare: Bare,
    idle: Idle,
    retain: Retention,
    next_release_us: u64,
    figures: ArenaStats,
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
    pub fn new(growth: GrowthMode, retain: Retention) -> Self {
        Self {
            growth,
            ranges: BTreeMap::new(),
            next_range: 0,
            holes: Default::default(),
            regions: Default::default(),
            bare: Bare::default(),
            idle: Idle::default(),
            retain,
            next_release_us: 0,
            figures: ArenaStats::default(),
            locking_bytes: 0,
        }
    }

    /// Adds a spanning range of `bytes` (rounded down to whole granules), all bare. `None` where the arena grows by
    /// regions, the range would be empty or too long, or there are too many ranges.
    pub fn add_spanning(&mut self, bytes: u64) -> Option<u32> {
        let GrowthMode::Granules(granule_bytes) = self.growth else { return None };
        let id = self.add_range(Kind::Spanning, bytes / granule_bytes * granule_bytes, Shelf::Shared)?;
        self.bare.add(self.ranges.get(&id)?.span);
        Some(id)
    }

    /// Adds a reserve (rule 10): `bytes` that are locked already and are kept. Open to buffers of every size.
    pub fn add_reserve(&mut self, bytes: u64) -> Option<u32> {
        let id = self.add_range(Kind::Reserve, bytes, Shelf::Shared)?;
        let span = self.ranges.get(&id)?.span;
        self.figures.locked_bytes += bytes;
        self.figures.claimed_bytes += bytes;
        self.figures.page_locks += 1;
        self.free(span, 0);
        Some(id)
    }

    fn add_range(&mut self, kind: Kind, bytes: u64, shelf: Shelf) -> Option<u32> {
        if bytes == 0 || bytes > RANGE_BYTES_MAX {
            return None;
        }
        let id = (self.next_range..RANGES_MAX).chain(0..self.next_range).find(|id| !self.ranges.contains_key(id))?;
        self.next_range = (id + 1) % RANGES_MAX;
        let span = Extent::new(ArenaPtr::new(id, 0), bytes);
        let granule_bytes = match (kind, self.growth) {
            (Kind::Spanning, GrowthMode::Granules(granule_bytes)) => granule_bytes,
            _ => bytes,
        };
        let range = Range { kind, span, shelf, grid: Grid { origin: span.start, granule_bytes } };
        self.ranges.insert(id, range);
        Some(id)
    }

    /// The range that `place` lies in. Every place the arena hands out has one until its buffer is given back.
    fn range_of(&self, place: ArenaPtr) -> Option<Range> {
        self.ranges.get(&place.range()).copied()
    }

    /// Where buffers of `bytes` may lie, besides the shared ranges.
    fn own_shelf(&self, bytes: u64) -> Shelf {
        match self.growth {
            GrowthMode::Granules(_) => Shelf::Shared,
            GrowthMode::Regions if bytes <= discrete::SMALL_BYTES_MAX => Shelf::Small,
            GrowthMode::Regions => Shelf::Large,
        }
    }

    /// Takes `bytes` at `align` from what is locked already: from the tightest hole, the lowest among equals (rule 5), or
    /// as rule 11 says. No driver call. `bytes` and `align` are multiples of a page, `align` a power of two.
    pub fn carve(&mut self, bytes: u64, align: u64) -> Option<ArenaPtr> {
        let own = self.own_shelf(bytes);
        let shared = self.holes[Shelf::Shared as usize].tightest(bytes, align).map(|hole| (Shelf::Shared, hole));
        let (shelf, hole) = shared.or_else(|| Some((own, self.best_behind_walls(own, bytes, align)?)))?;
        let start = align_up(hole.start, align);
        let buffer = Extent { start, end: start + bytes };
        self.take(shelf, hole, buffer, |_| ());
        self.figures.live_bytes += bytes;
        Some(buffer.place())
    }

    /// Rule 11: a hole of exactly these bytes, else one in the oldest region in use, else the tightest empty region.
    fn best_behind_walls(&self, own: Shelf, bytes: u64, align: u64) -> Option<Extent> {
        let tightest = self.holes[own as usize].tightest(bytes, align)?;
        if tightest.bytes() == bytes { Some(tightest) } else { self.regions[own as usize].best(bytes, align) }
    }

    /// Gives the bytes of a buffer back; the granules that are wholly free now are idle since `now_us`.
    pub fn give(&mut self, place: ArenaPtr, bytes: u64, now_us: u64) {
        self.figures.live_bytes -= bytes;
        self.free(Extent::new(place, bytes), now_us);
    }

    /// What is held now.
    #[must_use]
    pub fn figures(&self) -> ArenaStats {
        ArenaStats {
            free_locked_bytes: self.holes.iter().map(Holes::bytes).sum(),
            idle_bytes: self.idle.bytes(),
            ..self.figures
        }
    }

    /// Takes `part` of `hole` out of the holes and of the idle granules; shows the latter to `idle_before`.
    fn take(&mut self, shelf: Shelf, hole: Extent, part: Extent, idle_before: impl FnMut(IdleRun)) {
        self.holes[shelf as usize].cut(hole, part);
        let Some(range) = self.range_of(part.place()) else { return };
        if range.kind == Kind::Walled {
            let regions = &mut self.regions[shelf as usize];
            regions.remove(hole, range.span);
            hole.without(part).into_iter().flatten().for_each(|rest| regions.add(rest, range.span));
        }
        if range.kind != Kind::Reserve
            && let Some(granules) = range.grid.granules_decided(hole, part)
        {
            self.idle.cut(granules, idle_before);
        }
    }

    /// Makes `part`, which is locked, free.
    fn free(&mut self, part: Extent, since_us: u64) {
        let Some(range) = self.range_of(part.place()) else {
            debug_assert!(false, "{part:?} lies in no range");
            return;
        };
        let hole = self.holes[range.shelf as usize].add(part);
        if range.kind == Kind::Walled {
            let regions = &mut self.regions[range.shelf as usize];
            hole.without(part).into_iter().flatten().for_each(|old| regions.remove(old, range.span));
            regions.add(hole, range.span);
        }
        if range.kind != Kind::Reserve
            && let Some(granules) = range.grid.granules_decided(hole, part)
        {
            self.idle.add(IdleRun { span: granules, since_us });
        }
    }
}
