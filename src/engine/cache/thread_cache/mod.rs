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
//! **Take**: the newest buffer of the class in the thread's own free list; else one from its remote list; else one from
//! another shard that the occupancy bitmap names. **Return**: to the *home shard*, which is the shard of the thread that took
//! the buffer last: into the free list if that shard is the caller's own, else into its remote list. Loader threads take
//! buffers and the copying thread returns them, so each buffer circulates between one loader's shard and the copying thread
//! over a single cache line, and loader threads do not contend. **Limit**: a return only counts. A miss, a slow
//! return or a tick calls [`ThreadCache::evict_over_limit`] until the cache is back at its limit. **Ages** are counted in
//! *ticks*: a return belongs to the tick that the user of the cache began last.
//!
//! A thread that has cached its shard takes and returns on the *fast path*: one exchange and one store. The fast path is closed
//! while a request waits for a buffer or another owner of the shared limit wants memory, or once the cache is sealed.
//!
//! The cache never calls a backend, reads a clock, or logs; evicted buffers are returned to the caller. No operation holds
//! two locks.
//!
//! # Invariants
//!
//! - **cache-I1**: A take finds an idle buffer of its class that was put before it began, whichever shard holds it, unless
//!   another thread takes it first.
//! - **cache-I2**: After calls of [`ThreadCache::evict_over_limit`] up to the first `None`, with no other operation, at most
//!   as many buffers are idle as the limit allows, apart from those in remote lists, which count once they are collected.
//! - **cache-I3**: An eviction removes the buffer that was returned longest ago. On one thread that is exact. Between threads,
//!   ages are compared by ticks.
//! - **cache-I4**: After [`ThreadCache::seal`] no put keeps a buffer, so one drain empties the cache forever.
//! - **cache-I5**: A hit in the thread's own shard writes no cache line that hits of other threads write.
//! - **cache-I6**: At rest all counters are exact, and buffers of a thread that has ended are found by others.
//!
//! # Why this shape
//!
//! A shard's lock is one exchange and one store, and any thread may take it. A lock that is biased to its owner with `membarrier`
//! saved a tenth of a hit, but another thread must interrupt every core to take it. Without a lock, buffers of a sleeping thread
//! are out of reach. `docs/benchmarks.md` has the times of a hit.
//!
//! An array of slots cannot tell which buffer is oldest without reading all of it; one list of all buffers costs each hit
//! four more writes. Shards that steal but have no remote list make the copying thread the home of every buffer that
//! loaders need. A miss with nothing idle reads the own shard and a word or two. An eviction compares a bound for each
//! class in use of its shard; with several threads it first reads one or two lines of each shard in use.
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
use pinpool_os::sync::plain::Mutex;

/// The occupancy bitmap keeps one bit for each shard in a 64-bit word.
const SHARDS_MAX: usize = 64;

/// Idle buffers by class, for many threads. See the module.
pub(in crate::engine) struct ThreadCache<T> {
    shards: Box<[Shard<T>]>,
    occupancy: Arc<Occupancy>,
    limit: AtomicUsize,
    ticks: Mutex<ReturnTicks>,
}

/// The counters of a cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::engine) struct Counts {
    /// Buffers that are idle now.
    pub(in crate::engine) idle: u64,
    /// Their bytes.
    pub(in crate::engine) idle_bytes: usize,
    /// Takes that found a buffer.
    pub(in crate::engine) hits: u64,
    /// Puts that kept a buffer.
    pub(in crate::engine) puts: u64,
}

impl<T> ThreadCache<T> {
    /// An empty cache for classes `0..classes`, at most as many as a pool has, that keeps up to `limit` buffers. `shards` is
    /// rounded up to a power of two, at most 64; twice the number of cores keeps threads apart, more threads than shards
    /// share them.
    pub(in crate::engine) fn new(classes: u32, limit: usize, shards: usize) -> Self {
        let classes = classes.min(free_list::CLASSES_MAX);
        let shards = shards.clamp(1, SHARDS_MAX).next_power_of_two();
        let occupancy = Arc::new(Occupancy::new(classes, shards));
        Self {
            shards: (0..shards).zip(0u16..).map(|(_, at)| Shard::new(classes, at, occupancy.clone())).collect(),
            occupancy,
            limit: AtomicUsize::new(limit),
            ticks: Mutex::default(),
        }
    }

