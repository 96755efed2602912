//! On a real device: what the driver is taken to do, and every copied byte compared at the far end.
//!
//! Without a device each test says `skipped: why` and passes; `PINPOOL_REQUIRE_GPU=1` turns that into a failure:
//!
//! ```text
//! PINPOOL_REQUIRE_GPU=1 cargo test --release --test gpu -- --test-threads 1
//! ```
//!
//! Never loads the driver double: a process has one driver, and here it is the machine's own.
#![cfg(feature = "cuda")]
#![allow(unsafe_code)] // The contract suite and the facts about the driver.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use cudarc::driver::sys::{self, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtrMut, result};
use pinpool::backend::{
    CudaSource, PAGE_BYTES, RANGE_ALIGN_BYTES, Range, Region, RegisterSource, Source, Span, VmmSource,
};
use pinpool::{Backend, FenceKind, Pool, Preset, Rounding};

mod driver_facts;
#[path = "../src/backend/suite/mod.rs"]
mod suite;

const MIB: usize = 1 << 20;

/// The first device, or why the test is skipped. Asks the back-end first: cudarc panics where there is no driver.
fn device() -> Option<Arc<CudaContext>> {
    let found = CudaSource::new(0)
        .map_err(|error| error.to_string())
        .and_then(|_| CudaContext::new(0).map_err(|error| format!("{:?}", error.0)));
    match found {
        Ok(context) => Some(context),
        Err(why) if std::env::var("PINPOOL_REQUIRE_GPU").is_ok_and(|value| value == "1") => {
            panic!("PINPOOL_REQUIRE_GPU=1, and there is none: {why}")
        }
        Err(why) => {
            // Past the test harness, which keeps what a passing test prints to itself.
            let _unseen = writeln!(io::stderr(), "skipped: {why}");
            None
        }
    }
}

fn pool() -> Pool {
    Pool::builder().without_env().preset(Preset::Tensorflow).backend(Backend::Cuda).build().unwrap()
}

/// Bytes that differ from batch to batch and from place to place.
fn pattern(seed: u64, len: usize) -> impl Iterator<Item = u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..len).map(move |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[0]
    })
}

fn fill(buf: &mut pinpool::PinnedBuf, seed: u64) {
    let len = buf.len();
    buf.as_mut_slice().iter_mut().zip(pattern(seed, len)).for_each(|(to, byte)| *to = byte);
}

/// Compares what arrived with what was sent.
fn verify(stream: &Arc<CudaStream>, memory: &CudaSlice<u8>, seed: u64, len: usize) {
    let arrived = stream.clone_dtoh(memory).unwrap();
    let wrong = arrived[..len].iter().zip(pattern(seed, len)).position(|(&found, sent)| found != sent);
    assert_eq!(wrong, None, "first wrong byte of batch {seed} ({len} B)");
}

#[test]
fn the_driver_does_what_the_double_says() {
    let Some(context) = device() else { return };
    driver_facts::check(&context);
}

#[test]
fn the_source_keeps_the_contract() {
    let Some(context) = device() else { return };
    let source = CudaSource::new(0).unwrap();
    suite::run(&source);
    // Small blocks of others put the driver's next one anywhere.
    context.bind_to_thread().unwrap();
    // SAFETY: freed below, never touched.
    let odd = unsafe { result::malloc_host(100, 0) }.unwrap();
    suite::run(&source);
    // SAFETY: allocated above.
    unsafe { result::free_host(odd) }.unwrap();
}

#[test]
fn a_buffer_comes_back_when_its_copy_is_over() {
    let Some(context) = device() else { return };
    let pool = pool();
    let stream = context.new_stream().unwrap();
    let mut memory = stream.alloc_zeros::<u8>(64 * MIB).unwrap();
    let mut buf = pool.get(64 * MIB).unwrap();
    fill(&mut buf, 1);
    let id = buf.id();
    buf.copy_to(&stream, &mut memory).unwrap().wait().unwrap();
    assert_eq!(pool.try_get(64 * MIB).unwrap().expect("back in the pool").id(), id);
    verify(&stream, &memory, 1, 64 * MIB);
    let stats = pool.stats();
    assert!(stats.is_pinned && stats.in_flight == 0 && stats.lost == 0);
}

#[test]
fn recycled_buffers_carry_every_batch_whole_under_churn() {
    let Some(context) = device() else { return };
    // Few classes and exact sizes, so that buffers are reused at once.
    let tensorflow = || Pool::builder().without_env().preset(Preset::Tensorflow).rounding(Rounding::Pow2);
    for kind in [FenceKind::Event, FenceKind::Timeline] {
        churn(&context, &tensorflow().backend(Backend::Cuda).fence(kind).build().unwrap());
    }
    for backend in [Backend::Vmm, Backend::Register, Backend::Cuda] {
        // A tight ceiling, so that memory is moved and given back all the time.
        churn(&context, &Pool::builder().without_env().backend(backend).max_bytes(96 << 20).build().unwrap());
    }
}

