//! What a pool says of itself: a snapshot of its figures, and errors in numbers.

use super::core::Core;
use super::supply::{Refusal, Supply, SupplyStats};
use crate::error::{Error, ErrorKind, UsageReport};
use crate::stats::Stats;
use crate::sync::process::Ordering;

impl Core {
    pub(super) fn refused(&self, len: usize, refusal: Refusal) -> Error {
        let asked_bytes = len as u64;
        let holdings = self.holdings();
        match refusal {
            Refusal::Ceiling { needed_bytes } => {
                ErrorKind::Limit { asked_bytes, needed_bytes, holdings, remedy: self.remedy(needed_bytes) }.into()
            }
            Refusal::Source(source) => {
                ErrorKind::Backend { backend: self.source().name(), asked_bytes, holdings, source }.into()
            }
        }
    }

    /// What stands in the way of `needed_bytes`, and what to change.
    fn remedy(&self, needed_bytes: u64) -> &'static str {
        if !self.could_own(needed_bytes) {
            return "this partition can never hold that much: give it more";
        }
        match &self.supply {
            Supply::Shared(ground) if !ground.may_grow() => {
                "the reserve is all there is (PINPOOL_GROWTH=0): put buffers back first or raise PINPOOL_RESERVE"
            }
            Supply::Shared(ground) if !ground.could_hold(needed_bytes) => {
                "it has no room for that even when empty: ask for less or raise PINPOOL_MAX_BYTES"
            }
            _ => "put buffers back first or raise PINPOOL_MAX_BYTES",
        }
    }

    pub(super) fn holdings(&self) -> UsageReport {
        let stats = self.stats();
        UsageReport {
            held_bytes: stats.pinned_bytes,
            in_use_bytes: stats.in_use_bytes,
            idle_bytes: stats.idle_bytes,
            in_flight_bytes: stats.in_flight_bytes,
            max_bytes: stats.max_bytes,
        }
    }

    pub(super) fn holding(&self) -> SupplyStats {
        match &self.supply {
            Supply::Direct(direct) => direct.holding(),
            Supply::Shared(ground) => ground.holding(),
        }
    }

    pub(crate) fn stats(&self) -> Stats {
        let (preset, backend, is_pinned) = (self.config.preset.name(), self.source().name(), self.is_pinned());
        if self.is_forked() {
            return Stats { preset, backend, is_pinned, ..Stats::default() };
        }
        let (figures, holding) = (self.idle.figures(), self.holding());
        let own_bytes = match &self.supply {
            Supply::Direct(_) => holding.block_bytes,
            Supply::Shared(_) => self.own.held_bytes(),
        };
        let partition_bytes = holding.block_bytes.saturating_sub(own_bytes);
        // A partition sees what is its own; what lies free belongs to all.
        let (holding, partition_bytes) =
            if self.is_partition() { (holding.of(&self.own), 0) } else { (holding, partition_bytes) };
        let (in_flight, in_flight_bytes) = (self.in_flight.count(), self.in_flight.bytes());
        let (lost, lost_bytes) =
            (self.counts.lost.load(Ordering::Relaxed), self.counts.lost_bytes.load(Ordering::Relaxed));
        let oldest = self.in_flight.oldest(self.time.now_us());
        let handed_out = self.handed_out();
        let fallbacks = self.counts.fallbacks.load(Ordering::Relaxed);
        Stats {
            preset,
            backend,
            is_pinned,
            pool_size_limit: figures.limit,
            window: figures.window,
            gets: figures.total.gets() + fallbacks,
            hits: figures.total.get_from_pool,
            misses: figures.total.allocated + fallbacks,
            failed_gets: self.counts.failed_gets.load(Ordering::Relaxed),
            waits: self.queue.stood(),
            fallbacks,
            puts: figures.total.put + self.counts.fallbacks_put.load(Ordering::Relaxed),
            evicted: figures.total.evicted,
            reclaimed: figures.reclaimed,
            aged: figures.aged,
            checks: figures.checks,
            raises: figures.raises,
            lowers: figures.lowers,
            buffers_in_pool: figures.buffers,
            idle_bytes: figures.bytes,
            // Copies land between the readings while other threads run; at rest the differences are exact.
            in_use: handed_out.saturating_sub(in_flight),
            in_use_bytes: own_bytes.saturating_sub(figures.bytes + in_flight_bytes + lost_bytes),
            in_flight,
            in_flight_bytes,
            oldest_in_flight: oldest.map(|waiting| waiting.age),
            oldest_in_flight_stream: oldest.map(|waiting| waiting.stream),
            lost,
            lost_bytes: lost_bytes + holding.stuck_bytes,
            partition_bytes,
            arena_free_bytes: holding.free_bytes,
            arena_transit_bytes: holding.transit_bytes,
            awaiting_release_bytes: holding.awaiting_release_bytes,
            drains: holding.drains,
            reserve_bytes: holding.reserve_bytes,
            moves: holding.moves,
            pinned_bytes: holding.held_bytes,
            peak_pinned_bytes: holding.peak_bytes,
            max_bytes: holding.max_bytes,
            underlying: holding.calls,
        }
    }

    pub(super) fn handed_out(&self) -> u64 {
        let total = self.idle.figures().total;
        let [fallbacks, fallbacks_put, lost] = [&self.counts.fallbacks, &self.counts.fallbacks_put, &self.counts.lost]
            .map(|count| count.load(Ordering::Relaxed));
        // While other threads run, a get may be counted here whose put is not, and the other way round.
        (total.gets() + fallbacks).saturating_sub(total.put + fallbacks_put + lost)
    }
}
