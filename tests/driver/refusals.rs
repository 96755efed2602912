//! Calls that the driver refuses once, or while a stream captures a graph: no memory is leaked or quarantined.

use std::thread;
use std::time::Duration;

use cudarc::driver::CudaContext;
use cudarc::driver::sys::CUstreamCaptureMode;
use mock_driver::{Code, MockDriver};
use pinpool::{Backend, Pool, Preset, Request, Stats};

use crate::child;
use crate::events_only::EventsOnly;
use crate::fixture::{
    MIB, begin_capture, builder, end_capture, filled, held, in_flight_and_quarantined, loaded, on_a_stream,
    stream_and_memory, tensorflow,
};
use crate::until::until;
use crate::valid_stats::valid_stats;

/// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED` and `CUDA_ERROR_STREAM_CAPTURE_INVALIDATED`.
const OF_A_CAPTURE: [Code; 2] = [Code(900), Code(901)];
const BACKENDS: [Backend; 3] = [Backend::Vmm, Backend::Register, Backend::Cuda];

#[test]
fn without_device_addresses_timelines_leak_at_most_one_page() {
    child::alone(|| {
        let (driver, stream, mut memory) = on_a_stream(4096);
        let pool = builder(Backend::Vmm).build().unwrap();
        let before = driver.counts().registrations;
        driver.fail("cuMemHostGetDevicePointer_v2", 1, Code::OUT_OF_MEMORY);
        (0..20).for_each(|byte| filled(&pool, 4096, byte).copy_to(&stream, &mut memory).unwrap().wait().unwrap());
        assert!(driver.counts().registrations <= before + 1, "events do it from then on");
        assert_eq!(stream.clone_dtoh(&memory).unwrap(), vec![19; 4096]);
    });
}

#[test]
fn a_reserve_counts_granules_that_cannot_be_released() {
    const LIMIT: u64 = 16 << 20;
    let driver = MockDriver::load();
    let before = held(&driver).pinned_bytes;
    let pool = builder(Backend::Vmm).max_bytes(LIMIT).build().unwrap();
    drop(pool.get(8 * MIB).unwrap());
    driver.fail_from("cuMemRelease", 1, Code::UNKNOWN);
    pool.trim(0);
    let reserved = pool.reserve(LIMIT);
    assert!(held(&driver).pinned_bytes - before <= LIMIT, "{:?}", held(&driver));
    let text = reserved.unwrap_err().to_string();
    assert!(text.contains("cuMemRelease") && text.contains("8.0MiB stays pinned"), "{text}");
    driver.reset();
    pool.reserve(LIMIT).unwrap();
    assert_eq!(held(&driver).pinned_bytes - before, LIMIT, "the driver releases again");
}

#[test]
fn a_query_refused_during_a_capture_loses_no_buffer() {
    for code in OF_A_CAPTURE {
        for has_events in [true, false] {
            let (driver, stream, mut memory) = on_a_stream(4096);
            let _events = has_events.then(EventsOnly::begin);
            let pool = builder(Backend::Vmm).maintenance_thread(false).build().unwrap();
            let gate = driver.hold(stream.cu_stream());
            let copy = filled(&pool, 4096, 7).copy_to(&stream, &mut memory).unwrap();
            driver.fail_from("cuEventQuery", 1, code);
            driver.fail_from("cuStreamQuery", 1, code);
            // Longer than the pool trusts the device without a query.
            std::thread::sleep(Duration::from_millis(2));
            pool.maintain();
            assert!(!copy.is_complete().unwrap());
            assert_eq!(in_flight_and_quarantined(&pool), (1, 0), "{code:?} {has_events}");
            driver.reset();
            drop(gate);
            driver.fail("cuEventSynchronize", 1, code);
            copy.wait().unwrap();
            pool.maintain();
            assert_eq!(in_flight_and_quarantined(&pool), (0, 0), "{code:?} {has_events}");
        }
    }
}

#[test]
fn a_release_refused_during_a_capture_is_made_later() {
    for (backend, call) in [
        (Backend::Vmm, "cuMemUnmap"),
        (Backend::Vmm, "cuMemRelease"),
        (Backend::Register, "cuMemHostUnregister"),
        (Backend::Cuda, "cuMemFreeHost"),
    ] {
        for code in OF_A_CAPTURE {
            let (driver, before) = loaded();
            let pool = builder(backend.clone()).maintenance_thread(false).build().unwrap();
            drop(pool.get(3 * MIB).unwrap());
            driver.fail(call, 1, code);
            pool.trim(0);
            assert_eq!(pool.stats().memory.quarantined, 0);
            drop(pool.get(3 * MIB).unwrap());
            pool.trim(0);
            assert_eq!(pool.stats().memory.held_bytes, 0, "{call} {code:?}");
            drop(pool);
            assert_eq!(held(&driver), before, "{call} {code:?}");
        }
    }
}

