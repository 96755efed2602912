//! A snapshot as `torch.cuda.memory._snapshot()` returns it, for memory_viz: the memory at the end as segments with blocks, and
//! the way there as one trace.
//!
//! A buffer is allocated by its get and freed by its put, or by the end of its copies; what a back-end pins is mapped into a
//! segment, which adjoining pieces are one of, since a buffer may lie across them. memory_viz plays the trace backwards from
//! the end, so each entry must be undone by what is there then: a block lies in a segment, and what is freed was allocated.
//! So memory whose page-lock is not in the recording is mapped for the time that it is known, and memory whose address is not
//! has one of its own. The last frame of an entry names the tag, else the thread, and the pool; those before are the call stack of
//! a get that was sampled.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};

use pinpool_replay::{Event, Record, Recording};

use super::name_of;
use super::pickle::Pickle;

/// Addresses of memory whose own is not in the recording begin here, and each is a multiple of the second number.
const UNKNOWN_FROM: u64 = 1 << 62;
const UNKNOWN_STEP: u64 = 1 << 21;
/// Most bytes of a buffer there.
const UNKNOWN_BYTES_MAX: u64 = 1 << 48;
/// memory_viz has no larger numbers.
const NUMBER_MAX: u64 = i64::MAX as u64;

/// A buffer that is held.
#[derive(Clone, Copy)]
struct Held {
    bytes: u64,
    address: u64,
    /// Put, while devices may still use it.
    is_in_flight: bool,
    /// Its entry `alloc`, and the call stack of its get; 0 of one that was not sampled.
    entry: usize,
    stack: u32,
}

/// Where a buffer's memory is.
#[derive(Clone, Copy)]
struct Place {
    address: u64,
    bytes: u64,
    /// Mapped for this buffer alone.
    is_own: bool,
}

struct Memory<'a> {
    recording: &'a Recording,
    /// First byte and length of what is mapped; no two adjoin.
    segments: BTreeMap<u64, u64>,
    places: HashMap<(u32, u64), Place>,
    held: HashMap<(u32, u64), Held>,
    /// Who is held at an address. No two overlap.
    held_at: BTreeMap<u64, (u32, u64)>,
    next_unknown: u64,
    entries: Vec<Pickle>,
}

pub(super) fn write(recording: &Recording, out: &mut dyn Write) -> io::Result<()> {
    let (segments, places, held, held_at, entries) = Default::default();
    let mut memory = Memory { recording, segments, places, held, held_at, next_unknown: UNKNOWN_FROM, entries };
    recording.records.iter().for_each(|record| memory.add(record));
    let Memory { segments, held, entries, .. } = memory;
    let mut blocks: Vec<_> = held.into_values().collect();
    blocks.sort_by_key(|held| held.address);
    let segments = segments.into_iter().map(|(address, bytes)| segment(address, bytes, &blocks, recording)).collect();
    let snapshot = Pickle::Dictionary(vec![
        ("segments", Pickle::List(segments)),
        ("device_traces", Pickle::List(vec![Pickle::List(entries)])),
        ("allocator_settings", Pickle::Dictionary(Vec::new())),
        ("external_annotations", Pickle::List(Vec::new())),
    ]);
    snapshot.write(out)
}

