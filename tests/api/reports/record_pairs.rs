//! Requests and returns of recording pools, next to a pool that does not record and on several threads: each is in the file
//! once.

use std::path::Path;
use std::thread;
use std::time::Duration;

use pinpool::Pool;
use pinpool_observe::record::Event;

use super::record::alternates;
use crate::fixture::{faulty_heap, over, recorded};
use crate::recordings::read_recording;
use crate::scratch::scratch;
use crate::until::until;

/// Requests and returns of each pool in the file; for one buffer they alternate.
fn gets_and_puts(path: &Path) -> Vec<(u64, u64)> {
    let recording = read_recording(path).unwrap();
    assert_eq!((recording.warning.as_deref(), recording.lost), (None, 0));
    assert!(!recording.records.iter().any(|record| matches!(record.event, Event::Put { in_flight: true, .. })));
    alternates(&recording)
}

/// This many pairs fill no queue.
const PAIRS: u64 = if cfg!(miri) { 30 } else { 500 };

#[test]
fn pools_that_record_and_one_that_does_not_serve_a_thread_in_turn() {
    let (_dir, path) = scratch("t.trace");
    let pools: Vec<_> = (0..3).map(|_| recorded(&path).build().unwrap()).collect();
    let other = over(faulty_heap(), pinpool::Limit::Unlimited).build().unwrap();
    for round in 0..PAIRS {
        // Recording pools are never cached by the thread, so they do not displace the other pool.
        let used = if round % 10 == 0 { &pools[..] } else { &pools[..1] };
        let held: Vec<_> = used.iter().map(|pool| (pool.get(4096).unwrap(), other.get(100).unwrap())).collect();
        drop(pools[0].get(4096).unwrap());
        drop(held);
    }
    assert_eq!(other.stats().requests.hits, PAIRS + PAIRS / 10 * 2 - 3);
    drop(pools);
    assert_eq!(gets_and_puts(&path), [(2 * PAIRS, 2 * PAIRS), (PAIRS / 10, PAIRS / 10), (PAIRS / 10, PAIRS / 10)]);
}

#[test]
fn a_return_that_serves_a_request_in_the_queue_is_recorded_once() {
    let (_dir, path) = scratch("t.trace");
    let pool: Pool = recorded(&path).max_bytes(1 << 20).wait(Duration::from_secs(60)).build().unwrap();
    drop(pool.get(1 << 20).unwrap());
    for _ in 0..5 {
        let held = pool.get(1 << 20).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| drop(pool.get(1 << 20).unwrap()));
            until("it waits", || pool.stats().requests.waiting > 0);
            drop(held);
        });
    }
    drop(pool);
    assert_eq!(gets_and_puts(&path), [(11, 11)]);
}