#[test]
fn the_sources_made_for_an_arena_keep_the_contract() {
    if device().is_none() {
        return;
    }
    suite::run(&VmmSource::new(0, None).unwrap());
    suite::run(&RegisterSource::new(0, None).unwrap());
}

fn churn(context: &Arc<CudaContext>, pool: &Pool) {
    const THREADS: u64 = 8;
    const BATCHES: u64 = 48;
    const STREAMS: u64 = 3;
    let sent = AtomicU64::new(0);
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let sent = &sent;
            scope.spawn(move || {
                context.bind_to_thread().unwrap();
                let lane = || {
                    let stream = context.new_stream().unwrap();
                    let memory = stream.alloc_zeros::<u8>(2 * MIB).unwrap();
                    (stream, memory, None)
                };
                let mut lanes: Vec<_> = (0..STREAMS).map(|_| lane()).collect();
                for batch in 0..BATCHES {
                    let seed = thread * BATCHES + batch;
                    let len = [PAGE_BYTES, 100_001, MIB - 1, 2 * MIB][(seed % 4) as usize];
                    let (stream, memory, before) = &mut lanes[(batch % STREAMS) as usize];
                    if let Some((seed, len)) = before.replace((seed, len)) {
                        verify(stream, memory, seed, len);
                    }
                    let mut buf = pool.get(len).unwrap();
                    fill(&mut buf, seed);
                    // Dropped without a wait: the next get of any thread may want this very buffer.
                    drop(buf.copy_to(stream, memory).unwrap());
                    sent.fetch_add(1, Ordering::Relaxed);
                }
                for (stream, memory, last) in &lanes {
                    let (seed, len) = last.expect("a batch on every stream");
                    verify(stream, memory, seed, len);
                }
            });
        }
    });
    context.synchronize().unwrap();
    pool.poll();
    let stats = pool.stats();
    assert_eq!((stats.puts, stats.in_flight, stats.lost), (sent.into_inner(), 0, 0));
    assert!(stats.hits > stats.misses, "{} hits, {} misses: nothing was recycled", stats.hits, stats.misses);
}

#[test]
fn a_borrowed_buffer_is_not_written_under_its_copy() {
    let Some(context) = device() else { return };
    let pool = pool();
    let (first, second) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    let mut memories = [&first, &second].map(|stream| stream.alloc_zeros::<u8>(32 * MIB).unwrap());
    context.synchronize().unwrap();
    let mut buf = pool.get(32 * MIB).unwrap();
    fill(&mut buf, 1);
    for (stream, memory) in [&first, &second].into_iter().zip(&mut memories) {
        buf.copy_range_to(0..32 * MIB, stream, memory).unwrap();
    }
    // Waits for both copies by itself.
    buf.as_mut_slice().fill(0);
    for (stream, memory) in [&first, &second].into_iter().zip(&memories) {
        verify(stream, memory, 1, 32 * MIB);
    }
}

#[test]
fn a_capturing_stream_is_refused_and_captures_beside_the_pool_live() {
    let Some(context) = device() else { return };
    let pool = pool();
    let (captured, stream) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    let mut memory = stream.alloc_zeros::<u8>(MIB).unwrap();
    context.synchronize().unwrap();
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    // SAFETY: a live stream, which captures until the call below.
    unsafe { result::stream::begin_capture(captured.cu_stream(), mode) }.unwrap();
    let refused = pool.get(MIB).unwrap().copy_to(&captured, &mut memory).unwrap_err();
    assert!(refused.is_copy(), "{refused}");
    let mut buf = pool.get(MIB).unwrap();
    fill(&mut buf, 1);
    buf.copy_to(&stream, &mut memory).unwrap().wait().unwrap();
    pool.clear();
    // SAFETY: as above.
    let ended = unsafe { result::stream::end_capture(captured.cu_stream()) };
    assert!(ended.is_ok(), "the pool spoiled a capture: {:?}", ended.err().map(|error| error.0));
    verify(&stream, &memory, 1, MIB);
}

#[test]
fn the_end_of_a_pool_waits_for_its_copies() {
    let Some(context) = device() else { return };
    let stream = context.new_stream().unwrap();
    let mut memories: Vec<_> = (0..8).map(|_| stream.alloc_zeros::<u8>(16 * MIB).unwrap()).collect();
    let pool = pool();
    for (seed, memory) in (0..).zip(&mut memories) {
        let mut buf = pool.get(16 * MIB).unwrap();
        fill(&mut buf, seed);
        drop(buf.copy_to(&stream, memory).unwrap());
    }
    drop(pool);
    for (seed, memory) in (0..).zip(&memories) {
        verify(&stream, memory, seed, 16 * MIB);
    }
}

