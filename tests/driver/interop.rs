//! The pool alongside other users of CUDA: copies made by cudarc, copies back, untracked work, handles of other frameworks, and
//! how their completion is detected.
#![allow(unsafe_code)] // Captures, raw handles and event tracking, for which cudarc has no safe API.

use std::ptr;
use std::sync::Arc;
use std::thread;

use cudarc::driver::sys::{CUresult, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, DriverError, result};
use mock_driver::{Code, MockDriver};
use pinpool::copy::CopyStream;
use pinpool::copy::cuda::{RawMemory, RawStream};
use pinpool::unstable::ManualClock;
use pinpool::{Backend, PinnedBuf, Pool};

use crate::fixture::{
    self, begin_capture, end_capture, ends_only_after, in_flight_and_quarantined, maintain_until, panic_of, start,
    usual_streams,
};

const LEN: usize = 64 << 10;

/// Device memory with no work left on its stream.
fn memory(stream: &Arc<CudaStream>, byte: u8) -> CudaSlice<u8> {
    let memory = stream.clone_htod(&vec![byte; LEN]).unwrap();
    stream.synchronize().unwrap();
    memory
}

fn filled(pool: &Pool, byte: u8) -> PinnedBuf {
    fixture::filled(pool, LEN, byte)
}

fn first_wrong(found: &[u8], expected: u8) -> Option<usize> {
    assert_eq!(found.len(), LEN);
    found.iter().position(|&byte| byte != expected)
}

/// Captures on `stream` while `run` runs; the graph is never launched.
fn captured(stream: &CudaStream, run: impl FnOnce()) {
    begin_capture(stream, CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL);
    run();
    end_capture(stream).unwrap();
}

/// A stream with the handle of `destroyed`, which still has work to run.
fn stream_in_place_of(context: &Arc<CudaContext>, destroyed: Arc<CudaStream>) -> Arc<CudaStream> {
    let handle = destroyed.cu_stream();
    drop(destroyed);
    let stream = context.new_stream().unwrap();
    assert_eq!(stream.cu_stream(), handle, "the handle is used again");
    stream
}

#[test]
fn a_write_after_a_copy_by_cudarc_waits_for_it() {
    let (driver, context, pool) = start();
    for stream in usual_streams(&context) {
        let mut target = memory(&stream, 0);
        let gate = driver.hold_all();
        let mut buf = filled(&pool, 1);
        stream.memcpy_htod(&buf, &mut target).unwrap();
        assert!(buf.try_slice().unwrap().is_some() && buf.try_slice_mut().unwrap().is_none());
        ends_only_after(&driver, gate, || buf.wait_slice_mut().unwrap().fill(2));
        assert_eq!(first_wrong(&stream.clone_dtoh(&target).unwrap(), 1), None);
    }
}

#[test]
fn a_read_waits_for_a_copy_back_by_cudarc() {
    let (driver, context, pool) = start();
    for (byte, stream) in (1..).zip(usual_streams(&context)) {
        let (source, mut buf) = (memory(&stream, byte), filled(&pool, 0));
        let gate = driver.hold_all();
        stream.memcpy_dtoh(&source, &mut buf).unwrap();
        assert!(buf.try_slice().unwrap().is_none() && buf.try_slice_mut().unwrap().is_none());
        assert_eq!(ends_only_after(&driver, gate, || first_wrong(buf.wait_slice().unwrap(), byte)), None);
        assert_eq!(first_wrong(buf.try_slice().unwrap().unwrap(), byte), None);
    }
}

#[test]
fn stored_errors_do_not_free_a_buffer_during_a_copy_by_cudarc() {
    let (driver, context, pool) = start();
    let (writer, stream) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    let mut target = memory(&writer, 0);
    let gate = driver.hold(stream.cu_stream());
    let buf = filled(&pool, 1);
    // The target's wait for its other stream fails: cudarc stores the error, continues, and records no event.
    driver.fail("cuStreamWaitEvent", 1, Code::UNKNOWN);
    stream.memcpy_htod(&buf, &mut target).unwrap();
    assert_eq!(context.check_err(), Err(DriverError(CUresult::CUDA_ERROR_UNKNOWN)));
    context.record_err::<()>(Err(DriverError(CUresult::CUDA_ERROR_ILLEGAL_STATE)));
    drop(buf);
    pool.maintain();
    assert_eq!((pool.stats().copies.in_flight, pool.stats().memory.quarantined), (1, 0));
    drop(gate);
    stream.synchronize().unwrap_err();
    stream.synchronize().unwrap();
    pool.maintain();
    assert_eq!((pool.stats().copies.in_flight, pool.stats().memory.idle), (0, 1));
}

