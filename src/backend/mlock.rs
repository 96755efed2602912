//! Memory that the kernel keeps in place: an anonymous mapping with `mlock`.
//!
//! No driver knows of it, so a CUDA copy from it is staged like any pageable copy; it is the real thing for programs
//! that need resident memory, and what stands for pinned memory where there is no GPU (0.25 ms a MiB, the price of
//! faulting the pages in).
#![allow(unsafe_code)] // Implements the unsafe `Source`; calls `mlock`.

use super::pages::{self, Commit, Numbering};
use super::{Region, Source, SourceError};

/// Anonymous mappings locked into memory by the kernel.
#[derive(Debug, Default)]
pub struct MlockSource {
    numbering: Numbering,
}

/// How much the calling process may lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LockLimit {
    /// All of memory: `CAP_IPC_LOCK`, or no `RLIMIT_MEMLOCK`.
    None,
    /// `RLIMIT_MEMLOCK` bytes.
    Bytes(u64),
}

impl MlockSource {
    /// A source of page-locked memory.
    pub fn new() -> Self {
        Self::default()
    }

    /// Finds out what the process may lock by asking the kernel to lock one page more than `RLIMIT_MEMLOCK` allows.
    ///
    /// The limit alone does not tell: a process with `CAP_IPC_LOCK` is not bound by it, and inside a user namespace the
    /// capability shows but does not count. `MLOCK_ONFAULT` makes the trial cheap: nothing is faulted in.
    pub(super) fn lock_limit(&self) -> LockLimit {
        let Some(limit_bytes) = rlimit_memlock() else { return LockLimit::None };
        let over_the_limit = usize::try_from(limit_bytes).ok().and_then(|bytes| bytes.checked_add(1));
        let Some(trial) = over_the_limit.and_then(|bytes| pages::map(bytes, Commit::Lazily, 0).ok()) else {
            return LockLimit::Bytes(limit_bytes);
        };
        let locked = lock_on_fault(&trial);
        // SAFETY: the trial mapping was made above, and no reference into it was ever made.
        let _ = unsafe { pages::unmap(trial) };
        if locked { LockLimit::None } else { LockLimit::Bytes(limit_bytes) }
    }
}

// SAFETY: C1 to C3 as for any private anonymous mapping (`pages`); locking changes neither address nor content.
// C4: `Numbering`.
unsafe impl Source for MlockSource {
    fn name(&self) -> &'static str {
        "mlock"
    }

    fn is_pinned(&self) -> bool {
        true
    }

    fn acquire(&self, len_bytes: usize) -> Result<Region, SourceError> {
        let region = pages::map(len_bytes, Commit::Yes, self.numbering.next())?;
        lock(region.start().as_ptr(), region.len_bytes()).inspect_err(|_| {
            // The mapping was never handed out; if it cannot be undone either, the lock's refusal is the news.
            // SAFETY: made four lines above, no reference into it exists.
            let _ = unsafe { pages::unmap(Region::new(region.start(), region.len_bytes(), region.id())) };
        })?;
        Ok(region)
    }

    unsafe fn release(&self, region: Region) -> Result<(), SourceError> {
        // Unmapping unlocks.
        // SAFETY: the caller's promise: the region is of this source, hence of `map`, and unused.
        unsafe { pages::unmap(region) }
    }
}

#[cfg(not(miri))]
fn lock(start: *const u8, len_bytes: usize) -> Result<(), SourceError> {
    // SAFETY: `mlock` reads nothing through the pointer; on pages not mapped it fails with ENOMEM.
    if unsafe { libc::mlock(start.cast(), len_bytes) } == 0 {
        return Ok(());
    }
    let error = SourceError::last_os("mlock");
    Err(match rlimit_memlock() {
        Some(limit_bytes) => SourceError::new(
            "mlock",
            format!("{len_bytes} B refused, RLIMIT_MEMLOCK is {limit_bytes} B for all locked memory of this process"),
        )
        .with_code(error.code().unwrap_or_default())
        .with_remedy(
            "raise the limit (`ulimit -l`, LimitMEMLOCK=, --ulimit memlock=), grant CAP_IPC_LOCK, or set PINPOOL_BACKEND=heap",
        ),
        None => error.with_remedy("the machine or its cgroup is out of memory"),
    })
}

#[cfg(miri)]
fn lock(_start: *const u8, _len_bytes: usize) -> Result<(), SourceError> {
    Ok(())
}

#[cfg(not(miri))]
fn lock_on_fault(trial: &Region) -> bool {
    // SAFETY: like `mlock`, `mlock2` reads nothing through the pointer.
    unsafe { libc::mlock2(trial.start().as_ptr().cast(), trial.len_bytes(), libc::MLOCK_ONFAULT) == 0 }
}

#[cfg(miri)]
fn lock_on_fault(_trial: &Region) -> bool {
    true
}

/// `RLIMIT_MEMLOCK` in bytes; `None` if there is no limit.
fn rlimit_memlock() -> Option<u64> {
    if cfg!(miri) {
        return None;
    }
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a live `rlimit` for the length of the call.
    let asked = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) };
    (asked == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::suite;

    #[test]
    fn keeps_the_contract() {
        suite::run(&MlockSource::new());
    }

    #[cfg(all(target_os = "linux", not(miri)))]
    #[test]
    fn really_locks_the_pages() {
        // `VmLck` counts the whole process, other tests included; this region's own mapping cannot be confused.
        let source = MlockSource::new();
        let region = source.acquire(5 * PAGE).unwrap();
        let start = format!("{:x}", region.start().as_ptr() as usize);
        assert!(locked_kib_of_mapping_at_or_over(&start) >= 20);
        // SAFETY: acquired above, no reference into it was made.
        unsafe { source.release(region) }.unwrap();
    }

    const PAGE: usize = crate::backend::PAGE_BYTES;

    /// `Locked:` of the mapping that holds address `start` (hexadecimal): neighbours may have been merged into it.
    #[cfg(all(target_os = "linux", not(miri)))]
    fn locked_kib_of_mapping_at_or_over(start: &str) -> u64 {
        let start = usize::from_str_radix(start, 16).unwrap();
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut inside = false;
        for line in smaps.lines() {
            if let Some((from, to)) = line.split(' ').next().and_then(|range| range.split_once('-')) {
                let bounds = (usize::from_str_radix(from, 16), usize::from_str_radix(to, 16));
                inside = matches!(bounds, (Ok(from), Ok(to)) if (from..to).contains(&start));
            }
            if let Some(kib) = line.strip_prefix("Locked:").filter(|_| inside) {
                return kib.trim().trim_end_matches(" kB").parse().unwrap();
            }
        }
        0
    }
}
