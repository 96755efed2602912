//! The timeline of a recording.

use std::collections::{BTreeMap, HashMap, HashSet};

use pinpool_observe::judge::judge_recording;
use pinpool_replay::{Event, PoolDescription, Record, Recording, Usage};

use super::held::{Held, pool_name};
use super::timeline::{Doing, Sample, Timeline};
use pinpool_cli::table::grouped;

/// Parts of the time of which each gives at most two samples.
const PARTS: u64 = 600;
/// Pools whose limits are drawn.
const POOLS_MAX: usize = 4;
/// A pool ends within this time.
const END_NS: u64 = 1_000_000_000;

pub(super) fn timeline(recording: &Recording) -> Timeline {
    let records = &recording.records;
    let end_ns = records.last().map_or(0, |record| record.time_ns);
    let drawn = drawn_pools(recording);
    let is_direct = |pool: &&PoolDescription| pool.fact("PINPOOL_PRESET") == Some("tensorflow");
    let evicting = recording.pools.iter().filter(is_direct).map(|pool| pool.number).collect();
    let mut reader = Reader { drawn: &drawn, evicting, ..Reader::default() };
    let mut timeline = Timeline { has_time: true, ..Timeline::default() };
    timeline.limits = drawn.iter().map(|&pool| (pool_name(recording, pool), first_limit(recording, pool))).collect();
    timeline.clock = clock(recording);
    let (mut part, mut held) = (Part::default(), Held::default());
    let own_ends = own_ends(records);
    for (at, record) in records.iter().enumerate() {
        if own_ends.get(&record.pool) == Some(&at) {
            reader.ended.insert(record.pool);
        }
        // At most `PARTS`.
        let number = u128::from(record.time_ns) * u128::from(PARTS) / u128::from(end_ns.max(1));
        let number = u64::try_from(number).unwrap_or(PARTS);
        if number != part.number {
            part.end(&mut timeline.samples);
            held.point(timeline.samples.last().map_or(0.0, |sample| sample.x));
            part = Part { number, ..Part::default() };
        }
        held.apply(record);
        reader.apply(record, &mut timeline);
        part.add(reader.sample(record.time_ns));
    }
    part.end(&mut timeline.samples);
    let end = timeline.samples.last().map_or(0.0, |sample| sample.x);
    held.point(end);
    timeline.held = held.finish(recording, &timeline.axis());
    for (_, points) in &mut timeline.limits {
        points.dedup();
    }
    let judged = judge_recording(recording);
    timeline.said = judged.iter().map(crate::why::of_pool).collect();
    timeline.slow_gets = Some(judged.iter().map(|pool| pool.slow_gets).sum());
    let waits = judged.iter().flat_map(|pool| &pool.waits);
    timeline
        .lost
        .extend(waits.map(|&(at_ns, waited_ns)| (at_ns as f64 * 1e-9, Doing::Waiting, waited_ns as f64 * 1e-9)));
    timeline.lost.sort_by(|one, other| one.0.total_cmp(&other.0));
    timeline.notes = notes(recording, drawn.len());
    timeline
}

/// What the trace is of, in words.
pub(super) fn source(name: &str, recording: &Recording) -> String {
    let records = grouped(recording.records.len() as u64);
    let fact = |fact: &str| recording.pools.first().and_then(|pool| pool.fact(fact));
    let backend = fact("backend").map_or_else(String::new, |backend| format!(", back-end {backend}"));
    let version = fact("version").map_or_else(String::new, |version| format!(", recorded by pinpool {version}"));
    format!("{name}: {records} records{backend}{version}")
}

fn notes(recording: &Recording, drawn: usize) -> Vec<String> {
    let mut notes = Vec::new();
    if let Some(warning) = &recording.warning {
        notes.push(format!("The trace is not whole: {warning}."));
    }
    if recording.lost > 0 {
        notes.push(format!("{} records were lost while it was recorded.", grouped(recording.lost)));
    }
    let pools = recording.pools.len();
    if pools > 1 {
        notes.push(format!(
            "Bytes, gets and evictions are those of all {pools} pools; the ceiling is the sum of theirs, and there is none while \
             one of them has none."
        ));
    }
    if pools > drawn {
        notes.push(format!("Limits are drawn of the {drawn} pools with the most gets."));
    }
    notes
}

