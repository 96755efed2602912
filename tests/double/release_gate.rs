//! Releases that wait for the device, beside copies: no memory is released under a copy, and no release is forgotten.
#![allow(unsafe_code)] // Resets the device, and passes handles.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use cudarc::driver::sys::CUstreamCaptureMode;
use cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use driver_double::{Double, HeldStream};
use pinpool::copy::cuda::RawStream;
use pinpool::testing::ManualClock;
use pinpool::{Backend, FenceKind, PinnedBuf, Pool, ReleasePolicy};

use crate::fixture::{
    MIB, PressureFile, begin_capture, builder, end_capture_unnoticed, filled, held, stream_and_memory,
};

/// Back-ends whose release waits for the device.
const BACKENDS: [Backend; 2] = [Backend::Register, Backend::Cuda];

fn releases(double: &Double) -> u64 {
    double.calls("cuMemHostUnregister") + double.calls("cuMemFreeHost")
}

#[test]
fn a_postponed_trim_survives_a_later_trim_to_more_bytes() {
    for backend in BACKENDS {
        let double = Double::load();
        let context = CudaContext::new(0).unwrap();
        let (stream, mut memory) = stream_and_memory(&context, 4096);
        let pool = builder(backend).build().unwrap();
        drop(pool.get(3 * MIB).unwrap());
        let gate = double.hold(stream.cu_stream());
        drop(filled(&pool, 4096, 7).copy_to(&stream, &mut memory).unwrap());
        pool.trim(0);
        assert!(pool.stats().awaiting_release_bytes >= 3 << 20);
        drop(gate);
        stream.synchronize().unwrap();
        pool.trim(1 << 30);
        assert_eq!((releases(&double), pool.stats().awaiting_release_bytes), (1, 0));
        assert_eq!(double.counts().frees_with_work_in_flight, 0);
    }
}

#[test]
fn a_completed_copy_of_a_silent_partition_delays_no_release() {
    let pressure = PressureFile::of_short_memory();
    for backend in BACKENDS {
        let double = Double::load();
        let context = CudaContext::new(0).unwrap();
        let (stream, mut memory) = stream_and_memory(&context, 4096);
        let clock = ManualClock::default();
        let pool = builder(backend).clock(clock.clone()).pressure(pressure.source()).build().unwrap();
        let silent = pool.partition("silent", 1 << 20).unwrap();
        for release in [|pool: &Pool| pool.trim(0), Pool::poll] {
            drop(pool.get(3 * MIB).unwrap());
            drop(filled(&silent, 4096, 7).copy_to(&stream, &mut memory).unwrap());
            stream.synchronize().unwrap();
            let before = releases(&double);
            // Buffers expire from the thread cache; then their regions are due and released by another thread.
            for _ in 0..3000 {
                clock.advance_us(60_000_000);
                release(&pool);
                if releases(&double) > before {
                    break;
                }
                thread::sleep(Duration::from_millis(1));
            }
            assert!(releases(&double) > before);
        }
        assert_eq!(double.counts().frees_with_work_in_flight, 0);
    }
}

#[test]
fn at_the_ceiling_a_completed_copy_of_a_silent_partition_keeps_no_region() {
    let double = Double::load();
    let context = CudaContext::new(0).unwrap();
    let (stream, mut memory) = stream_and_memory(&context, 4096);
    let pool = builder(Backend::Register).max_bytes(6 << 20).wait(Duration::ZERO).build().unwrap();
    let silent = pool.partition("silent", 1 << 20).unwrap();
    drop(filled(&silent, 4096, 7).copy_to(&stream, &mut memory).unwrap());
    stream.synchronize().unwrap();
    drop(pool.get(3 * MIB).unwrap());
    drop(pool.get(5 * MIB).unwrap());
    assert_eq!((releases(&double), double.counts().frees_with_work_in_flight), (1, 0));
}

#[test]
fn a_buffer_that_a_drain_waits_for_may_be_copied_again_and_dropped() {
    let double = Double::load();
    let context = CudaContext::new(0).unwrap();
    let (stream, mut memory) = stream_and_memory(&context, 4096);
    let wait = Duration::from_secs(20);
    let pool =
        builder(Backend::Register).max_bytes(6 << 20).release_policy(ReleasePolicy::Force).wait(wait).build().unwrap();
    let mut buf = filled(&pool, 4096, 7);
    drop(pool.get(3 * MIB).unwrap());
    let held = double.hold(stream.cu_stream());
    buf.copy_range_to(0..1024, &stream, &mut memory).unwrap();
    thread::scope(|scope| {
        let get = scope.spawn(|| pool.get_timeout(5 * MIB, wait).map(drop));
        while pool.stats().drains == 0 {
            thread::yield_now();
        }
        // Gives the drain many chances to close the gate.
        (0..1000).for_each(|_| thread::yield_now());
        drop(held);
        buf.copy_range_to(1024..4096, &stream, &mut memory).unwrap();
        drop(buf);
        get.join().unwrap().unwrap();
    });
    assert_eq!(double.counts().frees_with_work_in_flight, 0);
}

