//! The wait queue: requests are served in order of arrival, and some may pass.

use std::thread;
use std::time::Duration;

use pinpool::Rounding;
use pinpool::{PoolBuilder, Preset, Request, Stats};

use crate::fixture::{LONG, MIB, over_sim, until_waits};
use crate::valid_stats::valid_stats;

const KIB: usize = 1 << 10;
/// Longer than a waiting request sleeps before it searches again.
const WHILE_ASLEEP: Duration = Duration::from_millis(30);

fn tensorflow(max_bytes: u64) -> PoolBuilder {
    over_sim(max_bytes).preset(Preset::TensorFlow).rounding(Rounding::Exact)
}

#[test]
fn a_returned_buffer_goes_to_the_waiting_request() {
    for builder in [over_sim(2 << 20), tensorflow(2 << 20)] {
        let pool = builder.build().unwrap();
        let len = MIB + MIB / 2;
        let only = pool.get(len).unwrap();
        let id = only.unstable_id();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| pool.get(len).unwrap());
            until_waits(&pool, 1);
            drop(only);
            assert!(pool.try_get(len).unwrap().is_none(), "the buffer belongs to the waiting request");
            assert_eq!(waiting.join().unwrap().unstable_id(), id, "the same memory, without a call of the backend");
        });
        let Stats { memory, requests, .. } = valid_stats(&pool);
        assert_eq!((requests.served, requests.hits, requests.returned, memory.idle), (2, 1, 2, 1));
    }
}

#[test]
fn a_return_of_another_class_makes_room_only_for_the_waiting_request() {
    for builder in [over_sim(2 << 20), tensorflow(2 << 20)] {
        let pool = builder.build().unwrap();
        let all = pool.get(MIB + MIB / 4).unwrap();
        let rest = pool.get(512 * KIB).unwrap();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| pool.get(MIB + MIB / 2).unwrap());
            until_waits(&pool, 1);
            drop(rest);
            assert!(pool.try_get(512 * KIB).unwrap().is_none(), "its memory is room for the head of the queue");
            drop(all);
            assert!(pool.try_get(MIB + MIB / 4).unwrap().is_none(), "its memory is room for the head of the queue");
            waiting.join().unwrap();
        });
        let Stats { memory, requests, .. } = valid_stats(&pool);
        assert_eq!((requests.served, requests.hits, requests.returned), (3, 0, 3));
        assert_eq!(memory.evictions.reclaimed, 2);
    }
}

#[test]
fn a_buffer_that_was_idle_before_the_queue_formed_is_hit_once() {
    let pool = over_sim(8 << 20).build().unwrap();
    let (most, idle) = (pool.get(6 * MIB).unwrap(), pool.get(MIB).unwrap());
    drop(idle);
    thread::scope(|scope| {
        let waiting = scope.spawn(|| pool.get(8 * MIB).unwrap());
        until_waits(&pool, 1);
        thread::sleep(WHILE_ASLEEP);
        let hit = pool.try_get(MIB).unwrap();
        assert!(hit.is_some(), "idle, and too little for the waiting request");
        drop(hit);
        assert!(pool.try_get(MIB).unwrap().is_none(), "once");
        drop(most);
        waiting.join().unwrap();
    });
    valid_stats(&pool);
}

#[test]
fn a_small_request_may_pass_the_head_without_delaying_it() {
    let pool = over_sim(64 << 20).build().unwrap();
    let held = pool.get(10 * MIB).unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| pool.get(56 * MIB).unwrap());
        until_waits(&pool, 1);
        // Repeatedly, with far more bytes in total than the pool can hold.
        (0..1000).for_each(|_| drop(pool.get_with(Request::new(4 * KIB).timeout(Duration::ZERO)).unwrap()));
        let adjacent = pool.get_with(Request::new(4 * KIB).timeout(Duration::ZERO)).unwrap();
        let error = pool.get_with(Request::new(7 * MIB).timeout(Duration::ZERO)).unwrap_err();
        assert!(error.is_limit());
        let text = error.to_string();
        for part in ["1 earlier request is waiting", "56.0MiB", "cannot allocate 7.0MiB", "PINPOOL_WAIT"] {
            assert!(text.contains(part), "{part} is missing in: {text}");
        }
        drop(held);
        // The adjacent buffer is still held.
        waiting.join().unwrap();
        drop(adjacent);
    });
    valid_stats(&pool);
}

#[test]
fn requests_that_pass_the_head_leave_it_its_room() {
    for builder in [over_sim(64 << 20), tensorflow(64 << 20)] {
        let pool = builder.build().unwrap();
        let held = pool.get(20 * MIB).unwrap();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| pool.get_with(Request::new(48 * MIB - 32).timeout(LONG)).map(drop));
            until_waits(&pool, 1);
            let passing: Vec<_> =
                std::iter::from_fn(|| pool.get_with(Request::new(MIB - 32).timeout(Duration::ZERO)).ok())
                    .take(1000)
                    .collect();
            assert!(passing.len() < 17, "{} MiB next to 48 MiB", passing.len());
            drop(held);
            waiting.join().unwrap().unwrap();
            drop(passing);
        });
        valid_stats(&pool);
    }
}
