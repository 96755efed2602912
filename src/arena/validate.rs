//! Recounting the arena from scratch.

use super::extent::Extent;
use super::holes::Holes;
use super::{Arena, GrowthMode, RangeKind};

impl Arena {
    /// Recounts the invariants of the arena and of its rooms. Costs a walk over everything.
    ///
    /// # Errors
    ///
    /// The first invariant that does not hold, with its numbers.
    pub fn validate(&self) -> Result<(), String> {
        self.holes.iter().try_for_each(Holes::validate)?;
        self.idle.validate()?;
        if let GrowthMode::Granules(granule_bytes) = self.growth {
            self.uncommitted.validate(granule_bytes)?;
        }
        let stats = self.stats();
        let all_bytes: u64 = self.ranges.values().map(|range| range.extent.bytes()).sum();
        let bare_bytes: u64 = self.uncommitted.iter().map(Extent::bytes).sum();
        if stats.committed_bytes + self.locking_bytes + bare_bytes != all_bytes {
            return Err(format!(
                "I2: {} locked, {} locking, {bare_bytes} bare are not the {all_bytes} there are",
                stats.committed_bytes, self.locking_bytes
            ));
        }
        // Live buffers and what is in transit overlap (a buffer lies in granules on their way), so I1 is a bound.
        let known = stats.hole_bytes + bare_bytes + stats.live_bytes;
        if known > all_bytes || known + stats.transit_bytes < all_bytes {
            return Err(format!("I1: {stats:?} and {bare_bytes} bare do not tile the {all_bytes} there are"));
        }
        if stats.claimed_bytes < stats.committed_bytes {
            return Err(format!("I4: {stats:?}"));
        }
        self.validate_places()
    }

    /// Holes and bare runs lie in their ranges, apart from each other, and I3.
    fn validate_places(&self) -> Result<(), String> {
        let mut idle_bytes = 0;
        let mut all: Vec<Extent> = self.uncommitted.iter().collect();
        for (set, holes) in self.holes.iter().enumerate() {
            let mut discrete = Vec::new();
            for hole in holes.iter() {
                let range = self.range_of(hole.ptr()).ok_or_else(|| format!("I1: {hole:?} lies in no range"))?;
                if range.set as usize != set || hole.start < range.extent.start || hole.end > range.extent.end {
                    return Err(format!("I1: {hole:?} does not lie in {range:?}"));
                }
                all.push(hole);
                discrete.extend((range.kind == RangeKind::Discrete).then_some((hole, range.extent)));
                let granules = range.grid.granules_decided(hole, hole).filter(|_| range.kind != RangeKind::Reserve);
                let Some(granules) = granules else { continue };
                let counted: u64 = self.idle.within(granules).map(|run| run.extent.bytes()).sum();
                if counted != granules.bytes() {
                    return Err(format!("I3: {granules:?} is idle, {counted} bytes of it are known to be"));
                }
                idle_bytes += counted;
            }
            self.regions[set].validate(&discrete).map_err(|error| format!("I5: {error}"))?;
        }
        if idle_bytes != self.idle.bytes() {
            return Err(format!("I3: {idle_bytes} bytes are idle, {} are known", self.idle.bytes()));
        }
        all.sort_unstable();
        match all.windows(2).find(|pair| pair[0].end > pair[1].start) {
            Some(pair) => Err(format!("I1: {pair:?} overlap")),
            None => Ok(()),
        }
    }
}