/// A get at the ceiling that forces a drain, on a thread that keeps a buffer which `copy` has copied from.
fn a_get_does_not_wait_for_its_own_buffer(
    copy: impl Fn(&mut PinnedBuf, &Arc<CudaStream>, &mut CudaSlice<u8>) + Send + 'static,
) {
    let double = Double::load();
    let context = CudaContext::new(0).unwrap();
    let (stream, mut memory) = stream_and_memory(&context, 4096);
    let wait = Duration::from_secs(600);
    let pool =
        builder(Backend::Register).max_bytes(6 << 20).release_policy(ReleasePolicy::Force).wait(wait).build().unwrap();
    let (done, is_done) = channel();
    let (end, may_end) = channel::<()>();
    let getting = thread::spawn(move || {
        stream.context().bind_to_thread().unwrap();
        let mut buf = filled(&pool, 4096, 7);
        drop(pool.get(3 * MIB).unwrap());
        copy(&mut buf, &stream, &mut memory);
        stream.synchronize().unwrap();
        drop(pool.get(5 * MIB).unwrap());
        assert_eq!(stream.clone_dtoh(&memory).unwrap(), vec![7; 4096]);
        assert_eq!(pool.stats().in_use, 1);
        buf.as_mut_slice().unwrap().fill(1);
        done.send(pool.stats().drains).unwrap();
        // The end of the pool is not looked at here.
        let _hung_up = may_end.recv();
    });
    let drains = is_done.recv_timeout(Duration::from_secs(20)).expect("it waits for itself, or it panicked");
    assert!(drains <= 1, "{drains}");
    assert_eq!(double.counts().frees_with_work_in_flight, 0);
    drop(end);
    getting.join().unwrap();
}

#[test]
fn a_get_at_the_ceiling_does_not_wait_for_a_copy_that_is_over_though_its_buffer_is_kept() {
    a_get_does_not_wait_for_its_own_buffer(|buf, stream, memory| {
        buf.copy_range_to(0..4096, stream, memory).unwrap();
    });
    a_get_does_not_wait_for_its_own_buffer(|buf, stream, memory| stream.memcpy_htod(&*buf, memory).unwrap());
    a_get_does_not_wait_for_its_own_buffer(|buf, stream, memory| {
        stream.memcpy_htod(&buf.slice(..).unwrap(), memory).unwrap();
    });
}

#[test]
fn a_refused_copy_delays_no_release() {
    let double = Double::load();
    let context = CudaContext::new(0).unwrap();
    let (stream, mut memory) = stream_and_memory(&context, 16);
    let pool = builder(Backend::Register).build().unwrap();
    drop(pool.get(3 * MIB).unwrap());
    let mut buf = pool.get(4096).unwrap();
    assert!(buf.copy_range_to(0..4096, &stream, &mut memory).unwrap_err().is_copy());
    pool.trim(0);
    assert_eq!(releases(&double), 1, "the buffer is kept, and nothing was enqueued");
}

/// A stream, and device memory for each batch that is copied on it.
struct Lane {
    pool: Pool,
    stream: Arc<CudaStream>,
    memories: Vec<CudaSlice<u8>>,
    number: u8,
}

const ROUNDS: u8 = 3;
const BATCHES: u8 = 18;
const LONGEST: usize = 3 * MIB;

impl Lane {
    fn new(number: u8, pool: Pool, context: &Arc<CudaContext>) -> Self {
        let stream = context.new_stream().unwrap();
        let memories =
            (0..ROUNDS * BATCHES).map(|batch| stream.alloc_zeros(Self::len(number, batch)).unwrap()).collect();
        stream.synchronize().unwrap();
        Self { pool, stream, memories, number }
    }

    /// Lengths up to `LONGEST`, in an order that depends on the lane.
    fn len(number: u8, batch: u8) -> usize {
        let spread = (usize::from(batch) + 1) * (usize::from(number) * 2 + 31) % 97;
        1 + spread * LONGEST / 97
    }

    fn byte(&self, batch: u8) -> u8 {
        1 + (batch * 3 + self.number) % 250
    }

