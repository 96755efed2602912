//! A reset of the device while pools have copies in flight: the context ends with its events, streams and memory, and the
//! next context has the same handle, as on a device. The mock driver aborts the process if a destroyed event is used.
#![allow(unsafe_code)] // Resets the device.

use std::time::Duration;

use cudarc::driver::{CudaContext, sys};
use mock_driver::{Deviation, MockDriver};
use pinpool::Backend;

use crate::child::alone;
use crate::events_only::EventsOnly;
use crate::fixture::{MIB, builder, filled, stream_and_memory};
use crate::until::until;
use crate::valid_stats::valid_stats;

const AS_ON_A_DEVICE: &[Deviation] = &[Deviation::RecurringHandles, Deviation::ResetUnmaps, Deviation::DeadEventAborts];

fn reset_under_a_pool(backend: Backend, has_events: bool) {
    let driver = MockDriver::load();
    let _events = has_events.then(EventsOnly::begin);
    driver.set_deviations(AS_ON_A_DEVICE);
    let context = CudaContext::new(0).unwrap();
    // Zeroes returned memory, if it is still mapped.
    let pool = builder(backend.clone()).setting("zero", "1").build().unwrap();
    let (stream, mut memory) = stream_and_memory(&context, MIB);
    // Its event is kept for the next copy.
    filled(&pool, MIB, 1).copy_to(&stream, &mut memory).unwrap().wait().unwrap();
    pool.maintain();
    let held = pool.get(2 * MIB).unwrap();
    drop([2, 3].map(|mib| pool.get(mib * MIB).unwrap()));
    let gate = driver.hold(stream.cu_stream());
    let in_flight = filled(&pool, MIB, 2).copy_to(&stream, &mut memory).unwrap();
    let old_handle = context.cu_ctx();
    // SAFETY: nothing of the old context is used from here on: the program would be wrong without a pool, too.
    unsafe { sys::cuDevicePrimaryCtxReset_v2(0) }.result().unwrap();
    std::mem::forget((stream, memory, context));

    let context = CudaContext::new(0).unwrap();
    assert_eq!(context.cu_ctx(), old_handle, "the handle recurs");
    drop(gate);
    assert!(in_flight.wait().unwrap_err().is_device_failed(), "the end of a copy is unknown after its event is gone");
    pool.maintain();
    assert_eq!((pool.stats().copies.in_flight, pool.stats().memory.quarantined), (0, 1));
    // Two buffers were idle, and the memory that the first of them uses is free for others.
    for len in [2 * MIB, 3 * MIB, 20 * MIB] {
        let error = pool.get(len).unwrap_err();
        let text = error.to_string();
        assert!(error.is_backend() && text.contains("was reset") && text.contains("Build a new pool"), "{text}");
    }
    drop(held);
    assert_eq!(pool.stats().memory.idle, 0, "memory returned after the reset is not kept");
    valid_stats(&pool);

    let pool = builder(backend.clone()).build().unwrap();
    let (stream, mut memory) = stream_and_memory(&context, MIB);
    for byte in 3..8 {
        filled(&pool, MIB, byte).copy_to(&stream, &mut memory).unwrap().wait().unwrap();
        assert!(stream.clone_dtoh(&memory).unwrap().iter().all(|&arrived| arrived == byte));
    }
    assert_eq!(pool.stats().memory.quarantined, 0);
}

#[test]
fn nothing_of_a_reset_context_is_reused() {
    alone(|| {
        for (backend, has_events) in
            [(Backend::Vmm, true), (Backend::Vmm, false), (Backend::Register, true), (Backend::Cuda, true)]
        {
            reset_under_a_pool(backend, has_events);
        }
    });
}

#[test]
fn queued_requests_fail_when_the_device_is_reset() {
    alone(|| {
        let driver = MockDriver::load();
        driver.set_deviations(AS_ON_A_DEVICE);
        let context = CudaContext::new(0).unwrap();
        let builder = builder(Backend::Vmm).max_bytes(4 << 20).wait(Duration::from_secs(60));
        let pool = builder.maintenance_thread(true).build().unwrap();
        let held = pool.get(4 * MIB).unwrap();
        let (first, second) = (pool.clone(), pool.clone());
        let waiting = [first, second].map(|pool| std::thread::spawn(move || pool.get(4 * MIB).map(drop)));
        until("both wait", || pool.stats().requests.waiting == 2);
        // SAFETY: nothing of the old context is used from here on.
        unsafe { sys::cuDevicePrimaryCtxReset_v2(0) }.result().unwrap();
        std::mem::forget(context);
        for get in waiting {
            let error = get.join().unwrap().unwrap_err();
            assert!(error.to_string().contains("was reset"), "{error}");
        }
        assert_eq!(pool.stats().requests.timeouts, 0, "no request waits for memory that no return can provide");
        drop(held);
    });
}
