//! The sequential core of one shard: its idle entries, as one list per class.
//!
//! ```text
//!   class 3: head ──▶ C ⇄ A             head.below: the newest        head.above: the oldest
//!   class 7: head ──▶ B                 each entry knows the order of its put
//!
//!   order = age (40 bits) | sequence (24 bits)
//! ```
//!
//! A push writes three links and the order, and a take writes one link. The writes are kept few because the lock's next atomic
//! exchange waits until they have reached the cache. Each push increments the order, so the number of puts is the order minus
//! the orders that ages have skipped. There is no list of all entries: the oldest entry is the oldest of some class, so an
//! eviction compares a lower bound for each class. Only evictions raise the bounds of marked classes. With ages of 10 ms the
//! order lasts for 348 years. If more than 2^24 puts occur between two ages, the order carries into the next age: the entries
//! put from then on seem an age younger than they are, until a later age begins.
//!
//! The links are in the entries, so a list allocates only once after its creation: its first mark allocates the heads,
//! the marks and the bounds. Until then the list uses heads that all lists share, so that a shard that no thread uses
//! has no heads. The list has no lock and no limit.
//!
//! - **list-I1**: A node is a head of this list, or an entry that a push leaked from its box. Such an entry is in exactly one
//!   class list until a take turns it back into a box, and until then only this list reaches it.
//! - **list-I2**: Orders rise from the oldest entry of a class to its newest, and no entry has a higher order than the list
//!   itself.
//! - **list-I3**: `above` of the newest entry and of the head of an empty class are stale and never followed.
//! - **list-I4**: The head of an unmarked class has a null `above`; such a class is empty. While a class is marked, its bit for
//!   this shard in the occupancy bitmap is set. Both the mark and the bit are removed only under the shard's lock.
//! - **list-I5**: No entry of a marked class has an order below the class's bound.
//! - **list-I6**: The shared heads have null links, so their classes are empty and unmarked. They are never written.
#![allow(unsafe_code)] // Boxes that are linked by raw pointers.

use super::entry::{Entry, Links};
use crate::size_class::EIGHTHS_CLASSES;
use std::marker::PhantomData;
use std::ptr::{self, NonNull};

/// The bits of an order below its age.
const SEQUENCE_BITS: u32 = 24;
/// The last age that fits into an order; it is 348 years away.
const AGE_MAX: u64 = u64::MAX >> SEQUENCE_BITS;

/// Returns the age of `order`.
pub(super) const fn age_of(order: u64) -> u64 {
    order >> SEQUENCE_BITS
}

/// The most classes of a list: all classes of a pool.
pub(super) const CLASSES_MAX: u32 = EIGHTHS_CLASSES;
/// Heads with null links. Initialized at compile time: with lazy initialization, a child forked while another thread
/// initializes them would wait forever.
static SHARED_HEADS: [[usize; 2]; CLASSES_MAX as usize] = [[0; 2]; CLASSES_MAX as usize];
const _: () = assert!(size_of::<[usize; 2]>() == size_of::<Links>() && align_of::<usize>() == align_of::<Links>());

#[repr(C)] // A hit uses the first three fields.
pub(super) struct FreeList<T> {
    /// One head per class, in an allocation that only this pointer refers to. The shared heads until a class is marked.
    heads: NonNull<Links>,
    /// The order of the newest put, or the last order before the current age if that age has no put yet.
    order: u64,
    idle_bytes: usize,
    cold: Box<Cold>,
    entries: PhantomData<Box<Entry<T>>>,
}

/// Fields that no hit uses.
struct Cold {
    classes: usize,
    /// Number of orders that ages have skipped.
    skipped: u64,
    /// Number of entries that [`FreeList::take_oldest`] took.
    evicted: u64,
    /// A bit for each marked class (list-I4); empty while the heads are the shared heads.
    marked: Box<[u64]>,
    /// Lower bound of the orders in each class (list-I5).
    bounds: Box<[u64]>,
}

// SAFETY: (list-I1) the list owns the linked entries as if they were boxes, and the heads as if they were a boxed slice.
unsafe impl<T: Send> Send for FreeList<T> {}

impl<T> FreeList<T> {
    /// Creates an empty list for the classes `0..classes`, at most [`CLASSES_MAX`].
    pub(super) fn new(classes: u32) -> Self {
        assert!(classes <= CLASSES_MAX, "{classes} classes");
        let (marked, bounds) = (Box::default(), Box::default());
        let cold = Box::new(Cold { classes: classes as usize, skipped: 0, evicted: 0, marked, bounds });
        Self { heads: NonNull::from(&SHARED_HEADS).cast(), order: 0, idle_bytes: 0, cold, entries: PhantomData }
    }