#[test]
fn copies_of_cudarc_itself_carry_every_batch_whole_under_churn() {
    const THREADS: u64 = 4;
    const ROUNDS: u64 = 24;
    let Some(context) = device() else { return };
    let pool = pool();
    let untracked = CudaContext::new(0).unwrap();
    // SAFETY: each stream's device memory is used on that stream alone.
    unsafe { untracked.disable_event_tracking() };
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let (pool, context, untracked) = (&pool, &context, &untracked);
            scope.spawn(move || {
                // With cudarc's events, without them, and where it makes none for want of a second stream.
                let single = CudaContext::new(0).unwrap();
                let streams = [context.new_stream(), untracked.new_stream(), Ok(single.default_stream())];
                let mut lanes = streams.map(|stream| {
                    let stream = stream.unwrap();
                    let memory = stream.alloc_zeros::<u8>(2 * MIB).unwrap();
                    (stream, memory)
                });
                for round in 0..ROUNDS {
                    let seed = |lane: u64| (thread * ROUNDS + round) * 3 + lane;
                    let len = [PAGE_BYTES, 100_001, MIB - 1, 2 * MIB][(round % 4) as usize];
                    for (lane, (stream, memory)) in (0..).zip(&mut lanes) {
                        let mut buf = pool.get(len).unwrap();
                        fill(&mut buf, seed(lane));
                        // Dropped at once: the next get of any thread may want this very buffer.
                        stream.memcpy_htod(&buf, memory).unwrap();
                    }
                    for (lane, (stream, memory)) in (0..).zip(&lanes) {
                        let mut back = pool.get(len).unwrap();
                        stream.memcpy_dtoh(&memory.slice(..len), &mut back).unwrap();
                        let wrong =
                            back.as_slice().iter().zip(pattern(seed(lane), len)).position(|(&b, sent)| b != sent);
                        assert_eq!(wrong, None, "first wrong byte of batch {} ({len} B)", seed(lane));
                    }
                }
            });
        }
    });
    context.synchronize().unwrap();
    pool.poll();
    let stats = pool.stats();
    assert_eq!((stats.puts, stats.in_flight, stats.lost), (THREADS * ROUNDS * 6, 0, 0));
    assert!(stats.hits > stats.misses, "{} hits, {} misses: nothing was recycled", stats.hits, stats.misses);
}

#[test]
fn a_buffer_from_the_device_is_read_only_when_it_is_there() {
    let Some(context) = device() else { return };
    let pool = pool();
    let stream = context.new_stream().unwrap();
    let mut memory = stream.alloc_zeros::<u8>(32 * MIB).unwrap();
    let mut buf = pool.get(32 * MIB).unwrap();
    fill(&mut buf, 3);
    drop(buf.copy_to(&stream, &mut memory).unwrap());
    for _ in 0..8 {
        // One that nobody waits for comes back all the same.
        drop(pool.get(32 * MIB).unwrap().copy_from(&stream, &memory).unwrap());
        let back = pool.get(32 * MIB).unwrap().copy_from(&stream, &memory).unwrap().wait().unwrap();
        let wrong = back.as_slice().iter().zip(pattern(3, 32 * MIB)).position(|(&found, sent)| found != sent);
        assert_eq!(wrong, None, "first wrong byte");
    }
}

#[test]
fn a_buffer_released_behind_work_of_others_is_not_written_under_it() {
    let Some(context) = device() else { return };
    let pool = pool();
    let stream = context.new_stream().unwrap();
    let mut memory = stream.alloc_zeros::<u8>(32 * MIB).unwrap();
    for seed in 0..8 {
        let mut buf = pool.get(32 * MIB).unwrap();
        fill(&mut buf, seed);
        let (to, tracking) = memory.device_ptr_mut(&stream);
        // SAFETY: the buffer is kept until the work on the stream is over, by the release below.
        let copied = unsafe { sys::cuMemcpyHtoDAsync_v2(to, buf.as_ptr().cast(), buf.len(), stream.cu_stream()) };
        copied.result().unwrap();
        drop(tracking);
        if seed % 2 == 0 {
            buf.release_after(&stream).unwrap();
        } else {
            let event = stream.record_event(None).unwrap();
            buf.release_after_event(&event).unwrap();
        }
        // Whatever is handed out now is written to at once.
        pool.get(32 * MIB).unwrap().as_mut_slice().fill(0xEE);
        verify(&stream, &memory, seed, 32 * MIB);
    }
}

#[test]
fn kernels_have_an_address_for_a_pinned_buffer() {
    let Some(context) = device() else { return };
    assert_ne!(pool().get(4096).unwrap().device_ptr(&context).unwrap(), 0);
}
