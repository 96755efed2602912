//! Ordinary memory: the same mappings as `mlock`, without the lock. Never pinned, and says so.
#![allow(unsafe_code)] // Implements the unsafe `Source` and `VirtualMemory`.

use super::pages::{self, Commit, Numbering};
use super::populate::populate;
use super::ranges::{self, Start};
use super::{AddressRange, PAGE_BYTES, Region, Source, SourceError, VirtualMemory};

/// Anonymous mappings that are not page-locked.
#[derive(Debug, Default)]
pub struct HeapSource {
    numbering: Numbering,
}

impl HeapSource {
    /// A source of ordinary memory.
    pub fn new() -> Self {
        Self::default()
    }
}

// SAFETY: C1 to C3 are the kernel's word on a private anonymous mapping: zeroed pages at a fixed page-aligned address,
// until `munmap`. C4: `Numbering`.
unsafe impl Source for HeapSource {
    fn name(&self) -> &'static str {
        "heap"
    }

    fn is_pinned(&self) -> bool {
        false
    }

    fn acquire(&self, len_bytes: usize) -> Result<Region, SourceError> {
        pages::map(len_bytes, Commit::Yes, self.numbering.next())
    }

    unsafe fn release(&self, region: Region) -> Result<(), SourceError> {
        // SAFETY: the caller's promise: the region is of this source, hence of `map`, and unused.
        unsafe { pages::unmap(region) }
    }

    fn acquire_fast(&self, len_bytes: usize, threads: usize, progress: &dyn Fn(usize)) -> Result<Region, SourceError> {
        let region = pages::map_huge(len_bytes, self.numbering.next())?;
        // SAFETY: mapped on the line above.
        let ready = unsafe { populate(&region, threads, None, progress) };
        // SAFETY: mapped above, no reference into it was made.
        unsafe { pages::keep_if(ready, region) }
    }

    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        (!cfg!(miri)).then_some(self)
    }
}

// SAFETY: S1, S4 and S5 are the kernel's word on one mapping without access, pages of which are opened and closed
// (`ranges`). S2 and S3: an open page is mapped, and zero until written to; closing empties it.
unsafe impl VirtualMemory for HeapSource {
    fn granule_bytes(&self) -> usize {
        PAGE_BYTES
    }

    fn reserve(&self, len_bytes: usize) -> Result<AddressRange, SourceError> {
        ranges::reserve(len_bytes, Start::Closed)
    }

    unsafe fn commit(&self, range: &AddressRange, offset: usize, bytes: usize) -> Result<(), SourceError> {
        // SAFETY: the caller's promise: not locked, hence closed.
        unsafe { ranges::open(range.at(offset, bytes)?, bytes) }
    }

    unsafe fn decommit(&self, range: &AddressRange, offset: usize, bytes: usize) -> Result<(), SourceError> {
        // SAFETY: the caller's promise: locked, hence open, and unused.
        unsafe { ranges::close(range.at(offset, bytes)?, bytes) }
    }

    unsafe fn unreserve(&self, range: AddressRange) -> Result<(), SourceError> {
        // SAFETY: the caller's promise: of `reserve`, and unused.
        unsafe { ranges::unreserve(range) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::suite::check_source;

    #[test]
    fn keeps_the_contract() {
        check_source(&HeapSource::new());
    }

    #[test]
    fn says_that_it_is_not_pinned() {
        assert!(!HeapSource::new().is_pinned());
    }
}
