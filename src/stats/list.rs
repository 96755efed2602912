//! The list of all statistics. The structures, their documentation, the table, the JSON object and the metrics come from it: to
//! add a statistic, add a line here and the code that counts it.

use std::time::Duration;

use super::Histogram;
use super::entry::{Kind, Statistic, ToStatistics};
use crate::policy::{PinnedBy, Preset};

/// Declares a group of statistics. Each statistic has a help text (the first line of its comment), optional further documentation,
/// a name, a type and a [`Kind`].
macro_rules! group {
    (
        $(#[$doc:meta])* $name:ident;
        $(#[doc = $help:literal] $(#[$more:meta])* $field:ident: $type:ty = $kind:ident,)+
    ) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Default, PartialEq)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize))]
        #[non_exhaustive]
        pub struct $name {
            $(#[doc = $help] $(#[$more])* pub $field: $type,)+
        }

        impl ToStatistics for $name {
            fn statistics(&self, path: String, _: &'static str, _: Kind) -> Vec<Statistic> {
                let path = |name| format!("{path}.{name}");
                [$(self.$field.statistics(path(stringify!($field)), $help, Kind::$kind)),+].concat()
            }
        }
    };
}

/// A snapshot of a pool's statistics. All zero in a forked child. [`Display`](std::fmt::Display) prints the non-zero ones.
///
/// While no other thread uses the pool, these sums hold:
///
/// - `requests.served = requests.hits + requests.misses`
/// - `requests.served + requests.adopted = requests.returned + memory.in_use + copies.in_flight + memory.quarantined`
/// - `memory.buffers = memory.idle + memory.in_use + copies.in_flight`
/// - `memory.held_bytes + memory.pageable_bytes = memory.in_use_bytes + copies.in_flight_bytes + memory.idle_bytes +
///   memory.quarantined_bytes + memory.free_bytes + memory.transit_bytes + memory.overhead_bytes`
///
/// With the feature `serde` a snapshot is an object of objects. Durations are in seconds, under names that end in `_seconds`.
///
/// # PyTorch's names
///
/// PyTorch counts times in microseconds, and pins each buffer with one call. Here one call may serve many buffers.
///
/// | `torch.cuda.host_memory_stats()` | here |
/// | --- | --- |
/// | `allocations.current` | `memory.buffers + memory.quarantined - memory.pageable - requests.adopted` |
/// | `allocations.allocated`, `.freed` | `requests.misses - requests.pageable`, `memory.evictions.total()` |
/// | `allocated_bytes.current`, `.peak` | `memory.held_bytes`, `memory.peak_held_bytes` |
/// | `allocated_bytes.allocated`, `.freed` | `memory.pin.bytes`, `memory.unpin.bytes` |
/// | `active_requests.current` | `memory.in_use + copies.in_flight` |
/// | `active_requests.allocated`, `.freed` | `requests.served`, `requests.returned` |
/// | `active_bytes.current` | `memory.in_use_bytes + copies.in_flight_bytes` |
/// | `num_host_alloc`, `num_host_free` | `memory.pin.count`, `memory.unpin.count` |
/// | `host_alloc_time`, `host_free_time` | `memory.pin.time`, `memory.unpin.time` |
///
/// After `pinpool.torch.install`, PyTorch's `active_requests` and `active_bytes` do not include buffers in flight.
///
/// # Partitions
///
/// A [partition](crate::Pool::open_partition) counts its own requests, waits and limit. Its `memory.in_use_bytes`,
/// `memory.held_bytes` and `memory.peak_held_bytes` are the bytes claimed by its buffers and by its requests that wait for
/// memory of the pool. All other statistics are 0, and no sum has to hold. The pool's statistics include its partitions, except
/// waits at the limit of a partition.
#[derive(Debug, Clone, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Stats {
    /// Name of the pool ([`PoolBuilder::name`](crate::PoolBuilder::name)); for a partition, `POOL/PARTITION` or `PARTITION`.
    pub name: Option<String>,
    /// Number of the pool or partition, unique within the process.
    pub number: u64,
    /// True for a [partition](crate::Pool::open_partition).
    pub is_partition: bool,
    /// The preset, `PINPOOL_PRESET`.
    pub preset: Preset,
    /// Name of the backend, as in `PINPOOL_BACKEND`.
    pub backend: &'static str,
    /// The component that pins the backend's memory; `None` for `heap`.
    pub pinned_by: Option<PinnedBy>,
    /// Requests for buffers.
    pub requests: RequestStats,
    /// Buffers and bytes by state, and driver calls.
    pub memory: MemoryStats,
    /// Copies that were running when their buffers were returned.
    pub copies: CopyStats,
    /// Limits, and how often the limit on idle buffers changed.
    pub limits: LimitStats,
}

