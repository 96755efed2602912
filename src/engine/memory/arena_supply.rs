//! Preset `adaptive`: an arena over a source, and the lock around its books.
//!
//! Only completely free memory is released, which no copy uses, so a release needs no lock against copies. If a release waits for
//! the device ([`Source::release_waits`](crate::backend::Source::release_waits)), it blocks every enqueue meanwhile. It happens only:
//!
//! - in `trim` and `clear`, and when a limit is lowered or exceeded
//! - at the limit, if a request cannot be served otherwise, or a request of another pool or process under a shared limit
//! - under memory pressure
//! - at the end of the pool
//!
//! Until then idle memory is reused, and counts as `awaiting_release_bytes` when it is due. While the end of a copy is unknown,
//! nothing is released at all, because a release would wait for that copy.
//!
//! - arena-supply-I1: the claim, which includes all bytes that the system adds
//!   ([`Source::held_bytes`](crate::backend::Source::held_bytes)), changes under the lock, before the source is called, and only
//!   within the limits.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

use super::PoolView;
use super::block_memory::Refusal;
use super::books::Books;
use super::called_source::CalledSource;
use super::pressure::PressureWatch;
use super::reserve::Reserve;
use super::shape::{GrowthShape, arena_over, held};
use crate::arena::Retention;
use crate::backend::{PAGE_BYTES, SourceError};
use crate::quota::{Budget, Claim};
use crate::report::PoolLog;
use pinpool_os::sync::{Condvar, Mutex, MutexGuard};

/// Wanted holes of more than this many granules count as varied sizes; a request remaps the granules for a shorter hole itself.
const VARIED_GRANULES: u64 = 2;
/// The same for separate regions: each small buffer has its own region.
const VARIED_IN_REGIONS_BYTES: u64 = 1 << 20;

/// An arena over a source.
pub(crate) struct ArenaSupply {
    pub(super) source: CalledSource,
    pub(super) budget: Arc<Budget>,
    pub(super) log: Arc<PoolLog>,
    pub(super) settings: ArenaSettings,
    pub(super) shape: GrowthShape,
    books: Mutex<Books>,
    /// Notified when a plan is finished.
    pub(super) finished: Condvar,
    /// The kernel reports that memory is short.
    pub(super) is_short: AtomicBool,
    /// Blocks with copies that end at an unknown time, or never.
    pub(super) quarantined: AtomicU64,
    /// The log says that idle memory stays.
    pub(super) told_idle: AtomicBool,
    /// Sizes vary, as of the last miss or tick (policy-R12).
    pub(super) is_varied: AtomicBool,
    /// Set if the holes changed and none is as long as is wanted (policy-R13), until a compaction begins.
    pub(super) lacks_hole: AtomicBool,
    /// Polls since the last one that found the flag set.
    pub(super) idle_polls: AtomicU32,
    pool: OnceLock<Weak<dyn PoolView>>,
    pub(super) pressure: PressureWatch,
    /// A thread is releasing what is due.
    pub(super) is_releasing: AtomicBool,
    pub(super) reserve: Reserve,
}

impl std::fmt::Debug for ArenaSupply {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ArenaSupply").field("source", &self.source.name()).finish_non_exhaustive()
    }
}

/// Settings of an arena.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ArenaSettings {
    pub(crate) may_grow: bool,
    /// Threads that touch the memory of a reserve.
    pub(crate) pin_threads: usize,
    /// The maintenance thread pins a reserve that is not waited for.
    pub(crate) background_thread: bool,
    pub(crate) retention: Retention,
}

impl ArenaSupply {
    /// An arena over `source`, which claims by `claim`. Reserves addresses if the source can, pins nothing. Reads memory
    /// pressure from `pressure` or the kernel's files.
    pub(crate) fn new(
        source: CalledSource,
        claim: Claim,
        settings: ArenaSettings,
        log: Arc<PoolLog>,
        pressure: Option<&Path>,
    ) -> Result<Self, SourceError> {
        let (arena, mappings, shape) = arena_over(&source, claim.budget().max_bytes(), settings.retention)?;
        let varied_above_bytes = if shape.is_discrete {
            VARIED_IN_REGIONS_BYTES
        } else {
            VARIED_GRANULES * shape.sizes.zone_at(0).granule_bytes
        };
        Ok(Self {
            source,
            log,
            settings,
            shape,
            budget: claim.budget().clone(),
            books: Mutex::new(Books::new(arena, mappings, varied_above_bytes, claim)),
            finished: Condvar::default(),
            is_short: AtomicBool::new(false),
            quarantined: AtomicU64::new(0),
            told_idle: AtomicBool::new(false),
            is_varied: AtomicBool::new(false),
            lacks_hole: AtomicBool::new(false),
            idle_polls: AtomicU32::new(u32::MAX),
            pool: OnceLock::new(),
            pressure: PressureWatch::new(pressure),
            is_releasing: AtomicBool::new(false),
            reserve: Reserve::default(),
        })
    }

