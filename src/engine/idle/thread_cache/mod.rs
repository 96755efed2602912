//! A cache of idle buffers by size class, for many threads.
//!
//! ```text
//!   thread 0 ── slot 0 ──▶ shard 0   lock ▶ [ free list: one list per class | counters ]
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
//! put that finds no free permit evicts the buffer that was put longest ago. **Ages** are counted in *ticks*: a put belongs
//! to the tick that the user of the cache began last.
//!
//! A thread that keeps its shard at hand takes and puts by the *short path*: one exchange, one store, and no look at
//! anything else. It steps aside while a shard asks for attention, because a get waits for a buffer or the cache is sealed.
//!
//! The cache never calls a back-end, reads a clock, logs or allocates; victims leave by return value. No operation holds
//! two locks.
//!
//! # Invariants
//!
//! - **cache-I1**: A take finds an idle buffer of its class that was put before it began, whichever shard holds it, unless
//!   another thread takes it first.
//! - **cache-I2**: Idle buffers never exceed the limit, except those that a lowered limit has not evicted yet.
//! - **cache-I3**: A put evicts only if it finds every permit in use; it cannot see permits that another put holds at that
//!   moment. On one thread that is exact, and the victim is the buffer put longest ago. Between threads, ages are compared
//!   by ticks.
//! - **cache-I4**: After [`ThreadCache::seal`] no put keeps a buffer, so one drain empties the cache for good.
//! - **cache-I5**: A hit in the thread's own shard writes no cache line that hits of other threads write.
//! - **cache-I6**: At rest all counters are exact, and buffers and permits of a thread that has ended are found by others.
//!
//! # Why this shape
//!
//! A hit is some fifty instructions, so their number is its cost. Nanoseconds for a get and its put through a pool on two
//! cores of an AMD EPYC (Zen 4), best of 80 interleaved rounds of 20,000 pairs; *filled* writes 2 KiB before the put, which
//! keeps the store buffer full when the lock is taken:
//!
//! | lock of a shard | same class | 16 classes | filled | |
//! | --- | --- | --- | --- | --- |
//! | biased to its owner, with `membarrier` | 5.0 | 6.7 | 23.1 | another thread interrupts every core; Linux only |
//! | **exchange and store** | 5.5 | 7.7 | 26.3 | any thread may enter |
//! | none, buffers of a sleeping owner cannot be had | 5.0 | 6.2 | 24.5 | lower bound |
//! | a lock-free `ArrayQueue` per class, for comparison | 6.5 | 9.0 | 29.9 | no limit, no order of age |
//!
//! An array of slots cannot tell which buffer is oldest without reading all of it; one list of all buffers costs each hit
//! four more writes. Shards that steal but have no remote free list make the copying thread the owner of every buffer that
//! loaders need. A miss with nothing idle reads the own shard and a word or two. An eviction compares a bound for each class in
//! use of its shard; with several threads it first reads one or two lines of each shard in use, for a spare permit or an
//! older buffer.
//!
//! # Prior art
//!
//! - a cache per thread in front of a shared allocator: [tcmalloc](https://google.github.io/tcmalloc/design.html);
//! - a separate list for frees by other threads: `thread_free` of [mimalloc](https://github.com/microsoft/mimalloc), and
//!   local and remote free lists of [sharded-slab](https://docs.rs/sharded-slab); each is a Treiber stack (Treiber, 1986);
//! - permits: [tokio's `Semaphore`](https://docs.rs/tokio/latest/tokio/sync/struct.Semaphore.html).

mod counters;
mod entry;
mod free_list;
mod lock;
mod permits;
mod remote_list;
mod shard;
mod slot;

pub use entry::Entry;
pub(in crate::engine) use entry::SpareEntries;
pub(in crate::engine) use shard::Shard;

use crate::policy::Window;
use counters::Evictions;
use permits::{Common, PERMITS_PER_CLAIM};
use pinpool_os::sync::{Backoff, Mutex};
use remote_list::PushError;
use std::fmt;
use std::sync::Arc;

