//! Which shards may hold a class: one word a class, a bit a shard, so that a miss with nothing idle looks at one word.
//!
//! A set bit may be out of date, a clear one never is: whoever keeps a buffer sets the bit after it, if it is not set.
//! Takes leave it alone, so that a thread which gets and puts the same buffer touches no word of others. The bit is
//! cleared by a thread that looked into the shard in vain, in this order:
//!
//! ```text
//!   under the shard's lock, the class is empty     put under the lock:   push to the shelf; unlock; bit clear? set it
//!   1. clear the bit                               put in the inbox:     push; bit clear? set it
//!   2. collect the inbox
//!   3. found something after all? set the bit
//! ```
//!
//! A push into the inbox comes before step 2, and is found, or after, and then the exchange of step 2 shows it the
//! cleared bit. Both are exchanges on the inbox's word that acquire and release, so no fence is needed.

use crate::sync::atomic::{AtomicU64, Ordering};

pub(super) struct Occupancy {
    shards_of: Box<[AtomicU64]>,
}

impl Occupancy {
    pub(super) fn new(classes: u32) -> Self {
        Self { shards_of: (0..classes).map(|_| AtomicU64::new(0)).collect() }
    }

    #[inline]
    pub(super) fn knows(&self, class: u32) -> bool {
        (class as usize) < self.shards_of.len()
    }

    /// A bit for each shard that may hold `class`.
    #[inline]
    pub(super) fn shards(&self, class: u32) -> u64 {
        // Relaxed: the shard's lock follows; a put that ended before this thread began to look is seen in any case.
        self.shards_of.get(class as usize).map_or(0, |shards| shards.load(Ordering::Relaxed))
    }

    /// Says that `shard` holds `class`; `true` if that was not known.
    #[inline]
    pub(super) fn set(&self, class: u32, shard: usize) -> bool {
        let Some(shards) = self.shards_of.get(class as usize) else { return false };
        let bit = 1 << shard;
        // Relaxed: what the order above needs comes with the shard's lock or the inbox's exchange.
        shards.load(Ordering::Relaxed) & bit == 0 && shards.fetch_or(bit, Ordering::Relaxed) & bit == 0
    }

    /// Step 1 above; the caller holds the lock of `shard`.
    pub(super) fn clear(&self, class: u32, shard: usize) {
        if let Some(shards) = self.shards_of.get(class as usize) {
            // Relaxed: step 2 releases it.
            shards.fetch_and(!(1 << shard), Ordering::Relaxed);
        }
    }
}
