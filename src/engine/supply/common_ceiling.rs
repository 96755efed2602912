//! One ceiling over several arenas: those of one pool on several memory nodes.
//!
//! ```text
//!   arena of node 0: claimed ─┐
//!                             ├─▶ sum <= ceiling
//!   arena of node 1: claimed ─┘
//! ```
//!
//! Each arena changes its share under its own lock. A pool of one node has one share, which is the sum. Under a host ledger
//! what a share has more than before is claimed there too, and what it has less is given back.
//!
//! - common-ceiling-I1: `sum` is the sum of all shares, as last recorded. Recording more than before is refused if it would
//!   raise the sum over the ceiling and another arena has a share,
//!   or if the host ledger has no room for it.

use std::sync::{Arc, Weak};

use crate::budget::Claim;
use crate::ledger::SharedCeiling;
use pinpool_os::lost;
use pinpool_os::sync::plain::Mutex;
use pinpool_os::sync::process::{AtomicU64, Ordering};

/// The share of one arena.
#[derive(Debug, Default)]
pub(super) struct CeilingShare {
    sum: Arc<AtomicU64>,
    own: u64,
    ledger: Option<Arc<SharedCeiling>>,
}

impl CeilingShare {
    /// An empty share of the same sum.
    pub(super) fn beside(&self) -> Self {
        Self { sum: self.sum.clone(), own: 0, ledger: self.ledger.clone() }
    }

    /// From now on also under `ledger`. Before anything is claimed.
    pub(super) fn join(&mut self, ledger: Arc<SharedCeiling>) {
        self.ledger = Some(ledger);
    }

    pub(super) fn ledger(&self) -> Option<&Arc<SharedCeiling>> {
        self.ledger.as_ref()
    }

    /// The pool has ended. What it still claims stays pinned until the process ends, and claimed as long. Returns the ledger,
    /// whose drop is a slow call.
    pub(super) fn end(&mut self) -> Option<Arc<SharedCeiling>> {
        let ledger = self.ledger.take();
        ledger.iter().filter(|_| self.own > 0).cloned().for_each(lost::keep);
        ledger
    }

    /// What the other arenas claim.
    pub(super) fn of_others(&self) -> u64 {
        // Relaxed: the sum guards no other memory.
        self.sum.load(Ordering::Relaxed).saturating_sub(self.own)
    }

    /// Records that this arena claims `bytes` now. False, and nothing is recorded, if that is more than before and the
    /// arenas together would claim more than `max_bytes`.
    pub(super) fn record(&mut self, bytes: u64, max_bytes: Option<u64>) -> bool {
        let (own, max_bytes) = (self.own, max_bytes.unwrap_or(u64::MAX));
        let change = |sum: u64| {
            let others = sum.saturating_sub(own);
            let sum = others.saturating_add(bytes);
            (bytes <= own || others == 0 || sum <= max_bytes).then_some(sum)
        };
        // Relaxed: as above.
        if self.sum.fetch_update(Ordering::Relaxed, Ordering::Relaxed, change).is_err() {
            return false;
        }
        let ledger = self.ledger.as_ref();
        if bytes > own && ledger.is_some_and(|ledger| !ledger.claim(bytes - own)) {
            self.sum.fetch_sub(bytes - own, Ordering::Relaxed);
            return false;
        }
        ledger.iter().for_each(|ledger| ledger.give_back(own.saturating_sub(bytes)));
        self.own = bytes;
        true
    }
}

/// Bytes that something beside the buffers of a pool holds under its ceiling, until this is dropped.
#[derive(Debug)]
pub(crate) struct OutsideClaim {
    share: CeilingShare,
    /// Under the ceiling of a pool's own, if it has one.
    _own: Option<Claim>,
    _counted: Claim,
}

impl OutsideClaim {
    /// Under the ceiling of an arena, if there is one, and that of a pool's own.
    pub(super) fn new(share: CeilingShare, own: Option<Claim>, counted: Claim) -> Self {
        Self { share, _own: own, _counted: counted }
    }
}

impl Drop for OutsideClaim {
    fn drop(&mut self) {
        self.share.record(0, None);
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_together_stay_under_the_ceiling() {
        let mut first = CeilingShare::default();
        assert!(first.record(60, Some(100)));
        let mut second = first.beside();
        assert_eq!((first.of_others(), second.of_others()), (0, 60));
        assert!(!second.record(41, Some(100)) && second.record(40, Some(100)));
        assert!(!first.record(61, Some(100)) && first.record(50, Some(100)), "less is always recorded");
        assert!(second.record(30, Some(10)), "under a lowered ceiling too");
        assert!(first.record(u64::MAX, None));
        assert_eq!(second.of_others(), u64::MAX - 30);
    }

    #[test]
    fn an_arena_alone_is_bounded_by_its_own_rules() {
        let mut only = CeilingShare::default();
        assert!(only.record(200, Some(100)));
        assert_eq!(only.of_others(), 0);
    }
}
