//! The backends without a driver: the pages that they use, and the state after a failed step.
#![allow(unsafe_code)] // Commits, locks and releases memory by hand.
#![allow(clippy::print_stdout)] // Prints why it skips.

use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::time::Duration;

use pinpool::source::{HeapSource, PAGE_BYTES, Source, SourceError};
use pinpool::unstable::backend::{AddressRange, BuiltInSource, VirtualMemory};
use pinpool::{Backend, OnFull, PinnedBuf, PinnedBy, Pool};
use pinpool_os::format::Size;

use crate::child::alone;

/// Granules of a range of `source`, in pages. The first and the last page stay uncommitted, so that the kernel merges no
/// neighbor with the counted ones.
struct Pages<'source> {
    source: &'source dyn VirtualMemory,
    range: AddressRange,
}

impl<'source> Pages<'source> {
    fn reserve(source: &'source dyn VirtualMemory, count: usize) -> Self {
        Self { source, range: source.reserve_addresses((count + 2) * PAGE_BYTES).unwrap() }
    }

    fn commit(&self, first: usize, count: usize) -> Result<(), SourceError> {
        // SAFETY: each test commits only uncommitted pages.
        unsafe { self.source.commit(&self.range, (first + 1) * PAGE_BYTES, count * PAGE_BYTES) }
    }

    fn decommit(&self, first: usize, count: usize) -> Result<(), SourceError> {
        // SAFETY: each test decommits only committed pages, and holds no slice of them.
        unsafe { self.source.decommit(&self.range, (first + 1) * PAGE_BYTES, count * PAGE_BYTES) }
    }

    fn start(&self, page: usize) -> NonNull<u8> {
        self.range.at((page + 1) * PAGE_BYTES, PAGE_BYTES).unwrap()
    }

    /// Accessible, resident and locked KiB, as the kernel counts them.
    fn kib(&self) -> [u64; 3] {
        let start = self.range.start().as_ptr().addr();
        let end = start + self.range.len_bytes();
        let mappings = mappings().into_iter().filter(|(addresses, _)| addresses.start < end && start < addresses.end);
        mappings.fold([0; 3], |sum, (addresses, kib)| {
            let inside = start <= addresses.start && addresses.end <= end;
            assert!(inside || kib == [0; 3], "{:?} was merged with a neighbor", self.range);
            [sum[0] + kib[0], sum[1] + kib[1], sum[2] + kib[2]]
        })
    }

    fn unreserve(self) {
        // SAFETY: no test uses the range after this call.
        unsafe { self.source.release_addresses(self.range) }.unwrap();
    }
}

/// The mappings of this process, with their accessible, resident and locked KiB.
fn mappings() -> Vec<(Range<usize>, [u64; 3])> {
    let mut mappings: Vec<(Range<usize>, [u64; 3])> = Vec::new();
    for line in std::fs::read_to_string("/proc/self/smaps").unwrap().lines() {
        let mut words = line.split_ascii_whitespace();
        let (first, second) = (words.next().unwrap(), words.next().unwrap_or_default());
        if let Some((from, to)) = first.split_once('-') {
            let [from, to] = [from, to].map(|address| usize::from_str_radix(address, 16).unwrap());
            let accessible = if second.starts_with("rw") { (to - from) as u64 >> 10 } else { 0 };
            mappings.push((from..to, [accessible, 0, 0]));
        } else if let Some((_, kib)) = mappings.last_mut() {
            match first {
                "Rss:" => kib[1] = second.parse().unwrap(),
                "Locked:" => kib[2] = second.parse().unwrap(),
                _ => {}
            }
        }
    }
    mappings
}

#[test]
fn memory_comes_with_a_touch_and_goes_with_the_decommit() {
    const PAGES: usize = (64 << 20) / PAGE_BYTES;
    let source = HeapSource::new();
    let pages = Pages::reserve(&source, PAGES);
    assert_eq!(pages.kib(), [0, 0, 0]);
    pages.commit(0, PAGES).unwrap();
    // SAFETY: committed, and used by this test alone.
    unsafe { pages.start(0).write_bytes(1, PAGES * PAGE_BYTES) };
    assert_eq!(pages.kib(), [64 << 10, 64 << 10, 0]);
    pages.decommit(0, PAGES).unwrap();
    assert_eq!(pages.kib(), [0, 0, 0]);
    pages.unreserve();
}

#[test]
fn failed_commits_and_decommits_change_nothing() {
    let source = HeapSource::new();
    let pages = Pages::reserve(&source, 4);
    // A page of a read-only file: the kernel makes the pages before it writable, then fails.
    let (file, page) = (File::open("/proc/self/exe").unwrap(), pages.start(2).as_ptr().cast());
    let (access, flags) = (libc::PROT_NONE, libc::MAP_SHARED | libc::MAP_FIXED);
    // SAFETY: the third page, which nothing uses.
    assert_eq!(unsafe { libc::mmap(page, PAGE_BYTES, access, flags, file.as_raw_fd(), 0) }, page);
    assert!(pages.commit(0, 4).is_err());
    assert_eq!(pages.kib()[0], 0);
    pages.commit(0, 2).unwrap();
    assert_eq!(pages.kib()[0], 8);
    pages.unreserve();

    let pages = Pages::reserve(&source, 4);
    pages.commit(0, 4).unwrap();
    let locked = pages.start(2).as_ptr().cast();
    // The kernel does not discard locked pages.
    // SAFETY: a committed page of the range.
    assert_eq!(unsafe { libc::mlock(locked, PAGE_BYTES) }, 0);
    assert!(pages.decommit(0, 4).is_err());
    assert_eq!(pages.kib()[0], 16);
    // SAFETY: as above.
    assert_eq!(unsafe { libc::munlock(locked, PAGE_BYTES) }, 0);
    pages.decommit(0, 4).unwrap();
    assert_eq!(pages.kib()[0], 0);
    pages.unreserve();
}

