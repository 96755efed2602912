//! Granules that a request remaps: the driver calls that it waits for, and the calls that come later.

use std::thread;

use mock_driver::{Code, MockDriver};
use pinpool::unstable::backend::VirtualMemory as _;
use pinpool::{Backend, PinnedBuf, Pool};

use crate::fixture::{Held, MIB, builder, filled, held, loaded};
use crate::sources::{RANGE_GRANULES, VmmRange};
use crate::until::until;

const GRANULE: usize = 2 * MIB;
const CALLS: [&str; 5] = ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease"];

/// How often each of the calls was made since the last reset.
fn calls(driver: &MockDriver) -> [u64; 5] {
    CALLS.map(|name| driver.calls(name))
}

/// A pool of eight granules, and buffers on the granules in `kept`. The other granules are idle.
fn with_kept(driver: &MockDriver, kept: &[usize], has_thread: bool) -> (Pool, Vec<PinnedBuf>) {
    let pool = builder(Backend::Vmm).maintenance_thread(has_thread).max_bytes(8 * GRANULE as u64).build().unwrap();
    let mut bufs: Vec<_> = (0..8).map(|byte| Some(filled(&pool, GRANULE, byte))).collect();
    bufs.sort_by_key(|buf| buf.as_ref().unwrap().as_ptr().addr());
    let kept = kept.iter().map(|&at| bufs[at].take().unwrap()).collect();
    drop(bufs);
    driver.reset();
    (pool, kept)
}

/// Drops the rest of a pool, and checks that it leaves nothing in the driver.
fn check_end(driver: &MockDriver, before: Held, left: impl Sized) {
    drop(left);
    assert_eq!(held(driver), before);
}

fn are_intact(bufs: &[PinnedBuf]) -> bool {
    bufs.iter().all(|buf| {
        let bytes = buf.wait_slice().unwrap();
        bytes.iter().all(|&byte| byte == bytes[0])
    })
}

#[test]
fn a_remap_sets_access_once_and_unmaps_old_addresses_later() {
    let (driver, before) = loaded();
    let (pool, kept) = with_kept(&driver, &[0, 3, 4, 7], false);
    let mut buf = pool.get(4 * GRANULE).unwrap();
    assert_eq!(calls(&driver), [0, 4, 1, 0, 0], "{CALLS:?}");
    buf.wait_slice_mut().unwrap().fill(9);
    assert!(are_intact(&kept));
    assert_eq!(held(&driver).mappings - before.mappings, 12, "four of them twice");
    assert_eq!(held(&driver).pinned_bytes - before.pinned_bytes, pool.stats().memory.held_bytes);
    pool.maintain();
    assert_eq!(calls(&driver), [0, 4, 1, 2, 0], "granules 1 and 2, and 5 and 6, of {CALLS:?}");
    assert_eq!(held(&driver).mappings - before.mappings, 8);
    assert!(buf.wait_slice().unwrap().iter().all(|&byte| byte == 9) && are_intact(&kept));
    pool.maintain();
    assert_eq!(calls(&driver), [0, 4, 1, 2, 0]);
    check_end(&driver, before, (buf, kept, pool));
}

#[test]
fn a_request_returns_while_the_maintenance_thread_unmaps() {
    let (driver, before) = loaded();
    let (pool, kept) = with_kept(&driver, &[1, 3, 5, 7], true);
    let held_call = driver.hold_call("cuMemUnmap");
    let mut buf = pool.get(3 * GRANULE).unwrap();
    held_call.wait_for(1);
    buf.wait_slice_mut().unwrap().fill(9);
    assert_eq!(calls(&driver)[..3], [0, 3, 1]);
    drop(held_call);
    until("the old places are unmapped", || held(&driver).mappings - before.mappings <= 8);
    assert!(are_intact(&kept) && are_intact(&[buf]));
    check_end(&driver, before, (kept, pool));
}

#[test]
fn remapped_memory_is_released_while_its_old_address_is_mapped() {
    let (driver, before) = loaded();
    let (pool, kept) = with_kept(&driver, &[1, 3, 5, 7], false);
    drop(pool.get(4 * GRANULE).unwrap());
    pool.clear();
    pool.trim(0);
    assert_eq!(pool.stats().memory.held_bytes, 4 * GRANULE as u64);
    assert_eq!(held(&driver).pinned_bytes - before.pinned_bytes, 4 * GRANULE as u64, "the pool reports all of it");
    assert!(are_intact(&kept));
    check_end(&driver, before, (kept, pool));
}

#[test]
fn a_failed_unmap_of_old_addresses_is_repeated() {
    let (driver, before) = loaded();
    let (pool, kept) = with_kept(&driver, &[1, 3, 5, 7], false);
    driver.fail_from("cuMemUnmap", 1, Code::UNKNOWN);
    let buf = pool.get(4 * GRANULE).unwrap();
    pool.maintain();
    assert_eq!(held(&driver).mappings - before.mappings, 12);
    assert_eq!(pool.stats().memory.remap.failures, 1);
    driver.reset();
    drop(buf);
    pool.clear();
    pool.trim(0);
    assert_eq!(held(&driver).mappings - before.mappings, 4);
    check_end(&driver, before, (kept, pool));
}

#[test]
fn addresses_are_mapped_again_only_after_they_are_unmapped() {
    let (driver, before) = loaded();
    let granules = VmmRange::committed(2);
    granules.remap(0, 4, 2).unwrap();
    driver.reset();
    let held_call = driver.hold_call("cuMemUnmap");
    thread::scope(|scope| {
        let unmaps = scope.spawn(|| granules.source.unmap_old_places());
        held_call.wait_for(1);
        let commits = scope.spawn(|| granules.commit(0, 2));
        (0..1000).for_each(|_| thread::yield_now());
        assert_eq!(driver.calls("cuMemMap"), 0, "still mapped");
        drop(held_call);
        commits.join().unwrap().unwrap();
        unmaps.join().unwrap().unwrap();
    });
    assert_eq!((driver.calls("cuMemUnmap"), driver.calls("cuMemMap")), (1, 2));
    granules.decommit(0, 2).unwrap();
    granules.decommit(4, 2).unwrap();
    granules.end();
    assert_eq!(held(&driver), before);
}

#[test]
fn few_granules_stay_mapped_at_their_old_addresses() {
    let (driver, before) = loaded();
    let granules = VmmRange::committed(1);
    let mut most = 0;
    for place in 1..RANGE_GRANULES {
        granules.remap(place - 1, place, 1).unwrap();
        most = most.max(held(&driver).mappings - before.mappings);
    }
    assert!((200..=300).contains(&most), "{most}");
    assert!(driver.calls("cuMemUnmap") < 10, "many in one call");
    granules.decommit(RANGE_GRANULES - 1, 1).unwrap();
    granules.end();
    assert_eq!(held(&driver), before);
}
