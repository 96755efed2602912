//! Where other threads lay buffers that belong to a shard: one word, no lock.
//!
//! ```text
//!   word = address of the newest entry | free places (low bits)
//!
//!   push     one compare-exchange: the entry goes in front of the chain, one place is used up
//!   collect  one compare-exchange: takes the whole chain, adds places for the next pushes
//!   empty    one exchange: takes the chain and the places
//!   seal     the word becomes SEALED: every later push is handed back
//! ```
//!
//! A place is the right to keep one buffer (see `places`). Keeping some of them in the word lets a thread that only puts
//! work on this one cache line: it pays with a place that the taker of an earlier buffer freed.
//!
//! A push never follows the address that it found, and a collector takes the chain as a whole, so an address that comes
//! again while a push is under way does no harm.
//!
//! - (inbox I1) An entry behind the word came out of a box in `push`; only the one exchange that took the word may follow
//!   it, and gives each back as a box.
#![allow(unsafe_code)] // The chain in the word: one access per entry of a taken chain.

use super::entry::Entry;
use crate::sync::atomic::{AtomicPtr, Ordering};
use std::ptr::{self, NonNull};

/// The alignment of an entry leaves this many bits.
const PLACES_MASK: usize = align_of::<Entry<()>>() - 1;

/// No entry and more places than a word may hold.
const SEALED: usize = PLACES_MASK;

/// More than a word may hold is never left in one.
pub(super) const MOST_PLACES: u32 = 31;

pub(super) struct RemoteList<T> {
    word: AtomicPtr<Entry<T>>,
}

/// Why a push gave its entry back.
pub(super) enum Unkept<T> {
    /// Nobody left a place for it here.
    NoPlace(Box<Entry<T>>),
    /// The front was sealed.
    Sealed(Box<Entry<T>>),
}

impl<T> RemoteList<T> {
    pub(super) fn new() -> Self {
        Self { word: AtomicPtr::new(word(0)) }
    }

    /// Puts `entry` in; it uses up a place of the word or of those `given` with it. The rest of the given ones stay in the
    /// word; returns how many found no room there.
    pub(super) fn push(&self, mut entry: Box<Entry<T>>, given: u32) -> Result<u32, Unkept<T>> {
        // Relaxed: a guess that the exchange confirms.
        let mut found = self.word.load(Ordering::Relaxed);
        loop {
            if found.addr() == SEALED {
                return Err(Unkept::Sealed(entry));
            }
            let Some(left) = (places_of(found) + given).checked_sub(1) else { return Err(Unkept::NoPlace(entry)) };
            let kept = left.min(MOST_PLACES);
            entry.below = NonNull::new(found.map_addr(|addr| addr & !PLACES_MASK));
            let entry_alone = Box::into_raw(entry);
            let with_places = entry_alone.map_addr(|addr| addr | kept as usize);
            // AcqRel: the collector sees the entry as it was written; and this thread sees what a collector that came
            // just before did first, which `whereabouts` builds on. Relaxed on failure: only another guess.
            match self.word.compare_exchange_weak(found, with_places, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return Ok(left - kept),
                Err(now) => found = now,
            }
            // SAFETY: (inbox I1) the exchange failed, so the entry is still this thread's alone.
            entry = unsafe { Box::from_raw(entry_alone) };
        }
    }

    /// Whether entries wait and how many places are left, without taking the line away from anybody.
    #[inline]
    pub(super) fn look(&self) -> (bool, u32) {
        // Relaxed: a collector's exchange follows where it matters.
        let found = self.word.load(Ordering::Relaxed);
        if found.addr() == SEALED { (false, 0) } else { (found.addr() > PLACES_MASK, places_of(found)) }
    }

    /// Takes all entries out, oldest first, and adds to the places that are left, from those `offered`, up to `enough`;
    /// returns how many were added. Only before `seal`, which the caller's lock keeps away.
    pub(super) fn collect(&self, offered: u32, enough: u32) -> (Chain<T>, u32) {
        debug_assert!(enough <= MOST_PLACES);
        let mut found = self.word.load(Ordering::Relaxed);
        loop {
            let added = enough.saturating_sub(places_of(found)).min(offered);
            let left = word(places_of(found) + added);
            // AcqRel: sees the entries as they were written; and a later push sees what this thread did before, so the
            // exchange is made even where it changes nothing.
            match self.word.compare_exchange_weak(found, left, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return (Chain::oldest_first(found), added),
                Err(now) => found = now,
            }
        }
    }

    /// Takes all entries and all places out. Only before `seal`.
    pub(super) fn empty(&self) -> (Chain<T>, u32) {
        self.leave(word(0))
    }

    /// As `empty`, for the last time: from here on every push is handed back.
    pub(super) fn seal(&self) -> (Chain<T>, u32) {
        self.leave(ptr::without_provenance_mut(SEALED))
    }

