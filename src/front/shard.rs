//! One thread's part of the front: its shelf behind a lock of one bit, and its inbox beside it.
//!
//! ```text
//!   own lines      lock | shelf | spare places | oldest stamp | allocated     the thread that sits here
//!   another line   inbox: newest entry + places                               threads that bring buffers home
//! ```
//!
//! The owner's hit takes the uncontended bit, moves a handful of pointers and lets go. Other threads come in by the lock
//! only to steal, evict, drain or add up, a few dozen instructions each; what they bring home waits in the inbox until
//! the owner runs out or somebody with the lock looks.
//!
//! - (shard I1) `spare` and `oldest` are written under the lock, and read without it as a hint where to look.
//! - (shard I2) Whoever has the lock and is about to judge by age collects the inbox first.

use super::entry::Entry;
use super::inbox::{Chain, Inbox, MOST_PLACES, Unkept};
use super::places::Pot;
use super::shelf::{NOTHING, Shelf};
use super::spin::SpinLock;
use super::whereabouts::Whereabouts;
use crate::sync::CachePadded;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering};

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
    inbox: CachePadded<Inbox<T>>,
}

struct Own<T> {
    shelf: SpinLock<Shelf<T>>,
    /// Places that takes have freed here.
    spare: AtomicU32,
    /// The stamp of the oldest on the shelf.
    oldest: AtomicU32,
    /// Misses of the threads that sit here.
    allocated: AtomicU64,
}

/// What can be seen from outside.
pub(super) struct View {
    pub(super) oldest: u32,
    /// Something may lie in the inbox that is older than `oldest` says.
    pub(super) inbox_waits: bool,
    pub(super) places: u32,
}

/// Sums over a shard.
#[derive(Default)]
pub(super) struct Content {
    pub(super) count: usize,
    pub(super) bytes: usize,
    pub(super) hits: u64,
    pub(super) puts: u64,
    pub(super) allocated: u64,
}

impl<T> Shard<T> {
    pub(super) fn new(classes: u32) -> Self {
        let own = Own {
            shelf: SpinLock::new(Shelf::new(classes)),
            spare: AtomicU32::new(0),
            oldest: AtomicU32::new(NOTHING),
            allocated: AtomicU64::new(0),
        };
        Self { own: CachePadded::new(own), inbox: CachePadded::new(Inbox::new()) }
    }

    /// The owner's take: the newest of the shelf, else what was brought home.
    #[inline]
    pub(super) fn take(&self, class: u32, pot: &Pot) -> Option<Box<Entry<T>>> {
        self.own.shelf.with(|shelf| {
            if let Some(entry) = shelf.take_newest(class) {
                self.taken(shelf, pot);
                return Some(entry);
            }
            self.collect(shelf);
            let entry = shelf.take_newest(class)?;
            self.taken(shelf, pot);
            Some(entry)
        })
    }

    /// A take by a thread that sits elsewhere. One that looks in vain clears the bit (see `whereabouts`).
    pub(super) fn steal(&self, class: u32, at: usize, whereabouts: &Whereabouts, pot: &Pot) -> Option<Box<Entry<T>>> {
        self.own.shelf.with(|shelf| {
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
            self.taken(shelf, pot);
            Some(entry)
        })
    }

    /// The owner's put, on a spare place of the shard or one of those `given`, whose rest stays here. If somebody else is
    /// inside, it goes through the inbox. Returns the given places that found no room.
    #[inline]
    pub(super) fn put(&self, entry: Box<Entry<T>>, given: u32) -> Result<u32, Unkept<T>> {
        let attempt = self.own.shelf.try_with(entry, |shelf, entry| {
            if shelf.sealed {
                return Err(Unkept::Sealed(entry));
            }
            let (waits, left_there) = self.inbox.look();
            if waits {
                self.collect_all(shelf, 0);
            }
            let mut places = self.own.spare.load(Ordering::Relaxed) + given;
            if places == 0 {
                if left_there == 0 {
                    return Err(Unkept::NoPlace(entry));
                }
                self.empty_inbox(shelf);
                places = self.own.spare.load(Ordering::Relaxed);
            }
            let Some(left) = places.checked_sub(1) else { return Err(Unkept::NoPlace(entry)) };
            self.own.spare.store(left, Ordering::Relaxed);
            shelf.puts += 1;
            shelf.push(entry);
            self.publish_oldest(shelf);
            Ok(0)
        });
        attempt.unwrap_or_else(|entry| self.bring(entry, given))
    }

    /// The put of a thread that sits elsewhere; never waits.
    pub(super) fn bring(&self, entry: Box<Entry<T>>, given: u32) -> Result<u32, Unkept<T>> {
        self.inbox.push(entry, given)
    }

    /// Counts a put whose buffer went again at once.
    pub(super) fn count_put(&self) {
        self.own.shelf.with(|shelf| shelf.puts += 1);
    }

