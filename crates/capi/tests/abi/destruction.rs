//! Pools that are destroyed with calls running and buffers out.

use std::sync::Barrier;
use std::thread;

use pinpool_c::*;

use crate::fixture::{HEAP, OPTIONS, ROUNDS, bytes, destroy, get, get_with, open, outcome, put, stats};

#[test]
fn buffers_stay_valid_and_returnable_after_the_end() {
    let pool = open(HEAP);
    let (first, second) = (get(pool, 1 << 20).unwrap(), get(pool, 4096).unwrap());
    destroy(pool);
    assert_eq!(get(pool, 4096).unwrap_err().0, pp_status::PP_UNKNOWN_POOL);
    assert_eq!(outcome(pp_pool_destroy(pool.0), ()).unwrap_err().0, pp_status::PP_UNKNOWN_POOL);
    bytes(first, 1 << 20).fill(1);
    put(pool, first).unwrap();
    let again = put(pool, first).unwrap_err();
    assert!(again.0 == pp_status::PP_UNKNOWN_POINTER && again.1.contains("already returned"), "{again:?}");
    bytes(second, 4096).fill(2);
    put(pool, second).unwrap();
    let after = put(pool, second).unwrap_err();
    assert!(after.0 == pp_status::PP_UNKNOWN_POOL && after.1.contains("already destroyed"), "{after:?}");
}

#[test]
fn destroyed_pools_free_their_slots_but_not_their_handles() {
    let mut seen = std::collections::HashSet::new();
    for _ in 0..2 * ROUNDS {
        let pools: Vec<_> = (0..40).map(|_| open("backend=heap; maintenance_thread=0")).collect();
        let held: Vec<_> = pools.iter().map(|&pool| get(pool, 4096).unwrap()).collect();
        assert!(pools.iter().all(|pool| seen.insert(pool.0.addr())), "given twice");
        pools.iter().for_each(|&pool| destroy(pool));
        for (&pool, &held) in pools.iter().zip(&held) {
            assert_eq!(get(pool, 1).unwrap_err().0, pp_status::PP_UNKNOWN_POOL);
            put(pool, held).unwrap();
            assert_eq!(put(pool, held).unwrap_err().0, pp_status::PP_UNKNOWN_POOL);
        }
        // The slot numbers in the handles stay small, however many pools there were before.
        assert!(pools.iter().all(|pool| pool.0.addr() % 4096 < 1000), "{pools:?}");
    }
}

#[test]
fn a_pool_may_be_destroyed_while_threads_use_it() {
    const THREADS: usize = 4;
    for _ in 0..ROUNDS {
        let pool = open(HEAP);
        let start = Barrier::new(THREADS + 1);
        let served: usize = thread::scope(|scope| {
            let work = || {
                start.wait();
                (0..).find(|served: &usize| match get(pool, 64 << 10) {
                    Ok(held) => {
                        bytes(held, 64 << 10)[served % 100] = 1;
                        put(pool, held).unwrap();
                        false
                    }
                    Err((status, text)) => {
                        assert_eq!(status, pp_status::PP_UNKNOWN_POOL, "{text}");
                        true
                    }
                })
            };
            let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(work)).collect();
            start.wait();
            thread::yield_now();
            destroy(pool);
            threads.into_iter().filter_map(|thread| thread.join().unwrap()).sum()
        });
        assert!(outcome(pp_maintain(pool.0), ()).is_err(), "destroyed after {served} gets");
    }
}

#[test]
fn a_destruction_does_not_wait_for_waiting_requests() {
    let pool = open("backend=heap; max_bytes=4MiB; on_full=error; wait=0s");
    let held = get(pool, 4 << 20).unwrap();
    thread::scope(|scope| {
        let waiting =
            scope.spawn(|| get_with(pool, 4 << 20, pp_request_options { timeout_ms: PP_WAIT_FOREVER, ..OPTIONS }));
        while stats(pool)["requests"]["waiting"].as_u64() == Some(0) {
            thread::yield_now();
        }
        destroy(pool);
        put(pool, held).unwrap();
        put(pool, waiting.join().unwrap().unwrap()).unwrap();
    });
    assert_eq!(get(pool, 1).unwrap_err().0, pp_status::PP_UNKNOWN_POOL);
}
