//! Arguments of `pinpool-bench soak`.

use std::time::Duration;

use clap::Args;
use pinpool::Backend;
use pinpool::unstable::config::text::{ParseError, parse_duration};

/// Use a pool at random for a long time, and check every byte and every count
///
/// Threads request, fill, check, return, keep, hand over and copy buffers. A buffer is filled after its request, and compared byte by
/// byte before its return, before its copy, and at the destination after its copy. Copies go to the GPU if there is one. Fails (exit
/// status 1) if a byte differs, a request or a copy fails, the counts do not add up, or resident memory grows after the first tenth
/// of the run by more than 16 MiB over the memory of the pool. Ctrl-C ends it with its report (130).
#[derive(Debug, Args)]
pub(crate) struct SoakArgs {
    /// Total operations: requests, returns, copies and hand-overs [default: 1e9, or any number with --seconds]
    #[arg(long, value_name = "N", value_parser = ops)]
    pub(super) ops: Option<u64>,

    /// End after this time
    #[arg(long, value_name = "SECONDS", value_parser = parse_duration)]
    pub(super) seconds: Option<Duration>,

    /// Threads [default: one for each core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(super) threads: Option<u16>,

    /// Seed of the operations; their order among threads depends on the machine
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    pub(super) seed: u64,

    /// Backend of the pool: auto, vmm, register, cuda, mlock or heap
    #[arg(long, value_name = "NAME")]
    pub(super) backend: Option<Backend>,
}

/// A whole number, also as `1e9`.
fn ops(text: &str) -> Result<u64, ParseError> {
    let why = "not a whole number above 0 (like 1000000 or 1e9)";
    let scaled = |(digits, power): (&str, &str)| -> Option<u64> {
        digits.parse::<u64>().ok()?.checked_mul(10_u64.checked_pow(power.parse().ok()?)?)
    };
    let number = match text.split_once(['e', 'E']) {
        Some(parts) => scaled(parts),
        None => text.parse().ok(),
    };
    number.filter(|&number| number > 0).ok_or_else(|| ParseError::new(text, why))
}

#[cfg(test)]
mod tests {
    use super::ops;

    #[test]
    fn operations_are_whole_numbers_with_or_without_a_power_of_ten() {
        for (text, number) in [("1", Some(1)), ("1e9", Some(1_000_000_000)), ("25E3", Some(25_000)), ("1e19", None)] {
            assert_eq!(ops(text).ok(), number.or((text == "1e19").then_some(10_000_000_000_000_000_000)), "{text}");
        }
        for text in ["", "0", "0e5", "1.5e9", "e9", "1e", "-1", "1e20", "2e19", "18446744073709551616"] {
            assert!(ops(text).is_err(), "{text}");
        }
    }
}
