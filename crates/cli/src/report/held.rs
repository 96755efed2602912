//! Who holds what over the time of a recording: lanes of tags and of pools, and what is still out at the end.

use std::collections::{BTreeMap, HashMap};

use pinpool_observe::judge::largest;
use pinpool_observe::judge::words::seconds;
use pinpool_replay::{Event, Record, Recording};

use super::figure::{Axis, Figure, Panel, Series, Shape, Table, Unit};
use pinpool_cli::table::grouped;

/// Lanes that are drawn, those with most bytes.
const LANES_MAX: usize = 8;
/// Rows of the table.
const ROWS_MAX: usize = 20;
/// The name of buffers without a tag.
const UNTAGGED: &str = "(untagged)";

#[derive(Debug, Clone, Copy)]
struct Out {
    bytes: u64,
    tag: u32,
    /// Of the call stack; 0 of a get that was not sampled.
    stack: u32,
    since_ns: u64,
}

/// Bytes that are out over time.
#[derive(Debug, Clone, Default)]
pub(super) struct Lane {
    now: u64,
    /// Since the last point.
    most: u64,
    peak: u64,
    points: Vec<(f64, f64)>,
}

impl Lane {
    pub(super) fn now(&self) -> u64 {
        self.now
    }

    pub(super) fn set(&mut self, bytes: u64) {
        (self.now, self.most, self.peak) = (bytes, bytes, self.peak.max(bytes));
    }

    fn change(&mut self, more: u64, less: u64) {
        self.now = self.now.saturating_add(more).saturating_sub(less);
        self.most = self.most.max(self.now);
        self.peak = self.peak.max(self.now);
    }

    pub(super) fn point(&mut self, x: f64) {
        self.points.push((x, self.most as f64));
        self.most = self.now;
    }
}

/// Buffers, bytes and the time of the oldest of them.
type Sum = (u64, u64, u64);

#[derive(Debug, Default)]
pub(super) struct Held {
    out: HashMap<(u32, u64), Out>,
    tags: BTreeMap<u32, Lane>,
    pools: BTreeMap<u32, Lane>,
    /// What the pools that have ended left, by pool and tag, with the time of the end.
    left: BTreeMap<(u32, u32), (Sum, u64)>,
    /// The bytes of those that were sampled, with pool and tag, by call stack.
    sampled: Vec<((u32, u32), u32, u64)>,
}

impl Held {
    pub(super) fn apply(&mut self, record: &Record) {
        let key = |id: u64| (record.pool, id);
        match record.event {
            Event::Get { id, class_bytes, tag, .. } => {
                self.back(key(id));
                self.out.insert(key(id), Out { bytes: class_bytes, tag, stack: 0, since_ns: record.time_ns });
                self.tags.entry(tag).or_default().change(class_bytes, 0);
                self.pools.entry(record.pool).or_default().change(class_bytes, 0);
            }
            Event::Sampled { id, stack } => self.out.get_mut(&key(id)).into_iter().for_each(|out| out.stack = stack),
            Event::Put { id, in_flight: false }
            | Event::Completed { id }
            | Event::Gone { id }
            | Event::Leaked { id } => {
                self.back(key(id));
            }
            Event::End => self.leave(record.pool, record.time_ns),
            _ => {}
        }
    }

    fn back(&mut self, key: (u32, u64)) {
        let Some(out) = self.out.remove(&key) else { return };
        for lane in [self.tags.get_mut(&out.tag), self.pools.get_mut(&key.0)].into_iter().flatten() {
            lane.change(0, out.bytes);
        }
    }

    fn leave(&mut self, pool: u32, at_ns: u64) {
        for ((of, _), out) in &self.out {
            if *of == pool {
                let (sum, _) = self.left.entry((pool, out.tag)).or_insert(((0, 0, u64::MAX), at_ns));
                *sum = (sum.0 + 1, sum.1 + out.bytes, sum.2.min(out.since_ns));
                self.sampled.extend((out.stack > 0).then_some(((pool, out.tag), out.stack, out.bytes)));
            }
        }
    }

    /// A point of each lane.
    pub(super) fn point(&mut self, x: f64) {
        self.tags.values_mut().chain(self.pools.values_mut()).for_each(|lane| lane.point(x));
    }

    /// The figures of tags and of pools, where there are several, and the table of what is still out.
    pub(super) fn finish(mut self, recording: &Recording, x: &Axis) -> (Vec<Figure>, Option<Table>) {
        let end_ns = recording.records.last().map_or(0, |record| record.time_ns);
        let living: Vec<u32> = recording.pools.iter().map(|pool| pool.number).collect();
        let has_ended =
            |pool: u32| recording.records.iter().rev().any(|record| record.pool == pool && record.event == Event::End);
        for pool in living.into_iter().filter(|&pool| !has_ended(pool)) {
            self.leave(pool, end_ns);
        }
        let table = self.table(recording);
        let Self { tags, pools, .. } = self;
        let tag = |tag: u32| recording.tag(tag).unwrap_or(UNTAGGED).to_owned();
        let has_tags = tags.keys().any(|&tag| recording.tag(tag).is_some());
        let mut figures = Vec::new();
        if has_tags {
            let lanes = tags.into_iter().map(|(number, lane)| (tag(number), lane)).collect();
            figures.push(lanes_figure("tags", "Who holds what", "tag", lanes, x));
        }
        if pools.len() > 1 {
            let lanes = pools.into_iter().map(|(number, lane)| (pool_name(recording, number), lane)).collect();
            figures.push(lanes_figure("pools", "Pools", "pool", lanes, x));
        }
        (figures, table)
    }

