//! An arena over a source: its lock, and the slow calls of a plan.
//!
//! ```text
//!  carve:   [lock: carve] ─fits─▶ memory
//!  grow:    [lock: plan under the ceiling] ─▶ steps (no lock) ─▶ [lock: settle] ─▶ memory       (policy-R5, R7, R11)
//!  prepare: [lock: plan] ─▶ steps (no lock) ─▶ [lock: settle]: the maintenance thread keeps a hole         (policy-R13)
//!  release: [lock: plan] ─▶ steps (no lock) ─▶ [lock: settle] ─▶ wake threads that wait for a settlement
//!  end:     closed, and the last block given back, in either order ─▶ granules, then regions, then addresses
//! ```
//!
//! Answers, and knows no pool: [`Domain`](crate::engine::memory::Domain) decides which step comes when. Only completely free
//! memory is released, which no copy uses, so a release needs no lock against copies.
//!
//! Where a release waits for the device ([`Source::release_waits`]), it blocks every enqueue meanwhile. It happens only:
//!
//! - in `trim` and `clear`, and when a limit is lowered or passed
//! - at the limit, if a request cannot be served otherwise, or a request of another pool or process under a common limit
//! - under memory pressure
//! - at the end of the pool
//!
//! Until then idle memory is used again first, and counts as `awaiting_release_bytes` when it is due. While the end of a copy is
//! unknown, nothing is released there: a release would wait for that copy.
//!
//! Never decides what is due. No source call happens under the lock.
//!
//! - shared-arena-I1: what is claimed, by [`Source::held_bytes`] with all that the system adds, changes under the lock, before
//!   the source is called, and only within the ceiling.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

use super::CalledSource;
use super::books::Books;
use super::carry_out::{GrowthShape, arena_over, held};
use super::watch::MappingWatch;
use super::{BlockMemory, Refusal};
use crate::arena::{ArenaPtr, Retention};
use crate::backend::{PAGE_BYTES, PageTiers, Source, SourceError};
use crate::diag::PoolLog;
use crate::quota::{Budget, Claim, Room};
use crate::stats::{SourceCalls, Stats};
use pinpool_os::sync::{Condvar, Mutex, MutexGuard};

mod grow;
mod prepare;
mod release;
mod reserve;
mod slices;

pub(in crate::engine) use reserve::Step;
pub(in crate::engine) use slices::Place;

/// Wanted holes of more than this many granules count as varied sizes; a get moves the granules for a shorter one itself.
const VARIED_GRANULES: u64 = 2;
/// The same for discrete regions, whose small buffers have regions of their own.
const VARIED_IN_REGIONS_BYTES: u64 = 1 << 20;

/// An arena over a source.
#[derive(Debug)]
pub(crate) struct SharedArena {
    source: CalledSource,
    budget: Arc<Budget>,
    log: Arc<PoolLog>,
    config: SharedArenaConfig,
    shape: GrowthShape,
    state: Mutex<Books>,
    /// Notified when a plan is settled.
    settled: Condvar,
    mappings: MappingWatch,
    /// The kernel reports that memory is short.
    is_short: AtomicBool,
    /// Blocks whose copies end at an unknown time, or never.
    quarantined: AtomicU64,
    /// The log says that idle memory stays.
    told_idle: AtomicBool,
    /// Sizes vary, as of the last miss or look at the clock (policy-R12).
    is_varied: AtomicBool,
    /// Since the last preparation the holes changed, and none is as long as is wanted (policy-R13).
    lacks_hole: AtomicBool,
    /// Looks that found no such note, since the last one that did.
    quiet_looks: AtomicU32,
}

/// Settings of a shared arena.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SharedArenaConfig {
    pub(crate) may_grow: bool,
    /// Threads that touch the memory of a reserve.
    pub(crate) pin_threads: usize,
    /// A reserve that is not waited for is pinned by a thread of its own.
    pub(crate) background_thread: bool,
    pub(crate) retention: Retention,
}

