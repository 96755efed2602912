//! Ranges of addresses from the kernel, pages of which become real and unreal: the ground of every span without a driver.
//!
//! Unreal pages are mapped without any access (`PROT_NONE`), so that nobody else gets the addresses and a stray access
//! faults. No two of these calls depend on state of this module: it has none.
//!
//! Miri knows neither protection nor advice, so sources do not span there.
#![allow(unsafe_code)] // Calls `mprotect` and `madvise`.

use std::ptr::NonNull;

use super::pages::{self, Commit, READ_WRITE};
use super::{AddressRange, SourceError};

/// What may be done with the addresses of a range before any of its pages is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Start {
    /// Nothing until [`open`]; then in huge pages where possible.
    Closed,
    /// Everything, in small pages that come when touched; never to be opened or closed.
    Open,
}

/// Reserves `len_bytes` (whole pages) of addresses; no memory is taken.
pub(super) fn reserve(len_bytes: usize, start: Start) -> Result<AddressRange, SourceError> {
    let len_bytes = pages::mapped_bytes(len_bytes)?;
    match start {
        Start::Open => Ok(AddressRange::new(pages::mmap_aligned(len_bytes, READ_WRITE, Commit::Lazily)?, len_bytes)),
        Start::Closed => {
            let range = AddressRange::new(pages::mmap_aligned(len_bytes, libc::PROT_NONE, Commit::Lazily)?, len_bytes);
            // For the whole range at once: pieces with advice of their own could never be one mapping again.
            pages::advise_huge(range.start(), len_bytes);
            Ok(range)
        }
    }
}

/// Lets `bytes` at `start` be read and written: zero, and taken from the system when touched. On error nothing changed.
///
/// # Safety
///
/// They are closed pages of a range of [`reserve`].
pub(super) unsafe fn open(start: NonNull<u8>, bytes: usize) -> Result<(), SourceError> {
    // A refusal may come after a part was done.
    // SAFETY: pages of ours that nobody uses yet.
    unsafe { protect(start, bytes, READ_WRITE) }.inspect_err(|_| {
        // SAFETY: the same pages, back to what they were.
        let _ = unsafe { protect(start, bytes, libc::PROT_NONE) };
    })
}

/// Takes the memory of `bytes` at `start` away. On error they are still open.
///
/// # Safety
///
/// They are open pages of a range of [`reserve`], and nothing uses them any more.
pub(super) unsafe fn close(start: NonNull<u8>, bytes: usize) -> Result<(), SourceError> {
    // Protection first: it is what can be refused (for want of mappings), and nothing is lost if it is.
    // SAFETY: the caller's promise: unused pages of ours.
    let closed = unsafe { protect(start, bytes, libc::PROT_NONE) }.and_then(|()| {
        // SAFETY: as above.
        unsafe { empty(start, bytes) }
    });
    closed.inspect_err(|_| {
        // SAFETY: the same pages, back to what they were.
        let _ = unsafe { protect(start, bytes, READ_WRITE) };
    })
}

/// Gives the memory of `bytes` at `start` back to the system; what is read next is zero.
///
/// # Safety
///
/// They are pages of a range of [`reserve`], and nothing uses them any more.
pub(super) unsafe fn empty(start: NonNull<u8>, bytes: usize) -> Result<(), SourceError> {
    // SAFETY: what the pages hold is needed no more.
    match unsafe { libc::madvise(start.as_ptr().cast(), bytes, libc::MADV_DONTNEED) } {
        0 => Ok(()),
        _ => Err(SourceError::last_os("madvise").with_remedy("the pages are locked by somebody else (mlockall?)")),
    }
}

/// # Safety
///
/// They are pages of a range of [`reserve`], and nothing uses them in a way that `protection` forbids.
unsafe fn protect(start: NonNull<u8>, bytes: usize, protection: libc::c_int) -> Result<(), SourceError> {
    // SAFETY: the caller's promise.
    match unsafe { libc::mprotect(start.as_ptr().cast(), bytes, protection) } {
        0 => Ok(()),
        _ => Err(SourceError::last_os("mprotect")
            .with_remedy("the machine or its cgroup is out of memory or of mappings (vm.max_map_count)")),
    }
}

