//! Virtual host memory: reserved addresses, physical granules, and their mappings.
//!
//! ```text
//!   reserve:  [ . . . . . . . . ]        addresses only
//!   create:                       {g}    bytes only, in a memory file
//!   map:      [ . . g . . . . . ]        mapped, without access
//!   access:   [ . . G . . . . . ]        CPU and device, each by its own call
//! ```
//!
//! No call here waits for the device or takes the enqueue lock. Creating a granule needs no context. A granule keeps its bytes while
//! it is remapped, and lives until it is released and unmapped. The device has a separate view of each granule, so that the CPU and
//! the device have separate access and a missing access is detected.
//!
//! As in the driver, these are invalid values: a NUMA node that is missing or has no memory, including -1; the location "current
//! node"; the location "host", unless an attribute of the device allows it; an offset into a granule.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex};

use crate::address_space::{self, Owner, Range};
use crate::adversarial::{self, Deviation};
use crate::call::{In, Out, Outcome, driver_call};
use crate::code::Code;
use crate::sync::lock;
use crate::{context, counts, device, memory};

const GRANULE_BYTES: u64 = 2 << 20;
const PINNED: c_int = 1;
const READ_WRITE: c_int = 3;
/// Locations, as the driver numbers them.
const ON_DEVICE: c_int = 1;
const ON_HOST: c_int = 2;
const ON_NUMA_NODE: c_int = 3;
/// The device attribute that allows virtual memory at the location "host".
const HOST_VIRTUAL_MEMORY: c_int = 145;

/// `CUmemLocation`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Location {
    kind: c_int,
    id: c_int,
}

/// `CUmemAllocationProp`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Properties {
    kind: c_int,
    handle_types: c_int,
    location: Location,
    windows: usize,
    flags: [u8; 8],
}

/// `CUmemAccessDesc`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Access {
    location: Location,
    flags: c_int,
}

impl Location {
    /// Returns whether this is a location of host memory. Only node 0 has memory.
    fn is_host(self) -> Result<bool, Code> {
        match self.kind {
            ON_DEVICE => Ok(false),
            ON_NUMA_NODE if self.id == 0 => Ok(true),
            ON_HOST if device::attribute(HOST_VIRTUAL_MEMORY) != 0 => Ok(true),
            _ if adversarial::is_on(Deviation::OtherCodes) => Err(Code::INVALID_DEVICE),
            _ => Err(Code::INVALID_VALUE),
        }
    }
}

const _: () = assert!(size_of::<Properties>() == 32 && size_of::<Access>() == 12);

struct Granule {
    file: File,
    bytes: u64,
    /// The address of the device's view.
    view: usize,
    mappings: u64,
    released: bool,
}

struct Mapping {
    bytes: u64,
    granule: u64,
    /// Devices with access, a bit each.
    devices: u64,
}

#[derive(Default)]
struct VirtualMemory {
    created: u64,
    reservations: BTreeMap<u64, u64>,
    granules: BTreeMap<u64, Granule>,
    mappings: BTreeMap<u64, Mapping>,
}

static VIRTUAL_MEMORY: LazyLock<Mutex<VirtualMemory>> = LazyLock::new(Mutex::default);

/// Devices without access to memory, a bit each.
static UNREACHABLE: AtomicU64 = AtomicU64::new(0);

/// Refuses access to memory for these devices, a bit each.
pub(crate) fn refuse_access(devices: u64) {
    UNREACHABLE.store(devices, Ordering::Relaxed);
}

fn bit(device: usize) -> u64 {
    1 << device.min(63)
}

/// Returns whether the device has access to each granule that these addresses touch; true for other memory.
pub(crate) fn can_reach(device: usize, address: u64, bytes: u64) -> bool {
    let all = lock(&VIRTUAL_MEMORY);
    let first = all.mappings.range(..=address).next_back().map_or(address, |(&start, _)| start);
    let mut touched = all.mappings.range(first..address + bytes).filter(|&(&start, of)| start + of.bytes > address);
    touched.all(|(_, mapping)| mapping.devices & bit(device) != 0)
}

/// Returns the numbers of live granules, mappings and reservations.
pub(crate) fn live() -> [u64; 3] {
    let all = lock(&VIRTUAL_MEMORY);
    [all.granules.len() as u64, all.mappings.len() as u64, all.reservations.len() as u64]
}

fn is_granular(bytes: u64) -> bool {
    bytes > 0 && bytes.is_multiple_of(GRANULE_BYTES)
}

