//! What only a thread with a chosen slot or owner shows. `tests/api/thread_cache_model.rs` tests the rest.

use super::*;

fn kept(put: Result<(), Box<Entry<u32>>>) {
    assert!(put.is_ok());
}

#[test]
fn between_threads_the_tick_decides_which_buffer_is_oldest() {
    let cache = ThreadCache::new(2, 4, 4);
    for (at, value, tick) in [(1, 1, 5), (2, 3, 6), (1, 2, 7), (2, 4, 8)] {
        cache.begin_tick(tick);
        kept(cache.put_at(at, Entry::new_at(at, 0, 10, value)));
    }
    let victims = (9..13).map(|value| {
        assert!(cache.evict_over_limit().is_none());
        cache.begin_tick(u64::from(value));
        kept(cache.put_at(2, Entry::new_at(2, 1, 10, value)));
        **cache.evict_over_limit().unwrap()
    });
    assert_eq!(victims.collect::<Vec<_>>(), [1, 3, 2, 4]);
    assert_eq!(cache.evict_oldest().map(|entry| **entry), Some(9));
    cache.validate().unwrap();
}

#[test]
fn after_seal_puts_are_handed_back_and_one_drain_empties_the_cache() {
    let cache = ThreadCache::new(1, 10, 4);
    (0..4).for_each(|value| kept(cache.put(Entry::new(0, 10, value))));
    let own = cache.take(0).unwrap();
    let mut remote = cache.take(0).unwrap();
    cache.seal();
    remote.owner += 1;
    remote.keep_off_short_path();
    for entry in [own, remote, Entry::new(0, 10, 9)] {
        assert!(cache.put(entry).is_err());
    }
    let mut left = 0;
    cache.drain(u64::MAX, |_| left += 1);
    assert_eq!((left, cache.counts().idle, cache.take(0).is_none()), (2, 0, true));
    cache.validate().unwrap();
}

#[test]
fn threads_that_share_a_shard_find_each_others_buffers() {
    let cache = ThreadCache::new(1, 100, 1);
    for at in 0..5 {
        kept(cache.put_at(at, Entry::new_at(at, 0, 10, u32::from(at))));
    }
    let taken = (5..10).filter_map(|at| cache.take_at(at, 0)).count();
    assert_eq!(taken, 5);
    cache.validate().unwrap();
}

#[test]
fn dropping_the_cache_drops_its_idle_buffers() {
    let counted = std::sync::Arc::new(());
    let cache = ThreadCache::new(2, 10, 2);
    for at in 0..2 {
        for owner in 0..2 {
            assert!(cache.put_at(at, Entry::new_at(owner, at.into(), 1, counted.clone())).is_ok());
        }
    }
    assert_eq!(std::sync::Arc::strong_count(&counted), 5);
    drop(cache);
    assert_eq!(std::sync::Arc::strong_count(&counted), 1);
}

#[test]
fn a_put_of_another_thread_belongs_to_the_tick_in_which_it_was_made() {
    let cache = ThreadCache::new(1, 10, 2);
    for tick in 1..4 {
        cache.begin_tick(tick);
        kept(cache.put_at(0, Entry::new_at(1, 0, 10, u32::try_from(tick).unwrap())));
    }
    for tick in 1..4 {
        let mut drained = Vec::new();
        cache.drain(tick, |entry| drained.push(**entry));
        assert_eq!(drained, [u32::try_from(tick).unwrap()]);
    }
    cache.validate().unwrap();
}
