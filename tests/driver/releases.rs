//! When `register` and `cuda` release memory. A release waits for the device, so they release only on request, at the limit, under
//! memory pressure and at the end. No memory that a copy uses is released.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use cudarc::driver::{CudaSlice, CudaStream};
use mock_driver::{Code, HeldStream, MockDriver};
use pinpool::unstable::ManualClock;
use pinpool::{Backend, Pool};

use crate::events_only::EventsOnly;
use crate::fixture::{MIB, builder, filled, maintain_until, on_a_stream, with_manual_clock};
use crate::pressure_file::PressureFile;
use crate::until::until;

/// Backends with releases that wait for the device.
const BACKENDS: [Backend; 2] = [Backend::Register, Backend::Cuda];
fn releases(driver: &MockDriver) -> u64 {
    driver.calls("cuMemHostUnregister") + driver.calls("cuMemFreeHost")
}

/// Two hours with a `maintain` every minute. Releases that are due run on dedicated threads.
fn two_hours(pool: &Pool, clock: &ManualClock) {
    for _ in 0..120 {
        clock.advance_us(60_000_000);
        pool.maintain();
        thread::sleep(Duration::from_micros(200));
    }
}

#[test]
fn memory_is_not_released_by_time_if_releases_wait() {
    for backend in BACKENDS {
        let driver = MockDriver::load();
        let (pool, clock) = with_manual_clock(builder(backend));
        drop(pool.get(3 * MIB).unwrap());
        two_hours(&pool, &clock);
        let stats = pool.stats();
        assert_eq!((releases(&driver), stats.memory.idle), (0, 0), "{stats:?}");
        assert_eq!(stats.memory.awaiting_release_bytes, stats.memory.free_bytes, "{stats:?}");
        // The memory serves requests again without a driver call, even of another size.
        let allocs = stats.memory.pin.count;
        drop(pool.get(2 * MIB).unwrap());
        assert_eq!(pool.stats().memory.pin.count, allocs);
        pool.trim(0);
        assert_eq!((releases(&driver), pool.stats().memory.held_bytes), (1, 0));
    }
    let driver = MockDriver::load();
    let (pool, clock) = with_manual_clock(builder(Backend::Vmm));
    drop(pool.get(3 * MIB).unwrap());
    let unmapped = driver.calls("cuMemUnmap");
    two_hours(&pool, &clock);
    until("the release on a dedicated thread", || pool.stats().memory.held_bytes == 0);
    assert!(driver.calls("cuMemUnmap") > unmapped, "a release of vmm waits for nothing");
}

#[test]
fn every_other_cause_releases_memory() {
    for backend in BACKENDS {
        let driver = MockDriver::load();
        let pressure = PressureFile::new();
        let under_pressure = builder(backend.clone()).unstable_settings(|only| only.pressure = Some(pressure.path()));
        let (pool, clock) = with_manual_clock(under_pressure);
        let filled_with = |pool: &Pool| drop(pool.get(3 * MIB).unwrap());
        filled_with(&pool);
        pool.clear();
        assert_eq!(releases(&driver), 1, "clear");
        filled_with(&pool);
        pool.set_max_bytes(1 << 20).unwrap();
        assert_eq!(releases(&driver), 2, "a limit");
        pool.set_max_bytes(64 << 20).unwrap();
        filled_with(&pool);
        two_hours(&pool, &clock);
        assert_eq!(releases(&driver), 2);
        pressure.write(20.0, 0.0);
        maintain_until(&pool, |_| {
            clock.advance_us(60_000_000);
            releases(&driver) == 3
        });
        pressure.write(0.0, 0.0);
        clock.advance_us(60_000_000);
        pool.maintain();
        filled_with(&pool);
        two_hours(&pool, &clock);
        assert_eq!(releases(&driver), 3, "the pressure has ended");
        drop(pool);
        assert_eq!(releases(&driver), 4, "the end");
        let idle_limit = builder(backend).max_idle_bytes(1 << 20).build().unwrap();
        filled_with(&idle_limit);
        idle_limit.maintain();
        assert_eq!(releases(&driver), 5, "a limit of idle memory");
    }
}

/// Makes a copy on `stream`, which is held, and runs `release` until it is inside a driver call. Checks that a hit is served
/// meanwhile. Then lets the device continue.
fn release_during_a_copy(
    driver: &MockDriver,
    pool: &Pool,
    (stream, memory): (&Arc<CudaStream>, &mut CudaSlice<u8>),
    release: impl FnOnce(&Pool) + Send,
) {
    drop(pool.get(4096).unwrap());
    let held: HeldStream<'_> = driver.hold(stream.cu_stream());
    drop(filled(pool, 2048, 7).copy_to(stream, memory).unwrap());
    let before = releases(driver);
    thread::scope(|scope| {
        let releasing = scope.spawn(|| release(pool));
        until("the release is in the driver", || releases(driver) > before);
        assert!(!releasing.is_finished(), "it waits for the device");
        drop(pool.try_get(4096).unwrap());
        drop(held);
        releasing.join().unwrap();
    });
    assert_eq!(stream.clone_dtoh(memory).unwrap(), [[7; 2048], [0; 2048]].concat());
}

#[test]
fn a_trim_or_a_request_at_the_limit_releases_and_waits_for_the_device() {
    const LIMIT: u64 = (6 << 20) + 8192;
    let by_trim: fn(&Pool) = |pool| pool.trim(0);
    let by_request: fn(&Pool) = |pool| drop(pool.get(5 * MIB).unwrap());
    for (backend, release) in
        BACKENDS.into_iter().flat_map(|backend| [by_trim, by_request].map(|by| (backend.clone(), by)))
    {
        let (driver, stream, mut memory) = on_a_stream(4096);
        let before_bytes = driver.counts().pinned_bytes;
        let pool = builder(backend).max_bytes(LIMIT).wait(Duration::ZERO).build().unwrap();
        drop(pool.get(4096).unwrap());
        drop(pool.get(3 * MIB).unwrap());
        release_during_a_copy(&driver, &pool, (&stream, &mut memory), release);
        let most_bytes = driver.counts().peak_pinned_bytes - before_bytes;
        assert!(most_bytes <= LIMIT, "{most_bytes}");
        pool.trim(0);
        assert_eq!(pool.stats().memory.held_bytes, 0);
    }
}

/// The end of a copy is unknown, so a release might wait forever.
#[test]
fn nothing_is_released_while_a_copy_is_quarantined() {
    for backend in BACKENDS {
        let (driver, stream, mut memory) = on_a_stream(4096);
        let _events = EventsOnly::begin();
        let pool = builder(backend).unstable_clock(ManualClock::default()).build().unwrap();
        drop(pool.get(3 * MIB).unwrap());
        drop(filled(&pool, 4096, 7).copy_to(&stream, &mut memory).unwrap());
        stream.synchronize().unwrap();
        driver.fail("cuEventQuery", 1, Code::UNKNOWN);
        pool.maintain();
        assert_eq!(pool.stats().memory.quarantined, 1);
        driver.fail("cuEventQuery", 1, Code::UNKNOWN);
        pool.trim(0);
        assert_eq!((releases(&driver), pool.stats().memory.quarantined), (0, 1));
        pool.trim(0);
        assert_eq!((pool.stats().memory.quarantined, pool.stats().memory.held_bytes), (0, 0));
    }
}
