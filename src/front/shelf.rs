//! The sequential core of one shard: what is idle, newest on top of its class, and in which order it came back.
//!
//! ```text
//!   class 3: top -> E -> B -> bottom        recency: oldest -> A -> B -> C -> E -> newest
//!   class 7: top -> C -> A -> bottom                 (all classes in one list)
//! ```
//!
//! Every operation is a fixed number of pointer writes. The lists run through the entries themselves, so a shelf never
//! allocates after `new`. It knows no lock, no limit and no other shelf.
//!
//! - (shelf I1) A linked entry came out of a box in `push`, is in exactly one class list and in the recency list of one
//!   shelf, and goes back into a box in `unlink`; `&mut self` is the only way to reach it meanwhile.
//! - (shelf I2) Stamps never fall along the recency list.
//! - (shelf I3) A class list is the recency list with the other classes left out, so the oldest of all is a bottom.
#![allow(unsafe_code)] // Two lists through one set of boxes: the two accesses at the end are the whole of it.

use super::entry::{Entry, Link};
use std::ptr::NonNull;

/// The stamp of a shelf without entries: later than any.
pub(super) const NOTHING: u32 = u32::MAX;

pub(super) struct Shelf<T> {
    classes: Box<[Ends<T>]>,
    oldest: Link<T>,
    newest: Link<T>,
    /// Bytes of all that is here.
    pub(super) bytes: usize,
    pub(super) count: u32,
    /// From now on nothing is kept.
    pub(super) sealed: bool,
    /// Takes served from here and puts that ended here, ever.
    pub(super) hits: u64,
    pub(super) puts: u64,
}

struct Ends<T> {
    top: Link<T>,
    bottom: Link<T>,
}

// SAFETY: (shelf I1) the entries behind the links belong to the shelf as boxes would.
unsafe impl<T: Send> Send for Shelf<T> {}

impl<T> Shelf<T> {
    pub(super) fn new(classes: u32) -> Self {
        let classes = (0..classes).map(|_| Ends { top: None, bottom: None }).collect();
        Self { classes, oldest: None, newest: None, bytes: 0, count: 0, sealed: false, hits: 0, puts: 0 }
    }

    /// Lays `entry` on top of its class, as the most recent of all. The caller has checked that the class exists.
    #[inline]
    pub(super) fn push(&mut self, mut entry: Box<Entry<T>>) {
        let (class, newest) = (entry.class as usize, self.newest);
        let top = self.classes[class].top;
        entry.above = None;
        entry.below = top;
        entry.newer = None;
        entry.older = newest;
        self.count += 1;
        self.bytes += entry.bytes();

        // (shelf I2) A thread that read the coarse time late must not appear to come before those already here.
        let entry = NonNull::from(Box::leak(entry));
        match newest {
            Some(newest) => {
                let before = self.at(newest);
                before.newer = Some(entry);
                let stamp = before.stamp;
                let entry = self.at(entry);
                entry.stamp = entry.stamp.max(stamp);
            }
            None => self.oldest = Some(entry),
        }
        match top {
            Some(top) => self.at(top).above = Some(entry),
            None => self.classes[class].bottom = Some(entry),
        }
        self.classes[class].top = Some(entry);
        self.newest = Some(entry);
    }

    /// The newest of `class`.
    #[inline]
    pub(super) fn take_newest(&mut self, class: u32) -> Option<Box<Entry<T>>> {
        let entry = self.classes.get(class as usize)?.top?;
        Some(self.unlink(entry))
    }

    /// The one put back longest ago, whatever its class.
    pub(super) fn take_oldest(&mut self) -> Option<Box<Entry<T>>> {
        let entry = self.oldest?;
        Some(self.unlink(entry))
    }

    /// When the oldest was put back, or [`NOTHING`].
    #[inline]
    pub(super) fn oldest_stamp(&mut self) -> u32 {
        match self.oldest {
            Some(oldest) => self.at(oldest).stamp,
            None => NOTHING,
        }
    }

