//! One thread's part of the cache: a free list behind a lock, and the remote list.
//!
//! ```text
//!   one cache line        lock | heads, order, idle bytes | idle buffers      all that a hit writes
//!   another cache line    remote list: its newest entry                       written by puts of other threads
//! ```
//!
//! The *fast path* is a hit or a return on the thread that owns the shard. It enters the lock without waiting, writes a few
//! words and leaves. It handles only the common case, and fails in every other case. Other threads take the lock for a few
//! dozen instructions, to steal, evict or drain. The buffers that they put wait in the remote list until a thread that holds
//! the lock collects the list.
//!
//! The remote list is a Treiber stack (like `thread_free` in mimalloc) that is only ever taken as a whole. A push never
//! dereferences the address that it read, so the ABA problem does not arise.
//!
//! - **shard-I1**: `idle` and `oldest` are written under the lock; read without it, they are hints.
//! - **shard-I2**: A thread that holds the lock collects the remote list before it compares ages or pushes a buffer. The fast
//!   path need not: it compares no ages, and pushes its own returns in their order.
//! - **shard-I3**: No entry in the free list has an order below `oldest`.
//! - **remote-I1**: An entry in the remote list was leaked from its box in `push`. Only the thread that took the list by an
//!   exchange follows its links, and turns each entry back into a box.
#![allow(unsafe_code)] // The fast path does not check that a class exists, and the remote list is a chain of raw pointers.

use super::Counts;
use super::entry::Entry;
use super::free_list::{FreeList, age_of};
use super::lock::Lock;
use super::occupancy::Occupancy;
use pinpool_os::sync::CachePadded;
use pinpool_os::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::ptr;
use std::sync::Arc;

/// One shard of a cache.
pub(in crate::engine) struct Shard<T> {
    own: CachePadded<OwnLines<T>>,
    remote: CachePadded<RemoteList<T>>,
    /// The number of this shard in its cache.
    index: u16,
    occupancy: Arc<Occupancy>,
}

#[repr(C)] // The free list and the count share the lock's cache line.
struct OwnLines<T> {
    free_list: Lock<FreeList<T>>,
    /// Entries in the free list.
    idle: AtomicU64,
    /// Lower bound of the orders in the free list (shard-I3).
    oldest: AtomicU64,
}

#[cfg(not(pinpool_loom))] // The lock of loom is larger.
const _: () = assert!(size_of::<Lock<FreeList<()>>>() + size_of::<u64>() <= 64);

impl<T> Shard<T> {
    pub(super) fn new(classes: u32, index: u16, occupancy: Arc<Occupancy>) -> Self {
        let free_list = Lock::new(FreeList::new(classes));
        let own = OwnLines { free_list, idle: AtomicU64::new(0), oldest: AtomicU64::new(0) };
        Self { own: CachePadded::new(own), remote: CachePadded::new(RemoteList::new()), index, occupancy }
    }

    /// Takes the newest entry of `class`, if the free list has one, no other thread is inside and the slow path is not
    /// required.
    ///
    /// # Safety
    ///
    /// The class must exist in this cache.
    #[inline(always)]
    pub(crate) unsafe fn take_fast(&self, class: u32) -> Option<Box<Entry<T>>> {
        let mut entry = self.own.free_list.try_fast(|list| {
            // SAFETY: the caller's contract.
            let entry = unsafe { list.take_newest_of(class) }?;
            self.add_idle(-1);
            Some(entry)
        })?;
        // Compare first: a store would dirty the cache line for nothing.
        if !entry.is_open_to::<Self>(self) {
            self.set_home(&mut entry);
        }
        Some(entry)
    }

    /// Collects the remote list and takes the newest entry of `class`. Returns `None` if the remote list is empty, no entry has
    /// this class, another thread is inside or the slow path is required.
    pub(crate) fn take_remote_fast(&self, class: u32) -> Option<Box<Entry<T>>> {
        if !self.remote.has_entries() {
            return None;
        }
        let mut entry = self.own.free_list.try_fast(|list| {
            self.collect(list);
            self.take_newest(list, class)
        })?;
        self.set_home(&mut entry);
        Some(entry)
    }

    /// Puts `entry`, which has its home in this shard, into the free list if its class is marked, no other thread is inside and
    /// the slow path is not required. Otherwise returns `entry`. Does not touch the cache after it has left the lock.
    ///
    /// # Safety
    ///
    /// `entry` must be open to this shard ([`Entry::is_open_to`]): this shard handed it out, so its class exists.
    #[inline(always)]
    pub(crate) unsafe fn put_fast(&self, entry: Box<Entry<T>>) -> Result<(), Box<Entry<T>>> {
        debug_assert!(entry.is_open_to::<Self>(self));
        let mut unkept = Some(entry);
        self.own.free_list.try_fast(|list| {
            if let Some(entry) = unkept.take() {
                // SAFETY: the entry's class exists (the caller's contract).
                match unsafe { list.push_if_marked(entry) } {
                    Ok(()) => self.add_idle(1),
                    Err(entry) => unkept = Some(entry),
                }
            }
            Some(())
        });
        unkept.map_or(Ok(()), Err)
    }

