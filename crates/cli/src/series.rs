//! The model of all commands: the pools of a recording, a running process or a log, with their snapshots and diagnoses.

use std::error::Error;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use pinpool_cli::table::grouped;
use pinpool_loader::StopFlag;
use pinpool_observe::diagnosis::{Snapshot, diagnose_recording};
use pinpool_replay::{Event, Recording};
use serde_json::Value;

use crate::diagnosis::{DiagnosisText, from_process, from_recording};
use crate::served::{name_of, pools, socket, worst_first};

/// Time between two checks for an interrupt.
const PAUSE: Duration = Duration::from_millis(20);

/// One pool over time.
#[derive(Debug)]
pub(crate) struct PoolSeries {
    pub(crate) name: String,
    /// In order of x: seconds, or requests if there is no time.
    pub(crate) points: Vec<(f64, Snapshot)>,
}

#[derive(Debug, Default)]
pub(crate) struct Series {
    pub(crate) pools: Vec<PoolSeries>,
    /// The diagnoses, the worst first; none for pools with too few requests.
    pub(crate) diagnoses: Vec<DiagnosisText>,
    /// The time at x = 0, in seconds since 1970.
    pub(crate) clock: Option<f64>,
    pub(crate) has_time: bool,
    /// A description of the source, and notes about it.
    pub(crate) source: String,
    pub(crate) notes: Vec<String>,
    /// Why a part is missing, if one is.
    pub(crate) warning: Option<String>,
}

impl Series {
    pub(crate) fn of_recording(recording: &Recording) -> Self {
        let (mut pools, mut ended_pools) = (Vec::new(), Vec::new());
        for description in &recording.pools {
            let number = description.number;
            let of = recording.snapshots.iter().filter(|taken| taken.pool == number);
            let mut points: Vec<_> = of.map(|taken| (taken.time_ns as f64 * 1e-9, (*taken.snapshot).clone())).collect();
            let mut latest = recording.records.iter().rev();
            let end = latest.find(|record| record.pool == number && record.event == Event::End);
            ended_pools.extend(end.map(|_| number));
            if let (Some(end), Some((_, last))) = (end, points.last()) {
                points.push((end.time_ns as f64 * 1e-9, ended(last)));
            }
            pools.push(PoolSeries { name: crate::trace::name_of(description), points });
        }
        let diagnoses = diagnose_recording(recording);
        let fact = |fact: &str| recording.pools.first()?.fact(fact);
        let (backend, version) = (fact("backend").unwrap_or("?"), fact("version").unwrap_or("?"));
        let records = grouped(recording.records.len() as u64);
        let lost = (recording.lost > 0).then(|| format!("{} records were lost.", grouped(recording.lost)));
        Self {
            pools,
            diagnoses: diagnoses.iter().map(|one| from_recording(one, ended_pools.contains(&one.pool))).collect(),
            clock: fact("time").and_then(|time| time.parse().ok()),
            has_time: true,
            source: format!("{records} records, backend {backend}, recorded by pinpool {version}"),
            notes: lost.into_iter().collect(),
            warning: recording.warning.clone(),
        }
    }

    /// The statistics of a process over `length`, or once if it is zero.
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

    /// Adds the statistics of a process. Pools that they no longer contain have ended.
    fn add(&mut self, x: f64, object: &Value) {
        for pool in &mut self.pools {
            if let Some(end) = pool.points.last().map(|(_, last)| ended(last)) {
                pool.points.push((x, end));
            }
        }
        self.diagnoses = worst_first(object).into_iter().map(from_process).collect();
        for object in worst_first(object) {
            let name = name_of(object);
            let known = self.pools.iter().position(|pool| pool.name == name);
            let at = known.unwrap_or_else(|| {
                self.pools.push(PoolSeries { name, points: Vec::new() });
                self.pools.len() - 1
            });
            let pool = &mut self.pools[at];
            pool.points.pop_if(|(at, _)| *at == x && known.is_some());
            pool.points.push((x, snapshot_of(object)));
        }
    }
}

/// The snapshot in the statistics of a pool; empty if the process runs another version of pinpool.
pub(crate) fn snapshot_of(pool: &Value) -> Snapshot {
    serde_json::from_value(pool["snapshot"].clone()).unwrap_or_default()
}

/// Time lost so far, summed over all threads.
pub(crate) fn lost_ns(of: &Snapshot) -> u64 {
    of.waiting_ns.saturating_add(of.pinning_ns).saturating_add(of.moving_ns)
}

/// The snapshot of an ended pool, which holds nothing.
fn ended(last: &Snapshot) -> Snapshot {
    let (used, used_bytes, in_flight_bytes, idle_bytes, free_bytes, held_bytes) = Default::default();
    let none = Snapshot { used, used_bytes, in_flight_bytes, idle_bytes, free_bytes, held_bytes, ..last.clone() };
    Snapshot { max_bytes: Some(0), holders: Vec::new(), ..none }
}
