//! The contracts of [`Source`] and [`VirtualMemory`], as a test for every implementation.
#![allow(unsafe_code)] // Reads and writes the memory of a source.

use std::collections::HashSet;

use pinpool::source::{PAGE_BYTES, Region, Source};
use pinpool::unstable::backend::{AddressRange, BuiltInSource, RANGE_ALIGN_BYTES, Subrange, VirtualMemory};

const LENGTHS: &[usize] =
    if cfg!(miri) { &[1, 4095, 4096, 4097] } else { &[1, 2, 4095, 4096, 4097, 65_536, 65_537, 1 << 20, (1 << 20) + 1] };
const ROUNDS: usize = if cfg!(miri) { 3 } else { 20 };

/// Checks the testable rules of the contract of [`Source`]: aligned, initialized and disjoint memory, unique IDs, `held_bytes`
/// that never falls, and concurrent threads. Also checks virtual memory, if the source has it.
///
/// The source must be able to provide 8 MiB, and 16 granules of virtual memory.
///
/// # Panics
///
/// If the source violates its contract; the message names the rule, as in `source-C3`.
pub fn check_source(source: &dyn Source) {
    regions_are_aligned_usable_and_disjoint(source);
    ids_are_unique(source);
    held_bytes_cover_the_request_and_never_fall(source);
    concurrent_threads_get_disjoint_regions(source);
    bulk_regions_keep_the_contract_and_report_progress(source);
    if let Some(memory) = source.virtual_memory() {
        check_virtual_memory(memory);
    }
}

fn bytes(region: &mut Region) -> &mut [u8] {
    // SAFETY: source-C1: the region is mapped and belongs to the caller alone; source-C2: its bytes are initialized. The
    // borrow of the region makes this the only slice.
    unsafe { std::slice::from_raw_parts_mut(region.start().as_ptr(), region.len_bytes()) }
}

/// Returns whether every byte can be read: reading an unmapped byte ends the process, and an uninitialized byte fails under Miri.
fn can_be_read(bytes: &mut [u8]) -> bool {
    bytes.iter().map(|&byte| u64::from(byte)).sum::<u64>() <= u64::from(u8::MAX) * bytes.len() as u64
}

fn release(source: &dyn Source, region: Region) {
    // SAFETY: the suite acquired the region from this source, and has no slice of it any more.
    unsafe { source.release(&region) }.unwrap();
}

fn regions_are_aligned_usable_and_disjoint(source: &dyn Source) {
    // Twice, so that the second round may get memory that was dirty when it was released.
    for _ in 0..2 {
        let mut regions: Vec<Region> = LENGTHS.iter().map(|&len| source.acquire(len).unwrap()).collect();
        for (mark, (region, &len)) in (1_u8..).zip(regions.iter_mut().zip(LENGTHS)) {
            assert_eq!(region.start().as_ptr() as usize % PAGE_BYTES, 0, "source-C3: {region:?}");
            assert_eq!(region.len_bytes(), len);
            assert!(can_be_read(bytes(region)), "source-C2: {region:?}");
            bytes(region).fill(mark);
        }
        for (mark, region) in (1_u8..).zip(regions.iter_mut()) {
            assert!(bytes(region).iter().all(|&byte| byte == mark), "source-C1: {region:?} is shared");
        }
        regions.into_iter().for_each(|region| release(source, region));
    }
}

fn ids_are_unique(source: &dyn Source) {
    let mut seen = HashSet::new();
    for _ in 0..50 {
        let region = source.acquire(PAGE_BYTES).unwrap();
        assert!(seen.insert(region.id()), "source-C4: {region:?}");
        release(source, region);
    }
}

fn held_bytes_cover_the_request_and_never_fall(source: &dyn Source) {
    let mut before = 0;
    for &len in LENGTHS {
        let held = source.held_bytes(len);
        assert!(held >= len && held >= before, "source-C5: {held} for {len}, {before} before");
        before = held;
    }
}

fn concurrent_threads_get_disjoint_regions(source: &dyn Source) {
    std::thread::scope(|scope| {
        for mark in 1..=4_u8 {
            scope.spawn(move || {
                for _ in 0..ROUNDS {
                    let mut region = source.acquire(3 * PAGE_BYTES).unwrap();
                    bytes(&mut region).fill(mark);
                    std::thread::yield_now();
                    assert!(bytes(&mut region).iter().all(|&byte| byte == mark), "source-C1, source-C6");
                    release(source, region);
                }
            });
        }
    });
}

