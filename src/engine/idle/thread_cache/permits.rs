//! The count limit, as places: who keeps a buffer sits it on one.
//!
//! ```text
//!   limit = idle buffers + spare places of the shards + places in their inboxes + places in the pot + places in hand
//! ```
//!
//! A take leaves its place with the shard and the next put there uses it, so hits never come here. Only a shard that has
//! none asks the pot, and one that has many brings some back. Because each idle buffer has a place, the limit is never
//! passed, by any number of threads; because a put collects every place there is before it evicts, none is evicted early.
//!
//! A lower limit takes places away that are in use: the pot owes them until that many buffers have left.

use crate::sync::atomic::{AtomicI64, AtomicUsize, Ordering};

pub(super) struct PermitPool {
    limit: AtomicUsize,
    /// Places that nobody has; below zero, places that must come back.
    free: AtomicI64,
}

impl PermitPool {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit: AtomicUsize::new(limit), free: AtomicI64::new(as_places(limit)) }
    }

    #[inline]
    pub(super) fn limit(&self) -> usize {
        // Relaxed: one number on its own.
        self.limit.load(Ordering::Relaxed)
    }

    /// Sets another limit; `true` if places must now come back.
    pub(super) fn set_limit(&self, limit: usize) -> bool {
        // Relaxed, here and below: places are only counted; the buffers travel under the shards' locks.
        let change = as_places(limit) - as_places(self.limit.swap(limit, Ordering::Relaxed));
        self.free.fetch_add(change, Ordering::Relaxed) + change < 0
    }

    pub(super) fn in_debt(&self) -> bool {
        self.free.load(Ordering::Relaxed) < 0
    }

    pub(super) fn free(&self) -> i64 {
        self.free.load(Ordering::Relaxed)
    }

    /// Takes up to `most` places out.
    pub(super) fn claim(&self, most: u32) -> u32 {
        let mut free = self.free.load(Ordering::Relaxed);
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
    pub(super) fn bring(&self, places: u32) {
        if places > 0 {
            self.free.fetch_add(i64::from(places), Ordering::Relaxed);
        }
    }
}

pub(super) fn as_places(limit: usize) -> i64 {
    // A limit of half the numbers there are is none at all; the cut keeps sums of limits from overflowing.
    i64::try_from(limit).unwrap_or(i64::MAX).min(i64::MAX / 4)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_lower_limit_is_owed_until_the_places_are_back() {
        let pot = PermitPool::new(5);
        assert_eq!(pot.claim(4), 4);
        assert_eq!(pot.claim(4), 1);
        assert_eq!(pot.claim(4), 0);
        assert!(pot.set_limit(3));
        pot.bring(1);
        assert!(pot.in_debt());
        pot.bring(2);
        assert!(!pot.in_debt());
        assert_eq!((pot.limit(), pot.claim(4)), (3, 1));
        assert!(!pot.set_limit(usize::MAX));
        assert!(pot.set_limit(0));
        pot.bring(3);
        assert_eq!((pot.free(), pot.claim(1)), (0, 0));
    }
}