/// Maps a granule, or nothing, at reserved addresses.
fn map_over(address: u64, bytes: u64, source: Option<&File>) -> Outcome {
    let (kind, file) = match source {
        None => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE, -1),
        Some(file) => (libc::MAP_SHARED, file.as_raw_fd()),
    };
    let at = ptr::with_exposed_provenance_mut(address as usize);
    // SAFETY: the range lies in one of our reservations, which only its users point into.
    let got = unsafe { libc::mmap(at, bytes as usize, libc::PROT_NONE, kind | libc::MAP_FIXED, file, 0) };
    if got == libc::MAP_FAILED { Err(Code::OUT_OF_MEMORY) } else { Ok(()) }
}

fn grant_to_host(address: u64, bytes: u64) -> Outcome {
    let at = ptr::with_exposed_provenance_mut(address as usize);
    // SAFETY: the call changes only the access rights of a mapping of ours, as its user requests.
    let failed = unsafe { libc::mprotect(at, bytes as usize, libc::PROT_READ | libc::PROT_WRITE) };
    if failed == 0 { Ok(()) } else { Err(Code::OUT_OF_MEMORY) }
}

/// Creates a memory file of this length.
fn file_of(bytes: u64) -> Result<File, Code> {
    // SAFETY: a plain system call with a name that ends in 0.
    let number = unsafe { libc::memfd_create(c"granule".as_ptr(), libc::MFD_CLOEXEC) };
    if number < 0 {
        return Err(Code::OUT_OF_MEMORY);
    }
    // SAFETY: the descriptor is fresh and owned here alone.
    let file = unsafe { File::from_raw_fd(number) };
    file.set_len(bytes).map_err(|_| Code::OUT_OF_MEMORY)?;
    Ok(file)
}

/// Maps `bytes` at a multiple of `alignment`, a power of two.
fn map_aligned(bytes: usize, alignment: usize) -> Result<usize, Code> {
    let with_padding = bytes.checked_add(alignment).ok_or(Code::OUT_OF_MEMORY)?;
    let start = memory::map(with_padding)?;
    let address = start.next_multiple_of(alignment);
    let before = address - start;
    if before > 0 {
        memory::unmap(start, before);
    }
    memory::unmap(address + bytes, with_padding - before - bytes);
    Ok(address)
}

fn view_of(file: &File, bytes: u64) -> Result<usize, Code> {
    let view = memory::map(bytes as usize)?;
    map_over(view as u64, bytes, Some(file))?;
    grant_to_host(view as u64, bytes)?;
    if !memory::is_sparse() {
        memory::make_resident(view, bytes as usize);
    }
    Ok(view)
}

impl VirtualMemory {
    fn reserved(&self, address: u64, bytes: u64) -> bool {
        let before = self.reservations.range(..=address).next_back();
        before.is_some_and(|(&start, &reserved)| address - start < reserved && bytes <= reserved - (address - start))
    }

    /// Returns the mappings that together form exactly this range.
    fn exactly(&self, address: u64, bytes: u64) -> Result<Vec<u64>, Code> {
        let mut next = address;
        let mut found = Vec::new();
        while next < address + bytes {
            let mapping = self.mappings.get(&next).ok_or(Code::INVALID_VALUE)?;
            found.push(next);
            next += mapping.bytes;
        }
        if next == address + bytes && bytes > 0 { Ok(found) } else { Err(Code::INVALID_VALUE) }
    }

    fn free_if_unused(&mut self, granule: u64) {
        let over = self.granules.get(&granule).is_some_and(|granule| granule.released && granule.mappings == 0);
        if let Some(granule) = over.then(|| self.granules.remove(&granule)).flatten() {
            memory::unmap(granule.view, granule.bytes as usize);
            counts::unpin(granule.bytes);
        }
    }
}

driver_call! { Device fn cuMemAddressReserve(out: Out<u64>, bytes: usize, alignment: usize, _wish: u64, flags: u64) {
    let alignment = (alignment as u64).max(GRANULE_BYTES);
    if !is_granular(bytes as u64) || !alignment.is_power_of_two() || flags != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let address = map_aligned(bytes, alignment as usize)? as u64;
    map_over(address, bytes as u64, None)?;
    lock(&VIRTUAL_MEMORY).reservations.insert(address, bytes as u64);
    out.put(address)
}}

driver_call! { Device fn cuMemAddressFree(address: u64, bytes: usize) {
    let mut all = lock(&VIRTUAL_MEMORY);
    let mapped = all.mappings.range(address..address + bytes as u64).next().is_some();
    if mapped || all.reservations.get(&address) != Some(&(bytes as u64)) {
        counts::misused(format!("cuMemAddressFree of {bytes} bytes at {address:#x}: still mapped, or not what was reserved"));
        return Err(Code::INVALID_VALUE);
    }
    all.reservations.remove(&address);
    memory::unmap(address as usize, bytes);
    Ok(())
}}

