//! Sets of maximal extents, which are found by length or by neighbor in O(log n). The arena has a set of uncommitted granules,
//! and sets of holes, which are free committed bytes.
//!
//! | index | answers |
//! | --- | --- |
//! | `by_len`: (length, start) | the tightest extent that fits, the lowest among equals |
//! | `start_by_end` | the neighbors of an extent that is added |
//!
//! Extents are keyed by their *end*, because a carve takes the low end of a hole and leaves the key unchanged.
//!
//! - **extent-set-I1**: Both indices contain the same extents.
//! - **extent-set-I2**: No two extents touch or overlap; adjacent ones are merged.
//! - **extent-set-I3**: `bytes` is the sum of the lengths of the extents.

use std::collections::{BTreeMap, BTreeSet};

use super::extent::Extent;

#[derive(Clone, Default, Debug)]
pub(super) struct ExtentSet {
    start_by_end: BTreeMap<u64, u64>,
    by_len: BTreeSet<(u64, u64)>,
    bytes: u64,
}

impl ExtentSet {
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the tightest extent that fits `bytes`, the lowest among equals.
    #[inline(always)] // Each carve calls this once.
    pub(super) fn tightest(&self, bytes: u64) -> Option<Extent> {
        self.of_at_least(bytes).next()
    }

    /// Returns the length of the longest extent, or 0 if the set is empty.
    pub(super) fn longest_bytes(&self) -> u64 {
        self.by_len.last().map_or(0, |&(len, _)| len)
    }

    /// Returns the extents of at least `bytes`, the shortest first.
    pub(super) fn of_at_least(&self, bytes: u64) -> impl Iterator<Item = Extent> + '_ {
        self.by_len.range((bytes, 0)..).map(|&(len, start)| Extent { start, end: start + len })
    }

    /// Returns `extent` extended by the extents that overlap or touch it.
    pub(super) fn joined_with(&self, extent: Extent) -> Extent {
        let behind = self.start_by_end.range(extent.start..).map(|(&end, &start)| Extent { start, end });
        behind
            .take_while(|other| other.start <= extent.end)
            .fold(extent, |whole, other| Extent { start: whole.start.min(other.start), end: whole.end.max(other.end) })
    }

    pub(super) fn ending_at(&self, at: u64) -> Option<Extent> {
        self.start_by_end.get(&at).map(|&start| Extent { start, end: at })
    }

    pub(super) fn starting_at(&self, at: u64) -> Option<Extent> {
        self.first_ending_after(at).filter(|hole| hole.start == at)
    }

    /// Returns the extent that contains all of `part`.
    pub(super) fn around(&self, part: Extent) -> Option<Extent> {
        self.first_ending_after(part.start).filter(|hole| hole.start <= part.start && part.end <= hole.end)
    }

    fn first_ending_after(&self, at: u64) -> Option<Extent> {
        self.start_by_end.range(at + 1..).next().map(|(&end, &start)| Extent { start, end })
    }

    /// Returns the parts of extents within `bounds`, by address.
    pub(super) fn within(&self, bounds: Extent) -> Vec<Extent> {
        let behind = self.start_by_end.range(bounds.start + 1..).map(|(&end, &start)| Extent { start, end });
        behind.map_while(|extent| extent.common(bounds)).collect()
    }

    /// Removes `part` from `whole`, which must be one of the extents.
    pub(super) fn cut(&mut self, whole: Extent, part: Extent) {
        self.by_len.remove(&(whole.bytes(), whole.start));
        self.bytes -= part.bytes();
        let [left, right] = whole.without(part);
        // The key of an extent is its end, so the right remainder has the key of `whole`.
        if right.is_none() {
            self.start_by_end.remove(&whole.end);
        }
        right.into_iter().chain(left).for_each(|rest| self.insert(rest));
    }

    #[inline(always)]
    fn insert(&mut self, extent: Extent) {
        self.start_by_end.insert(extent.end, extent.start);
        self.by_len.insert((extent.bytes(), extent.start));
    }

    /// Adds `part`, merges it with its neighbors, and returns the merged extent.
    #[inline(always)] // Each return to the arena calls this once.
    pub(super) fn add(&mut self, part: Extent) -> Extent {
        // One search finds both neighbors: an extent that ends at the start of `part`, and the extent after that.
        let mut near = self.start_by_end.range(part.start..).map(|(&end, &start)| Extent { start, end });
        let mut next = near.next();
        let left = next.filter(|hole| hole.end == part.start);
        if left.is_some() {
            next = near.next();
        }
        let right = next.filter(|hole| hole.start == part.end);

        let mut whole = part;
        if let Some(left) = left {
            self.start_by_end.remove(&left.end);
            self.by_len.remove(&(left.bytes(), left.start));
            whole.start = left.start;
        }
        if let Some(right) = right {
            // The end of `right` is the key of the merged extent, so the insertion below replaces the entry of `right`.
            self.by_len.remove(&(right.bytes(), right.start));
            whole.end = right.end;
        }
        self.insert(whole);
        self.bytes += part.bytes();
        whole
    }

    /// Returns all extents, by address.
    pub(super) fn iter(&self) -> impl Iterator<Item = Extent> + '_ {
        self.start_by_end.iter().map(|(&end, &start)| Extent { start, end })
    }

    /// Recounts extent-set-I1 to extent-set-I3.
    #[cfg(test)]
    pub(super) fn validate(&self) -> Result<(), String> {
        let by_address: BTreeSet<_> = self.iter().map(|hole| (hole.bytes(), hole.start)).collect();
        if by_address != self.by_len {
            return Err("extent-set-I1: the index by length and the index by end differ".into());
        }
        let mut last_end = None;
        for hole in self.iter() {
            if hole.start >= hole.end || last_end.is_some_and(|end| end >= hole.start) {
                return Err(format!("extent-set-I2: {hole:?} is empty or touches the extent ending at {last_end:?}"));
            }
            last_end = Some(hole.end);
        }
        let sum: u64 = self.iter().map(Extent::bytes).sum();
        if sum != self.bytes {
            return Err(format!("extent-set-I3: {} bytes counted, the sum is {sum}", self.bytes));
        }
        Ok(())
    }
}
