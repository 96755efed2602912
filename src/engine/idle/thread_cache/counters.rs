//! The counters of one shard, one method for each event, and the count of evictions that all shards share.
//!
//! A hit writes three numbers, all in the cache line of the lock; the others follow from events that are rare:
//!
//! ```text
//!   idle buffers = granted - spare permits          puts = idle buffers + hits + removed
//! ```
//!
//! Each shard's counters are written under its lock, so a load and a store replace an atomic addition. A sum that two
//! counters make is exact only under the lock: a snapshot copies each shard's counters there. All accesses are relaxed:
//! counters protect no data; the lock publishes the buffers.
//!
//! A window is the difference between the sums now and those noted at the last reset; a reset writes no counter.

use super::ThreadCache;
use super::permits::as_permits;
use crate::policy::{CHECK_EVERY_EVICTIONS, Window};
use crate::sync::CachePadded;
use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// What one shard counts.
#[repr(C)] // A hit writes the first three.
pub(super) struct Counters {
    hits: AtomicU64,
    /// Permits that no buffer uses.
    spare: AtomicU64,
    idle_bytes: AtomicUsize,
    /// Buffers that left by eviction or drain, and puts whose buffer was evicted at once.
    removed: AtomicU64,
    /// Permits received from the pool, less those returned to it.
    granted: AtomicU64,
    allocated: AtomicU64,
}

/// The counters of a shard at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct ShardCounts {
    pub(super) idle: u64,
    pub(super) idle_bytes: usize,
    pub(super) spare: u32,
    pub(super) window: Window,
}

impl Counters {
    pub(super) fn new() -> Self {
        Self {
            hits: AtomicU64::new(0),
            spare: AtomicU64::new(0),
            idle_bytes: AtomicUsize::new(0),
            removed: AtomicU64::new(0),
            granted: AtomicU64::new(0),
            allocated: AtomicU64::new(0),
        }
    }

    /// Counts a hit, whose permit stays with the shard; returns the spare permits.
    #[inline(always)]
    pub(super) fn hit(&self, bytes: usize) -> u64 {
        add(&self.hits, 1);
        self.idle_bytes.store(self.idle_bytes().wrapping_sub(bytes), Ordering::Relaxed);
        add(&self.spare, 1)
    }

    /// Counts a put that uses a spare permit, of which there is one.
    #[inline(always)]
    pub(super) fn put(&self, bytes: usize) {
        add(&self.spare, 1u64.wrapping_neg());
        self.idle_bytes.store(self.idle_bytes().wrapping_add(bytes), Ordering::Relaxed);
    }

    /// A buffer left by eviction or drain, with its permit.
    pub(super) fn removed(&self, bytes: usize) {
        add(&self.removed, 1);
        add(&self.granted, 1u64.wrapping_neg());
        self.idle_bytes.store(self.idle_bytes().wrapping_sub(bytes), Ordering::Relaxed);
    }

    /// Counts a put whose buffer was evicted at once, without a permit.
    pub(super) fn evicted_put(&self) {
        add(&self.removed, 1);
    }

    /// Permits arrived from outside the shard.
    pub(super) fn grant(&self, permits: u32) {
        add(&self.granted, u64::from(permits));
        add(&self.spare, u64::from(permits));
    }

    /// Spare permits left the shard.
    pub(super) fn withdraw(&self, permits: u32) {
        add(&self.granted, u64::from(permits).wrapping_neg());
        add(&self.spare, u64::from(permits).wrapping_neg());
    }

    /// Atomic: counted without the lock, and threads may share a shard.
    pub(super) fn allocated(&self) {
        self.allocated.fetch_add(1, Ordering::Relaxed);
    }

    /// Permits that no buffer uses.
    pub(super) fn spare(&self) -> u32 {
        u32::try_from(load(&self.spare)).unwrap_or(0)
    }

    #[inline(always)]
    pub(super) fn has_spare(&self) -> bool {
        load(&self.spare) > 0
    }

    /// Whether no buffer is idle; a hint without the lock.
    pub(super) fn is_empty(&self) -> bool {
        load(&self.granted) == load(&self.spare)
    }

    #[inline(always)]
    fn idle_bytes(&self) -> usize {
        self.idle_bytes.load(Ordering::Relaxed)
    }

    /// The caller holds the shard's lock.
    pub(super) fn snapshot(&self) -> ShardCounts {
        let idle = load(&self.granted).saturating_sub(load(&self.spare));
        let hits = load(&self.hits);
        let puts = idle + hits + load(&self.removed);
        let window = Window { get_from_pool: hits, put: puts, allocated: load(&self.allocated), evicted: 0 };
        ShardCounts { idle, idle_bytes: self.idle_bytes(), spare: self.spare(), window }
    }
}

