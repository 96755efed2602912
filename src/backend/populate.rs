//! Places the pages of a new mapping on a NUMA node, and faults them in with many threads.
//!
//! One thread faults in huge pages at 4 to 10 GB/s. With sixteen threads, and including the registration that follows, a reserve of
//! 1 GiB is pinned at 24 GB/s (17 to 22 GB/s on a busier machine).
//!
//! A placement is a preference. If the node is full, pages come from another node, and a refusal by the kernel is
//! ignored, because memory on the wrong node is slower but correct. On a machine with one node, pages are not placed.
#![allow(unsafe_code)] // Asks the kernel for a memory policy and for pages.

use std::path::Path;
use std::ptr::NonNull;
use std::sync::RwLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Sender};

use super::mapping;
use super::source::Region;
use crate::error::SourceError;
use pinpool_os::host::{self, GRANULE_BYTES, PAGE_BYTES};
use pinpool_os::threads;

/// Number of bits in a node mask; no kernel supports more nodes.
const NODE_LIMIT: u32 = 1024;

/// Bytes that a thread fills in one kernel call. The chunks are short because no other thread can change the address space during
/// such a call, which blocks threads that start and drivers that map memory.
const CHUNK_BYTES: usize = GRANULE_BYTES;

/// Returns whether `node` is one of several NUMA nodes. `root` is the file system root: `/` except in tests.
pub(super) fn one_of_several(root: &Path, node: u32) -> bool {
    let nodes = host::numa_nodes(root);
    nodes.len() > 1 && nodes.contains(&node) && node < NODE_LIMIT
}

/// Places the pages of this mapping on `node`, if set, when they are touched. The kernel rounds `bytes` up to whole pages.
#[cfg(target_os = "linux")]
pub(super) fn place(start: NonNull<u8>, bytes: usize, node: Option<u32>) {
    let Some(node) = node else { return };
    let mut mask = [0_u64; (NODE_LIMIT / 64) as usize];
    mask[(node / 64) as usize] = 1 << (node % 64);
    let (policy, bits) = (libc::MPOL_PREFERRED, u64::from(NODE_LIMIT) + 1);
    // SAFETY: the kernel reads the mask, which has `bits - 1` bits (the kernel reads one bit fewer than it is passed), and
    // only changes the node from which untouched pages of the caller's mapping come.
    let _refused = unsafe { libc::syscall(libc::SYS_mbind, start.as_ptr(), bytes, policy, mask.as_ptr(), bits, 0_u32) };
}

/// Does nothing: on other systems pages are not placed.
#[cfg(not(target_os = "linux"))]
pub(super) fn place(_start: NonNull<u8>, _bytes: usize, _node: Option<u32>) {}

/// Makes every page of `region` present and zero, on `node` if it is set, with `threads` threads. Calls `progress` on
/// the calling thread with the bytes done so far.
///
/// # Safety
///
/// `region` must be a new mapping: it reads as zero, and nothing else uses it.
pub(super) unsafe fn populate(
    region: &Region,
    threads: usize,
    node: Option<u32>,
    progress: &dyn Fn(usize),
) -> Result<(), SourceError> {
    place(region.start(), region.len_bytes(), node);
    let next_offset = AtomicUsize::new(0);
    let (report, reports) = mpsc::channel();
    // All threads start before the first one populates, because a starting thread must change the address space, and populating
    // prevents this.
    let barrier = RwLock::new(());
    threads::scope(|scope| {
        let closed = barrier.write();
        let spawn = |_: &usize| {
            let (next_offset, report, barrier) = (&next_offset, report.clone(), &barrier);
            let fill_chunks = move || {
                // This message says that the thread has started. The send cannot fail, because the receiver outlives this scope.
                let _ = report.send(Ok(0));
                drop(barrier.read());
                fill(region, next_offset, &report);
            };
            scope.spawn(c"pinpool-populate", fill_chunks).is_ok()
        };
        // Starts up to `threads` threads, as many as the system allows. If no thread starts, this thread does the work, and
        // reports progress afterwards.
        let spawned = (0..threads.clamp(1, region.len_bytes().div_ceil(CHUNK_BYTES))).filter(spawn).count();
        reports.iter().take(spawned).for_each(drop);
        drop(closed);
        if spawned == 0 {
            fill(region, &next_offset, &report);
        }
        drop(report);
        let mut done_bytes = 0;
        reports.into_iter().try_for_each(|filled| {
            done_bytes += filled?;
            progress(done_bytes);
            Ok::<_, SourceError>(())
        })?;
        // Bytes are missing if a thread has panicked.
        let whole = done_bytes == region.len_bytes();
        if whole { Ok(()) } else { Err(SourceError::new("populate", "a thread ended before its pages were there")) }
    })
}

/// Fills one chunk after another until none is left, and reports each chunk. After an error all threads stop.
fn fill(region: &Region, next_offset: &AtomicUsize, report: &Sender<Result<usize, SourceError>>) {
    let len_bytes = region.len_bytes();
    loop {
        // Relaxed: the addition alone gives each chunk to one thread; the end of the scope orders the writes.
        let offset = next_offset.fetch_add(CHUNK_BYTES, Ordering::Relaxed);
        if offset >= len_bytes {
            return;
        }
        let bytes = CHUNK_BYTES.min(len_bytes - offset);
        // SAFETY: inside the region, checked above.
        let filled = make_present(unsafe { region.start().add(offset) }, bytes);
        let filled = filled.map(|()| bytes).inspect_err(|_| {
            // Relaxed: a thread that misses this store fills one more chunk, which is harmless.
            next_offset.store(len_bytes, Ordering::Relaxed);
        });
        // The receiver is gone after an error, or when `progress` unwinds.
        if report.send(filled).is_err() {
            return;
        }
    }
}

