//! Virtual host memory of the CUDA driver: pinned granules on the device's NUMA node, mapped one by one. The range defines the sizes
//! of its granules ([`AddressRange::granules`]). Each granule is one driver allocation and one mapping of the process.
//!
//! ```text
//!   reserve     [ . . . . . . . . ]          cuMemAddressReserve: addresses only
//!   commit 2    [ . . G G . . . . ]          cuMemCreate, cuMemMap each; cuMemSetAccess over the run
//!   remap       [ . . g g . G G . ]          the same handles at other addresses too: nothing is pinned again
//!               [ . . . . . G G . ]          cuMemUnmap of the old place, later
//!   decommit    [ . . . . . . . . ]          cuMemUnmap of the run, cuMemRelease each
//! ```
//!
//! On an H200 an enqueue by another thread takes at most 0.3 ms during a commit, and 0.06 ms during a decommit; neither waits
//! for the device. But a commit pins only 4 to 5 GB/s. Therefore a reserve, which is acquired once and kept, is registered
//! memory ([`RegisterSource`]), which is pinned at 17 to 27 GB/s. A reserve consists of granules only if the driver registers
//! nothing. Unregistering the reserve when the pool ends waits for the device and blocks every enqueue.
//!
//! Access is set for the CPU and every GPU (`table`). Creating a source tests a granule at each [`location`] in order until one
//! works. Neither creating a source nor reserving addresses creates a context.
//!
//! Invariants:
//!
//! 1. **vmm-I1**: `granules` has the handle of every committed granule under the address of the granule, and no other handles. No
//!    driver call is made under the lock of the table; a call owns its granules alone (the contract of [`VirtualMemory`]).
//! 2. **vmm-I2**: a run of granules is unmapped by one call, which unmaps all of it or, if refused, none.
#![allow(unsafe_code)] // Calls the driver.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use super::mapping;
use super::register::RegisterSource;
use super::source::{BuiltInSource, PinnedBy, Region, RegionIds, Source};
use super::trial;
use super::virtual_memory::{AddressRange, RANGE_ALIGN_BYTES, RemapError, Subrange, VirtualMemory};
use crate::arena::GranuleSizes;
use crate::driver::code::{Code, FailedCall};
use crate::driver::device::Device;
use crate::driver::vmm::{self as driver, MemoryLocation};
use crate::driver::{CurrentContext, RelaxedCapture, with_one_retry};
use crate::error::SourceError;
use crate::report::Finding;
use pinpool_os::format::Size;
use pinpool_os::host::GRANULE_BYTES;
use pinpool_os::sync::Mutex;
use pinpool_os::sync::unmodeled::{AtomicBool, Ordering};

mod find;
mod location;
mod old_places;
mod table;

use old_places::OldPlaces;
pub(crate) use table::ensure_access;
use table::{Granule, GranuleRun, GranuleTable, bytes_of, placed};

/// Pinned virtual memory of the driver, readable by every device.
#[derive(Debug)]
pub struct VmmSource {
    device: Arc<Device>,
    location: MemoryLocation,
    /// Whether a call may create the device's context. False only during the trial.
    makes_context: bool,
    ids: RegionIds,
    granules: Arc<GranuleTable>,
    /// Unmapped granules that the driver refused to release. [`VmmSource::create`] uses them first.
    unreleased: Mutex<Vec<Granule>>,
    old_places: OldPlaces,
    reserves: Arc<RegisterSource>,
    /// Whether the driver cannot register memory here, as under confidential computing. A reserve then consists of granules.
    cannot_register: AtomicBool,
    /// Why the trial made no copy, if the device had no memory for it.
    untested: Option<SourceError>,
}

/// A remap that finds more granules than this at old places unmaps them first, because each of them is a mapping of the process.
const OLD_GRANULES_MAX: usize = 256;

/// All addresses.
const EVERYWHERE: Range<u64> = 0..u64::MAX;

fn address(start: NonNull<u8>) -> u64 {
    start.as_ptr().addr() as u64
}

impl VmmSource {
    /// Sets the state that driver calls need, until the result is dropped.
    fn enter(&self) -> Result<(CurrentContext, RelaxedCapture), SourceError> {
        if self.makes_context { self.device.enter() } else { self.device.enter_if_active() }
    }

