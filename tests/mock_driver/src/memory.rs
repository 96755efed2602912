//! Pinned host memory: allocated by the driver, or registered by the program.
//!
//! Freeing and unregistering wait for all work of every device with the enqueue lock held. A pool must not do that while it
//! streams; each violation is counted.
//!
//! Fresh blocks hold garbage and blocks up to [`SMALL_BYTES`] begin in the middle of a page: the real driver carves
//! them out of larger ones and promises neither zeros nor page alignment.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::address_space::{self, Owner, Range};
use crate::adversarial::{self, Deviation};
use crate::call::{Out, Outcome, driver_call};
use crate::code::Code;
use crate::{capture, context, counts, stream};

/// The content of a fresh block.
pub(crate) const GARBAGE: u8 = 0xA5;
const SMALL_BYTES: usize = 64 << 10;
const SMALL_OFFSET: usize = 512;
const PAGE: usize = 4096;
/// Portable, mapped, write-combined.
const ALLOC_FLAGS: u32 = 0b111;
/// Portable, mapped, device's own memory, read-only.
const REGISTER_FLAGS: u32 = 0b1111;
/// The only pointer attribute that the mock driver knows, as the driver numbers it.
const DEVICE_POINTER: c_int = 3;

/// Inserts a range of the current context.
pub(crate) fn insert(start: u64, bytes: u64, owner: Owner) -> Outcome {
    address_space::insert(start, Range { bytes, owner, context: context::current()? })
}

/// Unpins and unmaps a range that was removed from the map.
pub(crate) fn release(range: Range) {
    match range.owner {
        Owner::Allocated { mapping, mapping_bytes, .. } => {
            counts::unpin(range.bytes);
            unmap(mapping, mapping_bytes);
        }
        Owner::Registered { .. } => counts::unpin(range.bytes),
        Owner::Device { backing } => unmap(backing, range.bytes as usize),
        Owner::Granule { .. } => {}
    }
}

/// Frees the memory of a context that ends.
pub(crate) fn end_of(context: usize) {
    address_space::remove_of(context).into_iter().for_each(release);
}

