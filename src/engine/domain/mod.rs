//! An arena and the pools over it: a pool, its partitions, and what spans them.
//!
//! | file | owns |
//! | --- | --- |
//! | `serve.rs` | memory for a get that missed |
//! | `ladder.rs` | the order of its attempts |
//! | `release.rs` | idle memory of all pools: what is due, what a limit asks for, what others lack |
//! | `tick.rs` | what is done now and then for all pools |
//! | `reserve.rs` | a reserve that is pinned beside the pools |
//!
//! The arena answers, and knows no pool. A pool asks its domain, and knows no other pool.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use super::supply::SharedArena;
use crate::diag::PoolLog;
use crate::stats::{EvictionReason, Stats};
use pinpool_os::sync::plain::Mutex;

mod ladder;
mod release;
mod reserve;
mod serve;
mod tick;

use reserve::BackgroundPinning;
pub(super) use reserve::ReserveWait;
use tick::DomainTicks;

/// A pool as its domain sees it: it may have to give idle memory back.
pub(super) trait Member: Send + Sync {
    /// Bytes of the idle blocks.
    fn idle_bytes(&self) -> u64;
    /// Number of the idle blocks.
    fn idle_buffers(&self) -> u64;
    /// Releases the block that has been idle longest, for this reason; false if none is idle.
    fn release_oldest(&self, why: EvictionReason) -> bool;
    /// Puts back the blocks whose copies are over.
    fn complete_copies(&self);
    /// Whether a copy is in flight.
    fn has_copies(&self) -> bool {
        false
    }
    /// Bytes that its waiting gets ask for, in the order of the line.
    fn waiting_bytes(&self) -> Vec<u64> {
        Vec::new()
    }
    /// There is more room than before: waiting gets try again.
    fn room_was_made(&self) {}
    /// Other owners of the host ledger want memory: what is idle is to be released soon.
    fn room_is_wanted(&self) {}
    /// Releases the blocks that have been idle too long at `now_us`.
    fn expire_idle(&self, now_us: u64);
}

/// An arena and its pools.
#[derive(Debug)]
pub(crate) struct Domain {
    arena: SharedArena,
    log: Arc<PoolLog>,
    pools: Mutex<Members>,
    ticks: DomainTicks,
    /// A thread is releasing what is due.
    is_releasing: AtomicBool,
    /// Pools in which requests wait.
    waiting: AtomicU64,
    /// Gets that are after new memory: a reserve waits for them.
    getting: AtomicU64,
    background: BackgroundPinning,
}

/// The pools that are not closed.
#[derive(Default)]
struct Members(Vec<Weak<dyn Member>>);

impl std::fmt::Debug for Members {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Members").field(&self.0.len()).finish()
    }
}

impl Domain {
    pub(crate) fn new(arena: SharedArena, log: Arc<PoolLog>, pressure: Option<&Path>) -> Self {
        Self {
            arena,
            log,
            pools: Mutex::default(),
            ticks: DomainTicks::new(pressure),
            is_releasing: AtomicBool::new(false),
            waiting: AtomicU64::new(0),
            getting: AtomicU64::new(0),
            background: BackgroundPinning::default(),
        }
    }

    #[inline]
    pub(super) fn arena(&self) -> &SharedArena {
        &self.arena
    }

    pub(super) fn attach(&self, pool: Weak<dyn Member>) {
        self.pools.lock().0.push(pool);
    }

    /// A pool has closed. After the last one everything is released, now or with the last block.
    pub(super) fn detach(&self, pool: &dyn Member, now_us: u64) {
        let pool: *const () = std::ptr::from_ref(pool).cast();
        let mut pools = self.pools.lock();
        pools.0.retain(|other| !std::ptr::addr_eq(other.as_ptr(), pool));
        let is_last = pools.0.is_empty();
        drop(pools);
        if is_last {
            self.arena.close(now_us);
        }
    }

    /// The pools that are not closed. Upgraded under the lock and dropped outside of it: one may be the last reference.
    pub(super) fn pools(&self) -> Vec<Arc<dyn Member>> {
        self.pools.lock().0.iter().filter_map(Weak::upgrade).collect()
    }

    /// Requests wait in one more pool, or in one less.
    pub(super) fn note_waiting(&self, is_waiting: bool) {
        // SeqCst, here and below: ordered by the fences of `Core::announce_copy` and `Core::patience`.
        self.waiting.fetch_add(if is_waiting { 1 } else { u64::MAX }, Ordering::SeqCst);
    }

    /// Whether requests wait in any pool.
    pub(super) fn has_waiters(&self) -> bool {
        self.waiting.load(Ordering::SeqCst) > 0
    }

    /// Whether blocks of any pool wait for copies.
    pub(super) fn has_copies(&self) -> bool {
        self.pools().iter().any(|pool| pool.has_copies())
    }

    /// Puts back the blocks of all pools whose copies are over.
    fn complete_copies(&self) {
        self.pools().iter().for_each(|pool| pool.complete_copies());
    }

    pub(super) fn fill(&self, stats: &mut Stats) {
        self.arena.fill(stats);
        stats.reserve_eta = self.reserve_eta();
    }
}

#[cfg(test)]
mod fixtures;

#[cfg(all(test, pinpool_loom))]
mod models;

#[cfg(all(test, not(pinpool_loom)))]
mod tests;
