//! The duration of driver calls: a time for each call and a time for each byte.

use serde::Serialize;

/// Call times count as dependent on the bytes if the bytes explain at least this share of their variance.
const EXPLAINED_VARIANCE_MIN: f64 = 0.25;

/// A recorded driver call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimedCall {
    /// Length of the memory.
    pub bytes: u64,
    /// Duration of the call.
    pub took_ns: u64,
}

/// The cost of calls: each takes `call_ns + bytes * byte_ns`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct CallCost {
    /// Time of each call.
    pub call_ns: f64,
    /// Time of each byte.
    pub byte_ns: f64,
}

impl CallCost {
    /// The assumed cost of pinning: 0.1 ms per call and 2.5 GB/s, as for `cuMemHostAlloc` on an H200.
    pub const ASSUMED_PIN: Self = Self { call_ns: 100_000.0, byte_ns: 0.4 };
    /// The assumed cost of unpinning.
    pub const ASSUMED_UNPIN: Self = Self { call_ns: 100_000.0, byte_ns: 0.1 };

    /// Returns the least-squares line through `calls`, with neither part below 0, or `None` without calls. The costs on this
    /// line add up to the recorded time of all calls.
    ///
    /// Calls of one size do not separate the cost of a call from the cost of its bytes, so `assumed` is scaled to their mean.
    /// Times that barely depend on the bytes, as on a busy machine, do not separate them either. A byte then costs at least
    /// what it cost in the fastest call, since larger calls would otherwise seem free.
    pub fn fitted(calls: &[TimedCall], assumed: Self) -> Option<Self> {
        let n = calls.len() as f64;
        let mean = |of: fn(&TimedCall) -> u64| calls.iter().map(|call| of(call) as f64).sum::<f64>() / n;
        let (bytes, took) = (mean(|call| call.bytes), mean(|call| call.took_ns));
        if calls.is_empty() {
            return None;
        }
        if Self::is_one_size(calls) {
            let scale = took / (assumed.call_ns + assumed.byte_ns * bytes);
            return Some(Self { call_ns: assumed.call_ns * scale, byte_ns: assumed.byte_ns * scale });
        }
        let sums = calls.iter().map(|call| {
            let (x, y) = (call.bytes as f64 - bytes, call.took_ns as f64 - took);
            (x * x, x * y, y * y)
        });
        let (squares, products, spread) = sums.fold((0.0, 0.0, 0.0), |(a, b, c), (x, y, z)| (a + x, b + y, c + z));
        let slope = products / squares.max(1.0);
        let follows = products > 0.0 && products * products >= squares * spread * EXPLAINED_VARIANCE_MIN;
        let fastest = calls.iter().map(|call| call.took_ns as f64 / call.bytes.max(1) as f64).fold(f64::MAX, f64::min);
        let slope = if follows { slope } else { slope.max(fastest) };
        // A steeper line would cross 0. Since `call_ns` is cut off at 0, the calls together would then cost more than they took.
        let slope = slope.min(took / bytes);
        Some(Self { call_ns: (took - slope * bytes).max(0.0), byte_ns: slope })
    }

    /// Returns whether all of `calls` have one size, or sizes too close to separate a slope from noise.
    pub fn is_one_size(calls: &[TimedCall]) -> bool {
        let sizes = || calls.iter().map(|call| call.bytes);
        sizes().min().zip(sizes().max()).is_none_or(|(least, most)| most - least <= least / 8)
    }

    /// Returns the total seconds of `calls` calls over `bytes` bytes.
    pub fn seconds(&self, calls: u64, bytes: u64) -> f64 {
        (self.call_ns * calls as f64 + self.byte_ns * bytes as f64) / 1e9
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(bytes: u64, took_ns: u64) -> TimedCall {
        TimedCall { bytes, took_ns }
    }

    #[test]
    fn a_fitted_line_is_never_negative() {
        let fitted = |calls: &[TimedCall]| CallCost::fitted(calls, CallCost::ASSUMED_PIN);
        let line = fitted(&[call(0, 50), call(100, 250), call(200, 450)]).unwrap();
        assert!((line.call_ns - 50.0).abs() < 1e-9 && (line.byte_ns - 2.0).abs() < 1e-9, "{line:?}");
        assert!((line.seconds(2, 50) - 200e-9).abs() < 1e-15);
        let through = fitted(&[call(10, 0), call(20, 30)]).unwrap();
        assert!(through.call_ns == 0.0 && (through.seconds(2, 30) - 30e-9).abs() < 1e-15, "{through:?}");
        // The times barely depend on the bytes. The fitted costs add up to the recorded time.
        let loose = fitted(&[call(10, 1), call(11, 90), call(12, 30), call(13, 90)]).unwrap();
        assert!((loose.seconds(4, 46) - 211e-9).abs() < 1e-15, "{loose:?}");
        assert_eq!(fitted(&[]), None);
    }

    #[test]
    fn if_times_do_not_follow_the_bytes_the_fastest_call_sets_the_time_per_byte() {
        let fitted = |calls: &[TimedCall]| CallCost::fitted(calls, CallCost::ASSUMED_PIN).unwrap();
        assert_eq!(fitted(&[call(1, 20), call(2, 10)]), CallCost { call_ns: 7.5, byte_ns: 5.0 });
        // Calls of 4 and 8 MiB on a busy machine: the 4 MiB calls once took longer.
        let (small, large) = (4_u64 << 20, 8_u64 << 20);
        let busy =
            fitted(&[call(small, 546_000), call(small, 20_000_000), call(large, 9_000_000), call(large, 12_000_000)]);
        assert!((busy.byte_ns - 546_000.0 / small as f64).abs() < 1e-9, "{busy:?}");
        assert!(busy.seconds(1, 256 << 20) > 0.03, "{busy:?}");
    }

    #[test]
    fn calls_of_one_size_scale_the_assumed_cost() {
        let bytes = 64 << 20;
        for calls in [&[call(bytes, 30_000_000), call(bytes, 50_000_000)][..], &[call(bytes, 40_000_000)]] {
            let cost = CallCost::fitted(calls, CallCost::ASSUMED_PIN).unwrap();
            assert!((cost.seconds(1, bytes) - 0.040).abs() < 1e-9, "{cost:?}");
            // The two parts keep their assumed ratio, so a call for a ninth of the bytes takes about a ninth of the time.
            let ninth = cost.seconds(1, bytes / 9);
            assert!((0.040 / 9.5..0.040 / 8.5).contains(&ninth), "{ninth}");
            assert!((cost.byte_ns / cost.call_ns - 0.4 / 100_000.0).abs() < 1e-12, "{cost:?}");
        }
        // Two sizes that differ enough determine a line.
        let cost = CallCost::fitted(&[call(100, 200), call(200, 300)], CallCost::ASSUMED_PIN).unwrap();
        assert!((cost.call_ns - 100.0).abs() < 1e-9 && (cost.byte_ns - 1.0).abs() < 1e-9, "{cost:?}");
    }
}
