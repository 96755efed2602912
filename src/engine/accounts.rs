//! What the engine counts beside the idle buffers, and the snapshot of all figures.
//!
//! ```text
//!   in use = blocks - idle - in flight
//! ```
//!
//! Counters and sums only; while other threads run, the figures of a snapshot may be some operations apart.

use crate::copy;
use crate::error::UsageReport;
use crate::in_flight::InFlight;
use crate::stats::Stats;
use crate::sync::process::{AtomicU64, Ordering};

use super::stock::Stock;
use super::supply::PoolUsage;

/// Counts of buffers that are not idle. All Relaxed unless noted: each is a number on its own.
#[derive(Debug, Default)]
pub(super) struct Accounts {
    failed_gets: AtomicU64,
    fallbacks: AtomicU64,
    fallback_puts: AtomicU64,
    /// Buffers that a put handed to a waiting get and that get took: a put and a hit each. Counted when it is taken, since
    /// the get may have gone.
    handed_over: AtomicU64,
    /// Puts whose memory became room for a waiting get.
    made_room: AtomicU64,
    leaked: AtomicU64,
    leaked_bytes: AtomicU64,
}

impl Accounts {
    pub(super) fn count_failed_get(&self) {
        self.failed_gets.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns how many there have been.
    pub(super) fn count_fallback(&self) -> u64 {
        self.fallbacks.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(super) fn count_fallback_put(&self) {
        self.fallback_puts.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn count_handed_over(&self) {
        self.handed_over.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn count_made_room(&self) {
        self.made_room.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns how many buffers have been leaked.
    pub(super) fn count_leak(&self, bytes: u64) -> u64 {
        let leaked = self.leaked.fetch_add(1, Ordering::Relaxed) + 1;
        self.leaked_bytes.fetch_add(bytes, Ordering::Relaxed);
        leaked
    }

    /// Adds the figures of all modules to `stats`.
    pub(super) fn snapshot<E, U>(
        &self,
        stats: Stats,
        stock: &Stock<E>,
        copies: &InFlight<U>,
        waits: u64,
        now_us: u64,
    ) -> Stats {
        let PoolUsage { supply, own_bytes, partition_bytes, lost_in_partitions, fallback } = stock.backing().usage();
        let (idle, blocks) = (stock.idle().stats(), stock.lifetime().blocks());
        let (in_flight, in_flight_bytes, oldest) = (copies.count(), copies.bytes(), copies.oldest(now_us));
        let (lost, lost_bytes) = (self.leaked.load(Ordering::Relaxed), self.leaked_bytes.load(Ordering::Relaxed));
        let fallbacks = self.fallbacks.load(Ordering::Relaxed);
        let (handed_over, made_room) =
            (self.handed_over.load(Ordering::Relaxed), self.made_room.load(Ordering::Relaxed));
        Stats {
            pool_size_limit: idle.limit,
            window: idle.window,
            gets: idle.total.gets() + fallbacks + handed_over,
            hits: idle.total.get_from_pool + handed_over,
            misses: idle.total.allocated + fallbacks,
            failed_gets: self.failed_gets.load(Ordering::Relaxed),
            waits,
            fallbacks,
            puts: idle.total.put + self.fallback_puts.load(Ordering::Relaxed) + handed_over + made_room,
            evicted: idle.total.evicted,
            reclaimed: idle.reclaimed + made_room,
            aged: idle.aged,
            checks: idle.checks,
            raises: idle.raises,
            lowers: idle.lowers,
            buffers_in_pool: idle.buffers,
            idle_bytes: idle.bytes,
            // Saturating: copies complete between the readings while other threads run. Exact at rest.
            in_use: blocks.saturating_sub(idle.buffers + in_flight),
            in_use_bytes: own_bytes.saturating_sub(idle.bytes + in_flight_bytes + lost_bytes),
            in_flight,
            in_flight_bytes,
            oldest_in_flight: oldest.map(|pending| pending.age),
            oldest_in_flight_stream: oldest.map(|pending| pending.stream),
            lost,
            lost_bytes: lost_bytes + supply.stuck_bytes + lost_in_partitions.1,
            lost_in_partitions: lost_in_partitions.0,
            partition_bytes,
            arena_free_bytes: supply.free_bytes,
            arena_transit_bytes: supply.transit_bytes,
            arena_overhead_bytes: supply.overhead_bytes,
            awaiting_release_bytes: supply.awaiting_release_bytes,
            drains: supply.drains,
            reserve_bytes: supply.reserve_bytes,
            moves: supply.moves,
            mappings: supply.mappings,
            descriptors: supply.descriptors,
            pinned_bytes: supply.held_bytes,
            peak_pinned_bytes: supply.peak_bytes,
            max_bytes: supply.max_bytes,
            highest_max_bytes: supply.highest_max_bytes,
            timeline_bytes: copy::timeline_bytes(),
            smaller_regions: supply.smaller_regions,
            fallback_bytes: fallback.held_bytes,
            peak_fallback_bytes: fallback.peak_bytes,
            max_fallback_bytes: fallback.max_bytes,
            underlying: supply.calls,
            ..stats
        }
    }
}

/// The bytes of a snapshot, for the text of an error.
pub(super) fn usage_report(stats: &Stats) -> UsageReport {
    UsageReport {
        held_bytes: stats.pinned_bytes,
        in_use_bytes: stats.in_use_bytes,
        idle_bytes: stats.idle_bytes,
        in_flight_bytes: stats.in_flight_bytes,
        lost_bytes: stats.lost_bytes,
        fallback_bytes: stats.fallback_bytes,
        max_bytes: stats.max_bytes,
    }
}
