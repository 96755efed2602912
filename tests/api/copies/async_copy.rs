//! Copies that tasks await, and waits with a time limit.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use pinpool_testing::{SinkMemory, SinkStream};
use tokio::runtime::{Builder, Runtime};

use crate::fixture::{filled, heap, run};

/// A runtime with one worker thread, so that a blocking task stops the other task.
fn one_worker() -> Runtime {
    Builder::new_multi_thread().worker_threads(1).build().unwrap()
}

#[test]
fn a_task_awaits_a_copy_that_another_task_on_its_thread_lets_run() {
    let (pool, stream, mut device) = (heap().build().unwrap(), SinkStream::new().unwrap(), SinkMemory::new(4096));
    let gate = stream.hold();
    let copy = filled(&pool, 4096, 7).copy_to(&stream, &mut device).unwrap();
    let runtime = one_worker();
    let (waits, is_waiting) = tokio::sync::oneshot::channel();
    let awaiting = runtime.spawn(async move {
        waits.send(()).unwrap();
        copy.await
    });
    let opening = runtime.spawn(async move {
        is_waiting.await.unwrap();
        tokio::task::yield_now().await;
        drop(gate);
    });
    runtime.block_on(async {
        opening.await.unwrap();
        awaiting.await.unwrap().unwrap();
    });
    assert_eq!(device.read(), vec![7; 4096]);
}

#[test]
fn a_pending_buffer_is_awaited_and_brings_its_bytes() {
    let (pool, stream, mut device) = (heap().build().unwrap(), SinkStream::new().unwrap(), SinkMemory::new(4096));
    filled(&pool, 4096, 9).copy_to(&stream, &mut device).unwrap();
    let gate = stream.hold();
    let pending = pool.get(4096).unwrap().copy_from(&stream, &device).unwrap();
    assert!(!pending.wait_timeout(Duration::from_millis(2)).unwrap());
    let runtime = one_worker();
    let fetching = runtime.spawn(async move { pending.await?.wait_slice().map(|bytes| bytes.to_vec()) });
    drop(runtime.spawn(async move { drop(gate) }));
    assert_eq!(runtime.block_on(fetching).unwrap().unwrap(), vec![9; 4096]);
}

#[test]
fn a_failed_copy_ends_what_awaits_it_with_its_error() {
    let (pool, stream, mut device) = (heap().build().unwrap(), SinkStream::new().unwrap(), SinkMemory::new(100));
    let _gate = stream.hold();
    let copy = filled(&pool, 100, 1).copy_to(&stream, &mut device).unwrap();
    let runtime = one_worker();
    let awaiting = runtime.spawn(async move { copy.await });
    runtime.block_on(runtime.spawn(tokio::task::yield_now())).unwrap();
    stream.fail();
    assert!(runtime.block_on(awaiting).unwrap().unwrap_err().is_device_failed());
}

#[test]
fn a_future_that_is_dropped_or_of_no_bytes_needs_no_wake() {
    let (pool, stream, mut device) = (heap().build().unwrap(), SinkStream::new().unwrap(), SinkMemory::new(100));
    let gate = stream.hold();
    let copy = filled(&pool, 100, 1).copy_to(&stream, &mut device).unwrap();
    let runtime = one_worker();
    let awaiting = runtime.spawn(copy.clone().into_future());
    awaiting.abort();
    assert!(runtime.block_on(awaiting).unwrap_err().is_cancelled());
    runtime.block_on(async { pool.get(0).unwrap().copy_to(&stream, &mut device).unwrap().await }).unwrap();
    assert!(!copy.wait_timeout(Duration::ZERO).unwrap());
    drop(gate);
    assert!(copy.wait_timeout(Duration::from_secs(60)).unwrap());
    assert_eq!(device.read(), vec![1; 100]);
}

#[test]
fn the_future_of_a_copy_panics_if_it_is_used_after_completion() {
    let (pool, stream, mut device) = (heap().build().unwrap(), SinkStream::new().unwrap(), SinkMemory::new(100));
    for len in [0, 100] {
        let mut copied = filled(&pool, len, 1).copy_to(&stream, &mut device).unwrap().into_future();
        run(&mut copied).unwrap();
        assert!(catch_unwind(AssertUnwindSafe(|| run(&mut copied))).is_err());
        let mut pending = pool.get(len).unwrap().copy_from(&stream, &device).unwrap().into_future();
        assert_eq!(run(&mut pending).unwrap().len(), len);
        assert!(catch_unwind(AssertUnwindSafe(|| run(&mut pending))).is_err());
    }
}
