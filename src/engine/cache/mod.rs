//! The idle buffers of a pool, and the order in which each preset reuses and evicts them.
//!
//! | preset | file | reuse | eviction | lock |
//! | --- | --- | --- | --- | --- |
//! | `tensorflow` | `tensorflow.rs` | oldest of the class first | oldest of all first | one |
//! | `adaptive` | `thread_cache` | newest of the class first | oldest of all first | one per shard |
//!
//! One structure cannot serve both: TensorFlow's order needs one list for the whole pool, and to maintain it, each return must
//! take a lock that all threads share. `tensorflow` enforces the limit on idle buffers at each return, `adaptive` at the next
//! miss, slow return or maintenance tick.
//!
//! This module is generic over the buffer, so that tests use integers. It owns the counts of hits, returns and evictions, and
//! the limit. It never releases memory, waits for a buffer or logs: it returns evicted buffers to the caller, which releases
//! them outside every lock. It reads no clock: times are arguments.

mod tensorflow;
pub(super) mod thread_cache;

use self::tensorflow::{CountLimit, OrderedStore};
use self::thread_cache::{Counts, Entry, ThreadCache, current_slot};
use crate::policy::{RateCheck, RateWindow};
use crate::size_class::{Class, EIGHTHS_CLASSES};
use crate::stats::{EvictionReason, Stats};
use pinpool_os::sync::unmodeled::Mutex;

/// Buffers that were removed from the cache, for the caller to release.
pub(super) type Victims<T> = Vec<Box<Entry<T>>>;

/// The idle buffers of one pool.
pub(super) struct IdleBuffers<T> {
    /// The idle buffers under `adaptive`; `None` under `tensorflow`.
    pub(super) cache: Option<ThreadCache<T>>,
    state: Mutex<IdleState<T>>,
    /// Under `adaptive`, a buffer that has been idle for this long returns to the arena.
    idle_us: u64,
}

#[derive(Debug)]
struct IdleState<T> {
    limit: CountLimit,
    /// The idle buffers under `tensorflow`; empty under `adaptive`.
    store: OrderedStore<T>,
    sealed: bool,
}

/// A buffer that the caller must release, and the reason.
#[derive(Debug)]
pub(super) struct Eviction<T> {
    pub(super) entry: Box<Entry<T>>,
    pub(super) reason: EvictionReason,
    /// The result of the check that this eviction caused, if it caused one (policy-R4).
    pub(super) check: Option<RateCheck>,
}

impl<T> Eviction<T> {
    /// Rejects `entry`, because the cache is sealed or its limit is 0.
    fn rejected(entry: Box<Entry<T>>) -> Self {
        Self { entry, reason: EvictionReason::Other, check: None }
    }
}

impl<T> IdleBuffers<T> {
    /// Creates an empty cache that keeps up to `limit` buffers. Under `adaptive`, buffers idle for `idle_us` return to the
    /// arena.
    pub(super) fn new(is_adaptive: bool, limit: u64, auto_resize: bool, idle_us: u64) -> Self {
        let shards = || 2 * std::thread::available_parallelism().map_or(8, usize::from);
        let cache = is_adaptive.then(|| ThreadCache::new(EIGHTHS_CLASSES, saturating_usize(limit), shards()));
        let limit = CountLimit::new(limit, auto_resize);
        let state = Mutex::new(IdleState { limit, store: OrderedStore::new(), sealed: false });
        Self { cache, state, idle_us }
    }

    /// Takes an idle buffer of `class`. Counts a hit if there is one.
    pub(super) fn take(&self, class: Class) -> Option<Box<Entry<T>>> {
        if let Some(cache) = &self.cache {
            return cache.take(current_slot(), class.index);
        }
        let mut state = self.state.lock();
        let entry = state.store.take(class.bytes)?;
        state.limit.counted.get_from_pool += 1;
        Some(entry)
    }

