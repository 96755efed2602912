//! Virtual host memory of the CUDA driver: page-locked granules on the device's memory node, mapped one by one. Their sizes
//! are those of the range ([`AddressRange::granules`]): each is one allocation and one mapping of the process.
//!
//! ```text
//!   reserve     [ . . . . . . . . ]          cuMemAddressReserve: addresses only
//!   commit 2    [ . . G G . . . . ]          cuMemCreate, cuMemMap each; cuMemSetAccess over the run
//!   remap       [ . . . . . G G . ]          the same handles at other addresses: nothing is pinned again
//!   decommit    [ . . . . . . . . ]          cuMemUnmap, cuMemRelease each
//! ```
//!
//! A commit blocks no enqueue of another thread for more than 0.3 ms, a decommit for more than 0.06 ms, and neither waits for
//! the device. But a commit pins only 4 to 5 GB/s, so a reserve, which is acquired once and kept, is registered memory
//! instead ([`RegisterSource`]) at 28 to 35 GB/s.
//!
//! Access is set for the CPU and the source's device, and for another device when it first copies from a granule. Creating a
//! source, and reserving, creates no context.
//!
//! Invariants:
//!
//! 1. **vmm-I1**: `granules` has the handle of every granule that is mapped and readable, under its address, and no others.
//!    Its lock is held around no call of the driver; a call owns its granules alone (the contract of [`VirtualMemory`]).
//! 2. **vmm-I2**: a run is unmapped granule by granule, as it was mapped. If that fails half way, the first half is mapped
//!    again with the same handles.
#![allow(unsafe_code)] // Calls the driver.

use std::ffi::c_int;
use std::ptr::NonNull;
use std::sync::Arc;

use super::register::RegisterSource;
use super::source::{Region, RegionIds, Source};
use super::virtual_memory::{AddressRange, HandleTypes, RANGE_ALIGN_BYTES, RemapError, Subrange, VirtualMemory};
use crate::driver::RelaxedCapture;
use crate::driver::device::{self, Device};
use crate::driver::virtual_memory::{AccessDescriptor, DriverRefusal, GranuleKind, MemoryLocation, VmmApi, attribute};
use crate::error::SourceError;
use crate::host::{GRANULE_BYTES, PageTiers};
use crate::sync::Mutex;

mod table;

pub(crate) use table::let_reach;
use table::{Granule, GranuleRun, GranuleTable, placed, source_error};

/// Page-locked memory of the driver's virtual memory, readable by its device, and by each other that copies through the pool.
#[derive(Debug)]
pub struct VmmSource {
    device: Arc<Device>,
    driver: VmmApi,
    kind: GranuleKind,
    /// For the CPU and the own device.
    access: [AccessDescriptor; 2],
    ids: RegionIds,
    granules: Arc<GranuleTable>,
    /// Granules that the driver refused to release, mapped nowhere: [`VmmSource::create`] uses them first.
    unreleased: Mutex<Vec<Granule>>,
    reserves: RegisterSource,
}

fn address(start: NonNull<u8>) -> u64 {
    start.as_ptr().addr() as u64
}

impl HandleTypes {
    /// `CUmemAllocationHandleType`.
    fn bits(self) -> c_int {
        match self {
            Self::None => 0,
            Self::PosixFd => 1,
        }
    }
}

/// Why a run could not be unmapped, and whether all of it is mapped again.
struct UnmapError {
    refusal: DriverRefusal,
    restored: bool,
}

impl VmmSource {
    /// Finds a driver with virtual host memory and the device number `ordinal`; creates nothing on it. Granules come from
    /// the memory node `node`, else from the device's.
    ///
    /// # Errors
    ///
    /// There is no driver, no such device, or one of them lacks this ability; the error names what is missing.
    pub fn new(ordinal: u32, node: Option<u32>) -> Result<Self, SourceError> {
        Self::with_handles(ordinal, node, HandleTypes::None)
    }

