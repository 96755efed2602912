//! The memory of a pool: its sources and its release (policy-R5, policy-R7, policy-R11).
//!
//! ```text
//!   find:    [lock: carve] ─fits─▶ memory
//!            [lock: plan within the limits] ─▶ steps (no lock) ─▶ [lock: finish] ─▶ memory
//!   release: [lock: plan] ─▶ steps (no lock) ─▶ [lock: finish] ─▶ wake threads that wait for a plan
//! ```
//!
//! | file | contents |
//! | --- | --- |
//! | `mod.rs` | the memory of a pool; the interface of its two supplies |
//! | `arena_supply.rs` | the supply of `adaptive`, an arena over a source; the loop of a miss; the lock around the state |
//! | `arena_state` | the content of that lock: arena, addresses, size history, reserve, claims |
//! | `search.rs` | the steps of that loop: growth, room, limits, the reason for a refusal |
//! | `execution.rs`, `metered_source.rs` | carry out a plan's steps on the source; record calls and catch panics |
//! | `compaction.rs`, `release.rs` | plans that remap and release memory |
//! | `reserve.rs`, `pin_reserve.rs` | a reserve: its progress in the background; its steps |
//! | `shape.rs` | addresses, and the size of granules |
//! | `regions.rs` | one acquisition for each block: `tensorflow`, and pageable memory |
//! | `block_memory.rs` | memory of one block |
//! | `pressure.rs` | memory pressure |
//! | `refusal.rs` | the text of a refusal, with a remedy |
//!
//! Bytes are claimed under the limits before the source is called, and returned on every path that fails. The state of
//! the arena is not locked during a source call. This module never decides which idle buffer is reused, and reaches idle buffers
//! only through [`PoolView`].

use std::sync::{Arc, OnceLock};

use crate::backend::Source;
use crate::engine::meter::Counter;
use crate::quota::{Budget, Claim, LimitLevel, QuotaExceeded};
use crate::report::PoolLog;
use crate::size_class::Class;
use crate::stats::{EvictionReason, SourceCalls, Stats};

mod arena_state;
mod arena_supply;
mod block_memory;
mod compaction;
mod execution;
mod metered_source;
mod pin_reserve;
mod pressure;
mod refusal;
mod regions;
mod release;
mod reserve;
mod search;
mod shape;

pub(crate) use arena_supply::{ArenaSettings, ArenaSupply};
pub(crate) use block_memory::{Adopted, AllowedCalls, AttemptError, BlockMemory, Refusal, Rules};
pub(crate) use metered_source::MeteredSource;
pub(crate) use regions::RegionSupply;
pub(crate) use shape::granule_bytes;

/// The memory of one pool: a supply of pinned memory, pageable memory for requests without room for pinned memory, and memory
/// that users have pinned under the same limit.
pub(crate) struct Memory {
    source: MeteredSource,
    /// The limit of the pool.
    pub(in crate::engine) budget: Arc<Budget>,
    log: Arc<PoolLog>,
    /// The supply of pinned memory.
    pub(in crate::engine) supply: Arc<dyn Supply>,
    /// The same supply if it is an arena, which also has a reserve and free memory.
    arena: Option<Arc<ArenaSupply>>,
    /// The supply of pageable memory for a full pool.
    pub(crate) pageable: Option<RegionSupply>,
    /// Blocks with copies that end at an unknown time, or never.
    pub(in crate::engine) quarantined: Arc<Counter>,
    /// The bytes that the process may lock, determined at the first use: finding them out takes system calls.
    lock_limit: OnceLock<Option<u64>>,
}

impl Memory {
    /// Creates the memory of a pool that makes one acquisition of `source` for each block, under the limits of `claim`.
    pub(crate) fn with_regions(source: MeteredSource, claim: Claim, log: Arc<PoolLog>) -> Self {
        let supply = Arc::new(RegionSupply::new(source.clone(), claim, Some(log.clone())));
        let (budget, quarantined, lock_limit) = (supply.budget.clone(), Arc::default(), OnceLock::new());
        Self { source, budget, log, supply, arena: None, pageable: None, quarantined, lock_limit }
    }

