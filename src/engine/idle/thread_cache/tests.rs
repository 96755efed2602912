//! The front on one thread against a naive model, and on several, step by step.

use super::*;
use proptest::prelude::*;
use std::collections::VecDeque;

fn kept(put: Put<u32>) {
    assert!(put.victim.is_none() && put.handed_back.is_none() && !put.check_due);
}

fn fill(front: &ThreadCache<u32>, class: u32, values: std::ops::Range<u32>) {
    values.for_each(|value| kept(front.put(Entry::new(class, 10, value), 0)));
}

/// Another seat than the calling thread's.
#[allow(unsafe_code)]
fn seat(number: u32) -> ThreadSlot {
    // SAFETY: (seat I1) tests that pretend do all on one thread, on fronts of their own.
    unsafe { ThreadSlot::pretend(number) }
}

/// Runs `step` on a thread of its own, to its end.
fn elsewhere<R: Send>(step: impl FnOnce() -> R + Send) -> R {
    std::thread::scope(|scope| scope.spawn(step).join().unwrap())
}

#[test]
fn the_newest_of_the_class_is_taken_first() {
    let front = ThreadCache::new(2, 10, 4);
    fill(&front, 0, 0..3);
    fill(&front, 1, 3..4);
    assert_eq!([0, 0, 0].map(|class| **front.take(class).unwrap()), [2, 1, 0]);
    assert!(front.take(0).is_none());
    assert_eq!((front.idle_count(), front.idle_bytes()), (1, 10));
    front.validate().unwrap();
}

#[test]
fn whoever_put_it_there_it_is_found() {
    let front = ThreadCache::new(1, 100, 4);
    elsewhere(|| fill(&front, 0, 0..3));
    fill(&front, 0, 3..4);
    front.validate().unwrap();
    let mut found: Vec<u32> = std::iter::from_fn(|| front.take(0)).map(|entry| **entry).collect();
    assert_eq!(found.remove(0), 3, "the own one first");
    found.sort_unstable();
    assert_eq!(found, [0, 1, 2], "then those of a thread that has ended");
    front.validate().unwrap();
}

#[test]
fn a_put_brings_the_buffer_home_to_who_took_it() {
    let front = ThreadCache::new(1, 100, 4);
    fill(&front, 0, 0..2);
    let taken = [front.take(0).unwrap(), front.take(0).unwrap()];
    elsewhere(|| {
        taken.into_iter().for_each(|entry| kept(front.put(entry, 1)));
        fill(&front, 0, 7..8);
        assert_eq!(**front.take(0).unwrap(), 7, "a thread's own newest comes first");
    });
    assert_eq!([front.take(0), front.take(0)].map(|entry| **entry.unwrap()), [0, 1], "newest first");
    front.validate().unwrap();
}

#[test]
fn places_that_another_thread_freed_are_used_before_anything_is_evicted() {
    let front = ThreadCache::new(1, 12, 4);
    fill(&front, 0, 0..12);
    let in_use: Vec<_> = std::iter::from_fn(|| front.take(0)).collect();
    elsewhere(|| fill(&front, 0, 20..32));
    assert_eq!((in_use.len(), front.idle_count()), (12, 12));
    let put = elsewhere(|| front.put(Entry::new(0, 10, 99), 0));
    assert!(put.victim.is_some(), "the thirteenth is one too many");
    front.validate().unwrap();
}

#[test]
fn between_threads_the_coarse_stamp_decides_who_is_oldest() {
    let front = ThreadCache::new(2, 4, 4);
    for (at, value, stamp) in [(1, 1, 5), (1, 2, 7), (2, 3, 6), (2, 4, 8)] {
        kept(front.put_at(seat(at), Entry::new_at(at, 0, 10, value), stamp));
    }
    let put = |stamp| front.put_at(seat(2), Entry::new_at(2, 1, 10, stamp), stamp);
    let victims: Vec<u32> = (9..13).map(|stamp| **put(stamp).victim.unwrap()).collect();
    assert_eq!(victims, [1, 3, 2, 4]);
    let oldest = front.evict_oldest().map(|entry| **entry);
    assert_eq!((oldest, front.totals().evicted), (Some(9), 4), "reclaimed is not evicted");
    front.validate().unwrap();
}

