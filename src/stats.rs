//! The counters of a pool in one snapshot, with the sums that must balance.
//!
//! Each module counts its own events, under a lock or on a cache line that it holds anyway; `Core` collects the counts.
//! Nothing here prints or decides.

use std::time::Duration;

use crate::policy::Window;

/// Calls to the underlying allocator, in the bytes requested.
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

/// A snapshot of a pool's counters; zeros in a child of the process that made the pool. At rest they balance:
///
/// - `gets = hits + misses`,
/// - `gets = puts + in_use + in_flight + lost`,
/// - `pinned_bytes + fallback_bytes = in_use_bytes + in_flight_bytes + idle_bytes + lost_bytes + partition_bytes +
///   arena_free_bytes + arena_transit_bytes + arena_overhead_bytes`.
///
/// The counters of a [partition](crate::Pool::partition) are those of its own buffers, against its own ceiling.
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct Stats {
    /// Name of the preset.
    pub preset: &'static str,
    /// Name of the source of the memory.
    pub backend: &'static str,
    /// Whether that memory is page-locked.
    pub is_pinned: bool,
    /// Most idle buffers that the pool keeps, as of now.
    pub pool_size_limit: u64,
    /// TensorFlow's four counters, since the last raise or clear.
    pub window: Window,
    /// Gets of more than zero bytes that were served, over the life of the pool.
    pub gets: u64,
    /// Of those, served by an idle buffer.
    pub hits: u64,
    /// Of those, the others: by new memory under `tensorflow`, and mostly carved from memory already held under `adaptive`.
    pub misses: u64,
    /// Gets that ended in an error of the ceiling or of the back-end.
    pub failed_gets: u64,
    /// Gets that waited for memory at the ceiling.
    pub waits: u64,
    /// Gets that found no memory under the ceiling and got memory that is not pinned; they count as misses.
    pub fallbacks: u64,
    /// Buffers put back.
    pub puts: u64,
    /// Idle buffers evicted by puts over the limit.
    pub evicted: u64,
    /// Idle buffers released to free memory under the ceiling.
    pub reclaimed: u64,
    /// Idle buffers released because they stayed idle for too long.
    pub aged: u64,
    /// Checks of the rates.
    pub checks: u64,
    /// Of those, checks that raised the limit.
    pub raises: u64,
    /// Times that the limit was lowered.
    pub lowers: u64,
    /// Idle buffers.
    pub buffers_in_pool: u64,
    /// Bytes of the idle buffers.
    pub idle_bytes: u64,
    /// Buffers that users hold, and those handed to a waiting get that has not returned yet.
    pub in_use: u64,
    /// Bytes of those, pinned or not.
    pub in_use_bytes: u64,
    /// Buffers that users gave up and a device may still be reading. One that is copied from and still held is in use.
    pub in_flight: u64,
    /// Bytes of those.
    pub in_flight_bytes: u64,
    /// Age of the oldest copy in flight, from when its buffer was given up.
    pub oldest_in_flight: Option<Duration>,
    /// Its stream: the driver's handle, for a stream that was created.
    pub oldest_in_flight_stream: Option<u64>,
    /// Buffers that are never used again: after a device error it is unknown whether their copy is over.
    pub lost: u64,
    /// Bytes of those, of the lost buffers of the pool's partitions, and of regions that the back-end failed to take back.
    pub lost_bytes: u64,
    /// Lost buffers of the pool's partitions, those that have ended included.
    pub lost_in_partitions: u64,
    /// Bytes of the buffers of the pool's partitions, in use, in flight and idle.
    pub partition_bytes: u64,
    /// Bytes held and free: the arena carves the next buffers from them.
    pub arena_free_bytes: u64,
    /// Bytes in granules that are being committed, remapped or released.
    pub arena_transit_bytes: u64,
    /// Bytes that the back-end holds beyond those it was asked for: for alignment, under `cuda`. Under `tensorflow` they
    /// count with their buffer.
    pub arena_overhead_bytes: u64,
    /// Of the free bytes, those that go back to the system as soon as no copy is in flight; until then they are reused
    /// first. Only back-ends whose release waits for the device (`register`, `cuda`) have any.
    pub awaiting_release_bytes: u64,
    /// Gets that waited for the copies in flight so that such bytes could be released (`PINPOOL_RELEASE_POLICY=force`).
    pub drains: u64,
    /// Bytes pinned by [`Pool::prewarm`](crate::Pool::prewarm) or `PINPOOL_RESERVE`, kept to the end.
    pub reserve_bytes: u64,
    /// Runs of granules that were remapped instead of newly committed.
    pub moves: u64,
    /// Granules, regions and reserves held from the back-end. Under `vmm`, `register` and `cuda` each is a mapping of the
    /// process, of which the kernel allows `vm.max_map_count`; `mlock` and `heap` join neighbours and have fewer.
    pub mappings: u64,
    /// File descriptors that those may take of the process, which may have `ulimit -n` of them: one for each granule that
    /// can be exported (`PINPOOL_HANDLE_TYPES`).
    pub descriptors: u64,
    /// Bytes held from the back-end, in any state, in its own granularity.
    pub pinned_bytes: u64,
    /// Most bytes held at any time.
    pub peak_pinned_bytes: u64,
    /// The ceiling on the bytes held.
    pub max_bytes: Option<u64>,
    /// The highest ceiling so far; more than the ceiling only after [`Pool::set_max_bytes`](crate::Pool::set_max_bytes), or
    /// after the control group's limit was lowered.
    pub highest_max_bytes: Option<u64>,
    /// Bytes of buffers that are not pinned, because there was no room (`PINPOOL_ON_FULL=pageable`), those of partitions
    /// included.
    pub fallback_bytes: u64,
    /// Most such bytes at any time.
    pub peak_fallback_bytes: u64,
    /// The limit on such bytes (`PINPOOL_MAX_FALLBACK_BYTES`).
    pub max_fallback_bytes: Option<u64>,
    /// Page-locked bytes of this process's timelines ([`FenceKind::Timeline`](crate::FenceKind::Timeline)): 4160 B for each 64
    /// streams that are in use at once. In no other figure and under no ceiling: they are no pool's, since a stream's
    /// timeline serves the copies of all pools, and they are held until the process ends.
    pub timeline_bytes: u64,
    /// Regions of one buffer that were acquired where the back-end had refused a larger one.
    pub smaller_regions: u64,
    /// Calls to the underlying allocator.
    pub underlying: Underlying,
}

