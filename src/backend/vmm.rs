//! Virtual host memory of the CUDA driver: page-locked granules on the device's memory node, mapped one by one.
//!
//! ```text
//!   reserve     [ . . . . . . . . ]          cuMemAddressReserve: addresses only
//!   lock 2      [ . . G G . . . . ]          cuMemCreate, cuMemMap each; cuMemSetAccess over the run
//!   relocate    [ . . . . . G G . ]          the same handles elsewhere: nothing is pinned anew
//!   unlock      [ . . . . . . . . ]          cuMemUnmap, cuMemRelease each
//! ```
//!
//! Growing holds up no enqueue of another thread for more than 0.3 ms, giving back for more than 0.06 ms, and neither waits
//! for the device. It pins at 4 to 5 GB/s, though: so a reserve, made once and kept, is registered memory instead
//! ([`RegisterSource`]), which comes at 28 to 35.
//!
//! Every device that the driver sees may copy from the granules. Making a source, and reserving, creates no context.
//!
//! Invariants:
//!
//! 1. `granules` has the handle of every granule that is mapped and readable, under its address, and no others. Its lock is
//!    held around no call of the driver; who works on a granule owns it alone (the promises of [`VirtualMemory`]).
//! 2. A run is unmapped granule by granule, as it was mapped; what fails is mapped again with the same handles.
#![allow(unsafe_code)] // Calls the driver.

use std::collections::HashMap;
use std::ffi::c_int;
use std::ptr::NonNull;
use std::sync::Arc;

use super::device::{self, Device};
use super::pages::Numbering;
use super::register::RegisterSource;
use super::{
    AddressRange, PageTiers, RANGE_ALIGN_BYTES, Region, RemapError, Source, SourceError, Subrange, VirtualMemory,
};
use crate::driver::virtual_memory::{Access, Handle, Location, Refused, VmmApi, attribute};
use crate::driver::{Current, Relaxed};
use crate::sync::Mutex;

/// What the driver maps at once, and the size of a huge page.
const GRANULE_BYTES: usize = 2 << 20;
const _: () = assert!(GRANULE_BYTES == RANGE_ALIGN_BYTES);

/// Page-locked memory of the driver's virtual memory, readable by all devices.
#[derive(Debug)]
pub struct VmmSource {
    device: Arc<Device>,
    driver: VmmApi,
    node: Location,
    access: Vec<Access>,
    numbering: Numbering,
    granules: Mutex<HashMap<usize, Handle>>,
    /// Granules that the driver would not take back, mapped nowhere: the next to be used.
    refused: Mutex<Vec<Handle>>,
    reserves: RegisterSource,
}

/// Granules in a row.
struct Run {
    start: usize,
    granules: Vec<Handle>,
}

impl Run {
    fn bytes(&self) -> usize {
        self.granules.len() * GRANULE_BYTES
    }
}

/// How a run that could not be unmapped was left.
enum Stuck {
    /// As it was.
    Whole(Refused),
    /// In pieces that nobody may use: the driver would not map again what it had unmapped.
    Broken(Refused),
}

impl Stuck {
    /// The refusal, and whether the run is whole.
    fn into_parts(self) -> (Refused, bool) {
        match self {
            Self::Whole(refused) => (refused, true),
            Self::Broken(refused) => (refused, false),
        }
    }
}

impl VmmSource {
    /// Looks for a driver with virtual host memory and the device number `ordinal`; creates nothing on it. Granules are
    /// made on the memory node `node`, else on the device's.
    ///
    /// # Errors
    ///
    /// There is no driver, no such device, or one of them cannot do this; the error says what is missing.
    pub fn new(ordinal: u32, node: Option<u32>) -> Result<Self, SourceError> {
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
        let said = || device.attribute(attribute::HOST_NUMA_ID).and_then(|node| u32::try_from(node).ok());
        let node = node.or_else(|| device.numa_node()).or_else(said);
        // The driver says -1 where the machine has one node, whose number is 0.
        let location = Location::host_node(node.and_then(|node| c_int::try_from(node).ok()).unwrap_or(0));
        let granularity = driver.granularity(location).map_err(driver_said)?;
        if granularity == 0 || !GRANULE_BYTES.is_multiple_of(granularity) {
            let what = format!("granules of {granularity} B do not fit {GRANULE_BYTES} B");
            return Err(SourceError::new("cuMemGetAllocationGranularity", what));
        }
        let own = c_int::try_from(ordinal).unwrap_or(0);
        let others = device::all_with(attribute::VIRTUAL_MEMORY)?.into_iter().filter(|&other| other != own);
        let devices = std::iter::once(own).chain(others).map(Location::device);
        let access = [location].into_iter().chain(devices).map(Access::read_write).collect();
        let device = Arc::new(device);
        let reserves = RegisterSource::of(device.clone(), node);
        let (numbering, granules, refused) = Default::default();
        let source = Self { device, driver, node: location, access, numbering, granules, refused, reserves };
        let _relaxed = Relaxed::enter();
        source
            .try_one()
            .or_else(|refused| if refused.wants_a_context() { Ok(()) } else { Err(driver_said(refused)) })?;
        Ok(source)
    }

