//! Older drivers lack some functions from the first call of the process on, so each test runs in its own process.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use mock_driver::{Code, Deviation, MockDriver};
use pinpool::{Backend, Pool};

use crate::child::alone;
use crate::fixture::{MIB, builder, filled, on_a_stream, start, stream_and_memory, tensorflow};

/// Checks that an event detects the completion of a copy, although the pool was built for timelines.
fn copy_without_a_timeline(driver: &MockDriver) -> (Pool, Arc<CudaStream>, CudaSlice<u8>) {
    let context = CudaContext::new(0).unwrap();
    let pool = tensorflow().build().unwrap();
    let (stream, mut memory) = stream_and_memory(&context, 4096);
    let gate = driver.hold(stream.cu_stream());
    let copy = filled(&pool, 4096, 7).copy_to(&stream, &mut memory).unwrap();
    assert!(!copy.is_complete().unwrap());
    drop(gate);
    copy.wait().unwrap();
    assert_eq!(stream.clone_dtoh(&memory).unwrap(), [7; 4096]);
    assert_eq!(driver.calls("cuStreamWriteValue32_v2"), 0);
    (pool, stream, memory)
}

#[test]
fn without_stream_writes_events_detect_completion() {
    alone(|| _ = copy_without_a_timeline(&MockDriver::load_without(&["cuStreamWriteValue32_v2"])));
}

#[test]
fn a_driver_that_writes_no_words_is_asked_once() {
    alone(|| {
        let (driver, context, pool) = start();
        let (stream, mut memory) = stream_and_memory(&context, 4096);
        driver.fail_from("cuStreamWriteValue32_v2", 1, Code::NOT_SUPPORTED);
        for _ in 0..3 {
            filled(&pool, 4096, 7).copy_to(&stream, &mut memory).unwrap().wait().unwrap();
        }
        assert_eq!((driver.calls("cuStreamWriteValue32_v2"), pool.stats().copies.in_flight), (1, 0));
    });
}

#[test]
fn without_stream_ids_events_detect_completion_and_copies_wait() {
    alone(|| {
        let driver = MockDriver::load_without(&["cuStreamGetId"]);
        let (pool, stream, mut memory) = copy_without_a_timeline(&driver);
        // A copy into the buffer and one from it, on a stream that is indistinguishable from a later one with
        // the same handle.
        let (mut buf, waits) = (filled(&pool, 4096, 0), driver.calls("cuEventSynchronize"));
        stream.memcpy_dtoh(&memory, &mut buf).unwrap();
        stream.memcpy_htod(&buf, &mut memory).unwrap();
        assert_eq!(driver.calls("cuEventSynchronize"), waits + 1);
        drop(buf);
        stream.synchronize().unwrap();
        pool.maintain();
        assert_eq!((pool.stats().copies.in_flight, pool.stats().memory.quarantined), (0, 0));
        assert_eq!(stream.clone_dtoh(&memory).unwrap(), [7; 4096]);
    });
}

#[test]
fn a_missing_vmm_function_is_named_and_auto_uses_register() {
    alone(|| {
        let _driver = MockDriver::load_without(&["cuMemSetAccess"]);
        let error = builder(Backend::Vmm).build().unwrap_err();
        assert!(error.is_backend() && error.to_string().contains("no cuMemSetAccess"), "{error}");
        assert_eq!(builder(Backend::Auto).build().unwrap().stats().backend, "register");
    });
}

#[test]
fn a_timeline_is_tried_once_if_the_driver_registers_nothing() {
    alone(|| {
        let (driver, stream, mut memory) = on_a_stream(MIB);
        driver.set_deviations(&[Deviation::NoRegistering]);
        let pool = builder(Backend::Vmm).build().unwrap();
        let asked = driver.calls("cuMemHostRegister_v2");
        (0..9).for_each(|byte| filled(&pool, MIB, byte).copy_to(&stream, &mut memory).unwrap().wait().unwrap());
        assert_eq!(driver.calls("cuMemHostRegister_v2"), asked + 1, "events do it from then on");
    });
}
