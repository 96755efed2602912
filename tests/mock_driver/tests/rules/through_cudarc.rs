//! Uses the mock driver as a program does: through unmodified cudarc.
//!
//! No test reads a clock: gates decide which work is complete.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use cudarc::driver::{CudaContext, DevicePtr, DriverError, result, sys};
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
    (MockDriver::load(), CudaContext::new(0).unwrap())
}

fn code(result: Result<impl Sized, DriverError>) -> i32 {
    result.err().map_or(0, |error| error.0 as i32)
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
fn copies_of_pageable_memory_are_synchronous() {
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
    let other_stream = ctx.new_stream().unwrap();
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
            other_stream.record_event(None).unwrap();
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
    aloof.record_event(None).unwrap().synchronize().unwrap();
    assert!(!held.is_complete() && !behind.is_complete());
    drop(gate);
    behind.synchronize().unwrap();
    assert!(held.is_complete());
    drop(blocking_stream);
    // SAFETY: destroyed once.
    unsafe { result::stream::destroy(blocking) }.unwrap();
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
    driver.reset();
    std::mem::forget(device);
}