    /// Addresses and a granule, had and given back: drivers announce memory of the host and refuse it all the same where a
    /// container may not choose its memory node. A driver that wants a context for it is believed: none is created here.
    fn try_one(&self) -> Result<(), Refused> {
        let addresses = self.driver.reserve(GRANULE_BYTES, RANGE_ALIGN_BYTES)?;
        let created = self.create(1).map(|granule| self.dissolve(&granule));
        // SAFETY: reserved above, with nothing there.
        created.and(unsafe { self.driver.unreserve(addresses, GRANULE_BYTES) })
    }

    /// What every call of the driver needs around it.
    fn enter(&self) -> Result<(Relaxed, Current), SourceError> {
        Ok((Relaxed::enter(), self.device.bind()?))
    }

    /// New granules, all of them or none.
    fn create(&self, count: usize) -> Result<Vec<Handle>, Refused> {
        let mut created = Vec::with_capacity(count);
        for _ in 0..count {
            let left_over = self.refused.lock().pop();
            match left_over.map_or_else(|| self.driver.create(GRANULE_BYTES, self.node), Ok) {
                Ok(granule) => created.push(granule),
                Err(refused) => {
                    self.dissolve(&created);
                    return Err(refused);
                }
            }
        }
        Ok(created)
    }

    /// Gives granules back that are mapped nowhere.
    fn dissolve(&self, granules: &[Handle]) {
        for &granule in granules {
            // SAFETY: of `create`, and released only here, by who owns the run.
            if unsafe { self.driver.release(granule) }.is_err() {
                // Unless the driver is gone, it still holds the memory, which must not add up.
                self.refused.lock().push(granule);
            }
        }
    }

    /// Makes the run at `start` of `granules`, readable and writable, or changes nothing.
    ///
    /// # Safety
    ///
    /// Reserved addresses of the caller's, with nothing behind them.
    unsafe fn map(&self, start: usize, granules: &[Handle]) -> Result<(), Refused> {
        let undo = |count: usize| {
            for index in 0..count {
                // SAFETY: mapped below, and nobody has seen it.
                let _gone = unsafe { self.driver.unmap(start + index * GRANULE_BYTES, GRANULE_BYTES) };
            }
        };
        for (index, &granule) in granules.iter().enumerate() {
            // SAFETY: the caller's promise; the granule has this length.
            unsafe { self.driver.map(start + index * GRANULE_BYTES, GRANULE_BYTES, granule) }
                .inspect_err(|_| undo(index))?;
        }
        // SAFETY: whole granules, mapped above.
        unsafe { self.driver.allow(start, granules.len() * GRANULE_BYTES, &self.access) }
            .inspect_err(|_| undo(granules.len()))
    }

    /// Takes the run at `start` away from its addresses.
    ///
    /// # Safety
    ///
    /// It consists of `granules`, in this order, and nothing uses it.
    unsafe fn unmap(&self, start: usize, granules: &[Handle]) -> Result<(), Stuck> {
        for index in 0..granules.len() {
            // SAFETY: the caller's promise: one granule, mapped alone (invariant 2).
            if let Err(refused) = unsafe { self.driver.unmap(start + index * GRANULE_BYTES, GRANULE_BYTES) } {
                // SAFETY: just unmapped.
                let restored = index == 0 || unsafe { self.map(start, &granules[..index]) }.is_ok();
                return Err(if restored { Stuck::Whole(refused) } else { Stuck::Broken(refused) });
            }
        }
        Ok(())
    }

    /// Puts runs back where they were. Says whether all are there.
    ///
    /// # Safety
    ///
    /// They were unmapped, and nothing is at their addresses.
    unsafe fn map_back(&self, runs: &[Run]) -> bool {
        // SAFETY: the caller's promise.
        runs.iter().all(|run| unsafe { self.map(run.start, &run.granules) }.is_ok())
    }