    /// Makes later puts belong to `age`, or to a later age if the order has already carried into one. Returns the highest
    /// age that an earlier put may belong to.
    pub(super) fn begin_age(&mut self, age: u64) -> u64 {
        let newest = age_of(self.order);
        let skipped = (age.min(AGE_MAX) << SEQUENCE_BITS).saturating_sub(self.order + 1);
        self.order += skipped;
        self.cold.skipped += skipped;
        newest
    }

    pub(super) fn puts(&self) -> u64 {
        self.order - self.cold.skipped
    }

    /// Returns the number of entries taken as the newest, given that `idle` entries are left.
    pub(super) fn hits(&self, idle: u64) -> u64 {
        self.puts() - self.cold.evicted - idle
    }

    pub(super) fn idle_bytes(&self) -> usize {
        self.idle_bytes
    }

    /// Marks class `at`, which must exist.
    #[cold]
    fn mark(&mut self, at: usize) {
        if self.cold.bounds.is_empty() {
            let classes = self.cold.classes;
            let heads: Box<[Links]> = (0..classes).map(|_| Links::NONE).collect();
            self.heads = NonNull::from(Box::leak(heads)).cast();
            (self.cold.marked, self.cold.bounds) = (vec![0; classes.div_ceil(64)].into(), vec![0; classes].into());
        }
        let head = self.head(at);
        self.set_above(head, head);
        self.cold.marked[at / 64] |= 1 << (at % 64);
        // Every later push has a higher order.
        self.cold.bounds[at] = self.order;
    }

    /// Removes the mark of `class` if the class is empty.
    #[cold]
    pub(super) fn unmark(&mut self, class: u32) {
        let at = class as usize;
        if at < self.cold.classes && !self.above(self.head(at)).is_null() && self.below(self.head(at)).is_null() {
            self.set_above(self.head(at), ptr::null_mut());
            self.cold.marked[at / 64] &= !(1 << (at % 64));
        }
    }

    /// Makes `entry` the newest of its class and of all classes. Its class must exist. If the class is not marked, first marks
    /// it and calls `on_mark`.
    pub(super) fn push(&mut self, entry: Box<Entry<T>>, on_mark: impl FnOnce(&Entry<T>)) {
        assert!(usize::from(entry.class) < self.cold.classes, "class {}", entry.class);
        // SAFETY: the class exists, as asserted above.
        let Err(entry) = (unsafe { self.push_if_marked(entry) }) else { return };
        self.mark(entry.class.into());
        on_mark(&entry);
        // SAFETY: as above.
        let pushed = unsafe { self.push_if_marked(entry) };
        debug_assert!(pushed.is_ok());
    }

    /// Makes `entry` the newest of its class and of all classes. Returns `entry` if its class is not marked.
    ///
    /// # Safety
    ///
    /// The class of `entry` must exist in this list.
    #[inline(always)]
    pub(super) unsafe fn push_if_marked(&mut self, mut entry: Box<Entry<T>>) -> Result<(), Box<Entry<T>>> {
        let head = self.head(entry.class.into());
        if self.above(head).is_null() {
            return Err(entry);
        }
        let newest = self.below(head);
        self.order += 1;
        self.idle_bytes += entry.bytes;
        entry.order = self.order;
        entry.links.below = newest;
        let entry: *mut Links = Box::into_raw(entry).cast();
        self.set_above(if newest.is_null() { head } else { newest }, entry);
        self.set_below(head, entry);
        Ok(())
    }

    /// Takes the newest entry of `class`.
    pub(super) fn take_newest(&mut self, class: u32) -> Option<Box<Entry<T>>> {
        if class as usize >= self.cold.classes {
            return None;
        }
        // SAFETY: the class exists.
        unsafe { self.take_newest_of(class) }
    }

    /// Takes the newest entry of `class`.
    ///
    /// # Safety
    ///
    /// The class must exist in this list.
    #[inline(always)]
    pub(super) unsafe fn take_newest_of(&mut self, class: u32) -> Option<Box<Entry<T>>> {
        let head = self.head(class as usize);
        let newest = self.below(head);
        if newest.is_null() {
            return None;
        }
        self.set_below(head, self.below(newest));
        // SAFETY: (list-I1) `newest` is not a head, so a push leaked it, and no link that is followed leads to it any more.
        let entry: Box<Entry<T>> = unsafe { Box::from_raw(newest.cast()) };
        self.idle_bytes -= entry.bytes;
        Some(entry)
    }

