//! The thread cache on one thread against a naive model, and on several threads step by step.

use std::collections::VecDeque;

use pinpool::unstable::thread_cache::{Counts, Entry, ThreadCache};
use proptest::prelude::*;

fn put(cache: &ThreadCache<u32>, class: u32, value: u32) {
    assert!(cache.put(Entry::new(class, 10, value)).is_ok());
}

/// The buffers over the limit, oldest first.
fn over_limit(cache: &ThreadCache<u32>) -> Vec<u32> {
    std::iter::from_fn(|| cache.evict_over_limit()).map(|entry| **entry).collect()
}

fn drained(cache: &ThreadCache<u32>, until: u64) -> Vec<u32> {
    let mut left = Vec::new();
    cache.drain(until, |entry| left.push(**entry));
    left
}

/// The naive model of the cache on one thread.
struct Model {
    limit: usize,
    /// Oldest first: class, value, tick.
    idle: VecDeque<(u32, u32, u64)>,
    hits: u64,
    puts: u64,
}

impl Model {
    fn take(&mut self, class: u32) -> Option<u32> {
        let at = self.idle.iter().rposition(|entry| entry.0 == class)?;
        self.hits += 1;
        self.idle.remove(at).map(|entry| entry.1)
    }

    fn put(&mut self, class: u32, value: u32, tick: u64) {
        self.puts += 1;
        self.idle.push_back((class, value, tick));
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
    EvictOverLimit,
    Drain(u64),
    SetLimit(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        8 => (0u32..4).prop_map(Step::Take),
        8 => (0u32..4).prop_map(Step::Put),
        1 => Just(Step::PutAll),
        1 => Just(Step::EvictOldest),
        2 => Just(Step::EvictOverLimit),
        1 => prop_oneof![0u64..20, Just(u64::MAX)].prop_map(Step::Drain),
        1 => (1usize..30).prop_map(Step::SetLimit),
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
        let mut model = Model { limit, idle: VecDeque::new(), hits: 0, puts: 0 };
        let mut in_use = Vec::new();
        for (id, step) in (0u32..).zip(steps) {
            let now = u64::from(id / 16) + 1;
            if id % 16 == 0 {
                prop_assert_eq!(cache.begin_tick(now), now);
            }
            match step {
                Step::Take(class) => {
                    let entry = cache.take(class);
                    prop_assert_eq!(entry.as_ref().map(|entry| ***entry), model.take(class));
                    in_use.extend(entry);
                }
                Step::Put(class) => {
                    put(&cache, class, id);
                    model.put(class, id, now);
                }
                Step::PutAll => {
                    for entry in in_use.drain(..) {
                        model.put(entry.class(), **entry, now);
                        prop_assert!(cache.put(entry).is_ok());
                    }
                }
                Step::EvictOldest => {
                    let victim = cache.evict_oldest().map(|entry| **entry);
                    prop_assert_eq!(victim, model.idle.pop_front().map(|entry| entry.1));
                }
                Step::EvictOverLimit => prop_assert_eq!(over_limit(&cache), model.remove_oldest(model.limit)),
                Step::Drain(until) => {
                    let young = model.idle.iter().filter(|entry| entry.2 > until).count();
                    prop_assert_eq!(drained(&cache, until), model.remove_oldest(young));
                }
                Step::SetLimit(limit) => {
                    cache.set_limit(limit);
                    model.limit = limit;
                }
            }
            let (idle, idle_bytes) = (model.idle.len() as u64, 10 * model.idle.len());
            let counts = Counts { idle, idle_bytes, hits: model.hits, puts: model.puts };
            prop_assert_eq!((cache.counts(), cache.validate()), (counts, Ok(())));
        }
    }
}
