//! The order of the preset `tensorflow`: each class reuses its oldest buffer first, and the oldest buffer of all is evicted
//! first, as in
//! [`PoolAllocator`](https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/common_runtime/pool_allocator.h).

use std::collections::BTreeMap;

use super::thread_cache::Entry;

/// Idle buffers in the order of their puts.
#[derive(Debug)]
pub(super) struct ExactStore<T> {
    /// By class and number of the put. An eviction searches all keys: as many as the count limit, in less time than its
    /// release takes.
    idle: BTreeMap<(usize, u64), Box<Entry<T>>>,
    puts: u64,
    bytes: u64,
}

impl<T> ExactStore<T> {
    pub(super) fn new() -> Self {
        Self { idle: BTreeMap::new(), puts: 0, bytes: 0 }
    }

    /// The oldest buffer of `class`.
    pub(super) fn take(&mut self, class: usize) -> Option<Box<Entry<T>>> {
        let (&key, _) = self.idle.range((class, 0)..).next()?;
        if key.0 == class { self.remove(key) } else { None }
    }

    /// Keeps `entry` as the newest.
    pub(super) fn put(&mut self, class: usize, entry: Box<Entry<T>>) {
        self.puts += 1;
        self.bytes += entry.bytes() as u64;
        self.idle.insert((class, self.puts), entry);
    }

    /// The oldest buffer of all.
    pub(super) fn evict(&mut self) -> Option<Box<Entry<T>>> {
        let &key = self.idle.keys().min_by_key(|(_, put)| put)?;
        self.remove(key)
    }

    fn remove(&mut self, key: (usize, u64)) -> Option<Box<Entry<T>>> {
        let entry = self.idle.remove(&key)?;
        self.bytes -= entry.bytes() as u64;
        Some(entry)
    }

    /// Everything, oldest first.
    pub(super) fn drain(&mut self) -> Vec<Box<Entry<T>>> {
        self.bytes = 0;
        let mut idle: Vec<_> = std::mem::take(&mut self.idle).into_iter().collect();
        idle.sort_unstable_by_key(|((_, put), _)| *put);
        idle.into_iter().map(|(_, entry)| entry).collect()
    }

    pub(super) fn count_of(&self, class: usize) -> u64 {
        self.idle.range((class, 0)..=(class, u64::MAX)).count() as u64
    }

    pub(super) fn len(&self) -> u64 {
        self.idle.len() as u64
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
}

#[cfg(all(test, not(pinpool_loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 2 } else { 256 }, failure_persistence: None, ..Default::default() })]
        #[test]
        fn it_does_what_a_plain_vector_does(steps in prop::collection::vec((0..18, 0..6_usize), 1..if cfg!(miri) { 40 } else { 200 })) {
            let mut store = ExactStore::new();
            let mut model: Vec<(usize, usize)> = Vec::new();
            for (number, (step, class)) in steps.into_iter().enumerate() {
                match step {
                    0..8 => {
                        store.put(class, Entry::new(0, 10, number));
                        model.push((class, number));
                    }
                    8..14 => {
                        let at = model.iter().position(|&(other, _)| other == class);
                        prop_assert_eq!(store.take(class).map(|entry| **entry), at.map(|at| model.remove(at).1));
                    }
                    14..17 => {
                        let oldest = (!model.is_empty()).then(|| model.remove(0).1);
                        prop_assert_eq!(store.evict().map(|entry| **entry), oldest);
                    }
                    _ => {
                        let drained: Vec<_> = store.drain().into_iter().map(|entry| **entry).collect();
                        prop_assert_eq!(drained, model.drain(..).map(|(_, item)| item).collect::<Vec<_>>());
                    }
                }
                let of_class = model.iter().filter(|&&(other, _)| other == class).count();
                prop_assert_eq!((store.count_of(class), store.len()), (of_class as u64, model.len() as u64));
                prop_assert_eq!(store.bytes(), 10 * store.len());
            }
        }
    }
}
