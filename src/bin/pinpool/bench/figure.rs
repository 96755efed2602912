//! Figures for people: rates, sizes, rounding.

use std::fmt;
use std::time::Duration;

/// What a bench finds, or why it could not.
pub(crate) type Measured<T> = Result<T, NotMeasured>;

#[derive(Debug)]
pub(crate) enum NotMeasured {
    /// The command line asks for what cannot be.
    Setting(String),
    /// None of the back-ends asked for is here.
    Missing(String),
    Pool(pinpool::Error),
}

impl From<pinpool::Error> for NotMeasured {
    fn from(error: pinpool::Error) -> Self {
        Self::Pool(error)
    }
}

impl fmt::Display for NotMeasured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Setting(why) | Self::Missing(why) => f.write_str(why),
            Self::Pool(error) => error.fmt(f),
        }
    }
}

/// 10^9 bytes a second.
#[allow(clippy::cast_precision_loss)] // A quotient for people.
pub(crate) fn gb_per_s(bytes: u64, took: Duration) -> f64 {
    rounded(bytes as f64 / 1e9 / took.as_secs_f64().max(1e-9))
}

/// Three digits behind the point.
pub(crate) fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

/// `value` in units of `unit`.
pub(crate) fn quotient(value: f64, unit: f64) -> f64 {
    rounded(value / unit.max(1e-9))
}

/// The one in the middle, the lower of two; 0 of none.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len().saturating_sub(1) / 2).copied().unwrap_or(0.0)
}

/// Nanoseconds as microseconds.
#[allow(clippy::cast_precision_loss)] // As above.
pub(crate) fn micros(ns: u64) -> f64 {
    rounded(ns as f64 / 1e3)
}

/// Bytes in MiB, or in KiB below one.
#[allow(clippy::cast_precision_loss)] // As above.
pub(crate) fn mib(bytes: u64) -> String {
    let (unit, name) = if bytes < 1 << 20 { (1 << 10, "KiB") } else { (1 << 20, "MiB") };
    let number = format!("{:.1}", bytes as f64 / f64::from(unit));
    format!("{} {name}", number.strip_suffix(".0").unwrap_or(&number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_one_of_the_values() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 3.0, 2.0]), 2.0);
        assert_eq!((median(vec![7.0]), median(Vec::new())), (7.0, 0.0));
    }
}
