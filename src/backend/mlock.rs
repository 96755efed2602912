//! Memory that the kernel keeps resident: an anonymous mapping with `mlock`.
//!
//! No driver knows of the lock, so a CUDA copy from this memory is staged like any pageable copy. It serves programs that
//! need resident memory, and replaces pinned memory where there is no GPU: 0.25 ms a MiB, the cost of faulting pages in.
#![allow(unsafe_code)] // Implements the unsafe `Source` and `VirtualMemory`; calls `mlock`.

use std::path::Path;
use std::ptr::NonNull;

use super::huge_pages::{HugeTlb, increasing};
use super::mapping::{self, Accounting, InitialAccess};
use super::populate::{NodePlacement, populate};
use super::source::{Region, RegionIds, Source};
use super::virtual_memory::{AddressRange, VirtualMemory};
use crate::error::SourceError;
use pinpool_os::host::limits;

/// Anonymous mappings locked into memory by the kernel.
#[derive(Debug, Default)]
pub struct MlockSource {
    ids: RegionIds,
    placement: Option<NodePlacement>,
    hugetlb: HugeTlb,
}

impl MlockSource {
    /// A source of page-locked memory.
    pub fn new() -> Self {
        Self::default()
    }

    /// As [`MlockSource::new`], on memory node `node` where the machine has several.
    pub fn on_node(node: u32) -> Self {
        Self::on_node_below(Path::new("/"), node)
    }

    /// The same of the machine below `root`.
    pub(super) fn on_node_below(root: &Path, node: u32) -> Self {
        Self { placement: NodePlacement::on(root, node), ..Self::default() }
    }

    /// The same with such huge pages in what is acquired fast, as a reserve is.
    pub(super) fn with_hugetlb(self, hugetlb: HugeTlb) -> Self {
        Self { hugetlb, ..self }
    }

    /// The bytes that the process may lock, found by trying to lock one page more than `RLIMIT_MEMLOCK` allows; `None` if no
    /// limit binds it.
    ///
    /// Reading the limit is not enough: a process with `CAP_IPC_LOCK` is not bound by it, and inside a user namespace the
    /// capability is listed but has no effect. `MLOCK_ONFAULT` makes the trial cheap: no page is faulted in.
    pub fn lock_limit(&self) -> Option<u64> {
        let limit_bytes = rlimit_memlock()?;
        let over_the_limit = usize::try_from(limit_bytes).ok().and_then(|bytes| bytes.checked_add(1));
        let Some(trial) = over_the_limit.and_then(|bytes| mapping::map(bytes, Accounting::OnTouch, 0).ok()) else {
            return Some(limit_bytes);
        };
        let locked = lock_on_fault(&trial).is_ok();
        // SAFETY: the trial mapping was made above, and no reference into it was ever made.
        let _ = unsafe { mapping::unmap(trial) };
        (!locked).then_some(limit_bytes)
    }
}

// SAFETY: source-C1 to C3 hold for every private anonymous mapping (`mapping`); locking changes neither address nor content.
// source-C4: `RegionIds`.
unsafe impl Source for MlockSource {
    fn name(&self) -> &'static str {
        "mlock"
    }

    fn is_pinned(&self) -> bool {
        true
    }

    fn acquire(&self, len_bytes: usize) -> Result<Region, SourceError> {
        let region = mapping::map(len_bytes, Accounting::Charged, self.ids.next())?;
        if let Some(placement) = &self.placement {
            placement.place(region.start(), mapping::mapped_bytes(len_bytes)?);
        }
        let locked = lock(region.start(), len_bytes);
        // SAFETY: mapped above, no reference into it was made.
        unsafe { mapping::keep_if(locked, region) }
    }

    unsafe fn release(&self, region: Region) -> Result<(), SourceError> {
        // Unmapping unlocks.
        // SAFETY: the caller's promise: the region came from this source, hence from `map`, and is unused.
        unsafe { mapping::unmap(region) }
    }

    fn acquire_fast(&self, len_bytes: usize, threads: usize, progress: &dyn Fn(usize)) -> Result<Region, SourceError> {
        let (id, progress) = (self.ids.next(), &increasing(progress));
        // Pages that are set aside are never paged out, and need no lock.
        if let Some(region) = self.hugetlb.region(len_bytes, id, (threads, self.placement.as_ref()), progress) {
            return Ok(region);
        }
        let region = mapping::map_huge(len_bytes, id)?;
        // The first lock fails at the limit before a page is touched; the second covers pages that are present.
        let locked = lock_on_fault(&region)
            .and_then(|()| {
                // SAFETY: mapped above.
                unsafe { populate(&region, threads, self.placement.as_ref(), progress) }
            })
            .and_then(|()| lock(region.start(), len_bytes));
        // SAFETY: mapped above, no reference into it was made.
        unsafe { mapping::keep_if(locked, region) }
    }

    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        mapping::HAS_RANGES.then_some(self)
    }

    fn numa_node(&self) -> Option<u32> {
        self.placement.as_ref().map(NodePlacement::node)
    }
}

