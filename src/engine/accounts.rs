//! What the engine counts beside the idle buffers, and the snapshot of all figures.
//!
//! ```text
//!   in use = blocks - idle - in flight
//! ```
//!
//! Counters and sums only; while other threads run, the figures of a snapshot may be some operations apart.

use std::time::Duration;

use crate::copy;
use crate::error::UsageReport;
use crate::in_flight::InFlight;
use crate::stats::{Histogram, Peaks, Requested, Stats};
use pinpool_os::sync::plain::Mutex;
use pinpool_os::sync::process::{AtomicU64, Ordering};

use super::backing::PoolUsage;
use super::classes::ClassTotals;
use super::idle::IdleStats;
use super::stock::Stock;

/// Counts of buffers that are not idle. All Relaxed unless noted: each is a number on its own.
#[derive(Debug, Default)]
pub(super) struct Accounts {
    failed_gets: AtomicU64,
    fallbacks: AtomicU64,
    fallback_puts: AtomicU64,
    /// Buffers over adopted memory: in use, in flight or lost.
    adopted: AtomicU64,
    /// Buffers that a put handed to a waiting get and that get took: a put and a hit each. Counted when it is taken, since
    /// the get may have gone.
    handed_over: AtomicU64,
    /// Puts whose memory became room for a waiting get.
    made_room: AtomicU64,
    /// Buffers that are lost now.
    lost: AtomicU64,
    lost_bytes: AtomicU64,
    timeouts: AtomicU64,
    requests: AtomicU64,
    requested_bytes: AtomicU64,
    requested_class_bytes: AtomicU64,
    /// How long gets waited.
    waits: Mutex<Histogram>,
    /// How long users had the buffers that misses made.
    uses: Mutex<Histogram>,
    /// How long buffers were in flight.
    flights: Mutex<Histogram>,
    peaks: SampledPeaks,
}

/// The highest figures of all samples, and the highest count of buffers that are not pinned.
#[derive(Debug, Default)]
struct SampledPeaks {
    in_use: AtomicU64,
    in_use_bytes: AtomicU64,
    idle: AtomicU64,
    idle_bytes: AtomicU64,
    awaiting_release_bytes: AtomicU64,
    fallback_buffers: AtomicU64,
}

/// Buffers by what they do.
#[derive(Debug, Clone, Copy)]
struct Occupancy {
    blocks: u64,
    in_use: u64,
    in_use_bytes: u64,
    in_flight: u64,
    in_flight_bytes: u64,
}

impl Accounts {
    /// Returns how many there have been.
    pub(super) fn count_failed_get(&self) -> u64 {
        self.failed_gets.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Returns how many there have been.
    pub(super) fn count_fallback(&self) -> u64 {
        let fallbacks = self.fallbacks.fetch_add(1, Ordering::Relaxed) + 1;
        let buffers = fallbacks.saturating_sub(self.fallback_puts.load(Ordering::Relaxed));
        self.peaks.fallback_buffers.fetch_max(buffers, Ordering::Relaxed);
        fallbacks
    }

    /// A wait of a get ran out.
    pub(super) fn count_timeout(&self) {
        self.timeouts.fetch_add(1, Ordering::Relaxed);
    }

    /// A wait of a get is over.
    pub(super) fn count_wait(&self, took: Duration) {
        self.waits.lock().record(took);
    }

    /// A use that a miss began at `since_us` has ended.
    pub(super) fn count_use(&self, since_us: u64, now_us: u64) {
        self.uses.lock().record(Duration::from_micros(now_us.saturating_sub(since_us)));
    }

    /// A buffer that was in flight since `since_us` is not any more.
    pub(super) fn count_in_flight(&self, since_us: u64, now_us: u64) {
        self.flights.lock().record(Duration::from_micros(now_us.saturating_sub(since_us)));
    }

    /// A get that found nothing idle at once asked for `len` bytes and got `class_bytes`.
    pub(super) fn count_request(&self, len: usize, class_bytes: usize) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.requested_bytes.fetch_add(len as u64, Ordering::Relaxed);
        self.requested_class_bytes.fetch_add(class_bytes as u64, Ordering::Relaxed);
    }

