//! The contract of [`Source`], as a test that every implementation runs.
#![allow(unsafe_code)] // Reads and writes what a source hands out.

use std::collections::HashSet;

use super::{AddressRange, PAGE_BYTES, RANGE_ALIGN_BYTES, Region, Source, Subrange, VirtualMemory};

const LENGTHS: &[usize] =
    if cfg!(miri) { &[1, 4095, 4096, 4097] } else { &[1, 2, 4095, 4096, 4097, 65_536, 65_537, 1 << 20, (1 << 20) + 1] };
const ROUNDS: usize = if cfg!(miri) { 3 } else { 20 };

/// Checks the whole contract of [`Source`] on `source`, and that of [`VirtualMemory`] if it has one.
///
/// The source must have 8 MiB to give, and 16 granules of virtual memory.
///
/// # Panics
///
/// If the source breaks its contract; the message names the rule, as in `C3`.
pub fn check_source(source: &dyn Source) {
    regions_are_aligned_readable_writable_and_apart(source);
    ids_never_recur(source);
    held_bytes_cover_the_request_and_never_fall(source);
    many_threads_at_once_get_memory_of_their_own(source);
    a_fast_region_is_as_good_and_its_progress_is_heard(source);
    if let Some(spans) = source.virtual_memory() {
        check_virtual_memory(spans);
    }
}

fn bytes(region: &mut Region) -> &mut [u8] {
    // SAFETY: C1: mapped and ours alone; C2: initialised. The borrow of the receipt keeps it the only slice.
    unsafe { std::slice::from_raw_parts_mut(region.start().as_ptr(), region.len_bytes()) }
}

/// Looks at every byte: what is not mapped ends the process, what was never written the checker under which this runs.
fn can_be_read(bytes: &mut [u8]) -> bool {
    let sum: u64 = bytes.iter().map(|&byte| u64::from(byte)).sum();
    sum <= u64::from(u8::MAX) * bytes.len() as u64
}

fn release(source: &dyn Source, region: Region) {
    // SAFETY: acquired from this source by the suite, and the suite's slices of it are gone.
    unsafe { source.release(region) }.unwrap();
}

fn regions_are_aligned_readable_writable_and_apart(source: &dyn Source) {
    // Twice, so that the second round meets memory that was dirty when it was released.
    for _ in 0..2 {
        let mut regions: Vec<Region> = LENGTHS.iter().map(|&len| source.acquire(len).unwrap()).collect();
        for (mark, (region, &len)) in (1_u8..).zip(regions.iter_mut().zip(LENGTHS)) {
            assert_eq!(region.start().as_ptr() as usize % PAGE_BYTES, 0, "C3: {region:?}");
            assert_eq!(region.len_bytes(), len);
            assert!(can_be_read(bytes(region)), "C2: {region:?}");
            bytes(region).fill(mark);
        }
        for (mark, region) in (1_u8..).zip(regions.iter_mut()) {
            assert!(bytes(region).iter().all(|&byte| byte == mark), "C1: {region:?} is shared");
        }
        regions.into_iter().for_each(|region| release(source, region));
    }
}

fn ids_never_recur(source: &dyn Source) {
    let mut seen = HashSet::new();
    for _ in 0..50 {
        let region = source.acquire(PAGE_BYTES).unwrap();
        assert!(seen.insert(region.id()), "C4: {region:?}");
        release(source, region);
    }
}

fn held_bytes_cover_the_request_and_never_fall(source: &dyn Source) {
    let mut before = 0;
    for &len in LENGTHS {
        let held = source.held_bytes(len);
        assert!(held >= len && held >= before, "C5: {held} for {len}, {before} before");
        before = held;
    }
}

fn many_threads_at_once_get_memory_of_their_own(source: &dyn Source) {
    std::thread::scope(|scope| {
        for mark in 1..=4_u8 {
            scope.spawn(move || {
                for _ in 0..ROUNDS {
                    let mut region = source.acquire(3 * PAGE_BYTES).unwrap();
                    bytes(&mut region).fill(mark);
                    std::thread::yield_now();
                    assert!(bytes(&mut region).iter().all(|&byte| byte == mark), "C1, C6");
                    release(source, region);
                }
            });
        }
    });
}

