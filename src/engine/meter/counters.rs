//! What the engine counts in addition to the idle buffers.
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

/// A statistic. All accesses are Relaxed: each is a number on its own.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    /// Returns the sum.
    pub(crate) fn add(&self, number: u64) -> u64 {
        self.0.fetch_add(number, Ordering::Relaxed).wrapping_add(number)
    }

    pub(crate) fn subtract(&self, number: u64) {
        self.add(number.wrapping_neg());
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// How long something took, each time.
#[derive(Debug, Default)]
pub(crate) struct Times(Mutex<Histogram>);

impl Times {
    pub(crate) fn record(&self, took: Duration) {
        self.0.lock().record(took);
    }

    /// From `since_us` to `now_us`.
    pub(crate) fn record_us(&self, since_us: u64, now_us: u64) {
        self.record(Duration::from_micros(now_us.saturating_sub(since_us)));
    }

    pub(crate) fn get(&self) -> Histogram {
        *self.0.lock()
    }
}

/// Counts of requests, and of buffers that are not idle.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) failed_requests: Counter,
    pub(crate) fallbacks: Counter,
    pub(crate) fallback_returns: Counter,
    /// Buffers over adopted memory: in use, in flight or quarantined.
    pub(crate) adopted: Counter,
    /// Buffers handed over from a return to a waiting request and taken by it: a return and a hit each. Counted when it is
    /// taken, since the request may have timed out.
    pub(crate) handed_over: Counter,
    /// Returns that freed memory for a blocked request.
    pub(crate) made_room: Counter,
    /// Buffers that are quarantined now.
    pub(crate) lost: Counter,
    pub(crate) quarantined_bytes: Counter,
    pub(crate) timeouts: Counter,
    requested: Mutex<Requested>,
    /// How long requests waited.
    pub(crate) waits: Times,
    /// How long users had the buffers that misses made.
    pub(crate) uses: Times,
    /// How long buffers were in flight.
    pub(crate) flights: Times,
}

/// What was requested by requests that found nothing idle at once.
#[derive(Debug, Default)]
struct Requested {
    bytes: u64,
    class_bytes: u64,
    recent_lengths: RecentLengths,
    /// Requests of a length that was not requested recently.
    new_lengths: u64,
}

impl Counters {
    /// A request for `len` bytes that found no idle buffer at once received `class_bytes`.
    pub(crate) fn count_request(&self, len: usize, class_bytes: usize) {
        let mut requested = self.requested.lock();
        requested.bytes += len as u64;
        requested.class_bytes += class_bytes as u64;
        requested.new_lengths += u64::from(requested.recent_lengths.is_new(len as u64));
    }

    /// Requests so far that found nothing idle at once and had a length that was not requested recently.
    pub(crate) fn new_lengths(&self) -> u64 {
        self.requested.lock().new_lengths
    }

    /// Adds to `stats`, in which the stock and the copies in flight have filled their own, what is counted here. `own_bytes` are
    /// in blocks of this pool.
    pub(crate) fn fill(&self, stats: &mut Stats, own_bytes: u64) {
        let (fallbacks, fallback_returns) = (self.fallbacks.get(), self.fallback_returns.get());
        let (handed_over, quarantined_bytes) = (self.handed_over.get(), self.quarantined_bytes.get());
        stats.requests.served += fallbacks + handed_over;
        stats.requests.hits += handed_over;
        stats.requests.misses += fallbacks;
        stats.requests.returned += fallback_returns + handed_over + self.made_room.get();
        let Requested { bytes, class_bytes, .. } = *self.requested.lock();
        (stats.requests.requested_bytes, stats.requests.granted_bytes) = (bytes, class_bytes);
        stats.requests.failed = self.failed_requests.get();
        stats.requests.timeouts = self.timeouts.get();
        stats.requests.wait_time = self.waits.get();
        stats.requests.use_time = self.uses.get();
        stats.copies.time = self.flights.get();
        stats.requests.fallbacks = fallbacks;
        stats.memory.fallback_buffers = fallbacks.saturating_sub(fallback_returns);
        stats.requests.adopted = self.adopted.get();
        stats.memory.quarantined = self.lost.get();
        stats.memory.quarantined_bytes += quarantined_bytes;
        // Saturating: copies complete between the readings while other threads run. Exact at rest.
        stats.memory.in_use = stats.memory.buffers.saturating_sub(stats.memory.idle + stats.copies.in_flight);
        stats.memory.in_use_bytes =
            own_bytes.saturating_sub(stats.memory.idle_bytes + stats.copies.in_flight_bytes + quarantined_bytes);
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
        quarantined_bytes: stats.memory.quarantined_bytes,
        outside_bytes: stats.memory.external_bytes,
        fallback_bytes: stats.memory.fallback_bytes,
        max_bytes: stats.limits.max_bytes,
    }
}
