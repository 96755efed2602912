//! A snapshot as `torch.cuda.memory._snapshot()` returns it, for memory_viz: the memory at the end as segments with blocks, and its
//! history as one trace.
//!
//! A buffer is allocated by its request and freed by its release, or by the end of its copies. Pinned memory is mapped into segments;
//! adjoining pieces form one segment, since a buffer may span them. memory_viz plays the trace backwards from the end, so each entry
//! must be reversible: a block lies in a segment, and what is freed was allocated. Therefore memory with an unrecorded pin call is
//! mapped while it is known, and memory with an unknown address gets an invented one. The last frame of an entry names the tag, or the
//! thread, and the pool; the frames before it are the call stack of a sampled request.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};

use pinpool_replay::{Event, Record, Recording};
use serde_json::{Value, json};

use super::{name_of, pickle};

/// Invented addresses begin here, and each is a multiple of the second number.
const UNKNOWN_FROM: u64 = 1 << 62;
const UNKNOWN_STEP: u64 = 1 << 21;
/// Most bytes of a buffer at an invented address.
const UNKNOWN_BYTES_MAX: u64 = 1 << 48;
/// memory_viz has no larger numbers.
const NUMBER_MAX: u64 = i64::MAX as u64;

/// A buffer in use or in flight.
#[derive(Clone, Copy)]
struct Held {
    bytes: u64,
    address: u64,
    /// Returned, but devices may still read it.
    is_in_flight: bool,
    /// Its entry `alloc`, and the call stack of its request; 0 if that was not sampled.
    entry: usize,
    stack: u32,
}

/// The memory of a buffer.
#[derive(Clone, Copy)]
struct Place {
    address: u64,
    bytes: u64,
    /// Mapped for this buffer only.
    is_own: bool,
}

struct Memory<'a> {
    recording: &'a Recording,
    /// Start and length of mapped memory; no two adjoin.
    segments: BTreeMap<u64, u64>,
    places: HashMap<(u32, u64), Place>,
    held: HashMap<(u32, u64), Held>,
    /// The buffer held at an address. No two overlap.
    held_at: BTreeMap<u64, (u32, u64)>,
    next_unknown: u64,
    entries: Vec<Value>,
}

pub(super) fn write(recording: &Recording, out: &mut dyn Write) -> io::Result<()> {
    let (segments, places, held, held_at, entries) = Default::default();
    let mut memory = Memory { recording, segments, places, held, held_at, next_unknown: UNKNOWN_FROM, entries };
    recording.records.iter().for_each(|record| memory.add(record));
    let Memory { segments, held, entries, .. } = memory;
    let mut blocks: Vec<_> = held.into_values().collect();
    blocks.sort_by_key(|held| held.address);
    let segments = segments.into_iter().map(|(address, bytes)| segment(address, bytes, &blocks, recording)).collect();
    let snapshot = json!({
        "segments": Value::Array(segments), "device_traces": [Value::Array(entries)], "allocator_settings": {},
        "external_annotations": [],
    });
    pickle::write(&snapshot, out)
}

/// A segment, filled with the held buffers and the gaps between them.
fn segment(address: u64, bytes: u64, held: &[Held], recording: &Recording) -> Value {
    let end = address.saturating_add(bytes);
    let (mut blocks, mut at, mut active, mut allocated) = (Vec::new(), address, 0, 0);
    let mut add = |at: u64, bytes: u64, state: &str, stack: u32| {
        let frames = frames(recording, stack);
        blocks.push(json!({ "address": at, "size": bytes, "requested_size": bytes, "state": state, "frames": frames }));
    };
    for held in held.iter().filter(|held| (address..end).contains(&held.address)) {
        if held.address > at {
            add(at, held.address - at, "inactive", 0);
        }
        let state = if held.is_in_flight { "active_pending_free" } else { "active_allocated" };
        add(held.address, held.bytes, state, held.stack);
        active += held.bytes;
        allocated += if held.is_in_flight { 0 } else { held.bytes };
        at = held.address + held.bytes;
    }
    if at < end {
        add(at, end - at, "inactive", 0);
    }
    json!({
        "device": 0, "address": address, "total_size": bytes, "allocated_size": allocated, "active_size": active,
        "requested_size": allocated, "stream": 0, "segment_type": "large", "segment_pool_id": [0, 0], "is_expandable": 1,
        "frames": [], "blocks": blocks,
    })
}