/// The occupancy bitmap keeps one bit for each shard in a 64-bit word.
const SHARDS_MAX: usize = 64;

/// How often a put searches for a permit that is moving between other threads before it evicts its own buffer.
const PERMIT_SEARCHES: u32 = 64;

/// Idle buffers by class, for many threads. See the module.
pub struct ThreadCache<T> {
    shards: Box<[Shard<T>]>,
    common: Arc<Common>,
    evictions: Evictions,
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
    /// An empty cache for classes `0..classes`, at most 65,535 of them, that keeps up to `limit` buffers. `shards` is
    /// rounded up to a power of two, at most 64; twice the number of cores keeps threads apart, more threads than shards
    /// share them.
    pub fn new(classes: u32, limit: usize, shards: usize) -> Self {
        let classes = classes.min(u32::from(u16::MAX));
        let shards = shards.clamp(1, SHARDS_MAX).next_power_of_two();
        let common = Arc::new(Common::new(classes, limit, shards));
        Self {
            shards: (0..shards).zip(0u16..).map(|(_, at)| Shard::new(classes, at, common.clone())).collect(),
            common,
            evictions: Evictions::new(),
            reset: Mutex::new(Window::default()),
        }
    }

    /// The calling thread's shard, for its short path.
    pub(in crate::engine) fn own_shard(&self) -> &Shard<T> {
        &self.shards[self.shard_of(slot::current())]
    }

    /// From now on puts belong to `tick`, or to a later one that has begun. Returns the tick of the newest put before: as late
    /// or later if so many puts came between two ticks that they carried.
    pub fn begin_tick(&self, tick: u64) -> u64 {
        // All shards: one that comes into use later must not give its first puts an age.
        self.shards.iter().map(|shard| shard.begin_tick(tick)).max().unwrap_or(0)
    }

    /// While set, no take and no put goes by the short path. When it returns, those that began before have ended, and a take
    /// finds what they put.
    pub fn set_attention(&self, attention: bool) {
        self.shards.iter().for_each(|shard| shard.set_attention(attention));
    }

    /// An idle buffer of `class`, the calling thread's newest first.
    pub fn take(&self, class: u32) -> Option<Box<Entry<T>>> {
        self.take_at(slot::current(), class)
    }

    /// Puts `entry` back.
    pub fn put(&self, entry: Box<Entry<T>>) -> Put<T> {
        self.put_at(slot::current(), entry)
    }

    /// Puts `entry` back to its owner shard, which is another thread's, if that has a permit for it.
    pub(in crate::engine) fn put_remote(&self, entry: Box<Entry<T>>) -> Result<(), Box<Entry<T>>> {
        match self.shards[self.shard_of(entry.owner)].put_remote(entry, 0) {
            // Nothing was granted, so no permit is over.
            Ok(_) => Ok(()),
            Err(PushError::NoPermit(entry) | PushError::Sealed(entry)) => Err(entry),
        }
    }

    /// Counts a get of the calling thread that the underlying allocator served.
    pub fn count_allocated(&self) {
        let own = self.shard_of(slot::current());
        self.shards[own].count_allocated();
        self.common.occupancy.mark_used(own);
    }

    /// Idle buffers of `class`. Walks them.
    pub fn count_of(&self, class: u32) -> u64 {
        self.shards.iter().map(|shard| shard.count_of(class)).sum()
    }

    /// Removes the buffer put longest ago; not counted as an eviction.
    pub fn evict_oldest(&self) -> Option<Box<Entry<T>>> {
        let own = self.shard_of(slot::current());
        loop {
            let at = self.oldest_shard(own, Search::ByHints)?;
            let victim = self.shards[at].evict();
            if victim.is_some() {
                self.common.permits.add(1);
                return victim;
            }
        }
    }