impl Stats {
    /// Returns each statistic with its path (`memory.pin.count`), in the order of the list.
    #[doc(hidden)]
    pub fn unstable_list(&self) -> Vec<Statistic> {
        let Self { requests, memory, copies, limits, .. } = self;
        let groups: [(&str, &dyn ToStatistics); 4] =
            [("requests", requests), ("memory", memory), ("copies", copies), ("limits", limits)];
        groups.into_iter().flat_map(|(name, group)| group.statistics(name.to_owned(), "", Kind::Group)).collect()
    }
}

group! {
    /// Requests for buffers of more than zero bytes, and how they ended.
    RequestStats;
    /// Requests that got a buffer.
    served: u64 = Counter,
    /// Requests served by an idle buffer, or by a returned buffer that was handed over.
    hits: u64 = Counter,
    /// Requests served by new memory, by memory of the arena or by pageable memory.
    ///
    /// Under `tensorflow` each miss is an allocation. Under `adaptive` most buffers are carved from memory that the pool already
    /// holds.
    misses: u64 = Counter,
    /// Misses by reason.
    miss_reasons: MissReasons = Group,
    /// Requests that failed: no memory within the limit, or a backend error.
    failed: u64 = Counter,
    /// Buffers returned.
    returned: u64 = Counter,
    /// Requests that waited for memory.
    waits: u64 = Counter,
    /// Requests that are waiting now.
    waiting: u64 = Gauge,
    /// Waits that timed out: the request failed or got pageable memory.
    timeouts: u64 = Counter,
    /// Requests that got pageable memory instead of pinned memory (`PINPOOL_ON_FULL=pageable`). They are also misses.
    pageable: u64 = Counter,
    /// Existing buffers over [adopted](crate::Pool::adopt) memory. They are not requests, and their bytes are not held.
    adopted: u64 = Gauge,
    /// Bytes of the served requests that found no idle buffer at first.
    requested_bytes: u64 = Counter,
    /// Bytes granted for these requests, after rounding up to size classes.
    granted_bytes: u64 = Counter,
    /// Duration of waits, timeouts and cancelled requests included.
    wait_time: Histogram = Histogram,
    /// Time from a miss to the return of its buffer. Hits are not measured.
    use_time: Histogram = Histogram,
}

