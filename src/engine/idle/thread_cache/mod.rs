//! The front of the pool: idle buffers by class, for many threads.
//!
//! ```text
//!   thread --seat--> shard 0   [ lock | shelf: class stacks + recency ]   [ inbox ] <-- brought home by other threads
//!                    shard 1   [ lock | shelf                         ]   [ inbox ]
//!                    ...
//!   whereabouts  class -> shards that may hold it        pot  places nobody uses        evictions
//! ```
//!
//! **Take**: the newest of the class on the thread's own shelf; else what was brought home; else, if `whereabouts` names
//! other shards, from those, whoever put it there. **Put**: home, to the shard of the thread that took the buffer last:
//! on the shelf if that is the caller's own, else into the inbox. A loader's producers get and its copying thread puts,
//! so buffers circulate between one producer's shard and the copier along a single cache line, and producers never meet.
//! **Limit**: every idle buffer has a place (`places`). A put that finds no place anywhere evicts the buffer that was
//! returned longest ago, then keeps its own.
//!
//! It never calls a back-end, reads a clock, logs or allocates; victims leave by value. No operation holds two locks.
//!
//! # Promises
//!
//! 1. An idle buffer of the class is found by a take, on whichever shard it is.
//! 2. Idle buffers never exceed the limit, at rest or running, but for those that a lowered limit is still pushing out.
//! 3. A put evicts only if it finds every place used; the few that another put has in hand just then it cannot see. On
//!    one thread that is exact, and so is the order: the victim is the buffer returned longest ago. Between threads ages
//!    are compared by the coarse stamp that puts hand in.
//! 4. After [`ThreadCache::seal`] no put keeps anything, so one drain empties the front for good.
//! 5. A hit on the thread's own shard writes to no cache line that other threads write to in their own hits.
//! 6. At rest the figures are exact, and a thread that ended leaves nothing that others do not find.
//!
//! # Why this shape
//!
//! Nanoseconds for a get and its put on a 2-core machine, best of some hundred rounds, the front called and not inlined:
//!
//! | | one thread | get here, put there | limit and order of age |
//! | --- | --- | --- | --- |
//! | one mutex around a map of vectors | 30 | 185 | possible |
//! | 64 padded slots a class, own slot first | 17 | - | none |
//! | a shard a thread behind a plain bit, an inbox | 17.4 | 97 | exact on one thread |
//! | **the same, the lock leaning towards the thread** | **9.1** (6.4 inlined) | **97** | exact on one thread |
//! | floor: two exchanges; a ring there and one back | 12.8 | 95 | |
//!
//! Slots cannot say which buffer is oldest without looking at all of them, and still need two exchanges. A shard says it
//! at once. Stealing shards without an inbox make the copying thread the owner of everything that producers want.
//!
//! A miss with nothing idle looks at the own shard and at one word. An eviction takes the head of the own list; with more
//! threads it first looks at one or two lines of each shard in use, for a spare place or an older buffer.

mod asymmetric_fence;
mod biased_lock;
mod counters;
mod entry;
mod free_list;
mod occupancy;
mod permits;
mod remote_list;
mod shard;
mod slot;
mod validate;

pub use entry::Entry;

use crate::policy::Window;
use crate::sync::Backoff;
use crate::sync::atomic::{AtomicU64, Ordering};
use biased_lock::Who;
use counters::Evictions;
use free_list::NOTHING;
use occupancy::Occupancy;
use permits::PermitPool;
use remote_list::Unkept;
use shard::Shard;
use slot::ThreadSlot;
use std::fmt;

/// Shards are bits of a word.
const MOST_SHARDS: usize = 64;

/// A shard that ran out of places takes this many at once from the pot.
const PLACES_AT_ONCE: u32 = 4;

/// A put looks so often for a place that is on its way between other threads before it gives its own buffer up.
const SEARCHES: u32 = 64;

