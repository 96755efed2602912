//! Requests and returns of recording pools, next to a pool that does not record and on several threads: each is in the file
//! once.

use std::collections::HashMap;
use std::path::Path;
use std::thread;
use std::time::Duration;

use pinpool::Pool;
use pinpool_observe::record::{Event, Recording};

use crate::fixture::{faulty_heap, over, recorded};

/// Requests and returns of each pool in the file; for one buffer they alternate.
fn gets_and_puts(path: &Path) -> Vec<(u64, u64)> {
    let recording = Recording::open(path).unwrap();
    assert_eq!((recording.warning.as_deref(), recording.lost), (None, 0));
    let mut counts = vec![(0, 0); recording.pools.len()];
    let mut held = HashMap::new();
    for record in &recording.records {
        let (gets, puts) = &mut counts[record.pool as usize];
        match record.event {
            Event::Get { id, bytes, class_bytes, took_ns, .. } => {
                *gets += 1;
                assert!(bytes > 0 && bytes <= class_bytes);
                let was_held = held.insert((record.pool, id), true);
                // What takes no time is a hit, of memory that is known.
                assert!(was_held == Some(false) || (was_held.is_none() && took_ns > 0), "{record:?} {was_held:?}");
            }
            Event::Put { id, in_flight } => {
                *puts += 1;
                assert_eq!((held.insert((record.pool, id), false), in_flight), (Some(true), false), "{record:?}");
            }
            Event::Gone { id } => drop(held.remove(&(record.pool, id))),
            _ => {}
        }
    }
    counts
}

/// This many pairs fill no queue.
const PAIRS: u64 = if cfg!(miri) { 30 } else { 500 };

#[test]
fn pools_that_record_and_one_that_does_not_serve_a_thread_in_turn() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.trace");
    let pools: Vec<_> = (0..3).map(|_| recorded(&path).build().unwrap()).collect();
    let other = over(faulty_heap(), pinpool::Limit::Unlimited).build().unwrap();
    for round in 0..PAIRS {
        // Those that record take no place of the one that does not.
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
fn a_put_that_serves_a_get_in_line_is_recorded_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.trace");
    let pool: Pool = recorded(&path).max_bytes(1 << 20).wait(Duration::from_secs(60)).build().unwrap();
    drop(pool.get(1 << 20).unwrap());
    for _ in 0..5 {
        let held = pool.get(1 << 20).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| drop(pool.get(1 << 20).unwrap()));
            while pool.stats().requests.waiting == 0 {
                thread::yield_now();
            }
            drop(held);
        });
    }
    drop(pool);
    assert_eq!(gets_and_puts(&path), [(11, 11)]);
}
