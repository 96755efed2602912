//! The sequential core of one shard: its idle entries, as a stack per class and one list in the order of puts.
//!
//! ```text
//!   last: F      class 3: top -> E -> B        recency: oldest -> A -> B -> C -> E -> newest
//!                class 7: top -> C -> A                 (all classes in one list)
//! ```
//!
//! Each operation writes as few pointers as possible, because the lock's next atomic exchange waits until the writes have
//! reached the cache. Hence `last`: the entry pushed last joins the lists only at the next push, so a buffer that is put
//! and taken again costs one pointer. The links are in the entries, so the list never allocates after `new`. It has no
//! lock, no limit and no counters.
//!
//! - **list-I1**: A linked entry was leaked from its box in `link`, is in exactly one class list and in the recency list of
//!   one `FreeList`, and becomes a box again in `unlink`; only `&mut self` reaches it meanwhile.
//! - **list-I2**: Stamps never decrease along the recency list.
//! - **list-I3**: A class list is the recency list without the other classes, and `last` is newer than all of them.
//! - **list-I4**: `above` of a top and `newer` of the newest are stale and never read.
#![allow(unsafe_code)] // Two intrusive lists over one set of boxes; `unlink` and `at` are the only unsafe operations.

use super::entry::{Entry, Link};
use std::ptr::NonNull;

/// The stamp of a list without entries: later than any other.
pub(super) const NO_STAMP: u32 = u32::MAX;

pub(super) struct FreeList<T> {
    last: Option<Box<Entry<T>>>,
    /// The newest of each class.
    tops: Box<[Link<T>]>,
    oldest: Link<T>,
    newest: Link<T>,
    /// No further put is kept. Only the shard reads it; it is here to be under the lock.
    pub(super) sealed: bool,
}

// SAFETY: (list-I1) the list owns the linked entries as it would own boxes.
unsafe impl<T: Send> Send for FreeList<T> {}

/// Result of a walk.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Recount {
    pub(super) count: u64,
    pub(super) bytes: usize,
    /// Classes with entries.
    pub(super) classes: Vec<u32>,
}

impl<T> FreeList<T> {
    pub(super) fn new(classes: u32) -> Self {
        Self { last: None, tops: (0..classes).map(|_| None).collect(), oldest: None, newest: None, sealed: false }
    }

    /// Makes `entry` the newest of its class and of all. The caller has checked that the class exists.
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
            // (list-I2) The caller's coarse time may be older than that of an entry already here.
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

    /// The entry put longest ago, of any class.
    pub(super) fn take_oldest(&mut self) -> Option<Box<Entry<T>>> {
        match self.oldest {
            Some(oldest) => Some(self.unlink(oldest)),
            None => self.last.take(),
        }
    }

    /// When the oldest was put, or [`NO_STAMP`].
    pub(super) fn oldest_stamp(&mut self) -> u32 {
        match (self.oldest, &self.last) {
            (Some(oldest), _) => self.at(oldest).stamp,
            (None, Some(last)) => last.stamp,
            (None, None) => NO_STAMP,
        }
    }

    /// As `oldest_stamp`, without `last`.
    pub(super) fn oldest_linked_stamp(&mut self) -> u32 {
        self.oldest.map_or(NO_STAMP, |oldest| self.at(oldest).stamp)
    }

    #[inline]
    fn unlink(&mut self, entry: NonNull<Entry<T>>) -> Box<Entry<T>> {
        let &mut Entry { above, below, newer, older, class, .. } = self.at(entry);
        // (list-I4) The links of a top and of the newest are stale.
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
        // SAFETY: (list-I1) leaked from a box in `link`, and the lines above removed it from both lists.
        unsafe { Box::from_raw(entry.as_ptr()) }
    }

    #[inline(always)]
    fn at(&mut self, mut entry: NonNull<Entry<T>>) -> &mut Entry<T> {
        // SAFETY: (list-I1) `entry` was read from this list, so it is linked and alive; the returned borrow lasts as long
        // as that of `self`, so there is no second one.
        unsafe { entry.as_mut() }
    }

    /// Walks the recency list and the class lists, compares and counts them.
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
                    return Err(format!("class {class} is not in recency order"));
                }
                (above, next) = (next, entry.below);
            }
            if next.is_some() {
                return Err(format!("class {class} continues below its oldest"));
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
        // One by one: a chain of boxes would drop recursively.
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
    fn take_newest_is_per_class_and_take_oldest_across_classes() {
        let mut list = FreeList::new(2);
        for (class, value) in [(0, 1), (1, 2), (0, 3)] {
            list.push(entry(class, value, 0));
        }
        assert_eq!(list.validate(), Ok(Recount { count: 3, bytes: 30, classes: vec![0, 1] }));
        assert_eq!(list.take_newest(0).map(|e| **e), Some(3));
        assert_eq!(list.take_oldest().map(|e| **e), Some(1));
        assert_eq!(list.take_newest(0).map(|e| **e), None);
        assert_eq!(list.take_newest(9).map(|e| **e), None);
        assert_eq!(list.take_oldest().map(|e| **e), Some(2));
        assert_eq!(list.validate(), Ok(Recount::default()));
        assert_eq!(list.oldest_stamp(), NO_STAMP);
    }

    #[test]
    fn a_stamp_that_goes_back_does_not_make_an_entry_older() {
        let mut list = FreeList::new(1);
        list.push(entry(0, 1, 7));
        list.push(entry(0, 2, 5));
        assert!(list.validate().is_ok());
        list.push(entry(0, 3, 6));
        drop(list.take_oldest());
        assert_eq!(list.oldest_stamp(), 7);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 2 } else { 256 }, failure_persistence: None, ..Default::default() })]
        #[test]
        fn it_behaves_like_a_vector(steps in proptest::collection::vec((0u8..4, 0u32..4), 0..if cfg!(miri) { 40 } else { 200 })) {
            let mut list = FreeList::new(4);
            let mut model: Vec<(u32, u32)> = Vec::new();
            for (id, (step, class)) in (0u32..).zip(steps) {
                let (expected, got) = match step {
                    0 | 1 => {
                        model.push((class, id));
                        list.push(entry(class, id, id));
                        (None, None)
                    }
                    2 => {
                        let at = model.iter().rposition(|e| e.0 == class);
                        (at.map(|at| model.remove(at)), list.take_newest(class))
                    }
                    _ => ((!model.is_empty()).then(|| model.remove(0)), list.take_oldest()),
                };
                prop_assert_eq!(expected, got.map(|e| (e.class, **e)));
                prop_assert_eq!(list.oldest_stamp(), model.first().map_or(NO_STAMP, |e| e.1));
                let recount = list.validate();
                prop_assert_eq!(recount.map(|found| found.count), Ok(model.len() as u64));
            }
        }
    }
}
