//! The contract of [`Source`], as a test that every implementation runs.
#![allow(unsafe_code)] // Reads and writes what a source hands out.

use std::collections::HashSet;

use super::{PAGE_BYTES, Region, Source};

mod virtual_memory;

const LENGTHS: &[usize] =
    if cfg!(miri) { &[1, 4095, 4096, 4097] } else { &[1, 2, 4095, 4096, 4097, 65_536, 65_537, 1 << 20, (1 << 20) + 1] };
const ROUNDS: usize = if cfg!(miri) { 3 } else { 20 };

/// Runs the whole contract on `source`, which must have 8 MiB to give.
pub(crate) fn run(source: &dyn Source) {
    regions_are_aligned_readable_writable_and_apart(source);
    ids_never_recur(source);
    held_bytes_cover_the_request_and_never_fall(source);
    many_threads_at_once_get_memory_of_their_own(source);
    a_fast_region_is_as_good_and_its_progress_is_heard(source);
    if let Some(spans) = source.virtual_memory() {
        virtual_memory::run(spans);
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
