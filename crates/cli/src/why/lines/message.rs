//! The two messages of the pool and their numbers.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::diagnosis::DiagnosisText;

/// The pool raises its limit if both rates exceed this value (`kTolerable`).
pub(super) const TOLERABLE_RATE: f64 = 2e-3;
/// With fewer requests since the last raise, a check is inconclusive: a program that drains its queues only returns buffers.
pub(super) const GETS_MIN: u64 = 1_000;
/// The initial limit of TensorFlow's pool. A lower limit is raised to it directly.
pub(super) const START_LIMIT: u64 = 100;

/// Returns the limit after a raise from `limit`.
pub(super) fn raised(limit: u64) -> u64 {
    if limit < START_LIMIT { START_LIMIT } else { limit.saturating_add(limit / 10) }
}

/// One message and its prefix.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Message {
    /// The number of the message's first line, from 1.
    pub(super) line: u64,
    /// The time as printed, if there is one.
    pub(super) time: Option<String>,
    /// The name of the process, which a launcher printed before the text.
    pub(super) origin: Option<String>,
    pub(super) numbers: Numbers,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(untagged)]
pub(super) enum Numbers {
    After(Counters),
    Raise { from: u64, to: u64 },
}

/// The numbers of `PoolAllocator: After ...`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Counters {
    /// Number of requests; `None` if the log lost it.
    pub(super) get: Option<u64>,
    pub(super) put: u64,
    pub(super) evicted: u64,
    /// The rate as printed, with six significant digits; not finite if TensorFlow divided by 0.
    pub(super) eviction_rate: f64,
    pub(super) unsatisfied_rate: f64,
}

impl Counters {
    /// Returns the number of requests. If the log lost it, returns the number of returns, which is close to it.
    pub(super) fn requests(&self) -> u64 {
        self.get.unwrap_or(self.put)
    }
}

impl Numbers {
    /// Parses the numbers; `None` if a number is impossible, because the log lost or added digits.
    pub(super) fn of(numbers: &[&[u8]]) -> Option<Self> {
        let text = |at: usize| std::str::from_utf8(numbers.get(at)?).ok();
        let count = |at| text(at)?.parse::<u64>().ok();
        // A rate is not finite if TensorFlow divided by 0.
        let is_rate = |rate: &f64| !rate.is_finite() || (0.0..=1.0).contains(rate);
        let rate = |at| {
            let rate = text(at).filter(|text| !text.ends_with('.'))?.parse::<f64>().ok().filter(is_rate);
            // TensorFlow prints a rate of 0 as `0`, so `0.0` is the beginning of another rate.
            rate.filter(|&rate| rate != 0.0 || !text(at).is_some_and(|text| text.contains('.')))
        };
        if numbers.len() == 2 {
            let (from, to) = (count(0)?, count(1)?);
            return (to == raised(from)).then_some(Self::Raise { from, to });
        }
        let get = if numbers.first()?.is_empty() { None } else { Some(count(0)?) };
        Some(Self::After(Counters {
            get,
            put: count(1)?,
            evicted: count(2)?,
            eviction_rate: rate(3)?,
            unsatisfied_rate: rate(4)?,
        }))
    }
}

/// The messages of a log.
#[derive(Debug, Default)]
pub(super) struct LogContent {
    pub(super) messages: Vec<Message>,
    pub(super) lines: u64,
    /// Number of truncated or damaged messages.
    pub(super) cut: u64,
    /// The reason, with the line number, if reading the log stopped early.
    pub(super) stopped: Option<String>,
    /// Whether a pool of the log is pinned.
    pub(super) has_pinned: bool,
    /// The last diagnosis of each pool, if pinpool wrote the log.
    pub(super) diagnoses: BTreeMap<String, DiagnosisText>,
}