/// A segment whose blocks fill it: those that are held, and what is between them.
fn segment(address: u64, bytes: u64, held: &[Held], recording: &Recording) -> Pickle {
    let end = address.saturating_add(bytes);
    let (mut blocks, mut at, mut active, mut allocated) = (Vec::new(), address, 0, 0);
    let mut add = |at: u64, bytes: u64, state: &str, stack: u32| {
        blocks.push(Pickle::Dictionary(vec![
            ("address", at.into()),
            ("size", bytes.into()),
            ("requested_size", bytes.into()),
            ("state", state.into()),
            ("frames", Pickle::List(frames(recording, stack))),
        ]));
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
    Pickle::Dictionary(vec![
        ("device", 0.into()),
        ("address", address.into()),
        ("total_size", bytes.into()),
        ("allocated_size", allocated.into()),
        ("active_size", active.into()),
        ("requested_size", allocated.into()),
        ("stream", 0.into()),
        ("segment_type", "large".into()),
        ("segment_pool_id", Pickle::List(vec![0.into(), 0.into()])),
        ("is_expandable", 1.into()),
        ("frames", Pickle::List(Vec::new())),
        ("blocks", Pickle::List(blocks)),
    ])
}

/// The frames of a call stack; none of 0.
fn frames(recording: &Recording, stack: u32) -> Vec<Pickle> {
    let frames = recording.stacks.get(&stack).into_iter().flatten();
    frames.map(|at| frame(at.name.clone(), at.file.clone(), at.line.into())).collect()
}

fn frame(name: String, file: String, line: u64) -> Pickle {
    Pickle::Dictionary(vec![("name", Pickle::Text(name)), ("filename", Pickle::Text(file)), ("line", line.into())])
}

impl Memory<'_> {
    fn add(&mut self, record: &Record) {
        let key = |id| (record.pool, id);
        match record.event {
            Event::New { id, address, class_bytes, .. } => {
                self.forget(record, key(id));
                let address = address.min(NUMBER_MAX);
                let bytes = class_bytes.min(NUMBER_MAX - address);
                // Pageable memory, or a page-lock that was lost.
                let is_own = !self.is_mapped(address, bytes);
                if is_own {
                    self.map(record, address, bytes);
                }
                self.places.insert(key(id), Place { address, bytes, is_own });
            }
            Event::Get { id, bytes, class_bytes, tag, .. } => {
                // An earlier put may be lost.
                self.free(record, key(id));
                let place = self.place(record, key(id), class_bytes.max(bytes));
                // What else lies there was put, and the record is lost.
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
                    let entry = self.entries.get_mut(held.entry);
                    if let Some(Pickle::Dictionary(fields)) = entry
                        && let Some((_, Pickle::List(known))) = fields.iter_mut().find(|(name, _)| *name == "frames")
                    {
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

    /// Where the memory is; one that is unknown is mapped for its buffer.
    fn place(&mut self, record: &Record, key: (u32, u64), bytes: u64) -> Place {
        if let Some(place) = self.places.get(&key).copied().filter(|place| self.is_mapped(place.address, place.bytes)) {
            return place;
        }
        let place = Place { address: self.next_unknown, bytes: bytes.min(UNKNOWN_BYTES_MAX), is_own: true };
        // A hole behind it: what does not belong together does not adjoin.
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
        // Without a record of new memory a buffer is gone when it is put.
        if self.places.get(&key).is_some_and(|place| place.is_own && place.address >= UNKNOWN_FROM) {
            self.forget_place(record, key);
        }
    }

    /// Frees all that lies in these addresses.
    fn free_within(&mut self, record: &Record, address: u64, bytes: u64) {
        let before_end = self.held_at.range(..address.saturating_add(bytes)).rev();
        let is_within =
            |key: &(u32, u64)| self.held.get(key).is_some_and(|held: &Held| held.address + held.bytes > address);
        let keys: Vec<_> = before_end.map(|(_, key)| *key).take_while(is_within).collect();
        keys.into_iter().for_each(|key| self.free(record, key));
    }

    /// The memory of a buffer is gone.
    fn forget(&mut self, record: &Record, key: (u32, u64)) {
        self.free(record, key);
        self.forget_place(record, key);
    }

    fn forget_place(&mut self, record: &Record, key: (u32, u64)) {
        if let Some(place) = self.places.remove(&key).filter(|place| place.is_own) {
            self.unmap(record, place.address, place.bytes);
        }
    }

    /// Maps what of the addresses is not mapped.
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

    /// Adds a piece that nothing overlaps.
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

    /// Unmaps what of the addresses is mapped, and frees what lies there: its put is lost.
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
        let mut entry = vec![
            ("action", action.into()),
            ("addr", address.into()),
            ("size", bytes.min(NUMBER_MAX).into()),
            ("stream", 0.into()),
            ("time_us", (record.time_ns / 1_000).into()),
            ("frames", Pickle::List(vec![frame(name, pool, 0)])),
        ];
        if action == "oom" {
            entry.push(("device_free", 0.into()));
        }
        self.entries.push(Pickle::Dictionary(entry));
    }
}
