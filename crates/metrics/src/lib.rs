//! Publishes the statistics of a pool through the [`metrics`](https://docs.rs/metrics) facade, for any of its exporters.
//!
//! A [`Reporter`] publishes the statistics when its [`report`](Reporter::report) is called: before each scrape, or every few
//! seconds on a thread of the program. Requests and returns do no work for it.
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
//! Each quantity in [`Stats`](pinpool::Stats) is a metric: `pinpool.` and the path of the field, for example
//! `pinpool.requests.hits`, `pinpool.memory.held_bytes`, `pinpool.memory.pin.time` (a histogram) or `pinpool.limits.max_bytes`.
//! The field's documentation is the description of the metric. An unlimited pool has no series for its limit. In addition:
//!
//! | name | further label | value |
//! | --- | --- | --- |
//! | `pinpool.cause` | `cause`: one of [`Cause::NAMES`](pinpool::Cause::NAMES) | 1 for the current cause |
//! | `pinpool.alarm` | | 1 if the diagnosis is an alarm |
//! | `pinpool.holder.buffers`, `pinpool.holder.bytes`, `pinpool.holder.oldest_age` | `tag` | what each tag holds |
//!
//! Each series has the labels `pool.name` (empty for an unnamed pool) and `backend`. Partitions are reported as separate pools;
//! driver calls, causes and holders are counted only in their pool. Give each pool its own name: pools with the same name overwrite each other's series.
//!
//! Prometheus replaces dots by underscores and appends the unit, and `_total` to counters:
//! `pinpool_requests_hits_total{pool_name="train",backend="vmm"}`. Its exporter for the facade does so after
//! `with_recommended_naming(true)`. `pinpool metrics` serves the pools of running processes without any code.
//!
//! # Histograms
//!
//! The pool counts durations in powers of two ([`Histogram`](pinpool::stats::Histogram)). A report passes on the durations since
//! the last report, each as the middle of its power of two: counts are exact, the sum and single values are off by a factor of at
//! most 1.42 (more in the first and last bucket). An exporter with buckets that end at [`bucket_bounds`] shows exactly what the
//! pool counted.

use std::collections::HashMap;
use std::f64::consts::SQRT_2;

use metrics::{Label, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};
use parking_lot::Mutex;
use pinpool::unstable::Kind;
use pinpool::{Holder, Pool};
use serde_json::{Value, json};

mod metric;
mod text;

pub use self::metric::bucket_bounds;
use self::metric::{Durations, METRICS, Metric, Sample};
pub use self::text::prometheus_text;

/// Describes each metric, with its unit, to the current recorder. [`Reporter::new`] calls it.
pub fn describe_metrics() {
    for Metric { name, kind, unit, help, .. } in &*METRICS {
        match kind {
            Kind::Counter => describe_counter!(name.clone(), *unit, *help),
            Kind::Histogram => describe_histogram!(name.clone(), *unit, *help),
            _ => describe_gauge!(name.clone(), *unit, *help),
        }
    }
}

/// Passes the statistics of one pool and its partitions to the recorder. Holds a handle of the pool.
#[derive(Debug)]
pub struct Reporter {
    pool: Pool,
    reported: Mutex<Reported>,
}

/// The content of the last report.
#[derive(Debug, Default)]
struct Reported {
    /// Durations by number of the pool and name of the metric. Partitions may share a name, but not a number.
    times: HashMap<(u64, &'static str), Durations>,
    /// Tags with buffers. A tag without buffers is reported once as 0.
    tags: Vec<String>,
}

impl Reporter {
    /// Returns a reporter for `pool`, which describes the metrics to the recorder.
    pub fn new(pool: &Pool) -> Self {
        describe_metrics();
        Self { pool: pool.clone(), reported: Mutex::default() }
    }

    /// Passes the current statistics to the recorder: gauges and counters as they are, and new durations.
    pub fn report(&self) {
        // Locked, so that two threads do not pass a duration on twice.
        let Reported { times, tags } = &mut *self.reported.lock();
        let mut objects = vec![self.object(tags)];
        objects.extend(self.pool.partition_stats().iter().map(|stats| json!(stats)));
        objects.iter().for_each(|object| publish(object, times));
        let exists = |number: u64| objects.iter().any(|object| object["number"].as_u64() == Some(number));
        times.retain(|(number, _), _| exists(*number));
    }

