//! Separate regions (policy-R11): which hole a buffer gets, and how large the next region is.
//!
//! A region cannot be released or replaced while it contains a buffer. The order of policy-R11 lets regions become empty, because
//! long-lived buffers gather in old regions. If each buffer got the tightest hole of all regions, every region would stay partly
//! in use: in replays of scaled sizes, the worst peak is then 3.5 times the requested bytes, compared with 1.9 times under
//! policy-R11. A region that replaces others is not cut to whole buffers, since the rest would have to be committed again for the
//! next buffer.
//!
//! - **separate-regions-I1**: `by_region` contains the holes that are not a whole region. `longest` contains the length of the longest
//!   hole of each region in `by_region`, by ascending region number.

use std::collections::BTreeSet;

use super::extent::Extent;

/// The largest size of a small buffer. Small and large buffers have different regions (policy-R11).
pub(super) const SMALL_BYTES_MAX: u64 = 1 << 20;

const REGION_BYTES_MIN: u64 = 1 << 20;
const REGION_BYTES_MAX: u64 = 64 << 20;

/// Length of the next region: the bytes of the other regions of its set, divided by this number.
const GROWTH_SHARE: u64 = 8;

/// A region has room for at least this many buffers, but at most `MANY_BYTES_MAX` are required for that.
const MANY_BUFFERS: u64 = 8;
const MANY_BYTES_MAX: u64 = 16 << 20;

/// A region of large buffers has room for at least this many buffers of the largest requested size, but at most
/// `SEVERAL_BYTES_MAX` are required for that. If sizes vary, a region for buffers of one size would serve few of the next
/// requests.
const SEVERAL_LARGEST: u64 = 4;
const SEVERAL_BYTES_MAX: u64 = 44 << 20;

/// Returns the length of the next region for buffers of `class_bytes`, a multiple of `class_bytes`; `None` if no buffer fits.
/// The other regions of the set have `held_bytes`. At most `limit_bytes` may be committed. At most `step_bytes` should be
/// committed per call, unless one buffer, or several of `largest_miss_bytes`, need more. A region that replaces empty regions of
/// `replaced_bytes` has at least that many bytes, and then need not be a multiple of `class_bytes`, if these limits permit it.
pub(super) fn region_bytes(
    held_bytes: u64,
    class_bytes: u64,
    replaced_bytes: u64,
    limit_bytes: u64,
    (step_bytes, largest_miss_bytes): (u64, u64),
) -> Option<u64> {
    let many = class_bytes.saturating_mul(MANY_BUFFERS).min(MANY_BYTES_MAX);
    let several = match class_bytes {
        ..=SMALL_BYTES_MAX => 0,
        _ => largest_miss_bytes.saturating_mul(SEVERAL_LARGEST).min(SEVERAL_BYTES_MAX),
    };
    let least = REGION_BYTES_MIN.max(many).max(several).max(class_bytes);
    let most = REGION_BYTES_MAX.max(class_bytes);
    let whole_buffers = |bytes: u64| bytes / class_bytes * class_bytes;
    let wanted = whole_buffers((held_bytes / GROWTH_SHARE).clamp(least, most)).max(replaced_bytes);
    let at_once = step_bytes.max(several).max(class_bytes).min(limit_bytes);
    let bytes = if wanted <= at_once { wanted } else { whole_buffers(at_once) };
    (bytes > 0).then_some(bytes)
}

/// The holes of separate regions in use, by region. Regions are numbered in the order of their creation.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub(super) struct RegionsInUse {
    /// (region, length, start).
    by_region: BTreeSet<(u32, u64, u64)>,
    /// (region, length of its longest hole), ascending. Scanned for the oldest region that fits: even for thousands of regions a
    /// scan takes less time than updating a tree.
    longest: Vec<(u32, u64)>,
}

impl RegionsInUse {
    /// Returns the tightest hole for `bytes` in the oldest region that fits.
    pub(super) fn best(&self, bytes: u64) -> Option<Extent> {
        let &(oldest, _) = self.longest.iter().find(|&&(_, len)| len >= bytes)?;
        let &(_, len, start) = self.by_region.range((oldest, bytes, 0)..).next()?;
        Some(Extent { start, end: start + len })
    }

    /// Records that `region` has `hole`. Ignores a hole that is the whole region, which is not in use.
    pub(super) fn add(&mut self, hole: Extent, region: Extent) {
        if hole != region {
            self.by_region.insert((region.range(), hole.bytes(), hole.start));
            self.update_longest(region.range());
        }
    }