#[test]
fn a_buffer_is_not_reused_if_cudarcs_copy_has_an_unknown_end() {
    let (driver, context, pool) = start();
    let stream = context.default_stream();
    let mut target = memory(&stream, 0);
    // The pool's own stream, created by the first host slice, exists.
    stream.memcpy_htod(&filled(&pool, 1), &mut target).unwrap();
    stream.synchronize().unwrap();
    pool.maintain();
    // If only the fence is refused, the pool waits for all work of the context instead.
    let buf = filled(&pool, 2);
    driver.fail("cuEventRecord", 1, Code::UNKNOWN);
    let gate = driver.hold_all();
    stream.memcpy_htod(&buf, &mut target).unwrap();
    drop(buf);
    (0..3).for_each(|_| pool.maintain());
    assert_eq!((pool.stats().memory.quarantined, pool.stats().copies.in_flight), (1, 0));
    drop(gate);
    maintain_until(&pool, |stats| stats.memory.quarantined == 0);
    context.check_err().unwrap();
    // A refused event is tried again once.
    driver.fail("cuEventCreate", 1, Code::UNKNOWN);
    stream.memcpy_htod(&filled(&pool, 2), &mut target).unwrap();
    poll_until_idle(&pool);
    assert_eq!(pool.stats().memory.quarantined, 0);
    // If nothing is known about the stream, no copy is made.
    (1..=2).for_each(|nth| driver.fail("cuStreamIsCapturing", nth, Code::UNKNOWN));
    let panic = panic_of(|| stream.memcpy_htod(&filled(&pool, 2), &mut target).unwrap());
    assert!(panic.contains("this copy of cudarc: cuStreamIsCapturing failed"), "{panic}");
    context.check_err().unwrap();
    pool.maintain();
    assert_eq!((pool.stats().memory.quarantined, pool.stats().copies.in_flight), (0, 0));
    // A host slice with a forgotten guard.
    let buf = filled(&pool, 3);
    // SAFETY: the slice is not used.
    let (_, guard) = unsafe { cudarc::driver::HostSlice::stream_synced_slice(&buf, &stream) };
    std::mem::forget(guard);
    drop(buf);
    pool.maintain();
    assert_eq!(pool.stats().memory.quarantined, 1);
}

/// Waits until nothing is in flight.
fn poll_until_idle(pool: &Pool) {
    maintain_until(pool, |stats| stats.copies.in_flight == 0);
}

#[test]
fn a_pending_buffer_is_readable_only_when_its_copy_completes() {
    let (driver, context, pool) = start();
    let stream = context.new_stream().unwrap();
    let source = memory(&stream, 7);
    let gate = driver.hold(stream.cu_stream());
    let arriving = filled(&pool, 0).copy_from(&stream, &source).unwrap();
    assert!(!arriving.is_complete().unwrap());
    // A pending buffer that is dropped stays in flight until its copy completes.
    drop(filled(&pool, 0).copy_from(&stream, &source).unwrap());
    pool.maintain();
    assert_eq!((pool.stats().copies.in_flight, pool.stats().memory.in_use), (1, 1));
    drop(gate);
    assert_eq!(first_wrong(arriving.wait().unwrap().wait_slice().unwrap(), 7), None);
    poll_until_idle(&pool);
    let error = pool.get(LEN + 1).unwrap().copy_from(&stream, &source).unwrap_err();
    assert!(error.error().is_copy_refused() && error.to_string().contains("65536"), "{error}");
    assert_eq!(error.into_buf().map(|buf| buf.len()), Some(LEN + 1), "nothing was enqueued");
}