    pub(super) fn count_allocated(&self) {
        // Relaxed: a number on its own.
        self.own.allocated.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn view(&self) -> View {
        let (inbox_waits, places) = self.inbox.look();
        // Relaxed: hints (shard I1).
        let spare = self.own.spare.load(Ordering::Relaxed);
        View { oldest: self.own.oldest.load(Ordering::Relaxed), inbox_waits, places: places + spare }
    }

    /// Hands out every place that no buffer uses.
    pub(super) fn surrender(&self) -> u32 {
        self.own.shelf.with(|shelf| {
            self.empty_inbox(shelf);
            // Relaxed: under the lock (shard I1).
            self.own.spare.swap(0, Ordering::Relaxed)
        })
    }

    /// When the oldest was put back, the inbox included.
    pub(super) fn oldest_of_all(&self) -> u32 {
        self.own.shelf.with(|shelf| {
            self.collect(shelf);
            shelf.oldest_stamp()
        })
    }

    /// The oldest and, in hand, its place.
    pub(super) fn evict(&self) -> Option<Box<Entry<T>>> {
        self.own.shelf.with(|shelf| {
            self.collect(shelf);
            let entry = shelf.take_oldest();
            self.publish_oldest(shelf);
            entry
        })
    }

    /// Moves up to [`BATCH`] entries, put back before `stamp`, into `out`; their places go to the pot.
    pub(super) fn drain(&self, stamp: u32, out: &mut Batch<T>, pot: &Pot) {
        // Relaxed: hints. What came in before this thread began to look is seen in any case.
        if self.own.oldest.load(Ordering::Relaxed) >= stamp && !self.inbox.look().0 {
            return;
        }
        self.own.shelf.with(|shelf| {
            self.collect(shelf);
            for slot in out.iter_mut() {
                if shelf.oldest_stamp() >= stamp {
                    break;
                }
                *slot = shelf.take_oldest();
                pot.bring(1);
            }
            self.publish_oldest(shelf);
        });
    }

    /// From here on nothing is kept; what is here stays until it is drained.
    pub(super) fn seal(&self) {
        self.own.shelf.with(|shelf| {
            let (entries, places) = self.inbox.seal();
            self.bring_in(shelf, entries, places);
            shelf.sealed = true;
        });
    }

    pub(super) fn content(&self) -> Content {
        // Relaxed: a number on its own.
        let allocated = self.own.allocated.load(Ordering::Relaxed);
        self.own.shelf.with(|shelf| {
            self.collect(shelf);
            let (count, bytes) = (shelf.count as usize, shelf.bytes);
            Content { count, bytes, hits: shelf.hits, puts: shelf.puts, allocated }
        })
    }

    /// At rest: checks the lists and returns the classes that hold something and the places that are free here.
    pub(super) fn validate(&self) -> Result<(Vec<u32>, u32), String> {
        self.own.shelf.with(|shelf| {
            self.collect(shelf);
            let classes = shelf.validate()?;
            let published = self.own.oldest.load(Ordering::Relaxed);
            if published != shelf.oldest_stamp() {
                return Err(format!("published {published}, oldest {}", shelf.oldest_stamp()));
            }
            Ok((classes, self.own.spare.load(Ordering::Relaxed) + self.inbox.look().1))
        })
    }

    /// A take from here: counts it and keeps its place, up to a few.
    #[inline(always)]
    fn taken(&self, shelf: &mut Shelf<T>, pot: &Pot) {
        shelf.hits += 1;
        self.publish_oldest(shelf);
        let spare = self.own.spare.load(Ordering::Relaxed) + 1;
        let kept = if spare > MOST_SPARE { KEPT_SPARE } else { spare };
        self.own.spare.store(kept, Ordering::Relaxed);
        pot.bring(spare - kept);
    }

    #[inline(always)]
    fn collect(&self, shelf: &mut Shelf<T>) {
        if self.inbox.look().0 {
            self.collect_all(shelf, IN_INBOX);
        }
    }

    /// Brings the inbox in and offers it spare places, up to `enough`.
    #[cold]
    fn collect_all(&self, shelf: &mut Shelf<T>, enough: u32) {
        if shelf.sealed {
            return;
        }
        let spare = self.own.spare.load(Ordering::Relaxed);
        let (entries, added) = self.inbox.collect(spare, enough);
        self.own.spare.store(spare - added, Ordering::Relaxed);
        self.bring_in(shelf, entries, 0);
    }

    /// Brings the inbox in, its places too.
    fn empty_inbox(&self, shelf: &mut Shelf<T>) {
        if shelf.sealed {
            return;
        }
        let (entries, places) = self.inbox.empty();
        self.bring_in(shelf, entries, places);
    }

    fn bring_in(&self, shelf: &mut Shelf<T>, entries: Chain<T>, places: u32) {
        let spare = self.own.spare.load(Ordering::Relaxed);
        self.own.spare.store(spare + places, Ordering::Relaxed);
        for entry in entries {
            shelf.puts += 1;
            shelf.push(entry);
        }
        self.publish_oldest(shelf);
    }

    #[inline(always)]
    fn publish_oldest(&self, shelf: &mut Shelf<T>) {
        let oldest = shelf.oldest_stamp();
        // Coarse stamps seldom differ, and a store that changes nothing would still take the line from its readers.
        if self.own.oldest.load(Ordering::Relaxed) != oldest {
            self.own.oldest.store(oldest, Ordering::Relaxed);
        }
    }
}

/// Entries on their way out.
pub(super) type Batch<T> = [Option<Box<Entry<T>>>; BATCH];
