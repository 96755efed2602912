//! What a pool recorded, as a workload.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use pinpool::backend::HeapSource;
use pinpool::copy::sink::{SinkMem, SinkStream};
use pinpool::{Backend, Pool};
use pinpool_observe::record::{Event, Recording};
use pinpool_replay::{Replay, Workload, open_recording};

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

/// Records `threads` threads that each get a MiB, keep it for a while and put it back, `rounds` times, under a ceiling of so many.
fn contended(path: &Path, threads: usize, rounds: u64, ceiling_mib: u64) {
    let heap = Backend::Source(Arc::new(HeapSource::new()));
    let builder = Pool::builder().without_env().backend(heap).trace(path.to_owned()).wait(Duration::from_secs(60));
    let pool = builder.max_bytes(ceiling_mib << 20).build().unwrap();
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                for _ in 0..rounds {
                    let buffer = pool.get(MIB).unwrap();
                    thread::sleep(Duration::from_millis(5));
                    drop(buffer);
                }
            });
        }
    });
}

#[test]
fn threads_that_waited_go_on_at_once_under_a_ceiling_that_is_high_enough() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.trace");
    contended(&path, 6, 40, 3);
    let workload = Workload::open(&path).unwrap();
    assert!(workload.is_closed() && workload.has_waited(), "six threads share three buffers");
    assert_eq!((workload.gets(), workload.judged()[0].judgement.cause.name()), (240, "ceiling too small"));
    let play = |mib: Option<u64>| {
        let replay = Replay { max_bytes: mib.map(|mib| mib << 20), wait: Duration::MAX, ..Replay::default() };
        replay.play_with_lines(&workload).unwrap()
    };
    let (as_recorded, enough, free) = (play(Some(3)), play(Some(6)), play(None));
    assert_eq!([&as_recorded, &enough, &free].map(|outcome| outcome.report.gets), [240; 3]);
    assert!(as_recorded.report.waits > 100, "{as_recorded:?}");
    assert_eq!((enough.report.waits, enough.waited_us, free.report.waits), (0, 0, 0));
    // Three at a time take twice as long as six.
    assert!(as_recorded.ended_us > enough.ended_us * 3 / 2, "{} and {}", as_recorded.ended_us, enough.ended_us);
    // Nothing of what they wait for now is in the time of the end twice.
    assert!(play(Some(1)).ended_us > as_recorded.ended_us * 2);
}

#[test]
fn a_consumer_that_is_slow_ends_no_earlier_with_more_memory() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.trace");
    let heap = Backend::Source(Arc::new(HeapSource::new()));
    let builder = Pool::builder().without_env().backend(heap).trace(path.clone()).wait(Duration::from_secs(60));
    let pool = builder.max_bytes(4 << 20).build().unwrap();
    let (send, receive) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(|| (0..100).for_each(|_| send.send(pool.get(MIB).unwrap()).unwrap()));
        scope.spawn(move || {
            receive.iter().take(100).for_each(|buffer| {
                thread::sleep(Duration::from_millis(10));
                drop(buffer);
            });
        });
    });
    drop(pool);
    let workload = Workload::open(&path).unwrap();
    let play = |mib: u64| Replay { max_bytes: Some(mib << 20), wait: Duration::MAX, ..Replay::default() };
    let (as_recorded, ample) =
        (play(4).play_with_lines(&workload).unwrap(), play(64).play_with_lines(&workload).unwrap());
    assert!(as_recorded.waited_us > ample.waited_us, "{} and {}", as_recorded.waited_us, ample.waited_us);
    assert!(ample.ended_us >= as_recorded.ended_us * 9 / 10, "{} and {}", as_recorded.ended_us, ample.ended_us);
}
