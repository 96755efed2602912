//! What all shards share: the permit pool, which is the count limit, and the occupancy bitmaps.
//!
//! **Permits.** Each idle buffer holds one permit. A lowered limit leaves the pool in debt (below zero) until that many
//! permits have come back.
//!
//! ```text
//!   limit = idle buffers + spare permits of shards + permits in remote free lists + permits in the pool + permits that a
//!           put holds
//! ```
//!
//! A take leaves its permit with the shard and the next put there uses it, so hits never touch the pool. A shard without
//! permits claims some from the pool; one with many returns some. Any number of threads keep the limit, because each idle
//! buffer has a permit (cache-I2); a put collects every free permit before it evicts (cache-I3).
//!
//! **Occupancy.** One word per class, one bit per shard, so a miss with nothing idle reads one word. A set bit may be
//! stale; a clear bit never is (cache-I1): under the shard's lock, a push into a class whose head is not marked sets the bit
//! and the mark first. Takes leave both, so a thread that takes and puts the same buffer writes no shared word. A thread
//! that searched a shard without success clears both:
//!
//! ```text
//!   under the shard's lock, the class is empty       a remote push: push; bit clear? set it
//!   1. remove the mark, clear the bit
//!   2. collect the remote free list; each push of a collected entry sets mark and bit again
//! ```
//!
//! A remote push either comes before step 2, which then finds its buffer, or after it, and then the exchange of step 2
//! makes the cleared bit visible to it. Both are acquire-release exchanges on the word of the remote free list, so no
//! fence is needed.

use crate::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering};

/// Permits that a put claims from the pool at once.
pub(super) const PERMITS_PER_CLAIM: u32 = 4;

/// What all shards of a cache share.
pub(super) struct Common {
    pub(super) permits: PermitPool,
    pub(super) occupancy: Occupancy,
}

impl Common {
    pub(super) fn new(classes: u32, limit: usize) -> Self {
        Self { permits: PermitPool::new(limit), occupancy: Occupancy::new(classes) }
    }
}

pub(super) struct PermitPool {
    limit: AtomicUsize,
    /// Permits in the pool; below zero, permits that must come back.
    free: AtomicI64,
}

impl PermitPool {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit: AtomicUsize::new(limit), free: AtomicI64::new(as_permits(limit)) }
    }

    #[inline]
    pub(super) fn limit(&self) -> usize {
        // Relaxed: one number on its own.
        self.limit.load(Ordering::Relaxed)
    }

    /// Sets another limit; `true` if permits must now come back.
    pub(super) fn set_limit(&self, limit: usize) -> bool {
        // Relaxed, here and below: permits are only counted; the shards' locks publish the buffers.
        let change = as_permits(limit) - as_permits(self.limit.swap(limit, Ordering::Relaxed));
        self.free.fetch_add(change, Ordering::Relaxed) + change < 0
    }

    pub(super) fn in_debt(&self) -> bool {
        self.free() < 0
    }

    pub(super) fn free(&self) -> i64 {
        self.free.load(Ordering::Relaxed)
    }

    /// Takes up to `most` permits.
    pub(super) fn claim(&self, most: u32) -> u32 {
        let mut free = self.free();
        loop {
            let Ok(claimed @ 1..) = u32::try_from(free.min(i64::from(most))) else { return 0 };
            let left = free - i64::from(claimed);
            match self.free.compare_exchange_weak(free, left, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return claimed,
                Err(now) => free = now,
            }
        }
    }

    #[inline]
    pub(super) fn add(&self, permits: u32) {
        if permits > 0 {
            self.free.fetch_add(i64::from(permits), Ordering::Relaxed);
        }
    }
}

/// A limit as a number of permits, capped so that sums cannot overflow.
pub(super) fn as_permits(limit: usize) -> i64 {
    i64::try_from(limit).unwrap_or(i64::MAX).min(i64::MAX / 4)
}

/// Which shards may hold which class, and which were ever used.
pub(super) struct Occupancy {
    shards_of: Box<[AtomicU64]>,
    /// A bit for each shard that ever held a buffer or a permit.
    used: AtomicU64,
}

impl Occupancy {
    pub(super) fn new(classes: u32) -> Self {
        Self { shards_of: (0..classes).map(|_| AtomicU64::new(0)).collect(), used: AtomicU64::new(0) }
    }

    #[inline]
    pub(super) fn has_class(&self, class: u32) -> bool {
        (class as usize) < self.shards_of.len()
    }

    /// A bit for each shard that may hold `class`.
    #[inline]
    pub(super) fn shards(&self, class: u32) -> u64 {
        // Relaxed: the shard's lock follows; a put that ended before this thread's search is visible in any case.
        self.shards_of.get(class as usize).map_or(0, |shards| shards.load(Ordering::Relaxed))
    }

    /// Records that `shard` holds `class`.
    #[inline]
    pub(super) fn set(&self, class: u32, shard: usize) {
        let Some(shards) = self.shards_of.get(class as usize) else { return };
        // Relaxed: the shard's lock or the exchange on its remote free list gives the order described above.
        if shards.load(Ordering::Relaxed) & 1 << shard == 0 {
            shards.fetch_or(1 << shard, Ordering::Relaxed);
            self.mark_used(shard);
        }
    }

    /// A bit for each shard that was ever used.
    pub(super) fn used(&self) -> u64 {
        // Relaxed: the bits say which shards to search; the locks publish what is in them.
        self.used.load(Ordering::Relaxed)
    }

    pub(super) fn is_used(&self, shard: usize) -> bool {
        self.used() & 1 << shard != 0
    }

    pub(super) fn mark_used(&self, shard: usize) {
        if !self.is_used(shard) {
            self.used.fetch_or(1 << shard, Ordering::Relaxed);
        }
    }

    /// Step 1 above; the caller holds the lock of `shard`.
    pub(super) fn clear(&self, class: u32, shard: usize) {
        if let Some(shards) = self.shards_of.get(class as usize) {
            // Relaxed: the exchange of step 2 releases it.
            shards.fetch_and(!(1 << shard), Ordering::Relaxed);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_lowered_limit_is_a_debt_until_permits_come_back() {
        let permits = PermitPool::new(5);
        assert_eq!(permits.claim(4), 4);
        assert_eq!(permits.claim(4), 1);
        assert_eq!(permits.claim(4), 0);
        assert!(permits.set_limit(3));
        permits.add(1);
        assert!(permits.in_debt());
        permits.add(2);
        assert!(!permits.in_debt());
        assert_eq!((permits.limit(), permits.claim(4)), (3, 1));
        assert!(!permits.set_limit(usize::MAX));
        assert!(permits.set_limit(0));
        permits.add(3);
        assert_eq!((permits.free(), permits.claim(1)), (0, 0));
    }
}
