//! The memory of a pool: where it comes from, and where it returns to.
//!
//! | file | contents |
//! | --- | --- |
//! | `backing.rs` | what serves the misses of one pool: an arena or a source, its limit, unpinned memory |
//! | `find.rs`, `ladder.rs` | memory for a request that missed; the order of its attempts |
//! | `shared_arena.rs` | `adaptive`: a lock around an arena, and the slow calls of a plan |
//! | `books.rs` | the state under that lock: arena, addresses, demand, reserve, claims |
//! | `carry_out.rs` | the steps of a plan on the source |
//! | `one_each.rs` | `tensorflow`: each miss is an acquisition, each eviction a release |
//! | `release.rs` | idle memory: what is due, what a limit requires, what others lack |
//! | `reserve.rs` | a reserve that is pinned while the pool is in use |
//! | `pageable.rs`, `adopted.rs` | unpinned memory; memory of a user, for one buffer |
//! | `pressure.rs`, `watch.rs` | memory pressure; the number of mappings of the process |
//! | `refusal.rs` | why there is no memory, and what helps |
//!
//! Bytes are claimed under the limit before the source is called, and returned on every failing path. No lock is held
//! during a source call. Never decides which buffer is reused or evicted.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, OnceLock, Weak};

use crate::diag::PoolLog;
use crate::stats::{EvictionReason, Stats};

mod adopted;
mod backing;
mod block_memory;
mod books;
mod called_source;
mod carry_out;
mod find;
mod ladder;
mod one_each;
mod pageable;
mod pressure;
mod refusal;
mod release;
mod reserve;
mod shared_arena;
mod watch;

pub(crate) use adopted::Adopted;
pub(crate) use backing::{Backing, Supply};
pub(in crate::engine) use block_memory::{Acquired, BlockMemory, CALL_PATIENCE, Refusal, SlowCalls, Stop};
pub(in crate::engine) use books::Books;
pub(crate) use called_source::CalledSource;
pub(crate) use carry_out::granule_bytes;
pub(crate) use one_each::OneEach;
pub(crate) use pageable::Pageable;
use pressure::PressureWatch;
use reserve::BackgroundPinning;
pub(super) use reserve::ReserveWait;
pub(in crate::engine) use shared_arena::{Place, Step};
pub(crate) use shared_arena::{SharedArena, SharedArenaConfig};

/// The pool over an arena, as its domain sees it.
pub(super) trait PoolView: Send + Sync {
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
}

/// An arena with what its pool does now and then for its memory.
pub(crate) struct Domain {
    arena: SharedArena,
    log: Arc<PoolLog>,
    pool: OnceLock<Weak<dyn PoolView>>,
    pressure: PressureWatch,
    /// A thread is releasing what is due.
    is_releasing: AtomicBool,
    /// Gets that are after new memory: a reserve waits for them.
    getting: AtomicU64,
    background: BackgroundPinning,
}

impl std::fmt::Debug for Domain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Domain").field("arena", &self.arena).finish_non_exhaustive()
    }
}

impl Domain {
    pub(crate) fn new(arena: SharedArena, log: Arc<PoolLog>, pressure: Option<&Path>) -> Self {
        Self {
            arena,
            log,
            pool: OnceLock::new(),
            pressure: PressureWatch::new(pressure),
            is_releasing: AtomicBool::new(false),
            getting: AtomicU64::new(0),
            background: BackgroundPinning::default(),
        }
    }

    #[inline]
    pub(super) fn arena(&self) -> &SharedArena {
        &self.arena
    }

    /// Has this pool told of what a reserve makes room for.
    pub(super) fn attach(&self, pool: Weak<dyn PoolView>) {
        // Set once, when the pool is made.
        let _ = self.pool.set(pool);
    }

    fn pool(&self) -> Option<Arc<dyn PoolView>> {
        self.pool.get().and_then(Weak::upgrade)
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
