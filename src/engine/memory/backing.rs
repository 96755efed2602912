//! What serves the misses of one pool: its supply, its own ceiling, and its fallback.
//!
//! Owns which memory goes back where. Never waits for room, and reaches idle buffers only through
//! [`PoolView`].

use std::sync::{Arc, OnceLock};

use super::{Acquired, BlockMemory, OneEach, Pageable, Refusal, SharedArena, SlowCalls, Stop};
use super::{Domain, PoolView};
use crate::backend::{PageTiers, Source};
use crate::diag::PoolLog;
use crate::engine::waiters::Beside;
use crate::ledger::SharedCeiling;
use crate::quota::{Budget, Claim};
use crate::size_class::Class;
use crate::stats::{EvictionReason, SourceCalls, Stats};
use pinpool_os::sync::process::{AtomicU64, Ordering};

/// Where pinned memory comes from.
#[derive(Debug)]
pub(crate) enum Supply {
    /// Preset `tensorflow`.
    OneEach(OneEach),
    /// Preset `adaptive`.
    Shared(Arc<Domain>),
}

/// The supply of one pool.
#[derive(Debug)]
pub(crate) struct Backing {
    pub(super) supply: Supply,
    /// Bytes of users that are page-locked under the same limit. Relaxed: a figure.
    outside_bytes: AtomicU64,
    /// Serves gets for which there is no room; `None` if those are errors.
    pub(super) fallback: Option<Pageable>,
    /// What the process may lock, read from a file of the kernel when a get first finds no memory.
    pub(super) lock_limit: OnceLock<Option<u64>>,
}

impl Backing {
    pub(crate) fn new(supply: Supply, fallback: Option<Pageable>) -> Self {
        Self { supply, outside_bytes: AtomicU64::new(0), fallback, lock_limit: OnceLock::new() }
    }

    /// The pool has closed: everything is released, now or with the last block.
    pub(in crate::engine) fn close(&self, now_us: u64) {
        match &self.supply {
            Supply::OneEach(direct) => direct.close(),
            Supply::Shared(domain) => domain.arena().close(now_us),
        }
    }

    /// Sets the ceiling.
    pub(in crate::engine) fn set_max_bytes(&self, max_bytes: Option<u64>) {
        self.budget().set_max_bytes(max_bytes);
        if let Some(fallback) = &self.fallback {
            fallback.follow(max_bytes);
        }
    }

    /// The limit of the pool.
    pub(in crate::engine) fn budget(&self) -> &Arc<Budget> {
        match &self.supply {
            Supply::OneEach(direct) => direct.budget(),
            Supply::Shared(domain) => domain.arena().budget(),
        }
    }

    pub(in crate::engine) fn max_bytes(&self) -> Option<u64> {
        self.budget().max_bytes()
    }

    /// Whether more is held than the ceiling, which was lowered.
    pub(in crate::engine) fn is_over_ceiling(&self) -> bool {
        self.budget().over_bytes() > 0
    }

    /// The ceiling shared with others that memory is claimed under.
    pub(in crate::engine) fn ledger(&self) -> Option<Arc<SharedCeiling>> {
        self.budget().shared()
    }

    /// Has idle memory released until `bytes` are or nothing is idle. Returns how many were. Slow calls.
    pub(in crate::engine) fn give_room(&self, bytes: u64, pool: &dyn PoolView, now_us: u64) -> u64 {
        match &self.supply {
            Supply::OneEach(direct) => {
                let before_bytes = direct.budget().used_bytes();
                let given = || before_bytes.saturating_sub(direct.budget().used_bytes());
                let mut to_release = None;
                while given() < bytes && release_one(pool, &mut to_release) {}
                given()
            }
            Supply::Shared(domain) => domain.give_room(pool, bytes, now_us),
        }
    }

    /// Bytes of idle buffers and of free memory outside the reserve.
    pub(in crate::engine) fn idle_bytes(&self, pool: &dyn PoolView) -> u64 {
        match &self.supply {
            Supply::OneEach(_) => pool.idle_bytes(),
            Supply::Shared(domain) => domain.idle_bytes(pool),
        }
    }

    /// Whether buffers are carved from an arena, which can hold a reserve and be shared.
    pub(crate) fn has_arena(&self) -> bool {
        self.arena().is_some()
    }

    /// The pages of all that is held, where that is known.
    pub(crate) fn page_tiers(&self) -> Option<PageTiers> {
        self.arena().map(|arena| arena.page_tiers())
    }

