//! Traces: read and replayed.

use std::io::{BufReader, Write as _};

use flate2::Compression;
use flate2::write::GzEncoder;
use pinpool_replay::{Event, Replay, SourceKind, Trace, TraceError, Workload};

use super::written;

/// Replays of more requests or more time would test nothing else.
const GETS_MAX: u64 = 2000;
const DURATION_US_MAX: u64 = 2_000_000_000;

/// A workload has the requests of its trace; an error names its line, which exists.
pub(crate) fn text(data: &[u8]) {
    match Trace::read(data) {
        Ok(trace) => {
            let gets =
                trace.records.iter().filter(|record| matches!(record.event, Event::Get { bytes: 1.., .. })).count();
            assert_eq!(Workload::of_trace(trace).expect("it was read").requests, gets as u64);
        }
        Err(error) => names_a_line_of(data, &error),
    }
}

fn names_a_line_of(data: &[u8], error: &TraceError) {
    let TraceError::Line { line, why, .. } = error else { panic!("{error} names no line") };
    let lines = data.split(|byte| *byte == b'\n').count() as u64;
    assert!((1..=lines).contains(line) && !why.is_empty(), "{error}, of {lines} lines");
}

/// A file. The first byte selects whether the text is plain, compressed, or compressed and damaged. The next two bytes are the
/// offset of the damage.
pub(crate) fn file(data: &[u8]) {
    let Some((&[how, low, high], text)) = data.split_first_chunk() else { return };
    if how % 3 == 0 {
        let _ = Trace::open(&written("trace", text));
        return;
    }
    let mut compressed = Vec::new();
    // Two members, as in two concatenated files.
    let (first, second) = text.split_at(text.len() / 2);
    for part in [first, second] {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(part).expect("memory");
        compressed.extend(encoder.finish().expect("memory"));
    }
    if how % 3 == 1 {
        let opened = Trace::open(&written("trace.gz", &compressed));
        let plain = Trace::read(BufReader::new(text));
        match (opened, plain) {
            (Ok(opened), Ok(plain)) => assert_eq!(opened, plain),
            (Err(TraceError::Pickle), _) => assert_eq!(text.first(), Some(&0x80)),
            (opened, plain) => assert_eq!(opened.map_err(as_text), plain.map_err(as_text)),
        }
    } else {
        let at = usize::from(u16::from_le_bytes([low, high])) % compressed.len();
        if low % 2 == 0 {
            compressed[at] ^= high | 1;
        } else {
            compressed.truncate(at);
        }
        let _ = Trace::open(&written("trace.gz", &compressed));
    }
}

fn as_text(error: TraceError) -> String {
    error.to_string()
}

/// A short workload has the same outcome in two replays, under both presets and, for `adaptive`, on both kinds of memory, with
/// and without a limit.
pub(crate) fn replay(data: &[u8]) {
    let Ok(workload) = Trace::read(data).and_then(Workload::of_trace) else { return };
    if workload.requests > GETS_MAX || workload.duration_us > DURATION_US_MAX {
        return;
    }
    for (preset, source) in
        [("adaptive", SourceKind::Virtual), ("adaptive", SourceKind::Separate), ("tensorflow", SourceKind::Virtual)]
    {
        for max_bytes in [None, Some(64 << 20)] {
            let replay = Replay::under(&[("PINPOOL_PRESET".to_owned(), preset.to_owned())]).unwrap();
            let replay = Replay { source, max_bytes, ..replay };
            let outcome = || replay.play(&workload).map(|report| format!("{report:?}")).map_err(as_text);
            assert_eq!(outcome(), outcome());
        }
    }
}