driver_call! { Device fn cuMemGetAllocationGranularity(out: Out<usize>, properties: In<Properties>, _option: c_int) {
    properties.get()?.location.is_host()?;
    out.put(GRANULE_BYTES as usize)
}}

driver_call! { Device fn cuMemCreate(out: Out<u64>, bytes: usize, properties: In<Properties>, flags: u64) {
    let wanted = properties.get()?;
    let bytes = bytes as u64;
    if wanted.kind != PINNED || !is_granular(bytes) || flags != 0 || wanted.handle_types != 0 {
        return Err(Code::INVALID_VALUE);
    }
    if !wanted.location.is_host()? {
        return Err(Code::NOT_SUPPORTED);
    }
    counts::pin(bytes)?;
    let made = file_of(bytes).and_then(|file| view_of(&file, bytes).map(|view| (file, view)));
    let (file, view) = made.inspect_err(|_| counts::unpin(bytes))?;
    let mut all = lock(&VIRTUAL_MEMORY);
    all.created += 1;
    let handle = 0x8000_0000 + all.created * 0x10;
    all.granules.insert(handle, Granule { file, bytes, view, mappings: 0, released: false });
    out.put(handle)
}}

driver_call! { Device fn cuMemRelease(handle: u64) {
    let mut all = lock(&VIRTUAL_MEMORY);
    match all.granules.get_mut(&handle) {
        Some(granule) if !granule.released => granule.released = true,
        _ => {
            counts::misused(format!("cuMemRelease of {handle:#x}, which does not exist"));
            return Err(Code::INVALID_VALUE);
        }
    }
    all.free_if_unused(handle);
    Ok(())
}}

driver_call! { Device fn cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, flags: u64) {
    let mut all = lock(&VIRTUAL_MEMORY);
    let bytes = bytes as u64;
    if offset != 0 || !is_granular(bytes) || !address.is_multiple_of(GRANULE_BYTES) || flags != 0 || !all.reserved(address, bytes) {
        return Err(Code::INVALID_VALUE);
    }
    let mut before = all.mappings.range(..address + bytes);
    if before.next_back().is_some_and(|(&start, mapping)| start + mapping.bytes > address) {
        return Err(Code::ALREADY_MAPPED);
    }
    let granule = all.granules.get_mut(&handle).filter(|granule| !granule.released).ok_or(Code::INVALID_VALUE)?;
    if bytes > granule.bytes {
        return Err(Code::INVALID_VALUE);
    }
    map_over(address, bytes, Some(&granule.file))?;
    granule.mappings += 1;
    all.mappings.insert(address, Mapping { bytes, granule: handle, devices: 0 });
    Ok(())
}}

driver_call! { Device fn cuMemUnmap(address: u64, bytes: usize) {
    let mut all = lock(&VIRTUAL_MEMORY);
    let starts = all.exactly(address, bytes as u64).inspect_err(|_| {
        counts::misused(format!("cuMemUnmap of {bytes} bytes at {address:#x}, which are not whole mappings"));
    })?;
    for start in starts {
        // The range is removed first: a later copy faults, and a running copy delays this call by at most one step.
        address_space::remove(start, |owner| matches!(owner, Owner::Granule { .. }));
        let Some(mapping) = all.mappings.remove(&start) else { continue };
        map_over(start, mapping.bytes, None)?;
        if let Some(granule) = all.granules.get_mut(&mapping.granule) {
            granule.mappings -= 1;
        }
        all.free_if_unused(mapping.granule);
    }
    Ok(())
}}

driver_call! { Device fn cuMemSetAccess(address: u64, bytes: usize, wanted: In<Access>, count: usize) {
    let mut guard = lock(&VIRTUAL_MEMORY);
    let all = &mut *guard;
    let starts = all.exactly(address, bytes as u64)?;
    for access in (0..count).map(|index| wanted.at(index)) {
        let Access { location, flags } = access?;
        if flags != READ_WRITE {
            return Err(Code::INVALID_VALUE);
        }
        let is_host = location.is_host()?;
        for &start in &starts {
            let Mapping { bytes, granule, devices } = all.mappings.get_mut(&start).ok_or(Code::INVALID_VALUE)?;
            if is_host {
                grant_to_host(start, *bytes)?;
                continue;
            }
            let device = bit(context::check_device(location.id)?);
            if UNREACHABLE.load(Ordering::Relaxed) & device != 0 {
                return Err(Code::UNKNOWN);
            }
            if *devices == 0 {
                let owner = Owner::Granule { backing: all.granules.get(granule).ok_or(Code::INVALID_VALUE)?.view };
                address_space::insert(start, Range { bytes: *bytes, owner, context: 0 })?;
            }
            *devices |= device;
        }
    }
    Ok(())
}}
