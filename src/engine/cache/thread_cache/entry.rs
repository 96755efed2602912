//! A buffer with the header that the thread cache needs while the buffer is idle.
//!
//! The header travels with the buffer, so neither a request nor a return allocates, and a buffer changes hands as one pointer.
//! The links belong to the cache alone: they mean something only while the entry is idle.
//!
//! The *home* of an entry is the shard of the thread that took it last. Threads are numbered in the order in which they first use
//! a pool, and this number, the *slot*, selects a thread's own shard. Two threads may share a shard, which is correct but slower.
#![allow(unsafe_code)] // Send and Sync despite the links; moves a value out of memory that is kept.

use pinpool_os::sync::plain::Mutex;
use pinpool_os::sync::process::{AtomicPtr, AtomicU32, Ordering};
use std::cell::Cell;
use std::mem::MaybeUninit;
use std::ops::{Deref, DerefMut};
use std::ptr;

/// Entries with memory that is kept; the memory of further entries returns to the allocator.
const SPARE_MAX: usize = 64;

/// The position of an idle entry in the list of its class: the first field of an entry, and all there is of a list's head.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Links {
    /// Put next.
    pub(super) above: *mut Links,
    /// Put before. In a remote list, the entry pushed before.
    pub(super) below: *mut Links,
}

impl Links {
    pub(super) const NONE: Self = Self { above: ptr::null_mut(), below: ptr::null_mut() };
}

/// An element of the cache: a value, its class, and its links while it is idle.
///
/// The alignment keeps two entries off one cache line and leaves the address 1 to the remote list. The header and the first
/// 16 bytes of the value are one cache line.
#[derive(Debug)]
#[repr(C, align(64))]
pub(in crate::engine) struct Entry<T> {
    pub(super) links: Links,
    /// Order of the last put in its shard; the tick is in the upper bits (`free_list`).
    pub(super) order: u64,
    /// Address of the shard that may keep it by the fast path (the shard of the thread that took it last), or null; compared,
    /// never followed.
    shard: AtomicPtr<()>,
    /// A number for the user of the cache.
    stamp: AtomicU32,
    pub(super) class: u16,
    /// Number of the shard of the thread that took it last; of a new entry, the slot of its thread. It is returned to that shard.
    pub(super) home: u16,
    /// The part of this entry in the sum of idle bytes.
    pub(super) bytes: usize,
    value: T,
}

// SAFETY: only the free list or remote list that holds the entry follows its links (list-I1, remote-I1); to any other
// thread that has the entry they are numbers.
unsafe impl<T: Send> Send for Entry<T> {}

// SAFETY: as above; `&Entry` gives access to the value and the numbers only.
unsafe impl<T: Sync> Sync for Entry<T> {}

impl<T> Entry<T> {
    /// Wraps `value` of `bytes`; its home is the calling thread's shard.
    #[cfg(all(test, not(pinpool_loom)))]
    pub(in crate::engine) fn new(class: u32, bytes: usize, value: T) -> Box<Self> {
        Self::new_at(current_slot(), class, bytes, value)
    }

    #[cfg(test)]
    pub(super) fn new_at(home: u16, class: u32, bytes: usize, value: T) -> Box<Self> {
        Box::new(Self::with_home(home, class, bytes, value))
    }

    /// An entry that the shard of slot `home` keeps. No cache has a class above 65,534.
    #[inline]
    fn with_home(home: u16, class: u32, bytes: usize, value: T) -> Self {
        Self {
            links: Links::NONE,
            order: 0,
            shard: AtomicPtr::new(ptr::null_mut()),
            stamp: AtomicU32::new(0),
            class: u16::try_from(class).unwrap_or(u16::MAX),
            home,
            bytes,
            value,
        }
    }

    /// The size class under which it is put and taken.
    pub(in crate::engine) fn class(&self) -> u32 {
        u32::from(self.class)
    }

    /// The part of this entry in the sum of idle bytes.
    pub(in crate::engine) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The number that [`set_stamp`](Entry::set_stamp) stored last; 0 at first. The cache does not use it.
    #[inline(always)]
    pub(in crate::engine) fn stamp(&self) -> u32 {
        // Relaxed: a thread that has the entry alone comes after all threads that shared it.
        self.stamp.load(Ordering::Relaxed)
    }

    /// Stores a number next to the header, on the cache line that requests and returns touch anyway.
    #[inline(always)]
    pub(in crate::engine) fn set_stamp(&self, stamp: u32) {
        self.stamp.store(stamp, Ordering::Relaxed);
    }

