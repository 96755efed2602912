//! Memory that the CUDA driver pins: `cuMemHostAlloc`, portable (every context may copy from it) and cached.
//!
//! The memory is never write-combined, because reading write-combined memory on the host is very slow. The driver is loaded at run
//! time.
//!
//! ```text
//!   the driver's block    [ ... |<------- len_bytes ------->| ... ]     a small block begins anywhere in a page
//!   the region                  ^ starts at the first page boundary
//! ```
//!
//! `cuMemFreeHost` waits for all work on the device and meanwhile blocks the enqueues of all other threads. A pool that must
//! not stall keeps its memory.
#![allow(unsafe_code)] // Calls the driver.

use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::sys;

use super::source::{BuiltInSource, PinnedBy, Region, RegionIds, Source};
use crate::driver::calls;
use crate::driver::device::Device;
use crate::error::SourceError;
use pinpool_os::host::{GRANULE_BYTES, PAGE_BYTES};

/// The driver carves blocks below this size out of larger blocks, and guarantees no alignment for them.
const CARVED_BYTES: usize = GRANULE_BYTES;

/// Memory pinned by the CUDA driver for one device, readable by all devices.
#[derive(Debug)]
pub struct CudaSource {
    device: Arc<Device>,
    /// Numbers of the regions. The id of a region is its number times the page size, plus the region's offset in the driver's block.
    ids: RegionIds,
}

impl CudaSource {
    /// Finds the driver and the device number `ordinal`; creates nothing on it.
    ///
    /// # Errors
    ///
    /// There is no driver, no such device, or the driver refuses to start.
    pub fn new(ordinal: u32) -> Result<Self, SourceError> {
        Ok(Self { device: Device::find(ordinal)?, ids: Default::default() })
    }
}

// SAFETY: source-C1: `cuMemHostAlloc` maps pinned memory at a fixed address until `cuMemFreeHost`, and a failed free leaves it
// mapped. source-C2: fresh kernel pages, or pages that this process used before. source-C3: `held_bytes` has a page to
// spare if the driver guarantees no alignment, and `acquire` checks that the region ends inside the block. source-C4:
// `RegionIds`. source-C5: exactly `held_bytes` are requested.
unsafe impl Source for CudaSource {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn pinned_by(&self) -> Option<PinnedBy> {
        Some(PinnedBy::Driver)
    }

    fn held_bytes(&self, len_bytes: usize) -> usize {
        let whole_pages = len_bytes.checked_next_multiple_of(PAGE_BYTES).unwrap_or(usize::MAX);
        if whole_pages < CARVED_BYTES { whole_pages + PAGE_BYTES } else { whole_pages }
    }

    fn acquire(&self, len_bytes: usize) -> Result<Region, SourceError> {
        let _entered = self.device.enter()?;
        let held_bytes = self.held_bytes(len_bytes);
        let block = calls::host_alloc(held_bytes, sys::CU_MEMHOSTALLOC_PORTABLE)?.cast::<u8>();
        let skip = block.align_offset(PAGE_BYTES);
        let start = NonNull::new(block.wrapping_add(skip)).filter(|_| skip + len_bytes <= held_bytes);
        let Some(start) = start else {
            // SAFETY: allocated above, and not returned to the caller.
            let _leaked = unsafe { calls::host_free(block.cast()) };
            return Err(SourceError::new("cuMemHostAlloc", "the driver's block holds no page-aligned region"));
        };
        // `skip` is less than a page, so `release` can find it in the id.
        Ok(Region::new(start, len_bytes, self.ids.next() * PAGE_BYTES as u64 + skip as u64))
    }

    unsafe fn release(&self, region: &Region) -> Result<(), SourceError> {
        let _entered = self.device.enter()?;
        let skip = region.id() % PAGE_BYTES as u64;
        let block = region.start().as_ptr().wrapping_sub(usize::try_from(skip).unwrap_or(0));
        // SAFETY: the caller's promise: allocated by `acquire`, not freed, and unused by every device.
        Ok(unsafe { calls::host_free(block.cast()) }?)
    }

    fn blocks_on_release(&self) -> bool {
        true
    }

    fn built_in(&self) -> Option<&dyn BuiltInSource> {
        Some(self)
    }
}

impl BuiltInSource for CudaSource {
    fn device_lost(&self) -> Option<SourceError> {
        self.device.loss()
    }
}
