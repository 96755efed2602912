//! Anonymous private mappings of the kernel, from which the sources `heap`, `mlock` and `register` take their memory.
//!
//! | | whole mappings | ranges of addresses |
//! | --- | --- | --- |
//! | created by | [`map`], [`map_huge`] | [`reserve`] |
//! | memory comes | when touched | after [`commit`], when touched |
//! | memory goes | with [`unmap`] | with [`decommit`] |
//! | addresses go | with [`unmap`] | with [`unreserve`] |
//!
//! Uncommitted pages are mapped without any access (`PROT_NONE`), so that no other mapping gets their addresses and a stray
//! access faults. This module has no state.
//!
//! On systems other than Linux `madvise` empties no page, so sources have no virtual memory there ([`HAS_RANGES`]).
//! Miri has neither `mprotect` nor `madvise` and only part of `mmap`, so sources have no virtual memory there either.
#![allow(unsafe_code)] // The kernel's memory calls are here and in the sources, nowhere else.

use std::path::Path;
use std::ptr::NonNull;

use super::source::Region;
use super::virtual_memory::{AddressRange, RANGE_ALIGN_BYTES};
use crate::error::SourceError;
use pinpool_os::host::{PAGE_BYTES, limits};

pub(super) const READ_WRITE: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;

/// Whether pages of a range can be committed and decommitted.
pub(super) const HAS_RANGES: bool = cfg!(all(target_os = "linux", not(miri)));

/// Flags and advice that exist only on Linux.
#[cfg(target_os = "linux")]
pub(super) mod linux {
    pub(in crate::backend) use libc::{
        MADV_DOFORK, MADV_DONTFORK, MADV_HUGEPAGE, MADV_POPULATE_WRITE, MAP_HUGE_SHIFT, MAP_HUGETLB,
    };
}
/// No system defines the advice -1: `madvise` fails with `EINVAL`. The flags are not used ([`HAS_RANGES`]).
#[cfg(not(target_os = "linux"))]
pub(super) mod linux {
    pub(in crate::backend) const MADV_DOFORK: libc::c_int = -1;
    pub(in crate::backend) const MADV_DONTFORK: libc::c_int = -1;
    pub(in crate::backend) const MADV_HUGEPAGE: libc::c_int = -1;
    pub(in crate::backend) const MADV_POPULATE_WRITE: libc::c_int = -1;
    pub(in crate::backend) const MAP_HUGETLB: libc::c_int = 0;
    pub(in crate::backend) const MAP_HUGE_SHIFT: libc::c_int = 0;
}

/// Flags with which the kernel charges the whole mapping when it is created.
pub(super) const CHARGED: libc::c_int = 0;
/// Flags with which the kernel charges pages one by one, when they are touched.
pub(super) const CHARGED_ON_TOUCH: libc::c_int = libc::MAP_NORESERVE;

/// Maps memory that is charged according to `accounting`: [`CHARGED`] or [`CHARGED_ON_TOUCH`].
pub(super) fn map(len_bytes: usize, accounting: libc::c_int, id: u64) -> Result<Region, SourceError> {
    let mapped_bytes = mapped_bytes(len_bytes)?;
    let start = mmap(mapped_bytes, READ_WRITE, accounting).map_err(|error| with_memory_remedy(error, mapped_bytes))?;
    Ok(Region::new(start, len_bytes, id))
}

/// Maps memory as [`map`] does, at a multiple of [`RANGE_ALIGN_BYTES`] and in huge pages if the kernel has some.
pub(super) fn map_huge(len_bytes: usize, id: u64) -> Result<Region, SourceError> {
    if !HAS_RANGES {
        return map(len_bytes, CHARGED, id);
    }
    Ok(Region::new(mmap_huge(mapped_bytes(len_bytes)?, READ_WRITE, CHARGED)?, len_bytes, id))
}

/// Maps memory as [`map`] does, in huge pages of `page_bytes` (a power of two) that are set aside for it. Fails if there are
/// not enough of them. `len_bytes` is a multiple of `page_bytes`.
pub(super) fn map_hugetlb(len_bytes: usize, page_bytes: u64, id: u64) -> Result<Region, SourceError> {
    let log2 = libc::c_int::try_from(page_bytes.trailing_zeros()).unwrap_or(0);
    let flags = linux::MAP_HUGETLB | (log2 << linux::MAP_HUGE_SHIFT);
    Ok(Region::new(mmap(len_bytes, READ_WRITE, flags)?, len_bytes, id))
}