    /// Takes the oldest entry of all classes if it was put by the end of age `until`. Otherwise returns the order of the
    /// oldest entry, or 0 if there is no entry, as the error.
    pub(super) fn take_oldest(&mut self, until: u64) -> Result<Box<Entry<T>>, u64> {
        let (at, order) = self.oldest();
        if order > self.order || age_of(order) > until {
            return Err(if order > self.order { 0 } else { order });
        }
        let head = self.head(at);
        let oldest = self.above(head);
        if oldest == self.below(head) {
            self.set_below(head, ptr::null_mut());
        } else {
            let next = self.above(oldest);
            self.set_below(next, ptr::null_mut());
            self.set_above(head, next);
        }
        self.cold.bounds[at] = order + 1;
        self.cold.evicted += 1;
        // SAFETY: (list-I1) as in `take_newest_of`.
        let entry: Box<Entry<T>> = unsafe { Box::from_raw(oldest.cast()) };
        self.idle_bytes -= entry.bytes;
        Ok(entry)
    }

    /// Returns the class of the oldest entry and the order of this entry; without entries, an order above the list's own. Reads
    /// the list of a class only if the bound of the class is below the oldest order found so far, and then makes the bound
    /// exact.
    fn oldest(&mut self) -> (usize, u64) {
        let none = self.order + 1;
        let mut oldest = (0, none);
        for word in 0..self.cold.marked.len() {
            let mut left = self.cold.marked[word];
            while left != 0 {
                let at = 64 * word + left.trailing_zeros() as usize;
                left &= left - 1;
                if self.cold.bounds[at] < oldest.1 {
                    let head = self.head(at);
                    let order = if self.below(head).is_null() { none } else { self.order_of(self.above(head)) };
                    self.cold.bounds[at] = order;
                    if order < oldest.1 {
                        oldest = (at, order);
                    }
                }
            }
        }
        oldest
    }

    /// Returns the head of class `at`, which must exist.
    #[inline(always)]
    fn head(&self, at: usize) -> *mut Links {
        // The callers ensure that the head is in the allocation. Wrapping, so that the addition itself is defined for
        // every class.
        self.heads.as_ptr().wrapping_add(at)
    }

    #[inline(always)]
    fn below(&self, node: *mut Links) -> *mut Links {
        // SAFETY: (list-I1) `node` is a head or a linked entry.
        unsafe { (*node).below }
    }

    #[inline(always)]
    fn above(&self, node: *mut Links) -> *mut Links {
        // SAFETY: (list-I1) as in `below`.
        unsafe { (*node).above }
    }

    #[inline(always)]
    fn set_below(&mut self, node: *mut Links, to: *mut Links) {
        // SAFETY: (list-I1) as in `below`; `node` is not a shared head (list-I6), since each caller has seen a mark or an entry of
        // the class.
        unsafe { (*node).below = to }
    }

    #[inline(always)]
    fn set_above(&mut self, node: *mut Links, to: *mut Links) {
        // SAFETY: (list-I1) as in `set_below`, or `mark` has made the list's own heads.
        unsafe { (*node).above = to }
    }

    fn order_of(&self, entry: *mut Links) -> u64 {
        // SAFETY: (list-I1) the caller passes a linked entry, and the links are its first field.
        unsafe { (*entry.cast::<Entry<T>>()).order }
    }

    /// Iterates over the entries of `class`, the newest first.
    fn entries(&self, class: u32) -> impl Iterator<Item = &Entry<T>> {
        let exists = (class as usize) < self.cold.classes;
        let mut next = if exists { self.below(self.head(class as usize)) } else { ptr::null_mut() };
        std::iter::from_fn(move || {
            // SAFETY: (list-I1) `next` is null or a linked entry, which stays linked while the list is borrowed.
            let entry = unsafe { next.cast::<Entry<T>>().as_ref() }?;
            next = entry.links.below;
            Some(entry)
        })
    }

    /// Counts the entries of `class` by walking its list.
    pub(super) fn count_of(&self, class: u32) -> u64 {
        self.entries(class).count() as u64
    }