    /// Returns whether the shard at `shard`, which is not null, may keep it by the fast path.
    #[inline(always)]
    pub(in crate::engine) fn is_of<S>(&self, shard: *const S) -> bool {
        // Relaxed, as the stamp.
        ptr::eq(self.shard.load(Ordering::Relaxed), shard.cast())
    }

    /// Lets the shard at `shard` keep the entry by the fast path.
    pub(super) fn set_shard<S>(&self, shard: *const S) {
        self.shard.store(shard.cast_mut().cast(), Ordering::Relaxed);
    }

    /// The next put takes the slow path.
    #[inline]
    pub(in crate::engine) fn close_to_fast_path(&self) {
        self.set_shard(ptr::null::<()>());
    }
}

/// Memory of unwrapped entries, for later entries: an allocation of whole cache lines takes longer than a carve.
#[derive(Debug)]
pub(in crate::engine) struct SpareEntries<T>(Mutex<Vec<Box<MaybeUninit<Entry<T>>>>>);

impl<T> Default for SpareEntries<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T> SpareEntries<T> {
    /// Wraps the result of `value()`, which counts as `bytes`; its home is the calling thread's shard.
    #[inline(always)] // Otherwise the value is copied twice, as it is if it is made before the call.
    pub(in crate::engine) fn wrap(&self, class: u32, bytes: usize, value: impl FnOnce() -> T) -> Box<Entry<T>> {
        let (spare, home) = (self.0.lock().pop(), current_slot());
        Box::write(spare.unwrap_or_else(Box::new_uninit), Entry::with_home(home, class, bytes, value()))
    }

    /// Unwraps the value of `entry`, and returns the `part` of it.
    #[inline(always)] // Otherwise the value is copied twice.
    pub(in crate::engine) fn unwrap<P>(&self, entry: Box<Entry<T>>, part: impl FnOnce(T) -> P) -> P {
        let entry = Box::leak(entry);
        // SAFETY: the value is read once: from the next line on, this is memory without one.
        let part = part(unsafe { ptr::read(&raw const entry.value) });
        // SAFETY: the box that was leaked, in which nothing needs to be initialized now.
        let memory = unsafe { Box::from_raw(ptr::from_mut(entry).cast::<MaybeUninit<Entry<T>>>()) };
        let mut spare = self.0.lock();
        if spare.len() < SPARE_MAX {
            spare.push(memory);
        }
        part
    }
}

impl<T> Deref for Entry<T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for Entry<T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

/// The slot of a thread that has none yet.
const UNSET: u16 = u16::MAX;

thread_local! {
    /// No destructor, so it can be read until the thread ends.
    static SLOT: Cell<u16> = const { Cell::new(UNSET) };
}

/// The slot of the calling thread.
#[inline]
pub(in crate::engine) fn current_slot() -> u16 {
    let slot = SLOT.get();
    if slot == UNSET { next_slot() } else { slot }
}

#[cold]
fn next_slot() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    // Relaxed: slots select shards and guard nothing.
    let slot = u16::try_from(NEXT.fetch_add(1, Ordering::Relaxed) % u32::from(UNSET)).unwrap_or(0);
    SLOT.set(slot);
    slot
}

#[cfg(all(test, not(pinpool_loom)))]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn the_memory_of_an_entry_serves_the_next_one_and_each_value_is_dropped_once() {
        let (spare, value) = (SpareEntries::default(), Arc::new(()));
        let entry = spare.wrap(3, 10, || value.clone());
        let at = ptr::from_ref(&*entry);
        spare.unwrap(entry, drop);
        assert_eq!(Arc::strong_count(&value), 1);
        let entry = spare.wrap(4, 20, || value.clone());
        assert_eq!((ptr::from_ref(&*entry), entry.class(), entry.bytes(), entry.stamp()), (at, 4, 20, 0));
        let more = (0..SPARE_MAX).map(|_| spare.wrap(0, 10, || value.clone()));
        for entry in more.chain([entry]).collect::<Vec<_>>() {
            spare.unwrap(entry, drop);
        }
        assert_eq!((spare.0.lock().len(), Arc::strong_count(&value)), (SPARE_MAX, 1));
    }

    #[test]
    fn threads_that_begin_one_after_the_other_have_distinct_slots_and_keep_them() {
        let slot = || {
            let slot = current_slot();
            assert_eq!(current_slot(), slot);
            slot
        };
        let mut slots: Vec<u16> = (0..4).map(|_| std::thread::spawn(slot).join().unwrap()).collect();
        slots.sort_unstable();
        slots.dedup();
        assert_eq!(slots.len(), 4);
    }
}
