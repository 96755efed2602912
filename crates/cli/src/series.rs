//! The model that all commands share: the pools of a recording, a running process or a log, with their snapshots and diagnoses.

use std::error::Error;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use pinpool_cli::table::grouped;
use pinpool_loader::StopFlag;
use pinpool_observe::diagnosis::Snapshot;
use pinpool_replay::{PoolDescription, Recording};
use serde_json::Value;

use crate::diagnosis::{DiagnosisText, from_process, from_recording, recorded};
use crate::served::{name_of, pools, socket};

/// Time between two checks for an interrupt.
const PAUSE: Duration = Duration::from_millis(20);

/// One pool over time.
#[derive(Debug, Default)]
pub(crate) struct PoolSeries {
    pub(crate) name: String,
    /// Number and name of the pool in the statistics of a process, in which several pools may have the same name.
    pub(crate) key: [Value; 2],
    /// Preset and backend, if the source is a process.
    pub(crate) kind: String,
    /// The statistics and holders as a process prints them.
    pub(crate) text: String,
    /// Whether the process still has the pool.
    pub(crate) is_running: bool,
    /// Snapshots in order of x, which is the time in seconds, or the number of requests if there is no time.
    pub(crate) points: Vec<(f64, Snapshot)>,
}

#[derive(Debug, Default)]
pub(crate) struct Series {
    pub(crate) pools: Vec<PoolSeries>,
    pub(crate) process: Option<u64>,
    /// The diagnoses, the worst first. Pools with too few requests have none.
    pub(crate) diagnoses: Vec<DiagnosisText>,
    /// The time at x = 0, in seconds since 1970.
    pub(crate) clock: Option<f64>,
    pub(crate) has_time: bool,
    /// A description of the source, and notes about it.
    pub(crate) source: String,
    pub(crate) notes: Vec<String>,
    /// The reason that a part of the source is missing.
    pub(crate) warning: Option<String>,
}

impl Series {
    pub(crate) fn of_recording(recording: &Recording) -> Self {
        let ends = recording.ends();
        let pool = |pool: &PoolDescription| {
            let of = recording.snapshots.iter().filter(|taken| taken.pool == pool.number);
            let mut points: Vec<_> = of.map(|taken| (taken.time_ns as f64 * 1e-9, (*taken.snapshot).clone())).collect();
            if let (Some(end_ns), Some((_, last))) = (ends.get(&pool.number), points.last()) {
                points.push((*end_ns as f64 * 1e-9, ended(last)));
            }
            PoolSeries { name: pool.name(), points, ..PoolSeries::default() }
        };
        let diagnoses = recorded(recording);
        let fact = |fact: &str| recording.pools.first()?.fact(fact);
        let (backend, version) = (fact("backend").unwrap_or("?"), fact("version").unwrap_or("?"));
        let records = grouped(recording.records.len() as u64);
        let lost = (recording.lost > 0).then(|| format!("{} records were lost.", grouped(recording.lost)));
        Self {
            pools: recording.pools.iter().map(pool).collect(),
            diagnoses: diagnoses.iter().map(|one| from_recording(one, ends.contains_key(&one.pool))).collect(),
            clock: fact("time").and_then(|time| time.parse().ok()),
            has_time: true,
            source: format!("{records} records, backend {backend}, recorded by pinpool {version}"),
            notes: lost.into_iter().collect(),
            warning: recording.warning.clone(),
            ..Self::default()
        }
    }

    /// Returns the series of a single object that a process has sent.
    pub(crate) fn once(object: &Value) -> Self {
        let mut series = Self::default();
        series.add(0.0, object);
        series
    }

