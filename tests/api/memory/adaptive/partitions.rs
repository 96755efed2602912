//! Partitions: each has its own limit and wait queue over the memory of one pool.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use super::{MIB, over_virtual_memory, valid_stats};
use crate::captured_log::{lines_with_levels, listen};
use crate::fixture::{LONG, heap, until_waits};
use pinpool::{Limit, Preset, Request, Stats};

#[test]
fn a_partition_has_its_own_limit_and_its_buffers_are_of_the_pool() {
    let pool = over_virtual_memory().max_bytes(16 << 20).name("train").build().unwrap();
    let eval = pool.open_partition("eval", 4 << 20).unwrap();
    let held: Vec<_> = (0..2).map(|_| eval.get(2 * MIB).unwrap()).collect();
    let error = eval.get_with(Request::new(2 * MIB).timeout(Duration::from_millis(2))).unwrap_err();
    assert!(error.is_timeout() && error.is_limit(), "{error}");
    assert!(error.to_string().contains("the partition is full; held 4.0MiB"), "{error}");
    assert!(eval.as_pool().tagged("part").get(5 * MIB).unwrap_err().to_string().contains("partition"));
    assert!(eval.try_get(2 * MIB).unwrap().is_none());
    let Stats { memory, requests, limits, is_partition, .. } = valid_stats(&eval);
    assert_eq!((memory.in_use_bytes, memory.held_bytes, limits.max_bytes), (4 << 20, 4 << 20, Some(4 << 20)));
    assert_eq!((requests.served, requests.misses, requests.failed, is_partition), (2, 2, 2, true));
    let Stats { memory, requests, .. } = valid_stats(&pool);
    assert_eq!((requests.served, memory.in_use), (2, 2));
    assert_eq!((memory.in_use_bytes, memory.held_bytes), (4 << 20, 4 << 20));
    assert!(pool.dump().to_string().contains("4.0MiB eval (2 buffers"), "{}", pool.dump());
    drop(held);
    assert_eq!((eval.stats().memory.in_use_bytes, valid_stats(&pool).memory.idle_bytes), (0, 4 << 20));
    drop(pool.get(2 * MIB).expect("what was of the partition is idle in the pool"));
    assert_eq!((pool.stats().requests.hits, pool.partition_stats().len()), (1, 1));
    drop(eval.try_get(2 * MIB).unwrap().unwrap());
    let Stats { memory, requests, .. } = eval.stats();
    assert_eq!((requests.hits, memory.in_use_bytes, memory.peak_held_bytes), (1, 0, 4 << 20));
    assert_eq!((eval.name(), eval.stats().name.as_deref()), ("train/eval", Some("train/eval")));
    drop(eval);
    assert!(pool.partition_stats().is_empty());
}

#[test]
fn a_full_partition_delays_nobody_else_and_its_requests_are_served_in_order() {
    for preset in [Preset::Adaptive, Preset::TensorFlow] {
        let pool = heap().wait(LONG).preset(preset).max_bytes(64 << 20).build().unwrap();
        let eval = pool.open_partition("eval", 8 << 20).unwrap();
        let held = [(); 2].map(|()| eval.get(3 * MIB).unwrap());
        let (order, expected) = (AtomicUsize::new(0), [6 * MIB, 3 * MIB]);
        thread::scope(|scope| {
            for (at, len) in expected.into_iter().enumerate() {
                let (eval, order) = (&eval, &order);
                scope.spawn(move || {
                    let _got = eval.get(len).unwrap();
                    let served = order.fetch_add(1, Ordering::SeqCst);
                    assert_eq!(served, at, "a small request does not overtake a large one");
                });
                until_waits(eval, at as u64 + 1);
            }
            // The pool still serves other requests immediately, hits included.
            (0..20).for_each(|_| drop(pool.get_with(Request::new(16 * MIB).timeout(Duration::ZERO)).unwrap()));
            assert_eq!((pool.stats().requests.waiting, pool.stats().requests.waits), (0, 0));
            let [first, second] = held;
            drop(first);
            assert_eq!(order.load(Ordering::SeqCst), 0, "one buffer is no room for the first");
            drop(second);
        });
        let Stats { memory, requests, .. } = eval.stats();
        assert_eq!((requests.waits, requests.waiting, requests.wait_time.count()), (2, 0, 2));
        assert_eq!(memory.in_use_bytes, 0);
    }
}

#[test]
fn a_partition_above_its_pool_is_allowed_and_both_say_which_limit_applies() {
    listen();
    let pool = over_virtual_memory().max_bytes(8 << 20).name("train").wait(Duration::ZERO).build().unwrap();
    let eval = pool.open_partition("eval", 16 << 20).unwrap();
    let kept = lines_with_levels();
    let line = "pool[train] partition: name=eval max=16.0MiB pool_max=8.0MiB";
    assert!(kept.iter().any(|(_, kept)| kept == line), "{kept:?}");
    let error = eval.get(12 * MIB).unwrap_err();
    assert!(error.is_limit() && error.to_string().contains("exceeds the pool limit of 8.0MiB"), "{error}");
    assert_eq!(eval.stats().memory.in_use_bytes, 0, "a request that the pool refuses claims nothing");
    drop(eval.get(8 * MIB).unwrap());
    pool.set_max_bytes(32 << 20).unwrap();
    drop(eval.get(16 * MIB).unwrap());
    assert!(eval.get(17 * MIB).unwrap_err().to_string().contains("make the partition larger"));
}

#[test]
fn the_limit_of_a_partition_changes_within_the_limit_of_its_pool() {
    let pool = over_virtual_memory().max_bytes(16 << 20).wait(LONG).build().unwrap();
    let eval = pool.open_partition("eval", 2 << 20).unwrap();
    let get = || eval.get_with(Request::new(MIB).timeout(Duration::ZERO)).ok();
    let all = || std::iter::from_fn(get).collect::<Vec<_>>().len();
    assert_eq!(((0..3).filter_map(|_| get()).count(), all()), (3, 2), "one after the other, and at once");
    let held = eval.get(2 * MIB).unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| eval.get(MIB).map(drop));
        until_waits(&eval, 1);
        eval.set_max_bytes(3 << 20).unwrap();
        waiting.join().unwrap().unwrap();
    });
    drop(held);
    eval.set_max_bytes(Limit::Unlimited).unwrap();
    assert_eq!(all(), 16, "bounded by its pool");
}
