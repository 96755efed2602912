//! A cache of idle buffers by size class, for many threads.
//!
//! ```text
//!   thread 0 ── slot 0 ──▶ shard 0   lock ▶ free list: one list per class, counts
//!   other threads ───────────────▶   remote list: pushed without a lock
//!   thread 1 ── slot 1 ──▶ shard 1   ...
//!
//!   shared by all shards:   class occupancy bitmap      limit on idle buffers
//! ```
//!
//! - **Take**: a thread takes the newest buffer of the class from its own free list. If there is none, it collects its remote
//!   list and tries again. If there is still none, it takes a buffer from another shard that the occupancy bitmap names.
//! - **Return**: a buffer returns to its *home shard*, which is the shard of the thread that took the buffer last: into the
//!   free list if that shard is the caller's own, and otherwise into the remote list. Loader threads take buffers and the
//!   copying thread returns them, so each buffer circulates between one loader's shard and the copying thread over a single
//!   cache line, and loader threads do not contend.
//! - **Limit**: a return only counts its buffer. A miss, a slow return or a maintenance tick calls
//!   [`ThreadCache::evict_over_limit`] until the cache is back at its limit.
//! - **Ages** are numbered: a return belongs to the last age that the cache's user began before it.
//!
//! A thread that has cached its shard uses the *fast path* to take and return buffers: one atomic exchange and one store. The
//! fast path is closed while a request waits for a buffer or another member of the shared limit wants memory, and once the cache
//! is sealed.
//!
//! The cache never calls a backend, reads a clock, or logs; evicted buffers are returned to the caller. No operation holds
//! the locks of two shards.
//!
//! # Invariants
//!
//! - **cache-I1**: A take finds an idle buffer of its class in any shard, if the buffer was put before the take began
//!   and no other thread takes it first.
//! - **cache-I2**: If [`ThreadCache::evict_over_limit`] is called until it returns `None`, and no other operation runs
//!   meanwhile, no more buffers are idle than the limit allows. Buffers in remote lists do not count until they are collected.
//! - **cache-I3**: An eviction removes the buffer that was returned longest ago. This is exact on one thread. Between threads,
//!   buffers are compared by their ages.
//! - **cache-I4**: After [`ThreadCache::seal`] no put keeps a buffer, so one drain leaves the cache empty forever.
//! - **cache-I5**: A hit in the thread's own shard writes no cache line that hits of other threads write.
//! - **cache-I6**: While no operation runs, all counters are exact. Other threads find the buffers of a thread that has ended.
//!
//! # Why this design
//!
//! Entering and leaving a shard takes one exchange and one store, and any thread may take the lock. A lock that is biased to
//! its owner with `membarrier` saved a tenth of the time of a hit, but another thread must interrupt every core to take
//! it. Without any lock, other threads could not reach the buffers of a sleeping thread. `docs/benchmarks.md` has the
//! times of a hit.
//!
//! An array of slots cannot tell which buffer is oldest without reading all of it, and one list of all buffers costs each hit
//! four more writes. If shards could steal but had no remote lists, the copying thread would become the home of every buffer
//! that loaders need. A miss with nothing idle reads the thread's own shard and one or two words of the occupancy bitmap. An
//! eviction compares one bound for each marked class of a shard; with several threads it first reads one or two cache lines of
//! each shard in use.
//!
//! # Prior art
//!
//! - a cache per thread in front of a shared allocator: [tcmalloc](https://google.github.io/tcmalloc/design.html);
//! - a separate list for frees by other threads: `thread_free` of [mimalloc](https://github.com/microsoft/mimalloc), and
//!   local and remote lists of [sharded-slab](https://docs.rs/sharded-slab); each is a Treiber stack (Treiber, 1986).

use std::collections::VecDeque;
use std::sync::Arc;

mod entry;
mod free_list;
mod lock;
mod occupancy;
mod shard;

