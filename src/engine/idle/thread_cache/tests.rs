//! What only a thread with a chosen slot or owner shows. `tests/api/thread_cache_model.rs` tests the rest.

#![allow(unsafe_code)] // The short path of a shard.

use super::*;

fn kept(put: Put<u32>) {
    assert!(put.victim.is_none() && put.handed_back.is_none() && !put.check_due);
}

fn fill(cache: &ThreadCache<u32>, class: u32, values: std::ops::Range<u32>) {
    values.for_each(|value| kept(cache.put(Entry::new(class, 10, value))));
}

#[test]
fn between_threads_the_tick_decides_which_buffer_is_oldest() {
    let cache = ThreadCache::new(2, 4, 4);
    for (at, value, tick) in [(1, 1, 5), (2, 3, 6), (1, 2, 7), (2, 4, 8)] {
        cache.begin_tick(tick);
        kept(cache.put_at(at, Entry::new_at(at, 0, 10, value)));
    }
    let put = |value: u32| {
        cache.begin_tick(u64::from(value));
        cache.put_at(2, Entry::new_at(2, 1, 10, value))
    };
    let victims: Vec<u32> = (9..13).map(|value| **put(value).victim.unwrap()).collect();
    assert_eq!(victims, [1, 3, 2, 4]);
    let oldest = cache.evict_oldest().map(|entry| **entry);
    assert_eq!((oldest, cache.totals().evicted), (Some(9), 4), "reclaimed is not evicted");
    cache.validate().unwrap();
}

#[test]
fn after_seal_puts_are_handed_back_and_one_drain_empties_the_cache() {
    let cache = ThreadCache::new(1, 10, 4);
    fill(&cache, 0, 0..4);
    let own = cache.take(0).unwrap();
    let mut remote = cache.take(0).unwrap();
    cache.seal();
    remote.owner += 1;
    remote.keep_off_short_path();
    for entry in [own, remote, Entry::new(0, 10, 9)] {
        let put = cache.put(entry);
        assert!(put.handed_back.is_some() && put.victim.is_none());
    }
    let mut left = 0;
    cache.drain_all(|_| left += 1);
    assert_eq!((left, cache.idle_count(), cache.take(0).is_none()), (2, 0, true));
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
            let put = cache.put_at(at, Entry::new_at(owner, at.into(), 1, counted.clone()));
            assert!(put.victim.is_none());
        }
    }
    assert_eq!(std::sync::Arc::strong_count(&counted), 5);
    drop(cache);
    assert_eq!(std::sync::Arc::strong_count(&counted), 1);
}

#[test]
fn a_put_of_another_thread_belongs_to_the_tick_in_which_it_was_made() {
    let cache = ThreadCache::new(1, 10, 2);
    let remote = |value| Entry::new_at(1, 0, 10, value);
    for tick in 1..4 {
        cache.begin_tick(tick);
        kept(cache.put_at(0, remote(u32::try_from(tick).unwrap())));
    }
    for tick in 1..4 {
        let mut drained = Vec::new();
        cache.drain_older_than(tick + 1, |entry| drained.push(**entry));
        assert_eq!(drained, [u32::try_from(tick).unwrap()]);
    }
    cache.validate().unwrap();
}

#[test]
fn a_shard_with_many_spare_permits_has_the_next_take_return_some() {
    let cache = ThreadCache::new(1, 100, 1);
    fill(&cache, 0, 0..40);
    let shard = &cache.shards[0];
    let mut taken = Vec::new();
    // SAFETY: class 0 exists.
    while let Some(entry) = unsafe { shard.take_at_once(0) } {
        taken.push(entry);
    }
    assert!(taken.len() < 40, "the short path steps aside");
    taken.extend(cache.take(0));
    // SAFETY: as above.
    assert!(unsafe { shard.take_at_once(0) }.is_some_and(|entry| shard.put_at_once(entry).is_ok()));
    cache.validate().unwrap();
}
