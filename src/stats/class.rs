//! One size class.

/// What a pool has counted of one size class ([`Pool::class_stats`](crate::Pool::class_stats)).
///
/// Hits are not counted by class: each hit would have to. A recording has them (`PINPOOL_TRACE`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct ClassStats {
    /// Bytes of a buffer of this class.
    pub class_bytes: u64,
    /// Pinned buffers that exist, lost ones included.
    pub buffers: u64,
    /// Pinned buffers that a device may still be reading.
    pub in_flight: u64,
    /// Pinned buffers that are idle.
    pub idle: u64,
    /// The other pinned buffers: users hold them, or they are lost.
    pub in_use: u64,
    /// Most buffers at any time.
    pub peak_buffers: u64,
    /// Gets that missed, those included that got memory that is not pinned.
    pub misses: u64,
    /// Buffers that left, for any of the [reasons](crate::EvictionReasons).
    pub evictions: u64,
}