fn bulk_regions_keep_the_contract_and_report_progress(source: &dyn Source) {
    const LEN: usize = if cfg!(miri) { 5 * PAGE_BYTES + 1 } else { (1 << 20) + 1 };
    for threads in [1, 4] {
        let reported = std::cell::RefCell::new(Vec::new());
        let mut region = source.acquire_bulk(LEN, threads, &|bytes| reported.borrow_mut().push(bytes)).unwrap();
        let reported = reported.into_inner();
        assert!(reported.is_sorted_by(|before, after| before < after) && reported.last() == Some(&LEN), "{reported:?}");
        assert!(region.start().as_ptr().addr().is_multiple_of(PAGE_BYTES), "source-C3: {region:?}");
        assert!(can_be_read(bytes(&mut region)), "source-C2: {region:?}");
        bytes(&mut region).fill(1);
        release(source, region);
    }
}

fn check_virtual_memory(memory: &dyn VirtualMemory) {
    ranges_are_aligned_and_disjoint(memory);
    granules_are_readable_after_every_commit_and_independent(memory);
    any_granules_can_be_decommitted_in_any_grouping(memory);
    remapped_granules_are_usable_and_leave_their_addresses_free(memory);
    separate_granules_become_consecutive(memory);
    concurrent_threads_commit_disjoint_granules(memory);
}

/// An address range counted in granules. Each check decommits all of its granules before it ends.
struct GranuleRange<'source> {
    memory: &'source dyn VirtualMemory,
    range: AddressRange,
    granule_bytes: usize,
}

impl<'source> GranuleRange<'source> {
    fn reserve(memory: &'source dyn VirtualMemory, granules: usize) -> Self {
        let granule_bytes = memory.granule_bytes();
        Self { memory, range: memory.reserve_addresses(granules * granule_bytes).unwrap(), granule_bytes }
    }

    fn commit(&self, first: usize, count: usize) {
        // SAFETY: each check commits only granules that are not committed.
        unsafe { self.memory.commit(&self.range, first * self.granule_bytes, count * self.granule_bytes) }.unwrap();
    }

    fn decommit(&self, first: usize, count: usize) {
        // SAFETY: each check decommits only committed granules, and has no slice of them.
        unsafe { self.memory.decommit(&self.range, first * self.granule_bytes, count * self.granule_bytes) }.unwrap();
    }

    /// Remaps pieces of `(first, count)` granules to consecutive granules that begin at `to`.
    fn remap(&self, from: &[(usize, usize)], to: usize) {
        let piece =
            |&(first, count)| Subrange { offset: first * self.granule_bytes, bytes: count * self.granule_bytes };
        let from: Vec<Subrange> = from.iter().map(piece).collect();
        // SAFETY: each check remaps only committed granules to granules that are not committed, and has no slice of them.
        unsafe { self.memory.remap(&self.range, &from, to * self.granule_bytes) }.unwrap();
    }

    /// Calls `access` with the bytes of committed granules, as one slice across all of them (vm-S4).
    fn with<R>(&self, first: usize, count: usize, access: impl FnOnce(&mut [u8]) -> R) -> R {
        let bytes = count * self.granule_bytes;
        let start = self.range.at(first * self.granule_bytes, bytes).unwrap();
        // SAFETY: vm-S2: the granules are mapped and belong to the caller alone; vm-S3: their bytes are initialized. No check
        // uses a granule in two slices at once.
        access(unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), bytes) })
    }

    fn fill(&self, first: usize, count: usize, mark: u8) {
        self.with(first, count, |bytes| bytes.fill(mark));
    }

    fn is_all(&self, first: usize, count: usize, mark: u8) -> bool {
        self.with(first, count, |bytes| bytes.iter().all(|&byte| byte == mark))
    }

    fn unreserve(self) {
        // SAFETY: each check decommits all that it committed, and its slices are gone.
        unsafe { self.memory.release_addresses(self.range) }.unwrap();
    }
}

fn ranges_are_aligned_and_disjoint(memory: &dyn VirtualMemory) {
    let granule_bytes = memory.granule_bytes();
    assert!(granule_bytes.is_power_of_two() && granule_bytes >= PAGE_BYTES);
    let lengths = [granule_bytes, 3 * granule_bytes, RANGE_ALIGN_BYTES + granule_bytes, 1 << 30];
    let ranges: Vec<AddressRange> =
        lengths.iter().map(|&len_bytes| memory.reserve_addresses(len_bytes).unwrap()).collect();
    let mut ends = Vec::new();
    for (range, len_bytes) in ranges.iter().zip(lengths) {
        assert_eq!((range.start().as_ptr().addr() % RANGE_ALIGN_BYTES, range.len_bytes()), (0, len_bytes), "vm-S1");
        ends.push((range.start().as_ptr().addr(), range.start().as_ptr().addr() + len_bytes));
    }
    ends.sort_unstable();
    assert!(ends.is_sorted_by(|before, after| before.1 <= after.0), "vm-S1: {ends:x?}");
    for range in ranges {
        // SAFETY: the range was reserved above, and was never used.
        unsafe { memory.release_addresses(range) }.unwrap();
    }
}