    #[inline]
    pub(in crate::engine) fn arena(&self) -> Option<&SharedArena> {
        self.domain().map(|domain| domain.arena())
    }

    /// What pools over one arena share; `None` without an arena.
    #[inline]
    pub(in crate::engine) fn domain(&self) -> Option<&Arc<Domain>> {
        match &self.supply {
            Supply::OneEach(_) => None,
            Supply::Shared(domain) => Some(domain),
        }
    }

    pub(crate) fn source(&self) -> &dyn Source {
        match &self.supply {
            Supply::OneEach(direct) => direct.source(),
            Supply::Shared(domain) => domain.arena().source(),
        }
    }

    /// Memory for `class`, or what `reuse` found meanwhile, as far as `calls` allow. Idle blocks of `pool` make room. A slow
    /// call.
    pub(in crate::engine) fn acquire<R>(
        &self,
        class: Class,
        (now_us, calls): (u64, SlowCalls),
        pool: &dyn PoolView,
        mut reuse: impl FnMut() -> Option<R>,
    ) -> Result<Acquired<R>, Stop> {
        match &self.supply {
            Supply::OneEach(direct) => {
                let mut to_release = None;
                loop {
                    if let Some(reused) = reuse() {
                        return Ok(Acquired::Reused(reused));
                    }
                    match direct.acquire(class.bytes, calls) {
                        // A request that can never fit is no reason to release idle blocks.
                        Err(Stop::Refused(Refusal::Over { over, .. }))
                            if over.could_ever && calls == SlowCalls::None && pool.idle_buffers() > 0 =>
                        {
                            return Err(Stop::NeedsCall);
                        }
                        Err(Stop::Refused(Refusal::Over { over, .. }))
                            if over.could_ever && release_one(pool, &mut to_release) => {}
                        acquired => return acquired.map(Acquired::New),
                    }
                }
            }
            Supply::Shared(domain) => domain.serve(class, (now_us, calls), pool, reuse),
        }
    }

    /// Pageable memory for `class`, if this pool may give it out and its limit leaves room.
    pub(in crate::engine) fn acquire_pageable(&self, class: Class) -> Option<BlockMemory> {
        self.fallback.as_ref()?.acquire(class)
    }

    /// Claims `bytes` for memory that is held beside the blocks.
    pub(in crate::engine) fn claim_outside(&self, bytes: u64) -> Result<Claim, Refusal> {
        let claim = self.budget().claim(bytes).map_err(|over| Refusal::Over { needed_bytes: bytes, over })?;
        self.outside_bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(claim)
    }