pub(in crate::engine) use entry::{Entry, SpareEntries, current_slot};
pub(in crate::engine) use shard::Shard;

use occupancy::Occupancy;
use pinpool_os::sync::atomic::{AtomicUsize, Ordering};
use pinpool_os::sync::unmodeled::Mutex;

/// Maximum number of shards of a cache, because a set of shards is one 64-bit word.
const SHARDS_MAX: usize = 64;

/// Idle buffers by class, for many threads. See the module.
pub(in crate::engine) struct ThreadCache<T> {
    shards: Box<[Shard<T>]>,
    occupancy: Arc<Occupancy>,
    limit: AtomicUsize,
    ages: Mutex<ReturnAges>,
}

/// The counters of a cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::engine) struct Counts {
    /// Buffers that are idle now.
    pub(in crate::engine) idle: u64,
    /// Bytes of the idle buffers.
    pub(in crate::engine) idle_bytes: usize,
    /// Takes that found a buffer.
    pub(in crate::engine) hits: u64,
    /// Puts that kept a buffer.
    pub(in crate::engine) puts: u64,
}

impl<T> ThreadCache<T> {
    /// Creates an empty cache that keeps up to `limit` buffers of the classes `0..classes`, at most the classes of a pool.
    /// Rounds `shards` up to a power of two, at most 64. Twice as many shards as cores keep most threads apart; if there are
    /// more threads than shards, some threads share a shard.
    pub(in crate::engine) fn new(classes: u32, limit: usize, shards: usize) -> Self {
        let classes = classes.min(free_list::CLASSES_MAX);
        let shards = shards.clamp(1, SHARDS_MAX).next_power_of_two();
        let occupancy = Arc::new(Occupancy::new(classes, shards));
        Self {
            shards: (0..shards).zip(0u16..).map(|(_, at)| Shard::new(classes, at, occupancy.clone())).collect(),
            occupancy,
            limit: AtomicUsize::new(limit),
            ages: Mutex::default(),
        }
    }

    /// Returns the calling thread's shard.
    pub(in crate::engine) fn own_shard(&self) -> &Shard<T> {
        &self.shards[self.shard_of(current_slot())]
    }

    /// Begins `age` and returns it: from now on puts belong to it. Begins and returns a later age instead if earlier puts
    /// already belong to `age` or a later age: one age had more puts than an order can count, so the order has carried.
    pub(in crate::engine) fn begin_age(&self, age: u64) -> u64 {
        // All shards, including unused ones: the first puts of a shard must not belong to an earlier age.
        let newest = self.shards.iter().map(|shard| shard.begin_age(age)).max().unwrap_or(0);
        if newest < age { age } else { self.begin_age(newest + 1) }
    }

    /// Reports a reading of the clock: the time is `now_us`, and all puts so far were made at `put_by_us` or earlier. Begins an
    /// age, unless one began in the same interval of [`RETURN_AGE_US`] or later.
    pub(in crate::engine) fn advance_age(&self, now_us: u64, put_by_us: u64) {
        // If another thread is beginning an age, this reading need not begin one.
        if let Some(mut ages) = self.ages.try_lock() {
            ages.begin(now_us, put_by_us, |age| self.begin_age(age));
        }
    }

    /// Removes every buffer that is known to have been put at `us` or earlier, and passes it to `sink` outside every lock.
    /// Compares times in units of [`RETURN_AGE_US`], so it may include puts up to one unit later.
    pub(in crate::engine) fn drain_old(&self, us: u64, sink: impl FnMut(Box<Entry<T>>)) {
        let old = self.ages.lock().all_put_by(us);
        if let Some(last) = old.checked_sub(1) {
            self.drain(last, sink);
        }
    }

    /// Sets whether takes and puts must use the slow path. If so, every earlier fast-path call has ended when this returns, and
    /// a later take finds the buffers that these calls put.
    pub(in crate::engine) fn set_slow_path(&self, required: bool) {
        self.shards.iter().for_each(|shard| shard.set_slow_path(required));
    }

