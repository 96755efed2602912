//! Work of other code that is known only by the handle of its stream or event.
#![allow(unsafe_code)] // Passes handles.

use std::ptr;
use std::sync::Arc;
use std::thread;

use cudarc::driver::sys::{self, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, CudaStream, DevicePtr, result};
use mock_driver::{Code, Deviation, MockDriver};
use pinpool::copy::CopyStream;
use pinpool::copy::cuda::{RawMemory, RawStream};
use pinpool::{Error, PinnedBuf, Pool};

use crate::fixture::{begin_capture, end_capture, start, stream_and_memory, tensorflow};

const LEN: usize = 64 << 10;

type Record<'a> = &'a dyn Fn(&mut PinnedBuf) -> pinpool::Result<()>;

fn record_handle(buf: &mut PinnedBuf, stream: &Arc<CudaStream>) -> pinpool::Result<()> {
    // SAFETY: the stream is alive.
    unsafe { buf.unstable_record_stream(stream.cu_stream().cast()) }
}

fn current() -> Option<cudarc::driver::sys::CUcontext> {
    result::ctx::get_current().unwrap()
}

/// A copy of `buf` that the pool does not see.
fn untracked(stream: &Arc<CudaStream>, buf: &PinnedBuf, memory: &mut cudarc::driver::CudaSlice<u8>) {
    // SAFETY: the callers keep the buffer, unchanged, until the work of the stream has completed.
    stream.memcpy_htod(unsafe { buf.wait_slice_untracked() }.unwrap(), memory).unwrap();
}

/// Drops `buf` while its work is held, and checks that the buffer is reused only after the work has completed.
fn returns_only_after(pool: &Pool, buf: PinnedBuf, gate: mock_driver::HeldStream<'_>) {
    let id = buf.unstable_id();
    drop(buf);
    pool.maintain();
    assert_eq!((pool.stats().copies.in_flight, pool.stats().memory.idle), (1, 0));
    assert!(pool.try_get(LEN).unwrap().is_none());
    drop(gate);
    result::ctx::synchronize().unwrap();
    pool.maintain();
    assert_eq!((pool.stats().copies.in_flight, pool.stats().memory.quarantined), (0, 0));
    assert_eq!(pool.try_get(LEN).unwrap().and_then(|back| back.unstable_id()), id);
}

#[test]
fn a_buffer_is_reused_after_the_work_of_a_stream_or_event() {
    let (driver, context, pool) = start();
    let ((stream, mut memory), event) = (stream_and_memory(&context, LEN), context.new_event(None).unwrap());
    let by_handle: Record<'_> = &|buf| record_handle(buf, &stream);
    for record in [by_handle, &|buf| buf.record_stream(&stream), &|buf| buf.record_event(&event)] {
        let mut buf = pool.get(LEN).unwrap();
        let gate = driver.hold(stream.cu_stream());
        untracked(&stream, &buf, &mut memory);
        event.record(&stream).unwrap();
        // The thread's current context stays unchanged, even if there is none.
        for own in [Some(context.cu_ctx()), None] {
            // SAFETY: the context is alive.
            unsafe { result::ctx::set_current(own.unwrap_or(ptr::null_mut())) }.unwrap();
            record(&mut buf).unwrap();
            assert_eq!(current(), own);
        }
        context.bind_to_thread().unwrap();
        returns_only_after(&pool, buf, gate);
    }
}

#[test]
fn null_is_the_default_stream_and_green_streams_are_accepted() {
    let is_default: fn(&MockDriver, &Arc<CudaContext>) -> Arc<CudaStream> = |_, context| context.default_stream();
    let is_green: fn(&MockDriver, &Arc<CudaContext>) -> Arc<CudaStream> = |driver, context| {
        driver.set_deviations(&[Deviation::GreenStreams]);
        context.new_stream().unwrap()
    };
    for stream_of in [is_default, is_green] {
        let (driver, context, pool) = start();
        let mut memory = stream_and_memory(&context, LEN).1;
        let (stream, mut buf) = (stream_of(&driver, &context), pool.get(LEN).unwrap());
        let gate = driver.hold(stream.cu_stream());
        untracked(&stream, &buf, &mut memory);
        record_handle(&mut buf, &stream).unwrap();
        returns_only_after(&pool, buf, gate);
    }
}

