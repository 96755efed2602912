//! The sequential core of one shard: what is idle, newest on top of its class, and in which order it came back.
//!
//! ```text
//!   last: F      class 3: top -> E -> B        recency: oldest -> A -> B -> C -> E -> newest
//!                class 7: top -> C -> A                 (all classes in one list)
//! ```
//!
//! Every operation is a handful of pointer writes, and as few as can be, since the lock's next exchange waits until they
//! have reached the cache. Hence `last`: what was laid down last joins the lists only when something else is laid down,
//! so a buffer that comes and goes is one pointer. The lists run through the entries themselves, so a shelf never
//! allocates after `new`. It knows no lock, no limit, no count and no other shelf.
//!
//! - (shelf I1) A linked entry came out of a box in `link`, is in exactly one class list and in the recency list of one
//!   shelf, and goes back into a box in `unlink`; `&mut self` is the only way to reach it meanwhile.
//! - (shelf I2) Stamps never fall along the recency list.
//! - (shelf I3) A class list is the recency list with the other classes left out, and `last` is newer
//!   than all of them.
//! - (shelf I4) `above` of a top and `newer` of the newest are never read: what they say is left over.
#![allow(unsafe_code)] // Two lists through one set of boxes: the two accesses at the end are the whole of it.

use super::entry::{Entry, Link};
use std::ptr::NonNull;

/// The stamp of a shelf without entries: later than any.
pub(super) const NOTHING: u32 = u32::MAX;

pub(super) struct FreeList<T> {
    last: Option<Box<Entry<T>>>,
    /// The newest of each class.
    tops: Box<[Link<T>]>,
    oldest: Link<T>,
    newest: Link<T>,
    /// From now on nothing is kept. The shelf itself does not mind; it stands here to be under the lock.
    pub(super) sealed: bool,
}

// SAFETY: (shelf I1) the entries behind the links belong to the shelf as boxes would.
unsafe impl<T: Send> Send for FreeList<T> {}

/// What a walk found.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Recount {
    pub(super) count: u64,
    pub(super) bytes: usize,
    /// Those that hold something.
    pub(super) classes: Vec<u32>,
}

impl<T> FreeList<T> {
    pub(super) fn new(classes: u32) -> Self {
        Self { last: None, tops: (0..classes).map(|_| None).collect(), oldest: None, newest: None, sealed: false }
    }

    /// Lays `entry` on top of its class, as the most recent of all. The caller has checked that the class exists.
    #[inline]
    pub(super) fn push(&mut self, entry: Box<Entry<T>>) {
        if let Some(before) = self.last.replace(entry) {
            self.link(before);
        }
    }

    #[inline]
    fn link(&mut self, mut entry: Box<Entry<T>>) {
        let (class, newest) = (entry.class as usize, self.newest);
        let top = self.tops[class];
        entry.below = top;
        entry.older = newest;
        if let Some(newest) = newest {
            // (shelf I2) A thread that read the coarse time late must not seem to come before those already here.
            let stamp = self.at(newest).stamp;
            if entry.stamp < stamp {
                entry.stamp = stamp;
            }
        }
        let entry = NonNull::from(Box::leak(entry));
        match newest {
            Some(newest) => self.at(newest).newer = Some(entry),
            None => self.oldest = Some(entry),
        }
        if let Some(top) = top {
            self.at(top).above = Some(entry);
        }
        self.tops[class] = Some(entry);
        self.newest = Some(entry);
    }

    /// The newest of `class`.
    #[inline]
    pub(super) fn take_newest(&mut self, class: u32) -> Option<Box<Entry<T>>> {
        if self.last.as_ref().is_some_and(|last| last.class == class) {
            return self.last.take();
        }
        let entry = (*self.tops.get(class as usize)?)?;
        Some(self.unlink(entry))
    }

    /// The one put back longest ago, whatever its class.
    pub(super) fn take_oldest(&mut self) -> Option<Box<Entry<T>>> {
        match self.oldest {
            Some(oldest) => Some(self.unlink(oldest)),
            None => self.last.take(),
        }
    }

    /// When the oldest was put back, or [`NOTHING`].
    pub(super) fn oldest_stamp(&mut self) -> u32 {
        match (self.oldest, &self.last) {
            (Some(oldest), _) => self.at(oldest).stamp,
            (None, Some(last)) => last.stamp,
            (None, None) => NOTHING,
        }
    }

    /// As `oldest_stamp`, but `last` does not count.
    pub(super) fn oldest_linked_stamp(&mut self) -> u32 {
        self.oldest.map_or(NOTHING, |oldest| self.at(oldest).stamp)
    }

    #[inline]
    fn unlink(&mut self, entry: NonNull<Entry<T>>) -> Box<Entry<T>> {
        let &mut Entry { above, below, newer, older, class, .. } = self.at(entry);
        // (shelf I4) What lies above or is newer counts only if the ends do not say that there is nothing.
        let newer = if self.newest == Some(entry) { None } else { newer };
        let above = if self.tops[class as usize] == Some(entry) { None } else { above };
        match above {
            None => self.tops[class as usize] = below,
            Some(above) => {
                self.at(above).below = below;
                if let Some(below) = below {
                    self.at(below).above = Some(above);
                }
            }
        }
        match newer {
            None => self.newest = older,
            Some(newer) => {
                self.at(newer).older = older;
                if let Some(older) = older {
                    self.at(older).newer = Some(newer);
                }
            }
        }
        if older.is_none() {
            self.oldest = newer;
        }
        // SAFETY: (shelf I1) made from a box in `link`, and the lines above took it out of both lists.
        unsafe { Box::from_raw(entry.as_ptr()) }
    }

