//! Recordings as workloads.

use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use pinpool::source::HeapSource;
use pinpool::{Backend, Pool};
use pinpool_observe::record::{Event, PoolDescription, Record, Recording};
use pinpool_replay::{Replay, Workload};

use crate::recorded_use::{count, use_pool};
use crate::recordings::read_recording;

const MIB: usize = 1 << 20;

fn recorded(path: &Path) -> Pool {
    let heap = Backend::Source(Arc::new(HeapSource::new()));
    Pool::builder().without_env().backend(heap).maintenance_thread(false).trace(path.to_owned()).build().unwrap()
}

/// Records a pool with three buffers at once and a copy, 20 times.
fn a_recording() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.trace");
    use_pool(&recorded(&path));
    (dir, path)
}

#[test]
fn a_recording_replays_its_requests_and_returns() {
    let (_dir, path) = a_recording();
    let workload = Workload::from_recording(&read_recording(&path).unwrap()).unwrap();
    assert_eq!(workload.requests, 80);
    // Three buffers and the copied buffer.
    assert!(workload.peak_requested_bytes() >= (MIB + 60_000) as u64);
    let pins = count(&read_recording(&path).unwrap(), |event| matches!(event, Event::Pin { .. }));
    assert_eq!(workload.pins.len() as u64, pins);
    assert_eq!(workload.warning, None);
}

#[test]
fn a_recording_with_lost_records_replays_the_rest() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.trace.gz");
    let pool = recorded(&path);
    (0..1_000_000).for_each(|_| drop(pool.get(4096).unwrap()));
    drop(pool);
    let recording = read_recording(&path).unwrap();
    assert!(recording.lost > 0, "no record was lost: the test must record more");
    let workload = Workload::from_recording(&recording).unwrap();
    assert_eq!(workload.requests, count(&recording, |event| matches!(event, Event::Get { .. })));
}

#[test]
fn waiting_threads_continue_immediately_under_a_sufficient_limit() {
    // Six threads share three buffers. Each holds a buffer for 5 ms, and then waits for 5 ms.
    let round = |n: u64| {
        let (at_ms, took_ms) = (n * 5, if n < 2 { n * 5 } else { 5 });
        let of = move |at: u64| (u32::try_from((3 * n + at) % 6).unwrap(), 3 * n + at + 1);
        let gets = (0..3).map(move |at| (at_ms, of(at).0, get_of(of(at).1, took_ms)));
        gets.chain((0..3).map(move |at| (at_ms + 5, of(at).0, put_of(of(at).1))))
    };
    let workload = written(12, &(0..80).flat_map(round).collect::<Vec<_>>());
    assert!(workload.is_closed && workload.has_waited, "six threads share three buffers");
    assert_eq!(workload.requests, 240);
    let play = |mib: Option<u64>| under(mib).play(&workload).unwrap();
    let (as_recorded, enough, free) = (play(Some(12)), play(Some(24)), play(None));
    assert_eq!([&as_recorded, &enough, &free].map(|outcome| outcome.gets), [240; 3]);
    assert_eq!((enough.waits, enough.waited_us, free.waits), (0, 0, 0));
    // Three at a time take twice as long as six, and one at a time six times as long.
    assert_eq!([&as_recorded, &enough, &play(Some(4))].map(|outcome| outcome.ended_us / 1000), [400, 200, 1200]);
}

#[test]
fn a_slow_consumer_ends_no_earlier_with_more_memory() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.trace");
    let source = Backend::Source(Arc::new(HeapSource::new()));
    let builder = Pool::builder().without_env().backend(source).maintenance_thread(false).trace(path.clone());
    let pool = builder.wait(Duration::from_secs(60)).max_bytes(4 << 20).build().unwrap();
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
    let workload = Workload::from_recording(&read_recording(&path).unwrap()).unwrap();
    let play = |mib: u64| Replay { max_bytes: Some(mib << 20), wait: Some(Duration::MAX), ..Replay::default() };
    let (as_recorded, ample) = (play(4).play(&workload).unwrap(), play(64).play(&workload).unwrap());
    assert!(as_recorded.waited_us > ample.waited_us, "{} and {}", as_recorded.waited_us, ample.waited_us);
    assert!(ample.ended_us >= as_recorded.ended_us * 9 / 10, "{} and {}", as_recorded.ended_us, ample.ended_us);
}

