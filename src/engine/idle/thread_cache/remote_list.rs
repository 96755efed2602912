//! The remote free list: buffers that other threads put into a shard, in one word and without a lock.
//!
//! ```text
//!   word = address of the newest entry | permits (low bits)
//!
//!   push     one compare-exchange: prepends the entry, uses one permit
//!   collect  one compare-exchange: takes the whole chain, adds permits for the next pushes
//!   empty    one exchange: takes the chain and the permits
//!   seal     the word becomes SEALED: every later push fails
//! ```
//!
//! Permits in the word let a thread that only puts work on this one cache line: it uses a permit that the take of an
//! earlier buffer freed (see `permits`).
//!
//! This is a Treiber stack (as mimalloc's `thread_free`) that is only ever taken as a whole. A push never dereferences the
//! address that it read, so the ABA problem does not arise.
//!
//! - **remote-I1**: An entry behind the word was leaked from its box in `push`; only the thread whose exchange took the
//!   word follows it, and makes each entry a box again.
#![allow(unsafe_code)] // The chain behind the word.

use super::entry::Entry;
use pinpool_os::sync::atomic::{AtomicPtr, Ordering};
use std::ptr::{self, NonNull};

/// The low bits that the alignment of an entry leaves free.
const PERMITS_MASK: usize = align_of::<Entry<()>>() - 1;

/// No entry and more permits than a word may hold.
const SEALED: usize = PERMITS_MASK;

/// The most permits that a word holds.
pub(super) const PERMITS_MAX: u32 = 31;

pub(super) struct RemoteList<T> {
    word: AtomicPtr<Entry<T>>,
}

/// Why a push failed; returns the entry.
pub(super) enum PushError<T> {
    /// There is no permit for it here.
    NoPermit(Box<Entry<T>>),
    /// The cache is sealed, or does not know the class.
    Sealed(Box<Entry<T>>),
}

impl<T> RemoteList<T> {
    pub(super) fn new() -> Self {
        Self { word: AtomicPtr::new(word(0)) }
    }

    /// Pushes `entry`, which uses a permit of the word or one of those `granted`. The rest of these stay in the word;
    /// returns how many it could not hold.
    pub(super) fn push(&self, mut entry: Box<Entry<T>>, granted: u32) -> Result<u32, PushError<T>> {
        // Relaxed: a guess that the exchange confirms.
        let mut found = self.word.load(Ordering::Relaxed);
        loop {
            if found.addr() == SEALED {
                return Err(PushError::Sealed(entry));
            }
            let Some(left) = (permits_of(found) + granted).checked_sub(1) else {
                return Err(PushError::NoPermit(entry));
            };
            let kept = left.min(PERMITS_MAX);
            entry.set_pushed_before(NonNull::new(found.map_addr(|addr| addr & !PERMITS_MASK)));
            let entry_alone = Box::into_raw(entry);
            let with_permits = entry_alone.map_addr(|addr| addr | kept as usize);
            // AcqRel: the collector sees the entry as it was written, and this thread sees what the collector before it
            // did first, which the occupancy bitmap relies on. Relaxed on failure: another guess.
            match self.word.compare_exchange_weak(found, with_permits, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return Ok(left - kept),
                Err(now) => found = now,
            }
            // SAFETY: (remote-I1) the exchange failed, so this thread still owns the entry alone.
            entry = unsafe { Box::from_raw(entry_alone) };
        }
    }

    /// Whether there are entries, and how many permits; only reads the line.
    #[inline]
    pub(super) fn peek(&self) -> (bool, u32) {
        // Relaxed: where it matters, the exchange of `collect` follows.
        let found = self.word.load(Ordering::Relaxed);
        if found.addr() == SEALED { (false, 0) } else { (found.addr() > PERMITS_MASK, permits_of(found)) }
    }

    /// Takes all entries, oldest first, and adds permits from those `offered` until the word has `enough`; returns how many
    /// it added. Never after `seal`: both are called under the shard's lock.
    pub(super) fn collect(&self, offered: u32, enough: u32) -> (EntryChain<T>, u32) {
        debug_assert!(enough <= PERMITS_MAX);
        let mut found = self.word.load(Ordering::Relaxed);
        loop {
            let added = enough.saturating_sub(permits_of(found)).min(offered);
            let left = word(permits_of(found) + added);
            // AcqRel: sees the entries as they were written, and a later push sees what this thread did before. That is
            // why the exchange is made even if it changes nothing.
            match self.word.compare_exchange_weak(found, left, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return (EntryChain::oldest_first(found), added),
                Err(now) => found = now,
            }
        }
    }

    /// Takes all entries and permits. Never after `seal`.
    pub(super) fn empty(&self) -> (EntryChain<T>, u32) {
        self.replace(word(0))
    }

