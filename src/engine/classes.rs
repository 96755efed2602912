//! How many pinned buffers of each class exist, and the reasons for misses and evictions.
//!
//! ```text
//!   miss ─▶ made: buffers + 1, with a reason        buffers < peak   one left earlier
//!   left ◀─ buffers - 1, with a reason              buffers = peak   all are out: more are needed than ever before
//! ```
//!
//! Misses and evictions are counted here, but neither hits nor returns that keep a buffer. The lock is held for one look-up.

use super::block::Block;
use crate::size_class::Class;
use crate::stats::{ClassStats, EvictionReason, EvictionReasons, MissReasons, Stats};
use pinpool_os::sync::unmodeled::Mutex;

/// If there are more rows than this, rows of classes without a buffer are removed. `adaptive` has fewer classes.
const CLASSES_MAX: usize = 1024;

/// Statistics of pinned buffers, by class.
#[derive(Debug, Default)]
pub(super) struct Classes(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    /// One row for each class, the smallest class first.
    rows: Vec<ClassStats>,
    /// Number of rows at which rows without a buffer are removed, if it exceeds [`CLASSES_MAX`].
    prune_at: usize,
    /// The misses of all classes, by reason.
    misses: MissReasons,
    evictions: EvictionReasons,
}

impl Classes {
    /// Counts a miss of `class` that received a new buffer.
    pub(super) fn count_miss(&self, class: Class) {
        let mut table = self.0.lock();
        let row = table.row(class.bytes);
        row.misses += 1;
        row.buffers += 1;
        let (buffers, peak) = (row.buffers, row.peak_buffers);
        row.peak_buffers = peak.max(buffers);
        match peak {
            0 => table.misses.first_of_size += 1,
            _ if buffers <= peak => table.misses.evicted_earlier += 1,
            _ => table.misses.all_in_use += 1,
        }
    }

    /// Counts a miss of `class` that received pageable memory.
    pub(super) fn count_pageable(&self, class: Class) {
        let mut table = self.0.lock();
        table.row(class.bytes).misses += 1;
        table.misses.all_in_use += 1;
    }

    /// Counts a pinned buffer of `class` that leaves the pool.
    pub(super) fn count_eviction(&self, class: Class, reason: EvictionReason) {
        let mut table = self.0.lock();
        let row = table.row(class.bytes);
        row.buffers = row.buffers.saturating_sub(1);
        row.evictions += 1;
        table.evictions.count(reason);
    }

    /// Adds `change` to the quarantined buffers of the class of `block`, if the block is pinned. They also count in `buffers`
    /// here.
    pub(super) fn count_quarantined<P>(&self, block: &Block<P>, change: i64) {
        if block.memory().is_from_source() {
            let mut table = self.0.lock();
            let row = table.row(block.class_bytes());
            row.quarantined = row.quarantined.saturating_add_signed(change);
        }
    }

    pub(super) fn fill(&self, stats: &mut Stats) {
        let table = self.0.lock();
        (stats.requests.miss_reasons, stats.memory.evictions) = (table.misses, table.evictions);
    }

    /// Returns one row for each class, the smallest class first. Quarantined buffers count in `buffers`. How many are in
    /// flight, idle or in use is not known here.
    pub(super) fn rows(&self) -> Vec<ClassStats> {
        self.0.lock().rows.clone()
    }
}

impl Table {
    fn row(&mut self, class_bytes: usize) -> &mut ClassStats {
        let class_bytes = class_bytes as u64;
        let at = self.rows.binary_search_by_key(&class_bytes, |row| row.class_bytes).unwrap_or_else(|mut at| {
            if self.rows.len() >= self.prune_at.max(CLASSES_MAX) {
                self.rows.retain(|row| row.buffers > 0);
                self.prune_at = 2 * self.rows.len();
                at = self.rows.partition_point(|row| row.class_bytes < class_bytes);
            }
            self.rows.insert(at, ClassStats { class_bytes, ..ClassStats::default() });
            at
        });
        &mut self.rows[at]
    }
}