    pub(in crate::engine) fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock()
    }

    /// Tells this pool of room that a reserve makes.
    pub(in crate::engine) fn attach(&self, pool: Weak<dyn PoolView>) {
        // Set once, when the pool is made.
        let _ = self.pool.set(pool);
    }

    pub(super) fn pool(&self) -> Option<Arc<dyn PoolView>> {
        self.pool.get().and_then(Weak::upgrade)
    }

    /// Waits until a plan of another thread is finished. Returns false if none was by `until`.
    pub(super) fn wait_finished(&self, books: MutexGuard<'_, Books>, until: Instant) -> bool {
        !self.finished.wait_until(books, until).1
    }

    /// Returns whether a block of `bytes` could be held if everything else were released.
    pub(super) fn could_hold_bytes(&self, bytes: u64) -> bool {
        let is_addressable = bytes <= self.shape.longest_bytes;
        self.fits(bytes) && (is_addressable || bytes <= self.books().reserve_bytes().1)
    }

    /// Returns whether the limit leaves room for a block of `bytes` if everything else is released.
    fn fits(&self, bytes: u64) -> bool {
        let books = self.books();
        let (reserve_bytes, largest_reserve_bytes) = books.reserve_bytes();
        let room_bytes = self.budget.highest_claim_bytes().saturating_sub(reserve_bytes);
        let to_come_bytes = books.reserve_in_granules();
        drop(books);
        let GrowthShape { sizes, is_discrete, .. } = self.shape;
        let fits_by_growth = self.grown_bytes(bytes) <= room_bytes;
        let fits_by_reserve = !is_discrete && sizes.up(bytes) <= to_come_bytes.min(room_bytes);
        bytes <= largest_reserve_bytes || fits_by_growth && (self.settings.may_grow || fits_by_reserve)
    }

    /// The bytes to claim for a block of `bytes` that has no committed memory.
    pub(super) fn grown_bytes(&self, bytes: u64) -> u64 {
        let GrowthShape { sizes, is_discrete, .. } = self.shape;
        if is_discrete { self.alone_bytes(bytes) } else { sizes.up(bytes) }
    }

    /// The bytes that the system holds for a block of `bytes` alone.
    pub(super) fn alone_bytes(&self, bytes: u64) -> u64 {
        if self.shape.is_discrete { held(bytes, |len| self.source.held_bytes(len)) } else { bytes }
    }

    /// The reason that no plan gives a block of `bytes` memory while `idle_bytes` are idle in the pool.
    pub(super) fn no_space(&self, bytes: u64, idle_bytes: u64) -> Refusal {
        let refused = |over| Refusal::QuotaExceeded { needed_bytes: bytes, over };
        if !self.settings.may_grow {
            return refused(self.budget.full(bytes));
        }
        let books = self.books();
        // Idle memory of this pool is used first, and is claimed already.
        let reusable_bytes = idle_bytes.saturating_add(books.arena.stats().idle_bytes);
        let missing_bytes = books.arena.missing_bytes(bytes, PAGE_BYTES as u64);
        drop(books);
        let is_addressable = missing_bytes.is_some() && bytes <= self.shape.longest_bytes;
        let has_limit = self.budget.max_bytes().is_some() || self.budget.is_shared();
        if self.fits(bytes) && !(is_addressable && has_limit) {
            let longest_bytes = self.shape.longest_bytes;
            let what = format!("no {bytes} B in one piece are left of the {longest_bytes} B of addresses reserved");
            let remedy = self.shape.address_remedy.unwrap_or("request less at once, or return buffers first");
            return Refusal::Source(SourceError::new("arena", what).with_remedy(remedy));
        }
        // A part of the best place may be committed; idle granules elsewhere move there.
        let grown_bytes = self.grown_bytes(bytes);
        let missing_bytes = missing_bytes.filter(|_| !self.shape.is_discrete).unwrap_or(grown_bytes);
        let claimed_bytes = missing_bytes.min(grown_bytes.saturating_sub(reusable_bytes));
        let own_bytes = self.budget.own_room_bytes();
        // There may have been room although no plan was found: idle memory may lie elsewhere.
        let wanted = [(claimed_bytes, own_bytes), (grown_bytes, own_bytes.saturating_add(reusable_bytes))];
        let shared = wanted.iter().filter(|(bytes, own_bytes)| bytes <= own_bytes);
        let over = shared.filter_map(|&(bytes, _)| self.budget.current_shared_refusal(bytes)).next();
        refused(over.unwrap_or_else(|| self.budget.full(claimed_bytes.saturating_sub(own_bytes))))
    }

    /// Divides the time for which free memory is kept, because memory is short; `None` restores the setting.
    pub(super) fn shorten_retention(&self, divisor: Option<u64>) {
        // Relaxed: see `may_release_by_time`.
        self.is_short.store(divisor.is_some(), Ordering::Relaxed);
        let idle_timeout_us = self.settings.retention.idle_timeout_us.map(|us| us / divisor.unwrap_or(1).max(1));
        self.books().arena.set_retention(Retention { idle_timeout_us, ..self.settings.retention });
    }

    /// Returns whether some free memory will become due.
    pub(in crate::engine) fn ages(&self) -> bool {
        let books = self.books();
        let releasable_bytes = books.arena.releasable_bytes();
        releasable_bytes > 0 && (self.may_release_by_time() || books.overdue_bytes < releasable_bytes)
    }

    /// Returns whether there is free memory, which is released if memory is short.
    pub(in crate::engine) fn has_free(&self) -> bool {
        self.books().arena.releasable_bytes() > 0
    }
}
