//! Bytes, times and counts in words, one way for all.

use std::fmt;

/// What helps if the system refuses memory.
pub(super) const OF_SYSTEM: &str = "release pinned memory of this or other processes, or use less; `pinpool doctor` checks the limits of \
                                    the system (under WSL2 there is one on pinned memory)";

/// Bytes in GiB or MiB with one digit, never less than they are: a limit of so much suffices.
pub struct RoundedUp(pub u64);

impl fmt::Display for RoundedUp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (unit, name) = if self.0 >= 1 << 30 { (1u128 << 30, "GiB") } else { (1 << 20, "MiB") };
        let tenths = (u128::from(self.0) * 10).div_ceil(unit);
        write!(f, "{}.{} {name}", tenths / 10, tenths % 10)
    }
}

/// Nanoseconds in seconds, with more digits the fewer they are; in minutes, hours and days from two on.
#[allow(clippy::cast_precision_loss)] // Rounded anyway.
pub fn seconds(ns: u64) -> String {
    let seconds = ns as f64 / 1e9;
    match ns / 1_000_000_000 {
        0 if ns < 500_000 => "0 s".to_owned(),
        0 => format!("{seconds:.3} s"),
        1..=119 => format!("{seconds:.1} s"),
        more @ 120..=7_199 => format!("{} min", (more + 30) / 60),
        more @ 7_200..=172_799 => format!("{} h", (more + 1_800) / 3_600),
        more => format!("{} days", (more + 43_200) / 86_400),
    }
}

/// The share of `part` in `all`, in percent.
#[allow(clippy::cast_precision_loss)] // Rounded anyway.
pub fn percent(part: u64, all: u64) -> String {
    let percent = part as f64 / all.max(1) as f64 * 100.0;
    if percent >= 10.0 { format!("{percent:.0} %") } else { format!("{percent:.1} %") }
}

/// `1 buffer`, `2 buffers`.
pub fn counted(count: u64, noun: &str) -> String {
    if count == 1 { format!("1 {noun}") } else { format!("{count} {noun}s") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_in_words() {
        assert_eq!([RoundedUp((3 << 30) + 1).to_string(), RoundedUp(72 << 20).to_string()], ["3.1 GiB", "72.0 MiB"]);
        let times = [0, 20_000_000, 9_940_000_000, 119_900_000_000, 600_000_000_000, 86_400_000_000_000].map(seconds);
        assert_eq!(times, ["0 s", "0.020 s", "9.9 s", "119.9 s", "10 min", "24 h"]);
        assert_eq!([percent(1, 3), percent(1, 300), percent(0, 0)], ["33 %", "0.3 %", "0.0 %"]);
        assert_eq!([counted(1, "get"), counted(0, "get")], ["1 get", "0 gets"]);
    }
}