/// Idle buffers by class, for many threads. See the module.
pub struct ThreadCache<T> {
    shards: Box<[Shard<T>]>,
    whereabouts: Occupancy,
    pot: PermitPool,
    evictions: Evictions,
    /// A bit for each shard that ever held a buffer or a place.
    used: AtomicU64,
    reset: crate::sync::Mutex<Window>,
}

/// What became of a put: all empty means that the buffer was kept and nothing else happened.
#[derive(Debug)]
#[must_use = "what comes back from a put must be released by the caller"]
pub struct Put<T> {
    /// The buffer itself, which the front does not keep: it is sealed, or does not know the class.
    pub handed_back: Option<Box<Entry<T>>>,
    /// The buffer that the count limit pushed out.
    pub victim: Option<Box<Entry<T>>>,
    /// That eviction made a check of the rates due.
    pub check_due: bool,
}

/// How to look at a shard: what can be seen without its lock may be a moment behind.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Trust {
    Hints,
    Nothing,
}

/// Places that a put found, and the buffer that had to leave for it.
struct Found<T> {
    places: u32,
    victim: Option<Box<Entry<T>>>,
}

impl<T> ThreadCache<T> {
    /// An empty front for classes `0..classes` that keeps up to `limit` buffers. `shards` is rounded up to a power of
    /// two, 64 at most; twice the number of cores keeps threads apart, more threads than that share.
    pub fn new(classes: u32, limit: usize, shards: usize) -> Self {
        let shards = shards.clamp(1, MOST_SHARDS).next_power_of_two();
        Self {
            shards: (0..shards).map(|_| Shard::new(classes)).collect(),
            whereabouts: Occupancy::new(classes),
            pot: PermitPool::new(limit),
            evictions: Evictions::new(),
            used: AtomicU64::new(0),
            reset: crate::sync::Mutex::new(Window::default()),
        }
    }

    /// An idle buffer of `class`, the calling thread's newest first.
    #[inline]
    pub fn take(&self, class: u32) -> Option<Box<Entry<T>>> {
        self.take_at(slot::current(), class)
    }

    /// Puts `entry` back at the coarse time `epoch`.
    #[inline]
    pub fn put(&self, entry: Box<Entry<T>>, epoch: u32) -> Put<T> {
        self.put_at(slot::current(), entry, epoch)
    }

    /// Counts a get of the calling thread that was served from below.
    pub fn count_allocated(&self) {
        let own = self.shard_of(slot::current().number());
        self.shards[own].count_allocated();
        self.mark_used(own);
    }

    /// The buffer returned longest ago, not counted as evicted.
    pub fn evict_oldest(&self) -> Option<Box<Entry<T>>> {
        let seat = slot::current();
        loop {
            let at = self.oldest_shard(seat, Trust::Hints)?;
            let victim = self.shards[at].evict(who(seat, at));
            if victim.is_some() {
                self.pot.bring(1);
                return victim;
            }
        }
    }

    /// Gives every buffer that was put back before `epoch` to `sink`, which runs outside every lock.
    pub fn drain_older_than(&self, epoch: u32, mut sink: impl FnMut(Box<Entry<T>>)) {
        // All shards, since the first put of one may be under way: sealed, that one is the last.
        for shard in &self.shards {
            loop {
                let mut batch = [const { None }; shard::BATCH];
                shard.drain(epoch, &mut batch, &self.pot);
                let more = batch.last().is_some_and(Option::is_some);
                batch.into_iter().flatten().for_each(&mut sink);
                if !more {
                    break;
                }
            }
        }
    }

    /// Gives every idle buffer to `sink`.
    pub fn drain_all(&self, sink: impl FnMut(Box<Entry<T>>)) {
        self.drain_older_than(NOTHING, sink);
    }

    /// Orders what the caller did before this call with puts of other threads: a put whose count is not in
    /// [`totals`](ThreadCache::totals) afterwards comes after it as a whole, and whatever its thread reads next sees what the
    /// caller wrote. Costs microseconds.
    pub fn order_with_puts(&self) {
        asymmetric_fence::heavy();
    }

    /// From here on each put is handed back. What is idle stays until it is drained.
    pub fn seal(&self) {
        self.shards.iter().for_each(Shard::seal);
    }

