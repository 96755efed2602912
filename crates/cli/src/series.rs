//! What all commands show: the pools of a recording, a running process or a replay, with their snapshots over time and what is said of
//! each.

use std::error::Error;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use pinpool::{Pool, unstable};
use pinpool_loader::StopFlag;
use pinpool_observe::judge::{Snapshot, judge_recording};
use pinpool_replay::{Event, Recording, Replay, TraceError, Watch, Workload};
use serde_json::Value;

use crate::served::socket::{first_line, statistics};
use crate::served::{name_of, pools, worst_first};
use crate::why::{Judged, Said, of_judgement, of_object};

/// Snapshots of a replay over its time, and as many over its requests.
const LOOKS: u64 = 1_000;
/// Between two looks for a line of a process.
const PAUSE: Duration = Duration::from_millis(20);

/// One pool over time.
#[derive(Debug)]
pub(crate) struct OfPool {
    pub(crate) name: String,
    /// In order of time, which is in seconds; of a trace without time, in requests.
    pub(crate) points: Vec<(f64, Snapshot)>,
    /// `None` if there are too few requests to judge.
    pub(crate) said: Option<Said>,
}

#[derive(Debug, Default)]
pub(crate) struct Series {
    /// The worst first.
    pub(crate) pools: Vec<OfPool>,
    /// What the clock showed at 0, in seconds since 1970.
    pub(crate) clock: Option<f64>,
    pub(crate) has_time: bool,
}

impl Series {
    pub(crate) fn said(&self) -> Vec<Said> {
        self.pools.iter().filter_map(|pool| pool.said.clone()).collect()
    }

    /// The series of a recording, by the pools' own snapshots.
    pub(crate) fn of_recording(recording: &Recording) -> Self {
        let mut judged = judge_recording(recording);
        let pool = |number: u32| {
            let of = recording.snapshots.iter().filter(|taken| taken.pool == number);
            let mut points: Vec<_> = of.map(|taken| (taken.time_ns as f64 * 1e-9, (*taken.snapshot).clone())).collect();
            let is_end = |event: &Event| *event == Event::End;
            let end = recording.records.iter().rev().find(|record| record.pool == number && is_end(&record.event));
            if let (Some(end), Some((_, last))) = (end, points.last()) {
                points.push((end.time_ns as f64 * 1e-9, ended(last)));
            }
            (points, end.is_some())
        };
        let mut all = Vec::new();
        let known = judged.iter().map(|one| one.pool).collect::<Vec<_>>();
        let unjudged = recording.pools.iter().map(|pool| pool.number).filter(|number| !known.contains(number));
        for number in known.iter().copied().chain(unjudged) {
            let (points, has_ended) = pool(number);
            let name = recording.pool(number).and_then(|pool| pool.fact("name"));
            let name = name.map_or_else(|| format!("pool {number}"), str::to_owned);
            let one = judged.iter_mut().find(|one| one.pool == number);
            all.push(OfPool { name, points, said: one.map(|one| of_judgement(one, has_ended)) });
        }
        let clock = recording.pools.first().and_then(|pool| pool.fact("time")?.parse().ok());
        Self { pools: all, clock, has_time: true }
    }

    /// What a process sends over its socket for `length`, or once; why it ended meanwhile, if it did.
    ///
    /// # Errors
    ///
    /// If the process serves no pool.
    pub(crate) fn of_process(
        target: &str,
        length: Duration,
        stop: &StopFlag,
    ) -> Result<(Self, Option<String>), Box<dyn Error>> {
        let Some((lines, _, object)) = first_line(target, stop)? else { return Err("interrupted".into()) };
        if pools(&object).is_empty() {
            return Err(format!("{target}: the process has no pool now").into());
        }
        let clock = SystemTime::now().duration_since(UNIX_EPOCH).ok().map(|since| since.as_secs_f64());
        let (mut series, begun) = (Self { clock, has_time: true, ..Self::default() }, Instant::now());
        series.add(0.0, &object);
        let mut ended = None;
        while !stop.is_raised() && begun.elapsed() < length {
            match lines.take() {
                Some(Ok(Some(line))) => series.add(begun.elapsed().as_secs_f64(), &statistics(&line)?),
                // What it sent is shown.
                Some(end) => {
                    ended = Some(end.err().unwrap_or_else(|| "the process has ended".to_owned()));
                    break;
                }
                None => thread::sleep(PAUSE),
            }
        }
        series.pools.sort_by_key(|pool| !pool.said.as_ref().is_some_and(|said| said.is_alarm));
        Ok((series, ended))
    }

    /// Adds a line of a process. A pool that is not in it any more has ended.
    fn add(&mut self, x: f64, object: &Value) {
        for pool in &mut self.pools {
            if let Some(end) = pool.points.last().map(|(_, last)| ended(last)) {
                pool.points.push((x, end));
            }
        }
        for object in worst_first(object) {
            let name = name_of(object);
            let known = self.pools.iter().position(|pool| pool.name == name);
            let at = known.unwrap_or_else(|| {
                self.pools.push(OfPool { name, points: Vec::new(), said: None });
                self.pools.len() - 1
            });
            let pool = &mut self.pools[at];
            pool.points.pop_if(|(at, _)| *at == x && known.is_some());
            pool.points.push((x, snapshot_of(object)));
            pool.said = Some(of_object(object));
        }
    }

    /// A workload, played on simulated memory in virtual time.
    ///
    /// # Errors
    ///
    /// The errors of [`Replay::play_watched`].
    pub(crate) fn of_replay(name: &str, workload: &Workload, replay: &Replay) -> Result<(Self, String), TraceError> {
        let has_time = workload.duration_us() > 0;
        let (mut points, mut judged) = (Vec::new(), Judged::default());
        let mut see = |now_us: u64, pool: &Pool| {
            judged.look(pool);
            let snapshot = unstable::snapshot(pool);
            points.push((if has_time { now_us as f64 * 1e-6 } else { snapshot.gets as f64 }, snapshot));
        };
        let played = replay.play_watched(workload, Some(Watch::new(workload, LOOKS, &mut see)))?;
        let said = judged.worst(name);
        let pools = vec![OfPool { name: name.to_owned(), points, said }];
        Ok((Self { pools, clock: None, has_time }, played.preset.to_string()))
    }
}

/// The snapshot in the statistics of a pool; empty if the process runs another version of pinpool.
pub(crate) fn snapshot_of(pool: &Value) -> Snapshot {
    serde_json::from_value(pool["snapshot"].clone()).unwrap_or_default()
}

/// A pool that holds nothing any more.
fn ended(last: &Snapshot) -> Snapshot {
    let (used, used_bytes, in_flight_bytes, idle_bytes, free_bytes, held_bytes) = Default::default();
    let none = Snapshot { used, used_bytes, in_flight_bytes, idle_bytes, free_bytes, held_bytes, ..last.clone() };
    Snapshot { max_bytes: Some(0), holders: Vec::new(), ..none }
}