#[test]
fn what_is_older_than_an_epoch_leaves() {
    let front = ThreadCache::new(1, 500, 4);
    for stamp in 0..100 {
        kept(front.put(Entry::new(0, 10, stamp), stamp));
    }
    elsewhere(|| kept(front.put(Entry::new(0, 10, 500), 3)));
    let mut left = Vec::new();
    front.drain_older_than(70, |entry| left.push(**entry));
    left.sort_unstable();
    assert_eq!(left, (0..70).chain([500]).collect::<Vec<_>>());
    front.validate().unwrap();
    front.drain_all(|entry| left.push(**entry));
    assert_eq!((left.len(), front.idle_count()), (101, 0));
    front.validate().unwrap();
}

#[test]
fn a_lower_limit_pushes_the_oldest_out_and_a_higher_one_makes_room() {
    let front = ThreadCache::new(1, 10, 4);
    fill(&front, 0, 0..10);
    let mut left = Vec::new();
    front.set_limit(4, |entry| left.push(**entry));
    assert_eq!((left, front.idle_count(), front.limit()), ((0..6).collect(), 4, 4));
    front.validate().unwrap();
    front.set_limit(6, |_| panic!("nothing is too many"));
    fill(&front, 0, 10..12);
    assert!(front.put(Entry::new(0, 10, 12), 0).victim.is_some());
    assert_eq!(front.totals().evicted, 1);
    front.validate().unwrap();
}

#[test]
fn a_limit_of_nought_and_an_unknown_class_keep_nothing() {
    let front = ThreadCache::new(1, 0, 4);
    let put = front.put(Entry::new(0, 10, 1), 0);
    assert_eq!(put.victim.map(|entry| **entry), Some(1));
    assert_eq!(front.totals(), Window { put: 1, evicted: 1, ..Window::default() });
    let put = front.put(Entry::new(1, 10, 2), 0);
    assert_eq!(put.handed_back.map(|entry| **entry), Some(2));
    assert!(front.take(1).is_none());
    front.validate().unwrap();
}

#[test]
fn sealed_it_hands_back_each_put_and_one_drain_empties_it() {
    let front = ThreadCache::new(1, 10, 4);
    fill(&front, 0, 0..4);
    let own = front.take(0).unwrap();
    let mut brought = front.take(0).unwrap();
    front.seal();
    brought.home += 1;
    for entry in [own, brought, Entry::new(0, 10, 9)] {
        let put = front.put(entry, 0);
        assert!(put.handed_back.is_some() && put.victim.is_none());
    }
    let mut left = 0;
    front.drain_all(|_| left += 1);
    assert_eq!((left, front.idle_count(), front.take(0).is_none()), (2, 0, true));
    front.validate().unwrap();
}

#[test]
#[cfg_attr(miri, ignore = "four thousand evictions, minutes; `counters` has the rule")]
fn every_thousandth_eviction_of_the_window_makes_a_check_due() {
    let front = ThreadCache::new(1, 1, 4);
    fill(&front, 0, 0..1);
    front.count_allocated();
    let due: Vec<u32> = (1..=2500).filter(|&n| front.put(Entry::new(0, 10, n), 0).check_due).collect();
    assert_eq!(due, [1000, 2000]);
    assert_eq!(front.window(), Window { get_from_pool: 0, put: 2501, allocated: 1, evicted: 2500 });
    front.reset_window();
    assert_eq!(front.window(), Window::default());
    let due: Vec<u32> = (1..=1500).filter(|&n| front.put(Entry::new(0, 10, n), 0).check_due).collect();
    assert_eq!((due, front.window().put, front.totals().put), (vec![1000], 1500, 4001));
}

#[test]
fn threads_that_share_a_shard_find_each_others_buffers() {
    let front = ThreadCache::new(1, 100, 1);
    for at in 0..5 {
        kept(front.put_at(seat(at), Entry::new_at(at, 0, 10, at), 0));
    }
    let taken = (5..10).filter_map(|at| front.take_at(seat(at), 0)).count();
    assert_eq!(taken, 5);
    front.validate().unwrap();
}

