//! The coat around the arena: its lock, its source, its ceiling, and the order of steps when memory is needed.
//!
//! ```text
//!  acquire: [lock: carve] ─fits─▶ memory
//!                └─▶ a buffer of the class came back meanwhile?  that one
//!                └─▶ too large for the ceiling, whatever came back?  refused
//!                └─▶ the borrower's idle buffers could cover what is missing?  give its oldest back, again      (rule 6)
//!                └─▶ [lock: plan under the ceiling] ─▶ steps (no lock) ─▶ [lock: settle] ─▶ memory       (rules 5, 7, 11)
//!                          └─full─▶ granules in transit?  wait for them, again
//!                                   enough idle in front, of any pool?  give the oldest back, again             (rule 8)
//!                                   regions idle under copies?  wait for those, if told to, again
//!                                   else: refused
//! ```
//!
//! Invariants:
//!
//! 1. `claimed + pending <= max`, at every instant: both are changed under the lock, before the source is asked.
//! 2. A site leaves the table before its region is released, and comes back if that fails.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::addresses;
use super::attached::Reclaim;
use super::executor::{Executed, Executor, Mapping, Mappings};
use super::gate::{Closed, Gate};
use super::{Memory, Refusal, SupplyStats};
use crate::arena::{Arena, ArenaPtr, GrowthLimits, GrowthMode, Plan, RANGE_BYTES_MAX, Retention};
use crate::backend::{PAGE_BYTES, PageTiers, Source, SourceError};
use crate::diag::PoolLog;
use crate::engine::block::Block;
use crate::size_class::Class;
use crate::stats::Underlying;
use crate::sync::plain::{Condvar, Mutex, MutexGuard};

/// Registering so much holds up other threads' enqueues for half a millisecond: the longest step beside running copies.
const STEP_BESIDE_COPIES_BYTES: u64 = 8 << 20;

/// An arena over a source.
#[derive(Debug)]
pub(crate) struct SharedArena {
    pub(super) source: Arc<dyn Source>,
    pub(super) log: Arc<PoolLog>,
    max_bytes: Option<u64>,
    may_grow: bool,
    pub(super) pin_threads: usize,
    retain: Retention,
    /// What is locked or acquired at least; a page where there are walls.
    granule_bytes: u64,
    /// The longest buffer that there are addresses for.
    longest_bytes: u64,
    drain_at_most: Option<Duration>,
    pub(super) gate: Gate,
    /// A thread of its own is giving back what is due.
    pub(super) is_reclaiming: AtomicBool,
    pub(super) land: Mutex<ArenaState>,
    /// Told when a plan is settled.
    pub(super) settled: Condvar,
}

#[derive(Debug)]
pub(super) struct ArenaState {
    pub(super) arena: Arena,
    pub(super) sites: Mappings,
    /// What was due when somebody last looked, and could not go because of copies in flight.
    pub(super) overdue_bytes: u64,
    /// What a trim could not do because of copies in flight.
    pub(super) trim_to_bytes: Option<u64>,
    drains: u64,
    /// Bytes of reserves that are being pinned.
    pub(super) pending_bytes: u64,
    pub(super) reserve_bytes: u64,
    pub(super) largest_reserve_bytes: u64,
    peak_bytes: u64,
    next_id: u64,
    pub(super) calls: Underlying,
    /// A release failed, and none has worked since.
    pub(super) release_fails: bool,
    /// Pools that carve from here.
    pub(super) tenants: Vec<Weak<dyn Reclaim>>,
}

/// Settings of a ground.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SharedArenaConfig {
    pub(crate) max_bytes: Option<u64>,
    pub(crate) may_grow: bool,
    /// Threads that touch the memory of a reserve.
    pub(crate) pin_threads: usize,
    pub(crate) retain: Retention,
    /// At the ceiling, wait so long for copies in flight to release regions that are idle under them; `None`: do not.
    pub(crate) drain_at_most: Option<Duration>,
}

/// What a miss is served with.
#[derive(Debug)]
pub(in crate::engine) enum Acquired {
    New(Memory),
    Reused(Block),
}

