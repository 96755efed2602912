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
//! **Occupancy.** A bit per class and shard, so a miss with nothing idle reads a word or two. A set bit may be stale; a clear bit
//! never is (cache-I1): under the shard's lock, a push into a class whose head is not marked sets the bit and the mark first.
//! Takes leave both, so a thread that takes and puts the same buffer writes no shared word. A thread that searched a shard
//! without success clears both. While it looks once more, a second bit of the same word says so, and a take counts a shard with
//! either bit:
//!
//! ```text
//!   under the shard's lock, the class is empty          a remote push: push; bit clear? set it
//!   1. remove the mark; bit ─▶ "searched", in one step
//!   2. collect the remote free list; each push of a collected entry sets mark and bit again
//!   3. remove "searched"
//! ```
//!
//! A remote push either comes before step 2, which then finds its buffer, or after it, and then the exchange of step 2
//! makes the cleared bit visible to it. Both are acquire-release exchanges on the word of the remote free list, so no
//! fence is needed. Where the push comes first, one of the two bits is set from the end of its put on: a take that begins
//! then goes to the shard and waits for its lock.

use pinpool_os::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering};

/// Permits that a put claims from the pool at once.
pub(super) const PERMITS_PER_CLAIM: u32 = 4;

/// What all shards of a cache share.
pub(super) struct Common {
    pub(super) permits: PermitPool,
    pub(super) occupancy: Occupancy,
}

impl Common {
    pub(super) fn new(classes: u32, limit: usize, shards: usize) -> Self {
        Self { permits: PermitPool::new(limit), occupancy: Occupancy::new(classes, shards) }
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
    /// For each class as many words as the shards need: in the low half a bit for each that may hold the class, in the high half
    /// one for each that is being searched.
    words: Box<[AtomicU64]>,
    words_of_class: usize,
    /// A bit for each shard that ever held a buffer or a permit.
    used: AtomicU64,
}

/// A word has two bits for each of so many shards.
const SHARDS_OF_WORD: usize = 32;

impl Occupancy {
    pub(super) fn new(classes: u32, shards: usize) -> Self {
        let words_of_class = shards.div_ceil(SHARDS_OF_WORD);
        let words = (0..classes as usize * words_of_class).map(|_| AtomicU64::new(0)).collect();
        Self { words, words_of_class, used: AtomicU64::new(0) }
    }

    #[inline]
    pub(super) fn has_class(&self, class: u32) -> bool {
        (class as usize) < self.words.len() / self.words_of_class
    }

    /// A bit for each shard that may hold `class`.
    #[inline]
    pub(super) fn shards(&self, class: u32) -> u64 {
        let first = class as usize * self.words_of_class;
        let words = self.words.get(first..first + self.words_of_class).unwrap_or_default();
        // Relaxed: the shard's lock follows; a put that ended before this thread's search is visible in any case.
        let words = words.iter().map(|word| word.load(Ordering::Relaxed));
        let either = words.map(|word| (word | word >> SHARDS_OF_WORD) & u64::from(u32::MAX));
        either.rev().fold(0, |shards, either| shards << SHARDS_OF_WORD | either)
    }

    /// The word that has the bits of `class` and `shard`, and the lower of these bits.
    #[inline]
    fn bit(&self, class: u32, shard: usize) -> Option<(&AtomicU64, u64)> {
        let word = self.words.get(class as usize * self.words_of_class + shard / SHARDS_OF_WORD)?;
        Some((word, 1 << (shard % SHARDS_OF_WORD)))
    }

    /// Records that `shard` holds `class`.
    #[inline]
    pub(super) fn set(&self, class: u32, shard: usize) {
        let Some((word, bit)) = self.bit(class, shard) else { return };
        // Relaxed: the shard's lock or the exchange on its remote free list gives the order described above.
        if word.load(Ordering::Relaxed) & bit == 0 {
            word.fetch_or(bit, Ordering::Relaxed);
            self.mark_used(shard);
        }
    }

    /// Steps 1 to 3 above, of which `collect` is the second; the caller holds the lock of `shard`, and the class is not marked.
    pub(super) fn search(&self, class: u32, shard: usize, collect: impl FnOnce()) {
        let Some((word, bit)) = self.bit(class, shard) else { return };
        // Relaxed: only a thread that holds the lock clears the bit. If it is clear, the next push sets it.
        if word.load(Ordering::Relaxed) & bit == 0 {
            return;
        }
        let searched = bit << SHARDS_OF_WORD;
        // Relaxed: the exchange of step 2 releases the first, and all are changes of one word, whose order every thread sees.
        word.fetch_xor(bit | searched, Ordering::Relaxed);
        collect();
        word.fetch_and(!searched, Ordering::Relaxed);
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
}

#[cfg(all(test, not(pinpool_loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_shard_that_is_searched_counts_until_the_search_ends() {
        for (shards, shard) in [(2, 1), (64, 31), (64, 32), (64, 63)] {
            let occupancy = Occupancy::new(3, shards);
            occupancy.set(1, shard);
            occupancy.set(1, 0);
            let both = 1 << shard | 1;
            assert_eq!([0, 1, 2, 3].map(|class| occupancy.shards(class)), [0, both, 0, 0]);
            occupancy.search(1, shard, || assert_eq!(occupancy.shards(1), both));
            assert_eq!(occupancy.shards(1), 1);
            occupancy.search(1, shard, || panic!("its bit is clear"));
            occupancy.search(1, 0, || occupancy.set(1, 0));
            assert_eq!(occupancy.shards(1), 1, "what the search found keeps it");
            assert_eq!((occupancy.has_class(2), occupancy.has_class(3)), (true, false));
        }
    }

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