group! {
    /// Buffers and bytes by state, evictions, and driver calls.
    MemoryStats;
    /// Buffers that exist: in use, in flight or idle, pinned or not.
    buffers: u64 = Gauge,
    /// Buffers in use, including buffers that a waiting request is about to receive.
    in_use: u64 = Gauge,
    /// Bytes of the buffers in use.
    in_use_bytes: u64 = Gauge,
    /// Idle buffers.
    idle: u64 = Gauge,
    /// Bytes of the idle buffers.
    idle_bytes: u64 = Gauge,
    /// Buffers that cannot be reused, because the driver does not tell whether their copy has completed; leaked ones included.
    ///
    /// If only the query failed, the pool repeats it ten times a second, and reuses the buffer once the copy has completed.
    quarantined: u64 = Gauge,
    /// Bytes of the quarantined buffers, and of memory that the backend failed to release.
    quarantined_bytes: u64 = Gauge,
    /// Bytes held and free, from which the arena carves buffers.
    free_bytes: u64 = Gauge,
    /// Bytes being pinned, remapped or unpinned.
    transit_bytes: u64 = Gauge,
    /// Bytes that the backend holds beyond those requested, for alignment.
    overhead_bytes: u64 = Gauge,
    /// Free bytes idle for longer than `PINPOOL_IDLE_TIMEOUT` that stay pinned, because a release would stall the device.
    ///
    /// Only under `register` and `cuda`. They are reused first; [`Pool::trim`](crate::Pool::trim) releases them.
    awaiting_release_bytes: u64 = Gauge,
    /// Bytes held from the backend in any state.
    held_bytes: u64 = Gauge,
    /// Highest number of bytes held.
    peak_held_bytes: u64 = Gauge,
    /// Unpinned buffers (`PINPOOL_ON_FULL=pageable`), quarantined ones included.
    pageable: u64 = Gauge,
    /// Bytes of the pageable buffers.
    pageable_bytes: u64 = Gauge,
    /// Bytes that users pinned under this pool's limit ([`Pool::pin`](crate::Pool::pin)), not held by the pool.
    user_memory_bytes: u64 = Gauge,
    /// Reserved bytes that are pinned ([`Pool::reserve`](crate::Pool::reserve), `PINPOOL_RESERVE`).
    reserve_bytes: u64 = Gauge,
    /// Reserved bytes that were requested.
    ///
    /// More than `reserve_bytes` while a reserve is being pinned, after the backend refused a step in the background, and after
    /// a lower limit released a part.
    reserve_target_bytes: u64 = Gauge,
    /// Time until the reserve is complete, at the rate so far; none unless it is being pinned in the background.
    #[cfg_attr(feature = "serde", serde(rename = "reserve_eta_seconds", serialize_with = "super::serial::optional_seconds"))]
    reserve_eta: Option<Duration> = Gauge,
    /// Mappings held from the backend. Under `vmm`, `register` and `cuda` each counts towards `vm.max_map_count`.
    mappings: u64 = Gauge,
    /// Regions of one buffer, pinned after the backend had refused a larger region.
    smaller_regions: u64 = Counter,
    /// Pinned buffers that ceased to exist, by reason.
    evictions: EvictionReasons = Group,
    /// Calls that pinned memory.
    pin: CallStats = Group,
    /// Calls that unpinned memory.
    unpin: CallStats = Group,
    /// Calls that moved granules to another address.
    remap: CallStats = Group,
}

group! {
    /// Copies that were running when their buffers were returned. Buffers still in use are not counted.
    CopyStats;
    /// Returned buffers that a device may still be using, or that wait to be zeroed (`PINPOOL_ZERO`).
    in_flight: u64 = Gauge,
    /// Bytes of the buffers in flight.
    in_flight_bytes: u64 = Gauge,
    /// Time since the return of the buffer that has been in flight longest.
    #[cfg_attr(feature = "serde", serde(rename = "oldest_age_seconds", serialize_with = "super::serial::optional_seconds"))]
    oldest_age: Option<Duration> = Gauge,
    /// ID of the stream of that buffer's copy (`cuStreamGetId`, not a handle); `None` if unknown.
    oldest_stream_id: Option<u64> = Label,
    /// Time from a buffer's return until the pool found its copies completed (up to 0.1 s late), or zeroed it (`PINPOOL_ZERO`).
    time: Histogram = Histogram,
    /// Pinned bytes of this process's stream timelines: 4096 bytes per 64 streams, shared by all pools, outside every limit.
    timeline_bytes: u64 = Gauge,
}

group! {
    /// Limits, and how often the limit on idle buffers changed.
    LimitStats;
    /// The limit on held bytes (`PINPOOL_MAX_BYTES`); none if unlimited.
    max_bytes: Option<u64> = Gauge,
    /// The limit on idle buffers (`PINPOOL_POOL_SIZE_LIMIT`, raised and lowered automatically).
    pool_size_limit: u64 = Gauge,
    /// Checks of the limit on idle buffers, one per 1000 evictions.
    checks: u64 = Counter,
    /// Checks that raised the limit on idle buffers.
    raises: u64 = Counter,
    /// Times that the limit on idle buffers was lowered.
    reductions: u64 = Counter,
    /// The limit shared by the processes of this host, if the pool takes part in one (`PINPOOL_LEDGER`).
    shared: Option<SharedLimitStats> = Group,
}