    /// Walks all lists and checks the invariants; returns the number of entries and the classes that have some.
    #[cfg(test)]
    pub(super) fn validate(&self) -> Result<(u64, Vec<u32>), String> {
        let (mut count, mut bytes, mut classes) = (0, 0, Vec::new());
        for (at, class) in (0..self.cold.classes).zip(0u32..) {
            let check = |is_right, what| if is_right { Ok(()) } else { Err(format!("class {class}: wrong {what}")) };
            let head = self.head(at);
            let is_marked = self.cold.marked.get(at / 64).is_some_and(|marked| marked & 1 << (at % 64) != 0);
            check(is_marked != self.above(head).is_null(), "mark")?;
            let (mut newer, mut order) = (ptr::null_mut::<Links>(), self.order + 1);
            for entry in self.entries(class) {
                check(is_marked && entry.order < order && entry.order >= self.cold.bounds[at], "order of an entry")?;
                check(newer.is_null() || entry.links.above == newer, "link to a newer entry")?;
                (newer, order) = (ptr::from_ref(entry).cast_mut().cast(), entry.order);
                (count, bytes) = (count + 1, bytes + entry.bytes);
            }
            check(newer.is_null() || newer == self.above(head), "link to the oldest entry")?;
            classes.extend((!newer.is_null()).then_some(class));
        }
        if bytes == self.idle_bytes {
            Ok((count, classes))
        } else {
            Err(format!("{bytes} bytes, counted {}", self.idle_bytes))
        }
    }
}

impl<T> Drop for FreeList<T> {
    fn drop(&mut self) {
        if self.cold.bounds.is_empty() {
            return;
        }
        while self.take_oldest(u64::MAX).is_ok() {}
        let heads = NonNull::slice_from_raw_parts(self.heads, self.cold.classes);
        // SAFETY: `mark` leaked the heads from this box, and no entry is left that refers to them.
        drop(unsafe { Box::from_raw(heads.as_ptr()) });
    }
}

#[cfg(all(test, not(pinpool_loom)))]
mod tests {
    use super::*;

    fn push(list: &mut FreeList<u32>, class: u32, value: u32) {
        list.push(Entry::new_at(0, class, 10, value), |_| {});
    }

    fn take_oldest(list: &mut FreeList<u32>) -> Option<u32> {
        list.take_oldest(u64::MAX).ok().map(|entry| **entry)
    }

    #[test]
    fn the_oldest_leaves_only_if_its_age_has_ended_by_then() {
        let mut list = FreeList::new(1);
        for (age, value) in [(7, 1), (5, 2), (9, 3)] {
            list.begin_age(age);
            push(&mut list, 0, value);
        }
        assert_eq!(list.take_oldest(6).map_err(age_of).err(), Some(7));
        assert_eq!([(); 2].map(|()| list.take_oldest(7).map(|entry| **entry).ok()), [Some(1), Some(2)]);
        assert_eq!(list.take_oldest(8).map_err(age_of).err(), Some(9));
        assert_eq!((take_oldest(&mut list), list.take_oldest(u64::MAX).err()), (Some(3), Some(0)));
    }

    #[test]
    fn ages_keep_their_order_up_to_the_last_one_that_fits() {
        let mut list = FreeList::new(2);
        for (age, value) in [(AGE_MAX - 1, 1), (AGE_MAX, 2), (AGE_MAX + 1, 3), (u64::MAX, 4)] {
            list.begin_age(age);
            push(&mut list, value % 2, value);
        }
        assert!(list.validate().is_ok());
        assert_eq!([(); 5].map(|()| take_oldest(&mut list)), [Some(1), Some(2), Some(3), Some(4), None]);
    }

    #[test]
    fn only_an_empty_class_loses_its_mark_and_an_unmarked_class_takes_nothing() {
        let mut list = FreeList::new(1);
        let is_marked = |list: &mut FreeList<u32>| {
            // SAFETY: class 0 exists.
            unsafe { list.push_if_marked(Entry::new_at(0, 0, 10, 1)) }.is_ok()
        };
        assert!(!is_marked(&mut list));
        push(&mut list, 0, 2);
        list.unmark(0);
        assert!(is_marked(&mut list));
        drop((list.take_newest(0), list.take_newest(0)));
        list.unmark(0);
        assert!(!is_marked(&mut list));
        list.unmark(1);
        assert_eq!(list.validate(), Ok((0, vec![])));
    }
}