#[test]
fn every_backend_works_during_a_capture_and_keeps_it_valid() {
    for backend in BACKENDS {
        for mode in [
            CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL,
            CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
            CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED,
        ] {
            let driver = MockDriver::load();
            let context = CudaContext::new(0).unwrap();
            let (captured, _unused) = stream_and_memory(&context, 1);
            let (stream, mut memory) = stream_and_memory(&context, 4096);
            let before = held(&driver);
            begin_capture(&captured, mode);
            let pool = builder(backend.clone()).build().unwrap();
            pool.reserve(1 << 20).unwrap();
            filled(&pool, 4096, 1).copy_to(&stream, &mut memory).unwrap().wait().unwrap();
            let mut kept = filled(&pool, 4096, 2);
            kept.copy_range_to(0..4096, &stream, &mut memory).unwrap().wait().unwrap();
            drop(kept);
            drop(pool.get(8 * MIB).unwrap());
            pool.maintain();
            pool.trim(0);
            pool.clear();
            drop(pool);
            assert_eq!(end_capture(&captured), Ok(()), "{} {mode:?}", backend.name());
            assert_eq!(driver.counts().invalidated_captures, 0, "{} {mode:?}", backend.name());
            assert_eq!(held(&driver), before, "{} {mode:?}", backend.name());
            assert_eq!(stream.clone_dtoh(&memory).unwrap(), vec![2; 4096]);
        }
    }
}

#[test]
fn growth_refused_during_a_capture_is_repeated() {
    for (backend, call) in [
        (Backend::Vmm, "cuMemCreate"),
        (Backend::Vmm, "cuMemMap"),
        (Backend::Vmm, "cuMemSetAccess"),
        (Backend::Register, "cuMemHostRegister_v2"),
        (Backend::Cuda, "cuMemHostAlloc"),
    ] {
        for code in OF_A_CAPTURE {
            let (driver, before) = loaded();
            let pool = builder(backend.clone()).wait(Duration::from_secs(60)).build().unwrap();
            // Each refusal answers one attempt.
            (1..=4).for_each(|nth| driver.fail(call, nth, code));
            let buf = pool.get(MIB).unwrap();
            let Stats { memory, requests, .. } = pool.stats();
            assert_eq!((memory.quarantined, requests.failed, memory.in_use), (0, 0, 1), "{call} {code:?}");
            drop((buf, pool));
            assert_eq!(held(&driver), before, "{call} {code:?}");
        }
    }
}

#[test]
fn a_query_that_needs_a_context_is_repeated_with_one() {
    for (has_events, call) in [(true, "cuEventQuery"), (false, "cuStreamQuery")] {
        let (driver, stream, mut memory) = on_a_stream(4096);
        let _events = has_events.then(EventsOnly::begin);
        let pool = builder(Backend::Vmm).build().unwrap();
        let gate = driver.hold(stream.cu_stream());
        drop(filled(&pool, 4096, 7).copy_to(&stream, &mut memory).unwrap());
        // The first check begins the time for which the pool trusts the device without a query.
        pool.maintain();
        thread::sleep(Duration::from_millis(2));
        driver.fail(call, 1, Code::INVALID_CONTEXT);
        thread::scope(|scope| {
            scope.spawn(|| pool.maintain());
        });
        assert_eq!(in_flight_and_quarantined(&pool), (1, 0), "{call}");
        assert!(driver.calls(call) >= 2, "{call} was not repeated");
        drop(gate);
        stream.synchronize().unwrap();
        pool.maintain();
        assert_eq!(in_flight_and_quarantined(&pool), (0, 0), "{call}");
    }
}

