//! A cache of idle buffers by size class, for many threads.
//!
//! ```text
//!   thread 0 ── slot 0 ──▶ shard 0   biased lock ▶ [ free list: a stack per class, one recency list | counters ]
//!   other threads ───────────────▶   [ remote free list: one word, pushed without a lock ]
//!   thread 1 ── slot 1 ──▶ shard 1   ...
//!
//!   shared by all shards:   class occupancy bitmap      permit pool = the count limit      eviction counter
//! ```
//!
//! **Take**: the newest buffer of the class in the thread's own free list; else one from its remote free list; else one
//! from another shard that the occupancy bitmap names. **Put**: to the *owner shard*, which is the shard of the thread that
//! took the buffer last: into the free list if that shard is the caller's own, else into its remote free list. Loader
//! threads take buffers and the copying thread puts them, so each buffer circulates between one loader's shard and the
//! copying thread over a single cache line, and loader threads never meet. **Limit**: each idle buffer holds one permit. A
//! put that finds no free permit evicts the buffer that was put longest ago.
//!
//! The cache never calls a back-end, reads a clock, logs or allocates; victims leave by return value. No operation holds
//! two locks.
//!
//! # Invariants
//!
//! - **cache-I1**: A take finds an idle buffer of its class, whichever shard holds it.
//! - **cache-I2**: Idle buffers never exceed the limit, except those that a lowered limit has not evicted yet.
//! - **cache-I3**: A put evicts only if it finds every permit in use; it cannot see permits that another put holds at that
//!   moment. On one thread that is exact, and the victim is the buffer put longest ago. Between threads, ages are compared
//!   by the coarse time passed to `put`.
//! - **cache-I4**: After [`ThreadCache::seal`] no put keeps a buffer, so one drain empties the cache for good.
//! - **cache-I5**: A hit in the thread's own shard writes no cache line that hits of other threads write.
//! - **cache-I6**: At rest all counters are exact, and buffers and permits of a thread that has ended are found by others.
//!
//! # Why this shape
//!
//! Nanoseconds for a take and its put on a 2-core machine, best of some hundred rounds, not inlined:
//!
//! | | one thread | take here, put there | limit and order of age |
//! | --- | --- | --- | --- |
//! | one mutex around a map of vectors | 30 | 185 | possible |
//! | 64 padded slots per class, own slot first | 17 | - | none |
//! | a shard per thread behind a spin bit, a remote free list | 17.4 | 97 | exact on one thread |
//! | **the same, with a biased lock** | **9.1** (6.4 inlined) | **97** | exact on one thread |
//! | lower bound: two exchanges; a ring there and one back | 12.8 | 95 | |
//!
//! An array of slots cannot tell which buffer is oldest without reading all of it; a shard reads the head of one list.
//! Shards that steal but have no remote free list make the copying thread the owner of every buffer that loaders need.
//!
//! A miss with nothing idle reads the own shard and one word. An eviction takes the head of the own recency list; with
//! several threads it first reads one or two lines of each shard in use, for a spare permit or an older buffer.
//!
//! # Prior art
//!
//! - a cache per thread in front of a shared allocator: [tcmalloc](https://google.github.io/tcmalloc/design.html);
//! - a separate list for frees by other threads: `thread_free` of [mimalloc](https://github.com/microsoft/mimalloc), and
//!   local and remote free lists of [sharded-slab](https://docs.rs/sharded-slab); each is a Treiber stack (Treiber, 1986);
//! - the lock biased to its owner: Kawachiya, Koseki, Onodera, "Lock reservation", OOPSLA 2002;
//! - its fence: `AsymmetricThreadFence` of [folly](https://github.com/facebook/folly);
//! - permits: [tokio's `Semaphore`](https://docs.rs/tokio/latest/tokio/sync/struct.Semaphore.html).

mod biased_lock;
mod counters;
mod entry;
mod free_list;
mod permits;
mod remote_list;
mod shard;
mod slot;

pub use entry::Entry;

