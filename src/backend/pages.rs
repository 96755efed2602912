//! Whole pages from the kernel: anonymous private mappings, the ground of `mlock`, `heap` and `sim`.
//!
//! Under Miri, which knows no `mlock` and little of `mmap`, the same calls are served by the global allocator.
#![allow(unsafe_code)] // The kernel's memory calls are here and in the sources, nowhere else.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{PAGE_BYTES, Region, SourceError};

/// Numbers the regions of one source (contract C4).
#[derive(Debug, Default)]
pub(super) struct Numbering(AtomicU64);

impl Numbering {
    pub(super) fn next(&self) -> u64 {
        // Relaxed: only that no number is given twice matters, and a fetch_add alone guarantees it.
        self.0.fetch_add(1, Ordering::Relaxed)
    }
}

/// Should the kernel count the pages against its memory at once?
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Commit {
    Yes,
    /// Address space only (`MAP_NORESERVE`): pages come one by one when touched.
    Lazily,
}

#[cfg(not(miri))]
pub(super) fn map(len_bytes: usize, commit: Commit, id: u64) -> Result<Region, SourceError> {
    let mapped_bytes = mapped_bytes(len_bytes)?;
    let flags = libc::MAP_PRIVATE
        | libc::MAP_ANONYMOUS
        | match commit {
            Commit::Yes => 0,
            Commit::Lazily => libc::MAP_NORESERVE,
        };
    // SAFETY: an anonymous mapping at an address of the kernel's choice touches no memory that exists.
    let start =
        unsafe { libc::mmap(std::ptr::null_mut(), mapped_bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    if start == libc::MAP_FAILED {
        return Err(SourceError::last_os("mmap")
            .with_remedy("the machine or its cgroup is out of memory or of mappings (vm.max_map_count)"));
    }
    let start = NonNull::new(start.cast()).ok_or_else(|| SourceError::new("mmap", "the kernel mapped page zero"))?;
    Ok(Region::new(start, len_bytes, id))
}

#[cfg(miri)]
pub(super) fn map(len_bytes: usize, _commit: Commit, id: u64) -> Result<Region, SourceError> {
    let layout = layout(len_bytes)?;
    // SAFETY: the layout is not of zero size: `mapped_bytes` is at least one page.
    let start = unsafe { std::alloc::alloc_zeroed(layout) };
    let start = NonNull::new(start).ok_or_else(|| SourceError::new("alloc_zeroed", "out of memory"))?;
    Ok(Region::new(start, len_bytes, id))
}

/// Takes the pages of `region` out of the address space.
///
/// # Safety
///
/// `region` came from [`map`], and nothing uses it any more.
#[cfg(not(miri))]
pub(super) unsafe fn unmap(region: Region) -> Result<(), SourceError> {
    let mapped_bytes = mapped_bytes(region.len_bytes())?;
    // SAFETY: the caller gives up the whole mapping that `map` made with this very length.
    match unsafe { libc::munmap(region.start().as_ptr().cast(), mapped_bytes) } {
        0 => Ok(()),
        _ => Err(SourceError::last_os("munmap")),
    }
}

#[cfg(miri)]
pub(super) unsafe fn unmap(region: Region) -> Result<(), SourceError> {
    let layout = layout(region.len_bytes())?;
    // SAFETY: `map` allocated it with this very layout, and the caller gives it up.
    unsafe { std::alloc::dealloc(region.start().as_ptr(), layout) };
    Ok(())
}

pub(super) fn mapped_bytes(len_bytes: usize) -> Result<usize, SourceError> {
    len_bytes
        .max(1)
        .checked_next_multiple_of(PAGE_BYTES)
        .ok_or_else(|| SourceError::new("mmap", format!("{len_bytes} B is more than an address space")))
}

#[cfg(miri)]
fn layout(len_bytes: usize) -> Result<std::alloc::Layout, SourceError> {
    std::alloc::Layout::from_size_align(mapped_bytes(len_bytes)?, PAGE_BYTES)
        .map_err(|error| SourceError::new("layout", error.to_string()))
}