/// A recording of one pool under this limit, of events with their time in milliseconds and their thread.
fn written(limit_mib: u64, events: &[(u64, u32, Event)]) -> Workload {
    let limit = (0, 0, Event::MaxBytes { bytes: limit_mib << 20 });
    let record =
        |&(at_ms, thread, event): &(u64, u32, Event)| Record { time_ns: at_ms * 1_000_000, thread, pool: 0, event };
    let mut events: Vec<_> = std::iter::once(&limit).chain(events).copied().collect();
    events.sort_by_key(|(at_ms, ..)| *at_ms);
    let marked = |event @ (at_ms, thread, of): (u64, u32, Event)| {
        let has_waited = matches!(of, Event::Get { took_ns: 1.., .. });
        has_waited.then_some((at_ms, thread, Event::Waited)).into_iter().chain([event])
    };
    let records: Vec<_> = events.into_iter().flat_map(marked).map(|event| record(&event)).collect();
    let pools = vec![PoolDescription { number: 0, facts: Vec::new() }];
    Workload::from_recording(&Recording { records, pools, ..Recording::default() }).unwrap()
}

fn get_of(id: u64, took_ms: u64) -> Event {
    Event::Get { id, bytes: 4 << 20, class_bytes: 4 << 20, tag: 0, took_ns: took_ms * 1_000_000 }
}

fn put_of(id: u64) -> Event {
    Event::Put { id, in_flight: false }
}

fn under(limit_mib: Option<u64>) -> Replay {
    Replay { max_bytes: limit_mib.map(|mib| mib << 20), wait: Some(Duration::MAX), ..Replay::default() }
}

#[test]
fn time_in_pin_calls_does_not_delay_the_threads_that_return_its_buffers() {
    // The requesting thread spends half its time in pin calls; another thread returns each buffer a while later.
    let round = |n: u64| {
        let pin = Event::Pin { address: n << 30, bytes: 4 << 20, took_ns: 10_000_000, failed: false };
        [(n * 20, 0, pin), (n * 20, 0, get_of(n, 10)), (n * 20 + 30, 1, put_of(n))]
    };
    let workload = written(1000, &(1..200).flat_map(round).collect::<Vec<_>>());
    assert!(workload.is_closed && !workload.has_waited);
    let (open, closed) = (under(None).play(&workload).unwrap(), under(Some(1000)).play(&workload).unwrap());
    assert_eq!(closed.pin_calls, open.pin_calls);
    assert_eq!((closed.peak_pinned_bytes, closed.waits), (open.peak_pinned_bytes, 0));
}

#[test]
fn a_thread_that_returns_the_buffer_of_another_waits_only_as_long() {
    // Thread 0 holds all memory for 60 of 100 ms. Thread 1 waits for it, and thread 2 returns the buffer of thread 1
    // immediately.
    let round = |n: u64| {
        let (at_ms, held, passed) = (n * 100, 2 * n, 2 * n + 1);
        [
            (at_ms, 0, get_of(held, 0)),
            (at_ms + 60, 0, put_of(held)),
            (at_ms + 61, 1, get_of(passed, 59)),
            (at_ms + 62, 2, put_of(passed)),
        ]
    };
    let workload = written(4, &(1..100).flat_map(round).collect::<Vec<_>>());
    assert!(workload.has_waited);
    let free = under(None).play(&workload).unwrap();
    // Thread 1 runs ahead of the returning thread.
    assert!(free.waits == 0 && free.peak_pinned_bytes <= 16 << 20, "{free:?}");
}