    #[inline(always)]
    fn at(&mut self, mut entry: NonNull<Entry<T>>) -> &mut Entry<T> {
        // SAFETY: (shelf I1) `entry` was read from this shelf, so it is linked and alive; the borrow of the shelf lasts
        // as long as the one that is handed out, so there is no second one.
        unsafe { entry.as_mut() }
    }

    /// Walks both kinds of list, compares them and counts.
    pub(super) fn validate(&mut self) -> Result<Recount, String> {
        let mut recount = Recount::default();
        let mut by_recency: Vec<Vec<NonNull<Entry<T>>>> = self.tops.iter().map(|_| Vec::new()).collect();
        let (mut stamp, mut before, mut next) = (0, None, self.oldest);
        while let Some(node) = next {
            let last = self.newest == next;
            let entry = self.at(node);
            if entry.older != before {
                return Err(format!("entry {} from the oldest does not point back", recount.count));
            }
            if entry.stamp < stamp {
                return Err(format!("stamp {} after stamp {stamp}", entry.stamp));
            }
            recount.count += 1;
            recount.bytes += entry.bytes();
            stamp = entry.stamp;
            (before, next) = (Some(node), if last { None } else { entry.newer });
            by_recency[entry.class as usize].push(node);
        }
        if before != self.newest {
            return Err(format!("the walk of {} entries does not end at the newest", recount.count));
        }
        for (class, entries) in (0u32..).zip(&by_recency) {
            let mut next = self.tops[class as usize];
            let mut above = None;
            for &node in entries.iter().rev() {
                let entry = self.at(node);
                if next != Some(node) || above.is_some() && entry.above != above {
                    return Err(format!("class {class} is not in the order of recency"));
                }
                (above, next) = (next, entry.below);
            }
            if next.is_some() {
                return Err(format!("class {class} goes on below its oldest"));
            }
            let last = self.last.as_ref().filter(|last| last.class == class);
            if let Some(last) = last {
                recount.count += 1;
                recount.bytes += last.bytes();
            }
            if above.is_some() || last.is_some() {
                recount.classes.push(class);
            }
        }
        Ok(recount)
    }
}

impl<T> Drop for FreeList<T> {
    fn drop(&mut self) {
        // Boxes again, one by one; a chain of boxes would drop itself by recursion.
        while self.take_oldest().is_some() {}
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn entry(class: u32, value: u32, stamp: u32) -> Box<Entry<u32>> {
        let mut entry = Entry::new_at(0, class, 10, value);
        entry.stamp = stamp;
        entry
    }

    #[test]
    fn newest_of_the_class_and_oldest_of_all() {
        let mut shelf = FreeList::new(2);
        for (class, value) in [(0, 1), (1, 2), (0, 3)] {
            shelf.push(entry(class, value, 0));
        }
        assert_eq!(shelf.validate(), Ok(Recount { count: 3, bytes: 30, classes: vec![0, 1] }));
        assert_eq!(shelf.take_newest(0).map(|e| **e), Some(3));
        assert_eq!(shelf.take_oldest().map(|e| **e), Some(1));
        assert_eq!(shelf.take_newest(0).map(|e| **e), None);
        assert_eq!(shelf.take_newest(9).map(|e| **e), None);
        assert_eq!(shelf.take_oldest().map(|e| **e), Some(2));
        assert_eq!(shelf.validate(), Ok(Recount::default()));
        assert_eq!(shelf.oldest_stamp(), NOTHING);
    }

    #[test]
    fn a_late_stamp_does_not_jump_the_queue() {
        let mut shelf = FreeList::new(1);
        shelf.push(entry(0, 1, 7));
        shelf.push(entry(0, 2, 5));
        assert!(shelf.validate().is_ok());
        shelf.push(entry(0, 3, 6));
        drop(shelf.take_oldest());
        assert_eq!(shelf.oldest_stamp(), 7);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 2 } else { 256 }, failure_persistence: None, ..Default::default() })]
        #[test]
        fn like_a_plain_vector(steps in proptest::collection::vec((0u8..4, 0u32..4), 0..if cfg!(miri) { 40 } else { 200 })) {
            let mut shelf = FreeList::new(4);
            let mut model: Vec<(u32, u32)> = Vec::new();
            for (id, (step, class)) in (0u32..).zip(steps) {
                let (expected, got) = match step {
                    0 | 1 => {
                        model.push((class, id));
                        shelf.push(entry(class, id, id));
                        (None, None)
                    }
                    2 => {
                        let at = model.iter().rposition(|e| e.0 == class);
                        (at.map(|at| model.remove(at)), shelf.take_newest(class))
                    }
                    _ => ((!model.is_empty()).then(|| model.remove(0)), shelf.take_oldest()),
                };
                prop_assert_eq!(expected, got.map(|e| (e.class, **e)));
                prop_assert_eq!(shelf.oldest_stamp(), model.first().map_or(NOTHING, |e| e.1));
                let recount = shelf.validate();
                prop_assert_eq!(recount.map(|found| found.count), Ok(model.len() as u64));
            }
        }
    }
}