fn a_fast_region_is_as_good_and_its_progress_is_heard(source: &dyn Source) {
    const LEN: usize = if cfg!(miri) { 5 * PAGE_BYTES + 1 } else { (1 << 20) + 1 };
    for threads in [1, 4] {
        let heard = std::cell::RefCell::new(Vec::new());
        let mut region = source.acquire_fast(LEN, threads, &|bytes| heard.borrow_mut().push(bytes)).unwrap();
        let heard = heard.into_inner();
        assert!(heard.is_sorted_by(|before, after| before < after) && heard.last() == Some(&LEN), "{heard:?}");
        assert!(region.start().as_ptr().addr().is_multiple_of(PAGE_BYTES), "C3: {region:?}");
        assert!(can_be_read(bytes(&mut region)), "C2: {region:?}");
        bytes(&mut region).fill(1);
        release(source, region);
    }
}

fn check_virtual_memory(spans: &dyn VirtualMemory) {
    ranges_are_aligned_and_apart(spans);
    granules_are_readable_after_every_lock_and_apart(spans);
    any_granules_can_be_unlocked_however_they_were_locked(spans);
    moved_granules_are_usable_and_leave_their_place_free(spans);
    scattered_granules_become_one_run(spans);
    many_threads_lock_granules_of_their_own(spans);
}

/// A range counted in granules, all of them unlocked again by the end.
struct Granules<'span> {
    spans: &'span dyn VirtualMemory,
    range: AddressRange,
    granule_bytes: usize,
}

impl<'span> Granules<'span> {
    fn reserve(spans: &'span dyn VirtualMemory, granules: usize) -> Self {
        let granule_bytes = spans.granule_bytes();
        Self { spans, range: spans.reserve(granules * granule_bytes).unwrap(), granule_bytes }
    }

    fn commit(&self, first: usize, count: usize) {
        // SAFETY: each test locks only what is not locked.
        unsafe { self.spans.commit(&self.range, first * self.granule_bytes, count * self.granule_bytes) }.unwrap();
    }

    fn decommit(&self, first: usize, count: usize) {
        // SAFETY: each test unlocks only what is locked, and holds no slice of it.
        unsafe { self.spans.decommit(&self.range, first * self.granule_bytes, count * self.granule_bytes) }.unwrap();
    }

    /// Takes granules one by one to a run of them.
    fn gather<const N: usize>(&self, from: [usize; N], to: usize) {
        let piece = |granule| Subrange { offset: granule * self.granule_bytes, bytes: self.granule_bytes };
        // SAFETY: each test moves only what is locked, to where nothing is, and holds no slice of it.
        unsafe { self.spans.remap(&self.range, &from.map(piece), to * self.granule_bytes) }.unwrap();
    }

    fn remap(&self, from: usize, to: usize, count: usize) {
        let [from, to, bytes] = [from, to, count].map(|granules| granules * self.granule_bytes);
        // SAFETY: each test moves only what is locked, to where nothing is, and holds no slice of it.
        unsafe { self.spans.remap(&self.range, &[Subrange { offset: from, bytes }], to) }.unwrap();
    }

    /// The bytes of locked granules: one slice, over all edges between them (S4).
    fn with<R>(&self, first: usize, count: usize, look: impl FnOnce(&mut [u8]) -> R) -> R {
        let bytes = count * self.granule_bytes;
        let start = self.range.at(first * self.granule_bytes, bytes).unwrap();
        // SAFETY: S2: mapped and ours alone; S3: initialised. No test looks at a granule twice at one time.
        look(unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), bytes) })
    }

    fn fill(&self, first: usize, count: usize, mark: u8) {
        self.with(first, count, |bytes| bytes.fill(mark));
    }

    fn is_all(&self, first: usize, count: usize, mark: u8) -> bool {
        self.with(first, count, |bytes| bytes.iter().all(|&byte| byte == mark))
    }

    fn unreserve(self) {
        // SAFETY: each test unlocks all it locked, and its slices are gone.
        unsafe { self.spans.unreserve(self.range) }.unwrap();
    }
}

fn ranges_are_aligned_and_apart(spans: &dyn VirtualMemory) {
    let granule_bytes = spans.granule_bytes();
    assert!(granule_bytes.is_power_of_two() && granule_bytes >= PAGE_BYTES);
    let lengths = [granule_bytes, 3 * granule_bytes, RANGE_ALIGN_BYTES + granule_bytes, 1 << 30];
    let ranges: Vec<AddressRange> = lengths.iter().map(|&len_bytes| spans.reserve(len_bytes).unwrap()).collect();
    let mut ends = Vec::new();
    for (range, len_bytes) in ranges.iter().zip(lengths) {
        assert_eq!((range.start().as_ptr().addr() % RANGE_ALIGN_BYTES, range.len_bytes()), (0, len_bytes), "S1");
        ends.push((range.start().as_ptr().addr(), range.start().as_ptr().addr() + len_bytes));
    }
    ends.sort_unstable();
    assert!(ends.is_sorted_by(|before, after| before.1 <= after.0), "S1: {ends:x?}");
    for range in ranges {
        // SAFETY: reserved above, and never used.
        unsafe { spans.unreserve(range) }.unwrap();
    }
}

