//! One thread's part of the cache: a free list behind a lock, and a remote free list beside it.
//!
//! ```text
//!   one cache line        lock | heads, order | idle bytes, spare permits                  all that a hit writes
//!   another cache line    remote free list: newest entry + permits                         written by remote puts
//! ```
//!
//! A hit enters the lock without waiting, writes a few words and leaves. Other threads take the lock to steal, evict or
//! drain, for a few dozen instructions. Their puts wait in the remote free list until a thread that holds the lock collects
//! it. The *short path* is the hit and the put of the thread whose own shard this is; it does nothing but the common case,
//! and steps aside otherwise.
//!
//! - **shard-I1**: `counters` and `oldest` are written under the lock; read without it, they are hints where to search.
//! - **shard-I2**: A thread that holds the lock collects the remote free list before it compares ages or pushes a buffer;
//!   the short path compares none and pushes in the order of its own puts.
//! - **shard-I3**: No entry in the free list has an order below `oldest`, unless that is [`NO_ORDER`].
#![allow(unsafe_code)] // The short path asks no list whether a class exists.

use super::counters::{Counters, SPARE_BITS, ShardCounts};
use super::entry::Entry;
use super::free_list::{FreeList, NO_ORDER, Recount, first_order, tick_of};
use super::lock::Lock;
use super::permits::{Common, PERMITS_PER_CLAIM};
use super::remote_list::{EntryChain, PERMITS_MAX, PushError, RemoteList};
use pinpool_os::sync::CachePadded;
use pinpool_os::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

/// With more spare permits than this a shard returns some to the pool ...
pub(super) const SPARE_MAX: u32 = 16;
/// ... and keeps this many.
const SPARE_KEPT: u32 = 8;
/// Permits that the owner leaves in the remote free list for puts of other threads.
const REMOTE_PERMITS: u32 = 8;
const _: () = assert!(REMOTE_PERMITS <= PERMITS_MAX);
// The sum counts the permits that hits leave, those of a claim, and those of the remote free list.
const _: () = assert!(SPARE_MAX + PERMITS_PER_CLAIM + PERMITS_MAX < 1 << SPARE_BITS);

/// Entries removed at once, so that a drain holds the lock briefly.
pub(super) const BATCH: usize = 32;

/// One shard of a cache.
pub(in crate::engine) struct Shard<T> {
    own: CachePadded<OwnLines<T>>,
    remote: CachePadded<RemoteList<T>>,
    /// The number of this shard in its cache.
    index: u16,
    common: Arc<Common>,
}

#[repr(C)] // The free list and the first counter share the lock's cache line.
struct OwnLines<T> {
    free_list: Lock<FreeList<T>>,
    counters: Counters,
    /// Lower bound of the orders in the free list (shard-I3).
    oldest: AtomicU64,
}

#[cfg(not(pinpool_loom))] // Whose lock is larger.
const _: () = assert!(size_of::<Lock<FreeList<()>>>() + size_of::<u64>() <= 64);

/// What a search reads without the lock (shard-I1).
pub(super) struct Hint {
    /// Tick of the oldest entry, or of one before it; `None` if the shard seems empty.
    pub(super) oldest: Option<u64>,
    /// The remote free list has entries.
    pub(super) has_remote: bool,
    pub(super) permits: u32,
}

impl<T> Shard<T> {
    pub(super) fn new(classes: u32, index: u16, common: Arc<Common>) -> Self {
        let own = OwnLines {
            free_list: Lock::new(FreeList::new(classes)),
            counters: Counters::new(),
            oldest: AtomicU64::new(NO_ORDER),
        };
        Self { own: CachePadded::new(own), remote: CachePadded::new(RemoteList::new()), index, common }
    }

    /// The newest entry of `class`, if the free list has one, few permits are spare, and no other thread is inside or needs
    /// attention.
    ///
    /// # Safety
    ///
    /// The class exists in this cache.
    #[inline(always)]
    pub(crate) unsafe fn take_at_once(&self, class: u32) -> Option<Box<Entry<T>>> {
        let own = &*self.own;
        let mut entry = own.free_list.with_at_once(|list| {
            if own.counters.spare() >= SPARE_MAX {
                return None;
            }
            // SAFETY: the caller's contract.
            let entry = unsafe { list.take_newest_of(class) }?;
            own.counters.taken(entry.weight);
            Some(entry)
        })?;
        // Compare first: a store would make the line dirty for nothing.
        if !entry.is_of::<Self>(self) {
            self.own_entry(&mut entry);
        }
        Some(entry)
    }