impl SharedArena {
    /// An arena over `source`. Reserves addresses where the source spans, pins nothing.
    pub(crate) fn new(
        source: Arc<dyn Source>,
        plan: SharedArenaConfig,
        log: Arc<PoolLog>,
    ) -> Result<Self, SourceError> {
        let SharedArenaConfig { max_bytes, may_grow, pin_threads, retain, drain_at_most } = plan;
        let mut sites = Mappings::default();
        let (arena, granule_bytes, longest_bytes) = match source.virtual_memory() {
            None => (Arena::new(GrowthMode::Regions, retain), PAGE_BYTES as u64, RANGE_BYTES_MAX),
            Some(spans) => {
                let granule_bytes = addresses::granule_bytes(max_bytes, spans.granule_bytes() as u64);
                let mut arena = Arena::new(GrowthMode::Granules(granule_bytes), retain);
                let range = addresses::reserve(&*source, max_bytes, granule_bytes)?;
                let len_bytes = range.len_bytes() as u64;
                let id = arena
                    .add_virtual_range(len_bytes)
                    .ok_or_else(|| SourceError::new("reserve", format!("{len_bytes} B are no range")))?;
                sites.add(id, Mapping::Spanning(Arc::new(range)));
                (arena, granule_bytes, len_bytes)
            }
        };
        let land = ArenaState {
            arena,
            sites,
            overdue_bytes: 0,
            trim_to_bytes: None,
            drains: 0,
            pending_bytes: 0,
            reserve_bytes: 0,
            largest_reserve_bytes: 0,
            peak_bytes: 0,
            next_id: 0,
            calls: Underlying::default(),
            release_fails: false,
            tenants: Vec::new(),
        };
        Ok(Self {
            drain_at_most,
            gate: Gate::new(source.release_waits()),
            is_reclaiming: AtomicBool::new(false),
            source,
            log,
            max_bytes,
            may_grow,
            pin_threads,
            retain,
            granule_bytes,
            longest_bytes,
            land: Mutex::new(land),
            settled: Condvar::new(),
        })
    }

    pub(in crate::engine) fn source(&self) -> &Arc<dyn Source> {
        &self.source
    }

    /// Memory for `class`, whole pages. May call the source.
    pub(in crate::engine) fn acquire(
        &self,
        class: Class,
        now_us: u64,
        borrower: &dyn Reclaim,
    ) -> Result<Acquired, Refusal> {
        let bytes = class.bytes as u64;
        let align = PAGE_BYTES as u64;
        if let Some(memory) = self.land.lock().carve(bytes, align) {
            return Ok(Acquired::New(memory));
        }
        // What could never fit is no reason to empty the pool.
        if !self.could_hold(bytes) {
            return Err(self.full(bytes));
        }
        let tenants = self.tenants();
        let mut refused = None;
        let (mut waited, mut may_wait) = (None, true);
        loop {
            let idle_bytes = borrower.idle_bytes();
            let mut land = self.land.lock();
            if let Some(memory) = land.carve(bytes, align) {
                return Ok(Acquired::New(memory));
            }
            // Whatever the round before waited for, a put may have come meanwhile.
            if let Some(block) = borrower.take_back(class) {
                return Ok(Acquired::Reused(block));
            }
            let by_sum = refused.is_some() || self.has_walls();
            if idle_bytes > 0 && land.could_cover(bytes, align, idle_bytes, by_sum) {
                drop(land);
                // If another thread was faster, the next round sees what it left.
                borrower.give_back_oldest();
                continue;
            }
            // Once the source has refused, only granules that are locked already can help.
            // Regions go only with the gate closed; it opens again at once unless one does.
            let closed = waited.take().or_else(|| self.gate.close());
            let room = self.room(&land, refused.is_none(), closed.is_some());
            let plan = match land.arena.grow(bytes, align, room) {
                Ok(plan) => plan,
                Err(full) if full.transit_bytes > 0 => {
                    drop(closed);
                    self.settled.wait(&mut land);
                    continue;
                }
                Err(_) => {
                    let figures = land.arena.stats();
                    let locked_or_room_bytes = figures.hole_bytes.saturating_add(room.commit_bytes);
                    let is_held_up = closed.is_none() && figures.idle_bytes > 0;
                    drop(closed);
                    drop(land);
                    if make_way(borrower, &tenants, bytes.saturating_sub(locked_or_room_bytes)) {
                        continue;
                    }
                    if is_held_up && std::mem::take(&mut may_wait) {
                        waited = self.close_late(&tenants);
                        continue;
                    }
                    return Err(refused.map_or_else(|| self.full(bytes), Refusal::Source));
                }
            };
            land.note_peak();
            let place = plan.ptr();
            let closed = closed.filter(|_| plan.decommits());
            match self.carry_out(land, plan, closed, now_us) {
                Ok(()) => {
                    let memory = place.and_then(|place| self.land.lock().memory_at(place, bytes));
                    return memory
                        .map(Acquired::New)
                        .ok_or_else(|| Refusal::Source(SourceError::new("arena", "a place without an address")));
                }
                // Twice is enough: what others put back meanwhile is found by who waits in line.
                Err(error) if refused.is_some() => return Err(Refusal::Source(error)),
                Err(error) => refused = Some(error),
            }
        }
    }

