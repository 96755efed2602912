//! One statistic of the list, with its path, unit, help text and value.

use std::time::Duration;

use super::Histogram;

/// One statistic of a snapshot.
#[derive(Debug, Clone, PartialEq)]
pub struct Statistic {
    /// Group and name: `memory.pin.count`.
    pub path: String,
    /// The explanation of the statistic, in one line.
    pub help: &'static str,
    /// Gauge, counter or another kind.
    pub kind: Kind,
    /// The unit of the value.
    pub unit: Unit,
    /// The value.
    pub value: Value,
}

/// The kind of a statistic, as Prometheus distinguishes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// May rise and fall.
    Gauge,
    /// Only rises.
    Counter,
    /// Durations.
    Histogram,
    /// A text, or a number that must not be aggregated.
    Label,
    /// A group of further statistics.
    Group,
}

/// The unit of a statistic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// A number of events or objects.
    Count,
    /// Bytes.
    Bytes,
    /// Seconds.
    Seconds,
}

/// The value of a statistic.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// No value at present.
    None,
    /// A number.
    Count(u64),
    /// A text.
    Text(String),
    /// One duration.
    Time(Duration),
    /// Many durations.
    Times(Box<Histogram>),
}

/// A value in the list, or a group of values.
pub(super) trait ToStatistics {
    /// Returns the statistic, or every statistic of the group.
    fn statistics(&self, path: String, help: &'static str, kind: Kind) -> Vec<Statistic>;
}

/// Implements [`ToStatistics`] for types of single values. The type decides the unit; for a number, the end of the path does.
macro_rules! values {
    ($($type:ty: |$value:ident, $path:ident| $unit:expr, $shown:expr;)+) => {$(
        impl ToStatistics for $type {
            fn statistics(&self, path: String, help: &'static str, kind: Kind) -> Vec<Statistic> {
                let ($value, $path) = (self, &path);
                let (unit, value) = ($unit, $shown);
                vec![Statistic { path, help: help.trim(), kind, unit, value }]
            }
        }
    )+};
}
values! {
    u64: |count, path| unit_of(path), Value::Count(*count);
    Option<u64>: |count, path| unit_of(path), count.map_or(Value::None, Value::Count);
    Option<Duration>: |time, _path| Unit::Seconds, time.map_or(Value::None, Value::Time);
    Histogram: |times, _path| Unit::Seconds, Value::Times(Box::new(*times));
    String: |text, _path| Unit::Count, Value::Text(text.clone());
}

fn unit_of(path: &str) -> Unit {
    if path.ends_with("bytes") { Unit::Bytes } else { Unit::Count }
}
