//! TensorFlow's two log lines about the checks of its rates, and which of them are printed.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{PoolLog, emit};
use crate::policy::RateCheck;

/// Counts the checks of one or several pools and selects those that are printed.
///
/// All pools of a process share one sampler, as in TensorFlow, unless
/// [`PoolBuilder::unstable_log_sampler`](crate::PoolBuilder::unstable_log_sampler) sets another sampler.
#[derive(Debug, Clone, Default)]
pub struct LogSampler(Arc<AtomicU64>);

/// The number of checks of all pools without a separate sampler. This is not a lazily initialized cell, because a child
/// forked while another thread initializes the cell would wait forever.
static CHECKS_OF_PROCESS: AtomicU64 = AtomicU64::new(0);

impl LogSampler {
    /// Returns a new sampler, which selects the first check that it counts.
    pub fn new() -> Self {
        Self::default()
    }
}

/// A check of the rates, as passed to a listener ([`PoolBuilder::unstable_on_check`](crate::PoolBuilder::unstable_on_check)).
///
/// Displays as TensorFlow's lines: the counters, and below them the raise if there was one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RateCheckReport {
    /// The counters and the decision.
    pub check: RateCheck,
    /// Whether the check is printed.
    pub printed: bool,
}

/// Writes TensorFlow's lines, byte for byte.
impl fmt::Display for RateCheckReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RateCheck { window, limit, raised_to } = self.check;
        write!(
            f,
            "PoolAllocator: After {} get requests, put_count={} evicted_count={} eviction_rate={} and unsatisfied \
             allocation rate={}",
            window.requests(),
            window.put,
            window.evicted,
            SixDigits(window.eviction_rate()),
            SixDigits(window.unsatisfied_rate()),
        )?;
        raised_to.map_or(Ok(()), |to| write!(f, "\nRaising pool_size_limit_ from {limit} to {to}"))
    }
}

/// A function that is called after every check, printed or not.
pub(crate) type Listener = Arc<dyn Fn(&RateCheckReport) + Send + Sync>;

impl PoolLog {
    /// Prints a check if the sampler selects it, and calls the listener. TensorFlow's lines do not have the name of the pool.
    #[track_caller]
    pub(crate) fn rate_check(&self, check: RateCheck) {
        let checks = self.log_sampler.as_ref().map_or(&CHECKS_OF_PROCESS, |sampler| &*sampler.0);
        // Relaxed: checks are only counted.
        let printed = checks.fetch_add(1, Ordering::Relaxed).is_multiple_of(self.log_every.max(1));
        let report = RateCheckReport { check, printed };
        if report.printed && emit::is_wanted(log::Level::Info) {
            for line in report.to_string().lines() {
                emit::line("pinpool::pool_size_limit", log::Level::Info, format_args!("{line}"));
            }
        }
        if let Some(listener) = self.listener.clone() {
            emit::call(move || listener(&report));
        }
    }
}

/// A number that is displayed like C's `%g`: six significant digits, no trailing zeros, an exponent below 1e-4 and from 1e6 on.
struct SixDigits(f64);

impl fmt::Display for SixDigits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scientific = format!("{:.5e}", self.0);
        // `{:e}` always prints an `e`; a value without one (infinity, NaN) is printed as it is.
        let Some((mantissa, exponent)) = scientific.split_once('e') else { return f.write_str(&scientific) };
        let exponent: i32 = exponent.parse().map_err(|_| fmt::Error)?;
        if (-4..6).contains(&exponent) {
            let decimals = usize::try_from(5 - exponent).map_err(|_| fmt::Error)?;
            return f.write_str(without_trailing_zeros(&format!("{:.decimals$}", self.0)));
        }
        let sign = if exponent < 0 { '-' } else { '+' };
        write!(f, "{}e{sign}{:02}", without_trailing_zeros(mantissa), exponent.unsigned_abs())
    }
}

fn without_trailing_zeros(digits: &str) -> &str {
    if digits.contains('.') { digits.trim_end_matches('0').trim_end_matches('.') } else { digits }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_print_as_c_does() {
        let cases = [
            (0.0, "0"),
            (1.0, "1"),
            (0.002, "0.002"),
            (0.015_742_824_577_7, "0.0157428"),
            (0.000_12, "0.00012"),
            (0.000_1, "0.0001"),
            (0.000_099_999_96, "0.0001"),
            (9.910_8e-5, "9.9108e-05"),
            (5e-5, "5e-05"),
            (1e-10, "1e-10"),
            (0.999_999_96, "1"),
            (1.234_565e-5, "1.23456e-05"),
            (123_456.0, "123456"),
            (1_234_567.0, "1.23457e+06"),
            (1.5e100, "1.5e+100"),
        ];
        for (rate, text) in cases {
            assert_eq!(SixDigits(rate).to_string(), text);
        }
    }
}
