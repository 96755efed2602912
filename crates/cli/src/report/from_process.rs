//! The timeline of a process that runs, from what its socket sends once a second.

use std::collections::BTreeMap;
use std::error::Error;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use pinpool_loader::StopFlag;
use serde_json::Value;

use super::figure::{Axis, Figure, Unit};
use super::held::{Lane, lanes_figure};
use super::timeline::{Doing, Sample, Timeline};
use crate::served::socket::{first_line, statistics};
use crate::served::{name_of, pools, printable};
use crate::why;

/// Between two looks for a line.
const PAUSE: Duration = Duration::from_millis(20);

/// What came so far.
struct Seen {
    begun: Instant,
    clock: f64,
    samples: Vec<Sample>,
    lost: Vec<(f64, Doing, f64)>,
    /// Sums of the line before.
    before: [f64; 3],
    tags: BTreeMap<String, Lane>,
    pools: BTreeMap<String, Lane>,
    last: Value,
}

/// Observes the process for `length`; why it ended meanwhile, if it did.
///
/// # Errors
///
/// If the process serves nothing.
pub(super) fn follow(
    target: &str,
    length: Duration,
    stop: &StopFlag,
) -> Result<(Timeline, Option<String>), Box<dyn Error>> {
    let Some((lines, _, object)) = first_line(target, stop)? else { return Err("interrupted".into()) };
    if pools(&object).is_empty() {
        return Err(format!("{target}: the process has no pool now").into());
    }
    let clock = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
    let mut seen = Seen {
        begun: Instant::now(),
        clock,
        samples: Vec::new(),
        lost: Vec::new(),
        before: lost_of(&object),
        tags: BTreeMap::new(),
        pools: BTreeMap::new(),
        last: Value::Null,
    };
    seen.add(object);
    let mut ended = None;
    while !stop.is_raised() && seen.begun.elapsed() < length {
        match lines.take() {
            Some(Ok(Some(line))) => seen.add(statistics(&line)?),
            // What it sent is drawn.
            Some(end) => {
                ended = Some(end.err().unwrap_or_else(|| "the process has ended".to_owned()));
                break;
            }
            None => thread::sleep(PAUSE),
        }
    }
    Ok((seen.timeline(), ended))
}

/// Seconds that all pools have lost by waiting, page-locking and moving.
fn lost_of(object: &Value) -> [f64; 3] {
    let sum = |paths: &[&str]| {
        let of = |pool: &Value| paths.iter().filter_map(|path| pool.pointer(path)?.as_f64()).sum::<f64>();
        pools(object).iter().map(of).sum()
    };
    [
        sum(&["/requests/wait_time/total_seconds"]),
        sum(&["/memory/pin/time/total_seconds", "/memory/unpin/time/total_seconds"]),
        sum(&["/memory/remap/time/total_seconds"]),
    ]
}

impl Seen {
    fn add(&mut self, object: Value) {
        let x = self.begun.elapsed().as_secs_f64();
        let sum = |path: &str| pools(&object).iter().filter_map(|pool| pool.pointer(path)?.as_u64()).sum::<u64>();
        let ceilings: Vec<_> = pools(&object).iter().map(|pool| pool["limits"]["max_bytes"].as_u64()).collect();
        self.samples.push(Sample {
            x,
            in_use_bytes: sum("/memory/in_use_bytes"),
            in_flight_bytes: sum("/copies/in_flight_bytes"),
            idle_bytes: sum("/memory/idle_bytes"),
            pinned_bytes: sum("/memory/held_bytes"),
            ceiling_bytes: ceilings.into_iter().sum(),
            gets: sum("/requests/served"),
            hits: sum("/requests/hits"),
            evicted: sum("/memory/evictions/over_limit"),
            pins: sum("/memory/pin/count"),
        });
        let now = lost_of(&object);
        for (doing, (now, before)) in
            [Doing::Waiting, Doing::PageLocking, Doing::Moving].into_iter().zip(now.into_iter().zip(self.before))
        {
            // A pool that has ended takes its sums along.
            if now > before {
                self.lost.push((x, doing, now - before));
            }
        }
        self.before = now;
        let owners = pools(&object).iter().flat_map(|pool| pool["owners"].as_array().into_iter().flatten());
        let owners: Vec<_> =
            owners.filter_map(|owner| Some((printable(owner["tag"].as_str()?), owner["bytes"].as_u64()?))).collect();
        add_points(&mut self.tags, x, &owners);
        let used = |pool: &Value| {
            pool["memory"]["in_use_bytes"].as_u64().unwrap_or(0)
                + pool["copies"]["in_flight_bytes"].as_u64().unwrap_or(0)
        };
        let used: Vec<_> = pools(&object).iter().map(|pool| (name_of(pool), used(pool))).collect();
        add_points(&mut self.pools, x, &used);
        self.last = object;
    }

    fn timeline(&self) -> Timeline {
        let x = Axis { clock: Some(self.clock), ..Axis::new("time", Unit::Seconds) };
        let mut figures: Vec<Figure> = Vec::new();
        if !self.tags.is_empty() {
            figures.push(lanes_figure("tags", "Who holds what", "tag", self.tags.clone().into_iter().collect(), &x));
        }
        if self.pools.len() > 1 {
            figures.push(lanes_figure("pools", "Pools", "pool", self.pools.clone().into_iter().collect(), &x));
        }
        Timeline {
            has_time: true,
            is_live: true,
            clock: Some(self.clock),
            samples: self.samples.clone(),
            lost: self.lost.clone(),
            held: (figures, None),
            notes: vec![
                "The process sends its figures once a second: what rises and falls between two of them is not seen."
                    .to_owned(),
            ],
            said: why::of_statistics(&self.last),
            ..Timeline::default()
        }
    }
}

/// A point for each lane: that of a name which is not there any more is 0.
fn add_points(lanes: &mut BTreeMap<String, Lane>, x: f64, now: &[(String, u64)]) {
    lanes.values_mut().for_each(|lane| lane.set(0));
    for (name, bytes) in now {
        let lane = lanes.entry(name.clone()).or_default();
        lane.set(lane.now().saturating_add(*bytes));
    }
    lanes.values_mut().for_each(|lane| lane.point(x));
}
