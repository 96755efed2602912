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
//! of their own, without the calls of the arena that they share (`page_locked`, `released`, `call.failures`, `create_time`,
//! `release_time`, `move_time`): those are the parent's, so that sums are right. Causes and owners are reported of the pool alone.
//! Pools of one name share their series: give partitions names of their own. Prometheus sees dots as underscores, the unit, and
//! `_total` behind counters ([`Metric::prometheus_name`]): `pinpool_gets_total{pool_name="train",backend="vmm",result="hit"}`. Its
//! exporter for the facade writes them so `with_recommended_naming(true)`; [`prometheus_text`] needs no recorder, and
//! `pinpool metrics` no code: it serves the pools of processes that run.
//!
//! | name | kind | further labels |
//! | --- | --- | --- |
//! | `pinpool.cause` | gauge | `cause`: one of [`Why::CAUSES`](pinpool::Why::CAUSES); 1 for the one that holds |
//! | `pinpool.alarm` | gauge | 1 if something is wrong that a cure mends |
//! | `pinpool.buffers` | gauge | `state`: `used`, `idle`, `in_flight`, `lost` |
//! | `pinpool.bytes` | gauge | `state`: the same and `free`, which the next buffers are carved from |
//! | `pinpool.owner.buffers`, `pinpool.owner.bytes`, `pinpool.owner.oldest_time` | gauge | `tag`: who has buffers that are out |
//! | `pinpool.unpinned.buffers`, `pinpool.unpinned.bytes` | gauge | of the buffers above, those that are not pinned |
//! | `pinpool.held.bytes`, `pinpool.awaiting_release.bytes` | gauge | |
//! | `pinpool.reserve.bytes`, `pinpool.reserve.asked.bytes` | gauge | of the reserve, what is pinned; what was asked for |
//! | `pinpool.max.bytes` | gauge | the ceiling; missing without one |
//! | `pinpool.idle.max` | gauge | the count limit |
//! | `pinpool.pending_requests` | gauge | |
//! | `pinpool.in_flight.oldest_time` | gauge, seconds | |
//! | `pinpool.gets` | counter | `result`: `hit`, `miss`, `failed` |
//! | `pinpool.misses` | counter | `reason`: a field of [`MissReasons`](pinpool::stats::MissReasons) |
//! | `pinpool.evictions` | counter | `reason`: a field of [`EvictionReasons`](pinpool::stats::EvictionReasons) |
//! | `pinpool.timeouts`, `pinpool.fallbacks`, `pinpool.limit.raises` | counter | |
//! | `pinpool.requested.bytes`, `pinpool.given.bytes` | counter | [`RequestStats`](pinpool::stats::RequestStats) |
//! | `pinpool.page_locked.bytes`, `pinpool.released.bytes` | counter | sums over all calls |
//! | `pinpool.call.failures` | counter | `call`: `pin`, `unpin`, `remap` |
//! | `pinpool.create_time`, `pinpool.release_time`, `pinpool.move_time` | histogram, seconds | a page-lock; a release; a move |
//! | `pinpool.wait_time`, `pinpool.use_time`, `pinpool.in_flight_time` | histogram, seconds | as in [`Stats`](pinpool::Stats) |
//!
//! # Histograms
//!
//! The pool counts durations in powers of two ([`Histogram`](pinpool::stats::Histogram)), since a recorder that is called at each event would run inside
//! gets. A report passes on what came since the last one, each duration as the middle of its power of two: counts are exact,
//! and the sum and a single value are off by a factor of 1.42 at most. An exporter whose buckets end at
//! [`bucket_bounds`] shows exactly what the pool counted.

use std::f64::consts::SQRT_2;

use metrics::{Label, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};
use parking_lot::Mutex;
use pinpool::{Owner, Pool};
use serde_json::{Value, json};

mod figures;
mod text;

use self::figures::{Durations, Figure};
pub use self::figures::{Kind, METRICS, Metric, bucket_bounds};
pub use self::text::prometheus_text;

/// Gives the recorder the unit and the description of each metric. [`Reporter::new`] does it for the recorder of that moment.
pub fn describe() {
    for &Metric { name, kind, unit, description, .. } in METRICS {
        match kind {
            Kind::Gauge => describe_gauge!(name, unit, description),
            Kind::Counter => describe_counter!(name, unit, description),
            Kind::Histogram => describe_histogram!(name, unit, description),
        }
    }
}

/// Passes the figures of one pool and its partitions on. Keeps the pool: drop it with the other handles.
#[derive(Debug)]
pub struct Reporter {
    pool: Pool,
    reported: Mutex<Reported>,
}

