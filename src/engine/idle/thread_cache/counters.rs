//! The counters of one shard, one method for each event, and the count of evictions that all shards share.
//!
//! Spare permits and idle buffers are derived, so a hit writes two counters: every hit frees a permit and removes an idle
//! buffer, every put uses a permit and adds an idle buffer.
//!
//! ```text
//!   spare permits = granted + hits + removed - puts          idle = puts - hits - removed
//! ```
//!
//! Each shard's counters are written under its lock, so a load and a store replace an atomic addition. A reader without
//! the lock may see one counter before an event and another after it: its result is a hint while threads run, and exact
//! when they are at rest. All accesses are relaxed: counters protect no data; the lock publishes the buffers.
//!
//! A window is the difference between the sums now and those noted at the last reset; a reset writes no counter.

use super::ThreadCache;
use super::permits::as_permits;
use crate::policy::{CHECK_EVERY_EVICTIONS, Window};
use crate::sync::CachePadded;
use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// What one shard counts.
pub(super) struct Counters {
    hits: AtomicU64,
    puts: AtomicU64,
    /// Buffers that left by eviction or drain.
    removed: AtomicU64,
    /// Permits received from the pool, less those returned to it; wraps below zero.
    granted: AtomicU64,
    idle_bytes: AtomicUsize,
    allocated: AtomicU64,
}

impl Counters {
    pub(super) fn new() -> Self {
        Self {
            hits: AtomicU64::new(0),
            puts: AtomicU64::new(0),
            removed: AtomicU64::new(0),
            granted: AtomicU64::new(0),
            idle_bytes: AtomicUsize::new(0),
            allocated: AtomicU64::new(0),
        }
    }

    #[inline(always)]
    pub(super) fn hit(&self, bytes: usize) {
        add(&self.hits, 1);
        self.idle_bytes.store(self.idle_bytes().wrapping_sub(bytes), Ordering::Relaxed);
    }

    #[inline(always)]
    pub(super) fn put(&self, bytes: usize) {
        add(&self.puts, 1);
        self.idle_bytes.store(self.idle_bytes().wrapping_add(bytes), Ordering::Relaxed);
    }

    /// A buffer left by eviction or drain; its permit stays with the shard.
    #[inline(always)]
    pub(super) fn removed(&self, bytes: usize) {
        add(&self.removed, 1);
        self.idle_bytes.store(self.idle_bytes().wrapping_sub(bytes), Ordering::Relaxed);
    }

    /// Permits arrived from outside the shard.
    #[inline(always)]
    pub(super) fn grant(&self, permits: u32) {
        add(&self.granted, u64::from(permits));
    }

    /// Permits left the shard.
    #[inline(always)]
    pub(super) fn withdraw(&self, permits: u32) {
        add(&self.granted, u64::from(permits).wrapping_neg());
    }

    /// Atomic: threads without a slot of their own share a shard, and this one is counted without its lock.
    pub(super) fn allocated(&self) {
        self.allocated.fetch_add(1, Ordering::Relaxed);
    }

    /// Permits that no buffer uses.
    #[inline(always)]
    pub(super) fn spare(&self) -> u32 {
        let spare = load(&self.granted).wrapping_add(self.hits()).wrapping_add(load(&self.removed));
        // A reader between two stores may see one less than none.
        u32::try_from(spare.wrapping_sub(self.puts())).unwrap_or(0)
    }

    #[inline(always)]
    pub(super) fn idle(&self) -> u64 {
        self.puts().saturating_sub(self.hits() + load(&self.removed))
    }

    #[inline(always)]
    pub(super) fn idle_bytes(&self) -> usize {
        self.idle_bytes.load(Ordering::Relaxed)
    }

    #[inline(always)]
    fn hits(&self) -> u64 {
        load(&self.hits)
    }

    #[inline(always)]
    fn puts(&self) -> u64 {
        load(&self.puts)
    }

    /// Adds this shard's totals to `sum`.
    pub(super) fn add_to(&self, sum: &mut Window) {
        sum.get_from_pool += self.hits();
        sum.put += self.puts();
        sum.allocated += load(&self.allocated);
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
    /// Buffers that are idle now.
    pub fn idle_count(&self) -> usize {
        let count = self.used_shards().map(|shard| shard.counters().idle()).sum::<u64>();
        usize::try_from(count).unwrap_or(usize::MAX)
    }

    /// Bytes of the buffers that are idle now.
    pub fn idle_bytes(&self) -> usize {
        self.used_shards().map(|shard| shard.counters().idle_bytes()).fold(0, usize::wrapping_add)
    }

    /// Everything counted since the cache was made.
    pub fn totals(&self) -> Window {
        let mut totals = Window { evicted: self.evictions.count(), ..Window::default() };
        self.used_shards().for_each(|shard| shard.counters().add_to(&mut totals));
        totals
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
        let mut permits = self.permits.free();
        for (at, shard) in self.shards.iter().enumerate() {
            let in_shard = |wrong| format!("shard {at}: {wrong}");
            let (classes, free) = shard.validate().map_err(in_shard)?;
            permits += i64::from(free);
            if !(classes.is_empty() && free == 0 || self.used.load(Ordering::Relaxed) & 1 << at != 0) {
                return Err(in_shard("not marked used".into()));
            }
            if let Some(class) = classes.iter().find(|&&class| self.occupancy.shards(class) & 1 << at == 0) {
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
    fn spare_permits_and_idle_buffers_follow_from_the_events() {
        let counters = Counters::new();
        counters.grant(3);
        counters.put(10);
        counters.put(20);
        assert_eq!((counters.spare(), counters.idle(), counters.idle_bytes()), (1, 2, 30));
        counters.hit(10);
        counters.removed(20);
        assert_eq!((counters.spare(), counters.idle(), counters.idle_bytes()), (3, 0, 0));
        counters.withdraw(3);
        assert_eq!((counters.spare(), counters.hits(), counters.puts()), (0, 1, 2));
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