impl SharedArena {
    /// An arena over `source`, which claims by `claim`. Reserves addresses where the source can, pins nothing.
    pub(crate) fn new(
        source: CalledSource,
        claim: Claim,
        config: SharedArenaConfig,
        log: Arc<PoolLog>,
    ) -> Result<Self, SourceError> {
        let (arena, mappings, shape) = arena_over(&source, claim.budget().max_bytes(), config.retention)?;
        let varied_above_bytes = if shape.is_discrete {
            VARIED_IN_REGIONS_BYTES
        } else {
            VARIED_GRANULES * shape.sizes.zone_at(0).granule_bytes
        };
        Ok(Self {
            source,
            log,
            config,
            shape,
            budget: claim.budget().clone(),
            state: Mutex::new(Books::new(arena, mappings, varied_above_bytes, claim)),
            settled: Condvar::default(),
            mappings: MappingWatch::below("/".into()),
            is_short: AtomicBool::new(false),
            quarantined: AtomicU64::new(0),
            told_idle: AtomicBool::new(false),
            is_varied: AtomicBool::new(false),
            lacks_hole: AtomicBool::new(false),
            quiet_looks: AtomicU32::new(u32::MAX),
        })
    }

    /// Reads the limits of the process below `root`.
    pub(crate) fn with_host_root(self, root: PathBuf) -> Self {
        Self { mappings: MappingWatch::below(root), ..self }
    }

    pub(in crate::engine) fn budget(&self) -> &Arc<Budget> {
        &self.budget
    }

    pub(in crate::engine) fn source(&self) -> &dyn Source {
        &*self.source
    }