/// Numbers of the pools with the most gets.
fn drawn_pools(recording: &Recording) -> Vec<u32> {
    let mut gets: BTreeMap<u32, u64> = recording.pools.iter().map(|pool| (pool.number, 0)).collect();
    for record in &recording.records {
        if matches!(record.event, Event::Get { .. }) {
            *gets.entry(record.pool).or_default() += 1;
        }
    }
    let mut pools: Vec<_> = gets.into_iter().collect();
    pools.sort_by_key(|&(_, gets)| std::cmp::Reverse(gets));
    pools.truncate(POOLS_MAX);
    let mut pools: Vec<_> = pools.into_iter().map(|(pool, _)| pool).collect();
    pools.sort_unstable();
    pools
}

/// For each pool that has ended the first of the records of its end: what it releases then is no eviction.
fn own_ends(records: &[Record]) -> HashMap<u32, usize> {
    let mut ends = HashMap::new();
    let mut open: HashMap<u32, u64> = HashMap::new();
    for (at, record) in records.iter().enumerate().rev() {
        let Record { pool, time_ns, .. } = *record;
        match record.event {
            Event::End => _ = open.insert(pool, time_ns),
            Event::Gone { .. } | Event::Unpin { .. } if open.get(&pool).is_some_and(|end| end - time_ns < END_NS) => {
                ends.insert(pool, at);
            }
            _ => _ = open.remove(&pool),
        }
    }
    ends
}

/// What the clock showed when the recording began: the times of all pools are from there.
fn clock(recording: &Recording) -> Option<f64> {
    recording.pools.first()?.fact("time")?.parse().ok()
}

/// The limit that the pool was built with.
fn first_limit(recording: &Recording, pool: u32) -> Vec<(f64, f64)> {
    let limit = recording.pool(pool).and_then(|pool| pool.fact("PINPOOL_POOL_SIZE_LIMIT")?.parse::<f64>().ok());
    limit.map(|limit| (0.0, limit)).into_iter().collect()
}

/// The samples of one part of the time: the one with the most bytes in use, and the last.
#[derive(Default)]
struct Part {
    number: u64,
    highest: Option<Sample>,
    last: Option<Sample>,
}

impl Part {
    fn add(&mut self, sample: Sample) {
        let used = |sample: &Sample| sample.in_use_bytes + sample.in_flight_bytes;
        if self.highest.is_none_or(|highest| used(&highest) < used(&sample)) {
            self.highest = Some(sample);
        }
        self.last = Some(sample);
    }

    fn end(&mut self, samples: &mut Vec<Sample>) {
        samples.extend(self.highest.take().filter(|highest| Some(*highest) != self.last));
        samples.extend(self.last.take());
    }
}

/// What the records so far add up to.
#[derive(Default)]
struct Reader<'a> {
    drawn: &'a [u32],
    usage: Usage,
    /// Ceilings of the pools that live, and of those that ended after the last get.
    ceilings: BTreeMap<u32, u64>,
    ended_since: Vec<u32>,
    /// Pools of which memory that leaves a buffer is an eviction.
    evicting: HashSet<u32>,
    /// Memory that no get has been served from.
    new: HashSet<(u32, u64)>,
    ended: HashSet<u32>,
    gets: u64,
    hits: u64,
    evicted: u64,
    pins: u64,
}

