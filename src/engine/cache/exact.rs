//! The order of the preset `tensorflow`: each class reuses its oldest buffer first, and the oldest buffer of all is evicted
//! first, as in
//! [`PoolAllocator`](https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/common_runtime/pool_allocator.h).

use std::collections::{BTreeMap, VecDeque};

use super::thread_cache::Entry;

/// Most numbers of returns and classes that remain after their buffers have left.
const LEFTOVERS: usize = 32;

/// Idle buffers by class, oldest first, with the numbers of their returns.
type Classes<T> = BTreeMap<usize, VecDeque<(u64, Box<Entry<T>>)>>;

/// Idle buffers in the order of their returns.
#[derive(Debug)]
pub(super) struct ExactStore<T> {
    classes: Classes<T>,
    /// Class and number of all returns, oldest first; including some of buffers that have left.
    order: VecDeque<(usize, u64)>,
    puts: u64,
    len: usize,
    bytes: u64,
}

fn oldest<T>(classes: &Classes<T>, class: usize) -> Option<u64> {
    classes.get(&class)?.front().map(|(put, _)| *put)
}

impl<T> ExactStore<T> {
    pub(super) fn new() -> Self {
        Self { classes: BTreeMap::new(), order: VecDeque::new(), puts: 0, len: 0, bytes: 0 }
    }

    /// The oldest buffer of `class`.
    pub(super) fn take(&mut self, class: usize) -> Option<Box<Entry<T>>> {
        let (_, entry) = self.classes.get_mut(&class)?.pop_front()?;
        self.len -= 1;
        self.bytes -= entry.bytes() as u64;
        Some(entry)
    }

    /// Keeps `entry` as the newest.
    pub(super) fn put(&mut self, class: usize, entry: Box<Entry<T>>) {
        self.puts += 1;
        self.len += 1;
        self.bytes += entry.bytes() as u64;
        self.order.push_back((class, self.puts));
        self.classes.entry(class).or_default().push_back((self.puts, entry));
        if self.order.len().max(self.classes.len()) > 2 * self.len + LEFTOVERS {
            self.classes.retain(|_, idle| !idle.is_empty());
            let classes = &self.classes;
            self.order.retain(|(class, put)| oldest(classes, *class).is_some_and(|oldest| oldest <= *put));
        }
    }

    /// The oldest buffer of all.
    pub(super) fn evict(&mut self) -> Option<Box<Entry<T>>> {
        loop {
            let (class, put) = self.order.pop_front()?;
            if oldest(&self.classes, class) == Some(put) {
                return self.take(class);
            }
        }
    }

    /// Everything, oldest first.
    pub(super) fn drain(&mut self) -> Vec<Box<Entry<T>>> {
        std::iter::from_fn(|| self.evict()).collect()
    }

    pub(super) fn count_of(&self, class: usize) -> u64 {
        self.classes.get(&class).map_or(0, |idle| idle.len() as u64)
    }

    pub(super) fn len(&self) -> u64 {
        self.len as u64
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
                prop_assert!(store.order.len().max(store.classes.len()) <= 2 * model.len() + LEFTOVERS + 1);
            }
        }
    }
}
