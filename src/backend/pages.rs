//! Whole pages from the kernel: anonymous private mappings, the ground of `mlock`, `heap` and `sim`.
//!
//! Under Miri, which knows no `mlock` and little of `mmap`, the same calls are served by the global allocator.
#![allow(unsafe_code)] // The kernel's memory calls are here and in the sources, nowhere else.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{PAGE_BYTES, RANGE_ALIGN_BYTES, Region, SourceError};

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
pub(crate) enum Commit {
    Yes,
    /// Address space only (`MAP_NORESERVE`): pages come one by one when touched.
    Lazily,
}

#[cfg(not(miri))]
pub(crate) fn map(len_bytes: usize, commit: Commit, id: u64) -> Result<Region, SourceError> {
    Ok(Region::new(mmap(mapped_bytes(len_bytes)?, READ_WRITE, commit)?, len_bytes, id))
}

#[cfg(miri)]
pub(crate) fn map(len_bytes: usize, _commit: Commit, id: u64) -> Result<Region, SourceError> {
    let layout = layout(len_bytes)?;
    // SAFETY: the layout is not of zero size: `mapped_bytes` is at least one page.
    let start = unsafe { std::alloc::alloc_zeroed(layout) };
    let start = NonNull::new(start).ok_or_else(|| SourceError::new("alloc_zeroed", "out of memory"))?;
    Ok(Region::new(start, len_bytes, id))
}

/// As [`map`], at a multiple of [`RANGE_ALIGN_BYTES`] and in huge pages where the kernel has them to give.
#[cfg(not(miri))]
pub(crate) fn map_huge(len_bytes: usize, id: u64) -> Result<Region, SourceError> {
    let mapped_bytes = mapped_bytes(len_bytes)?;
    let start = mmap_aligned(mapped_bytes, READ_WRITE, Commit::Yes)?;
    advise_huge(start, mapped_bytes);
    Ok(Region::new(start, len_bytes, id))
}

#[cfg(miri)]
pub(crate) fn map_huge(len_bytes: usize, id: u64) -> Result<Region, SourceError> {
    map(len_bytes, Commit::Yes, id)
}

/// Takes the pages of `region` out of the address space.
///
/// # Safety
///
/// `region` came from [`map`] or [`map_huge`], and nothing uses it any more.
#[cfg(not(miri))]
pub(crate) unsafe fn unmap(region: Region) -> Result<(), SourceError> {
    // SAFETY: the caller gives up the whole mapping that `map` made with this very length.
    unsafe { munmap(region.start(), mapped_bytes(region.len_bytes())?) }
}

#[cfg(miri)]
pub(crate) unsafe fn unmap(region: Region) -> Result<(), SourceError> {
    let layout = layout(region.len_bytes())?;
    // SAFETY: `map` allocated it with this very layout, and the caller gives it up.
    unsafe { std::alloc::dealloc(region.start().as_ptr(), layout) };
    Ok(())
}

/// `region`, if it could be made `ready`; else the reason, and its pages are gone.
///
/// # Safety
///
/// As [`unmap`].
pub(super) unsafe fn keep_if(ready: Result<(), SourceError>, region: Region) -> Result<Region, SourceError> {
    match ready {
        Ok(()) => Ok(region),
        Err(refusal) => {
            // If this fails too, the first refusal is the news.
            // SAFETY: the caller's promise.
            let _ = unsafe { unmap(region) };
            Err(refusal)
        }
    }
}

pub(super) const READ_WRITE: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;

fn mmap(mapped_bytes: usize, protection: libc::c_int, commit: Commit) -> Result<NonNull<u8>, SourceError> {
    let flags = libc::MAP_PRIVATE
        | libc::MAP_ANONYMOUS
        | match commit {
            Commit::Yes => 0,
            Commit::Lazily => libc::MAP_NORESERVE,
        };
    // SAFETY: an anonymous mapping at an address of the kernel's choice touches no memory that exists.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), mapped_bytes, protection, flags, -1, 0) };
    if start == libc::MAP_FAILED {
        return Err(SourceError::last_os("mmap")
            .with_remedy("the machine or its cgroup is out of memory or of mappings (vm.max_map_count)"));
    }
    NonNull::new(start.cast()).ok_or_else(|| SourceError::new("mmap", "the kernel mapped page zero"))
}