use crate::policy::Window;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Backoff, Mutex};
use biased_lock::{LockAccess, asymmetric_fence};
use counters::Evictions;
use free_list::NO_STAMP;
use permits::{Occupancy, PermitPool};
use remote_list::PushError;
use shard::Shard;
use slot::ThreadSlot;
use std::fmt;

/// The occupancy bitmap keeps one bit for each shard in a 64-bit word.
const SHARDS_MAX: usize = 64;

/// Permits that a put claims from the pool at once.
const PERMITS_PER_CLAIM: u32 = 4;

/// How often a put searches for a permit that is moving between other threads before it evicts its own buffer.
const PERMIT_SEARCHES: u32 = 64;

/// Idle buffers by class, for many threads. See the module.
pub struct ThreadCache<T> {
    shards: Box<[Shard<T>]>,
    occupancy: Occupancy,
    permits: PermitPool,
    evictions: Evictions,
    /// A bit for each shard that ever held a buffer or a permit.
    used: AtomicU64,
    /// Sums at the last reset: the window began there.
    reset: Mutex<Window>,
}

/// Result of a put. All fields empty: the buffer was kept and nothing else happened.
#[derive(Debug)]
#[must_use = "what comes back from a put must be released by the caller"]
pub struct Put<T> {
    /// The buffer itself, if the cache is sealed or does not know its class.
    pub handed_back: Option<Box<Entry<T>>>,
    /// The buffer that the count limit evicted.
    pub victim: Option<Box<Entry<T>>>,
    /// That eviction makes a check of the rates due.
    pub check_due: bool,
}

/// How a search treats what it reads of a shard without the lock.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Search {
    /// Trust it: it may be a moment old.
    ByHints,
    /// Look into every shard under its lock.
    Full,
}

/// Permits that a put obtained, and the buffer that was evicted for them.
struct Obtained<T> {
    permits: u32,
    victim: Option<Box<Entry<T>>>,
}

impl<T> ThreadCache<T> {
    /// An empty cache for classes `0..classes` that keeps up to `limit` buffers. `shards` is rounded up to a power of
    /// two, at most 64; twice the number of cores keeps threads apart, more threads than shards share them.
    pub fn new(classes: u32, limit: usize, shards: usize) -> Self {
        let shards = shards.clamp(1, SHARDS_MAX).next_power_of_two();
        Self {
            shards: (0..shards).map(|_| Shard::new(classes)).collect(),
            occupancy: Occupancy::new(classes),
            permits: PermitPool::new(limit),
            evictions: Evictions::new(),
            used: AtomicU64::new(0),
            reset: Mutex::new(Window::default()),
        }
    }

    /// An idle buffer of `class`, the calling thread's newest first.
    #[inline]
    pub fn take(&self, class: u32) -> Option<Box<Entry<T>>> {
        self.take_at(slot::current(), class)
    }

    /// Puts `entry` back at `coarse_time`.
    #[inline]
    pub fn put(&self, entry: Box<Entry<T>>, coarse_time: u32) -> Put<T> {
        self.put_at(slot::current(), entry, coarse_time)
    }

    /// Counts a get of the calling thread that the underlying allocator served.
    pub fn count_allocated(&self) {
        let own = self.shard_of(slot::current().number());
        self.shards[own].count_allocated();
        self.mark_used(own);
    }

    /// Removes the buffer put longest ago; not counted as an eviction.
    pub fn evict_oldest(&self) -> Option<Box<Entry<T>>> {
        let slot = slot::current();
        loop {
            let at = self.oldest_shard(slot, Search::ByHints)?;
            let victim = self.shards[at].evict(access(slot, at));
            if victim.is_some() {
                self.permits.add(1);
                return victim;
            }
        }
    }

    /// Removes every buffer that was put before `coarse_time` and passes it to `sink`, outside every lock.
    pub fn drain_older_than(&self, coarse_time: u32, mut sink: impl FnMut(Box<Entry<T>>)) {
        // All shards, not only those marked used: the first put of a shard may be under way, and after `seal` no later
        // drain would find it (cache-I4).
        for shard in &self.shards {
            loop {
                let mut batch = [const { None }; shard::BATCH];
                shard.drain(coarse_time, &mut batch, &self.permits);
                let more = batch.last().is_some_and(Option::is_some);
                batch.into_iter().flatten().for_each(&mut sink);
                if !more {
                    break;
                }
            }
        }
    }

