//! A snapshot of PyTorch's memory (`torch.cuda.memory._dump_snapshot`), read as a recording: what its allocator of pinned
//! memory did, which the snapshot has under `host_traces` if it was recorded.
//!
//! There each buffer is a call of the driver of its own, whose length is rounded up to a power of two: a `segment_alloc`, and
//! at the same address an `alloc` for each use. The length that was requested is not in the snapshot.

use std::collections::{HashMap, HashSet};
use std::io::Read;

use super::format::TraceError;
use super::pickle::{Id, Pickle};
use pinpool_observe::record::{Event, PoolDescription, Record, Recording};

/// Most bytes of a snapshot.
const BYTES_MAX: u64 = 1 << 30;
/// Most tags: half of what a recording names.
const TAGS_MAX: usize = 32_768;

pub(super) fn read(input: impl Read) -> Result<Recording, TraceError> {
    read_within(input, BYTES_MAX)
}

fn read_within(input: impl Read, bytes_max: u64) -> Result<Recording, TraceError> {
    let mut bytes = Vec::new();
    input.take(bytes_max + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > bytes_max {
        let why = format!("over {bytes_max} bytes, the most that is read: record less history (max_entries)");
        return Err(refused(why));
    }
    let pickle = Pickle::read(&bytes).map_err(|error| refused(format!("at byte {}: {}", error.at, error.why)))?;
    of_pickle(&pickle)
}

fn refused(why: String) -> TraceError {
    TraceError::Snapshot { why }
}

fn of_pickle(pickle: &Pickle<'_>) -> Result<Recording, TraceError> {
    let root = pickle.root();
    if pickle.get(root, "segments").is_none() && pickle.get(root, "device_traces").is_none() {
        return Err(refused("a pickle of something else: it has neither `segments` nor `device_traces`".to_owned()));
    }
    let traces = pickle.get(root, "host_traces").and_then(|id| pickle.list(id)).unwrap_or_default();
    // One list, or one for each device as those of the device's memory are.
    let entries = traces.iter().flat_map(|id| pickle.list(*id).unwrap_or(std::slice::from_ref(id)));
    let mut importer = Importer::new(pickle);
    for (number, entry) in entries.enumerate() {
        importer.add(*entry).map_err(|why| refused(format!("entry {number} of host_traces: {why}")))?;
    }
    if importer.recording.records.is_empty() {
        let remedy = "torch.cuda.memory._record_memory_history(record_pinned_host_memory=True) records it, of PyTorch 2.14 and later";
        return Err(refused(format!("has no history of pinned memory (`host_traces`): {remedy}")));
    }
    let mut recording = importer.recording;
    recording.records.sort_by_key(|record| record.time_ns);
    Ok(recording)
}

struct Importer<'a> {
    pickle: &'a Pickle<'a>,
    recording: Recording,
    begun_us: Option<i128>,
    pools: HashMap<(i128, i128), u32>,
    tags: HashMap<String, u32>,
    /// Buffers that are held, and of those the ones that were given back while copies used them.
    held: HashSet<(u32, u64)>,
    requested: HashSet<(u32, u64)>,
}

impl<'a> Importer<'a> {
    fn new(pickle: &'a Pickle<'a>) -> Self {
        let (recording, pools, tags, held, requested) = Default::default();
        Self { pickle, recording, begun_us: None, pools, tags, held, requested }
    }

    fn number(&self, entry: Id, key: &str) -> Option<i128> {
        self.pickle.get(entry, key).and_then(|id| self.pickle.number(id))
    }

    fn unsigned(&self, entry: Id, key: &str) -> Result<u64, String> {
        let number = self.number(entry, key).and_then(|number| u64::try_from(number).ok());
        number.ok_or_else(|| format!("`{key}` is no number of bytes or address"))
    }

    fn add(&mut self, entry: Id) -> Result<(), String> {
        if !self.pickle.is_dictionary(entry) {
            return Err("not a dictionary".to_owned());
        }
        let action =
            self.pickle.get(entry, "action").and_then(|id| self.pickle.text(id)).ok_or("`action` is no text")?;
        // Marks of the user, which change no memory.
        if matches!(action, "snapshot" | "annotate") {
            return Ok(());
        }
        let (bytes, pool) = (self.unsigned(entry, "size")?, self.pool(entry));
        let tag = if matches!(action, "alloc" | "oom") { self.tag(entry) } else { 0 };
        let (took_ns, failed) = (0, false);
        let events = if action == "oom" {
            [Some(Event::Refused { bytes, class_bytes: bytes, tag, took_ns }), None]
        } else {
            let address = self.unsigned(entry, "addr")?;
            let key = (pool, address);
            match action {
                "segment_alloc" | "segment_map" => [
                    Some(Event::Pin { address, bytes, took_ns, failed }),
                    Some(Event::New { id: address, address, class_bytes: bytes, from_source: true }),
                ],
                "segment_free" | "segment_unmap" => {
                    [Some(Event::Gone { id: address }), Some(Event::Unpin { address, bytes, took_ns, failed })]
                }
                "alloc" => {
                    self.requested.remove(&key);
                    self.held.insert(key);
                    [Some(Event::Get { id: address, bytes, class_bytes: bytes, tag, took_ns }), None]
                }
                // Of buffers that were got before the history begins, nothing is known.
                "free_requested" if self.held.contains(&key) => {
                    self.requested.insert(key);
                    [Some(Event::Put { id: address, in_flight: true }), None]
                }
                "free_completed" if self.held.remove(&key) => {
                    // Recording may skip requests.
                    let was_requested = self.requested.remove(&key);
                    let put = Event::Put { id: address, in_flight: false };
                    [Some(if was_requested { Event::Completed { id: address } } else { put }), None]
                }
                "free_requested" | "free_completed" => [None, None],
                _ => {
                    return Err(format!(
                        "`{}` is no action that is known",
                        action.chars().take(40).collect::<String>()
                    ));
                }
            }
        };
        let time_ns = self.time_ns(entry);
        let record = |event| Record { time_ns, thread: 0, pool, event };
        self.recording.records.extend(events.into_iter().flatten().map(record));
        Ok(())
    }

