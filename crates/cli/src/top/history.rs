//! Snapshots of one pool over time: the last two, and curves since the first.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use pinpool_observe::diagnosis::Snapshot;
use serde_json::Value;

use crate::diagnosis::from_process;
use crate::series::{lost_ns, snapshot_of};
use crate::served::pools;

/// Maximum number of values in a curve.
const KEPT: usize = 200;

#[derive(Debug, Default)]
pub(super) struct History {
    process: u64,
    /// Index of the pool, and the number of pools in the process.
    pool: usize,
    pub(super) pools: usize,
    /// Name, preset and backend.
    pub(super) title: String,
    /// The diagnosis, the cause first.
    pub(super) why: Vec<String>,
    pub(super) is_alarm: bool,
    pub(super) now: Snapshot,
    before: Option<Snapshot>,
    /// Arrival of the last snapshot, and the time since the previous one and since the first.
    arrived: Option<Instant>,
    between: Duration,
    pub(super) elapsed: Duration,
    /// Microseconds lost of each second, and bytes held, oldest first.
    pub(super) lost: VecDeque<u64>,
    pub(super) held: VecDeque<u64>,
}

impl History {
    pub(super) fn of(pool: usize) -> Self {
        Self { pool, ..Self::default() }
    }

    pub(super) fn next_pool(&mut self) {
        *self = Self::of((self.pool + 1) % self.pools.max(1));
    }

    /// Adds the statistics of a process that arrived at `now`.
    pub(super) fn add(&mut self, object: &Value, now: Instant) {
        let pools = pools(object);
        (self.process, self.pools) = (object["process"].as_u64().unwrap_or(0), pools.len());
        let Some(pool) = pools.get(self.pool).or(pools.first()) else { return };
        let (diagnosis, text) = (from_process(pool), |name: &str| pool[name].as_str().unwrap_or("?").to_owned());
        self.title = format!("{}: {} on {}", diagnosis.pool, text("preset"), text("backend"));
        (self.why, self.is_alarm) = (diagnosis.lines, diagnosis.is_alarm);
        self.add_snapshot(snapshot_of(pool), now);
    }

    pub(super) fn add_snapshot(&mut self, snapshot: Snapshot, now: Instant) {
        let before = std::mem::replace(&mut self.now, snapshot);
        let Some(arrived) = self.arrived.replace(now) else { return };
        (self.before, self.between) = (Some(before), now - arrived);
        self.elapsed += self.between;
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // Not below 0; saturates.
        let lost = (self.rate(lost_ns) / 1e3).round() as u64;
        for (curve, value) in [(&mut self.lost, lost), (&mut self.held, self.now.held_bytes)] {
            curve.push_back(value);
            if curve.len() > KEPT {
                curve.pop_front();
            }
        }
    }

    /// A description of the process and pool, and the keys.
    pub(super) fn place(&self) -> (String, &'static str) {
        match self.pools {
            ..=1 => (format!("process {}", self.process), "q or Ctrl-C ends"),
            pools => (
                format!("process {}, pool {} of {pools}", self.process, self.pool + 1),
                "n: next pool; a: all pools; q or Ctrl-C ends",
            ),
        }
    }

    /// Growth of a counter per second.
    pub(super) fn rate(&self, counter: impl Fn(&Snapshot) -> u64) -> f64 {
        let Some(before) = self.before.as_ref().filter(|_| !self.between.is_zero()) else { return 0.0 };
        counter(&self.now).saturating_sub(counter(before)) as f64 / self.between.as_secs_f64()
    }

    /// Hit rate in percent, since the previous snapshot and overall; `None` without requests.
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
        let (mut history, begun, half) = (History::default(), Instant::now(), Duration::from_millis(500));
        history.add_snapshot(snapshot(1000, 900), begun);
        assert_eq!((history.rate(|now| now.gets), history.hit_rates()[0]), (0.0, None));
        history.add_snapshot(snapshot(1100, 901), begun + half);
        assert_eq!((history.rate(|now| now.gets), history.hit_rates()[0]), (200.0, Some(99.0)));
        assert_eq!((history.lost.len(), history.elapsed), (1, half));
        history.add_snapshot(snapshot(1100, 901), begun + 2 * half);
        assert_eq!((history.hit_rates()[0], history.held.len()), (None, 2));
        assert!(history.hit_rates()[1].is_some_and(|rate| (rate - 18.0909).abs() < 1e-3));
    }

    #[test]
    fn the_next_pool_begins_a_new_history() {
        let object = |gets: u64| {
            let pools =
                serde_json::json!([{ "snapshot": { "gets": 10 } }, { "snapshot": { "gets": gets }, "name": "b" }]);
            serde_json::json!({ "process": 5, "pools": pools })
        };
        let (mut history, begun) = (History::of(0), Instant::now());
        history.add(&object(3), begun);
        assert_eq!((history.now.gets, history.place().0.as_str()), (10, "process 5, pool 1 of 2"));
        history.next_pool();
        history.add(&object(3), begun);
        history.add(&object(7), begun + Duration::from_secs(2));
        assert!((history.rate(|now| now.gets) - 2.0).abs() < 1e-9, "per second between the objects");
        assert_eq!((history.now.gets, history.title.as_str()), (7, "b: ? on ?"));
        history.next_pool();
        assert_eq!(history.pool, 0);
    }
}