    /// Uses each method of copying in turn.
    fn run(&mut self, round: u8) {
        let (pool, stream) = (self.pool.clone(), self.stream.clone());
        for batch in round * BATCHES..(round + 1) * BATCHES {
            let (byte, len) = (self.byte(batch), Self::len(self.number, batch));
            let memory = &mut self.memories[usize::from(batch)];
            let mut buf = filled(&pool, len, byte);
            match batch % 6 {
                // Dropped without a wait: the next get may need this memory.
                0 | 1 => drop(buf.copy_to(&stream, memory).unwrap()),
                2 => drop(buf.copy_range_to(0..len, &stream, memory).unwrap()),
                3 => {
                    // The buffer itself waits for the copy and stays in use while memory is released.
                    buf.copy_range_to(0..len, &stream, memory).unwrap();
                    assert!(*buf.as_mut_slice().unwrap() == vec![byte; len]);
                }
                4 => {
                    buf.copy_to(&stream, memory).unwrap().wait().unwrap();
                    let back = pool.get(len).unwrap().copy_from(&stream, memory).unwrap();
                    assert!(*back.wait().unwrap().as_slice().unwrap() == vec![byte; len]);
                }
                _ => {
                    stream.memcpy_htod(&buf, memory).unwrap();
                    buf.release_after(&stream).unwrap();
                }
            }
        }
    }

    fn check(&self) {
        for (batch, memory) in (0..).zip(&self.memories) {
            let arrived = self.stream.clone_dtoh(memory).unwrap();
            assert!(arrived == vec![self.byte(batch); arrived.len()], "batch {batch} of lane {}", self.number);
        }
    }
}

/// Lanes copy, two of them from one pool and one from its partition, while another thread releases memory in every way,
/// advances the clock, and holds one stream now and then.
fn churn(backend: Backend, release: ReleasePolicy, fence: FenceKind, double: &Double) {
    let name = backend.name();
    let what = format!("{name} {release:?} {fence:?}");
    let context = CudaContext::new(0).unwrap();
    // The page of the timelines stays with the context.
    Lane::new(0, builder(backend.clone()).fence(FenceKind::Timeline).build().unwrap(), &context).run(0);
    double.reset();
    let before = held(double);
    let clock = ManualClock::default();
    let pool = builder(backend)
        .fence(fence)
        .clock(clock.clone())
        .idle_timeout(Duration::from_millis(1))
        .release_policy(release)
        .max_bytes(12 << 20)
        .wait(Duration::from_secs(60))
        .build()
        .unwrap();
    let partition = pool.partition("other", 6 << 20).unwrap();
    let pools = [pool.clone(), pool.clone(), partition.clone()];
    let mut lanes: Vec<_> = (0..).zip(pools).map(|(number, pool)| Lane::new(number, pool, &context)).collect();
    let stuck = lanes[0].stream.clone();
    for round in 0..ROUNDS {
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            let copying: Vec<_> = lanes
                .iter_mut()
                .map(|lane| {
                    let context = context.clone();
                    scope.spawn(move || {
                        context.bind_to_thread().unwrap();
                        lane.run(round);
                    })
                })
                .collect();
            scope.spawn(|| {
                for turn in 0_u32.. {
                    let gate = (turn % 8 == 0).then(|| double.hold(stuck.cu_stream()));
                    for pool in [&pool, &partition] {
                        clock.advance_us(2_000);
                        match turn % 4 {
                            0 => pool.poll(),
                            1 => pool.trim(4 << 20),
                            2 => pool.clear(),
                            _ => pool.trim(0),
                        }
                    }
                    thread::yield_now();
                    drop(gate);
                    if is_over.load(Ordering::Relaxed) {
                        break;
                    }
                }
            });
            let ends: Vec<_> = copying.into_iter().map(|lane| lane.join()).collect();
            is_over.store(true, Ordering::Relaxed);
            ends.into_iter().for_each(|end| end.unwrap());
        });
        let counts = double.counts();
        assert_eq!(counts.frees_with_work_in_flight, 0, "{what}: memory was released under a copy");
        let most_bytes = counts.peak_pinned_bytes - before.pinned_bytes;
        assert!(most_bytes <= 12 << 20, "{what}: {most_bytes} B pinned");
        // No copy is in flight, so everything is released: at once, or after a release that still runs.
        lanes.iter().for_each(|lane| lane.stream.synchronize().unwrap());
        partition.clear();
        pool.clear();
        while pool.stats().pinned_bytes > 0 {
            clock.advance_us(20_000);
            pool.poll();
            thread::yield_now();
        }
        assert!(releases(double) > 0, "{what}");
        for pool in [&pool, &partition] {
            let stats = pool.stats();
            stats.validate().unwrap();
            assert_eq!((stats.in_use, stats.in_flight, stats.lost, stats.failed_gets), (0, 0, 0, 0), "{what}");
        }
    }
    lanes.iter().for_each(Lane::check);
    drop((pool, partition, lanes));
    assert_eq!(held(double), before, "{what} left memory behind");
    assert_eq!(double.wrong_uses(), Vec::<String>::new(), "{what}");
}

