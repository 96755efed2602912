//! The counters of one shard, one method for each event, and the count of evictions that all shards share.
//!
//! A take writes one number and a put two, all in the cache line of the lock; the others follow from events that are rare:
//!
//! ```text
//!   one word       idle bytes (56 bits) | spare permits (8 bits)        a put adds bytes | -1, its take subtracts them
//!   idle buffers = granted - spare permits
//!   hits         = puts that the free list counts - idle buffers - removed
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
use pinpool_os::sync::CachePadded;
use pinpool_os::sync::atomic::{AtomicU64, Ordering};

/// The bits of the spare permits: a shard has fewer than two to the power of this.
pub(super) const SPARE_BITS: u32 = 8;

/// What a buffer of `bytes` adds to the first word while it is idle: its bytes, and one spare permit less.
pub(super) const fn weight(bytes: usize) -> u64 {
    ((bytes as u64) << SPARE_BITS).wrapping_sub(1)
}

/// The bytes behind a weight.
pub(super) fn bytes_of(weight: u64) -> usize {
    usize::try_from(weight.wrapping_add(1) >> SPARE_BITS).unwrap_or(usize::MAX)
}

/// What one shard counts.
#[repr(C)] // A hit writes the first.
pub(super) struct Counters {
    /// Idle bytes and, in the low bits, the permits that no buffer uses.
    bytes_and_spare: AtomicU64,
    /// Buffers that left by eviction or drain.
    removed: AtomicU64,
    /// Puts whose buffer was evicted at once.
    evicted_puts: AtomicU64,
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
            bytes_and_spare: AtomicU64::new(0),
            removed: AtomicU64::new(0),
            evicted_puts: AtomicU64::new(0),
            granted: AtomicU64::new(0),
            allocated: AtomicU64::new(0),
        }
    }

    /// Counts a take of a buffer of this `weight`, whose permit stays with the shard.
    #[inline(always)]
    pub(super) fn taken(&self, weight: u64) {
        add(&self.bytes_and_spare, weight.wrapping_neg());
    }

    /// Counts a put of a buffer of this `weight`, which uses a spare permit, of which there is one.
    #[inline(always)]
    pub(super) fn put(&self, weight: u64) {
        add(&self.bytes_and_spare, weight);
    }

    /// A buffer of this `weight` left by eviction or drain, with its permit.
    pub(super) fn removed(&self, weight: u64) {
        self.taken(weight);
        add(&self.removed, 1);
        self.withdraw(1);
    }

    /// Counts a put whose buffer was evicted at once, without a permit.
    pub(super) fn evicted_put(&self) {
        add(&self.evicted_puts, 1);
    }

    /// Permits arrived from outside the shard.
    pub(super) fn grant(&self, permits: u32) {
        add(&self.granted, u64::from(permits));
        add(&self.bytes_and_spare, u64::from(permits));
    }

    /// Spare permits left the shard.
    pub(super) fn withdraw(&self, permits: u32) {
        add(&self.granted, u64::from(permits).wrapping_neg());
        add(&self.bytes_and_spare, u64::from(permits).wrapping_neg());
    }

    /// Atomic: counted without the lock, and threads may share a shard.
    pub(super) fn allocated(&self) {
        self.allocated.fetch_add(1, Ordering::Relaxed);
    }

    /// Permits that no buffer uses.
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "the low bits")]
    pub(super) fn spare(&self) -> u32 {
        load(&self.bytes_and_spare) as u32 & ((1 << SPARE_BITS) - 1)
    }

    /// Whether no buffer is idle; a hint without the lock.
    pub(super) fn is_empty(&self) -> bool {
        load(&self.granted) == u64::from(self.spare())
    }

    /// The free list has counted `puts`. The caller holds the shard's lock.
    pub(super) fn snapshot(&self, puts: u64) -> ShardCounts {
        let idle = load(&self.granted).saturating_sub(self.spare().into());
        let get_from_pool = puts.saturating_sub(idle + load(&self.removed));
        let put = puts + load(&self.evicted_puts);
        let window = Window { get_from_pool, put, allocated: load(&self.allocated), evicted: 0 };
        let idle_bytes = usize::try_from(load(&self.bytes_and_spare) >> SPARE_BITS).unwrap_or(usize::MAX);
        ShardCounts { idle, idle_bytes, spare: self.spare(), window }
    }
}

#[inline(always)]
fn load(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

#[inline(always)]
fn add(counter: &AtomicU64, more: u64) {
    counter.store(load(counter).wrapping_add(more), Ordering::Relaxed);
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

#[cfg(all(test, not(pinpool_loom)))]
mod tests {
    use super::*;

    #[test]
    fn idle_buffers_and_puts_follow_from_the_events() {
        let counters = Counters::new();
        counters.grant(3);
        counters.put(weight(10));
        counters.put(weight(20));
        let ShardCounts { idle, idle_bytes, spare, window } = counters.snapshot(2);
        assert_eq!((idle, idle_bytes, spare, window.put), (2, 30, 1, 2));
        counters.taken(weight(10));
        assert!(!counters.is_empty());
        counters.removed(weight(20));
        counters.evicted_put();
        let ShardCounts { idle, idle_bytes, spare, window } = counters.snapshot(2);
        assert_eq!((idle, idle_bytes, spare, window.put, window.get_from_pool), (0, 0, 2, 3, 1));
        counters.withdraw(2);
        assert_eq!((counters.is_empty(), counters.spare()), (true, 0));
    }

    #[test]
    fn the_spare_permits_and_the_idle_bytes_share_a_word() {
        let counters = Counters::new();
        let most = (1usize << 55) + 5;
        counters.grant((1 << SPARE_BITS) - 1);
        for bytes in [0, 1, most] {
            counters.put(weight(bytes));
            assert_eq!(bytes_of(weight(bytes)), bytes);
        }
        assert_eq!((counters.spare(), counters.snapshot(3).idle_bytes), (252, most + 1));
        [most, 1, 0].into_iter().for_each(|bytes| counters.taken(weight(bytes)));
        let counts = counters.snapshot(3);
        assert_eq!((counts.spare, counts.idle_bytes, counts.window.get_from_pool), (255, 0, 3));
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