    /// How many idle buffers it may keep.
    pub fn limit(&self) -> usize {
        self.pot.limit()
    }

    /// Sets another limit. If more are idle, the oldest go to `sink`, not counted as evicted.
    pub fn set_limit(&self, limit: usize, mut sink: impl FnMut(Box<Entry<T>>)) {
        if !self.pot.set_limit(limit) {
            return;
        }
        // The sum of all places is the limit, so what the pot lacks is on shelves, in inboxes, or in the hand of a put
        // that is about to lay it down.
        let backoff = Backoff::new();
        while self.pot.in_debt() {
            self.shards.iter().for_each(|shard| self.pot.bring(shard.surrender(Who::Guest)));
            if self.pot.in_debt() {
                self.evict_oldest().map_or_else(|| backoff.snooze(), &mut sink);
            }
        }
    }

    #[inline(always)]
    fn take_at(&self, seat: ThreadSlot, class: u32) -> Option<Box<Entry<T>>> {
        let own = self.shard_of(seat.number());
        let mut entry = match self.shards[own].take(who(seat, own), class, &self.pot) {
            Some(entry) => entry,
            None => self.steal(own, class)?,
        };
        if entry.home != seat.number() {
            entry.home = seat.number();
        }
        Some(entry)
    }

    fn steal(&self, own: usize, class: u32) -> Option<Box<Entry<T>>> {
        let elsewhere = self.whereabouts.shards(class) & !(1 << own);
        bits_from(own, elsewhere).find_map(|at| self.shards[at].steal(class, at, &self.whereabouts, &self.pot))
    }

    #[inline(always)]
    fn put_at(&self, seat: ThreadSlot, mut entry: Box<Entry<T>>, epoch: u32) -> Put<T> {
        let stamp = epoch.min(NOTHING - 1);
        if entry.stamp != stamp {
            entry.stamp = stamp;
        }
        match self.keep(seat, entry, 0) {
            Ok(()) => Put { handed_back: None, victim: None, check_due: false },
            Err(unkept) => self.put_slowly(seat, unkept),
        }
    }

    #[cold]
    fn put_slowly(&self, seat: ThreadSlot, unkept: Unkept<T>) -> Put<T> {
        let entry = match unkept {
            Unkept::NoPlace(entry) => entry,
            Unkept::Sealed(entry) => return Put { handed_back: Some(entry), victim: None, check_due: false },
        };
        let Some(Found { places, victim }) = self.find_place(seat) else {
            // A limit of nought, or every place in other hands for long: it came and is the one to go.
            let own = self.shard_of(seat.number());
            self.shards[own].count_passing(who(seat, own));
            self.mark_used(own);
            return Put { handed_back: None, victim: Some(entry), check_due: self.evictions.add() };
        };
        let handed_back = match self.keep(seat, entry, places) {
            Ok(()) => None,
            Err(Unkept::NoPlace(entry) | Unkept::Sealed(entry)) => {
                self.pot.bring(places);
                Some(entry)
            }
        };
        let check_due = victim.is_some() && self.evictions.add();
        Put { handed_back, victim, check_due }
    }

    /// Keeps `entry` at its home, on a place that is free there or one of those `given`.
    #[inline(always)]
    fn keep(&self, seat: ThreadSlot, entry: Box<Entry<T>>, given: u32) -> Result<(), Unkept<T>> {
        let (class, home) = (entry.class(), self.shard_of(entry.home));
        if !self.whereabouts.knows(class) {
            return Err(Unkept::Sealed(entry));
        }
        let shard = &self.shards[home];
        let no_room = if seat.owns(home) { shard.put(seat, entry, given)? } else { shard.bring(entry, given)? };
        self.pot.bring(no_room);
        // After the buffer is in: see `whereabouts`.
        if self.whereabouts.set(class, home) {
            self.mark_used(home);
        }
        Ok(())
    }