    /// Since the first entry.
    fn time_ns(&mut self, entry: Id) -> u64 {
        let now_us = self.number(entry, "time_us").or(self.begun_us).unwrap_or(0);
        let since_us = now_us.saturating_sub(*self.begun_us.get_or_insert(now_us));
        u64::try_from(since_us).unwrap_or(0).saturating_mul(1_000)
    }

    /// The pool of an entry, described at its first.
    fn pool(&mut self, entry: Id) -> u32 {
        let id = self.pickle.get(entry, "pool_id").and_then(|id| match self.pickle.list(id)? {
            [a, b] => Some((self.pickle.number(*a)?, self.pickle.number(*b)?)),
            _ => None,
        });
        let id = id.unwrap_or((0, 0));
        let next = u32::try_from(self.pools.len()).unwrap_or(u32::MAX);
        let pools = &mut self.recording.pools;
        *self.pools.entry(id).or_insert_with(|| {
            let name = if id == (0, 0) { "torch".to_owned() } else { format!("torch pool {}.{}", id.0, id.1) };
            let facts = vec![("backend".to_owned(), "torch".to_owned()), ("name".to_owned(), name)];
            pools.push(PoolDescription { number: next, facts });
            next
        })
    }

    /// Who asked: the innermost frame of Python, if the history has any; else the innermost of all.
    fn tag(&mut self, entry: Id) -> u32 {
        let frames = self.pickle.get(entry, "frames").and_then(|id| self.pickle.list(id)).unwrap_or_default();
        let text = |frame: Id, key: &str| self.pickle.get(frame, key).and_then(|id| self.pickle.text(id));
        let is_python = |frame: &&Id| text(**frame, "filename").is_some_and(|name| name.ends_with(".py"));
        let Some(&frame) = frames.iter().find(is_python).or(frames.first()) else { return 0 };
        let line = self.number(frame, "line").unwrap_or(0);
        let (file, name) = (text(frame, "filename").unwrap_or("?"), text(frame, "name").unwrap_or("?"));
        let name = format!("{file}:{line} {name}");
        if let Some(&number) = self.tags.get(&name) {
            return number;
        }
        if self.tags.len() >= TAGS_MAX {
            return 0;
        }
        let number = u32::try_from(self.tags.len() + 1).unwrap_or(0);
        self.recording.tags.push((number, name.clone()));
        self.tags.insert(name, number);
        number
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `{"host_traces": [{"action": ACTION, "size": 1, KEY: 2}], "segments": []}` of protocol 2.
    fn snapshot(action: &str, key: &str) -> Vec<u8> {
        let text = |text: &str| [b"X", &u32::try_from(text.len()).unwrap().to_le_bytes()[..], text.as_bytes()].concat();
        let texts = ["host_traces", "action", action, "size", key, "segments"].map(text);
        let [host_traces, action_key, action, size, key, segments] = texts;
        let parts: [&[u8]; 11] = [
            b"\x80\x02}(",
            &host_traces,
            b"]}(",
            &action_key,
            &action,
            &size,
            b"K\x01",
            &key,
            b"K\x02ua",
            &segments,
            b"]u.",
        ];
        parts.concat()
    }

    #[test]
    fn an_entry_that_cannot_be_used_is_named() {
        assert_eq!(read(snapshot("alloc", "addr").as_slice()).unwrap().records.len(), 1);
        for (action, key, why) in [
            ("resize", "addr", "entry 0 of host_traces: `resize` is no action"),
            ("alloc", "address", "entry 0 of host_traces: `addr` is no number"),
            ("free_requested", "addr", "record_pinned_host_memory=True"),
        ] {
            let error = read(snapshot(action, key).as_slice()).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn a_snapshot_over_the_limit_is_refused_before_it_is_read() {
        let endless = std::io::repeat(0x80);
        let error = read_within(endless, 1000).unwrap_err().to_string();
        assert!(error.contains("over 1000 bytes"), "{error}");
        assert!(read(&b"\x80\x02}."[..]).unwrap_err().to_string().contains("something else"));
    }
}