impl Stats {
    /// Share of the gets that an idle buffer served; 0 before the first.
    #[allow(clippy::cast_precision_loss)] // A rate.
    pub fn hit_rate(&self) -> f64 {
        if self.gets == 0 { 0.0 } else { self.hits as f64 / self.gets as f64 }
    }

    /// Recounts the sums that must balance while no other thread uses the pool.
    ///
    /// # Errors
    ///
    /// The first sum that does not balance.
    pub fn validate(&self) -> Result<(), StatsError> {
        let Self { gets, pinned_bytes, fallback_bytes, .. } = *self;
        let equal = [
            ("gets = hits + misses", gets, self.hits + self.misses),
            ("gets = puts + in use + in flight + lost", gets, self.puts + self.in_use + self.in_flight + self.lost),
            (
                "pinned + fallback = in use + in flight + idle + lost + partition + arena bytes",
                pinned_bytes + fallback_bytes,
                self.in_use_bytes
                    + self.in_flight_bytes
                    + self.idle_bytes
                    + self.lost_bytes
                    + self.partition_bytes
                    + self.arena_free_bytes
                    + self.arena_transit_bytes
                    + self.arena_overhead_bytes,
            ),
        ];
        let at_most = [
            ("idle buffers <= pool size limit", self.buffers_in_pool, self.pool_size_limit),
            (
                "peak pinned bytes <= highest ceiling",
                self.peak_pinned_bytes,
                self.highest_max_bytes.unwrap_or(u64::MAX),
            ),
        ];
        let unequal = equal.into_iter().filter(|(_, left, right)| left != right);
        let mut broken = unequal.chain(at_most.into_iter().filter(|(_, left, right)| left > right));
        broken
            .next()
            .map_or(Ok(()), |(rule, left, right)| Err(StatsError { rule, left, right, stats: Box::new(self.clone()) }))
    }
}

/// Counters that do not balance ([`Stats::validate`]).
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{rule} is broken: {left} against {right} in {stats:?}")]
pub struct StatsError {
    rule: &'static str,
    left: u64,
    right: u64,
    stats: Box<Stats>,
}