    /// Removes every buffer that was put before `tick` and passes it to `sink`, outside every lock.
    pub fn drain_older_than(&self, tick: u64, sink: impl FnMut(Box<Entry<T>>)) {
        self.drain(Some(tick), sink);
    }

    /// Passes every idle buffer to `sink`.
    pub fn drain_all(&self, sink: impl FnMut(Box<Entry<T>>)) {
        self.drain(None, sink);
    }

    fn drain(&self, tick: Option<u64>, mut sink: impl FnMut(Box<Entry<T>>)) {
        // All shards, not only those marked used: the first put of a shard may be under way, and after `seal` no later
        // drain would find it (cache-I4).
        for shard in &self.shards {
            loop {
                let mut batch = [const { None }; shard::BATCH];
                shard.drain(tick, &mut batch);
                let more = batch.last().is_some_and(Option::is_some);
                batch.into_iter().flatten().for_each(&mut sink);
                if !more {
                    break;
                }
            }
        }
    }

    /// From now on each put is handed back. Idle buffers stay until they are drained.
    pub fn seal(&self) {
        self.shards.iter().for_each(Shard::seal);
    }

    /// How many idle buffers the cache may keep.
    pub fn limit(&self) -> usize {
        self.common.permits.limit()
    }

    /// Sets another limit. If more buffers are idle, the oldest go to `sink`, not counted as evictions.
    pub fn set_limit(&self, limit: usize, mut sink: impl FnMut(Box<Entry<T>>)) {
        if !self.common.permits.set_limit(limit) {
            return;
        }
        // All permits sum to the limit, so those that the pool lacks are in free lists, in remote free lists, or held by
        // a put that is about to use them.
        let backoff = Backoff::new();
        while self.common.permits.in_debt() {
            self.shards.iter().for_each(|shard| self.common.permits.add(shard.revoke()));
            if self.common.permits.in_debt() {
                self.evict_oldest().map_or_else(|| backoff.snooze(), &mut sink);
            }
        }
    }

    fn take_at(&self, slot: u16, class: u32) -> Option<Box<Entry<T>>> {
        let own = self.shard_of(slot);
        self.shards[own].take(class).or_else(|| self.steal(own, class))
    }

    fn steal(&self, own: usize, class: u32) -> Option<Box<Entry<T>>> {
        let elsewhere = self.common.occupancy.shards(class) & !(1 << own);
        bits_from(own, elsewhere).find_map(|at| self.shards[at].steal(class, &self.shards[own]))
    }

    fn put_at(&self, slot: u16, entry: Box<Entry<T>>) -> Put<T> {
        let own = self.shard_of(slot);
        match self.insert(own, entry, 0) {
            Ok(()) => Put { handed_back: None, victim: None, check_due: false },
            Err(error) => self.put_slow(own, error),
        }
    }

    #[cold]
    fn put_slow(&self, own: usize, error: PushError<T>) -> Put<T> {
        let entry = match error {
            PushError::NoPermit(entry) => entry,
            PushError::Sealed(entry) => return Put { handed_back: Some(entry), victim: None, check_due: false },
        };
        let Some(Obtained { permits, victim }) = self.obtain_permits(own) else {
            // The limit is 0, or other threads held every permit during the whole search: evict the buffer itself.
            self.shards[own].count_evicted_put();
            self.common.occupancy.mark_used(own);
            return Put { handed_back: None, victim: Some(entry), check_due: self.evictions.add() };
        };
        let handed_back = match self.insert(own, entry, permits) {
            Ok(()) => None,
            Err(PushError::NoPermit(entry) | PushError::Sealed(entry)) => {
                self.common.permits.add(permits);
                Some(entry)
            }
        };
        let check_due = victim.is_some() && self.evictions.add();
        Put { handed_back, victim, check_due }
    }