#[test]
fn threads_without_driver_calls_continue_sooner_and_use_more_at_once() {
    // Each request pins for 50 ms; another thread returns the buffer 60 ms after the request.
    let round = |n: u64| {
        let pin = Event::Pin { address: n << 30, bytes: 4 << 20, took_ns: 50_000_000, failed: false };
        [(n * 60 + 50, 0, pin), (n * 60 + 51, 0, get_of(n, 51)), (n * 60 + 60, 1, put_of(n))]
    };
    let workload = written(1000, &(1..50).flat_map(round).collect::<Vec<_>>());
    let ended = |workload: &Workload| under(Some(1000)).play(workload).unwrap().ended_us;
    let (as_recorded, hurried) = (ended(&workload), ended(&workload.without_delays()));
    assert!(as_recorded > 2_800_000 && hurried < 600_000, "{as_recorded} {hurried}");
}

/// One buffer for three threads: the third requests it later than the second, but is served first. Another thread returns it.
fn served_out_of_order() -> Workload {
    const CONSUMER: u32 = 1000;
    let round = |n: u64| {
        let (at_ms, name, thread) = (n * 30, 3 * n, u32::try_from(3 * n).unwrap());
        [
            (at_ms, thread, get_of(name, if n == 0 { 0 } else { 29 })),
            (at_ms + 10, CONSUMER, put_of(name)),
            (at_ms + 10, thread + 2, get_of(name + 2, 8)),
            (at_ms + 20, CONSUMER, put_of(name + 2)),
            (at_ms + 20, thread + 1, get_of(name + 1, 19)),
            (at_ms + 30, CONSUMER, put_of(name + 1)),
        ]
    };
    written(4, &(0..40).flat_map(round).collect::<Vec<_>>())
}

#[test]
fn a_consumer_takes_a_ready_buffer_and_no_request_times_out() {
    let workload = served_out_of_order();
    let outcome = Replay { wait: Some(Duration::from_secs(30)), ..under(Some(4)) }.play(&workload).unwrap();
    assert_eq!((outcome.timeouts, workload.doubt(&outcome)), (0, None), "{outcome:?}");
    assert!((1_140_000..1_260_000).contains(&outcome.ended_us), "{}", outcome.ended_us);
}

#[test]
fn a_thread_that_waits_for_a_buffer_returns_its_own_if_all_threads_wait() {
    // Two buffers fit. Thread 0 holds one until it has returned the buffer of thread 1, which requested it later than thread 2 but
    // was served first.
    let alone = (0..30).flat_map(|n| [(n, 0, get_of(n, 0)), (n, 0, put_of(n))]);
    let gets = [(40, 0, get_of(40, 0)), (42, 1, get_of(41, 0)), (45, 2, get_of(42, 4))];
    let puts = [(45, 0, put_of(41)), (46, 0, put_of(40)), (47, 0, put_of(42))];
    let workload = written(8, &alone.chain(gets).chain(puts).collect::<Vec<_>>());
    let outcome = Replay { wait: Some(Duration::from_secs(30)), ..under(Some(8)) }.play(&workload).unwrap();
    assert_eq!((outcome.timeouts, workload.doubt(&outcome)), (0, None), "{outcome:?}");
}

#[test]
fn a_paused_thread_returns_no_other_buffer_meanwhile() {
    // Two buffers fit. Every 4 ms thread 0 hands one to thread 1, which keeps it for 2 ms, but each 20th for 200 ms. Meanwhile
    // thread 0 waits for 196 ms with the next buffer filled.
    let round = |n: u64| {
        let (at_ms, paused) = (n * 276, 20 * n);
        let first = [(at_ms, 0, get_of(paused, 0)), (at_ms + 4, 0, get_of(paused + 1, 0))];
        let returned = [(at_ms + 204, 1, put_of(paused)), (at_ms + 206, 1, put_of(paused + 1))];
        let rest = (0..18).flat_map(move |k| {
            let (got_ms, took_ms) = (at_ms + 204 + 4 * k, if k == 0 { 196 } else { 0 });
            [(got_ms, 0, get_of(paused + 2 + k, took_ms)), (got_ms + 6, 1, put_of(paused + 2 + k))]
        });
        first.into_iter().chain(returned).chain(rest)
    };
    let workload = written(8, &(0..10).flat_map(round).collect::<Vec<_>>());
    let replayed = under(Some(8)).play(&workload).unwrap();
    assert_eq!((replayed.waited_us, workload.doubt(&replayed)), (1_960_000, None), "{replayed:?}");
}

