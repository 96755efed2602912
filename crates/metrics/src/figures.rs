//! Each metric with where its figure stands in what a pool shows of itself: the object of JSON that its socket sends.

use metrics::Unit;
use pinpool::stats::Histogram;
use serde_json::Value;

/// What a metric is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
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
    from: From,
}

/// Where a figure stands.
#[derive(Debug, Clone, Copy)]
enum From {
    /// Here; without it there is no series.
    At(&'static str),
    /// Here; 0 without it.
    OrZero(&'static str),
    /// Here; a partition has none, since its parent's are the calls of both.
    OfArena(&'static str),
    /// A series for each value of a label.
    Each(&'static str, &'static [(&'static str, &'static str)]),
    /// The same, without a partition's.
    EachOfArena(&'static str, &'static [(&'static str, &'static str)]),
    /// A series for each field of the object here, whose names are values of a label.
    Fields(&'static str, &'static str),
    /// A series for each tag that holds buffers.
    Owners(&'static str),
    /// A series for each cause that a judge names: 1 for the one that holds.
    Causes,
}

impl Metric {
    /// Its name as Prometheus wants it: with its unit, and `_total` behind a counter.
    pub fn prometheus_name(&self) -> String {
        let mut name = self.name.replace('.', "_");
        for (suffix, is_due) in [
            ("_bytes", self.unit == Unit::Bytes),
            ("_seconds", self.unit == Unit::Seconds),
            ("_total", self.kind == Kind::Counter),
        ] {
            if is_due && !name.ends_with(suffix) {
                name += suffix;
            }
        }
        name
    }

    /// The samples of this metric in `object`: further labels and the figure.
    pub(crate) fn samples(&self, object: &Value) -> Vec<(Option<(&'static str, String)>, Figure)> {
        let is_partition = object["is_partition"].as_bool().unwrap_or(false);
        let figure = |pointer: &str| object.pointer(pointer).and_then(Figure::of);
        let each = |label: &'static str, of: &[(&'static str, &'static str)]| {
            let of =
                of.iter().filter_map(|(value, pointer)| Some((Some((label, (*value).to_owned())), figure(pointer)?)));
            of.collect()
        };
        match self.from {
            From::OfArena(_) | From::EachOfArena(..) if is_partition => Vec::new(),
            From::At(pointer) | From::OfArena(pointer) => {
                figure(pointer).map(|figure| (None, figure)).into_iter().collect()
            }
            From::OrZero(pointer) => vec![(None, figure(pointer).unwrap_or(Figure::Number(0.0)))],
            From::Each(label, of) | From::EachOfArena(label, of) => each(label, of),
            From::Fields(label, pointer) => {
                let fields = object.pointer(pointer).and_then(Value::as_object).into_iter().flatten();
                fields.filter_map(|(name, value)| Some((Some((label, name.clone())), Figure::of(value)?))).collect()
            }
            From::Owners(field) => {
                let owners = object["owners"].as_array().into_iter().flatten();
                let of = |owner: &Value| {
                    Some((Some(("tag", owner["tag"].as_str()?.to_owned())), Figure::of(&owner[field])?))
                };
                owners.filter_map(of).collect()
            }
            From::Causes => {
                let Some(held) = object.pointer("/why/cause").and_then(Value::as_str) else { return Vec::new() };
                let of = |cause: &str| {
                    (Some(("cause", cause.to_owned())), Figure::Number(f64::from(u8::from(cause == held))))
                };
                pinpool::Why::CAUSES.iter().map(|cause| of(cause)).collect()
            }
        }
    }
}

/// A figure of one moment.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Figure {
    Count(u64),
    Number(f64),
    Durations(Durations),
}

impl Figure {
    fn of(value: &Value) -> Option<Self> {
        match value {
            Value::Bool(is_so) => Some(Self::Count(u64::from(*is_so))),
            Value::Number(number) => number.as_u64().map(Self::Count).or_else(|| number.as_f64().map(Self::Number)),
            Value::Object(_) => Durations::of(value).map(Self::Durations),
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
    /// As many as there are bounds, and those above.
    pub(crate) buckets: Vec<u64>,
}

impl Durations {
    fn of(value: &Value) -> Option<Self> {
        let bounds = bucket_bounds();
        let mut buckets = vec![0; bounds.len() + 1];
        for bucket in value["buckets"].as_array()? {
            // A bound that was text may be off by its last digit.
            let is_bound = |bound: &f64| bucket[0].as_f64().is_some_and(|read| (read / bound - 1.0).abs() < 0.1);
            let at = bounds.iter().position(is_bound).unwrap_or(bounds.len());
            buckets[at] = bucket[1].as_u64()?;
        }
        let (count, seconds) = (value["count"].as_u64()?, |name: &str| value[name].as_f64());
        Some(Self { count, total_seconds: seconds("total_seconds")?, max_seconds: seconds("max_seconds")?, buckets })
    }
}

/// The bounds between the buckets of all histograms, in seconds, for an exporter that wants to be told.
pub fn bucket_bounds() -> Vec<f64> {
    Histogram::default().buckets().filter_map(|(bound, _)| bound).map(|bound| bound.as_secs_f64()).collect()
}

const fn gauge(name: &'static str, unit: Unit, description: &'static str, from: From) -> Metric {
    Metric { name, kind: Kind::Gauge, unit, description, from }
}

const fn counter(name: &'static str, unit: Unit, description: &'static str, from: From) -> Metric {
    Metric { name, kind: Kind::Counter, unit, description, from }
}

const fn times(name: &'static str, description: &'static str, from: From) -> Metric {
    Metric { name, kind: Kind::Histogram, unit: Unit::Seconds, description, from }
}

/// Every metric of this crate.
pub const METRICS: &[Metric] = &[
    gauge("pinpool.cause", Unit::Count, "1 for the cause that the pool's judge names, 0 for the others", From::Causes),
    gauge("pinpool.alarm", Unit::Count, "1 if something is wrong that a cure mends", From::At("/why/is_alarm")),
    gauge(
        "pinpool.buffers",
        Unit::Count,
        "Buffers by state",
        From::Each(
            "state",
            &[
                ("used", "/memory/in_use"),
                ("idle", "/memory/idle"),
                ("in_flight", "/copies/in_flight"),
                ("lost", "/memory/lost"),
            ],
        ),
    ),
    gauge(
        "pinpool.bytes",
        Unit::Bytes,
        "Bytes by state",
        From::Each(
            "state",
            &[
                ("used", "/memory/in_use_bytes"),
                ("idle", "/memory/idle_bytes"),
                ("in_flight", "/copies/in_flight_bytes"),
                ("lost", "/memory/lost_bytes"),
                ("free", "/memory/free_bytes"),
            ],
        ),
    ),
    gauge("pinpool.owner.buffers", Unit::Count, "Buffers that are out, by tag", From::Owners("buffers")),
    gauge("pinpool.owner.bytes", Unit::Bytes, "Bytes that are out, by tag", From::Owners("bytes")),
    gauge(
        "pinpool.owner.oldest_time",
        Unit::Seconds,
        "Age of the oldest buffer that is out, by tag",
        From::Owners("oldest_seconds"),
    ),
    gauge("pinpool.unpinned.buffers", Unit::Count, "Buffers that are not pinned", From::At("/memory/fallback_buffers")),
    gauge(
        "pinpool.unpinned.bytes",
        Unit::Bytes,
        "Bytes of buffers that are not pinned",
        From::At("/memory/fallback_bytes"),
    ),
    gauge(
        "pinpool.held.bytes",
        Unit::Bytes,
        "Bytes held from the back-end, in any state",
        From::At("/memory/held_bytes"),
    ),
    gauge(
        "pinpool.awaiting_release.bytes",
        Unit::Bytes,
        "Free bytes that go back when no copy is in flight",
        From::At("/memory/awaiting_release_bytes"),
    ),
    gauge(
        "pinpool.reserve.bytes",
        Unit::Bytes,
        "Bytes of the reserve that are pinned",
        From::At("/memory/reserve_bytes"),
    ),
    gauge(
        "pinpool.reserve.asked.bytes",
        Unit::Bytes,
        "Bytes of the reserve that were asked for",
        From::At("/memory/reserve_target_bytes"),
    ),
    gauge("pinpool.max.bytes", Unit::Bytes, "The ceiling on the bytes held", From::At("/limits/max_bytes")),
    gauge(
        "pinpool.idle.max",
        Unit::Count,
        "Most idle buffers that the pool keeps",
        From::At("/limits/max_idle_buffers"),
    ),
    gauge("pinpool.pending_requests", Unit::Count, "Gets that wait for memory now", From::At("/requests/waiting")),
    gauge(
        "pinpool.in_flight.oldest_time",
        Unit::Seconds,
        "Age of the oldest copy in flight; 0 without one",
        From::OrZero("/copies/oldest_age_seconds"),
    ),
    counter(
        "pinpool.gets",
        Unit::Count,
        "Gets by result",
        From::Each(
            "result",
            &[("hit", "/requests/hits"), ("miss", "/requests/misses"), ("failed", "/requests/failed")],
        ),
    ),
    counter("pinpool.misses", Unit::Count, "Misses by reason", From::Fields("reason", "/requests/miss_reasons")),
    counter(
        "pinpool.evictions",
        Unit::Count,
        "Buffers that left the pool, by reason",
        From::Fields("reason", "/memory/evictions"),
    ),
    counter("pinpool.timeouts", Unit::Count, "Gets whose wait ran out", From::At("/requests/timeouts")),
    counter(
        "pinpool.fallbacks",
        Unit::Count,
        "Gets that got memory that is not pinned",
        From::At("/requests/fallbacks"),
    ),
    counter("pinpool.limit.raises", Unit::Count, "Raises of the count limit", From::At("/limits/raises")),
    counter(
        "pinpool.requested.bytes",
        Unit::Bytes,
        "Asked for by gets that found nothing idle at once",
        From::At("/requests/requested_bytes"),
    ),
    counter(
        "pinpool.given.bytes",
        Unit::Bytes,
        "Given to these gets, rounding included",
        From::At("/requests/granted_bytes"),
    ),
    counter(
        "pinpool.page_locked.bytes",
        Unit::Bytes,
        "Page-locked by all calls so far",
        From::OfArena("/memory/pin/bytes"),
    ),
    counter(
        "pinpool.released.bytes",
        Unit::Bytes,
        "Given back to the system by all calls so far",
        From::OfArena("/memory/unpin/bytes"),
    ),
    counter(
        "pinpool.call.failures",
        Unit::Count,
        "Calls of the back-end that failed",
        From::EachOfArena(
            "call",
            &[
                ("pin", "/memory/pin/failures"),
                ("unpin", "/memory/unpin/failures"),
                ("remap", "/memory/remap/failures"),
            ],
        ),
    ),
    times("pinpool.create_time", "Calls that page-lock memory", From::OfArena("/memory/pin/time")),
    times("pinpool.release_time", "Calls that give memory back to the system", From::OfArena("/memory/unpin/time")),
    times("pinpool.move_time", "Calls that move memory to another address", From::OfArena("/memory/remap/time")),
    times("pinpool.wait_time", "Waits of gets for memory", From::At("/requests/wait_time")),
    times("pinpool.use_time", "From a get that missed to its put", From::At("/requests/use_time")),
    times("pinpool.in_flight_time", "From a put with copies to their end", From::At("/copies/time")),
];
