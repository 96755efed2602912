//! One thread's part of the front: its shelf behind a lock of one bit, and its inbox beside it.
//!
//! ```text
//!   own lines      lock | shelf | counts | oldest stamp             the thread that sits here
//!   another line   inbox: newest entry + places                     threads that bring buffers home
//! ```
//!
//! The owner's hit takes the uncontended bit, moves a handful of pointers and lets go. Other threads come in by the lock
//! only to steal, evict or drain, a few dozen instructions each; what they bring home waits in the inbox until the owner
//! runs out or somebody with the lock looks.
//!
//! - (shard I1) `counts` and `oldest` are written under the lock, and read without it as a hint where to look.
//! - (shard I2) Whoever has the lock and is about to judge by age, or to lay something down, collects the inbox first.

use super::biased_lock::{BiasedLock, Who};
use super::counters::Counters;
use super::entry::Entry;
use super::free_list::{FreeList, NOTHING, Recount};
use super::occupancy::Occupancy;
use super::permits::PermitPool;
use super::remote_list::{Chain, MOST_PLACES, RemoteList, Unkept};
use super::slot::ThreadSlot;
use crate::sync::CachePadded;
use crate::sync::atomic::{AtomicU32, Ordering};

/// A shard that frees more places than this brings some back to the pot.
const MOST_SPARE: u32 = 16;
/// So many it keeps then.
const KEPT_SPARE: u32 = 8;
/// So many the owner leaves in the inbox for those who bring buffers home.
const IN_INBOX: u32 = 8;
const _: () = assert!(IN_INBOX <= MOST_PLACES);

/// Entries leave in batches of this size when many leave, so that the lock is held for short.
pub(super) const BATCH: usize = 32;

pub(super) struct Shard<T> {
    own: CachePadded<Own<T>>,
    inbox: CachePadded<RemoteList<T>>,
}

struct Own<T> {
    shelf: BiasedLock<FreeList<T>>,
    counts: Counters,
    /// The stamp of the oldest in the shelf's lists.
    oldest: AtomicU32,
}

/// What can be seen from outside.
pub(super) struct View {
    /// The stamp of the oldest, if it can be seen.
    pub(super) oldest: u32,
    /// There may be something older, or something at all: ask [`Shard::oldest`].
    pub(super) uncertain: bool,
    pub(super) places: u32,
}

impl<T> Shard<T> {
    pub(super) fn new(classes: u32) -> Self {
        let own = Own {
            shelf: BiasedLock::new(FreeList::new(classes)),
            counts: Counters::new(),
            oldest: AtomicU32::new(NOTHING),
        };
        Self { own: CachePadded::new(own), inbox: CachePadded::new(RemoteList::new()) }
    }

    /// The numbers, with what waits in the inbox counted in.
    pub(super) fn counts(&self) -> &Counters {
        if self.inbox.look().0 {
            self.own.shelf.with(Who::Guest, |shelf| self.collect_all(shelf, 0));
        }
        &self.own.counts
    }

    /// The owner's take: the newest of the shelf, else what was brought home.
    #[inline]
    pub(super) fn take(&self, who: Who, class: u32, pot: &PermitPool) -> Option<Box<Entry<T>>> {
        self.own.shelf.with(who, |shelf| {
            let entry = match shelf.take_newest(class) {
                Some(entry) => entry,
                None => {
                    self.collect(shelf);
                    shelf.take_newest(class)?
                }
            };
            self.taken(shelf, &entry, pot);
            Some(entry)
        })
    }

    /// A take by a thread that sits elsewhere. One that looks in vain clears the bit (see `whereabouts`).
    pub(super) fn steal(
        &self,
        class: u32,
        at: usize,
        whereabouts: &Occupancy,
        pot: &PermitPool,
    ) -> Option<Box<Entry<T>>> {
        self.own.shelf.with(Who::Guest, |shelf| {
            self.collect(shelf);
            let mut entry = shelf.take_newest(class);
            if entry.is_none() && !shelf.sealed {
                whereabouts.clear(class, at);
                self.collect_all(shelf, 0);
                entry = shelf.take_newest(class);
                if entry.is_some() {
                    whereabouts.set(class, at);
                }
            }
            let entry = entry?;
            self.taken(shelf, &entry, pot);
            Some(entry)
        })
    }

