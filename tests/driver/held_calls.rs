//! A thread inside a driver call delays no other thread: no hit, no statistics, no trim, and no request beyond its timeout.

use std::thread;
use std::time::Duration;

use mock_driver::{Code, MockDriver};
use pinpool::{Backend, Pool, Preset};

use crate::events_only::EventsOnly;
use crate::fixture::{MIB, builder, filled, on_a_stream};
use crate::until::{ends, in_time, until};
use crate::valid_stats::valid_stats;

/// Holds `call` while `act` makes it.
fn while_held(driver: &MockDriver, pool: &Pool, call: &str, act: impl FnOnce(&Pool) + Send) {
    let gate = driver.hold_call(call);
    thread::scope(|scope| {
        let acting = scope.spawn(|| act(pool));
        gate.wait_for(1);
        let pool = pool.clone();
        in_time(move || {
            let _all = (pool.stats().to_string(), pool.class_stats(), pool.partition_stats());
            let _hit = pool.try_get(4096).unwrap();
        });
        drop(gate);
        acting.join().unwrap();
    });
    valid_stats(pool);
}

#[test]
fn statistics_and_hits_do_not_wait_for_driver_calls() {
    let (driver, stream, mut memory) = on_a_stream(MIB);
    let _events = EventsOnly::begin();
    for (preset, backend, pin, unpin) in [
        (Preset::Adaptive, Backend::Vmm, "cuMemCreate", "cuMemUnmap"),
        (Preset::Adaptive, Backend::Register, "cuMemHostRegister_v2", "cuMemHostUnregister"),
        (Preset::Adaptive, Backend::Cuda, "cuMemHostAlloc", "cuMemFreeHost"),
        (Preset::TensorFlow, Backend::Cuda, "cuMemHostAlloc", "cuMemFreeHost"),
    ] {
        let pool = builder(backend).preset(preset).max_bytes(64 << 20).build().unwrap();
        drop(pool.get(4096).unwrap());
        while_held(&driver, &pool, pin, |pool| drop(pool.get(4 * MIB).unwrap()));
        if preset == Preset::Adaptive && pin != "cuMemCreate" {
            // Other calls pin a reserve of `vmm`; `tensorflow` has none.
            while_held(&driver, &pool, pin, |pool| pool.reserve(8 << 20).unwrap());
        }
        while_held(&driver, &pool, unpin, Pool::clear);
        let buf = filled(&pool, MIB, 7);
        while_held(&driver, &pool, "cuEventRecord", |_| drop(buf.copy_to(&stream, &mut memory).unwrap()));
        while_held(&driver, &pool, "cuEventQuery", Pool::maintain);
        stream.synchronize().unwrap();
        pool.maintain();
        assert_eq!(pool.stats().copies.in_flight, 0);
    }
}

#[test]
fn a_trim_does_not_call_an_unresponsive_driver() {
    for backend in [Backend::Register, Backend::Cuda] {
        let (driver, stream, mut memory) = on_a_stream(MIB);
        let _events = EventsOnly::begin();
        let pool = builder(backend).max_bytes(16 << 20).wait(Duration::from_millis(20)).build().unwrap();
        drop(pool.get(8 * MIB).unwrap());
        let copying = filled(&pool, MIB, 7);
        let gate = driver.hold_call("cuEventQuery");
        drop(copying.copy_to(&stream, &mut memory).unwrap());
        let maintained = pool.clone();
        let blocked = thread::spawn(move || maintained.maintain());
        gate.wait_for(1);
        // Longer than a driver is given to answer.
        thread::sleep(Duration::from_millis(50));
        let getting = pool.clone();
        in_time(move || {
            getting.trim(0);
            assert_eq!((getting.stats().copies.in_flight, getting.stats().memory.quarantined), (1, 0));
        });
        drop(gate);
        blocked.join().unwrap();
        stream.synchronize().unwrap();
        until("all is released", || {
            pool.trim(0);
            pool.stats().memory.held_bytes == 0
        });
        assert_eq!((pool.stats().copies.in_flight, pool.stats().memory.quarantined), (0, 0));
    }
}

#[test]
fn a_blocked_query_does_not_clear_a_device_failure() {
    let (driver, stream, mut memory) = on_a_stream(4096);
    let pool = builder(Backend::Vmm).maintenance_thread(false).build().unwrap();
    let work = driver.hold(stream.cu_stream());
    let copy = filled(&pool, 4096, 7).copy_to(&stream, &mut memory).unwrap();
    // Longer than the pool trusts the device without a query.
    thread::sleep(Duration::from_millis(2));
    driver.fail("cuStreamQuery", 1, Code(719));
    assert!(copy.is_complete().unwrap_err().is_device_failed());
    let gate = driver.hold_call("cuStreamQuery");
    thread::scope(|scope| {
        thread::sleep(Duration::from_millis(2));
        let stuck = scope.spawn(|| copy.is_complete());
        gate.wait_for(1);
        // Longer than a driver is given to answer.
        thread::sleep(Duration::from_millis(50));
        let meanwhile = [(); 2].map(|()| copy.is_complete());
        drop(gate);
        assert!(meanwhile.iter().all(Result::is_err), "{meanwhile:?}");
        assert!(!stuck.join().unwrap().unwrap(), "the driver answers again");
    });
    drop(work);
    copy.wait().unwrap();
}

#[test]
fn a_request_times_out_while_another_thread_pins() {
    let driver = MockDriver::load();
    let pool = builder(Backend::Register).max_bytes(1 << 30).wait(Duration::from_millis(20)).build().unwrap();
    let held = driver.hold_call("cuMemHostRegister_v2");
    thread::scope(|scope| {
        let registering = scope.spawn(|| pool.get(8 * MIB).map(drop));
        held.wait_for(1);
        let waiting = scope.spawn(|| pool.get(4 * MIB).map(drop));
        let ended = ends(&waiting);
        assert!(!registering.is_finished());
        drop(held);
        assert!(ended, "a request waited for the registration of another thread");
        let error = waiting.join().unwrap().unwrap_err();
        assert!(error.is_backend());
        let text = error.to_string();
        assert!(text.contains("another thread") && text.contains("PINPOOL_WAIT"), "{text}");
        registering.join().unwrap().unwrap();
    });
    valid_stats(&pool);
    drop(pool.get(4 * MIB).unwrap());
}