    /// A place from the pot; else any place that nobody uses; else that of the buffer returned longest ago.
    fn find_place(&self, seat: ThreadSlot) -> Option<Found<T>> {
        let backoff = Backoff::new();
        let mut trust = Trust::Hints;
        for _ in 0..SEARCHES {
            if self.limit() == 0 {
                break;
            }
            let places = self.unused_places(seat, trust);
            if places > 0 {
                return Some(Found { places, victim: None });
            }
            let victim = self.oldest_shard(seat, trust).and_then(|at| self.shards[at].evict(who(seat, at)));
            if victim.is_some() {
                return Some(Found { places: 1, victim });
            }
            backoff.snooze();
            trust = Trust::Nothing;
        }
        None
    }

    fn unused_places(&self, seat: ThreadSlot, trust: Trust) -> u32 {
        let claimed = self.pot.claim(PLACES_AT_ONCE);
        if claimed > 0 {
            return claimed;
        }
        let promising = |&at: &usize| trust == Trust::Nothing || self.shards[at].view().places > 0;
        let mut found = self
            .worth_a_look(self.shard_of(seat.number()), trust)
            .filter(promising)
            .map(|at| self.shards[at].surrender(who(seat, at)));
        let places = found.find(|&places| places > 0).unwrap_or(0);
        let in_hand = places.min(PLACES_AT_ONCE);
        self.pot.bring(places - in_hand);
        in_hand
    }

    /// The shard with the buffer put back longest ago; `own` if ages are equal.
    fn oldest_shard(&self, seat: ThreadSlot, trust: Trust) -> Option<usize> {
        let age = |at: usize| {
            let view = self.shards[at].view();
            if view.uncertain || trust == Trust::Nothing { self.shards[at].oldest(who(seat, at)) } else { view.oldest }
        };
        let ages = self
            .worth_a_look(self.shard_of(seat.number()), trust)
            .map(|at| (age(at), at))
            .filter(|&(stamp, _)| stamp != NOTHING);
        ages.reduce(|a, b| if b.0 < a.0 { b } else { a }).map(|(_, at)| at)
    }

    fn worth_a_look(&self, own: usize, trust: Trust) -> impl Iterator<Item = usize> + use<T> {
        let all = u64::MAX >> (MOST_SHARDS - self.shards.len());
        bits_from(own, if trust == Trust::Nothing { all } else { self.used.load(Ordering::Relaxed) })
    }

    #[inline(always)]
    fn shard_of(&self, seat: u32) -> usize {
        seat as usize & (self.shards.len() - 1)
    }

    fn mark_used(&self, shard: usize) {
        // Relaxed: which shards are worth a look; what is in them comes with their locks.
        if self.used.load(Ordering::Relaxed) & 1 << shard == 0 {
            self.used.fetch_or(1 << shard, Ordering::Relaxed);
        }
    }

    /// The shards in use.
    fn used(&self) -> impl Iterator<Item = &Shard<T>> {
        self.worth_a_look(0, Trust::Hints).map(|at| &self.shards[at])
    }
}

/// As whom a thread on `seat` comes to the shard `at`.
#[inline(always)]
fn who(seat: ThreadSlot, at: usize) -> Who {
    if seat.owns(at) { Who::Owner(seat) } else { Who::Guest }
}

/// The numbers of the set bits, beginning at `first` and going round.
fn bits_from(first: usize, bits: u64) -> impl Iterator<Item = usize> {
    let mut left = bits & (u64::MAX << first);
    let mut then = bits ^ left;
    std::iter::from_fn(move || {
        if left == 0 {
            left = std::mem::take(&mut then);
        }
        let next = (left != 0).then(|| left.trailing_zeros() as usize)?;
        left &= left - 1;
        Some(next)
    })
}

impl<T> fmt::Debug for ThreadCache<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ThreadCache")
            .field("limit", &self.limit())
            .field("idle", &self.idle_count())
            .field("idle_bytes", &self.idle_bytes())
            .field("totals", &self.totals())
            .finish_non_exhaustive()
    }
}

#[cfg(all(test, loom))]
mod models;

#[cfg(all(test, not(loom)))]
mod tests;
