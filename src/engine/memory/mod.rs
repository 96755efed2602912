//! The memory of a pool: its origin and its release.
//!
//! ```text
//!   find:    [lock: carve] ─fits─▶ memory
//!            [lock: plan within the limits] ─▶ steps (no lock) ─▶ [lock: finish] ─▶ memory          (policy-R5, R7, R11)
//!   release: [lock: plan] ─▶ steps (no lock) ─▶ [lock: finish] ─▶ wake threads that wait for a plan
//! ```
//!
//! | file | contents |
//! | --- | --- |
//! | `mod.rs` | the memory of a pool; the interface of its two supplies |
//! | `arena_supply.rs` | `adaptive`: an arena over a source as a supply, with the attempts of a miss; the lock around its books |
//! | `books` | the content of that lock: arena, addresses, demand, reserve, claims |
//! | `search.rs` | the steps of these attempts: growth, room, limits, the reason for a refusal |
//! | `execution.rs`, `called_source.rs` | the steps of a plan on the source; calls recorded, panics caught |
//! | `compaction.rs`, `release.rs` | plans that move and release memory |
//! | `reserve.rs`, `pin_reserve.rs` | a reserve: its progress in the background; its steps |
//! | `shape.rs` | addresses, and the size of granules |
//! | `one_each.rs` | one acquisition for each block: `tensorflow`, and pageable memory |
//! | `block_memory.rs` | memory of one block |
//! | `pressure.rs` | memory pressure; the number of mappings of the process |
//! | `refusal.rs` | the text of a refusal, with a remedy |
//!
//! Bytes are claimed under the limits before the source is called, and returned on every failing path. The books are not locked
//! during a source call. Never decides which idle buffer is reused, and reaches idle buffers only through [`PoolView`].

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use crate::backend::Source;
use crate::engine::meter::Counter;
use crate::quota::{Budget, Claim, LimitLevel, QuotaExceeded};
use crate::report::PoolLog;
use crate::size_class::Class;
use crate::stats::{EvictionReason, SourceCalls, Stats};

mod arena_supply;
mod block_memory;
mod books;
mod called_source;
mod compaction;
mod execution;
mod one_each;
mod pin_reserve;
mod pressure;
mod refusal;
mod release;
mod reserve;
mod search;
mod shape;

pub(crate) use arena_supply::{ArenaSettings, ArenaSupply};
pub(crate) use block_memory::{Adopted, BlockMemory, Refusal, SlowCalls, Stop};
pub(crate) use called_source::CalledSource;
pub(crate) use one_each::OneEach;
pub(crate) use shape::granule_bytes;

/// The memory of one pool: a supply of pinned memory, pageable memory for requests without room, and memory that users have
/// pinned under the same limit.
pub(crate) struct Memory {
    source: CalledSource,
    /// The limit of the pool.
    pub(in crate::engine) budget: Arc<Budget>,
    log: Arc<PoolLog>,
    /// The supply of pinned memory.
    pub(in crate::engine) supply: Arc<dyn Supply>,
    /// The supply, if it is an arena, which has a reserve and free memory.
    arena: Option<Arc<ArenaSupply>>,
    pageable: Option<OneEach>,
    /// Blocks with copies that end at an unknown time, or never.
    pub(in crate::engine) quarantined: Arc<Counter>,
    /// The bytes that the process may lock, read when a request first finds no memory.
    lock_limit: OnceLock<Option<u64>>,
}

impl Memory {
    /// One acquisition of `source` for each block, which `claim` claims.
    pub(crate) fn one_each(source: CalledSource, claim: Claim, pageable: Option<OneEach>, log: Arc<PoolLog>) -> Self {
        let supply = Arc::new(OneEach::new(source.clone(), claim, Some(log.clone())));
        let (budget, quarantined, lock_limit) = (supply.budget.clone(), Arc::default(), OnceLock::new());
        Self { source, budget, log, supply, arena: None, pageable, quarantined, lock_limit }
    }

    pub(crate) fn of_arena(arena: ArenaSupply, pageable: Option<OneEach>) -> Self {
        let (source, budget, log) = (arena.source.clone(), arena.budget.clone(), arena.log.clone());
        let (quarantined, arena) = (arena.quarantined.clone(), Arc::new(arena));
        let (supply, lock_limit) = (arena.clone(), OnceLock::new());
        Self { source, budget, log, supply, arena: Some(arena), pageable, quarantined, lock_limit }
    }

    #[inline]
    pub(crate) fn source(&self) -> &dyn Source {
        &*self.source
    }

    /// The arena that buffers are carved from, if there is one.
    #[inline]
    pub(crate) fn arena(&self) -> Option<&Arc<ArenaSupply>> {
        self.arena.as_ref()
    }

    /// Returns whether it may pin more than its reserve.
    fn may_grow(&self) -> bool {
        self.arena.as_ref().is_none_or(|arena| arena.settings.may_grow)
    }

    /// Sets the limit.
    pub(in crate::engine) fn set_max_bytes(&self, max_bytes: Option<u64>) {
        self.budget.set_max_bytes(max_bytes);
        self.pageable.iter().for_each(|pageable| pageable.budget.set_max_bytes(max_bytes));
    }

    /// Pageable memory for `class`, if this pool may return it and its limit leaves room.
    pub(in crate::engine) fn find_pageable(&self, class: Class) -> Option<BlockMemory> {
        self.pageable.as_ref()?.acquire(class.bytes, SlowCalls::Until(Instant::now())).ok()
    }

