//! The idle buffers of a pool, by the policy of its preset.
//!
//! | preset | file | reuse | eviction | lock |
//! | --- | --- | --- | --- | --- |
//! | `tensorflow` | `tensorflow.rs` | oldest of the class first | oldest of all first | one |
//! | `adaptive` | `thread_cache` | newest of the class first | oldest of all first | one per shard |
//!
//! One structure cannot serve both: TensorFlow's order is one list for the whole pool, and maintaining it costs every return a
//! lock that all threads share. `tensorflow` enforces the limit on idle buffers at each return; `adaptive` at the next miss, slow
//! return or tick.
//!
//! Generic over the buffer, so that tests use integers. Owns the counts of hits, returns and evictions, and the limit.
//! Never releases, waits or logs: victims leave by return value, to be released outside every lock. Reads no clock: times
//! are arguments.

mod tensorflow;
pub(super) mod thread_cache;

use self::tensorflow::{CountLimit, ExactStore};
use self::thread_cache::{Counts, Entry, ThreadCache, current_slot};
use crate::policy::{Check, Window};
use crate::size_class::{Class, EIGHTHS_CLASSES};
use crate::stats::{EvictionReason, Stats};
use pinpool_os::sync::plain::Mutex;

/// Buffers that leave.
pub(super) type Victims<T> = Vec<Box<Entry<T>>>;

/// The idle buffers of one pool.
pub(super) struct Idle<T> {
    /// Under `adaptive`.
    pub(super) cache: Option<ThreadCache<T>>,
    state: Mutex<State<T>>,
    /// A buffer idle for this long returns to the arena.
    idle_us: u64,
}

#[derive(Debug)]
struct State<T> {
    limit: CountLimit,
    /// Under `tensorflow`.
    store: ExactStore<T>,
    sealed: bool,
}

/// A buffer that leaves.
#[derive(Debug)]
pub(super) struct Evicted<T> {
    pub(super) entry: Box<Entry<T>>,
    pub(super) reason: EvictionReason,
    /// The result of a check of the rates.
    pub(super) check: Option<Check>,
}

impl<T> Evicted<T> {
    /// Nothing is kept after the seal.
    fn rejected(entry: Box<Entry<T>>) -> Self {
        Self { entry, reason: EvictionReason::Released, check: None }
    }
}

impl<T> Idle<T> {
    /// Under `adaptive`, buffers idle for `idle_us` return to the arena.
    pub(super) fn new(is_adaptive: bool, limit: u64, auto_resize: bool, idle_us: u64) -> Self {
        let shards = || 2 * std::thread::available_parallelism().map_or(8, usize::from);
        let cache = is_adaptive.then(|| ThreadCache::new(EIGHTHS_CLASSES, as_count(limit), shards()));
        let limit = CountLimit::new(limit, auto_resize);
        let state = Mutex::new(State { limit, store: ExactStore::new(), sealed: false });
        Self { cache, state, idle_us }
    }

    /// An idle buffer of `class`: a hit.
    pub(super) fn take(&self, class: Class) -> Option<Box<Entry<T>>> {
        if let Some(cache) = &self.cache {
            return cache.take(current_slot(), class.index);
        }
        let mut state = self.state.lock();
        let entry = state.store.take(class.bytes)?;
        state.limit.counted.get_from_pool += 1;
        Some(entry)
    }

    /// Keeps `entry`, of `class`. Returns a buffer that leaves instead; then others may have to leave by
    /// [`evict_over_limit`](Self::evict_over_limit).
    pub(super) fn put(&self, entry: Box<Entry<T>>, class: Class) -> Option<Evicted<T>> {
        let Some(cache) = &self.cache else { return self.state.lock().put(entry, class.bytes) };
        let kept = match cache.home(&entry) {
            Some(home) => home.put(cache.own_shard(), entry),
            None => Err(entry),
        };
        let Err(entry) = kept else { return self.evict_over_limit() };
        let mut state = self.state.lock();
        state.limit.counted.put += 1;
        Some(if state.sealed { Evicted::rejected(entry) } else { state.evict(entry, cache) })
    }

    /// Keeps `entry`, which another thread took from a thread cache, for that thread, unless there is more to be done.
    pub(super) fn put_remote(&self, entry: Box<Entry<T>>) -> Result<(), Box<Entry<T>>> {
        match self.cache.as_ref().and_then(|cache| cache.home(&entry)) {
            Some(home) => home.put_remote(entry),
            None => Err(entry),
        }
    }

    /// The buffer returned longest ago, if more are idle than the limit allows.
    pub(super) fn evict_over_limit(&self) -> Option<Evicted<T>> {
        let cache = self.cache.as_ref().filter(|cache| cache.is_over_limit())?;
        // One thread at a time, so that no more are evicted than are over the limit.
        let mut state = self.state.lock();
        let victim = cache.evict_over_limit()?;
        Some(state.evict(victim, cache))
    }

    /// A request was served by the underlying allocator at `now_us`.
    pub(super) fn count_allocated(&self, now_us: u64) {
        self.state.lock().limit.count_allocated(now_us);
    }

    /// A returned buffer that is not kept here.
    pub(super) fn count_put(&self) {
        self.state.lock().limit.counted.put += 1;
    }

    /// The buffer returned longest ago, to make room.
    pub(super) fn reclaim(&self) -> Option<Box<Entry<T>>> {
        match &self.cache {
            Some(cache) => cache.evict_oldest(),
            None => self.state.lock().store.evict(),
        }
    }

