//! A full pool: copies that begin while requests wait for the memory of these copies.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::{Context, Waker};
use std::time::Duration;

use pinpool::{PinnedBuf, Request};

use crate::fixture::{MIB, Requests, both_presets, held_sink, over_sim, run};
use crate::valid_stats::valid_stats;

/// A request to `waiting` that needs the memory of `held` is served when a copy of `held` that starts later ends.
fn a_copy_serves(waiting: &impl Requests, held: PinnedBuf) {
    let (stream, mut device, gate) = held_sink(held.len());
    let mut get = pin!(waiting.get_async(MIB.into()));
    assert!(get.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    let copy = held.copy_to(&stream, &mut device).unwrap();
    drop(gate);
    run(get).unwrap();
    copy.wait().unwrap();
    valid_stats(waiting);
}

#[test]
fn a_copy_that_begins_while_a_request_waits_serves_it() {
    for has_thread in [false, true] {
        for builder in both_presets(1 << 20) {
            let pool = builder.maintenance_thread(has_thread).build().unwrap();
            a_copy_serves(&pool, pool.get(MIB).unwrap());
        }
    }
}

#[test]
fn a_copy_that_begins_while_requests_wait_in_partitions_serves_them() {
    let pool = over_sim(2 << 20).build().unwrap();
    let [one, other] = ["one", "other"].map(|name| pool.open_partition(name, 1 << 20).unwrap());
    // At the limit of the partition, while the pool has room.
    let held = one.get(MIB).unwrap();
    a_copy_serves(&one, held);
    let (rest, held) = (pool.get(MIB).unwrap(), pool.get(MIB).unwrap());
    a_copy_serves(&one, held);
    drop(rest);
    for is_of_pool in [true, false] {
        let (rest, held) = (pool.get(MIB).unwrap(), one.get(MIB).unwrap());
        if is_of_pool {
            a_copy_serves(&pool, held)
        } else {
            a_copy_serves(&other, held)
        }
        drop(rest);
    }
}

/// How often a request that fails after `wait` is polled.
fn polls(pool: &impl Requests, wait: Duration) -> u128 {
    let (mut get, mut polls) = (pin!(pool.get_async(Request::new(MIB).timeout(wait))), 0);
    let counted = poll_fn(|context| {
        polls += 1;
        get.as_mut().poll(context)
    });
    assert!(run(counted).unwrap_err().is_limit());
    polls
}

#[test]
fn a_waiting_request_checks_rarely_and_backs_off_during_a_long_copy() {
    let all = over_sim(1 << 30).build().unwrap();
    polls_rarely(&over_sim(1 << 20).build().unwrap());
    polls_rarely(&all.open_partition("part", 1 << 20).unwrap());
}

fn polls_rarely(pool: &impl Requests) {
    let held = pool.get(MIB).unwrap();
    let wait = Duration::from_millis(200);
    let idle = polls(pool, wait);
    assert!(idle <= wait.as_millis() / 5 + 3, "{idle} polls for nothing");
    let (stream, mut device, gate) = held_sink(MIB);
    let copy = held.copy_to(&stream, &mut device).unwrap();
    // At most 128 polls until the pauses exceed 40 us, then at most 128 for each e-fold of the wait.
    let queries = polls(pool, wait);
    assert!(queries <= 128 * 6, "{queries} queries of one copy");
    drop(gate);
    copy.wait().unwrap();
}