/// What was passed on.
#[derive(Debug, Default)]
struct Reported {
    /// Of each pool's durations, by metric. The pool is known by its number, since partitions may share a name.
    times: Vec<(u64, &'static str, Durations)>,
    /// Tags with buffers: of those that hold none any more 0 is passed on.
    tags: Vec<String>,
}

/// Seconds, and how many events took as long.
type News = Vec<(f64, usize)>;

/// One call of the recorder.
struct Passed {
    metric: &'static Metric,
    labels: Vec<Label>,
    figure: Figure,
    /// Of durations, those that came since the last report.
    news: News,
}

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
        let mut objects = vec![self.object(&mut reported.tags)];
        objects.extend(self.pool.partition_stats().iter().map(|stats| json!(stats)));
        let passed: Vec<_> = objects.iter().flat_map(|object| passed(object, &mut reported.times)).collect();
        let is_there = |number: u64| objects.iter().any(|object| object["number"].as_u64() == Some(number));
        reported.times.retain(|(number, ..)| is_there(*number));
        drop(reported);
        passed.into_iter().for_each(Passed::record);
    }

    /// What the pool's socket would send.
    fn object(&self, tags: &mut Vec<String>) -> Value {
        let (mut object, why, dump) = (json!(self.pool.stats()), self.pool.why(), self.pool.dump());
        object["why"] = json!({ "cause": why.cause(), "is_alarm": why.is_alarm() });
        let of = |Owner { tag, buffers, bytes, oldest, .. }: &Owner| json!({ "tag": tag, "buffers": buffers, "bytes": bytes, "oldest_seconds": oldest.map(|age| age.as_secs_f64()) });
        let mut owners: Vec<_> = dump.owners().iter().map(of).collect();
        let is_owner = |tag: &String| dump.owners().iter().any(|owner| owner.tag == *tag);
        let gone = tags.iter().filter(|tag| !is_owner(tag));
        owners.extend(gone.map(|tag| json!({ "tag": tag, "buffers": 0, "bytes": 0, "oldest_seconds": 0 })));
        *tags = dump.owners().iter().map(|owner| owner.tag.clone()).collect();
        object["owners"] = owners.into();
        object
    }
}

/// What a report passes on of one pool.
fn passed(object: &Value, reported: &mut Vec<(u64, &'static str, Durations)>) -> Vec<Passed> {
    let text = |name: &str| object[name].as_str().unwrap_or_default().to_owned();
    let pool = [Label::new("pool.name", text("name")), Label::new("backend", text("backend"))];
    let number = object["number"].as_u64().unwrap_or(0);
    let mut all = Vec::new();
    for metric in METRICS {
        for (label, figure) in metric.samples(object) {
            let mut labels = pool.to_vec();
            labels.extend(label.map(|(name, value)| Label::new(name, value)));
            let news =
                if let Figure::Durations(now) = &figure { news_of(number, metric, now, reported) } else { News::new() };
            all.push(Passed { metric, labels, figure, news });
        }
    }
    all
}

impl Passed {
    #[allow(clippy::cast_precision_loss)] // Gauges are floating.
    fn record(self) {
        let Self { metric: Metric { name, kind, .. }, labels, figure, news } = self;
        match (kind, figure) {
            (Kind::Gauge, Figure::Count(count)) => gauge!(*name, labels).set(count as f64),
            (Kind::Gauge, Figure::Number(number)) => gauge!(*name, labels).set(number),
            (Kind::Counter, Figure::Count(count)) => counter!(*name, labels).absolute(count),
            (Kind::Histogram, Figure::Durations(_)) => {
                // Also without an event, so that the series is there.
                let histogram = histogram!(*name, labels);
                news.into_iter().for_each(|(seconds, events)| histogram.record_many(seconds, events));
            }
            // The table has no other pair.
            _ => {}
        }
    }
}

/// The durations that came since the last report.
fn news_of(
    number: u64,
    metric: &'static Metric,
    now: &Durations,
    reported: &mut Vec<(u64, &'static str, Durations)>,
) -> News {
    match reported.iter_mut().find(|(of, name, _)| (*of, *name) == (number, metric.name)) {
        Some((.., before)) => since(now, &std::mem::replace(before, now.clone())),
        None => {
            reported.push((number, metric.name, now.clone()));
            since(now, &Durations::default())
        }
    }
}

fn since(now: &Durations, before: &Durations) -> News {
    let bounds = bucket_bounds();
    let mut news = News::new();
    for (at, count) in now.buckets.iter().enumerate() {
        let middle = match bounds.get(at) {
            Some(bound) if at == 0 => bound / 2.0,
            Some(bound) => bound / SQRT_2,
            None => now.max_seconds,
        };
        let before = before.buckets.get(at).copied().unwrap_or(0);
        if let Ok(more @ 1..) = usize::try_from(count.saturating_sub(before)) {
            news.push((middle, more));
        }
    }
    news
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_new_is_passed_on_once_as_the_middle_of_its_power_of_two() {
        let durations = |nanos: &[u64]| {
            let mut times = pinpool::stats::Histogram::default();
            nanos.iter().for_each(|nanos| times.record(std::time::Duration::from_nanos(*nanos)));
            let object = json!({ "wait_time": times });
            let metric = METRICS.iter().find(|metric| metric.name == "pinpool.wait_time").unwrap();
            let (_, Figure::Durations(durations)) = metric.samples(&object).remove(0) else { panic!() };
            durations
        };
        let (before, now) = (durations(&[10, 700, 700]), durations(&[10, 700, 700, 800, 5_000]));
        let news = since(&now, &before);
        assert_eq!(news.iter().map(|(_, events)| *events).collect::<Vec<_>>(), [1, 1]);
        let (low, high) = (news[0].0 * 1e9, news[1].0 * 1e9);
        assert!(512.0 < low && low < 1024.0 && 4096.0 < high && high < 8192.0, "{news:?}");
        assert_eq!(since(&now, &now), []);
    }
}