    /// The owner's put, on a spare place of the shard or one of those `given`, whose rest stays here. If somebody else is
    /// inside, it goes through the inbox. Returns the given places that found no room.
    #[inline]
    pub(super) fn put(&self, owner: ThreadSlot, entry: Box<Entry<T>>, given: u32) -> Result<u32, Unkept<T>> {
        let attempt = self.own.shelf.try_with(owner, entry, |shelf, entry| {
            if shelf.sealed {
                return Err(Unkept::Sealed(entry));
            }
            let (waits, left_there) = self.inbox.look();
            if waits {
                self.collect_all(shelf, 0);
            }
            if given == 0 && self.own.counts.spare() == 0 {
                if left_there == 0 {
                    return Err(Unkept::NoPlace(entry));
                }
                self.empty_inbox(shelf);
                if self.own.counts.spare() == 0 {
                    return Err(Unkept::NoPlace(entry));
                }
            }
            if given > 0 {
                self.own.counts.grant(given);
            }
            self.lay(shelf, entry);
            Ok(0)
        });
        attempt.unwrap_or_else(|entry| self.bring(entry, given))
    }

    /// The put of a thread that sits elsewhere; never waits.
    pub(super) fn bring(&self, entry: Box<Entry<T>>, given: u32) -> Result<u32, Unkept<T>> {
        self.inbox.push(entry, given)
    }

    /// Counts a put whose buffer went again at once.
    pub(super) fn count_passing(&self, who: Who) {
        self.own.shelf.with(who, |_| {
            self.own.counts.put(0);
            self.own.counts.removed(0);
        });
    }

    pub(super) fn count_allocated(&self) {
        self.own.counts.allocated();
    }

    pub(super) fn view(&self) -> View {
        let (inbox_waits, places) = self.inbox.look();
        // Relaxed: a hint (shard I1).
        let oldest = self.own.oldest.load(Ordering::Relaxed);
        let uncertain = inbox_waits || oldest == NOTHING && self.own.counts.idle() > 0;
        View { oldest, uncertain, places: places + self.own.counts.spare() }
    }

    /// Hands out every place that no buffer uses.
    pub(super) fn surrender(&self, who: Who) -> u32 {
        self.own.shelf.with(who, |shelf| {
            self.empty_inbox(shelf);
            let places = self.own.counts.spare();
            self.own.counts.withdraw(places);
            places
        })
    }

    /// When the oldest was put back, the inbox included.
    pub(super) fn oldest(&self, who: Who) -> u32 {
        self.own.shelf.with(who, |shelf| {
            self.collect(shelf);
            shelf.oldest_stamp()
        })
    }

    /// The oldest and, in hand, its place.
    pub(super) fn evict(&self, who: Who) -> Option<Box<Entry<T>>> {
        self.own.shelf.with(who, |shelf| {
            self.collect(shelf);
            let entry = self.take_oldest(shelf);
            self.publish_oldest(shelf);
            entry
        })
    }

    /// Moves up to [`BATCH`] entries, put back before `stamp`, into `out`; their places go to the pot.
    pub(super) fn drain(&self, stamp: u32, out: &mut Batch<T>, pot: &PermitPool) {
        // A hint, but what came in before this thread began to look is seen in any case.
        let view = self.view();
        if view.oldest >= stamp && !view.uncertain {
            return;
        }
        self.own.shelf.with(Who::Guest, |shelf| {
            self.collect(shelf);
            for slot in out.iter_mut() {
                if shelf.oldest_stamp() >= stamp {
                    break;
                }
                *slot = self.take_oldest(shelf);
                pot.bring(1);
            }
            self.publish_oldest(shelf);
        });
    }

