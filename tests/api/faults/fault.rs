//! A return that serves a request while the request releases idle memory.

use pinpool_testing::SourceCall;

use crate::fixture::{faulty_heap, two_buffers};
use crate::valid_stats::valid_stats;

#[test]
fn a_return_during_a_miss_serves_it_and_nothing_is_pinned() {
    let source = faulty_heap();
    // The limit holds these two buffers: a third one needs the memory of the idle one.
    let pool = two_buffers(&source).max_bytes(12 << 10).build().unwrap();
    let wanted = pool.get(4000).unwrap();
    drop(pool.get(8000).unwrap());
    let releases = source.hold(SourceCall::Release);
    std::thread::scope(|scope| {
        let missing = scope.spawn(|| pool.get(4000).map(|buffer| buffer.unstable_id()));
        // The request has missed, and is releasing the idle buffer of the other class.
        releases.wait_for(1);
        let id = wanted.unstable_id();
        drop(wanted);
        drop(releases);
        assert_eq!(missing.join().unwrap().unwrap(), id);
    });
    let stats = valid_stats(&pool);
    assert_eq!((stats.requests.hits, stats.requests.misses, source.calls(SourceCall::Acquire)), (1, 2, 2));
}
