//! The sequential core of one shard: its idle entries, as one list per class.
//!
//! ```text
//!   class 3: head ⇄ C ⇄ A ⇄ head        head.below: the newest        head.above: the oldest
//!   class 7: head ⇄ B ⇄ head            each entry knows the order of its put
//!
//!   order = tick (40 bits) | sequence (24 bits)
//! ```
//!
//! A push writes two links and the order, and a take writes one link, because the lock's next atomic exchange waits until
//! the writes have reached the cache. Each push adds one to the order, so the order counts the puts, but for what ticks have
//! skipped. There is no list of all entries: the oldest of all is the oldest of some class, and an
//! eviction compares a lower bound per class, which only evictions refresh. A tick of 10 ms makes the order last for 348
//! years. More than 2^24 puts between two ticks carry into the next tick: their entries seem a tick younger,
//! until the user of the cache begins a tick above theirs.
//!
//! The links are in the entries, so the list allocates once: at its first mark, the heads. Until then its heads are those that
//! all lists share, or each pool would hold the heads of every shard that no thread uses. It has no lock, no limit and no
//! counters.
//!
//! - **list-I1**: A node is a head of this list, or an entry that was leaked from its box in `push` and is in exactly one
//!   class list until a take makes it a box again; only `&mut self` reaches it meanwhile.
//! - **list-I2**: Orders rise from the oldest entry of a class to its newest, and the list's own is the highest.
//! - **list-I3**: `above` of the newest entry and of the head of an empty class are stale and never followed.
//! - **list-I4**: The head of a class that is not marked has a null `above`; such a class is empty. A class is marked while
//!   the occupancy bitmap may name this shard for it; both change under the shard's lock.
//! - **list-I5**: No entry of a marked class has an order below the class's bound.
//! - **list-I6**: The shared heads are empty, not marked, and never written.
#![allow(unsafe_code)] // Lists through boxes.

use super::entry::{Entry, Links};
use crate::size_class::EIGHTHS_CLASSES;
use std::marker::PhantomData;
use std::ptr::NonNull;

/// The order of a list without entries: above any other.
pub(super) const NO_ORDER: u64 = u64::MAX;
/// The bits of an order below its tick.
const SEQUENCE_BITS: u32 = 24;

/// The least order of a put in `tick`.
pub(super) const fn first_order(tick: u64) -> u64 {
    // The last tick that 40 bits hold is 348 years away.
    let tick = if tick >> (u64::BITS - SEQUENCE_BITS) == 0 { tick } else { u64::MAX >> SEQUENCE_BITS };
    tick << SEQUENCE_BITS
}

/// The tick of an order.
pub(super) const fn tick_of(order: u64) -> u64 {
    order >> SEQUENCE_BITS
}

/// So many classes have shared heads: those of a pool.
const SHARED_CLASSES: usize = EIGHTHS_CLASSES as usize;
/// Made by the compiler: a child of `fork` would wait for ever for what another thread was about to make.
static SHARED_HEADS: SharedHeads = {
    let mut heads = [Links::NONE; SHARED_CLASSES];
    let mut at = 0;
    while at < SHARED_CLASSES {
        heads[at].below = shared_heads().wrapping_add(at);
        at += 1;
    }
    SharedHeads(heads)
};

struct SharedHeads([Links; SHARED_CLASSES]);

// SAFETY: (list-I6) never written, so any thread may read them.
unsafe impl Sync for SharedHeads {}

const fn shared_heads() -> *mut Links {
    (&raw const SHARED_HEADS.0).cast::<Links>().cast_mut()
}

/// The heads of empty classes without a mark, leaked.
fn empty_heads(classes: usize) -> NonNull<Links> {
    let heads: Box<[Links]> = (0..classes).map(|_| Links::NONE).collect();
    let heads: NonNull<Links> = NonNull::from(Box::leak(heads)).cast();
    for at in 0..classes {
        let head = heads.as_ptr().wrapping_add(at);
        // SAFETY: within the allocation, which nothing else refers to yet.
        unsafe { (*head).below = head };
    }
    heads
}

#[repr(C)] // A hit uses the first two fields.
pub(super) struct FreeList<T> {
    /// One head for each class, in an allocation that only this pointer refers to; the shared heads until a class is marked.
    heads: NonNull<Links>,
    /// The order of the newest put, or the last one before the tick that began since.
    order: u64,
    cold: Box<Cold>,
    entries: PhantomData<Box<Entry<T>>>,
}

/// What no hit uses.
struct Cold {
    classes: usize,
    /// No further put is kept. Only the shard reads it; it is here to be under the lock.
    sealed: bool,
    /// Orders that ticks have skipped.
    skipped: u64,
    /// A bit for each marked class (list-I4); none as long as the heads are the shared ones.
    marked: Box<[u64]>,
    /// Bound of each class (list-I5).
    bounds: Box<[u64]>,
}

