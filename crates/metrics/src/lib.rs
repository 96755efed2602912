//! The statistics through the [`metrics`](https://docs.rs/metrics) facade, for any exporter that it has.
//!
//! A [`Reporter`] passes the figures on when its [`report`](Reporter::report) is called: before each scrape, or every few
//! seconds on a thread of the program. No get and no put does anything for it, and without a recorder nothing is kept.
//!
//! ```
//! let pool = pinpool::Pool::builder().without_env().backend(pinpool::Backend::Heap).name("train").build()?;
//! let reporter = pinpool_metrics::Reporter::new(&pool);
//! drop(pool.get(1 << 20)?);
//! reporter.report(); // to the recorder that the program installed
//! # Ok::<(), pinpool::Error>(())
//! ```
//!
//! # Names
//!
//! The metrics have the names of OpenTelemetry's connection pools where one fits, behind `pinpool.`; [`METRICS`] has all of
//! them. Each has the labels `pool.name` (empty for a pool without a name) and `backend`; partitions are reported as pools
//! of their own, without the calls of the arena that they share (`pinned`, `released`, `call.failures`, `create_time`,
//! `release_time`): those are the parent's, so that sums are right. Pools of one name share their series: give partitions
//! names of their own. Exporters write dots as they must: Prometheus sees
//! `pinpool_count{pool_name="train",backend="vmm",state="used"}`.
//!
//! | name | kind | further labels |
//! | --- | --- | --- |
//! | `pinpool.count` | gauge | `state`: `used`, `idle`, `in_flight`, `lost` |
//! | `pinpool.bytes` | gauge | `state`: the same and `free`, which the next buffers are carved from |
//! | `pinpool.unpinned.count`, `pinpool.unpinned.bytes` | gauge | of the buffers above, those that are not pinned |
//! | `pinpool.held.bytes`, `pinpool.awaiting_release.bytes` | gauge | |
//! | `pinpool.reserve.bytes`, `pinpool.reserve.asked.bytes` | gauge | of the reserve, what is pinned; what was asked for |
//! | `pinpool.max.bytes` | gauge | the ceiling; missing without one |
//! | `pinpool.idle.max` | gauge | the count limit |
//! | `pinpool.pending_requests` | gauge | |
//! | `pinpool.in_flight.oldest_time` | gauge, seconds | |
//! | `pinpool.gets` | counter | `result`: `hit`, `miss`, `failed` |
//! | `pinpool.misses` | counter | `reason`: a field of [`MissReasons`](pinpool::MissReasons) |
//! | `pinpool.evictions` | counter | `reason`: a field of [`EvictionReasons`](pinpool::EvictionReasons) |
//! | `pinpool.timeouts`, `pinpool.fallbacks`, `pinpool.limit.raises` | counter | |
//! | `pinpool.requested.bytes`, `pinpool.given.bytes` | counter | [`Requested`](pinpool::Requested) |
//! | `pinpool.pinned.bytes`, `pinpool.released.bytes` | counter | sums over all calls |
//! | `pinpool.call.failures` | counter | `call`: `pin`, `unpin`, `remap` |
//! | `pinpool.create_time`, `pinpool.release_time` | histogram, seconds | a page-lock; a release |
//! | `pinpool.wait_time`, `pinpool.use_time`, `pinpool.in_flight_time` | histogram, seconds | as in [`Stats`] |
//!
//! # Histograms
//!
//! The pool counts durations in powers of two ([`Histogram`]), since a recorder that is called at each event would run inside
//! gets. A report passes on what came since the last one, each duration as the middle of its power of two: counts are exact,
//! and the sum and a single value are off by a factor of 1.42 at most. An exporter whose buckets end at
//! [`bucket_bounds`] shows exactly what the pool counted.

use std::f64::consts::SQRT_2;
use std::time::Duration;

use metrics::{Label, Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};
use parking_lot::Mutex;
use pinpool::{Histogram, Pool, Stats};

/// What a metric is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A figure of now.
    Gauge,
    /// A figure that never falls.
    Counter,
    /// Durations in seconds.
    Histogram,
}

