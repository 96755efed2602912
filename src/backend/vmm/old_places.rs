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
//! - **old-places-I2**: a run that a thread is unmapping is marked as taken, and no other thread touches it.
#![allow(unsafe_code)] // Calls the driver.

use std::ops::Range;

use super::table::{Granule, bytes_of};
use crate::driver::code::Failed;
use crate::driver::vmm as driver;
use pinpool_os::sync::{Condvar, Mutex};

/// Adjacent granules at addresses that they have left.
#[derive(Debug, Clone, PartialEq, Eq)]
struct OldRun {
    start: u64,
    end: u64,
    granules: usize,
}

#[derive(Debug, Default)]
struct Runs {
    waiting: Vec<OldRun>,
    /// Runs that a thread is unmapping.
    taken: Vec<OldRun>,
}

/// The old places of the granules of one source.
#[derive(Debug, Default)]
pub(super) struct OldPlaces {
    runs: Mutex<Runs>,
    /// Notified when a thread has ended its call for a run.
    ended: Condvar,
}

impl OldPlaces {
    /// Records that `granules` are still mapped from `start` on, where nothing uses them.
    pub(super) fn add(&self, start: u64, granules: &[Granule]) {
        if !granules.is_empty() {
            let end = start + bytes_of(granules) as u64;
            self.runs.lock().waiting.push(OldRun { start, end, granules: granules.len() });
        }
    }

    /// Granules that are still mapped at an old place.
    pub(super) fn granules(&self) -> usize {
        let runs = self.runs.lock();
        runs.waiting.iter().chain(&runs.taken).map(|run| run.granules).sum()
    }

    /// Unmaps what is mapped in `addresses`, adjacent granules in one call. Waits for threads that do the same.
    /// After a refusal the rest stays mapped, for the next call.
    pub(super) fn unmap(&self, addresses: &Range<u64>) -> Result<(), Failed> {
        let is_within = |run: &OldRun| run.start < addresses.end && addresses.start < run.end;
        let mut runs = self.runs.lock();
        loop {
            if let Some(run) = runs.take(is_within) {
                drop(runs);
                // SAFETY: whole granules that are mapped there (old-places-I1), unused, and unmapped by no other thread
                // (old-places-I2).
                let unmapped = unsafe { driver::unmap(run.start, run.bytes()) };
                runs = self.runs.lock();
                runs.taken.retain(|other| *other != run);
                if unmapped.is_err() {
                    runs.waiting.push(run);
                }
                self.ended.notify_all();
                unmapped?;
            } else if runs.taken.iter().any(is_within) {
                runs = self.ended.wait(runs);
            } else {
                return Ok(());
            }
        }
    }
}

impl OldRun {
    fn bytes(&self) -> usize {
        usize::try_from(self.end - self.start).unwrap_or(usize::MAX)
    }
}

impl Runs {
    /// Takes a run for which `is_wanted`, with those that adjoin it.
    fn take(&mut self, is_wanted: impl Fn(&OldRun) -> bool) -> Option<OldRun> {
        let first = self.waiting.iter().position(is_wanted)?;
        let mut run = self.waiting.swap_remove(first);
        while let Some(next) = self.waiting.iter().position(|other| other.end == run.start || other.start == run.end) {
            let next = self.waiting.swap_remove(next);
            let (low, high) = if next.start < run.start { (next, run) } else { (run, next) };
            run = OldRun { start: low.start, end: high.end, granules: low.granules + high.granules };
        }
        self.taken.push(run.clone());
        Some(run)
    }
}

#[cfg(all(test, not(pinpool_loom)))]
mod tests {
    use super::*;

    #[test]
    fn adjacent_runs_are_taken_together_and_others_are_not() {
        let places = OldPlaces::default();
        for (start, end, granules) in [(4, 6, 1), (0, 2, 2), (8, 9, 1), (2, 4, 1)] {
            places.runs.lock().waiting.push(OldRun { start, end, granules });
        }
        assert_eq!(places.granules(), 5);
        let mut runs = places.runs.lock();
        assert_eq!(runs.take(|run| run.start == 2), Some(OldRun { start: 0, end: 6, granules: 4 }));
        assert_eq!(runs.take(|run| run.start < 6), None);
        assert_eq!((runs.waiting.len(), runs.taken.len()), (1, 1));
        drop(runs);
        assert_eq!(places.granules(), 5, "what is being unmapped is still mapped");
    }
}
