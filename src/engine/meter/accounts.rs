//! What the engine counts in addition to the idle buffers, and the snapshot of all statistics.
//!
//! ```text
//!   in use = blocks - idle - in flight
//! ```
//!
//! Counters and sums only; while other threads run, the counters of a snapshot may be a few operations apart.

use std::time::Duration;

use crate::error::UsageReport;
use crate::stats::{Histogram, Stats};
use pinpool_observe::judge::RecentLengths;
use pinpool_os::sync::plain::Mutex;
use pinpool_os::sync::process::{AtomicU64, Ordering};

/// Counts of buffers that are not idle. All Relaxed unless noted: each is a number on its own.
#[derive(Debug, Default)]
pub(crate) struct Accounts {
    failed_gets: AtomicU64,
    fallbacks: AtomicU64,
    fallback_puts: AtomicU64,
    /// Buffers over adopted memory: in use, in flight or lost.
    adopted: AtomicU64,
    /// Buffers handed over from a return to a waiting request and taken by it: a return and a hit each. Counted when it is
    /// taken, since the request may have timed out.
    handed_over: AtomicU64,
    /// Returns that freed memory for a blocked request.
    made_room: AtomicU64,
    /// Buffers that are lost now.
    lost: AtomicU64,
    lost_bytes: AtomicU64,
    timeouts: AtomicU64,
    requested: Mutex<Requested>,
    /// How long gets waited.
    waits: Mutex<Histogram>,
    /// How long users had the buffers that misses made.
    uses: Mutex<Histogram>,
    /// How long buffers were in flight.
    flights: Mutex<Histogram>,
}

/// What was asked for by requests that found nothing idle at once.
#[derive(Debug, Default)]
struct Requested {
    bytes: u64,
    class_bytes: u64,
    recent_lengths: RecentLengths,
    /// Requests of a length that was not asked for lately.
    new_lengths: u64,
}

impl Accounts {
    /// Returns how many there have been.
    pub(crate) fn count_failed_get(&self) -> u64 {
        self.failed_gets.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Returns how many there have been.
    pub(crate) fn count_fallback(&self) -> u64 {
        self.fallbacks.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// The wait of a request timed out.
    pub(crate) fn count_timeout(&self) {
        self.timeouts.fetch_add(1, Ordering::Relaxed);
    }

    /// A request has stopped waiting.
    pub(crate) fn count_wait(&self, took: Duration) {
        self.waits.lock().record(took);
    }

    /// A use that a miss began at `since_us` has ended.
    pub(crate) fn count_use(&self, since_us: u64, now_us: u64) {
        self.uses.lock().record(Duration::from_micros(now_us.saturating_sub(since_us)));
    }

    /// Buffers that have been in flight since these times are not any more.
    pub(crate) fn count_in_flight(&self, since_us: impl Iterator<Item = u64>, now_us: u64) {
        let mut flights = self.flights.lock();
        since_us.for_each(|since_us| flights.record(Duration::from_micros(now_us.saturating_sub(since_us))));
    }

    /// A request for `len` bytes that found no idle buffer at once received `class_bytes`.
    pub(crate) fn count_request(&self, len: usize, class_bytes: usize) {
        let mut requested = self.requested.lock();
        requested.bytes += len as u64;
        requested.class_bytes += class_bytes as u64;
        requested.new_lengths += u64::from(requested.recent_lengths.is_new(len as u64));
    }

    /// Gets so far that found nothing idle at once and asked for a length that was not asked for lately.
    pub(crate) fn new_lengths(&self) -> u64 {
        self.requested.lock().new_lengths
    }

    pub(crate) fn count_fallback_put(&self) {
        self.fallback_puts.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn count_adopted(&self) {
        self.adopted.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn count_adopted_put(&self) {
        self.adopted.fetch_sub(1, Ordering::Relaxed);
    }

    /// Buffers over adopted memory.
    pub(crate) fn adopted(&self) -> u64 {
        self.adopted.load(Ordering::Relaxed)
    }

    pub(crate) fn count_handed_over(&self) {
        self.handed_over.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn count_made_room(&self) {
        self.made_room.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns how many buffers are lost now.
    pub(crate) fn count_lost(&self, bytes: u64) -> u64 {
        let lost = self.lost.fetch_add(1, Ordering::Relaxed) + 1;
        self.lost_bytes.fetch_add(bytes, Ordering::Relaxed);
        lost
    }

    /// Subtracts `buffers` that were lost and answer again.
    pub(crate) fn count_recovered(&self, buffers: u64, bytes: u64) {
        self.lost.fetch_sub(buffers, Ordering::Relaxed);
        self.lost_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Adds to `stats`, in which the stock and the copies in flight have filled their own, what is counted here. `own_bytes` are
    /// in blocks of this pool.
    pub(crate) fn fill(&self, stats: &mut Stats, own_bytes: u64) {
        let counted = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (fallbacks, fallback_puts) = (counted(&self.fallbacks), counted(&self.fallback_puts));
        let (handed_over, lost_bytes) = (counted(&self.handed_over), counted(&self.lost_bytes));
        stats.requests.served += fallbacks + handed_over;
        stats.requests.hits += handed_over;
        stats.requests.misses += fallbacks;
        stats.requests.returned += fallback_puts + handed_over + counted(&self.made_room);
        let Requested { bytes, class_bytes, .. } = *self.requested.lock();
        (stats.requests.requested_bytes, stats.requests.granted_bytes) = (bytes, class_bytes);
        stats.requests.failed = counted(&self.failed_gets);
        stats.requests.timeouts = counted(&self.timeouts);
        stats.requests.wait_time = *self.waits.lock();
        stats.requests.use_time = *self.uses.lock();
        stats.copies.time = *self.flights.lock();
        stats.requests.fallbacks = fallbacks;
        stats.memory.fallback_buffers = fallbacks.saturating_sub(fallback_puts);
        stats.requests.adopted = self.adopted();
        stats.memory.lost = counted(&self.lost);
        stats.memory.lost_bytes += lost_bytes;
        // Saturating: copies complete between the readings while other threads run. Exact at rest.
        stats.memory.in_use = stats.memory.buffers.saturating_sub(stats.memory.idle + stats.copies.in_flight);
        stats.memory.in_use_bytes =
            own_bytes.saturating_sub(stats.memory.idle_bytes + stats.copies.in_flight_bytes + lost_bytes);
    }
}

/// The bytes of a snapshot, for the text of an error.
pub(crate) fn usage_report(stats: &Stats) -> UsageReport {
    UsageReport {
        held_bytes: stats.memory.held_bytes,
        in_use_bytes: stats.memory.in_use_bytes,
        idle_bytes: stats.memory.idle_bytes,
        free_bytes: stats.memory.free_bytes + stats.memory.transit_bytes + stats.memory.overhead_bytes,
        in_flight_bytes: stats.copies.in_flight_bytes,
        lost_bytes: stats.memory.lost_bytes,
        outside_bytes: stats.memory.external_bytes,
        fallback_bytes: stats.memory.fallback_bytes,
        max_bytes: stats.limits.max_bytes,
    }
}
