//! Memory that the kernel keeps in place: an anonymous mapping with `mlock`.
//!
//! No driver knows of it, so a CUDA copy from it is staged like any pageable copy; it is the real thing for programs
//! that need resident memory, and what stands for pinned memory where there is no GPU (0.25 ms a MiB, the price of
//! faulting the pages in).
#![allow(unsafe_code)] // Implements the unsafe `Source` and `VirtualMemory`; calls `mlock`.

use std::path::Path;
use std::ptr::NonNull;

use super::pages::{self, Commit, Numbering};
use super::placement::Placement;
use super::populate::populate;
use super::ranges::{self, Start};
use super::{AddressRange, PAGE_BYTES, Region, Source, SourceError, VirtualMemory};

/// Anonymous mappings locked into memory by the kernel.
#[derive(Debug, Default)]
pub struct MlockSource {
    numbering: Numbering,
    placement: Option<Placement>,
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

    /// The same on memory node `node`, where the machine has several.
    pub fn on_node(node: u32) -> Self {
        Self { placement: Placement::on(Path::new("/"), node), ..Self::default() }
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
        let locked = lock_on_fault(&trial).is_ok();
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
        if let Some(placement) = &self.placement {
            placement.place(region.start(), pages::mapped_bytes(len_bytes)?);
        }
        let ready = lock(region.start(), len_bytes);
        // SAFETY: mapped above, no reference into it was made.
        unsafe { pages::keep_if(ready, region) }
    }

    unsafe fn release(&self, region: Region) -> Result<(), SourceError> {
        // Unmapping unlocks.
        // SAFETY: the caller's promise: the region is of this source, hence of `map`, and unused.
        unsafe { pages::unmap(region) }
    }

    fn acquire_fast(&self, len_bytes: usize, threads: usize, progress: &dyn Fn(usize)) -> Result<Region, SourceError> {
        let region = pages::map_huge(len_bytes, self.numbering.next())?;
        // The limit speaks before a page is touched; the second lock finds all pages present, and makes sure of it.
        let ready = lock_on_fault(&region)
            .and_then(|()| {
                // SAFETY: mapped above.
                unsafe { populate(&region, threads, self.placement.as_ref(), progress) }
            })
            .and_then(|()| lock(region.start(), len_bytes));
        // SAFETY: mapped above, no reference into it was made.
        unsafe { pages::keep_if(ready, region) }
    }

    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        (!cfg!(miri)).then_some(self)
    }

    fn numa_node(&self) -> Option<u32> {
        self.placement.as_ref().map(Placement::node)
    }
}

// SAFETY: as for `HeapSource`, whose granules these are; locking changes neither address nor content.
unsafe impl VirtualMemory for MlockSource {
    fn granule_bytes(&self) -> usize {
        PAGE_BYTES
    }

    fn reserve(&self, len_bytes: usize) -> Result<AddressRange, SourceError> {
        let range = ranges::reserve(len_bytes, Start::Closed)?;
        if let Some(placement) = &self.placement {
            placement.place(range.start(), range.len_bytes());
        }
        Ok(range)
    }

    unsafe fn commit(&self, range: &AddressRange, offset: usize, bytes: usize) -> Result<(), SourceError> {
        let start = range.at(offset, bytes)?;
        // SAFETY: the caller's promise: not locked, hence closed.
        unsafe { ranges::open(start, bytes) }?;
        lock(start, bytes).inspect_err(|_| {
            // A lock refused for want of memory has locked a part.
            let _ = unlock(start, bytes);
            // SAFETY: opened above, and given to nobody.
            let _ = unsafe { ranges::close(start, bytes) };
        })
    }

    unsafe fn decommit(&self, range: &AddressRange, offset: usize, bytes: usize) -> Result<(), SourceError> {
        let start = range.at(offset, bytes)?;
        let closed = unlock(start, bytes).and_then(|()| {
            // SAFETY: the caller's promise: locked, hence open, and unused.
            unsafe { ranges::close(start, bytes) }
        });
        closed.inspect_err(|_| {
            // The pages are still there (S2); the lock is theirs again if the kernel will have it.
            let _ = lock(start, bytes);
        })
    }

    unsafe fn unreserve(&self, range: AddressRange) -> Result<(), SourceError> {
        // Unmapping unlocks.
        // SAFETY: the caller's promise: of `reserve`, and unused.
        unsafe { ranges::unreserve(range) }
    }
}

/// Brings the pages in and keeps them there.
#[cfg(not(miri))]
fn lock(start: NonNull<u8>, len_bytes: usize) -> Result<(), SourceError> {
    // SAFETY: `mlock` reads nothing through the pointer; on pages not mapped it fails with ENOMEM.
    match unsafe { libc::mlock(start.as_ptr().cast(), len_bytes) } {
        0 => Ok(()),
        _ => Err(refusal("mlock", len_bytes)),
    }
}

/// Keeps the pages of `region` there once they come.
#[cfg(not(miri))]
fn lock_on_fault(region: &Region) -> Result<(), SourceError> {
    let (start, len_bytes) = (region.start().as_ptr(), region.len_bytes());
    // SAFETY: like `mlock`, `mlock2` reads nothing through the pointer.
    match unsafe { libc::mlock2(start.cast(), len_bytes, libc::MLOCK_ONFAULT) } {
        0 => Ok(()),
        _ => Err(refusal("mlock2", len_bytes)),
    }
}

#[cfg(miri)]
fn lock(_start: NonNull<u8>, _len_bytes: usize) -> Result<(), SourceError> {
    Ok(())
}

#[cfg(miri)]
fn lock_on_fault(_region: &Region) -> Result<(), SourceError> {
    Ok(())
}

