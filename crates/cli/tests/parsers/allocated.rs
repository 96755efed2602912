//! The most bytes that a thread had allocated at one time.
#![allow(unsafe_code)] // Implements the unsafe `GlobalAlloc`.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static LIVE: Cell<usize> = const { Cell::new(0) };
    static PEAK: Cell<usize> = const { Cell::new(0) };
}

/// Forgets earlier peaks of the calling thread, and returns what it has allocated now.
pub(crate) fn start() -> usize {
    PEAK.set(LIVE.get());
    LIVE.get()
}

/// Most bytes that the calling thread had allocated at one time since [`start`].
pub(crate) fn peak() -> usize {
    PEAK.get()
}

struct MeasuringAllocator;

// SAFETY: every call is passed on to the system's allocator; counting touches no memory of the caller.
unsafe impl GlobalAlloc for MeasuringAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.set(LIVE.get().wrapping_add(layout.size()));
        PEAK.set(PEAK.get().max(LIVE.get()));
        // SAFETY: the caller's promise, passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // Saturating: another thread may have allocated the block.
        LIVE.set(LIVE.get().saturating_sub(layout.size()));
        // SAFETY: the caller's promise, passed on.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: MeasuringAllocator = MeasuringAllocator;