    fn take_oldest(&self, shelf: &mut FreeList<T>) -> Option<Box<Entry<T>>> {
        let entry = shelf.take_oldest()?;
        self.own.counts.removed(entry.bytes());
        self.own.counts.withdraw(1);
        Some(entry)
    }

    /// From here on nothing is kept; what is here stays until it is drained.
    pub(super) fn seal(&self) {
        self.own.shelf.with(Who::Guest, |shelf| {
            let (entries, places) = self.inbox.seal();
            self.bring_in(shelf, entries, places);
            shelf.sealed = true;
        });
    }

    /// At rest: compares the lists with what is counted; returns the classes that hold something and the places that are
    /// free here.
    pub(super) fn validate(&self) -> Result<(Vec<u32>, u32), String> {
        let counts = self.counts();
        self.own.shelf.with(Who::Guest, |shelf| {
            let Recount { count, bytes, classes } = shelf.validate()?;
            let stated = (counts.idle(), counts.idle_bytes());
            if (count, bytes) != stated {
                return Err(format!("{count} entries of {bytes} bytes, but {} of {} are stated", stated.0, stated.1));
            }
            let published = self.own.oldest.load(Ordering::Relaxed);
            if published != shelf.oldest_linked_stamp() {
                return Err(format!("published {published}, oldest {}", shelf.oldest_linked_stamp()));
            }
            Ok((classes, counts.spare() + self.inbox.look().1))
        })
    }

    /// Lays `entry` down on a spare place.
    #[inline(always)]
    fn lay(&self, shelf: &mut FreeList<T>, entry: Box<Entry<T>>) {
        self.own.counts.put(entry.bytes());
        shelf.push(entry);
        self.publish_oldest(shelf);
    }

    /// A take from here: counts it and keeps its place, up to a few.
    #[inline(always)]
    fn taken(&self, shelf: &mut FreeList<T>, entry: &Entry<T>, pot: &PermitPool) {
        self.own.counts.hit(entry.bytes());
        self.publish_oldest(shelf);
        let spare = self.own.counts.spare();
        if spare > MOST_SPARE {
            self.own.counts.withdraw(spare - KEPT_SPARE);
            pot.bring(spare - KEPT_SPARE);
        }
    }

    #[inline(always)]
    fn collect(&self, shelf: &mut FreeList<T>) {
        if self.inbox.look().0 {
            self.collect_all(shelf, IN_INBOX);
        }
    }

    /// Brings the inbox in and offers it spare places, up to `enough`.
    #[cold]
    fn collect_all(&self, shelf: &mut FreeList<T>, enough: u32) {
        if shelf.sealed {
            return;
        }
        let (entries, added) = self.inbox.collect(self.own.counts.spare(), enough);
        self.own.counts.withdraw(added);
        self.bring_in(shelf, entries, 0);
    }

    /// Brings the inbox in, its places too.
    fn empty_inbox(&self, shelf: &mut FreeList<T>) {
        if shelf.sealed {
            return;
        }
        let (entries, places) = self.inbox.empty();
        self.bring_in(shelf, entries, places);
    }

    /// Lays down what came out of the inbox: each entry has used up a place there.
    fn bring_in(&self, shelf: &mut FreeList<T>, entries: Chain<T>, places: u32) {
        self.own.counts.grant(places);
        for entry in entries {
            self.own.counts.grant(1);
            self.lay(shelf, entry);
        }
    }

    #[inline(always)]
    fn publish_oldest(&self, shelf: &mut FreeList<T>) {
        let oldest = shelf.oldest_linked_stamp();
        // Relaxed: a hint (shard I1). Coarse stamps seldom differ, and a load costs less than a store.
        if self.own.oldest.load(Ordering::Relaxed) != oldest {
            self.own.oldest.store(oldest, Ordering::Relaxed);
        }
    }
}

/// Entries on their way out.
pub(super) type Batch<T> = [Option<Box<Entry<T>>>; BATCH];