    /// Records that `region` no longer has `hole`.
    pub(super) fn remove(&mut self, hole: Extent, region: Extent) {
        if hole != region {
            self.by_region.remove(&(region.range(), hole.bytes(), hole.start));
            self.update_longest(region.range());
        }
    }

    fn update_longest(&mut self, id: u32) {
        let longest = self.by_region.range((id, 0, 0)..(id + 1, 0, 0)).next_back().map(|&(_, len, _)| len);
        match (self.longest.binary_search_by_key(&id, |&(id, _)| id), longest) {
            (Ok(at), Some(len)) => self.longest[at].1 = len,
            (Ok(at), None) => drop(self.longest.remove(at)),
            (Err(at), Some(len)) => self.longest.insert(at, (id, len)),
            (Err(_), None) => {}
        }
    }

    /// Recounts separate-regions-I1 from all `holes` of the set and the regions that they lie in.
    #[cfg(test)]
    pub(super) fn validate(&self, holes: &[(Extent, Extent)]) -> Result<(), String> {
        let mut expected = Self::default();
        for &(hole, region) in holes {
            expected.add(hole, region);
        }
        if *self == expected { Ok(()) } else { Err(format!("separate-regions-I1: {self:?}, expected {expected:?}")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: u64 = 1 << 10;
    const MIB: u64 = 1 << 20;

    #[test]
    fn a_region_is_whole_buffers_between_its_bounds() {
        const MAX: u64 = u64::MAX;
        let cases = [
            ("it holds several small buffers", (0, 4 * KIB, 0, MAX, MAX), Some(MIB)),
            ("", (0, 640 * KIB, 0, MAX, MAX), Some(5 * MIB)),
            ("16 MiB, cut to whole buffers", (0, 3 * MIB, 0, MAX, MAX), Some(15 * MIB)),
            ("", (0, 100 * MIB, 0, MAX, MAX), Some(100 * MIB)),
            ("it grows with the bytes held", (200 * MIB, MIB, 0, MAX, MAX), Some(25 * MIB)),
            ("up to a bound", (2000 * MIB, MIB, 0, MAX, MAX), Some(64 * MIB)),
            ("it is as large as what it replaces, uncut", (0, 24 * MIB, 100 * MIB, MAX, MAX), Some(100 * MIB)),
            ("", (0, 24 * MIB, 20 * MIB, MAX, MAX), Some(24 * MIB)),
            ("within the limit", (0, 640 * KIB, 0, 2 * MIB, MAX), Some(1920 * KIB)),
            ("", (0, 640 * KIB, 0, 639 * KIB, MAX), None),
            ("one step while copies run", (2000 * MIB, MIB, 0, MAX, 8 * MIB), Some(8 * MIB)),
            ("", (0, 3 * MIB, 0, MAX, 8 * MIB), Some(6 * MIB)),
            ("or one buffer, which lies in one region", (0, 20 * MIB, 0, MAX, 8 * MIB), Some(20 * MIB)),
            ("", (0, 20 * MIB, 0, 19 * MIB, 8 * MIB), None),
        ];
        for (why, (held, class, replaced, limit, step), expected) in cases {
            assert_eq!(region_bytes(held, class, replaced, limit, (step, 0)), expected, "{why}: {held} {class}");
        }
    }

    #[test]
    fn a_region_has_room_for_four_of_the_largest_requests() {
        const MAX: u64 = u64::MAX;
        for (why, (class, largest, limit, step), expected) in [
            ("four", (2 * MIB, 8 * MIB, MAX, MAX), Some(32 * MIB)),
            ("as far as they take 44 MiB", (2 * MIB, 20 * MIB, MAX, MAX), Some(44 * MIB)),
            ("in whole buffers", (5 * MIB, 20 * MIB, MAX, MAX), Some(40 * MIB)),
            ("with copies too", (2 * MIB, 8 * MIB, MAX, 8 * MIB), Some(32 * MIB)),
            ("within the limit", (2 * MIB, 8 * MIB, 21 * MIB, 8 * MIB), Some(20 * MIB)),
            ("not for small buffers", (MIB, 20 * MIB, MAX, MAX), Some(8 * MIB)),
            ("one buffer after a refusal", (2 * MIB, 0, MAX, 0), Some(2 * MIB)),
        ] {
            assert_eq!(region_bytes(0, class, 0, limit, (step, largest)), expected, "{why}");
        }
    }
}