#[test]
fn churn_releases_no_memory_under_a_copy_and_forgets_none() {
    for backend in BACKENDS {
        for (release, fence) in [(ReleasePolicy::Idle, FenceKind::Event), (ReleasePolicy::Force, FenceKind::Timeline)] {
            churn(backend.clone(), release, fence, &Double::load());
        }
    }
}

/// The work of a stream that no default stream is ordered with would hold up the release, and with it every enqueue.
#[test]
fn nothing_is_released_under_work_of_a_stream_that_copies_went_to() {
    for backend in BACKENDS {
        let double = Double::load();
        let context = CudaContext::new(0).unwrap();
        let (stream, mut memory) = stream_and_memory(&context, 4096);
        let pool = builder(backend).build().unwrap();
        drop(pool.get(3 * MIB).unwrap());
        filled(&pool, 4096, 7).copy_to(&stream, &mut memory).unwrap().wait().unwrap();
        let gate = double.hold(stream.cu_stream());
        let other = stream.clone_htod(&[1_u8; 64]).unwrap();
        let before = releases(&double);
        pool.trim(0);
        assert_eq!(releases(&double), before, "the stream has work of others");
        assert!(pool.stats().awaiting_release_bytes >= 3 << 20);
        drop(gate);
        stream.synchronize().unwrap();
        // What was put off is not forgotten.
        pool.trim(1 << 30);
        assert!(releases(&double) > before && pool.stats().awaiting_release_bytes == 0);
        drop(other);
        assert_eq!(double.counts().frees_with_work_in_flight, 0);
    }
}

/// Whether a `trim(0)` of `pool` releases anything under held work. If not, the enqueue of another thread ends under that work, too.
fn releases_under_held_work(double: &Double, pool: &Pool, held: HeldStream<'_>, other: &Arc<CudaStream>) -> bool {
    let before = releases(double);
    thread::scope(|scope| {
        let trimming = scope.spawn(|| pool.trim(0));
        while !trimming.is_finished() && releases(double) == before {
            thread::yield_now();
        }
        let releases_any = releases(double) > before;
        if !releases_any {
            scope.spawn(|| other.clone_htod(&[1_u8; 64]).map(drop)).join().unwrap().unwrap();
        }
        drop(held);
        releases_any
    })
}

/// A release waits for all work of the device, and every enqueue for the release.
#[test]
fn nothing_is_released_under_work_that_another_pool_lent_memory_to_by_the_handle_of_its_stream() {
    for backend in BACKENDS {
        let double = Double::load();
        let context = CudaContext::new(0).unwrap();
        let ((stream, _), (other, _)) = (stream_and_memory(&context, 4096), stream_and_memory(&context, 4096));
        let (pool, lender) = (builder(backend.clone()).build().unwrap(), builder(backend).build().unwrap());
        drop(pool.get(3 * MIB).unwrap());
        let before = releases(&double);
        let held = double.hold(stream.cu_stream());
        let work = stream.clone_htod(&[1_u8; 64]).unwrap();
        lend(&lender, &stream).unwrap();
        assert!(!releases_under_held_work(&double, &pool, held, &other));
        assert!(releases(&double) == before && pool.stats().awaiting_release_bytes >= 3 << 20);
        drop(work);
        [&stream, &other].into_iter().for_each(|stream| stream.synchronize().unwrap());
        drop(stream);
        // What was put off is not forgotten, and the handle that is gone by now is not asked.
        pool.trim(1 << 30);
        assert_eq!((releases(&double) - before, pool.stats().awaiting_release_bytes), (1, 0));
        assert_eq!((double.counts().frees_with_work_in_flight, double.wrong_uses()), (0, Vec::new()));
    }
}

/// Lends memory to a stream by its handle.
fn lend(pool: &Pool, stream: &CudaStream) -> Result<(), String> {
    // SAFETY: the stream is alive.
    let lent = pool.get(4096).unwrap().release_after(&unsafe { RawStream::new(stream.cu_stream().cast()) });
    lent.map_err(|refused| refused.to_string())
}

/// The driver leaves a capture valid whose process releases memory in relaxed mode, and it runs nothing that a release would
/// wait for.
#[test]
fn a_capture_that_refused_a_loan_holds_no_release_back_and_stays_valid() {
    for backend in BACKENDS {
        let double = Double::load();
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        let [pool, lender] = [(); 2].map(|()| builder(backend.clone()).build().unwrap());
        drop(pool.get(3 * MIB).unwrap());
        begin_capture(&stream, CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL);
        assert!(lend(&lender, &stream).unwrap_err().contains("capturing a graph"));
        let before = releases(&double);
        pool.trim(0);
        assert_eq!((releases(&double) - before, pool.stats().awaiting_release_bytes), (1, 0));
        end_capture_unnoticed(&stream).unwrap();
    }
}
