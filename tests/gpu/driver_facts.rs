//! The assumed behavior of the driver. Checked on the mock driver and on a real device, so that the mock driver may replace the
//! device in tests.
#![allow(unsafe_code, clippy::print_stdout)] // Calls the driver directly, and prints its answers.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUresult, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, CudaStream, DevicePtr, DriverError, result};

use CUstreamCaptureMode::{CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_RELAXED};

const PAGE: usize = 4096;

/// A fact, which panics if it does not hold.
pub(crate) type Fact = fn(&Arc<CudaContext>);

/// Every fact by name. Each must be checked on a device without other users.
pub(crate) const FACTS: [(&str, Fact); 14] = [
    ("unknown_pointers_are_refused", unknown_pointers_are_refused),
    ("a_copy_stays_in_one_registration", a_copy_stays_in_one_registration),
    ("a_copy_from_pageable_memory_has_read_it", a_copy_from_pageable_memory_has_read_it),
    (
        "a_query_during_a_global_capture_invalidates_it_unless_relaxed",
        a_query_during_a_global_capture_invalidates_it_unless_relaxed,
    ),
    ("pinning_during_a_global_capture_needs_relaxing_too", pinning_during_a_global_capture_needs_relaxing_too),
    ("a_capturing_stream_cannot_be_waited_for", a_capturing_stream_cannot_be_waited_for),
    ("the_default_stream_is_not_queried_during_a_capture", the_default_stream_is_not_queried_during_a_capture),
    ("events_are_queried_without_a_context", events_are_queried_without_a_context),
    ("only_an_event_that_was_recorded_has_a_time", only_an_event_that_was_recorded_has_a_time),
    ("a_stream_has_a_unique_id", a_stream_has_a_unique_id),
    ("pinned_memory_has_a_device_address", pinned_memory_has_a_device_address),
    ("a_stream_is_destroyed_behind_a_blocked_host_function", a_stream_is_destroyed_behind_a_blocked_host_function),
    ("host_memory_of_no_node_is_refused", host_memory_of_no_node_is_refused),
    ("host_memory_is_created_without_a_context", host_memory_is_created_without_a_context),
];

/// Checks every fact in this process, and panics with the names of all facts that do not hold.
#[allow(dead_code)] // On a device each fact has its own process.
pub(crate) fn check(context: &Arc<CudaContext>) {
    let holds = |fact: &Fact| std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| fact(context))).is_ok();
    let wrong: Vec<_> = FACTS.iter().filter(|(_, fact)| !holds(fact)).map(|(name, _)| name).collect();
    assert!(wrong.is_empty(), "these facts do not hold: {wrong:?}");
}

fn code(result: Result<impl Sized, DriverError>) -> CUresult {
    result.err().map_or(CUresult::CUDA_SUCCESS, |error| error.0)
}

/// Runs on a new thread with `context` current.
fn on_a_fresh_thread<R: Send>(context: &Arc<CudaContext>, run: impl FnOnce() -> R + Send) -> R {
    let fresh = || {
        context.bind_to_thread().unwrap();
        run()
    };
    thread::scope(|scope| scope.spawn(fresh).join().unwrap())
}

fn relax() {
    let mut mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: space for one mode.
    unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) }.result().unwrap();
    assert_eq!(mode, CU_STREAM_CAPTURE_MODE_GLOBAL, "the mode of a new thread");
}

/// Captures on `stream` while `run` runs, and returns the error code from the end of the capture.
fn captured(stream: &CudaStream, run: impl FnOnce()) -> CUresult {
    // SAFETY: a live stream, which captures until the line after `run`.
    unsafe { result::stream::begin_capture(stream.cu_stream(), CU_STREAM_CAPTURE_MODE_GLOBAL) }.unwrap();
    run();
    // SAFETY: as above.
    match unsafe { result::stream::end_capture(stream.cu_stream()) } {
        // SAFETY: just made, never launched.
        Ok(graph) if !graph.is_null() => code(unsafe { result::graph::destroy(graph) }),
        Ok(_) => CUresult::CUDA_SUCCESS,
        Err(error) => error.0,
    }
}

fn pin(bytes: usize) -> Result<usize, DriverError> {
    // SAFETY: freed by `unpin` and never touched.
    unsafe { result::malloc_host(bytes, sys::CU_MEMHOSTALLOC_PORTABLE) }.map(|start| start.expose_provenance())
}

fn unpin(start: usize) -> Result<(), DriverError> {
    // SAFETY: only addresses from `pin`, each once; no copy uses them.
    unsafe { result::free_host(std::ptr::with_exposed_provenance_mut(start)) }
}

