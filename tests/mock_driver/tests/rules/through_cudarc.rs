//! Uses the mock driver as a program does: through unmodified cudarc.
//!
//! No test reads a clock: gates decide which work is complete.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::thread;

use cudarc::driver::sys::{self, CUresult};
use cudarc::driver::{CudaContext, CudaStream, DevicePtr, DriverError, result};
use mock_driver::{Code, MockDriver};

const MIB: usize = 1 << 20;

/// Pinned memory of the driver, freed on drop.
struct Pinned {
    address: *mut u8,
    len: usize,
}

impl Pinned {
    fn new(len: usize) -> Self {
        // SAFETY: the result is used within its length and freed once, below.
        let address = unsafe { result::malloc_host(len, sys::CU_MEMHOSTALLOC_PORTABLE) }.unwrap().cast();
        Self { address, len }
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the mock driver has written this many bytes.
        unsafe { std::slice::from_raw_parts_mut(self.address, self.len) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: came from `malloc_host`. A test that broke the device may fail to free it.
        let _leaked = unsafe { result::free_host(self.address.cast::<c_void>()) };
    }
}

fn start() -> (MockDriver, Arc<CudaContext>) {
    let driver = MockDriver::load();
    (driver, CudaContext::new(0).unwrap())
}

fn code(result: Result<impl Sized, DriverError>) -> i32 {
    result.err().map_or(0, |error| error.0 as i32)
}

fn raw(result: CUresult) -> i32 {
    result as i32
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|index| (index * 7 + index / 251) as u8).collect()
}

#[test]
fn data_goes_to_the_device_and_comes_back() {
    let (driver, ctx) = start();
    let before = driver.counts();
    let stream = ctx.new_stream().unwrap();
    let sent = pattern(3 * MIB + 17);
    let on_device = stream.clone_htod(&sent).unwrap();
    assert_eq!(stream.clone_dtoh(&on_device).unwrap(), sent);
    let zeros = ctx.default_stream().alloc_zeros::<u8>(1000).unwrap();
    assert_eq!(ctx.default_stream().clone_dtoh(&zeros).unwrap(), vec![0; 1000]);
    assert!(driver.calls("cuMemcpyHtoDAsync_v2") == 1 && driver.calls("cuMemAllocAsync") == 2);
    drop((on_device, zeros));
    ctx.synchronize().unwrap();
    assert_eq!(driver.counts().device_allocations, before.device_allocations);
    assert_eq!(driver.wrong_uses(), Vec::<String>::new());
}

#[test]
fn the_device_describes_itself() {
    let (driver, ctx) = start();
    assert_eq!(ctx.name().unwrap(), "mock driver");
    assert_eq!(ctx.compute_capability().unwrap(), (9, 0));
    let numa = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID;
    driver.set_attribute(134, 1);
    assert_eq!(ctx.attribute(numa).unwrap(), 1);
    let mut id = [0; 20];
    // SAFETY: space for twenty bytes.
    assert_eq!(raw(unsafe { sys::cuDeviceGetPCIBusId(id.as_mut_ptr(), 20, 0) }), 0);
    let text: String = id.iter().take_while(|&&byte| byte != 0).map(|&byte| byte as u8 as char).collect();
    assert_eq!(text, "0000:D0:00.0");
}

#[test]
fn a_copy_completes_later_and_no_later_than_its_event() {
    let (driver, ctx) = start();
    let stream = ctx.new_stream().unwrap();
    let mut device = stream.alloc_zeros::<u8>(MIB).unwrap();
    let mut host = Pinned::new(MIB);
    host.bytes().fill(1);
    ctx.synchronize().unwrap();
    let gate = driver.hold(stream.cu_stream());
    stream.memcpy_htod(host.bytes(), &mut device).unwrap();
    let event = stream.record_event(None).unwrap();
    assert!(!event.try_is_complete().unwrap());
    assert!(driver.counts().work_in_flight >= 2);
    // The copy reads its source when it runs, so reusing the buffer now corrupts the batch.
    host.bytes().fill(2);
    drop(gate);
    event.synchronize().unwrap();
    assert!(event.try_is_complete().unwrap());
    assert_eq!(stream.clone_dtoh(&device).unwrap(), vec![2; MIB]);
}

#[test]
fn pageable_sources_are_read_at_once_and_pageable_targets_waited_for() {
    let (driver, ctx) = start();
    let stream = ctx.new_stream().unwrap();
    let mut device = stream.alloc_zeros::<u8>(1000).unwrap();
    ctx.synchronize().unwrap();
    let gate = driver.hold(stream.cu_stream());
    let mut source = vec![5_u8; 1000];
    stream.memcpy_htod(&source, &mut device).unwrap();
    source.fill(6);
    let target = thread::scope(|scope| {
        let reader = scope.spawn(|| stream.clone_dtoh(&device).unwrap());
        while driver.calls("cuMemcpyDtoHAsync_v2") == 0 {
            thread::yield_now();
        }
        drop(gate);
        reader.join().unwrap()
    });
    assert_eq!(target, vec![5; 1000]);
}