    /// The newest entry of `class`, as [`take_at_once`](Self::take_at_once) gives it, after those that other threads have
    /// put were collected; `None` if there are none of these.
    pub(crate) fn take_remote_at_once(&self, class: u32) -> Option<Box<Entry<T>>> {
        if !self.remote.peek().0 {
            return None;
        }
        let mut entry = self.own.free_list.with_at_once(|list| {
            self.collect(list);
            let entry = list.take_newest(class)?;
            self.count_hit(&entry);
            Some(entry)
        })?;
        self.own_entry(&mut entry);
        Some(entry)
    }

    /// Puts `entry`, which this shard owns, into the free list if the shard has a spare permit and the class's
    /// mark, and no other thread is inside or needs attention. Touches nothing of the cache after it has left the lock.
    #[inline(always)]
    pub(crate) fn put_at_once(&self, entry: Box<Entry<T>>) -> Result<(), Box<Entry<T>>> {
        debug_assert!(entry.is_of::<Self>(self));
        let (own, mut unkept) = (&*self.own, Some(entry));
        own.free_list.with_at_once(|list| {
            if own.counters.spare() > 0
                && let Some(entry) = unkept.take()
            {
                let weight = entry.weight;
                // SAFETY: this shard gave the entry out, so the entry's class exists.
                match unsafe { list.push_if_marked(entry) } {
                    Ok(()) => own.counters.put(weight),
                    Err(entry) => unkept = Some(entry),
                }
            }
            Some(())
        });
        unkept.map_or(Ok(()), Err)
    }

    /// This shard owns `entry` from now on.
    #[inline]
    fn own_entry(&self, entry: &mut Entry<T>) {
        entry.set_shard(std::ptr::from_ref(self));
        entry.owner = self.index;
    }

    /// Sets whether hits and puts take the slow path; in a sealed shard they always do. Entries of remote puts that ended
    /// before are in the free list when it returns, so that a search finds them.
    pub(super) fn set_attention(&self, attention: bool) {
        self.own.free_list.set_attention(|list| {
            if attention {
                self.collect_all(list, 0);
            }
            attention || list.is_sealed()
        });
    }

    /// Whether hits and puts take the slow path.
    pub(crate) fn has_attention(&self) -> bool {
        self.own.free_list.has_attention()
    }

    /// From now on puts belong to `tick`; those of the remote free list belong to an earlier one. Returns the tick of the
    /// newest put before.
    pub(super) fn begin_tick(&self, tick: u64) -> u64 {
        self.own.free_list.with(|list| {
            self.collect(list);
            list.begin_tick(tick)
        })
    }

    /// The counters, after the remote free list was collected.
    pub(super) fn counts(&self) -> ShardCounts {
        self.own.free_list.with(|list| {
            if self.remote.peek().0 {
                self.collect_all(list, 0);
            }
            self.own.counters.snapshot(list.puts())
        })
    }

    /// Idle buffers of `class`, those of the remote free list included.
    pub(super) fn count_of(&self, class: u32) -> u64 {
        self.own.free_list.with(|list| {
            self.collect(list);
            list.count_of(class)
        })
    }

    /// The owner's take: the newest of the free list, else of the remote free list.
    pub(super) fn take(&self, class: u32) -> Option<Box<Entry<T>>> {
        let mut entry = self.own.free_list.with(|list| {
            let entry = match list.take_newest(class) {
                Some(entry) => entry,
                None => {
                    self.collect(list);
                    list.take_newest(class)?
                }
            };
            self.count_hit(&entry);
            Some(entry)
        })?;
        self.own_entry(&mut entry);
        Some(entry)
    }