fn unknown_pointers_are_refused(context: &Arc<CudaContext>) {
    context.bind_to_thread().unwrap();
    let mut own = vec![0_u8; PAGE];
    let pointer: *mut c_void = own.as_mut_ptr().cast();
    // SAFETY: not the driver's memory, so the call is refused.
    assert_eq!(code(unsafe { result::free_host(pointer) }), CUresult::CUDA_ERROR_INVALID_VALUE);
    // SAFETY: as above.
    assert_eq!(unsafe { sys::cuMemHostUnregister(pointer) }, CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
}

fn a_copy_stays_in_one_registration(context: &Arc<CudaContext>) {
    // The driver may copy small data inline, whatever memory it spans. The second size is certainly copied by the device.
    for half in [PAGE, 16 << 20] {
        let stream = context.new_stream().unwrap();
        let device = stream.alloc_zeros::<u8>(3 * half).unwrap();
        let mut pages = vec![1_u8; 3 * half + PAGE];
        let first = pages.as_mut_ptr().wrapping_add(pages.as_ptr().align_offset(PAGE));
        for number in [0, 1] {
            // SAFETY: pages of the vector, unregistered below.
            let registered = unsafe { sys::cuMemHostRegister_v2(first.wrapping_add(number * half).cast(), half, 1) };
            assert_eq!(registered, CUresult::CUDA_SUCCESS);
        }
        let copy = |number: usize, halves: usize| {
            let source = first.wrapping_add(number * half);
            let (target, _tracking) = device.device_ptr(&stream);
            // SAFETY: both sides are as long as the copy, and live until the synchronisation below.
            unsafe { sys::cuMemcpyHtoDAsync_v2(target, source.cast(), halves * half, stream.cu_stream()) }
        };
        assert_eq!(copy(0, 1), CUresult::CUDA_SUCCESS);
        let crossing = [copy(0, 2), copy(1, 2)];
        println!(
            "{half} registered bytes, a copy into as many of another registration, into pageable ones: {crossing:?}"
        );
        if half > PAGE {
            assert_eq!(crossing, [CUresult::CUDA_ERROR_INVALID_VALUE; 2], "{half} B");
        }
        stream.synchronize().unwrap();
        for number in [0, 1] {
            // SAFETY: registered above, and no copy is left.
            let unregistered = unsafe { sys::cuMemHostUnregister(first.wrapping_add(number * half).cast()) };
            assert_eq!(unregistered, CUresult::CUDA_SUCCESS);
        }
    }
}

fn a_copy_from_pageable_memory_has_read_it(context: &Arc<CudaContext>) {
    let stream = context.new_stream().unwrap();
    for len in [1000, 64 << 10, 1 << 20] {
        let mut device = stream.alloc_zeros::<u8>(len).unwrap();
        let mut source = vec![5; len];
        stream.memcpy_htod(&source, &mut device).unwrap();
        source.fill(6);
        assert_eq!(stream.clone_dtoh(&device).unwrap(), vec![5; len]);
    }
}

fn a_query_during_a_global_capture_invalidates_it_unless_relaxed(context: &Arc<CudaContext>) {
    let (stream, other) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    let event = other.record_event(None).unwrap();
    event.synchronize().unwrap();
    let query = || code(event.try_is_complete());
    let end = captured(&stream, || {
        let relaxed = on_a_fresh_thread(context, || {
            relax();
            query()
        });
        assert_eq!(relaxed, CUresult::CUDA_SUCCESS);
    });
    assert_eq!(end, CUresult::CUDA_SUCCESS);
    let end = captured(&stream, || {
        assert_eq!(on_a_fresh_thread(context, query), CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    });
    assert_eq!(end, CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
}

fn pinning_during_a_global_capture_needs_relaxing_too(context: &Arc<CudaContext>) {
    let stream = context.new_stream().unwrap();
    let end = captured(&stream, || {
        on_a_fresh_thread(context, || {
            relax();
            unpin(pin(PAGE).unwrap()).unwrap();
            let mut pages = vec![1_u8; 2 * PAGE];
            let page = pages.as_mut_ptr().wrapping_add(pages.as_ptr().align_offset(PAGE)).cast();
            // SAFETY: a page of the vector, unregistered below; no copy uses it.
            unsafe { sys::cuMemHostRegister_v2(page, PAGE, 0) }.result().unwrap();
            // SAFETY: registered above.
            unsafe { sys::cuMemHostUnregister(page) }.result().unwrap();
        });
    });
    assert_eq!(end, CUresult::CUDA_SUCCESS);
}

/// While a stream that is ordered with the default stream captures, `cuStreamIsCapturing` leaves the capture valid, but a query
/// does not.
fn the_default_stream_is_not_queried_during_a_capture(context: &Arc<CudaContext>) {
    let mut stream = std::ptr::null_mut();
    // SAFETY: space for a handle; destroyed below.
    unsafe { sys::cuStreamCreate(&raw mut stream, 0) }.result().unwrap();
    for asks in [false, true] {
        // SAFETY: a live stream, which captures until the end below.
        unsafe { result::stream::begin_capture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL) }.unwrap();
        on_a_fresh_thread(context, || {
            relax();
            let legacy = std::ptr::without_provenance_mut(1);
            let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
            // SAFETY: a stream that always exists, and space for a state.
            let captures = unsafe { sys::cuStreamIsCapturing(legacy, &raw mut status) };
            assert_eq!(captures, CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
            if asks {
                // SAFETY: as above.
                assert_eq!(unsafe { sys::cuStreamQuery(legacy) }, CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
            }
        });
        // SAFETY: as above.
        let graph = unsafe { result::stream::end_capture(stream) };
        assert_eq!(graph.is_err(), asks, "{graph:?}");
        if let Ok(graph) = graph {
            // SAFETY: just made, never launched.
            unsafe { result::graph::destroy(graph) }.unwrap();
        }
    }
    // SAFETY: created above, and not used any more.
    unsafe { sys::cuStreamDestroy_v2(stream) }.result().unwrap();
}

fn a_capturing_stream_cannot_be_waited_for(context: &Arc<CudaContext>) {
    let stream = context.new_stream().unwrap();
    let end = captured(&stream, || {
        // SAFETY: a live stream.
        let waited = code(unsafe { result::stream::synchronize(stream.cu_stream()) });
        assert_eq!(waited, CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    });
    assert_eq!(end, CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
}

fn events_are_queried_without_a_context(context: &Arc<CudaContext>) {
    let event = context.new_stream().unwrap().record_event(None).unwrap();
    context.synchronize().unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!(result::ctx::get_current(), Ok(None));
            assert_eq!(event.try_is_complete(), Ok(true));
            assert_eq!(result::ctx::get_current(), Ok(None));
        });
    });
}

fn only_an_event_that_was_recorded_has_a_time(context: &Arc<CudaContext>) {
    let stream = context.new_stream().unwrap();
    let event = context.new_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT)).unwrap();
    let elapsed = || elapsed(event.cu_event());
    assert_eq!(code(event.try_is_complete()), CUresult::CUDA_SUCCESS);
    assert_eq!(elapsed(), CUresult::CUDA_ERROR_INVALID_HANDLE);
    event.record(&stream).unwrap();
    // Waiting needs a current context.
    on_a_fresh_thread(context, || event.synchronize().unwrap());
    assert_eq!(elapsed(), CUresult::CUDA_SUCCESS);
}