/// One metric.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Metric {
    /// Its name in the facade.
    pub name: &'static str,
    /// What it is.
    pub kind: Kind,
    /// In what it is counted.
    pub unit: Unit,
    /// What it says.
    pub description: &'static str,
}

const fn metric(name: &'static str, kind: Kind, unit: Unit, description: &'static str) -> Metric {
    Metric { name, kind, unit, description }
}

/// Every metric of this crate.
pub const METRICS: &[Metric] = &[
    metric("pinpool.count", Kind::Gauge, Unit::Count, "Buffers by state"),
    metric("pinpool.bytes", Kind::Gauge, Unit::Bytes, "Bytes by state"),
    metric("pinpool.unpinned.count", Kind::Gauge, Unit::Count, "Buffers that are not pinned"),
    metric("pinpool.unpinned.bytes", Kind::Gauge, Unit::Bytes, "Bytes of buffers that are not pinned"),
    metric("pinpool.held.bytes", Kind::Gauge, Unit::Bytes, "Bytes held from the back-end, in any state"),
    metric(
        "pinpool.awaiting_release.bytes",
        Kind::Gauge,
        Unit::Bytes,
        "Free bytes that go back when no copy is in flight",
    ),
    metric("pinpool.reserve.bytes", Kind::Gauge, Unit::Bytes, "Bytes of the reserve that are pinned"),
    metric("pinpool.reserve.asked.bytes", Kind::Gauge, Unit::Bytes, "Bytes of the reserve that were asked for"),
    metric("pinpool.max.bytes", Kind::Gauge, Unit::Bytes, "The ceiling on the bytes held"),
    metric("pinpool.idle.max", Kind::Gauge, Unit::Count, "Most idle buffers that the pool keeps"),
    metric("pinpool.pending_requests", Kind::Gauge, Unit::Count, "Gets that wait for memory now"),
    metric(
        "pinpool.in_flight.oldest_time",
        Kind::Gauge,
        Unit::Seconds,
        "Age of the oldest copy in flight; 0 without one",
    ),
    metric("pinpool.gets", Kind::Counter, Unit::Count, "Gets by result"),
    metric("pinpool.misses", Kind::Counter, Unit::Count, "Misses by reason"),
    metric("pinpool.evictions", Kind::Counter, Unit::Count, "Buffers that left the pool, by reason"),
    metric("pinpool.timeouts", Kind::Counter, Unit::Count, "Gets whose wait ran out"),
    metric("pinpool.fallbacks", Kind::Counter, Unit::Count, "Gets that got memory that is not pinned"),
    metric("pinpool.limit.raises", Kind::Counter, Unit::Count, "Raises of the count limit"),
    metric("pinpool.requested.bytes", Kind::Counter, Unit::Bytes, "Asked for by gets that found nothing idle at once"),
    metric("pinpool.given.bytes", Kind::Counter, Unit::Bytes, "Given to these gets, rounding included"),
    metric("pinpool.pinned.bytes", Kind::Counter, Unit::Bytes, "Page-locked by all calls so far"),
    metric("pinpool.released.bytes", Kind::Counter, Unit::Bytes, "Given back to the system by all calls so far"),
    metric("pinpool.call.failures", Kind::Counter, Unit::Count, "Calls of the back-end that failed"),
    metric("pinpool.create_time", Kind::Histogram, Unit::Seconds, "Calls that page-lock memory"),
    metric("pinpool.release_time", Kind::Histogram, Unit::Seconds, "Calls that give memory back to the system"),
    metric("pinpool.wait_time", Kind::Histogram, Unit::Seconds, "Waits of gets for memory"),
    metric("pinpool.use_time", Kind::Histogram, Unit::Seconds, "From a get that missed to its put"),
    metric("pinpool.in_flight_time", Kind::Histogram, Unit::Seconds, "From a put with copies to their end"),
];

/// Gives the recorder the unit and the description of each metric. [`Reporter::new`] does it for the recorder of that moment.
pub fn describe() {
    for &Metric { name, kind, unit, description } in METRICS {
        match kind {
            Kind::Gauge => describe_gauge!(name, unit, description),
            Kind::Counter => describe_counter!(name, unit, description),
            Kind::Histogram => describe_histogram!(name, unit, description),
        }
    }
}

