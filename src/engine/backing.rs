//! What serves the misses of one pool: its supply, its own ceiling, and its fallback.
//!
//! Owns which memory goes back where. Never waits for room, and reaches idle buffers only through
//! [`Member`].

use std::sync::{Arc, OnceLock};

use super::domain::{Domain, Member};
use super::supply::{Acquired, BlockMemory, Direct, Fallback, Refusal, SharedArena, SlowCalls, Stop};
use super::waiters::Beside;
use crate::backend::{PageTiers, Source};
use crate::diag::PoolLog;
use crate::ledger::SharedCeiling;
use crate::quota::{Claim, Quota};
use crate::size_class::Class;
use crate::stats::{EvictionReason, SourceCalls, Stats};

mod refusals;

/// Where pinned memory comes from.
#[derive(Debug)]
pub(crate) enum Supply {
    /// Preset `tensorflow`.
    Direct(Direct),
    /// Preset `adaptive`; partitions share it.
    Shared(Arc<Domain>),
}

/// The supply of one pool.
#[derive(Debug)]
pub(crate) struct Backing {
    supply: Supply,
    is_partition: bool,
    /// The blocks of this pool and its partitions, and what is held beside them. Where pools share an arena, it has a ceiling in
    /// a partition and nowhere else; without an arena it is the quota of the supply.
    own: Arc<Quota>,
    /// What this pool and its partitions have added to the reserve, under the same ceiling.
    reserves: Arc<Quota>,
    /// Serves gets for which there is no room; `None` if those are errors.
    fallback: Option<Fallback>,
    /// What the process may lock, read from a file of the kernel when a get first finds no memory.
    lock_limit: OnceLock<Option<u64>>,
}

/// Bytes that something beside the buffers of a pool holds under its ceilings, until this is dropped.
#[derive(Debug)]
pub(crate) struct OutsideClaim {
    _of_arena: Option<Claim>,
    _own: Claim,
}

impl Backing {
    pub(crate) fn new(supply: Supply, fallback: Option<Fallback>) -> Self {
        let own = match &supply {
            Supply::Direct(direct) => direct.quota().clone(),
            Supply::Shared(_) => Quota::new(None),
        };
        Self { supply, is_partition: false, own, reserves: Quota::new(None), fallback, lock_limit: OnceLock::new() }
    }

    /// The same arena under an own ceiling; `None` for a supply that cannot be shared.
    pub(in crate::engine) fn partition(&self, max_bytes: u64) -> Option<Self> {
        let domain = self.domain()?.clone();
        let max_bytes = Some(max_bytes);
        Some(Self {
            supply: Supply::Shared(domain),
            is_partition: true,
            own: Quota::inside(&self.own, max_bytes),
            reserves: Quota::inside(&self.reserves, max_bytes),
            fallback: self.fallback.as_ref().map(|fallback| fallback.partition(max_bytes)),
            lock_limit: OnceLock::new(),
        })
    }

    /// The pool has closed. After the last one over an arena everything is released, now or with the last block.
    pub(in crate::engine) fn close(&self, pool: &dyn Member, now_us: u64) {
        match &self.supply {
            Supply::Direct(direct) => direct.close(),
            Supply::Shared(domain) => domain.detach(pool, now_us),
        }
    }

    pub(crate) fn is_partition(&self) -> bool {
        self.is_partition
    }

    /// Sets the ceiling: of a partition its own, else that of all pools of the arena.
    pub(in crate::engine) fn set_max_bytes(&self, max_bytes: Option<u64>) {
        self.quota().set_max_bytes(max_bytes);
        if self.is_partition {
            self.reserves.set_max_bytes(max_bytes);
        }
        if let Some(fallback) = &self.fallback {
            fallback.follow(max_bytes);
        }
    }

    /// The ceiling that [`set_max_bytes`](Self::set_max_bytes) sets: of a partition its own, else that of the supply.
    fn quota(&self) -> &Arc<Quota> {
        if self.is_partition { &self.own } else { self.supply_quota() }
    }