/// Maps `mapped_bytes` (whole pages) at a multiple of [`RANGE_ALIGN_BYTES`]: maps more and trims both ends.
pub(super) fn mmap_aligned(
    mapped_bytes: usize,
    protection: libc::c_int,
    commit: Commit,
) -> Result<NonNull<u8>, SourceError> {
    let spare_bytes = RANGE_ALIGN_BYTES - PAGE_BYTES;
    let widened_bytes = mapped_bytes.checked_add(spare_bytes).ok_or_else(|| too_much(mapped_bytes))?;
    let widened = mmap(widened_bytes, protection, commit)?;
    let head_bytes = widened.addr().get().wrapping_neg() % RANGE_ALIGN_BYTES;
    // SAFETY: the mapping has room for the range behind any head, which is at most `spare_bytes`.
    let start = unsafe { widened.add(head_bytes) };
    // SAFETY: ends where the mapping ends at the latest, as above.
    let end = unsafe { start.add(mapped_bytes) };
    for (spare, bytes) in [(widened, head_bytes), (end, spare_bytes - head_bytes)] {
        if bytes > 0 {
            // Fails only for want of mappings; the spare addresses then stay taken, with no memory behind them.
            // SAFETY: mapped above, outside what is handed out.
            let _ = unsafe { munmap(spare, bytes) };
        }
    }
    Ok(start)
}

/// Asks for huge pages; a kernel without them, or told not to, uses small ones.
pub(super) fn advise_huge(start: NonNull<u8>, mapped_bytes: usize) {
    // SAFETY: changes which pages back a mapping of ours, not what it holds.
    let _ = unsafe { libc::madvise(start.as_ptr().cast(), mapped_bytes, libc::MADV_HUGEPAGE) };
}

/// A child of `fork` does not get these pages. It would get them all copied at once, as the kernel does with pages that a
/// device has pinned, and could make no use of the page-lock.
#[cfg(all(feature = "cuda", not(miri)))]
pub(super) fn keep_from_children(region: &Region) -> Result<(), SourceError> {
    let bytes = mapped_bytes(region.len_bytes())?;
    // SAFETY: changes what a child gets of a mapping of ours, not what it holds.
    match unsafe { libc::madvise(region.start().as_ptr().cast(), bytes, libc::MADV_DONTFORK) } {
        0 => Ok(()),
        _ => Err(SourceError::last_os("madvise")),
    }
}

#[cfg(all(feature = "cuda", miri))]
pub(super) fn keep_from_children(_region: &Region) -> Result<(), SourceError> {
    Ok(())
}

/// # Safety
///
/// The pages were mapped here, and nothing uses them any more.
pub(super) unsafe fn munmap(start: NonNull<u8>, mapped_bytes: usize) -> Result<(), SourceError> {
    // SAFETY: the caller gives up these pages.
    match unsafe { libc::munmap(start.as_ptr().cast(), mapped_bytes) } {
        0 => Ok(()),
        _ => Err(SourceError::last_os("munmap")),
    }
}

pub(crate) fn mapped_bytes(len_bytes: usize) -> Result<usize, SourceError> {
    len_bytes.max(1).checked_next_multiple_of(PAGE_BYTES).ok_or_else(|| too_much(len_bytes))
}

fn too_much(len_bytes: usize) -> SourceError {
    SourceError::new("mmap", format!("{len_bytes} B is more than an address space"))
}

#[cfg(miri)]
fn layout(len_bytes: usize) -> Result<std::alloc::Layout, SourceError> {
    std::alloc::Layout::from_size_align(mapped_bytes(len_bytes)?, PAGE_BYTES)
        .map_err(|error| SourceError::new("layout", error.to_string()))
}