    /// Takes all entries and permits as `empty` does, for the last time: every later push fails.
    pub(super) fn seal(&self) -> (EntryChain<T>, u32) {
        self.replace(ptr::without_provenance_mut(SEALED))
    }

    fn replace(&self, word: *mut Entry<T>) -> (EntryChain<T>, u32) {
        // AcqRel: as in `collect`.
        let found = self.word.swap(word, Ordering::AcqRel);
        if found.addr() == SEALED {
            (EntryChain { next: None }, 0)
        } else {
            (EntryChain::oldest_first(found), permits_of(found))
        }
    }
}

impl<T> Drop for RemoteList<T> {
    fn drop(&mut self) {
        drop(self.seal());
    }
}

fn word<T>(permits: u32) -> *mut Entry<T> {
    ptr::without_provenance_mut(permits as usize)
}

#[expect(clippy::cast_possible_truncation, reason = "six bits")]
fn permits_of<T>(word: *mut Entry<T>) -> u32 {
    (word.addr() & PERMITS_MASK) as u32
}

/// Entries taken from a remote free list.
pub(super) struct EntryChain<T> {
    next: Option<Box<Entry<T>>>,
}

impl<T> EntryChain<T> {
    /// Reverses the chain behind `found`, which is newest first.
    fn oldest_first(found: *mut Entry<T>) -> Self {
        let mut reversed = None;
        let mut next = NonNull::new(found.map_addr(|addr| addr & !PERMITS_MASK));
        while let Some(entry) = next {
            // SAFETY: (remote-I1) the caller's exchange took the word, so this thread owns the chain alone, and visits each
            // entry once.
            let mut entry = unsafe { Box::from_raw(entry.as_ptr()) };
            next = entry.pushed_before();
            entry.set_pushed_before(reversed.map(|before| NonNull::from(Box::leak(before))));
            reversed = Some(entry);
        }
        Self { next: reversed }
    }
}

impl<T> Iterator for EntryChain<T> {
    type Item = Box<Entry<T>>;

    fn next(&mut self) -> Option<Box<Entry<T>>> {
        let mut entry = self.next.take()?;
        let next = entry.pushed_before();
        entry.set_pushed_before(None);
        // SAFETY: (remote-I1) leaked in `oldest_first`, and only this chain refers to it.
        self.next = next.map(|next| unsafe { Box::from_raw(next.as_ptr()) });
        Some(entry)
    }
}

impl<T> Drop for EntryChain<T> {
    fn drop(&mut self) {
        for _ in self {}
    }
}

#[cfg(all(test, not(pinpool_loom)))]
mod tests {
    use super::*;

    #[test]
    fn entries_are_taken_oldest_first_and_permits_add_up() {
        let list = RemoteList::new();
        let entry = |value| Entry::new_at(0, 0, 10, value);
        assert!(matches!(list.push(entry(0), 0), Err(PushError::NoPermit(_))));
        assert!(matches!(list.push(entry(1), 3), Ok(0)));
        assert!(matches!(list.push(entry(2), 0), Ok(0)));
        assert_eq!(list.peek(), (true, 1));
        let (chain, added) = list.collect(9, 4);
        assert_eq!((chain.map(|entry| **entry).collect::<Vec<_>>(), added), (vec![1, 2], 3));
        assert_eq!(list.peek(), (false, 4));
        assert!(matches!(list.push(entry(3), 40), Ok(12)));
        let (chain, permits) = list.empty();
        assert_eq!((chain.count(), permits), (1, PERMITS_MAX));
        assert_eq!(list.seal().1, 0);
        assert!(matches!(list.push(entry(4), 1), Err(PushError::Sealed(_))));
        assert_eq!((list.peek(), list.seal().1), ((false, 0), 0));
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
                loom::thread::spawn(move || list.push(Entry::new_at(0, 0, 10, value), 1).is_ok())
            });
            let early = list.collect(0, 0).0.count();
            let late = list.seal().0.count();
            let kept = pushers.map(|pusher| pusher.join().unwrap());
            assert_eq!(early + late, kept.iter().filter(|&&kept| kept).count());
        });
    }

    #[test]
    fn loom_a_permit_is_used_once() {
        loom::model(|| {
            let list = Arc::new(RemoteList::new());
            assert_eq!(list.collect(1, 1).1, 1);
            let other = list.clone();
            let there = loom::thread::spawn(move || other.push(Entry::new_at(0, 0, 10, 1), 0).is_ok());
            let here = list.push(Entry::new_at(0, 0, 10, 2), 0).is_ok();
            assert!(here ^ there.join().unwrap());
            assert_eq!((list.peek().1, list.empty().0.count()), (0, 1));
        });
    }
}
