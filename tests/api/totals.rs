//! What has been counted stays counted: no total falls while a pool is used.

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Waker};

use pinpool::stats::{EvictionReasons, RequestStats, Stats};

use crate::fixture::over_sim;

const MIB: usize = 1 << 20;

fn totals(stats: &Stats) -> [u64; 12] {
    let RequestStats { served, hits, misses, failed, waits, pageable, returned, .. } = stats.requests;
    let EvictionReasons { over_limit, reclaimed, expired, released, .. } = stats.memory.evictions;
    let checks = stats.limits.checks;
    [served, hits, misses, failed, waits, pageable, returned, over_limit, reclaimed, expired, released, checks]
}

#[test]
fn no_total_falls_when_a_get_goes_that_was_handed_a_buffer() {
    let pool = over_sim(2 << 20).build().unwrap();
    let held = pool.get(2 * MIB).unwrap();
    let mut before = totals(&pool.stats());
    let mut grown = |what: &str| {
        let now = totals(&pool.stats());
        assert!(before.iter().zip(&now).all(|(before, now)| before <= now), "{what}: {before:?}, then {now:?}");
        before = now;
    };
    {
        let mut waiting = pin!(pool.get_async(2 * MIB));
        assert!(waiting.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        grown("a request waits");
        drop(held);
        grown("it was handed the buffer");
    }
    grown("it is gone");
    let stats = pool.stats();
    assert_eq!(
        (stats.validate(), stats.requests.served, stats.requests.returned, stats.memory.idle),
        (Ok(()), 1, 1, 1)
    );
    // One that is there to take the buffer counts as a hit.
    let held = pool.get(2 * MIB).unwrap();
    let mut waiting = pin!(pool.get_async(2 * MIB));
    assert!(waiting.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    drop(held);
    let served = waiting.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    let stats = pool.stats();
    assert_eq!(
        (stats.validate(), stats.requests.served, stats.requests.hits, stats.requests.returned),
        (Ok(()), 3, 2, 2)
    );
    drop(served);
}