    /// Passes every idle buffer to `sink`.
    pub fn drain_all(&self, sink: impl FnMut(Box<Entry<T>>)) {
        self.drain_older_than(NO_STAMP, sink);
    }

    /// Orders what the caller did before this call with puts of other threads: a put that
    /// [`totals`](ThreadCache::totals) does not count afterwards happens entirely after this call, and its thread then
    /// reads what the caller wrote. Costs microseconds.
    pub fn order_with_puts(&self) {
        asymmetric_fence::heavy();
    }

    /// From now on each put is handed back. Idle buffers stay until they are drained.
    pub fn seal(&self) {
        self.shards.iter().for_each(Shard::seal);
    }

    /// How many idle buffers the cache may keep.
    pub fn limit(&self) -> usize {
        self.permits.limit()
    }

    /// Sets another limit. If more buffers are idle, the oldest go to `sink`, not counted as evictions.
    pub fn set_limit(&self, limit: usize, mut sink: impl FnMut(Box<Entry<T>>)) {
        if !self.permits.set_limit(limit) {
            return;
        }
        // All permits sum to the limit, so those that the pool lacks are in free lists, in remote free lists, or held by
        // a put that is about to use them.
        let backoff = Backoff::new();
        while self.permits.in_debt() {
            self.shards.iter().for_each(|shard| self.permits.add(shard.revoke(LockAccess::Remote)));
            if self.permits.in_debt() {
                self.evict_oldest().map_or_else(|| backoff.snooze(), &mut sink);
            }
        }
    }

    #[inline(always)]
    fn take_at(&self, slot: ThreadSlot, class: u32) -> Option<Box<Entry<T>>> {
        let own = self.shard_of(slot.number());
        let mut entry = match self.shards[own].take(access(slot, own), class, &self.permits) {
            Some(entry) => entry,
            None => self.steal(own, class)?,
        };
        // Compare first: a store would make the line dirty for nothing.
        if entry.owner != slot.number() {
            entry.owner = slot.number();
        }
        Some(entry)
    }

    fn steal(&self, own: usize, class: u32) -> Option<Box<Entry<T>>> {
        let elsewhere = self.occupancy.shards(class) & !(1 << own);
        bits_from(own, elsewhere).find_map(|at| self.shards[at].steal(class, at, &self.occupancy, &self.permits))
    }

    #[inline(always)]
    fn put_at(&self, slot: ThreadSlot, mut entry: Box<Entry<T>>, coarse_time: u32) -> Put<T> {
        let stamp = coarse_time.min(NO_STAMP - 1);
        if entry.stamp != stamp {
            entry.stamp = stamp;
        }
        match self.insert(slot, entry, 0) {
            Ok(()) => Put { handed_back: None, victim: None, check_due: false },
            Err(error) => self.put_slow(slot, error),
        }
    }

    #[cold]
    fn put_slow(&self, slot: ThreadSlot, error: PushError<T>) -> Put<T> {
        let entry = match error {
            PushError::NoPermit(entry) => entry,
            PushError::Sealed(entry) => return Put { handed_back: Some(entry), victim: None, check_due: false },
        };
        let Some(Obtained { permits, victim }) = self.obtain_permits(slot) else {
            // The limit is 0, or other threads held every permit during the whole search: evict the buffer itself.
            let own = self.shard_of(slot.number());
            self.shards[own].count_evicted_put(access(slot, own));
            self.mark_used(own);
            return Put { handed_back: None, victim: Some(entry), check_due: self.evictions.add() };
        };
        let handed_back = match self.insert(slot, entry, permits) {
            Ok(()) => None,
            Err(PushError::NoPermit(entry) | PushError::Sealed(entry)) => {
                self.permits.add(permits);
                Some(entry)
            }
        };
        let check_due = victim.is_some() && self.evictions.add();
        Put { handed_back, victim, check_due }
    }

