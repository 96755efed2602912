//! Copies through cudarc over the mock driver. Its gates decide which copies are complete.
#![allow(unsafe_code)] // Acquires memory by hand, and captures, for which cudarc has no safe API.

use std::sync::Arc;

use cudarc::driver::sys::{CUresult, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DriverError};
use mock_driver::{Code, Deviation, MockDriver};
use pinpool::{Backend, Completion, Pool};

use crate::child::alone;
use crate::driver_facts;
use crate::events_only::EventsOnly;
use crate::fixture::{
    MIB, begin_capture, end_capture, filled, in_flight_and_quarantined, maintain_until, panic_of, start,
    stream_and_memory,
};
use crate::until::{threads_named, until};
use crate::valid_stats::valid_stats;

#[test]
fn every_fact_about_the_driver_holds_on_the_mock_driver() {
    let (driver, context, _pool) = start();
    driver_facts::check(&context);
    // One of the facts frees and unregisters memory that does not belong to the driver.
    assert_eq!(driver.wrong_uses().len(), 2, "{:?}", driver.wrong_uses());
    driver.reset();
}

#[test]
fn the_facts_hold_for_drivers_that_deviate_from_the_manual() {
    alone(|| {
        let driver = MockDriver::load();
        driver.set_deviations(&[Deviation::SmallCopies, Deviation::OtherCodes]);
        driver_facts::check(&CudaContext::new(0).unwrap());
        driver.reset();
    });
}

#[test]
fn copies_work_on_every_kind_of_stream_and_target() {
    let (_driver, context, pool) = start();
    let (own, mut memory) = stream_and_memory(&context, 4096);
    for stream in [own, context.default_stream(), context.per_thread_stream()] {
        filled(&pool, 4096, 1).copy_to(&*stream, &mut memory).unwrap();
        let (mut left, mut right) = memory.split_at_mut(1024);
        filled(&pool, 1024, 2).copy_to(&stream, &mut left).unwrap();
        let mut buf = filled(&pool, 4096, 3);
        buf.copy_range_to(1024..2048, &stream, &mut right).unwrap();
        drop(buf);
        assert_eq!(stream.clone_dtoh(&memory).unwrap(), [vec![2; 1024], vec![3; 1024], vec![1; 2048]].concat());
    }
    let error = pool.get(4097).unwrap().copy_to(&context.default_stream(), &mut memory).unwrap_err();
    assert!(error.error().is_copy_refused() && error.to_string().contains("4096"), "{error}");
    let pageable = Pool::builder().without_env().backend(Backend::Heap).build().unwrap();
    filled(&pageable, 4096, 4).copy_to(&context.default_stream(), &mut memory).unwrap().wait().unwrap();
    assert_eq!(context.default_stream().clone_dtoh(&memory).unwrap(), vec![4; 4096]);
}