    pub(super) fn count_fallback_put(&self) {
        self.fallback_puts.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn count_adopted(&self) {
        self.adopted.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn count_adopted_put(&self) {
        self.adopted.fetch_sub(1, Ordering::Relaxed);
    }

    /// Buffers over adopted memory.
    pub(super) fn adopted(&self) -> u64 {
        self.adopted.load(Ordering::Relaxed)
    }

    pub(super) fn count_handed_over(&self) {
        self.handed_over.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn count_made_room(&self) {
        self.made_room.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns how many buffers are lost now.
    pub(super) fn count_lost(&self, bytes: u64) -> u64 {
        let lost = self.lost.fetch_add(1, Ordering::Relaxed) + 1;
        self.lost_bytes.fetch_add(bytes, Ordering::Relaxed);
        lost
    }

    /// Subtracts `buffers` that were lost and answer again.
    pub(super) fn count_recovered(&self, buffers: u64, bytes: u64) {
        self.lost.fetch_sub(buffers, Ordering::Relaxed);
        self.lost_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Notes the peaks of what no counter of its own has.
    pub(super) fn sample<E, U>(&self, stock: &Stock<E>, copies: &InFlight<U>) {
        let (usage, idle) = (stock.backing().usage(), stock.idle().stats());
        self.note_peaks(&usage, &idle, &self.occupancy(&usage, &idle, stock, copies));
    }

    fn note_peaks(&self, usage: &PoolUsage, idle: &IdleStats, now: &Occupancy) {
        let peaks = &self.peaks;
        for (peak, now) in [
            (&peaks.in_use, now.in_use),
            (&peaks.in_use_bytes, now.in_use_bytes),
            (&peaks.idle, idle.buffers),
            (&peaks.idle_bytes, idle.bytes),
            (&peaks.awaiting_release_bytes, usage.supply.awaiting_release_bytes),
        ] {
            peak.fetch_max(now, Ordering::Relaxed);
        }
    }

    fn occupancy<E, U>(
        &self,
        usage: &PoolUsage,
        idle: &IdleStats,
        stock: &Stock<E>,
        copies: &InFlight<U>,
    ) -> Occupancy {
        let (blocks, in_flight, in_flight_bytes) = (stock.lifetime().blocks(), copies.count(), copies.bytes());
        let lost_bytes = self.lost_bytes.load(Ordering::Relaxed);
        Occupancy {
            blocks,
            // Saturating: copies complete between the readings while other threads run. Exact at rest.
            in_use: blocks.saturating_sub(idle.buffers + in_flight),
            in_use_bytes: usage.own_bytes.saturating_sub(idle.bytes + in_flight_bytes + lost_bytes),
            in_flight,
            in_flight_bytes,
        }
    }

    /// Adds the figures of all modules to `stats`, whose waits are known.
    pub(super) fn snapshot<E, U>(&self, stats: Stats, stock: &Stock<E>, copies: &InFlight<U>, now_us: u64) -> Stats {
        let (usage, idle, calls) = (stock.backing().usage(), stock.idle().stats(), stock.backing().calls());
        let now = self.occupancy(&usage, &idle, stock, copies);
        self.note_peaks(&usage, &idle, &now);
        let PoolUsage { supply, partition_bytes, lost_in_partitions, fallback, outside_bytes, .. } = usage;
        let (oldest, [peak_in_flight, peak_in_flight_bytes]) = (copies.oldest(now_us), copies.peaks());
        let counted = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (lost, lost_bytes) = (counted(&self.lost), counted(&self.lost_bytes));
        let (fallbacks, fallback_puts) = (counted(&self.fallbacks), counted(&self.fallback_puts));
        let (handed_over, made_room) = (counted(&self.handed_over), counted(&self.made_room));
        let ClassTotals { misses: miss_reasons, evictions } = stock.classes().totals();
        Stats {
            pool_size_limit: idle.limit,
            window: idle.window,
            gets: idle.total.gets() + fallbacks + handed_over,
            hits: idle.total.get_from_pool + handed_over,
            misses: idle.total.allocated + fallbacks,
            miss_reasons,
            requested: Requested {
                gets: counted(&self.requests),
                bytes: counted(&self.requested_bytes),
                class_bytes: counted(&self.requested_class_bytes),
            },
            failed_gets: counted(&self.failed_gets),
            timeouts: counted(&self.timeouts),
            wait_time: *self.waits.lock(),
            use_time: *self.uses.lock(),
            in_flight_time: *self.flights.lock(),
            fallbacks,
            adopted: self.adopted(),
            puts: idle.total.put + fallback_puts + handed_over + made_room,
            evicted: idle.total.evicted,
            reclaimed: evictions.reclaimed + evictions.over_bytes + evictions.pressure + evictions.trimmed,
            aged: evictions.expired,
            eviction_reasons: evictions,
            checks: idle.checks,
            raises: idle.raises,
            lowers: idle.lowers,
            buffers: now.blocks,
            buffers_in_pool: idle.buffers,
            idle_bytes: idle.bytes,
            in_use: now.in_use,
            in_use_bytes: now.in_use_bytes,
            in_flight: now.in_flight,
            in_flight_bytes: now.in_flight_bytes,
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
            reserve_asked_bytes: supply.reserve_asked_bytes,
            pinned_fraction: stock.backing().domain().map_or(1.0, |domain| domain.pinned_fraction()),
            reserve_eta: supply.reserve_eta,
            moves: supply.moves,
            mappings: supply.mappings,
            descriptors: supply.descriptors,
            pinned_bytes: supply.held_bytes,
            outside_bytes,
            peak_pinned_bytes: supply.peak_bytes,
            max_bytes: supply.max_bytes,
            highest_max_bytes: supply.highest_max_bytes,
            timeline_bytes: copy::timeline_bytes(),
            smaller_regions: supply.smaller_regions,
            fallback_bytes: fallback.held_bytes,
            fallback_buffers: fallbacks.saturating_sub(fallback_puts),
            peak_fallback_bytes: fallback.peak_bytes,
            max_fallback_bytes: fallback.max_bytes,
            underlying: calls.underlying(),
            pin: calls.pin,
            unpin: calls.unpin,
            remap: calls.remap,
            peaks: Peaks {
                buffers: stock.lifetime().peak_blocks(),
                in_use: counted(&self.peaks.in_use),
                in_use_bytes: counted(&self.peaks.in_use_bytes),
                idle: counted(&self.peaks.idle),
                idle_bytes: counted(&self.peaks.idle_bytes),
                in_flight: peak_in_flight,
                in_flight_bytes: peak_in_flight_bytes,
                awaiting_release_bytes: counted(&self.peaks.awaiting_release_bytes),
                fallback_buffers: counted(&self.peaks.fallback_buffers),
            },
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
        outside_bytes: stats.outside_bytes,
        fallback_bytes: stats.fallback_bytes,
        max_bytes: stats.max_bytes,
    }
}