    /// As [`new`](VmmSource::new), with granules that can be exported to other processes as `handle_types` says. A reserve
    /// cannot.
    ///
    /// # Errors
    ///
    /// As [`new`](VmmSource::new), and if the driver refuses such granules.
    pub fn with_handles(ordinal: u32, node: Option<u32>, handle_types: HandleTypes) -> Result<Self, SourceError> {
        let device = Device::find(ordinal)?;
        for (number, what) in [
            (attribute::VIRTUAL_MEMORY, "the device has no virtual memory management"),
            (attribute::HOST_NUMA_VIRTUAL_MEMORY, "the driver or the device has no virtual memory on the host"),
        ] {
            if device.attribute(number).is_none_or(|value| value == 0) {
                return Err(SourceError::new("cuDeviceGetAttribute", format!("{what} (attribute {number})")));
            }
        }
        let driver = VmmApi::find()
            .map_err(|name| SourceError::new("dlsym", format!("the driver has no {name}; it is too old")))?;
        let of_driver = || device.attribute(attribute::HOST_NUMA_ID).and_then(|node| u32::try_from(node).ok());
        let node = node.or_else(|| device.numa_node()).or_else(of_driver);
        // The driver reports -1 where the machine has one node, whose number is 0.
        let location = MemoryLocation::host_node(node.and_then(|node| c_int::try_from(node).ok()).unwrap_or(0));
        let kind = GranuleKind { location, handle_types: handle_types.bits() };
        let granularity = driver.granularity(kind).map_err(source_error)?;
        if granularity == 0 || !GRANULE_BYTES.is_multiple_of(granularity) {
            let what = format!("granules of {granularity} B do not fit {GRANULE_BYTES} B");
            return Err(SourceError::new("cuMemGetAllocationGranularity", what));
        }
        let own = c_int::try_from(ordinal).unwrap_or(0);
        let access = [location, MemoryLocation::device(own)].map(AccessDescriptor::read_write);
        let granules = GranuleTable::new(driver, ordinal, device::count()? > 1);
        let device = Arc::new(device);
        let reserves = RegisterSource::of(device.clone(), node);
        let (ids, unreleased) = Default::default();
        let source = Self { device, driver, kind, access, ids, granules, unreleased, reserves };
        let _relaxed = RelaxedCapture::enter();
        source.probe().or_else(|refusal| if refusal.needs_context() { Ok(()) } else { Err(source_error(refusal)) })?;
        Ok(source)
    }

    /// Reserves addresses and creates a granule, then releases both: some drivers announce memory of the host and refuse it
    /// in a container that may not choose its memory node. A driver that needs a context for this counts as able, because
    /// the probe creates none.
    fn probe(&self) -> Result<(), DriverRefusal> {
        let addresses = self.driver.reserve(GRANULE_BYTES, RANGE_ALIGN_BYTES)?;
        let created = self.create(std::iter::once(GRANULE_BYTES)).map(|granules| {
            let _released_later = self.release_granules(&granules);
        });
        // SAFETY: reserved above, with nothing mapped.
        created.and(unsafe { self.driver.unreserve(addresses, GRANULE_BYTES) })
    }

    /// New granules of these lengths, all of them or none.
    fn create(&self, lengths: impl Iterator<Item = usize>) -> Result<Vec<Granule>, DriverRefusal> {
        let mut created = Vec::new();
        for bytes in lengths {
            let unreleased = {
                let mut unreleased = self.unreleased.lock();
                let alike = unreleased.iter().rposition(|granule| granule.bytes == bytes);
                alike.map(|index| unreleased.swap_remove(index))
            };
            let new = || self.driver.create(bytes, self.kind).map(|handle| Granule { handle, bytes });
            match unreleased.map_or_else(new, Ok) {
                Ok(granule) => created.push(granule),
                Err(refusal) => {
                    let _released_later = self.release_granules(&created);
                    return Err(refusal);
                }
            }
        }
        Ok(created)
    }

    /// Releases granules that are mapped nowhere. Returns a refusal of the driver; what it refused is released later.
    fn release_granules(&self, granules: &[Granule]) -> Result<(), DriverRefusal> {
        let mut released = Ok(());
        for &granule in granules {
            // SAFETY: it came from `create`, and only the owner of its run releases it, here.
            if let Err(refusal) = unsafe { self.driver.release(granule.handle) } {
                // The driver still holds the memory unless it is gone itself; reuse keeps that from adding up.
                self.unreleased.lock().push(granule);
                released = Err(refusal);
            }
        }
        released
    }