impl Reader<'_> {
    fn apply(&mut self, record: &Record, timeline: &mut Timeline) {
        self.usage.apply(record);
        let (pool, x) = (record.pool, record.time_ns as f64 * 1e-9);
        if matches!(record.event, Event::Get { .. } | Event::Ceiling { .. }) {
            for ended in self.ended_since.drain(..) {
                self.ceilings.remove(&ended);
            }
        }
        match record.event {
            Event::New { id, .. } => {
                self.new.insert((pool, id));
            }
            Event::Get { id, bytes, class_bytes, .. } => {
                self.gets += 1;
                self.hits += u64::from(!self.new.remove(&(pool, id)));
                let sum = timeline.traffic.entry(class_bytes).or_default();
                *sum = (sum.0 + 1, sum.1.saturating_add(bytes));
            }
            Event::Gone { id } => {
                self.new.remove(&(pool, id));
                // Under adaptive, memory that leaves a buffer stays pinned, and the pool counts no eviction.
                self.evicted += u64::from(self.evicting.contains(&pool) && !self.ended.contains(&pool));
            }
            Event::Pin { took_ns, failed, .. } => {
                timeline.pins.push(took_ns);
                timeline.lost.push((x, Doing::PageLocking, took_ns as f64 * 1e-9));
                self.pins += u64::from(!failed);
            }
            Event::Unpin { took_ns, .. } => {
                timeline.unpins.push(took_ns);
                if !self.ended.contains(&pool) {
                    timeline.lost.push((x, Doing::PageLocking, took_ns as f64 * 1e-9));
                }
            }
            Event::Move { took_ns, .. } => timeline.lost.push((x, Doing::Moving, took_ns as f64 * 1e-9)),
            Event::Ceiling { bytes } => {
                self.ceilings.insert(pool, bytes);
            }
            Event::Limit { from, to } => {
                if let Some(at) = self.drawn.iter().position(|&drawn| drawn == pool) {
                    let points = &mut timeline.limits[at].1;
                    if points.is_empty() {
                        points.push((0.0, from as f64));
                    }
                    points.push((x, to as f64));
                    if to > from {
                        timeline.raises.push((x, to as f64));
                    }
                }
            }
            Event::End => {
                self.ended.insert(pool);
                self.ended_since.push(pool);
            }
            _ => {}
        }
    }

    /// What all pools together may hold; `None` if one of them has no ceiling.
    fn ceiling_bytes(&self) -> Option<u64> {
        let sum = self.ceilings.values().fold(0_u64, |sum, &bytes| sum.saturating_add(bytes));
        (!self.ceilings.is_empty() && sum != u64::MAX).then_some(sum)
    }

    fn sample(&self, time_ns: u64) -> Sample {
        Sample {
            x: time_ns as f64 * 1e-9,
            in_use_bytes: self.usage.in_use_bytes,
            in_flight_bytes: self.usage.in_flight_bytes,
            idle_bytes: self.usage.idle_bytes,
            pinned_bytes: self.usage.pinned_bytes,
            ceiling_bytes: self.ceiling_bytes(),
            gets: self.gets,
            hits: self.hits,
            evicted: self.evicted,
            pins: self.pins,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn recording(events: &[(u32, Event)]) -> Recording {
        let facts = [("PINPOOL_POOL_SIZE_LIMIT", "100"), ("PINPOOL_PRESET", "tensorflow")];
        let facts: Vec<_> = facts.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
        let number = |number| PoolDescription { number, facts: facts.clone() };
        let record =
            |(at, &(pool, event)): (u64, &(u32, Event))| Record { time_ns: at * 1_000_000, thread: 0, pool, event };
        let records = (1_u64..).zip(events).map(record).collect();
        Recording { pools: vec![number(0), number(1)], records, ..Recording::default() }
    }

    fn get(id: u64) -> Event {
        Event::Get { id, bytes: MIB, class_bytes: MIB, tag: 0, took_ns: 0 }
    }

    fn ceilings(timeline: &Timeline) -> Vec<Option<u64>> {
        timeline.samples.iter().map(|sample| sample.ceiling_bytes.map(|bytes| bytes / MIB)).collect()
    }

    #[test]
    fn bytes_of_all_pools_are_drawn_against_the_sum_of_their_ceilings() {
        let ceiling = |bytes| Event::Ceiling { bytes };
        let both =
            [(0, ceiling(3 * MIB)), (1, ceiling(2 * MIB)), (0, get(1)), (1, get(1)), (0, Event::End), (1, Event::End)];
        let timeline = timeline(&recording(&both));
        // That of a pool which has ended stays until another goes on.
        assert_eq!(ceilings(&timeline), [Some(3), Some(5), Some(5), Some(5), Some(5), Some(5)]);
        assert!(timeline.notes.iter().any(|note| note.contains("the sum of theirs")), "{:?}", timeline.notes);
        let names: Vec<_> = timeline.limits.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["pool 0", "pool 1"]);
    }

    #[test]
    fn what_a_pool_releases_at_its_end_is_no_eviction() {
        let (gone, put) = (|id| Event::Gone { id }, |id| Event::Put { id, in_flight: false });
        let events = [get(1), get(2), put(1), gone(1), put(2), gone(2), Event::End].map(|event| (0, event));
        let timeline = timeline(&recording(&events));
        assert_eq!(timeline.samples.last().map(|last| last.evicted), Some(1));
    }

    #[test]
    fn a_pool_that_has_ended_has_no_ceiling_and_one_without_leaves_none() {
        let ceiling = |bytes| Event::Ceiling { bytes };
        let first = [(0, ceiling(3 * MIB)), (0, get(1)), (0, Event::End), (1, ceiling(2 * MIB)), (1, get(1))];
        assert_eq!(ceilings(&timeline(&recording(&first))), [Some(3), Some(3), Some(3), Some(2), Some(2)]);
        let without = [(0, ceiling(3 * MIB)), (1, ceiling(u64::MAX)), (1, get(1))];
        assert_eq!(ceilings(&timeline(&recording(&without))), [Some(3), None, None]);
    }
}
