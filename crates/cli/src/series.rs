//! The model of all commands: the pools of a recording, a running process, a replay or a log, with their snapshots and diagnoses.

use std::error::Error;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use pinpool::{Pool, unstable};
use pinpool_loader::StopFlag;
use pinpool_observe::judge::{Snapshot, judge_recording, judge_series};
use pinpool_replay::{Event, Recording, Replay, TraceError, Workload};
use serde_json::Value;

use crate::diagnosis::{Said, of_judgement, of_object, of_recorded};
use crate::served::socket::{first_line, statistics};
use crate::served::{name_of, pools, worst_first};
use crate::why::lines::{Curve, Log};

/// Time between two checks for a line of a process.
const PAUSE: Duration = Duration::from_millis(20);

/// One pool over time.
#[derive(Debug)]
pub(crate) struct OfPool {
    pub(crate) name: String,
    /// In order of x: seconds, or requests without time.
    pub(crate) points: Vec<(f64, Snapshot)>,
}

#[derive(Debug, Default)]
pub(crate) struct Series {
    pub(crate) pools: Vec<OfPool>,
    /// The diagnoses, the worst first; none for pools with too few requests.
    pub(crate) said: Vec<Said>,
    /// The time at x = 0, in seconds since 1970.
    pub(crate) clock: Option<f64>,
    pub(crate) has_time: bool,
}

impl Series {
    /// The snapshots in a recording.
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
            let name = description.fact("name").map_or_else(|| format!("pool {number}"), str::to_owned);
            pools.push(OfPool { name, points });
        }
        let judged = judge_recording(recording);
        let said = judged.iter().map(|one| of_recorded(one, ended_pools.contains(&one.pool))).collect();
        let clock = recording.pools.first().and_then(|pool| pool.fact("time")?.parse().ok());
        Self { pools, said, clock, has_time: true }
    }

    /// What a process sends over its socket for `length`, or once, and why it ended early.
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
                // The snapshots so far are kept.
                Some(end) => {
                    ended = Some(end.err().unwrap_or_else(|| "the process has ended".to_owned()));
                    break;
                }
                None => thread::sleep(PAUSE),
            }
        }
        Ok((series, ended))
    }

    /// Adds a line of a process. A pool that is no longer in it has ended.
    fn add(&mut self, x: f64, object: &Value) {
        for pool in &mut self.pools {
            if let Some(end) = pool.points.last().map(|(_, last)| ended(last)) {
                pool.points.push((x, end));
            }
        }
        self.said = worst_first(object).into_iter().map(of_object).collect();
        for object in worst_first(object) {
            let name = name_of(object);
            let known = self.pools.iter().position(|pool| pool.name == name);
            let at = known.unwrap_or_else(|| {
                self.pools.push(OfPool { name, points: Vec::new() });
                self.pools.len() - 1
            });
            let pool = &mut self.pools[at];
            pool.points.pop_if(|(at, _)| *at == x && known.is_some());
            pool.points.push((x, snapshot_of(object)));
        }
    }

    /// A workload, replayed on simulated memory in virtual time.
    ///
    /// # Errors
    ///
    /// The errors of [`Replay::play_watched`].
    pub(crate) fn of_replay(name: &str, workload: &Workload, replay: &Replay) -> Result<(Self, String), TraceError> {
        let has_time = workload.duration_us() > 0;
        let mut taken = Vec::new();
        let mut see = |now_us: u64, pool: &Pool| taken.push((now_us, unstable::snapshot(pool)));
        let played = replay.play_watched(workload, &mut see)?;
        let said = judge_series(&taken).iter().map(|judgement| of_judgement(name, judgement)).collect();
        let x = |now_us: u64, of: &Snapshot| if has_time { now_us as f64 * 1e-6 } else { of.gets as f64 };
        let points = taken.into_iter().map(|(now_us, of)| (x(now_us, &of), of)).collect();
        let pools = vec![OfPool { name: name.to_owned(), points }];
        Ok((Self { pools, said, clock: None, has_time }, played.preset.to_string()))
    }

    /// The pools in TensorFlow's lines of a log, over the requests that these show, or over the lines if they show none.
    pub(crate) fn of_log(log: &Log) -> Self {
        let pool = |(at, curve): (usize, &Curve)| {
            let x = |at: usize, of: &Snapshot| if curve.has_requests { of.gets as f64 } else { at as f64 + 1.0 };
            let points = curve.points.iter().enumerate().map(|(at, of)| (x(at, of), of.clone())).collect();
            OfPool { name: format!("pool {}", at + 1), points }
        };
        let pools = log.curves.iter().enumerate().map(pool).collect();
        Self { pools, said: of_log(log), ..Self::default() }
    }
}

/// The snapshot in the statistics of a pool; empty if the process runs another version of pinpool.
pub(crate) fn snapshot_of(pool: &Value) -> Snapshot {
    serde_json::from_value(pool["snapshot"].clone()).unwrap_or_default()
}

/// The snapshot of an ended pool, which holds nothing.
fn ended(last: &Snapshot) -> Snapshot {
    let (used, used_bytes, in_flight_bytes, idle_bytes, free_bytes, held_bytes) = Default::default();
    let none = Snapshot { used, used_bytes, in_flight_bytes, idle_bytes, free_bytes, held_bytes, ..last.clone() };
    Snapshot { max_bytes: Some(0), holders: Vec::new(), ..none }
}

/// The diagnoses that the log contains; without any, the diagnoses from TensorFlow's lines.
pub(crate) fn of_log(log: &Log) -> Vec<Said> {
    match log.said.is_empty() {
        true => log.curves.iter().enumerate().map(|(at, curve)| of_curve(at, curve)).collect(),
        false => log.said.clone(),
    }
}

fn of_curve(at: usize, curve: &Curve) -> Said {
    let advice = curve.advice.iter().map(|line| format!("  {line}"));
    Said {
        pool: format!("pool {}", at + 1),
        cause: curve.trend.to_owned(),
        is_alarm: curve.trend == "thrashing",
        lines: std::iter::once(curve.trend.to_owned()).chain(advice).collect(),
    }
}
