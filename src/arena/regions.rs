//! The holes of discrete regions once more, by region: which one a buffer that fits no hole exactly goes to (rule 11).
//!
//! | index | answers |
//! | --- | --- |
//! | `elders` | the oldest region in use that has room |
//! | `by_region`: (region, length, start) | its tightest hole |
//! | `empty`: (length, start) | the tightest region in which no buffer lies |
//!
//! Invariant R1: `empty` holds the holes that are a whole region, `by_region` the others, `elders` the longest of each.

use std::collections::BTreeSet;

use super::extent::{Extent, align_up};
use super::region_index::Elders;

#[derive(Clone, Default, Debug)]
pub(super) struct Regions {
    elders: Elders,
    by_region: BTreeSet<(u32, u64, u64)>,
    empty: BTreeSet<(u64, u64)>,
}

impl Regions {
    /// The tightest hole in the oldest region in use that has room for `bytes` at `align`, else the tightest empty one.
    pub(super) fn best(&self, bytes: u64, align: u64) -> Option<Extent> {
        let fits = |hole: &Extent| align_up(hole.start, align) + bytes <= hole.end;
        let tightest_in = |id: u32| {
            let holes = self.by_region.range((id, bytes, 0)..(id + 1, 0, 0));
            holes.map(|&(_, len, start)| Extent { start, end: start + len }).find(fits)
        };
        let in_use = self.elders.with_room(bytes).find_map(tightest_in);
        let empty =
            || self.empty.range((bytes, 0)..).map(|&(len, start)| Extent { start, end: start + len }).find(fits);
        in_use.or_else(empty)
    }

    /// `hole` of `region` is there now.
    pub(super) fn add(&mut self, hole: Extent, region: Extent) {
        if hole == region {
            self.empty.insert((hole.bytes(), hole.start));
        } else {
            self.by_region.insert((region.range(), hole.bytes(), hole.start));
            self.note(region.range());
        }
    }

    /// `hole` of `region` is there no more.
    pub(super) fn remove(&mut self, hole: Extent, region: Extent) {
        if hole == region {
            self.empty.remove(&(hole.bytes(), hole.start));
        } else {
            self.by_region.remove(&(region.range(), hole.bytes(), hole.start));
            self.note(region.range());
        }
    }

    fn note(&mut self, id: u32) {
        let longest = self.by_region.range((id, 0, 0)..(id + 1, 0, 0)).next_back();
        self.elders.set(id, longest.map_or(0, |&(_, len, _)| len));
    }

    /// Recounts R1, given all holes of the set beside the regions that they lie in.
    pub(super) fn validate(&self, holes: &[(Extent, Extent)]) -> Result<(), String> {
        let mut others = Self::default();
        for &(hole, region) in holes {
            others.add(hole, region);
        }
        if (&self.empty, &self.by_region) != (&others.empty, &others.by_region) {
            return Err(format!("R1: {self:?}, expected {others:?}"));
        }
        let mut longest: Vec<(u32, u64)> = Vec::new();
        for &(id, len, _) in &self.by_region {
            match longest.last_mut() {
                Some(last) if last.0 == id => last.1 = len,
                _ => longest.push((id, len)),
            }
        }
        self.elders.validate(longest.into_iter())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::ArenaPtr;

    fn extent(range: u32, start: u64, end: u64) -> Extent {
        Extent::new(ArenaPtr::new(range, start), end - start)
    }

    #[test]
    fn the_oldest_region_in_use_comes_before_an_empty_one() {
        let mut regions = Regions::default();
        let region = |id| extent(id, 0, 100);
        for (id, from) in [(1, 0), (3, 40), (4, 80), (6, 10)] {
            regions.add(extent(id, from, 100), region(id));
        }
        assert_eq!(regions.best(20, 1), Some(extent(3, 40, 100)), "1 is empty, 6 is younger");
        assert_eq!(regions.best(70, 1), Some(extent(6, 10, 100)));
        assert_eq!(regions.best(95, 1), Some(extent(1, 0, 100)));
        assert_eq!(regions.best(80, 16), Some(extent(6, 10, 100)), "16..96");
        assert_eq!(regions.best(101, 1), None);
        regions.remove(extent(3, 40, 100), region(3));
        assert_eq!(regions.best(20, 1), Some(extent(4, 80, 100)));
    }
}