    /// Makes this shard the home of `entry`.
    #[inline]
    fn set_home(&self, entry: &mut Entry<T>) {
        entry.set_shard(std::ptr::from_ref(self));
        entry.home = self.index;
    }

    /// Sets whether hits and puts must take the slow path; in a sealed shard they always must. If `required`, this also moves the
    /// entries of earlier remote puts to the free list, so that a search finds them.
    pub(super) fn set_slow_path(&self, required: bool) {
        self.own.free_list.set_slow_path(|list| {
            if required {
                self.collect_all(list);
            }
            required || self.remote.is_sealed()
        });
    }

    /// Returns whether hits and puts must take the slow path.
    pub(crate) fn requires_slow_path(&self) -> bool {
        self.own.free_list.requires_slow_path()
    }

    /// Seals the shard: from now on puts take the slow path and keep no buffer. Idle buffers stay until they are drained.
    pub(super) fn seal(&self) {
        self.own.free_list.set_slow_path(|list| {
            self.push_all(list, self.remote.seal());
            true
        });
    }

    /// Makes later puts belong to `age`. Puts that are already in the remote list belong to an earlier age. Returns the
    /// highest age that an earlier put may belong to.
    pub(super) fn begin_age(&self, age: u64) -> u64 {
        self.own.free_list.with(|list| {
            self.collect(list);
            list.begin_age(age)
        })
    }

    pub(super) fn counts(&self) -> Counts {
        self.own.free_list.with(|list| {
            self.collect(list);
            let idle = self.idle();
            Counts { idle, idle_bytes: list.idle_bytes(), hits: list.hits(idle), puts: list.puts() }
        })
    }

    /// Counts the idle buffers of `class`.
    pub(super) fn count_of(&self, class: u32) -> u64 {
        self.own.free_list.with(|list| {
            self.collect(list);
            list.count_of(class)
        })
    }

    /// Takes an entry for the thread that owns this shard: the newest in the free list, or, if there is none, the newest after
    /// a collection of the remote list.
    pub(super) fn take(&self, class: u32) -> Option<Box<Entry<T>>> {
        let mut entry = self.own.free_list.with(|list| {
            self.take_newest(list, class).or_else(|| {
                self.collect(list);
                self.take_newest(list, class)
            })
        })?;
        self.set_home(&mut entry);
        Some(entry)
    }

    /// Takes an entry for a thread with the shard `taker`. If there is none, clears the mark and the occupancy bit in the steps
    /// that `occupancy` describes, and searches again.
    pub(super) fn steal(&self, class: u32, taker: &Self) -> Option<Box<Entry<T>>> {
        let mut entry = self.own.free_list.with(|list| {
            self.collect(list);
            self.take_newest(list, class).or_else(|| {
                list.unmark(class);
                self.occupancy.search(class, self.index.into(), || self.collect_all(list));
                self.take_newest(list, class)
            })
        })?;
        taker.set_home(&mut entry);
        Some(entry)
    }

    /// Puts `entry` for a thread with the shard `own_shard`. The class of `entry` must exist. Returns `entry` if this shard is sealed.
    pub(in crate::engine) fn put(&self, own_shard: &Self, entry: Box<Entry<T>>) -> Result<(), Box<Entry<T>>> {
        if !ptr::eq(self, own_shard) {
            return self.put_remote(entry);
        }
        self.own.free_list.with(|list| {
            if self.remote.is_sealed() {
                return Err(entry);
            }
            self.collect(list);
            list.push(entry, |entry| self.set_occupied(entry));
            self.add_idle(1);
            Ok(())
        })
    }

    /// Puts `entry` into the remote list, for another thread. Never waits. Returns `entry` if the shard is sealed.
    pub(in crate::engine) fn put_remote(&self, entry: Box<Entry<T>>) -> Result<(), Box<Entry<T>>> {
        let class = entry.class();
        self.remote.push(entry)?;
        // After the push: see the steps in `occupancy`.
        self.occupancy.set(class, self.index.into());
        Ok(())
    }

    /// Returns the number of entries in the free list; without the lock this is a hint (shard-I1).
    pub(super) fn idle(&self) -> u64 {
        // Relaxed: (shard-I1).
        self.own.idle.load(Ordering::Relaxed)
    }

    /// Returns a lower bound of the age of the oldest entry, or `None` if the shard seems empty. A hint.
    pub(super) fn oldest_age(&self) -> Option<u64> {
        if self.remote.has_entries() {
            return Some(0);
        }
        // Relaxed: (shard-I1).
        (self.idle() > 0).then(|| age_of(self.own.oldest.load(Ordering::Relaxed)))
    }

    /// Removes the oldest entry if it was put by the end of age `until`.
    pub(super) fn evict(&self, until: u64) -> Option<Box<Entry<T>>> {
        self.own.free_list.with(|list| {
            self.collect(list);
            let oldest = list.take_oldest(until);
            // Relaxed: (shard-I1). No entry that is left has a lower order, and later ones have higher orders (list-I2).
            let order = oldest.as_ref().map_or_else(|&order| order, |entry| entry.order);
            self.own.oldest.store(order, Ordering::Relaxed);
            let entry = oldest.ok()?;
            self.add_idle(-1);
            Some(entry)
        })
    }

