//! Lengths and alignments: from a byte to more than the machine has.

use std::collections::VecDeque;
use std::sync::Arc;

use pinpool::Request;
use pinpool_replay::SimSource;

use super::{MIB, over, over_both, over_virtual_memory, valid_stats};

#[test]
fn common_sizes_are_served_whole_page_aligned_and_again() {
    for builder in over_both() {
        let pool = builder.build().unwrap();
        for len in [1, 4095, 4096, 4097, 2 * MIB - 1, 2 * MIB, 2 * MIB + 1, 64 * MIB + 1] {
            let mut buffer = pool.get(len).unwrap();
            let (id, address) = (buffer.unstable_id(), buffer.as_ptr());
            assert_eq!(buffer.len(), len);
            assert!(buffer.capacity() >= len && buffer.capacity() <= len.next_multiple_of(4096) * 9 / 8);
            assert!(address.addr().is_multiple_of(4096));
            let bytes = buffer.wait_slice_mut().unwrap();
            (bytes[0], bytes[len - 1]) = (1, 2);
            drop(buffer);
            let again = pool.get(len).unwrap();
            assert_eq!((again.unstable_id(), again.as_ptr()), (id, address));
        }
        let stats = valid_stats(&pool);
        assert_eq!((stats.requests.hits, stats.requests.misses, stats.memory.in_use), (11, 5, 0));
    }
}

#[test]
fn lengths_and_alignments_beyond_reason_are_refused_as_requests() {
    let pool = over_virtual_memory().build().unwrap();
    for len in [usize::MAX, isize::MAX as usize, isize::MAX as usize - 4096] {
        assert!(pool.get(len).unwrap_err().is_invalid_request() || len < isize::MAX as usize, "{len}");
    }
    for align in [0, 3, 2 << 30] {
        assert!(pool.get_with(Request::new(1).align(align)).unwrap_err().is_invalid_request());
    }
    valid_stats(&pool);
}

#[test]
fn a_request_over_the_machine_is_refused_by_the_source_and_releases_nothing() {
    for source in [SimSource::new(64 << 20), SimSource::separate_regions(64 << 20)] {
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
fn a_request_that_the_source_refuses_is_made_from_idle_memory() {
    for source in [SimSource::new(16 << 20), SimSource::separate_regions(16 << 20)] {
        let pool = over(Arc::new(source)).build().unwrap();
        drop((0..8).map(|_| pool.get(2 * MIB).unwrap()).collect::<Vec<_>>());
        assert_eq!(pool.get(16 * MIB).unwrap().len(), 16 * MIB);
        assert_eq!(valid_stats(&pool).memory.evictions.reclaimed, 8);
    }
}

#[test]
fn a_million_requests_with_512_live_buffers_lock_one_granule() {
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
