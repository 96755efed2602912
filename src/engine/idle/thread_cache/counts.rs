//! The numbers of one shard: one verb for each event.
//!
//! Two of them serve twice, so that a hit stores as little as can be. Every hit frees a place and every put uses one;
//! every put adds an idle buffer and every hit takes one away:
//!
//! ```text
//!   spare places = granted + hits + gone - puts          idle = puts - hits - gone
//! ```
//!
//! Changed under the shard's lock, so a load and a store do where others would need an atomic addition; read by anybody.
//! A reader without the lock may catch one number before and another after an event: a hint while threads run, exact when
//! they have come to rest. Every access is relaxed: numbers guard nothing, buffers travel under the lock.

use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

pub(super) struct Counts {
    hits: AtomicU64,
    puts: AtomicU64,
    /// Left otherwise than by a hit.
    gone: AtomicU64,
    /// Places that came from elsewhere, less those that went there; wraps below zero.
    granted: AtomicU64,
    idle_bytes: AtomicUsize,
    allocated: AtomicU64,
}

impl Counts {
    pub(super) fn new() -> Self {
        Self {
            hits: AtomicU64::new(0),
            puts: AtomicU64::new(0),
            gone: AtomicU64::new(0),
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

    /// A buffer left by eviction or drain, and its place stays.
    #[inline(always)]
    pub(super) fn gone(&self, bytes: usize) {
        add(&self.gone, 1);
        self.idle_bytes.store(self.idle_bytes().wrapping_sub(bytes), Ordering::Relaxed);
    }

    /// Places came from elsewhere.
    #[inline(always)]
    pub(super) fn grant(&self, places: u32) {
        add(&self.granted, u64::from(places));
    }

    /// Places went elsewhere.
    #[inline(always)]
    pub(super) fn withdraw(&self, places: u32) {
        add(&self.granted, u64::from(places).wrapping_neg());
    }

    /// By whoever sits here, without the lock.
    pub(super) fn allocated(&self) {
        self.allocated.fetch_add(1, Ordering::Relaxed);
    }

    /// Places that no buffer uses.
    #[inline(always)]
    pub(super) fn spare(&self) -> u32 {
        let spare = load(&self.granted).wrapping_add(self.hits()).wrapping_add(load(&self.gone));
        // A glimpse between two events may be one below nothing.
        u32::try_from(spare.wrapping_sub(self.puts())).unwrap_or(0)
    }

    #[inline(always)]
    pub(super) fn idle(&self) -> u64 {
        self.puts().saturating_sub(self.hits() + load(&self.gone))
    }

    #[inline(always)]
    pub(super) fn idle_bytes(&self) -> usize {
        self.idle_bytes.load(Ordering::Relaxed)
    }

    #[inline(always)]
    pub(super) fn hits(&self) -> u64 {
        load(&self.hits)
    }

    #[inline(always)]
    pub(super) fn puts(&self) -> u64 {
        load(&self.puts)
    }

    #[inline(always)]
    pub(super) fn misses(&self) -> u64 {
        load(&self.allocated)
    }
}

#[inline(always)]
fn load(number: &AtomicU64) -> u64 {
    number.load(Ordering::Relaxed)
}

#[inline(always)]
fn add(number: &AtomicU64, more: u64) {
    number.store(load(number).wrapping_add(more), Ordering::Relaxed);
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn places_and_idle_follow_from_the_events() {
        let counts = Counts::new();
        counts.grant(3);
        counts.put(10);
        counts.put(20);
        assert_eq!((counts.spare(), counts.idle(), counts.idle_bytes()), (1, 2, 30));
        counts.hit(10);
        counts.gone(20);
        assert_eq!((counts.spare(), counts.idle(), counts.idle_bytes()), (3, 0, 0));
        counts.withdraw(3);
        assert_eq!((counts.spare(), counts.hits(), counts.puts()), (0, 1, 2));
    }
}
