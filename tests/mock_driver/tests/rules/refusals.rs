//! The mock driver refuses what the driver's manual forbids.

use std::mem::MaybeUninit;
use std::thread;

use cudarc::driver::{CudaContext, sys};
use mock_driver::{Code, MockDriver};

use crate::virtual_memory::{
    GRANULE, ON_DEVICE, ON_NUMA_NODE, allow, allow_at, create, create_at, map, raw, release, reserve, unmap,
};

const ON_HOST: i32 = 2;
const ON_CURRENT_NUMA_NODE: i32 = 4;
const HOST_VIRTUAL_MEMORY: i32 = 145;

#[test]
fn memory_is_created_only_on_nodes_that_have_some() {
    let driver = MockDriver::load();
    let _context = CudaContext::new(0).unwrap();
    for location in [
        [ON_CURRENT_NUMA_NODE, 0],
        [ON_NUMA_NODE, -1],
        [ON_NUMA_NODE, 1],
        [ON_NUMA_NODE, 64],
        [ON_NUMA_NODE, i32::MAX],
        [ON_HOST, 0],
        [0, 0],
        [99, 0],
    ] {
        assert_eq!(create_at(location, GRANULE), Err(Code::INVALID_VALUE.0), "{location:?}");
    }
    assert_eq!(create_at([ON_DEVICE, 0], GRANULE), Err(Code::NOT_SUPPORTED.0), "not modelled");
    // A driver that has the location "host".
    driver.set_attribute(HOST_VIRTUAL_MEMORY, 1);
    release(create_at([ON_HOST, 0], GRANULE).unwrap());
    assert_eq!(driver.counts().granules, 0);
}

#[test]
fn access_is_granted_only_to_devices_and_nodes_that_are_there() {
    let driver = MockDriver::load();
    assert_eq!(raw(init()), 0);
    let base = reserve(GRANULE);
    let handle = create().unwrap();
    assert_eq!(map(base, handle), 0);
    for location in [[ON_NUMA_NODE, -1], [ON_NUMA_NODE, 3], [ON_CURRENT_NUMA_NODE, 0], [ON_HOST, 0]] {
        assert_eq!(allow_at(base, GRANULE, &[location]), Code::INVALID_VALUE.0, "{location:?}");
    }
    assert_eq!(allow_at(base, GRANULE, &[[ON_DEVICE, 7]]), Code::INVALID_DEVICE.0);
    assert_eq!(allow(base, GRANULE, &[ON_DEVICE, ON_NUMA_NODE]), 0);
    assert_eq!(unmap(base, GRANULE), 0);
    release(handle);
    // SAFETY: reserved above, unmapped since.
    assert_eq!(raw(unsafe { sys::cuMemAddressFree(base, GRANULE) }), 0);
    assert_eq!(driver.wrong_uses(), Vec::<String>::new());
}

/// `cuInit`, which a thread without a context still needs.
fn init() -> sys::CUresult {
    // SAFETY: may be called at any time.
    unsafe { sys::cuInit(0) }
}

#[test]
fn an_event_is_destroyed_in_a_context() {
    let driver = MockDriver::load();
    let context = CudaContext::new(0).unwrap();
    let before = driver.counts().events;
    let mut event = MaybeUninit::uninit();
    // SAFETY: space for one handle.
    assert_eq!(raw(unsafe { sys::cuEventCreate(event.as_mut_ptr(), 2) }), 0);
    // SAFETY: written above.
    let event = unsafe { event.assume_init() }.expose_provenance();
    let destroy = move || {
        // SAFETY: created above; the mock driver refuses it if it must.
        raw(unsafe { sys::cuEventDestroy_v2(std::ptr::with_exposed_provenance_mut(event)) })
    };
    assert_eq!(thread::spawn(destroy).join().unwrap(), Code::INVALID_CONTEXT.0);
    context.bind_to_thread().unwrap();
    assert_eq!((destroy(), driver.counts().events), (0, before));
}

#[test]
fn after_a_reset_of_the_devices_their_contexts_have_other_handles() {
    let driver = MockDriver::load();
    let old = CudaContext::new(0).unwrap();
    driver.renew_contexts();
    let bound = thread::scope(|scope| scope.spawn(|| old.bind_to_thread()).join().unwrap());
    assert_eq!(bound.unwrap_err().0 as i32, Code::CONTEXT_IS_DESTROYED.0);
    let new = CudaContext::new(0).unwrap();
    assert_ne!(old.cu_ctx(), new.cu_ctx());
    assert_eq!(new.new_stream().unwrap().synchronize(), Ok(()));
    // Its release would affect the next test.
    std::mem::forget(old);
}

#[test]
fn the_calls_of_a_program_are_listed_with_their_numbers() {
    let driver = MockDriver::load();
    let _context = CudaContext::new(0).unwrap();
    driver.reset();
    let base = reserve(GRANULE);
    release(create().unwrap());
    release(create().unwrap());
    // SAFETY: reserved above, nothing is mapped.
    assert_eq!(raw(unsafe { sys::cuMemAddressFree(base, GRANULE) }), 0);
    let calls = ["cuMemAddressFree", "cuMemAddressReserve", "cuMemCreate", "cuMemRelease"];
    assert_eq!(driver.all_calls(), calls.map(String::from).into_iter().zip([1, 1, 2, 2]).collect::<Vec<_>>());
}

#[test]
fn freeing_null_is_no_error() {
    let driver = MockDriver::load();
    let _context = CudaContext::new(0).unwrap();
    // SAFETY: there is nothing to free.
    assert_eq!(raw(unsafe { sys::cuMemFreeHost(std::ptr::null_mut()) }), 0);
    assert_eq!(driver.wrong_uses(), Vec::<String>::new());
}
