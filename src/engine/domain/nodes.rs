//! The domains of one pool on several memory nodes, which are under one ceiling.

use std::sync::{Arc, Weak};

use pinpool_os::sync::plain::Mutex;

/// The domains of one pool. Empty while it has one.
#[derive(Debug)]
pub(super) struct Nodes<D> {
    domains: Mutex<Vec<Weak<D>>>,
    /// Whose reserve is pinned before those of the others.
    first: Mutex<Weak<D>>,
}

impl<D> Default for Nodes<D> {
    fn default() -> Self {
        Self { domains: Mutex::new(Vec::new()), first: Mutex::new(Weak::new()) }
    }
}

impl<D> Nodes<D> {
    pub(super) fn add(&self, domain: &Arc<D>) {
        let mut domains = self.domains.lock();
        domains.retain(|other| other.strong_count() > 0);
        if !domains.iter().any(|other| std::ptr::eq(other.as_ptr(), Arc::as_ptr(domain))) {
            domains.push(Arc::downgrade(domain));
        }
    }

    /// The reserve of `domain` is pinned before those of the others, from now on.
    pub(super) fn put_first(&self, domain: &Arc<D>) {
        *self.first.lock() = Arc::downgrade(domain);
    }

    /// Another domain than this one whose reserve comes first.
    pub(super) fn first_before(&self, domain: &D) -> Option<Arc<D>> {
        self.first.lock().upgrade().filter(|first| !std::ptr::eq(Arc::as_ptr(first), domain))
    }

    /// The other domains.
    pub(super) fn beside(&self, domain: &D) -> Vec<Arc<D>> {
        let domains = self.domains.lock();
        domains.iter().filter(|other| !std::ptr::eq(other.as_ptr(), domain)).filter_map(Weak::upgrade).collect()
    }
}
