//! Pool memory on a machine with several GPUs: other libraries can copy it on any GPU with untracked driver calls, and a
//! process that works with one GPU gets no context on another GPU.
#![allow(unsafe_code)] // Copies and queries as another library does.

use cudarc::driver::{CudaContext, result, sys};
use mock_driver::{Deviation, MockDriver};
use pinpool::{Backend, PoolBuilder};

use crate::captured_log::{lines_with_levels, listen};
use crate::child::alone;
use crate::fixture::{MIB, builder, filled, stream_and_memory};

/// Whether the device has a primary context.
fn is_active(device: i32) -> bool {
    let (mut flags, mut active) = (0, 0);
    // SAFETY: both take results.
    unsafe { sys::cuDevicePrimaryCtxGetState(device, &raw mut flags, &raw mut active) }.result().unwrap();
    active != 0
}

/// Copies to the device of the current context and back, by direct driver calls, and returns what arrived.
fn copied(start: *const u8, len: usize) -> Result<Vec<u8>, cudarc::driver::DriverError> {
    // SAFETY: freed below.
    let there = unsafe { result::malloc_sync(len) }?;
    // SAFETY: memory of a pool's buffer with this length.
    let source = unsafe { std::slice::from_raw_parts(start, len) };
    let mut arrived = vec![0; len];
    // SAFETY: device memory of this length, which nothing else uses.
    let both = unsafe { result::memcpy_htod_sync(there, source) }
        // SAFETY: as above.
        .and_then(|()| unsafe { result::memcpy_dtoh_sync(&mut arrived, there) });
    // SAFETY: allocated above; the copies are complete.
    unsafe { result::free_sync(there) }?;
    both.map(|()| arrived)
}

fn a_process_that_works_with_gpu_1(backend: Backend) {
    let driver = MockDriver::load();
    driver.set_device_count(2);
    driver.set_deviations(&[Deviation::StickyFaults]);
    let context = CudaContext::new(1).unwrap();
    context.bind_to_thread().unwrap();
    let pool = builder(backend.clone()).build().unwrap();
    assert_eq!(pool.unstable_config().device, 1, "the GPU of the current context");
    for (byte, len) in [(1, 4096), (2, 3 * MIB), (3, 20 * MIB)] {
        let buf = filled(&pool, len, byte);
        assert!(copied(buf.as_ptr(), len).unwrap().iter().all(|&arrived| arrived == byte));
    }
    drop(pool);
    assert!(!is_active(0), "a context on a GPU that the process does not use");
    // A pool for the other GPU, selected by `device`, can be copied by this GPU too.
    let pool = builder(backend).device(0).build().unwrap();
    let buf = filled(&pool, 3 * MIB, 4);
    context.bind_to_thread().unwrap();
    assert!(copied(buf.as_ptr(), 3 * MIB).unwrap().iter().all(|&arrived| arrived == 4));
}

#[test]
fn every_gpu_copies_granules_without_another_context() {
    alone(|| a_process_that_works_with_gpu_1(Backend::Vmm));
}

#[test]
fn every_gpu_copies_registered_memory_without_another_context() {
    alone(|| a_process_that_works_with_gpu_1(Backend::Register));
}

#[test]
fn every_gpu_copies_driver_memory_without_another_context() {
    alone(|| a_process_that_works_with_gpu_1(Backend::Cuda));
}

#[test]
fn a_pool_uses_the_gpu_of_the_process() {
    alone(|| {
        let device = || pinpool::Pool::builder().without_env().unstable_config().unwrap().device;
        assert_eq!(device(), 0, "without a driver that has started");
        let driver = MockDriver::load();
        driver.set_device_count(3);
        assert_eq!((device(), driver.calls("cuInit")), (0, 0));
        let contexts = [2, 1].map(|ordinal| CudaContext::new(ordinal).unwrap());
        assert_eq!(device(), 1, "the current context");
        contexts[0].bind_to_thread().unwrap();
        assert_eq!(device(), 2, "the current context");
        // SAFETY: none is allowed.
        unsafe { result::ctx::set_current(std::ptr::null_mut()) }.unwrap();
        assert_eq!(device(), 1, "the first GPU with a context");
        assert_eq!(builder(Backend::Heap).device(2).unstable_config().unwrap().device, 2);
    });
}

