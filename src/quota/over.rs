//! Why a claim was refused.

use crate::ledger::SharedCeiling;

/// Which ceiling has no room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Level {
    /// That of a partition, so many levels out from the one that was asked.
    Partition { depth: usize },
    /// That of a pool.
    Pool,
    /// That of several pools.
    Shared,
}

/// A claim that was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Over {
    pub(crate) level: Level,
    /// The ceiling of that level.
    pub(crate) max_bytes: u64,
    /// What would have to come back there.
    pub(crate) missing_bytes: u64,
    /// Whether it would fit there if nothing else were claimed.
    pub(crate) could_ever: bool,
}

impl Over {
    /// The shared ceiling has no room for `bytes`.
    pub(crate) fn shared(shared: &SharedCeiling, bytes: u64) -> Self {
        let max_bytes = shared.max_bytes();
        Self { level: Level::Shared, max_bytes, missing_bytes: bytes, could_ever: bytes <= max_bytes }
    }
}
