//! Traces: read, printed, read again and replayed.

use std::fmt::Write as _;
use std::io::{BufReader, Cursor, Write as _};

use flate2::Compression;
use flate2::write::GzEncoder;
use pinpool_replay::{Replay, SourceKind, TraceError, TraceHeader, TraceOp, TraceReader, Workload};

use super::written;

/// Replays of more gets than this, or of more time, say nothing that shorter ones do not.
const MOST_GETS: u64 = 2000;
const LONGEST_US: u64 = 2_000_000_000;

type Trace = (TraceHeader, Vec<TraceOp>);

fn read(mut reader: TraceReader) -> Result<Trace, TraceError> {
    let operations = reader.by_ref().collect::<Result<_, _>>()?;
    Ok((reader.header().clone(), operations))
}

fn reader(data: &[u8]) -> Result<TraceReader, TraceError> {
    TraceReader::new(Cursor::new(data.to_vec()))
}

/// The text form of a trace.
fn print((header, operations): &Trace) -> String {
    let mut text = format!("# limit {}\n# auto_resize {}\n", header.limit, u8::from(header.auto_resize));
    let rounder = if header.rounding == pinpool::unstable::Rounding::Exact { "noop" } else { "pow2" };
    let _ = writeln!(text, "# rounder {rounder}\n# pools {}", header.pools);
    for operation in operations {
        let _ = match operation {
            TraceOp::Get { id, bytes, align } => writeln!(text, "a {id} {bytes} {align}"),
            TraceOp::Put { id } => writeln!(text, "f {id}"),
            TraceOp::Steps { count, bytes, step } => writeln!(text, "s {count} {bytes} {step}"),
            TraceOp::Clear => writeln!(text, "c"),
            TraceOp::Pool { index } => writeln!(text, "p {index}"),
            TraceOp::Advance { micros } => writeln!(text, "t {micros}"),
        };
    }
    text
}

/// What is read is printed so that it is read back; an error names its line, which exists.
pub(crate) fn text(data: &[u8]) {
    match reader(data).and_then(read) {
        Ok(trace) => {
            let printed = print(&trace);
            assert_eq!(reader(printed.as_bytes()).and_then(read).expect("it was printed"), trace);
        }
        Err(error) => names_a_line_of(data, &error),
    }
    if let Err(error) = reader(data).and_then(|mut reader| Workload::read(&mut reader)) {
        names_a_line_of(data, &error);
    }
}

fn names_a_line_of(data: &[u8], error: &TraceError) {
    let TraceError::Line { line, why, .. } = error else { panic!("{error} names no line") };
    let lines = data.split(|byte| *byte == b'\n').count() as u64;
    assert!((1..=lines).contains(line) && !why.is_empty(), "{error}, of {lines} lines");
}

/// A file: the first byte says whether it is taken as it is, compressed, or compressed and then damaged at the place that the
/// next two bytes name.
pub(crate) fn file(data: &[u8]) {
    let Some((&[how, low, high], text)) = data.split_first_chunk() else { return };
    if how % 3 == 0 {
        let _ = TraceReader::open(&written("trace", text)).and_then(read);
        return;
    }
    let mut compressed = Vec::new();
    // Two members, as from two files joined.
    let (first, second) = text.split_at(text.len() / 2);
    for part in [first, second] {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(part).expect("memory");
        compressed.extend(encoder.finish().expect("memory"));
    }
    if how % 3 == 1 {
        let opened = TraceReader::open(&written("trace.gz", &compressed)).and_then(read);
        let plain = TraceReader::new(BufReader::new(Cursor::new(text.to_vec()))).and_then(read);
        match (opened, plain) {
            (Ok(opened), Ok(plain)) => assert_eq!(opened, plain),
            (opened, plain) => assert_eq!(opened.map_err(as_text), plain.map_err(as_text)),
        }
    } else {
        let at = usize::from(u16::from_le_bytes([low, high])) % compressed.len();
        if low % 2 == 0 {
            compressed[at] ^= high | 1;
        } else {
            compressed.truncate(at);
        }
        let _ = TraceReader::open(&written("trace.gz", &compressed)).and_then(read);
    }
}

fn as_text(error: TraceError) -> String {
    error.to_string()
}

/// A short workload under both presets and both kinds of memory, with and without a limit: replayed twice it has the same
/// outcome, and its printed bound each other.
pub(crate) fn replay(data: &[u8]) {
    let Ok(workload) = reader(data).and_then(|mut reader| Workload::read(&mut reader)) else { return };
    if workload.gets > MOST_GETS || workload.duration_us > LONGEST_US {
        return;
    }
    for (preset, source) in
        [("adaptive", SourceKind::Virtual), ("adaptive", SourceKind::Discrete), ("tensorflow", SourceKind::Virtual)]
    {
        for max_bytes in [None, Some(64 << 20)] {
            let replay = Replay::under(&[("PINPOOL_PRESET".to_owned(), preset.to_owned())]).unwrap();
            let replay = Replay { source, max_bytes, ..replay };
            let outcome = || replay.play(&workload).map(|report| format!("{report:?}")).map_err(as_text);
            assert_eq!(outcome(), outcome());
        }
    }
}
