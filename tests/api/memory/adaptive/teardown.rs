//! The end of a pool releases everything exactly once.

use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use pinpool::unstable::ManualClock;
use pinpool_testing::{FaultSource, SourceCall};

use super::{MIB, over};
use crate::child::alone;
use crate::fixture::each_sim;
use crate::until::{threads_named, until};

/// Address ranges that are still reserved.
fn ranges(source: &FaultSource) -> u64 {
    source.calls(SourceCall::Reserve) - source.calls(SourceCall::Unreserve)
}

#[test]
fn a_pool_ends_once_when_its_last_handle_and_buffers_are_dropped_together() {
    for round in 0..200 {
        for (sim, source) in each_sim() {
            let pool = over(source.clone()).pool_size_limit(round % 3).auto_resize(false).build().unwrap();
            let last: Vec<_> = (1..5).map(|n| pool.get(n * MIB).unwrap()).collect();
            let barrier = Barrier::new(5);
            thread::scope(|scope| {
                for buffer in last {
                    let barrier = &barrier;
                    scope.spawn(move || {
                        barrier.wait();
                        drop(buffer);
                    });
                }
                barrier.wait();
                drop(pool);
            });
            assert_eq!((sim.sums.lock().pinned_bytes, ranges(&source)), (0, 0), "round {round}");
        }
    }
}

#[test]
fn the_drop_of_the_last_handle_releases_idle_memory_while_a_buffer_is_in_use() {
    for (sim, source) in each_sim() {
        let pool = over(source.clone()).build().unwrap();
        let kept = pool.get(MIB).unwrap();
        drop(pool.get(32 * MIB).unwrap());
        drop(pool);
        let held_bytes = sim.sums.lock().pinned_bytes;
        assert!((1..=8 << 20).contains(&held_bytes), "{held_bytes}");
        drop(kept);
        assert_eq!((sim.sums.lock().pinned_bytes, ranges(&source)), (0, 0));
    }
}

#[test]
fn the_maintenance_thread_releases_idle_memory_and_ends_after_the_last_pool() {
    // Other tests have pools too, and all pools of a process share the thread.
    alone(|| {
        let [(sim, source), _] = each_sim();
        let held_bytes = || sim.sums.lock().pinned_bytes;
        let clock = ManualClock::default();
        let builder =
            || over(source.clone()).idle_timeout(Duration::ZERO).maintenance_thread(true).unstable_clock(clock.clone());
        let (pool, other) = (builder().build().unwrap(), builder().build().unwrap());
        assert_eq!(threads_named("pinpool-maint"), 0, "nothing needs it yet");
        drop((pool.get(2 * MIB).unwrap(), other.get(2 * MIB).unwrap()));
        // One thread for both pools, once it has set its name.
        until("one thread", || threads_named("pinpool-maint") == 1);
        assert!(held_bytes() > 0);
        clock.advance_us(60_000_000);
        // Nothing calls the pools, but their memory is released anyway.
        until("its memory is released", || held_bytes() == 0);
        drop((pool, other));
        until("the thread ends", || threads_named("pinpool-maint") == 0);
        assert_eq!(ranges(&source), 0);
        let later = builder().build().unwrap();
        drop(later.get(2 * MIB).unwrap());
        // The thread starts again.
        until("one thread", || threads_named("pinpool-maint") == 1);
    });
}