#[inline(always)]
fn load(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

/// Adds and returns the sum.
#[inline(always)]
fn add(counter: &AtomicU64, more: u64) -> u64 {
    let sum = load(counter).wrapping_add(more);
    counter.store(sum, Ordering::Relaxed);
    sum
}

/// Evictions of all shards: one shared counter, because every thousandth must be noticed.
pub(super) struct Evictions {
    count: CachePadded<AtomicU64>,
    at_reset: AtomicU64,
}

impl Evictions {
    pub(super) fn new() -> Self {
        Self { count: CachePadded::new(AtomicU64::new(0)), at_reset: AtomicU64::new(0) }
    }

    /// Adds one; `true` if it makes a check due (policy-R4).
    pub(super) fn add(&self) -> bool {
        // Relaxed, here and below: each is a number on its own.
        let count = self.count.fetch_add(1, Ordering::Relaxed) + 1;
        count.wrapping_sub(self.at_reset.load(Ordering::Relaxed)).is_multiple_of(CHECK_EVERY_EVICTIONS)
    }

    pub(super) fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    pub(super) fn reset_at(&self, count: u64) {
        self.at_reset.store(count, Ordering::Relaxed);
    }
}

/// Sums over all shards; no take or put runs this code.
impl<T> ThreadCache<T> {
    fn counts(&self) -> impl Iterator<Item = ShardCounts> {
        self.used_shards().map(|shard| shard.counts())
    }

    /// Buffers that are idle now.
    pub fn idle_count(&self) -> usize {
        usize::try_from(self.counts().map(|counts| counts.idle).sum::<u64>()).unwrap_or(usize::MAX)
    }

    /// Bytes of the buffers that are idle now.
    pub fn idle_bytes(&self) -> usize {
        self.counts().map(|counts| counts.idle_bytes).fold(0, usize::wrapping_add)
    }

    /// Everything counted since the cache was made.
    pub fn totals(&self) -> Window {
        let none = Window { evicted: self.evictions.count(), ..Window::default() };
        self.counts().fold(none, |sum, ShardCounts { window, .. }| Window {
            get_from_pool: sum.get_from_pool + window.get_from_pool,
            put: sum.put + window.put,
            allocated: sum.allocated + window.allocated,
            evicted: sum.evicted,
        })
    }

    /// Everything counted since the last reset.
    pub fn window(&self) -> Window {
        let (reset, now) = (self.reset.lock(), self.totals());
        // Saturates: a reset that races with operations may have noted one more than a later reader finds.
        Window {
            get_from_pool: now.get_from_pool.saturating_sub(reset.get_from_pool),
            put: now.put.saturating_sub(reset.put),
            allocated: now.allocated.saturating_sub(reset.allocated),
            evicted: now.evicted.saturating_sub(reset.evicted),
        }
    }

    /// Begins a new window.
    pub fn reset_window(&self) {
        let mut reset = self.reset.lock();
        *reset = self.totals();
        self.evictions.reset_at(reset.evicted);
    }

    /// At rest: recounts everything and compares it with the counters.
    ///
    /// # Errors
    ///
    /// Names the first number that does not agree.
    pub fn validate(&self) -> Result<(), String> {
        let mut permits = self.common.permits.free();
        for (at, shard) in self.shards.iter().enumerate() {
            let in_shard = |wrong| format!("shard {at}: {wrong}");
            let (classes, free) = shard.validate().map_err(in_shard)?;
            permits += i64::from(free);
            if !(classes.is_empty() && free == 0 || self.common.occupancy.is_used(at)) {
                return Err(in_shard("not marked used".into()));
            }
            if let Some(class) = classes.iter().find(|&&class| self.common.occupancy.shards(class) & 1 << at == 0) {
                return Err(in_shard(format!("the occupancy bit of class {class} is clear")));
            }
        }
        let (idle, limit) = (self.idle_count(), self.limit());
        if idle > limit || i64::try_from(idle).is_ok_and(|idle| as_permits(limit) != idle + permits) {
            return Err(format!("{idle} idle and {permits} permits do not add up to the limit {limit}"));
        }
        Ok(())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn idle_buffers_and_puts_follow_from_the_events() {
        let counters = Counters::new();
        counters.grant(3);
        counters.put(10);
        counters.put(20);
        let ShardCounts { idle, idle_bytes, spare, window } = counters.snapshot();
        assert_eq!((idle, idle_bytes, spare, window.put), (2, 30, 1, 2));
        assert_eq!((counters.hit(10), counters.is_empty()), (2, false));
        counters.removed(20);
        counters.evicted_put();
        let ShardCounts { idle, idle_bytes, spare, window } = counters.snapshot();
        assert_eq!((idle, idle_bytes, spare, window.put, window.get_from_pool), (0, 0, 2, 3, 1));
        counters.withdraw(2);
        assert!(counters.is_empty() && !counters.has_spare());
    }

    #[test]
    fn a_check_is_due_at_each_thousandth_eviction_of_the_window() {
        let evictions = Evictions::new();
        let due = |n: u64| (1..=n).filter(|_| evictions.add()).count();
        assert_eq!((due(999), due(1), due(999), due(1)), (0, 1, 0, 1));
        assert_eq!(due(400), 0);
        evictions.reset_at(evictions.count());
        assert_eq!((due(999), due(1)), (0, 1));
        assert_eq!(evictions.count(), 3400);
    }
}
