//! A recording whose gets and puts have the times and threads of a script: the recorder reads the clock of the machine.

use std::fs;
use std::path::Path;

use flate2::Crc;

use super::{Call, Event, Recording};

const THREAD: u8 = 64;
const POOL: u8 = 65;
const POOL_FACTS: u8 = 66;
const TAG: u8 = 67;
/// A block has fewer records than are allowed.
const BLOCK_RECORDS: usize = 4096;

fn is_call(event: &Event) -> bool {
    matches!(event, Event::Get { .. } | Event::Refused { .. } | Event::Put { .. })
}

/// Gets and puts that are recorded.
pub(super) fn calls(recording: &Recording) -> usize {
    recording.records.iter().filter(|record| is_call(&record.event)).count()
}

/// Writes `recording` to `path` with the times of `calls`, in their order. What the pool did between two of them has the time of the
/// second; what it did after the last one is left out, but for its end at `end_us`, as if the process had been killed then.
pub(super) fn write(recording: &Recording, calls: &[Call], end_us: u64, path: &Path) {
    assert!(!recording.records.iter().any(|record| matches!(record.event, Event::Missing { .. })), "records are lost");
    let mut items = Items::default();
    for pool in &recording.pools {
        items.item(POOL_FACTS, &[pool.number.into(), pool.facts.len() as u64]);
        pool.facts.iter().for_each(|(name, value)| [name, value].into_iter().for_each(|text| items.text(text)));
    }
    for (number, name) in &recording.tags {
        items.item(TAG, &[(*number).into()]);
        items.text(name);
    }
    let mut file = [&b"PINPOOLT"[..], &3_u32.to_le_bytes()].concat();
    let (mut next, mut in_block) = (0, 0);
    for record in &recording.records {
        let Some(call) = calls.get(next) else { break };
        next += usize::from(is_call(&record.event));
        items.record(call.at_us * 1000, call.thread, record.pool, timed(record.event, call.took_us * 1000));
        in_block += 1;
        if in_block == BLOCK_RECORDS {
            file.extend(items.block());
            in_block = 0;
        }
    }
    // A put of nothing tells how long it went on.
    items.record(end_us * 1000, 0, 0, Event::Put { id: u64::MAX, in_flight: false });
    file.extend(items.block());
    fs::write(path, file).unwrap();
}

fn timed(event: Event, took_ns: u64) -> Event {
    match event {
        Event::Get { id, bytes, class_bytes, tag, .. } => Event::Get { id, bytes, class_bytes, tag, took_ns },
        Event::Refused { bytes, class_bytes, tag, .. } => Event::Refused { bytes, class_bytes, tag, took_ns },
        event => event,
    }
}

/// The items of a block, as `docs/trace-format.md` has them.
#[derive(Default)]
struct Items(Vec<u8>, u64);

impl Items {
    fn record(&mut self, time_ns: u64, thread: u32, pool: u32, event: Event) {
        self.item(THREAD, &[thread.into()]);
        self.item(POOL, &[pool.into()]);
        let flag = u64::from;
        let (kind, fields) = match event {
            Event::Get { id, bytes, class_bytes, tag, took_ns } => {
                (1, vec![id, bytes, class_bytes, tag.into(), took_ns])
            }
            Event::Refused { bytes, class_bytes, tag, took_ns } => (2, vec![bytes, class_bytes, tag.into(), took_ns]),
            Event::Put { id, in_flight } => (3, vec![id, flag(in_flight)]),
            Event::Completed { id } => (4, vec![id]),
            Event::New { id, address, class_bytes, from_source } => {
                (6, vec![id, address, class_bytes, flag(from_source)])
            }
            Event::Gone { id } => (7, vec![id]),
            Event::Pin { address, bytes, took_ns, failed } => (8, vec![address, bytes, took_ns, flag(failed)]),
            Event::Unpin { address, bytes, took_ns, failed } => (9, vec![address, bytes, took_ns, flag(failed)]),
            Event::Move { from, to, bytes, took_ns } => (10, vec![from, to, bytes, took_ns]),
            Event::Limit { from, to } => (11, vec![from, to]),
            Event::Ceiling { bytes } => (12, vec![bytes]),
            Event::Waited => (17, Vec::new()),
            other => panic!("no program does that: {other:?}"),
        };
        // Zigzag: times never fall.
        let since = time_ns - std::mem::replace(&mut self.1, time_ns);
        self.item(kind, &[since * 2]);
        fields.into_iter().for_each(|field| self.number(field));
    }

    fn item(&mut self, kind: u8, fields: &[u64]) {
        self.0.push(kind);
        fields.iter().for_each(|&field| self.number(field));
    }

    fn number(&mut self, mut number: u64) {
        while number >= 0x80 {
            self.0.push(number.to_le_bytes()[0] | 0x80);
            number >>= 7;
        }
        self.0.push(number.to_le_bytes()[0]);
    }

    fn text(&mut self, text: &str) {
        self.number(text.len() as u64);
        self.0.extend_from_slice(text.as_bytes());
    }

    /// The block with its frame; this one is empty again.
    fn block(&mut self) -> Vec<u8> {
        let Self(items, _) = std::mem::take(self);
        let mut sum = Crc::new();
        sum.update(&items);
        let len = u32::try_from(items.len()).unwrap();
        [&len.to_le_bytes()[..], &sum.sum().to_le_bytes(), &items].concat()
    }
}