#[test]
fn a_copy_back_that_fails_returns_no_bytes() {
    let (driver, context, pool) = start();
    let stream = context.new_stream().unwrap();
    let source = memory(&stream, 7);
    let _gate = driver.hold(stream.cu_stream());
    let arriving = filled(&pool, 0).copy_from(&stream, &source).unwrap();
    let mut buf = filled(&pool, 0);
    stream.memcpy_dtoh(&source, &mut buf).unwrap();
    driver.lose_device(Code::LAUNCH_FAILED);
    assert!(arriving.wait().unwrap_err().is_device_failed());
    assert!(buf.wait().unwrap_err().is_device_failed());
    assert!(buf.wait_slice().unwrap_err().is_device_failed());
    assert!(buf.wait_slice_as_mut::<u32>().unwrap_err().is_device_failed());
    assert!(buf.try_slice().unwrap_err().is_device_failed() && buf.try_slice_mut().unwrap_err().is_device_failed());
    assert_eq!(buf.len(), LEN, "the buffer does not appear empty");
    drop(buf);
    pool.maintain();
    assert_eq!((pool.stats().memory.quarantined, pool.stats().memory.idle), (2, 0));
}

#[test]
fn a_buffer_released_after_untracked_work_waits_for_that_work_only() {
    let (driver, context, pool) = start();
    let (stream, other) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    let event = context.new_event(None).unwrap();
    let mut target = memory(&stream, 0);
    let gate = driver.hold(stream.cu_stream());
    stream.memset_zeros(&mut target).unwrap();
    event.record(&stream).unwrap();
    filled(&pool, 1).release_after(&stream).unwrap();
    filled(&pool, 1).release_after_event(&event).unwrap();
    filled(&pool, 1).release_after(&other).unwrap();
    // A later record of the event, or its end, changes nothing.
    event.record(&other).unwrap();
    drop(event);
    filled(&pool, 1).release_after_event(&context.new_event(None).unwrap()).unwrap();
    other.synchronize().unwrap();
    pool.maintain();
    assert!(pool.stats().copies.in_flight >= 2, "{} in flight", pool.stats().copies.in_flight);
    drop(gate);
    poll_until_idle(&pool);
    // A call that the driver refuses once is tried again; after a second refusal it may stay refused.
    driver.fail("cuStreamIsCapturing", 1, Code::UNKNOWN);
    filled(&pool, 1).release_after(&stream).unwrap();
    poll_until_idle(&pool);
    driver.fail_from("cuStreamIsCapturing", 1, Code::UNKNOWN);
    assert!(filled(&pool, 1).release_after(&stream).unwrap_err().error().is_device_failed());
    assert_eq!((pool.stats().memory.quarantined, pool.stats().copies.in_flight), (1, 0));
}

#[test]
fn raw_memory_is_copied_on_a_raw_stream() {
    let (driver, context, pool) = start();
    let owner = context.new_stream().unwrap();
    let allocated = memory(&owner, 0);
    // SAFETY: the stream lives to the end of this test.
    let stream = unsafe { RawStream::new(owner.cu_stream().cast()) };
    // SAFETY: the memory lives as long, and no other code uses it meanwhile.
    let mut raw = unsafe { RawMemory::new(allocated.device_ptr(&owner).0, LEN) };
    // SAFETY: no context needs to be current, because the stream's own context is used.
    unsafe { result::ctx::set_current(ptr::null_mut()) }.unwrap();
    let gate = driver.hold(owner.cu_stream());
    let copy = filled(&pool, 5).copy_to(&stream, &mut raw).unwrap();
    assert!(!copy.is_complete().unwrap());
    pool.maintain();
    assert_eq!((pool.stats().copies.in_flight, pool.stats().memory.idle), (1, 0));
    drop(gate);
    let back = filled(&pool, 0).copy_from(&stream, &raw).unwrap().wait().unwrap();
    assert_eq!(first_wrong(back.wait_slice().unwrap(), 5), None);
    assert_eq!(result::ctx::get_current().unwrap(), None);
    context.bind_to_thread().unwrap();
    begin_capture(&owner, CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL);
    assert!(filled(&pool, 6).copy_to(&stream, &mut raw).unwrap_err().to_string().contains("capturing a graph"));
    end_capture(&owner).unwrap();
    pool.maintain();
    assert_eq!((pool.stats().copies.in_flight, pool.stats().memory.quarantined), (0, 0), "nothing was enqueued");
    driver.fail("cuMemcpyHtoDAsync_v2", 1, Code(9999));
    // A code that no header lists.
    assert!(filled(&pool, 6).copy_to(&stream, &mut raw).unwrap_err().error().is_device_failed());
}

