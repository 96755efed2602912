//! A trace of requests as the recording of one thread.

use std::collections::HashMap;

use super::format::{TraceError, TraceOp, TraceReader};
use pinpool_observe::record::{Event, Record, Recording};

/// Longest duration of a workload: a replay polls the pool once a second.
pub(super) const MAX_DURATION_US: u64 = 366 * 24 * 3_600 * 1_000_000;
/// Most records that are replayed.
const RECORDS_MAX: usize = 16_000_000;
/// The buffer of `r` and `s` lines.
const STEPS_ID: u64 = u64::MAX;

/// The records so far. Empty buffers have no memory and therefore no record.
#[derive(Default)]
struct Records {
    records: Vec<Record>,
    time_ns: u64,
    pool: u32,
    /// The pool and the bytes of each held buffer.
    held: HashMap<u64, (u32, u64)>,
    held_bytes: u64,
}

/// Reads all of a trace.
pub(super) fn recording_of(reader: &mut TraceReader) -> Result<Recording, TraceError> {
    let mut all = Records::default();
    while let Some(operation) = reader.next() {
        all.add(operation?).map_err(|why| reader.error_here(why))?;
    }
    all.push(all.pool, Event::End);
    Ok(Recording { records: all.records, ..Recording::default() })
}

impl Records {
    fn add(&mut self, operation: TraceOp) -> Result<(), String> {
        match operation {
            TraceOp::Get { id, .. } if self.held.contains_key(&id) => {
                return Err(format!("buffer {id} is held already"));
            }
            TraceOp::Get { id, bytes, .. } => {
                let bytes = bytes as u64;
                self.held_bytes = self.held_bytes.checked_add(bytes).ok_or("the held bytes exceed 2^64")?;
                self.held.insert(id, (self.pool, bytes));
                self.get(id, bytes);
            }
            TraceOp::Put { id } => {
                let (pool, bytes) = self.held.remove(&id).ok_or_else(|| format!("no buffer {id} is held"))?;
                self.held_bytes -= bytes;
                self.put(pool, id, bytes);
            }
            TraceOp::Steps { count, bytes, step } => {
                for n in 0..count {
                    let grown = (step as u64).checked_mul(n).and_then(|grown| grown.checked_add(bytes as u64));
                    let bytes = grown.ok_or("the sizes exceed 2^64")?;
                    self.get(STEPS_ID, bytes);
                    self.put(self.pool, STEPS_ID, bytes);
                    self.check_len()?;
                }
            }
            TraceOp::Clear => self.push(self.pool, Event::Cleared),
            TraceOp::Pool { index } => self.pool = u32::try_from(index).unwrap_or(u32::MAX),
            TraceOp::Advance { micros } => {
                self.time_ns = self.time_ns.saturating_add(micros.saturating_mul(1_000));
                if self.time_ns / 1_000 > MAX_DURATION_US {
                    return Err("the trace lasts longer than a year".to_owned());
                }
            }
        }
        self.check_len()
    }

    fn check_len(&self) -> Result<(), String> {
        let is_long = self.records.len() > RECORDS_MAX;
        if is_long { Err(format!("the trace has more than {RECORDS_MAX} requests and returns")) } else { Ok(()) }
    }

    fn push(&mut self, pool: u32, event: Event) {
        self.records.push(Record { time_ns: self.time_ns, thread: 0, pool, event });
    }

    fn get(&mut self, id: u64, bytes: u64) {
        if bytes > 0 {
            self.push(self.pool, Event::Get { id, bytes, class_bytes: bytes, tag: 0, took_ns: 0 });
        }
    }

    fn put(&mut self, pool: u32, id: u64, bytes: u64) {
        if bytes > 0 {
            self.push(pool, Event::Put { id, in_flight: false });
        }
    }
}