/// Maps anonymous memory and returns its address.
pub(crate) fn map(bytes: usize) -> Result<usize, Code> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a fresh anonymous mapping, at an address of the kernel's choice.
    let at = unsafe { libc::mmap(ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    if at == libc::MAP_FAILED { Err(Code::OUT_OF_MEMORY) } else { Ok(at.expose_provenance()) }
}

/// Unmaps memory of [`map`].
pub(crate) fn unmap(at: usize, bytes: usize) {
    // SAFETY: (address-I2) the range was removed from the map, so nothing uses it.
    let failed = unsafe { libc::munmap(ptr::with_exposed_provenance_mut(at), bytes) };
    debug_assert_eq!(failed, 0);
}

/// Makes fresh memory resident, as pinned memory is, and fills it with garbage.
pub(crate) fn make_resident(at: usize, bytes: usize) {
    // SAFETY: the caller just mapped these bytes, and nothing else uses them.
    unsafe { ptr::write_bytes(ptr::with_exposed_provenance_mut::<u8>(at), GARBAGE, bytes) };
}

/// Whether new pinned memory has zeros and no pages until it is written to.
static SPARSE: AtomicBool = AtomicBool::new(false);

/// Sets whether new pinned memory gets pages only when it is written to, so that a test may hold a terabyte.
pub(crate) fn set_sparse(is_sparse: bool) {
    // Relaxed, here and below: a test sets it before the calls that it affects.
    SPARSE.store(is_sparse, Ordering::Relaxed);
}

pub(crate) fn is_sparse() -> bool {
    SPARSE.load(Ordering::Relaxed)
}

fn is_mapped(at: usize, bytes: usize) -> bool {
    let start = at & !(PAGE - 1);
    let pages = (at + bytes - start).div_ceil(PAGE);
    let mut residency = vec![0_u8; pages];
    // SAFETY: `mincore` writes one byte per page into a vector of that length.
    let failed =
        unsafe { libc::mincore(ptr::with_exposed_provenance_mut(start), pages * PAGE, residency.as_mut_ptr()) };
    failed == 0
}

/// Waits for all work of every device, as the calls that free memory do.
pub(crate) fn wait_for_all_work() -> Outcome {
    capture::forbid_unsafe_call()?;
    if stream::in_flight() > 0 {
        counts::freed_with_work_in_flight();
    }
    stream::wait_for_idle(None)
}

/// Releases the range that starts here, if its owner is of the wanted kind; otherwise records a misuse and fails with `code`.
fn unpin(call: &str, start: u64, wanted: impl Fn(&Owner) -> bool, code: Code) -> Outcome {
    let is_wanted = |(at, range): (u64, Range)| at == start && wanted(&range.owner);
    if !address_space::read().at(start).is_some_and(is_wanted) {
        counts::misused(format!("{call} of {start:#x}, which is not the start of such memory"));
        return Err(code);
    }
    wait_for_all_work()?;
    address_space::remove(start, wanted).map(release).ok_or(code)
}

fn allocate(out: Out<*mut c_void>, bytes: usize, flags: u32) -> Outcome {
    context::current()?;
    capture::forbid_unsafe_call()?;
    if bytes == 0 || flags & !ALLOC_FLAGS != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let offset = if bytes <= SMALL_BYTES { SMALL_OFFSET } else { 0 };
    let mapping_bytes = bytes.checked_add(offset + PAGE - 1).ok_or(Code::OUT_OF_MEMORY)? & !(PAGE - 1);
    counts::pin(bytes as u64)?;
    let mapping = map(mapping_bytes).inspect_err(|_| counts::unpin(bytes as u64))?;
    if !is_sparse() {
        make_resident(mapping, mapping_bytes);
    }
    let address = mapping + offset;
    insert(address as u64, bytes as u64, Owner::Allocated { flags, mapping, mapping_bytes })?;
    out.put(ptr::with_exposed_provenance_mut(address))
}

driver_call! { Enqueue fn cuMemHostAlloc(out: Out<*mut c_void>, bytes: usize, flags: u32) {
    allocate(out, bytes, flags)
}}

driver_call! { Enqueue fn cuMemAllocHost_v2(out: Out<*mut c_void>, bytes: usize) {
    allocate(out, bytes, 0)
}}

driver_call! { Enqueue fn cuMemFreeHost(address: *mut c_void) {
    if address.is_null() {
        return Ok(());
    }
    let is_allocated = |owner: &Owner| matches!(owner, Owner::Allocated { .. });
    unpin("cuMemFreeHost", address.addr() as u64, is_allocated, Code::INVALID_VALUE)
}}

driver_call! { Enqueue fn cuMemHostRegister_v2(address: *mut c_void, bytes: usize, flags: u32) {
    context::current()?;
    capture::forbid_unsafe_call()?;
    if adversarial::is_on(Deviation::NoRegistering) {
        return Err(Code::NOT_SUPPORTED);
    }
    let start = address.expose_provenance();
    if start == 0 || bytes == 0 || flags & !REGISTER_FLAGS != 0 || !is_mapped(start, bytes) {
        counts::misused(format!("cuMemHostRegister of {bytes} bytes at {start:#x}, which are not all mapped, with flags {flags}"));
        return Err(Code::INVALID_VALUE);
    }
    counts::pin(bytes as u64)?;
    insert(start as u64, bytes as u64, Owner::Registered { flags })
        .inspect_err(|_| counts::unpin(bytes as u64))
}}

driver_call! { Enqueue fn cuMemHostUnregister(address: *mut c_void) {
    let is_registered = |owner: &Owner| matches!(owner, Owner::Registered { .. });
    unpin("cuMemHostUnregister", address.addr() as u64, is_registered, Code::HOST_MEMORY_NOT_REGISTERED)
}}

driver_call! { Device fn cuMemHostGetDevicePointer_v2(out: Out<u64>, address: *mut c_void, flags: u32) {
    let start = address.addr() as u64;
    match address_space::read().at(start) {
        Some((_, Range { owner: Owner::Allocated { .. } | Owner::Registered { .. }, .. })) if flags == 0 => out.put(start),
        _ => Err(Code::INVALID_VALUE),
    }
}}

// Host memory has one address on the host and on the device. Pageable memory is refused.
driver_call! { Device fn cuPointerGetAttribute(out: Out<u64>, number: c_int, address: u64) {
    match address_space::read().at(address) {
        Some(_) if number == DEVICE_POINTER => out.put(address),
        None if number == DEVICE_POINTER => Err(Code::INVALID_VALUE),
        _ => Err(Code::NOT_SUPPORTED),
    }
}}

driver_call! { Device fn cuMemHostGetFlags(out: Out<u32>, address: *mut c_void) {
    match address_space::read().at(address.addr() as u64) {
        Some((_, Range { owner: Owner::Allocated { flags, .. } | Owner::Registered { flags }, .. })) => out.put(flags),
        _ => Err(Code::INVALID_VALUE),
    }
}}
