//! Which shards may hold which class, and which shards were ever used.
//!
//! There is one bit for each class and shard, so a miss with nothing idle reads one or two words. A set bit may be stale, but a
//! clear bit never is (cache-I1): under the shard's lock, a push into an unmarked class first sets the mark and the bit. Takes
//! leave both set, so a thread that takes and puts the same buffer writes no shared word. A thread that has searched a shard
//! without success clears both and searches the shard again. During this second search another bit of the same word,
//! "searched", is set. A take visits each shard that has either bit:
//!
//! ```text
//!   under the shard's lock, the class is empty          a remote push: push; bit clear? set it
//!   1. remove the mark; bit ─▶ "searched", in one step
//!   2. collect the remote list; each push of a collected entry sets mark and bit again
//!   3. remove "searched"
//! ```
//!
//! A remote push either precedes step 2, which then finds its buffer, or follows step 2, and then the exchange of step 2 makes
//! the cleared bit visible to the push, which sets it. The push and step 2 are acquire-release exchanges on the word of the
//! remote list, so no fence is needed. If the push comes first, one of the two bits is set once its put has ended, so a
//! take that begins then visits the shard and waits for its lock.

use pinpool_os::sync::atomic::{AtomicU64, Ordering};

pub(super) struct Occupancy {
    /// As many words per class as the shards need. The low half has a bit for each shard that may hold the class, the high
    /// half a bit for each shard that is being searched.
    words: Box<[AtomicU64]>,
    words_of_class: usize,
    /// A bit for each shard that ever held a buffer.
    used: AtomicU64,
}

/// A word has two bits for each of this many shards.
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

    /// Returns a bit for each shard that may hold `class`.
    #[inline]
    pub(super) fn shards(&self, class: u32) -> u64 {
        let first = class as usize * self.words_of_class;
        let words = self.words.get(first..first + self.words_of_class).unwrap_or_default();
        // Relaxed: the caller then takes the shard's lock. A return that ended before this thread's search is visible in any
        // case.
        let words = words.iter().map(|word| word.load(Ordering::Relaxed));
        let either = words.map(|word| (word | word >> SHARDS_OF_WORD) & u64::from(u32::MAX));
        either.rev().fold(0, |shards, either| shards << SHARDS_OF_WORD | either)
    }

    /// Returns the word that has the bits of `class` and `shard`, and the lower of these two bits.
    #[inline]
    fn bit(&self, class: u32, shard: usize) -> Option<(&AtomicU64, u64)> {
        let word = self.words.get(class as usize * self.words_of_class + shard / SHARDS_OF_WORD)?;
        Some((word, 1 << (shard % SHARDS_OF_WORD)))
    }

    /// Records that `shard` holds `class`.
    #[inline]
    pub(super) fn set(&self, class: u32, shard: usize) {
        let Some((word, bit)) = self.bit(class, shard) else { return };
        // Relaxed: the shard's lock or the exchange on its remote list gives the order described above.
        if word.load(Ordering::Relaxed) & bit == 0 {
            word.fetch_or(bit, Ordering::Relaxed);
            if self.used() & 1 << shard == 0 {
                self.used.fetch_or(1 << shard, Ordering::Relaxed);
            }
        }
    }

    /// Performs steps 1 to 3 above; `collect` performs step 2. The caller holds the lock of `shard` and has removed the
    /// mark.
    pub(super) fn search(&self, class: u32, shard: usize, collect: impl FnOnce()) {
        let Some((word, bit)) = self.bit(class, shard) else { return };
        // Relaxed: only a thread that holds the lock clears the bit. If the bit is clear, the next push sets it.
        if word.load(Ordering::Relaxed) & bit == 0 {
            return;
        }
        let searched = bit << SHARDS_OF_WORD;
        // Relaxed: the exchange of step 2 releases step 1. Steps 1 and 3 and the pushes that set the bit change the same word,
        // so every thread sees these changes in the same order.
        word.fetch_xor(bit | searched, Ordering::Relaxed);
        collect();
        word.fetch_and(!searched, Ordering::Relaxed);
    }

    /// Returns a bit for each shard that ever held a buffer.
    pub(super) fn used(&self) -> u64 {
        // Relaxed: the bits say which shards to search; the locks publish what is in them.
        self.used.load(Ordering::Relaxed)
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
            assert_eq!(occupancy.used(), both);
            occupancy.search(1, shard, || assert_eq!(occupancy.shards(1), both));
            assert_eq!(occupancy.shards(1), 1);
            occupancy.search(1, shard, || panic!("its bit is clear"));
            occupancy.search(1, 0, || occupancy.set(1, 0));
            assert_eq!(occupancy.shards(1), 1, "a bit that the search set again stays");
            assert_eq!((occupancy.has_class(2), occupancy.has_class(3)), (true, false));
        }
    }
}