    /// Releases the granules that the driver refused to release before.
    fn release_refused(&self) -> Result<(), SourceError> {
        if self.unreleased.lock().is_empty() {
            return Ok(());
        }
        let _entered = self.device.enter()?;
        let refused = std::mem::take(&mut *self.unreleased.lock());
        self.release_granules(&refused).map_err(|refusal| {
            let bytes: usize = self.unreleased.lock().iter().map(|granule| granule.bytes).sum();
            let what = format!("{refusal}; {bytes} B stay page-locked");
            SourceError::new(refusal.call, what).with_code(refusal.code.into())
        })
    }

    /// Maps `granules` from `start` on, readable and writable, or changes nothing.
    ///
    /// # Safety
    ///
    /// The addresses are reserved by the caller and have no memory.
    unsafe fn map(&self, start: u64, granules: &[Granule]) -> Result<(), DriverRefusal> {
        let undo = |count: usize| {
            for (address, granule) in placed(start, granules).take(count) {
                // SAFETY: mapped below, and not returned to the caller.
                let _ignored = unsafe { self.driver.unmap(address, granule.bytes) };
            }
        };
        for (index, (address, granule)) in placed(start, granules).enumerate() {
            // SAFETY: the caller's promise; the granule has this length.
            unsafe { self.driver.map(address, granule.bytes, 0, granule.handle, 0) }.inspect_err(|_| undo(index))?;
        }
        let bytes = granules.iter().map(|granule| granule.bytes).sum();
        // SAFETY: whole granules, mapped above; `access` has the length passed.
        unsafe { self.driver.set_access(start, bytes, self.access.as_ptr(), self.access.len()) }
            .inspect_err(|_| undo(granules.len()))
    }

    /// Unmaps the run at `start`.
    ///
    /// # Safety
    ///
    /// It consists of `granules`, in this order, and nothing uses it.
    unsafe fn unmap(&self, start: u64, granules: &[Granule]) -> Result<(), UnmapError> {
        for (index, (address, granule)) in placed(start, granules).enumerate() {
            // SAFETY: the caller's promise: one granule, mapped alone (vmm-I2).
            if let Err(refusal) = unsafe { self.driver.unmap(address, granule.bytes) } {
                // SAFETY: just unmapped.
                let restored = index == 0 || unsafe { self.map(start, &granules[..index]) }.is_ok();
                return Err(UnmapError { refusal, restored });
            }
        }
        Ok(())
    }

    /// Maps runs at their old addresses; whether all of them succeeded.
    ///
    /// # Safety
    ///
    /// They were unmapped, and nothing is mapped at their addresses.
    unsafe fn restore(&self, runs: &[GranuleRun]) -> bool {
        // SAFETY: the caller's promise.
        runs.iter().all(|run| unsafe { self.map(run.start, &run.granules) }.is_ok())
    }

    /// The error of a failed remap. Unless all `runs` are restored, releases what is left of them.
    fn remap_error(&self, refusal: DriverRefusal, restored: bool, runs: &[GranuleRun]) -> RemapError {
        if restored {
            return RemapError::Kept(source_error(refusal));
        }
        for run in runs {
            for (address, granule) in placed(run.start, &run.granules) {
                // Some are mapped and some are not; the driver refuses those that are not.
                // SAFETY: addresses of a run that is given up, mapped alone if at all (vmm-I2).
                let _ignored = unsafe { self.driver.unmap(address, granule.bytes) };
                let _released_later = self.release_granules(&[granule]);
            }
            self.granules.forget(run);
        }
        RemapError::Lost(source_error(refusal))
    }

    /// The committed run of `bytes` at `offset`.
    fn run_at(&self, range: &AddressRange, offset: usize, bytes: usize) -> Result<GranuleRun, SourceError> {
        let run = self.granules.run_at(address(range.at(offset, bytes)?), bytes);
        run.ok_or_else(|| SourceError::new("vmm", "granules that were never committed, or a part of one"))
    }
}