    /// Could a buffer of `bytes` ever exist here, with everything else given back?
    pub(in crate::engine) fn could_hold(&self, bytes: u64) -> bool {
        let land = self.land.lock();
        if bytes <= land.largest_reserve_bytes {
            return true;
        }
        let room = self.max_bytes.map_or(u64::MAX, |max_bytes| max_bytes.saturating_sub(land.reserve_bytes));
        self.may_grow && bytes <= self.longest_bytes && bytes.div_ceil(self.granule_bytes) <= room / self.granule_bytes
    }

    pub(in crate::engine) fn max_bytes(&self) -> Option<u64> {
        self.max_bytes
    }

    /// May it pin more than its reserve?
    pub(in crate::engine) fn may_grow(&self) -> bool {
        self.may_grow
    }

    /// There is no room, and nothing that could make way.
    fn full(&self, bytes: u64) -> Refusal {
        if self.max_bytes.is_some() || !self.may_grow {
            return Refusal::Ceiling { needed_bytes: bytes };
        }
        let what = format!("no {bytes} B in one piece are left of the addresses reserved");
        Refusal::Source(SourceError::new("arena", what).with_remedy("ask for less at once, or put buffers back first"))
    }

    fn has_walls(&self) -> bool {
        self.source.virtual_memory().is_none()
    }

    fn room(&self, land: &ArenaState, source_is_willing: bool, at_rest: bool) -> GrowthLimits {
        let commit_bytes = match self.max_bytes {
            _ if !(self.may_grow && source_is_willing) => 0,
            None => u64::MAX,
            Some(max_bytes) => max_bytes.saturating_sub(land.claimed_bytes()),
        };
        let step_bytes = if at_rest { u64::MAX } else { STEP_BESIDE_COPIES_BYTES };
        GrowthLimits { commit_bytes, may_decommit_regions: at_rest, step_bytes }
    }

    /// Closes the gate after the release that is running, and, if told so, after the copies in flight.
    fn close_late(&self, tenants: &[Arc<dyn Reclaim>]) -> Option<Closed<'_>> {
        // Those that are over may be a silent pool's.
        let look = || tenants.iter().for_each(|tenant| tenant.land_copies());
        let Some(patience) = self.drain_at_most else {
            look();
            return self.gate.close_in_turn();
        };
        self.land.lock().drains += 1;
        self.gate.drain(patience, look)
    }

    /// Makes the steps of `plan`, which is for a buffer, without the lock, then settles it.
    fn carry_out(
        &self,
        mut land: MutexGuard<'_, ArenaState>,
        plan: Plan,
        closed: Option<Closed<'_>>,
        now_us: u64,
    ) -> Result<(), SourceError> {
        let mut tools = land.sites.tools_for(&plan);
        drop(land);
        let begun = Instant::now();
        let built = tools.build(&*self.source, &plan, closed);
        let took = begun.elapsed();
        let mut land = self.land.lock();
        land.calls.time += took;
        let outcome = built.outcome;
        let error = land.note(tools, built);
        let granted = land.arena.settle(plan, outcome, now_us);
        self.settled.notify_all();
        match error {
            None if granted => Ok(()),
            error => Err(error.unwrap_or_else(|| SourceError::new("arena", "a plan was made and not granted"))),
        }
    }

    /// Gives a block's place back. With the last one that a closed pool left behind everything goes back.
    pub(in crate::engine) fn give(&self, place: ArenaPtr, bytes: u64, now_us: u64) -> Result<(), SourceError> {
        let mut land = self.land.lock();
        land.arena.free(place, bytes, now_us);
        let deserted = land.is_deserted();
        drop(land);
        if deserted { self.dismantle(now_us) } else { Ok(()) }
    }

    /// Memory that falls idle goes back this much sooner: `None` restores what was set.
    pub(in crate::engine) fn hurry(&self, divisor: Option<u64>) {
        let idle_timeout_us = self.retain.idle_timeout_us.map(|us| us / divisor.unwrap_or(1).max(1));
        self.land.lock().arena.set_retention(Retention { idle_timeout_us, ..self.retain });
    }

    /// The pages of all that is held.
    pub(in crate::engine) fn page_tiers(&self) -> PageTiers {
        let places = self.land.lock().sites.places();
        let tiers = places.into_iter().map(|(start, len_bytes)| self.source.page_tiers(start, len_bytes));
        tiers.fold(PageTiers::default(), PageTiers::add)
    }

    pub(in crate::engine) fn holding(&self) -> SupplyStats {
        let land = self.land.lock();
        let figures = land.arena.stats();
        SupplyStats {
            held_bytes: figures.committed_bytes,
            peak_bytes: land.peak_bytes,
            block_bytes: figures.live_bytes,
            free_bytes: figures.hole_bytes,
            transit_bytes: figures.transit_bytes,
            reserve_bytes: land.reserve_bytes,
            stuck_bytes: 0,
            awaiting_release_bytes: land.awaiting_release_bytes(),
            drains: land.drains,
            max_bytes: self.max_bytes,
            moves: figures.remaps,
            calls: land.calls,
        }
    }
}

