//! Statistics of a pool return at once while a thread is in any driver call.

use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use cudarc::driver::CudaContext;
use mock_driver::MockDriver;
use pinpool::{Backend, FenceKind, Pool};

use crate::fixture::{MIB, builder, filled, stream_and_memory};

/// Reads all statistics of `pool` on a separate thread. Fails if that takes too long.
fn statistics_return_at_once(pool: &Pool, call: &str) {
    let (done, result) = channel();
    let pool = pool.clone();
    thread::spawn(move || {
        let _all = (pool.stats().to_string(), pool.class_stats(), pool.partition_stats());
        let _ = done.send(());
    });
    assert!(result.recv_timeout(Duration::from_secs(20)).is_ok(), "the statistics waited for {call}");
}

/// Holds `call` while `act` makes it.
fn while_held(double: &MockDriver, pool: &Pool, call: &str, act: impl FnOnce(&Pool) + Send) {
    let gate = double.hold_call(call);
    thread::scope(|scope| {
        let acting = scope.spawn(|| act(pool));
        gate.wait_for(1);
        statistics_return_at_once(pool, call);
        drop(gate);
        acting.join().unwrap();
    });
    assert_eq!(pool.stats().validate(), Ok(()), "{call}");
}

#[test]
fn statistics_wait_for_no_pin_call_no_release_and_no_copy_call() {
    let double = MockDriver::load();
    let context = CudaContext::new(0).unwrap();
    let (stream, mut memory) = stream_and_memory(&context, MIB);
    for (backend, pin, unpin) in [
        (Backend::Vmm, "cuMemCreate", "cuMemUnmap"),
        (Backend::Register, "cuMemHostRegister_v2", "cuMemHostUnregister"),
        (Backend::Cuda, "cuMemHostAlloc", "cuMemFreeHost"),
    ] {
        let pool = builder(backend).unstable_fence(FenceKind::Event).max_bytes(64 << 20).build().unwrap();
        while_held(&double, &pool, pin, |pool| drop(pool.get(4 * MIB).unwrap()));
        if pin != "cuMemCreate" {
            // A reserve of `vmm` is made of other calls.
            while_held(&double, &pool, pin, |pool| pool.reserve(8 << 20).unwrap());
        }
        while_held(&double, &pool, unpin, Pool::clear);
        let buf = filled(&pool, MIB, 7);
        while_held(&double, &pool, "cuEventRecord", |_| drop(buf.copy_to(&stream, &mut memory).unwrap()));
        while_held(&double, &pool, "cuEventQuery", Pool::maintain);
        stream.synchronize().unwrap();
        pool.maintain();
        assert_eq!(pool.stats().copies.in_flight, 0);
    }
}