// SAFETY: (list-I1) the list owns the linked entries as it would own boxes, and the heads as it would own a slice.
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
        let classes = classes as usize;
        let (marked, bounds) = (Box::default(), Box::default());
        let cold = Box::new(Cold { classes, sealed: false, skipped: 0, marked, bounds });
        let mut list = Self { heads: NonNull::from(&SHARED_HEADS.0).cast(), order: 0, cold, entries: PhantomData };
        if classes > SHARED_CLASSES {
            list.make_heads();
        }
        list
    }

    /// Makes the list's own heads.
    fn make_heads(&mut self) {
        let classes = self.cold.classes;
        self.heads = empty_heads(classes);
        (self.cold.marked, self.cold.bounds) = (vec![0; classes.div_ceil(64)].into(), vec![0; classes].into());
    }

    fn has_own_heads(&self) -> bool {
        self.heads.as_ptr() != shared_heads()
    }

    pub(super) fn is_sealed(&self) -> bool {
        self.cold.sealed
    }

    pub(super) fn seal(&mut self) {
        self.cold.sealed = true;
    }

    /// From now on puts belong to `tick`, or to a later one. Returns the tick of the newest put before.
    pub(super) fn begin_tick(&mut self, tick: u64) -> u64 {
        let newest = tick_of(self.order);
        let skipped = first_order(tick).saturating_sub(self.order + 1);
        self.order += skipped;
        self.cold.skipped += skipped;
        newest
    }

    /// How many entries were pushed.
    pub(super) fn puts(&self) -> u64 {
        self.order - self.cold.skipped
    }

    #[inline(always)]
    pub(super) fn is_marked(&self, class: u16) -> bool {
        // A class that the list does not have is never marked.
        usize::from(class) < self.cold.classes && !self.above(self.head(class.into())).is_null()
    }

    /// Marks `class`, which exists.
    #[cold]
    pub(super) fn mark(&mut self, class: u16) {
        let at = usize::from(class);
        if !self.has_own_heads() {
            self.make_heads();
        }
        let head = self.head(at);
        if self.above(head).is_null() {
            self.set_above(head, head);
            self.cold.marked[at / 64] |= 1 << (at % 64);
            // The next push is above this.
            self.cold.bounds[at] = self.order;
        }
    }

    /// Removes the mark of `class` if the class is empty.
    #[cold]
    pub(super) fn unmark(&mut self, class: u16) {
        let at = usize::from(class);
        if self.is_marked(class) && self.is_empty(at) {
            self.set_above(self.head(at), std::ptr::null_mut());
            self.cold.marked[at / 64] &= !(1 << (at % 64));
        }
    }

    /// Makes `entry`, of a marked class, the newest of its class and of all.
    #[inline(always)]
    pub(super) fn push(&mut self, entry: Box<Entry<T>>) {
        debug_assert!(self.is_marked(entry.class));
        // SAFETY: the class is marked, so it exists.
        let pushed = unsafe { self.push_if_marked(entry) };
        debug_assert!(pushed.is_ok());
    }

    /// Pushes `entry` as `push` does; returns it if its class is not marked.
    ///
    /// # Safety
    ///
    /// The class exists in this list.
    #[inline(always)]
    pub(super) unsafe fn push_if_marked(&mut self, mut entry: Box<Entry<T>>) -> Result<(), Box<Entry<T>>> {
        let head = self.head(entry.class.into());
        if self.above(head).is_null() {
            return Err(entry);
        }
        let newest = self.below(head);
        self.order += 1;
        entry.order = self.order;
        entry.links.below = newest;
        let entry: *mut Links = Box::into_raw(entry).cast();
        self.set_above(newest, entry);
        self.set_below(head, entry);
        Ok(())
    }

    /// The newest of `class`.
    pub(super) fn take_newest(&mut self, class: u32) -> Option<Box<Entry<T>>> {
        if class as usize >= self.cold.classes {
            return None;
        }
        // SAFETY: the class exists.
        unsafe { self.take_newest_of(class) }
    }

    /// Takes the newest of `class` as `take_newest` does.
    ///
    /// # Safety
    ///
    /// The class exists in this list.
    #[inline(always)]
    pub(super) unsafe fn take_newest_of(&mut self, class: u32) -> Option<Box<Entry<T>>> {
        let head = self.head(class as usize);
        let newest = self.below(head);
        if newest == head {
            return None;
        }
        self.set_below(head, self.below(newest));
        // SAFETY: (list-I1) not a head, so an entry leaked in `push`, and no link that is followed leads to it any more.
        Some(unsafe { Box::from_raw(newest.cast()) })
    }

    /// The entry put longest ago, of any class.
    pub(super) fn take_oldest(&mut self) -> Option<Box<Entry<T>>> {
        let (at, order) = self.oldest()?;
        let head = self.head(at);
        let oldest = self.above(head);
        if oldest == self.below(head) {
            self.set_below(head, head);
        } else {
            let next = self.above(oldest);
            self.set_below(next, head);
            self.set_above(head, next);
        }
        self.cold.bounds[at] = order + 1;
        // SAFETY: (list-I1) as in `take_newest_of`.
        Some(unsafe { Box::from_raw(oldest.cast()) })
    }

    /// The order of the oldest entry, or [`NO_ORDER`].
    pub(super) fn oldest_order(&mut self) -> u64 {
        self.oldest().map_or(NO_ORDER, |(_, order)| order)
    }

    /// The class of the oldest entry, and its order. Looks into a class only if its bound is below the oldest order found so
    /// far, and then makes the bound exact.
    fn oldest(&mut self) -> Option<(usize, u64)> {
        // Above the order of every entry.
        let none = self.order + 1;
        let (mut oldest, mut of) = (none, 0);
        for word in 0..self.cold.marked.len() {
            let mut left = self.cold.marked[word];
            while left != 0 {
                let at = 64 * word + left.trailing_zeros() as usize;
                left &= left - 1;
                if self.cold.bounds[at] < oldest {
                    let order = if self.is_empty(at) { none } else { self.order_of(self.above(self.head(at))) };
                    self.cold.bounds[at] = order;
                    if order < oldest {
                        (oldest, of) = (order, at);
                    }
                }
            }
        }
        (oldest < none).then_some((of, oldest))
    }

    fn is_empty(&self, at: usize) -> bool {
        let head = self.head(at);
        self.below(head) == head
    }

    /// The head of class `at`, which exists.
    #[inline(always)]
    fn head(&self, at: usize) -> *mut Links {
        // In the allocation, as the callers ensure; wrapping, so that no class makes the sum itself undefined.
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
        // SAFETY: (list-I1) as in `below`; no shared head (list-I6), since each caller has seen a mark or an entry of the class.
        unsafe { (*node).below = to }
    }

    #[inline(always)]
    fn set_above(&mut self, node: *mut Links, to: *mut Links) {
        // SAFETY: (list-I1) as in `set_below`, or `mark` has made the list's own heads.
        unsafe { (*node).above = to }
    }

    fn order_of(&self, entry: *mut Links) -> u64 {
        // SAFETY: (list-I1) the caller passes a linked entry, whose first field are its links.
        unsafe { (*entry.cast::<Entry<T>>()).order }
    }

    fn bytes_of(&self, entry: *mut Links) -> usize {
        // SAFETY: (list-I1) as in `order_of`; the borrow ends here.
        unsafe { &*entry.cast::<Entry<T>>() }.bytes()
    }

    /// Entries of `class`: walks its list.
    pub(super) fn count_of(&self, class: u32) -> u64 {
        let at = class as usize;
        if at >= self.cold.classes {
            return 0;
        }
        let head = self.head(at);
        let (mut node, mut count) = (self.below(head), 0);
        while node != head {
            (node, count) = (self.below(node), count + 1);
        }
        count
    }

    /// Walks all lists, checks the invariants and counts.
    pub(super) fn validate(&self) -> Result<Recount, String> {
        let mut recount = Recount::default();
        for (at, class) in (0..self.cold.classes).zip(0u32..) {
            let head = self.head(at);
            let is_marked = self.cold.marked.get(at / 64).is_some_and(|marked| marked & 1 << (at % 64) != 0);
            if is_marked == self.above(head).is_null() || !is_marked && !self.is_empty(at) {
                return Err(format!("class {class}: marked {is_marked}, empty {}", self.is_empty(at)));
            }
            if self.is_empty(at) {
                continue;
            }
            recount.classes.push(class);
            let (mut node, mut newer, mut order) = (self.below(head), None, self.order + 1);
            while node != head {
                let own = self.order_of(node);
                if own >= order || own < self.cold.bounds[at] {
                    return Err(format!(
                        "class {class}: order {own}, above it {order}, bound {}",
                        self.cold.bounds[at]
                    ));
                }
                if newer.is_some_and(|newer| self.above(node) != newer) {
                    return Err(format!("class {class}: the entry of order {own} does not point to the next"));
                }
                order = own;
                recount.count += 1;
                recount.bytes += self.bytes_of(node);
                (newer, node) = (Some(node), self.below(node));
            }
            if newer != Some(self.above(head)) {
                return Err(format!("class {class} does not end at its oldest"));
            }
        }
        Ok(recount)
    }
}

