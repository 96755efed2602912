//! Snapshots of the figures of a pool.

use std::collections::BTreeMap;

use super::Core;
use crate::copy;
use crate::policy::Window;
use crate::size_class::{Class, plain_eighths_index};
use crate::stats::{ClassStats, Stats};

impl Core {
    /// The classes that this pool had buffers of, the smallest first.
    pub(crate) fn class_stats(&self) -> Vec<ClassStats> {
        if self.is_forked() {
            return Vec::new();
        }
        let mut in_flight = BTreeMap::<usize, u64>::new();
        self.in_flight.for_each(|block| {
            *in_flight.entry(block.class_bytes()).or_default() += u64::from(block.adopted().is_none());
        });
        let counted = self.stock.classes().rows().into_iter();
        let row = |counted: ClassStats| {
            let bytes = usize::try_from(counted.class_bytes).unwrap_or(usize::MAX);
            let in_flight = in_flight.remove(&bytes).unwrap_or(0);
            let idle = self.stock.idle().count_of(Class { bytes, index: plain_eighths_index(bytes) });
            // Saturating: buffers come and go between the readings.
            let in_use = counted.buffers.saturating_sub(in_flight + idle);
            ClassStats { in_flight, idle, in_use, ..counted }
        };
        counted.map(row).collect()
    }

    pub(crate) fn stats(&self) -> Stats {
        let (preset, source) = (self.config.preset.name(), self.backing().source());
        let name = self.name().map(str::to_owned);
        let (number, backend, is_pinned) = (self.log.number, source.name(), source.is_pinned());
        let mut stats = Stats { name, number, preset, backend, is_pinned, ..Stats::default() };
        if self.is_forked() {
            return stats;
        }
        (stats.requests.waits, stats.requests.waiting) = (self.waiters.total(), self.waiters.waiting());
        stats.limits.shared = self.ledger_stats();
        self.stock.fill(&mut stats);
        self.in_flight.fill(&mut stats);
        self.accounts.fill(&mut stats, self.backing().own_bytes());
        stats.copies.timeline_bytes = copy::timeline_bytes();
        let oldest = self.in_flight.oldest(self.time.now_us());
        (stats.copies.oldest_age, stats.copies.oldest_stream) =
            oldest.map(|pending| (pending.age, pending.stream)).unzip();
        stats
    }

    /// TensorFlow's counters since the last raise or clear.
    pub(crate) fn window(&self) -> Window {
        self.stock.idle().window()
    }
}