    pub(crate) fn with_arena(arena: ArenaSupply) -> Self {
        let (source, budget, log) = (arena.source.clone(), arena.budget.clone(), arena.log.clone());
        let (quarantined, arena) = (arena.quarantined.clone(), Arc::new(arena));
        let (supply, lock_limit) = (arena.clone(), OnceLock::new());
        Self { source, budget, log, supply, arena: Some(arena), pageable: None, quarantined, lock_limit }
    }

    #[inline]
    pub(crate) fn source(&self) -> &dyn Source {
        &*self.source
    }

    /// Returns the arena that buffers are carved from, if there is one.
    #[inline]
    pub(crate) fn arena(&self) -> Option<&Arc<ArenaSupply>> {
        self.arena.as_ref()
    }

    /// Returns whether the pool may pin more than its reserve.
    fn may_grow(&self) -> bool {
        self.arena.as_ref().is_none_or(|arena| arena.settings.may_grow)
    }

    /// Sets the limit on pinned memory and the limit on pageable memory.
    pub(in crate::engine) fn set_max_bytes(&self, max_bytes: Option<u64>) {
        self.budget.set_max_bytes(max_bytes);
        self.pageable.iter().for_each(|pageable| pageable.budget.set_max_bytes(max_bytes));
    }

    /// Returns whether pageable memory for `class` would fit under its limit if no other pageable memory were held.
    pub(in crate::engine) fn could_be_pageable(&self, class: Class) -> bool {
        self.pageable.as_ref().is_some_and(|pageable| pageable.could_hold(class))
    }

    /// Returns the bytes that the supply may hold so that the refused claim fits in addition. Returns `None` if no release of
    /// idle memory can make room for the claim.
    pub(in crate::engine) fn room_next_to(&self, refusal: &Refusal) -> Option<u64> {
        let &Refusal::Limit(QuotaExceeded { level, bytes, could_fit: true }) = refusal else { return None };
        match level {
            LimitLevel::Shared => Some(self.supply.held_bytes().saturating_sub(bytes)),
            LimitLevel::Partition | LimitLevel::Pool => {
                let by_others = self.arena.as_ref().map_or(0, |arena| arena.state().claimed_by_others());
                Some(self.budget.max_bytes()?.checked_sub(bytes)?.saturating_sub(by_others))
            }
        }
    }

    /// Returns the memory of a block to the supply, the system or its user. The call may be slow. Waits for copies only
    /// if `may_wait`.
    pub(in crate::engine) fn give(&self, memory: BlockMemory, now_us: u64, may_wait: bool) {
        match (memory, &self.pageable) {
            (memory @ BlockMemory::Region { is_pageable: true, .. }, Some(pageable)) => {
                pageable.give(memory, now_us, true)
            }
            (BlockMemory::Adopted(adopted), _) => adopted.release(),
            (pinned, _) => self.supply.give(pinned, now_us, may_wait),
        }
    }

    /// Returns the bytes of all blocks, pinned or pageable.
    pub(in crate::engine) fn own_bytes(&self) -> u64 {
        self.supply.all_block_bytes() + self.pageable.as_ref().map_or(0, Supply::all_block_bytes)
    }

    /// Fills in the statistics of the supply and of pageable memory.
    pub(in crate::engine) fn fill_stats(&self, stats: &mut Stats) {
        self.supply.fill(stats);
        stats.memory.quarantined = self.quarantined.get();
        stats.memory.pageable_bytes = self.pageable.as_ref().map_or(0, Supply::all_block_bytes);
        let calls = self.supply.calls();
        (stats.memory.pin, stats.memory.unpin, stats.memory.remap) = (calls.pin, calls.unpin, calls.remap);
    }
}