    /// The ceiling of all pools that share the supply.
    pub(in crate::engine) fn supply_quota(&self) -> &Arc<Quota> {
        match &self.supply {
            Supply::Direct(direct) => direct.quota(),
            Supply::Shared(domain) => domain.arena().quota(),
        }
    }

    pub(in crate::engine) fn max_bytes(&self) -> Option<u64> {
        self.quota().max_bytes()
    }

    /// Whether only releasing idle blocks of this pool brings it back under its ceiling: in a partition, and without an arena.
    pub(in crate::engine) fn is_over_own_ceiling(&self) -> bool {
        self.own.max_bytes().is_some_and(|max_bytes| self.own.held_bytes() > max_bytes)
    }

    /// The ceiling shared with others that memory is claimed under.
    pub(in crate::engine) fn ledger(&self) -> Option<Arc<SharedCeiling>> {
        self.supply_quota().shared()
    }

    /// Has idle memory released until `bytes` are or nothing is idle. Returns how many were. Slow calls.
    pub(in crate::engine) fn give_room(&self, bytes: u64, pool: &dyn Member, now_us: u64) -> u64 {
        match &self.supply {
            Supply::Direct(direct) => {
                let before_bytes = direct.quota().held_bytes();
                let given = || before_bytes.saturating_sub(direct.quota().held_bytes());
                let mut to_release = None;
                while given() < bytes && release_one(pool, &mut to_release) {}
                given()
            }
            Supply::Shared(domain) => domain.give_room(bytes, now_us),
        }
    }

    /// Bytes of idle buffers and of free memory outside the reserve.
    pub(in crate::engine) fn idle_bytes(&self, pool: &dyn Member) -> u64 {
        match &self.supply {
            Supply::Direct(_) => pool.idle_bytes(),
            Supply::Shared(domain) => domain.idle_bytes(),
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
            Supply::Direct(_) => None,
            Supply::Shared(domain) => Some(domain),
        }
    }

    pub(crate) fn source(&self) -> &dyn Source {
        match &self.supply {
            Supply::Direct(direct) => direct.source(),
            Supply::Shared(domain) => domain.arena().source(),
        }
    }

