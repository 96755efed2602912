//! An arena and the pool over it: the order of steps when memory is needed, and what is done now and then.
//!
//! | file | owns |
//! | --- | --- |
//! | `serve.rs` | memory for a get that missed |
//! | `ladder.rs` | the order of its attempts |
//! | `release.rs` | idle memory: what is due, what a limit asks for, what others lack |
//! | `tick.rs` | what is done now and then |
//! | `reserve.rs` | a reserve that is pinned beside the pool |
//!
//! The arena answers, and knows no pool.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, OnceLock, Weak};

use super::supply::SharedArena;
use crate::diag::PoolLog;
use crate::stats::{EvictionReason, Stats};

mod ladder;
mod release;
mod reserve;
mod serve;
mod tick;

use reserve::BackgroundPinning;
pub(super) use reserve::ReserveWait;
use tick::PressureWatch;

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
        stats.memory.reserve_eta = self.reserve_eta();
    }
}

#[cfg(test)]
mod fixtures;

#[cfg(all(test, pinpool_loom))]
mod models;

#[cfg(all(test, not(pinpool_loom)))]
mod tests;
