//! Lengths and alignments: from a byte to more than the machine has.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use pinpool::{PinnedBuf, Request};
use pinpool_replay::SimSource;

use super::{KIB, LONG, MIB, over, over_both, over_virtual_memory, valid_stats};

#[test]
fn common_sizes_are_served_whole_page_aligned_and_again() {
    for builder in over_both() {
        let pool = builder.build().unwrap();
        for len in [1, 4095, 4096, 4097, 2 * MIB - 1, 2 * MIB, 2 * MIB + 1, 64 * MIB + 1] {
            let mut buffer = pool.get(len).unwrap();
            let (id, address) = (buffer.id(), buffer.as_ptr());
            assert_eq!(buffer.len(), len);
            assert!(buffer.capacity() >= len && buffer.capacity() <= len.next_multiple_of(4096) * 9 / 8);
            assert!(address.addr().is_multiple_of(4096));
            let bytes = buffer.wait_slice_mut().unwrap();
            (bytes[0], bytes[len - 1]) = (1, 2);
            drop(buffer);
            let again = pool.get(len).unwrap();
            assert_eq!((again.id(), again.as_ptr()), (id, address));
        }
        let stats = valid_stats(&pool);
        assert_eq!((stats.requests.hits, stats.requests.misses, stats.memory.in_use), (11, 5, 0));
    }
}

#[test]
fn a_get_of_zero_bytes_belongs_to_no_pool_and_costs_nothing() {
    let pool = over_virtual_memory().build().unwrap();
    let buffer = pool.get(0).unwrap();
    assert!(buffer.is_empty() && buffer.id().is_none() && !buffer.is_pinned());
    assert!(pool.try_get(0).unwrap().is_some());
    drop(buffer);
    assert_eq!((valid_stats(&pool).requests.served, pool.stats().memory.held_bytes), (0, 0));
}

#[test]
fn lengths_and_alignments_beyond_reason_are_refused_as_requests() {
    let pool = over_virtual_memory().build().unwrap();
    for len in [usize::MAX, isize::MAX as usize, isize::MAX as usize - 4096] {
        assert!(pool.get(len).unwrap_err().is_request() || len < isize::MAX as usize, "{len}");
    }
    for align in [0, 3, 2 << 30] {
        assert!(pool.get_with(Request::new(1).align(align)).unwrap_err().is_request());
    }
    valid_stats(&pool);
}

#[test]
fn a_get_over_the_limit_is_refused_at_once_and_releases_nothing() {
    for builder in over_both() {
        let pool = builder.max_bytes(16 << 20).wait(LONG).build().unwrap();
        drop(pool.get(4 * MIB).unwrap());
        let error = pool.get(17 * MIB).unwrap_err();
        assert!(error.is_limit());
        let text = error.to_string();
        for part in [
            "cannot allocate 17.0MiB",
            "idle 4.0MiB",
            "in flight 0B",
            "exceeds the pool limit of 16.0MiB (PINPOOL_MAX_BYTES)",
        ] {
            assert!(text.contains(part), "{part} is missing in: {text}");
        }
        let stats = valid_stats(&pool);
        assert_eq!(
            (stats.requests.waits, stats.requests.failed, stats.memory.evictions.reclaimed, stats.memory.idle),
            (0, 1, 0, 1)
        );
    }
}

#[test]
fn a_get_over_the_machine_is_refused_by_the_source_and_releases_nothing() {
    for source in [SimSource::new(64 << 20), SimSource::discrete(64 << 20)] {
        let pool = over(Arc::new(source)).build().unwrap();
        drop(pool.get(4 * MIB).unwrap());
        for len in [65 * MIB, 1 << 36, 1 << 50] {
            let error = pool.get(len).unwrap_err();
            assert!(error.is_backend(), "{error}");
            // The pool has no limit; the report below the first line names the free memory of the machine.
            assert!(!error.to_string().lines().next().unwrap().contains("PINPOOL_MAX_BYTES"), "{error}");
        }
        let stats = valid_stats(&pool);
        assert_eq!((stats.requests.failed, stats.memory.evictions.reclaimed, stats.memory.idle), (3, 0, 1));
    }
}