#[test]
fn fresh_pinned_memory_is_garbage_and_small_blocks_are_not_aligned() {
    let (driver, _ctx) = start();
    let mut small = Pinned::new(4096);
    assert!(!small.address.addr().is_multiple_of(4096));
    assert!(small.bytes().iter().all(|&byte| byte == 0xA5));
    assert_eq!(Pinned::new(MIB).address.addr() % 4096, 0);
    let before = driver.counts();
    let block = Pinned::new(MIB);
    assert_eq!(driver.counts().pinned_bytes, before.pinned_bytes + MIB as u64);
    drop(block);
    assert_eq!(driver.counts().pinned_bytes, before.pinned_bytes);
    driver.limit_pinned(before.pinned_bytes + MIB as u64);
    // SAFETY: refused, so there is nothing to free.
    assert_eq!(code(unsafe { result::malloc_host(MIB + 1, 0) }), Code::OUT_OF_MEMORY.0);
    assert_eq!(driver.counts().pinned_bytes, before.pinned_bytes);
}

#[test]
fn a_free_waits_for_all_work_and_blocks_all_enqueues() {
    let (driver, ctx) = start();
    let stream = ctx.new_stream().unwrap();
    let beside = ctx.new_stream().unwrap();
    let block = Pinned::new(MIB);
    assert_eq!(driver.counts().frees_with_work_in_flight, 0);
    let gate = driver.hold(stream.cu_stream());
    let event = stream.record_event(None).unwrap();
    let order = AtomicUsize::new(0);
    thread::scope(|scope| {
        let context = &ctx;
        let address = block.address.addr();
        let free = scope.spawn(move || {
            context.bind_to_thread().unwrap();
            // SAFETY: the block is forgotten below.
            code(unsafe { result::free_host(std::ptr::with_exposed_provenance_mut(address)) })
        });
        while driver.counts().frees_with_work_in_flight == 0 {
            thread::yield_now();
        }
        let enqueue = scope.spawn(|| {
            beside.record_event(None).unwrap();
            order.load(Ordering::Acquire)
        });
        // Queries do not take the lock; the concurrent enqueue waits for the free.
        while driver.calls("cuEventRecord") < 2 {
            thread::yield_now();
        }
        assert!(!event.try_is_complete().unwrap());
        order.store(1, Ordering::Release);
        drop(gate);
        assert_eq!(free.join().unwrap(), 0);
        assert_eq!(enqueue.join().unwrap(), 1);
    });
    std::mem::forget(block);
    assert_eq!(driver.counts().frees_with_work_in_flight, 1);
}

#[test]
fn a_stream_writes_a_value_behind_its_work() {
    let (driver, ctx) = start();
    let stream = ctx.new_stream().unwrap();
    let mut flag = Pinned::new(4096);
    flag.bytes().fill(0);
    // SAFETY: aligned, live, and from here on only read as an atomic.
    let seen = unsafe { AtomicU32::from_ptr(flag.address.cast()) };
    let gate = driver.hold(stream.cu_stream());
    // SAFETY: pinned and aligned.
    assert_eq!(raw(unsafe { sys::cuStreamWriteValue32_v2(stream.cu_stream(), flag.address as u64, 77, 0) }), 0);
    assert_eq!(seen.load(Ordering::Acquire), 0);
    drop(gate);
    stream.synchronize().unwrap();
    assert_eq!(seen.load(Ordering::Acquire), 77);
    let pageable = 0_u32;
    // SAFETY: refused, for a pageable address.
    let refused = unsafe { sys::cuStreamWriteValue32_v2(stream.cu_stream(), (&raw const pageable) as u64, 1, 0) };
    assert_eq!(raw(refused), Code::INVALID_VALUE.0);
}

#[test]
fn the_legacy_stream_is_ordered_with_blocking_streams_only() {
    let (driver, ctx) = start();
    let legacy = ctx.default_stream();
    let aloof = ctx.new_stream().unwrap();
    let blocking = result::stream::create(result::stream::StreamKind::Default).unwrap();
    // SAFETY: created above, destroyed below, after its last use.
    let blocking_stream = unsafe { ctx.wrap_borrowed_stream(blocking) };
    let gate = driver.hold(blocking);
    let held = blocking_stream.record_event(None).unwrap();
    let behind = legacy.record_event(None).unwrap();
    let free = aloof.record_event(None).unwrap();
    free.synchronize().unwrap();
    assert!(!held.is_complete() && !behind.is_complete());
    drop(gate);
    behind.synchronize().unwrap();
    assert!(held.is_complete());
    drop(blocking_stream);
    // SAFETY: destroyed once.
    unsafe { result::stream::destroy(blocking) }.unwrap();
}