    /// Keeps `entry`, which is of `class`. Returns a buffer that the caller must release: `entry` itself, or a buffer over the
    /// limit. More buffers may then be over the limit, so the caller calls [`evict_over_limit`](Self::evict_over_limit) until
    /// it returns `None`.
    pub(super) fn put(&self, entry: Box<Entry<T>>, class: Class) -> Option<Eviction<T>> {
        let Some(cache) = &self.cache else { return self.state.lock().put(entry, class.bytes) };
        let kept = match cache.home(&entry) {
            Some(home) => home.put(cache.own_shard(), entry),
            None => Err(entry),
        };
        let Err(entry) = kept else { return self.evict_over_limit() };
        let mut state = self.state.lock();
        state.limit.counted.put += 1;
        Some(if state.sealed { Eviction::rejected(entry) } else { state.evict(entry, cache) })
    }

    /// Pushes `entry`, which another thread took, to the shard of that thread, without waiting. Returns `entry` if no shard may
    /// keep it.
    pub(super) fn put_remote(&self, entry: Box<Entry<T>>) -> Result<(), Box<Entry<T>>> {
        match self.cache.as_ref().and_then(|cache| cache.home(&entry)) {
            Some(home) => home.put_remote(entry),
            None => Err(entry),
        }
    }

    /// Removes and returns the buffer returned longest ago, if more are idle than the limit allows. Does nothing under
    /// `tensorflow`, which enforces its limit in [`put`](Self::put).
    pub(super) fn evict_over_limit(&self) -> Option<Eviction<T>> {
        let cache = self.cache.as_ref().filter(|cache| cache.is_over_limit())?;
        // Under the lock, so that several threads together evict no more buffers than are over the limit.
        let mut state = self.state.lock();
        let victim = cache.evict_over_limit()?;
        Some(state.evict(victim, cache))
    }

    /// Counts a miss that was served with new memory at `now_us`.
    pub(super) fn count_allocated(&self, now_us: u64) {
        self.state.lock().limit.count_allocated(now_us);
    }

    /// Counts the return of a buffer that is not kept here.
    pub(super) fn count_put(&self) {
        self.state.lock().limit.counted.put += 1;
    }

    /// Removes and returns the buffer returned longest ago, to make room.
    pub(super) fn reclaim(&self) -> Option<Box<Entry<T>>> {
        self.cache.as_ref().map_or_else(|| self.state.lock().store.evict(), ThreadCache::evict_oldest)
    }

    /// Removes and returns the buffers that have been idle for too long at `now_us`; none under `tensorflow`.
    pub(super) fn expire(&self, now_us: u64) -> Victims<T> {
        let mut old = Vec::new();
        if let Some((cache, oldest_us)) = self.cache.as_ref().zip(now_us.checked_sub(self.idle_us)) {
            cache.drain_old(oldest_us, |entry| old.push(entry));
        }
        old
    }

    /// Lowers the limit if no request has missed for a long time (policy-R4). Returns the old limit, the new limit, and the
    /// buffers over the new limit; `None` if the limit stays, as it always does under `tensorflow`.
    pub(super) fn lower_limit(&self, now_us: u64) -> Option<(u64, u64, Victims<T>)> {
        let cache = self.cache.as_ref()?;
        let mut state = self.state.lock();
        let from = state.limit.lower(now_us)?;
        let to = state.limit.get();
        cache.set_limit(saturating_usize(to));
        Some((from, to, std::iter::from_fn(|| cache.evict_over_limit()).collect()))
    }

    /// Removes and returns all idle buffers, and begins a new window of TensorFlow's counters.
    pub(super) fn clear(&self) -> Victims<T> {
        let mut state = self.state.lock();
        state.limit.begin_window(self.counts());
        self.drain(state)
    }

    /// Removes and returns all idle buffers. From now on no buffer is kept.
    pub(super) fn stop_keeping(&self) -> Victims<T> {
        let mut state = self.state.lock();
        state.sealed = true;
        if let Some(cache) = &self.cache {
            cache.seal();
        }
        self.drain(state)
    }

    fn drain(&self, mut state: impl std::ops::DerefMut<Target = IdleState<T>>) -> Victims<T> {
        let Some(cache) = &self.cache else { return state.store.drain() };
        let mut idle = Vec::new();
        cache.drain(u64::MAX, |entry| idle.push(entry));
        idle
    }

    /// Counts the idle buffers of `class`. Under `adaptive` this walks their lists.
    pub(super) fn count_of(&self, class: Class) -> u64 {
        let in_store = || self.state.lock().store.count_of(class.bytes);
        self.cache.as_ref().map_or_else(in_store, |cache| cache.count_of(class.index))
    }