#[test]
fn a_timeline_reports_completion_correctly_when_it_wraps() {
    let (driver, context, pool) = start();
    let stream = context.new_stream().unwrap();
    let mut target = memory(&stream, 0);
    let records = driver.calls("cuEventRecord");
    // The timeline values of a new stream wrap after 64 copies.
    for round in 0..40 {
        let gate = driver.hold(stream.cu_stream());
        let copies: Vec<_> = (0..5).map(|byte| filled(&pool, byte).copy_to(&stream, &mut target).unwrap()).collect();
        for (done, copy) in copies.iter().enumerate() {
            assert!(!copy.is_complete().unwrap(), "round {round}, copy {done}");
        }
        assert!(pool.try_get(LEN).unwrap().is_none());
        drop(gate);
        copies.iter().rev().for_each(|copy| copy.wait().unwrap());
        assert!(copies.iter().all(|copy| copy.is_complete().unwrap()), "round {round}");
        assert_eq!(first_wrong(&stream.clone_dtoh(&target).unwrap(), 4), None);
        pool.maintain();
        assert_eq!(pool.stats().memory.idle, 5);
    }
    assert_eq!(driver.calls("cuStreamWriteValue32_v2"), 200);
    // Events of the target, one per copy and one per check, and no fence event.
    assert_eq!(driver.calls("cuEventRecord") - records, 240);
}

#[test]
fn timelines_work_on_streams_shared_by_threads() {
    let (driver, context, pool) = start();
    let streams: Vec<_> = (0..3).map(|_| context.new_stream().unwrap()).collect();
    thread::scope(|scope| {
        for lane in 0..6_u8 {
            let (pool, context, streams) = (&pool, &context, &streams);
            scope.spawn(move || {
                context.bind_to_thread().unwrap();
                let mut targets: Vec<_> = streams.iter().map(|stream| memory(stream, 0)).collect();
                for round in 0..60_u8 {
                    let byte = |index: u8| lane ^ round.wrapping_mul(5) ^ index.wrapping_mul(63);
                    for ((index, stream), target) in (0..).zip(streams).zip(&mut targets) {
                        filled(pool, byte(index)).copy_to(stream, target).unwrap();
                    }
                    for ((index, stream), target) in (0..).zip(streams).zip(&targets) {
                        let back = pool.get(LEN).unwrap().copy_from(stream, target).unwrap().wait().unwrap();
                        let wrong = first_wrong(back.wait_slice().unwrap(), byte(index));
                        assert_eq!(wrong, None, "first wrong byte, lane {lane}, round {round}, stream {index}");
                    }
                }
            });
        }
    });
    poll_until_idle(&pool);
    assert_eq!((pool.stats().requests.returned, pool.stats().memory.quarantined), (6 * 60 * 6, 0));
    assert_eq!(driver.calls("cuStreamWriteValue32_v2"), 6 * 60 * 6);
}

#[test]
fn a_timeline_word_is_reused_by_later_streams() {
    let (driver, context, pool) = start();
    let pages = driver.counts().host_allocations;
    let first = context.new_stream().unwrap().record_fence().unwrap();
    let first_id = first.stream_id();
    for round in 0..300 {
        let stream = context.new_stream().unwrap();
        let mut target = memory(&stream, 0);
        let copies: Vec<_> = (1..4).map(|byte| filled(&pool, byte).copy_to(&stream, &mut target).unwrap()).collect();
        assert_eq!(first_wrong(&stream.clone_dtoh(&target).unwrap(), 3), None, "round {round}");
        copies.iter().for_each(|copy| copy.wait().unwrap());
        pool.maintain();
    }
    assert!(driver.counts().host_allocations <= pages + 2 + 3, "words are reused");
    assert_eq!(first.stream_id(), first_id, "a fence of an earlier stream of the word");
}

#[test]
fn a_reused_stream_handle_does_not_complete_earlier_copies() {
    let (driver, context, pool) = start();
    let (owner, first) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    let mut targets = [memory(&owner, 0), memory(&owner, 0), memory(&owner, 0)];
    let old_gate = driver.hold(first.cu_stream());
    let old = filled(&pool, 1).copy_to(&first, &mut targets[0]).unwrap();
    let second = stream_in_place_of(&context, first);
    // The value of the new stream does not complete the old stream's copy.
    filled(&pool, 2).copy_to(&second, &mut targets[1]).unwrap().wait().unwrap();
    assert!(!old.is_complete().unwrap(), "completed by another stream");
    let new_gate = driver.hold(second.cu_stream());
    let new = filled(&pool, 3).copy_to(&second, &mut targets[2]).unwrap();
    drop(old_gate);
    old.wait().unwrap();
    // Nor does the last value of the old stream complete the new stream's copy.
    assert!(!new.is_complete().unwrap(), "completed by another stream");
    drop(new_gate);
    new.wait().unwrap();
    assert_eq!(driver.calls("cuStreamWriteValue32_v2"), 3, "all three on timelines");
    for (byte, target) in (1..).zip(&targets) {
        assert_eq!(first_wrong(&owner.clone_dtoh(target).unwrap(), byte), None);
    }
}