    fn leave(&self, word: *mut Entry<T>) -> (Chain<T>, u32) {
        // AcqRel: as in `collect`.
        let found = self.word.swap(word, Ordering::AcqRel);
        if found.addr() == SEALED { (Chain { next: None }, 0) } else { (Chain::oldest_first(found), places_of(found)) }
    }
}

impl<T> Drop for RemoteList<T> {
    fn drop(&mut self) {
        drop(self.seal());
    }
}

fn word<T>(places: u32) -> *mut Entry<T> {
    ptr::without_provenance_mut(places as usize)
}

#[expect(clippy::cast_possible_truncation, reason = "six bits")]
fn places_of<T>(word: *mut Entry<T>) -> u32 {
    (word.addr() & PLACES_MASK) as u32
}

/// Entries taken out of an inbox.
pub(super) struct Chain<T> {
    next: Option<Box<Entry<T>>>,
}

impl<T> Chain<T> {
    /// Turns the chain behind `found` round: it was built newest first.
    fn oldest_first(found: *mut Entry<T>) -> Self {
        let mut reversed = None;
        let mut next = NonNull::new(found.map_addr(|addr| addr & !PLACES_MASK));
        while let Some(entry) = next {
            // SAFETY: (inbox I1) the caller's exchange took the word, so this thread alone has the chain, and each
            // entry of it is visited once.
            let mut entry = unsafe { Box::from_raw(entry.as_ptr()) };
            next = entry.below;
            entry.below = reversed.map(|before| NonNull::from(Box::leak(before)));
            reversed = Some(entry);
        }
        Self { next: reversed }
    }
}

impl<T> Iterator for Chain<T> {
    type Item = Box<Entry<T>>;

    fn next(&mut self) -> Option<Box<Entry<T>>> {
        let mut entry = self.next.take()?;
        // SAFETY: (inbox I1) leaked in `oldest_first` and reachable from nowhere else.
        self.next = entry.below.take().map(|next| unsafe { Box::from_raw(next.as_ptr()) });
        Some(entry)
    }
}

impl<T> Drop for Chain<T> {
    fn drop(&mut self) {
        for _ in self {}
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn entries_come_out_oldest_first_and_places_are_kept_straight() {
        let inbox = RemoteList::new();
        let entry = |value| Entry::new_at(0, 0, 10, value);
        assert!(matches!(inbox.push(entry(0), 0), Err(Unkept::NoPlace(_))));
        assert!(matches!(inbox.push(entry(1), 3), Ok(0)));
        assert!(matches!(inbox.push(entry(2), 0), Ok(0)));
        assert_eq!(inbox.look(), (true, 1));
        let (chain, added) = inbox.collect(9, 4);
        assert_eq!((chain.map(|entry| **entry).collect::<Vec<_>>(), added), (vec![1, 2], 3));
        assert_eq!(inbox.look(), (false, 4));
        assert!(matches!(inbox.push(entry(3), 40), Ok(12)));
        let (chain, places) = inbox.empty();
        assert_eq!((chain.count(), places), (1, MOST_PLACES));
        assert_eq!(inbox.seal().1, 0);
        assert!(matches!(inbox.push(entry(4), 1), Err(Unkept::Sealed(_))));
        assert_eq!((inbox.look(), inbox.seal().1), ((false, 0), 0));
    }
}

#[cfg(all(test, loom))]
mod loom_models {
    use super::*;
    use loom::sync::Arc;

    #[test]
    fn loom_every_push_is_collected_or_handed_back_once() {
        loom::model(|| {
            let inbox = Arc::new(RemoteList::new());
            let pushers = [1u32, 2].map(|value| {
                let inbox = inbox.clone();
                loom::thread::spawn(move || inbox.push(Entry::new_at(0, 0, 10, value), 1).is_ok())
            });
            let early = inbox.collect(0, 0).0.count();
            let late = inbox.seal().0.count();
            let kept = pushers.map(|pusher| pusher.join().unwrap());
            assert_eq!(early + late, kept.iter().filter(|&&kept| kept).count());
        });
    }

    #[test]
    fn loom_a_place_is_used_once() {
        loom::model(|| {
            let inbox = Arc::new(RemoteList::new());
            assert_eq!(inbox.collect(1, 1).1, 1);
            let other = inbox.clone();
            let there = loom::thread::spawn(move || other.push(Entry::new_at(0, 0, 10, 1), 0).is_ok());
            let here = inbox.push(Entry::new_at(0, 0, 10, 2), 0).is_ok();
            assert!(here ^ there.join().unwrap());
            assert_eq!((inbox.look().1, inbox.empty().0.count()), (0, 1));
        });
    }
}
