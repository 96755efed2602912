//! The format of sizes, times and counts in log lines, errors and diagnoses.

use std::time::Duration;

pub use pinpool_os::format::{RoundedUp, Size, Time};

/// The remedy if the system refuses memory.
pub(super) const SYSTEM_REMEDY: &str = "free pinned memory in this or other processes, or use less; `pinpool doctor` checks the system's limits \
                                    (WSL2 limits pinned memory)";

/// Formats nanoseconds as [`Time`] does.
pub fn seconds(ns: u64) -> String {
    Time(Duration::from_nanos(ns)).to_string()
}

/// Formats the share of `part` in `all`, in percent.
pub fn percent(part: u64, all: u64) -> String {
    let percent = part as f64 / all.max(1) as f64 * 100.0;
    if percent >= 10.0 { format!("{percent:.0} %") } else { format!("{percent:.1} %") }
}

/// Formats a count with its noun: `1 buffer`, `2 buffers`.
pub fn counted(count: u64, noun: &str) -> String {
    if count == 1 { format!("1 {noun}") } else { format!("{count} {noun}s") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_shares_and_counts_are_formatted() {
        let times =
            [0, 191_736, 999_999, 20_000_000, 9_940_000_000, 119_900_000_000, 600_000_000_000, 86_400_000_000_000];
        assert_eq!(times.map(seconds), ["0s", "191.7us", "1.0ms", "20.0ms", "9.9s", "119.9s", "10.0min", "24.0h"]);
        assert_eq!([percent(1, 3), percent(1, 300), percent(0, 0)], ["33 %", "0.3 %", "0.0 %"]);
        assert_eq!([counted(1, "request"), counted(0, "request")], ["1 request", "0 requests"]);
    }
}
