//! Granule sizes by offset in a virtual range: small at its start, larger at higher offsets.
//!
//! ```text
//!   offset   0           8 GiB      14 GiB     38 GiB        134 GiB       (limits above 16 GiB, up to 1 TiB)
//!            |  2 MiB ... |  8 MiB ... | 32 MiB ... | 128 MiB ...  | 512 MiB ...
//!   granules    4096          768          768          768          the rest
//! ```
//!
//! Each granule is one mapping of the process. Buffers are placed low, at the position with the fewest missing bytes (policy-R5),
//! so a pool uses larger granules only once it holds much memory: a granule is never larger than 1/256 of the bytes below it. In
//! replays, granules of 1/256 of the peak cost 0.3 % of the peak. Granules sized by the limit would cost 4 to 120 % in pools that
//! use only a small part of the limit. With these sizes a pool of 1 TiB has at most 8,180 granules. Under a limit of up to 8,192
//! small granules, the first 8,192 (16 GiB) are small; without a limit, the first 16,384 (32 GiB).
//!
//! A granule is remapped only to the place of a granule of the same size. Between places of different sizes, one granule is
//! decommitted and another is committed instead.

use std::iter;

/// Ratio of each size to the size before it.
const FACTOR: u64 = 4;
/// Number of granules of the smallest size under a limit of more than `SMALL_POOL_GRANULES`.
const FIRST_GRANULES: u64 = 4096;
/// The largest limit, in granules of the smallest size, under which all granules have that size.
const SMALL_POOL_GRANULES: u64 = 8192;
/// Number of granules of the smallest size if there is no limit.
const UNBOUNDED_GRANULES: u64 = 16384;
/// Number of granules of each size between the smallest and the largest.
const NEXT_GRANULES: u64 = 768;
/// The largest size. A commit of such a granule takes a tenth of a second.
const GRANULE_BYTES_MAX: u64 = 512 << 20;

/// The sizes of granules by offset in their range. All granules of one size are contiguous.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct GranuleSizes {
    smallest_bytes: u64,
    largest_bytes: u64,
    first_granules: u64,
    next_granules: u64,
}

/// The part of a virtual range that has granules of one size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct GranuleZone {
    /// Offset of the first granule.
    pub(crate) start: u64,
    /// Offset after the last granule; `u64::MAX` for the largest granules.
    pub(crate) end: u64,
    pub(crate) granule_bytes: u64,
}

impl GranuleSizes {
    /// Returns the sizes for a pool under this limit: `smallest_bytes` at the start of a range, larger sizes at higher offsets.
    pub(crate) fn for_pool(smallest_bytes: u64, max_bytes: Option<u64>) -> Self {
        let first_granules = match max_bytes {
            None => UNBOUNDED_GRANULES,
            Some(max_bytes) if max_bytes / smallest_bytes <= SMALL_POOL_GRANULES => SMALL_POOL_GRANULES,
            Some(_) => FIRST_GRANULES,
        };
        let largest_bytes = GRANULE_BYTES_MAX.max(smallest_bytes);
        Self { smallest_bytes, largest_bytes, first_granules, next_granules: NEXT_GRANULES }
    }

    /// Returns sizes that are all equal.
    pub(crate) fn uniform(bytes: u64) -> Self {
        Self { smallest_bytes: bytes, largest_bytes: bytes, first_granules: 1, next_granules: 1 }
    }

    /// Returns sizes like [`for_pool`](Self::for_pool), but with `granules` granules of each size, up to `largest_bytes`.
    #[cfg(test)]
    pub(super) fn short(smallest_bytes: u64, granules: u64, largest_bytes: u64) -> Self {
        Self { smallest_bytes, largest_bytes, first_granules: granules, next_granules: granules }
    }

    /// Returns the zones, the smallest granules first.
    pub(crate) fn zones(self) -> impl Iterator<Item = GranuleZone> {
        let next = move |before: &GranuleZone| {
            let granule_bytes = before.granule_bytes.saturating_mul(FACTOR).min(self.largest_bytes);
            (before.end < u64::MAX).then(|| self.zone(before.end, granule_bytes, self.next_granules))
        };
        iter::successors(Some(self.first_zone()), next)
    }

    #[inline]
    fn first_zone(self) -> GranuleZone {
        self.zone(0, self.smallest_bytes, self.first_granules)
    }

    #[inline]
    fn zone(self, start: u64, granule_bytes: u64, granules: u64) -> GranuleZone {
        let is_last = granule_bytes >= self.largest_bytes;
        let end = if is_last { u64::MAX } else { start.saturating_add(granule_bytes.saturating_mul(granules)) };
        GranuleZone { start, end, granule_bytes }
    }

    /// Returns the zone of the byte at `offset`.
    #[inline]
    pub(crate) fn zone_at(self, offset: u64) -> GranuleZone {
        // Each carve and each release calls this. In most pools the byte is in the first zone.
        let first = self.first_zone();
        if offset < first.end { first } else { self.later_zone_at(offset) }
    }