    /// Returns the bytes of all idle buffers.
    pub(super) fn bytes(&self) -> u64 {
        self.cache.as_ref().map_or_else(|| self.state.lock().store.bytes(), |cache| cache.counts().idle_bytes as u64)
    }

    /// Returns the number of idle buffers.
    pub(super) fn count(&self) -> u64 {
        self.cache.as_ref().map_or_else(|| self.state.lock().store.len(), |cache| cache.counts().idle)
    }

    /// Returns the counts of the thread cache; zeros under `tensorflow`.
    fn counts(&self) -> Counts {
        self.cache.as_ref().map(ThreadCache::counts).unwrap_or_default()
    }

    pub(super) fn fill(&self, stats: &mut Stats) {
        let (state, counts) = (self.state.lock(), self.counts());
        state.limit.fill(stats, counts);
        stats.memory.idle = state.store.len() + counts.idle;
        stats.memory.idle_bytes = state.store.bytes() + counts.idle_bytes as u64;
    }

    /// Returns TensorFlow's counters since the last raise or clear.
    pub(super) fn window(&self) -> RateWindow {
        let (state, counts) = (self.state.lock(), self.counts());
        // TensorFlow counts nothing under a limit of 0.
        let counts_nothing = self.cache.is_none() && state.limit.get() == 0;
        if counts_nothing { RateWindow::default() } else { state.limit.window(counts) }
    }
}

impl<T> IdleState<T> {
    /// Puts `entry` as TensorFlow does: counts the return, evicts the oldest buffer if the limit is reached, which may cause a
    /// check, and only then keeps `entry`. Returns the buffer that the caller must release, if there is one.
    fn put(&mut self, entry: Box<Entry<T>>, class: usize) -> Option<Eviction<T>> {
        self.limit.counted.put += 1;
        if self.sealed || self.limit.get() == 0 {
            return Some(Eviction::rejected(entry));
        }
        let victim = if self.store.len() >= self.limit.get() { self.store.evict() } else { None };
        let evicted = victim.map(|entry| Eviction {
            entry,
            reason: EvictionReason::OverLimit,
            check: self.limit.count_eviction(Counts::default),
        });
        self.store.put(class, entry);
        evicted
    }

    /// Counts `entry` as evicted because of the limit of `cache`. This may cause a check, which may raise the limit.
    fn evict(&mut self, entry: Box<Entry<T>>, cache: &ThreadCache<T>) -> Eviction<T> {
        let check = self.limit.count_eviction(|| cache.counts());
        cache.set_limit(saturating_usize(self.limit.get()));
        Eviction { entry, reason: EvictionReason::OverLimit, check }
    }
}

fn saturating_usize(limit: u64) -> usize {
    usize::try_from(limit).unwrap_or(usize::MAX)
}

#[cfg(all(test, not(pinpool_loom)))]
mod tests {
    use super::thread_cache::RETURN_AGE_US;
    use super::*;
    use crate::policy::BUFFER_IDLE_US_MAX;

    #[test]
    fn puts_that_carried_into_later_ages_grow_old_like_others() {
        let idle = IdleBuffers::new(true, 10, false, BUFFER_IDLE_US_MAX);
        let class = Class { bytes: 10, index: 0 };
        let (second, cache) = (1_000_000, idle.cache.as_ref().unwrap());
        cache.advance_age(0, 0);
        // A cache reaches an age this far ahead if more than 2^24 puts are made in each age.
        cache.begin_age(50_000);
        assert!(idle.put(Entry::new(0, 10, 7), class).is_none());
        cache.advance_age(second, second);
        assert!(idle.expire(second + BUFFER_IDLE_US_MAX - RETURN_AGE_US).is_empty());
        assert_eq!(idle.expire(second + BUFFER_IDLE_US_MAX).len(), 1);
        // A buffer returned later is younger.
        assert!(idle.put(Entry::new(0, 10, 8), class).is_none());
        cache.advance_age(60 * second, 60 * second);
        assert!(idle.expire(60 * second + BUFFER_IDLE_US_MAX - RETURN_AGE_US).is_empty());
        assert_eq!(idle.expire(60 * second + BUFFER_IDLE_US_MAX).len(), 1);
    }
}