/// The bounds between the buckets of all histograms, in seconds, for an exporter that wants to be told.
pub fn bucket_bounds() -> Vec<f64> {
    Histogram::default().buckets().filter_map(|(bound, _)| bound).map(|bound| bound.as_secs_f64()).collect()
}

/// Passes the figures of one pool and its partitions on. Keeps the pool: drop it with the other handles.
#[derive(Debug)]
pub struct Reporter {
    pool: Pool,
    /// What was passed on of each pool's durations.
    reported: Mutex<Vec<Reported>>,
}

/// Histograms of a pool.
const TIMES: usize = 5;
/// The first of them are those of its calls.
const CALL_TIMES: usize = 2;

/// What was passed on of a pool's durations. The pool is known by its number, since partitions may share a name.
#[derive(Debug)]
struct Reported {
    pool: u64,
    times: [Histogram; TIMES],
}

/// A duration, and how many events took as long.
type Durations = Vec<(f64, usize)>;

impl Reporter {
    /// A reporter for `pool`, which describes the metrics to the recorder.
    pub fn new(pool: &Pool) -> Self {
        describe();
        Self { pool: pool.clone(), reported: Mutex::default() }
    }

    /// Passes the figures of now to the recorder: gauges and counters as they are, of the durations what is new. Takes some
    /// microseconds, and the time of the recorder.
    pub fn report(&self) {
        // The figures come under the lock, so that two threads pass no duration on twice; the recorder is called behind it.
        let mut reported = self.reported.lock();
        let mut pools = vec![self.pool.stats()];
        pools.extend(self.pool.partition_stats());
        let news: Vec<_> = pools.iter().map(|stats| news_of(stats, &mut reported)).collect();
        reported.retain(|known| pools.iter().any(|stats| known.pool == stats.number));
        drop(reported);
        for (stats, times) in pools.iter().zip(news) {
            record(stats, times);
        }
    }
}

