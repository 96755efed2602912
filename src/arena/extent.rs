//! Addresses in the arena. A range and an offset in it are packed into one number, so that one ordered index serves all ranges.
//!
//! ```text
//!   63        44 43                       0
//!  +------------+--------------------------+
//!  | range 20 b | offset 44 b (to 16 TiB)  |
//!  +------------+--------------------------+
//! ```
//!
//! - **extent-I1**: Extents of two ranges never touch, because a range is shorter than 2^44 bytes. So code that merges adjacent
//!   extents never merges extents of different ranges, and need not check for that.

use super::granules::{GranuleSizes, GranuleZone};

const OFFSET_BITS: u32 = 44;
const OFFSET_MASK: u64 = (1 << OFFSET_BITS) - 1;

/// Maximum number of ranges in an arena.
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
    /// Returns the `bytes` that begin `offset` bytes into the range with this number.
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

    /// Returns the distance in bytes from the start of the range.
    pub(crate) fn offset(self) -> u64 {
        self.start & OFFSET_MASK
    }

    /// Returns the first `bytes` of this extent.
    pub(super) fn first(self, bytes: u64) -> Self {
        Self { end: self.start + bytes, ..self }
    }

    pub(crate) fn bytes(self) -> u64 {
        self.end - self.start
    }

    pub(super) fn contains(self, part: Extent) -> bool {
        self.start <= part.start && part.end <= self.end
    }

    /// Returns the bytes that are in both extents.
    pub(super) fn common(self, other: Extent) -> Option<Self> {
        Extent::between(self.start.max(other.start), self.end.min(other.end))
    }

    /// Returns the parts of `self` below and above `other`.
    pub(super) fn without(self, other: Extent) -> [Option<Extent>; 2] {
        [Extent::between(self.start, self.end.min(other.start)), Extent::between(self.start.max(other.end), self.end)]
    }
}

/// Returns the first `bytes` of `extents`, in their order. If the last extent is longer than needed, `cut` moves its end to the
/// edge of a granule.
pub(super) fn first_bytes(
    extents: impl IntoIterator<Item = Extent>,
    bytes: u64,
    cut: impl Fn(Extent, u64) -> u64,
) -> Vec<Extent> {
    let (mut left, mut extents) = (bytes, extents.into_iter());
    let mut chosen = Vec::new();
    // Checked first, because `next` may search for an extent.
    while left > 0
        && let Some(extent) = extents.next()
    {
        let end = if extent.bytes() <= left { extent.end } else { cut(extent, extent.start + left) };
        left = left.saturating_sub(extent.bytes());
        chosen.extend(Extent::between(extent.start, end));
    }
    chosen
}

/// The granules of one range. A separate region or a reserve is a single granule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Grid {
    pub(super) origin: u64,
    pub(super) sizes: GranuleSizes,
}

impl Grid {
    /// Returns the granules of the virtual range that contains `extent`.
    pub(super) fn around(extent: Extent, sizes: GranuleSizes) -> Self {
        Self { origin: extent.start - extent.offset(), sizes }
    }

    /// Splits `extent` into parts with granules of one size, the smallest granules first.
    pub(super) fn zones(self, extent: Extent) -> impl Iterator<Item = Extent> {
        let clipped = move |zone: GranuleZone| {
            let end = self.origin.saturating_add(zone.end).min(extent.end);
            Extent::between(extent.start.max(self.origin.saturating_add(zone.start)), end)
        };
        self.sizes.zones().filter_map(clipped)
    }

    /// Returns the number of granules in `extent`, which consists of whole granules.
    pub(super) fn count(self, extent: Extent) -> u64 {
        self.sizes.count(extent.start - self.origin, extent.end - self.origin)
    }

    pub(super) fn down(self, at: u64) -> u64 {
        self.origin + self.sizes.down(at - self.origin)
    }

    pub(super) fn up(self, at: u64) -> u64 {
        self.origin + self.sizes.up(at - self.origin)
    }

    /// Returns the whole granules within `whole` that `part` touches. They become idle when `part` is freed and merges
    /// into `whole`, and stop being idle when `part` is taken out of `whole`.
    pub(super) fn touched_granules(self, whole: Extent, part: Extent) -> Option<Extent> {
        // Most holes are shorter than the smallest granule.
        if whole.bytes() < self.sizes.zone_at(0).granule_bytes {
            return None;
        }
        let start = self.up(whole.start).max(self.down(part.start));
        let end = self.down(whole.end).min(self.up(part.end));
        Extent::between(start, end)
    }
}