#[test]
fn a_copy_on_a_capturing_stream_is_refused_and_the_capture_survives() {
    let (driver, context, pool) = start();
    let (stream, mut memory) = stream_and_memory(&context, 4096);
    let buf = filled(&pool, 4096, 1);
    begin_capture(&stream, CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    let error = pinpool::Error::from(buf.copy_to(&stream, &mut memory).unwrap_err());
    assert!(error.is_capturing_stream() && error.to_string().contains("before the capture begins"), "{error}");
    assert_eq!(pool.stats().memory.idle, 1, "the buffer is put back");
    assert_eq!(end_capture(&stream), Ok(()));
    assert_eq!(driver.counts().invalidated_captures, 0);
}

#[test]
fn a_copy_waits_for_its_target_despite_a_stored_error() {
    let (driver, context, pool) = start();
    let ((writer, mut memory), (stream, _unused)) = (stream_and_memory(&context, 4096), stream_and_memory(&context, 1));
    let gate = driver.hold(writer.cu_stream());
    writer.memset_zeros(&mut memory).unwrap();
    context.record_err::<()>(Err(DriverError(CUresult::CUDA_ERROR_ILLEGAL_STATE)));
    let copy = filled(&pool, 4096, 1).copy_to(&stream, &mut memory).unwrap();
    assert!(!copy.is_complete().unwrap(), "the copy overtook work on its target");
    drop(gate);
    copy.wait().unwrap();
    assert!(context.check_err().is_err());
    assert_eq!(stream.clone_dtoh(&memory).unwrap(), vec![1; 4096]);
}

/// Neither the host nor a second copy may write to bytes that the first copy may still read.
#[test]
fn writes_fail_if_the_wait_for_an_earlier_copy_is_refused() {
    let (driver, context, pool) = start();
    let _events = EventsOnly::begin();
    let ((stream, mut memory), (other, source)) =
        (stream_and_memory(&context, 4096), stream_and_memory(&context, 4096));
    let mut buf = filled(&pool, 4096, 1);
    let gate = driver.hold(stream.cu_stream());
    buf.copy_range_to(0..4096, &stream, &mut memory).unwrap();
    assert_eq!(*buf.wait_slice().unwrap(), [1; 4096], "a read does not wait");
    let refused = || driver.fail("cuEventSynchronize", 1, Code::OUT_OF_MEMORY);
    refused();
    assert!(buf.wait().unwrap_err().is_device_failed());
    refused();
    assert!(buf.wait_slice_mut().unwrap_err().is_device_failed());
    refused();
    let panic = panic_of(|| other.memcpy_dtoh(&source, &mut buf).unwrap());
    let why = "cannot track this copy of cudarc: device failure: cuEventSynchronize failed";
    assert!(panic.starts_with(why), "{panic}");
    refused();
    assert!(buf.copy_from(&other, &source).unwrap_err().error().is_device_failed());
    assert_eq!(pool.stats().copies.in_flight, 1);
    drop(gate);
    assert_eq!(stream.clone_dtoh(&memory).unwrap(), [1; 4096]);
    pool.maintain();
    assert_eq!((pool.stats().memory.idle, in_flight_and_quarantined(&pool)), (1, (0, 0)));
}

#[test]
fn a_failed_copy_returns_its_buffer_only_if_nothing_was_enqueued() {
    for (name, code) in ["cuCtxGetCurrent", "cuStreamIsCapturing", "cuStreamWaitEvent"]
        .map(|name| (name, Code::UNKNOWN))
        .into_iter()
        .chain([("cuMemcpyHtoDAsync_v2", Code::INVALID_VALUE), ("cuMemcpyHtoDAsync_v2", Code::LAUNCH_FAILED)])
    {
        let (driver, context, pool) = start();
        let (stream, mut memory) = stream_and_memory(&context, 4096);
        let buf = filled(&pool, 4096, 1);
        driver.fail(name, 1, code);
        let error = pinpool::Error::from(buf.copy_to(&stream, &mut memory).unwrap_err());
        let is_of_device = matches!(code, Code::LAUNCH_FAILED | Code::UNKNOWN);
        assert_eq!((error.is_device_failed(), error.is_copy_refused()), (is_of_device, !is_of_device), "{error}");
        assert_eq!(error.code(), Some(code.0.into()), "{name}: {error}");
        // The copy may be running, so the buffer waits for a fence that was recorded after it despite the error.
        let may_run = code == Code::LAUNCH_FAILED;
        let stats = pool.stats();
        let [waiting, idle] = [may_run, !may_run].map(u64::from);
        assert_eq!((stats.copies.in_flight, stats.memory.idle, stats.memory.quarantined), (waiting, idle, 0), "{name}");
        stream.synchronize().unwrap();
        pool.maintain();
        assert_eq!((pool.stats().memory.idle, pool.stats().memory.quarantined), (1, 0), "{name}");
        context.check_err().unwrap();
    }
}

/// A copy for which the driver refuses both kinds of fence: the timeline value and the event.
fn copy_without_a_fence(
    driver: &MockDriver,
    pool: &Pool,
    stream: &Arc<CudaStream>,
    memory: &mut CudaSlice<u8>,
) -> Completion {
    driver.fail("cuStreamWriteValue32_v2", 1, Code::UNKNOWN);
    // cudarc records the first event, for the target.
    driver.fail("cuEventRecord", 2, Code::OUT_OF_MEMORY);
    filled(pool, 4096, 1).copy_to(stream, memory).unwrap()
}

#[test]
fn a_copy_without_a_fence_is_quarantined_until_the_device_answers() {
    let (driver, context, pool) = start();
    let (stream, mut memory) = stream_and_memory(&context, 4096);
    let (other, mut others) = stream_and_memory(&context, 4096);
    filled(&pool, 4096, 2).copy_to(&stream, &mut memory).unwrap().wait().unwrap();
    let gate = driver.hold(stream.cu_stream());
    let copy = copy_without_a_fence(&driver, &pool, &stream, &mut memory);
    assert!(copy.is_complete().unwrap_err().is_device_failed());
    let later = filled(&pool, 4096, 3).copy_to(&stream, &mut memory).unwrap();
    filled(&pool, 4096, 4).copy_to(&other, &mut others).unwrap().wait().unwrap();
    pool.maintain();
    assert_eq!(in_flight_and_quarantined(&pool), (1, 1), "it holds up no other stream");
    assert!(pool.stats().memory.quarantined_bytes >= 4096);
    drop(gate);
    later.wait().unwrap();
    maintain_until(&pool, |stats| stats.memory.quarantined == 0);
    pool.maintain();
    let stats = valid_stats(&pool);
    assert_eq!((stats.copies.in_flight, stats.memory.quarantined_bytes), (0, 0));
}

#[test]
fn a_copy_without_a_fence_is_waited_for_once_during_a_capture() {
    let (driver, context, pool) = start();
    let (stream, mut memory) = stream_and_memory(&context, 4096);
    let (captured, _unused) = stream_and_memory(&context, 1);
    until("no thread of an earlier test is left, which could make the call", || threads_named("pinpool-wait") == 0);
    let before = driver.calls("cuCtxSynchronize");
    let gate = driver.hold(stream.cu_stream());
    begin_capture(&captured, CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED);
    let copy = copy_without_a_fence(&driver, &pool, &stream, &mut memory);
    maintain_until(&pool, |_| driver.calls("cuCtxSynchronize") > before && threads_named("pinpool-wait") == 0);
    for _ in 0..3 {
        assert!(copy.wait().unwrap_err().is_device_failed());
        pool.maintain();
        assert_eq!((driver.calls("cuCtxSynchronize"), pool.stats().memory.quarantined), (before + 1, 1));
    }
    end_capture(&captured).unwrap_err();
    drop(gate);
    driver.reset();
}

#[test]
fn after_a_failed_query_the_buffer_is_never_reused() {
    let (driver, context, pool) = start();
    let (stream, mut memory) = stream_and_memory(&context, 4096);
    let _gate = driver.hold(stream.cu_stream());
    let copy = filled(&pool, 4096, 1).copy_to(&stream, &mut memory).unwrap();
    pool.maintain();
    assert_eq!(in_flight_and_quarantined(&pool), (1, 0), "not ready is not an error");
    driver.lose_device(Code::LAUNCH_FAILED);
    let error = copy.wait().unwrap_err();
    assert!(error.is_device_failed() && error.to_string().contains("LAUNCH_FAILED"), "{error}");
    assert_eq!(copy.wait().unwrap_err().code(), Some(Code::LAUNCH_FAILED.0.into()));
    maintain_until(&pool, |stats| stats.memory.quarantined > 0);
    let stats = pool.stats();
    assert_eq!((stats.copies.in_flight, stats.memory.quarantined, stats.memory.idle), (0, 1, 0));
    assert!(pool.try_get(4096).unwrap().is_none());
}

#[test]
fn no_memory_is_freed_on_a_lost_device_or_at_process_exit() {
    let harms: [fn(&MockDriver); 2] = [|driver| driver.lose_device(Code::UNKNOWN), MockDriver::shut_down];
    for harm in harms {
        let (driver, context, pool) = start();
        let (stream, mut memory) = stream_and_memory(&context, MIB);
        let _gate = driver.hold(stream.cu_stream());
        filled(&pool, MIB, 9).copy_to(&stream, &mut memory).unwrap();
        let pinned = driver.counts().pinned_bytes;
        harm(&driver);
        // This would take thirty seconds if it waited.
        drop(pool);
        assert_eq!(driver.counts().pinned_bytes, pinned);
        driver.reset();
    }
}