/// Removes the pages of `region` from the address space.
///
/// # Safety
///
/// `region` must come from [`map`], [`map_huge`] or [`map_hugetlb`], and nothing may use it any more.
pub(super) unsafe fn unmap(region: &Region) -> Result<(), SourceError> {
    // SAFETY: the caller gives up the whole mapping, which has this length.
    unsafe { munmap(region.start(), mapped_bytes(region.len_bytes())?) }
}

/// Returns `region` if `prepared` succeeded; else unmaps it and returns the error.
///
/// # Safety
///
/// The contract of [`unmap`].
pub(super) unsafe fn keep_if(prepared: Result<(), SourceError>, region: Region) -> Result<Region, SourceError> {
    match prepared {
        Ok(()) => Ok(region),
        Err(error) => {
            // A failure of the clean-up is ignored, because the first error is more useful.
            // SAFETY: the caller's promise.
            let _ = unsafe { unmap(&region) };
            Err(error)
        }
    }
}

/// Sets whether forked children inherit the pages of `region`, as they do by default. They should not inherit pages that are pinned
/// for a device, because the kernel would copy all of these pages in the `fork`, and the child could not use the pin.
pub(super) fn inherit(region: &Region, is_inherited: bool) -> Result<(), SourceError> {
    if cfg!(miri) {
        return Ok(());
    }
    let advice = if is_inherited { linux::MADV_DOFORK } else { linux::MADV_DONTFORK };
    advise(region.start(), mapped_bytes(region.len_bytes())?, advice)
}

/// Advises the kernel about pages of the caller, with advice that keeps their content.
pub(super) fn advise(start: NonNull<u8>, bytes: usize, advice: libc::c_int) -> Result<(), SourceError> {
    // SAFETY: the advice keeps the content, as stated above; the kernel refuses the call if nothing is mapped there.
    check("madvise", unsafe { libc::madvise(start.as_ptr().cast(), bytes, advice) })
}

/// Returns fresh pages that forked children do not inherit; `None` if the system refuses. A child would share the pages, so a write
/// of this process would go to a copy of the page, which a device that has pinned the original page does not see.
#[cfg(feature = "cuda")]
pub(crate) fn page_of_this_process(bytes: usize) -> Option<*mut libc::c_void> {
    let page = map(bytes, CHARGED, 0).ok()?;
    let prepared = inherit(&page, false);
    // SAFETY: mapped above, and nothing uses it.
    unsafe { keep_if(prepared, page) }.ok().map(|page| page.start().as_ptr().cast())
}

/// Reserves `len_bytes` (whole pages) of addresses without memory.
pub(super) fn reserve(len_bytes: usize) -> Result<AddressRange, SourceError> {
    let len_bytes = mapped_bytes(len_bytes)?;
    Ok(AddressRange::new(mmap_huge(len_bytes, libc::PROT_NONE, CHARGED_ON_TOUCH)?, len_bytes))
}

/// Makes `bytes` at `start` readable and writable. They read as zero, and are taken from the system when they are touched. On error
/// nothing has changed.
///
/// # Safety
///
/// The bytes must be uncommitted pages of a range of [`reserve`].
pub(super) unsafe fn commit(start: NonNull<u8>, bytes: usize) -> Result<(), SourceError> {
    // A failing `mprotect` may have changed a part of the pages.
    // SAFETY: pages that nothing uses yet.
    unsafe { protect(start, bytes, READ_WRITE) }.inspect_err(|_| {
        // SAFETY: the same pages, back to their former protection.
        let _ = unsafe { protect(start, bytes, libc::PROT_NONE) };
    })
}

/// Returns the memory of `bytes` at `start` to the system. On error the bytes are still committed.
///
/// # Safety
///
/// The bytes must be committed pages of a range of [`reserve`], and nothing may use them any more.
pub(super) unsafe fn decommit(start: NonNull<u8>, bytes: usize) -> Result<(), SourceError> {
    // `mprotect` comes first: if it fails (out of mappings), the pages still have their memory.
    // SAFETY: the caller's promise: unused pages.
    let decommitted = unsafe { protect(start, bytes, libc::PROT_NONE) }.and_then(|()| {
        // SAFETY: as above: the content is not needed any more.
        check("madvise", unsafe { libc::madvise(start.as_ptr().cast(), bytes, libc::MADV_DONTNEED) })
            .map_err(|error| error.with_remedy("another part of the program locked the pages (mlockall?)"))
    });
    decommitted.inspect_err(|_| {
        // SAFETY: the same pages, back to their former protection.
        let _ = unsafe { protect(start, bytes, READ_WRITE) };
    })
}

