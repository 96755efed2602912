//! The figures of a pool at one moment, and how fast they change.

use std::cell::Cell;
use std::collections::VecDeque;
use std::time::Duration;

use serde_json::Value;

/// Values that are kept for each curve.
const KEPT: usize = 200;

#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Snapshot {
    /// Empty for a pool without a name.
    pub(super) name: String,
    pub(super) backend: String,
    pub(super) preset: String,
    pub(super) pinned_bytes: u64,
    pub(super) in_use_bytes: u64,
    pub(super) in_flight_bytes: u64,
    pub(super) idle_bytes: u64,
    /// Held, and in no buffer.
    pub(super) free_bytes: u64,
    pub(super) fallback_bytes: u64,
    pub(super) max_bytes: Option<u64>,
    pub(super) buffers_in_use: u64,
    pub(super) buffers_in_flight: u64,
    pub(super) buffers_idle: u64,
    pub(super) pool_size_limit: u64,
    pub(super) raises: u64,
    pub(super) gets: u64,
    pub(super) hits: u64,
    pub(super) evicted: u64,
    pub(super) pins: u64,
    pub(super) unpins: u64,
    pub(super) waits: u64,
    /// Threads and tasks that wait now.
    pub(super) waiting: u64,
    /// Time of all threads that the pool took so far: waiting, in calls of the back-end and in moves.
    pub(super) lost_us: u64,
    pub(super) fallbacks: u64,
    pub(super) oldest_in_flight: Option<Duration>,
    pub(super) oldest_in_flight_stream: Option<u64>,
    /// Why the pool is as fast as it is, the cause first; empty where the process does not say.
    pub(super) why: Vec<String>,
    pub(super) is_alarm: bool,
    /// Whether the process does not say all of these, and is of another version.
    pub(super) is_partial: bool,
    /// The largest first.
    pub(super) owners: Vec<Owner>,
}

/// The holders of buffers under one tag.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Owner {
    pub(super) tag: String,
    pub(super) buffers: u64,
    pub(super) bytes: u64,
    /// How long the oldest of them has been out.
    pub(super) oldest: Option<Duration>,
}

impl Owner {
    fn of_json(owner: &Value) -> Self {
        Self {
            tag: owner["tag"].as_str().unwrap_or_default().to_owned(),
            buffers: owner["buffers"].as_u64().unwrap_or(0),
            bytes: owner["bytes"].as_u64().unwrap_or(0),
            oldest: owner["oldest_seconds"].as_f64().and_then(|age| Duration::try_from_secs_f64(age).ok()),
        }
    }
}

impl Snapshot {
    /// From a line of the socket; what is missing is 0.
    pub(super) fn of_json(stats: &Value) -> Self {
        let number = |path: &str| stats.pointer(path).and_then(Value::as_u64);
        let is_partial = Cell::new(false);
        let count = |path: &str| {
            number(path).unwrap_or_else(|| {
                is_partial.set(true);
                0
            })
        };
        let time = |path: &str| {
            stats.pointer(path).and_then(Value::as_f64).and_then(|time| Duration::try_from_secs_f64(time).ok())
        };
        let lost = |path: &str| micros(time(&format!("{path}/total_seconds")).unwrap_or_default());
        let text = |name: &str| stats[name].as_str().unwrap_or_default().to_owned();
        let mut snapshot = Self {
            name: text("name"),
            backend: text("backend"),
            preset: text("preset"),
            pinned_bytes: count("/memory/held_bytes"),
            in_use_bytes: count("/memory/in_use_bytes"),
            in_flight_bytes: count("/copies/in_flight_bytes"),
            idle_bytes: count("/memory/idle_bytes"),
            free_bytes: count("/memory/free_bytes") + count("/memory/transit_bytes"),
            fallback_bytes: count("/memory/fallback_bytes"),
            max_bytes: number("/limits/max_bytes"),
            buffers_in_use: count("/memory/in_use"),
            buffers_in_flight: count("/copies/in_flight"),
            buffers_idle: count("/memory/idle"),
            pool_size_limit: count("/limits/max_idle_buffers"),
            raises: count("/limits/raises"),
            gets: count("/requests/served"),
            hits: count("/requests/hits"),
            evicted: count("/memory/evictions/over_limit"),
            pins: count("/memory/pin/count"),
            unpins: count("/memory/unpin/count"),
            waits: count("/requests/waits"),
            lost_us: ["/requests/wait_time", "/memory/pin/time", "/memory/unpin/time", "/memory/remap/time"]
                .map(lost)
                .iter()
                .sum::<u64>()
                + micros(time("/waiting_seconds").unwrap_or_default()),
            waiting: number("/requests/waiting").unwrap_or(0),
            fallbacks: count("/requests/fallbacks"),
            oldest_in_flight: time("/copies/oldest_age_seconds"),
            oldest_in_flight_stream: number("/copies/oldest_stream"),
            why: stats["why"]["lines"]
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(Value::as_str)
                .map(str::to_owned)
                .collect(),
            is_alarm: stats.pointer("/why/is_alarm").and_then(Value::as_bool).unwrap_or(false),
            is_partial: false,
            owners: stats["owners"].as_array().into_iter().flatten().map(Owner::of_json).collect(),
        };
        snapshot.is_partial = is_partial.get();
        snapshot
    }
}