    #[cold]
    fn later_zone_at(self, offset: u64) -> GranuleZone {
        let endless = GranuleZone { end: u64::MAX, ..self.first_zone() };
        self.zones().find(|zone| offset < zone.end).unwrap_or(endless)
    }

    /// Returns the edge of a granule at or below `offset`.
    pub(crate) fn down(self, offset: u64) -> u64 {
        let zone = self.zone_at(offset);
        offset - (offset - zone.start) % zone.granule_bytes
    }

    /// Returns the edge of a granule at or above `offset`.
    pub(crate) fn up(self, offset: u64) -> u64 {
        let zone = self.zone_at(offset);
        let past = (offset - zone.start) % zone.granule_bytes;
        if past == 0 { offset } else { offset.saturating_add(zone.granule_bytes - past) }
    }

    /// Returns the offsets and lengths of the granules from `start` to `end`. The last granule is cut off at `end`.
    pub(crate) fn between(self, start: u64, end: u64) -> impl Iterator<Item = (u64, u64)> {
        let mut at = start;
        iter::from_fn(move || {
            let offset = at;
            at = self.up(offset.saturating_add(1)).min(end);
            (offset < end).then(|| (offset, at - offset))
        })
    }

    /// Returns the number of granules between two edges.
    pub(super) fn count(self, start: u64, end: u64) -> u64 {
        let zones = self.zones().skip_while(|zone| zone.end <= start).take_while(|zone| zone.start < end);
        zones.map(|zone| (end.min(zone.end) - start.max(zone.start)).div_ceil(zone.granule_bytes)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;

    fn sizes() -> GranuleSizes {
        GranuleSizes::for_pool(2 * MIB, Some(1 << 40))
    }

    #[test]
    fn granules_grow_with_their_offset_as_the_limit_says() {
        let zones = |sizes: GranuleSizes| {
            sizes.zones().map(|zone| (zone.start / GIB, zone.granule_bytes / MIB)).collect::<Vec<_>>()
        };
        assert_eq!(zones(sizes()), [(0, 2), (8, 8), (14, 32), (38, 128), (134, 512)]);
        assert_eq!(zones(GranuleSizes::for_pool(2 * MIB, None))[..2], [(0, 2), (32, 8)]);
        assert_eq!(zones(GranuleSizes::for_pool(2 * MIB, Some(16 * GIB)))[..2], [(0, 2), (16, 8)]);
        assert_eq!(zones(GranuleSizes::for_pool(2 * MIB, Some(17 * GIB)))[..2], [(0, 2), (8, 8)]);
        let small: Vec<_> = GranuleSizes::for_pool(4096, None).zones().map(|zone| zone.granule_bytes >> 10).collect();
        assert_eq!(small, [4, 16, 64, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 512 << 10]);
        assert_eq!(GranuleSizes::for_pool(GIB, None).zones().count(), 1);
    }

    #[test]
    fn edges_are_those_of_the_granule_around_an_offset() {
        for (offset, down, up) in [
            (0, 0, 0),
            (1, 0, 2 * MIB),
            (8 * GIB - 1, 8 * GIB - 2 * MIB, 8 * GIB),
            (8 * GIB, 8 * GIB, 8 * GIB),
            (8 * GIB + 1, 8 * GIB, 8 * GIB + 8 * MIB),
            (134 * GIB + 513 * MIB, 134 * GIB + 512 * MIB, 135 * GIB),
        ] {
            assert_eq!((sizes().down(offset), sizes().up(offset)), (down, up), "{offset}");
        }
        let uniform = GranuleSizes::uniform(3 * MIB);
        assert_eq!((uniform.down(100 * MIB), uniform.up(100 * MIB)), (99 * MIB, 102 * MIB));
    }

    #[test]
    fn granules_between_two_edges_are_counted_as_they_are_listed() {
        let short = GranuleSizes::short(2, 3, 32);
        // 2 2 2 8 8 8 32 32 ...
        let edges = [0, 2, 4, 6, 14, 22, 30, 62, 94, 126];
        for (first, &start) in edges.iter().enumerate() {
            for (last, &end) in edges.iter().enumerate().skip(first) {
                assert_eq!(short.count(start, end), (last - first) as u64, "{start} to {end}");
                let listed: Vec<_> = short.between(start, end).map(|(offset, _)| offset).collect();
                assert_eq!(listed, edges[first..last], "{start} to {end}");
            }
        }
        assert_eq!(short.between(6, 9).collect::<Vec<_>>(), [(6, 3)], "cut off");
    }

    #[test]
    fn a_terabyte_is_at_most_8192_granules_wherever_they_lie() {
        // The smallest granules come first, so no other terabyte has more.
        assert_eq!(sizes().count(0, 1 << 40), 8180);
        assert!(sizes().zones().skip(1).all(|zone| zone.granule_bytes * 256 <= zone.start));
    }
}