#[test]
fn what_is_idle_goes_with_the_front() {
    let counted = std::sync::Arc::new(());
    let front = ThreadCache::new(2, 10, 2);
    for at in 0..2 {
        for home in 0..2 {
            let put = front.put_at(seat(at), Entry::new_at(home, at, 1, counted.clone()), 0);
            assert!(put.victim.is_none());
        }
    }
    assert_eq!(std::sync::Arc::strong_count(&counted), 5);
    drop(front);
    assert_eq!(std::sync::Arc::strong_count(&counted), 1);
}

/// What the front must do on one thread, in the plainest words.
struct Model {
    limit: usize,
    /// Oldest first: class, value, stamp.
    idle: VecDeque<(u32, u32, u32)>,
    figures: Window,
}

impl Model {
    fn take(&mut self, class: u32) -> Option<u32> {
        let at = self.idle.iter().rposition(|entry| entry.0 == class)?;
        self.figures.get_from_pool += 1;
        self.idle.remove(at).map(|entry| entry.1)
    }

    fn put(&mut self, class: u32, value: u32, stamp: u32) -> Option<u32> {
        self.figures.put += 1;
        self.idle.push_back((class, value, stamp));
        let victim = (self.idle.len() > self.limit).then(|| self.idle.pop_front()).flatten();
        self.figures.evicted += u64::from(victim.is_some());
        victim.map(|entry| entry.1)
    }

    fn leave(&mut self, keep: usize) -> Vec<u32> {
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
    DrainOlder(u32),
    SetLimit(usize),
    Clear,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        8 => (0u32..4).prop_map(Step::Take),
        8 => (0u32..4).prop_map(Step::Put),
        1 => Just(Step::PutAll),
        1 => Just(Step::EvictOldest),
        1 => (0u32..20).prop_map(Step::DrainOlder),
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
    fn on_one_thread_it_is_the_model_exactly(limit in 1usize..30, steps in steps()) {
        let front = ThreadCache::new(4, limit, 4);
        let mut model = Model { limit, idle: VecDeque::new(), figures: Window::default() };
        let mut in_use = Vec::new();
        for (id, step) in (0u32..).zip(steps) {
            let epoch = id / 16;
            match step {
                Step::Take(class) => {
                    let entry = front.take(class);
                    prop_assert_eq!(entry.as_ref().map(|entry| ***entry), model.take(class));
                    in_use.extend(entry);
                }
                Step::Put(class) => {
                    let put = front.put(Entry::new(class, 10, id), epoch);
                    prop_assert_eq!(put.victim.map(|entry| **entry), model.put(class, id, epoch));
                }
                Step::PutAll => {
                    for entry in in_use.drain(..) {
                        let (class, id) = (entry.class(), **entry);
                        let put = front.put(entry, epoch);
                        prop_assert_eq!(put.victim.map(|entry| **entry), model.put(class, id, epoch));
                    }
                }
                Step::EvictOldest => {
                    let victim = front.evict_oldest().map(|entry| **entry);
                    prop_assert_eq!(victim, model.idle.pop_front().map(|entry| entry.1));
                }
                Step::DrainOlder(epoch) => {
                    let mut left = Vec::new();
                    front.drain_older_than(epoch, |entry| left.push(**entry));
                    let young = model.idle.iter().filter(|entry| entry.2 >= epoch).count();
                    prop_assert_eq!(left, model.leave(young));
                }
                Step::SetLimit(limit) => {
                    let mut left = Vec::new();
                    front.set_limit(limit, |entry| left.push(**entry));
                    model.limit = limit;
                    prop_assert_eq!(left, model.leave(limit));
                }
                Step::Clear => {
                    let mut left = Vec::new();
                    front.drain_all(|entry| left.push(**entry));
                    prop_assert_eq!(left, model.leave(0));
                }
            }
            prop_assert_eq!(front.idle_count(), model.idle.len());
            prop_assert_eq!(front.idle_bytes(), 10 * model.idle.len());
            prop_assert_eq!(front.totals(), model.figures);
            prop_assert_eq!(front.validate(), Ok(()));
        }
    }
}