#[test]
fn a_buffer_is_reused_after_the_work_of_an_event_handle() {
    let (driver, context, pool) = start();
    let (stream, mut memory) = stream_and_memory(&context, LEN);
    let mut buf = pool.get(LEN).unwrap();
    let gate = driver.hold(stream.cu_stream());
    untracked(&stream, &buf, &mut memory);
    let event = context.new_event(None).unwrap();
    // SAFETY: none is allowed.
    unsafe { result::ctx::set_current(ptr::null_mut()) }.unwrap();
    // SAFETY: the event is alive. It was never recorded, so it represents no work. Finding this out needs no
    // context.
    unsafe { buf.unstable_record_event(event.cu_event().cast()) }.unwrap();
    context.bind_to_thread().unwrap();
    assert!(buf.try_slice_mut().unwrap().is_some(), "nothing is recorded");
    event.record(&stream).unwrap();
    // SAFETY: as above.
    unsafe { buf.unstable_record_event(event.cu_event().cast()) }.unwrap();
    assert!(buf.try_slice_mut().unwrap().is_none());
    drop(event);
    returns_only_after(&pool, buf, gate);
}

#[test]
fn memory_is_quarantined_if_its_fence_is_refused() {
    let (driver, context, pool) = start();
    let (stream, _memory) = stream_and_memory(&context, LEN);
    // SAFETY: the mock driver checks handles before it uses them.
    let unknown: Record<'_> = &|buf| unsafe { buf.unstable_record_stream(ptr::without_provenance_mut(0x1234_5670)) };
    let without_context: Record<'_> = &|buf| {
        // SAFETY: none is allowed.
        unsafe { result::ctx::set_current(ptr::null_mut()) }.unwrap();
        // SAFETY: refused.
        let refused = unsafe { buf.unstable_record_event(ptr::dangling_mut()) };
        context.bind_to_thread().unwrap();
        refused
    };
    // SAFETY: refused.
    let no_event: Record<'_> = &|buf| unsafe { buf.unstable_record_event(ptr::null_mut()) };
    let capturing: Record<'_> = &|buf| {
        begin_capture(&stream, CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL);
        let refused = record_handle(buf, &stream);
        end_capture(&stream).unwrap();
        refused
    };
    let of_device: Record<'_> = &|buf| {
        // The pool asks again after a refusal.
        driver.fail_from("cuStreamIsCapturing", 1, Code::LAUNCH_FAILED);
        let refused = record_handle(buf, &stream);
        driver.reset_scripts();
        refused
    };
    let mut lost = Vec::new();
    for (record, words) in [
        (unknown, "cuStreamGetCtx failed"),
        (without_context, "cuEventQuery failed"),
        (no_event, "the event is null"),
        (capturing, "capturing a graph"),
        (of_device, "cuStreamIsCapturing failed"),
    ] {
        let mut buf = pool.get(LEN).unwrap();
        assert!(!lost.contains(&buf.as_ptr()), "{words}: memory that may be in use was handed out");
        lost.push(buf.as_ptr());
        let error = record(&mut buf).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
        // SAFETY: the default stream. Work on it is unrelated.
        unsafe { buf.unstable_record_stream(ptr::null_mut()) }.unwrap();
        assert!(buf.wait_slice_mut().unwrap_err().is_device_failed(), "{words}: who writes would overtake the work");
        drop(buf);
        pool.maintain();
        assert_eq!((pool.stats().memory.idle, pool.stats().memory.quarantined), (0, lost.len() as u64), "{words}");
    }
    assert_eq!(context.check_err(), Ok(()), "no error is left in the context");
    driver.reset();
}

