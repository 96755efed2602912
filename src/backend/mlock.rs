//! Locks pages in memory, and finds out how many bytes a process may lock.
//!
//! No driver knows about the lock, so a CUDA copy from locked memory is staged like any pageable copy. The lock is for programs
//! that need resident memory, and for machines without a GPU. Locking takes 0.25 ms per MiB, mostly for faulting pages in.
#![allow(unsafe_code)] // Calls `mlock`.

use std::path::Path;
use std::ptr::NonNull;

use super::mapping;
use super::source::Region;
use crate::error::{Retry, SourceError};
use pinpool_os::format::Size;
use pinpool_os::host::limits;

/// Returns the number of bytes that the process may lock, after trying to lock one page more than `RLIMIT_MEMLOCK` allows; `None`
/// if no limit applies to the process.
///
/// Reading the limit is not enough: a process with `CAP_IPC_LOCK` is not bound by it, and inside a user namespace the
/// capability is listed but has no effect. `MLOCK_ONFAULT` makes the trial cheap: no page is faulted in.
pub fn lock_limit() -> Option<u64> {
    let limit_bytes = rlimit_memlock()?;
    let over_the_limit = usize::try_from(limit_bytes).ok().and_then(|bytes| bytes.checked_add(1));
    let Some(trial) = over_the_limit.and_then(|bytes| mapping::map(bytes, mapping::CHARGED_ON_TOUCH, 0).ok()) else {
        return Some(limit_bytes);
    };
    let locked = lock_on_fault(&trial).is_ok();
    // SAFETY: the trial mapping was made above, and no reference into it was ever made.
    let _ = unsafe { mapping::unmap(&trial) };
    (!locked).then_some(limit_bytes)
}

/// Faults the pages in and locks all of them or none. Does nothing under Miri, which has no `mlock`.
pub(super) fn lock(start: NonNull<u8>, len_bytes: usize) -> Result<(), SourceError> {
    if cfg!(miri) {
        return Ok(());
    }
    // SAFETY: `mlock` reads nothing through the pointer; on pages not mapped it fails with ENOMEM.
    let locked = mapping::check("mlock", unsafe { libc::mlock(start.as_ptr().cast(), len_bytes) });
    locked.map_err(|error| {
        // A failed call may have locked a part of the pages.
        let _ = unlock(start, len_bytes);
        lock_error("mlock", &error, len_bytes)
    })
}

/// Makes the kernel lock each page of `region` when the page is faulted in.
#[cfg(target_os = "linux")]
pub(super) fn lock_on_fault(region: &Region) -> Result<(), SourceError> {
    if cfg!(miri) {
        return Ok(());
    }
    let (start, len_bytes) = (region.start().as_ptr(), region.len_bytes());
    // SAFETY: like `mlock`, `mlock2` reads nothing through the pointer.
    mapping::check("mlock2", unsafe { libc::mlock2(start.cast(), len_bytes, libc::MLOCK_ONFAULT) })
        .map_err(|error| lock_error("mlock2", &error, len_bytes))
}

#[cfg(not(target_os = "linux"))]
pub(super) fn lock_on_fault(_region: &Region) -> Result<(), SourceError> {
    Err(SourceError::new("mlock2", "needs Linux"))
}

/// Returns the error for a refused lock of `len_bytes`, with the limit that refused it and the remedy.
fn lock_error(call: &'static str, error: &SourceError, len_bytes: usize) -> SourceError {
    let locked_bytes = limits::locked_bytes(Path::new("/"));
    let leaves_less = |limit: &u64| locked_bytes.is_none_or(|locked| limit.saturating_sub(locked) < len_bytes as u64);
    let Some(limit_bytes) = rlimit_memlock().filter(leaves_less) else {
        return mapping::with_memory_remedy(error.clone(), len_bytes);
    };
    let so_far = locked_bytes.map_or_else(String::new, |bytes| format!(" ({} so far)", Size(bytes)));
    let [len, limit] = [len_bytes as u64, limit_bytes].map(Size);
    let what = format!("{len} refused, RLIMIT_MEMLOCK is {limit} for all locked memory of this process{so_far}");
    let refused = SourceError::new(call, what).with_code(error.code().unwrap_or_default());
    refused.with_remedy(limits::LOCKED).with_retry(Retry::Never)
}

pub(super) fn unlock(start: NonNull<u8>, len_bytes: usize) -> Result<(), SourceError> {
    // SAFETY: `munlock` only allows the kernel to page the memory out, which changes nothing that a program can observe.
    mapping::check("munlock", unsafe { libc::munlock(start.as_ptr().cast(), len_bytes) })
        .map_err(|error| error.with_remedy(limits::MAPPINGS))
}

/// Returns `RLIMIT_MEMLOCK` in bytes; `None` if there is no limit.
fn rlimit_memlock() -> Option<u64> {
    if cfg!(miri) {
        return None;
    }
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a live `rlimit` for the length of the call.
    let status = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) };
    (status == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_over_the_limit_of_the_process_is_not_repeated() {
        let refused = SourceError::new("mlock", "out of memory").with_code(libc::ENOMEM.into());
        let expected = if rlimit_memlock().is_some() { Retry::Never } else { Retry::Later };
        assert_eq!(lock_error("mlock", &refused, usize::MAX >> 1).retry, expected);
    }
}
