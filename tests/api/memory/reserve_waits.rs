//! A reserve while requests wait: it never takes memory that an earlier request needs.

use std::sync::Arc;
use std::thread;

use pinpool_replay::SimSource;

use crate::fixture::{LONG, MIB, over, until_waits};
use crate::valid_stats::valid_stats;

#[test]
fn a_reserve_that_leaves_no_room_for_a_request_that_waits_is_refused() {
    for source in [SimSource::new, SimSource::separate_regions] {
        for is_partition in [false, true] {
            let pool = over(Arc::new(source(1 << 40)), 64 << 20).wait(LONG).build().unwrap();
            let part = pool.open_partition("part", 48 << 20).unwrap();
            let held = pool.get(20 * MIB).unwrap();
            thread::scope(|scope| {
                let waiting =
                    scope.spawn(|| if is_partition { part.get(46 * MIB) } else { pool.get(46 * MIB) }.map(drop));
                // A partition's request waits for memory in the pool's queue.
                until_waits(&pool, 1);
                let error = pool.reserve(24 << 20).unwrap_err();
                assert!(error.is_limit());
                let text = error.to_string();
                assert!(text.contains("1 earlier request is waiting"), "{text}");
                assert!(text.contains("cannot allocate 24.0MiB"), "{text}");
                assert_eq!(pool.stats().memory.reserve_bytes, 0);
                // There is room in addition to that request.
                pool.reserve(10 << 20).unwrap();
                assert!(!waiting.is_finished());
                drop(held);
                waiting.join().unwrap().unwrap();
            });
            valid_stats(&pool);
            // No request is waiting any more.
            pool.trim(0);
            pool.reserve(24 << 20).unwrap();
        }
    }
}