#[test]
fn only_handle_errors_are_reported_as_invalid_handles() {
    let driver = MockDriver::load();
    driver.renew_contexts();
    let (context, pool) = (CudaContext::new(0).unwrap(), tensorflow().build().unwrap());
    let (stream, mut memory) = stream_and_memory(&context, LEN);
    let (copied, event) = (pool.get(LEN).unwrap(), context.new_event(None).unwrap());
    let _gate = driver.hold(stream.cu_stream());
    untracked(&stream, &copied, &mut memory);
    event.record(&stream).unwrap();
    let errors = |call, code| {
        let mut buf = pool.get(LEN).unwrap();
        driver.fail_from(call, 1, code);
        // SAFETY: a default stream.
        let of_stream = unsafe { buf.unstable_record_stream(ptr::null_mut()) };
        // SAFETY: a live event.
        let of_event = unsafe { buf.unstable_record_event(event.cu_event().cast()) };
        driver.reset_scripts();
        [of_stream, of_event].map(Result::err)
    };
    for (call, code, is_handle) in [
        ("cuDevicePrimaryCtxRetain", Code::OUT_OF_MEMORY, false),
        ("cuStreamGetCtx_v2", Code::LAUNCH_FAILED, false),
        ("cuStreamGetCtx_v2", Code::INVALID_HANDLE, true),
        ("cuStreamGetCtx_v2", Code::CONTEXT_IS_DESTROYED, true),
    ] {
        let kinds = |error: Option<Error>| error.map(|error| (error.is_invalid_handle(), error.is_device_failed()));
        assert_eq!(errors(call, code).map(kinds), [Some((is_handle, !is_handle)); 2], "{call}: {code:?}");
    }
    assert!(errors("cuEventQuery", Code::INVALID_HANDLE)[1].as_ref().unwrap().is_invalid_handle());
    // SAFETY: none is allowed.
    unsafe { result::ctx::set_current(ptr::null_mut()) }.unwrap();
    let [of_stream, of_event] = errors("no call", Code::UNKNOWN).map(Option::unwrap);
    assert!(of_stream.is_invalid_handle() && of_event.is_invalid_handle());
    assert!(of_event.to_string().contains("no CUDA context is current"));
    assert!(errors("cuEventQuery", Code::LAUNCH_FAILED)[1].as_ref().unwrap().is_device_failed());
}

#[test]
fn a_repeated_call_succeeds_only_for_the_same_default_stream() {
    let (driver, context, pool) = start();
    driver.set_device_count(2);
    let other = CudaContext::new(1).unwrap();
    let record = |buf: &mut PinnedBuf, handle: usize, context: &CudaContext| {
        context.bind_to_thread().unwrap();
        // SAFETY: default streams live as long as their contexts.
        unsafe { buf.unstable_record_stream(ptr::without_provenance_mut(handle)) }
    };
    for handle in [0, 1, 2] {
        let mut buf = pool.get(LEN).unwrap();
        driver.fail_from("cuStreamIsCapturing", 1, Code::UNKNOWN);
        assert!(record(&mut buf, handle, &context).unwrap_err().is_device_failed());
        driver.reset_scripts();
        record(&mut buf, handle, &other).unwrap();
        assert!(buf.wait_slice_mut().unwrap_err().is_device_failed(), "{handle}: a stream of another context");
        let on_other_thread = || record(&mut buf, handle, &context).map(|()| buf.wait_slice_mut().is_ok());
        let is_free = thread::scope(|scope| scope.spawn(on_other_thread).join().unwrap().unwrap());
        assert_eq!(is_free, handle < 2, "{handle}: each thread has another");
        record(&mut buf, handle, &context).unwrap();
        drop(buf);
        result::ctx::synchronize().unwrap();
        pool.maintain();
        assert_eq!((pool.stats().memory.idle, pool.stats().memory.quarantined), (1, 0), "{handle}");

        let mut buf = pool.get(LEN).unwrap();
        // SAFETY: none is allowed.
        unsafe { result::ctx::set_current(ptr::null_mut()) }.unwrap();
        // SAFETY: as above.
        let refused = unsafe { buf.unstable_record_stream(ptr::without_provenance_mut(handle)) }.unwrap_err();
        assert!(refused.is_invalid_handle(), "{handle}: no context is current");
        thread::scope(|scope| scope.spawn(|| record(&mut buf, handle, &context)).join().unwrap()).unwrap();
        assert!(buf.wait_slice_mut().unwrap_err().is_device_failed(), "{handle}: a thread may mean another stream");
        record(&mut buf, handle, &context).unwrap();
        assert!(buf.wait_slice_mut().is_ok(), "{handle}: repeated with the context current");
    }
}

