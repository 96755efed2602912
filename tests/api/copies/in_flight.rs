//! Buffers and the copies that read them: no buffer is reused, overwritten or freed before its copy completes.

use std::time::Duration;

use pinpool::Completion;
use pinpool_testing::{SinkMemory, SinkStream, SourceCall};

use crate::fixture::{LONG, faulty_heap, filled, heap, held_sink, two_buffers};
use crate::until::until;
use crate::valid_stats::valid_stats;

#[test]
fn a_buffer_in_flight_is_not_reused_until_its_copy_completes() {
    let pool = two_buffers(&faulty_heap()).build().unwrap();
    let (stream, mut device, gate) = held_sink(100);
    let first = filled(&pool, 100, 1);
    let id = first.unstable_id();
    let copy = first.copy_to(&stream, &mut device).unwrap();
    let second = filled(&pool, 100, 2);
    assert_ne!(second.unstable_id(), id);
    let stats = pool.stats();
    assert_eq!((stats.copies.in_flight, stats.memory.in_use, stats.requests.returned, stats.memory.idle), (1, 1, 0, 0));
    assert!(stats.copies.oldest_age.is_some());
    assert!(!copy.is_complete().unwrap());
    drop(gate);
    copy.wait().unwrap();
    assert_eq!(pool.get(100).unwrap().unstable_id(), id, "the request found the copy complete and reused its buffer");
    assert!(device.read().iter().all(|&byte| byte == 1));
    valid_stats(&pool);
}

#[test]
fn an_awaited_copy_is_no_longer_in_flight() {
    let pool = two_buffers(&faulty_heap()).build().unwrap();
    let (stream, mut device) = (SinkStream::new().unwrap(), SinkMemory::new(100));
    let waits: [fn(&Completion); 2] =
        [|copy| copy.wait().unwrap(), |copy| assert!(copy.wait_timeout(Duration::from_secs(60)).unwrap())];
    for (wait, times) in waits.into_iter().zip(1..) {
        wait(&filled(&pool, 100, 1).copy_to(&stream, &mut device).unwrap());
        let stats = pool.stats();
        assert_eq!((stats.copies.in_flight, stats.copies.oldest_age, stats.memory.idle), (0, None, 1));
        assert_eq!(stats.copies.time.count(), times);
    }
}

#[test]
fn statistics_do_not_count_a_finished_copy_as_in_flight() {
    let pool = heap().maintenance_thread(false).build().unwrap();
    let (stream, mut device) = (SinkStream::new().unwrap(), SinkMemory::new(100));
    let copy = filled(&pool, 100, 1).copy_to(&stream, &mut device).unwrap();
    until("the copy is complete", || copy.is_complete().unwrap());
    let stats = valid_stats(&pool);
    assert_eq!((stats.copies.in_flight, stats.requests.returned, stats.memory.idle), (0, 1, 1));
}

#[test]
fn one_slow_stream_does_not_hold_back_the_buffers_of_another() {
    let pool = two_buffers(&faulty_heap()).build().unwrap();
    let (slow, fast) = (SinkStream::new().unwrap(), SinkStream::new().unwrap());
    let (mut slow_device, mut fast_device) = (SinkMemory::new(100), SinkMemory::new(100));
    let gate = slow.hold();
    filled(&pool, 100, 1).copy_to(&slow, &mut slow_device).unwrap();
    for _ in 0..10 {
        filled(&pool, 100, 2).copy_to(&fast, &mut fast_device).unwrap().wait().unwrap();
    }
    pool.maintain();
    let stats = pool.stats();
    assert_eq!((stats.copies.in_flight, stats.requests.returned, stats.requests.misses), (1, 10, 2));
    drop(gate);
    slow.synchronize().unwrap();
    pool.maintain();
    assert_eq!(pool.stats().copies.in_flight, 0);
}