impl<T> Drop for FreeList<T> {
    fn drop(&mut self) {
        if !self.has_own_heads() {
            return;
        }
        (0..self.cold.classes)
            .for_each(|at| while u32::try_from(at).is_ok_and(|class| self.take_newest(class).is_some()) {});
        let heads = NonNull::slice_from_raw_parts(self.heads, self.cold.classes);
        // SAFETY: leaked from this box in `make_heads`, and no entry is left that refers to it.
        drop(unsafe { Box::from_raw(heads.as_ptr()) });
    }
}

#[cfg(all(test, not(pinpool_loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn push(list: &mut FreeList<u32>, class: u32, value: u32) {
        let entry = Entry::new_at(0, class, 10, value);
        list.mark(entry.class);
        list.push(entry);
    }

    #[test]
    fn take_newest_is_per_class_and_take_oldest_across_classes() {
        let mut list = FreeList::new(2);
        for (class, value) in [(0, 1), (1, 2), (0, 3)] {
            push(&mut list, class, value);
        }
        assert_eq!(list.validate(), Ok(Recount { count: 3, bytes: 30, classes: vec![0, 1] }));
        assert_eq!(list.take_newest(0).map(|e| **e), Some(3));
        assert_eq!(list.take_oldest().map(|e| **e), Some(1));
        assert_eq!(list.take_newest(0).map(|e| **e), None);
        assert_eq!(list.take_newest(9).map(|e| **e), None);
        assert_eq!(list.take_oldest().map(|e| **e), Some(2));
        assert_eq!(list.validate(), Ok(Recount::default()));
        assert_eq!(list.oldest_order(), NO_ORDER);
    }

    #[test]
    fn a_tick_that_goes_back_does_not_make_an_entry_older() {
        let mut list = FreeList::new(1);
        for (tick, value) in [(7, 1), (5, 2), (6, 3)] {
            list.begin_tick(tick);
            push(&mut list, 0, value);
        }
        assert!(list.validate().is_ok());
        drop(list.take_oldest());
        assert_eq!(tick_of(list.oldest_order()), 7);
    }

    #[test]
    fn ticks_keep_their_order_up_to_the_last_one_that_fits() {
        let last = (1 << 40) - 1;
        let mut list = FreeList::new(2);
        for (tick, value) in [(last - 1, 1), (last, 2), (last + 1, 3), (u64::MAX, 4)] {
            list.begin_tick(tick);
            push(&mut list, value % 2, value);
        }
        assert!(list.validate().is_ok());
        let oldest_first: Vec<u32> = std::iter::from_fn(|| list.take_oldest()).map(|entry| **entry).collect();
        assert_eq!(oldest_first, [1, 2, 3, 4]);
    }

    #[test]
    fn only_an_empty_class_loses_its_mark_and_a_class_without_one_takes_nothing() {
        let mut list = FreeList::new(1);
        // SAFETY: class 0 exists.
        assert!(unsafe { list.push_if_marked(Entry::new_at(0, 0, 10, 1)) }.is_err());
        push(&mut list, 0, 2);
        list.unmark(0);
        assert!(list.is_marked(0));
        drop(list.take_newest(0));
        list.unmark(0);
        assert!(!list.is_marked(0) && !list.is_marked(1));
        assert_eq!(list.validate(), Ok(Recount::default()));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 2 } else { 256 }, failure_persistence: None, ..Default::default() })]
        #[test]
        fn it_behaves_like_a_vector(steps in proptest::collection::vec((0u8..5, 0u32..4), 0..if cfg!(miri) { 40 } else { 200 })) {
            let mut list = FreeList::new(4);
            let mut model: Vec<(u32, u32)> = Vec::new();
            for (id, (step, class)) in (0u32..).zip(steps) {
                list.begin_tick(u64::from(id / 8));
                let (expected, got) = match step {
                    0 | 1 => {
                        model.push((class, id));
                        push(&mut list, class, id);
                        (None, None)
                    }
                    2 => {
                        let at = model.iter().rposition(|e| e.0 == class);
                        (at.map(|at| model.remove(at)), list.take_newest(class))
                    }
                    3 => {
                        list.unmark(u16::try_from(class).unwrap());
                        (None, None)
                    }
                    _ => ((!model.is_empty()).then(|| model.remove(0)), list.take_oldest()),
                };
                prop_assert_eq!(expected, got.map(|e| (e.class(), **e)));
                prop_assert_eq!(list.oldest_order() == NO_ORDER, model.is_empty());
                let recount = list.validate();
                prop_assert_eq!(recount.map(|found| found.count), Ok(model.len() as u64));
            }
        }
    }
}