fn times(stats: &Stats) -> [(&'static str, Histogram); TIMES] {
    [
        ("pinpool.create_time", stats.pin.time),
        ("pinpool.release_time", stats.unpin.time),
        ("pinpool.wait_time", stats.wait_time),
        ("pinpool.use_time", stats.use_time),
        ("pinpool.in_flight_time", stats.in_flight_time),
    ]
}

/// The durations that came since the last report.
fn news_of(stats: &Stats, reported: &mut Vec<Reported>) -> Vec<(&'static str, Durations)> {
    let now = times(stats);
    let passed_on = now.map(|(_, time)| time);
    let before = match reported.iter_mut().find(|known| known.pool == stats.number) {
        Some(known) => std::mem::replace(&mut known.times, passed_on),
        None => {
            reported.push(Reported { pool: stats.number, times: passed_on });
            Default::default()
        }
    };
    now.into_iter().zip(before).map(|((name, now), before)| (name, since(&now, &before))).collect()
}

fn since(now: &Histogram, before: &Histogram) -> Durations {
    let mut least = Duration::ZERO;
    let mut durations = Vec::new();
    for ((bound, count), (_, before)) in now.buckets().zip(before.buckets()) {
        let middle = match bound {
            Some(bound) if least.is_zero() => bound / 2,
            Some(_) => least.mul_f64(SQRT_2),
            None => now.max(),
        };
        if let Ok(more @ 1..) = usize::try_from(count.saturating_sub(before)) {
            durations.push((middle.as_secs_f64(), more));
        }
        least = bound.unwrap_or(least);
    }
    durations
}

#[allow(clippy::cast_precision_loss)] // Gauges are floating.
fn record(stats: &Stats, times: Vec<(&'static str, Durations)>) {
    let is_partition = stats.is_partition;
    let pool =
        vec![Label::new("pool.name", stats.name.clone().unwrap_or_default()), Label::new("backend", stats.backend)];
    let with = |name: &'static str, value: &'static str| {
        let mut labels = pool.clone();
        labels.push(Label::from_static_parts(name, value));
        labels
    };
    let states = [
        ("used", stats.in_use, stats.in_use_bytes),
        ("idle", stats.buffers_in_pool, stats.idle_bytes),
        ("in_flight", stats.in_flight, stats.in_flight_bytes),
        ("lost", stats.lost, stats.lost_bytes),
    ];
    for (state, count, bytes) in states {
        gauge!("pinpool.count", with("state", state)).set(count as f64);
        gauge!("pinpool.bytes", with("state", state)).set(bytes as f64);
    }
    gauge!("pinpool.bytes", with("state", "free")).set(stats.arena_free_bytes as f64);
    for (name, value) in [
        ("pinpool.unpinned.count", stats.fallback_buffers),
        ("pinpool.unpinned.bytes", stats.fallback_bytes),
        ("pinpool.held.bytes", stats.pinned_bytes),
        ("pinpool.awaiting_release.bytes", stats.awaiting_release_bytes),
        ("pinpool.reserve.bytes", stats.reserve_bytes),
        ("pinpool.reserve.asked.bytes", stats.reserve_asked_bytes),
        ("pinpool.idle.max", stats.pool_size_limit),
        ("pinpool.pending_requests", stats.waiting),
    ] {
        gauge!(name, pool.clone()).set(value as f64);
    }
    if let Some(max_bytes) = stats.max_bytes {
        gauge!("pinpool.max.bytes", pool.clone()).set(max_bytes as f64);
    }
    let oldest = stats.oldest_in_flight.unwrap_or_default();
    gauge!("pinpool.in_flight.oldest_time", pool.clone()).set(oldest.as_secs_f64());
    for (result, count) in [("hit", stats.hits), ("miss", stats.misses), ("failed", stats.failed_gets)] {
        counter!("pinpool.gets", with("result", result)).absolute(count);
    }
    for (reason, count) in stats.miss_reasons.by_name() {
        counter!("pinpool.misses", with("reason", reason)).absolute(count);
    }
    for (reason, count) in stats.eviction_reasons.by_name() {
        counter!("pinpool.evictions", with("reason", reason)).absolute(count);
    }
    if !is_partition {
        for (call, calls) in [("pin", &stats.pin), ("unpin", &stats.unpin), ("remap", &stats.remap)] {
            counter!("pinpool.call.failures", with("call", call)).absolute(calls.failures);
        }
        counter!("pinpool.pinned.bytes", pool.clone()).absolute(stats.pin.bytes);
        counter!("pinpool.released.bytes", pool.clone()).absolute(stats.unpin.bytes);
    }
    for (name, value) in [
        ("pinpool.timeouts", stats.timeouts),
        ("pinpool.fallbacks", stats.fallbacks),
        ("pinpool.limit.raises", stats.raises),
        ("pinpool.requested.bytes", stats.requested.bytes),
        ("pinpool.given.bytes", stats.requested.class_bytes),
    ] {
        counter!(name, pool.clone()).absolute(value);
    }
    for (name, durations) in times.into_iter().skip(if is_partition { CALL_TIMES } else { 0 }) {
        // Also without an event, so that the series is there.
        let histogram = histogram!(name, pool.clone());
        durations.into_iter().for_each(|(seconds, events)| histogram.record_many(seconds, events));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_new_is_passed_on_once_as_the_middle_of_its_power_of_two() {
        let mut before = Histogram::default();
        [10, 700, 700].into_iter().for_each(|nanos| before.record(Duration::from_nanos(nanos)));
        let mut now = before;
        [800, 5_000].into_iter().for_each(|nanos| now.record(Duration::from_nanos(nanos)));
        let news = since(&now, &before);
        assert_eq!(news.iter().map(|(_, events)| *events).collect::<Vec<_>>(), [1, 1]);
        let (low, high) = (news[0].0 * 1e9, news[1].0 * 1e9);
        assert!(512.0 < low && low < 1024.0 && 4096.0 < high && high < 8192.0, "{news:?}");
        assert_eq!(since(&now, &now), []);
    }
}