/// Gives the addresses of `range` back, with all that is behind them.
///
/// # Safety
///
/// `range` came from [`reserve`], and nothing uses it any more.
pub(super) unsafe fn unreserve(range: AddressRange) -> Result<(), SourceError> {
    // SAFETY: the caller gives up the whole mapping, which `reserve` made of this very length.
    unsafe { pages::munmap(range.start(), range.len_bytes()) }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;
    use crate::backend::PAGE_BYTES;
    use crate::backend::mapping::{self, accessible_kib, resident_kib};

    #[test]
    fn memory_comes_with_a_touch_and_goes_with_the_close() {
        const BYTES: usize = 64 << 20;
        let range = reserve(BYTES + 2 * PAGE_BYTES, Start::Closed).unwrap();
        let start = range.at(PAGE_BYTES, BYTES).unwrap();
        assert_eq!((accessible_kib(&range), resident_kib(&range)), (0, 0));
        // SAFETY: closed pages of the range made above.
        unsafe { open(start, BYTES) }.unwrap();
        // SAFETY: open, and used by nobody else.
        unsafe { start.write_bytes(1, BYTES) };
        assert_eq!((accessible_kib(&range), resident_kib(&range)), (64 << 10, 64 << 10));
        // SAFETY: opened above, and used no more.
        unsafe { close(start, BYTES) }.unwrap();
        assert_eq!((accessible_kib(&range), resident_kib(&range)), (0, 0));
        // SAFETY: no part of it is in use.
        unsafe { unreserve(range) }.unwrap();
    }

    #[test]
    fn an_opening_refused_half_way_leaves_the_first_half_closed() {
        let range = reserve(4 * PAGE_BYTES, Start::Closed).unwrap();
        // Never writable, for its file is not: the kernel opens what lies before it, then refuses.
        let read_only = std::fs::File::open("/proc/self/exe").unwrap();
        // SAFETY: the third page of the range made above, used by nobody.
        unsafe { mapping::replace_page(range.at(2 * PAGE_BYTES, PAGE_BYTES).unwrap(), &read_only, libc::PROT_NONE) };
        // SAFETY: pages of the range, used by nobody.
        assert!(unsafe { open(range.start(), 4 * PAGE_BYTES) }.is_err());
        assert_eq!(accessible_kib(&range), 0);
        // SAFETY: as above.
        unsafe { open(range.start(), 2 * PAGE_BYTES) }.unwrap();
        assert_eq!(accessible_kib(&range), 8);
        // SAFETY: no part of it is in use.
        unsafe { unreserve(range) }.unwrap();
    }

    #[test]
    fn a_closing_refused_half_way_leaves_all_open() {
        let range = reserve(4 * PAGE_BYTES, Start::Closed).unwrap();
        // SAFETY: closed pages of the range made above.
        unsafe { open(range.start(), 4 * PAGE_BYTES) }.unwrap();
        let locked = range.at(2 * PAGE_BYTES, PAGE_BYTES).unwrap().as_ptr().cast();
        // The kernel takes no memory of locked pages away.
        // SAFETY: an open page of the range.
        assert_eq!(unsafe { libc::mlock(locked, PAGE_BYTES) }, 0);
        // SAFETY: open pages, used by nobody.
        assert!(unsafe { close(range.start(), 4 * PAGE_BYTES) }.is_err());
        assert_eq!(accessible_kib(&range), 16);
        // SAFETY: as above.
        assert_eq!(unsafe { libc::munlock(locked, PAGE_BYTES) }, 0);
        // SAFETY: open pages, used by nobody.
        unsafe { close(range.start(), 4 * PAGE_BYTES) }.unwrap();
        assert_eq!(accessible_kib(&range), 0);
        // SAFETY: no part of it is in use.
        unsafe { unreserve(range) }.unwrap();
    }
}