impl ArenaState {
    pub(super) fn claimed_bytes(&self) -> u64 {
        self.arena.stats().claimed_bytes + self.pending_bytes
    }

    pub(super) fn note_peak(&mut self) {
        self.peak_bytes = self.peak_bytes.max(self.claimed_bytes());
    }

    fn carve(&mut self, bytes: u64, align: u64) -> Option<Memory> {
        let place = self.arena.carve(bytes, align)?;
        self.memory_at(place, bytes)
    }

    fn memory_at(&mut self, place: ArenaPtr, bytes: u64) -> Option<Memory> {
        let start = self.sites.address(place)?;
        let id = self.next_id;
        self.next_id += 1;
        Some(Memory::Carved { start, place, bytes, id, claim: None })
    }

    /// Rule 6: could what is idle in front cover what would have to be locked? Where nothing can be locked beside it, it
    /// must make up the whole buffer with what is free.
    fn could_cover(&self, bytes: u64, align: u64, idle_bytes: u64, by_sum: bool) -> bool {
        if by_sum {
            return idle_bytes + self.arena.stats().hole_bytes >= bytes;
        }
        self.arena.missing_bytes(bytes, align).is_some_and(|missing_bytes| idle_bytes >= missing_bytes)
    }

    /// Books what the steps of a plan did, before it is settled. Returns the reason if one failed.
    pub(super) fn note(&mut self, tools: Executor, built: Executed) -> Option<SourceError> {
        let Executed { regions, error, locked_bytes, released_bytes, locks, releases, .. } = built;
        self.sites.keep(tools);
        for (range, region) in regions {
            self.sites.add(range, Mapping::Region(region));
        }
        self.calls.failures += u64::from(error.is_some());
        self.calls.allocs += locks;
        self.calls.frees += releases;
        self.calls.alloc_bytes += locked_bytes;
        self.calls.free_bytes += released_bytes;
        self.calls.note_peak();
        error
    }

    /// Has every pool closed and every buffer come back?
    pub(super) fn is_deserted(&self) -> bool {
        self.tenants.is_empty() && self.arena.stats().live_bytes == 0
    }
}

/// Makes somebody's idle buffer room: the borrower's own oldest, else another pool's. False if none is idle, or all of
/// them would not make up the `lacking_bytes`.
fn make_way(borrower: &dyn Reclaim, tenants: &[Arc<dyn Reclaim>], lacking_bytes: u64) -> bool {
    let idle_bytes: u64 = tenants.iter().map(|tenant| tenant.idle_bytes()).sum();
    idle_bytes > 0
        && idle_bytes >= lacking_bytes
        && (borrower.give_back_oldest() || tenants.iter().any(|tenant| tenant.give_back_oldest()))
}