#[test]
fn idle_and_queued_time_is_not_kept_in_a_replay() {
    // Of four threads one waits for the only buffer while the others queue. A device reads the buffer for 8 of 10 ms.
    let round = |n: u64| {
        let thread = u32::try_from(n % 4).unwrap();
        [
            (n * 10, thread, Event::Completed { id: n.max(1) - 1 }),
            (n * 10, thread, get_of(n, if n == 0 { 0 } else { 10 })),
            (n * 10 + 2, 4, Event::Put { id: n, in_flight: true }),
        ]
    };
    let workload = written(4, &(0..200).flat_map(round).collect::<Vec<_>>());
    let ended_ms = |workload: &Workload, mib| under(Some(mib)).play(workload).unwrap().ended_us / 1000;
    assert_eq!(workload.doubt(&under(Some(4)).play(&workload).unwrap()), None);
    let hurried = workload.without_delays();
    assert!((1_900..2_100).contains(&ended_ms(&hurried, 4)), "{}", ended_ms(&hurried, 4));
    // Only the device's reads still delay the threads.
    assert!(ended_ms(&hurried, 64) < 200, "{}", ended_ms(&hurried, 64));
}

#[test]
fn a_replay_with_another_end_or_with_timeouts_is_not_faithful() {
    let workload = served_out_of_order();
    let doubt = |replay: Replay| workload.doubt(&replay.play(&workload).unwrap()).unwrap_or_default();
    let ends_early = doubt(under(None));
    assert!(ends_early.contains("the replay ends after 51.0ms instead of 1.2s"), "{ends_early}");
    let times_out = doubt(Replay { wait: Some(Duration::from_millis(19)), ..under(Some(4)) });
    assert!(times_out.contains("of the replay time out"), "{times_out}");
    assert!(times_out.starts_with("this recording cannot be replayed faithfully: "), "{times_out}");
}

#[test]
fn use_grows_only_if_each_eighth_has_more() {
    let run = |is_kept: fn(u64) -> bool| {
        let events = (1..100).flat_map(|n| {
            let put_ms = if is_kept(n) { 2_000 } else { n * 10 + 5 };
            [(n * 10, 0, get_of(n, 0)), (put_ms, 0, put_of(n))]
        });
        written(1000, &events.collect::<Vec<_>>())
    };
    assert!(!run(|_| false).grows() && !run(|n| n < 20).grows());
    assert!(written(1000, &(1..100).flat_map(|n| [(n * 10, 0, get_of(n, 0))]).collect::<Vec<_>>()).grows());
    // Four sizes, one after the other, with equal numbers of buffers.
    let by_steps = (1..400).flat_map(|n| {
        let bytes = (1 + n / 100) << 20;
        let get = Event::Get { id: n, bytes, class_bytes: bytes, tag: 0, took_ns: 0 };
        [(n * 10, 0, get), (n * 10 + 25, 0, put_of(n))]
    });
    assert!(!written(1000, &by_steps.collect::<Vec<_>>()).grows());
}

#[test]
fn idle_memory_is_released_at_the_pace_of_the_maintenance_thread() {
    // Eight buffers for a moment every 1.3 s: the thread checks once a second, and never finds the same idle memory twice.
    let bursts = (0..6).flat_map(|burst| {
        let gets = (0..8).map(move |n| (burst * 1300, 0, get_of(burst * 8 + n + 1, 0)));
        gets.chain((0..8).map(move |n| (burst * 1300 + 20, 0, put_of(burst * 8 + n + 1))))
    });
    let workload = written(1000, &bursts.collect::<Vec<_>>());
    let pins = |timeout: &str| {
        let replay = Replay::under(&[("PINPOOL_IDLE_TIMEOUT".to_owned(), timeout.to_owned())]).unwrap();
        replay.play(&workload).unwrap().pin_calls
    };
    assert_eq!(pins("200ms"), pins("none"));
}
