//! What every supply of pinned memory offers, and what it knows of its pool.

use std::fmt::Debug;
use std::sync::Arc;

use super::block_memory::{BlockMemory, SlowCalls, Stop};
use crate::backend::{Source, SourceError};
use crate::quota::Budget;
use crate::size_class::Class;
use crate::stats::{EvictionReason, SourceCalls, Stats};

/// A supply of pinned memory for the blocks of one pool.
pub(crate) trait Supply: Debug + Send + Sync {
    fn source(&self) -> &dyn Source;
    /// The limit of the pool.
    fn budget(&self) -> &Arc<Budget>;
    /// Memory for `class`, as far as `calls` allow; idle blocks of `pool` make room. Stops if `take_idle` finds an idle block that
    /// has returned meanwhile. A slow call.
    fn find(
        &self,
        class: Class,
        calls: (u64, SlowCalls),
        pool: &dyn PoolView,
        take_idle: &mut dyn FnMut() -> bool,
    ) -> Result<BlockMemory, Stop>;
    /// Takes back memory of [`find`](Self::find). If the source refuses to release it, returns its bytes with the reason.
    fn give(&self, memory: BlockMemory, now_us: u64) -> Result<(), (u64, SourceError)>;
    /// Releases idle memory until `bytes` are released or nothing is idle. Returns how many were. Slow calls.
    fn release_idle(&self, bytes: u64, pool: &dyn PoolView, now_us: u64) -> u64;
    /// Releases what the source refused to release before; an arena does so with its next release. Slow calls.
    fn release_refused(&self) {}
    /// The pool has closed: everything is released, now or with the last block.
    fn close(&self, now_us: u64);
    /// Whether a block of `class` fits under all limits if nothing else is held.
    fn could_hold(&self, class: Class) -> bool;
    /// Whether it may pin more than its reserve.
    fn may_grow(&self) -> bool {
        true
    }
    /// What the limit leaves next to a block of the class `first`. 0 if memory is held in regions, which a small buffer may keep
    /// from being replaced.
    fn room_beside_bytes(&self, first: Class) -> u64;
    /// What a block of `class` uses of that room.
    fn beside_bytes(&self, class: Class) -> u64;
    /// What a block of `class` holds for its user.
    fn block_bytes(&self, class: Class) -> u64;
    /// Bytes in all blocks: in use, in flight, idle or quarantined.
    fn all_block_bytes(&self) -> u64;
    /// All bytes that are held.
    fn held_bytes(&self) -> u64;
    /// Bytes that others claim under the limit of the pool.
    fn claimed_by_others(&self) -> u64 {
        0
    }
    /// Bytes of idle buffers and of free memory outside the reserve.
    fn idle_bytes(&self, pool: &dyn PoolView) -> u64;
    /// The longest piece of free memory.
    fn longest_free_bytes(&self) -> u64 {
        0
    }
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
    /// Whether a copy is in flight.
    fn has_copies(&self) -> bool {
        false
    }
    /// Bytes that its waiting requests need, in the order of the wait queue.
    fn waiting_bytes(&self) -> Vec<u64> {
        Vec::new()
    }
    /// There is more room than before: waiting requests try again.
    fn room_was_made(&self) {}
}

/// Releases blocks of `pool`, the oldest first, while `is_wanted`. No more than were idle at the start, whatever other threads
/// put back meanwhile, so it ends.
pub(crate) fn release_while(pool: &dyn PoolView, why: EvictionReason, is_wanted: impl Fn() -> bool) {
    for _ in 0..pool.idle_buffers() {
        if !is_wanted() || !pool.release_oldest(why) {
            return;
        }
    }
}
