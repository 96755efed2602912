//! Where a release waits for the device, nothing is released by time alone, and nothing while the device is seen to have work.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use driver_double::Double;
use pinpool::testing::ManualClock;
use pinpool::{Backend, Pool};

use crate::child::alone;
use crate::fixture::{MIB, PressureFile, builder, held};

/// Back-ends whose release waits for the device.
const BACKENDS: [Backend; 2] = [Backend::Register, Backend::Cuda];
/// A wait that lasts longer is a failure.
const LONGEST: Duration = Duration::from_secs(20);

fn releases(double: &Double) -> u64 {
    double.calls("cuMemHostUnregister") + double.calls("cuMemFreeHost")
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < LONGEST, "{what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Two hours, a look each minute; releases that are due run on threads of their own.
fn two_hours(pool: &Pool, clock: &ManualClock) {
    for _ in 0..120 {
        clock.advance_us(60_000_000);
        pool.poll();
        thread::sleep(Duration::from_micros(200));
    }
}

/// Work of other code, on the default stream.
fn other_work(stream: &Arc<CudaStream>) -> CudaSlice<u8> {
    stream.alloc_zeros(4096).unwrap()
}

#[test]
fn nothing_is_released_by_time_alone_where_a_release_waits() {
    for backend in BACKENDS {
        let double = Double::load();
        let clock = ManualClock::default();
        let pool = builder(backend).clock(clock.clone()).build().unwrap();
        drop(pool.get(3 * MIB).unwrap());
        two_hours(&pool, &clock);
        let stats = pool.stats();
        assert_eq!((releases(&double), stats.awaiting_release_bytes, stats.buffers_in_pool), (0, 0, 0), "{stats:?}");
        // It serves again without a call of the driver, in another size too.
        let allocs = stats.underlying.allocs;
        drop(pool.get(2 * MIB).unwrap());
        assert_eq!(pool.stats().underlying.allocs, allocs);
        pool.trim(0);
        assert_eq!((releases(&double), pool.stats().pinned_bytes), (1, 0));
    }
    let double = Double::load();
    let clock = ManualClock::default();
    let pool = builder(Backend::Vmm).clock(clock.clone()).build().unwrap();
    drop(pool.get(3 * MIB).unwrap());
    let unmapped = double.calls("cuMemUnmap");
    two_hours(&pool, &clock);
    wait_until("the release on a thread of its own", || pool.stats().pinned_bytes == 0);
    assert!(double.calls("cuMemUnmap") > unmapped, "there a release waits for nothing");
}

#[test]
fn each_other_cause_releases() {
    for backend in BACKENDS {
        let double = Double::load();
        let (clock, pressure) = (ManualClock::default(), PressureFile::new());
        let pool = builder(backend.clone()).clock(clock.clone()).pressure(pressure.source()).build().unwrap();
        let filled_with = |pool: &Pool| drop(pool.get(3 * MIB).unwrap());
        filled_with(&pool);
        pool.clear();
        assert_eq!(releases(&double), 1, "clear");
        filled_with(&pool);
        pool.set_max_bytes(1 << 20).unwrap();
        assert_eq!(releases(&double), 2, "a ceiling");
        pool.set_max_bytes(64 << 20).unwrap();
        filled_with(&pool);
        two_hours(&pool, &clock);
        assert_eq!(releases(&double), 2);
        pressure.write(20.0);
        wait_until("pressure", || {
            clock.advance_us(60_000_000);
            pool.poll();
            releases(&double) == 3
        });
        pressure.write(0.0);
        clock.advance_us(60_000_000);
        pool.poll();
        filled_with(&pool);
        two_hours(&pool, &clock);
        assert_eq!(releases(&double), 3, "the pressure is over");
        drop(pool);
        assert_eq!(releases(&double), 4, "the end");
        let idle_limit = builder(backend).max_idle_bytes(1 << 20).build().unwrap();
        filled_with(&idle_limit);
        idle_limit.poll();
        assert_eq!(releases(&double), 5, "a limit of what is idle");
    }
}

#[test]
fn a_trim_and_a_clear_beside_work_of_other_code_are_made_when_the_device_is_seen_idle() {
    for backend in BACKENDS {
        for release in [|pool: &Pool| pool.trim(0), Pool::clear, |pool: &Pool| pool.set_max_bytes(1 << 20).unwrap()] {
            let double = Double::load();
            let context = CudaContext::new(0).unwrap();
            let stream = context.default_stream();
            let pool = builder(backend.clone()).build().unwrap();
            drop(pool.get(3 * MIB).unwrap());
            let gate = double.hold_all();
            let memory = other_work(&stream);
            release(&pool);
            pool.poll();
            assert_eq!(releases(&double), 0);
            drop(gate);
            stream.synchronize().unwrap();
            wait_until("the release", || {
                pool.poll();
                releases(&double) > 0
            });
            assert_eq!((pool.stats().awaiting_release_bytes, double.counts().frees_with_work_in_flight), (0, 0));
            drop((pool, memory));
        }
    }
}

#[test]
fn the_end_of_a_pool_on_vmm_unregisters_its_reserve_when_the_device_is_seen_idle() {
    alone(|| {
        let double = Double::load();
        let context = CudaContext::new(0).unwrap();
        let stream = context.default_stream();
        let before = held(&double);
        for is_busy in [false, true] {
            let pool = builder(Backend::Vmm).reserve_bytes(4 << 20).build().unwrap();
            drop(pool.get(8 * MIB).unwrap());
            let gate = is_busy.then(|| double.hold_all());
            let memory = is_busy.then(|| other_work(&stream));
            let released = double.calls("cuMemHostUnregister");
            drop(pool);
            // The granules are gone, the reserve only if no one waits for it.
            assert_eq!(double.counts().granules, before.granules);
            assert_eq!(double.calls("cuMemHostUnregister") - released, u64::from(!is_busy));
            drop(gate);
            stream.synchronize().unwrap();
            wait_until("the release of the reserve", || double.calls("cuMemHostUnregister") - released == 1);
            wait_until("all is given back", || held(&double) == before);
            drop(memory);
        }
        assert_eq!((double.counts().frees_with_work_in_flight, double.wrong_uses()), (0, Vec::new()));
    });
}

#[test]
fn the_end_of_a_pool_waits_for_work_of_other_code_without_holding_it_up() {
    for backend in BACKENDS {
        let double = Double::load();
        let context = CudaContext::new(0).unwrap();
        let stream = context.default_stream();
        let pool = builder(backend).build().unwrap();
        drop(pool.get(3 * MIB).unwrap());
        let gate = double.hold_all();
        let memory = other_work(&stream);
        thread::scope(|scope| {
            let end = scope.spawn(|| drop(pool));
            // While it waits, other threads enqueue.
            let _more = stream.alloc_zeros::<u8>(4096).unwrap();
            thread::sleep(Duration::from_millis(20));
            assert_eq!(releases(&double), 0);
            drop(gate);
            end.join().unwrap();
        });
        assert_eq!((releases(&double), double.counts().frees_with_work_in_flight), (1, 0));
        drop(memory);
    }
}
