//! A buffer with the header that the thread cache needs while the buffer is idle.
//!
//! The header travels with the buffer, so neither a request nor a return allocates, and a buffer changes hands as one pointer.
//! Only the cache uses the links, and they are valid only while the entry is idle.
//!
//! The *home* of an entry is the shard of the thread that took it last. Threads are numbered in the order in which they first use
//! a pool, and this number, the *slot*, selects a thread's own shard. Two threads may share a shard, which is correct but slower.
#![allow(unsafe_code)] // `Send` and `Sync` despite the links; a value is moved out of memory that is reused.

use pinpool_os::sync::unmodeled::{AtomicPtr, AtomicU32, Mutex, Ordering};
use std::cell::Cell;
use std::mem::MaybeUninit;
use std::ops::{Deref, DerefMut};
use std::ptr;

/// Maximum number of unwrapped entries that leave their memory for later entries. Further memory returns to the allocator.
const SPARE_MAX: usize = 64;

/// The position of an idle entry in the list of its class. It is the first field of an entry, and the whole of a list's head.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Links {
    /// The entry that was put next. In a head, the oldest entry.
    pub(super) above: *mut Links,
    /// The entry that was put before this one. In a head, the newest entry; in a remote list, the entry that was pushed before.
    pub(super) below: *mut Links,
}

impl Links {
    pub(super) const NONE: Self = Self { above: ptr::null_mut(), below: ptr::null_mut() };
}

/// An element of the cache: a value, its class, and its links while it is idle.
///
/// Because of the alignment, two entries share no cache line, and no entry has the address 1, which marks a sealed remote list.
/// The header and the first 16 bytes of the value are one cache line.
#[derive(Debug)]
#[repr(C, align(64))]
pub(in crate::engine) struct Entry<T> {
    pub(super) links: Links,
    /// Order of the last put in its shard; the age is in the upper bits (`free_list`).
    pub(super) order: u64,
    /// Address of the shard that may keep the entry by the fast path (the shard of the thread that took the entry last), or
    /// null. Compared, never dereferenced.
    shard: AtomicPtr<()>,
    /// A number that the user of the cache stores.
    stamp: AtomicU32,
    pub(super) class: u16,
    /// Number of the shard to which the entry is returned: the shard of the thread that took the entry last. In a new entry,
    /// the slot of the thread that created it.
    pub(super) home: u16,
    /// Bytes that this entry adds to the sum of idle bytes.
    pub(super) bytes: usize,
    value: T,
}

// SAFETY: only the free list or remote list that contains the entry follows its links (list-I1, remote-I1). To any other thread
// that has the entry the links are numbers.
unsafe impl<T: Send> Send for Entry<T> {}

// SAFETY: as above; `&Entry` gives access only to the value and to numbers.
unsafe impl<T: Sync> Sync for Entry<T> {}

impl<T> Entry<T> {
    /// Wraps `value`, which counts as `bytes`. The home of the entry is the calling thread's shard.
    #[cfg(all(test, not(pinpool_loom)))]
    pub(in crate::engine) fn new(class: u32, bytes: usize, value: T) -> Box<Self> {
        Self::new_at(current_slot(), class, bytes, value)
    }

    #[cfg(test)]
    pub(super) fn new_at(home: u16, class: u32, bytes: usize, value: T) -> Box<Self> {
        Box::new(Self::with_home(home, class, bytes, value))
    }

    /// Creates an entry with the home `home`. A class above 65,534 becomes 65,535, which no cache has.
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

    /// Returns the size class under which the entry is put and taken.
    pub(in crate::engine) fn class(&self) -> u32 {
        u32::from(self.class)
    }

    /// Returns the bytes that this entry adds to the sum of idle bytes.
    pub(in crate::engine) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the number that [`set_stamp`](Entry::set_stamp) stored last; 0 at first. The cache does not use it.
    #[inline(always)]
    pub(in crate::engine) fn stamp(&self) -> u32 {
        // Relaxed: the synchronization that made a thread the only owner also made the stores of all earlier threads visible.
        self.stamp.load(Ordering::Relaxed)
    }

    /// Stores a number next to the header, on the cache line that requests and returns touch anyway.
    #[inline(always)]
    pub(in crate::engine) fn set_stamp(&self, stamp: u32) {
        self.stamp.store(stamp, Ordering::Relaxed);
    }

    /// Returns whether the shard at `shard`, which is not null, may keep the entry by the fast path.
    #[inline(always)]
    pub(in crate::engine) fn is_open_to<S>(&self, shard: *const S) -> bool {
        // Relaxed, for the same reason as in `stamp`.
        ptr::eq(self.shard.load(Ordering::Relaxed), shard.cast())
    }

    /// Lets the shard at `shard` keep the entry by the fast path.
    pub(super) fn set_shard<S>(&self, shard: *const S) {
        self.shard.store(shard.cast_mut().cast(), Ordering::Relaxed);
    }

    /// Makes the next put of this entry take the slow path.
    #[inline]
    pub(in crate::engine) fn close_to_fast_path(&self) {
        self.set_shard(ptr::null::<()>());
    }
}

/// Memory of unwrapped entries, reused for later entries: allocating whole cache lines takes longer than carving a buffer.
#[derive(Debug)]
pub(in crate::engine) struct SpareEntries<T>(Mutex<Vec<Box<MaybeUninit<Entry<T>>>>>);

impl<T> Default for SpareEntries<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T> SpareEntries<T> {
    /// Wraps the result of `value()`, which counts as `bytes`. The home of the entry is the calling thread's shard.
    #[inline(always)] // Otherwise the value is copied twice, and so is a value that is made before the call.
    pub(in crate::engine) fn wrap(&self, class: u32, bytes: usize, value: impl FnOnce() -> T) -> Box<Entry<T>> {
        let (spare, home) = (self.0.lock().pop(), current_slot());
        Box::write(spare.unwrap_or_else(Box::new_uninit), Entry::with_home(home, class, bytes, value()))
    }

    /// Unwraps `entry`, and returns what `part` takes from its value. Keeps the memory of the entry for a later one, unless
    /// [`SPARE_MAX`] are kept already.
    #[inline(always)] // Otherwise the value is copied twice.
    pub(in crate::engine) fn unwrap<P>(&self, entry: Box<Entry<T>>, part: impl FnOnce(T) -> P) -> P {
        let entry = Box::leak(entry);
        // SAFETY: the value is read once: from here on this memory counts as uninitialized.
        let part = part(unsafe { ptr::read(&raw const entry.value) });
        // SAFETY: this is the box that was leaked above, and the contents of `MaybeUninit` need not be initialized.
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
    /// The slot of this thread. It has no destructor, so it can be read until the thread ends.
    static SLOT: Cell<u16> = const { Cell::new(UNSET) };
}

/// Returns the slot of the calling thread. The first call assigns it.
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