#[test]
fn a_pool_chooses_its_gpu_at_the_first_request() {
    alone(|| {
        let driver = MockDriver::load();
        driver.set_device_count(4);
        let build = |device: Option<u32>| {
            let builder = pinpool::Pool::builder().without_env().maintenance_thread(false);
            device.into_iter().fold(builder, PoolBuilder::device).build().unwrap()
        };
        let (default, named) = (build(None), build(Some(2)));
        assert_eq!(driver.calls("cuInit"), 0);
        let _context = CudaContext::new(3).unwrap();
        drop((default.get(MIB).unwrap(), named.get(MIB).unwrap()));
        assert_eq!((default.unstable_config().device, named.unstable_config().device), (3, 2));
        assert!(!is_active(0), "a context on a GPU that the process does not use");
    });
}

#[test]
fn a_gpu_without_access_is_logged_and_does_not_affect_others() {
    let driver = MockDriver::load();
    driver.set_device_count(3);
    let contexts = [0, 1, 2].map(|ordinal| CudaContext::new(ordinal).unwrap());
    contexts[0].bind_to_thread().unwrap();
    driver.refuse_access(1 << 1);
    listen();
    let pool = builder(Backend::Vmm).build().unwrap();
    let lines = lines_with_levels();
    let refused = lines.iter().filter(|(_, line)| line.contains("GPU 1 cannot copy from this memory")).count();
    assert_eq!(refused, 1, "{lines:?}");
    let buf = filled(&pool, 3 * MIB, 7);
    contexts[2].bind_to_thread().unwrap();
    assert!(copied(buf.as_ptr(), 3 * MIB).unwrap().iter().all(|&byte| byte == 7));
    contexts[1].bind_to_thread().unwrap();
    assert!(copied(buf.as_ptr(), 3 * MIB).is_err());
    let calls = driver.calls("cuMemSetAccess");
    drop(filled(&pool, 20 * MIB, 8));
    assert_eq!(driver.calls("cuMemSetAccess"), calls + 1, "it is not asked for again with each granule");
}

#[test]
fn every_gpu_copies_from_new_old_and_reused_buffers() {
    alone(|| {
        let driver = MockDriver::load();
        driver.set_device_count(2);
        driver.set_deviations(&[Deviation::StickyFaults]);
        let _first = CudaContext::new(0).unwrap();
        let pool = builder(Backend::Vmm).device(0).build().unwrap();
        let before = driver.calls("cuMemSetAccess");
        let mut old = filled(&pool, 3 * MIB, 1);
        assert_eq!(driver.calls("cuMemSetAccess"), before + 1);
        drop(filled(&pool, 20 * MIB, 2));
        let later = CudaContext::new(1).unwrap();
        later.bind_to_thread().unwrap();
        let reused = filled(&pool, 20 * MIB, 3);
        assert_eq!(pool.stats().requests.hits, 1);
        // A copy that the pool sees.
        let (stream, mut memory) = stream_and_memory(&later, 3 * MIB);
        old.copy_range_to(0..3 * MIB, &stream, &mut memory).unwrap().wait().unwrap();
        // Copies that it does not see.
        for (buf, byte) in [(&old, 1), (&reused, 3)] {
            assert!(copied(buf.as_ptr(), buf.len()).unwrap().iter().all(|&arrived| arrived == byte));
        }
        assert_eq!(driver.calls("cuMemSetAccess"), before + 2, "one call for each growth");
    });
}

#[test]
fn pools_retain_a_primary_context_once() {
    let driver = MockDriver::load();
    let use_pools = || {
        for backend in [Backend::Vmm, Backend::Register, Backend::Cuda, Backend::Auto] {
            drop(filled(&builder(backend).build().unwrap(), 3 * MIB, 1));
        }
    };
    use_pools();
    let before = driver.calls("cuDevicePrimaryCtxRetain");
    use_pools();
    assert_eq!(driver.calls("cuDevicePrimaryCtxRetain"), before);
}