    /// Inserts `entry` into its owner shard, with a permit that is free there or one of those `granted`.
    fn insert(&self, own: usize, entry: Box<Entry<T>>, granted: u32) -> Result<(), PushError<T>> {
        if !self.common.occupancy.has_class(entry.class()) {
            return Err(PushError::Sealed(entry));
        }
        let owner = self.shard_of(entry.owner);
        let shard = &self.shards[owner];
        let unused = if owner == own { shard.put(entry, granted)? } else { shard.put_remote(entry, granted)? };
        self.common.permits.add(unused);
        Ok(())
    }

    /// Permits from the pool; else spare ones of any shard; else that of the buffer put longest ago.
    fn obtain_permits(&self, own: usize) -> Option<Obtained<T>> {
        let backoff = Backoff::new();
        let mut search = Search::ByHints;
        for _ in 0..PERMIT_SEARCHES {
            if self.limit() == 0 {
                break;
            }
            let permits = self.spare_permits(own, search);
            if permits > 0 {
                return Some(Obtained { permits, victim: None });
            }
            let victim = self.oldest_shard(own, search).and_then(|at| self.shards[at].evict());
            if victim.is_some() {
                return Some(Obtained { permits: 1, victim });
            }
            backoff.snooze();
            search = Search::Full;
        }
        None
    }

    fn spare_permits(&self, own: usize, search: Search) -> u32 {
        let claimed = self.common.permits.claim(PERMITS_PER_CLAIM);
        if claimed > 0 {
            return claimed;
        }
        let promising = |&at: &usize| search == Search::Full || self.shards[at].hint().permits > 0;
        let mut found = self.candidates(own, search).filter(promising).map(|at| self.shards[at].revoke());
        let permits = found.find(|&permits| permits > 0).unwrap_or(0);
        let kept = permits.min(PERMITS_PER_CLAIM);
        self.common.permits.add(permits - kept);
        kept
    }

    /// The shard with the buffer put longest ago; the own shard if ages are equal. The age that a shard publishes is a lower
    /// bound, so the shard that seems oldest is asked, until its answer is exact.
    fn oldest_shard(&self, own: usize, search: Search) -> Option<usize> {
        if search == Search::ByHints && self.common.occupancy.used() == 1 << own {
            let hint = self.shards[own].hint();
            return Some(own).filter(|_| hint.has_remote || hint.oldest.is_some());
        }
        let (mut asked, mut exact) = (0u64, [None; SHARDS_MAX]);
        loop {
            let mut age = |at: usize| {
                let hint = self.shards[at].hint();
                if asked & 1 << at == 0 && (search == Search::Full || hint.has_remote) {
                    (asked, exact[at]) = (asked | 1 << at, self.shards[at].oldest());
                }
                if asked & 1 << at == 0 { hint.oldest } else { exact[at] }
            };
            let ages = self.candidates(own, search).filter_map(|at| Some((age(at)?, at)));
            let (_, at) = ages.reduce(|a, b| if b.0 < a.0 { b } else { a })?;
            if asked & 1 << at != 0 {
                return Some(at);
            }
            (asked, exact[at]) = (asked | 1 << at, self.shards[at].oldest());
        }
    }

    fn candidates(&self, own: usize, search: Search) -> impl Iterator<Item = usize> + use<T> {
        let all = u64::MAX >> (SHARDS_MAX - self.shards.len());
        bits_from(own, if search == Search::Full { all } else { self.common.occupancy.used() })
    }

    fn shard_of(&self, slot: u16) -> usize {
        usize::from(slot) & (self.shards.len() - 1)
    }

    fn used_shards(&self) -> impl Iterator<Item = &Shard<T>> {
        self.candidates(0, Search::ByHints).map(|at| &self.shards[at])
    }
}

/// In a child of `fork`: of the parent's threads only the calling one exists, so only its slot is in use.
pub(in crate::engine) fn forget_other_threads() {
    slot::keep_own_lease_only();
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

#[cfg(all(test, pinpool_loom))]
mod models;

#[cfg(all(test, not(pinpool_loom)))]
mod tests;
