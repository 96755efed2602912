//! A hit touches the heap not at all: a global allocator counts.
#![allow(unsafe_code)] // Counts the calls of the global allocator.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use pinpool::{Backend, Pool};

struct Counting;

thread_local! {
    static CALLS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: every call is passed on to the system's allocator; counting touches no memory of the caller.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        CALLS.set(CALLS.get() + 1);
        // SAFETY: the caller's promise, passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        CALLS.set(CALLS.get() + 1);
        // SAFETY: the caller's promise, passed on.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn hits_allocate_nothing_on_the_heap() {
    let pool = Pool::builder().without_env().backend(Backend::Heap).build().unwrap();
    let lens = [100, 5_000, 100_000, 1 << 20];
    // Once round, so that every class has its buffer and every table its size.
    let round = || {
        let held = lens.map(|len| pool.get(len).unwrap());
        assert!(held.iter().all(|buffer| !buffer.is_empty()));
    };
    round();
    let before = CALLS.get();
    assert!(before > 0, "the counting allocator is not in place");
    (0..1000).for_each(|_| round());
    assert_eq!(CALLS.get() - before, 0);
    assert_eq!(pool.stats().hits, 4000);
}