#[test]
fn a_reused_stream_handle_waits_for_work_of_the_destroyed_stream() {
    let (driver, context, pool) = start();
    let (owner, down) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    let (source, other, mut target) = (memory(&owner, 7), memory(&owner, 8), memory(&owner, 0));
    let mut buf = filled(&pool, 0);
    // The buffer is read, and then written, on the second stream.
    for (filling, expected) in [(&source, 7), (&other, 8)] {
        let down = context.new_stream().unwrap();
        let gate = driver.hold(down.cu_stream());
        down.memcpy_dtoh(filling, &mut buf).unwrap();
        let up = stream_in_place_of(&context, down);
        ends_only_after(&driver, gate, || up.memcpy_htod(&buf, &mut target).unwrap());
        assert_eq!(first_wrong(&up.clone_dtoh(&target).unwrap(), expected), None);
    }
    let gate = driver.hold(down.cu_stream());
    down.memcpy_htod(&buf, &mut target).unwrap();
    let again = stream_in_place_of(&context, down);
    ends_only_after(&driver, gate, || again.memcpy_dtoh(&source, &mut buf).unwrap());
    assert_eq!(first_wrong(&owner.clone_dtoh(&target).unwrap(), 8), None);
    assert_eq!(first_wrong(buf.wait_slice().unwrap(), 7), None);
}

#[test]
fn a_copy_that_would_join_a_capture_is_refused() {
    let (driver, context, pool) = start();
    let (origin, stream, other) =
        (context.new_stream().unwrap(), context.new_stream().unwrap(), context.new_stream().unwrap());
    // SAFETY: the bytes are never read.
    let [mut target, mut source] = [(); 2].map(|()| unsafe { origin.alloc::<u8>(LEN) }.unwrap());
    origin.synchronize().unwrap();
    captured(&origin, || {
        // The events of both belong to the graph from here on.
        origin.memset_zeros(&mut target).unwrap();
        origin.memset_zeros(&mut source).unwrap();
        let records = driver.calls("cuEventRecord");
        let refused = pinpool::Error::from(filled(&pool, 1).copy_to(&stream, &mut target).unwrap_err());
        assert!(refused.is_capturing_stream() && refused.to_string().contains("capturing"), "{refused}");
        let refused = pinpool::Error::from(filled(&pool, 1).copy_from(&other, &source).unwrap_err());
        assert!(refused.is_capturing_stream() && refused.to_string().contains("capturing"), "{refused}");
        assert_eq!(driver.calls("cuEventRecord"), records, "nothing was enqueued, so no event was recorded");
        assert_eq!((in_flight_and_quarantined(&pool), pool.stats().memory.idle), ((0, 0), 1));
        assert_eq!(driver.calls("cuMemcpyHtoDAsync_v2") + driver.calls("cuMemcpyDtoHAsync_v2"), 0);
        // cudarc's own copy is in the graph, so its buffer is never reused.
        stream.memcpy_htod(&filled(&pool, 2), &mut target).unwrap();
    });
    pool.maintain();
    assert_eq!((pool.stats().memory.quarantined, pool.stats().copies.in_flight), (1, 0));
    assert_eq!(driver.counts().invalidated_captures, 0);
}

#[test]
fn an_event_recorded_in_a_capture_is_refused() {
    let (driver, context, pool) = start();
    let (origin, stream) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    let (in_graph, event) = (context.new_event(None).unwrap(), context.new_event(None).unwrap());
    captured(&origin, || {
        in_graph.record(&origin).unwrap();
        let refused = pinpool::Error::from(filled(&pool, 1).release_after_event(&in_graph).unwrap_err());
        assert!(refused.is_capturing_stream() && refused.to_string().contains("the event is part of one"), "{refused}");
        // Later buffers are not affected.
        let gate = driver.hold(stream.cu_stream());
        event.record(&stream).unwrap();
        filled(&pool, 1).release_after_event(&event).unwrap();
        pool.maintain();
        assert_eq!((pool.stats().memory.quarantined, pool.stats().copies.in_flight), (1, 1));
        drop(gate);
        poll_until_idle(&pool);
    });
    assert_eq!((pool.stats().memory.quarantined, driver.counts().invalidated_captures), (1, 0));
}

