//! What the engine counts beside the idle buffers, and the snapshot of all figures.
//!
//! ```text
//!   in use = blocks - idle - in flight
//! ```
//!
//! Counters and sums only; while other threads run, the figures of a snapshot may be some operations apart.

use std::time::Duration;

use crate::error::UsageReport;
use crate::stats::{Histogram, Peaks, Requested, Stats};
use pinpool_observe::judge::RecentLengths;
use pinpool_os::sync::plain::Mutex;
use pinpool_os::sync::process::{AtomicU64, Ordering};

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
    lengths: Mutex<RecentLengths>,
    /// Requests of a length that was not asked for lately.
    new_lengths: AtomicU64,
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

    /// A wait of a get ran out. Returns how many have.
    pub(super) fn count_timeout(&self) -> u64 {
        self.timeouts.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// A wait of a get is over.
    pub(super) fn count_wait(&self, took: Duration) {
        self.waits.lock().record(took);
    }

    /// A use that a miss began at `since_us` has ended.
    pub(super) fn count_use(&self, since_us: u64, now_us: u64) {
        self.uses.lock().record(Duration::from_micros(now_us.saturating_sub(since_us)));
    }

    /// Buffers that have been in flight since these times are not any more.
    pub(super) fn count_in_flight(&self, since_us: impl Iterator<Item = u64>, now_us: u64) {
        let mut flights = self.flights.lock();
        since_us.for_each(|since_us| flights.record(Duration::from_micros(now_us.saturating_sub(since_us))));
    }

    /// A get that found nothing idle at once asked for `len` bytes and got `class_bytes`.
    pub(super) fn count_request(&self, len: usize, class_bytes: usize) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.requested_bytes.fetch_add(len as u64, Ordering::Relaxed);
        self.requested_class_bytes.fetch_add(class_bytes as u64, Ordering::Relaxed);
        let is_new = self.lengths.lock().is_new(len as u64);
        self.new_lengths.fetch_add(is_new.into(), Ordering::Relaxed);
    }

    /// Gets so far that found nothing idle at once and asked for a length that was not asked for lately.
    pub(super) fn new_lengths(&self) -> u64 {
        self.new_lengths.load(Ordering::Relaxed)
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

    /// Adds to `stats`, in which the stock and the copies in flight have filled their own, what is counted here. `own_bytes` are
    /// in blocks of this pool.
    pub(super) fn fill(&self, stats: &mut Stats, own_bytes: u64) {
        let counted = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (fallbacks, fallback_puts) = (counted(&self.fallbacks), counted(&self.fallback_puts));
        let (handed_over, lost_bytes) = (counted(&self.handed_over), counted(&self.lost_bytes));
        stats.gets += fallbacks + handed_over;
        stats.hits += handed_over;
        stats.misses += fallbacks;
        stats.puts += fallback_puts + handed_over + counted(&self.made_room);
        stats.requested = Requested {
            gets: counted(&self.requests),
            bytes: counted(&self.requested_bytes),
            class_bytes: counted(&self.requested_class_bytes),
        };
        stats.failed_gets = counted(&self.failed_gets);
        stats.timeouts = counted(&self.timeouts);
        stats.wait_time = *self.waits.lock();
        stats.use_time = *self.uses.lock();
        stats.in_flight_time = *self.flights.lock();
        stats.fallbacks = fallbacks;
        stats.fallback_buffers = fallbacks.saturating_sub(fallback_puts);
        stats.adopted = self.adopted();
        stats.lost = counted(&self.lost);
        stats.lost_bytes += lost_bytes;
        // Saturating: copies complete between the readings while other threads run. Exact at rest.
        stats.in_use = stats.buffers.saturating_sub(stats.buffers_in_pool + stats.in_flight);
        stats.in_use_bytes = own_bytes.saturating_sub(stats.idle_bytes + stats.in_flight_bytes + lost_bytes);
        self.peaks.note(stats);
    }
}

impl SampledPeaks {
    fn note(&self, stats: &mut Stats) {
        let most = |peak: &AtomicU64, now: u64| peak.fetch_max(now, Ordering::Relaxed).max(now);
        stats.peaks = Peaks {
            in_use: most(&self.in_use, stats.in_use),
            in_use_bytes: most(&self.in_use_bytes, stats.in_use_bytes),
            idle: most(&self.idle, stats.buffers_in_pool),
            idle_bytes: most(&self.idle_bytes, stats.idle_bytes),
            awaiting_release_bytes: most(&self.awaiting_release_bytes, stats.awaiting_release_bytes),
            fallback_buffers: self.fallback_buffers.load(Ordering::Relaxed),
            ..stats.peaks
        };
    }
}

/// The bytes of a snapshot, for the text of an error.
pub(super) fn usage_report(stats: &Stats) -> UsageReport {
    UsageReport {
        held_bytes: stats.pinned_bytes,
        in_use_bytes: stats.in_use_bytes,
        idle_bytes: stats.idle_bytes,
        free_bytes: stats.arena_free_bytes + stats.arena_transit_bytes + stats.arena_overhead_bytes,
        in_flight_bytes: stats.in_flight_bytes,
        lost_bytes: stats.lost_bytes,
        outside_bytes: stats.outside_bytes,
        fallback_bytes: stats.fallback_bytes,
        max_bytes: stats.max_bytes,
    }
}
