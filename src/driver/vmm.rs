//! The driver's virtual memory on the host: reserving addresses, creating granules, and mapping granules at addresses.
//!
//! The types and numbers are defined here as in the driver's header, and the functions are found by name, because cudarc's bindings
//! before CUDA 12.2 lack the host locations, and later bindings changed the layout of a location twice. Results are plain numbers,
//! because a Rust enum must never have a value that it does not list.
//!
//! This module does not decide what is mapped, and has no state.

use std::ffi::c_int;

use super::calls::{calls, values};
use super::code::FailedCall;
use super::library::symbol;

/// `CUmemGenericAllocationHandle`: one physical granule.
pub(crate) type GranuleHandle = u64;

/// Numbers of `CUdevice_attribute`.
pub(crate) mod attribute {
    use std::ffi::c_int;

    pub(crate) const HOST_REGISTER_SUPPORTED: c_int = 99;
    pub(crate) const VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: c_int = 102;
    pub(crate) const HOST_NUMA_ID: c_int = 134;
    pub(crate) const HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: c_int = 141;
    pub(crate) const HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: c_int = 145;
}

// Values of `CUmemLocationType`, `CUmemAllocationType`, `CUmemAccess_flags` and `CUmemAllocationGranularity_flags`.
const LOCATION_DEVICE: c_int = 1;
const LOCATION_HOST: c_int = 2;
const LOCATION_HOST_NUMA: c_int = 3;
const ALLOCATION_PINNED: c_int = 1;
const ACCESS_READ_WRITE: c_int = 3;
const GRANULARITY_MINIMUM: c_int = 0;

/// `CUmemLocation`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct MemoryLocation {
    kind: c_int,
    id: c_int,
}

impl MemoryLocation {
    pub(crate) fn device(id: c_int) -> Self {
        Self { kind: LOCATION_DEVICE, id }
    }

    /// Returns the location on the NUMA node `node` of the host; `None` lets the driver choose the node.
    pub(crate) fn host(node: Option<u32>) -> Self {
        let node = node.map(|node| (LOCATION_HOST_NUMA, c_int::try_from(node).unwrap_or(0)));
        let (kind, id) = node.unwrap_or((LOCATION_HOST, 0));
        Self { kind, id }
    }
}

/// `CUmemAllocationProp`, used for pinned memory.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct AllocationProperties {
    kind: c_int,
    handle_types: c_int,
    location: MemoryLocation,
    windows: usize,
    flags: [u8; 8],
}

impl AllocationProperties {
    fn pinned(location: MemoryLocation) -> Self {
        Self { kind: ALLOCATION_PINNED, handle_types: 0, location, windows: 0, flags: [0; 8] }
    }
}

/// `CUmemAccessDesc`: access from one location.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct AccessDescriptor {
    location: MemoryLocation,
    flags: c_int,
}

impl AccessDescriptor {
    pub(crate) fn read_write(location: MemoryLocation) -> Self {
        Self { location, flags: ACCESS_READ_WRITE }
    }
}

// These are the sizes in the header since CUDA 10.2.
const _: () = assert!(size_of::<MemoryLocation>() == 8 && size_of::<AccessDescriptor>() == 12);
const _: () = assert!(size_of::<AllocationProperties>() == 32 && align_of::<AllocationProperties>() == 8);

/// Returns the name of the first function that this driver does not have; `None` if the driver has all of them.
pub(crate) fn missing() -> Option<&'static str> {
    let names = [
        c"cuMemAddressReserve",
        c"cuMemAddressFree",
        c"cuMemGetAllocationGranularity",
        c"cuMemCreate",
        c"cuMemRelease",
        c"cuMemMap",
        c"cuMemUnmap",
        c"cuMemSetAccess",
    ];
    names.into_iter().find(|name| symbol(name).is_none()).and_then(|name| name.to_str().ok())
}

values! {
    /// Reserves addresses without memory at a multiple of `alignment`. The driver chooses the addresses if `wish` is 0.
    pub(crate) reserve = c"cuMemAddressReserve"(bytes: usize, alignment: usize, wish: u64, flags: u64) -> u64;
    granularity_call = c"cuMemGetAllocationGranularity"(properties: &AllocationProperties, recommended: c_int) -> usize;
    create_call = c"cuMemCreate"(bytes: usize, properties: &AllocationProperties, flags: u64) -> GranuleHandle;
}

calls! {
    /// Returns reserved addresses to the driver. Nothing may be mapped at them.
    pub(crate) unreserve = c"cuMemAddressFree"(address: u64, bytes: usize);
    /// Releases a granule. The driver frees the memory once it is mapped nowhere.
    pub(crate) release = c"cuMemRelease"(granule: GranuleHandle);
    /// Maps a granule at reserved addresses, at which nothing may be mapped.
    pub(crate) map = c"cuMemMap"(address: u64, bytes: usize, offset: usize, granule: GranuleHandle, flags: u64);
    /// Unmaps one whole mapping, or several adjacent ones.
    pub(crate) unmap = c"cuMemUnmap"(address: u64, bytes: usize);
    /// Sets which locations may read and write mapped memory.
    pub(crate) set_access = c"cuMemSetAccess"(address: u64, bytes: usize, descriptors: *const AccessDescriptor, count: usize);
}

/// Returns the size of the smallest granule at this location. Lengths and addresses are multiples of this size.
pub(crate) fn granularity(location: MemoryLocation) -> Result<usize, FailedCall> {
    granularity_call(&AllocationProperties::pinned(location), GRANULARITY_MINIMUM)
}

/// Creates a granule of `bytes` without an address. Needs no current context.
pub(crate) fn create(bytes: usize, location: MemoryLocation) -> Result<GranuleHandle, FailedCall> {
    create_call(bytes, &AllocationProperties::pinned(location), 0)
}