#[test]
fn a_default_stream_during_a_capture_is_recorded_after_it() {
    let (driver, context, pool) = start();
    let default = context.default_stream();
    let mut captured = ptr::null_mut();
    // SAFETY: takes the result.
    unsafe { sys::cuStreamCreate(&raw mut captured, 0) }.result().unwrap();
    // SAFETY: alive until the end of the test.
    let captured = unsafe { context.wrap_borrowed_stream(captured) };
    let mut buf = pool.get(LEN).unwrap();
    begin_capture(&captured, CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL);
    // SAFETY: the default stream.
    let error = unsafe { buf.unstable_record_stream(ptr::null_mut()) }.unwrap_err();
    assert!(!error.is_capturing_stream() && error.to_string().contains("once that capture has ended"), "{error}");
    let released = pool.get(LEN).unwrap().release_after(&default).unwrap_err().into_buf().unwrap();
    drop(pool.get(LEN).unwrap().release_after(&default).unwrap_err());
    assert_eq!(pool.stats().memory.quarantined, 1, "a buffer that nobody takes out of the error");
    end_capture(&captured).unwrap();
    // SAFETY: as above.
    unsafe { buf.unstable_record_stream(ptr::null_mut()) }.unwrap();
    released.release_after(&default).unwrap();
    drop(buf);
    default.synchronize().unwrap();
    pool.maintain();
    let stats = pool.stats();
    assert_eq!((stats.memory.idle, stats.memory.quarantined, driver.counts().invalidated_captures), (2, 1, 0));
}

#[test]
fn a_default_stream_of_a_named_gpu_belongs_to_its_primary_context() {
    let (driver, context, _) = start();
    let stream = context.default_stream();
    let mut memory = stream.alloc_zeros::<u8>(LEN).unwrap();
    stream.synchronize().unwrap();
    let gate = driver.hold_all();
    stream.memset_zeros(&mut memory).unwrap();
    let other: sys::CUcontext = ptr::without_provenance_mut(driver.create_context(0));
    // SAFETY: the context is alive.
    unsafe { result::ctx::set_current(other) }.unwrap();
    // SAFETY: default streams live as long as their contexts.
    let fence = unsafe { RawStream::new(ptr::null_mut()) }.on_device(0).record_fence().unwrap();
    assert!(!fence.is_complete().unwrap(), "work of the primary context");
    assert_eq!(current(), Some(other));
    // SAFETY: as above.
    let without_context = unsafe { RawStream::new(ptr::null_mut()) }.or_on_device(0);
    assert_ne!(without_context.record_fence().unwrap().stream_id(), fence.stream_id(), "of the current context");
    driver.fail_from("cuStreamGetCtx_v2", 1, Code::OUT_OF_MEMORY);
    assert!(without_context.record_fence().unwrap_err().is_device_failed(), "no fence on another context's stream");
    driver.reset_scripts();
    // SAFETY: none is allowed.
    unsafe { result::ctx::set_current(ptr::null_mut()) }.unwrap();
    assert_eq!(without_context.record_fence().unwrap().stream_id(), fence.stream_id());
    context.bind_to_thread().unwrap();
    assert_eq!(fence.stream_id(), stream.record_fence().unwrap().stream_id());
    drop(gate);
    fence.wait().unwrap();
    driver.renew_contexts();
}