fn granules_are_readable_after_every_commit_and_independent(memory: &dyn VirtualMemory) {
    let granules = GranuleRange::reserve(memory, 8);
    granules.commit(0, 1);
    granules.fill(0, 1, 9);
    for mark in 1..=3 {
        granules.commit(1, 2);
        assert!(granules.with(1, 2, can_be_read), "vm-S3");
        granules.fill(1, 2, mark);
        granules.commit(7, 1);
        assert!(granules.with(7, 1, can_be_read), "vm-S3");
        granules.fill(7, 1, mark + 100);
        assert!(granules.is_all(1, 2, mark), "vm-S2");
        granules.decommit(1, 2);
        assert!(granules.is_all(7, 1, mark + 100), "vm-S4: a neighbor changed");
        granules.decommit(7, 1);
        assert!(granules.is_all(0, 1, 9), "vm-S4: a neighbor changed");
    }
    granules.decommit(0, 1);
    granules.unreserve();
}

fn any_granules_can_be_decommitted_in_any_grouping(memory: &dyn VirtualMemory) {
    let granules = GranuleRange::reserve(memory, 8);
    granules.commit(0, 4);
    granules.commit(4, 2);
    granules.commit(6, 2);
    granules.fill(0, 8, 5);
    // First the middle of one commit; then the end of that commit, all of the next commit and the start of the third.
    granules.decommit(1, 2);
    granules.decommit(3, 4);
    assert!(granules.is_all(0, 1, 5) && granules.is_all(7, 1, 5), "vm-S4");
    granules.commit(1, 6);
    assert!(granules.with(1, 6, can_be_read), "vm-S3");
    granules.fill(0, 8, 6);
    assert!(granules.is_all(0, 8, 6), "vm-S4: not contiguous");
    granules.decommit(0, 8);
    granules.unreserve();
}

fn remapped_granules_are_usable_and_leave_their_addresses_free(memory: &dyn VirtualMemory) {
    let granules = GranuleRange::reserve(memory, 8);
    granules.commit(0, 4);
    granules.fill(0, 4, 1);
    granules.remap(&[(1, 2)], 5);
    assert!(granules.is_all(0, 1, 1) && granules.is_all(3, 1, 1), "vm-S4: a neighbor changed");
    // The content is unspecified.
    assert!(granules.with(5, 2, can_be_read), "vm-S3");
    granules.fill(5, 2, 2);
    granules.commit(1, 2);
    assert!(granules.with(1, 2, can_be_read), "vm-S3");
    assert!(granules.is_all(5, 2, 2), "vm-S2");
    granules.decommit(0, 4);
    granules.decommit(5, 2);
    granules.unreserve();
}

fn separate_granules_become_consecutive(memory: &dyn VirtualMemory) {
    let granules = GranuleRange::reserve(memory, 16);
    granules.commit(0, 8);
    granules.fill(0, 8, 1);
    granules.remap(&[(6, 1), (0, 1), (3, 1)], 10);
    assert!(granules.is_all(1, 2, 1) && granules.is_all(4, 2, 1) && granules.is_all(7, 1, 1), "vm-S4");
    granules.fill(10, 3, 2);
    granules.commit(3, 1);
    granules.fill(3, 1, 3);
    assert!(granules.is_all(10, 3, 2), "vm-S4: not contiguous");
    granules.decommit(11, 1);
    for (first, count) in [(1, 5), (7, 1), (10, 1), (12, 1)] {
        granules.decommit(first, count);
    }
    granules.unreserve();
}

fn concurrent_threads_commit_disjoint_granules(memory: &dyn VirtualMemory) {
    let granules = GranuleRange::reserve(memory, 16);
    std::thread::scope(|scope| {
        for (first, mark) in (0..16).step_by(4).zip(1..) {
            let granules = &granules;
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    granules.commit(first, 2);
                    assert!(granules.with(first, 2, can_be_read), "vm-S3, vm-S6");
                    granules.fill(first, 2, mark);
                    std::thread::yield_now();
                    assert!(granules.is_all(first, 2, mark), "vm-S2, vm-S6");
                    if round % 2 == 0 {
                        granules.remap(&[(first, 2)], first + 2);
                        granules.decommit(first + 2, 2);
                    } else {
                        granules.decommit(first, 2);
                    }
                }
            });
        }
    });
    granules.unreserve();
}
