//! Panics in user code: a listener, a log sink and a source. The pool stays intact, and its statistics stay correct.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use pinpool::unstable::RateCheckReport;
use pinpool::{Backend, Pool, PoolBuilder, Preset, Request};
use pinpool_replay::SimSource;
use pinpool_testing::{SinkMemory, SinkStream, SourceCall};

use crate::captured_log::{listen, panic_at, panics};
use crate::fixture::{LONG, MIB, faulty, over_sim, poll, until_waits};
use crate::manual_copies::{ManualStream, Nowhere};
use crate::until::until;
use crate::valid_stats::valid_stats;

fn builder(max_bytes: u64) -> PoolBuilder {
    over_sim(max_bytes).wait(Duration::ZERO)
}

/// Runs `act` and catches its panic, as user code may do.
fn go_on(act: impl FnOnce()) {
    let _ = catch_unwind(AssertUnwindSafe(act));
}

/// A pool that keeps one idle buffer. Its listener counts the checks, and panics at each.
fn checked(max_bytes: u64, preset: Preset) -> (Pool, Arc<AtomicU64>) {
    let checks = Arc::new(AtomicU64::new(0));
    let counted = checks.clone();
    let listener = move |_: &RateCheckReport| {
        counted.fetch_add(1, Ordering::SeqCst);
        panic!("the listener panics")
    };
    let builder = builder(max_bytes).preset(preset).pool_size_limit(1).auto_resize(false);
    (builder.unstable_on_check(listener).build().unwrap(), checks)
}

#[test]
fn a_listener_panic_in_a_cancelled_request_does_not_block_the_queue() {
    let (pool, checks) = checked(8 << 20, Preset::TensorFlow);
    // After 999 evictions the next one makes a check due.
    (0..999).for_each(|_| drop([pool.get(MIB).unwrap(), pool.get(MIB).unwrap()]));
    assert_eq!(valid_stats(&pool).memory.evictions.over_limit, 999);
    pool.trim(0);
    let [handed, large, other] = [2, 4, 1].map(|mib| pool.get(mib * MIB - 64).unwrap());
    let mut leaving = pool.get_async(Request::new(handed.len()).timeout(LONG));
    assert!(poll(&mut leaving).is_pending());
    drop(handed);
    // No request waits: this buffer becomes idle, and the return of the first makes it the 1000th evicted buffer.
    drop(other);
    assert_eq!((valid_stats(&pool).memory.evictions.over_limit, checks.load(Ordering::SeqCst)), (999, 0));
    drop(leaving);
    assert_eq!((valid_stats(&pool).memory.evictions.over_limit, checks.load(Ordering::SeqCst)), (1000, 1));
    drop(large);
    drop(pool.get_with(Request::new(3 * MIB).timeout(Duration::ZERO)).expect("no request waits any more"));
    assert_eq!(valid_stats(&pool).memory.in_use, 0);
}

#[test]
fn a_log_sink_that_panics_in_a_waiting_request_does_not_block_the_queue() {
    listen();
    // Only the waiting request checks the copy.
    let pool = builder(4 << 20).build().unwrap();
    let stream = SinkStream::new().unwrap();
    let (held, other) = (pool.get(2 * MIB).unwrap(), pool.get(2 * MIB).unwrap());
    let gate = stream.hold();
    let copy = held.copy_to(&stream, &mut SinkMemory::new(2 * MIB)).unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            listen();
            panic_at(" quarantined: ");
            go_on(|| drop(pool.get_with(Request::new(MIB).timeout(LONG))));
            panics()
        });
        until_waits(&pool, 1);
        stream.fail();
        until("the copy has failed", || pool.stats().memory.quarantined > 0);
        drop((gate, copy, other));
        assert_eq!(waiting.join().unwrap(), 1, "the waiting request logged the message");
    });
    drop(pool.get_with(Request::new(512 << 10).timeout(Duration::ZERO)).expect("no request waits any more"));
    assert_eq!(valid_stats(&pool).memory.quarantined, 1);
}

#[test]
fn a_panic_of_a_listener_loses_none_of_the_buffers_that_a_sweep_found() {
    let (pool, _) = checked(64 << 20, Preset::TensorFlow);
    for _ in 0..998 {
        go_on(|| drop([pool.get(MIB).unwrap(), pool.get(MIB).unwrap()]));
        pool.trim(0);
    }
    let stream = ManualStream::default();
    let held: Vec<_> = (0..8).map(|_| pool.get(MIB).unwrap()).collect();
    held.into_iter().for_each(|buf| drop(buf.copy_to(&stream, &mut Nowhere).unwrap()));
    stream.0.is_over.store(true, Ordering::SeqCst);
    go_on(|| pool.maintain());
    let stats = valid_stats(&pool);
    assert_eq!((stats.memory.in_use, stats.memory.quarantined, stats.memory.idle), (0, 0, 1));
    assert_eq!(stats.copies.in_flight, 0);
    pool.clear();
    assert_eq!(valid_stats(&pool).memory.held_bytes, 0);
}

#[test]
fn a_panic_of_a_listener_does_not_reach_the_drop_of_a_buffer() {
    let (pool, checks) = checked(64 << 20, Preset::Adaptive);
    for round in 0..1000 {
        // Requests miss here, because the return of a hit checks no limit. A panicking drop would make the `Vec` leak a buffer.
        let pages = 2 * (round % 7);
        drop(vec![pool.get(4096 * (pages + 1)).unwrap(), pool.get(4096 * (pages + 2)).unwrap()]);
    }
    assert!(checks.load(Ordering::SeqCst) > 0);
    assert_eq!(valid_stats(&pool).memory.in_use, 0);
}

#[test]
fn a_panic_while_a_reserve_reports_its_progress_gives_its_bytes_back() {
    listen();
    let pool = builder(64 << 20).backend(Backend::Heap).build().unwrap();
    panic_at("reserve_");
    go_on(|| drop(pool.reserve(48 << 20)));
    assert!(panics() > 0);
    panic_at("");
    pool.trim(0);
    let stats = valid_stats(&pool);
    assert_eq!(stats.memory.held_bytes, stats.memory.reserve_bytes, "all that is held is the reserve");
    pool.get(48 * MIB).expect("either from the reserve, or next to it");
}

#[test]
fn a_source_that_panics_has_failed_and_the_limit_stays_true() {
    for preset in [Preset::Adaptive, Preset::TensorFlow] {
        let source = faulty(SimSource::separate_regions(1 << 40));
        source.act(SourceCall::Acquire, 0, || panic!("the source panics"));
        let pool = builder(4 << 20).preset(preset).backend(Backend::Source(source.clone())).build().unwrap();
        go_on(|| assert!(pool.get(3 * MIB).unwrap_err().is_backend()));
        let buf = pool.get(3 * MIB).expect("the bytes of the failed request are available again");
        source.act(SourceCall::Release, source.calls(SourceCall::Release), || panic!("the source panics"));
        drop(buf);
        go_on(|| pool.clear());
        let stats = valid_stats(&pool);
        assert_eq!(stats.memory.in_use, 0);
        assert!(stats.memory.held_bytes >= 3 << 20, "{preset:?}: not released, so still held: {stats:?}");
        if preset == Preset::Adaptive {
            // The next release succeeds.
            pool.clear();
            assert_eq!(valid_stats(&pool).memory.held_bytes, 0);
        }
    }
}
