//! Gets that wait at the limit.

use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use pinpool::Request;

use super::{KIB, LONG, MIB, after_seconds, over_virtual_memory, valid_stats, wait_until, with_manual_clock};
use crate::captured_log::{count, lines, listen};

#[test]
fn a_wait_ends_when_a_buffer_is_put() {
    let pool = over_virtual_memory().max_bytes(4 << 20).build().unwrap();
    let all = pool.get(4 * MIB).unwrap();
    thread::scope(|scope| {
        // The longest wait that there is.
        let waiting = scope.spawn(|| pool.get_with(Request::new(2 * MIB).wait(Duration::MAX)));
        wait_until(|| pool.stats().requests.waits == 1);
        drop(all);
        assert_eq!(waiting.join().unwrap().unwrap().len(), 2 * MIB);
    });
    let stats = valid_stats(&pool);
    assert_eq!(
        (stats.requests.waits, stats.requests.pageable, stats.requests.failed, stats.memory.evictions.reclaimed),
        (1, 0, 0, 1)
    );
}

#[test]
fn waits_are_served_in_the_order_of_arrival() {
    let pool = over_virtual_memory().max_bytes(2 << 20).wait(LONG).build().unwrap();
    let first = pool.get(2 * MIB).unwrap();
    let (served, order) = channel();
    thread::scope(|scope| {
        for name in 0..4 {
            let (pool, served) = (&pool, served.clone());
            scope.spawn(move || {
                // Different classes, so that each needs all the memory.
                let buffer = pool.get(2 * MIB - name * 200 * KIB).unwrap();
                served.send(name).unwrap();
                drop(buffer);
            });
            wait_until(|| pool.stats().requests.waits == name as u64 + 1);
        }
        drop(first);
    });
    assert_eq!(order.try_iter().collect::<Vec<_>>(), [0, 1, 2, 3]);
    valid_stats(&pool);
}

#[test]
fn a_wait_of_zero_is_no_wait() {
    let pool = over_virtual_memory().max_bytes(2 << 20).wait(LONG).build().unwrap();
    let _all = pool.get(2 * MIB).unwrap();
    assert!(pool.get_with(Request::new(4096).wait(Duration::ZERO)).unwrap_err().is_limit());
    assert!(pool.get_with(Request::new(4096).wait(Duration::from_millis(1))).unwrap_err().is_limit());
    let stats = valid_stats(&pool);
    assert_eq!((stats.requests.waits, stats.requests.failed), (1, 2));
}

#[test]
fn a_shortage_is_logged_once_when_it_begins_and_once_when_it_is_over() {
    listen();
    let (pool, clock) = with_manual_clock(over_virtual_memory().max_bytes(2 << 20));
    let mut all = Some(pool.get(2 * MIB).unwrap());
    for _ in 0..100 {
        assert!(pool.get(4096).is_err());
        // A request that succeeds in between does not end the shortage.
        drop(all.take());
        all = Some(pool.get(2 * MIB).unwrap());
    }
    let logged = lines();
    assert_eq!((count(&logged, " refused: request=4.0KiB"), count(&logged, " recovered: ")), (1, 0), "{logged:?}");
    drop(all);
    after_seconds(&clock, &pool, 1);
    let logged = lines();
    assert_eq!(count(&logged, " requests=100 waited=0s pageable=0"), 1, "{logged:?}");
}