    /// Creates granules of these lengths, all of them or none.
    fn create(&self, lengths: impl Iterator<Item = usize>) -> Result<Vec<Granule>, FailedCall> {
        let mut created = Vec::new();
        for bytes in lengths {
            let unreleased = {
                let mut unreleased = self.unreleased.lock();
                let alike = unreleased.iter().rposition(|granule| granule.bytes == bytes);
                alike.map(|index| unreleased.swap_remove(index))
            };
            let new = || driver::create(bytes, self.location).map(|handle| Granule { handle, bytes });
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

    /// Releases unmapped granules. If the driver refuses some of them, keeps these for a later release and returns a refusal.
    fn release_granules(&self, granules: &[Granule]) -> Result<(), FailedCall> {
        let mut released = Ok(());
        for &granule in granules {
            // SAFETY: it came from `create`, and only the owner of its run releases it, here.
            if let Err(refusal) = unsafe { driver::release(granule.handle) } {
                // The driver still holds the memory, unless it has shut down. Reuse keeps such memory from accumulating.
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
        let _entered = self.enter()?;
        let refused = std::mem::take(&mut *self.unreleased.lock());
        self.release_granules(&refused).map_err(|FailedCall { call, code }| {
            let bytes: usize = self.unreleased.lock().iter().map(|granule| granule.bytes).sum();
            let what = format!("{code}; {} stays pinned", Size(bytes as u64));
            SourceError::new(call, what).with_code(code.number())
        })
    }

    /// Returns the run of committed granules that make up the `bytes` at `offset`.
    fn run_at(&self, range: &AddressRange, offset: usize, bytes: usize) -> Result<GranuleRun, SourceError> {
        let run = self.granules.run_at(address(range.at(offset, bytes)?), bytes);
        run.ok_or_else(|| SourceError::new("vmm", "the range is not one of committed granules"))
    }

    /// Maps `granules` from `start` on, readable and writable. After an error none of these mappings is in use, and mappings that the
    /// driver refused to undo are unmapped later.
    ///
    /// # Safety
    ///
    /// The caller must have reserved the addresses, and no granule may be committed there.
    unsafe fn map(&self, start: NonNull<u8>, granules: &[Granule]) -> Result<(), SourceError> {
        let (at, bytes) = (address(start), bytes_of(granules));
        self.old_places.unmap(&(at..at + bytes as u64))?;
        let undo = |count: usize| self.unmap_or_keep(at, &granules[..count]);
        for (index, (address, granule)) in placed(at, granules).enumerate() {
            // SAFETY: the caller's promise, and nothing is mapped there any more; the granule has this length.
            let mapped = unsafe { driver::map(address, granule.bytes, 0, granule.handle, 0) };
            mapped.inspect_err(|_| undo(index))?;
        }
        // SAFETY: mapped above.
        let reached = unsafe { self.granules.set_access(at, granules) }.map_err(SourceError::from);
        // A forked child would share the pages, and could write to them during a copy.
        let keep = |()| mapping::advise(start, bytes, mapping::linux::MADV_DONTFORK);
        reached.and_then(keep).inspect_err(|_| undo(granules.len()))
    }

    /// Unmaps `granules`, which are mapped from `start` on and which nothing uses. Mappings that the driver refuses to unmap are
    /// unmapped later.
    fn unmap_or_keep(&self, start: u64, granules: &[Granule]) {
        let end = start + bytes_of(granules) as u64;
        self.old_places.add(start, granules);
        let _unmapped_later = self.old_places.unmap(&(start..end));
    }
}

// SAFETY: source-C1 to C3 follow from vm-S1 to S3 of a dedicated range; a reserve is a region of `RegisterSource`.
// source-C4: `RegionIds`, for both kinds. source-C5: whole granules; whole pages for a reserve.
unsafe impl Source for VmmSource {
    fn name(&self) -> &'static str {
        "vmm"
    }

    fn pinned_by(&self) -> Option<PinnedBy> {
        Some(PinnedBy::Driver)
    }

    fn held_bytes(&self, len_bytes: usize) -> usize {
        len_bytes.max(1).checked_next_multiple_of(GRANULE_BYTES).unwrap_or(usize::MAX)
    }

    fn acquire(&self, len_bytes: usize) -> Result<Region, SourceError> {
        let held_bytes = self.held_bytes(len_bytes);
        let sizes = GranuleSizes::for_pool(GRANULE_BYTES as u64, Some(held_bytes as u64));
        let range = self.reserve_addresses(held_bytes)?.with_granules(sizes);
        let start = range.start();
        // SAFETY: reserved above, and nothing of it is committed.
        match unsafe { self.commit(&range, 0, held_bytes) } {
            Ok(()) => Ok(Region::new(start, len_bytes, self.ids.next())),
            Err(error) => {
                // SAFETY: reserved above, and nothing of it is committed. If this call fails too, addresses are leaked, but no memory.
                let _ = unsafe { self.release_addresses(range) };
                Err(error)
            }
        }
    }

    unsafe fn release(&self, region: &Region) -> Result<(), SourceError> {
        let start = address(region.start());
        if !self.granules.has_granules(start..=start) {
            // SAFETY: the caller's promise; without granules it came from `acquire_bulk`, with this length.
            return unsafe { self.reserves.release(region) };
        }
        let held_bytes = self.held_bytes(region.len_bytes());
        let range = AddressRange::new(region.start(), held_bytes);
        // SAFETY: the caller's promise: committed by `acquire`, and unused.
        unsafe { self.decommit(&range, 0, held_bytes) }?;
        // A failure is ignored, because the memory is released and only addresses leak.
        // SAFETY: reserved by `acquire`, and decommitted above.
        let _ = unsafe { self.release_addresses(range) };
        Ok(())
    }

    fn numa_node(&self) -> Option<u32> {
        self.reserves.numa_node()
    }

    fn built_in(&self) -> Option<&dyn BuiltInSource> {
        Some(self)
    }
}

impl BuiltInSource for VmmSource {
    /// Returns the bytes of the whole pages that a reserve takes, since a reserve is registered memory.
    fn held_bytes_in_bulk(&self, len_bytes: usize) -> usize {
        self.reserves.held_bytes_in_bulk(len_bytes)
    }

    fn acquire_bulk(&self, len_bytes: usize, threads: usize, progress: &dyn Fn(usize)) -> Result<Region, SourceError> {
        // A new granule would reuse memory that the driver refused to release, but a reserve is pinned in addition to such memory.
        self.release_refused()?;
        // Relaxed: a hint that avoids touching memory that the driver would refuse.
        if !self.cannot_register.load(Ordering::Relaxed) {
            let acquired = self.reserves.acquire_bulk(len_bytes, threads, progress);
            if !matches!(&acquired, Err(error) if error.code() == Some(Code::NOT_SUPPORTED.number())) {
                return acquired.map(|region| Region::new(region.start(), len_bytes, self.ids.next()));
            }
            self.cannot_register.store(true, Ordering::Relaxed);
        }
        // The caller has claimed only whole pages for the reserve, and granules must not take more.
        if self.held_bytes(len_bytes) != self.held_bytes_in_bulk(len_bytes) {
            let what = format!("the driver registers no memory here, and {len_bytes} bytes are not whole granules");
            let remedy = "raise PINPOOL_MAX_BYTES until the reserve fits in whole granules of 2 MiB";
            return Err(SourceError::new("vmm", what).with_remedy(remedy));
        }
        self.acquire(len_bytes).inspect(|_| progress(len_bytes))
    }

    fn reserve_slice_bytes(&self) -> Option<u64> {
        // Relaxed: a hint.
        (!self.cannot_register.load(Ordering::Relaxed)).then(|| self.reserves.reserve_slice_bytes()).flatten()
    }

    fn device_lost(&self) -> Option<SourceError> {
        self.device.loss()
    }

    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        Some(self)
    }

    fn findings(&self) -> Vec<Finding> {
        let finding = |(device, failed): (u32, FailedCall)| {
            Finding::warning("gpu", format!("GPU {device} cannot copy from this memory: {failed}"))
                .remedy("create a separate pool for that GPU (PINPOOL_DEVICE), or use PINPOOL_BACKEND=register")
        };
        let untested = self.untested.iter().map(|error| trial::untested("vmm", error));
        untested.chain(self.granules.refused.lock().iter().copied().map(finding)).collect()
    }
}

// SAFETY: vm-S1: the driver's own reservation. vm-S2: mapped with access for host and devices, and unmapped only by `decommit`
// and `remap`. vm-S3: fresh kernel pages, or pages that this process used before; a remapped granule keeps its bytes.
// vm-S4: a copy may cross the driver's mappings of adjacent addresses, and each granule is mapped alone. vm-S5: only `commit`
// creates granules. A granule that the driver refuses to release waits in `unreleased` for a later commit or release.
unsafe impl VirtualMemory for VmmSource {
    fn granule_bytes(&self) -> usize {
        GRANULE_BYTES
    }

    fn reserve_addresses(&self, len_bytes: usize) -> Result<AddressRange, SourceError> {
        // According to the driver API reference, this needs no context.
        let _relaxed = RelaxedCapture::enter();
        let reserved = driver::reserve(len_bytes, RANGE_ALIGN_BYTES, 0, 0)?;
        // The driver runs on 64-bit machines only.
        let aligned = usize::try_from(reserved).ok().filter(|address| address.is_multiple_of(RANGE_ALIGN_BYTES));
        let start = aligned.and_then(|address| NonNull::new(std::ptr::with_exposed_provenance_mut::<u8>(address)));
        let start =
            start.ok_or_else(|| SourceError::new("cuMemAddressReserve", format!("{reserved:#x} is not a range")))?;
        Ok(AddressRange::new(start, len_bytes))
    }

    unsafe fn commit(&self, range: &AddressRange, offset: usize, bytes: usize) -> Result<(), SourceError> {
        let start = range.at(offset, bytes)?;
        let _entered = self.enter()?;
        let granules = self.create(range.granules(offset, bytes))?;
        // SAFETY: addresses of the range, which the caller promises are not committed.
        unsafe { self.map(start, &granules) }.inspect_err(|_| {
            let _released_later = self.release_granules(&granules);
        })?;
        self.granules.remember(address(start), &granules);
        Ok(())
    }

    unsafe fn decommit(&self, range: &AddressRange, offset: usize, bytes: usize) -> Result<(), SourceError> {
        let run = self.run_at(range, offset, bytes)?;
        let _entered = self.enter()?;
        // A granule that is still mapped at an old place would stay pinned (vm-S5).
        self.old_places.unmap(&EVERYWHERE)?;
        // SAFETY: the caller's promise: committed and unused; whole granules (vmm-I1).
        unsafe { driver::unmap(run.start, bytes) }?;
        self.granules.forget(&run);
        let _released_later = self.release_granules(&run.granules);
        Ok(())
    }

    unsafe fn remap(&self, range: &AddressRange, from: &[Subrange], to: usize) -> Result<(), RemapError> {
        let runs = from.iter().map(|piece| self.run_at(range, piece.offset, piece.bytes));
        let runs = runs.collect::<Result<Vec<_>, _>>().map_err(RemapError::Kept)?;
        let granules: Vec<_> = runs.iter().flat_map(|run| &run.granules).copied().collect();
        let to = range.at(to, bytes_of(&granules)).map_err(RemapError::Kept)?;
        let _entered = self.enter().map_err(RemapError::Kept)?;
        if self.old_places.granules() > OLD_GRANULES_MAX {
            self.unmap_old_places().map_err(RemapError::Kept)?;
        }
        // One `map` for all runs, because setting the access costs more than all other calls.
        // SAFETY: the caller's promise: nothing is committed at `to`.
        unsafe { self.map(to, &granules) }.map_err(RemapError::Kept)?;
        for run in &runs {
            self.granules.forget(run);
            self.old_places.add(run.start, &run.granules);
        }
        self.granules.remember(address(to), &granules);
        Ok(())
    }

    fn has_old_places(&self) -> bool {
        self.old_places.granules() > 0
    }

    fn unmap_old_places(&self) -> Result<(), SourceError> {
        if !self.has_old_places() {
            return Ok(());
        }
        let _entered = self.enter()?;
        Ok(self.old_places.unmap(&EVERYWHERE)?)
    }

    unsafe fn release_addresses(&self, range: AddressRange) -> Result<(), SourceError> {
        let unmapped = self.unmap_old_places();
        let (start, bytes) = (address(range.start()), range.len_bytes());
        let unreserved = if unmapped.is_err() || self.granules.has_granules(start..=start + bytes as u64 - 1) {
            Err(SourceError::new("cuMemUnmap", "granules are still mapped at these addresses"))
        } else {
            // SAFETY: the caller's promise: the range came from `reserve_addresses` and is unused. Nothing is mapped there any more.
            with_one_retry(|| unsafe { driver::unreserve(start, bytes) }).map_err(SourceError::from)
        };
        unmapped.and(unreserved).and(self.release_refused())
    }
}

impl Drop for VmmSource {
    fn drop(&mut self) {
        // `release_addresses` has returned the error of an earlier attempt.
        let _leaked = self.release_refused();
    }
}
