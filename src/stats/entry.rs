//! One statistic of the list, with its path, unit, help text and value.

use std::time::Duration;

use super::Histogram;

/// One statistic of a snapshot.
#[derive(Debug, Clone, PartialEq)]
pub struct Statistic {
    /// Its group and name, as `memory.pin.count`.
    pub path: String,
    /// One line that explains it.
    pub help: &'static str,
    /// How values from several moments compare.
    pub kind: Kind,
    /// The unit of the value.
    pub unit: Unit,
    /// The value.
    pub value: Value,
}

/// How values of a statistic from several moments compare.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(non_camel_case_types)] // As the list has them.
pub enum Kind {
    /// May rise and fall.
    gauge,
    /// Only rises.
    counter,
    /// Durations.
    histogram,
    /// Not a number to aggregate.
    label,
    /// Further statistics.
    group,
}

/// The unit of a statistic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Events or things.
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

/// The position of a statistic in the list.
pub(super) struct Place {
    pub(super) path: String,
    pub(super) help: &'static str,
    pub(super) kind: Kind,
}

/// A value in the list, or a group of values.
pub(super) trait Entry {
    /// Calls `see` with the statistic, or with each of the group.
    fn visit(&self, at: &Place, see: &mut dyn FnMut(Statistic));
}

impl Place {
    pub(super) fn member(&self, name: &str, help: &'static str, kind: Kind) -> Self {
        Self { path: format!("{}.{name}", self.path), help: help.trim(), kind }
    }

    fn with(&self, unit: Unit, value: Value) -> Statistic {
        Statistic { path: self.path.clone(), help: self.help, kind: self.kind, unit, value }
    }
}

impl Entry for u64 {
    fn visit(&self, at: &Place, see: &mut dyn FnMut(Statistic)) {
        Some(*self).visit(at, see);
    }
}

impl Entry for Option<u64> {
    fn visit(&self, at: &Place, see: &mut dyn FnMut(Statistic)) {
        let is_bytes = at.path.ends_with("bytes");
        see(at.with(if is_bytes { Unit::Bytes } else { Unit::Count }, self.map_or(Value::None, Value::Count)));
    }
}

impl Entry for Option<Duration> {
    fn visit(&self, at: &Place, see: &mut dyn FnMut(Statistic)) {
        see(at.with(Unit::Seconds, self.map_or(Value::None, Value::Time)));
    }
}

impl Entry for Histogram {
    fn visit(&self, at: &Place, see: &mut dyn FnMut(Statistic)) {
        see(at.with(Unit::Seconds, Value::Times(Box::new(*self))));
    }
}

impl Entry for String {
    fn visit(&self, at: &Place, see: &mut dyn FnMut(Statistic)) {
        see(at.with(Unit::Count, Value::Text(self.clone())));
    }
}
