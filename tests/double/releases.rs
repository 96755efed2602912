//! When `register` and `cuda` release memory. A release waits for the device, so they release only on request, at the limit, under
//! memory pressure and at the end. No memory that a copy uses is released.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use mock_driver::{Code, HeldStream, MockDriver};
use pinpool::unstable::ManualClock;
use pinpool::{Backend, FenceKind, PinnedBuf, Pool};

use crate::fixture::{MIB, PressureFile, builder, filled, held, stream_and_memory};

/// Backends with releases that wait for the device.
const BACKENDS: [Backend; 2] = [Backend::Register, Backend::Cuda];
/// A wait that lasts longer is a failure.
const LONGEST: Duration = Duration::from_secs(20);

fn releases(double: &MockDriver) -> u64 {
    double.calls("cuMemHostUnregister") + double.calls("cuMemFreeHost")
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < LONGEST, "{what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Two hours with a poll every minute. Releases that are due run on dedicated threads.
fn two_hours(pool: &Pool, clock: &ManualClock) {
    for _ in 0..120 {
        clock.advance_us(60_000_000);
        pool.maintain();
        thread::sleep(Duration::from_micros(200));
    }
}

#[test]
fn nothing_is_released_by_time_alone_if_a_release_waits() {
    for backend in BACKENDS {
        let double = MockDriver::load();
        let clock = ManualClock::default();
        let pool = builder(backend).unstable_clock(clock.clone()).build().unwrap();
        drop(pool.get(3 * MIB).unwrap());
        two_hours(&pool, &clock);
        let stats = pool.stats();
        assert_eq!((releases(&double), stats.memory.idle), (0, 0), "{stats:?}");
        assert_eq!(stats.memory.awaiting_release_bytes, stats.memory.free_bytes, "{stats:?}");
        // It serves again without a call of the driver, in another size too.
        let allocs = stats.memory.pin.count;
        drop(pool.get(2 * MIB).unwrap());
        assert_eq!(pool.stats().memory.pin.count, allocs);
        pool.trim(0);
        assert_eq!((releases(&double), pool.stats().memory.held_bytes), (1, 0));
    }
    let double = MockDriver::load();
    let clock = ManualClock::default();
    let pool = builder(Backend::Vmm).unstable_clock(clock.clone()).build().unwrap();
    drop(pool.get(3 * MIB).unwrap());
    let unmapped = double.calls("cuMemUnmap");
    two_hours(&pool, &clock);
    wait_until("the release on a dedicated thread", || pool.stats().memory.held_bytes == 0);
    assert!(double.calls("cuMemUnmap") > unmapped, "a release of vmm waits for nothing");
}

#[test]
fn each_other_cause_releases() {
    for backend in BACKENDS {
        let double = MockDriver::load();
        let (clock, pressure) = (ManualClock::default(), PressureFile::new());
        let pool =
            builder(backend.clone()).unstable_clock(clock.clone()).unstable_pressure(pressure.path()).build().unwrap();
        let filled_with = |pool: &Pool| drop(pool.get(3 * MIB).unwrap());
        filled_with(&pool);
        pool.clear();
        assert_eq!(releases(&double), 1, "clear");
        filled_with(&pool);
        pool.set_max_bytes(1 << 20).unwrap();
        assert_eq!(releases(&double), 2, "a limit");
        pool.set_max_bytes(64 << 20).unwrap();
        filled_with(&pool);
        two_hours(&pool, &clock);
        assert_eq!(releases(&double), 2);
        pressure.write(20.0);
        wait_until("pressure", || {
            clock.advance_us(60_000_000);
            pool.maintain();
            releases(&double) == 3
        });
        pressure.write(0.0);
        clock.advance_us(60_000_000);
        pool.maintain();
        filled_with(&pool);
        two_hours(&pool, &clock);
        assert_eq!(releases(&double), 3, "the pressure is over");
        drop(pool);
        assert_eq!(releases(&double), 4, "the end");
        let idle_limit = builder(backend).setting("max_idle_bytes", 1 << 20).build().unwrap();
        filled_with(&idle_limit);
        idle_limit.maintain();
        assert_eq!(releases(&double), 5, "a limit of idle memory");
    }
}

/// Makes a copy on `stream`, which is held, and runs `release` until it is in the driver. A hit is served meanwhile. Then lets the
/// device continue.
fn release_beside_a_copy(
    double: &MockDriver,
    pool: &Pool,
    (stream, memory): (&Arc<CudaStream>, &mut CudaSlice<u8>),
    release: impl FnOnce(&Pool) + Send,
) {
    drop(pool.get(4096).unwrap());
    let held: HeldStream<'_> = double.hold(stream.cu_stream());
    drop(filled(pool, 2048, 7).copy_to(stream, memory).unwrap());
    let before = releases(double);
    thread::scope(|scope| {
        let releasing = scope.spawn(|| release(pool));
        wait_until("the release is in the driver", || releases(double) > before);
        assert!(!releasing.is_finished(), "it waits for the device");
        drop(pool.try_get(4096).unwrap());
        drop(held);
        releasing.join().unwrap();
    });
    assert_eq!(stream.clone_dtoh(memory).unwrap(), [[7; 2048], [0; 2048]].concat());
}

#[test]
fn a_trim_and_a_request_that_nothing_else_serves_release_regions_and_wait_for_the_device() {
    const LIMIT: u64 = (6 << 20) + 8192;
    let by_trim: fn(&Pool) = |pool| pool.trim(0);
    let by_request: fn(&Pool) = |pool| drop(pool.get(5 * MIB).unwrap());
    for (backend, release) in
        BACKENDS.into_iter().flat_map(|backend| [by_trim, by_request].map(|by| (backend.clone(), by)))
    {
        let double = MockDriver::load();
        let context = CudaContext::new(0).unwrap();
        let (stream, mut memory) = stream_and_memory(&context, 4096);
        let before_bytes = double.counts().pinned_bytes;
        let pool = builder(backend).max_bytes(LIMIT).wait(Duration::ZERO).build().unwrap();
        drop(pool.get(4096).unwrap());
        drop(pool.get(3 * MIB).unwrap());
        release_beside_a_copy(&double, &pool, (&stream, &mut memory), release);
        let most_bytes = double.counts().peak_pinned_bytes - before_bytes;
        assert!(most_bytes <= LIMIT, "{most_bytes}");
        pool.trim(0);
        assert_eq!((pool.stats().memory.held_bytes, double.wrong_uses()), (0, Vec::new()));
    }
}

/// The end of a copy is unknown, so a release might wait for it for ever.
#[test]
fn nothing_is_released_while_a_copy_is_quarantined() {
    for backend in BACKENDS {
        let double = MockDriver::load();
        let context = CudaContext::new(0).unwrap();
        let (stream, mut memory) = stream_and_memory(&context, 4096);
        let clock = ManualClock::default();
        let pool = builder(backend).unstable_fence(FenceKind::Event).unstable_clock(clock.clone()).build().unwrap();
        drop(pool.get(3 * MIB).unwrap());
        drop(filled(&pool, 4096, 7).copy_to(&stream, &mut memory).unwrap());
        stream.synchronize().unwrap();
        double.fail("cuEventQuery", 1, Code::UNKNOWN);
        pool.maintain();
        assert_eq!(pool.stats().memory.quarantined, 1);
        double.fail("cuEventQuery", 1, Code::UNKNOWN);
        pool.trim(0);
        assert_eq!((releases(&double), pool.stats().memory.quarantined), (0, 1));
        pool.trim(0);
        assert_eq!((pool.stats().memory.quarantined, pool.stats().memory.held_bytes), (0, 0));
    }
}

/// A stream, and device memory for each batch that is copied on it.
struct Lane {
    get: Box<dyn Fn(usize) -> PinnedBuf + Send>,
    stream: Arc<CudaStream>,
    memories: Vec<CudaSlice<u8>>,
    number: u8,
}

const ROUNDS: u8 = 3;
const BATCHES: u8 = 18;
const LONGEST_BYTES: usize = 3 * MIB;

impl Lane {
    fn new(number: u8, get: impl Fn(usize) -> PinnedBuf + Send + 'static, context: &Arc<CudaContext>) -> Self {
        let stream = context.new_stream().unwrap();
        let memories =
            (0..ROUNDS * BATCHES).map(|batch| stream.alloc_zeros(Self::len(number, batch)).unwrap()).collect();
        stream.synchronize().unwrap();
        Self { get: Box::new(get), stream, memories, number }
    }

    /// Lengths up to `LONGEST_BYTES`, in an order that depends on the lane.
    fn len(number: u8, batch: u8) -> usize {
        let spread = (usize::from(batch) + 1) * (usize::from(number) * 2 + 31) % 97;
        1 + spread * LONGEST_BYTES / 97
    }

    fn byte(&self, batch: u8) -> u8 {
        1 + (batch * 3 + self.number) % 250
    }

    /// Uses each method of copying in turn.
    fn run(&mut self, round: u8) {
        let stream = self.stream.clone();
        for batch in round * BATCHES..(round + 1) * BATCHES {
            let (byte, len) = (self.byte(batch), Self::len(self.number, batch));
            let memory = &mut self.memories[usize::from(batch)];
            let mut buf = (self.get)(len);
            buf.wait_slice_mut().unwrap().fill(byte);
            match batch % 6 {
                // Dropped without a wait: the next request may need this memory.
                0 | 1 => drop(buf.copy_to(&stream, memory).unwrap()),
                2 => drop(buf.copy_range_to(0..len, &stream, memory).unwrap()),
                3 => {
                    // The buffer itself waits for the copy and stays in use while memory is released.
                    buf.copy_range_to(0..len, &stream, memory).unwrap();
                    assert!(*buf.wait_slice_mut().unwrap() == vec![byte; len]);
                }
                4 => {
                    buf.copy_to(&stream, memory).unwrap().wait().unwrap();
                    let back = (self.get)(len).copy_from(&stream, memory).unwrap();
                    assert!(*back.wait().unwrap().wait_slice().unwrap() == vec![byte; len]);
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
fn churn(backend: Backend, fence: FenceKind, double: &MockDriver) {
    let name = backend.name();
    let what = format!("{name} {fence:?}");
    let context = CudaContext::new(0).unwrap();
    // The page of the timelines stays with the context.
    let other = builder(backend.clone()).build().unwrap();
    Lane::new(0, move |len| other.get(len).unwrap(), &context).run(0);
    double.reset();
    let (before, before_bytes) = (held(double), double.counts().pinned_bytes);
    let clock = ManualClock::default();
    let pool = builder(backend)
        .unstable_fence(fence)
        .unstable_clock(clock.clone())
        .idle_timeout(Duration::from_millis(1))
        .max_bytes(12 << 20)
        .wait(Duration::from_secs(60))
        .build()
        .unwrap();
    let partition = pool.partition("other", 6 << 20).unwrap();
    let of_pool = || {
        let pool = pool.clone();
        move |len| pool.get(len).unwrap()
    };
    let of_partition = partition.clone();
    let mut lanes = [
        Lane::new(0, of_pool(), &context),
        Lane::new(1, of_pool(), &context),
        Lane::new(2, move |len| of_partition.get(len).unwrap(), &context),
    ];
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
                    clock.advance_us(2_000);
                    match turn % 4 {
                        0 => pool.maintain(),
                        1 => pool.trim(4 << 20),
                        2 => pool.clear(),
                        _ => pool.trim(0),
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
        let most_bytes = counts.peak_pinned_bytes - before_bytes;
        assert!(most_bytes <= 12 << 20, "{what}: {most_bytes} B pinned");
        // No copy is in flight, so everything is released.
        lanes.iter().for_each(|lane| lane.stream.synchronize().unwrap());
        pool.clear();
        while pool.stats().memory.held_bytes > 0 {
            clock.advance_us(20_000);
            pool.maintain();
            thread::yield_now();
        }
        let has_waited = double.counts().frees_with_work_in_flight > 0;
        assert!(if name == "vmm" { !has_waited } else { releases(double) > 0 }, "{what}");
        for stats in [pool.stats(), partition.stats()] {
            stats.validate().unwrap();
            assert_eq!(
                (stats.memory.in_use, stats.copies.in_flight, stats.memory.quarantined, stats.requests.failed),
                (0, 0, 0, 0),
                "{what}"
            );
        }
    }
    lanes.iter().for_each(Lane::check);
    drop((pool, partition, lanes));
    assert_eq!(held(double), before, "{what} left memory behind");
    assert_eq!(double.wrong_uses(), Vec::<String>::new(), "{what}");
}

#[test]
fn churn_releases_no_memory_that_a_copy_uses_and_forgets_none() {
    for backend in [Backend::Vmm, Backend::Register, Backend::Cuda] {
        for fence in [FenceKind::Event, FenceKind::Timeline] {
            churn(backend.clone(), fence, &MockDriver::load());
        }
    }
}
