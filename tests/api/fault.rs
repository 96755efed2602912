//! A source that fails at every call in turn: errors are returned, bytes balance, and no memory is lost without need.

use std::sync::Arc;

use pinpool::{Backend, Pool, Preset};
use pinpool_testing::{FaultSource, SourceCall};

use crate::fixture::{faulty_heap, two_buffers};
use crate::valid_stats::valid_stats;

#[test]
fn hits_continue_while_one_thread_hangs_in_acquire_and_another_in_release() {
    let source = faulty_heap();
    let pool = two_buffers(&source).max_bytes(None).build().unwrap();
    // Two idle buffers: the limit. The next put of another class evicts, and so releases.
    let (hot, cold) = (pool.get(100).unwrap(), pool.get(10_000).unwrap());
    let fresh = pool.get(100_000).unwrap();
    drop(cold);
    drop(hot);
    let releases = source.hold(SourceCall::Release);
    std::thread::scope(|scope| {
        let releasing = scope.spawn(|| drop(fresh));
        releases.wait_for(1);
        let acquires = source.hold(SourceCall::Acquire);
        let acquiring = scope.spawn(|| pool.get(1_000_000).map(drop));
        acquires.wait_for(1);
        for _ in 0..1000 {
            drop(pool.get(100).unwrap());
        }
        let stats = pool.stats();
        assert_eq!(stats.requests.hits, 1000);
        assert!(!releasing.is_finished() && !acquiring.is_finished());
        drop((releases, acquires));
        acquiring.join().unwrap().unwrap();
    });
    valid_stats(&pool);
}

#[test]
fn a_put_during_a_miss_serves_it_and_nothing_is_pinned() {
    let source = faulty_heap();
    // The limit holds these two buffers: a third one needs the memory of the idle one.
    let pool = two_buffers(&source).max_bytes(Some(12 << 10)).build().unwrap();
    let wanted = pool.get(4000).unwrap();
    drop(pool.get(8000).unwrap());
    let releases = source.hold(SourceCall::Release);
    std::thread::scope(|scope| {
        let missing = scope.spawn(|| pool.get(4000).map(|buffer| buffer.id()));
        // The get has missed and releases the idle buffer of the other class.
        releases.wait_for(1);
        let id = wanted.id();
        drop(wanted);
        drop(releases);
        assert_eq!(missing.join().unwrap().unwrap(), id);
    });
    let stats = valid_stats(&pool);
    assert_eq!((stats.requests.hits, stats.requests.misses, source.calls(SourceCall::Acquire)), (1, 2, 2));
}

#[test]
fn hits_of_the_adaptive_preset_continue_while_acquire_and_release_hang() {
    let source = Arc::new(FaultSource::around(Arc::new(pinpool_replay::SimSource::discrete(1 << 40))));
    let builder = Pool::builder().without_env().preset(Preset::Adaptive).setting("pool_size_limit", 8);
    let pool = builder.backend(Backend::Source(source.clone())).build().unwrap();
    // Something large to release, idle for longer than the small one.
    drop(pool.get(64 << 20).unwrap());
    drop(pool.get(100).unwrap());
    let (acquires, releases) = (source.hold(SourceCall::Acquire), source.hold(SourceCall::Release));
    let hits = if cfg!(miri) { 100 } else { 100_000 };
    std::thread::scope(|scope| {
        let releasing = scope.spawn(|| pool.trim(1 << 20));
        releases.wait_for(1);
        let acquiring = scope.spawn(|| pool.get(128 << 20).map(drop));
        acquires.wait_for(1);
        // The trim has evicted the small buffer before it hangs: the next one is carved from free memory.
        let before = pool.stats().requests.hits;
        let held = pool.try_get(100).unwrap();
        assert!(held.is_some(), "the small buffer went before the large one");
        drop(held);
        for _ in 1..hits {
            drop(pool.get(100).unwrap());
        }
        assert_eq!(pool.stats().requests.hits, before + hits);
        assert!(!releasing.is_finished() && !acquiring.is_finished());
        drop((acquires, releases));
        releasing.join().unwrap();
        acquiring.join().unwrap().unwrap();
    });
    valid_stats(&pool);
}
