//! Each metric, and the location of its value in the JSON object of a pool's socket.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use metrics::Unit;
use pinpool::Stats;
use pinpool::stats::Histogram;
use pinpool::unstable::{Kind, Statistic};
use serde_json::Value;

/// One metric.
#[derive(Debug)]
pub(crate) struct Metric {
    /// The name in the facade.
    pub(crate) name: String,
    pub(crate) kind: Kind,
    pub(crate) unit: Unit,
    pub(crate) help: &'static str,
    from: ValueSource,
}

/// The source of a metric's values.
#[derive(Debug)]
enum ValueSource {
    /// One value at this JSON pointer.
    At(String),
    /// A field of each tag that holds buffers.
    Holders(&'static str),
    /// One series per cause: 1 for the current cause, 0 for the rest.
    Causes,
}

/// Every metric: the statistics of the pool, its diagnosis, and what each tag holds.
pub(crate) static METRICS: LazyLock<Vec<Metric>> = LazyLock::new(|| {
    let gauge =
        |name: &str, unit, help, from| Metric { name: format!("pinpool.{name}"), kind: Kind::Gauge, unit, help, from };
    let mut metrics = vec![
        gauge("cause", Unit::Count, "1 for the cause in the pool's diagnosis, 0 for the others", ValueSource::Causes),
        gauge("alarm", Unit::Count, "1 if the diagnosis is an alarm", ValueSource::At("/why/is_alarm".into())),
        gauge("holder.buffers", Unit::Count, "Buffers in use or in flight, by tag", ValueSource::Holders("buffers")),
        gauge("holder.bytes", Unit::Bytes, "Bytes in use or in flight, by tag", ValueSource::Holders("bytes")),
        gauge(
            "holder.oldest_age",
            Unit::Seconds,
            "Age of the oldest buffer in use, by tag",
            ValueSource::Holders("oldest_age_seconds"),
        ),
    ];
    let mut all = Stats::default();
    all.limits.shared = Some(Default::default());
    let statistics = all.unstable_list().into_iter().filter(|statistic| statistic.kind != Kind::Label);
    metrics.extend(statistics.map(Metric::from));
    metrics
});

impl From<Statistic> for Metric {
    fn from(Statistic { path, help, kind, unit, .. }: Statistic) -> Self {
        use pinpool::unstable::Unit as Of;
        let unit = match unit {
            Of::Count => Unit::Count,
            Of::Bytes => Unit::Bytes,
            Of::Seconds => Unit::Seconds,
        };
        let suffix = if unit == Unit::Seconds && kind == Kind::Gauge { "_seconds" } else { "" };
        let from = ValueSource::At(format!("/{}{suffix}", path.replace('.', "/")));
        Self { name: format!("pinpool.{path}"), kind, unit, help, from }
    }
}

impl Metric {
    /// Returns the name in Prometheus, with the unit, and with `_total` if the metric is a counter.
    pub(crate) fn prometheus_name(&self) -> String {
        let mut name = self.name.replace('.', "_");
        for (suffix, applies) in [
            ("_bytes", self.unit == Unit::Bytes),
            ("_seconds", self.unit == Unit::Seconds),
            ("_total", self.kind == Kind::Counter),
        ] {
            if applies && !name.ends_with(suffix) {
                name += suffix;
            }
        }
        name
    }

    /// Returns the samples of this metric in `object`, each with its further label, if any.
    pub(crate) fn samples(&self, object: &Value) -> Vec<(Option<(&'static str, String)>, Sample)> {
        match &self.from {
            ValueSource::At(pointer) => match object.pointer(pointer) {
                // A missing duration, such as the age of a copy that has completed, is 0. A missing limit has no series.
                Some(Value::Null) if self.unit == Unit::Seconds => vec![(None, Sample::Number(0.0))],
                value => value.and_then(Sample::from_json).map(|sample| (None, sample)).into_iter().collect(),
            },
            ValueSource::Holders(field) => {
                // Two holders may have the same tag.
                let mut tags = BTreeMap::new();
                for holder in object["holders"].as_array().into_iter().flatten() {
                    let (Some(tag), Some(sample)) = (holder["tag"].as_str(), Sample::from_json(&holder[field])) else {
                        continue;
                    };
                    tags.entry(tag).and_modify(|sum: &mut Sample| sum.add(&sample)).or_insert(sample);
                }
                tags.into_iter().map(|(tag, sample)| (Some(("tag", tag.to_owned())), sample)).collect()
            }
            ValueSource::Causes => {
                let Some(found) = object.pointer("/why/cause").and_then(Value::as_str) else { return Vec::new() };
                let of = |&cause: &&str| (Some(("cause", cause.to_owned())), Sample::Count(u64::from(cause == found)));
                pinpool::Cause::NAMES.iter().map(of).collect()
            }
        }
    }
}

/// A value at one moment.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Sample {
    Count(u64),
    Number(f64),
    Durations(Durations),
}

impl Sample {
    /// Adds `other` to a count. Two numbers are ages, and the larger one is kept.
    fn add(&mut self, other: &Self) {
        match (self, other) {
            (Self::Count(sum), Self::Count(count)) => *sum += count,
            (Self::Number(most), Self::Number(number)) => *most = most.max(*number),
            _ => {}
        }
    }

    fn from_json(value: &Value) -> Option<Self> {
        match value {
            Value::Bool(value) => Some(Self::Count(u64::from(*value))),
            Value::Number(number) => number.as_u64().map(Self::Count).or_else(|| number.as_f64().map(Self::Number)),
            Value::Object(_) => Durations::from_json(value).map(Self::Durations),
            _ => None,
        }
    }
}

/// Durations in the buckets of [`Histogram`].
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Durations {
    pub(crate) count: u64,
    pub(crate) total_seconds: f64,
    pub(crate) max_seconds: f64,
    /// One count per bound, and one count of the durations above the last bound.
    pub(crate) buckets: Vec<u64>,
}

impl Durations {
    fn from_json(value: &Value) -> Option<Self> {
        let bounds = bucket_bounds();
        let mut buckets = vec![0; bounds.len() + 1];
        for bucket in value["buckets"].as_array()? {
            // A bound that was printed and parsed may differ in its last digit.
            let is_bound = |bound: &f64| bucket[0].as_f64().is_some_and(|read| (read / bound - 1.0).abs() < 0.1);
            buckets[bounds.iter().position(is_bound).unwrap_or(bounds.len())] = bucket[1].as_u64()?;
        }
        let (count, seconds) = (value["count"].as_u64()?, |name: &str| value[name].as_f64());
        Some(Self { count, total_seconds: seconds("total_seconds")?, max_seconds: seconds("max_seconds")?, buckets })
    }
}

/// Returns the bounds between the buckets of all histograms in seconds, for an exporter that must be configured with them.
pub fn bucket_bounds() -> Vec<f64> {
    Histogram::default().buckets().filter_map(|(bound, _)| bound).map(|bound| bound.as_secs_f64()).collect()
}
