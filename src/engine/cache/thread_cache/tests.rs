//! The cache with chosen slots and homes: compared with a naive model on one thread, and run on many threads, after
//! which the counters must balance.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Barrier, mpsc};

use proptest::prelude::*;

use super::*;

fn kept(put: Result<(), Box<Entry<u32>>>) {
    assert!(put.is_ok());
}

#[test]
fn between_threads_the_age_decides_which_buffer_is_oldest() {
    let cache = ThreadCache::new(2, 4, 4);
    for (at, value, age) in [(1, 1, 5), (2, 3, 6), (1, 2, 7), (2, 4, 8)] {
        cache.begin_age(age);
        kept(cache.put(at, Entry::new_at(at, 0, 10, value)));
    }
    let victims = (9..13).map(|value| {
        assert!(cache.evict_over_limit().is_none());
        cache.begin_age(u64::from(value));
        kept(cache.put(2, Entry::new_at(2, 1, 10, value)));
        **cache.evict_over_limit().unwrap()
    });
    assert_eq!(victims.collect::<Vec<_>>(), [1, 3, 2, 4]);
    assert_eq!(cache.evict_oldest().map(|entry| **entry), Some(9));
    cache.validate().unwrap();
}

#[test]
fn after_a_seal_returns_are_refused_and_one_drain_empties_the_cache() {
    let cache = ThreadCache::new(1, 10, 4);
    (0..4).for_each(|value| kept(cache.put(current_slot(), Entry::new(0, 10, value))));
    let own = cache.take(current_slot(), 0).unwrap();
    let mut remote = cache.take(current_slot(), 0).unwrap();
    cache.seal();
    remote.home += 1;
    remote.close_to_fast_path();
    for entry in [own, remote, Entry::new(0, 10, 9)] {
        assert!(cache.put(current_slot(), entry).is_err());
    }
    let mut left = 0;
    cache.drain(u64::MAX, |_| left += 1);
    assert_eq!((left, cache.counts().idle, cache.take(current_slot(), 0).is_none()), (2, 0, true));
    cache.validate().unwrap();
}

#[test]
fn dropping_the_cache_drops_its_idle_buffers() {
    let counted = std::sync::Arc::new(());
    let cache = ThreadCache::new(2, 10, 2);
    for at in 0..2 {
        for home in 0..2 {
            assert!(cache.put(at, Entry::new_at(home, at.into(), 1, counted.clone())).is_ok());
        }
    }
    assert_eq!(std::sync::Arc::strong_count(&counted), 5);
    drop(cache);
    assert_eq!(std::sync::Arc::strong_count(&counted), 1);
}

#[test]
fn a_return_of_another_thread_belongs_to_the_age_in_which_it_was_made() {
    let cache = ThreadCache::new(1, 10, 2);
    for age in 1..4 {
        cache.begin_age(age);
        kept(cache.put(0, Entry::new_at(1, 0, 10, u32::try_from(age).unwrap())));
    }
    for age in 1..4 {
        let mut drained = Vec::new();
        cache.drain(age, |entry| drained.push(**entry));
        assert_eq!(drained, [u32::try_from(age).unwrap()]);
    }
    cache.validate().unwrap();
}

/// Begins an age; returns its number.
fn begin(ages: &mut ReturnAges, now_us: u64) -> Option<u64> {
    let mut begun = None;
    ages.begin(now_us, now_us, |age| *begun.insert(age));
    begun
}

#[test]
fn only_the_next_age_proves_that_a_buffer_is_old() {
    let mut ages = ReturnAges::default();
    assert_eq!(begin(&mut ages, 0), Some(1));
    assert_eq!(ages.all_put_by(0), 1, "buffers of age 0 were put by then");
    // Puts of age 1 may have come at any time up to the next reading of the clock.
    assert_eq!(begin(&mut ages, 60_000_000), Some(2));
    assert_eq!(ages.all_put_by(50_000_000), 1);
    assert_eq!(ages.all_put_by(60_000_000), 2);
}

#[test]
fn ages_are_some_time_apart_and_a_late_reading_begins_none() {
    let mut ages = ReturnAges::default();
    let begun = [70, 80, 2 * RETURN_AGE_US, RETURN_AGE_US].map(|now| begin(&mut ages, now));
    assert_eq!(begun, [Some(1), None, Some(2), None]);
    assert_eq!((ages.all_put_by(RETURN_AGE_US), ages.all_put_by(u64::MAX)), (1, 2));
}