#[test]
fn a_default_stream_belongs_to_the_named_gpu() {
    let driver = MockDriver::load();
    driver.set_device_count(2);
    let contexts = [0, 1].map(|ordinal| CudaContext::new(ordinal).unwrap());
    // The default stream of the second GPU waits for the work of this one.
    let (mut blocking, mut memory) = (ptr::null_mut(), contexts[1].default_stream().alloc_zeros::<u8>(LEN).unwrap());
    contexts[1].bind_to_thread().unwrap();
    // SAFETY: takes the result.
    unsafe { sys::cuStreamCreate(&raw mut blocking, 0) }.result().unwrap();
    let gate = driver.hold(blocking);
    // SAFETY: alive until the end of the test.
    let blocking = unsafe { contexts[1].wrap_borrowed_stream(blocking) };
    blocking.memcpy_htod(&[7; LEN], &mut memory).unwrap();
    contexts[0].bind_to_thread().unwrap();
    let pool = tensorflow().build().unwrap();
    // SAFETY: default streams live as long as their contexts.
    let current = unsafe { RawStream::new(ptr::null_mut()) };
    let named = current.on_device(1);
    current.record_fence().unwrap().wait().unwrap();
    let fence = named.record_fence().unwrap();
    assert!(!fence.is_complete().unwrap(), "work of the other GPU");
    assert_eq!(self::current().map(|context| context.addr()), Some(contexts[0].cu_ctx().addr()));
    pool.get(LEN).unwrap().release_after(&named).unwrap();
    assert_eq!(pool.stats().copies.in_flight, 1);
    drop(gate);
    fence.wait().unwrap();
    assert!(!named.is_capturing());
    let stream = contexts[1].new_stream().unwrap();
    // SAFETY: alive.
    let raw = unsafe { RawStream::new(stream.cu_stream().cast()) };
    begin_capture(&stream, CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL);
    assert!(std::thread::scope(|scope| scope.spawn(|| raw.is_capturing()).join().unwrap()), "any thread may use it");
    assert!(raw.record_fence().unwrap_err().to_string().contains("capturing a graph"));
    end_capture(&stream).unwrap();
    assert!(!std::thread::spawn(move || raw.is_capturing()).join().unwrap());
}

#[test]
fn the_default_stream_of_a_green_context_is_refused() {
    let (driver, context, pool) = start();
    let memory = context.default_stream().alloc_zeros::<u8>(LEN).unwrap();
    driver.set_deviations(&[Deviation::GreenStreams]);
    // SAFETY: a default stream lives as long as its context.
    let default = unsafe { RawStream::new(ptr::null_mut()) };
    let (address, _record) = memory.device_ptr(memory.stream());
    // SAFETY: the memory lives until the end of the test.
    let mut target = unsafe { RawMemory::new(address, LEN) };
    let error = pool.get(LEN).unwrap().copy_to(&default, &mut target).unwrap_err();
    assert!(error.to_string().contains("green context"), "{error}");
    let buf = error.into_buf().expect("nothing was enqueued");
    // The primary context has another default stream: an event there would not cover this work.
    let error = buf.release_after(&default).unwrap_err();
    assert!(error.error().is_device_failed() && error.to_string().contains("green context"), "{error}");
    let mut buf = error.into_buf().expect("for another attempt");
    // SAFETY: as above.
    assert!(unsafe { buf.unstable_record_stream(ptr::null_mut()) }.unwrap_err().is_device_failed());
    // Given as torch does: on the primary context's stream, the fence would complete immediately.
    assert!(default.on_device(0).record_fence().unwrap_err().is_device_failed());
    drop(buf);
    pool.maintain();
    assert_eq!((pool.stats().memory.quarantined, pool.stats().memory.idle), (1, 0), "it is not known what uses it");
}