    #[inline]
    fn unlink(&mut self, entry: NonNull<Entry<T>>) -> Box<Entry<T>> {
        let &mut Entry { above, below, newer, older, class, .. } = self.at(entry);
        match above {
            Some(above) => self.at(above).below = below,
            None => self.classes[class as usize].top = below,
        }
        match below {
            Some(below) => self.at(below).above = above,
            None => self.classes[class as usize].bottom = above,
        }
        match newer {
            Some(newer) => self.at(newer).older = older,
            None => self.newest = older,
        }
        match older {
            Some(older) => self.at(older).newer = newer,
            None => self.oldest = newer,
        }
        // SAFETY: (shelf I1) made from a box in `push`, and the lines above took it out of both lists.
        let entry = unsafe { Box::from_raw(entry.as_ptr()) };
        self.count -= 1;
        self.bytes -= entry.bytes();
        entry
    }

    #[inline(always)]
    fn at(&mut self, mut entry: NonNull<Entry<T>>) -> &mut Entry<T> {
        // SAFETY: (shelf I1) `entry` was read from this shelf, so it is linked and alive; the borrow of the shelf lasts
        // as long as the one that is handed out, so there is no second one.
        unsafe { entry.as_mut() }
    }

    /// Walks both kinds of list and compares: classes that hold something, or what is wrong.
    pub(super) fn validate(&mut self) -> Result<Vec<u32>, String> {
        let (mut count, mut bytes, mut stamp, mut before) = (0, 0, 0, None);
        let mut by_recency: Vec<Vec<NonNull<Entry<T>>>> = self.classes.iter().map(|_| Vec::new()).collect();
        let mut next = self.oldest;
        while let Some(node) = next {
            let entry = self.at(node);
            if entry.older != before {
                return Err(format!("entry {count} from the oldest does not point back"));
            }
            if entry.stamp < stamp {
                return Err(format!("stamp {} after stamp {stamp}", entry.stamp));
            }
            (count, bytes, stamp) = (count + 1, bytes + entry.bytes(), entry.stamp);
            (before, next) = (Some(node), entry.newer);
            by_recency[entry.class as usize].push(node);
        }
        if (count, bytes, before) != (self.count, self.bytes, self.newest) {
            return Err(format!("{count} entries of {bytes} bytes, {} of {} stated", self.count, self.bytes));
        }
        for (class, expected) in by_recency.iter().enumerate() {
            let (mut below, mut next) = (None, self.classes[class].bottom);
            for &node in expected {
                if next != Some(node) || self.at(node).below != below {
                    return Err(format!("class {class} is not in the order of recency"));
                }
                (below, next) = (next, self.at(node).above);
            }
            if next.is_some() || self.classes[class].top != below {
                return Err(format!("class {class} does not end at its top"));
            }
        }
        let held = (0u32..).zip(&by_recency).filter(|(_, entries)| !entries.is_empty());
        Ok(held.map(|(class, _)| class).collect())
    }
}

impl<T> Drop for Shelf<T> {
    fn drop(&mut self) {
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
        let mut shelf = Shelf::new(2);
        for (class, value) in [(0, 1), (1, 2), (0, 3)] {
            shelf.push(entry(class, value, 0));
        }
        assert_eq!(shelf.validate(), Ok(vec![0, 1]));
        assert_eq!((shelf.count, shelf.bytes), (3, 30));
        assert_eq!(shelf.take_newest(0).map(|e| **e), Some(3));
        assert_eq!(shelf.take_oldest().map(|e| **e), Some(1));
        assert_eq!(shelf.take_newest(0).map(|e| **e), None);
        assert_eq!(shelf.take_newest(9).map(|e| **e), None);
        assert_eq!(shelf.take_oldest().map(|e| **e), Some(2));
        assert_eq!(shelf.validate(), Ok(vec![]));
        assert_eq!(shelf.oldest_stamp(), NOTHING);
    }

    #[test]
    fn a_late_stamp_does_not_jump_the_queue() {
        let mut shelf = Shelf::new(1);
        shelf.push(entry(0, 1, 7));
        shelf.push(entry(0, 2, 5));
        assert_eq!(shelf.validate(), Ok(vec![0]));
        drop(shelf.take_oldest());
        assert_eq!(shelf.oldest_stamp(), 7);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 2 } else { 256 }, failure_persistence: None, ..Default::default() })]
        #[test]
        fn like_a_plain_vector(steps in proptest::collection::vec((0u8..4, 0u32..4), 0..200)) {
            let mut shelf = Shelf::new(4);
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
                prop_assert!(shelf.validate().is_ok(), "{:?}", shelf.validate());
            }
        }
    }
}