    /// Returns whether pageable memory for `class` fits under its limit if none is held.
    pub(in crate::engine) fn could_be_pageable(&self, class: Class) -> bool {
        self.pageable.as_ref().is_some_and(|pageable| pageable.could_hold(class))
    }

    /// The bytes that the supply may hold so that a refused claim fits in addition. `None` if no idle memory can make room for
    /// the claim.
    pub(in crate::engine) fn room_next_to(&self, refusal: &Refusal) -> Option<u64> {
        let &Refusal::Limit(QuotaExceeded { level, bytes, could_fit: true }) = refusal else { return None };
        match level {
            LimitLevel::Shared => Some(self.supply.held_bytes().saturating_sub(bytes)),
            LimitLevel::Partition | LimitLevel::Pool => {
                let by_others = self.arena.as_ref().map_or(0, |arena| arena.books().claimed_by_others());
                Some(self.budget.max_bytes()?.checked_sub(bytes)?.saturating_sub(by_others))
            }
        }
    }

    /// Memory leaves the pool, to the supply or to the system. Makes slow calls; if it must not wait for copies, none that do.
    pub(in crate::engine) fn release(&self, memory: BlockMemory, now_us: u64, may_wait: bool) {
        match (memory, &self.pageable) {
            (memory @ BlockMemory::Region { is_pageable: true, .. }, Some(pageable)) => {
                pageable.give(memory, now_us, true)
            }
            (BlockMemory::Adopted(adopted), _) => adopted.release(),
            (pinned, _) => self.supply.give(pinned, now_us, may_wait),
        }
    }

    /// Bytes in blocks, pinned or not.
    pub(in crate::engine) fn own_bytes(&self) -> u64 {
        self.supply.all_block_bytes() + self.pageable.as_ref().map_or(0, Supply::all_block_bytes)
    }

    /// Fills in what the supply and pageable memory count.
    pub(in crate::engine) fn fill_stats(&self, stats: &mut Stats) {
        self.supply.fill(stats);
        stats.memory.quarantined = self.quarantined.get();
        stats.memory.pageable_bytes = self.pageable.as_ref().map_or(0, Supply::all_block_bytes);
        let calls = self.supply.calls();
        (stats.memory.pin, stats.memory.unpin, stats.memory.remap) = (calls.pin, calls.unpin, calls.remap);
    }
}

/// A supply of pinned memory for the blocks of one pool.
pub(crate) trait Supply: Send + Sync {
    /// Memory for a request; idle blocks of `pool` make room. Stops if `take_idle` finds an idle block that was returned
    /// meanwhile. A slow call.
    fn find(
        &self,
        class: Class,
        now_us: u64,
        calls: SlowCalls,
        pool: &dyn PoolView,
        take_idle: &dyn Fn() -> bool,
    ) -> Result<BlockMemory, Stop>;
    /// Returns memory of [`find`](Self::find). If a release must not wait for copies, and would, it comes when the pool closes.
    fn give(&self, memory: BlockMemory, now_us: u64, may_wait: bool);
    /// Releases what the source refused to release before; an arena does so with its next release. Makes slow calls.
    fn release_refused(&self) {}
    /// The pool has closed: releases all memory, now or with the last block.
    fn close(&self, now_us: u64);
    /// Returns whether a block of `class` fits under all limits if nothing else is held.
    fn could_hold(&self, class: Class) -> bool;
    /// The bytes that later requests may take while the head of the wait queue, of class `first`, waits: the bytes that remain
    /// next to its block if blocks may hold `most_bytes`. 0 for separate regions, since a small buffer may keep a region from
    /// being replaced.
    fn room_to_pass(&self, first: Class, most_bytes: u64) -> u64;
    /// The bytes of that room that a block of `class` uses.
    fn bytes_to_pass(&self, class: Class) -> u64;
    /// The bytes that a block of `class` holds for its user.
    fn block_bytes(&self, class: Class) -> u64;
    /// Bytes in all blocks: in use, in flight, idle or quarantined.
    fn all_block_bytes(&self) -> u64;
    /// All bytes that are held.
    fn held_bytes(&self) -> u64;
    /// Bytes of idle buffers and of free memory outside the reserve.
    fn idle_bytes(&self, pool: &dyn PoolView) -> u64;
    /// The calls of the source.
    fn calls(&self) -> SourceCalls;
    fn fill(&self, stats: &mut Stats);
}

/// A pool, as its supply sees it.
pub(crate) trait PoolView: Send + Sync {
    /// Bytes of the idle blocks.
    fn idle_bytes(&self) -> u64;
    /// Number of the idle blocks.
    fn idle_buffers(&self) -> u64;
    /// Releases the block that has been idle longest, for this reason; false if none is idle.
    fn release_oldest(&self, why: EvictionReason) -> bool;
    /// Returns the blocks with completed copies.
    fn complete_copies(&self);
    /// Returns whether a copy is in flight.
    fn has_copies(&self) -> bool;
    /// Bytes that its waiting requests need, in the order of the wait queue.
    fn waiting_bytes(&self) -> Vec<u64>;
    /// The time by the clock of the pool.
    fn now_us(&self) -> u64;
    /// There is more room than before: waiting requests search again.
    fn room_was_made(&self);
}

/// Releases blocks of `pool`, the oldest first, while `is_wanted`. Releases no more than were idle at the start, so it ends
/// although other threads return blocks meanwhile.
pub(crate) fn release_while(pool: &dyn PoolView, why: EvictionReason, mut is_wanted: impl FnMut() -> bool) {
    for _ in 0..pool.idle_buffers() {
        if !is_wanted() || !pool.release_oldest(why) {
            return;
        }
    }
}

#[cfg(test)]
mod tests;