    /// Why runs were not moved, and what is left of them: all, or nothing that anybody may use.
    fn not_moved(&self, refused: Refused, are_back: bool, runs: &[Run]) -> RemapError {
        if are_back {
            return RemapError::Kept(driver_said(refused));
        }
        for run in runs {
            for (index, &granule) in run.granules.iter().enumerate() {
                // Some are mapped and some are not; the driver refuses what is not there.
                // SAFETY: addresses of a run that is given up, mapped alone if at all (invariant 2).
                let _gone = unsafe { self.driver.unmap(run.start + index * GRANULE_BYTES, GRANULE_BYTES) };
                self.dissolve(&[granule]);
            }
            self.forget(run.start, run.bytes());
        }
        RemapError::Lost(driver_said(refused))
    }

    /// The handles of the run at `start`.
    fn granules_at(&self, start: usize, bytes: usize) -> Result<Vec<Handle>, SourceError> {
        let granules = self.granules.lock();
        let handles = (start..start + bytes).step_by(GRANULE_BYTES).map(|address| granules.get(&address).copied());
        handles.collect::<Option<_>>().ok_or_else(|| SourceError::new("vmm", "granules that were never locked"))
    }

    fn remember(&self, start: usize, handles: &[Handle]) {
        let addresses = (start..).step_by(GRANULE_BYTES);
        self.granules.lock().extend(addresses.zip(handles.iter().copied()));
    }

    fn forget(&self, start: usize, bytes: usize) {
        let mut granules = self.granules.lock();
        for address in (start..start + bytes).step_by(GRANULE_BYTES) {
            granules.remove(&address);
        }
    }

    fn is_of_granules(&self, region: &Region) -> bool {
        self.granules.lock().contains_key(&region.start().as_ptr().addr())
    }
}

// SAFETY: C1 to C3 as for a span of its own, S1 to S3; a reserve is a region of `RegisterSource`. C4: `Numbering`, for both
// kinds. C5: whole granules.
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

    fn acquire(&self, len_bytes: usize) -> Result<Region, SourceError> {
        let held_bytes = self.held_bytes(len_bytes);
        let range = self.reserve(held_bytes)?;
        let start = range.start();
        // SAFETY: reserved above, and nothing of it is locked.
        match unsafe { self.commit(&range, 0, held_bytes) } {
            Ok(()) => Ok(Region::new(start, len_bytes, self.numbering.next())),
            Err(refusal) => {
                // SAFETY: as above; if this fails too, addresses are lost and no memory.
                let _ = unsafe { self.unreserve(range) };
                Err(refusal)
            }
        }
    }

    unsafe fn release(&self, region: Region) -> Result<(), SourceError> {
        let held_bytes = self.held_bytes(region.len_bytes());
        if !self.is_of_granules(&region) {
            let reserve = Region::new(region.start(), held_bytes, region.id());
            // SAFETY: the caller's promise; not of granules, hence of `acquire_fast`, with this length.
            return unsafe { self.reserves.release(reserve) };
        }
        let range = AddressRange::new(region.start(), held_bytes);
        // SAFETY: the caller's promise: locked by `acquire` and used by nobody.
        unsafe { self.decommit(&range, 0, held_bytes) }?;
        // The memory is back; if this fails, addresses are lost and nothing else.
        // SAFETY: reserved by `acquire`, and unlocked above.
        let _ = unsafe { self.unreserve(range) };
        Ok(())
    }

    fn acquire_fast(&self, len_bytes: usize, threads: usize, progress: &dyn Fn(usize)) -> Result<Region, SourceError> {
        let held_bytes = self.held_bytes(len_bytes);
        let told = |bytes: usize| progress(bytes.min(len_bytes));
        let region = self.reserves.acquire_fast(held_bytes, threads, &told)?;
        Ok(Region::new(region.start(), len_bytes, self.numbering.next()))
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
        let addresses = start.as_ptr().addr()..start.as_ptr().addr() + len_bytes;
        let granules = self.granules.lock().keys().filter(|&address| addresses.contains(address)).count();
        match granules {
            0 => PageTiers::between(start, len_bytes),
            granules => PageTiers { driver_bytes: (granules * GRANULE_BYTES) as u64, ..PageTiers::default() },
        }
    }
}

// SAFETY: S1: the driver's own reservation. S2: mapped with access for host and devices, and taken away only by `unlock` and
// `relocate`. S3: pages of the kernel, or used before by this
// process; what moves keeps its bytes. S4: the driver's mappings of adjacent addresses are one memory
// to a copy, and each granule is mapped alone. S5: granules are created by `lock` and released by `unlock` alone.
unsafe impl VirtualMemory for VmmSource {
    fn granule_bytes(&self) -> usize {
        GRANULE_BYTES
    }

