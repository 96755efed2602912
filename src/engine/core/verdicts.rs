//! What the verdict on a pool is made from. Ticks look, never a hit.

use super::Core;
use crate::size_class::Class;
use crate::verdict::{Judge, Sample};
use pinpool_os::sync::plain::Mutex;
use pinpool_os::sync::process::{AtomicU64, Ordering};

/// The verdicts so far, and what gets that found no memory at once would have needed. Relaxed: figures.
#[derive(Debug, Default)]
pub(super) struct Verdicts {
    judge: Mutex<Judge>,
    short_gets: AtomicU64,
    /// The most bytes in use and asked for at one time, since the last verdict.
    needed_bytes: AtomicU64,
}

impl Core {
    /// A get of `class` found no memory at once.
    pub(super) fn note_need(&self, class: Class) {
        let usage = self.backing().usage();
        let used_bytes = usage.own_bytes.saturating_sub(self.stock.idle().bytes()) + usage.partition_bytes;
        let waiting_bytes: u64 = self.waiters.waiting_bytes().iter().sum();
        self.verdicts.short_gets.fetch_add(1, Ordering::Relaxed);
        self.verdicts.needed_bytes.fetch_max(used_bytes + waiting_bytes + class.bytes as u64, Ordering::Relaxed);
    }

    /// Logs the verdict if it has changed.
    pub(super) fn report_verdict(&self, now_us: u64) {
        // A pool that is to keep nothing releases what it pins.
        if self.config.pool_size_limit == 0 && !self.backing().has_arena() {
            return;
        }
        // Another thread that looks is enough.
        let Some(mut judge) = self.verdicts.judge.try_lock().filter(|judge| judge.is_due(now_us)) else { return };
        let (stats, is_direct) = (self.stats(), !self.backing().has_arena());
        // The calls are of the whole arena: beside what a partition holds they say nothing.
        let (pinned_bytes, unpinned_bytes) = match self.backing().is_partition() {
            true => (0, 0),
            false => (stats.underlying.alloc_bytes, stats.underlying.free_bytes),
        };
        let sample = Sample {
            gets: stats.gets + stats.failed_gets,
            misses: stats.misses,
            puts: stats.puts,
            evicted: stats.evicted,
            short_gets: self.verdicts.short_gets.load(Ordering::Relaxed),
            pinned_bytes,
            unpinned_bytes,
            held_bytes: stats.pinned_bytes,
            // Under `adaptive` an eviction gives memory to the arena, and costs no driver call.
            pool_size_limit: is_direct.then_some(stats.pool_size_limit),
            needed_bytes: self.verdicts.needed_bytes.load(Ordering::Relaxed),
        };
        let before = judge.gets();
        let limit = self.backing().limit_for(sample.needed_bytes);
        let has_limit = limit != "PINPOOL_MAX_BYTES" || stats.max_bytes.is_some() || stats.ledger.is_some();
        let verdict = judge.look(now_us, sample, has_limit.then_some(limit));
        if judge.gets() != before {
            self.verdicts.needed_bytes.store(0, Ordering::Relaxed);
        }
        drop(judge);
        if let Some(verdict) = verdict {
            self.log.judged(&verdict);
        }
    }
}
