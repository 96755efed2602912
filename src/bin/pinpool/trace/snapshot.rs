//! A snapshot as `torch.cuda.memory._snapshot()` returns it, for memory_viz: the memory at the end as segments with blocks, and
//! the way there as one trace.
//!
//! A buffer is allocated by its get and freed by its put, or by the end of its copies; what a back-end pins is a segment. The
//! frame of an entry names the tag, else the thread, and the pool.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};

use pinpool::trace::{Event, Record, Recording};

use super::name_of;
use super::pickle::Pickle;

/// A buffer that is held.
#[derive(Clone, Copy)]
struct Held {
    bytes: u64,
    address: u64,
}

#[derive(Default)]
struct Memory {
    /// First byte and length of what is pinned.
    segments: BTreeMap<u64, u64>,
    /// First byte of each buffer's memory.
    addresses: HashMap<(u32, u64), u64>,
    held: HashMap<(u32, u64), Held>,
    entries: Vec<Pickle>,
}

pub(super) fn write(recording: &Recording, out: &mut dyn Write) -> io::Result<()> {
    let mut memory = Memory::default();
    for record in &recording.records {
        memory.add(record, recording);
    }
    let Memory { segments, held, entries, .. } = memory;
    let mut blocks: Vec<_> = held.into_values().collect();
    blocks.sort_by_key(|held| held.address);
    let segments = joined(segments).into_iter().map(|(address, bytes)| segment(address, bytes, &blocks)).collect();
    let snapshot = Pickle::Dictionary(vec![
        ("segments", Pickle::List(segments)),
        ("device_traces", Pickle::List(vec![Pickle::List(entries)])),
        ("allocator_settings", Pickle::Dictionary(Vec::new())),
        ("external_annotations", Pickle::List(Vec::new())),
    ]);
    snapshot.write(out)
}

/// A segment whose blocks fill it: those that are held, and what is between them.
fn segment(address: u64, bytes: u64, held: &[Held]) -> Pickle {
    let end = address.saturating_add(bytes);
    let (mut blocks, mut at, mut active) = (Vec::new(), address, 0);
    let mut add = |at: u64, bytes: u64, state: &str| {
        blocks.push(Pickle::Dictionary(vec![
            ("address", at.into()),
            ("size", bytes.into()),
            ("requested_size", bytes.into()),
            ("state", state.into()),
            ("frames", Pickle::List(Vec::new())),
        ]));
    };
    for held in held.iter().filter(|held| (address..end).contains(&held.address)) {
        let bytes = held.bytes.min(end - held.address);
        if held.address < at || bytes == 0 {
            continue;
        }
        if held.address > at {
            add(at, held.address - at, "inactive");
        }
        add(held.address, bytes, "active_allocated");
        active += bytes;
        at = held.address + bytes;
    }
    if at < end {
        add(at, end - at, "inactive");
    }
    Pickle::Dictionary(vec![
        ("device", 0.into()),
        ("address", address.into()),
        ("total_size", bytes.into()),
        ("allocated_size", active.into()),
        ("active_size", active.into()),
        ("requested_size", active.into()),
        ("stream", 0.into()),
        ("segment_type", "large".into()),
        ("segment_pool_id", Pickle::List(vec![0.into(), 0.into()])),
        ("is_expandable", 0.into()),
        ("frames", Pickle::List(Vec::new())),
        ("blocks", Pickle::List(blocks)),
    ])
}

/// Adjoining pieces as one, since a buffer may lie across them.
fn joined(segments: BTreeMap<u64, u64>) -> Vec<(u64, u64)> {
    let mut joined: Vec<(u64, u64)> = Vec::new();
    for (address, bytes) in segments {
        match joined.last_mut() {
            Some((start, len)) if start.saturating_add(*len) == address => *len = len.saturating_add(bytes),
            _ => joined.push((address, bytes)),
        }
    }
    joined
}

impl Memory {
    fn add(&mut self, record: &Record, recording: &Recording) {
        let key = |id| (record.pool, id);
        match record.event {
            Event::New { id, address, .. } => {
                self.addresses.insert(key(id), address);
            }
            Event::Get { id, bytes, tag, .. } => {
                // An earlier put may be lost.
                self.free(record, key(id), recording);
                let address = self.addresses.get(&key(id)).copied().unwrap_or(id);
                self.held.insert(key(id), Held { bytes, address });
                self.entry("alloc", record, address, bytes, tag, recording);
            }
            Event::Put { id, in_flight: true } => {
                if let Some(Held { bytes, address }) = self.held.get(&key(id)).copied() {
                    self.entry("free_requested", record, address, bytes, 0, recording);
                }
            }
            Event::Put { id, .. } | Event::Completed { id } | Event::Gone { id } => {
                self.free(record, key(id), recording)
            }
            Event::Pin { address, bytes, failed: false, .. } => {
                self.segments.insert(address, bytes);
                self.entry("segment_alloc", record, address, bytes, 0, recording);
            }
            Event::Unpin { address, bytes, failed: false, .. } => {
                unpin(&mut self.segments, address, bytes);
                self.entry("segment_free", record, address, bytes, 0, recording);
            }
            Event::Move { from, to, bytes, .. } => {
                unpin(&mut self.segments, from, bytes);
                self.segments.insert(to, bytes);
                self.entry("segment_unmap", record, from, bytes, 0, recording);
                self.entry("segment_map", record, to, bytes, 0, recording);
            }
            Event::Refused { bytes, tag, .. } => self.entry("oom", record, 0, bytes, tag, recording),
            _ => {}
        }
    }

    fn free(&mut self, record: &Record, key: (u32, u64), recording: &Recording) {
        if let Some(Held { bytes, address }) = self.held.remove(&key) {
            if !matches!(record.event, Event::Completed { .. }) {
                self.entry("free_requested", record, address, bytes, 0, recording);
            }
            self.entry("free_completed", record, address, bytes, 0, recording);
        }
    }

    fn entry(&mut self, action: &str, record: &Record, address: u64, bytes: u64, tag: u32, recording: &Recording) {
        let pool = recording.pool(record.pool).map_or_else(|| format!("pool {}", record.pool), name_of);
        let name = recording.tag(tag).map_or_else(|| format!("thread {}", record.thread), ToOwned::to_owned);
        let frame = Pickle::Dictionary(vec![
            ("name", Pickle::Text(name)),
            ("filename", Pickle::Text(pool)),
            ("line", 0.into()),
        ]);
        let mut entry = vec![
            ("action", action.into()),
            ("addr", address.into()),
            ("size", bytes.into()),
            ("stream", 0.into()),
            ("time_us", (record.time_ns / 1_000).into()),
            ("frames", Pickle::List(vec![frame])),
        ];
        if action == "oom" {
            entry.push(("device_free", 0.into()));
        }
        self.entries.push(Pickle::Dictionary(entry));
    }
}

/// Takes bytes out of the segments, which may have been pinned in other pieces.
fn unpin(segments: &mut BTreeMap<u64, u64>, address: u64, bytes: u64) {
    let end = address.saturating_add(bytes);
    let touched: Vec<_> = segments
        .range(..end)
        .filter(|(start, len)| start.saturating_add(**len) > address)
        .map(|(&start, &len)| (start, len))
        .collect();
    for (start, len) in touched {
        segments.remove(&start);
        let old_end = start.saturating_add(len);
        if start < address {
            segments.insert(start, address - start);
        }
        if old_end > end {
            segments.insert(end, old_end - end);
        }
    }
}