fn granules_are_readable_after_every_lock_and_apart(spans: &dyn VirtualMemory) {
    let granules = Granules::reserve(spans, 8);
    granules.commit(0, 1);
    granules.fill(0, 1, 9);
    for mark in 1..=3 {
        granules.commit(1, 2);
        assert!(granules.with(1, 2, can_be_read), "S3");
        granules.fill(1, 2, mark);
        granules.commit(7, 1);
        assert!(granules.with(7, 1, can_be_read), "S3");
        granules.fill(7, 1, mark + 100);
        assert!(granules.is_all(1, 2, mark), "S2");
        granules.decommit(1, 2);
        assert!(granules.is_all(7, 1, mark + 100), "S4: a neighbour was touched");
        granules.decommit(7, 1);
        assert!(granules.is_all(0, 1, 9), "S4: a neighbour was touched");
    }
    granules.decommit(0, 1);
    granules.unreserve();
}

fn any_granules_can_be_unlocked_however_they_were_locked(spans: &dyn VirtualMemory) {
    let granules = Granules::reserve(spans, 8);
    granules.commit(0, 4);
    granules.commit(4, 2);
    granules.commit(6, 2);
    granules.fill(0, 8, 5);
    // The middle of one lock; then the end of one, all of the next and the start of a third.
    granules.decommit(1, 2);
    granules.decommit(3, 4);
    assert!(granules.is_all(0, 1, 5) && granules.is_all(7, 1, 5), "S4");
    granules.commit(1, 6);
    assert!(granules.with(1, 6, can_be_read), "S3");
    granules.fill(0, 8, 6);
    assert!(granules.is_all(0, 8, 6), "S4: one memory");
    granules.decommit(0, 8);
    granules.unreserve();
}

fn moved_granules_are_usable_and_leave_their_place_free(spans: &dyn VirtualMemory) {
    let granules = Granules::reserve(spans, 8);
    granules.commit(0, 4);
    granules.fill(0, 4, 1);
    granules.remap(1, 5, 2);
    assert!(granules.is_all(0, 1, 1) && granules.is_all(3, 1, 1), "S4: a neighbour was touched");
    // Whatever they hold (a source may bring the content along).
    assert!(granules.with(5, 2, can_be_read), "S3");
    granules.fill(5, 2, 2);
    granules.commit(1, 2);
    assert!(granules.with(1, 2, can_be_read), "S3");
    assert!(granules.is_all(5, 2, 2), "S2");
    granules.decommit(0, 4);
    granules.decommit(5, 2);
    granules.unreserve();
}

fn scattered_granules_become_one_run(spans: &dyn VirtualMemory) {
    let granules = Granules::reserve(spans, 16);
    granules.commit(0, 8);
    granules.fill(0, 8, 1);
    granules.gather([6, 0, 3], 10);
    assert!(granules.is_all(1, 2, 1) && granules.is_all(4, 2, 1) && granules.is_all(7, 1, 1), "S4");
    granules.fill(10, 3, 2);
    granules.commit(3, 1);
    granules.fill(3, 1, 3);
    assert!(granules.is_all(10, 3, 2), "S4: one memory");
    granules.decommit(11, 1);
    for (first, count) in [(1, 5), (7, 1), (10, 1), (12, 1)] {
        granules.decommit(first, count);
    }
    granules.unreserve();
}

fn many_threads_lock_granules_of_their_own(spans: &dyn VirtualMemory) {
    let granules = Granules::reserve(spans, 16);
    std::thread::scope(|scope| {
        for (first, mark) in (0..16).step_by(4).zip(1..) {
            let granules = &granules;
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    granules.commit(first, 2);
                    assert!(granules.with(first, 2, can_be_read), "S3, S6");
                    granules.fill(first, 2, mark);
                    std::thread::yield_now();
                    assert!(granules.is_all(first, 2, mark), "S2, S6");
                    if round % 2 == 0 {
                        granules.remap(first, first + 2, 2);
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
