//! What the pools that share an arena can give to one of them.

use std::sync::Arc;

use super::Reclaim;
use crate::stats::EvictionReason;

/// Puts back the blocks of `pools` whose copies are over.
pub(super) fn complete_copies(pools: &[Arc<dyn Reclaim>]) {
    pools.iter().for_each(|pool| pool.complete_copies());
}

/// Idle blocks of all attached pools.
pub(super) fn idle_buffers(pool: &dyn Reclaim, attached: &[Arc<dyn Reclaim>]) -> u64 {
    // `pool` is attached, too, unless it is closing.
    attached.iter().map(|other| other.idle_buffers()).sum::<u64>().max(pool.idle_buffers())
}

/// Releases the oldest idle block: of `pool`, else of another attached pool. False if none is idle, or all of them would
/// not make up `lacking_bytes`.
pub(super) fn make_room(pool: &dyn Reclaim, attached: &[Arc<dyn Reclaim>], lacking_bytes: u64) -> bool {
    let idle_bytes: u64 = attached.iter().map(|other| other.idle_bytes()).sum();
    idle_bytes > 0
        && idle_bytes >= lacking_bytes
        && std::iter::once(pool)
            .chain(attached.iter().map(|other| &**other))
            .any(|other| other.release_oldest(EvictionReason::Reclaimed))
}
