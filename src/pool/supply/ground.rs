//! The coat around the arena: its lock, its source, its ceiling, and the order of steps when memory is needed.
//!
//! ```text
//!  acquire: [lock: carve] ─fits─▶ memory
//!                └─▶ the borrower's idle buffers could cover what is missing?  give its oldest back, again      (rule 6)
//!                └─▶ [lock: plan under the ceiling] ─▶ steps (no lock) ─▶ [lock: settle] ─▶ memory       (rules 5, 7, 11)
//!                          └─full─▶ granules in transit?  wait for them, again
//!                                   anything idle in front?  give the oldest back, again                        (rule 8)
//!                                   regions idle under copies?  wait for those, if told to, again
//!                                   else: refused
//! ```
//!
//! Invariants:
//!
//! 1. `claimed + pending <= max`, at every instant: both are changed under the lock, before the source is asked.
//! 2. A site leaves the table before its region is released, and comes back if that fails.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use super::gate::{Closed, Gate};
use super::works::{Built, Site, Sites};
use super::{Holding, Memory, Refusal};
use crate::arena::{Arena, Growth, Plan, RANGE_BYTES_MAX, Retain, Room};
use crate::backend::{PAGE_BYTES, PageTiers, Source, SourceError};
use crate::stats::Underlying;
use crate::sync::plain::{Condvar, Mutex};

/// What one page-lock makes real at least, where the ceiling leaves room: the size of a huge page, and of what the
/// driver maps at once.
const GRANULE_BYTES: u64 = 2 << 20;
/// Under a ceiling of fewer granules than this, granules are smaller: a pool of one granule has no room to be fair.
const LEAST_GRANULES: u64 = 8;
/// Registering so much holds up other threads' enqueues for half a millisecond: the longest step beside running copies.
const STEP_BESIDE_COPIES_BYTES: u64 = 8 << 20;
/// Addresses are reserved for so many times the ceiling, so that holes between long-lived buffers cost no memory.
const ADDRESSES_PER_BYTE: u64 = 8;
/// And no fewer than this; they cost nothing.
const LEAST_ADDRESS_BYTES: u64 = 64 << 30;

/// An arena over a source.
#[derive(Debug)]
pub(in crate::pool) struct Ground {
    pub(super) source: Arc<dyn Source>,
    max_bytes: Option<u64>,
    may_grow: bool,
    retain: Retain,
    drain_at_most: Option<Duration>,
    pub(super) gate: Gate,
    pub(super) land: Mutex<Land>,
    pub(super) settled: Condvar,
    /// A thread of its own is giving back what is due.
    pub(super) is_reclaiming: AtomicBool,
}

#[derive(Debug)]
pub(super) struct Land {
    pub(super) arena: Arena,
    pub(super) sites: Sites,
    /// What was due when somebody last looked, and could not go because of copies in flight.
    pub(super) overdue_bytes: u64,
    /// What a trim could not do because of copies in flight.
    pub(super) trim_to_bytes: Option<u64>,
    drains: u64,
    /// Bytes of reserves that are being pinned.
    pending_bytes: u64,
    reserve_bytes: u64,
    peak_bytes: u64,
    next_id: u64,
    pub(super) calls: Underlying,
    /// Pools that carve from here.
    pub(super) members: u64,
}

/// Settings of a ground.
#[derive(Debug, Clone, Copy)]
pub(in crate::pool) struct GroundPlan {
    pub(in crate::pool) max_bytes: Option<u64>,
    pub(in crate::pool) may_grow: bool,
    pub(in crate::pool) retain: Retain,
    /// At the ceiling, wait so long for copies in flight to release regions that are idle under them; `None`: do not.
    pub(in crate::pool) drain_at_most: Option<Duration>,
}

/// Who asks for memory, and may have to give some back first.
pub(in crate::pool) trait Borrower {
    /// Bytes of the idle buffers.
    fn idle_bytes(&self) -> u64;

    /// Gives the buffer back that has been idle longest; false if none is.
    fn give_back_oldest(&self) -> bool;

    /// Puts back the buffers whose copies are over.
    fn land_copies(&self);
}