/// Measures the time from an event to itself and returns the code. The function is found by name, because CUDA 12.8 has a newer
/// form.
fn elapsed(event: sys::CUevent) -> CUresult {
    type Elapsed = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> CUresult;
    // SAFETY: the driver is loaded, and stays so.
    let library = unsafe { sys::culib() };
    let find = |name: &[u8]| {
        // SAFETY: both names have this type in the driver's header.
        unsafe { library.get::<Elapsed>(name) }.ok().map(|found| *found)
    };
    let elapsed = find(b"cuEventElapsedTime_v2\0").or_else(|| find(b"cuEventElapsedTime\0")).unwrap();
    let mut milliseconds = 0.0;
    // SAFETY: space for a number, and a live event.
    unsafe { elapsed(&raw mut milliseconds, event, event) }
}

fn a_stream_has_a_unique_id(context: &Arc<CudaContext>) {
    let id = |stream: &CudaStream| {
        let mut id = 0;
        // SAFETY: a live stream, and space for a number.
        unsafe { sys::cuStreamGetId(stream.cu_stream(), &raw mut id) }.result().unwrap();
        id
    };
    let mut ids = vec![id(&context.default_stream()), id(&context.per_thread_stream())];
    let other = on_a_fresh_thread(context, || (id(&context.default_stream()), id(&context.per_thread_stream())));
    assert_eq!(other.0, ids[0]);
    ids.push(other.1);
    // Each stream is destroyed before the next is created, so that handles recur.
    ids.extend((0..100).map(|_| id(&context.new_stream().unwrap())));
    let count = ids.len();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), count, "an id was used twice");
}

fn pinned_memory_has_a_device_address(context: &Arc<CudaContext>) {
    context.bind_to_thread().unwrap();
    let start = pin(PAGE).unwrap();
    let (mut mapped, mut attribute): (sys::CUdeviceptr, sys::CUdeviceptr) = (0, 0);
    let wanted = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_POINTER;
    let pointer = std::ptr::with_exposed_provenance_mut(start);
    // SAFETY: space for an address, and memory that is pinned until the end.
    unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut mapped, pointer, 0) }.result().unwrap();
    // SAFETY: as above.
    let asked = unsafe { sys::cuPointerGetAttribute((&raw mut attribute).cast(), wanted, start as sys::CUdeviceptr) };
    asked.result().unwrap();
    assert_eq!(mapped, attribute);
    unpin(start).unwrap();
    let own = [0_u8; PAGE];
    // SAFETY: space for an address; the pointer is not dereferenced.
    let asked = unsafe { sys::cuPointerGetAttribute((&raw mut attribute).cast(), wanted, own.as_ptr() as u64) };
    assert_eq!(asked, CUresult::CUDA_ERROR_INVALID_VALUE);
}

