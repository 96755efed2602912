//! The order of the preset `tensorflow`: each class reuses its oldest buffer first, and the oldest buffer of all is evicted
//! first, as in
//! [`PoolAllocator`](https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/common_runtime/pool_allocator.h).

use std::collections::{BTreeMap, HashMap, VecDeque};

use super::thread_cache::Entry;

/// Idle buffers in the order of their puts. A class whose last buffer was taken keeps its empty queue, since the buffer will
/// come back; an eviction removes the queue.
#[derive(Debug)]
pub(super) struct ExactStore<T> {
    /// Class and buffer by the number of the put.
    all: BTreeMap<u64, (usize, Box<Entry<T>>)>,
    /// The numbers of each class, oldest first.
    classes: HashMap<usize, VecDeque<u64>>,
    puts: u64,
    bytes: u64,
}

impl<T> ExactStore<T> {
    pub(super) fn new() -> Self {
        Self { all: BTreeMap::new(), classes: HashMap::new(), puts: 0, bytes: 0 }
    }

    /// The oldest buffer of `class`.
    pub(super) fn take(&mut self, class: usize) -> Option<Box<Entry<T>>> {
        let number = self.classes.get_mut(&class)?.pop_front()?;
        let (_, entry) = self.all.remove(&number)?;
        self.bytes -= entry.bytes() as u64;
        Some(entry)
    }

    /// Keeps `entry` as the newest.
    pub(super) fn put(&mut self, class: usize, entry: Box<Entry<T>>) {
        self.puts += 1;
        self.bytes += entry.bytes() as u64;
        self.classes.entry(class).or_default().push_back(self.puts);
        self.all.insert(self.puts, (class, entry));
    }

    /// The oldest buffer of all.
    pub(super) fn evict(&mut self) -> Option<Box<Entry<T>>> {
        let class = self.all.first_key_value()?.1.0;
        let victim = self.take(class);
        if self.classes.get(&class).is_some_and(VecDeque::is_empty) {
            self.classes.remove(&class);
        }
        victim
    }

    /// Everything, oldest first.
    pub(super) fn drain(&mut self) -> Vec<Box<Entry<T>>> {
        self.classes.clear();
        self.bytes = 0;
        std::mem::take(&mut self.all).into_values().map(|(_, entry)| entry).collect()
    }

    pub(super) fn count_of(&self, class: usize) -> u64 {
        self.classes.get(&class).map_or(0, |numbers| numbers.len() as u64)
    }

    pub(super) fn len(&self) -> u64 {
        self.all.len() as u64
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
}

#[cfg(all(test, not(pinpool_loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn put(store: &mut ExactStore<usize>, class: usize, value: usize) {
        store.put(class, Entry::new(0, 10, value));
    }

    #[test]
    fn classes_that_come_and_go_leave_no_entry_behind() {
        let mut store = ExactStore::new();
        for class in 0..if cfg!(miri) { 50 } else { 10_000 } {
            put(&mut store, class, class);
            if store.len() > 3 {
                store.evict();
            }
        }
        assert_eq!((store.classes.len(), store.len(), store.bytes()), (3, 3, 30));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 2 } else { 256 }, failure_persistence: None, ..Default::default() })]
        #[test]
        fn it_does_what_a_plain_vector_does(steps in prop::collection::vec((0..18, 0..6_usize), 1..if cfg!(miri) { 40 } else { 200 })) {
            let mut store = ExactStore::new();
            let mut model: Vec<(usize, usize)> = Vec::new();
            for (number, (step, class)) in steps.into_iter().enumerate() {
                match step {
                    0..8 => {
                        put(&mut store, class, number);
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
