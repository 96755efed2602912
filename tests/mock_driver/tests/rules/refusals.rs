//! The mock driver refuses what the driver's manual forbids.

use std::mem::MaybeUninit;
use std::thread;

use cudarc::driver::{CudaContext, sys};
use mock_driver::{Code, MockDriver};

use crate::virtual_memory::{
    GRANULE, ON_DEVICE, ON_NUMA_NODE, allow, allow_at, create, map, raw, release, reserve, unmap,
};

const ON_HOST: i32 = 2;
const ON_CURRENT_NUMA_NODE: i32 = 4;

#[test]
fn access_is_granted_only_to_existing_devices_and_nodes() {
    let _driver = MockDriver::load();
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