    /// Takes an idle buffer of `class`: the newest in the shard of the thread at `slot`, or, if there is none, one of another
    /// shard.
    pub(in crate::engine) fn take(&self, slot: u16, class: u32) -> Option<Box<Entry<T>>> {
        let own = self.shard_of(slot);
        self.shards[own].take(class).or_else(|| {
            let elsewhere = self.occupancy.shards(class) & !(1 << own);
            bits_from(own, elsewhere).find_map(|at| self.shards[at].steal(class, &self.shards[own]))
        })
    }

    /// Returns the shard that keeps `entry` when it is returned, which is the shard of the thread that took it last. Returns
    /// `None` if the limit is 0 or the cache does not have the class.
    pub(in crate::engine) fn home(&self, entry: &Entry<T>) -> Option<&Shard<T>> {
        let may_keep = self.limit() > 0 && self.occupancy.has_class(entry.class());
        may_keep.then(|| &self.shards[self.shard_of(entry.home)])
    }

    /// Removes the buffer returned longest ago if more are idle than the limit allows.
    pub(in crate::engine) fn evict_over_limit(&self) -> Option<Box<Entry<T>>> {
        self.is_over_limit().then(|| self.evict_oldest()).flatten()
    }

    /// Returns whether more buffers are idle than the limit allows. Buffers that other threads have put may not count yet.
    /// Takes no lock.
    pub(in crate::engine) fn is_over_limit(&self) -> bool {
        self.used_shards().map(Shard::idle).sum::<u64>() > self.limit() as u64
    }

    /// Removes the buffer returned longest ago. The age that a shard publishes is a lower bound: if it was not exact, the shard
    /// corrects it and the search begins again.
    pub(in crate::engine) fn evict_oldest(&self) -> Option<Box<Entry<T>>> {
        let own = self.shard_of(current_slot());
        loop {
            let used = self.occupancy.used();
            let ages = bits_from(own, used).filter_map(|at| Some((self.shards[at].oldest_age()?, at)));
            // If ages are equal, the thread's own shard comes first.
            let (age, at) = ages.reduce(|a, b| if b.0 < a.0 { b } else { a })?;
            let victim = self.shards[at].evict(if used.is_power_of_two() { u64::MAX } else { age });
            if victim.is_some() {
                return victim;
            }
        }
    }

    /// Removes every buffer that was put by the end of age `until`, and passes it to `sink` outside every lock.
    pub(in crate::engine) fn drain(&self, until: u64, mut sink: impl FnMut(Box<Entry<T>>)) {
        // All shards, not only the shards marked as used: the first put of a shard may be under way, and after `seal` no later
        // drain would find its buffer (cache-I4).
        for shard in &self.shards {
            while shard.oldest_age().is_some_and(|age| age <= until) {
                let Some(entry) = shard.evict(until) else { break };
                sink(entry);
            }
        }
    }

    /// Seals the cache: from now on no put keeps its buffer. Idle buffers stay until they are drained.
    pub(in crate::engine) fn seal(&self) {
        self.shards.iter().for_each(Shard::seal);
    }

    /// Returns how many idle buffers the cache may keep.
    #[inline]
    pub(in crate::engine) fn limit(&self) -> usize {
        // Relaxed: the number guards no other memory.
        self.limit.load(Ordering::Relaxed)
    }

    /// Sets the limit. Evicts nothing.
    pub(in crate::engine) fn set_limit(&self, limit: usize) {
        self.limit.store(limit, Ordering::Relaxed);
    }

    /// Counts the idle buffers of `class` by walking their lists.
    pub(in crate::engine) fn count_of(&self, class: u32) -> u64 {
        self.shards.iter().map(|shard| shard.count_of(class)).sum()
    }