    /// Memory for `class`, or what `reuse` found meanwhile, as far as `calls` allow. Idle blocks of `pool` make room. A slow
    /// call.
    pub(in crate::engine) fn acquire<R>(
        &self,
        class: Class,
        (now_us, calls): (u64, SlowCalls),
        pool: &dyn Member,
        mut reuse: impl FnMut() -> Option<R>,
    ) -> Result<Acquired<R>, Stop> {
        match &self.supply {
            Supply::Direct(direct) => {
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
            Supply::Shared(domain) => {
                let own_claim = self.claim_own(class.bytes as u64, pool)?;
                let mut acquired = domain.serve(class, (now_us, calls), pool, reuse)?;
                if let Acquired::New(BlockMemory::Carved { claim, .. }) = &mut acquired {
                    *claim = Some(own_claim.held());
                }
                Ok(acquired)
            }
        }
    }

    /// Claims `bytes` under the pool's own ceiling, where its own idle blocks make room.
    fn claim_own(&self, bytes: u64, pool: &dyn Member) -> Result<Claim, Refusal> {
        let mut to_release = None;
        loop {
            match self.own.claim(bytes) {
                Err(over) if over.could_ever && release_one(pool, &mut to_release) => {}
                claimed => return claimed.map_err(|over| Refusal::Over { needed_bytes: bytes, over }),
            }
        }
    }

    /// Pageable memory for `class`, if this pool may give it out and its limit leaves room.
    pub(in crate::engine) fn acquire_pageable(&self, class: Class) -> Option<BlockMemory> {
        self.fallback.as_ref()?.acquire(class)
    }

    /// Claims `bytes` of a reserve under the pool's own ceiling, for as long as the pool lives; in the end as many as `add` returns.
    pub(in crate::engine) fn add_reserve<R>(
        &self,
        bytes: u64,
        add: impl FnOnce() -> Result<(u64, R), Refusal>,
    ) -> Result<R, Refusal> {
        let claim = self.reserves.claim(bytes).map_err(|over| Refusal::Over { needed_bytes: bytes, over });
        let mut claim = claim?;
        let (added_bytes, added) = add()?;
        // Fewer than were asked for are there: never more than are claimed.
        let _lowered = claim.resize(added_bytes.min(bytes));
        claim.keep_forever();
        Ok(added)
    }

    /// Claims `bytes` under all ceilings for memory that is held beside the blocks.
    pub(in crate::engine) fn claim_outside(&self, bytes: u64, pool: &dyn Member) -> Result<OutsideClaim, Refusal> {
        let refused = |over| Refusal::Over { needed_bytes: bytes, over };
        let own =
            if self.is_partition { self.claim_own(bytes, pool)? } else { self.own.claim(bytes).map_err(refused)? };
        let of_arena = self.arena().map(|arena| arena.quota().claim(bytes)).transpose().map_err(refused)?;
        Ok(OutsideClaim { _of_arena: of_arena, _own: own.held_outside() })
    }

    /// How much the supply may hold for `bytes` to fit beside it. `None` without a ceiling.
    pub(in crate::engine) fn room_for_outside(&self, bytes: u64) -> Option<u64> {
        let (max_bytes, others) = match &self.supply {
            Supply::Direct(direct) => (direct.quota().max_bytes(), 0),
            Supply::Shared(domain) => (domain.arena().quota().max_bytes(), domain.arena().claimed_by_others()),
        };
        Some(max_bytes?.saturating_sub(bytes).saturating_sub(others))
    }

    /// A block of this pool of `bytes` is never used again.
    pub(in crate::engine) fn note_lost(&self, bytes: u64) {
        self.own.note_lost(bytes);
    }

    /// A block of this pool of `bytes` that was lost is used again.
    pub(in crate::engine) fn note_recovered(&self, bytes: u64) {
        self.own.note_recovered(bytes);
    }

    /// Memory leaves the pool, to the arena or to the system. Logs a failure. A slow call.
    pub(in crate::engine) fn release(&self, memory: BlockMemory, now_us: u64, log: &PoolLog) {
        let released = match (memory, &self.supply) {
            (BlockMemory::Carved { ptr, bytes, claim, .. }, Supply::Shared(domain)) => {
                domain.arena().give(ptr, bytes, now_us);
                drop(claim);
                Ok(())
            }
            (BlockMemory::Region { region, claim }, Supply::Direct(direct)) => direct.release(region, claim),
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
        if let Supply::Direct(direct) = &self.supply {
            direct.release_refused();
        }
    }

    /// Whether a block of `class` fits under all ceilings when nothing else is held.
    pub(in crate::engine) fn could_hold(&self, class: Class) -> bool {
        match &self.supply {
            Supply::Direct(direct) => self.own.could_hold(direct.held_bytes(class.bytes)),
            Supply::Shared(domain) => {
                let bytes = class.bytes as u64;
                self.own.could_hold(bytes) && domain.arena().could_hold(bytes)
            }
        }
    }

    /// The memory beside a get of the class `first`, as a get of `class` would use it. Counts a buffer as all the granules
    /// that it may touch, so that what is beside leaves the first whole ones. None where memory is held in regions, which
    /// a small buffer may keep from being replaced.
    pub(in crate::engine) fn beside(&self, first: Class, class: Class) -> Beside {
        let room_bytes = match &self.supply {
            Supply::Direct(direct) => direct.room_beside_bytes(first.bytes),
            Supply::Shared(domain) => domain.arena().room_beside_bytes(first.bytes as u64, self.own.max_bytes()),
        };
        Beside { room_bytes, needed_bytes: self.beside_bytes(class) }
    }

    /// What a buffer of `class` uses of the memory beside the first in line.
    pub(in crate::engine) fn beside_bytes(&self, class: Class) -> u64 {
        match &self.supply {
            Supply::Direct(direct) => direct.held_bytes(class.bytes),
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
            Supply::Direct(_) => self.own.held_bytes(),
            Supply::Shared(domain) => domain.arena().held_bytes(),
        }
    }

    /// Whether the supply has memory in blocks: in use, in flight, idle or lost.
    pub(in crate::engine) fn has_blocks(&self) -> bool {
        match &self.supply {
            Supply::Direct(direct) => self.own.held_bytes() > direct.stuck_bytes(),
            Supply::Shared(domain) => domain.arena().has_blocks(),
        }
    }

    /// The calls of the source, for all pools of the arena.
    pub(in crate::engine) fn calls(&self) -> SourceCalls {
        match &self.supply {
            Supply::Direct(direct) => direct.calls(),
            Supply::Shared(domain) => domain.arena().calls(),
        }
    }

    /// Bytes in blocks of this pool, pinned or not.
    pub(in crate::engine) fn own_bytes(&self) -> u64 {
        let stuck_bytes = match &self.supply {
            Supply::Direct(direct) => direct.stuck_bytes(),
            Supply::Shared(_) => 0,
        };
        let (inner_bytes, inner_outside_bytes) = self.own.inner_bytes();
        let not_own_bytes = self.own.outside_bytes() + inner_bytes.saturating_sub(inner_outside_bytes) + stuck_bytes;
        let pageable_bytes = self.fallback.as_ref().map_or(0, |fallback| {
            let quota = fallback.quota();
            quota.held_bytes().saturating_sub(quota.inner_bytes().0)
        });
        self.own.held_bytes().saturating_sub(not_own_bytes) + pageable_bytes
    }

    /// Bytes in blocks of the pool's partitions that are not lost, pinned or not.
    pub(in crate::engine) fn partition_bytes(&self) -> u64 {
        let (inner_bytes, inner_outside_bytes) = self.own.inner_bytes();
        let pageable_bytes = self.fallback.as_ref().map_or(0, |fallback| fallback.quota().inner_bytes().0);
        let (_, lost_bytes) = self.own.inner_lost();
        (inner_bytes.saturating_sub(inner_outside_bytes) + pageable_bytes).saturating_sub(lost_bytes)
    }

    /// A partition sees its own blocks; free memory belongs to all pools.
    pub(in crate::engine) fn fill(&self, stats: &mut Stats) {
        let outside_bytes = self.own.outside_bytes();
        match &self.supply {
            Supply::Direct(direct) => direct.fill(stats),
            Supply::Shared(_) if self.is_partition => self.own.fill(stats),
            Supply::Shared(domain) => domain.fill(stats),
        }
        // What an own ceiling counts includes what is outside; what an arena holds does not.
        if self.is_partition || !self.has_arena() {
            stats.pinned_bytes = stats.pinned_bytes.saturating_sub(outside_bytes);
        }
        stats.pinned_fraction = self.domain().map_or(1.0, |domain| domain.pinned_fraction());
        stats.outside_bytes = outside_bytes.saturating_sub(self.own.inner_bytes().1);
        stats.partition_bytes = self.partition_bytes();
        let (lost, lost_bytes) = self.own.inner_lost();
        stats.lost_in_partitions = lost;
        stats.lost_bytes += lost_bytes;
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
fn release_one(pool: &dyn Member, to_release: &mut Option<u64>) -> bool {
    let left = to_release.get_or_insert_with(|| pool.idle_buffers());
    let is_left = *left > 0;
    *left = left.saturating_sub(1);
    is_left && pool.release_oldest(EvictionReason::Reclaimed)
}