// SAFETY: source-C1 to C3 follow from vm-S1 to S3 of a range of its own; a reserve is a region of `RegisterSource`.
// source-C4: `RegionIds`, for both kinds. source-C5: whole granules; whole pages for a reserve.
unsafe impl Source for VmmSource {
    fn name(&self) -> &'static str {
        "vmm"
    }

    fn is_pinned(&self) -> bool {
        true
    }

    fn held_bytes(&self, len_bytes: usize) -> usize {
        len_bytes.max(1).checked_next_multiple_of(GRANULE_BYTES).unwrap_or(usize::MAX)
    }

    /// A reserve is registered, in whole pages.
    fn held_bytes_fast(&self, len_bytes: usize) -> usize {
        self.reserves.held_bytes_fast(len_bytes)
    }

    fn acquire(&self, len_bytes: usize) -> Result<Region, SourceError> {
        let held_bytes = self.held_bytes(len_bytes);
        let range = self.reserve(held_bytes)?;
        let start = range.start();
        // SAFETY: reserved above, and nothing of it is committed.
        match unsafe { self.commit(&range, 0, held_bytes) } {
            Ok(()) => Ok(Region::new(start, len_bytes, self.ids.next())),
            Err(error) => {
                // SAFETY: as above; if this fails too, addresses are leaked but no memory.
                let _ = unsafe { self.unreserve(range) };
                Err(error)
            }
        }
    }

    unsafe fn release(&self, region: Region) -> Result<(), SourceError> {
        if !self.granules.contains(address(region.start())) {
            // SAFETY: the caller's promise; without granules it came from `acquire_fast`, with this length.
            return unsafe { self.reserves.release(region) };
        }
        let held_bytes = self.held_bytes(region.len_bytes());
        let range = AddressRange::new(region.start(), held_bytes);
        // SAFETY: the caller's promise: committed by `acquire`, and unused.
        unsafe { self.decommit(&range, 0, held_bytes) }?;
        // Ignore a failure: the memory is released, only addresses leak.
        // SAFETY: reserved by `acquire`, and decommitted above.
        let _ = unsafe { self.unreserve(range) };
        Ok(())
    }

    fn acquire_fast(&self, len_bytes: usize, threads: usize, progress: &dyn Fn(usize)) -> Result<Region, SourceError> {
        // A granule takes the place of one that was not released. A reserve would come on top of it.
        self.release_refused()?;
        let region = self.reserves.acquire_fast(len_bytes, threads, progress)?;
        Ok(Region::new(region.start(), len_bytes, self.ids.next()))
    }

    fn needs_gpu(&self) -> bool {
        true
    }

    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        Some(self)
    }

    fn numa_node(&self) -> Option<u32> {
        self.reserves.numa_node()
    }

    fn page_tiers(&self, start: NonNull<u8>, len_bytes: usize) -> PageTiers {
        let addresses = address(start)..address(start) + len_bytes as u64;
        let driver_bytes = self.granules.bytes_in(addresses);
        match driver_bytes {
            0 => PageTiers::between(start, len_bytes),
            driver_bytes => PageTiers { driver_bytes, ..PageTiers::default() },
        }
    }
}

// SAFETY: vm-S1: the driver's own reservation. vm-S2: mapped with access for host and devices, and unmapped only by
// `decommit` and `remap`. vm-S3: pages of the kernel, or used before by this process; a remapped granule keeps its bytes.
// vm-S4: a copy may cross the driver's mappings of adjacent addresses, and each granule is mapped alone. vm-S5: only `commit`
// creates granules, and only `decommit` releases them.
unsafe impl VirtualMemory for VmmSource {
    fn granule_bytes(&self) -> usize {
        GRANULE_BYTES
    }

