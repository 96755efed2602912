//! The snapshot of all figures, with the sums that must balance.

use std::time::Duration;

use super::{Calls, EvictionReasons, Histogram, MissReasons, Underlying};
use crate::policy::Window;

/// A snapshot of a pool's counters; zeros in a child of the process that made the pool. At rest they balance:
///
/// - `gets = hits + misses`,
/// - `misses = miss_reasons.total()`,
/// - `gets + adopted = puts + in_use + in_flight + lost`,
/// - `buffers = buffers_in_pool + in_use + in_flight`,
/// - `misses + adopted = buffers + lost + (fallbacks - fallback_buffers) + eviction_reasons.total()`,
/// - `evicted = eviction_reasons.over_limit`, `aged = eviction_reasons.expired`, `reclaimed = eviction_reasons.reclaimed +
///   over_bytes + pressure + trimmed`,
/// - `pinned_bytes + fallback_bytes = in_use_bytes + in_flight_bytes + idle_bytes + lost_bytes +
///   arena_free_bytes + arena_transit_bytes + arena_overhead_bytes`.
///
/// # What PyTorch calls them
///
/// Most keys of `torch.cuda.host_memory_stats()` have a twin here. What PyTorch counts in microseconds is a
/// [`Duration`], and its `reset_*` calls have none: take the difference of two snapshots.
///
/// | `host_memory_stats()` | here |
/// | --- | --- |
/// | `allocations.current`, `.peak` | `buffers - fallback_buffers`, `peaks.buffers` |
/// | `allocations.allocated`, `.freed` | `misses - fallbacks`, `eviction_reasons.total()` |
/// | `allocated_bytes.current`, `.peak` | `pinned_bytes`, `peak_pinned_bytes` |
/// | `allocated_bytes.allocated`, `.freed` | `pin.bytes`, `unpin.bytes` |
/// | `active_requests.current`, `.peak` | `in_use + in_flight`, `peaks.in_use` and `peaks.in_flight` |
/// | `active_requests.allocated`, `.freed` | `gets`, `puts` |
/// | `active_bytes.current`, `.peak` | `in_use_bytes + in_flight_bytes`, `peaks.in_use_bytes` and `peaks.in_flight_bytes` |
/// | `num_host_alloc`, `num_host_free` | `pin.count`, `unpin.count` |
/// | `host_alloc_time.total`, `.max`, `.min`, `.count`, `.avg` | `pin.time`: `total()`, `max()`, `min()`, `count()`, `mean()` |
/// | `host_free_time` | `unpin.time` |
///
/// PyTorch page-locks each buffer by itself; here one call may serve many, so the two pairs of counts differ.
///
/// A [partition](crate::Pool::partition) has its own counters of requests and waits, and `in_use_bytes` (also `pinned_bytes`): the
/// bytes that its buffers in use and in flight and its waiting requests claim, against its own limit. The rest is 0, and so
/// nothing has to balance. The counters of the pool include those of its partitions, but for waits at the limit of a partition.
#[derive(Debug, Clone, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Stats {
    /// Name of the pool ([`PoolBuilder::name`](crate::PoolBuilder::name)), or of the partition behind the name of its pool.
    pub name: Option<String>,
    /// Number of the pool or partition among those of its process, which is not used again.
    pub number: u64,
    /// Whether it is a [partition](crate::Pool::partition).
    pub is_partition: bool,
    /// Name of the preset.
    pub preset: &'static str,
    /// Name of the source of the memory.
    pub backend: &'static str,
    /// Whether that memory is page-locked.
    pub is_pinned: bool,
    /// Most idle buffers that the pool keeps, as of now.
    pub pool_size_limit: u64,
    /// TensorFlow's four counters since the last raise or clear: `get_from_pool`, `put`, `allocated` and `evicted`.
    pub window: Window,
    /// Gets of more than zero bytes that were served, over the life of the pool.
    pub gets: u64,
    /// Gets that an idle buffer served.
    pub hits: u64,
    /// Gets that no idle buffer served. Under `tensorflow` new memory served them, under `adaptive` mostly memory already held,
    /// from which their buffers were carved.
    pub misses: u64,
    /// Why they missed.
    pub miss_reasons: MissReasons,
    /// The requests that found nothing idle at once: `gets`, their `bytes` and the `class_bytes` given.
    pub requested: Requested,
    /// Gets that ended in an error of the ceiling or of the back-end.
    pub failed_gets: u64,
    /// Gets that waited for memory at the ceiling.
    pub waits: u64,
    /// Gets that wait now.
    pub waiting: u64,
    /// Gets whose time ran out while they waited: they failed or got memory that is not pinned.
    pub timeouts: u64,
    /// How long they waited, those whose time ran out or whose task was dropped included; those that still wait are not.
    pub wait_time: Histogram,
    /// From a get that missed to its put, and nothing else: a hit reads no clock, so of a pool in steady state this has what
    /// its first gets showed. A recorded trace has all.
    pub use_time: Histogram,
    /// From the return of a buffer with running copies until the pool found them finished. Misses,
    /// [`Completion::wait`](crate::Completion::wait) and, ten times a second, the maintenance thread query copies, so this is up to
    /// 0.1 s longer than the copy.
    pub in_flight_time: Histogram,
    /// Gets that found no memory under the ceiling and got memory that is not pinned; they count as misses.
    pub fallbacks: u64,
    /// Bytes of users that are page-locked under the ceiling of this pool ([`Pool::page_lock`](crate::Pool::page_lock)), and not held.
    pub outside_bytes: u64,
    /// Buffers over [adopted](crate::Pool::adopt) memory, in use, in flight or lost: no gets, and their bytes are not held.
    pub adopted: u64,
    /// Buffers put back.
    pub puts: u64,
    /// Idle buffers evicted by puts over the limit.
    pub evicted: u64,
    /// Idle buffers released to free memory under the ceiling, by a trim or under pressure, and puts that made room for a
    /// waiting get.
    pub reclaimed: u64,
    /// Idle buffers released because they stayed idle for too long.
    pub aged: u64,
    /// Why pinned buffers left the pool: these three and the others.
    pub eviction_reasons: EvictionReasons,
    /// Checks of the rates.
    pub checks: u64,
    /// Checks that raised the limit.
    pub raises: u64,
    /// Times that the limit was lowered.
    pub lowers: u64,
    /// Buffers that exist, pinned or not: idle, in use and in flight.
    pub buffers: u64,
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
    #[cfg_attr(
        feature = "serde",
        serde(rename = "oldest_in_flight_seconds", serialize_with = "super::serial::optional_seconds")
    )]
    pub oldest_in_flight: Option<Duration>,
    /// Its stream: the driver's handle, for a stream that was created.
    pub oldest_in_flight_stream: Option<u64>,
    /// Buffers that are not used, since it is unknown after an error of the device or its driver whether their copy is over.
    /// A driver that only refused to answer is asked again, ten times a second; a buffer whose copy it then says to be over is
    /// lost no more.
    pub lost: u64,
    /// Bytes of those, and of regions that the back-end failed to take back.
    pub lost_bytes: u64,
    /// Bytes held and free: the arena carves the next buffers from them.
    pub arena_free_bytes: u64,
    /// Bytes in granules that are being committed, remapped or released.
    pub arena_transit_bytes: u64,
    /// Bytes that the back-end holds beyond those it was asked for: for alignment, under `cuda`. Under `tensorflow` they
    /// count with their buffer.
    pub arena_overhead_bytes: u64,
    /// Free bytes that have been idle for longer than `PINPOOL_IDLE_TIMEOUT` and stay pinned, because a release would wait for the
    /// device (`register`, `cuda`). They are reused first; [`Pool::trim`](crate::Pool::trim) releases them.
    pub awaiting_release_bytes: u64,
    /// Bytes pinned by [`Pool::prewarm`](crate::Pool::prewarm) or `PINPOOL_RESERVE`, kept to the end.
    pub reserve_bytes: u64,
    /// Bytes that these asked for. More than `reserve_bytes` while a reserve that is not waited for
    /// (`PINPOOL_RESERVE_WAIT=0`) is under way, or after it was refused.
    pub reserve_asked_bytes: u64,
    /// Share of what was asked for that is pinned; 1 where nothing was asked for.
    pub pinned_fraction: f64,
    /// When all of it will be there, at the rate so far; `None` where nothing is under way, or none of it came yet.
    #[cfg_attr(
        feature = "serde",
        serde(rename = "reserve_eta_seconds", serialize_with = "super::serial::optional_seconds")
    )]
    pub reserve_eta: Option<Duration>,
    /// Runs of granules that were remapped instead of newly committed.
    pub moves: u64,
    /// Granules, regions and reserves held from the back-end. Under `vmm`, `register` and `cuda` each is a mapping of the
    /// process, of which the kernel allows `vm.max_map_count`; `mlock` and `heap` join neighbours and have fewer.
    pub mappings: u64,
    /// Bytes held from the back-end, in any state, in its own granularity.
    pub pinned_bytes: u64,
    /// Most bytes held at any time.
    pub peak_pinned_bytes: u64,
    /// The ceiling on the bytes held.
    pub max_bytes: Option<u64>,
    /// The highest ceiling so far; more than the ceiling only after [`Pool::set_max_bytes`](crate::Pool::set_max_bytes), or
    /// after the control group's limit was lowered.
    pub highest_max_bytes: Option<u64>,
    /// Bytes of buffers that are not pinned, because there was no room (`PINPOOL_ON_FULL=pageable`).
    pub fallback_bytes: u64,
    /// Buffers that are not pinned, lost ones included.
    pub fallback_buffers: u64,
    /// Most such bytes at any time.
    pub peak_fallback_bytes: u64,
    /// The limit on such bytes: as much as the pool may hold.
    pub max_fallback_bytes: Option<u64>,
    /// Pinned bytes of the numbers that streams write behind copies in this process: 4160 B for each 64
    /// streams that are in use at once. In no other figure and under no ceiling: they are no pool's, since a stream's
    /// timeline serves the copies of all pools, and they are held until the process ends.
    pub timeline_bytes: u64,
    /// Regions of one buffer that were acquired where the back-end had refused a larger one.
    pub smaller_regions: u64,
    /// What the host ledger says, if the pool is in one (`PINPOOL_LEDGER`).
    pub ledger: Option<LedgerStats>,
    /// The sums of `pin`, `unpin` and `remap` in requested bytes: `allocs`, `frees`, `alloc_bytes`, `free_bytes`, `peak_bytes`,
    /// `time` and `failures`.
    pub underlying: Underlying,
    /// Calls that page-locked memory: acquisitions of regions and reserves, commits of granules.
    pub pin: Calls,
    /// Calls that returned it to the system.
    pub unpin: Calls,
    /// Calls that moved granules from one address to another.
    pub remap: Calls,
    /// The peaks of the members above that have these names; `idle` is that of `buffers_in_pool`. Peaks of idle and used buffers
    /// are sampled, mostly ten times a second.
    pub peaks: Peaks,
}

