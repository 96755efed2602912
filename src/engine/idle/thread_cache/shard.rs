//! One thread's part of the cache: a free list behind a biased lock, and a remote free list beside it.
//!
//! ```text
//!   own lines      lock | free list | counters | oldest stamp       written by the owner's hits
//!   another line   remote free list: newest entry + permits         written by puts of other threads
//! ```
//!
//! The owner's hit enters the lock without contention, writes a few pointers and leaves. Other threads take the lock only
//! to steal, evict or drain, for a few dozen instructions. Their puts wait in the remote free list until a thread that
//! holds the lock collects it.
//!
//! - **shard-I1**: `counters` and `oldest` are written under the lock; read without it, they are hints where to search.
//! - **shard-I2**: A thread that holds the lock collects the remote free list before it compares ages or pushes a buffer.

use super::biased_lock::{BiasedLock, LockAccess};
use super::counters::Counters;
use super::entry::Entry;
use super::free_list::{FreeList, NO_STAMP, Recount};
use super::permits::{Occupancy, PermitPool};
use super::remote_list::{EntryChain, PERMITS_MAX, PushError, RemoteList};
use super::slot::ThreadSlot;
use crate::sync::CachePadded;
use crate::sync::atomic::{AtomicU32, Ordering};

/// With more spare permits than this a shard returns some to the pool ...
const SPARE_MAX: u32 = 16;
/// ... and keeps this many.
const SPARE_KEPT: u32 = 8;
/// Permits that the owner leaves in the remote free list for puts of other threads.
const REMOTE_PERMITS: u32 = 8;
const _: () = assert!(REMOTE_PERMITS <= PERMITS_MAX);

/// Entries removed at once, so that a drain holds the lock briefly.
pub(super) const BATCH: usize = 32;

pub(super) struct Shard<T> {
    own: CachePadded<OwnLines<T>>,
    remote: CachePadded<RemoteList<T>>,
}

struct OwnLines<T> {
    free_list: BiasedLock<FreeList<T>>,
    counters: Counters,
    /// Stamp of the oldest linked entry of the free list.
    oldest: AtomicU32,
}

/// What a search reads without the lock (shard-I1).
pub(super) struct Hint {
    /// Stamp of the oldest entry, if visible.
    pub(super) oldest: u32,
    /// There may be an older entry, or any at all: ask [`Shard::oldest`].
    pub(super) uncertain: bool,
    pub(super) permits: u32,
}

impl<T> Shard<T> {
    pub(super) fn new(classes: u32) -> Self {
        let own = OwnLines {
            free_list: BiasedLock::new(FreeList::new(classes)),
            counters: Counters::new(),
            oldest: AtomicU32::new(NO_STAMP),
        };
        Self { own: CachePadded::new(own), remote: CachePadded::new(RemoteList::new()) }
    }

    /// The counters, after the remote free list was collected.
    pub(super) fn counters(&self) -> &Counters {
        if self.remote.peek().0 {
            self.own.free_list.with(LockAccess::Remote, |list| self.collect_all(list, 0));
        }
        &self.own.counters
    }

    /// The owner's take: the newest of the free list, else of the remote free list.
    #[inline]
    pub(super) fn take(&self, access: LockAccess, class: u32, pool: &PermitPool) -> Option<Box<Entry<T>>> {
        self.own.free_list.with(access, |list| {
            let entry = match list.take_newest(class) {
                Some(entry) => entry,
                None => {
                    self.collect(list);
                    list.take_newest(class)?
                }
            };
            self.count_hit(list, &entry, pool);
            Some(entry)
        })
    }

    /// A take by another thread. Clears the occupancy bit if it finds nothing, in the order that `permits` gives.
    pub(super) fn steal(
        &self,
        class: u32,
        at: usize,
        occupancy: &Occupancy,
        pool: &PermitPool,
    ) -> Option<Box<Entry<T>>> {
        self.own.free_list.with(LockAccess::Remote, |list| {
            self.collect(list);
            let mut entry = list.take_newest(class);
            if entry.is_none() && !list.sealed {
                occupancy.clear(class, at);
                self.collect_all(list, 0);
                entry = list.take_newest(class);
                if entry.is_some() {
                    occupancy.set(class, at);
                }
            }
            let entry = entry?;
            self.count_hit(list, &entry, pool);
            Some(entry)
        })
    }

