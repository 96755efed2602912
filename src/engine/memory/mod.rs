//! The memory of a pool: where it comes from, and where it returns to.
//!
//! ```text
//!   find:    [lock: carve] ─fits─▶ memory
//!            [lock: plan within the limits] ─▶ steps (no lock) ─▶ [lock: finish] ─▶ memory          (policy-R5, R7, R11)
//!   release: [lock: plan] ─▶ steps (no lock) ─▶ [lock: finish] ─▶ wake threads that wait for a plan
//! ```
//!
//! | file | contents |
//! | --- | --- |
//! | `mod.rs`, `supply.rs` | the memory of a pool; what its two supplies have in common |
//! | `arena_supply.rs` | `adaptive`: an arena over a source, and the lock around its books |
//! | `books.rs` | what that lock guards: arena, addresses, demand, reserve, claims |
//! | `find.rs` | the attempts of a miss, in their order |
//! | `grow.rs`, `prepare.rs`, `release.rs` | plans that add, move and release memory |
//! | `reserve.rs`, `progress.rs`, `pin_reserve.rs` | memory that stays |
//! | `carry_out.rs`, `called_source.rs` | the steps of a plan on the source; calls recorded, panics caught |
//! | `shape.rs` | addresses, and the size of granules |
//! | `one_each.rs` | `tensorflow`: each miss is an acquisition, each eviction a release |
//! | `block_memory.rs`, `pageable.rs` | memory of one block: pinned or a user's, unpinned |
//! | `pressure.rs` | memory pressure; the number of mappings of the process |
//! | `refusal.rs` | why there is no memory, and what helps |
//!
//! Bytes are claimed under the limits before the source is called, and returned on every failing path. No lock is held during a
//! source call. Never decides which idle buffer is reused, and reaches idle buffers only through [`PoolView`].

use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use crate::diag::PoolLog;
use crate::quota::Claim;
use crate::size_class::Class;
use crate::stats::Stats;
use pinpool_os::sync::process::{AtomicU64, Ordering};

mod arena_supply;
mod block_memory;
mod books;
mod called_source;
mod carry_out;
mod find;
mod grow;
mod one_each;
mod pageable;
mod pin_reserve;
mod prepare;
mod pressure;
mod progress;
mod refusal;
mod release;
mod reserve;
mod shape;
mod supply;

pub(crate) use arena_supply::{ArenaSettings, ArenaSupply};
pub(crate) use block_memory::{Adopted, BlockMemory, Refusal, SlowCalls, Stop};
pub(crate) use called_source::CalledSource;
pub(crate) use one_each::OneEach;
pub(crate) use pageable::Pageable;
pub(in crate::engine) use pin_reserve::Place;
pub(in crate::engine) use reserve::ReserveWait;
pub(crate) use shape::granule_bytes;
pub(crate) use supply::{PoolView, Supply};

/// The memory of one pool: a supply of pinned memory, unpinned memory if requests without room get that, and what users have
/// pinned under the same limit.
#[derive(Debug)]
pub(crate) struct Memory {
    supply: Arc<dyn Supply>,
    /// The supply, if it is an arena, which has a reserve and free memory.
    arena: Option<Arc<ArenaSupply>>,
    pageable: Option<Pageable>,
    /// Bytes of users that are pinned under the same limit. Relaxed: a statistic.
    outside_bytes: AtomicU64,
    /// What the process may lock, read when a request first finds no memory.
    lock_limit: OnceLock<Option<u64>>,
}

impl Deref for Memory {
    type Target = dyn Supply;

    fn deref(&self) -> &Self::Target {
        &*self.supply
    }
}

impl Memory {
    pub(crate) fn one_each(supply: OneEach, pageable: Option<Pageable>) -> Self {
        Self::over(Arc::new(supply), None, pageable)
    }

    pub(crate) fn of_arena(arena: Arc<ArenaSupply>, pageable: Option<Pageable>) -> Self {
        Self::over(arena.clone(), Some(arena), pageable)
    }