fn put(cache: &ThreadCache<u32>, class: u32, value: u32) {
    assert!(cache.put(current_slot(), Entry::new(class, 10, value)).is_ok());
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
    /// Oldest first: class, value, age.
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

    fn put(&mut self, class: u32, value: u32, age: u64) {
        self.puts += 1;
        self.idle.push_back((class, value, age));
    }

    fn remove_oldest(&mut self, keep: usize) -> Vec<u32> {
        self.idle.drain(..self.idle.len().saturating_sub(keep)).map(|entry| entry.1).collect()
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
                prop_assert_eq!(cache.begin_age(now), now);
            }
            match step {
                Step::Take(class) => {
                    let entry = cache.take(current_slot(), class);
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
                        prop_assert!(cache.put(current_slot(), entry).is_ok());
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

/// Random numbers (xorshift).
struct Draw(u64);

impl Draw {
    fn below(&mut self, most: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % most
    }
}

const CLASSES: u32 = 5;
const THREADS: usize = if cfg!(miri) { 3 } else { 8 };
const STEPS: u64 = if cfg!(miri) { 60 } else { 40_000 };
const BYTES: usize = 64;

/// What all threads did.
#[derive(Default)]
struct Done {
    hits: AtomicU64,
    misses: AtomicU64,
    puts: AtomicU64,
    rejected: AtomicU64,
    removed: AtomicU64,
}

fn count_one(number: &AtomicU64) {
    number.fetch_add(1, Ordering::Relaxed);
}

type Buffer = Box<Entry<AtomicBool>>;

fn put_back(cache: &ThreadCache<AtomicBool>, done: &Done, buffer: Buffer) {
    assert!(buffer.swap(false, Ordering::Relaxed));
    count_one(&done.puts);
    if cache.put(current_slot(), buffer).is_err() {
        count_one(&done.rejected);
    }
    while cache.evict_over_limit().is_some() {
        count_one(&done.removed);
    }
}

/// Takes, returns, sends and receives buffers; one thread also evicts, drains, changes the limit and reads counters.
fn work(
    cache: &ThreadCache<AtomicBool>,
    done: &Done,
    thread: usize,
    to: &mpsc::Sender<Buffer>,
    from: &mpsc::Receiver<Buffer>,
) {
    let mut draw = Draw(0x9e37_79b9_7f4a_7c15 ^ (thread as u64 + 1) << 32);
    let mut held = Vec::new();
    for step in 0..STEPS {
        let now = step / 64;
        if thread == 0 && step % 64 == 0 {
            cache.begin_age(now);
        }
        let class = u32::try_from(draw.below(u64::from(CLASSES))).unwrap();
        match draw.below(16) {
            0..7 => {
                let buffer = cache.take(current_slot(), class);
                count_one(if buffer.is_some() { &done.hits } else { &done.misses });
                let buffer = buffer.unwrap_or_else(|| Entry::new(class, BYTES, AtomicBool::new(false)));
                assert_eq!(buffer.class(), class);
                assert!(!buffer.swap(true, Ordering::Relaxed), "two threads have the same buffer");
                held.push(buffer);
            }
            7..11 => held.pop().into_iter().for_each(|buffer| put_back(cache, done, buffer)),
            11..13 => held.pop().into_iter().for_each(|buffer| to.send(buffer).unwrap()),
            13..15 => from.try_iter().take(4).for_each(|buffer| put_back(cache, done, buffer)),
            _ if thread > 0 => {}
            _ => {
                let removed = |_| count_one(&done.removed);
                match draw.below(5) {
                    0 => cache.evict_oldest().into_iter().for_each(removed),
                    1 => cache.drain(now.saturating_sub(2), removed),
                    2 => cache.set_limit(usize::try_from(draw.below(30)).unwrap()),
                    3 if step % 256 == 0 => cache.drain(u64::MAX, removed),
                    _ => {
                        cache.set_slow_path(step % 2 == 0);
                        assert!(cache.counts().idle_bytes <= BYTES * 10_000);
                    }
                }
            }
        }
    }
    held.into_iter().for_each(|buffer| put_back(cache, done, buffer));
}

fn check_balance(shards: usize, seal: bool) {
    let (cache, done) = (ThreadCache::new(CLASSES, 12, shards), Done::default());
    let start = Barrier::new(THREADS);
    let (senders, mut receivers): (Vec<_>, Vec<_>) = (0..THREADS).map(|_| mpsc::channel::<Buffer>()).unzip();
    receivers.rotate_left(1);
    std::thread::scope(|scope| {
        for (thread, (to, from)) in senders.into_iter().zip(receivers).enumerate() {
            let (cache, done, start) = (&cache, &done, &start);
            scope.spawn(move || {
                start.wait();
                work(cache, done, thread, &to, &from);
                drop(to);
                if seal && thread == 1 {
                    cache.seal();
                }
                from.iter().for_each(|buffer| put_back(cache, done, buffer));
            });
        }
    });

    cache.validate().unwrap();
    let [hits, misses, puts, rejected, removed] = [&done.hits, &done.misses, &done.puts, &done.rejected, &done.removed]
        .map(|number| number.load(Ordering::Relaxed));
    let counts = cache.counts();
    assert_eq!((counts.hits, counts.puts), (hits, puts - rejected));
    assert_eq!(hits + misses, puts, "every taken buffer was returned");
    assert_eq!(counts.puts, hits + removed + counts.idle, "each kept buffer has left once or is still here");
    assert_eq!(counts.idle_bytes as u64, counts.idle * BYTES as u64);
    assert!(cfg!(miri) || removed > 1000, "{removed} removed");

    while cache.evict_over_limit().is_some() {}
    let idle = cache.counts().idle;
    assert_eq!(idle, counts.idle.min(cache.limit() as u64));
    let mut drained = 0;
    cache.drain(u64::MAX, |_| drained += 1);
    assert_eq!((drained, cache.counts().idle), (idle, 0));
    cache.validate().unwrap();
}

#[test]
fn counters_balance_with_a_shard_for_each_thread() {
    check_balance(16, false);
}

#[test]
fn counters_balance_with_more_threads_than_shards() {
    check_balance(2, false);
}

#[test]
fn counters_balance_after_a_seal_while_buffers_are_returned() {
    check_balance(4, true);
}