#[test]
fn mlock_locks_the_pages_of_regions() {
    let source = HeapSource::locked();
    for region in [source.acquire(5 * PAGE_BYTES), source.acquire_bulk(5 * PAGE_BYTES, 2, &|_| {})] {
        let region = region.unwrap();
        let start = region.start().as_ptr().addr();
        let (_, kib) = mappings().into_iter().find(|(addresses, _)| addresses.contains(&start)).unwrap();
        assert!(kib[2] >= 20);
        // SAFETY: acquired above, and no reference into the region exists.
        unsafe { source.release(&region) }.unwrap();
    }
}

#[test]
fn mlock_locks_granules_and_releases_them() {
    // The limit applies to the process.
    alone(|| {
        let source = HeapSource::locked();
        let limit = rlimit_memlock().map_or(64 << 20, |limit_bytes| limit_bytes / 4).min(64 << 20);
        let count = limit / PAGE_BYTES / 2 * 2;
        let kib = (count * PAGE_BYTES) as u64 >> 10;
        let pages = Pages::reserve(&source, count);
        pages.commit(0, count).unwrap();
        assert_eq!(pages.kib(), [kib; 3]);
        pages.decommit(0, count / 2).unwrap();
        assert_eq!(pages.kib(), [kib / 2; 3]);
        pages.decommit(count / 2, count / 2).unwrap();
        assert_eq!(pages.kib(), [0; 3]);
        pages.unreserve();
    });
}

#[test]
fn memory_that_mlock_locks_is_pinned_by_the_kernel() {
    const MAX_BYTES: u64 = 4 << 20;
    // The limit is the process's.
    alone(|| {
        let builder = Pool::builder().without_env().backend(Backend::Mlock).max_bytes(MAX_BYTES);
        let pool = builder.on_full(OnFull::Pageable).wait(Duration::ZERO).build().unwrap();
        if pool.stats().limits.max_bytes < Some(MAX_BYTES) {
            println!("skipped: this process may not lock {MAX_BYTES} B");
            return;
        }
        let held = [(); 2].map(|()| pool.get(3 << 20).unwrap());
        assert_eq!(held.each_ref().map(PinnedBuf::pinned_by), [Some(PinnedBy::Kernel), None]);
    });
}

#[test]
fn a_lock_over_the_limit_names_the_limit_and_changes_nothing() {
    let Some(limit_bytes) = rlimit_memlock() else {
        println!("skipped: there is no RLIMIT_MEMLOCK here");
        return;
    };
    let count = limit_bytes.div_ceil(PAGE_BYTES) + 1;
    let over_bytes = count * PAGE_BYTES;
    // On a separate thread: capabilities are per thread.
    let refusals = std::thread::spawn(move || {
        drop_ipc_lock();
        let source = HeapSource::locked();
        let pages = Pages::reserve(&source, count);
        let refusal = pages.commit(0, count).unwrap_err().to_string();
        let [accessible_kib, _, locked_kib] = pages.kib();
        assert_eq!((accessible_kib, locked_kib), (0, 0));
        pages.unreserve();
        let progress = |_| panic!("a page was touched before the limit was checked");
        [refusal, source.acquire_bulk(over_bytes, 2, &progress).unwrap_err().to_string()]
    });
    for refusal in refusals.join().unwrap() {
        let expected = format!("{} refused, RLIMIT_MEMLOCK is {}", Size(over_bytes as u64), Size(limit_bytes as u64));
        assert!(refusal.contains(&expected), "{refusal}");
    }
}

/// `RLIMIT_MEMLOCK` in bytes; `None` if there is no limit.
fn rlimit_memlock() -> Option<usize> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a live `rlimit` for the length of the call.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) }, 0);
    (limit.rlim_cur != libc::RLIM_INFINITY).then(|| usize::try_from(limit.rlim_cur).unwrap())
}

/// Drops `CAP_IPC_LOCK` from the calling thread.
fn drop_ipc_lock() {
    const VERSION_3: u32 = 0x2008_0522;
    const IPC_LOCK: u32 = 14;
    let header = [VERSION_3, 0];
    // Effective, permitted, inheritable sets of capabilities 0 to 31, then of 32 to 63.
    let mut sets = [0_u32; 6];
    // SAFETY: the kernel writes the six words of version 3.
    let got = unsafe { libc::syscall(libc::SYS_capget, header.as_ptr(), sets.as_mut_ptr()) };
    sets[0] &= !(1 << IPC_LOCK);
    // SAFETY: the kernel reads the same six words.
    let set = unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), sets.as_ptr()) };
    assert_eq!((got, set), (0, 0));
}