/// What the calling thread's `errno` says of a lock of `len_bytes`.
#[cfg(not(miri))]
fn refusal(call: &'static str, len_bytes: usize) -> SourceError {
    let error = SourceError::last_os(call);
    match rlimit_memlock() {
        Some(limit_bytes) => SourceError::new(
            call,
            format!("{len_bytes} B refused, RLIMIT_MEMLOCK is {limit_bytes} B for all locked memory of this process"),
        )
        .with_code(error.code().unwrap_or_default())
        .with_remedy(
            "raise the limit (`ulimit -l`, LimitMEMLOCK=, --ulimit memlock=), grant CAP_IPC_LOCK, or set PINPOOL_BACKEND=heap",
        ),
        None => error.with_remedy("the machine or its cgroup is out of memory"),
    }
}

fn unlock(start: NonNull<u8>, len_bytes: usize) -> Result<(), SourceError> {
    // SAFETY: lets the kernel move pages, which changes nothing that a program can see.
    match unsafe { libc::munlock(start.as_ptr().cast(), len_bytes) } {
        0 => Ok(()),
        _ => Err(SourceError::last_os("munlock").with_remedy("the kernel is out of mappings (vm.max_map_count)")),
    }
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
    use crate::backend::suite::check_source;

    #[test]
    fn keeps_the_contract() {
        check_source(&MlockSource::new());
    }

    #[cfg(not(miri))]
    mod really {
        use super::*;
        use crate::backend::mapping;

        #[test]
        fn locks_the_pages() {
            let source = MlockSource::new();
            for region in [source.acquire(5 * PAGE_BYTES), source.acquire_fast(5 * PAGE_BYTES, 2, &|_| {})] {
                let region = region.unwrap();
                assert!(mapping::locked_kib_at(region.start()) >= 20);
                // SAFETY: acquired above, no reference into it was made.
                unsafe { source.release(region) }.unwrap();
            }
        }

        #[test]
        fn locks_granules_and_gives_them_back() {
            let source = MlockSource::new();
            // A quarter of the limit, for there are other tests in this process.
            let bytes = match source.lock_limit() {
                LockLimit::None => 64 << 20,
                LockLimit::Bytes(limit) => {
                    usize::try_from(limit / 4).unwrap().next_multiple_of(PAGE_BYTES).min(64 << 20)
                }
            };
            let kib = bytes as u64 >> 10;
            // A closed page at each end, so that no neighbour is merged with what is counted.
            let range = source.reserve(bytes + 2 * PAGE_BYTES).unwrap();
            // SAFETY: of this range, and not locked.
            unsafe { VirtualMemory::commit(&source, &range, PAGE_BYTES, bytes) }.unwrap();
            assert_eq!((mapping::resident_kib(&range), mapping::locked_kib(&range)), (kib, kib));
            // SAFETY: locked above, and unused.
            unsafe { VirtualMemory::decommit(&source, &range, PAGE_BYTES, bytes / 2) }.unwrap();
            assert_eq!((mapping::resident_kib(&range), mapping::locked_kib(&range)), (kib / 2, kib / 2));
            // SAFETY: as above, the other half.
            unsafe { VirtualMemory::decommit(&source, &range, PAGE_BYTES + bytes / 2, bytes / 2) }.unwrap();
            assert_eq!((mapping::resident_kib(&range), mapping::locked_kib(&range)), (0, 0));
            // SAFETY: nothing of it is locked or in use.
            unsafe { source.unreserve(range) }.unwrap();
        }

        #[test]
        #[allow(clippy::print_stdout)] // A skipped test says so.
        fn a_lock_over_the_limit_names_the_limit_and_changes_nothing() {
            let Some(limit_bytes) = rlimit_memlock() else {
                println!("skipped: there is no RLIMIT_MEMLOCK here");
                return;
            };
            let over_bytes = usize::try_from(limit_bytes).unwrap().next_multiple_of(PAGE_BYTES) + PAGE_BYTES;
            // On a thread of its own: capabilities are a thread's.
            let refused = std::thread::spawn(move || {
                give_up_ipc_lock();
                let source = MlockSource::new();
                let range = source.reserve(over_bytes).unwrap();
                // SAFETY: of this range, and not locked.
                let refusal = unsafe { VirtualMemory::commit(&source, &range, 0, over_bytes) }.unwrap_err().to_string();
                assert_eq!((mapping::accessible_kib(&range), mapping::locked_kib(&range)), (0, 0));
                // SAFETY: nothing of it is locked or in use.
                unsafe { source.unreserve(range) }.unwrap();
                let untouched = |_| panic!("asks before it touches");
                [refusal, source.acquire_fast(over_bytes, 2, &untouched).unwrap_err().to_string()]
            });
            for refusal in refused.join().unwrap() {
                let words = format!("{over_bytes} B refused, RLIMIT_MEMLOCK is {limit_bytes} B");
                assert!(refusal.contains(&words), "{refusal}");
            }
        }

        /// Takes `CAP_IPC_LOCK` from the calling thread.
        fn give_up_ipc_lock() {
            const VERSION_3: u32 = 0x2008_0522;
            const IPC_LOCK: u32 = 14;
            let header = [VERSION_3, 0];
            // Effective, permitted, inheritable; of capabilities 0 to 31, then 32 to 63.
            let mut sets = [0_u32; 6];
            // SAFETY: the kernel writes the six words that version 3 has.
            let got = unsafe { libc::syscall(libc::SYS_capget, header.as_ptr(), sets.as_mut_ptr()) };
            sets[0] &= !(1 << IPC_LOCK);
            // SAFETY: the kernel reads the same six words.
            let set = unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), sets.as_ptr()) };
            assert_eq!((got, set), (0, 0));
        }
    }
}
