//! Snapshots of the figures of a pool.

use std::collections::BTreeMap;

use super::Core;
use crate::copy;
use crate::size_class::{Class, plain_eighths_index};
use crate::stats::{ClassStats, Stats};

/// A snapshot whose sums do not hold is taken so often.
const SNAPSHOT_TRIES: u32 = 8;

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

    /// Notes the peaks of what no counter of its own has.
    pub(super) fn sample_peaks(&self) {
        self.fill(&mut Stats::default());
    }

    fn fill(&self, stats: &mut Stats) {
        self.stock.fill(stats);
        self.in_flight.fill(stats);
        self.accounts.fill(stats, self.backing().own_bytes());
    }

    pub(crate) fn stats(&self) -> Stats {
        let (preset, source) = (self.config.preset.name(), self.backing().source());
        let name = self.name().map(str::to_owned);
        let (number, backend, is_pinned) = (self.log.number, source.name(), source.is_pinned());
        let stats = Stats { name, number, preset, backend, is_pinned, ..Stats::default() };
        if self.is_forked() {
            return stats;
        }
        let stats = Stats { ledger: self.ledger_stats(), ..stats };
        let mut tries = 0;
        loop {
            let mut stats = stats.clone();
            (stats.waits, stats.waiting) = (self.waiters.total(), self.waiters.waiting());
            stats.timeline_bytes = copy::timeline_bytes();
            self.fill(&mut stats);
            let oldest = self.in_flight.oldest(self.time.now_us());
            (stats.oldest_in_flight, stats.oldest_in_flight_stream) =
                oldest.map(|pending| (pending.age, pending.stream)).unzip();
            tries += 1;
            // The maintenance thread may end a copy between two readings. Beside a pool that is in use at all times the last one
            // has to do.
            if tries == SNAPSHOT_TRIES || stats.validate().is_ok() {
                return stats;
            }
            std::thread::yield_now();
        }
    }
}
