//! A trace of any kind, told by its first bytes: a recording of a pool, a log of RMM, a snapshot of PyTorch, or text.

use std::collections::HashSet;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use flate2::bufread::MultiGzDecoder;

use super::format::{TraceError, TraceOp, TraceReader};
use super::pickle::Pickle;
use super::{rmm, snapshot};
use crate::record::{Event, PoolDescription, Record, Recording};

/// Most records that the `r` and `s` lines of a text are written out as.
const RECORDS_MAX: usize = 16_000_000;
/// The buffer that `r` and `s` lines get and put.
const STEPS_ID: u64 = u64::MAX;

/// Reads the trace at `path` as a recording, whichever kind it is. A text has gets, puts and clears; its sizes are its classes.
///
/// # Errors
///
/// If the file cannot be read, is neither kind of trace, or is too long.
pub fn open_recording(path: &Path) -> Result<Recording, TraceError> {
    let kind = kind(path)?;
    Ok(match kind {
        Kind::Recording => Recording::open(path)?,
        Kind::Rmm | Kind::Snapshot => open_other(path, kind)?,
        Kind::Text => of_text(&mut TraceReader::open(path)?)?,
    })
}

/// What a file holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Recording,
    /// A log of RMM.
    Rmm,
    /// A pickle, as PyTorch dumps snapshots of its memory.
    Snapshot,
    Text,
}

/// What another program recorded, at `path`.
pub(super) fn open_other(path: &Path, kind: Kind) -> Result<Recording, TraceError> {
    let mut file = BufReader::new(File::open(path)?);
    let is_gzip = file.fill_buf()?.starts_with(&[0x1f, 0x8b]);
    let input: Box<dyn BufRead> =
        if is_gzip { Box::new(BufReader::new(MultiGzDecoder::new(file))) } else { Box::new(file) };
    if kind == Kind::Snapshot { snapshot::read(input) } else { rmm::read(input) }
}

/// What the file at `path` holds, plain or compressed, by its first bytes.
pub(super) fn kind(path: &Path) -> Result<Kind, TraceError> {
    let mut file = BufReader::new(File::open(path)?);
    let is_gzip = file.fill_buf()?.starts_with(&[0x1f, 0x8b]);
    let (mut first, most) = (Vec::new(), rmm::HEAD.len() as u64);
    let mut take = |input: &mut dyn Read| input.take(most).read_to_end(&mut first);
    // What cannot be decompressed is told by the reader that follows.
    let _ = if is_gzip { take(&mut MultiGzDecoder::new(file)) } else { take(&mut file) };
    Ok(match () {
        () if Recording::is_begun_by(&first) => Kind::Recording,
        () if first == rmm::HEAD.as_bytes() => Kind::Rmm,
        () if Pickle::is_begun_by(&first) => Kind::Snapshot,
        () => Kind::Text,
    })
}

fn of_text(reader: &mut TraceReader) -> Result<Recording, TraceError> {
    let header = reader.header();
    let facts = vec![("PINPOOL_POOL_SIZE_LIMIT".to_owned(), header.limit.to_string())];
    let pools = (0..).take(header.pools).map(|number| PoolDescription { number, facts: facts.clone() }).collect();
    let mut recording = Recording { pools, ..Recording::default() };
    let (mut time_ns, mut pool) = (0_u64, 0_u32);
    // Of zero bytes: no memory, so no record.
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
            return Err(reader.error_here(format!("the trace has more than {RECORDS_MAX} gets and puts")));
        }
    }
    Ok(recording)
}

fn get(id: u64, bytes: usize) -> Event {
    let bytes = bytes as u64;
    Event::Get { id, bytes, class_bytes: bytes, tag: 0, took_ns: 0 }
}
