//! The trend of a pool over its checks, and the recommended setting.

use pinpool_observe::diagnosis::words::counted;

use super::history::PoolHistory;
use super::limits::is_too_low;
use super::message::{Counters, GETS_MIN, TOLERABLE_RATE};

/// If more than this share of the requests miss, raising the limit did not help.
const THRASHING_RATE: f64 = 0.1;
/// If more than this share of the requests miss, the limit is not worth starting with.
const USELESS_RATE: f64 = 0.5;
/// Number of raises that count as many: together they raise a limit by a factor of 2.6.
const MANY_RAISES: u64 = 10;

pub(super) const THRASHING: &str = "thrashing";

/// Returns the trend of a pool: its name, and its meaning and the recommended setting, a sentence each.
pub(super) fn trend(pool: &PoolHistory) -> (&'static str, Vec<String>) {
    if pool.checks.is_empty() {
        return ("unknown", vec!["The log has only raises, which do not show how many requests miss.".to_owned()]);
    }
    // The last check with enough requests and a rate that is consistent with its counters.
    let is_long = |counters: &&Counters| counters.requests() >= GETS_MIN && !is_too_low(counters);
    let Some(last) = pool.checks.iter().rev().find(is_long) else {
        let why = format!(
            "No line has {GETS_MIN} requests since a raise with a consistent rate: too few to recommend a limit."
        );
        return ("too short to tell", vec![why]);
    };
    let raises = pool.printed_raises + pool.silent_raises;
    let start = pool.limit.filter(|_| raises > 0).map(|limit| {
        let raises = counted(raises, "raise");
        format!("Set PINPOOL_POOL_SIZE_LIMIT={limit} to start there and skip the {raises}.")
    });
    let is_raise_due = last.eviction_rate > TOLERABLE_RATE && last.unsatisfied_rate > TOLERABLE_RATE;
    if !is_raise_due && !pool.is_raised() {
        let keeps = pool.limit.map_or_else(String::new, |limit| format!(": it keeps up to {limit} idle buffers"));
        return ("steady", [format!("The pool has found its size{keeps}.")].into_iter().chain(start).collect());
    }
    let misses = last.unsatisfied_rate * 100.0;
    let has_fallen = last.unsatisfied_rate < pool.checks[0].unsatisfied_rate / 2.0;
    if raises < MANY_RAISES || last.unsatisfied_rate < THRASHING_RATE || has_fallen {
        let to = pool.limit.map_or_else(String::new, |limit| format!(", to {limit} buffers"));
        let rising = format!("The limit was still rising at the last line{to}; {misses:.3} % of the requests missed.");
        let start = start.filter(|_| last.unsatisfied_rate <= USELESS_RATE);
        return ("warming up", [rising].into_iter().chain(start).collect());
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
    (THRASHING, advice)
}