/// The driver may or may not wait for the function when it destroys the stream, but it must not lose the function.
fn a_stream_is_destroyed_behind_a_blocked_host_function(context: &Arc<CudaContext>) {
    static MAY_END: AtomicBool = AtomicBool::new(false);
    static ENDED: AtomicBool = AtomicBool::new(false);
    extern "C" fn wait(_argument: *mut c_void) {
        let begun = Instant::now();
        while !MAY_END.load(Ordering::SeqCst) && begun.elapsed() < Duration::from_secs(10) {
            thread::sleep(Duration::from_micros(200));
        }
        ENDED.store(true, Ordering::SeqCst);
    }
    let stream = context.new_stream().unwrap();
    // SAFETY: a live stream, and a function without an argument.
    unsafe { result::stream::launch_host_function(stream.cu_stream(), wait, std::ptr::null_mut()) }.unwrap();
    thread::scope(|scope| {
        let destroying = scope.spawn(move || drop(stream));
        thread::sleep(Duration::from_millis(50));
        let waits = !destroying.is_finished();
        println!("{{\"figure\":\"stream_destroy_waits_for_host_functions\",\"value\":{waits}}}");
        MAY_END.store(true, Ordering::SeqCst);
        destroying.join().unwrap();
    });
    while !ENDED.load(Ordering::SeqCst) {
        thread::yield_now();
    }
}

/// `CUmemAllocationProp`, independent of the version of the bindings.
#[repr(C)]
struct Properties {
    kind: i32,
    handle_types: i32,
    location: [i32; 2],
    windows: usize,
    flags: u64,
}

const GRANULE: usize = 2 << 20;
const NUMA_NODE: i32 = 3;
const CURRENT_NUMA_NODE: i32 = 4;
/// The device attribute for virtual memory on a host NUMA node.
const HOST_NUMA_VIRTUAL_MEMORY: i32 = 141;

type Create = unsafe extern "C" fn(*mut u64, usize, *const Properties, u64) -> i32;
type Release = unsafe extern "C" fn(u64) -> i32;
type Attribute = unsafe extern "C" fn(*mut i32, i32, sys::CUdevice) -> i32;

/// Creates and releases a granule. Returns `None` if the device does not support virtual host memory.
fn create_at(context: &Arc<CudaContext>, location: [i32; 2]) -> Option<i32> {
    // SAFETY: the driver is loaded, and stays so.
    let library = unsafe { sys::culib() };
    // SAFETY: the types of the driver's header, for each of the three.
    let attribute = unsafe { library.get::<Attribute>(b"cuDeviceGetAttribute\0") }.ok()?;
    // SAFETY: as above.
    let create = unsafe { library.get::<Create>(b"cuMemCreate\0") }.ok()?;
    // SAFETY: as above.
    let release = unsafe { library.get::<Release>(b"cuMemRelease\0") }.ok()?;
    let mut supported = 0;
    // SAFETY: space for a number, and a device of the driver.
    let asked = unsafe { attribute(&raw mut supported, HOST_NUMA_VIRTUAL_MEMORY, context.cu_device()) };
    if asked != 0 || supported == 0 {
        println!("skipped: the device has no virtual memory of the host");
        return None;
    }
    let wanted = Properties { kind: 1, handle_types: 0, location, windows: 0, flags: 0 };
    let mut granule = 0;
    // SAFETY: space for a handle, and properties in the driver's layout.
    let created = unsafe { create(&raw mut granule, GRANULE, &raw const wanted, 0) };
    if created == 0 {
        // SAFETY: just created, mapped nowhere.
        assert_eq!(unsafe { release(granule) }, 0);
    }
    Some(created)
}

fn host_memory_of_no_node_is_refused(context: &Arc<CudaContext>) {
    context.bind_to_thread().unwrap();
    for location in [[NUMA_NODE, -1], [NUMA_NODE, 63], [CURRENT_NUMA_NODE, 0]] {
        let answer = create_at(context, location);
        println!("memory at {location:?}: {answer:?}");
        // Any error is sufficient, because a pool then tries the next location.
        assert_ne!(answer, Some(0), "{location:?}");
    }
}

fn host_memory_is_created_without_a_context(context: &Arc<CudaContext>) {
    thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!(result::ctx::get_current(), Ok(None));
            assert!(matches!(create_at(context, [NUMA_NODE, 0]), None | Some(0)));
        });
    });
}
