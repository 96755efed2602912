//! Finds the limit in force when a message was printed, from the numbers of the message.
//!
//! Since the last raise, the underlying allocator served one request for every evicted buffer, for every additional buffer in
//! use, and for every additional idle buffer. At a check the number of idle buffers equals the limit, and after a raise it equals
//! the previous limit. So
//!
//! ```text
//! allocated = get - put + evicted + (limit - previous limit)
//! ```
//!
//! with a previous limit of 0 before the first raise. The message prints `allocated / get` with six significant digits, and
//! limits form a chain, so usually one limit of the chain fits.

use super::message::{Counters, GETS_MIN, Numbers, START_LIMIT, TOLERABLE_RATE, raised};

/// Successive limits by TensorFlow's raise rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Chain(Vec<u64>);

/// A limit that the numbers fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Fit {
    pub(super) limit: u64,
    /// Number of requests that went to the underlying allocator.
    pub(super) allocated: u64,
}

/// No pool has a higher limit.
const LIMIT_MAX: u64 = 1 << 40;

impl Chain {
    /// Returns the limits of a pool that starts with `limit`.
    pub(super) fn from(limit: u64) -> Self {
        let next = |&limit: &u64| Some(raised(limit)).filter(|&raised| raised < LIMIT_MAX);
        Self(std::iter::successors(Some(limit), next).collect())
    }

    /// Returns the number of raises between the start and `limit`.
    pub(super) fn place(&self, limit: u64) -> Option<usize> {
        self.0.binary_search(&limit).ok()
    }

    /// Returns whether `to` follows `from` in this chain.
    pub(super) fn has_raise(&self, from: u64, to: u64) -> bool {
        self.place(from).is_some_and(|at| self.0.get(at + 1) == Some(&to))
    }

    /// Returns the limits that `counters` fit.
    pub(super) fn fits(&self, counters: &Counters) -> Vec<Fit> {
        let previous = std::iter::once(0).chain(self.0.iter().copied());
        let fit = |(&limit, previous)| {
            let allocated = allocated(counters, limit - previous)?;
            prints_as(allocated, counters).then_some(Fit { limit, allocated })
        };
        self.0.iter().zip(previous).filter_map(fit).collect()
    }
}

/// The certainty that the last number of a message is complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Trust {
    /// The other numbers contradict the last number.
    Contradicted,
    /// Nothing contradicts the last number.
    Likely,
    /// The other numbers confirm the last number.
    Sure,
}

impl Numbers {
    pub(super) fn trust(&self) -> Trust {
        match self {
            // Each limit has one successor, which was checked when the numbers were read.
            Self::Raise { .. } => Trust::Sure,
            Self::After(counters) if !Chain::from(START_LIMIT).fits(counters).is_empty() => Trust::Sure,
            Self::After(counters) if counters.get.is_none() || !counters.unsatisfied_rate.is_finite() => Trust::Likely,
            Self::After(counters) if all_by_rate(counters).next().is_none() || is_too_low(counters) => {
                Trust::Contradicted
            }
            Self::After(_) => Trust::Likely,
        }
    }
}

/// Returns the number of requests that went to the underlying allocator; `None` if the sum is negative, or more than the
/// requests.
fn allocated(counters: &Counters, raised_by: u64) -> Option<u64> {
    let get = counters.get?;
    let sum = i128::from(get) - i128::from(counters.put) + i128::from(counters.evicted) + i128::from(raised_by);
    u64::try_from(sum).ok().filter(|&allocated| allocated <= get)
}

/// Returns whether TensorFlow prints this rate for `allocated`, with the six digits of C's `%g`.
fn prints_as(allocated: u64, counters: &Counters) -> bool {
    let Some(get) = counters.get else { return false };
    let (rate, printed) = (if get == 0 { 0.0 } else { allocated as f64 / get as f64 }, counters.unsatisfied_rate);
    // Nearly all limits fail the first comparison. The comparison of texts is exact, but slow.
    (rate - printed).abs() <= rate * 1e-5 && format!("{rate:.5e}") == format!("{printed:.5e}")
}

/// Returns the numbers of requests that may have gone to the underlying allocator, from the printed rate only.
fn all_by_rate(counters: &Counters) -> impl Iterator<Item = u64> {
    let get = counters.get.unwrap_or(0);
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // Saturates; checked below.
    let nearest = (counters.unsatisfied_rate * get as f64).round() as u64;
    let around = nearest.saturating_sub(1)..=nearest.saturating_add(1).min(get);
    around.filter(move |&allocated| prints_as(allocated, counters))
}

/// Returns whether the printed rate is below the raise threshold although the counters, at any limit, are above it.
pub(super) fn is_too_low(counters: &Counters) -> bool {
    let allocated = |get| i128::from(get) - i128::from(counters.put) + i128::from(counters.evicted);
    let is_due = |get: u64| get >= GETS_MIN && allocated(get) as f64 > TOLERABLE_RATE * get as f64;
    counters.unsatisfied_rate <= TOLERABLE_RATE && counters.get.is_some_and(is_due)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counters(get: u64, put: u64, evicted: u64, unsatisfied_rate: f64) -> Counters {
        let eviction_rate = evicted as f64 / put as f64;
        Counters { get: Some(get), put, evicted, eviction_rate, unsatisfied_rate }
    }

    #[test]
    fn a_first_check_determines_the_start() {
        let fits = Chain::from(100).fits(&counters(63_521, 63_521, 1_000, 0.017_317_1));
        assert_eq!(fits, [Fit { limit: 100, allocated: 1_100 }]);
    }

    #[test]
    fn a_later_check_determines_its_limit() {
        let fits = Chain::from(100).fits(&counters(71_532, 71_532, 1_000, 0.014_301_3));
        assert_eq!(fits, [Fit { limit: 256, allocated: 1_023 }]);
    }

    #[test]
    fn without_requests_the_returns_and_evictions_determine_the_limit() {
        assert_eq!(Chain::from(100).fits(&counters(0, 1_010, 1_000, 0.0)), [Fit { limit: 110, allocated: 0 }]);
    }

    #[test]
    fn impossible_numbers_fit_no_limit() {
        assert_eq!(Chain::from(100).fits(&counters(10, 50_000, 1_000, 0.5)), []);
        assert_eq!(Chain::from(100).fits(&counters(u64::MAX, 0, u64::MAX, 1.0)), []);
        assert_eq!(Chain::from(100).fits(&Counters { get: None, ..counters(0, 2_530, 2_000, 0.0) }), []);
    }

    #[test]
    fn the_chain_follows_the_pools_rule() {
        let chain = Chain::from(100);
        assert_eq!(chain.0[..12], [100, 110, 121, 133, 146, 160, 176, 193, 212, 233, 256, 281]);
        assert!(chain.has_raise(256, 281) && !chain.has_raise(256, 282) && !chain.has_raise(257, 282));
        assert_eq!(Chain::from(7).0[..3], [7, 100, 110]);
        assert_eq!(Chain::from(0).0[..3], [0, 100, 110]);
        assert_eq!(chain.place(121), Some(2));
    }
}
