//! What calls of a back-end take: a time for each call and one for each byte.

use serde::Serialize;

use super::workload::TimedCall;

/// `call_ns + bytes * byte_ns`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct CallCost {
    /// Of each call.
    pub call_ns: f64,
    /// Of each byte.
    pub byte_ns: f64,
}

impl CallCost {
    /// Of pinning where nothing is known: 0.1 ms a call and 2.5 GB/s, as `cuMemHostAlloc` on an H200.
    pub const ASSUMED_PIN: Self = Self { call_ns: 100_000.0, byte_ns: 0.4 };
    /// Of releasing where nothing is known.
    pub const ASSUMED_UNPIN: Self = Self { call_ns: 100_000.0, byte_ns: 0.1 };

    /// The line with the least squares through `calls`, neither part below 0. `None` for no call.
    pub fn fitted(calls: &[TimedCall]) -> Option<Self> {
        let n = calls.len() as f64;
        let mean = |of: fn(&TimedCall) -> u64| calls.iter().map(|call| of(call) as f64).sum::<f64>() / n;
        let (bytes, took) = (mean(|call| call.bytes), mean(|call| call.took_ns));
        if calls.is_empty() {
            return None;
        }
        let sums = calls.iter().map(|call| {
            let (x, y) = (call.bytes as f64 - bytes, call.took_ns as f64 - took);
            (x * x, x * y)
        });
        let (squares, products) = sums.fold((0.0, 0.0), |(a, b), (c, d)| (a + c, b + d));
        let slope = if squares > 0.0 { products / squares } else { 0.0 };
        Some(match (slope, took - slope * bytes) {
            // One size, or none that costs more for its bytes: all calls take the same.
            (slope, _) if slope <= 0.0 => Self { call_ns: took, byte_ns: 0.0 },
            // The line would cross 0: through 0, then.
            (_, base) if base < 0.0 => {
                let weights = calls.iter().map(|call| (call.bytes as f64).powi(2)).sum::<f64>();
                let through = calls.iter().map(|call| call.bytes as f64 * call.took_ns as f64).sum::<f64>();
                Self { call_ns: 0.0, byte_ns: through / weights }
            }
            (slope, base) => Self { call_ns: base, byte_ns: slope },
        })
    }

    /// Seconds of so many calls over so many bytes.
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
    fn a_line_is_found_and_never_falls_below_nothing() {
        let line = CallCost::fitted(&[call(0, 50), call(100, 250), call(200, 450)]).unwrap();
        assert!((line.call_ns - 50.0).abs() < 1e-9 && (line.byte_ns - 2.0).abs() < 1e-9, "{line:?}");
        assert!((line.seconds(2, 50) - 200e-9).abs() < 1e-15);
        assert_eq!(CallCost::fitted(&[call(7, 10), call(7, 20)]), Some(CallCost { call_ns: 15.0, byte_ns: 0.0 }));
        assert_eq!(CallCost::fitted(&[call(1, 20), call(2, 10)]), Some(CallCost { call_ns: 15.0, byte_ns: 0.0 }));
        let through = CallCost::fitted(&[call(10, 0), call(20, 30)]).unwrap();
        assert!(through.call_ns == 0.0 && through.byte_ns > 0.0, "{through:?}");
        assert_eq!(CallCost::fitted(&[]), None);
    }
}
