//! Old addresses at which remapped granules are still mapped.
//!
//! ```text
//!   remap       [ G G . . . . ]      before
//!               [ g g . . G G ]      mapped and readable at the new place: the caller has its memory
//!   later       [ . . . . G G ]      the old place unmapped, in one call for adjacent granules
//! ```
//!
//! A granule may be mapped at two places, so the caller of a remap waits only for the new mapping, not for the unmapping of the old
//! place. Nothing uses the old place, which was idle. A later slow call unmaps it, at the latest when its addresses are needed.
//!
//! - **old-places-I1**: `runs` contains every address at which something is mapped but no granule is committed, each address once.
//! - **old-places-I2**: a run that a thread is unmapping is marked as taken, and no other thread touches it.
#![allow(unsafe_code)] // Calls the driver.

use std::ops::Range;

use super::table::{Granule, bytes_of};
use crate::driver::code::FailedCall;
use crate::driver::vmm as driver;
use pinpool_os::sync::{Condvar, Mutex};

/// Adjacent mappings of granules that are no longer committed at these addresses.
#[derive(Debug)]
struct OldRun {
    start: u64,
    end: u64,
    granules: usize,
    /// Whether a thread is unmapping the run.
    is_taken: bool,
}

impl OldRun {
    fn touches(&self, addresses: &Range<u64>) -> bool {
        self.start < addresses.end && addresses.start < self.end
    }
}

/// The old places of the granules of one source.
#[derive(Debug, Default)]
pub(super) struct OldPlaces {
    runs: Mutex<Vec<OldRun>>,
    /// Notified when a thread has finished the unmap call for its runs.
    ended: Condvar,
}

impl OldPlaces {
    /// Records that `granules` are still mapped from `start` on, but that nothing uses them at these addresses.
    pub(super) fn add(&self, start: u64, granules: &[Granule]) {
        if !granules.is_empty() {
            let end = start + bytes_of(granules) as u64;
            self.runs.lock().push(OldRun { start, end, granules: granules.len(), is_taken: false });
        }
    }

    /// Returns the number of granules that are still mapped at an old place.
    pub(super) fn granules(&self) -> usize {
        self.runs.lock().iter().map(|run| run.granules).sum()
    }

    /// Unmaps the runs that touch `addresses`, adjacent runs in one call. Waits for other threads that are unmapping such runs.
    /// After a refusal the remaining runs stay mapped, and a later call tries again.
    pub(super) fn unmap(&self, addresses: &Range<u64>) -> Result<(), FailedCall> {
        let mut runs = self.runs.lock();
        loop {
            if let Some(taken) = take(&mut runs, addresses) {
                drop(runs);
                let bytes = usize::try_from(taken.end - taken.start).unwrap_or(usize::MAX);
                // SAFETY: whole granules that are mapped there (old-places-I1), unused, and unmapped by no other thread
                // (old-places-I2).
                let unmapped = unsafe { driver::unmap(taken.start, bytes) };
                runs = self.runs.lock();
                runs.retain_mut(|run| {
                    let was_taken = run.touches(&taken);
                    run.is_taken &= !was_taken;
                    !was_taken || unmapped.is_err()
                });
                self.ended.notify_all();
                unmapped?;
            } else if runs.iter().any(|run| run.touches(addresses)) {
                runs = self.ended.wait(runs);
            } else {
                return Ok(());
            }
        }
    }
}

/// Marks a run that touches `addresses`, and all runs that adjoin it, as taken. Returns their addresses; `None` if there is none.
fn take(runs: &mut [OldRun], addresses: &Range<u64>) -> Option<Range<u64>> {
    let first = runs.iter().find(|run| !run.is_taken && run.touches(addresses))?;
    let mut all = first.start..first.end;
    while let Some(run) = runs.iter().find(|run| !run.is_taken && (run.end == all.start || run.start == all.end)) {
        all = all.start.min(run.start)..all.end.max(run.end);
    }
    runs.iter_mut().filter(|run| run.touches(&all)).for_each(|run| run.is_taken = true);
    Some(all)
}

#[cfg(all(test, not(pinpool_loom)))]
mod tests {
    use super::*;

    #[test]
    fn adjacent_runs_are_taken_together_and_others_are_not() {
        let places = OldPlaces::default();
        for (start, end, granules) in [(4, 6, 1), (0, 2, 2), (8, 9, 1), (2, 4, 1)] {
            places.runs.lock().push(OldRun { start, end, granules, is_taken: false });
        }
        let mut runs = places.runs.lock();
        assert_eq!(take(&mut runs, &(6..8)), None);
        assert_eq!(take(&mut runs, &(2..3)), Some(0..6));
        assert_eq!(take(&mut runs, &(0..6)), None, "another thread has it");
        assert_eq!(take(&mut runs, &(4..20)), Some(8..9));
        drop(runs);
        assert_eq!(places.granules(), 5, "what is being unmapped is still mapped");
    }
}