/// A supply of memory, pinned or pageable, for the blocks of one pool.
pub(crate) trait Supply: Send + Sync {
    /// Finds memory for a request of `class`, and releases idle blocks of `pool` to make room. Returns `None` if `take_idle` takes
    /// an idle block that was returned during the search. Makes the slow calls that `rules` permit.
    fn find(
        &self,
        class: Class,
        now_us: u64,
        rules: Rules,
        pool: &dyn PoolView,
        take_idle: &dyn Fn() -> bool,
    ) -> Result<Option<BlockMemory>, AttemptError>;
    /// Takes back memory that [`find`](Self::find) returned. Unless `may_wait`, a release that would wait for copies is
    /// postponed until [`release_refused`](Self::release_refused) or [`end`](Self::end).
    fn give(&self, memory: BlockMemory, now_us: u64, may_wait: bool);
    /// Tries again to release memory that was not released before; an arena does this in its next release. The call may be slow.
    fn release_refused(&self) {}
    /// Ends the supply with its pool: releases all memory, now or when the last block is returned.
    fn end(&self, now_us: u64);
    /// Returns whether a block of `class` would fit under all limits if nothing else were held.
    fn could_hold(&self, class: Class) -> bool;
    /// Returns the bytes that later requests may take while the head of the wait queue waits for a block of class `first`. If
    /// all blocks may hold `most_bytes`, this is what the head's block leaves. Returns 0 for an arena of separate regions, since
    /// a small buffer may keep a region from being replaced.
    fn room_to_overtake(&self, first: Class, most_bytes: u64) -> u64;
    /// Returns how many bytes of [`room_to_overtake`](Self::room_to_overtake) a block of `class` uses.
    fn bytes_to_overtake(&self, class: Class) -> u64;
    /// Returns the bytes that a block of `class` holds.
    fn block_bytes(&self, class: Class) -> u64;
    /// Returns the bytes in all blocks: in use, in flight, idle or quarantined.
    fn all_block_bytes(&self) -> u64;
    /// Returns all bytes that are held.
    fn held_bytes(&self) -> u64;
    /// Returns the bytes of idle buffers and of free memory outside the reserve.
    fn unused_bytes(&self, pool: &dyn PoolView) -> u64;
    /// Returns the counts of source calls.
    fn calls(&self) -> SourceCalls;
    fn fill(&self, stats: &mut Stats);
}

/// A pool, as its supply sees it.
pub(crate) trait PoolView: Send + Sync {
    /// Returns the bytes of the idle blocks.
    fn idle_buffer_bytes(&self) -> u64;
    /// Returns the number of idle blocks.
    fn idle_buffers(&self) -> u64;
    /// Gives the block that has been idle longest to the supply, and counts `why` as the reason. Returns whether a block was
    /// idle.
    fn give_oldest(&self, why: EvictionReason) -> bool;
    /// Makes the blocks with completed copies available again.
    fn sweep_in_flight(&self);
    /// Returns whether a copy is in flight.
    fn has_copies(&self) -> bool;
    /// Returns the bytes that each waiting request needs, in the order of the wait queue.
    fn waiting_bytes(&self) -> Vec<u64>;
    /// Returns the time by the clock of the pool.
    fn now_us(&self) -> u64;
    /// Makes waiting requests search again, because there is more room than before.
    fn on_room_made(&self);
}

/// Gives idle blocks of `pool` to the supply, the oldest first, while `is_wanted` returns true. Gives no more blocks than were
/// idle at the start, so it ends even if other threads keep returning blocks.
pub(crate) fn give_while(pool: &dyn PoolView, why: EvictionReason, mut is_wanted: impl FnMut() -> bool) {
    for _ in 0..pool.idle_buffers() {
        if !is_wanted() || !pool.give_oldest(why) {
            return;
        }
    }
}

#[cfg(test)]
mod tests;
