//! The exact store: oldest first within a class, oldest first out of all of them.
//!
//! ```text
//!   oldest                                     newest
//!   [c 64] ──▶ [c 32] ──▶ [c 64] ──▶ [c 64] ──▶ [c 32]      all: order of the puts, evicted from the left
//!     └──────────────────▶  └────────▶ │                    class 64: reused from the left
//!                └──────────────────────────────▶ │         class 32
//! ```
//!
//! Nodes lie in one vector and are linked by index, so a take or a put moves no other node and allocates nothing once
//! the vector has grown to the most that were ever idle.
//!
//! Invariants, recounted by [`ExactStore::validate`]:
//!
//! 1. Every node is in `all`, in the list of its class, or on the free list; `len` counts the first.
//! 2. Both lists are in the order of the puts, so the oldest of all is the oldest of its class.
//! 3. A class without nodes is kept only where a take emptied it: its buffer is in use and will come back.

use std::collections::HashMap;

/// No node.
const NIL: usize = usize::MAX;

/// Idle items under a class each, in the order in which they were put.
#[derive(Debug)]
pub(crate) struct ExactStore<T> {
    nodes: Vec<Node<T>>,
    free: usize,
    all: List,
    classes: HashMap<usize, List>,
    len: usize,
}

#[derive(Debug)]
struct Node<T> {
    item: Option<T>,
    class: usize,
    all: Links,
    peers: Links,
}

#[derive(Debug, Clone, Copy)]
struct Links {
    older: usize,
    newer: usize,
}

#[derive(Debug, Clone, Copy)]
struct List {
    oldest: usize,
    newest: usize,
}

/// Which of the two lists that a node is in.
#[derive(Debug, Clone, Copy)]
enum Chain {
    All,
    Peers,
}

impl List {
    const EMPTY: Self = Self { oldest: NIL, newest: NIL };
}

impl<T> ExactStore<T> {
    pub(crate) fn new() -> Self {
        Self { nodes: Vec::new(), free: NIL, all: List::EMPTY, classes: HashMap::new(), len: 0 }
    }

    /// Items kept.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The item of `class` that was put longest ago.
    pub(crate) fn take(&mut self, class: usize) -> Option<T> {
        let index = self.classes.get(&class)?.oldest;
        if index == NIL {
            return None;
        }
        self.remove(index)
    }

    /// Keeps `item` as the newest.
    pub(crate) fn put(&mut self, class: usize, item: T) {
        let index = self.node_for(class, item);
        let mut all = self.all;
        self.append(&mut all, index, Chain::All);
        self.all = all;
        let mut peers = self.classes.get(&class).copied().unwrap_or(List::EMPTY);
        self.append(&mut peers, index, Chain::Peers);
        self.classes.insert(class, peers);
        self.len += 1;
    }

    /// The item that was put longest ago, of whatever class.
    pub(crate) fn evict(&mut self) -> Option<T> {
        let index = self.all.oldest;
        let class = self.nodes.get(index)?.class;
        let item = self.remove(index);
        if self.classes.get(&class).is_some_and(|list| list.oldest == NIL) {
            self.classes.remove(&class);
        }
        item
    }

    /// Everything, oldest first.
    pub(crate) fn drain(&mut self) -> Vec<T> {
        let items = std::iter::from_fn(|| self.evict()).collect();
        self.classes.clear();
        items
    }

    fn remove(&mut self, index: usize) -> Option<T> {
        let class = self.nodes[index].class;
        let mut all = self.all;
        self.unlink(&mut all, index, Chain::All);
        self.all = all;
        let mut peers = self.classes.get(&class).copied()?;
        self.unlink(&mut peers, index, Chain::Peers);
        // Invariant 3: an empty list stays here, and goes in `evict`.
        self.classes.insert(class, peers);
        self.len -= 1;
        let node = &mut self.nodes[index];
        node.all.newer = self.free;
        self.free = index;
        node.item.take()
    }

    /// A node off the free list, or a new one, linked to nothing.
    fn node_for(&mut self, class: usize, item: T) -> usize {
        let alone = Links { older: NIL, newer: NIL };
        let node = Node { item: Some(item), class, all: alone, peers: alone };
        if self.free == NIL {
            self.nodes.push(node);
            return self.nodes.len() - 1;
        }
        let index = self.free;
        self.free = self.nodes[index].all.newer;
        self.nodes[index] = node;
        index
    }