#[test]
fn a_get_that_the_source_refuses_is_made_from_idle_memory() {
    for source in [SimSource::new(16 << 20), SimSource::discrete(16 << 20)] {
        let pool = over(Arc::new(source)).build().unwrap();
        let eight: Vec<_> = (0..8).map(|_| pool.get(2 * MIB).unwrap()).collect();
        drop(eight);
        assert_eq!(pool.get(16 * MIB).unwrap().len(), 16 * MIB);
        assert_eq!(valid_stats(&pool).memory.evictions.reclaimed, 8);
    }
}

#[test]
fn a_get_aligned_to_more_than_a_page_starts_there_and_ends_inside() {
    for builder in over_both() {
        let pool = builder.build().unwrap();
        for align in [1, 4096, 8192, 64 * KIB, 2 * MIB, 1 << 30] {
            let buffer = pool.get_with(Request::new(5000).align(align)).unwrap();
            assert!(buffer.as_ptr().addr().is_multiple_of(align));
            assert!(buffer.capacity() >= 5000);
        }
        valid_stats(&pool);
    }
}

#[test]
fn ten_thousand_live_buffers_are_apart_and_all_come_back() {
    for builder in over_both() {
        let pool = builder.build().unwrap();
        let mut live: Vec<_> = (0..10_000).map(|n| pool.get(1 + n * 37 % 50_000).unwrap()).collect();
        assert_eq!(valid_stats(&pool).memory.in_use, 10_000);
        live.sort_by_key(|buffer| buffer.as_ptr().addr());
        assert!(live.windows(2).all(|pair| pair[0].as_ptr().addr() + pair[0].capacity() <= pair[1].as_ptr().addr()));
        assert_eq!(live.iter().map(PinnedBuf::id).collect::<BTreeSet<_>>().len(), 10_000);
        drop(live);
        pool.clear();
        assert_eq!((valid_stats(&pool).memory.held_bytes, pool.stats().memory.in_use), (0, 0));
    }
}

#[test]
fn a_million_gets_with_512_live_buffers_lock_one_granule() {
    let pool = over_virtual_memory().build().unwrap();
    // There are as many live buffers of one page as a granule has pages.
    let mut live: VecDeque<_> = (0..512).map(|n| pool.get(1 + n % 100).unwrap()).collect();
    for n in 512..1_000_000 {
        drop(live.pop_front());
        live.push_back(pool.get(1 + n % 100).unwrap());
    }
    let stats = valid_stats(&pool);
    assert_eq!((stats.requests.hits, stats.requests.misses, stats.memory.in_use), (1_000_000 - 512, 512, 512));
    assert_eq!((stats.memory.pin.count, stats.memory.held_bytes), (1, 2 << 20));
    let _one_more = pool.get(1).unwrap();
    assert_eq!(valid_stats(&pool).memory.pin.count, 2, "the granule was full");
}

#[test]
fn a_million_live_buffers_of_a_page_fill_their_granules() {
    let pool = over_virtual_memory().build().unwrap();
    let live = (0..1_000_000).map(|_| pool.get(4096).unwrap()).collect::<Vec<_>>();
    let stats = valid_stats(&pool);
    assert_eq!((stats.memory.in_use, stats.memory.in_use_bytes), (1_000_000, 1_000_000 * 4096));
    let needed = (1_000_000_u64 * 4096).next_multiple_of(2 << 20);
    assert!((needed..needed + (18 << 20)).contains(&stats.memory.held_bytes), "all but the last step: {stats:?}");
    drop(live);
    pool.clear();
    assert_eq!((valid_stats(&pool).memory.in_use, pool.stats().memory.held_bytes), (0, 0));
}