/// Returns the addresses of `range` to the system, with all memory committed there.
///
/// # Safety
///
/// `range` must come from [`reserve`], and nothing may use it any more.
pub(super) unsafe fn unreserve(range: AddressRange) -> Result<(), SourceError> {
    // SAFETY: the caller gives up the whole mapping, which has this length.
    unsafe { munmap(range.start(), range.len_bytes()) }
}

/// Returns `len_bytes` rounded up to whole pages, at least one page.
pub(super) fn mapped_bytes(len_bytes: usize) -> Result<usize, SourceError> {
    len_bytes.max(1).checked_next_multiple_of(PAGE_BYTES).ok_or_else(|| over_address_space(len_bytes))
}

fn over_address_space(len_bytes: usize) -> SourceError {
    SourceError::new("mmap", format!("{len_bytes} bytes are more than an address space"))
}

/// Creates an anonymous mapping with these additional flags.
fn mmap(mapped_bytes: usize, protection: libc::c_int, flags: libc::c_int) -> Result<NonNull<u8>, SourceError> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | flags;
    // SAFETY: an anonymous mapping at an address of the kernel's choice touches no existing memory.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), mapped_bytes, protection, flags, -1, 0) };
    if start == libc::MAP_FAILED {
        return Err(SourceError::last_os("mmap"));
    }
    NonNull::new(start.cast()).ok_or_else(|| SourceError::new("mmap", "the kernel mapped page zero"))
}

/// Maps `mapped_bytes` (whole pages) at a multiple of [`RANGE_ALIGN_BYTES`]: maps more and trims both ends. Requests huge pages; a
/// kernel that has none, or is configured not to use them, uses small pages.
fn mmap_huge(mapped_bytes: usize, protection: libc::c_int, flags: libc::c_int) -> Result<NonNull<u8>, SourceError> {
    let spare_bytes = RANGE_ALIGN_BYTES - PAGE_BYTES;
    let widened_bytes = mapped_bytes.checked_add(spare_bytes).ok_or_else(|| over_address_space(mapped_bytes))?;
    let widened = mmap(widened_bytes, protection, flags).map_err(|error| with_memory_remedy(error, widened_bytes))?;
    let head_bytes = widened.addr().get().wrapping_neg() % RANGE_ALIGN_BYTES;
    // SAFETY: `head_bytes` is at most `spare_bytes`, so the range fits after it.
    let start = unsafe { widened.add(head_bytes) };
    // SAFETY: at most the end of the mapping, as above.
    let end = unsafe { start.add(mapped_bytes) };
    for (spare, bytes) in [(widened, head_bytes), (end, spare_bytes - head_bytes)] {
        if bytes > 0 {
            // Fails only for lack of mappings; the spare addresses then stay mapped, without memory.
            // SAFETY: mapped above, outside the returned range.
            let _ = unsafe { munmap(spare, bytes) };
        }
    }
    // One call advises the whole mapping, because pieces with different advice would stay separate mappings.
    let _ = advise(start, mapped_bytes, linux::MADV_HUGEPAGE);
    Ok(start)
}

/// # Safety
///
/// The pages must have been mapped here, and nothing may use them any more.
unsafe fn munmap(start: NonNull<u8>, mapped_bytes: usize) -> Result<(), SourceError> {
    // SAFETY: the caller gives up these pages.
    check("munmap", unsafe { libc::munmap(start.as_ptr().cast(), mapped_bytes) })
}

/// # Safety
///
/// The bytes must be pages of a range of [`reserve`], and nothing may use them in a way that `protection` forbids.
unsafe fn protect(start: NonNull<u8>, bytes: usize, protection: libc::c_int) -> Result<(), SourceError> {
    // SAFETY: the caller's promise.
    check("mprotect", unsafe { libc::mprotect(start.as_ptr().cast(), bytes, protection) })
        .map_err(|error| with_memory_remedy(error, bytes))
}

/// Adds the limit that refused `bytes`, and a remedy, if the error is `ENOMEM`.
pub(super) fn with_memory_remedy(error: SourceError, bytes: usize) -> SourceError {
    if error.code() == Some(i64::from(libc::ENOMEM)) {
        let remedy = limits::memory_remedy(Path::new("/"), bytes);
        let limit =
            if remedy == limits::ADDRESSES { limits::process_limits(Path::new("/")).address_bytes } else { None };
        error.with_bytes(bytes, limit).with_remedy(remedy)
    } else {
        error
    }
}

/// Returns the result of a kernel call that returned `status`. Reads the calling thread's `errno` after a failure.
pub(super) fn check(call: &'static str, status: libc::c_int) -> Result<(), SourceError> {
    if status == 0 { Ok(()) } else { Err(SourceError::last_os(call)) }
}