    fn reserve(&self, len_bytes: usize) -> Result<AddressRange, SourceError> {
        // By the manual this needs no context; some drivers ask for one.
        let reserved = match self.driver.reserve(len_bytes, RANGE_ALIGN_BYTES) {
            Err(refusal) if refusal.needs_context() => {
                let _entered = self.device.enter()?;
                self.driver.reserve(len_bytes, RANGE_ALIGN_BYTES)
            }
            reserved => reserved,
        }
        .map_err(source_error)?;
        // The driver runs on 64-bit machines only.
        let aligned = usize::try_from(reserved).ok().filter(|address| address.is_multiple_of(RANGE_ALIGN_BYTES));
        let start = aligned.and_then(|address| NonNull::new(std::ptr::with_exposed_provenance_mut::<u8>(address)));
        let start =
            start.ok_or_else(|| SourceError::new("cuMemAddressReserve", format!("{reserved:#x} is no range")))?;
        Ok(AddressRange::new(start, len_bytes))
    }

    unsafe fn commit(&self, range: &AddressRange, offset: usize, bytes: usize) -> Result<(), SourceError> {
        let start = address(range.at(offset, bytes)?);
        let _entered = self.device.enter()?;
        let granules = self.create(range.granules(offset, bytes)).map_err(source_error)?;
        // SAFETY: addresses of the range, not committed by the caller's promise.
        unsafe { self.map(start, &granules) }.map_err(|refusal| {
            let _released_later = self.release_granules(&granules);
            source_error(refusal)
        })?;
        self.granules.remember(start, &granules);
        Ok(())
    }

    unsafe fn decommit(&self, range: &AddressRange, offset: usize, bytes: usize) -> Result<(), SourceError> {
        let run = self.run_at(range, offset, bytes)?;
        let _entered = self.device.enter()?;
        // SAFETY: the caller's promise: committed and unused; these are its handles (vmm-I1).
        if let Err(UnmapError { refusal, restored: true }) = unsafe { self.unmap(run.start, &run.granules) } {
            return Err(source_error(refusal));
        }
        // A run that is mapped in part counts as decommitted, so that none of it is used again.
        self.granules.forget(&run);
        if self.release_granules(&run.granules).is_ok() {
            // The driver releases again. What it still refuses is tried again at the end, where it is an error.
            let _released_later = self.release_refused();
        }
        Ok(())
    }

    unsafe fn remap(&self, range: &AddressRange, from: &[Subrange], to: usize) -> Result<(), RemapError> {
        let runs = from.iter().map(|piece| self.run_at(range, piece.offset, piece.bytes));
        let runs = runs.collect::<Result<Vec<_>, _>>().map_err(RemapError::Kept)?;
        let bytes = from.iter().map(|piece| piece.bytes).sum();
        let to = address(range.at(to, bytes).map_err(RemapError::Kept)?);
        let _entered = self.device.enter().map_err(RemapError::Kept)?;
        for (done, run) in runs.iter().enumerate() {
            // SAFETY: the caller's promise: committed and unused; these are its handles (vmm-I1).
            if let Err(UnmapError { refusal, restored }) = unsafe { self.unmap(run.start, &run.granules) } {
                // SAFETY: the runs before this one were unmapped in earlier rounds.
                let restored = restored && unsafe { self.restore(&runs[..done]) };
                return Err(self.remap_error(refusal, restored, &runs));
            }
        }
        let granules: Vec<_> = runs.iter().flat_map(|run| &run.granules).copied().collect();
        // One `map` for all runs, because setting the access costs more than all other calls.
        // SAFETY: the caller's promise: nothing is committed at `to`.
        if let Err(refusal) = unsafe { self.map(to, &granules) } {
            // SAFETY: all were unmapped above.
            let restored = unsafe { self.restore(&runs) };
            return Err(self.remap_error(refusal, restored, &runs));
        }
        runs.iter().for_each(|run| self.granules.forget(run));
        self.granules.remember(to, &granules);
        Ok(())
    }

    unsafe fn unreserve(&self, range: AddressRange) -> Result<(), SourceError> {
        // SAFETY: the caller's promise: it came from `reserve`, nothing is committed, and it is unused.
        let unreserved = unsafe { self.driver.unreserve(address(range.start()), range.len_bytes()) };
        unreserved.map_err(source_error).and(self.release_refused())
    }
}

impl Drop for VmmSource {
    fn drop(&mut self) {
        // `unreserve` has returned the error.
        let _no_later = self.release_refused();
    }
}
