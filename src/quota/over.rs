//! Why a claim was refused.

use crate::ledger::SharedCeiling;

/// Which limit has no room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Level {
    /// Of a partition.
    Partition,
    /// Of a pool.
    Pool,
    /// Of several pools.
    Shared,
}

/// A claim that was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct QuotaExceeded {
    pub(crate) level: Level,
    /// The limit of that level.
    pub(crate) max_bytes: u64,
    /// What would have to be returned there.
    pub(crate) missing_bytes: u64,
    /// Whether it would fit there if nothing else were claimed.
    pub(crate) could_ever: bool,
}

impl QuotaExceeded {
    /// The shared limit has no room for `bytes`.
    pub(crate) fn shared(shared: &SharedCeiling, bytes: u64) -> Self {
        let max_bytes = shared.max_bytes();
        Self { level: Level::Shared, max_bytes, missing_bytes: bytes, could_ever: bytes <= max_bytes }
    }
}