/// The frames of a call stack; none of 0.
fn frames(recording: &Recording, stack: u32) -> Vec<Value> {
    let frames = recording.stacks.get(&stack).into_iter().flatten();
    frames.map(|at| json!({ "name": at.name, "filename": at.file, "line": at.line })).collect()
}

impl Memory<'_> {
    fn add(&mut self, record: &Record) {
        let key = |id| (record.pool, id);
        match record.event {
            Event::New { id, address, class_bytes, .. } => {
                self.forget(record, key(id));
                let address = address.min(NUMBER_MAX);
                let bytes = class_bytes.min(NUMBER_MAX - address);
                // Pageable memory, or a lost record of a pin call.
                let is_own = !self.is_mapped(address, bytes);
                if is_own {
                    self.map(record, address, bytes);
                }
                self.places.insert(key(id), Place { address, bytes, is_own });
            }
            Event::Get { id, bytes, class_bytes, tag, .. } => {
                // The record of an earlier release may be lost.
                self.free(record, key(id));
                let place = self.place(record, key(id), class_bytes.max(bytes));
                // Other buffers there were released, and the records are lost.
                self.free_within(record, place.address, place.bytes);
                let (bytes, entry) = (bytes.min(place.bytes), self.entries.len());
                let held = Held { bytes, address: place.address, is_in_flight: false, entry, stack: 0 };
                self.held.insert(key(id), held);
                self.held_at.insert(held.address, key(id));
                self.entry("alloc", record, held.address, held.bytes, tag);
            }
            Event::Sampled { id, stack } => {
                if let Some(held) = self.held.get_mut(&key(id)) {
                    held.stack = stack;
                    let known = self.entries.get_mut(held.entry).and_then(|entry| entry["frames"].as_array_mut());
                    if let Some(known) = known {
                        known.splice(..known.len().saturating_sub(1), frames(self.recording, stack));
                    }
                }
            }
            Event::Put { id, in_flight: true } => {
                if let Some(held) = self.held.get_mut(&key(id)).filter(|held| !held.is_in_flight) {
                    held.is_in_flight = true;
                    let Held { address, bytes, .. } = *held;
                    self.entry("free_requested", record, address, bytes, 0);
                }
            }
            Event::Put { id, .. } | Event::Completed { id } => self.free(record, key(id)),
            Event::Gone { id } => self.forget(record, key(id)),
            Event::Pin { address, bytes, failed: false, .. } => self.map(record, address, bytes),
            Event::Unpin { address, bytes, failed: false, .. } => self.unmap(record, address, bytes),
            Event::Move { from, to, bytes, .. } => {
                self.unmap(record, from, bytes);
                self.map(record, to, bytes);
            }
            Event::Refused { bytes, tag, .. } => self.entry("oom", record, 0, bytes, tag),
            _ => {}
        }
    }

    /// The place of the memory; an unknown one is mapped for its buffer.
    fn place(&mut self, record: &Record, key: (u32, u64), bytes: u64) -> Place {
        if let Some(place) = self.places.get(&key).copied().filter(|place| self.is_mapped(place.address, place.bytes)) {
            return place;
        }
        let place = Place { address: self.next_unknown, bytes: bytes.min(UNKNOWN_BYTES_MAX), is_own: true };
        // With a gap after it, so that unrelated buffers do not adjoin.
        let steps = place.bytes.div_ceil(UNKNOWN_STEP) + 1;
        let next = place.address + steps * UNKNOWN_STEP;
        self.next_unknown = if next < NUMBER_MAX - 2 * UNKNOWN_BYTES_MAX { next } else { UNKNOWN_FROM };
        self.map(record, place.address, place.bytes);
        self.places.insert(key, place);
        place
    }

    fn is_mapped(&self, address: u64, bytes: u64) -> bool {
        let segment = self.segments.range(..=address).next_back();
        segment.is_some_and(|(start, len)| address.saturating_add(bytes) <= start.saturating_add(*len))
    }

    fn free(&mut self, record: &Record, key: (u32, u64)) {
        if let Some(Held { bytes, address, is_in_flight, .. }) = self.held.remove(&key) {
            self.held_at.remove(&address);
            if !is_in_flight {
                self.entry("free_requested", record, address, bytes, 0);
            }
            self.entry("free_completed", record, address, bytes, 0);
        }
        // Without a record of new memory a buffer ends with its release.
        if self.places.get(&key).is_some_and(|place| place.is_own && place.address >= UNKNOWN_FROM) {
            self.forget_place(record, key);
        }
    }

    /// Frees all buffers at these addresses.
    fn free_within(&mut self, record: &Record, address: u64, bytes: u64) {
        let before_end = self.held_at.range(..address.saturating_add(bytes)).rev();
        let is_within =
            |key: &(u32, u64)| self.held.get(key).is_some_and(|held: &Held| held.address + held.bytes > address);
        let keys: Vec<_> = before_end.map(|(_, key)| *key).take_while(is_within).collect();
        keys.into_iter().for_each(|key| self.free(record, key));
    }

    /// The memory of a buffer was released.
    fn forget(&mut self, record: &Record, key: (u32, u64)) {
        self.free(record, key);
        self.forget_place(record, key);
    }

    fn forget_place(&mut self, record: &Record, key: (u32, u64)) {
        if let Some(place) = self.places.remove(&key).filter(|place| place.is_own) {
            self.unmap(record, place.address, place.bytes);
        }
    }

    /// Maps the unmapped part of these addresses.
    fn map(&mut self, record: &Record, address: u64, bytes: u64) {
        let (mut at, end) = (address.min(NUMBER_MAX), address.saturating_add(bytes).min(NUMBER_MAX));
        while at < end {
            let before = self.segments.range(..=at).next_back().map_or(0, |(start, len)| start + len);
            let from = at.max(before);
            let to = self.segments.range(from + 1..).next().map_or(end, |(start, _)| (*start).min(end));
            if from < to {
                self.entry("segment_map", record, from, to - from, 0);
                self.join(from, to);
            }
            at = to.max(from);
        }
    }

    /// Adds a piece that overlaps no other.
    fn join(&mut self, mut from: u64, mut to: u64) {
        if let Some((&start, &len)) =
            self.segments.range(..from).next_back().filter(|(start, len)| *start + *len == from)
        {
            self.segments.remove(&start);
            (from, to) = (start, to.max(start + len));
        }
        if let Some(len) = self.segments.remove(&to) {
            to += len;
        }
        self.segments.insert(from, to - from);
    }

    /// Unmaps the mapped part of these addresses, and frees the buffers there: the records of their release are lost.
    fn unmap(&mut self, record: &Record, address: u64, bytes: u64) {
        self.free_within(record, address, bytes);
        let end = address.saturating_add(bytes);
        let touched = self.segments.range(..end).filter(|(start, len)| *start + *len > address);
        let touched: Vec<_> = touched.map(|(&start, &len)| (start, start + len)).collect();
        for (start, old_end) in touched {
            self.segments.remove(&start);
            if start < address {
                self.segments.insert(start, address - start);
            }
            if old_end > end {
                self.segments.insert(end, old_end - end);
            }
            let (from, to) = (start.max(address), old_end.min(end));
            self.entry("segment_unmap", record, from, to - from, 0);
        }
    }

    fn entry(&mut self, action: &str, record: &Record, address: u64, bytes: u64, tag: u32) {
        let recording = self.recording;
        let pool = recording.pool(record.pool).map_or_else(|| format!("pool {}", record.pool), name_of);
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