#[test]
fn a_destroyed_stream_finishes_first_and_an_event_is_destroyed_without_a_wait() {
    let (driver, ctx) = start();
    // Without this stream cudarc would wait for the whole context before it creates another.
    let _beside = ctx.new_stream().unwrap();
    let before = driver.counts();
    let stream = ctx.new_stream().unwrap();
    let gate = driver.hold(stream.cu_stream());
    let (kept, dropped) = (stream.record_event(None).unwrap(), stream.record_event(None).unwrap());
    drop(dropped);
    let handle = stream.cu_stream();
    drop(stream);
    assert_eq!(driver.counts().streams, before.streams);
    // The next stream has the same handle and nothing else in common.
    let next = ctx.new_stream().unwrap();
    assert_eq!(next.cu_stream(), handle);
    next.record_event(None).unwrap().synchronize().unwrap();
    drop(next);
    assert!(!kept.is_complete());
    drop(gate);
    kept.synchronize().unwrap();
    drop(kept);
    assert_eq!(driver.counts().events, before.events);
    assert_eq!(driver.wrong_uses(), Vec::<String>::new());
}

#[test]
fn memory_freed_under_a_copy_is_a_fault_and_not_a_crash() {
    let (driver, ctx) = start();
    let (stream, other) = (ctx.new_stream().unwrap(), ctx.new_stream().unwrap());
    let mut device = stream.alloc_zeros::<u8>(1000).unwrap();
    let mut host = Pinned::new(1000);
    let address = device.device_ptr(&stream).0;
    ctx.synchronize().unwrap();
    let gate = driver.hold(stream.cu_stream());
    stream.memcpy_htod(host.bytes(), &mut device).unwrap();
    // SAFETY: wrong on purpose: freed on one stream while another still writes.
    unsafe { result::free_async(address, other.cu_stream()) }.unwrap();
    other.synchronize().unwrap();
    drop(gate);
    assert_eq!(code(stream.synchronize()), Code::ILLEGAL_ADDRESS.0);
    assert_eq!(driver.wrong_uses().len(), 1);
    std::mem::forget(device);
}

fn capture(stream: &CudaStream, mode: sys::CUstreamCaptureMode) {
    // SAFETY: a live stream.
    unsafe { result::stream::begin_capture(stream.cu_stream(), mode) }.unwrap();
}

#[test]
fn captured_copies_run_at_each_launch_and_not_before() {
    let (driver, ctx) = start();
    let stream = ctx.new_stream().unwrap();
    let device = stream.alloc_zeros::<u8>(4096).unwrap();
    let mut host = Pinned::new(4096);
    host.bytes().fill(1);
    ctx.synchronize().unwrap();
    let before = stream.record_event(None).unwrap();
    capture(&stream, sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED);
    assert_eq!(code(stream.wait(&before)), Code::STREAM_CAPTURE_ISOLATION.0, "a graph waits for nothing outside of it");
    // SAFETY: a capturing stream.
    let spoiled = unsafe { result::stream::end_capture(stream.cu_stream()) };
    assert_eq!(code(spoiled), Code::STREAM_CAPTURE_INVALIDATED.0);

    let address = device.device_ptr(&stream).0;
    capture(&stream, sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED);
    // SAFETY: both live until the last launch is complete.
    unsafe { result::memcpy_htod_async(address, host.bytes(), stream.cu_stream()) }.unwrap();
    // SAFETY: a live stream.
    let state = unsafe { result::stream::is_capturing(stream.cu_stream()) }.unwrap();
    assert_eq!(state, sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE);
    let mut event = MaybeUninit::uninit();
    // SAFETY: space for one handle.
    assert_eq!(raw(unsafe { sys::cuEventCreate(event.as_mut_ptr(), 2) }), 0);
    // SAFETY: written above.
    let event = unsafe { event.assume_init() };
    // SAFETY: live handles.
    unsafe { result::event::record(event, stream.cu_stream()) }.unwrap();
    // SAFETY: a live event.
    assert_eq!(code(unsafe { result::event::query(event) }), Code::CAPTURED_EVENT.0);
    // SAFETY: a capturing stream.
    let graph = unsafe { result::stream::end_capture(stream.cu_stream()) }.unwrap();
    assert_eq!(stream.clone_dtoh(&device).unwrap(), vec![0; 4096]);
    let mut runnable = MaybeUninit::uninit();
    // SAFETY: space for one handle, and a live graph.
    assert_eq!(raw(unsafe { sys::cuGraphInstantiateWithFlags(runnable.as_mut_ptr(), graph, 0) }), 0);
    // SAFETY: written above.
    let runnable = unsafe { runnable.assume_init() };
    for value in [7, 8] {
        host.bytes().fill(value);
        // SAFETY: a live graph, and its memory is live.
        unsafe { result::graph::launch(runnable, stream.cu_stream()) }.unwrap();
        assert_eq!(stream.clone_dtoh(&device).unwrap(), vec![value; 4096]);
    }
    // SAFETY: destroyed once.
    unsafe { result::graph::exec_destroy(runnable) }.unwrap();
    // SAFETY: destroyed once.
    unsafe { result::event::destroy(event) }.unwrap();
    assert_eq!(driver.counts().invalidated_captures, 1);
}