    fn links(&mut self, index: usize, chain: Chain) -> &mut Links {
        let node = &mut self.nodes[index];
        match chain {
            Chain::All => &mut node.all,
            Chain::Peers => &mut node.peers,
        }
    }

    fn append(&mut self, list: &mut List, index: usize, chain: Chain) {
        *self.links(index, chain) = Links { older: list.newest, newer: NIL };
        match list.newest {
            NIL => list.oldest = index,
            newest => self.links(newest, chain).newer = index,
        }
        list.newest = index;
    }

    fn unlink(&mut self, list: &mut List, index: usize, chain: Chain) {
        let Links { older, newer } = *self.links(index, chain);
        match older {
            NIL => list.oldest = newer,
            older => self.links(older, chain).newer = newer,
        }
        match newer {
            NIL => list.newest = older,
            newer => self.links(newer, chain).older = older,
        }
    }

    /// Recounts the invariants from the nodes.
    #[cfg(test)]
    fn validate(&self) {
        let mut walked = Vec::new();
        let mut index = self.all.oldest;
        while index != NIL {
            walked.push(index);
            index = self.nodes[index].all.newer;
        }
        assert_eq!(walked.len(), self.len, "invariant 1");
        let in_classes: usize = self
            .classes
            .iter()
            .map(|(&class, list)| {
                let expected: Vec<_> = walked.iter().copied().filter(|&at| self.nodes[at].class == class).collect();
                let mut peers = Vec::new();
                let mut index = list.oldest;
                while index != NIL {
                    peers.push(index);
                    index = self.nodes[index].peers.newer;
                }
                assert_eq!(peers, expected, "invariant 2, class {class}");
                peers.len()
            })
            .sum();
        assert_eq!(in_classes, self.len, "invariant 1");
        let filled = self.nodes.iter().filter(|node| node.item.is_some()).count();
        assert_eq!(filled, self.len, "invariant 1: a free node holds an item");
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_oldest_of_a_class_is_reused_first_and_the_oldest_of_all_evicted_first() {
        let mut store = ExactStore::new();
        for (class, item) in [(64, 'a'), (32, 'b'), (64, 'c'), (64, 'd')] {
            store.put(class, item);
        }
        assert_eq!(store.take(64), Some('a'));
        assert_eq!(store.evict(), Some('b'));
        assert_eq!(store.take(32), None);
        assert_eq!(store.drain(), ['c', 'd']);
        store.validate();
    }

    #[test]
    fn classes_that_come_and_go_leave_no_entry_behind() {
        let mut store = ExactStore::new();
        for class in 0..if cfg!(miri) { 50 } else { 10_000 } {
            store.put(class, ());
            if store.len() > 3 {
                store.evict();
            }
        }
        assert_eq!(store.classes.len(), 3);
        assert_eq!(store.nodes.len(), 4);
    }

    #[derive(Debug, Clone)]
    enum Step {
        Put(usize),
        Take(usize),
        Evict,
        Drain,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            8 => (0..6_usize).prop_map(Step::Put),
            6 => (0..6_usize).prop_map(Step::Take),
            3 => Just(Step::Evict),
            1 => Just(Step::Drain),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 2 } else { 256 }, failure_persistence: None, ..Default::default() })]
        #[test]
        fn it_does_what_a_plain_vector_does(steps in prop::collection::vec(step(), 1..if cfg!(miri) { 40 } else { 200 })) {
            let mut store = ExactStore::new();
            let mut model: Vec<(usize, usize)> = Vec::new();
            for (number, step) in steps.into_iter().enumerate() {
                match step {
                    Step::Put(class) => {
                        store.put(class, number);
                        model.push((class, number));
                    }
                    Step::Take(class) => {
                        let at = model.iter().position(|&(other, _)| other == class);
                        prop_assert_eq!(store.take(class), at.map(|at| model.remove(at).1));
                    }
                    Step::Evict => {
                        let oldest = (!model.is_empty()).then(|| model.remove(0).1);
                        prop_assert_eq!(store.evict(), oldest);
                    }
                    Step::Drain => {
                        let all: Vec<_> = model.drain(..).map(|(_, item)| item).collect();
                        prop_assert_eq!(store.drain(), all);
                    }
                }
                store.validate();
            }
        }
    }
}
