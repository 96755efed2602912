//! Memory that the CUDA driver page-locks: `cuMemHostAlloc`, portable (every context may copy from it) and cached.
//!
//! Not write-combined: that gains nothing for copies, and reading it back on the host is ruinous. The driver is looked
//! for at run time.
//!
//! ```text
//!   what the driver gives    [ ... |<------- len_bytes ------->| ... ]     small blocks begin anywhere in a page
//!   what a region is               ^ the first page boundary
//! ```
//!
//! `cuMemFreeHost` waits for all work of the device and holds up every other thread's enqueues meanwhile. That is the
//! driver's doing; a pool that must not stall keeps what it has.
#![allow(unsafe_code)] // Calls the driver.

use std::collections::HashMap;
use std::ptr::NonNull;

use cudarc::driver::{result, sys};

use super::device::{Device, driver_said, pinning_said};
use super::pages::Numbering;
use super::{PAGE_BYTES, Region, Source, SourceError};
use crate::driver::Relaxed;
use crate::sync::Mutex;

/// The driver carves blocks below this out of larger ones and promises no alignment for them.
const CARVED_BYTES: usize = 2 << 20;

/// Memory page-locked by the CUDA driver for one device, readable by all.
#[derive(Debug)]
pub struct CudaSource {
    device: Device,
    numbering: Numbering,
    /// Region start -> what the driver gave, where the two differ.
    shifted: Mutex<HashMap<usize, Block>>,
}

/// First byte of what `cuMemHostAlloc` returned.
#[derive(Debug, Clone, Copy)]
struct Block(NonNull<u8>);

// SAFETY: an address, used only to give the block back, which any thread may do.
unsafe impl Send for Block {}

impl CudaSource {
    /// Looks for a driver and the device number `ordinal`; creates nothing on it.
    ///
    /// # Errors
    ///
    /// There is no driver, no such device, or the driver refuses to start.
    pub fn new(ordinal: u32) -> Result<Self, SourceError> {
        Ok(Self { device: Device::find(ordinal)?, numbering: Numbering::default(), shifted: Mutex::default() })
    }

    /// What the driver gave for this region.
    fn block_of(&self, start: NonNull<u8>) -> Block {
        self.shifted.lock().remove(&start.as_ptr().addr()).unwrap_or(Block(start))
    }
}

// SAFETY: C1: `cuMemHostAlloc` maps page-locked memory at a fixed address until `cuMemFreeHost`, and a failed free leaves
// it. C2: pages of the kernel, or used before by this process. C3: `held_bytes` has a page to spare wherever the driver promises no alignment, and `acquire`
// checks that the region ends inside the block. C4: `Numbering`. C5: exactly `held_bytes` are asked of the driver.
unsafe impl Source for CudaSource {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn is_pinned(&self) -> bool {
        true
    }

    fn held_bytes(&self, len_bytes: usize) -> usize {
        let whole_pages = len_bytes.checked_next_multiple_of(PAGE_BYTES).unwrap_or(usize::MAX);
        if whole_pages < CARVED_BYTES { whole_pages + PAGE_BYTES } else { whole_pages }
    }

    fn acquire(&self, len_bytes: usize) -> Result<Region, SourceError> {
        let _relaxed = Relaxed::enter();
        let _current = self.device.bind()?;
        let held_bytes = self.held_bytes(len_bytes);
        // SAFETY: a context is current on this thread (`Device::bind`).
        let block = unsafe { result::malloc_host(held_bytes, sys::CU_MEMHOSTALLOC_PORTABLE) }
            .map_err(|error| pinning_said("cuMemHostAlloc", error))?;
        let block = block.cast::<u8>();
        let skip = block.align_offset(PAGE_BYTES);
        let start = NonNull::new(block.wrapping_add(skip)).filter(|_| skip + len_bytes <= held_bytes);
        let Some((block, start)) = NonNull::new(block).map(Block).zip(start) else {
            // SAFETY: just allocated, and nobody has seen it.
            let _leaked = unsafe { result::free_host(block.cast()) };
            return Err(SourceError::new("cuMemHostAlloc", "the driver's block holds no page-aligned region"));
        };
        if skip != 0 {
            self.shifted.lock().insert(start.as_ptr().addr(), block);
        }
        Ok(Region::new(start, len_bytes, self.numbering.next()))
    }

    unsafe fn release(&self, region: Region) -> Result<(), SourceError> {
        let _relaxed = Relaxed::enter();
        let _current = self.device.bind()?;
        let block = self.block_of(region.start());
        // SAFETY: the caller's promise: allocated by `acquire`, not freed, and read by no device.
        unsafe { result::free_host(block.0.as_ptr().cast()) }.map_err(|error| driver_said("cuMemFreeHost", error))
    }

    fn needs_gpu(&self) -> bool {
        true
    }

    fn release_waits(&self) -> bool {
        true
    }
}
