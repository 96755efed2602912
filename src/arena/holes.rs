//! Holes: free committed bytes as maximal extents, found by length or by neighbour in O(log n).
//!
//! | index | answers |
//! | --- | --- |
//! | `by_len`: (length, start) | the tightest hole that fits, the lowest among equals |
//! | `start_by_end` | the neighbours of an extent that is freed |
//!
//! Holes are keyed by their *end*: a carve takes the low end, so the key stays.
//!
//! - **holes-I1**: Both indices have the same holes.
//! - **holes-I2**: No two holes touch or overlap; adjacent ones are merged.
//! - **holes-I3**: `bytes` is the sum of their lengths.

use std::collections::{BTreeMap, BTreeSet};

use super::extent::Extent;

#[derive(Clone, Default, Debug)]
pub(super) struct Holes {
    start_by_end: BTreeMap<u64, u64>,
    by_len: BTreeSet<(u64, u64)>,
    bytes: u64,
}

impl Holes {
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The tightest hole that fits `bytes`, the lowest of equals.
    #[inline(always)] // A carve calls this once.
    pub(super) fn tightest(&self, bytes: u64) -> Option<Extent> {
        self.of_at_least(bytes).next()
    }

    /// The length of the longest hole; 0 without one.
    pub(super) fn longest_bytes(&self) -> u64 {
        self.by_len.last().map_or(0, |&(len, _)| len)
    }

    /// The holes of at least `bytes`, the shortest first.
    pub(super) fn of_at_least(&self, bytes: u64) -> impl Iterator<Item = Extent> + '_ {
        self.by_len.range((bytes, 0)..).map(|&(len, start)| Extent { start, end: start + len })
    }

    /// `extent` and the holes that lie across its ends or touch them.
    pub(super) fn joined_with(&self, extent: Extent) -> Extent {
        let first = Extent { start: extent.start, end: extent.start + 1 };
        let last = Extent { start: extent.end - 1, end: extent.end };
        let before = self.ending_at(extent.start).or_else(|| self.around(first));
        let behind = self.starting_at(extent.end).or_else(|| self.around(last));
        Extent {
            start: before.map_or(extent.start, |hole| hole.start),
            end: behind.map_or(extent.end, |hole| hole.end),
        }
    }

    pub(super) fn ending_at(&self, at: u64) -> Option<Extent> {
        self.start_by_end.get(&at).map(|&start| Extent { start, end: at })
    }

    pub(super) fn starting_at(&self, at: u64) -> Option<Extent> {
        self.first_ending_after(at).filter(|hole| hole.start == at)
    }

    /// The hole that holds all of `part`.
    pub(super) fn around(&self, part: Extent) -> Option<Extent> {
        self.first_ending_after(part.start).filter(|hole| hole.start <= part.start && part.end <= hole.end)
    }

    fn first_ending_after(&self, at: u64) -> Option<Extent> {
        self.start_by_end.range(at + 1..).next().map(|(&end, &start)| Extent { start, end })
    }

    /// Takes `part` out of `hole`, which must be one of the holes.
    pub(super) fn cut(&mut self, hole: Extent, part: Extent) {
        self.by_len.remove(&(hole.bytes(), hole.start));
        self.bytes -= part.bytes();
        let [left, right] = hole.without(part);
        match right {
            // The key is the end, so the right remainder keeps it.
            Some(right) => {
                self.start_by_end.insert(right.end, right.start);
                self.by_len.insert((right.bytes(), right.start));
            }
            None => {
                self.start_by_end.remove(&hole.end);
            }
        }
        if let Some(left) = left {
            self.start_by_end.insert(left.end, left.start);
            self.by_len.insert((left.bytes(), left.start));
        }
    }

    /// Adds `part` and merges it with its neighbours; returns the merged hole.
    #[inline(always)] // A return to the arena calls this once.
    pub(super) fn add(&mut self, part: Extent) -> Extent {
        // One search finds both neighbours: the hole that ends at the start of `part`, and the next one.
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
            // Its end is the key of the merged hole; the insertion below replaces the entry.
            self.by_len.remove(&(right.bytes(), right.start));
            whole.end = right.end;
        }
        self.start_by_end.insert(whole.end, whole.start);
        self.by_len.insert((whole.bytes(), whole.start));
        self.bytes += part.bytes();
        whole
    }

    /// All holes, by address.
    #[cfg(test)]
    pub(super) fn iter(&self) -> impl Iterator<Item = Extent> + '_ {
        self.start_by_end.iter().map(|(&end, &start)| Extent { start, end })
    }

    /// Recounts holes-I1 to holes-I3.
    #[cfg(test)]
    pub(super) fn validate(&self) -> Result<(), String> {
        let by_address: BTreeSet<_> = self.iter().map(|hole| (hole.bytes(), hole.start)).collect();
        if by_address != self.by_len {
            return Err("holes-I1: the index by length and the index by end differ".into());
        }
        let mut last_end = None;
        for hole in self.iter() {
            if hole.start >= hole.end || last_end.is_some_and(|end| end >= hole.start) {
                return Err(format!("holes-I2: {hole:?} is empty or touches the hole that ends at {last_end:?}"));
            }
            last_end = Some(hole.end);
        }
        let sum: u64 = self.iter().map(Extent::bytes).sum();
        if sum != self.bytes {
            return Err(format!("holes-I3: {} bytes counted, the sum is {sum}", self.bytes));
        }
        Ok(())
    }
}