    pub(in crate::engine) fn state(&self) -> MutexGuard<'_, Books> {
        self.state.lock()
    }

    pub(in crate::engine) fn config(&self) -> &SharedArenaConfig {
        &self.config
    }

    /// A get of `bytes` missed: carves it if a hole is long enough. Also returns whether the size recurs (policy-R12).
    pub(in crate::engine) fn serve_miss(&self, bytes: u64, now_us: u64) -> (Option<BlockMemory>, bool) {
        let mut state = self.state.lock();
        let served = state.serve_miss(bytes, now_us);
        let changed = self.note_demand(&state, now_us);
        self.note_holes(&state, now_us);
        drop(state);
        self.log.sizes_changed(changed);
        served
    }

    /// No hole is long enough for `bytes`, of a size that does not recur, while `idle_bytes` are idle in the pool.
    pub(in crate::engine) fn note_scattered(&self, bytes: u64, idle_bytes: u64, now_us: u64) {
        let mut state = self.state.lock();
        state.note_scattered(bytes, idle_bytes, now_us);
        let changed = self.note_demand(&state, now_us);
        drop(state);
        self.log.sizes_changed(changed);
    }

    /// Waits until a plan of another thread is settled. False if none was until `until`.
    pub(in crate::engine) fn wait_settled(&self, state: MutexGuard<'_, Books>, until: Instant) -> bool {
        !self.settled.wait_until(state, until).1
    }

    /// A buffer has memory for itself alone, where the source refused more.
    pub(in crate::engine) fn note_smaller_region(&self) {
        if self.shape.is_discrete {
            self.state.lock().count_smaller_region();
        }
    }

    /// Whether a block of `bytes` fits when everything else is released.
    pub(in crate::engine) fn could_hold(&self, bytes: u64) -> bool {
        let is_addressable = bytes <= self.shape.longest_bytes;
        self.fits(bytes) && (is_addressable || bytes <= self.state.lock().reserve_bytes().1)
    }

    /// Whether the ceiling leaves room for a block of `bytes` when everything else is released.
    fn fits(&self, bytes: u64) -> bool {
        let state = self.state.lock();
        let (reserve_bytes, largest_reserve_bytes) = state.reserve_bytes();
        let room_bytes = self.budget.highest_claim_bytes().saturating_sub(reserve_bytes);
        let background_bytes = state.background_reserve_bytes();
        drop(state);
        let GrowthShape { sizes, is_discrete, .. } = self.shape;
        let fits_by_growth = self.grown_bytes(bytes) <= room_bytes;
        let fits_by_reserve = !is_discrete && sizes.up(bytes) <= background_bytes.min(room_bytes);
        bytes <= largest_reserve_bytes || fits_by_growth && (self.config.may_grow || fits_by_reserve)
    }

    /// What is claimed for a block of `bytes` that has no committed memory.
    pub(in crate::engine) fn grown_bytes(&self, bytes: u64) -> u64 {
        let GrowthShape { sizes, is_discrete, .. } = self.shape;
        if is_discrete { self.alone_bytes(bytes) } else { sizes.up(bytes) }
    }

    /// What the system holds for a block of `bytes` alone.
    pub(in crate::engine) fn alone_bytes(&self, bytes: u64) -> u64 {
        if self.shape.is_discrete { held(bytes, |len| self.source.held_bytes(len)) } else { bytes }
    }

    /// Bytes that others claim under the same ceiling.
    pub(in crate::engine) fn claimed_by_others(&self) -> u64 {
        self.state.lock().claimed_by_others()
    }

    /// Whether it may pin more than its reserve.
    pub(in crate::engine) fn may_grow(&self) -> bool {
        self.config.may_grow
    }

    /// What the ceiling leaves beside a block of `first_bytes` in whole granules.
    pub(in crate::engine) fn room_beside_bytes(&self, first_bytes: u64) -> u64 {
        let GrowthShape { ample_bytes: granule_bytes, is_discrete, .. } = self.shape;
        match self.budget.max_bytes().filter(|_| !is_discrete && self.config.may_grow) {
            Some(max_bytes) => {
                let granules = (max_bytes / granule_bytes).saturating_sub(first_bytes.div_ceil(granule_bytes));
                granules * granule_bytes
            }
            None => 0,
        }
    }

    /// Bytes of the granules that a block of `bytes` may touch.
    pub(in crate::engine) fn touched_bytes(&self, bytes: u64) -> u64 {
        let granule_bytes = self.shape.ample_bytes;
        (bytes.div_ceil(granule_bytes) + 1).saturating_mul(granule_bytes)
    }

    /// Why no plan gives a block of `bytes` memory, while `idle_bytes` were idle in the pool and `room` was left under the
    /// ceilings.
    pub(in crate::engine) fn no_space(&self, bytes: u64, idle_bytes: u64, room: Room) -> Refusal {
        let refused = |over| Refusal::Over { needed_bytes: bytes, over };
        if !self.config.may_grow {
            return refused(self.budget.full(bytes));
        }
        let state = self.state.lock();
        // What is idle here is used first, and is claimed already.
        let reusable_bytes = idle_bytes.saturating_add(state.arena().stats().idle_bytes);
        let missing_bytes = state.arena().missing_bytes(bytes, PAGE_BYTES as u64);
        drop(state);
        let is_addressable = missing_bytes.is_some() && bytes <= self.shape.longest_bytes;
        let has_ceiling = self.budget.max_bytes().is_some() || self.budget.shared().is_some();
        if self.fits(bytes) && !(is_addressable && has_ceiling) {
            let longest_bytes = self.shape.longest_bytes;
            let what = format!("no {bytes} B in one piece are left of the {longest_bytes} B of addresses reserved");
            let remedy = self.shape.address_remedy.unwrap_or("ask for less at once, or put buffers back first");
            return Refusal::Source(SourceError::new("arena", what).with_remedy(remedy));
        }
        // At its best place a part of it may be committed; idle granules elsewhere move there.
        let grown_bytes = self.grown_bytes(bytes);
        let missing_bytes = missing_bytes.filter(|_| !self.shape.is_discrete).unwrap_or(grown_bytes);
        let claimed_bytes = missing_bytes.min(grown_bytes.saturating_sub(reusable_bytes));
        let own_bytes = self.budget.own_room_bytes();
        // There may have been room for a plan that did not come about: what is idle here may lie elsewhere.
        let wanted = [(claimed_bytes, own_bytes), (grown_bytes, own_bytes.saturating_add(reusable_bytes))];
        let shared = wanted.iter().filter(|(bytes, own_bytes)| bytes <= own_bytes);
        let over = shared.filter_map(|&(bytes, _)| self.budget.lacking_shared(room, bytes)).next();
        refused(over.unwrap_or_else(|| self.budget.full(claimed_bytes.saturating_sub(own_bytes))))
    }

    /// The pool has closed. Everything is released, now or with the last block.
    pub(in crate::engine) fn close(&self, now_us: u64) {
        self.state.lock().close();
        self.teardown(now_us);
    }

    /// Takes a block's bytes back. A pool is closed once its last block is counted as put, which may be before that
    /// block's memory is given back by another thread; so the last of the two, `close` or `give`, tears down.
    pub(in crate::engine) fn give(&self, ptr: ArenaPtr, bytes: u64, now_us: u64) {
        let mut state = self.state.lock();
        let is_unused = state.give(ptr, bytes, now_us);
        self.note_holes(&state, now_us);
        drop(state);
        if is_unused {
            self.teardown(now_us);
        }
    }

    /// Divides the time that free memory is kept, since memory is short; `None` restores the setting.
    pub(in crate::engine) fn shorten_retention(&self, divisor: Option<u64>) {
        // Relaxed: see `may_release_by_time`.
        self.is_short.store(divisor.is_some(), Ordering::Relaxed);
        let idle_timeout_us = self.config.retention.idle_timeout_us.map(|us| us / divisor.unwrap_or(1).max(1));
        self.state.lock().set_retention(Retention { idle_timeout_us, ..self.config.retention });
    }

    /// Whether free memory will be due, and is not known to be.
    pub(in crate::engine) fn ages(&self) -> bool {
        let state = self.state.lock();
        let releasable_bytes = state.arena().releasable_bytes();
        releasable_bytes > 0 && (self.may_release_by_time() || state.overdue_bytes() < releasable_bytes)
    }

    /// Bytes of free memory, and `buffer_bytes` of idle buffers, that are no reserve.
    pub(in crate::engine) fn idle_bytes(&self, buffer_bytes: u64) -> u64 {
        let state = self.state.lock();
        let arena = state.arena().stats();
        let free_bytes = arena.hole_bytes.saturating_sub(arena.reserve_hole_bytes);
        let kept_bytes = state.arena().kept_bytes();
        (free_bytes + buffer_bytes).min(state.arena().committed_outside_reserves().saturating_sub(kept_bytes))
    }

    /// Whether there is free memory, which goes back if memory is short.
    pub(in crate::engine) fn has_free(&self) -> bool {
        self.state.lock().arena().releasable_bytes() > 0
    }

    /// The pages of all committed memory.
    pub(in crate::engine) fn page_tiers(&self) -> PageTiers {
        let extents = self.state.lock().extents();
        let tiers = extents.into_iter().map(|(start, len_bytes)| self.source.page_tiers(start, len_bytes));
        tiers.fold(PageTiers::default(), PageTiers::add)
    }

    pub(in crate::engine) fn fill(&self, stats: &mut Stats) {
        self.state.lock().fill(stats);
    }

    pub(in crate::engine) fn held_bytes(&self) -> u64 {
        self.state.lock().held_bytes()
    }

    /// Bytes of the blocks that are carved from the arena.
    pub(in crate::engine) fn block_bytes(&self) -> u64 {
        self.state.lock().arena().stats().live_bytes
    }

    pub(in crate::engine) fn calls(&self) -> SourceCalls {
        self.state.lock().calls()
    }
}