    /// The owner's put, with a spare permit of the shard or one of those `granted`, whose rest stays here. While another
    /// thread holds the lock, the entry goes to the remote free list. Returns the granted permits that it could not store.
    #[inline]
    pub(super) fn put(&self, owner: ThreadSlot, entry: Box<Entry<T>>, granted: u32) -> Result<u32, PushError<T>> {
        let attempt = self.own.free_list.try_with(owner, entry, |list, entry| {
            if list.sealed {
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
        self.remote.push(entry, granted)
    }

    /// Counts a put whose buffer was evicted at once.
    pub(super) fn count_evicted_put(&self, access: LockAccess) {
        self.own.free_list.with(access, |_| {
            self.own.counters.put(0);
            self.own.counters.removed(0);
        });
    }

    pub(super) fn count_allocated(&self) {
        self.own.counters.allocated();
    }

    pub(super) fn hint(&self) -> Hint {
        let (has_entries, remote_permits) = self.remote.peek();
        // Relaxed: a hint (shard-I1).
        let oldest = self.own.oldest.load(Ordering::Relaxed);
        let uncertain = has_entries || oldest == NO_STAMP && self.own.counters.idle() > 0;
        Hint { oldest, uncertain, permits: remote_permits + self.own.counters.spare() }
    }

    /// Removes every permit that no buffer uses.
    pub(super) fn revoke(&self, access: LockAccess) -> u32 {
        self.own.free_list.with(access, |list| {
            self.empty_remote(list);
            let permits = self.own.counters.spare();
            self.own.counters.withdraw(permits);
            permits
        })
    }

    /// Stamp of the oldest entry, the remote free list included.
    pub(super) fn oldest(&self, access: LockAccess) -> u32 {
        self.own.free_list.with(access, |list| {
            self.collect(list);
            list.oldest_stamp()
        })
    }

    /// Removes the oldest entry; its permit goes to the caller.
    pub(super) fn evict(&self, access: LockAccess) -> Option<Box<Entry<T>>> {
        self.own.free_list.with(access, |list| {
            self.collect(list);
            let entry = self.take_oldest(list);
            self.publish_oldest(list);
            entry
        })
    }

    /// Moves up to [`BATCH`] entries that were put before `stamp` into `out`, and their permits to the pool.
    pub(super) fn drain(&self, stamp: u32, out: &mut EntryBatch<T>, pool: &PermitPool) {
        // A hint, but puts that ended before this call began are visible in any case.
        let hint = self.hint();
        if hint.oldest >= stamp && !hint.uncertain {
            return;
        }
        self.own.free_list.with(LockAccess::Remote, |list| {
            self.collect(list);
            for space in out.iter_mut() {
                if list.oldest_stamp() >= stamp {
                    break;
                }
                *space = self.take_oldest(list);
                pool.add(1);
            }
            self.publish_oldest(list);
        });
    }

    fn take_oldest(&self, list: &mut FreeList<T>) -> Option<Box<Entry<T>>> {
        let entry = list.take_oldest()?;
        self.own.counters.removed(entry.bytes());
        self.own.counters.withdraw(1);
        Some(entry)
    }

    /// From now on no put keeps a buffer here; idle ones stay until they are drained.
    pub(super) fn seal(&self) {
        self.own.free_list.with(LockAccess::Remote, |list| {
            let (entries, permits) = self.remote.seal();
            self.push_all(list, entries, permits);
            list.sealed = true;
        });
    }

    /// At rest: compares the lists with the counters; returns the classes that have entries, and the free permits.
    pub(super) fn validate(&self) -> Result<(Vec<u32>, u32), String> {
        let counters = self.counters();
        self.own.free_list.with(LockAccess::Remote, |list| {
            let Recount { count, bytes, classes } = list.validate()?;
            let counted = (counters.idle(), counters.idle_bytes());
            if (count, bytes) != counted {
                return Err(format!("{count} entries of {bytes} bytes, counted {} of {}", counted.0, counted.1));
            }
            let published = self.own.oldest.load(Ordering::Relaxed);
            if published != list.oldest_linked_stamp() {
                return Err(format!("published {published}, oldest {}", list.oldest_linked_stamp()));
            }
            Ok((classes, counters.spare() + self.remote.peek().1))
        })
    }

    /// Pushes `entry`, which uses a spare permit.
    #[inline(always)]
    fn push(&self, list: &mut FreeList<T>, entry: Box<Entry<T>>) {
        self.own.counters.put(entry.bytes());
        list.push(entry);
        self.publish_oldest(list);
    }

    /// Counts a take and keeps its permit as a spare one, up to a few.
    #[inline(always)]
    fn count_hit(&self, list: &mut FreeList<T>, entry: &Entry<T>, pool: &PermitPool) {
        self.own.counters.hit(entry.bytes());
        self.publish_oldest(list);
        let spare = self.own.counters.spare();
        if spare > SPARE_MAX {
            self.own.counters.withdraw(spare - SPARE_KEPT);
            pool.add(spare - SPARE_KEPT);
        }
    }

    #[inline(always)]
    fn collect(&self, list: &mut FreeList<T>) {
        if self.remote.peek().0 {
            self.collect_all(list, REMOTE_PERMITS);
        }
    }

    /// Moves the remote free list's entries here and refills its permits from the spare ones, up to `enough`.
    #[cold]
    fn collect_all(&self, list: &mut FreeList<T>, enough: u32) {
        if list.sealed {
            return;
        }
        let (entries, added) = self.remote.collect(self.own.counters.spare(), enough);
        self.own.counters.withdraw(added);
        self.push_all(list, entries, 0);
    }

    /// Moves the remote free list's entries and permits here.
    fn empty_remote(&self, list: &mut FreeList<T>) {
        if list.sealed {
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

    #[inline(always)]
    fn publish_oldest(&self, list: &mut FreeList<T>) {
        let oldest = list.oldest_linked_stamp();
        // Relaxed: a hint (shard-I1). Coarse stamps seldom differ, and a load costs less than a store.
        if self.own.oldest.load(Ordering::Relaxed) != oldest {
            self.own.oldest.store(oldest, Ordering::Relaxed);
        }
    }
}

/// Entries that a drain removes under the lock and releases outside it.
pub(super) type EntryBatch<T> = [Option<Box<Entry<T>>>; BATCH];
