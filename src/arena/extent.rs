//! Addresses in the arena: a range and an offset in it, packed into one number so that one ordered index serves every
//! range.
//!
//! ```text
//!   63        44 43                       0
//!  +------------+--------------------------+
//!  | range 20 b | offset 44 b (to 16 TiB)  |
//!  +------------+--------------------------+
//! ```
//!
//! - **extent-I1**: Extents of two ranges never touch, because a range is shorter than 2^44 bytes. So code that merges
//!   adjacent extents never merges across ranges, and need not check.

use super::granules::{GranuleSizes, GranuleZone};

const OFFSET_BITS: u32 = 44;
const OFFSET_MASK: u64 = (1 << OFFSET_BITS) - 1;

/// Ranges an arena can number.
pub(super) const RANGES_MAX: u32 = 1 << (u64::BITS - OFFSET_BITS);

/// The longest range (extent-I1).
pub(crate) const RANGE_BYTES_MAX: u64 = 1 << (OFFSET_BITS - 1);

/// A non-empty run of bytes in one range.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Extent {
    pub(super) start: u64,
    pub(super) end: u64,
}

impl Extent {
    /// The `bytes` that begin `offset` bytes into the range with this number.
    pub(super) fn new(range: u32, offset: u64, bytes: u64) -> Self {
        debug_assert!(range < RANGES_MAX && offset <= OFFSET_MASK);
        let start = (u64::from(range) << OFFSET_BITS) | offset;
        Self { start, end: start + bytes }
    }

    pub(super) fn between(start: u64, end: u64) -> Option<Self> {
        (start < end).then_some(Self { start, end })
    }

    pub(crate) fn range(self) -> u32 {
        u32::try_from(self.start >> OFFSET_BITS).unwrap_or(u32::MAX)
    }

    /// Bytes from the start of the range.
    pub(crate) fn offset(self) -> u64 {
        self.start & OFFSET_MASK
    }

    /// Its first `bytes`.
    pub(super) fn first(self, bytes: u64) -> Self {
        Self { end: self.start + bytes, ..self }
    }

    pub(crate) fn bytes(self) -> u64 {
        self.end - self.start
    }

    pub(super) fn contains(self, part: Extent) -> bool {
        self.start <= part.start && part.end <= self.end
    }

    /// The bytes of both.
    pub(super) fn common(self, other: Extent) -> Option<Self> {
        Extent::between(self.start.max(other.start), self.end.min(other.end))
    }

    /// The parts of `self` below and above `other`.
    pub(super) fn without(self, other: Extent) -> [Option<Extent>; 2] {
        [Extent::between(self.start, self.end.min(other.start)), Extent::between(self.start.max(other.end), self.end)]
    }
}

/// The first `bytes` of `extents`, in their order. If the last extent is longer than needed, it ends at the edge of a granule, to
/// which `cut` moves its end.
pub(super) fn first_bytes(
    extents: impl IntoIterator<Item = Extent>,
    bytes: u64,
    cut: impl Fn(Extent, u64) -> u64,
) -> Vec<Extent> {
    let (mut left, mut extents) = (bytes, extents.into_iter());
    let mut chosen = Vec::new();
    // Searches for no extent that is not needed.
    while left > 0
        && let Some(extent) = extents.next()
    {
        let end = if extent.bytes() <= left { extent.end } else { cut(extent, extent.start + left) };
        left = left.saturating_sub(extent.bytes());
        chosen.extend(Extent::between(extent.start, end));
    }
    chosen
}

/// The granules of one range. A discrete region, or a reserve, is a single granule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Grid {
    pub(super) origin: u64,
    pub(super) sizes: GranuleSizes,
}

impl Grid {
    /// The granules of the virtual range that `extent` lies in.
    pub(super) fn around(extent: Extent, sizes: GranuleSizes) -> Self {
        Self { origin: extent.start - extent.offset(), sizes }
    }

    /// The parts of `extent` by the size of their granules, smallest first.
    pub(super) fn zones(self, extent: Extent) -> impl Iterator<Item = Extent> {
        let clipped = move |zone: GranuleZone| {
            let end = self.origin.saturating_add(zone.end).min(extent.end);
            Extent::between(extent.start.max(self.origin.saturating_add(zone.start)), end)
        };
        self.sizes.zones().filter_map(clipped)
    }

    /// How many granules `extent`, whole granules, has.
    pub(super) fn count(self, extent: Extent) -> u64 {
        self.sizes.count(extent.start - self.origin, extent.end - self.origin)
    }

    pub(super) fn down(self, at: u64) -> u64 {
        self.origin + self.sizes.down(at - self.origin)
    }

    pub(super) fn up(self, at: u64) -> u64 {
        self.origin + self.sizes.up(at - self.origin)
    }

    /// The whole granules of `whole` that `part` of it touches. They become idle when `part` is freed and merges into `whole`,
    /// and are no longer idle when `part` is taken out of `whole`.
    pub(super) fn granules_decided(self, whole: Extent, part: Extent) -> Option<Extent> {
        // Most holes are shorter than any granule.
        if whole.bytes() < self.sizes.zone_at(0).granule_bytes {
            return None;
        }
        let start = self.up(whole.start).max(self.down(part.start));
        let end = self.down(whole.end).min(self.up(part.end));
        Extent::between(start, end)
    }
}
