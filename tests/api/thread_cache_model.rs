//! The thread cache on one thread against a naive model, and on several threads step by step.

use std::collections::VecDeque;

use pinpool::Window;
use pinpool::unstable::thread_cache::{Entry, Put, ThreadCache};
use proptest::prelude::*;

fn kept(put: Put<u32>) {
    assert!(put.victim.is_none() && put.handed_back.is_none() && !put.check_due);
}

fn fill(cache: &ThreadCache<u32>, class: u32, values: std::ops::Range<u32>) {
    values.for_each(|value| kept(cache.put(Entry::new(class, 10, value))));
}

/// Runs `step` on another thread and joins it.
fn elsewhere<R: Send>(step: impl FnOnce() -> R + Send) -> R {
    std::thread::scope(|scope| scope.spawn(step).join().unwrap())
}

#[test]
fn the_newest_of_the_class_is_taken_first() {
    let cache = ThreadCache::new(2, 10, 4);
    fill(&cache, 0, 0..3);
    fill(&cache, 1, 3..4);
    assert_eq!([0, 0, 0].map(|class| **cache.take(class).unwrap()), [2, 1, 0]);
    assert!(cache.take(0).is_none());
    assert_eq!((cache.idle_count(), cache.idle_bytes()), (1, 10));
    cache.validate().unwrap();
}

#[test]
fn buffers_of_other_and_ended_threads_are_found() {
    let cache = ThreadCache::new(1, 100, 4);
    elsewhere(|| fill(&cache, 0, 0..3));
    fill(&cache, 0, 3..4);
    cache.validate().unwrap();
    let mut found: Vec<u32> = std::iter::from_fn(|| cache.take(0)).map(|entry| **entry).collect();
    assert_eq!(found.remove(0), 3, "its own buffer first");
    found.sort_unstable();
    assert_eq!(found, [0, 1, 2], "then those of a thread that has ended");
    cache.validate().unwrap();
}

#[test]
fn a_put_returns_the_buffer_to_the_shard_that_took_it() {
    let cache = ThreadCache::new(1, 100, 4);
    fill(&cache, 0, 0..2);
    let taken = [cache.take(0).unwrap(), cache.take(0).unwrap()];
    elsewhere(|| {
        taken.into_iter().for_each(|entry| kept(cache.put(entry)));
        fill(&cache, 0, 7..8);
        assert_eq!(**cache.take(0).unwrap(), 7, "a thread's own newest comes first");
    });
    assert_eq!([cache.take(0), cache.take(0)].map(|entry| **entry.unwrap()), [0, 1], "newest first");
    cache.validate().unwrap();
}

#[test]
fn permits_freed_by_another_thread_are_used_before_an_eviction() {
    let cache = ThreadCache::new(1, 12, 4);
    fill(&cache, 0, 0..12);
    let in_use: Vec<_> = std::iter::from_fn(|| cache.take(0)).collect();
    elsewhere(|| fill(&cache, 0, 20..32));
    assert_eq!((in_use.len(), cache.idle_count()), (12, 12));
    let put = elsewhere(|| cache.put(Entry::new(0, 10, 99)));
    assert!(put.victim.is_some(), "the thirteenth is one too many");
    cache.validate().unwrap();
}

#[test]
fn a_drain_removes_buffers_of_earlier_ticks() {
    let cache = ThreadCache::new(1, 500, 4);
    for value in 0..100 {
        cache.begin_tick(u64::from(value));
        kept(cache.put(Entry::new(0, 10, value)));
        if value == 3 {
            elsewhere(|| kept(cache.put(Entry::new(0, 10, 500))));
        }
    }
    let mut left = Vec::new();
    cache.drain_older_than(70, |entry| left.push(**entry));
    left.sort_unstable();
    assert_eq!(left, (0..70).chain([500]).collect::<Vec<_>>());
    cache.validate().unwrap();
    cache.drain_all(|entry| left.push(**entry));
    assert_eq!((left.len(), cache.idle_count()), (101, 0));
    cache.validate().unwrap();
}

#[test]
fn a_lowered_limit_evicts_the_oldest_and_a_raised_one_keeps_more() {
    let cache = ThreadCache::new(1, 10, 4);
    fill(&cache, 0, 0..10);
    let mut left = Vec::new();
    cache.set_limit(4, |entry| left.push(**entry));
    assert_eq!((left, cache.idle_count(), cache.limit()), ((0..6).collect(), 4, 4));
    cache.validate().unwrap();
    cache.set_limit(6, |_| panic!("no buffer is over the limit"));
    fill(&cache, 0, 10..12);
    assert!(cache.put(Entry::new(0, 10, 12)).victim.is_some());
    assert_eq!(cache.totals().evicted, 1);
    cache.validate().unwrap();
}

#[test]
fn a_limit_of_zero_and_an_unknown_class_keep_nothing() {
    let cache = ThreadCache::new(1, 0, 4);
    let put = cache.put(Entry::new(0, 10, 1));
    assert_eq!(put.victim.map(|entry| **entry), Some(1));
    assert_eq!(cache.totals(), Window { put: 1, evicted: 1, ..Window::default() });
    let put = cache.put(Entry::new(1, 10, 2));
    assert_eq!(put.handed_back.map(|entry| **entry), Some(2));
    assert!(cache.take(1).is_none());
    cache.validate().unwrap();
}

