//! The trend of a pool over its checks, and the recommended setting.

use pinpool_observe::diagnosis::words::counted;

use super::history::PoolHistory;
use super::limits::is_too_low;
use super::message::{Counters, GETS_MIN, TOLERABLE_RATE};

/// With more misses than this share of the requests, raising the limit did not help.
const THRASHING_RATE: f64 = 0.1;
/// With more misses than this share of the requests, the limit is not worth starting with.
const USELESS_RATE: f64 = 0.5;
/// This many raises are a factor of 2.6.
const MANY_RAISES: u64 = 10;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Trend {
    /// The last check raised nothing.
    Steady,
    /// The limit is rising and has not risen far, or misses are falling or rare.
    WarmingUp,
    /// The limit has risen far, and a tenth of the requests or more miss, about as many as before.
    Thrashing,
    /// There are raises only.
    Unknown,
    /// No line has enough requests.
    TooShort,
}

/// The last check with enough requests and a rate that does not contradict them.
fn deciding(pool: &PoolHistory) -> Option<&Counters> {
    let is_long = |counters: &&Counters| counters.get.unwrap_or(counters.put) >= GETS_MIN && !is_too_low(counters);
    pool.checks.iter().rev().map(|(_, counters)| counters).find(is_long)
}

impl Trend {
    pub(super) fn of(pool: &PoolHistory) -> Self {
        if pool.checks.is_empty() {
            return Self::Unknown;
        }
        let Some(last) = deciding(pool) else { return Self::TooShort };
        let is_raise_due = last.eviction_rate > TOLERABLE_RATE && last.unsatisfied_rate > TOLERABLE_RATE;
        if !is_raise_due && !pool.is_raised() {
            return Self::Steady;
        }
        let raises = pool.printed_raises + pool.silent_raises;
        if raises < MANY_RAISES || last.unsatisfied_rate < THRASHING_RATE {
            return Self::WarmingUp;
        }
        let first = pool.checks.first().map_or(last, |(_, first)| first);
        let has_fallen = last.unsatisfied_rate < first.unsatisfied_rate / 2.0;
        if has_fallen { Self::WarmingUp } else { Self::Thrashing }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Steady => "steady",
            Self::WarmingUp => "warming up",
            Self::Thrashing => "thrashing",
            Self::Unknown => "unknown",
            Self::TooShort => "too short to tell",
        }
    }

    /// The meaning for `pool` and the recommended setting, a sentence each.
    pub(super) fn advice(self, pool: &PoolHistory) -> Vec<String> {
        let raises = pool.printed_raises + pool.silent_raises;
        let start = |limit: u64| {
            (raises > 0).then(|| {
                let raises = counted(raises, "raise");
                format!("Set PINPOOL_POOL_SIZE_LIMIT={limit} to start there and skip the {raises}.")
            })
        };
        let rate = deciding(pool).map_or(0.0, |last| last.unsatisfied_rate);
        let misses = rate * 100.0;
        match (self, pool.limit) {
            (Self::Steady, Some(limit)) if raises == 0 => {
                vec![format!("The pool has found its size with the limit that it began with, {limit} buffers: nothing to set.")]
            }
            (Self::Steady, Some(limit)) => {
                let found = format!("The pool has found its size: it keeps up to {limit} idle buffers.");
                std::iter::once(found).chain(start(limit)).collect()
            }
            (Self::Steady, None) => vec!["The pool has found its size: nothing to set.".to_owned()],
            (Self::WarmingUp, limit) => {
                let to = limit.map_or_else(String::new, |limit| format!(", to {limit} buffers"));
                let rising = format!("The limit was still rising at the last line{to}; {misses:.3} % of the requests missed.");
                let start = match limit {
                    Some(_) if rate > USELESS_RATE => Some("It is too early to recommend a limit.".to_owned()),
                    limit => limit.and_then(start),
                };
                std::iter::once(rising).chain(start).collect()
            }
            (Self::Thrashing, _) => vec![
                format!(
                    "{misses:.1} % of the requests found no idle buffer of their size, after {}: sizes rarely repeat, and each raise \
                     holds more memory.",
                    counted(raises, "raise")
                ),
                "Batch to fewer sizes. In pinpool, PINPOOL_PRESET=adaptive serves all sizes from the same pinned memory, and \
                 PINPOOL_MAX_BYTES limits it; with the tensorflow preset PINPOOL_ROUNDING=pow2 makes sizes repeat."
                    .to_owned(),
            ],
            (Self::Unknown, _) => vec!["The log has only raises, which do not show how many requests miss.".to_owned()],
            (Self::TooShort, _) => vec![format!(
                "No line has {GETS_MIN} requests since a raise with a consistent rate: too few to recommend a limit."
            )],
        }
    }
}
