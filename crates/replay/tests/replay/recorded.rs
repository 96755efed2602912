//! What a pool recorded, as a workload.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use pinpool::backend::HeapSource;
use pinpool::copy::sink::{SinkMem, SinkStream};
use pinpool::{Backend, Pool};
use pinpool_observe::record::{Event, Recording};
use pinpool_replay::{Workload, open_recording};

const MIB: usize = 1 << 20;

fn recorded(path: &Path) -> Pool {
    let heap = Backend::Source(Arc::new(HeapSource::new()));
    Pool::builder().without_env().backend(heap).trace(path.to_owned()).build().unwrap()
}

fn count(recording: &Recording, is: impl Fn(&Event) -> bool) -> u64 {
    recording.records.iter().filter(|record| is(&record.event)).count() as u64
}

/// Records a pool with three buffers at once and a copy, 20 times.
fn a_recording() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.trace");
    let (pool, stream) = (recorded(&path), SinkStream::new().unwrap());
    for round in 0..20 {
        let mut device = SinkMem::new(MIB);
        let buffers: Vec<_> = (1..=3).map(|n| pool.get(n * 10_000 + round).unwrap()).collect();
        pool.get(MIB).unwrap().copy_to(&stream, &mut device).unwrap().wait().unwrap();
        drop(buffers);
    }
    pool.poll();
    drop(pool);
    (dir, path)
}

#[test]
fn a_recording_plays_as_the_gets_and_puts_that_it_is_of() {
    let (_dir, path) = a_recording();
    let workload = Workload::open(&path).unwrap();
    assert_eq!(workload.gets(), 80);
    // Three buffers and the one that is copied.
    assert!(workload.peak_requested_bytes() >= (MIB + 60_000) as u64);
    let pins = count(&Recording::open(&path).unwrap(), |event| matches!(event, Event::Pin { .. }));
    assert_eq!(workload.pins().len() as u64, pins);
    assert_eq!(workload.warning(), None);
}

#[test]
fn the_gets_that_are_left_of_a_recording_with_losses_play() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.trace.gz");
    let pool = recorded(&path);
    (0..100_000).for_each(|_| drop(pool.get(4096).unwrap()));
    drop(pool);
    let recording = Recording::open(&path).unwrap();
    assert!(recording.lost > 0, "all of them found room: the test needs more");
    let workload = Workload::of(&recording).unwrap();
    assert_eq!(workload.gets(), count(&recording, |event| matches!(event, Event::Get { .. })));
}

#[test]
fn a_newer_recording_is_refused_by_name_and_a_text_is_a_trace_too() {
    let (_dir, path) = a_recording();
    let mut bytes = fs::read(&path).unwrap();
    bytes[8..12].copy_from_slice(&9_u32.to_le_bytes());
    fs::write(&path, &bytes).unwrap();
    let error = open_recording(&path).unwrap_err().to_string();
    assert!(error.contains("version 9"), "{error}");
    fs::write(&path, "a 1 4096\n").unwrap();
    assert_eq!(open_recording(&path).unwrap().records.len(), 1);
}
