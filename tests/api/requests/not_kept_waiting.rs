//! Waiting requests are served, or fail, as soon as possible: the head, the next, and requests in a partition.

use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::thread;
use std::time::Duration;
use std::{pin::Pin, sync::Arc};

use pinpool::{Preset, Request};
use pinpool_testing::SourceCall;

use super::async_get::Counting;
use crate::fixture::{LONG, MIB, Requests, both_presets, faulty_sim, over, over_sim, poll, until_waits};
use crate::until::{in_time, until};

fn head_above_a_lowered_limit(requests: &impl Requests, lower: impl FnOnce()) {
    let held = requests.get(12 * MIB).unwrap();
    thread::scope(|scope| {
        let large = scope.spawn(|| requests.get(8 * MIB).map(drop));
        until_waits(requests, 1);
        let small = scope.spawn(|| requests.get(5 * MIB).map(drop));
        until_waits(requests, 2);
        lower();
        drop(held);
        assert!(matches!(large.join().unwrap(), Err(error) if error.is_limit() && !error.is_timeout()));
        small.join().unwrap().unwrap();
    });
}

#[test]
fn a_head_above_a_lowered_limit_fails_and_the_next_is_served() {
    in_time(|| {
        for pool in both_presets(16 << 20).map(|builder| builder.build().unwrap()) {
            head_above_a_lowered_limit(&pool, || pool.set_max_bytes(7 << 20).unwrap());
        }
        let partition = over_sim(64 << 20).build().unwrap().open_partition("p", 16 << 20).unwrap();
        head_above_a_lowered_limit(&partition, || partition.set_max_bytes(7 << 20).unwrap());
    });
}

#[test]
fn what_waits_for_the_pool_is_served_after_its_partition_is_closed() {
    let pool = over_sim(8 << 20).build().unwrap();
    let partition = pool.open_partition("p", 8 << 20).unwrap();
    let held = pool.get(8 * MIB).unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| partition.get(4 * MIB).map(drop));
        until_waits(&pool, 1);
        let mut task = partition.get_async(4 * MIB);
        assert!(poll(&mut task).is_pending());
        until_waits(&pool, 2);
        partition.close();
        assert!(poll(&mut task).is_pending());
        drop(held);
        waiting.join().unwrap().unwrap();
        until("the task is served", || matches!(poll(&mut task), Poll::Ready(Ok(_))));
    });
}

#[test]
fn a_lost_device_ends_the_wait_in_a_partition() {
    let source = faulty_sim();
    let pool = over(source.clone(), 8 << 20).wait(LONG).build().unwrap();
    let partition = pool.open_partition("p", 2 << 20).unwrap();
    let _held = partition.get(2 * MIB).unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| partition.get(2 * MIB).map(drop));
        until_waits(&partition, 1);
        (0..100).for_each(|call| source.fail(SourceCall::DeviceLost, source.calls(SourceCall::DeviceLost) + call));
        pool.maintain();
        assert!(waiting.join().unwrap().unwrap_err().is_backend());
    });
}

#[test]
fn a_try_get_that_finds_nothing_refuses_no_request_of_its_partition() {
    let pool = over_sim(64 << 20).build().unwrap();
    let partition = pool.open_partition("p", 2 << 20).unwrap();
    thread::scope(|scope| {
        let asking = scope.spawn(|| (0..20_000).all(|_| partition.try_get(2 * MIB).unwrap().is_none()));
        while !asking.is_finished() {
            partition.get_with(Request::new(MIB).timeout(Duration::ZERO)).unwrap();
        }
        assert!(asking.join().unwrap());
    });
}

#[test]
fn idle_memory_makes_room_although_another_threads_call_hangs() {
    let source = faulty_sim();
    let pool = over(source.clone(), 20 << 20).build().unwrap();
    drop([(); 3].map(|()| pool.get(2 * MIB).unwrap()));
    let gate = source.hold(SourceCall::Acquire);
    thread::scope(|scope| {
        let hanging = scope.spawn(|| pool.get(8 * MIB).map(drop));
        gate.wait_for(1);
        let served = scope.spawn(|| pool.get(10 * MIB).map(drop));
        gate.wait_for(2);
        drop(gate);
        served.join().unwrap().unwrap();
        hanging.join().unwrap().unwrap();
    });
}

#[test]
fn a_close_wakes_tasks_while_their_thread_is_in_a_driver_call() {
    let source = faulty_sim();
    let pool = over(source.clone(), 8 << 20).wait(LONG).build().unwrap();
    let gate = source.hold(SourceCall::Acquire);
    let wakers: [Arc<Counting>; 2] = Default::default();
    let mut tasks = [pool.get_async(MIB), pool.get_async(2 * MIB)];
    for (task, waker) in tasks.iter_mut().zip(&wakers) {
        assert!(Pin::new(task).poll(&mut Context::from_waker(&waker.clone().into())).is_pending());
    }
    gate.wait_for(1);
    thread::scope(|scope| {
        scope.spawn(|| pool.close());
        until("both are woken", || wakers.iter().all(|waker| waker.0.load(Ordering::SeqCst) > 0));
        drop(gate);
    });
}

#[test]
fn requests_that_pass_the_head_return_their_room_although_no_buffer_is_reused() {
    for preset in [Preset::TensorFlow, Preset::Adaptive] {
        let pool = over_sim((20 << 20) + (64 << 10)).preset(preset).pool_size_limit(0).build().unwrap();
        let held = pool.get(12 * MIB).unwrap();
        thread::scope(|scope| {
            let head = scope.spawn(|| pool.get(10 * MIB).map(drop));
            until_waits(&pool, 1);
            // 8 MiB are free, and the head's request leaves 10 MiB of the limit.
            (0..20).for_each(|_| drop(pool.get_with(Request::new(3 * MIB).timeout(Duration::ZERO)).unwrap()));
            drop(held);
            head.join().unwrap().unwrap();
        });
    }
}

#[test]
fn a_partition_with_room_says_who_comes_first() {
    let partition = over_sim(64 << 20).build().unwrap().open_partition("p", 4 << 20).unwrap();
    let held = partition.get(3 * MIB).unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| partition.get(2 * MIB).map(drop));
        until_waits(&partition, 1);
        let refuse = |mib| partition.get_with(Request::new(mib * MIB).timeout(Duration::ZERO)).unwrap_err().to_string();
        let (small, large) = (refuse(1), refuse(5));
        assert!(small.contains("1 earlier request is waiting") && small.contains("limit of the partition"), "{small}");
        assert!(large.contains("exceeds the limit of the partition"), "{large}");
        drop(held);
        waiting.join().unwrap().unwrap();
    });
}