    fn reserve(&self, len_bytes: usize) -> Result<AddressRange, SourceError> {
        // Needs no context by the manual; a driver that wants one all the same gets it.
        let address = match self.driver.reserve(len_bytes, RANGE_ALIGN_BYTES) {
            Err(refused) if refused.wants_a_context() => {
                let _entered = self.enter()?;
                self.driver.reserve(len_bytes, RANGE_ALIGN_BYTES)
            }
            reserved => reserved,
        }
        .map_err(driver_said)?;
        let start = NonNull::new(std::ptr::with_exposed_provenance_mut::<u8>(address));
        let start = start.filter(|start| start.as_ptr().addr().is_multiple_of(RANGE_ALIGN_BYTES));
        let start =
            start.ok_or_else(|| SourceError::new("cuMemAddressReserve", format!("{address:#x} is no range")))?;
        Ok(AddressRange::new(start, len_bytes))
    }

    unsafe fn commit(&self, range: &AddressRange, offset: usize, bytes: usize) -> Result<(), SourceError> {
        let start = range.at(offset, bytes)?;
        let _entered = self.enter()?;
        let granules = self.create(bytes / GRANULE_BYTES).map_err(driver_said)?;
        // SAFETY: addresses of the range, not locked by the caller's promise.
        unsafe { self.map(start.as_ptr().addr(), &granules) }.map_err(|refused| {
            self.dissolve(&granules);
            driver_said(refused)
        })?;
        self.remember(start.as_ptr().addr(), &granules);
        Ok(())
    }

    unsafe fn decommit(&self, range: &AddressRange, offset: usize, bytes: usize) -> Result<(), SourceError> {
        let start = range.at(offset, bytes)?.as_ptr().addr();
        let granules = self.granules_at(start, bytes)?;
        let _entered = self.enter()?;
        // SAFETY: the caller's promise: locked, and unused; invariant 1 has the handles.
        if let Err(Stuck::Whole(refused)) = unsafe { self.unmap(start, &granules) } {
            return Err(driver_said(refused));
        }
        // A run in pieces counts as gone: nobody may be given what is no longer mapped.
        self.forget(start, bytes);
        self.dissolve(&granules);
        Ok(())
    }

    unsafe fn remap(&self, range: &AddressRange, from: &[Subrange], to: usize) -> Result<(), RemapError> {
        let run = |&Subrange { offset, bytes }: &Subrange| {
            let start = range.at(offset, bytes)?.as_ptr().addr();
            Ok(Run { start, granules: self.granules_at(start, bytes)? })
        };
        let runs = from.iter().map(run).collect::<Result<Vec<_>, _>>().map_err(RemapError::Kept)?;
        let bytes = from.iter().map(|piece| piece.bytes).sum();
        let to = range.at(to, bytes).map_err(RemapError::Kept)?.as_ptr().addr();
        let _entered = self.enter().map_err(RemapError::Kept)?;
        for (done, run) in runs.iter().enumerate() {
            // SAFETY: the caller's promise: locked, and unused; invariant 1 has the handles.
            if let Err(stuck) = unsafe { self.unmap(run.start, &run.granules) } {
                let (refused, is_whole) = stuck.into_parts();
                // SAFETY: those before were unmapped in earlier rounds.
                let are_back = is_whole && unsafe { self.map_back(&runs[..done]) };
                return Err(self.not_moved(refused, are_back, &runs));
            }
        }
        let granules: Vec<_> = runs.iter().flat_map(|run| &run.granules).copied().collect();
        // The access is set over all of it at once: that call costs more than all others.
        // SAFETY: the caller's promise: nothing is locked at `to`.
        if let Err(refused) = unsafe { self.map(to, &granules) } {
            // SAFETY: all were unmapped above.
            let are_back = unsafe { self.map_back(&runs) };
            return Err(self.not_moved(refused, are_back, &runs));
        }
        runs.iter().for_each(|run| self.forget(run.start, run.bytes()));
        self.remember(to, &granules);
        Ok(())
    }

    unsafe fn unreserve(&self, range: AddressRange) -> Result<(), SourceError> {
        // SAFETY: the caller's promise: of `reserve`, with nothing locked, used by nobody.
        unsafe { self.driver.unreserve(range.start().as_ptr().addr(), range.len_bytes()) }.map_err(driver_said)
    }
}

fn driver_said(refused: Refused) -> SourceError {
    const OUT_OF_MEMORY: c_int = 2;
    let said = SourceError::new(refused.call, refused.to_string()).with_code(refused.code.into());
    match refused {
        Refused { call: "cuMemCreate" | "cuMemMap" | "cuMemSetAccess", code: OUT_OF_MEMORY } => {
            said.with_remedy(device::SHORT_OF_MEMORY)
        }
        _ => said,
    }
}
