//! A source for tests.
#![allow(unsafe_code)] // Implements the unsafe `Source`.

use super::{HeapSource, PinnedBy, Region, Source, SourceError};
// In a model another thread may run before each call.
use pinpool_os::sync::atomic::{AtomicU64, Ordering};

/// A heap of separate regions that counts them. `blocks_on_release` says whether releases count as waiting for copies.
#[derive(Debug)]
pub(crate) struct CountedHeap {
    heap: HeapSource,
    blocks_on_release: bool,
    /// The longest region that it provides.
    longest: usize,
    held: AtomicU64,
}

impl CountedHeap {
    pub(crate) fn new(blocks_on_release: bool) -> Self {
        Self { heap: HeapSource::new(), blocks_on_release, longest: usize::MAX, held: AtomicU64::new(0) }
    }

    /// A heap of regions of at most `longest` bytes.
    #[cfg(not(miri))]
    pub(crate) fn up_to(longest: usize) -> Self {
        Self { longest, ..Self::new(false) }
    }

    /// Returns the number of regions that were acquired and not released.
    pub(crate) fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }
}

// SAFETY: forwards every call.
unsafe impl Source for CountedHeap {
    fn name(&self) -> &'static str {
        "counted heap"
    }
    fn pinned_by(&self) -> Option<PinnedBy> {
        None
    }
    fn blocks_on_release(&self) -> bool {
        self.blocks_on_release
    }
    fn acquire(&self, len_bytes: usize) -> Result<Region, SourceError> {
        if len_bytes > self.longest {
            return Err(SourceError::new("counted heap", "refused"));
        }
        self.held.fetch_add(1, Ordering::Relaxed);
        self.heap.acquire(len_bytes)
    }
    unsafe fn release(&self, region: &Region) -> Result<(), SourceError> {
        self.held.fetch_sub(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { self.heap.release(region) }
    }
}