    fn table(&self, recording: &Recording) -> Option<Table> {
        let mut left: Vec<_> = self.left.iter().collect();
        left.sort_by_key(|(_, ((_, bytes, _), _))| std::cmp::Reverse(*bytes));
        let buffers: u64 = left.iter().map(|(_, ((buffers, ..), _))| buffers).sum();
        let row = |&(of @ &(pool, tag), &((buffers, bytes, since_ns), at_ns)): &(&(u32, u32), &(Sum, u64))| {
            let tag = recording.tag(tag).unwrap_or(UNTAGGED);
            let owner = if recording.pools.len() > 1 {
                format!("{}: {tag}", pool_name(recording, pool))
            } else {
                tag.to_owned()
            };
            let age = seconds(at_ns.saturating_sub(since_ns));
            let sampled = self.sampled.iter().filter(|(owner, ..)| owner == of);
            let stack = largest(sampled.map(|&(_, stack, bytes)| (stack, bytes)));
            let place = stack.and_then(|stack| recording.place(stack));
            let owner = place.map_or(owner.clone(), |place| format!("{owner}, most got at {place}"));
            [owner, grouped(buffers), Unit::Bytes.text(bytes as f64), age]
        };
        let rows = left.iter().take(ROWS_MAX).map(row).collect();
        let noun = if buffers == 1 { "buffer" } else { "buffers" };
        let name = format!("Still out at the end: {} {noun}", grouped(buffers));
        (buffers > 0).then_some(Table { is_open: true, name, head: ["owner", "buffers", "bytes", "oldest for"], rows })
    }
}

/// A panel for each of those with most bytes, the largest first.
pub(super) fn lanes_figure(
    id: &'static str,
    title: &'static str,
    noun: &str,
    mut lanes: Vec<(String, Lane)>,
    x: &Axis,
) -> Figure {
    lanes.sort_by_key(|(_, lane)| std::cmp::Reverse(lane.peak));
    let all = lanes.len();
    lanes.truncate(LANES_MAX);
    let largest = lanes.first().map_or_else(String::new, |(name, lane)| {
        format!(", most of them in {name}: {} at one time", Unit::Bytes.text(lane.peak as f64))
    });
    let of =
        if all > LANES_MAX { format!("the {LANES_MAX} of {all} {noun}s with most") } else { format!("each {noun}") };
    let panel = |(name, lane): (String, Lane)| Panel {
        series: vec![Series::new(name.clone(), Shape::Area, lane.points)],
        y: Axis::new(name, Unit::Bytes),
        is_lane: true,
    };
    Figure {
        id,
        title,
        description: format!("Bytes that users hold or devices read, of {of}{largest}."),
        x: x.clone(),
        panels: lanes.into_iter().map(panel).collect(),
    }
}

pub(super) fn pool_name(recording: &Recording, pool: u32) -> String {
    let name = recording.pool(pool).and_then(|pool| pool.fact("name"));
    name.map_or_else(|| format!("pool {pool}"), str::to_owned)
}

#[cfg(test)]
mod tests {
    use pinpool_replay::PoolDescription;

    use super::*;

    #[test]
    fn what_did_not_come_back_is_listed_by_tag_with_its_age_and_has_a_lane() {
        let get = |id, tag| Event::Get { id, bytes: 100, class_bytes: 1 << 20, tag, took_ns: 0 };
        let events = [
            (1, 0, get(1, 1)),
            (2, 0, get(2, 0)),
            (3, 0, Event::Put { id: 2, in_flight: false }),
            (4, 1, get(1, 1)),
            (9, 0, Event::End),
            (10, 0, Event::Put { id: 1, in_flight: false }),
        ];
        let record =
            |(at, pool, event): (u64, u32, Event)| Record { time_ns: at * 1_000_000_000, thread: 0, pool, event };
        let pools = [0, 1].map(|number| PoolDescription { number, facts: vec![("name".into(), format!("p{number}"))] });
        let recording = Recording {
            records: events.into_iter().map(record).collect(),
            pools: pools.to_vec(),
            tags: vec![(1, "labels".to_owned())],
            ..Recording::default()
        };
        let mut held = Held::default();
        for record in &recording.records {
            held.apply(record);
            held.point(record.time_ns as f64 * 1e-9);
        }
        let (figures, table) = held.finish(&recording, &Axis::new("time", Unit::Seconds));
        assert_eq!(
            figures.iter().map(|figure| (figure.id, figure.panels.len())).collect::<Vec<_>>(),
            [("tags", 2), ("pools", 2)]
        );
        let table = table.unwrap();
        assert_eq!(table.name, "Still out at the end: 2 buffers");
        let rows = [["p0: labels", "1", "1 MiB", "8.0 s"], ["p1: labels", "1", "1 MiB", "6.0 s"]];
        assert_eq!(table.rows, rows.map(|row| row.map(str::to_owned)));
    }
}