    /// Returns the sums of the counters of all shards.
    pub(in crate::engine) fn counts(&self) -> Counts {
        self.used_shards().map(Shard::counts).fold(Counts::default(), |sum, shard| Counts {
            idle: sum.idle + shard.idle,
            idle_bytes: sum.idle_bytes + shard.idle_bytes,
            hits: sum.hits + shard.hits,
            puts: sum.puts + shard.puts,
        })
    }

    /// Puts `entry` as the thread at `slot` does. Returns `entry` if the cache does not keep it.
    #[cfg(test)]
    fn put(&self, slot: u16, entry: Box<Entry<T>>) -> Result<(), Box<Entry<T>>> {
        match self.home(&entry) {
            Some(home) => home.put(&self.shards[self.shard_of(slot)], entry),
            None => Err(entry),
        }
    }

    /// Recounts everything and compares it with the counters, while no operation runs. The error names the first number
    /// that differs.
    #[cfg(test)]
    fn validate(&self) -> Result<(), String> {
        for (at, shard) in self.shards.iter().enumerate() {
            let classes = shard.validate().map_err(|wrong| format!("shard {at}: {wrong}"))?;
            if let Some(class) = classes.iter().find(|&&class| self.occupancy.shards(class) & 1 << at == 0) {
                return Err(format!("shard {at}: the occupancy bit of class {class} is clear"));
            }
            if !classes.is_empty() && self.occupancy.used() & 1 << at == 0 {
                return Err(format!("shard {at}: not marked used"));
            }
        }
        Ok(())
    }

    fn shard_of(&self, slot: u16) -> usize {
        usize::from(slot) & (self.shards.len() - 1)
    }

    fn used_shards(&self) -> impl Iterator<Item = &Shard<T>> {
        bits_from(0, self.occupancy.used()).map(|at| &self.shards[at])
    }
}

/// The unit of the times of ages: at most one age begins in each interval of this length.
pub(in crate::engine) const RETURN_AGE_US: u64 = 10_000;

/// The number of the current age, and the times of the ages before it.
///
/// A return on the fast path reads no clock. It belongs to the age that is current at the return, so all that is known about
/// its time is that it precedes the beginning of the next age. So a buffer is old enough only if the age *after* its own age
/// is.
#[derive(Debug, Default)]
struct ReturnAges {
    current: u64,
    /// When the current age began, in units of [`RETURN_AGE_US`].
    since: u64,
    /// Pairs of a time in units of [`RETURN_AGE_US`] and an age, the oldest first: all buffers of earlier ages were returned
    /// by that time.
    put_by: VecDeque<(u64, u64)>,
    /// The last result of [`all_put_by`](Self::all_put_by): buffers of earlier ages are old.
    old: u64,
}

impl ReturnAges {
    /// Begins an age at `now_us`, unless the current age began in the same unit of time or later. All buffers of ages before
    /// the new one were returned by `put_by_us`. `begin` receives the next number and returns the number of the age that it
    /// began, which may be higher.
    fn begin(&mut self, now_us: u64, put_by_us: u64, begin: impl FnOnce(u64) -> u64) {
        let now = now_us / RETURN_AGE_US;
        if self.current == 0 || now > self.since {
            self.since = now;
            self.current = begin(self.current + 1);
            self.put_by.push_back((put_by_us / RETURN_AGE_US, self.current));
        }
    }

    /// Returns the latest age for which all buffers of earlier ages are known to have been returned at `us` or earlier.
    fn all_put_by(&mut self, us: u64) -> u64 {
        while let Some(&(_, age)) = self.put_by.front().filter(|(put_by, _)| *put_by <= us / RETURN_AGE_US) {
            self.old = age;
            self.put_by.pop_front();
        }
        self.old
    }
}

/// Iterates over the numbers of the set bits, from `first` upward and then from 0.
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

#[cfg(all(test, pinpool_loom))]
mod models;

#[cfg(all(test, not(pinpool_loom)))]
mod tests;