/// The highest figures so far; those of `pinned_bytes` and `fallback_bytes` are in [`Stats`] itself.
///
/// A hit writes none of them. Those of what is in use and idle are samples: taken by each snapshot, by each look of the
/// maintenance thread (ten times a second while copies are in flight, or some buffers are idle and some in use; once a second
/// otherwise), by each [`poll`](crate::Pool::poll), and when a miss makes more buffers than there ever were. So a rise between
/// two samples is missed if it needs no new buffer. The others are exact.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Peaks {
    /// Peak of `buffers`, exact.
    pub buffers: u64,
    /// Peak of `in_use`, as sampled.
    pub in_use: u64,
    /// Peak of `in_use_bytes`, as sampled.
    pub in_use_bytes: u64,
    /// Peak of `buffers_in_pool`, as sampled.
    pub idle: u64,
    /// Peak of `idle_bytes`, as sampled.
    pub idle_bytes: u64,
    /// Peak of `in_flight`, exact.
    pub in_flight: u64,
    /// Peak of `in_flight_bytes`, exact.
    pub in_flight_bytes: u64,
    /// Peak of `awaiting_release_bytes`, as sampled.
    pub awaiting_release_bytes: u64,
    /// Peak of `fallback_buffers`, exact.
    pub fallback_buffers: u64,
}