    /// The calling thread's shard, for its fast path.
    pub(in crate::engine) fn own_shard(&self) -> &Shard<T> {
        &self.shards[self.shard_of(current_slot())]
    }

    /// From now on puts belong to `tick`, or to a later tick, which is returned: if more puts came between two ticks than an
    /// order can count, they have carried.
    pub(in crate::engine) fn begin_tick(&self, tick: u64) -> u64 {
        // All shards: one that comes into use later must not give its first puts an age.
        let newest = self.shards.iter().map(|shard| shard.begin_tick(tick)).max().unwrap_or(0);
        if newest < tick { tick } else { self.begin_tick(newest + 1) }
    }

    /// The clock was read: it is `now_us`, and all earlier puts were made by `put_by_us`. Begins a tick if the current one began
    /// earlier.
    pub(in crate::engine) fn tick(&self, now_us: u64, put_by_us: u64) {
        // While another thread begins a tick, this time belongs to that tick.
        if let Some(mut ticks) = self.ticks.try_lock() {
            ticks.begin(now_us, put_by_us, |tick| self.begin_tick(tick));
        }
    }

    /// Passes every buffer that was put at `us` or earlier to `sink`, outside every lock.
    pub(in crate::engine) fn drain_old(&self, us: u64, sink: impl FnMut(Box<Entry<T>>)) {
        let old = self.ticks.lock().all_put_by(us);
        if let Some(last) = old.checked_sub(1) {
            self.drain(last, sink);
        }
    }

    /// While set, no take and no put uses the fast path. When it returns, those that began before have ended, and a take
    /// finds what they put.
    pub(in crate::engine) fn set_slow_path(&self, required: bool) {
        self.shards.iter().for_each(|shard| shard.set_slow_path(required));
    }

    /// An idle buffer of `class`, the newest of the thread at `slot` first.
    pub(in crate::engine) fn take(&self, slot: u16, class: u32) -> Option<Box<Entry<T>>> {
        let own = self.shard_of(slot);
        self.shards[own].take(class).or_else(|| {
            let elsewhere = self.occupancy.shards(class) & !(1 << own);
            bits_from(own, elsewhere).find_map(|at| self.shards[at].steal(class, &self.shards[own]))
        })
    }

    /// The shard that keeps `entry` when it is returned: the shard of the thread that took it last. `None` if the limit is 0, or
    /// the cache does not know the class.
    pub(in crate::engine) fn home(&self, entry: &Entry<T>) -> Option<&Shard<T>> {
        let may_keep = self.limit() > 0 && self.occupancy.has_class(entry.class());
        may_keep.then(|| &self.shards[self.shard_of(entry.home)])
    }

    /// Removes the buffer returned longest ago if more are idle than the limit allows.
    pub(in crate::engine) fn evict_over_limit(&self) -> Option<Box<Entry<T>>> {
        self.is_over_limit().then(|| self.evict_oldest()).flatten()
    }

    /// Returns whether more buffers are idle than the limit allows; what other threads put may not count yet. Takes no lock.
    pub(in crate::engine) fn is_over_limit(&self) -> bool {
        let idle: u64 = self.used_shards().map(Shard::idle).sum();
        idle > self.limit() as u64
    }

    /// Removes the buffer returned longest ago. The tick that a shard publishes is a lower bound: if it was not exact, the shard
    /// corrects it and the search begins again.
    pub(in crate::engine) fn evict_oldest(&self) -> Option<Box<Entry<T>>> {
        let own = self.shard_of(current_slot());
        loop {
            let used = self.occupancy.used();
            let ticks = bits_from(own, used).filter_map(|at| Some((self.shards[at].oldest_tick()?, at)));
            // The own shard if ticks are equal.
            let (tick, at) = ticks.reduce(|a, b| if b.0 < a.0 { b } else { a })?;
            let until = if used.is_power_of_two() { u64::MAX } else { tick };
            let victim = self.shards[at].evict(until);
            if victim.is_some() {
                return victim;
            }
        }
    }

