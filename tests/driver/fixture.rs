//! Pools, streams and captures that several modules use.
#![allow(unsafe_code)] // Captures, for which cudarc has no safe API.

use std::sync::Arc;
use std::thread;

use cudarc::driver::sys::CUstreamCaptureMode;
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DriverError, result};
use mock_driver::{Counts, HeldStream, MockDriver};
use pinpool::unstable::ManualClock;
use pinpool::{Backend, PinnedBuf, Pool, PoolBuilder, Preset, Stats};

use crate::until::until;

pub(crate) const MIB: usize = 1 << 20;

pub(crate) fn builder(backend: Backend) -> PoolBuilder {
    // These tests control when copies are checked.
    Pool::builder().without_env().backend(backend).maintenance_thread(false)
}

pub(crate) fn tensorflow() -> PoolBuilder {
    builder(Backend::Cuda).preset(Preset::TensorFlow)
}

pub(crate) fn start() -> (MockDriver, Arc<CudaContext>, Pool) {
    let driver = MockDriver::load();
    let context = CudaContext::new(0).unwrap();
    (driver, context, tensorflow().build().unwrap())
}

/// The driver, and a stream with device memory on it.
pub(crate) fn on_a_stream(len: usize) -> (MockDriver, Arc<CudaStream>, CudaSlice<u8>) {
    let driver = MockDriver::load();
    let (stream, memory) = stream_and_memory(&CudaContext::new(0).unwrap(), len);
    (driver, stream, memory)
}

/// A stream and device memory on it, with no work left to run.
pub(crate) fn stream_and_memory(context: &Arc<CudaContext>, len: usize) -> (Arc<CudaStream>, CudaSlice<u8>) {
    let stream = context.new_stream().unwrap();
    let memory = stream.alloc_zeros(len).unwrap();
    stream.synchronize().unwrap();
    (stream, memory)
}

/// The message with which `call` panics.
pub(crate) fn panic_of(call: impl FnOnce()) -> String {
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)).unwrap_err();
    panic.downcast_ref::<String>().cloned().unwrap_or_else(|| (*panic.downcast_ref::<&str>().unwrap()).to_owned())
}

pub(crate) fn filled(pool: &Pool, len: usize, byte: u8) -> PinnedBuf {
    let mut buf = pool.get(len).unwrap();
    buf.wait_slice_mut().unwrap().fill(byte);
    buf
}

/// The driver objects that a pool or a source holds, and must not leave behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) pinned_bytes: u64,
    pub(crate) host_allocations: u64,
    pub(crate) registrations: u64,
    pub(crate) granules: u64,
    pub(crate) mappings: u64,
    pub(crate) reservations: u64,
}

pub(crate) fn held(driver: &MockDriver) -> Held {
    let Counts { pinned_bytes, host_allocations, registrations, granules, mappings, reservations, .. } =
        driver.counts();
    // The pages with the words that streams write belong to no pool.
    let any = Pool::builder().without_env().backend(Backend::Heap).build().unwrap();
    let words_bytes = any.stats().copies.timeline_bytes;
    let pinned_bytes = pinned_bytes.saturating_sub(words_bytes);
    let registrations = registrations.saturating_sub(words_bytes / 4096);
    Held { pinned_bytes, host_allocations, registrations, granules, mappings, reservations }
}

pub(crate) fn with_manual_clock(builder: PoolBuilder) -> (Pool, ManualClock) {
    let clock = ManualClock::default();
    (builder.unstable_clock(clock.clone()).build().unwrap(), clock)
}

/// The driver, and what is held before a test.
pub(crate) fn loaded() -> (MockDriver, Held) {
    let driver = MockDriver::load();
    let before = held(&driver);
    (driver, before)
}

pub(crate) fn in_flight_and_quarantined(pool: &Pool) -> (u64, u64) {
    let stats = pool.stats();
    (stats.copies.in_flight, stats.memory.quarantined)
}

/// Maintains the pool until its statistics satisfy `is_so`.
pub(crate) fn maintain_until(pool: &Pool, is_so: impl Fn(&Stats) -> bool) {
    until("the pool is maintained", || {
        pool.maintain();
        is_so(&pool.stats())
    });
}

pub(crate) fn begin_capture(stream: &CudaStream, mode: CUstreamCaptureMode) {
    // SAFETY: a live stream; each test ends its capture.
    unsafe { result::stream::begin_capture(stream.cu_stream(), mode) }.unwrap();
}

/// Ends a capture; the graph is never launched.
pub(crate) fn end_capture(stream: &CudaStream) -> Result<(), DriverError> {
    // SAFETY: a live stream that captures.
    let graph = unsafe { result::stream::end_capture(stream.cu_stream()) }?;
    // SAFETY: just made, never launched.
    unsafe { result::graph::destroy(graph) }
}

/// The kinds of streams that programs use; with the last two cudarc records no events.
pub(crate) fn usual_streams(context: &Arc<CudaContext>) -> Vec<Arc<CudaStream>> {
    let untracked = CudaContext::new(0).unwrap();
    // SAFETY: each test uses one stream at a time for its device memory.
    unsafe { untracked.disable_event_tracking() };
    vec![
        context.new_stream().unwrap(),
        context.per_thread_stream(),
        untracked.new_stream().unwrap(),
        CudaContext::new(0).unwrap().default_stream(),
    ]
}

/// Runs `run` on a thread, checks that it waits for an event while `gate` holds the work, and lets the work run.
pub(crate) fn ends_only_after<R: Send>(driver: &MockDriver, gate: HeldStream<'_>, run: impl FnOnce() -> R + Send) -> R {
    let waits = driver.calls("cuEventSynchronize");
    thread::scope(|scope| {
        let waiting = scope.spawn(run);
        until("it waits", || driver.calls("cuEventSynchronize") > waits || waiting.is_finished());
        assert!(!waiting.is_finished(), "it does not wait for the work");
        drop(gate);
        waiting.join().unwrap()
    })
}
