//! The remote list: buffers that other threads put into a shard, without a lock.
//!
//! A Treiber stack (as `thread_free` of mimalloc) that is only ever taken as a whole. A push never dereferences the address
//! that it read, so the ABA problem does not arise.
//!
//! - **remote-I1**: An entry in the list was leaked from its box in `push`; only the thread that exchanged the list follows it,
//!   and makes each entry a box again.
#![allow(unsafe_code)] // The chain of entries.

use super::entry::Entry;
use pinpool_os::sync::atomic::{AtomicPtr, Ordering};
use std::ptr;

/// In place of an entry: every later push fails.
const SEALED: usize = 1;

/// The entry pushed last, or null.
pub(super) struct RemoteList<T>(AtomicPtr<Entry<T>>);

impl<T> RemoteList<T> {
    pub(super) fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// Pushes `entry`; returns it if the list is sealed.
    pub(super) fn push(&self, mut entry: Box<Entry<T>>) -> Result<(), Box<Entry<T>>> {
        // Relaxed: a guess that the exchange confirms.
        let mut newest = self.0.load(Ordering::Relaxed);
        while newest.addr() != SEALED {
            entry.links.below = newest.cast();
            let pushed = Box::into_raw(entry);
            // AcqRel: the collector sees the entry as it was written, and this thread sees what the collector before it
            // did first, which the occupancy bitmap relies on. Relaxed on failure: another guess.
            match self.0.compare_exchange_weak(newest, pushed, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return Ok(()),
                Err(now) => newest = now,
            }
            // SAFETY: (remote-I1) the exchange failed, so this thread still owns the entry alone.
            entry = unsafe { Box::from_raw(pushed) };
        }
        Err(entry)
    }

    /// Whether there are entries; only reads the cache line.
    #[inline]
    pub(super) fn has_entries(&self) -> bool {
        // Relaxed: `take_all` follows if it matters.
        self.0.load(Ordering::Relaxed).addr() > SEALED
    }

    /// Exact under the shard's lock, under which `seal` is called.
    #[inline]
    pub(super) fn is_sealed(&self) -> bool {
        self.0.load(Ordering::Relaxed).addr() == SEALED
    }

    /// Takes all entries, oldest first. Never after `seal`: both are called under the shard's lock.
    pub(super) fn take_all(&self) -> Entries<T> {
        self.replace(ptr::null_mut())
    }

    /// Takes all entries for the last time.
    pub(super) fn seal(&self) -> Entries<T> {
        self.replace(ptr::without_provenance_mut(SEALED))
    }

    fn replace(&self, word: *mut Entry<T>) -> Entries<T> {
        // AcqRel: sees the entries as they were written, and a later push sees what this thread did before.
        let newest = self.0.swap(word, Ordering::AcqRel);
        Entries::oldest_first(if newest.addr() == SEALED { ptr::null_mut() } else { newest })
    }
}

impl<T> Drop for RemoteList<T> {
    fn drop(&mut self) {
        drop(self.seal());
    }
}

/// Entries taken from a remote list.
pub(super) struct Entries<T> {
    next: *mut Entry<T>,
}

impl<T> Entries<T> {
    /// Reverses the chain that begins at `newest`.
    fn oldest_first(newest: *mut Entry<T>) -> Self {
        let (mut reversed, mut next) = (ptr::null_mut::<Entry<T>>(), newest);
        while !next.is_null() {
            // SAFETY: (remote-I1) the caller's exchange took the list, so this thread owns the chain alone.
            let below = unsafe { &mut (*next).links.below };
            let before = std::mem::replace(below, reversed.cast());
            (reversed, next) = (next, before.cast());
        }
        Self { next: reversed }
    }
}

impl<T> Iterator for Entries<T> {
    type Item = Box<Entry<T>>;

    fn next(&mut self) -> Option<Box<Entry<T>>> {
        if self.next.is_null() {
            return None;
        }
        // SAFETY: (remote-I1) leaked in `push`, and only this chain refers to it.
        let entry = unsafe { Box::from_raw(self.next) };
        self.next = entry.links.below.cast();
        Some(entry)
    }
}

impl<T> Drop for Entries<T> {
    fn drop(&mut self) {
        self.for_each(drop);
    }
}

#[cfg(all(test, not(pinpool_loom)))]
mod tests {
    use super::*;

    #[test]
    fn entries_are_taken_oldest_first_until_the_list_is_sealed() {
        let list = RemoteList::new();
        let push = |value| list.push(Entry::new_at(0, 0, 10, value)).is_ok();
        assert!(push(1) && push(2) && push(3) && list.has_entries());
        assert_eq!(list.take_all().map(|entry| **entry).collect::<Vec<_>>(), [1, 2, 3]);
        assert!(!list.has_entries() && push(4) && !list.is_sealed());
        assert_eq!(list.seal().count(), 1);
        assert!(!push(5) && list.is_sealed() && !list.has_entries());
        assert_eq!(list.seal().count(), 0);
    }
}

#[cfg(all(test, pinpool_loom))]
mod loom_models {
    use super::*;
    use loom::sync::Arc;

    #[test]
    fn loom_every_push_is_collected_or_fails_once() {
        loom::model(|| {
            let list = Arc::new(RemoteList::new());
            let pushers = [1u32, 2].map(|value| {
                let list = list.clone();
                loom::thread::spawn(move || list.push(Entry::new_at(0, 0, 10, value)).is_ok())
            });
            let early = list.take_all().count();
            let late = list.seal().count();
            let kept = pushers.map(|pusher| pusher.join().unwrap());
            assert_eq!(early + late, kept.iter().filter(|&&kept| kept).count());
        });
    }
}
