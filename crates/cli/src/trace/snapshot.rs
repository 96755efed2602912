//! A snapshot in the format of `torch.cuda.memory._snapshot()`, for memory_viz: segments for all addresses that buffers had,
//! blocks for the buffers at the end, and one trace with the history.
//!
//! A buffer is allocated by its request and freed by its release, or by the end of its copies. memory_viz plays the trace
//! backwards from the end, so each entry must be reversible: a block lies in a segment, and a freed buffer was allocated before.
//! Therefore the segments are mapped at the start, a request frees buffers without a recorded release, and buffers without a
//! recorded address are left out. The last frame of an entry names the tag, or the thread, and the pool; the frames before it are
//! the call stack of a sampled request.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};

use pinpool_replay::{Event, PoolDescription, Record, Recording};
use serde_json::{Value, json};

use super::pickle;

/// The largest number that memory_viz supports.
const NUMBER_MAX: u64 = i64::MAX as u64;

/// The number of a pool, and the `id` of a buffer's memory.
type Key = (u32, u64);

/// A buffer in use or in flight.
struct HeldBuffer {
    key: Key,
    bytes: u64,
    /// Whether the buffer was returned, but devices may still read it.
    is_in_flight: bool,
    /// The index of the `alloc` entry, and the number of the request's call stack; 0 if the request was not sampled.
    entry: usize,
    stack: u32,
}

struct Memory<'a> {
    recording: &'a Recording,
    /// Address and length of the memory of each buffer.
    places: HashMap<Key, (u64, u64)>,
    /// The held buffers by address. No two overlap.
    held: BTreeMap<u64, HeldBuffer>,
    /// Start and end of each piece of memory that was requested.
    requested: BTreeMap<u64, u64>,
    entries: Vec<Value>,
}

pub(super) fn write(recording: &Recording, out: &mut dyn Write) -> io::Result<()> {
    let (places, held, requested, entries) = Default::default();
    let mut memory = Memory { recording, places, held, requested, entries };
    recording.records.iter().for_each(|record| memory.add(record));
    let segments = joined(&memory.requested);
    let history = std::mem::take(&mut memory.entries);
    // If there is a segment, there is at least one record.
    let mut map =
        |(start, end): &(u64, u64)| memory.entry("segment_map", &recording.records[0], *start, end - start, 0);
    segments.iter().for_each(&mut map);
    memory.entries.extend(history);
    let segments: Vec<_> = segments.into_iter().map(|ends| segment(ends, &memory.held, recording)).collect();
    let snapshot = json!({
        "segments": segments, "device_traces": [memory.entries], "allocator_settings": {}, "external_annotations": [],
    });
    pickle::write(&snapshot, out)
}

/// Merges adjoining and overlapping pieces, because a buffer may span several.
fn joined(pieces: &BTreeMap<u64, u64>) -> Vec<(u64, u64)> {
    let mut joined: Vec<(u64, u64)> = Vec::new();
    for (&start, &end) in pieces {
        match joined.last_mut().filter(|last| start <= last.1) {
            Some(last) => last.1 = last.1.max(end),
            None => joined.push((start, end)),
        }
    }
    joined
}

/// Returns a segment, filled with the held buffers and the gaps between them.
fn segment((start, end): (u64, u64), held: &BTreeMap<u64, HeldBuffer>, recording: &Recording) -> Value {
    let (mut blocks, mut at, mut active, mut allocated) = (Vec::new(), start, 0, 0);
    let mut add = |at: u64, bytes: u64, state: &str, stack: u32| {
        let frames = frames(recording, stack);
        blocks.push(json!({ "address": at, "size": bytes, "requested_size": bytes, "state": state, "frames": frames }));
    };
    for (&address, held) in held.range(start..end) {
        if address > at {
            add(at, address - at, "inactive", 0);
        }
        let state = if held.is_in_flight { "active_pending_free" } else { "active_allocated" };
        add(address, held.bytes, state, held.stack);
        active += held.bytes;
        allocated += if held.is_in_flight { 0 } else { held.bytes };
        at = address + held.bytes;
    }
    if at < end {
        add(at, end - at, "inactive", 0);
    }
    json!({
        "device": 0, "address": start, "total_size": end - start, "allocated_size": allocated, "active_size": active,
        "requested_size": allocated, "stream": 0, "segment_type": "large", "segment_pool_id": [0, 0], "is_expandable": 1,
        "frames": [], "blocks": blocks,
    })
}

