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

/// The trend of one pool.
#[derive(Debug)]
pub(super) struct Trend {
    pub(super) name: &'static str,
    pub(super) is_alarm: bool,
    /// Its meaning, and the recommended setting, a sentence each.
    pub(super) advice: Vec<String>,
}

impl Trend {
    fn quiet(name: &'static str, meaning: impl Into<String>, start: Option<String>) -> Self {
        Self { name, is_alarm: false, advice: std::iter::once(meaning.into()).chain(start).collect() }
    }

    pub(super) fn of(pool: &PoolHistory) -> Self {
        if pool.checks.is_empty() {
            let why = "The log has only raises, which do not show how many requests miss.";
            return Self::quiet("unknown", why, None);
        }
        // The last check with enough requests and a rate that does not contradict them.
        let is_long = |counters: &&Counters| counters.requests() >= GETS_MIN && !is_too_low(counters);
        let Some(last) = pool.checks.iter().rev().find(is_long) else {
            let why = format!(
                "No line has {GETS_MIN} requests since a raise with a consistent rate: too few to recommend a limit."
            );
            return Self::quiet("too short to tell", why, None);
        };
        let raises = pool.printed_raises + pool.silent_raises;
        let start = pool.limit.filter(|_| raises > 0).map(|limit| {
            let raises = counted(raises, "raise");
            format!("Set PINPOOL_POOL_SIZE_LIMIT={limit} to start there and skip the {raises}.")
        });
        let is_raise_due = last.eviction_rate > TOLERABLE_RATE && last.unsatisfied_rate > TOLERABLE_RATE;
        if !is_raise_due && !pool.is_raised() {
            let found = match pool.limit {
                None => ": nothing to set.".to_owned(),
                Some(limit) if raises == 0 => {
                    format!(" with the limit that it began with, {limit} buffers: nothing to set.")
                }
                Some(limit) => format!(": it keeps up to {limit} idle buffers."),
            };
            return Self::quiet("steady", format!("The pool has found its size{found}"), start);
        }
        let misses = last.unsatisfied_rate * 100.0;
        let has_fallen = last.unsatisfied_rate < pool.checks[0].unsatisfied_rate / 2.0;
        if raises < MANY_RAISES || last.unsatisfied_rate < THRASHING_RATE || has_fallen {
            let to = pool.limit.map_or_else(String::new, |limit| format!(", to {limit} buffers"));
            let rising =
                format!("The limit was still rising at the last line{to}; {misses:.3} % of the requests missed.");
            let is_useless = pool.limit.is_some() && last.unsatisfied_rate > USELESS_RATE;
            let start = if is_useless { Some("It is too early to recommend a limit.".to_owned()) } else { start };
            return Self::quiet("warming up", rising, start);
        }
        let advice = vec![
            format!(
                "{misses:.1} % of the requests found no idle buffer of their size, after {}: sizes rarely repeat, and each raise \
                 holds more memory.",
                counted(raises, "raise")
            ),
            "Batch to fewer sizes. In pinpool, PINPOOL_PRESET=adaptive serves all sizes from the same pinned memory, and \
             PINPOOL_MAX_BYTES limits it; with the tensorflow preset PINPOOL_ROUNDING=pow2 makes sizes repeat."
                .to_owned(),
        ];
        Self { name: "thrashing", is_alarm: true, advice }
    }
}
