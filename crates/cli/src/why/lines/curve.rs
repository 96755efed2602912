//! A log's messages as curves over the gets that it shows, for pictures.
//!
//! Counters begin again at each raise, so the gets of the windows before are added. Gets of windows that the log does not show
//! are not counted: the position of a message is a lower bound.

use super::history::{Entry, History, PoolHistory};
use super::message::{Counters, Figures, Message};
use super::verdict::Verdict;

/// What the log shows of one pool.
#[derive(Debug)]
pub(crate) struct Curve {
    pub(crate) checks: Vec<CheckPoint>,
    pub(crate) raises: Vec<RaisePoint>,
    pub(crate) verdict: &'static str,
    /// A sentence each.
    pub(crate) advice: Vec<String>,
}

/// One `After` message.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct CheckPoint {
    pub(crate) gets: u64,
    /// Before a raise that follows.
    pub(crate) limit: Option<u64>,
    pub(crate) evicted: u64,
    /// The rate of the gets since the last raise; not finite where TensorFlow divided by 0.
    pub(crate) unsatisfied_rate: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RaisePoint {
    pub(crate) gets: u64,
    pub(crate) to: u64,
}

/// A curve for each pool of `history`.
pub(super) fn curves(messages: &[Message], history: &History) -> Vec<Curve> {
    let mut plotters: Vec<Plotter> = history.pools.iter().map(Plotter::new).collect();
    for (message, entry) in messages.iter().zip(&history.entries) {
        if let Some(plotter) = plotters.get_mut(entry.pool) {
            plotter.add(message, entry);
        }
    }
    plotters.into_iter().map(|plotter| plotter.curve).collect()
}

struct Plotter {
    curve: Curve,
    /// Counts of the windows before.
    gets_before: u64,
    evicted_before: u64,
    /// Gets and evictions of this window so far.
    window: (u64, u64),
    limit: Option<u64>,
}

impl Plotter {
    fn new(pool: &PoolHistory) -> Self {
        let verdict = Verdict::of(pool);
        let curve =
            Curve { checks: Vec::new(), raises: Vec::new(), verdict: verdict.name(), advice: verdict.advice(pool) };
        Self { curve, gets_before: 0, evicted_before: 0, window: (0, 0), limit: None }
    }

    fn add(&mut self, message: &Message, entry: &Entry) {
        match message.figures {
            Figures::After(counters) => self.add_check(&counters, entry),
            Figures::Raise { to, .. } => {
                self.add_silent(self.gets(), entry);
                self.close_window();
                self.curve.raises.push(RaisePoint { gets: self.gets(), to });
                self.limit = Some(to);
            }
        }
    }

    fn add_check(&mut self, counters: &Counters, entry: &Entry) {
        // A log that lost the gets still has the puts, which are nearly as many.
        let window = (counters.get.unwrap_or(counters.put), counters.evicted);
        if entry.silent_raises > 0 || window.0 < self.window.0 || window.1 < self.window.1 {
            self.close_window();
        }
        self.window = window;
        self.add_silent(self.gets(), entry);
        self.limit = entry.limit.or(self.limit);
        self.curve.checks.push(CheckPoint {
            gets: self.gets(),
            limit: entry.limit,
            evicted: self.evicted_before.saturating_add(window.1),
            unsatisfied_rate: counters.unsatisfied_rate,
        });
    }

    fn gets(&self) -> u64 {
        self.gets_before.saturating_add(self.window.0)
    }

    fn close_window(&mut self) {
        let (gets, evicted) = std::mem::take(&mut self.window);
        self.gets_before = self.gets_before.saturating_add(gets);
        self.evicted_before = self.evicted_before.saturating_add(evicted);
    }

    /// The raises between the message before and this one, which is at `gets`.
    fn add_silent(&mut self, gets: u64, entry: &Entry) {
        let Some(limit) = entry.limit else { return };
        let last_check = self.curve.checks.last().map_or(0, |check| check.gets);
        let last_raise = self.curve.raises.last().map_or(0, |raise| raise.gets);
        let from = last_check.max(last_raise).min(gets);
        let limits = limits_up_to(self.limit, limit, entry.silent_raises);
        for (at, to) in (1..).zip(limits) {
            let gets = from + (gets - from) / (entry.silent_raises + 1) * at;
            self.curve.raises.push(RaisePoint { gets, to });
        }
    }
}

/// The limits after each of `raises`, of which the last gives `to`. `to` alone where the chain from `before` does not lead to it.
fn limits_up_to(before: Option<u64>, to: u64, raises: u64) -> Vec<u64> {
    let mut limit = before.unwrap_or(super::message::START_LIMIT);
    let mut limits = Vec::new();
    for _ in 0..raises {
        limit = limit.saturating_add(limit / 10).min(to);
        limits.push(limit);
    }
    if limits.last() == Some(&to) { limits } else { limits.iter().map(|_| to).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn raises_between_two_limits_are_a_tenth_each() {
        assert_eq!(limits_up_to(Some(110), 146, 3), [121, 133, 146]);
        assert_eq!(limits_up_to(None, 121, 2), [110, 121]);
        assert_eq!(limits_up_to(Some(100), 5000, 2), [5000, 5000]);
        assert!(limits_up_to(Some(100), 100, 0).is_empty());
    }
}