    /// Buffers that have been idle too long at `now_us`.
    pub(super) fn expire(&self, now_us: u64) -> Victims<T> {
        let mut old = Vec::new();
        if let Some((cache, oldest_us)) = self.cache.as_ref().zip(now_us.checked_sub(self.idle_us)) {
            cache.drain_old(oldest_us, |entry| old.push(entry));
        }
        old
    }

    /// Lowers a limit that no request has needed for long. Returns the limits before and after, and the buffers over it.
    pub(super) fn lower_limit(&self, now_us: u64) -> Option<(u64, u64, Victims<T>)> {
        let cache = self.cache.as_ref()?;
        let mut state = self.state.lock();
        let from = state.limit.lower(now_us)?;
        let to = state.limit.get();
        cache.set_limit(as_count(to));
        Some((from, to, std::iter::from_fn(|| cache.evict_over_limit()).collect()))
    }

    /// Everything; a new window begins.
    pub(super) fn clear(&self) -> Victims<T> {
        let mut state = self.state.lock();
        state.limit.begin_window(self.counts());
        self.drain(state)
    }

    /// Everything; from now on nothing is kept.
    pub(super) fn seal(&self) -> Victims<T> {
        let mut state = self.state.lock();
        state.sealed = true;
        if let Some(cache) = &self.cache {
            cache.seal();
        }
        self.drain(state)
    }

    fn drain(&self, mut state: impl std::ops::DerefMut<Target = State<T>>) -> Victims<T> {
        let Some(cache) = &self.cache else { return state.store.drain() };
        let mut idle = Vec::new();
        cache.drain(u64::MAX, |entry| idle.push(entry));
        idle
    }

    /// Idle buffers of `class`. Walks them.
    pub(super) fn count_of(&self, class: Class) -> u64 {
        match &self.cache {
            Some(cache) => cache.count_of(class.index),
            None => self.state.lock().store.count_of(class.bytes),
        }
    }

    /// Bytes of the idle buffers.
    pub(super) fn bytes(&self) -> u64 {
        self.cache.as_ref().map_or_else(|| self.state.lock().store.bytes(), |cache| cache.counts().idle_bytes as u64)
    }

    /// Idle buffers.
    pub(super) fn count(&self) -> u64 {
        self.cache.as_ref().map_or_else(|| self.state.lock().store.len(), |cache| cache.counts().idle)
    }

    /// The counts of the thread cache.
    fn counts(&self) -> Counts {
        self.cache.as_ref().map(ThreadCache::counts).unwrap_or_default()
    }

    pub(super) fn fill(&self, stats: &mut Stats) {
        let (state, counts) = (self.state.lock(), self.counts());
        state.limit.fill(stats, counts);
        stats.memory.idle = state.store.len() + counts.idle;
        stats.memory.idle_bytes = state.store.bytes() + counts.idle_bytes as u64;
    }

    /// TensorFlow's counters since the last raise or clear.
    pub(super) fn window(&self) -> Window {
        let (state, counts) = (self.state.lock(), self.counts());
        // TensorFlow counts nothing under a limit of 0.
        let counts_nothing = self.cache.is_none() && state.limit.get() == 0;
        if counts_nothing { Window::default() } else { state.limit.window(counts) }
    }
}

impl<T> State<T> {
    /// TensorFlow's return: count, evict if the limit is reached, check, then keep.
    fn put(&mut self, entry: Box<Entry<T>>, class: usize) -> Option<Evicted<T>> {
        self.limit.counted.put += 1;
        if self.sealed || self.limit.get() == 0 {
            return Some(Evicted::rejected(entry));
        }
        let is_full = self.store.len() >= self.limit.get();
        let victim = if is_full { self.store.evict() } else { None };
        let evicted = victim.map(|entry| Evicted {
            entry,
            reason: EvictionReason::OverLimit,
            check: self.limit.count_eviction(Counts::default),
        });
        self.store.put(class, entry);
        evicted
    }

    /// Counts the eviction of `entry` by the limit of `cache`, which a check may raise.
    fn evict(&mut self, entry: Box<Entry<T>>, cache: &ThreadCache<T>) -> Evicted<T> {
        let check = self.limit.count_eviction(|| cache.counts());
        cache.set_limit(as_count(self.limit.get()));
        Evicted { entry, reason: EvictionReason::OverLimit, check }
    }
}

fn as_count(limit: u64) -> usize {
    usize::try_from(limit).unwrap_or(usize::MAX)
}

#[cfg(all(test, not(pinpool_loom)))]
mod tests {
    use super::thread_cache::RETURN_TICK_US;
    use super::*;
    use crate::policy::IDLE_BUFFER_US;

    #[test]
    fn puts_that_carried_into_later_ticks_grow_old_like_others() {
        let idle = Idle::new(true, 10, false, IDLE_BUFFER_US);
        let class = Class { bytes: 10, index: 0 };
        let (second, cache) = (1_000_000, idle.cache.as_ref().unwrap());
        cache.tick(0, 0);
        // The cache reaches this tick as it does after 2^24 puts in each tick.
        cache.begin_tick(50_000);
        assert!(idle.put(Entry::new(0, 10, 7), class).is_none());
        cache.tick(second, second);
        assert!(idle.expire(second + IDLE_BUFFER_US - RETURN_TICK_US).is_empty());
        assert_eq!(idle.expire(second + IDLE_BUFFER_US).len(), 1);
        // Later ones are younger.
        assert!(idle.put(Entry::new(0, 10, 8), class).is_none());
        cache.tick(60 * second, 60 * second);
        assert!(idle.expire(60 * second + IDLE_BUFFER_US - RETURN_TICK_US).is_empty());
        assert_eq!(idle.expire(60 * second + IDLE_BUFFER_US).len(), 1);
    }
}
