//! Pools over `vmm`, `register` and `cuda` beside copies: data is checked on the device, and no release waits for a copy.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use driver_double::Double;
use pinpool::backend::PAGE_BYTES;
use pinpool::testing::ManualClock;
use pinpool::{Backend, Pool, ReleasePolicy};

use crate::fixture::{MIB, PressureFile, builder, filled, held, stream_and_memory};

const GRANULE: usize = 2 * MIB;

/// Threads copy batches on their own streams to their own device memory, while the pool grows, shrinks, trims and reuses;
/// every batch is checked on the device.
fn churn(backend: Backend, double: &Double) {
    const THREADS: u8 = 3;
    const ROUNDS: u8 = 24;
    let name = backend.name();
    let before = held(double);
    let context = CudaContext::new(0).unwrap();
    // A get may wait for the copies of all lanes, and those for a slow machine.
    let pool = builder(backend).max_bytes(24 << 20).wait(Duration::from_secs(60)).build().unwrap();
    let lens = [PAGE_BYTES, 100_001, MIB - 1, GRANULE + 5, 3 * MIB];
    let batches_of =
        |lane: u8| (0..ROUNDS).map(move |round| (lane * 80 + round, lens[usize::from(round * THREADS + lane) % 5]));
    // Only the pool's copies run meanwhile: any work that a free waits for is one of them.
    let mut lanes: Vec<_> = (0..THREADS)
        .map(|lane| {
            let stream = context.new_stream().unwrap();
            let memories: Vec<CudaSlice<u8>> =
                batches_of(lane).map(|(_, len)| stream.alloc_zeros(len).unwrap()).collect();
            stream.synchronize().unwrap();
            (stream, memories)
        })
        .collect();
    // Work of an earlier run must be complete too.
    let at_rest = || {
        while double.counts().work_in_flight > 0 {
            thread::yield_now();
        }
    };
    at_rest();
    thread::scope(|scope| {
        for (lane, (stream, memories)) in (0..).zip(&mut lanes) {
            let (pool, context) = (&pool, &context);
            scope.spawn(move || {
                context.bind_to_thread().unwrap();
                for ((byte, len), memory) in batches_of(lane).zip(memories) {
                    let mut buf = pool.get(len).unwrap();
                    buf.as_mut_slice().unwrap().fill(byte);
                    match byte % 3 {
                        // Dropped without a wait: the next get may need this memory.
                        0 => drop(buf.copy_to(stream, memory).unwrap()),
                        1 => drop(buf.copy_range_to(0..len, stream, memory).unwrap()),
                        _ => stream.memcpy_htod(&buf, memory).unwrap(),
                    }
                    match byte % 4 {
                        1 => pool.trim(0),
                        3 => pool.clear(),
                        _ => {}
                    }
                }
            });
        }
    });
    assert_eq!(double.counts().frees_with_work_in_flight, 0, "{name} released memory under a copy");
    for (lane, (stream, memories)) in (0..).zip(&lanes) {
        for ((byte, len), memory) in batches_of(lane).zip(memories) {
            let arrived = stream.clone_dtoh(memory).unwrap();
            assert!(arrived.iter().all(|&found| found == byte), "{name}: {len} B of lane {lane}");
        }
    }
    // The checks above enqueued work on the streams, which must not count as copies at the end of the pool.
    at_rest();
    pool.poll();
    let stats = pool.stats();
    stats.validate().unwrap();
    assert_eq!((stats.backend, stats.puts), (name, u64::from(THREADS) * u64::from(ROUNDS)));
    assert_eq!((stats.in_flight, stats.lost), (0, 0));
    drop(pool);
    assert_eq!(held(double), before, "{name} left memory behind");
    assert_eq!(double.wrong_uses(), Vec::<String>::new(), "{name}");
}

#[test]
fn pools_over_each_back_end_deliver_every_batch_intact_and_release_nothing_under_a_copy() {
    let double = Double::load();
    for backend in [Backend::Vmm, Backend::Register, Backend::Cuda] {
        churn(backend, &double);
    }
}

#[test]
fn a_reserve_of_vmm_is_one_registration_that_buffers_are_carved_from() {
    let double = Double::load();
    let before = held(&double);
    let pool = builder(Backend::Vmm).reserve_bytes(16 << 20).build().unwrap();
    let created = double.calls("cuMemCreate");
    let bufs = [1, MIB, 5 * MIB].map(|len| pool.get(len).unwrap());
    let counts = double.counts();
    assert_eq!((counts.registrations - before.registrations, double.calls("cuMemCreate")), (1, created));
    assert_eq!(counts.pinned_bytes - before.pinned_bytes, 16 << 20);
    // The kernel reports the pages of the reserve, the driver those of growth.
    let tiers = pool.page_tiers().unwrap();
    assert_eq!((tiers.transparent_bytes + tiers.small_bytes, tiers.driver_bytes), (16 << 20, 0), "{tiers}");
    let beyond = pool.get(16 * MIB).unwrap();
    assert_eq!(pool.page_tiers().unwrap().driver_bytes, 16 << 20);
    drop((bufs, beyond, pool));
    assert_eq!(held(&double), before);
}

