//! Reserves of `vmm` and `register`, also if the driver registers no memory, as under confidential computing.

use mock_driver::{Code, MockDriver};
use pinpool::{Backend, Pool};

use crate::child::alone;
use crate::fixture::{MIB, builder, filled, held, loaded};
use crate::valid_stats::valid_stats;

const REGISTERS: i32 = 99;

#[test]
fn a_reserve_uses_granules_if_registering_is_unsupported() {
    let (driver, before) = loaded();
    driver.fail_from("cuMemHostRegister_v2", 1, Code::NOT_SUPPORTED);
    let pool = builder(Backend::Vmm).reserve(16 << 20).build().unwrap();
    let now = held(&driver);
    assert_eq!((now.registrations, now.granules - before.granules), (before.registrations, 8));
    assert_eq!(now.pinned_bytes - before.pinned_bytes, pool.stats().memory.held_bytes);
    assert_eq!((pool.stats().memory.reserve_bytes, pool.stats().memory.held_bytes), (16 << 20, 16 << 20));
    // All of it serves buffers and none of it is released before the end.
    let created = driver.calls("cuMemCreate");
    let bufs = [1, 7, 8].map(|mib| filled(&pool, mib * MIB, u8::try_from(mib).unwrap()));
    assert_eq!(driver.calls("cuMemCreate"), created);
    drop(bufs);
    pool.clear();
    pool.trim(0);
    assert_eq!(pool.stats().memory.held_bytes, 16 << 20);
    valid_stats(&pool);
    // The driver is asked only once, so that later reserves do not touch pages before a call that will be refused.
    let registered = driver.calls("cuMemHostRegister_v2");
    pool.reserve(4 << 20).unwrap();
    assert_eq!((driver.calls("cuMemHostRegister_v2"), pool.stats().memory.reserve_bytes), (registered, 20 << 20));
    drop(pool);
    assert_eq!(held(&driver), before);
}

#[test]
fn a_device_that_reports_no_registering_is_not_asked_to_register() {
    let driver = MockDriver::load();
    driver.set_attribute(REGISTERS, 0);
    let pool = builder(Backend::Vmm).reserve(4 << 20).build().unwrap();
    assert_eq!((pool.stats().memory.reserve_bytes, driver.calls("cuMemHostRegister_v2")), (4 << 20, 0));
    driver.set_attribute(REGISTERS, 1);
}

#[test]
fn a_reserve_of_granules_never_exceeds_the_limit() {
    let driver = MockDriver::load();
    let pool = builder(Backend::Vmm).max_bytes(11 << 20).build().unwrap();
    let before = held(&driver);
    driver.fail_from("cuMemHostRegister_v2", 1, Code::NOT_SUPPORTED);
    // Whole pages would fit, but whole granules do not.
    let error = pool.reserve((11 << 20) - 4096).unwrap_err();
    let text = error.to_string();
    assert!(error.is_backend() && text.contains("registers no memory") && text.contains("PINPOOL_MAX_BYTES"), "{text}");
    assert_eq!(held(&driver), before);
    pool.reserve(8 << 20).unwrap();
    assert_eq!(held(&driver).pinned_bytes - before.pinned_bytes, 8 << 20);
    valid_stats(&pool);
}

#[test]
fn a_limit_below_the_reserve_evicts_only_what_it_releases() {
    // A reserve that is made while the pool is in use consists of granules, which a lower limit releases.
    for is_in_granules in [false, true] {
        let driver = MockDriver::load();
        let builder = builder(Backend::Vmm).max_bytes(16 << 20).reserve(12 << 20).maintenance_thread(false);
        let pool = builder.reserve_wait(!is_in_granules).build().unwrap();
        drop(pool.get(1 << 20).unwrap());
        (0..100).for_each(|_| pool.maintain());
        drop([(); 4].map(|()| pool.get(1 << 20).unwrap()));
        driver.fail_from("cuMemUnmap", 1, Code::OUT_OF_MEMORY);
        pool.set_max_bytes(8 << 20).unwrap();
        let memory = || {
            let memory = pool.stats().memory;
            (memory.evictions.total(), memory.idle_bytes, memory.held_bytes)
        };
        assert_eq!(memory(), (0, 4 << 20, 12 << 20));
        driver.reset_scripts();
        pool.maintain();
        assert_eq!(memory(), (0, 4 << 20, if is_in_granules { 8 << 20 } else { 12 << 20 }));
    }
}

#[test]
fn a_long_reserve_is_registered_in_slices() {
    for backend in [Backend::Register, Backend::Vmm] {
        let (driver, before) = loaded();
        let registered = driver.calls("cuMemHostRegister_v2");
        let pool = builder(backend).reserve(272 << 20).build().unwrap();
        let slices = driver.calls("cuMemHostRegister_v2") - registered;
        assert_eq!((slices, pool.stats().memory.reserve_bytes), (3, 272 << 20));
        assert_eq!(held(&driver).pinned_bytes - before.pinned_bytes, 272 << 20);
        let allocs = pool.stats().memory.pin.count;
        drop([120, 120, 16].map(|mib| pool.get(mib * MIB).unwrap()));
        assert_eq!(pool.stats().memory.pin.count, allocs);
        drop(pool);
        assert_eq!(held(&driver), before);
    }
}

#[test]
fn a_partly_refused_reserve_keeps_the_pinned_slices() {
    let (driver, before) = loaded();
    driver.fail_from("cuMemHostRegister_v2", 2, Code::OUT_OF_MEMORY);
    let pool = builder(Backend::Register).max_bytes(1 << 30).reserve(272 << 20).build().unwrap();
    let stats = valid_stats(&pool);
    assert!([16 << 20, 128 << 20].contains(&stats.memory.reserve_bytes), "{stats}");
    assert_eq!(held(&driver).pinned_bytes - before.pinned_bytes, stats.memory.held_bytes);
    driver.reset();
    pool.reserve(32 << 20).unwrap();
    let expected = stats.memory.reserve_bytes + (32 << 20);
    assert_eq!(pool.stats().memory.reserve_bytes, expected, "what was not pinned is claimed no more");
    drop(pool);
    assert_eq!(held(&driver), before);
}

#[test]
fn a_process_may_exit_while_the_driver_pins() {
    alone(|| {
        let _driver = MockDriver::load();
        for backend in [Backend::Vmm, Backend::Register] {
            let pool = Pool::builder().without_env().backend(backend).max_bytes(1 << 30);
            std::mem::forget(pool.reserve(512 << 20).reserve_wait(false).build().unwrap());
        }
    });
}