/// What the host ledger of a pool says (`PINPOOL_LEDGER`).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct LedgerStats {
    /// Its name.
    pub name: String,
    /// Its ceiling in bytes; `None` without one.
    pub max_bytes: Option<u64>,
    /// Its living owners, this pool among them.
    pub owners: u64,
    /// Bytes that all of them hold, those that they are pinning and releasing included.
    pub held_bytes: u64,
    /// Bytes that this pool holds.
    pub own_bytes: u64,
    /// Bytes that the other owners hold.
    pub others_bytes: u64,
    /// Bytes of the other owners that were idle when their maintenance threads looked last.
    pub others_idle_bytes: u64,
    /// Bytes that waiting gets of the other owners want.
    pub others_wanted_bytes: u64,
}

/// What gets asked for and what they were given.
///
/// Counts the gets that found nothing idle at once, hits that a copy just ended or a put handed over included: a plain hit
/// counts nothing beyond itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Requested {
    /// Gets that found nothing idle at once.
    pub gets: u64,
    /// Bytes that they asked for.
    pub bytes: u64,
    /// Bytes of their classes, which they were given.
    pub class_bytes: u64,
}

impl Requested {
    /// Share of what was given that was not asked for; 0 before the first.
    #[allow(clippy::cast_precision_loss)] // A rate.
    pub fn waste(&self) -> f64 {
        if self.class_bytes == 0 { 0.0 } else { 1.0 - self.bytes as f64 / self.class_bytes as f64 }
    }
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
    #[doc(hidden)]
    pub fn validate(&self) -> Result<(), StatsError> {
        if self.is_partition {
            return Ok(());
        }
        let Self { gets, misses, buffers, pinned_bytes, fallback_bytes, .. } = *self;
        let (left, peaks) = (self.eviction_reasons, self.peaks);
        let equal = [
            ("gets = hits + misses", gets, self.hits + misses),
            ("misses = the sum of their reasons", misses, self.miss_reasons.total()),
            (
                "gets + adopted = puts + in use + in flight + lost",
                gets + self.adopted,
                self.puts + self.in_use + self.in_flight + self.lost,
            ),
            ("buffers = idle + in use + in flight", buffers, self.buffers_in_pool + self.in_use + self.in_flight),
            (
                "misses + fallback buffers + adopted = buffers + lost + fallbacks + those that left",
                misses + self.fallback_buffers + self.adopted,
                buffers + self.lost + self.fallbacks + left.total(),
            ),
            ("evicted = over the limit", self.evicted, left.over_limit),
            ("aged = expired", self.aged, left.expired),
            (
                "reclaimed = for room + over the bytes + under pressure + trimmed",
                self.reclaimed,
                left.reclaimed + left.over_bytes + left.pressure + left.trimmed,
            ),
            (
                "failed calls = those of pin, unpin and remap",
                self.underlying.failures,
                self.pin.failures + self.unpin.failures + self.remap.failures,
            ),
            (
                "pinned + fallback = in use + in flight + idle + lost + arena bytes",
                pinned_bytes + fallback_bytes,
                self.in_use_bytes
                    + self.in_flight_bytes
                    + self.idle_bytes
                    + self.lost_bytes
                    + self.arena_free_bytes
                    + self.arena_transit_bytes
                    + self.arena_overhead_bytes,
            ),
        ];
        // Under `adaptive` puts may exceed the limit until the next miss or tick.
        let limited = if self.preset == "tensorflow" { self.buffers_in_pool } else { 0 };
        let at_most = [
            ("idle buffers <= pool size limit", limited, self.pool_size_limit),
            (
                "peak pinned bytes <= highest ceiling",
                self.peak_pinned_bytes,
                self.highest_max_bytes.unwrap_or(u64::MAX),
            ),
            ("waits that ended + waiting <= waits", self.wait_time.count() + self.waiting, self.waits),
            ("waits whose time ran out <= waits that ended", self.timeouts, self.wait_time.count()),
            ("buffers <= peak", buffers, peaks.buffers),
            ("in use <= peak", self.in_use, peaks.in_use),
            ("in-use bytes <= peak", self.in_use_bytes, peaks.in_use_bytes),
            ("idle <= peak", self.buffers_in_pool, peaks.idle),
            ("idle bytes <= peak", self.idle_bytes, peaks.idle_bytes),
            ("in flight <= peak", self.in_flight, peaks.in_flight),
            ("in-flight bytes <= peak", self.in_flight_bytes, peaks.in_flight_bytes),
            ("bytes awaiting release <= peak", self.awaiting_release_bytes, peaks.awaiting_release_bytes),
            ("fallback buffers <= peak", self.fallback_buffers, peaks.fallback_buffers),
            ("fallback bytes <= peak", fallback_bytes, self.peak_fallback_bytes),
            ("requested bytes <= bytes of their classes", self.requested.bytes, self.requested.class_bytes),
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
