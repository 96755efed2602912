//! Idle buffers of the preset `tensorflow`: TensorFlow's `PoolAllocator`, step by step, under one lock.
//!
//! ```text
//!   oldest                                     newest
//!   [c 64] ──▶ [c 32] ──▶ [c 64] ──▶ [c 64] ──▶ [c 32]      all: order of the puts, evicted from the left
//!     └──────────────────▶  └────────▶ │                    class 64: reused from the left
//!                └──────────────────────────────▶ │         class 32
//! ```
//!
//! Nodes are in one vector and linked by index, so a take or a put moves no other node, and allocates nothing once the
//! vector has grown to the most that were ever idle. The rules are those of
//! [`PoolAllocator`](https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/common_runtime/pool_allocator.h).
//!
//! Owns the order, the limit and the four counters. Never releases: victims leave by return value.
//!
//! Invariants, recounted by `ExactStore::validate`:
//!
//! - exact-I1: every node is in `all` and in the list of its class, or on the free list; `len` counts the former.
//! - exact-I2: both lists are in the order of the puts, so the oldest of all is the oldest of its class.
//! - exact-I3: a class without nodes is kept only where a take emptied it: its buffer is in use and will come back.

use std::collections::HashMap;

use super::thread_cache::Entry;
use super::{PutOutcome, fill_totals};
use crate::policy::{self, Check, Window};
use crate::size_class::Class;
use crate::stats::Stats;
use pinpool_os::sync::plain::Mutex;

/// Idle buffers in the order of their puts.
#[derive(Debug)]
pub(in crate::engine) struct ExactIdle<T> {
    /// False for a limit of 0: then nothing is kept, and nothing is counted in windows, evicted or checked.
    is_pooling: bool,
    auto_resize: bool,
    state: Mutex<ExactState<T>>,
}

#[derive(Debug)]
struct ExactState<T> {
    store: ExactStore<Box<Entry<T>>>,
    limit: u64,
    bytes: u64,
    window: Window,
    /// All windows before this one.
    before: Window,
    unpooled: Window,
    checks: u64,
    raises: u64,
    sealed: bool,
}

impl<T> ExactIdle<T> {
    pub(super) fn new(limit: u64, auto_resize: bool) -> Self {
        let state = ExactState {
            store: ExactStore::new(),
            limit,
            bytes: 0,
            window: Window::default(),
            before: Window::default(),
            unpooled: Window::default(),
            checks: 0,
            raises: 0,
            sealed: false,
        };
        Self { is_pooling: limit != 0, auto_resize, state: Mutex::new(state) }
    }

    pub(super) fn take(&self, class: Class) -> Option<Box<Entry<T>>> {
        let mut state = self.state.lock();
        let entry = state.store.take(class.bytes)?;
        state.window.get_from_pool += 1;
        state.bytes -= entry.bytes() as u64;
        Some(entry)
    }

    /// TensorFlow's put: count, evict while the limit is reached, check, then keep.
    pub(super) fn put(&self, entry: Box<Entry<T>>, class: Class) -> PutOutcome<T> {
        let mut state = self.state.lock();
        if !self.is_pooling {
            state.unpooled.put += 1;
            return PutOutcome { rejected: Some(entry), ..PutOutcome::default() };
        }
        state.window.put += 1;
        if state.sealed {
            return PutOutcome { rejected: Some(entry), ..PutOutcome::default() };
        }
        let mut outcome = PutOutcome::default();
        if state.store.len as u64 >= state.limit {
            outcome.victim = state.evict();
            state.window.evicted += 1;
            outcome.check = state.check_if_due(self.auto_resize);
        }
        state.bytes += entry.bytes() as u64;
        state.store.put(class.bytes, entry);
        outcome
    }

    pub(super) fn count_allocated(&self) {
        let mut state = self.state.lock();
        let window = if self.is_pooling { &mut state.window } else { &mut state.unpooled };
        window.allocated += 1;
    }

    pub(super) fn reclaim(&self) -> Option<Box<Entry<T>>> {
        self.state.lock().evict()
    }

    pub(super) fn clear(&self) -> Vec<Box<Entry<T>>> {
        let mut state = self.state.lock();
        state.begin_window();
        state.drain()
    }

    pub(super) fn seal(&self) -> Vec<Box<Entry<T>>> {
        let mut state = self.state.lock();
        state.sealed = true;
        state.drain()
    }

    pub(super) fn count_of(&self, class: Class) -> u64 {
        self.state.lock().store.count_of(class.bytes)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.state.lock().bytes
    }

    pub(super) fn count(&self) -> u64 {
        self.state.lock().store.len as u64
    }

    pub(super) fn fill(&self, stats: &mut Stats) {
        let state = self.state.lock();
        fill_totals(stats, state.before + state.window + state.unpooled);
        stats.window = state.window;
        stats.pool_size_limit = state.limit;
        stats.buffers_in_pool = state.store.len as u64;
        stats.idle_bytes = state.bytes;
        stats.checks = state.checks;
        stats.raises = state.raises;
    }
}

impl<T> ExactState<T> {
    fn evict(&mut self) -> Option<Box<Entry<T>>> {
        let entry = self.store.evict()?;
        self.bytes -= entry.bytes() as u64;
        Some(entry)
    }

    fn drain(&mut self) -> Vec<Box<Entry<T>>> {
        self.bytes = 0;
        self.store.drain()
    }

    fn check_if_due(&mut self, auto_resize: bool) -> Option<Check> {
        let window = self.window;
        window.check_is_due().then(|| {
            let check = policy::check(window, self.limit, auto_resize);
            self.checks += 1;
            if let Some(limit) = check.raised_to {
                self.limit = limit;
                self.raises += 1;
                self.begin_window();
            }
            check
        })
    }

