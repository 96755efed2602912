//! Whether a pool has found its size, from its checks in order; and what to set.

use pinpool_observe::judge::Cause;
use pinpool_observe::judge::words::counted;

use super::history::PoolHistory;
use super::ledger::is_too_low;
use super::message::{Counters, GETS_MIN, TOLERABLE_RATE};
use crate::diagnosis::Said;

/// With more misses than this share of the gets, a pool whose limit has grown a lot is of little use.
const THRASHING_RATE: f64 = 0.1;
/// With more misses than this share of the gets, the limit that was reached is none to begin with.
const USELESS_RATE: f64 = 0.5;
/// This many raises are a factor of 2.6.
const MANY_RAISES: u64 = 10;

/// How a line about a diagnosis begins, after the name of its pool.
const DIAGNOSIS: &str = "diagnosis: ";

/// The diagnosis in a line of pinpool's own log.
pub(super) fn said(line: &[u8]) -> Option<Said> {
    let text = String::from_utf8_lossy(line);
    let (before, diagnosis) = text.split_once(DIAGNOSIS)?;
    let cause = Cause::ALL.iter().find(|cause| diagnosis.starts_with(cause.name()))?;
    let name = before.rsplit_once("pool[").and_then(|(_, name)| name.trim_end().strip_suffix(']'));
    let lines: Vec<_> = diagnosis.trim_end().split("; ").map(|part| part.replace(char::is_control, " ")).collect();
    // Sizes that cost nothing come without advice.
    let has_cure = lines.len() > 1;
    let is_alarm = *cause >= Cause::Thrashing || (*cause == Cause::SizesNeverRecur && has_cure);
    Some(Said { pool: name.unwrap_or("the pool").to_owned(), cause: cause.name().to_owned(), is_alarm, lines })
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The last check raised nothing.
    Steady,
    /// The limit rises, and has not risen far, or there are fewer misses than before, or few.
    WarmingUp,
    /// The limit has risen far, and a tenth of the gets or more miss, about as many as before: sizes hardly ever repeat.
    Thrashing,
    /// There are raises alone.
    Unknown,
    /// No line has gets enough.
    TooShort,
}

/// The last check that decides anything: one with gets enough, and with a rate that they do not contradict.
fn deciding(pool: &PoolHistory) -> Option<&Counters> {
    let is_long = |counters: &&Counters| counters.get.unwrap_or(counters.put) >= GETS_MIN && !is_too_low(counters);
    pool.checks.iter().rev().map(|(_, counters)| counters).find(is_long)
}

impl Verdict {
    pub(super) fn of(pool: &PoolHistory) -> Self {
        if pool.checks.is_empty() {
            return Self::Unknown;
        }
        let Some(last) = deciding(pool) else { return Self::TooShort };
        if !is_raise_due(last) && !pool.is_raised() {
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

    /// What it means for `pool`, and what to set; a sentence each.
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
            (Self::WarmingUp, Some(limit)) if rate > USELESS_RATE => vec![format!(
                "The limit was still rising at the last line, to {limit} buffers, and {misses:.1} % of the gets missed: too early to \
                 say what to begin with."
            )],
            (Self::WarmingUp, Some(limit)) => {
                let rising = format!("The limit was still rising at the last line, to {limit} buffers; {misses:.3} % of the gets missed.");
                std::iter::once(rising).chain(start(limit)).collect()
            }
            (Self::WarmingUp, None) => vec![format!("The limit was still rising at the last line; {misses:.3} % of the gets missed.")],
            (Self::Thrashing, _) => vec![
                format!(
                    "{misses:.1} % of the gets found no idle buffer of their size, after {}: sizes hardly ever \
                     repeat, and each raise holds more memory.",
                    counted(raises, "raise")
                ),
                "Batch to fewer sizes. In pinpool, PINPOOL_PRESET=adaptive cuts all sizes from the same pinned memory, and \
                 PINPOOL_MAX_BYTES limits it; with TensorFlow's rules PINPOOL_ROUNDING=pow2 makes sizes repeat."
                    .to_owned(),
            ],
            (Self::Unknown, _) => vec!["The log has raises alone, which do not say how many gets miss.".to_owned()],
            (Self::TooShort, _) => vec![format!("No line has {GETS_MIN} gets since a raise and a rate that they allow: too little to say what to set.")],
        }
    }
}

fn is_raise_due(counters: &Counters) -> bool {
    counters.eviction_rate > TOLERABLE_RATE && counters.unsatisfied_rate > TOLERABLE_RATE
}
