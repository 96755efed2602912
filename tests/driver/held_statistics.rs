//! Statistics and hits of a pool return at once while a thread is in any driver call.

use std::thread;

use cudarc::driver::CudaContext;
use mock_driver::MockDriver;
use pinpool::{Backend, Pool, Preset};

use crate::events_only::EventsOnly;
use crate::fixture::{MIB, builder, filled, stream_and_memory};
use crate::until::in_time;
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
fn statistics_and_hits_wait_for_no_pin_call_no_release_and_no_copy_call() {
    let driver = MockDriver::load();
    let _events = EventsOnly::begin();
    let context = CudaContext::new(0).unwrap();
    let (stream, mut memory) = stream_and_memory(&context, MIB);
    for (preset, backend, pin, unpin) in [
        (Preset::Adaptive, Backend::Vmm, "cuMemCreate", "cuMemUnmap"),
        (Preset::Adaptive, Backend::Register, "cuMemHostRegister_v2", "cuMemHostUnregister"),
        (Preset::Adaptive, Backend::Cuda, "cuMemHostAlloc", "cuMemFreeHost"),
        (Preset::TensorFlow, Backend::Cuda, "cuMemHostAlloc", "cuMemFreeHost"),
    ] {
        let builder = builder(backend).preset(preset);
        let pool = builder.max_bytes(64 << 20).build().unwrap();
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