    fn begin_window(&mut self) {
        self.before = self.before + std::mem::take(&mut self.window);
    }
}

/// No node.
const NIL: usize = usize::MAX;

/// Idle items by class, in the order of their puts.
#[derive(Debug)]
struct ExactStore<T> {
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

/// One of the two lists that a node is in.
#[derive(Debug, Clone, Copy)]
enum ListKind {
    All,
    Class,
}

impl List {
    const EMPTY: Self = Self { oldest: NIL, newest: NIL };
}

impl<T> ExactStore<T> {
    fn new() -> Self {
        Self { nodes: Vec::new(), free: NIL, all: List::EMPTY, classes: HashMap::new(), len: 0 }
    }

    /// The oldest item of `class`.
    fn take(&mut self, class: usize) -> Option<T> {
        let index = self.classes.get(&class)?.oldest;
        if index == NIL {
            return None;
        }
        self.remove(index)
    }

    /// Keeps `item` as the newest.
    fn put(&mut self, class: usize, item: T) {
        let index = self.node_for(class, item);
        let mut all = self.all;
        self.append(&mut all, index, ListKind::All);
        self.all = all;
        let mut peers = self.classes.get(&class).copied().unwrap_or(List::EMPTY);
        self.append(&mut peers, index, ListKind::Class);
        self.classes.insert(class, peers);
        self.len += 1;
    }

    /// The oldest item of all.
    fn evict(&mut self) -> Option<T> {
        let index = self.all.oldest;
        let class = self.nodes.get(index)?.class;
        let item = self.remove(index);
        if self.classes.get(&class).is_some_and(|list| list.oldest == NIL) {
            self.classes.remove(&class);
        }
        item
    }

    /// Items of `class`: walks its list.
    fn count_of(&self, class: usize) -> u64 {
        let oldest = self.classes.get(&class).map_or(NIL, |list| list.oldest);
        let next = |&index: &usize| self.nodes.get(index).map(|node| node.peers.newer);
        std::iter::successors(Some(oldest), next).take_while(|&index| index != NIL).count() as u64
    }

    /// Everything, oldest first.
    fn drain(&mut self) -> Vec<T> {
        let items = std::iter::from_fn(|| self.evict()).collect();
        self.classes.clear();
        items
    }

    fn remove(&mut self, index: usize) -> Option<T> {
        let class = self.nodes[index].class;
        let mut all = self.all;
        self.unlink(&mut all, index, ListKind::All);
        self.all = all;
        let mut peers = self.classes.get(&class).copied()?;
        self.unlink(&mut peers, index, ListKind::Class);
        // exact-I3: an empty list stays here, and is removed in `evict`.
        self.classes.insert(class, peers);
        self.len -= 1;
        let node = &mut self.nodes[index];
        node.all.newer = self.free;
        self.free = index;
        node.item.take()
    }

    /// A node from the free list, or a new one, in no list.
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

    fn links(&mut self, index: usize, kind: ListKind) -> &mut Links {
        let node = &mut self.nodes[index];
        match kind {
            ListKind::All => &mut node.all,
            ListKind::Class => &mut node.peers,
        }
    }

    fn append(&mut self, list: &mut List, index: usize, kind: ListKind) {
        *self.links(index, kind) = Links { older: list.newest, newer: NIL };
        match list.newest {
            NIL => list.oldest = index,
            newest => self.links(newest, kind).newer = index,
        }
        list.newest = index;
    }

    fn unlink(&mut self, list: &mut List, index: usize, kind: ListKind) {
        let Links { older, newer } = *self.links(index, kind);
        match older {
            NIL => list.oldest = newer,
            older => self.links(older, kind).newer = newer,
        }
        match newer {
            NIL => list.newest = older,
            newer => self.links(newer, kind).older = older,
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
        assert_eq!(walked.len(), self.len, "exact-I1");
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
                assert_eq!(peers, expected, "exact-I2, class {class}");
                peers.len()
            })
            .sum();
        assert_eq!(in_classes, self.len, "exact-I1");
        let filled = self.nodes.iter().filter(|node| node.item.is_some()).count();
        assert_eq!(filled, self.len, "exact-I1: a free node holds an item");
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
            if store.len > 3 {
                store.evict();
            }
        }
        assert_eq!(store.classes.len(), 3);
        assert_eq!(store.nodes.len(), 4);
    }

    #[derive(Debug, Clone)]
    enum StoreStep {
        Put(usize),
        Take(usize),
        Evict,
        Drain,
    }

    fn step() -> impl Strategy<Value = StoreStep> {
        prop_oneof![
            8 => (0..6_usize).prop_map(StoreStep::Put),
            6 => (0..6_usize).prop_map(StoreStep::Take),
            3 => Just(StoreStep::Evict),
            1 => Just(StoreStep::Drain),
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
                    StoreStep::Put(class) => {
                        store.put(class, number);
                        model.push((class, number));
                    }
                    StoreStep::Take(class) => {
                        let at = model.iter().position(|&(other, _)| other == class);
                        prop_assert_eq!(store.take(class), at.map(|at| model.remove(at).1));
                    }
                    StoreStep::Evict => {
                        let oldest = (!model.is_empty()).then(|| model.remove(0).1);
                        prop_assert_eq!(store.evict(), oldest);
                    }
                    StoreStep::Drain => {
                        let all: Vec<_> = model.drain(..).map(|(_, item)| item).collect();
                        prop_assert_eq!(store.drain(), all);
                    }
                }
                store.validate();
            }
        }
    }
}