    /// Inserts `entry` into its owner shard, with a permit that is free there or one of those `granted`.
    #[inline(always)]
    fn insert(&self, slot: ThreadSlot, entry: Box<Entry<T>>, granted: u32) -> Result<(), PushError<T>> {
        let (class, owner) = (entry.class(), self.shard_of(entry.owner));
        if !self.occupancy.has_class(class) {
            return Err(PushError::Sealed(entry));
        }
        let shard = &self.shards[owner];
        let unused =
            if slot.owns(owner) { shard.put(slot, entry, granted)? } else { shard.put_remote(entry, granted)? };
        self.permits.add(unused);
        // After the insertion: see the order in `permits`.
        if self.occupancy.set(class, owner) {
            self.mark_used(owner);
        }
        Ok(())
    }

    /// Permits from the pool; else spare ones of any shard; else that of the buffer put longest ago.
    fn obtain_permits(&self, slot: ThreadSlot) -> Option<Obtained<T>> {
        let backoff = Backoff::new();
        let mut search = Search::ByHints;
        for _ in 0..PERMIT_SEARCHES {
            if self.limit() == 0 {
                break;
            }
            let permits = self.spare_permits(slot, search);
            if permits > 0 {
                return Some(Obtained { permits, victim: None });
            }
            let victim = self.oldest_shard(slot, search).and_then(|at| self.shards[at].evict(access(slot, at)));
            if victim.is_some() {
                return Some(Obtained { permits: 1, victim });
            }
            backoff.snooze();
            search = Search::Full;
        }
        None
    }

    fn spare_permits(&self, slot: ThreadSlot, search: Search) -> u32 {
        let claimed = self.permits.claim(PERMITS_PER_CLAIM);
        if claimed > 0 {
            return claimed;
        }
        let promising = |&at: &usize| search == Search::Full || self.shards[at].hint().permits > 0;
        let mut found = self
            .candidates(self.shard_of(slot.number()), search)
            .filter(promising)
            .map(|at| self.shards[at].revoke(access(slot, at)));
        let permits = found.find(|&permits| permits > 0).unwrap_or(0);
        let kept = permits.min(PERMITS_PER_CLAIM);
        self.permits.add(permits - kept);
        kept
    }

    /// The shard with the buffer put longest ago; the own shard if ages are equal.
    fn oldest_shard(&self, slot: ThreadSlot, search: Search) -> Option<usize> {
        let age = |at: usize| {
            let hint = self.shards[at].hint();
            let look = hint.uncertain || search == Search::Full;
            if look { self.shards[at].oldest(access(slot, at)) } else { hint.oldest }
        };
        let ages = self
            .candidates(self.shard_of(slot.number()), search)
            .map(|at| (age(at), at))
            .filter(|&(stamp, _)| stamp != NO_STAMP);
        ages.reduce(|a, b| if b.0 < a.0 { b } else { a }).map(|(_, at)| at)
    }

    fn candidates(&self, own: usize, search: Search) -> impl Iterator<Item = usize> + use<T> {
        let all = u64::MAX >> (SHARDS_MAX - self.shards.len());
        bits_from(own, if search == Search::Full { all } else { self.used.load(Ordering::Relaxed) })
    }

    #[inline(always)]
    fn shard_of(&self, slot: u32) -> usize {
        slot as usize & (self.shards.len() - 1)
    }

    fn mark_used(&self, shard: usize) {
        // Relaxed: the bits say which shards to search; the locks publish what is in them.
        if self.used.load(Ordering::Relaxed) & 1 << shard == 0 {
            self.used.fetch_or(1 << shard, Ordering::Relaxed);
        }
    }

    fn used_shards(&self) -> impl Iterator<Item = &Shard<T>> {
        self.candidates(0, Search::ByHints).map(|at| &self.shards[at])
    }
}

/// How a thread in `slot` accesses the shard `at`.
#[inline(always)]
fn access(slot: ThreadSlot, at: usize) -> LockAccess {
    if slot.owns(at) { LockAccess::Owner(slot) } else { LockAccess::Remote }
}

/// The numbers of the set bits, from `first` upward and then from 0.
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
