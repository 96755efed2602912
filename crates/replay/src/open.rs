//! A trace of any kind, told by its first bytes: a recording of a pool, or text.

use std::collections::HashSet;
use std::path::Path;

use super::format::{TraceError, TraceOp, TraceReader};
use super::input::Input;
use pinpool_observe::record::{Event, PoolDescription, Record, Recording};

/// Most records that the `r` and `s` lines of a text expand to.
const RECORDS_MAX: usize = 16_000_000;
/// The buffer of `r` and `s` lines.
const STEPS_ID: u64 = u64::MAX;

/// Reads the trace at `path` as a recording, whichever kind it is. A text has requests, returns and clears; its sizes are its classes.
///
/// # Errors
///
/// If the file cannot be read, is neither kind of trace, or is too long.
pub fn open_recording(path: &Path) -> Result<Recording, TraceError> {
    read_recording(Input::open(path)?)
}

/// Reads a trace from a file that is open, as [`open_recording`] does.
///
/// # Errors
///
/// The errors of [`open_recording`].
pub fn read_recording(input: Input) -> Result<Recording, TraceError> {
    match read_file(input)? {
        Trace::Recording(recording) => Ok(recording),
        Trace::Text(mut reader) => of_text(&mut reader),
    }
}

/// The contents of a file.
pub(super) enum Trace {
    /// A recording of a pool, or of the pinned allocations of another program.
    Recording(Recording),
    Text(TraceReader),
}

/// Reads a file of any kind, which its first bytes tell; only the header of a text.
pub(super) fn read_file(input: Input) -> Result<Trace, TraceError> {
    let is_recording = Recording::is_begun_by(input.first());
    let is_pickle = matches!(input.first(), [0x80, 2..=5, ..]);
    let bytes = input.into_bytes();
    Ok(match () {
        () if is_recording => Trace::Recording(Recording::read(bytes)?),
        () if is_pickle => return Err(TraceError::Pickle),
        () => Trace::Text(TraceReader::new(bytes)?),
    })
}

fn of_text(reader: &mut TraceReader) -> Result<Recording, TraceError> {
    let header = reader.header();
    let facts = vec![("PINPOOL_POOL_SIZE_LIMIT".to_owned(), header.limit.to_string())];
    let pools = (0..).take(header.pools).map(|number| PoolDescription { number, facts: facts.clone() }).collect();
    let mut recording = Recording { pools, ..Recording::default() };
    let (mut time_ns, mut pool) = (0_u64, 0_u32);
    // Buffers of zero bytes have no memory, so no record.
    let mut empty = HashSet::new();
    while let Some(operation) = reader.next() {
        let mut add = |event| recording.records.push(Record { time_ns, thread: 0, pool, event });
        match operation? {
            TraceOp::Get { id, bytes: 0, .. } => {
                empty.insert(id);
            }
            TraceOp::Get { id, bytes, .. } => add(get(id, bytes)),
            TraceOp::Put { id } => {
                if !empty.remove(&id) {
                    add(Event::Put { id, in_flight: false });
                }
            }
            TraceOp::Steps { count, bytes, step } => {
                let mut len = bytes;
                for _ in 0..count.min(RECORDS_MAX as u64) {
                    if len > 0 {
                        add(get(STEPS_ID, len));
                        add(Event::Put { id: STEPS_ID, in_flight: false });
                    }
                    len = len.saturating_add(step);
                }
            }
            TraceOp::Clear => add(Event::Cleared),
            TraceOp::Pool { index } => pool = u32::try_from(index).unwrap_or(u32::MAX),
            TraceOp::Advance { micros } => time_ns = time_ns.saturating_add(micros.saturating_mul(1_000)),
        }
        if recording.records.len() > RECORDS_MAX {
            return Err(reader.error_here(format!("the trace has more than {RECORDS_MAX} requests and returns")));
        }
    }
    Ok(recording)
}

fn get(id: u64, bytes: usize) -> Event {
    let bytes = bytes as u64;
    Event::Get { id, bytes, class_bytes: bytes, tag: 0, took_ns: 0 }
}