    fn over(supply: Arc<dyn Supply>, arena: Option<Arc<ArenaSupply>>, pageable: Option<Pageable>) -> Self {
        Self { supply, arena, pageable, outside_bytes: AtomicU64::new(0), lock_limit: OnceLock::new() }
    }

    /// The arena that buffers are carved from, if there is one.
    #[inline]
    pub(in crate::engine) fn arena(&self) -> Option<&Arc<ArenaSupply>> {
        self.arena.as_ref()
    }

    pub(crate) fn has_arena(&self) -> bool {
        self.arena.is_some()
    }

    /// Sets the limit.
    pub(in crate::engine) fn set_max_bytes(&self, max_bytes: Option<u64>) {
        self.budget().set_max_bytes(max_bytes);
        if let Some(pageable) = &self.pageable {
            pageable.follow(max_bytes);
        }
    }

    pub(in crate::engine) fn max_bytes(&self) -> Option<u64> {
        self.budget().max_bytes()
    }

    /// Whether more is held than the limit, which was lowered.
    pub(in crate::engine) fn exceeds_limit(&self) -> bool {
        self.budget().over_bytes() > 0
    }

    /// Unpinned memory for `class`, if this pool may give it out and its limit leaves room.
    pub(in crate::engine) fn find_pageable(&self, class: Class) -> Option<BlockMemory> {
        self.pageable.as_ref()?.acquire(class)
    }

    /// Whether unpinned memory for `class` fits under its limit if none is held.
    pub(in crate::engine) fn could_fall_back(&self, class: Class) -> bool {
        self.pageable.as_ref().is_some_and(|pageable| pageable.could_hold(class))
    }

    /// Claims `bytes` for memory that is held in addition to the blocks.
    pub(in crate::engine) fn claim_outside(&self, bytes: u64) -> Result<Claim, Refusal> {
        let claim = self.budget().claim(bytes).map_err(|over| Refusal::QuotaExceeded { needed_bytes: bytes, over })?;
        self.outside_bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(claim)
    }

    /// `bytes` of [`claim_outside`](Self::claim_outside) are no longer held.
    pub(in crate::engine) fn end_outside(&self, bytes: u64) {
        self.outside_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// How much the supply may hold for `bytes` to fit in addition. `None` without a limit.
    pub(in crate::engine) fn room_for_outside(&self, bytes: u64) -> Option<u64> {
        Some(self.max_bytes()?.saturating_sub(bytes).saturating_sub(self.claimed_by_others()))
    }

    /// Memory leaves the pool, to the supply or to the system. Logs a failure. A slow call.
    pub(in crate::engine) fn release(&self, memory: BlockMemory, now_us: u64, log: &PoolLog) {
        let released = match memory {
            BlockMemory::Pageable { region, claim } => {
                self.pageable.as_ref().map_or(Ok(()), |pageable| pageable.release(region, claim))
            }
            BlockMemory::Adopted(adopted) => {
                adopted.release();
                Ok(())
            }
            pinned => self.give(pinned, now_us),
        };
        if let Err((held_bytes, error)) = released {
            log.release_failed(held_bytes, &error);
        }
    }

    /// Bytes in blocks, pinned or not.
    pub(in crate::engine) fn own_bytes(&self) -> u64 {
        self.all_block_bytes() + self.pageable.as_ref().map_or(0, Pageable::held_bytes)
    }

    /// Fills in what the supply and unpinned memory count.
    pub(in crate::engine) fn fill_stats(&self, stats: &mut Stats) {
        self.fill(stats);
        stats.memory.external_bytes = self.outside_bytes.load(Ordering::Relaxed);
        if let Some(pageable) = &self.pageable {
            pageable.fill(stats);
        }
        let calls = self.calls();
        (stats.memory.pin, stats.memory.unpin, stats.memory.remap) = (calls.pin, calls.unpin, calls.remap);
    }
}

#[cfg(test)]
mod fixtures;

#[cfg(all(test, pinpool_loom))]
mod models;

#[cfg(all(test, not(pinpool_loom)))]
mod tests;