    /// A take by a thread whose own shard is `taker`. Clears mark and occupancy bit if it finds nothing, in the steps that
    /// `permits` gives.
    pub(super) fn steal(&self, class: u32, taker: &Self) -> Option<Box<Entry<T>>> {
        let mut entry = self.own.free_list.with(|list| {
            self.collect(list);
            let mut entry = list.take_newest(class);
            if let (None, Ok(at), false) = (&entry, u16::try_from(class), list.is_sealed()) {
                list.unmark(at);
                self.common.occupancy.search(class, self.index.into(), || self.collect_all(list, 0));
                entry = list.take_newest(class);
            }
            let entry = entry?;
            self.count_hit(&entry);
            Some(entry)
        })?;
        taker.own_entry(&mut entry);
        Some(entry)
    }

    /// The owner's put, with a spare permit of the shard or one of those `granted`, whose rest stays here. While another
    /// thread holds the lock, the entry goes to the remote free list. Returns the granted permits that it could not store.
    pub(super) fn put(&self, entry: Box<Entry<T>>, granted: u32) -> Result<u32, PushError<T>> {
        let attempt = self.own.free_list.try_with(entry, |list, entry| {
            if list.is_sealed() {
                return Err(PushError::Sealed(entry));
            }
            let (has_entries, remote_permits) = self.remote.peek();
            if has_entries {
                self.collect_all(list, 0);
            }
            if granted == 0 && self.own.counters.spare() == 0 {
                if remote_permits == 0 {
                    return Err(PushError::NoPermit(entry));
                }
                self.empty_remote(list);
                if self.own.counters.spare() == 0 {
                    return Err(PushError::NoPermit(entry));
                }
            }
            if granted > 0 {
                self.own.counters.grant(granted);
            }
            self.push(list, entry);
            Ok(0)
        });
        attempt.unwrap_or_else(|entry| self.put_remote(entry, granted))
    }

    /// The put of a thread that does not own the shard; never waits.
    pub(super) fn put_remote(&self, entry: Box<Entry<T>>, granted: u32) -> Result<u32, PushError<T>> {
        let class = entry.class();
        let unused = self.remote.push(entry, granted)?;
        // After the push: see the order in `permits`.
        self.common.occupancy.set(class, self.index.into());
        Ok(unused)
    }

    /// Counts a put whose buffer was evicted at once.
    pub(super) fn count_evicted_put(&self) {
        self.own.free_list.with(|_| self.own.counters.evicted_put());
    }

    pub(super) fn count_allocated(&self) {
        self.own.counters.allocated();
    }

    pub(super) fn hint(&self) -> Hint {
        let (has_remote, remote_permits) = self.remote.peek();
        // Relaxed: a hint (shard-I1). Without a published order any age is possible.
        let oldest = match self.own.oldest.load(Ordering::Relaxed) {
            _ if self.own.counters.is_empty() => None,
            NO_ORDER => Some(0),
            order => Some(tick_of(order)),
        };
        Hint { oldest, has_remote, permits: remote_permits + self.own.counters.spare() }
    }

    /// Removes every permit that no buffer uses.
    pub(super) fn revoke(&self) -> u32 {
        self.own.free_list.with(|list| {
            self.empty_remote(list);
            let permits = self.own.counters.spare();
            self.own.counters.withdraw(permits);
            permits
        })
    }

    /// Tick of the oldest entry, the remote free list included; `None` without entries.
    pub(super) fn oldest(&self) -> Option<u64> {
        self.own.free_list.with(|list| {
            self.collect(list);
            self.publish_oldest(list)
        })
    }

    /// Removes the oldest entry; its permit goes to the caller.
    pub(super) fn evict(&self) -> Option<Box<Entry<T>>> {
        self.own.free_list.with(|list| {
            self.collect(list);
            let entry = self.take_oldest(list);
            // Relaxed: (shard-I1). What is left is newer (list-I2).
            self.own.oldest.store(entry.as_ref().map_or(NO_ORDER, |entry| entry.order), Ordering::Relaxed);
            entry
        })
    }

    /// Moves up to [`BATCH`] entries that were put before `tick` into `out`, and their permits to the pool.
    pub(super) fn drain(&self, tick: Option<u64>, out: &mut EntryBatch<T>) {
        // A hint, but puts that ended before this call began are visible in any case.
        let hint = self.hint();
        if !hint.has_remote && tick.is_some_and(|tick| hint.oldest.is_none_or(|oldest| oldest >= tick)) {
            return;
        }
        let end = tick.map_or(NO_ORDER, first_order);
        self.own.free_list.with(|list| {
            self.collect(list);
            for space in out.iter_mut() {
                if list.oldest_order() >= end {
                    break;
                }
                *space = self.take_oldest(list);
                self.common.permits.add(1);
            }
            self.publish_oldest(list);
        });
    }