fn make_present(start: NonNull<u8>, bytes: usize) -> Result<(), SourceError> {
    if cfg!(miri) {
        touch(start, bytes);
        return Ok(());
    }
    loop {
        let Err(error) = mapping::advise(start, bytes, mapping::linux::MADV_POPULATE_WRITE) else { return Ok(()) };
        match error.code().and_then(|code| i32::try_from(code).ok()) {
            Some(libc::EINTR | libc::EAGAIN) => {}
            // Linux before 5.14 and other systems lack this advice.
            Some(libc::EINVAL) => {
                touch(start, bytes);
                return Ok(());
            }
            _ => return Err(mapping::with_memory_remedy(error, bytes)),
        }
    }
}

fn touch(start: NonNull<u8>, bytes: usize) {
    for offset in (0..bytes).step_by(PAGE_BYTES) {
        // SAFETY: inside the chunk, by the bound of the loop.
        let page = unsafe { start.add(offset) };
        // SAFETY: mapped, writable and used by this thread alone; it reads as zero already. Volatile, so that the compiler
        // keeps the write.
        unsafe { page.write_volatile(0) };
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn every_chunk_is_filled_once_and_reported_in_order() {
        const BYTES: usize = (9 << 20) + 5;
        for threads in [0, 1, 3, 100] {
            let region = mapping::map_huge(BYTES, 0).unwrap();
            let reported = RefCell::new(Vec::new());
            // SAFETY: just mapped.
            unsafe { populate(&region, threads, None, &|bytes| reported.borrow_mut().push(bytes)) }.unwrap();
            let reported = reported.into_inner();
            assert!(reported.is_sorted_by(|before, after| before < after), "{reported:?}");
            assert_eq!((reported.len(), reported.last()), (BYTES.div_ceil(CHUNK_BYTES), Some(&BYTES)));
            #[cfg(not(miri))]
            {
                let mut present = vec![0_u8; BYTES.div_ceil(PAGE_BYTES)];
                // SAFETY: the kernel writes one byte for each page, and `present` has as many.
                let status = unsafe { libc::mincore(region.start().as_ptr().cast(), BYTES, present.as_mut_ptr()) };
                assert!(status == 0 && present.iter().all(|byte| byte & 1 == 1));
            }
            // SAFETY: mapped above, no reference into it was made.
            unsafe { mapping::unmap(&region) }.unwrap();
        }
    }

    #[cfg(not(miri))]
    #[test]
    fn an_error_ends_the_work_of_all_threads() {
        use std::os::fd::AsRawFd;

        const BYTES: usize = 16 << 20;
        let region = mapping::map_huge(BYTES, 0).unwrap();
        let beyond_file = region.start().as_ptr().wrapping_add(PAGE_BYTES).cast();
        let empty_file = tempfile::tempfile().unwrap();
        let (file, flags) = (empty_file.as_raw_fd(), libc::MAP_SHARED | libc::MAP_FIXED);
        // SAFETY: a page of the region made above, which nothing uses.
        let mapped = unsafe { libc::mmap(beyond_file, PAGE_BYTES, mapping::READ_WRITE, flags, file, 0) };
        assert_eq!(mapped, beyond_file);
        let reported = std::cell::Cell::new(0);
        // SAFETY: just mapped, except for a page beyond the end of its file, which the kernel cannot make present.
        let error = unsafe { populate(&region, 1, None, &|bytes| reported.set(bytes)) }.unwrap_err();
        assert_eq!((error.code(), reported.get()), (Some(libc::EFAULT.into()), 0));
        // SAFETY: mapped above, no reference into it was made.
        unsafe { mapping::unmap(&region) }.unwrap();
    }

    #[cfg(not(miri))]
    #[test]
    fn one_node_is_no_placement() {
        let with_nodes = |nodes| host::tree::of(&[("/sys/devices/system/node/online", nodes)]);
        assert!(!one_of_several(with_nodes("0\n").path(), 0));
        let root = with_nodes("0-1\n");
        assert!(one_of_several(root.path(), 1) && !one_of_several(root.path(), 2));
    }

    #[cfg(not(miri))]
    #[test]
    fn pages_carry_the_policy() {
        let region = mapping::map_huge(4 * PAGE_BYTES, 0).unwrap();
        // Every machine has node 0.
        place(region.start(), 4 * PAGE_BYTES, Some(0));
        let maps = std::fs::read_to_string("/proc/self/numa_maps").unwrap_or_default();
        let address = format!("{:x} ", region.start().as_ptr().addr());
        let line = maps.lines().find(|line| line.starts_with(&address));
        // Kernels without nodes have no such file.
        assert!(maps.is_empty() || line.is_some_and(|line| line.contains("prefer")), "{line:?}");
        // SAFETY: mapped above, no reference into it was made.
        unsafe { mapping::unmap(&region) }.unwrap();
    }
}
