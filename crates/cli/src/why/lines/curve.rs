//! A log's messages as a series of snapshots, for charts.
//!
//! Counters restart at each raise, so the requests of the windows before are added. Requests of windows that the log does not show
//! are not counted: the position of a message is a lower bound.

use pinpool_observe::judge::Snapshot;

use super::history::{Entry, History};
use super::message::{Message, Numbers};
use super::trend::Trend;

/// What the log shows of one pool.
#[derive(Debug)]
pub(crate) struct Curve {
    /// One for each message: requests, misses, evictions and the limit so far.
    pub(crate) points: Vec<Snapshot>,
    /// Without `After` messages the requests are unknown.
    pub(crate) has_requests: bool,
    pub(crate) trend: &'static str,
    /// A sentence each.
    pub(crate) advice: Vec<String>,
    /// Requests and evictions of the windows before, and of this one.
    before: (u64, u64),
    window: (u64, u64),
}

/// A curve for each pool of `history`.
pub(super) fn curves(messages: &[Message], history: &History) -> Vec<Curve> {
    let new = |pool| {
        let trend = Trend::of(pool);
        let (trend, advice) = (trend.name(), trend.advice(pool));
        Curve { points: Vec::new(), has_requests: false, trend, advice, before: (0, 0), window: (0, 0) }
    };
    let mut curves: Vec<_> = history.pools.iter().map(new).collect();
    for (message, entry) in messages.iter().zip(&history.entries) {
        curves[entry.pool].add(message, entry);
    }
    curves
}

impl Curve {
    fn add(&mut self, message: &Message, entry: &Entry) {
        let last = self.points.last().cloned().unwrap_or_default();
        let point = match message.numbers {
            Numbers::After(counters) => {
                // A log that lost the requests still has the returns, which are nearly as many.
                let window = (counters.get.unwrap_or(counters.put), counters.evicted);
                if entry.silent_raises > 0 || window.0 < self.window.0 || window.1 < self.window.1 {
                    self.close_window();
                }
                (self.window, self.has_requests) = (window, true);
                let gets = self.before.0.saturating_add(window.0);
                #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // Not below 0; saturates.
                let misses = (counters.unsatisfied_rate * gets as f64) as u64;
                let evicted = self.before.1.saturating_add(window.1);
                Snapshot { gets, misses, evicted, pool_size_limit: entry.limit.or(last.pool_size_limit), ..last }
            }
            Numbers::Raise { to, .. } => {
                self.close_window();
                Snapshot { gets: self.before.0, pool_size_limit: Some(to), ..last }
            }
        };
        self.points.push(point);
    }

    fn close_window(&mut self) {
        let (gets, evicted) = std::mem::take(&mut self.window);
        self.before = (self.before.0.saturating_add(gets), self.before.1.saturating_add(evicted));
    }
}