#[test]
fn a_pending_event_delays_only_its_own_buffers() {
    let (driver, context, pool) = start();
    let (slow, fast) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    let events = [context.new_event(None).unwrap(), context.new_event(None).unwrap()];
    let gates = [driver.hold(slow.cu_stream()), driver.hold(fast.cu_stream())];
    for (stream, event) in [&slow, &fast].into_iter().zip(&events) {
        event.record(stream).unwrap();
        filled(&pool, 1).release_after_event(event).unwrap();
    }
    assert_eq!(pool.stats().copies.in_flight, 2);
    let [slow_gate, fast_gate] = gates;
    drop(fast_gate);
    maintain_until(&pool, |stats| stats.copies.in_flight < 2);
    assert_eq!((pool.stats().copies.in_flight, pool.stats().memory.idle), (1, 1));
    drop(slow_gate);
    poll_until_idle(&pool);
    for _ in 0..20 {
        let gate = driver.hold(slow.cu_stream());
        events[0].record(&slow).unwrap();
        filled(&pool, 1).release_after_event(&events[0]).unwrap();
        filled(&pool, 1).release_after_event(&events[1]).unwrap();
        drop(gate);
        poll_until_idle(&pool);
    }
}

/// The driver calls that `act` makes.
fn calls_of<R>(driver: &MockDriver, act: impl FnOnce() -> R) -> (R, Vec<(String, u64)>) {
    let before = driver.all_calls();
    let result = act();
    let of = |name: &str| before.iter().find(|(other, _)| other == name).map_or(0, |(_, count)| *count);
    let made = driver.all_calls().into_iter().map(|(name, count)| (name.clone(), count - of(&name)));
    (result, made.filter(|(_, count)| *count > 0).collect())
}

#[test]
fn copies_returns_hits_and_sweeps_make_few_driver_calls() {
    let (driver, context, _) = start();
    // No time passes, so no maintenance tick interferes.
    let pool =
        Pool::builder().without_env().backend(Backend::Vmm).unstable_clock(ManualClock::default()).build().unwrap();
    let stream = context.new_stream().unwrap();
    // SAFETY: there is only one stream.
    unsafe { context.disable_event_tracking() };
    // SAFETY: alive until the end of the test.
    let raw = unsafe { RawStream::new(stream.cu_stream().cast()) };
    let mut target = memory(&stream, 0);
    // Creates what is created only once.
    filled(&pool, 1).copy_to(&stream, &mut target).unwrap().wait().unwrap();
    filled(&pool, 1).release_after(&raw).unwrap();
    stream.synchronize().unwrap();
    poll_until_idle(&pool);
    let gate = driver.hold(stream.cu_stream());
    let bufs: Vec<_> = (0..64).map(|byte| filled(&pool, byte)).collect();
    let is_own = |name: &str| !["cuMemcpyHtoDAsync_v2", "cuStreamWriteValue32_v2"].contains(&name);
    let own =
        |calls: &[(String, u64)]| calls.iter().filter(|(name, _)| is_own(name)).map(|(_, count)| count).sum::<u64>();
    for (nth, buf) in bufs.into_iter().enumerate() {
        if nth % 2 == 0 {
            let (copied, calls) = calls_of(&driver, || buf.copy_to(&stream, &mut target));
            drop(copied.unwrap());
            assert!(own(&calls) <= 4, "{calls:?}");
        } else {
            let (put, calls) = calls_of(&driver, || buf.release_after(&raw));
            put.unwrap();
            assert!(own(&calls) <= 2, "{calls:?}");
        }
    }
    assert_eq!(pool.stats().copies.in_flight, 64);
    drop(gate);
    stream.synchronize().unwrap();
    let (buf, calls) = calls_of(&driver, || pool.get(LEN).unwrap());
    assert_eq!((calls, pool.stats().copies.in_flight), (Vec::new(), 0), "a sweep of 64 copies that are over");
    let (_, calls) = calls_of(&driver, || (drop(buf), drop(pool.get(LEN).unwrap())));
    assert_eq!(calls, Vec::new(), "a return and a hit");
}