// SAFETY: as for `HeapSource`, whose calls these are; locking changes neither address nor content.
unsafe impl VirtualMemory for MlockSource {
    fn reserve(&self, len_bytes: usize) -> Result<AddressRange, SourceError> {
        let range = mapping::reserve(len_bytes, InitialAccess::None)?;
        if let Some(placement) = &self.placement {
            placement.place(range.start(), range.len_bytes());
        }
        Ok(range)
    }

    unsafe fn commit(&self, range: &AddressRange, offset: usize, bytes: usize) -> Result<(), SourceError> {
        let start = range.at(offset, bytes)?;
        // SAFETY: the caller's promise: not committed.
        unsafe { mapping::commit(start, bytes) }?;
        lock(start, bytes).inspect_err(|_| {
            // A lock that fails for lack of memory has locked a part of the pages.
            let _ = unlock(start, bytes);
            // SAFETY: committed above, and not returned to the caller.
            let _ = unsafe { mapping::decommit(start, bytes) };
        })
    }

    unsafe fn decommit(&self, range: &AddressRange, offset: usize, bytes: usize) -> Result<(), SourceError> {
        let start = range.at(offset, bytes)?;
        let decommitted = unlock(start, bytes).and_then(|()| {
            // SAFETY: the caller's promise: committed and unused.
            unsafe { mapping::decommit(start, bytes) }
        });
        decommitted.inspect_err(|_| {
            // The pages are still committed (vm-S2), so lock them again, if the kernel allows it.
            let _ = lock(start, bytes);
        })
    }

    unsafe fn unreserve(&self, range: AddressRange) -> Result<(), SourceError> {
        // Unmapping unlocks.
        // SAFETY: the caller's promise: it came from `reserve` and is unused.
        unsafe { mapping::unreserve(range) }
    }
}

/// Faults the pages in and locks them. Miri has no `mlock`.
pub(super) fn lock(start: NonNull<u8>, len_bytes: usize) -> Result<(), SourceError> {
    if cfg!(miri) {
        return Ok(());
    }
    // SAFETY: `mlock` reads nothing through the pointer; on pages not mapped it fails with ENOMEM.
    mapping::check("mlock", unsafe { libc::mlock(start.as_ptr().cast(), len_bytes) })
        .map_err(|error| lock_error("mlock", &error, len_bytes))
}

/// Locks each page of `region` once it is faulted in.
#[cfg(target_os = "linux")]
fn lock_on_fault(region: &Region) -> Result<(), SourceError> {
    if cfg!(miri) {
        return Ok(());
    }
    let (start, len_bytes) = (region.start().as_ptr(), region.len_bytes());
    // SAFETY: like `mlock`, `mlock2` reads nothing through the pointer.
    mapping::check("mlock2", unsafe { libc::mlock2(start.cast(), len_bytes, libc::MLOCK_ONFAULT) })
        .map_err(|error| lock_error("mlock2", &error, len_bytes))
}

#[cfg(not(target_os = "linux"))]
fn lock_on_fault(_region: &Region) -> Result<(), SourceError> {
    Err(SourceError::new("mlock2", "needs Linux"))
}

/// The error of a lock of `len_bytes`, with the limit that refused it and the remedy.
fn lock_error(call: &'static str, error: &SourceError, len_bytes: usize) -> SourceError {
    let Some(limit_bytes) = rlimit_memlock() else { return mapping::with_memory_remedy(error.clone(), len_bytes) };
    let locked_bytes = limits::locked_bytes(Path::new("/"));
    let leaves_less = |locked: u64| limit_bytes.saturating_sub(locked) < len_bytes as u64;
    if !locked_bytes.is_none_or(leaves_less) {
        return mapping::with_memory_remedy(error.clone(), len_bytes);
    }
    let so_far = locked_bytes.map_or_else(String::new, |bytes| format!(" ({bytes} B so far)"));
    let what = format!(
        "{len_bytes} B refused, RLIMIT_MEMLOCK is {limit_bytes} B for all locked memory of this process{so_far}"
    );
    SourceError::new(call, what).with_code(error.code().unwrap_or_default()).with_remedy(limits::LOCKED)
}

pub(super) fn unlock(start: NonNull<u8>, len_bytes: usize) -> Result<(), SourceError> {
    // SAFETY: allows the kernel to page out, which changes nothing that a program can observe.
    mapping::check("munlock", unsafe { libc::munlock(start.as_ptr().cast(), len_bytes) })
        .map_err(|error| error.with_remedy(limits::MAPPINGS))
}

/// `RLIMIT_MEMLOCK` in bytes; `None` if there is no limit.
fn rlimit_memlock() -> Option<u64> {
    if cfg!(miri) {
        return None;
    }
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a live `rlimit` for the length of the call.
    let status = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) };
    (status == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}