    /// Compares the lists with the counts, while no operation runs. Returns the classes that have entries.
    #[cfg(test)]
    pub(super) fn validate(&self) -> Result<Vec<u32>, String> {
        self.own.free_list.with(|list| {
            self.collect(list);
            let (count, classes) = list.validate()?;
            if count != self.idle() {
                return Err(format!("{count} entries, counted {}", self.idle()));
            }
            Ok(classes)
        })
    }

    fn take_newest(&self, list: &mut FreeList<T>, class: u32) -> Option<Box<Entry<T>>> {
        let entry = list.take_newest(class)?;
        self.add_idle(-1);
        Some(entry)
    }

    /// Pushes `entries`, of classes that exist.
    fn push_all(&self, list: &mut FreeList<T>, entries: Entries<T>) {
        for entry in entries {
            list.push(entry, |entry| self.set_occupied(entry));
            self.add_idle(1);
        }
    }

    /// Records that this shard may hold entries of the class of `entry`.
    fn set_occupied(&self, entry: &Entry<T>) {
        self.occupancy.set(entry.class(), self.index.into());
    }

    /// Moves the remote list's entries into the free list.
    fn collect(&self, list: &mut FreeList<T>) {
        if self.remote.has_entries() {
            self.collect_all(list);
        }
    }

    /// Moves the remote list's entries into the free list. Performs the exchange even if the remote list is empty: a push that
    /// this exchange does not see then sees what this thread did before.
    fn collect_all(&self, list: &mut FreeList<T>) {
        if !self.remote.is_sealed() {
            self.push_all(list, self.remote.take_all());
        }
    }

    /// Adds to the number of idle entries. It is written only under the lock, so a load and a store replace an atomic addition.
    #[inline(always)]
    fn add_idle(&self, entries: i64) {
        self.own.idle.store(self.idle().wrapping_add_signed(entries), Ordering::Relaxed);
    }
}

/// The word of a sealed remote list, in place of the address of an entry: every later push fails.
const SEALED: usize = 1;

/// A remote list: the address of the entry that was pushed last, null, or [`SEALED`].
struct RemoteList<T>(AtomicPtr<Entry<T>>);

impl<T> RemoteList<T> {
    fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// Pushes `entry`; returns it if the list is sealed.
    fn push(&self, mut entry: Box<Entry<T>>) -> Result<(), Box<Entry<T>>> {
        // Relaxed: a guess that the exchange confirms.
        let mut newest = self.0.load(Ordering::Relaxed);
        while newest.addr() != SEALED {
            entry.links.below = newest.cast();
            let pushed = Box::into_raw(entry);
            // AcqRel: the collector sees the entry as it was written, and this thread sees what the previous collector did
            // before its exchange, which the occupancy bitmap relies on. Relaxed on failure: the value is another guess.
            match self.0.compare_exchange_weak(newest, pushed, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return Ok(()),
                Err(now) => newest = now,
            }
            // SAFETY: (remote-I1) the exchange failed, so this thread still owns the entry alone.
            entry = unsafe { Box::from_raw(pushed) };
        }
        Err(entry)
    }

    /// Returns whether the list has entries. Only reads the cache line.
    #[inline]
    fn has_entries(&self) -> bool {
        // Relaxed: a hint. A thread that needs the entries calls `take_all`.
        self.0.load(Ordering::Relaxed).addr() > SEALED
    }

    /// Returns whether the list is sealed. Exact under the shard's lock, since `seal` is called under it.
    #[inline]
    fn is_sealed(&self) -> bool {
        self.0.load(Ordering::Relaxed).addr() == SEALED
    }

    /// Takes all entries, the oldest first. Never called after `seal`; both are called under the shard's lock.
    fn take_all(&self) -> Entries<T> {
        self.replace(ptr::null_mut())
    }

    /// Takes all entries, and makes every later push fail.
    fn seal(&self) -> Entries<T> {
        self.replace(ptr::without_provenance_mut(SEALED))
    }

    fn replace(&self, word: *mut Entry<T>) -> Entries<T> {
        // AcqRel: this thread sees the entries as they were written, and a later push sees what this thread did before.
        let newest = self.0.swap(word, Ordering::AcqRel);
        Entries::oldest_first(if newest.addr() == SEALED { ptr::null_mut() } else { newest })
    }
}

impl<T> Drop for RemoteList<T> {
    fn drop(&mut self) {
        self.seal().for_each(drop);
    }
}

/// Entries taken from a remote list, the oldest first. Dropping this before its end would leak the rest.
struct Entries<T> {
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
        // SAFETY: (remote-I1) the entry was leaked in `push`, and only this chain refers to it.
        let entry = unsafe { Box::from_raw(self.next) };
        self.next = entry.links.below.cast();
        Some(entry)
    }
}

#[cfg(all(test, pinpool_loom))]
mod models {
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
