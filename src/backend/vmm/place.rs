//! Where granules are mapped: new ones, those that go, and those that move where the driver maps a granule at one address at a
//! time.
#![allow(unsafe_code)] // Calls the driver.

use super::super::mapping;
use super::super::virtual_memory::RemapError;
use super::calls::Reached;
use super::granule::{Granule, GranuleRun, placed};
use super::table::source_error;
use super::{VmmSource, bytes_of, lengths_of};
use crate::driver::virtual_memory::DriverRefusal;

impl VmmSource {
    /// Maps `granules` from `start` on, readable and writable, or commits nothing there. Returns the other devices that have
    /// access.
    ///
    /// # Safety
    ///
    /// The addresses are reserved by the caller, and no granule is committed there.
    pub(super) unsafe fn map(&self, start: u64, granules: &[Granule]) -> Result<Reached, DriverRefusal> {
        let bytes = bytes_of(granules);
        self.old_places.unmap(&self.calls, &(start..start + bytes as u64))?;
        let undo = |count: usize| self.unmap_or_keep(start, &granules[..count]);
        for (index, (address, granule)) in placed(start, granules).enumerate() {
            // SAFETY: the caller's promise, and nothing is mapped there any more; the granule has this length.
            unsafe { self.driver.map(address, granule.bytes, 0, granule.handle, 0) }.inspect_err(|_| undo(index))?;
        }
        // A child of `fork` would share the pages, and could write to them under a copy.
        let kept = || mapping::keep_run_from_children(start, bytes).map_err(DriverRefusal::of_madvise);
        // SAFETY: mapped above.
        let others = unsafe { self.calls.set_access(start, granules) };
        others.and_then(|others| kept().map(|()| others)).inspect_err(|_| undo(granules.len()))
    }

    /// Unmaps `granules`, which nothing uses, from `start` on. What the driver refuses is unmapped later.
    pub(super) fn unmap_or_keep(&self, start: u64, granules: &[Granule]) {
        let end = start + bytes_of(granules) as u64;
        self.old_places.add(start, lengths_of(granules));
        let _unmapped_later = self.old_places.unmap(&self.calls, &(start..end));
    }

    /// Unmaps a committed run. After an error it is mapped as before; where the driver takes one granule in a call and refuses
    /// one behind the first, the rest is unmapped later.
    ///
    /// # Safety
    ///
    /// Nothing uses the run.
    pub(super) unsafe fn unmap(&self, run: &GranuleRun) -> Result<(), DriverRefusal> {
        let lengths = lengths_of(&run.granules);
        // SAFETY: the caller's promise; whole granules (vmm-I1).
        match unsafe { self.calls.unmap(run.start, &lengths) } {
            (0, unmapped) => unmapped,
            (count, _) => {
                self.old_places
                    .add(run.start + lengths[..count].iter().sum::<usize>() as u64, lengths[count..].to_vec());
                Ok(())
            }
        }
    }

    /// Moves committed runs to `to` where the driver maps a granule at one address at a time.
    ///
    /// # Safety
    ///
    /// Nothing uses the runs, and nothing is committed at `to`.
    pub(super) unsafe fn move_unmapped(
        &self,
        runs: &[GranuleRun],
        to: u64,
        granules: &[Granule],
    ) -> Result<(), RemapError> {
        let mut gone = 0;
        let unmapped = runs.iter().try_for_each(|run| {
            // SAFETY: the caller's promise.
            unsafe { self.unmap(run) }?;
            gone += 1;
            Ok(())
        });
        // SAFETY: the caller's promise.
        let refusal = match unmapped.and_then(|()| unsafe { self.map(to, granules) }) {
            Ok(others) => {
                runs.iter().for_each(|run| self.granules.forget(run));
                self.granules.remember(to, granules, others);
                self.calls.note_maps_once();
                return Ok(());
            }
            Err(refusal) => refusal,
        };
        for (index, run) in runs[..gone].iter().enumerate() {
            // SAFETY: unmapped above, and nothing is committed there.
            match unsafe { self.map(run.start, &run.granules) } {
                Ok(others) => {
                    self.granules.forget(run);
                    self.granules.remember(run.start, &run.granules, others);
                }
                Err(refusal) => {
                    // Neither there nor back: all of them are given up, wherever they are mapped.
                    let mapped = runs[..index].iter().chain(&runs[gone..]);
                    mapped.for_each(|run| self.unmap_or_keep(run.start, &run.granules));
                    runs.iter().for_each(|run| self.granules.forget(run));
                    let _released_later = self.release_granules(granules);
                    return Err(RemapError::Lost(source_error(refusal)));
                }
            }
        }
        Err(RemapError::Kept(source_error(refusal)))
    }
}
