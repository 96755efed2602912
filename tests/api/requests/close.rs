//! `Pool::close`: requests that wait and later ones fail, and buffers in use stay valid.

use std::task::Poll;
use std::thread;

use pinpool::{Backend, OnFull, Request, Stats};
use pinpool_testing::SourceCall;

use crate::captured_log;
use crate::fixture::{LONG, MIB, both_presets, faulty_sim, held_sink, over_sim, poll, until_waits};
use crate::until::until;
use crate::valid_stats::{stats_when, valid_stats};

#[test]
fn threads_and_tasks_that_wait_fail_and_so_does_every_later_request() {
    for builder in both_presets(2 << 20) {
        let pool = builder.on_full(OnFull::Pageable).build().unwrap();
        let held = pool.get(2 * MIB).unwrap();
        let tagged = pool.tagged("tag");
        thread::scope(|scope| {
            // The head of the queue is a task that is not polled.
            let mut unpolled = pool.get_async(MIB);
            assert!(poll(&mut unpolled).is_pending());
            let waiting = [2, 1].map(|mib| {
                let pool = &pool;
                scope.spawn(move || pool.get_with(Request::new(mib * MIB).timeout(LONG)).map(drop))
            });
            until_waits(&pool, 3);
            let mut task = pool.get_async(MIB);
            assert!(poll(&mut task).is_pending());
            pool.close();
            for thread in waiting {
                assert!(thread.join().unwrap().unwrap_err().is_closed());
            }
            for mut task in [task, unpolled] {
                let Poll::Ready(Err(error)) = poll(&mut task) else { panic!("the task still waits") };
                assert!(error.is_closed() && error.to_string().contains("pool or partition was closed"), "{error}");
            }
        });
        for error in [
            pool.get(MIB).unwrap_err(),
            pool.get(2 * MIB).unwrap_err(),
            pool.try_get(2 * MIB).unwrap_err(),
            pool.get_with(Request::new(MIB).align(4096)).unwrap_err(),
            tagged.get(MIB).unwrap_err(),
        ] {
            assert!(error.is_closed(), "{error}");
        }
        assert!(matches!(poll(&mut pool.get_async(MIB)), Poll::Ready(Err(error)) if error.is_closed()));
        pool.close();
        drop(held);
        let Stats { memory, requests, .. } = valid_stats(&pool);
        assert_eq!((memory.in_use, memory.idle), (0, 0));
        assert_eq!((requests.timeouts, requests.waiting, requests.pageable), (0, 0, 0));
    }
}

#[test]
fn close_releases_idle_memory_and_keeps_buffers_in_use() {
    for builder in both_presets(2 << 20) {
        let pool = builder.build().unwrap();
        drop(pool.get(MIB).unwrap());
        let (mut used, copied) = (pool.get(MIB / 2).unwrap(), pool.get(MIB / 4).unwrap());
        let (stream, mut device, gate) = held_sink(MIB);
        let copy = copied.copy_to(&stream, &mut device).unwrap();
        pool.close();
        assert_eq!(valid_stats(&pool).memory.idle_bytes, 0);
        used.wait_slice_mut().unwrap().fill(7);
        let last = used.copy_to(&stream, &mut device).unwrap();
        drop(gate);
        copy.wait().unwrap();
        last.wait().unwrap();
        pool.maintain();
        let stats = valid_stats(&pool);
        assert_eq!((stats.memory.in_use, stats.copies.in_flight, stats.memory.idle), (0, 0, 0));
        pool.trim(0);
        assert_eq!(pool.stats().memory.held_bytes, 0);
    }
}

#[test]
fn a_pool_closes_its_partitions_and_a_partition_not_its_pool() {
    let pool = over_sim(8 << 20).build().unwrap();
    let [one, other] = ["one", "other"].map(|name| pool.open_partition(name, 2 << 20).unwrap());
    drop(one.get(MIB).unwrap());
    one.close();
    assert!(one.get(MIB).unwrap_err().is_closed());
    assert!(other.get(MIB).is_ok() && pool.get(MIB).is_ok());
    pool.close();
    assert!(other.get(MIB).unwrap_err().is_closed() && pool.open_partition("late", 1 << 20).unwrap_err().is_closed());
}

#[test]
fn close_fails_a_task_during_its_driver_call() {
    let source = faulty_sim();
    let pool = over_sim(8 << 20).backend(Backend::Source(source.clone())).build().unwrap();
    let gate = source.hold(SourceCall::Acquire);
    let mut get = pool.get_async(MIB);
    assert!(poll(&mut get).is_pending());
    gate.wait_for(1);
    let closing = thread::scope(|scope| {
        // Idle memory is released by this call, which waits for the driver.
        let closing = scope.spawn(|| pool.close());
        until("the task fails", || matches!(poll(&mut get), Poll::Ready(Err(ref error)) if error.is_closed()));
        drop(gate);
        closing.join()
    });
    closing.unwrap();
    assert_eq!(stats_when(&pool, |stats| stats.memory.in_use_bytes + stats.memory.transit_bytes == 0).memory.idle, 0);
}

#[test]
fn buffers_that_are_returned_after_the_last_handle_raise_no_limit() {
    for builder in both_presets(1 << 30) {
        captured_log::listen();
        let pool = builder.pool_size_limit(100).build().unwrap();
        let held: Vec<_> = (0..2_500).map(|_| pool.get(4096).unwrap()).collect();
        drop(pool);
        drop(held);
        let lines = captured_log::lines();
        assert_eq!(captured_log::count(&lines, "PoolAllocator: After"), 0, "{lines:#?}");
    }
}
