//! The last two snapshots of a pool, and the curves since the first.

use std::collections::VecDeque;
use std::time::Duration;

use pinpool_observe::diagnosis::Snapshot;
use serde_json::Value;

use crate::diagnosis::of_object;
use crate::series::{lost_ns, snapshot_of};

/// Values that are kept for each curve.
const KEPT: usize = 200;

#[derive(Debug, Default)]
pub(super) struct History {
    /// Name, preset and backend.
    pub(super) title: String,
    /// The diagnosis, the cause first.
    pub(super) why: Vec<String>,
    pub(super) is_alarm: bool,
    pub(super) now: Snapshot,
    pub(super) before: Option<Snapshot>,
    pub(super) between: Duration,
    /// Since the first snapshot.
    pub(super) elapsed: Duration,
    /// Microseconds lost of each second, and bytes held, oldest first.
    pub(super) lost: VecDeque<u64>,
    pub(super) held: VecDeque<u64>,
}

impl History {
    /// Takes the statistics of the pool in; `between` is the time since those before, `None` of the first.
    pub(super) fn add(&mut self, pool: &Value, between: Option<Duration>) {
        let (said, text) = (of_object(pool), |name: &str| pool[name].as_str().unwrap_or("?").to_owned());
        self.title = format!("{}: {} on {}", said.pool, text("preset"), text("backend"));
        (self.why, self.is_alarm) = (said.lines, said.is_alarm);
        self.see(snapshot_of(pool), between);
    }

    pub(super) fn see(&mut self, now: Snapshot, between: Option<Duration>) {
        let before = std::mem::replace(&mut self.now, now);
        let Some(between) = between else { return };
        (self.before, self.between) = (Some(before), between);
        self.elapsed += between;
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // Not below 0; saturates.
        let lost = (self.rate(lost_ns) / 1e3).round() as u64;
        for (curve, value) in [(&mut self.lost, lost), (&mut self.held, self.now.held_bytes)] {
            curve.push_back(value);
            if curve.len() > KEPT {
                curve.pop_front();
            }
        }
    }

    /// How much a counter has grown, a second.
    pub(super) fn rate(&self, counter: impl Fn(&Snapshot) -> u64) -> f64 {
        let Some(before) = self.before.as_ref().filter(|_| !self.between.is_zero()) else { return 0.0 };
        counter(&self.now).saturating_sub(counter(before)) as f64 / self.between.as_secs_f64()
    }

    /// Percent of the gets since the snapshot before, and of all; `None` of no gets.
    pub(super) fn hit_rates(&self) -> [Option<f64>; 2] {
        let of = |hits: f64, gets: f64| (gets > 0.0).then(|| (hits / gets * 100.0).min(100.0));
        [of(self.rate(hits), self.rate(|now| now.gets)), of(hits(&self.now) as f64, self.now.gets as f64)]
    }
}

fn hits(now: &Snapshot) -> u64 {
    now.gets.saturating_sub(now.misses + now.failed_gets)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_of_the_time_between_two_snapshots() {
        let snapshot = |gets: u64, misses: u64| Snapshot { gets, misses, ..Snapshot::default() };
        let (mut history, half) = (History::default(), Some(Duration::from_millis(500)));
        history.see(snapshot(1000, 900), None);
        assert_eq!((history.rate(|now| now.gets), history.hit_rates()[0]), (0.0, None));
        history.see(snapshot(1100, 901), half);
        assert_eq!((history.rate(|now| now.gets), history.hit_rates()[0]), (200.0, Some(99.0)));
        assert_eq!((history.lost.len(), history.elapsed), (1, half.unwrap()));
        history.see(snapshot(1100, 901), half);
        assert_eq!((history.hit_rates()[0], history.held.len()), (None, 2));
        assert!(history.hit_rates()[1].is_some_and(|rate| (rate - 18.0909).abs() < 1e-3));
    }
}
