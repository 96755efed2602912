//! Maps granules, and unmaps them later if the driver refuses to do so at once.
#![allow(unsafe_code)] // Calls the driver.

use super::super::mapping;
use super::calls::Reached;
use super::granule::{Granule, placed};
use super::{VmmSource, bytes_of};
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
        self.old_places.unmap(self.driver, &(start..start + bytes as u64))?;
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
        self.old_places.add(start, granules);
        let _unmapped_later = self.old_places.unmap(self.driver, &(start..end));
    }
}