/// Returns the frames of a call stack. Stack 0 has none.
fn frames(recording: &Recording, stack: u32) -> Vec<Value> {
    let frames = recording.stacks.get(&stack).into_iter().flatten();
    frames.map(|at| json!({ "name": at.name, "filename": at.file, "line": at.line })).collect()
}

impl Memory<'_> {
    fn add(&mut self, record: &Record) {
        let key = |id| (record.pool, id);
        match record.event {
            Event::New { id, address, class_bytes, .. } => {
                self.free(record, key(id));
                let address = address.min(NUMBER_MAX - 1);
                self.places.insert(key(id), (address, class_bytes.clamp(1, NUMBER_MAX - address)));
            }
            Event::Get { id, bytes, tag, .. } => {
                // The record of an earlier return may be lost.
                self.free(record, key(id));
                let Some(&(address, most)) = self.places.get(&key(id)) else { return };
                self.free_within(record, address, most);
                let end = self.requested.entry(address).or_default();
                *end = (*end).max(address + most);
                let (bytes, entry) = (bytes.clamp(1, most), self.entries.len());
                self.held.insert(address, HeldBuffer { key: key(id), bytes, is_in_flight: false, entry, stack: 0 });
                self.entry("alloc", record, address, bytes, tag);
            }
            Event::Sampled { id, stack } => {
                if let Some((_, held)) = self.held_buffer(key(id)) {
                    held.stack = stack;
                    let entry = held.entry;
                    let known = self.entries.get_mut(entry).and_then(|entry| entry["frames"].as_array_mut());
                    if let Some(known) = known {
                        known.splice(..known.len().saturating_sub(1), frames(self.recording, stack));
                    }
                }
            }
            Event::Put { id, in_flight: true } => {
                if let Some((address, held)) = self.held_buffer(key(id)).filter(|(_, held)| !held.is_in_flight) {
                    held.is_in_flight = true;
                    let bytes = held.bytes;
                    self.entry("free_requested", record, address, bytes, 0);
                }
            }
            Event::Put { id, .. } | Event::Completed { id } => self.free(record, key(id)),
            Event::Gone { id } => {
                self.free(record, key(id));
                self.places.remove(&key(id));
            }
            Event::Refused { bytes, tag, .. } => self.entry("oom", record, 0, bytes, tag),
            _ => {}
        }
    }

    /// Returns a held buffer and its address.
    fn held_buffer(&mut self, key: Key) -> Option<(u64, &mut HeldBuffer)> {
        let &(address, _) = self.places.get(&key)?;
        self.held.get_mut(&address).filter(|held| held.key == key).map(|held| (address, held))
    }

    fn free(&mut self, record: &Record, key: Key) {
        if let Some((address, &mut HeldBuffer { bytes, is_in_flight, .. })) = self.held_buffer(key) {
            self.held.remove(&address);
            if !is_in_flight {
                self.entry("free_requested", record, address, bytes, 0);
            }
            self.entry("free_completed", record, address, bytes, 0);
        }
    }

    /// Frees all buffers in this range, because the records of their returns are lost.
    fn free_within(&mut self, record: &Record, address: u64, bytes: u64) {
        let before_end = self.held.range(..address.saturating_add(bytes)).rev();
        let within = before_end.take_while(|(start, held)| *start + held.bytes > address);
        let keys: Vec<_> = within.map(|(_, held)| held.key).collect();
        keys.into_iter().for_each(|key| self.free(record, key));
    }

    fn entry(&mut self, action: &str, record: &Record, address: u64, bytes: u64, tag: u32) {
        let recording = self.recording;
        let pool = recording.pool(record.pool).map_or_else(|| format!("pool {}", record.pool), PoolDescription::name);
        let name = recording.tag(tag).map_or_else(|| format!("thread {}", record.thread), ToOwned::to_owned);
        let mut entry = json!({
            "action": action, "addr": address, "size": bytes.min(NUMBER_MAX), "stream": 0, "time_us": record.time_ns / 1_000,
            "frames": [{ "name": name, "filename": pool, "line": 0 }],
        });
        if action == "oom" {
            entry["device_free"] = 0.into();
        }
        self.entries.push(entry);
    }
}