    fn take_oldest(&self, list: &mut FreeList<T>) -> Option<Box<Entry<T>>> {
        let entry = list.take_oldest()?;
        self.own.counters.removed(entry.weight);
        Some(entry)
    }

    /// From now on no put keeps a buffer here, and each takes the slow path; idle ones stay until they are drained.
    pub(super) fn seal(&self) {
        self.own.free_list.set_attention(|list| {
            let (entries, permits) = self.remote.seal();
            self.push_all(list, entries, permits);
            list.seal();
            true
        });
    }

    /// At rest: compares the lists with the counters; returns the classes that have entries, and the free permits.
    pub(super) fn validate(&self) -> Result<(Vec<u32>, u32), String> {
        let counts = self.counts();
        self.own.free_list.with(|list| {
            let Recount { count, bytes, classes } = list.validate()?;
            if (count, bytes) != (counts.idle, counts.idle_bytes) {
                let (counted, counted_bytes) = (counts.idle, counts.idle_bytes);
                return Err(format!("{count} entries of {bytes} bytes, counted {counted} of {counted_bytes}"));
            }
            let published = self.own.oldest.load(Ordering::Relaxed);
            if published != NO_ORDER && published > list.oldest_order() {
                return Err(format!("published {published}, oldest {}", list.oldest_order()));
            }
            Ok((classes, counts.spare + self.remote.peek().1))
        })
    }

    /// Pushes `entry`, of a class that exists, which uses a spare permit.
    fn push(&self, list: &mut FreeList<T>, entry: Box<Entry<T>>) {
        if !list.is_marked(entry.class) {
            list.mark(entry.class);
            self.common.occupancy.set(entry.class(), self.index.into());
        }
        self.own.counters.put(entry.weight);
        list.push(entry);
    }

    /// Counts a take and keeps its permit as a spare one; returns all but a few of these if there are many.
    fn count_hit(&self, entry: &Entry<T>) {
        self.own.counters.taken(entry.weight);
        let spare = self.own.counters.spare();
        if spare > SPARE_MAX {
            self.own.counters.withdraw(spare - SPARE_KEPT);
            self.common.permits.add(spare - SPARE_KEPT);
        }
    }

    fn collect(&self, list: &mut FreeList<T>) {
        if self.remote.peek().0 {
            self.collect_all(list, REMOTE_PERMITS);
        }
    }

    /// Moves the remote free list's entries here and refills its permits from the spare ones, up to `enough`.
    #[cold]
    fn collect_all(&self, list: &mut FreeList<T>, enough: u32) {
        if list.is_sealed() {
            return;
        }
        let (entries, added) = self.remote.collect(self.own.counters.spare(), enough);
        self.own.counters.withdraw(added);
        self.push_all(list, entries, 0);
    }

    /// Moves the remote free list's entries and permits here.
    fn empty_remote(&self, list: &mut FreeList<T>) {
        if list.is_sealed() {
            return;
        }
        let (entries, permits) = self.remote.empty();
        self.push_all(list, entries, permits);
    }

    /// Pushes what came from the remote free list; each entry brings the permit that it used there.
    fn push_all(&self, list: &mut FreeList<T>, entries: EntryChain<T>, permits: u32) {
        self.own.counters.grant(permits);
        for entry in entries {
            self.own.counters.grant(1);
            self.push(list, entry);
        }
    }

    fn publish_oldest(&self, list: &mut FreeList<T>) -> Option<u64> {
        let oldest = list.oldest_order();
        // Relaxed: a hint (shard-I1).
        self.own.oldest.store(oldest, Ordering::Relaxed);
        (oldest != NO_ORDER).then(|| tick_of(oldest))
    }
}

/// Entries that a drain removes under the lock and releases outside it.
pub(super) type EntryBatch<T> = [Option<Box<Entry<T>>>; BATCH];