    /// Returns the part of the socket's object that the metrics read: the statistics, the cause, and all holders.
    fn object(&self, tags: &mut Vec<String>) -> Value {
        let (mut object, why, dump) = (json!(self.pool.stats()), self.pool.diagnose(), self.pool.dump());
        object["why"] = json!({ "cause": why.cause.name(), "is_alarm": why.is_alarm });
        let of = |holder: &Holder| {
            let oldest = holder.oldest_age.map(|age| age.as_secs_f64());
            json!({ "tag": holder.tag, "buffers": holder.buffers, "bytes": holder.bytes, "oldest_age_seconds": oldest })
        };
        let mut holders: Vec<_> = dump.holders().iter().map(of).collect();
        let is_holder = |tag: &String| dump.holders().iter().any(|holder| holder.tag == *tag);
        let gone = tags.iter().filter(|tag| !is_holder(tag));
        holders.extend(gone.map(|tag| json!({ "tag": tag, "buffers": 0, "bytes": 0, "oldest_age_seconds": 0 })));
        *tags = dump.holders().iter().map(|holder| holder.tag.clone()).collect();
        object["holders"] = holders.into();
        object
    }
}

/// Passes the statistics of one pool to the recorder.
#[allow(clippy::cast_precision_loss)] // Gauges are floating.
fn publish(object: &Value, reported: &mut HashMap<(u64, &'static str), Durations>) {
    let text = |name: &str| object[name].as_str().unwrap_or_default().to_owned();
    let pool = [Label::new("pool.name", text("name")), Label::new("backend", text("backend"))];
    let number = object["number"].as_u64().unwrap_or(0);
    for metric in &*METRICS {
        let name = metric.name.as_str();
        for (label, sample) in metric.samples(object) {
            let labels: Vec<_> =
                pool.iter().cloned().chain(label.map(|(name, value)| Label::new(name, value))).collect();
            match (metric.kind, sample) {
                (Kind::Counter, Sample::Count(count)) => counter!(name, labels).absolute(count),
                (_, Sample::Count(count)) => gauge!(name, labels).set(count as f64),
                (_, Sample::Number(number)) => gauge!(name, labels).set(number),
                (_, Sample::Durations(now)) => {
                    // Done even without new durations, so that the series exists.
                    let histogram = histogram!(name, labels);
                    let before = reported.insert((number, name), now.clone()).unwrap_or_default();
                    let new = new_durations(&now, &before).into_iter();
                    new.for_each(|(seconds, events)| histogram.record_many(seconds, events));
                }
            }
        }
    }
}

/// Returns the durations in `now` that are not in `before`: the middle of each bucket, and its number of new durations.
fn new_durations(now: &Durations, before: &Durations) -> Vec<(f64, usize)> {
    let bounds = bucket_bounds();
    let mut new = Vec::new();
    for (at, count) in now.buckets.iter().enumerate() {
        let middle = match bounds.get(at) {
            Some(bound) if at == 0 => bound / 2.0,
            Some(bound) => bound / SQRT_2,
            None => now.max_seconds,
        };
        let before = before.buckets.get(at).copied().unwrap_or(0);
        if let Ok(more @ 1..) = usize::try_from(count.saturating_sub(before)) {
            new.push((middle, more));
        }
    }
    new
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_durations_are_reported_once_as_the_middle_of_their_bucket() {
        let durations = |nanos: &[u64]| {
            let mut times = pinpool::stats::Histogram::default();
            nanos.iter().for_each(|nanos| times.record(std::time::Duration::from_nanos(*nanos)));
            let object = json!({ "requests": { "wait_time": times } });
            let metric = METRICS.iter().find(|metric| metric.name == "pinpool.requests.wait_time").unwrap();
            let (_, Sample::Durations(durations)) = metric.samples(&object).remove(0) else { panic!() };
            durations
        };
        let (before, now) = (durations(&[10, 700, 700]), durations(&[10, 700, 700, 800, 5_000]));
        let news = new_durations(&now, &before);
        assert_eq!(news.iter().map(|(_, events)| *events).collect::<Vec<_>>(), [1, 1]);
        let (low, high) = (news[0].0 * 1e9, news[1].0 * 1e9);
        assert!(512.0 < low && low < 1024.0 && 4096.0 < high && high < 8192.0, "{news:?}");
        assert_eq!(new_durations(&now, &now), []);
    }
}
