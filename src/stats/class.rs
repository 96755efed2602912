//! One size class.

/// Statistics of one size class ([`Pool::class_stats`](crate::Pool::class_stats)).
///
/// Hits are not counted per class, because the fast path would have to count them. A recording (`PINPOOL_TRACE`) contains them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct ClassStats {
    /// Size of this class's buffers in bytes.
    pub class_bytes: u64,
    /// Pinned buffers that exist: in use, in flight or idle.
    pub buffers: u64,
    /// Returned pinned buffers that a device may still be using.
    pub in_flight: u64,
    /// Idle pinned buffers.
    pub idle: u64,
    /// Pinned buffers in use.
    pub in_use: u64,
    /// Pinned buffers that cannot be reused ([`MemoryStats::quarantined`](super::MemoryStats::quarantined)).
    pub quarantined: u64,
    /// Highest number of buffers so far, quarantined buffers included.
    pub peak_buffers: u64,
    /// Requests that missed, including requests that got pageable memory.
    pub misses: u64,
    /// Buffers that ceased to exist, for any [reason](super::EvictionReasons).
    pub evictions: u64,
}