impl Ground {
    /// An arena over `source`. Reserves addresses where the source spans, pins nothing.
    pub(in crate::pool) fn new(source: Arc<dyn Source>, plan: GroundPlan) -> Result<Self, SourceError> {
        let GroundPlan { max_bytes, may_grow, retain, drain_at_most } = plan;
        let mut sites = Sites::default();
        let arena = match source.spans() {
            None => Arena::new(Growth::Regions, retain),
            Some(spans) => {
                let granule_bytes = granule_bytes(max_bytes, spans.granule_bytes() as u64);
                let mut arena = Arena::new(Growth::Granules(granule_bytes), retain);
                let range = reserve(&*source, max_bytes, granule_bytes)?;
                let id = arena
                    .add_spanning(range.len_bytes() as u64)
                    .ok_or_else(|| SourceError::new("reserve", format!("{} B are no range", range.len_bytes())))?;
                sites.add(id, Site::Spanning(Arc::new(range)));
                arena
            }
        };
        let land = Land {
            arena,
            sites,
            overdue_bytes: 0,
            trim_to_bytes: None,
            drains: 0,
            pending_bytes: 0,
            reserve_bytes: 0,
            peak_bytes: 0,
            next_id: 0,
            calls: Underlying::default(),
            members: 0,
        };
        Ok(Self {
            gate: Gate::new(source.release_waits()),
            source,
            max_bytes,
            may_grow,
            retain,
            drain_at_most,
            land: Mutex::new(land),
            settled: Condvar::new(),
            is_reclaiming: AtomicBool::new(false),
        })
    }

    pub(in crate::pool) fn source(&self) -> &Arc<dyn Source> {
        &self.source
    }

    /// Memory for `class_bytes`, whole pages. May call the source.
    pub(in crate::pool) fn acquire(
        &self,
        class_bytes: usize,
        now_us: u64,
        borrower: &dyn Borrower,
    ) -> Result<Memory, Refusal> {
        let bytes = class_bytes as u64;
        let align = PAGE_BYTES as u64;
        let mut refused = None;
        let (mut drained, mut may_drain) = (None, self.drain_at_most.is_some());
        loop {
            let mut land = self.land.lock();
            if let Some(memory) = land.carve(bytes, align) {
                return Ok(memory);
            }
            let idle_bytes = borrower.idle_bytes();
            if idle_bytes > 0 && (refused.is_some() || land.could_cover(bytes, align, idle_bytes, self.has_walls())) {
                drop(land);
                // If another thread was faster, the next round sees what it left.
                borrower.give_back_oldest();
                continue;
            }
            // Once the source has refused, only granules that are locked already can help.
            let closed = drained.take().or_else(|| self.gate.close());
            let room = self.room(&land, refused.is_none(), closed.is_some());
            let plan = match land.arena.grow(bytes, align, room) {
                Ok(plan) => plan,
                Err(full) if full.transit_bytes > 0 => {
                    drop(closed);
                    self.settled.wait(&mut land);
                    continue;
                }
                Err(_) if idle_bytes > 0 => {
                    drop(land);
                    borrower.give_back_oldest();
                    continue;
                }
                Err(_) if may_drain && closed.is_none() && land.arena.figures().idle_bytes > 0 => {
                    may_drain = false;
                    land.drains += 1;
                    drop(land);
                    drained = self.drain(borrower);
                    continue;
                }
                Err(_) => {
                    let ceiling = Refusal::Ceiling { needed_bytes: bytes };
                    return Err(refused.map_or(ceiling, Refusal::Source));
                }
            };
            land.note_peak();
            let place = plan.place();
            let closed = closed.filter(|_| plan.gives_back());
            let (granted, error) = self.carry_out(land, plan, now_us);
            drop(closed);
            let mut land = self.land.lock();
            match (granted, place) {
                (true, Some(place)) => {
                    if let Some(memory) = land.memory_at(place, bytes) {
                        return Ok(memory);
                    }
                    return Err(Refusal::Source(SourceError::new("arena", "a place without an address")));
                }
                _ => {
                    let again = refused.is_some();
                    refused = error.or(refused);
                    if again && idle_bytes == 0 {
                        let ceiling = Refusal::Ceiling { needed_bytes: bytes };
                        return Err(refused.map_or(ceiling, Refusal::Source));
                    }
                }
            }
        }
    }