#[test]
#[cfg_attr(miri, ignore = "four thousand evictions, minutes; `counters` has the rule")]
fn every_thousandth_eviction_of_the_window_makes_a_check_due() {
    let cache = ThreadCache::new(1, 1, 4);
    fill(&cache, 0, 0..1);
    cache.count_allocated();
    let due: Vec<u32> = (1..=2500).filter(|&n| cache.put(Entry::new(0, 10, n)).check_due).collect();
    assert_eq!(due, [1000, 2000]);
    assert_eq!(cache.window(), Window { get_from_pool: 0, put: 2501, allocated: 1, evicted: 2500 });
    cache.reset_window();
    assert_eq!(cache.window(), Window::default());
    let due: Vec<u32> = (1..=1500).filter(|&n| cache.put(Entry::new(0, 10, n)).check_due).collect();
    assert_eq!((due, cache.window().put, cache.totals().put), (vec![1000], 1500, 4001));
}

/// The naive model of the cache on one thread.
struct Model {
    limit: usize,
    /// Oldest first: class, value, tick.
    idle: VecDeque<(u32, u32, u64)>,
    counted: Window,
}

impl Model {
    fn take(&mut self, class: u32) -> Option<u32> {
        let at = self.idle.iter().rposition(|entry| entry.0 == class)?;
        self.counted.get_from_pool += 1;
        self.idle.remove(at).map(|entry| entry.1)
    }

    fn put(&mut self, class: u32, value: u32, tick: u64) -> Option<u32> {
        self.counted.put += 1;
        self.idle.push_back((class, value, tick));
        let victim = (self.idle.len() > self.limit).then(|| self.idle.pop_front()).flatten();
        self.counted.evicted += u64::from(victim.is_some());
        victim.map(|entry| entry.1)
    }

    fn remove_oldest(&mut self, keep: usize) -> Vec<u32> {
        let gone = self.idle.len().saturating_sub(keep);
        self.idle.drain(..gone).map(|entry| entry.1).collect()
    }
}

#[derive(Clone, Debug)]
enum Step {
    Take(u32),
    Put(u32),
    PutAll,
    EvictOldest,
    DrainOlder(u64),
    SetLimit(usize),
    Clear,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        8 => (0u32..4).prop_map(Step::Take),
        8 => (0u32..4).prop_map(Step::Put),
        1 => Just(Step::PutAll),
        1 => Just(Step::EvictOldest),
        1 => (0u64..20).prop_map(Step::DrainOlder),
        1 => (0usize..30).prop_map(Step::SetLimit),
        1 => Just(Step::Clear),
    ];
    proptest::collection::vec(step, 0..if cfg!(miri) { 40 } else { 400 })
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 2 } else { 256 },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn on_one_thread_the_cache_equals_the_model(limit in 1usize..30, steps in steps()) {
        let cache = ThreadCache::new(4, limit, 4);
        let mut model = Model { limit, idle: VecDeque::new(), counted: Window::default() };
        let mut in_use = Vec::new();
        for (id, step) in (0u32..).zip(steps) {
            let now = u64::from(id / 16);
            cache.begin_tick(now);
            match step {
                Step::Take(class) => {
                    let entry = cache.take(class);
                    prop_assert_eq!(entry.as_ref().map(|entry| ***entry), model.take(class));
                    in_use.extend(entry);
                }
                Step::Put(class) => {
                    let put = cache.put(Entry::new(class, 10, id));
                    prop_assert_eq!(put.victim.map(|entry| **entry), model.put(class, id, now));
                }
                Step::PutAll => {
                    for entry in in_use.drain(..) {
                        let (class, id) = (entry.class(), **entry);
                        let put = cache.put(entry);
                        prop_assert_eq!(put.victim.map(|entry| **entry), model.put(class, id, now));
                    }
                }
                Step::EvictOldest => {
                    let victim = cache.evict_oldest().map(|entry| **entry);
                    prop_assert_eq!(victim, model.idle.pop_front().map(|entry| entry.1));
                }
                Step::DrainOlder(tick) => {
                    let mut left = Vec::new();
                    cache.drain_older_than(tick, |entry| left.push(**entry));
                    let young = model.idle.iter().filter(|entry| entry.2 >= tick).count();
                    prop_assert_eq!(left, model.remove_oldest(young));
                }
                Step::SetLimit(limit) => {
                    let mut left = Vec::new();
                    cache.set_limit(limit, |entry| left.push(**entry));
                    model.limit = limit;
                    prop_assert_eq!(left, model.remove_oldest(limit));
                }
                Step::Clear => {
                    let mut left = Vec::new();
                    cache.drain_all(|entry| left.push(**entry));
                    prop_assert_eq!(left, model.remove_oldest(0));
                }
            }
            prop_assert_eq!(cache.idle_count(), model.idle.len());
            prop_assert_eq!(cache.idle_bytes(), 10 * model.idle.len());
            prop_assert_eq!(cache.totals(), model.counted);
            prop_assert_eq!(cache.validate(), Ok(()));
        }
    }
}
