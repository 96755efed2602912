//! The memory of a pool: the driver's own pinned memory, allocated in the program's context, portable and mapped, so that
//! the driver answers queries about it as for the program's own allocations.
//!
//! The blocks are recorded by address, since a program that frees an address twice must not free a block of the pool.

use std::ffi::c_void;
use std::num::NonZero;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pinpool::PinnedBy;
use pinpool::source::{PAGE_BYTES, Region, Retry, Source, SourceError};
use pinpool::unstable::backend::{BuiltInSource, GRANULE_BYTES};

use crate::contexts::Context;
use crate::driver::{Code, Driver, SERVED_FLAGS, is_refused_by_capture};
use crate::driver_blocks::{DriverBlock, DriverBlocks};
use pinpool_os::sync::unmodeled::Mutex;

/// The blocks of all pools, by the address of their first byte.
static BLOCKS: Mutex<DriverBlocks> = Mutex::new(DriverBlocks::new());

/// Returns whether the address lies in a block of a pool.
pub(crate) fn is_pool_memory(address: usize) -> bool {
    BLOCKS.lock().contains(address)
}

/// Returns whether the address lies in a block of a pool, in a forked child. If another thread of the parent held the lock
/// during the fork, the address counts as inside.
pub(crate) fn is_parents_pool_memory(address: usize) -> bool {
    BLOCKS.try_lock().is_none_or(|blocks| blocks.contains(address))
}

/// A source of pinned memory in one context.
#[derive(Debug)]
pub(crate) struct HostSource {
    driver: &'static Driver,
    context: Arc<Context>,
    acquired: AtomicU64,
}

impl HostSource {
    pub(crate) fn new(driver: &'static Driver, context: Arc<Context>) -> Self {
        Self { driver, context, acquired: AtomicU64::new(0) }
    }

    fn error(&self, call: &'static str, code: Code) -> SourceError {
        let retry = if is_refused_by_capture(code) { Retry::Soon } else { Retry::Later };
        SourceError::new(call, self.driver.name(code)).with_code(code.into()).with_retry(retry)
    }

    fn gone() -> SourceError {
        SourceError::new("cuMemHostAlloc", "the context is gone")
    }
}

// SAFETY: source-C1: `cuMemHostAlloc` maps pinned memory at a fixed address until `cuMemFreeHost`, and a failed free leaves
// it mapped; after the end of its context the memory is not accessed (preload-I4). source-C2: the pages come from the kernel,
// or were used before by this process. source-C3: the region begins at a page, and ends inside the block. source-C4: a
// counter numbers the regions. source-C5: exactly `held_bytes` are requested from the driver. source-C6: no lock of a pool is taken.
unsafe impl Source for HostSource {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn pinned_by(&self) -> Option<PinnedBy> {
        Some(PinnedBy::Driver)
    }

    fn held_bytes(&self, len_bytes: usize) -> usize {
        let whole_pages = len_bytes.checked_next_multiple_of(PAGE_BYTES).unwrap_or(usize::MAX);
        // A small block of the driver may begin anywhere in a page.
        if whole_pages < GRANULE_BYTES { whole_pages + PAGE_BYTES } else { whole_pages }
    }

    fn acquire(&self, len_bytes: usize) -> Result<Region, SourceError> {
        let held_bytes = self.held_bytes(len_bytes);
        let acquired = self.context.while_alive(|handle| {
            let _entered = self.driver.enter(handle)?;
            let block = self.driver.host_alloc(held_bytes, SERVED_FLAGS)?;
            let at = block.addr().get();
            if at.next_multiple_of(PAGE_BYTES) - at + len_bytes > held_bytes {
                // SAFETY: the block was allocated above, and was not returned to the caller.
                let _freed = unsafe { self.driver.free_host(block) };
                return Ok(None);
            }
            // The block is recorded before the context can end, since that end forgets the context's blocks.
            BLOCKS.lock().insert(at, DriverBlock { bytes: held_bytes, context: self.context.number });
            Ok(Some(block))
        });
        let acquired = acquired.ok_or_else(Self::gone)?.map_err(|code| self.error("cuMemHostAlloc", code))?;
        let unaligned = || SourceError::new("cuMemHostAlloc", "the driver's block holds no page-aligned region");
        let block = acquired.ok_or_else(unaligned)?;
        let to_page = |at: usize| at.next_multiple_of(PAGE_BYTES) - at;
        let start = block.cast::<u8>().map_addr(|at| at.saturating_add(to_page(at.get())));
        // Relaxed: the number publishes no other data.
        Ok(Region::new(start, len_bytes, self.acquired.fetch_add(1, Ordering::Relaxed)))
    }

    unsafe fn release(&self, region: &Region) -> Result<(), SourceError> {
        let released = self.context.while_alive(|handle| {
            let start = region.start().addr().get();
            let block = BLOCKS.lock().find_containing(start, region.len_bytes(), self.context.number);
            let missing = || SourceError::new("cuMemFreeHost", format!("no block of the pool holds {start:#x}"));
            let (at, block) = block.ok_or_else(missing)?;
            let _entered = self.driver.enter(handle).map_err(|code| self.error("cuCtxPushCurrent", code))?;
            // The block is removed before the call, since another thread may receive its address right after the free.
            BLOCKS.lock().remove(at);
            let block_start = region.start().cast::<c_void>().map_addr(|start| NonZero::new(at).unwrap_or(start));
            // SAFETY: `block_start` is the start of this region's block, which nothing uses any more, as the caller promises.
            let freed = unsafe { self.driver.free_host(block_start) };
            freed.inspect_err(|_| BLOCKS.lock().insert(at, block)).map_err(|code| self.error("cuMemFreeHost", code))
        });
        // If the context is gone, its memory is gone with it.
        released.unwrap_or(Ok(()))
    }

    fn blocks_on_release(&self) -> bool {
        true
    }

    fn built_in(&self) -> Option<&dyn BuiltInSource> {
        Some(self)
    }
}

impl BuiltInSource for HostSource {
    fn device_lost(&self) -> Option<SourceError> {
        self.context.while_alive(|_| ()).is_none().then(Self::gone)
    }

    fn while_mapped(&self, write: &mut dyn FnMut()) {
        let _gone = self.context.while_alive(|_| write());
    }
}

/// Forgets the blocks of a context that is gone, by its number. Other memory may get their addresses.
pub(crate) fn forget_blocks(context: u64) {
    BLOCKS.lock().forget(context);
}