#[test]
fn a_return_and_its_eviction_happen_when_the_copy_is_found_complete() {
    let pool = two_buffers(&faulty_heap()).build().unwrap();
    let (stream, mut device, gate) = held_sink(20_000);
    for len in [1_000, 5_000, 20_000] {
        filled(&pool, len, 1).copy_to(&stream, &mut device).unwrap();
    }
    let before = pool.stats();
    assert_eq!((before.requests.returned, before.memory.evictions.over_limit, before.copies.in_flight), (0, 0, 3));
    drop(gate);
    stream.synchronize().unwrap();
    pool.maintain();
    let after = pool.stats();
    assert_eq!((after.requests.returned, after.memory.evictions.over_limit), (3, 1));
    assert_eq!((after.copies.in_flight, after.memory.idle), (0, 2));
    assert!(pool.try_get(1_000).unwrap().is_none(), "the buffer of the first copy was evicted");
}

#[test]
fn a_write_right_after_a_borrowing_copy_leaves_the_device_data_intact() {
    let pool = two_buffers(&faulty_heap()).build().unwrap();
    let (stream, mut device) = (SinkStream::new().unwrap(), SinkMemory::new(1 << 20));
    let mut buffer = filled(&pool, 1 << 20, 7);
    let gate = stream.hold();
    let copy = buffer.copy_range_to(0..1 << 20, &stream, &mut device).unwrap();
    assert!(buffer.try_slice_mut().unwrap().is_none(), "the copy may still read");
    let writing = std::thread::spawn(move || {
        // Waits for the copy, then overwrites what it has read.
        buffer.wait_slice_mut().unwrap().fill(9);
        buffer
    });
    assert!(!copy.is_complete().unwrap());
    drop(gate);
    let mut buffer = writing.join().unwrap();
    assert!(device.read().iter().all(|&byte| byte == 7));
    assert!(buffer.try_slice_mut().unwrap().is_some_and(|bytes| bytes.iter().all(|&byte| byte == 9)));
}

#[test]
fn a_buffer_dropped_after_borrowing_copies_on_two_streams_waits_for_both() {
    let pool = two_buffers(&faulty_heap()).build().unwrap();
    let (one, two) = (SinkStream::new().unwrap(), SinkStream::new().unwrap());
    let (mut first, mut second) = (SinkMemory::new(50), SinkMemory::new(50));
    let (gate_one, gate_two) = (one.hold(), two.hold());
    let mut buffer = filled(&pool, 100, 3);
    buffer.copy_range_to(0..50, &one, &mut first).unwrap();
    buffer.copy_range_to(50..100, &two, &mut second).unwrap();
    drop(buffer);
    drop(gate_two);
    two.synchronize().unwrap();
    pool.maintain();
    assert_eq!(pool.stats().copies.in_flight, 1);
    drop(gate_one);
    one.synchronize().unwrap();
    pool.maintain();
    assert_eq!((pool.stats().copies.in_flight, pool.stats().memory.idle), (0, 1));
}

#[test]
fn a_refused_copy_returns_its_buffer() {
    let pool = two_buffers(&faulty_heap()).build().unwrap();
    let (stream, mut device) = (SinkStream::new().unwrap(), SinkMemory::new(10));
    let error = filled(&pool, 11, 5).copy_to(&stream, &mut device).unwrap_err();
    assert!(error.error().is_copy_refused(), "{error}");
    assert_eq!(format!("{error:?}"), format!("CopyRefused: {error}"));
    assert!(["copy 11B", "only 10B"].iter().all(|part| error.to_string().contains(part)), "{error}");
    assert_eq!((pool.stats().memory.idle, pool.stats().memory.in_use), (0, 1));
    // The bytes are still there, and may be copied elsewhere.
    let mut larger = SinkMemory::new(11);
    error.into_buf().unwrap().copy_to(&stream, &mut larger).unwrap().wait().unwrap();
    assert_eq!(larger.read(), [5; 11]);
    // Otherwise the buffer returns with the error.
    assert!(pinpool::Error::from(pool.get(11).unwrap().copy_to(&stream, &mut device).unwrap_err()).is_copy_refused());
    assert_eq!((pool.stats().memory.idle, pool.stats().memory.in_use), (1, 0));
    let mut buffer = pool.get(8).unwrap();
    #[allow(clippy::reversed_empty_ranges)] // A mistake of the caller.
    for range in [0..9, 9..9, 5..4] {
        assert!(buffer.copy_range_to(range, &stream, &mut device).unwrap_err().is_invalid_request());
    }
    assert!(buffer.copy_range_to(4..4, &stream, &mut device).unwrap().is_complete().unwrap());
}