/// Copies 4096 B from the pool.
fn start_copy(pool: &Pool, stream: &Arc<CudaStream>, memory: &mut CudaSlice<u8>) {
    drop(filled(pool, 4096, 7).copy_to(stream, memory).unwrap());
}

#[test]
fn a_release_due_under_pressure_waits_for_copies_is_reused_before_and_runs_on_its_own_thread() {
    let double = Double::load();
    let pressure = PressureFile::of_short_memory();
    let context = CudaContext::new(0).unwrap();
    let (stream, mut memory) = stream_and_memory(&context, 4096);
    for backend in [Backend::Register, Backend::Cuda] {
        let clock = ManualClock::default();
        let pool = builder(backend).clock(clock.clone()).pressure(pressure.source()).build().unwrap();
        let at_start = double.counts();
        drop(pool.get(3 * MIB).unwrap());
        let large = double.counts();
        let gate = double.hold(stream.cu_stream());
        start_copy(&pool, &stream, &mut memory);
        // Buffers expire from the thread cache; then their regions are due.
        for _ in 0..8 {
            clock.advance_us(60_000_000);
            pool.poll();
        }
        let stats = pool.stats();
        assert!(stats.awaiting_release_bytes >= 3 << 20, "{stats:?}");
        assert!(stats.awaiting_release_bytes <= stats.arena_free_bytes);
        stats.validate().unwrap();
        assert_eq!(double.counts().peak_pinned_bytes, double.counts().pinned_bytes, "nothing was released");
        // A region that waits for its release serves a get that fits.
        let locks = stats.underlying.allocs;
        drop(pool.get(3 * MIB).unwrap());
        assert_eq!(pool.stats().underlying.allocs, locks);
        drop(gate);
        stream.synchronize().unwrap();
        let call = if stats.backend == "cuda" { "cuMemFreeHost" } else { "cuMemHostUnregister" };
        let held_call = double.hold_call(call);
        for _ in 0..8 {
            clock.advance_us(60_000_000);
            pool.poll();
        }
        // The poll has returned while the release hangs in the driver.
        held_call.wait_for(1);
        assert_eq!(pool.stats().awaiting_release_bytes, 0, "the release runs");
        drop(held_call);
        while double.counts().pinned_bytes >= large.pinned_bytes {
            clock.advance_us(60_000_000);
            pool.poll();
            thread::yield_now();
        }
        drop(pool);
        let counts = double.counts();
        assert_eq!((counts.pinned_bytes, counts.frees_with_work_in_flight), (at_start.pinned_bytes, 0));
        double.reset();
    }
}

#[test]
fn a_trim_beside_a_copy_runs_once_the_copy_completes() {
    let double = Double::load();
    let context = CudaContext::new(0).unwrap();
    let (stream, mut memory) = stream_and_memory(&context, 4096);
    let pool = builder(Backend::Register).build().unwrap();
    drop(pool.get(3 * MIB).unwrap());
    let gate = double.hold(stream.cu_stream());
    start_copy(&pool, &stream, &mut memory);
    pool.clear();
    pool.trim(0);
    assert_eq!(double.calls("cuMemHostUnregister"), 0);
    assert!(pool.stats().awaiting_release_bytes >= 3 << 20);
    drop(gate);
    stream.synchronize().unwrap();
    while double.calls("cuMemHostUnregister") == 0 {
        pool.poll();
        thread::sleep(Duration::from_millis(1));
    }
    drop(pool);
    assert_eq!(double.counts().frees_with_work_in_flight, 0);
}

#[test]
fn a_borrowed_copy_counts_as_in_flight_until_its_buffer_is_free() {
    let double = Double::load();
    let context = CudaContext::new(0).unwrap();
    let (stream, mut memory) = stream_and_memory(&context, 4096);
    let pool = builder(Backend::Register).build().unwrap();
    drop(pool.get(3 * MIB).unwrap());
    let mut buf = pool.get(4096).unwrap();
    let gate = double.hold(stream.cu_stream());
    buf.copy_range_to(0..4096, &stream, &mut memory).unwrap();
    pool.trim(0);
    assert_eq!(double.calls("cuMemHostUnregister"), 0);
    drop(gate);
    buf.as_mut_slice().unwrap().fill(1);
    pool.trim(0);
    assert!(double.calls("cuMemHostUnregister") > 0, "the buffer is in use, but no copy runs");
    assert_eq!(double.counts().frees_with_work_in_flight, 0);
}