    fn has_walls(&self) -> bool {
        self.source.spans().is_none()
    }

    fn room(&self, land: &Land, source_is_willing: bool, at_rest: bool) -> Room {
        let lock_bytes = match self.max_bytes {
            _ if !(self.may_grow && source_is_willing) => 0,
            None => u64::MAX,
            Some(max_bytes) => max_bytes.saturating_sub(land.claimed_bytes()),
        };
        let step_bytes = if at_rest { u64::MAX } else { STEP_BESIDE_COPIES_BYTES };
        Room { lock_bytes, may_release_regions: at_rest, step_bytes }
    }

    /// Waits for the copies in flight, so that regions can go.
    fn drain(&self, borrower: &dyn Borrower) -> Option<Closed<'_>> {
        self.gate.drain(self.drain_at_most?, || borrower.land_copies())
    }

    /// Makes the steps of `plan` without the lock, then settles it. Says whether its buffer was granted, or why not.
    pub(super) fn carry_out(
        &self,
        mut land: parking_lot::MutexGuard<'_, Land>,
        plan: Plan,
        now_us: u64,
    ) -> (bool, Option<SourceError>) {
        let mut tools = land.sites.tools_for(&plan);
        drop(land);
        let begun = Instant::now();
        let built = tools.build(&*self.source, &plan);
        let took = begun.elapsed();
        let mut land = self.land.lock();
        land.sites.keep(tools);
        land.calls.time += took;
        let (granted, error) = land.settle(plan, built, now_us);
        self.settled.notify_all();
        (granted, error)
    }

    /// Gives a block's place back.
    pub(in crate::pool) fn give(&self, place: crate::arena::Place, bytes: u64, now_us: u64) {
        self.land.lock().arena.give(place, bytes, now_us);
    }

    /// Memory that falls idle goes back this much sooner: `None` restores what was set.
    pub(in crate::pool) fn hurry(&self, divisor: Option<u64>) {
        let retain_us = self.retain.retain_us.map(|us| us / divisor.unwrap_or(1).max(1));
        self.land.lock().arena.set_retain(Retain { retain_us, ..self.retain });
    }

    /// Pins `bytes` at once and keeps them (rule 10). A slow call.
    /// Says in which pages it came.
    pub(in crate::pool) fn add_reserve(&self, bytes: u64, progress: &dyn Fn(u64)) -> Result<PageTiers, Refusal> {
        let bytes = bytes.next_multiple_of(GRANULE_BYTES);
        let refusal = Refusal::Ceiling { needed_bytes: bytes };
        {
            let mut land = self.land.lock();
            let room = self.max_bytes.map_or(u64::MAX, |max_bytes| max_bytes.saturating_sub(land.claimed_bytes()));
            if bytes > room {
                return Err(refusal);
            }
            land.pending_bytes += bytes;
            land.note_peak();
        }
        let begun = Instant::now();
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let told = |bytes: usize| progress(bytes as u64);
        let acquired = match usize::try_from(bytes) {
            Ok(bytes) => self.source.acquire_fast(bytes, threads, &told).map_err(Refusal::Source),
            Err(_) => Err(refusal),
        };
        let tiers = acquired
            .as_ref()
            .map_or(PageTiers::default(), |region| self.source.page_tiers(region.start(), region.len_bytes()));
        let mut land = self.land.lock();
        land.pending_bytes -= bytes;
        land.calls.time += begun.elapsed();
        let region = acquired.inspect_err(|_| land.calls.failures += 1)?;
        land.calls.acquired(bytes);
        land.reserve_bytes += bytes;
        match land.arena.add_reserve(bytes) {
            Some(range) => land.sites.add(range, Site::Region(region)),
            None => return Err(Refusal::Source(SourceError::new("arena", "no range is left for a reserve"))),
        }
        land.note_peak();
        Ok(tiers)
    }

    /// One more pool carves from here.
    pub(in crate::pool) fn join(&self) {
        self.land.lock().members += 1;
    }

    /// The pages of all that is held.
    pub(in crate::pool) fn page_tiers(&self) -> PageTiers {
        let places = self.land.lock().sites.places();
        let tiers = places.into_iter().map(|(start, len_bytes)| self.source.page_tiers(start, len_bytes));
        tiers.fold(PageTiers::default(), PageTiers::add)
    }

    pub(in crate::pool) fn holding(&self) -> Holding {
        let land = self.land.lock();
        let figures = land.arena.figures();
        Holding {
            held_bytes: figures.locked_bytes,
            peak_bytes: land.peak_bytes,
            block_bytes: figures.live_bytes,
            free_bytes: figures.free_locked_bytes,
            transit_bytes: figures.transit_bytes,
            reserve_bytes: land.reserve_bytes,
            stuck_bytes: 0,
            awaiting_release_bytes: land.awaiting_release_bytes(),
            drains: land.drains,
            max_bytes: self.max_bytes,
            moves: figures.moves,
            calls: land.calls,
        }
    }
}