    /// Passes every buffer that was put by the end of tick `until` to `sink`, outside every lock.
    pub(in crate::engine) fn drain(&self, until: u64, mut sink: impl FnMut(Box<Entry<T>>)) {
        // All shards, not only those marked used: the first put of a shard may be under way, and after `seal` no later
        // drain would find it (cache-I4).
        for shard in &self.shards {
            while shard.oldest_tick().is_some_and(|tick| tick <= until) {
                let Some(entry) = shard.evict(until) else { break };
                sink(entry);
            }
        }
    }

    /// From now on no put keeps its buffer. Idle buffers stay until they are drained.
    pub(in crate::engine) fn seal(&self) {
        self.shards.iter().for_each(Shard::seal);
    }

    /// How many idle buffers the cache may keep.
    #[inline]
    pub(in crate::engine) fn limit(&self) -> usize {
        // Relaxed: one number on its own.
        self.limit.load(Ordering::Relaxed)
    }

    /// Sets another limit; evicts nothing.
    pub(in crate::engine) fn set_limit(&self, limit: usize) {
        self.limit.store(limit, Ordering::Relaxed);
    }

    /// Idle buffers of `class`. Walks them.
    pub(in crate::engine) fn count_of(&self, class: u32) -> u64 {
        self.shards.iter().map(|shard| shard.count_of(class)).sum()
    }

    /// The sums of all shards.
    pub(in crate::engine) fn counts(&self) -> Counts {
        self.used_shards().map(Shard::counts).fold(Counts::default(), |sum, shard| Counts {
            idle: sum.idle + shard.idle,
            idle_bytes: sum.idle_bytes + shard.idle_bytes,
            hits: sum.hits + shard.hits,
            puts: sum.puts + shard.puts,
        })
    }

    /// A return of `entry` by the thread at `slot`.
    #[cfg(test)]
    fn put(&self, slot: u16, entry: Box<Entry<T>>) -> Result<(), Box<Entry<T>>> {
        match self.home(&entry) {
            Some(home) => home.put(&self.shards[self.shard_of(slot)], entry),
            None => Err(entry),
        }
    }

    /// At rest: recounts everything and compares it with the counters. The error names the first number that does not agree.
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

/// Ticks are at least this far apart.
pub(in crate::engine) const RETURN_TICK_US: u64 = 10_000;

/// The number of the current tick, and the times of the ticks before it.
///
/// A return on the fast path reads no clock. It belongs to the tick that began last, so all that is known of its time is that
/// the next tick began later. So a buffer is old enough only if the tick *after* its own is.
#[derive(Debug, Default)]
struct ReturnTicks {
    current: u64,
    /// When the current tick began, in units of [`RETURN_TICK_US`].
    since: u64,
    /// Oldest first: a time in units of [`RETURN_TICK_US`], and the tick before which all buffers were returned by that time.
    put_by: VecDeque<(u64, u64)>,
    /// The buffers of ticks before this one are old.
    old: u64,
}

impl ReturnTicks {
    /// Begins a tick at `now_us`, unless the current tick began at that time or later; all buffers of the current tick were
    /// returned by `put_by_us`. `begin` gets the number of the tick and returns the one that has begun, which may be later.
    fn begin(&mut self, now_us: u64, put_by_us: u64, begin: impl FnOnce(u64) -> u64) {
        let now = now_us / RETURN_TICK_US;
        if self.current == 0 || now > self.since {
            self.since = now;
            self.current = begin(self.current + 1);
            self.put_by.push_back((put_by_us / RETURN_TICK_US, self.current));
        }
    }

    /// The tick before which all buffers were returned at `us` or earlier.
    fn all_put_by(&mut self, us: u64) -> u64 {
        while let Some(&(_, tick)) = self.put_by.front().filter(|(put_by, _)| *put_by <= us / RETURN_TICK_US) {
            self.old = tick;
            self.put_by.pop_front();
        }
        self.old
    }
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

#[cfg(all(test, pinpool_loom))]
mod models;

#[cfg(all(test, not(pinpool_loom)))]
mod tests;
