//! The calls of each thread to a global allocator, [`MeasuringAllocator`], and the most bytes that a thread had allocated at one time.
#![allow(unsafe_code)] // Implements the unsafe `GlobalAlloc`.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static CALLS: Cell<u64> = const { Cell::new(0) };
    static LIVE: Cell<usize> = const { Cell::new(0) };
    static PEAK: Cell<usize> = const { Cell::new(0) };
}

/// Allocations and frees made by the calling thread so far.
pub fn calls() -> u64 {
    CALLS.get()
}

/// Forgets earlier peaks of the calling thread, and returns what it has allocated now.
pub fn start() -> usize {
    PEAK.set(LIVE.get());
    LIVE.get()
}

/// Returns the most bytes that the calling thread had allocated at one time since [`start`].
pub fn peak() -> usize {
    PEAK.get()
}

/// The global allocator of a test binary that measures.
#[derive(Debug)]
pub struct MeasuringAllocator;

// SAFETY: every call is passed on to the system's allocator; counting touches no memory of the caller.
unsafe impl GlobalAlloc for MeasuringAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        CALLS.set(CALLS.get() + 1);
        LIVE.set(LIVE.get().wrapping_add(layout.size()));
        PEAK.set(PEAK.get().max(LIVE.get()));
        // SAFETY: the caller's promise, passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        CALLS.set(CALLS.get() + 1);
        // Saturating: another thread may have allocated the block.
        LIVE.set(LIVE.get().saturating_sub(layout.size()));
        // SAFETY: the caller's promise, passed on.
        unsafe { System.dealloc(block, layout) }
    }
}