impl Land {
    fn claimed_bytes(&self) -> u64 {
        self.arena.figures().claimed_bytes + self.pending_bytes
    }

    fn note_peak(&mut self) {
        self.peak_bytes = self.peak_bytes.max(self.claimed_bytes());
    }

    fn carve(&mut self, bytes: u64, align: u64) -> Option<Memory> {
        let place = self.arena.carve(bytes, align)?;
        self.memory_at(place, bytes)
    }

    fn memory_at(&mut self, place: crate::arena::Place, bytes: u64) -> Option<Memory> {
        let start = self.sites.address(place)?;
        let id = self.next_id;
        self.next_id += 1;
        Some(Memory::Carved { start, place, bytes, id, claim: None })
    }

    /// Rule 6: could what is idle in front cover what would have to be locked?
    fn could_cover(&self, bytes: u64, align: u64, idle_bytes: u64, has_walls: bool) -> bool {
        if has_walls {
            return idle_bytes + self.arena.figures().free_locked_bytes >= bytes;
        }
        self.arena.missing_bytes(bytes, align).is_some_and(|missing_bytes| idle_bytes >= missing_bytes)
    }

    fn settle(&mut self, plan: Plan, built: Built, now_us: u64) -> (bool, Option<SourceError>) {
        let Built { outcome, regions, error, locked_bytes, released_bytes, locks, releases } = built;
        for (range, region) in regions {
            self.sites.add(range, Site::Region(region));
        }
        self.calls.failures += u64::from(error.is_some());
        self.calls.allocs += locks;
        self.calls.frees += releases;
        self.calls.alloc_bytes += locked_bytes;
        self.calls.free_bytes += released_bytes;
        self.calls.note_peak();
        let granted = self.arena.settle(plan, outcome, now_us);
        (granted, error)
    }
}

fn granule_bytes(max_bytes: Option<u64>, least_bytes: u64) -> u64 {
    let fair = max_bytes.map_or(GRANULE_BYTES, |max_bytes| previous_power_of_two(max_bytes / LEAST_GRANULES));
    fair.min(GRANULE_BYTES).max(least_bytes)
}

fn previous_power_of_two(n: u64) -> u64 {
    n.checked_ilog2().map_or(1, |log| 1 << log)
}

/// As many addresses as are good to have; fewer where the system refuses, down to what the ceiling needs.
fn reserve(
    source: &dyn Source,
    max_bytes: Option<u64>,
    granule_bytes: u64,
) -> Result<crate::backend::Range, SourceError> {
    let spans = source.spans().ok_or_else(|| SourceError::new("reserve", "the source has walls"))?;
    let whole = |bytes: u64| (bytes / granule_bytes).max(1) * granule_bytes;
    let wanted = max_bytes.map_or(RANGE_BYTES_MAX / 2, |max_bytes| max_bytes.saturating_mul(ADDRESSES_PER_BYTE));
    let mut bytes = whole(wanted.clamp(LEAST_ADDRESS_BYTES, RANGE_BYTES_MAX / 2));
    let least = whole(max_bytes.unwrap_or(LEAST_ADDRESS_BYTES / 16).min(bytes));
    loop {
        let reserved = usize::try_from(bytes)
            .map_err(|_| SourceError::new("reserve", format!("{bytes} B are more than an address space")))
            .and_then(|bytes| spans.reserve(bytes));
        match reserved {
            Err(_) if bytes > least => bytes = whole(bytes / 2).max(least),
            reserved => return reserved,
        }
    }
}