#[test]
fn copies_wait_while_memory_is_released_and_hits_continue() {
    let double = Double::load();
    let context = CudaContext::new(0).unwrap();
    let (stream, mut memory) = stream_and_memory(&context, 4096);
    let pool = builder(Backend::Register).build().unwrap();
    let mut buf = pool.get(4096).unwrap();
    buf.as_mut_slice().unwrap().fill(7);
    drop(pool.get(3 * MIB).unwrap());
    let gate = double.hold_call("cuMemHostUnregister");
    thread::scope(|scope| {
        scope.spawn(|| pool.trim(0));
        gate.wait_for(1);
        let copies = double.calls("cuMemcpyHtoDAsync_v2");
        let copy = scope.spawn(|| {
            context.bind_to_thread().unwrap();
            drop(buf.copy_to(&stream, &mut memory).unwrap());
        });
        drop(pool.get(4096).unwrap());
        assert!(pool.try_get(4096).unwrap().is_some(), "a hit while the release hangs in the driver");
        assert_eq!((double.calls("cuMemcpyHtoDAsync_v2"), copy.is_finished()), (copies, false));
        drop(gate);
        copy.join().unwrap();
    });
    assert_eq!(stream.clone_dtoh(&memory).unwrap(), vec![7; 4096]);
    assert_eq!(double.counts().frees_with_work_in_flight, 0);
}

#[test]
fn at_the_ceiling_idle_regions_wait_for_copies_or_a_forced_drain() {
    for release in [ReleasePolicy::Idle, ReleasePolicy::Force] {
        let double = Double::load();
        let context = CudaContext::new(0).unwrap();
        let (stream, mut memory) = stream_and_memory(&context, 4096);
        let before = double.counts().pinned_bytes;
        let wait = Duration::from_secs(if release == ReleasePolicy::Force { 20 } else { 0 });
        let pool = builder(Backend::Register).max_bytes(6 << 20).release_policy(release).wait(wait).build().unwrap();
        let gate = double.hold(stream.cu_stream());
        start_copy(&pool, &stream, &mut memory);
        drop(pool.get(3 * MIB).unwrap());
        // No idle region is large enough, and the ceiling allows no other.
        thread::scope(|scope| {
            let get = scope.spawn(|| {
                context.bind_to_thread().unwrap();
                pool.get(5 * MIB).map(drop)
            });
            if release == ReleasePolicy::Idle {
                assert!(get.join().unwrap().unwrap_err().is_limit());
                return;
            }
            while pool.stats().drains == 0 {
                thread::yield_now();
            }
            assert!(!get.is_finished());
            drop(gate);
            get.join().unwrap().unwrap();
        });
        assert_eq!(pool.stats().drains, u64::from(release == ReleasePolicy::Force));
        let most_bytes = double.counts().peak_pinned_bytes - before;
        assert!(most_bytes <= 6 << 20, "{release:?}: {most_bytes}, {:?}", pool.stats());
        assert_eq!(double.counts().frees_with_work_in_flight, 0);
    }
}

#[test]
fn beside_copies_a_pool_grows_in_short_steps() {
    let double = Double::load();
    let context = CudaContext::new(0).unwrap();
    let (stream, mut memory) = stream_and_memory(&context, 4096);
    let pool = builder(Backend::Register).build().unwrap();
    let step = |len: usize| {
        let before = double.counts().pinned_bytes;
        let mut bufs = Vec::new();
        while double.counts().pinned_bytes == before {
            bufs.push(pool.get(len).unwrap());
        }
        (double.counts().pinned_bytes - before, bufs)
    };
    let (at_rest, _kept) = step(2 * MIB);
    assert_eq!(at_rest, 16 << 20);
    let gate = double.hold(stream.cu_stream());
    start_copy(&pool, &stream, &mut memory);
    let (beside_a_copy, _kept) = step(2 * MIB);
    assert_eq!(beside_a_copy, 8 << 20);
    let (four_buffers, _kept) = step(10 * MIB);
    assert_eq!(four_buffers, 40 << 20);
    drop(gate);
}

#[test]
fn the_end_of_a_pool_with_a_stuck_copy_releases_nothing_that_would_wait_for_it() {
    let double = Double::load();
    let context = CudaContext::new(0).unwrap();
    let (stream, mut memory) = stream_and_memory(&context, 4096);
    let pool = builder(Backend::Register).close_wait(Duration::ZERO).build().unwrap();
    drop(pool.get(3 * MIB).unwrap());
    let gate = double.hold(stream.cu_stream());
    start_copy(&pool, &stream, &mut memory);
    let held_before = held(&double);
    drop(pool);
    assert_eq!(held(&double), held_before);
    drop(gate);
    assert_eq!(stream.clone_dtoh(&memory).unwrap(), vec![7; 4096]);
}

#[test]
fn buffers_and_copies_that_outlive_their_pool_release_everything_at_the_end() {
    let double = Double::load();
    let context = CudaContext::new(0).unwrap();
    let (stream, mut memory) = stream_and_memory(&context, 4096);
    for backend in [Backend::Vmm, Backend::Register, Backend::Cuda] {
        let before = held(&double);
        let pool = builder(backend).build().unwrap();
        let late = pool.get(3 * MIB).unwrap();
        let gate = double.hold(stream.cu_stream());
        start_copy(&pool, &stream, &mut memory);
        thread::scope(|scope| {
            let end = scope.spawn(|| drop(pool));
            drop(gate);
            end.join().unwrap();
        });
        drop(late);
        assert_eq!(held(&double), before);
    }
    assert_eq!(double.counts().frees_with_work_in_flight, 0);
}
