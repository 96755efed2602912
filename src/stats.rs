//! One adds up: what happened, as a user sees it.
//!
//! Every room counts its own events where it has a lock or a line of its own anyway; here the counts meet in one snapshot,
//! with the sums that must balance. Nothing here prints or decides.

use std::time::Duration;

use crate::policy::Window;

/// Calls to the underlying allocator, in the bytes asked of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Underlying {
    /// Acquisitions that succeeded.
    pub allocs: u64,
    /// Releases that succeeded.
    pub frees: u64,
    /// Sum of the classes acquired.
    pub alloc_bytes: u64,
    /// Sum of the classes released.
    pub free_bytes: u64,
    /// Most bytes acquired and not released at any time.
    pub peak_bytes: u64,
    /// Time spent in calls to acquire and release, failed ones included.
    pub time: Duration,
    /// Calls that failed.
    pub failures: u64,
}

impl Underlying {
    pub(crate) fn acquired(&mut self, bytes: u64) {
        self.allocs += 1;
        self.alloc_bytes += bytes;
        self.note_peak();
    }

    pub(crate) fn released(&mut self, bytes: u64) {
        self.frees += 1;
        self.free_bytes += bytes;
    }

    pub(crate) fn note_peak(&mut self) {
        self.peak_bytes = self.peak_bytes.max(self.alloc_bytes.saturating_sub(self.free_bytes));
    }
}

/// A snapshot of a pool; zeros in a child of the process that made it. At rest the figures balance:
///
/// - `gets = hits + misses`,
/// - `gets = puts + in_use + in_flight + lost`,
/// - `pinned_bytes = in_use_bytes + in_flight_bytes + idle_bytes + lost_bytes + partition_bytes + arena_free_bytes +
///   arena_transit_bytes`.
///
/// The figures of a [partition](crate::Pool::partition) are those of its own buffers, against its own ceiling.
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct Stats {
    /// Rules that the pool follows.
    pub preset: &'static str,
    /// Name of the source of the memory.
    pub backend: &'static str,
    /// Is that memory page-locked?
    pub is_pinned: bool,
    /// Most idle buffers that the pool keeps now.
    pub pool_size_limit: u64,
    /// TensorFlow's four counters, since the last raise or clear.
    pub window: Window,
    /// Gets of more than zero bytes that were served, over the life of the pool.
    pub gets: u64,
    /// Of those, served by an idle buffer.
    pub hits: u64,
    /// Of those, served by the underlying allocator.
    pub misses: u64,
    /// Gets that ended in an error of the ceiling or of the back-end.
    pub failed_gets: u64,
    /// Gets that stood in line for room.
    pub waits: u64,
    /// Gets that were given memory that is not pinned, for want of room; they count as misses.
    pub fallbacks: u64,
    /// Buffers that came back.
    pub puts: u64,
    /// Idle buffers evicted by puts over the limit.
    pub evicted: u64,
    /// Idle buffers given back to make room under the ceiling.
    pub reclaimed: u64,
    /// Idle buffers given back because nobody asked for them.
    pub aged: u64,
    /// Times that the rates were looked at.
    pub checks: u64,
    /// Of those, how often the limit rose.
    pub raises: u64,
    /// How often the limit came down again.
    pub lowers: u64,
    /// Idle buffers.
    pub buffers_in_pool: u64,
    /// Bytes of the idle buffers.
    pub idle_bytes: u64,
    /// Buffers in the hands of users.
    pub in_use: u64,
    /// Bytes of those.
    pub in_use_bytes: u64,
    /// Buffers given up that a device may still be reading. One that is copied from and kept is in use.
    pub in_flight: u64,
    /// Bytes of those.
    pub in_flight_bytes: u64,
    /// Age of the oldest copy in flight, from when its buffer was given up.
    pub oldest_in_flight: Option<Duration>,
    /// Its stream: for one that somebody created, the driver's handle.
    pub oldest_in_flight_stream: Option<u64>,
    /// Buffers that can never be used again: a device error hid whether their copy is over.
    pub lost: u64,
    /// Bytes of those, and of regions that the back-end failed to take back.
    pub lost_bytes: u64,
    /// Bytes of the buffers of its partitions, in use and idle.
    pub partition_bytes: u64,
    /// Bytes held and free: what the arena cuts buffers from next.
    pub arena_free_bytes: u64,
    /// Bytes in granules that are being locked, moved or released.
    pub arena_transit_bytes: u64,
    /// Of the free bytes, those that go back to the system as soon as no copy is in flight: until then they are used
    /// again first. Only back-ends whose release waits for the device (`register`, `cuda`) have any.
    pub awaiting_release_bytes: u64,
    /// Gets that waited for the copies in flight so that such bytes could go (`PINPOOL_RELEASE_POLICY=force`).
    pub drains: u64,
    /// Bytes pinned by [`Pool::prewarm`](crate::Pool::prewarm) or `PINPOOL_RESERVE`, kept to the end.
    pub reserve_bytes: u64,
    /// Runs of granules that were moved instead of locked anew.
    pub moves: u64,
    /// Bytes held from the back-end, in whatever state, in its own granularity.
    pub pinned_bytes: u64,
    /// Most of them at any time.
    pub peak_pinned_bytes: u64,
    /// The ceiling on them.
    pub max_bytes: Option<u64>,
    /// Calls to the underlying allocator.
    pub underlying: Underlying,
}

impl Stats {
    /// Share of the gets that an idle buffer served; 0 before the first.
    #[allow(clippy::cast_precision_loss)] // A rate.
    pub fn hit_rate(&self) -> f64 {
        if self.gets == 0 { 0.0 } else { self.hits as f64 / self.gets as f64 }
    }

    /// Recounts what must balance while no other thread uses the pool; names the first sum that does not.
    ///
    /// # Errors
    ///
    /// The two sides of that sum, in words and numbers.
    pub fn validate(&self) -> Result<(), String> {
        let sums = [
            ("gets = hits + misses", self.gets, self.hits + self.misses),
            (
                "gets = puts + in use + in flight + lost",
                self.gets,
                self.puts + self.in_use + self.in_flight + self.lost,
            ),
            (
                "pinned = in use + in flight + idle + lost + partition + arena bytes",
                self.pinned_bytes,
                self.in_use_bytes
                    + self.in_flight_bytes
                    + self.idle_bytes
                    + self.lost_bytes
                    + self.partition_bytes
                    + self.arena_free_bytes
                    + self.arena_transit_bytes,
            ),
        ];
        let broken = sums.iter().find(|(_, left, right)| left != right);
        match broken {
            Some((sum, left, right)) => Err(format!("{sum}: {left} against {right} in {self:?}")),
            None if self.buffers_in_pool > self.pool_size_limit => {
                Err(format!("{} idle buffers, limit {}", self.buffers_in_pool, self.pool_size_limit))
            }
            None if self.max_bytes.is_some_and(|max_bytes| self.peak_pinned_bytes > max_bytes) => {
                Err(format!("{} B held at the peak, ceiling {:?}", self.peak_pinned_bytes, self.max_bytes))
            }
            None => Ok(()),
        }
    }
}