    /// `bytes` of [`claim_outside`](Self::claim_outside) are held no more.
    pub(in crate::engine) fn end_outside(&self, bytes: u64) {
        self.outside_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// How much the supply may hold for `bytes` to fit beside it. `None` without a ceiling.
    pub(in crate::engine) fn room_for_outside(&self, bytes: u64) -> Option<u64> {
        let (max_bytes, others) = match &self.supply {
            Supply::OneEach(_) => (self.max_bytes(), 0),
            Supply::Shared(domain) => (self.max_bytes(), domain.arena().claimed_by_others()),
        };
        Some(max_bytes?.saturating_sub(bytes).saturating_sub(others))
    }

    /// Memory leaves the pool, to the arena or to the system. Logs a failure. A slow call.
    pub(in crate::engine) fn release(&self, memory: BlockMemory, now_us: u64, log: &PoolLog) {
        let released = match (memory, &self.supply) {
            (BlockMemory::Carved { ptr, bytes, .. }, Supply::Shared(domain)) => {
                domain.arena().give(ptr, bytes, now_us);
                Ok(())
            }
            (BlockMemory::Region { region, claim }, Supply::OneEach(direct)) => direct.release(region, claim),
            (BlockMemory::Pageable { region, claim }, _) => {
                self.fallback.as_ref().map_or(Ok(()), |fallback| fallback.release(region, claim))
            }
            (BlockMemory::Adopted(adopted), _) => {
                adopted.give_back();
                Ok(())
            }
            // A block is made by the supply of its own pool.
            (BlockMemory::Carved { .. } | BlockMemory::Region { .. }, _) => Ok(()),
        };
        if let Err((held_bytes, error)) = released {
            log.release_failed(held_bytes, &error);
        }
    }

    /// Releases what the source refused to release before; an arena does so with its next release. Slow calls.
    pub(in crate::engine) fn release_refused(&self) {
        if let Supply::OneEach(direct) = &self.supply {
            direct.release_refused();
        }
    }

    /// Whether a block of `class` fits under all ceilings when nothing else is held.
    pub(in crate::engine) fn could_hold(&self, class: Class) -> bool {
        match &self.supply {
            Supply::OneEach(direct) => self.budget().could_hold(direct.held_bytes(class.bytes)),
            Supply::Shared(domain) => domain.arena().could_hold(class.bytes as u64),
        }
    }

    /// The memory beside a get of the class `first`, as a get of `class` would use it. Counts a buffer as all the granules
    /// that it may touch, so that what is beside leaves the first whole ones. None where memory is held in regions, which
    /// a small buffer may keep from being replaced.
    pub(in crate::engine) fn beside(&self, first: Class, class: Class) -> Beside {
        let room_bytes = match &self.supply {
            Supply::OneEach(direct) => direct.room_beside_bytes(first.bytes),
            Supply::Shared(domain) => domain.arena().room_beside_bytes(first.bytes as u64),
        };
        Beside { room_bytes, needed_bytes: self.beside_bytes(class) }
    }

    /// What a buffer of `class` uses of the memory beside the first in line.
    pub(in crate::engine) fn beside_bytes(&self, class: Class) -> u64 {
        match &self.supply {
            Supply::OneEach(direct) => direct.held_bytes(class.bytes),
            Supply::Shared(domain) => domain.arena().touched_bytes(class.bytes as u64),
        }
    }

    /// Whether pageable memory for `class` fits under its limit when none is held.
    pub(in crate::engine) fn could_fall_back(&self, class: Class) -> bool {
        self.fallback.as_ref().is_some_and(|fallback| fallback.could_hold(class))
    }

    /// Bytes that the whole supply holds.
    pub(in crate::engine) fn held_bytes(&self) -> u64 {
        match &self.supply {
            Supply::OneEach(direct) => direct.budget().used_bytes(),
            Supply::Shared(domain) => domain.arena().held_bytes(),
        }
    }

    /// Whether the supply has memory in blocks: in use, in flight, idle or lost.
    pub(in crate::engine) fn has_blocks(&self) -> bool {
        match &self.supply {
            Supply::OneEach(direct) => direct.block_bytes() > 0,
            Supply::Shared(domain) => domain.arena().block_bytes() > 0,
        }
    }

    /// The calls of the source, for all pools of the arena.
    pub(in crate::engine) fn calls(&self) -> SourceCalls {
        match &self.supply {
            Supply::OneEach(direct) => direct.calls(),
            Supply::Shared(domain) => domain.arena().calls(),
        }
    }

    /// Bytes in blocks, pinned or not.
    pub(in crate::engine) fn own_bytes(&self) -> u64 {
        let pinned_bytes = match &self.supply {
            Supply::OneEach(direct) => direct.block_bytes(),
            Supply::Shared(domain) => domain.arena().block_bytes(),
        };
        pinned_bytes + self.fallback.as_ref().map_or(0, Pageable::held_bytes)
    }

    /// What a block of `class` holds for its user.
    pub(in crate::engine) fn block_bytes(&self, class: Class) -> u64 {
        match &self.supply {
            Supply::OneEach(direct) => direct.held_bytes(class.bytes),
            Supply::Shared(_) => class.bytes as u64,
        }
    }

    pub(in crate::engine) fn fill(&self, stats: &mut Stats) {
        match &self.supply {
            Supply::OneEach(direct) => direct.fill(stats),
            Supply::Shared(domain) => domain.fill(stats),
        }
        stats.pinned_fraction = self.domain().map_or(1.0, |domain| domain.pinned_fraction());
        stats.outside_bytes = self.outside_bytes.load(Ordering::Relaxed);
        if let Some(fallback) = &self.fallback {
            fallback.fill(stats);
        }
        let calls = self.calls();
        stats.underlying = calls.underlying();
        (stats.pin, stats.unpin, stats.remap) = (calls.pin, calls.unpin, calls.remap);
    }
}

/// Releases the block that has been idle longest; at most as many as are idle at the first call, whatever other threads
/// put back meanwhile.
fn release_one(pool: &dyn PoolView, to_release: &mut Option<u64>) -> bool {
    let left = to_release.get_or_insert_with(|| pool.idle_buffers());
    let is_left = *left > 0;
    *left = left.saturating_sub(1);
    is_left && pool.release_oldest(EvictionReason::Reclaimed)
}
