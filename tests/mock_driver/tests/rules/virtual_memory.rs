//! The mock driver's virtual host memory: granules are created, remapped and released during copies.

use std::mem::MaybeUninit;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUresult};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, result};
use mock_driver::{Code, MockDriver};

pub(crate) const GRANULE: usize = 2 << 20;
pub(crate) const ON_DEVICE: i32 = 1;
pub(crate) const ON_NUMA_NODE: i32 = 3;

/// The driver's own layout, whatever version the bindings are of.
#[repr(C)]
struct Properties {
    kind: i32,
    handle_types: i32,
    location: [i32; 2],
    windows: usize,
    flags: u64,
}

#[repr(C)]
struct Access {
    location: [i32; 2],
    flags: i32,
}

pub(crate) fn raw(result: CUresult) -> i32 {
    result as i32
}

pub(crate) fn reserve(bytes: usize) -> u64 {
    let mut address = 0;
    // SAFETY: space for one address.
    assert_eq!(raw(unsafe { sys::cuMemAddressReserve(&mut address, bytes, 0, 0, 0) }), 0);
    address
}

pub(crate) fn create() -> Result<u64, i32> {
    let wanted = Properties { kind: 1, handle_types: 0, location: [ON_NUMA_NODE, 0], windows: 0, flags: 0 };
    let mut handle = MaybeUninit::uninit();
    // SAFETY: space for one handle, and properties in the driver's layout.
    let code = raw(unsafe { sys::cuMemCreate(handle.as_mut_ptr(), GRANULE, (&raw const wanted).cast(), 0) });
    // SAFETY: the call has written the handle if it succeeded.
    if code == 0 { Ok(unsafe { handle.assume_init() }) } else { Err(code) }
}

pub(crate) fn map(address: u64, handle: u64) -> i32 {
    // SAFETY: the mock driver checks every number it is given.
    raw(unsafe { sys::cuMemMap(address, GRANULE, 0, handle, 0) })
}

pub(crate) fn allow(address: u64, bytes: usize, kinds: &[i32]) -> i32 {
    allow_at(address, bytes, &kinds.iter().map(|&kind| [kind, 0]).collect::<Vec<_>>())
}

pub(crate) fn allow_at(address: u64, bytes: usize, locations: &[[i32; 2]]) -> i32 {
    let wanted: Vec<_> = locations.iter().map(|&location| Access { location, flags: 3 }).collect();
    // SAFETY: the count matches the descriptions.
    raw(unsafe { sys::cuMemSetAccess(address, bytes, wanted.as_ptr().cast(), wanted.len()) })
}

pub(crate) fn unmap(address: u64, bytes: usize) -> i32 {
    // SAFETY: the mock driver checks every number it is given.
    raw(unsafe { sys::cuMemUnmap(address, bytes) })
}

pub(crate) fn release(handle: u64) {
    // SAFETY: the mock driver checks every number it is given.
    assert_eq!(raw(unsafe { sys::cuMemRelease(handle) }), 0);
}

pub(crate) fn bytes<'a>(address: u64, len: usize) -> &'a mut [u8] {
    // SAFETY: the tests ask only for mapped granules that the CPU may access, one slice at a time.
    unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(address as usize), len) }
}

fn copy(stream: &CudaStream, to: &CudaSlice<u8>, from: u64, len: usize) -> i32 {
    // SAFETY: the mock driver checks both ranges; the slice outlives the copy.
    raw(unsafe { sys::cuMemcpyHtoDAsync_v2(to.device_ptr(stream).0, from as *const _, len, stream.cu_stream()) })
}

fn start() -> (MockDriver, Arc<CudaContext>, Arc<CudaStream>) {
    let driver = MockDriver::load();
    let ctx = CudaContext::new(0).unwrap();
    let stream = ctx.new_stream().unwrap();
    (driver, ctx, stream)
}

#[test]
fn the_device_needs_its_own_access_and_an_unmapped_source_is_a_fault() {
    let (driver, ctx, stream) = start();
    let base = reserve(GRANULE);
    let handle = create().unwrap();
    let device = stream.alloc_zeros::<u8>(GRANULE).unwrap();
    ctx.synchronize().unwrap();
    assert_eq!(map(base, handle), 0);
    assert_eq!(allow(base, GRANULE, &[ON_NUMA_NODE]), 0);
    bytes(base, GRANULE).fill(9);
    // A copy needs memory to which the device has access.
    assert_eq!(copy(&stream, &device, base, 4096), Code::ILLEGAL_ADDRESS.0);
    assert_eq!(allow(base, GRANULE, &[ON_DEVICE]), 0);
    assert_eq!(copy(&stream, &device, base, 4096), 0);
    assert_eq!(stream.clone_dtoh(&device).unwrap()[0], 9);

    let gate = driver.hold(stream.cu_stream());
    assert_eq!(copy(&stream, &device, base, 4096), 0);
    assert_eq!(unmap(base, GRANULE), 0);
    drop(gate);
    assert_eq!(stream.synchronize().map_err(|error| error.0 as i32), Err(Code::ILLEGAL_ADDRESS.0));
    assert_eq!(driver.wrong_uses().len(), 1);
    driver.reset();
    release(handle);
    // SAFETY: reserved above, unmapped since.
    assert_eq!(raw(unsafe { sys::cuMemAddressFree(base, GRANULE) }), 0);
}

#[test]
fn granules_past_the_limit_are_refused_and_misuse_is_counted() {
    let (driver, _ctx, _stream) = start();
    driver.limit_pinned(driver.counts().pinned_bytes + GRANULE as u64);
    let handle = create().unwrap();
    assert_eq!(create(), Err(Code::OUT_OF_MEMORY.0));
    let base = reserve(2 * GRANULE);
    assert_eq!(map(base + 4096, handle), Code::INVALID_VALUE.0);
    assert_eq!(map(base + 2 * GRANULE as u64, handle), Code::INVALID_VALUE.0, "past what is reserved");
    assert_eq!(map(base, handle), 0);
    assert_eq!(unmap(base + GRANULE as u64, GRANULE), Code::INVALID_VALUE.0);
    // SAFETY: refused, since a granule is still mapped there.
    assert_eq!(raw(unsafe { sys::cuMemAddressFree(base, 2 * GRANULE) }), Code::INVALID_VALUE.0);
    assert_eq!(driver.wrong_uses().len(), 2);
    // Released while mapped, a granule lives on until it is unmapped.
    release(handle);
    assert_eq!(driver.counts().granules, 1);
    assert_eq!(unmap(base, GRANULE), 0);
    assert_eq!(driver.counts().granules, 0);
    // SAFETY: reserved above, unmapped since. Frees the addresses permanently.
    assert_eq!(raw(unsafe { sys::cuMemAddressFree(base, 2 * GRANULE) }), 0);
    // SAFETY: an unknown handle, refused.
    let unknown = unsafe { result::event::destroy(std::ptr::null_mut()) };
    assert!(unknown.is_err());
    driver.reset();
}
