//! How sizes and times are written in log lines and errors.

use std::fmt;
use std::time::Duration;

/// Bytes with one decimal and a binary unit: `24.0MiB`.
pub struct Size(pub u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        scaled(f, self.0, |tenths, unit| (tenths + unit / 2) / unit)
    }
}

/// Bytes in the format of [`Size`], rounded up, so that a limit of the printed size suffices.
pub struct RoundedUp(pub u64);

impl fmt::Display for RoundedUp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        scaled(f, self.0, u128::div_ceil)
    }
}

fn scaled(f: &mut fmt::Formatter<'_>, bytes: u64, divide: fn(u128, u128) -> u128) -> fmt::Result {
    let units = ["KiB", "MiB", "GiB", "TiB"];
    let power = (bytes.max(1).ilog2() / 10).min(4);
    let Some(unit) = power.checked_sub(1) else { return f.pad(&format!("{bytes}B")) };
    let mut tenths = divide(u128::from(bytes) * 10, 1 << (10 * power));
    let mut name = units[unit as usize];
    // 1023.97 KiB is 1.0MiB.
    if tenths >= 10_240 && unit < 3 {
        (tenths, name) = (10, units[unit as usize + 1]);
    }
    f.pad(&format!("{}.{}{name}", tenths / 10, tenths % 10))
}

/// A duration with one decimal: `36.1ms`.
pub struct Time(pub Duration);

impl fmt::Display for Time {
    #[allow(clippy::cast_precision_loss)] // The result is rounded anyway.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let us = self.0.as_nanos() as f64 / 1e3;
        let (time, unit) = match us {
            0.0 => return f.pad("0s"),
            ..999.95 => (us, "us"),
            ..999_950.0 => (us / 1e3, "ms"),
            ..120e6 => (us / 1e6, "s"),
            ..7_200e6 => (us / 60e6, "min"),
            ..172_800e6 => (us / 3_600e6, "h"),
            _ => (us / 86_400e6, "d"),
        };
        f.pad(&format!("{time:.1}{unit}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_one_decimal_and_a_unit() {
        let sizes = [0, 1023, 4096, 500_000, (1 << 20) - 1, 24 << 20, 2_000_000, 3 << 30, 5 << 40, u64::MAX];
        assert_eq!(
            sizes.map(|bytes| Size(bytes).to_string()),
            ["0B", "1023B", "4.0KiB", "488.3KiB", "1.0MiB", "24.0MiB", "1.9MiB", "3.0GiB", "5.0TiB", "16777216.0TiB"]
        );
        assert_eq!(
            [(3 << 30) + 1, 72 << 20, 4097].map(|bytes| RoundedUp(bytes).to_string()),
            ["3.1GiB", "72.0MiB", "4.1KiB"]
        );
    }
}
