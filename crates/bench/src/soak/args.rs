//! Arguments of `pinpool-bench soak`.

use std::time::Duration;

use clap::Args;
use pinpool::Backend;
use pinpool::unstable::config::text::{ParseError, parse_duration};

/// Maximum number of operations in a run, enough for years. An `f64` represents all smaller whole numbers exactly.
const OPS_MAX: f64 = 1e15;

/// Run random operations on a pool for a long time, and check every byte and every count
///
/// Threads request, fill, check, return, keep, exchange and copy buffers. Each buffer is filled after its request and compared
/// byte by byte before its return, before its copy, and at the destination after its copy. Copies go to the GPU if there is one.
/// The run fails (exit status 1) if a byte differs, a request or a copy fails, counts differ, or resident memory grows by more
/// than 16 MiB beyond the memory of the pool after the first tenth of the run. Ctrl-C ends the run and prints its report (exit
/// status 130).
#[derive(Debug, Args)]
pub(crate) struct SoakArgs {
    /// Total operations: requests, returns, copies and hand-overs [default: 1e9, or any number with --seconds]
    #[arg(long, value_name = "N", value_parser = ops)]
    pub(super) ops: Option<u64>,

    /// End after this time
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub(super) seconds: Option<Duration>,

    /// Threads [default: one for each core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(super) threads: Option<u16>,

    /// Seed of the operations; the order among threads still varies
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    pub(super) seed: u64,

    /// Backend of the pool: auto, vmm, register, cuda, mlock or heap
    #[arg(long, value_name = "NAME")]
    pub(super) backend: Option<Backend>,
}

/// Parses a whole number, which may be written as `1e9`.
fn ops(text: &str) -> Result<u64, ParseError> {
    let number = text.parse::<f64>().ok().filter(|number| number.fract() == 0.0 && (1.0..=OPS_MAX).contains(number));
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // Checked above.
    number.map(|number| number as u64).ok_or_else(|| ParseError::new(text, "not a whole number from 1 to 1e15"))
}

#[cfg(test)]
mod tests {
    use super::ops;

    #[test]
    fn operations_are_whole_numbers_with_or_without_a_power_of_ten() {
        let numbers = ["1", "1e9", "25E3", "1.5e9", "1e15"].map(|text| ops(text).unwrap());
        assert_eq!(numbers, [1, 1_000_000_000, 25_000, 1_500_000_000, 1_000_000_000_000_000]);
        for text in ["", "0", "0e5", "1.5", "e9", "1e", "-1", "2e15", "nan", "inf"] {
            assert!(ops(text).is_err(), "{text}");
        }
    }
}
