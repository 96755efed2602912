//! Ordinary memory: the mappings of `mlock` without the lock. Never page-locked.
#![allow(unsafe_code)] // Implements the unsafe `Source` and `VirtualMemory`.

use std::path::Path;

use super::huge_pages::{HugeTlb, increasing};
use super::mapping::{self, Accounting, InitialAccess};
use super::populate::{NodePlacement, populate};
use super::source::{Region, RegionIds, Source};
use super::virtual_memory::{AddressRange, VirtualMemory};
use crate::error::SourceError;

/// Anonymous mappings that are not page-locked.
#[derive(Debug, Default)]
pub struct HeapSource {
    ids: RegionIds,
    placement: Option<NodePlacement>,
    hugetlb: HugeTlb,
}

impl HeapSource {
    /// A source of ordinary memory.
    pub fn new() -> Self {
        Self::default()
    }

    /// As [`HeapSource::new`], on memory node `node` where the machine has several.
    pub fn on_node(node: u32) -> Self {
        Self::on_node_below(Path::new("/"), node)
    }

    /// The same of the machine below `root`.
    pub(super) fn on_node_below(root: &Path, node: u32) -> Self {
        Self { placement: NodePlacement::on(root, node), ..Self::default() }
    }

    /// The same with such huge pages in what is acquired fast, as a reserve is.
    pub(super) fn with_hugetlb(self, hugetlb: HugeTlb) -> Self {
        Self { hugetlb, ..self }
    }
}

// SAFETY: source-C1 to C3 hold for every private anonymous mapping (`mapping`): zeroed pages at a fixed page-aligned
// address, until `munmap`. source-C4: `RegionIds`.
unsafe impl Source for HeapSource {
    fn name(&self) -> &'static str {
        "heap"
    }

    fn is_pinned(&self) -> bool {
        false
    }

    fn acquire(&self, len_bytes: usize) -> Result<Region, SourceError> {
        let region = mapping::map(len_bytes, Accounting::Charged, self.ids.next())?;
        if let Some(placement) = &self.placement {
            placement.place(region.start(), mapping::mapped_bytes(len_bytes)?);
        }
        Ok(region)
    }

    unsafe fn release(&self, region: Region) -> Result<(), SourceError> {
        // SAFETY: the caller's promise: the region came from this source, hence from `map`, and is unused.
        unsafe { mapping::unmap(region) }
    }

    fn acquire_fast(&self, len_bytes: usize, threads: usize, progress: &dyn Fn(usize)) -> Result<Region, SourceError> {
        let (id, progress) = (self.ids.next(), &increasing(progress));
        // Pages that are set aside are never paged out.
        if let Some(region) = self.hugetlb.region(len_bytes, id, (threads, self.placement.as_ref()), progress) {
            return Ok(region);
        }
        let region = mapping::map_huge(len_bytes, id)?;
        // SAFETY: mapped on the line above.
        let populated = unsafe { populate(&region, threads, self.placement.as_ref(), progress) };
        // SAFETY: mapped above, no reference into it was made.
        unsafe { mapping::keep_if(populated, region) }
    }

    fn numa_node(&self) -> Option<u32> {
        self.placement.as_ref().map(NodePlacement::node)
    }

    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        mapping::HAS_RANGES.then_some(self)
    }
}

// SAFETY: vm-S1, S4 and S5: the range is one mapping without access, in which the kernel commits and decommits pages
// (`mapping`). vm-S2 and S3: a committed page is mapped, and zero until written to; a decommit empties it.
unsafe impl VirtualMemory for HeapSource {
    fn reserve(&self, len_bytes: usize) -> Result<AddressRange, SourceError> {
        let range = mapping::reserve(len_bytes, InitialAccess::None)?;
        if let Some(placement) = &self.placement {
            placement.place(range.start(), range.len_bytes());
        }
        Ok(range)
    }

    unsafe fn commit(&self, range: &AddressRange, offset: usize, bytes: usize) -> Result<(), SourceError> {
        // SAFETY: the caller's promise: not committed.
        unsafe { mapping::commit(range.at(offset, bytes)?, bytes) }
    }

    unsafe fn decommit(&self, range: &AddressRange, offset: usize, bytes: usize) -> Result<(), SourceError> {
        // SAFETY: the caller's promise: committed and unused.
        unsafe { mapping::decommit(range.at(offset, bytes)?, bytes) }
    }

    unsafe fn unreserve(&self, range: AddressRange) -> Result<(), SourceError> {
        // SAFETY: the caller's promise: it came from `reserve` and is unused.
        unsafe { mapping::unreserve(range) }
    }
}