#[test]
fn the_end_of_the_pool_waits_for_copies_and_then_frees_everything() {
    let source = faulty_heap();
    let pool = two_buffers(&source).build().unwrap();
    let (stream, mut device, gate) = held_sink(100);
    filled(&pool, 100, 5).copy_to(&stream, &mut device).unwrap();
    let closing = std::thread::spawn(move || drop(pool));
    assert_eq!(source.calls(SourceCall::Release), 0);
    drop(gate);
    closing.join().unwrap();
    assert_eq!((source.calls(SourceCall::Acquire), source.calls(SourceCall::Release)), (1, 1));
    assert!(device.read().iter().all(|&byte| byte == 5));
}

#[test]
fn the_last_buffer_ends_a_pool_without_handles() {
    let source = faulty_heap();
    let pool = two_buffers(&source).build().unwrap();
    let (idle, kept) = (pool.get(100).unwrap(), filled(&pool, 200, 4));
    drop(idle);
    drop(pool.clone());
    assert_eq!(source.calls(SourceCall::Release), 0, "a clone is left");
    drop(pool);
    assert_eq!(source.calls(SourceCall::Release), 1, "idle memory was released with the last handle");
    assert!(kept.wait_slice().unwrap().iter().all(|&byte| byte == 4), "a buffer outlives its pool");
    drop(kept);
    assert_eq!(source.calls(SourceCall::Release), 2);
}

#[test]
fn the_last_buffer_closes_the_pool_when_its_copy_completes() {
    let source = faulty_heap();
    let pool = two_buffers(&source).build().unwrap();
    let (stream, mut device) = (SinkStream::new().unwrap(), SinkMemory::new(100));
    let buffer = filled(&pool, 100, 6);
    drop(pool);
    let copy = buffer.copy_to(&stream, &mut device).unwrap();
    assert!(copy.is_complete().unwrap(), "the end of the pool waited for the copy");
    assert_eq!(source.calls(SourceCall::Release), 1);
}

#[test]
fn the_memory_of_a_copy_that_never_ends_is_kept_after_the_wait() {
    let source = faulty_heap();
    let pool = two_buffers(&source).unstable_settings(|only| only.copies_wait = Some(Duration::ZERO)).build().unwrap();
    let (stuck, fine) = (SinkStream::new().unwrap(), SinkStream::new().unwrap());
    let (mut first, mut second) = (SinkMemory::new(100), SinkMemory::new(100));
    let gate = stuck.hold();
    filled(&pool, 100, 1).copy_to(&stuck, &mut first).unwrap();
    filled(&pool, 100, 2).copy_to(&fine, &mut second).unwrap().wait().unwrap();
    drop(pool);
    let calls = (source.calls(SourceCall::Acquire), source.calls(SourceCall::Release));
    assert_eq!(calls, (2, 1), "the memory of the stuck copy is kept");
    drop(gate);
    assert!(first.read().iter().all(|&byte| byte == 1), "the copy read intact memory");
}

#[test]
fn a_device_error_quarantines_the_buffer_without_a_wait() {
    let source = faulty_heap();
    // If the end of the pool waited, the test would time out.
    let pool = two_buffers(&source).unstable_settings(|only| only.copies_wait = Some(LONG)).build().unwrap();
    let (stream, mut device, gate) = held_sink(100);
    let copy = filled(&pool, 100, 1).copy_to(&stream, &mut device).unwrap();
    stream.fail();
    assert!(copy.wait().unwrap_err().is_device_failed());
    pool.maintain();
    let stats = valid_stats(&pool);
    assert_eq!((stats.memory.quarantined, stats.copies.in_flight, stats.memory.idle), (1, 0, 0));
    assert_eq!(stats.memory.quarantined_bytes, stats.memory.held_bytes);
    drop(pool);
    assert_eq!(source.calls(SourceCall::Release), 0);
    drop(gate);
}