#[test]
fn the_tensorflow_preset_repeats_a_refused_release() {
    let repeat: [fn(&Pool); 2] = [|pool| pool.trim(0), Pool::maintain];
    // A small block may begin anywhere in one of the driver's pages.
    for (len, code) in [4096, 3 * MIB].into_iter().flat_map(|len| [1, 2, 201, 999].map(|code| (len, Code(code)))) {
        for repeat in repeat {
            let (driver, before) = loaded();
            let pool = tensorflow().max_bytes(4 << 20).build().unwrap();
            drop(pool.get(len).unwrap());
            driver.fail("cuMemFreeHost", 1, code);
            pool.trim(0);
            let stuck_bytes = held(&driver).pinned_bytes - before.pinned_bytes;
            let stuck_and_held = || (pool.stats().memory.quarantined_bytes, pool.stats().memory.held_bytes);
            assert_eq!(stuck_and_held(), (stuck_bytes, stuck_bytes), "{code:?}");
            repeat(&pool);
            assert_eq!(stuck_and_held(), (0, 0), "{len} {code:?}");
            assert_eq!(held(&driver), before);
            drop(pool.get(4 * MIB - 4096).expect("under the same limit"));
            valid_stats(&pool);
            drop(pool);
            assert_eq!(held(&driver), before);
        }
    }
}

const PINS: [(Backend, &str); 3] =
    [(Backend::Vmm, "cuMemCreate"), (Backend::Register, "cuMemHostRegister_v2"), (Backend::Cuda, "cuMemHostAlloc")];

#[test]
fn a_refused_request_fails_immediately_if_nothing_is_held() {
    child::alone(|| {
        let (driver, runtime) = (MockDriver::load(), tokio::runtime::Builder::new_current_thread().build().unwrap());
        for (backend, call) in PINS {
            for code in [Code::INVALID_VALUE, Code::OUT_OF_MEMORY] {
                for preset in [Preset::Adaptive, Preset::TensorFlow] {
                    driver.reset();
                    let pool = builder(backend.clone()).preset(preset).wait(Duration::from_secs(60)).build();
                    // This preset does not support the backend.
                    let Ok(pool) = pool else { continue };
                    let before = driver.calls(call);
                    driver.fail_from(call, 1, code);
                    let error = pool.get(40 * MIB).unwrap_err();
                    let task = runtime.block_on(pool.get_async(40 * MIB)).unwrap_err();
                    assert!(error.is_backend() && task.is_backend(), "{error}");
                    let (calls, stats) = (driver.calls(call) - before, pool.stats());
                    assert!(calls <= 100, "{call} {code:?}: {calls} calls");
                    assert_eq!((stats.requests.timeouts, stats.requests.failed), (0, 2), "{call} {code:?}");
                    assert_eq!(pool.diagnose().cause.name(), "memory_refused");
                }
            }
        }
        driver.reset();
    });
}

#[test]
fn refused_calls_are_repeated_with_backoff_unless_invalid() {
    child::alone(|| {
        let driver = MockDriver::load();
        for (backend, call) in PINS {
            for (code, most) in [(Code::INVALID_VALUE, 0), (Code::OUT_OF_MEMORY, 8)] {
                driver.reset();
                let pool = builder(backend.clone()).wait(Duration::from_millis(600)).build().unwrap();
                let held = pool.get(MIB).unwrap();
                driver.fail_from(call, 1, code);
                let before = driver.calls(call);
                let at_once = pool.get_with(Request::new(40 * MIB).timeout(Duration::ZERO)).unwrap_err();
                let of_one = driver.calls(call) - before;
                assert!(at_once.is_backend() && of_one > 0);
                assert_eq!(at_once.code(), Some(code.0.into()));
                assert!(pool.get(40 * MIB).unwrap_err().is_backend());
                // The first attempt is repeated after 5, 10, 20, ... ms.
                let repeated = driver.calls(call) - before - 2 * of_one;
                assert!(repeated <= most * of_one, "{call} {code:?}: {repeated} calls");
                assert_eq!(pool.stats().requests.timeouts, 1, "{call} {code:?}");
                drop(held);
            }
        }
        driver.reset();
    });
}

#[test]
fn a_return_serves_a_request_that_the_driver_refuses() {
    let driver = MockDriver::load();
    for (backend, call) in PINS {
        let pool = builder(backend).wait(Duration::from_secs(60)).build().unwrap();
        let mut held = vec![pool.get(8 * MIB).unwrap()];
        driver.fail_from(call, 1, Code::INVALID_VALUE);
        held.extend(std::iter::from_fn(|| pool.get_with(Request::new(8 * MIB).timeout(Duration::ZERO)).ok()));
        let waiting = thread::scope(|scope| {
            let waiting = scope.spawn(|| pool.get(6 * MIB).map(drop));
            until("it waits", || pool.stats().requests.waiting > 0 || waiting.is_finished());
            drop(held);
            waiting.join().unwrap()
        });
        waiting.unwrap();
        driver.reset();
    }
}
