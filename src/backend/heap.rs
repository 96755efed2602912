//! Ordinary system memory, which the kernel locks in the backend `mlock`.
//!
//! A region is an anonymous mapping, and a range is an inaccessible mapping; granules become accessible when committed. The
//! kernel keeps locked pages in memory, and unlocks the pages that it unmaps.
#![allow(unsafe_code)] // Implements the unsafe `Source` and `VirtualMemory`.

use super::huge_pages::HugeTlb;
use super::mapping;
use super::mlock::{lock, lock_on_fault, unlock};
use super::options::PinOptions;
use super::populate::{one_of_several, place};
use super::source::{BuiltInSource, PinnedBy, Region, RegionIds, Source};
use super::virtual_memory::{AddressRange, VirtualMemory};
use crate::error::SourceError;

/// Anonymous mappings, which the kernel locks into memory (`mlock`) or does not lock (`heap`).
#[derive(Debug, Default)]
pub struct HeapSource {
    is_locked: bool,
    ids: RegionIds,
    /// Requested NUMA node of the pages.
    node: Option<u32>,
    /// The huge pages for fast acquisitions, such as a reserve.
    hugetlb: HugeTlb,
}

impl HeapSource {
    /// Creates the backend `heap`: unpinned memory.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates the backend `mlock`: memory that the kernel keeps resident. No driver knows about the lock.
    pub fn locked() -> Self {
        Self { is_locked: true, ..Self::default() }
    }

    /// Returns the same source with the options of a pool.
    pub(super) fn for_pool(self, options: &PinOptions<'_>) -> Self {
        let node = options.node.filter(|&node| one_of_several(options.root, node));
        Self { node, hugetlb: options.hugetlb, ..self }
    }

    fn if_locked(&self, call: impl FnOnce() -> Result<(), SourceError>) -> Result<(), SourceError> {
        if self.is_locked { call() } else { Ok(()) }
    }
}

// SAFETY: source-C1 to C3 hold for every private anonymous mapping (`mapping`): zeroed pages at a fixed page-aligned
// address, until `munmap`. A lock changes neither address nor content. source-C4: `RegionIds`.
unsafe impl Source for HeapSource {
    fn name(&self) -> &'static str {
        if self.is_locked { "mlock" } else { "heap" }
    }

    fn pinned_by(&self) -> Option<PinnedBy> {
        self.is_locked.then_some(PinnedBy::Kernel)
    }

    fn acquire(&self, len_bytes: usize) -> Result<Region, SourceError> {
        let region = mapping::map(len_bytes, mapping::CHARGED, self.ids.next())?;
        place(region.start(), len_bytes, self.node);
        let locked = self.if_locked(|| lock(region.start(), len_bytes));
        // SAFETY: mapped above, no reference into it was made.
        unsafe { mapping::keep_if(locked, region) }
    }

    unsafe fn release(&self, region: &Region) -> Result<(), SourceError> {
        // SAFETY: the caller's promise: the region came from this source, hence from `map`, and is unused.
        unsafe { mapping::unmap(region) }
    }

    fn numa_node(&self) -> Option<u32> {
        self.node
    }

    fn built_in(&self) -> Option<&dyn BuiltInSource> {
        Some(self)
    }
}

impl BuiltInSource for HeapSource {
    fn acquire_bulk(&self, len_bytes: usize, threads: usize, progress: &dyn Fn(usize)) -> Result<Region, SourceError> {
        // This first lock fails at the limit before a page is touched. The second lock, below, covers pages that are then present.
        let lock_first = |region: &Region| self.if_locked(|| lock_on_fault(region));
        let (id, place) = (self.ids.next(), (threads, self.node));
        let (region, is_set_aside) = self.hugetlb.acquire(len_bytes, id, place, progress, lock_first)?;
        // Huge pages that were set aside are never paged out, so they need no lock.
        let locked = if is_set_aside { Ok(()) } else { self.if_locked(|| lock(region.start(), len_bytes)) };
        // SAFETY: mapped above, no reference into it was made.
        unsafe { mapping::keep_if(locked, region) }
    }

    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        mapping::HAS_RANGES.then_some(self)
    }
}

// SAFETY: vm-S1, S4 and S5: the range is one mapping without access, in which the kernel commits and decommits pages
// (`mapping`). vm-S2 and S3: a committed page is mapped, and zero until written to; a decommit empties it.
unsafe impl VirtualMemory for HeapSource {
    fn reserve_addresses(&self, len_bytes: usize) -> Result<AddressRange, SourceError> {
        let range = mapping::reserve(len_bytes)?;
        place(range.start(), range.len_bytes(), self.node);
        Ok(range)
    }

    unsafe fn commit(&self, range: &AddressRange, offset: usize, bytes: usize) -> Result<(), SourceError> {
        let start = range.at(offset, bytes)?;
        // SAFETY: the caller promises that none of these pages is committed.
        unsafe { mapping::commit(start, bytes) }?;
        self.if_locked(|| lock(start, bytes)).inspect_err(|_| {
            // SAFETY: committed above, and not returned to the caller.
            let _ = unsafe { mapping::decommit(start, bytes) };
        })
    }

    unsafe fn decommit(&self, range: &AddressRange, offset: usize, bytes: usize) -> Result<(), SourceError> {
        let start = range.at(offset, bytes)?;
        let decommitted = self.if_locked(|| unlock(start, bytes)).and_then(|()| {
            // SAFETY: the caller's promise: committed and unused.
            unsafe { mapping::decommit(start, bytes) }
        });
        decommitted.inspect_err(|_| {
            // The pages are still committed (vm-S2), so they are locked again, if the kernel allows it.
            let _ = self.if_locked(|| lock(start, bytes));
        })
    }

    unsafe fn release_addresses(&self, range: AddressRange) -> Result<(), SourceError> {
        // SAFETY: the caller's promise: it came from `reserve_addresses` and is unused.
        unsafe { mapping::unreserve(range) }
    }
}
