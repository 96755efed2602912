//! Old addresses at which remapped granules are still mapped.
//!
//! ```text
//!   remap       [ G G . . . . ]      before
//!               [ g g . . G G ]      mapped and readable at the new place: the caller has its memory
//!   later       [ . . . . G G ]      the old place unmapped, in one call for adjacent granules
//! ```
//!
//! A granule may be mapped twice, so a remap makes the caller wait only for what its buffer needs. Nothing uses the old place, which
//! was idle. The next slow call unmaps it, at the latest when its addresses are needed.
//!
//! - **old-places-I1**: all addresses without a committed granule where something is mapped are in `runs`, each once.
//! - **old-places-I2**: one thread at a time unmaps, and it removes a run once the run is unmapped.
#![allow(unsafe_code)] // Calls the driver.

use std::ops::Range;

use super::table::{Granule, bytes_of};
use crate::driver::code::Failed;
use crate::driver::vmm as driver;
use pinpool_os::sync::Mutex;

/// Adjacent granules at addresses that they have left.
#[derive(Debug)]
struct OldRun {
    start: u64,
    end: u64,
    granules: usize,
}

/// The old places of the granules of one source.
#[derive(Debug, Default)]
pub(super) struct OldPlaces {
    runs: Mutex<Vec<OldRun>>,
    /// Held by the thread that unmaps.
    unmapping: Mutex<()>,
}

impl OldPlaces {
    /// Records that `granules` are still mapped from `start` on, where nothing uses them.
    pub(super) fn add(&self, start: u64, granules: &[Granule]) {
        if !granules.is_empty() {
            let end = start + bytes_of(granules) as u64;
            self.runs.lock().push(OldRun { start, end, granules: granules.len() });
        }
    }

    /// Granules that are still mapped at an old place.
    pub(super) fn granules(&self) -> usize {
        self.runs.lock().iter().map(|run| run.granules).sum()
    }

    /// Unmaps what is mapped in `addresses`, adjacent granules in one call. Waits for another thread that unmaps if something is.
    /// After a refusal the rest stays mapped, for the next call.
    pub(super) fn unmap(&self, addresses: &Range<u64>) -> Result<(), Failed> {
        while self.adjacent_in(addresses).is_some() {
            let _unmapping = self.unmapping.lock();
            let Some(Range { start, end }) = self.adjacent_in(addresses) else { break };
            let bytes = usize::try_from(end - start).unwrap_or(usize::MAX);
            // SAFETY: whole granules that are mapped there (old-places-I1), unused, and unmapped by no other thread
            // (old-places-I2).
            unsafe { driver::unmap(start, bytes) }?;
            self.runs.lock().retain(|run| run.end <= start || end <= run.start);
        }
        Ok(())
    }

    /// The addresses of a run that touches `addresses`, and of those that adjoin it.
    fn adjacent_in(&self, addresses: &Range<u64>) -> Option<Range<u64>> {
        let runs = self.runs.lock();
        let first = runs.iter().find(|run| run.start < addresses.end && addresses.start < run.end)?;
        let mut all = first.start..first.end;
        while let Some(next) = runs.iter().find(|run| run.end == all.start || run.start == all.end) {
            all = all.start.min(next.start)..all.end.max(next.end);
        }
        Some(all)
    }
}

#[cfg(all(test, not(pinpool_loom)))]
mod tests {
    use super::*;

    #[test]
    fn adjacent_runs_are_taken_together_and_others_are_not() {
        let places = OldPlaces::default();
        for (start, end, granules) in [(4, 6, 1), (0, 2, 2), (8, 9, 1), (2, 4, 1)] {
            places.runs.lock().push(OldRun { start, end, granules });
        }
        assert_eq!(places.granules(), 5);
        assert_eq!(places.adjacent_in(&(2..3)), Some(0..6));
        assert_eq!(places.adjacent_in(&(8..20)), Some(8..9));
        assert_eq!(places.adjacent_in(&(6..8)), None);
    }
}