    /// Reads the statistics of a process over `length`, or once if it is zero.
    ///
    /// # Errors
    ///
    /// If the process serves no pool.
    pub(crate) fn of_process(target: &str, length: Duration, stop: &StopFlag) -> Result<Self, Box<dyn Error>> {
        let (object, objects) = socket::first(target, stop)?;
        if pools(&object).is_empty() {
            return Err(format!("{target}: the process has no pool now").into());
        }
        let mut series = Self {
            clock: SystemTime::now().duration_since(UNIX_EPOCH).ok().map(|since| since.as_secs_f64()),
            has_time: true,
            source: "a process, which sends its statistics once a second".to_owned(),
            ..Self::default()
        };
        let begun = Instant::now();
        series.add(0.0, &object);
        while !stop.is_raised() && begun.elapsed() < length {
            match objects.recv_timeout(PAUSE) {
                Ok(Ok(object)) => series.add(begun.elapsed().as_secs_f64(), &object),
                Ok(Err(why)) => series.warning = Some(why),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        Ok(series)
    }

    /// Adds the statistics of a process. Pools that are missing in `object` have ended.
    pub(crate) fn add(&mut self, x: f64, object: &Value) {
        for pool in &mut self.pools {
            let end = pool.points.last().filter(|_| pool.is_running).map(|(_, last)| (x, ended(last)));
            pool.points.extend(end);
            pool.is_running = false;
        }
        self.process = object["process"].as_u64();
        self.diagnoses.clear();
        for object in pools(object) {
            let key = ["number", "name"].map(|name| object[name].clone());
            let known = self.pools.iter().position(|pool| pool.key == key);
            let at = known.unwrap_or_else(|| {
                let (name, number) = (name_of(object), &key[0]);
                let is_taken = self.pools.iter().any(|pool| pool.name == name);
                let name = if is_taken { format!("{name} (pool {number})") } else { name };
                self.pools.push(PoolSeries { name, key, ..PoolSeries::default() });
                self.pools.len() - 1
            });
            let pool = &mut self.pools[at];
            self.diagnoses.push(from_process(pool.name.clone(), object));
            let text = |name: &str| object[name].as_str().unwrap_or("?");
            pool.kind = format!("{} on {}", text("preset"), text("backend"));
            let texts = ["table", "dump"].iter().filter_map(|name| object[name].as_str());
            pool.text = texts.collect::<Vec<_>>().join("\n\n");
            pool.is_running = true;
            pool.points.pop_if(|(at, _)| *at == x && known.is_some());
            let snapshot = serde_json::from_value(object["snapshot"].clone());
            // The snapshot is empty if the process runs another version of pinpool.
            pool.points.push((x, snapshot.unwrap_or_default()));
        }
        self.diagnoses.sort_by(DiagnosisText::worst_first);
    }

    /// Returns the pool of a diagnosis, and its last snapshot.
    pub(crate) fn latest(&self, of: &DiagnosisText) -> Option<(&PoolSeries, &Snapshot)> {
        let pool = self.pools.iter().find(|pool| pool.name == of.pool)?;
        Some((pool, &pool.points.last()?.1))
    }

    /// Forgets pools that have ended, and all but the last `count` points of each running pool.
    pub(crate) fn keep_running(&mut self, count: usize) {
        self.pools.retain(|pool| pool.is_running);
        for pool in &mut self.pools {
            pool.points.drain(..pool.points.len().saturating_sub(count));
        }
    }
}

impl PoolSeries {
    /// Returns the growth of a counter per second between the last two points.
    pub(crate) fn rate(&self, counter: impl Fn(&Snapshot) -> u64) -> f64 {
        self.rates(counter).last().unwrap_or(0.0)
    }

    /// Returns the growth of a counter per second between each two points.
    pub(crate) fn rates(&self, counter: impl Fn(&Snapshot) -> u64) -> impl Iterator<Item = f64> {
        self.points.windows(2).map(move |pair| {
            let [(from, before), (to, now)] = pair else { return 0.0 };
            let grown = counter(now).saturating_sub(counter(before)) as f64;
            if to > from { grown / (to - from) } else { 0.0 }
        })
    }
}

/// Returns the snapshot of an ended pool, which holds nothing.
fn ended(last: &Snapshot) -> Snapshot {
    Snapshot { max_bytes: Some(0), pool_size_limit: last.pool_size_limit, ..last.since(&Snapshot::default()) }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn rates_are_per_second_and_ended_pools_are_forgotten() {
        let mut series = Series::default();
        let pool = |name: &str, requests: u64| json!({ "name": name, "snapshot": { "requests": requests } });
        series.add(0.0, &json!({ "pools": [pool("a", 1000), pool("b", 1)] }));
        assert_eq!((series.pools.len(), series.pools[0].rate(|now| now.requests)), (2, 0.0));
        series.add(0.5, &json!({ "pools": [pool("a", 1100)] }));
        series.add(2.5, &json!({ "pools": [pool("a", 1102)] }));
        assert_eq!(series.pools[0].rates(|now| now.requests).collect::<Vec<_>>(), [200.0, 1.0]);
        let held: Vec<_> = series.pools[1].points.iter().map(|(_, of)| of.max_bytes).collect();
        assert_eq!(held, [None, Some(0)], "it has ended");
        series.keep_running(2);
        assert_eq!((series.pools.len(), series.pools[0].points.len()), (1, 2));
        assert!((series.pools[0].rate(|now| now.requests) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn two_pools_with_one_name_keep_their_own_statistics() {
        let pool =
            |number: u64, requests: u64| json!({ "name": "x", "number": number, "snapshot": { "requests": requests } });
        let shown = |series: &Series| {
            let latest = series.diagnoses.iter().filter_map(|one| series.latest(one));
            latest.map(|(pool, now)| (pool.name.clone(), now.requests)).collect::<Vec<_>>()
        };
        let mut series = Series::once(&json!({ "pools": [pool(3, 100), pool(5, 7)] }));
        let second = |requests| ("x (pool 5)".to_owned(), requests);
        assert_eq!(shown(&series), [("x".to_owned(), 100), second(7)]);
        // The first pool has ended.
        series.add(1.0, &json!({ "pools": [pool(5, 8)] }));
        assert_eq!(shown(&series), [second(8)]);
    }
}