/// The last two snapshots, and the hit rate between each two.
#[derive(Debug, Default)]
pub(super) struct History {
    pub(super) now: Snapshot,
    before: Option<Snapshot>,
    between: Duration,
    /// Since the first snapshot.
    pub(super) elapsed: Duration,
    /// Microseconds lost of each second, and bytes held, oldest first.
    pub(super) lost: VecDeque<u64>,
    pub(super) held: VecDeque<u64>,
}

impl History {
    pub(super) fn add(&mut self, snapshot: Snapshot, between: Duration) {
        let is_first = self.elapsed.is_zero() && self.before.is_none() && self.now == Snapshot::default();
        let before = std::mem::replace(&mut self.now, snapshot);
        if is_first {
            return;
        }
        self.before = Some(before);
        self.between = between;
        self.elapsed += between;
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // Not below 0; saturates.
        let lost = self.rate(|now| now.lost_us).round() as u64;
        for (curve, value) in [(&mut self.lost, lost), (&mut self.held, self.now.pinned_bytes)] {
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

    /// Percent of the gets since the snapshot before; `None` if there were none.
    pub(super) fn recent_hit_rate(&self) -> Option<f64> {
        let before = self.before.as_ref()?;
        percent(self.now.hits.saturating_sub(before.hits), self.now.gets.saturating_sub(before.gets))
    }

    /// Percent of all gets; `None` before the first.
    pub(super) fn hit_rate(&self) -> Option<f64> {
        percent(self.now.hits, self.now.gets)
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

fn percent(part: u64, all: u64) -> Option<f64> {
    (all > 0).then(|| (part as f64 / all as f64 * 100.0).min(100.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_socket_has_every_figure() {
        let pool =
            pinpool::Pool::builder().without_env().backend(pinpool::Backend::Heap).name("train").build().unwrap();
        let held = pool.get(1 << 20).unwrap();
        (0..2).for_each(|_| drop(pool.get(1 << 20).unwrap()));
        let snapshot = Snapshot::of_json(&serde_json::to_value(pool.stats()).unwrap());
        assert!(snapshot.pins > 0 && snapshot.hits > 0 && snapshot.in_use_bytes > 0 && snapshot.max_bytes.is_some());
        assert_eq!((snapshot.name.as_str(), snapshot.is_partial), ("train", false));
        drop(held);
    }

    #[test]
    fn owners_come_with_a_line_of_the_socket() {
        let line = r#"{"owners":[{"tag":"images","buffers":2,"bytes":4096,"asked_bytes":4000,"oldest_seconds":1.5},{"tag":"b"}]}"#;
        let Snapshot { owners, is_partial, .. } = Snapshot::of_json(&serde_json::from_str(line).unwrap());
        assert!(is_partial, "the line has no counts");
        let images = Owner { tag: "images".into(), buffers: 2, bytes: 4096, oldest: Some(Duration::from_millis(1500)) };
        assert_eq!(owners, [images, Owner { tag: "b".into(), buffers: 0, bytes: 0, oldest: None }]);
    }

    #[test]
    fn rates_are_of_the_time_between_two_snapshots() {
        let snapshot = |gets: u64, hits: u64| Snapshot { gets, hits, ..Snapshot::default() };
        let mut history = History::default();
        history.add(snapshot(1000, 100), Duration::from_millis(500));
        assert_eq!((history.rate(|now| now.gets), history.recent_hit_rate()), (0.0, None));
        history.add(snapshot(1100, 199), Duration::from_millis(500));
        assert_eq!((history.rate(|now| now.gets), history.recent_hit_rate()), (200.0, Some(99.0)));
        assert_eq!((history.lost.len(), history.elapsed), (1, Duration::from_millis(500)));
        history.add(snapshot(1100, 199), Duration::from_millis(500));
        assert_eq!((history.recent_hit_rate(), history.held.len()), (None, 2));
        assert!(history.hit_rate().is_some_and(|rate| (rate - 18.0909).abs() < 1e-3));
    }
}