group! {
    /// A limit shared by several processes (`PINPOOL_LEDGER`).
    SharedLimitStats;
    /// The name of the shared limit.
    name: String = Label,
    /// The limit on the bytes of all pools that share it; none if unlimited.
    max_bytes: Option<u64> = Gauge,
    /// Live pools that share the limit, this one included.
    pools: u64 = Gauge,
    /// Bytes that these pools hold, pin or unpin.
    held_bytes: u64 = Gauge,
    /// Bytes that this pool holds.
    own_bytes: u64 = Gauge,
    /// Idle bytes of the other pools, as of their last maintenance.
    others_idle_bytes: u64 = Gauge,
    /// Bytes that the other pools' blocked requests and reserves lack.
    others_wanted_bytes: u64 = Gauge,
}

group! {
    /// Calls of one kind to the driver or kernel.
    #[derive(Copy)]
    CallStats;
    /// Successful calls.
    count: u64 = Counter,
    /// Failed calls.
    failures: u64 = Counter,
    /// Requested bytes of the successful calls.
    bytes: u64 = Counter,
    /// Duration of each call, failed calls and waits for other threads' calls included.
    time: Histogram = Histogram,
}

group! {
    /// Why requests were not served by an idle buffer.
    ///
    /// Under `PINPOOL_ROUNDING=exact` or `pow2` the pool forgets classes without buffers once there are more than 1024.
    #[derive(Copy)]
    MissReasons;
    /// Misses of a size class that never had a buffer. Harmless once they stop.
    first_of_size: u64 = Counter,
    /// Misses of a size class that once had more buffers than now. See the evictions for the reason.
    evicted_earlier: u64 = Counter,
    /// Misses while all buffers of the size class were in use or in flight, more than ever before.
    ///
    /// All misses with pageable memory count here.
    all_in_use: u64 = Counter,
}

group! {
    /// Why pinned buffers ceased to exist: their memory went to the arena or to the backend.
    #[derive(Copy)]
    EvictionReasons;
    /// Buffers over the limit on idle buffers. TensorFlow's `evicted`.
    over_limit: u64 = Counter,
    /// Buffers evicted for their memory: for a request, to stay within a byte limit, or because the system was short of memory.
    reclaimed: u64 = Counter,
    /// Buffers idle for too long.
    expired: u64 = Counter,
    /// Buffers evicted for another reason: `trim`, `clear`, `close`, a lowered limit on idle buffers, or while sizes vary.
    other: u64 = Counter,
}

impl ToStatistics for Option<SharedLimitStats> {
    fn statistics(&self, path: String, help: &'static str, kind: Kind) -> Vec<Statistic> {
        self.as_ref().map(|shared| shared.statistics(path, help, kind)).unwrap_or_default()
    }
}

impl EvictionReasons {
    /// Returns the sum of all reasons.
    pub fn total(&self) -> u64 {
        self.over_limit + self.reclaimed + self.expired + self.other
    }
}

impl RequestStats {
    /// Returns the share of the served requests that were hits, from 0 to 1; 0 before the first request.
    #[allow(clippy::cast_precision_loss)] // A rate.
    pub fn hit_rate(&self) -> f64 {
        self.hits as f64 / self.served.max(1) as f64
    }
}

impl MemoryStats {
    /// Returns the share of the requested reserve that is pinned, from 0 to 1; 1 if nothing was reserved.
    #[allow(clippy::cast_precision_loss)] // A rate.
    pub fn reserve_fraction(&self) -> f64 {
        if self.reserve_target_bytes == 0 { 1.0 } else { self.reserve_bytes as f64 / self.reserve_target_bytes as f64 }
    }
}
