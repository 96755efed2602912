//! The arenas of one pool on several memory nodes, which are under one ceiling.

use std::sync::{Arc, Weak};

use pinpool_os::sync::plain::Mutex;

/// The arenas of one pool. Empty while it has one.
#[derive(Debug)]
pub(super) struct NodeArenas<A> {
    arenas: Mutex<Vec<Weak<A>>>,
    /// Whose reserve is pinned before those of the others.
    first: Mutex<Weak<A>>,
}

impl<A> Default for NodeArenas<A> {
    fn default() -> Self {
        Self { arenas: Mutex::new(Vec::new()), first: Mutex::new(Weak::new()) }
    }
}

impl<A> NodeArenas<A> {
    pub(super) fn add(&self, arena: &Arc<A>) {
        let mut arenas = self.arenas.lock();
        arenas.retain(|other| other.strong_count() > 0);
        if !arenas.iter().any(|other| std::ptr::eq(other.as_ptr(), Arc::as_ptr(arena))) {
            arenas.push(Arc::downgrade(arena));
        }
    }

    /// The reserve of `arena` is pinned before those of the others, from now on.
    pub(super) fn put_first(&self, arena: &Arc<A>) {
        *self.first.lock() = Arc::downgrade(arena);
    }

    /// Another arena than this one whose reserve comes first.
    pub(super) fn first_before(&self, arena: &A) -> Option<Arc<A>> {
        self.first.lock().upgrade().filter(|first| !std::ptr::eq(Arc::as_ptr(first), arena))
    }

    /// The other arenas.
    pub(super) fn beside(&self, arena: &A) -> Vec<Arc<A>> {
        let arenas = self.arenas.lock();
        arenas.iter().filter(|other| !std::ptr::eq(other.as_ptr(), arena)).filter_map(Weak::upgrade).collect()
    }
}
