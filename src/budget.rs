//! The ceiling: bytes are claimed here before the source is called.
//!
//! ```text
//!   claim(n) ──▶ Claim ──▶ the slow call ──┬─ succeeded: `held`: counted in the figures as long as the memory lives
//!                                          └─ failed: dropping the claim returns the bytes
//! ```
//!
//! A budget may lie under a host ledger, where each of its claims is made as well. A budget may lie inside another, as the ceiling of a partition inside that of its parent: a claim counts in both.
//!
//! Never calls a source and never waits.
//!
//! - budget-I1: `claimed` is the sum of all live claims and of those kept forever, those of inner budgets included. A claim
//!   that would raise it over `max` is refused. So it is at most `max`, unless `max` was lowered meanwhile.
//! - budget-I2: a claim is returned exactly once, by its drop.
//! - budget-I3: `held` and its peak count memory that is there, and no claim whose memory was refused.

use std::sync::Arc;

use crate::ledger::SharedCeiling;
use pinpool_os::lost;
use pinpool_os::sync::atomic::{AtomicU64, Ordering};

/// Bytes held against a ceiling.
#[derive(Debug)]
pub(crate) struct Budget {
    /// `u64::MAX` without a ceiling.
    max_bytes: AtomicU64,
    /// The highest ceiling so far.
    highest_max_bytes: AtomicU64,
    claimed_bytes: AtomicU64,
    held_bytes: AtomicU64,
    peak_bytes: AtomicU64,
    /// Bytes held by the budgets inside this one, which count in `held_bytes`.
    inner_bytes: AtomicU64,
    /// Buffers of the budgets inside this one that are never used again, and their bytes.
    inner_lost: AtomicU64,
    inner_lost_bytes: AtomicU64,
    /// The budget that this one lies in.
    outer: Option<Arc<Budget>>,
    ledger: Option<Arc<SharedCeiling>>,
}

/// Bytes of a [`Budget`], returned when this is dropped.
#[derive(Debug)]
#[must_use = "dropping a claim returns its bytes"]
pub(crate) struct Claim {
    budget: Arc<Budget>,
    bytes: u64,
    is_held: bool,
}

impl Budget {
    pub(crate) fn new(max_bytes: Option<u64>) -> Arc<Self> {
        Self::with(max_bytes, None, None)
    }

    /// A budget whose claims are made in `ledger` too, if there is one.
    pub(crate) fn under(ledger: Option<Arc<SharedCeiling>>, max_bytes: Option<u64>) -> Arc<Self> {
        Self::with(max_bytes, None, ledger)
    }

    /// A budget inside `outer`.
    pub(crate) fn inside(outer: &Arc<Self>, max_bytes: Option<u64>) -> Arc<Self> {
        Self::with(max_bytes, Some(outer.clone()), None)
    }

    fn with(max_bytes: Option<u64>, outer: Option<Arc<Self>>, ledger: Option<Arc<SharedCeiling>>) -> Arc<Self> {
        Arc::new(Self {
            max_bytes: AtomicU64::new(max_bytes.unwrap_or(u64::MAX)),
            highest_max_bytes: AtomicU64::new(max_bytes.unwrap_or(u64::MAX)),
            claimed_bytes: AtomicU64::new(0),
            held_bytes: AtomicU64::new(0),
            peak_bytes: AtomicU64::new(0),
            inner_bytes: AtomicU64::new(0),
            inner_lost: AtomicU64::new(0),
            inner_lost_bytes: AtomicU64::new(0),
            outer,
            ledger,
        })
    }

    /// Claims `bytes`; `None` if that would exceed the ceiling, here or further out.
    pub(crate) fn claim(self: &Arc<Self>, bytes: u64) -> Option<Claim> {
        let refused_by = self.chain().find(|budget| !budget.add_claim(bytes));
        if let Some(refused_by) = refused_by {
            let claimed = self.chain().take_while(|budget| !std::ptr::eq(*budget, refused_by));
            claimed.for_each(|budget| budget.end_claim(bytes));
            return None;
        }
        if self.ledger.as_ref().is_some_and(|ledger| !ledger.claim(bytes)) {
            self.chain().for_each(|budget| budget.end_claim(bytes));
            return None;
        }
        Some(Claim { budget: self.clone(), bytes, is_held: false })
    }

    /// This budget and those around it, from the inside out.
    fn chain(&self) -> impl Iterator<Item = &Self> {
        std::iter::successors(Some(self), |budget| budget.outer.as_deref())
    }

    fn add_claim(&self, bytes: u64) -> bool {
        // Relaxed: the counts guard no other memory; the compare-exchange alone upholds budget-I1.
        let max_bytes = self.max_bytes.load(Ordering::Relaxed);
        let fits = |claimed: u64| claimed.checked_add(bytes).filter(|&sum| sum <= max_bytes);
        self.claimed_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok()
    }

    fn end_claim(&self, bytes: u64) {
        // Relaxed, as in `add_claim`.
        self.claimed_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Sets the ceiling. What is held above a lower one stays held until it is given back.
    pub(crate) fn set_max_bytes(&self, max_bytes: Option<u64>) {
        // Relaxed: a claim that is made at the same time comes before or after.
        let max_bytes = max_bytes.unwrap_or(u64::MAX);
        self.highest_max_bytes.fetch_max(max_bytes, Ordering::Relaxed);
        self.max_bytes.store(max_bytes, Ordering::Relaxed);
    }

    /// A buffer of `bytes` that was claimed here is lost. The budgets around this one remember it for longer than this one may
    /// live.
    pub(crate) fn note_lost(&self, bytes: u64) {
        for budget in self.chain().skip(1) {
            budget.inner_lost.fetch_add(1, Ordering::Relaxed);
            budget.inner_lost_bytes.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    /// A lost buffer of `bytes` is used again.
    pub(crate) fn note_recovered(&self, bytes: u64) {
        for budget in self.chain().skip(1) {
            budget.inner_lost.fetch_sub(1, Ordering::Relaxed);
            budget.inner_lost_bytes.fetch_sub(bytes, Ordering::Relaxed);
        }
    }

    /// Buffers of the budgets inside this one that are lost, and their bytes.
    pub(crate) fn inner_lost(&self) -> (u64, u64) {
        (self.inner_lost.load(Ordering::Relaxed), self.inner_lost_bytes.load(Ordering::Relaxed))
    }

    pub(crate) fn ledger(&self) -> Option<&Arc<SharedCeiling>> {
        self.ledger.as_ref()
    }

    /// Bytes that may still be claimed here.
    pub(crate) fn room_bytes(&self) -> u64 {
        // Relaxed: a snapshot.
        self.max_bytes.load(Ordering::Relaxed).saturating_sub(self.claimed_bytes.load(Ordering::Relaxed))
    }

    /// Bytes of memory that is there.
    pub(crate) fn held_bytes(&self) -> u64 {
        // Relaxed, here and below: a snapshot.
        self.held_bytes.load(Ordering::Relaxed)
    }

    /// Most bytes held at any time.
    pub(crate) fn peak_bytes(&self) -> u64 {
        self.peak_bytes.load(Ordering::Relaxed)
    }

    /// Bytes held by the budgets inside this one, which count as held by this one.
    pub(crate) fn inner_bytes(&self) -> u64 {
        self.inner_bytes.load(Ordering::Relaxed)
    }

    /// `None` without a ceiling.
    pub(crate) fn max_bytes(&self) -> Option<u64> {
        Some(self.max_bytes.load(Ordering::Relaxed)).filter(|&max_bytes| max_bytes != u64::MAX)
    }

    /// The highest ceiling so far.
    pub(crate) fn highest_max_bytes(&self) -> Option<u64> {
        Some(self.highest_max_bytes.load(Ordering::Relaxed)).filter(|&max_bytes| max_bytes != u64::MAX)
    }

    /// What refuses `bytes`: the first budget that can never hold them, else the first that has no room now. How far out it
    /// lies, its ceiling, and whether it could ever hold them.
    pub(crate) fn refusing(&self, bytes: u64) -> Option<(usize, u64, bool)> {
        let find = |could_ever: bool, refuses: &dyn Fn(&Self, u64) -> bool| {
            let ceilings =
                self.chain().enumerate().filter_map(|(depth, budget)| Some((depth, budget, budget.max_bytes()?)));
            let mut refusing = ceilings.filter(|&(_, budget, max_bytes)| refuses(budget, max_bytes));
            refusing.next().map(|(depth, _, max_bytes)| (depth, max_bytes, could_ever))
        };
        find(false, &|_, max_bytes| bytes > max_bytes).or_else(|| find(true, &|budget, _| bytes > budget.room_bytes()))
    }

    /// Whether `bytes` could be claimed, here and further out, if nothing else were.
    pub(crate) fn could_hold(&self, bytes: u64) -> bool {
        self.chain().all(|budget| budget.max_bytes().is_none_or(|max_bytes| bytes <= max_bytes))
    }
}

impl Claim {
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The memory that was claimed for is there.
    pub(crate) fn held(mut self) -> Self {
        if !std::mem::replace(&mut self.is_held, true) {
            for (depth, budget) in self.budget.chain().enumerate() {
                // Relaxed: a maximum of sums that were all really held (budget-I3).
                let before = budget.held_bytes.fetch_add(self.bytes, Ordering::Relaxed);
                budget.peak_bytes.fetch_max(before + self.bytes, Ordering::Relaxed);
                if depth > 0 {
                    budget.inner_bytes.fetch_add(self.bytes, Ordering::Relaxed);
                }
            }
        }
        self
    }

    /// Counts the bytes as held forever: their memory could not be released.
    pub(crate) fn keep_forever(self) {
        // The pool may end before the process does, and the ledger goes on counting them.
        self.budget.ledger.iter().cloned().for_each(lost::keep);
        self.held().bytes = 0;
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        for (depth, budget) in self.budget.chain().enumerate() {
            if self.is_held {
                // Relaxed, as in `held`; before the claim ends, so that no more is ever held than claimed.
                budget.held_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
                if depth > 0 {
                    budget.inner_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
                }
            }
            budget.end_claim(self.bytes);
        }
        self.budget.ledger.iter().for_each(|ledger| ledger.give_back(self.bytes));
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_claim_over_the_ceiling_is_refused_and_claims_nothing() {
        let budget = Budget::new(Some(100));
        let first = budget.claim(60).unwrap().held();
        assert!(budget.claim(41).is_none());
        let second = budget.claim(40).unwrap().held();
        assert_eq!(budget.held_bytes(), 100);
        drop(first);
        assert_eq!((budget.held_bytes(), budget.peak_bytes()), (40, 100));
        second.keep_forever();
        assert_eq!(budget.held_bytes(), 40);
    }

    #[test]
    fn a_claim_whose_memory_was_refused_is_in_no_figure() {
        let budget = Budget::new(Some(100));
        let claim = budget.claim(90).unwrap();
        assert!(budget.claim(11).is_none(), "it counts against the ceiling");
        assert_eq!((budget.held_bytes(), budget.peak_bytes()), (0, 0));
        drop(claim);
        let held = budget.claim(30).unwrap().held().held();
        assert_eq!((budget.held_bytes(), budget.peak_bytes()), (30, 30));
        drop(held);
        assert!(budget.claim(100).is_some());
    }

    #[test]
    fn a_claim_counts_in_every_budget_around_its_own() {
        let outer = Budget::new(Some(100));
        let (inner, other) = (Budget::inside(&outer, Some(80)), Budget::inside(&outer, None));
        let held = inner.claim(60).unwrap().held();
        assert!(inner.claim(30).is_none(), "over its own ceiling");
        assert!(other.claim(41).is_none(), "over the ceiling around it");
        assert!(outer.claim(41).is_none());
        assert_eq!((inner.held_bytes(), outer.held_bytes(), outer.inner_bytes()), (60, 60, 60));
        let beside = outer.claim(40).unwrap().held();
        assert_eq!((outer.held_bytes(), outer.inner_bytes(), outer.peak_bytes()), (100, 60, 100));
        assert!(inner.could_hold(80) && !inner.could_hold(81) && other.could_hold(100) && !other.could_hold(101));
        drop(held);
        drop(beside);
        assert_eq!((inner.held_bytes(), outer.held_bytes(), outer.inner_bytes()), (0, 0, 0));
        assert!(inner.claim(80).is_some());
    }

    #[test]
    fn lost_buffers_are_remembered_by_the_budgets_around_theirs() {
        let outer = Budget::new(Some(100));
        let middle = Budget::inside(&outer, None);
        let inner = Budget::inside(&middle, None);
        inner.note_lost(30);
        middle.note_lost(12);
        assert_eq!((inner.inner_lost(), middle.inner_lost(), outer.inner_lost()), ((0, 0), (1, 30), (2, 42)));
        let claim = inner.claim(25).unwrap();
        assert_eq!(claim.bytes(), 25);
    }

    #[test]
    fn the_highest_ceiling_is_remembered() {
        let budget = Budget::new(Some(50));
        assert_eq!((budget.max_bytes(), budget.highest_max_bytes()), (Some(50), Some(50)));
        budget.set_max_bytes(Some(80));
        budget.set_max_bytes(Some(20));
        assert_eq!((budget.max_bytes(), budget.highest_max_bytes()), (Some(20), Some(80)));
        budget.set_max_bytes(None);
        budget.set_max_bytes(Some(20));
        assert_eq!((budget.max_bytes(), budget.highest_max_bytes()), (Some(20), None));
    }

    #[test]
    fn a_ceiling_that_is_lowered_refuses_until_enough_came_back() {
        let budget = Budget::new(None);
        let held = budget.claim(60).unwrap().held();
        budget.set_max_bytes(Some(50));
        assert!(budget.claim(0).is_none() && budget.claim(1).is_none());
        assert_eq!((budget.held_bytes(), budget.max_bytes()), (60, Some(50)));
        drop(held);
        assert!(budget.claim(51).is_none());
        assert!(budget.claim(50).is_some());
    }

    #[test]
    fn sums_that_overflow_are_refused() {
        let budget = Budget::new(None);
        let _held = budget.claim(u64::MAX - 1).unwrap();
        assert!(budget.claim(2).is_none());
        assert_eq!(budget.max_bytes(), None);
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;

    #[test]
    fn two_claims_never_pass_the_ceiling_together() {
        loom::model(|| {
            let budget = Budget::new(Some(3));
            let other = budget.clone();
            let thread = loom::thread::spawn(move || other.claim(2).map(|claim| drop(claim.held())).is_some());
            let claimed = budget.claim(2).map(Claim::held);
            assert!(budget.held_bytes() <= 3);
            let mine = claimed.is_some();
            drop(claimed);
            let theirs = thread.join().unwrap();
            assert!(mine || theirs, "a refusal needs another claim");
            assert_eq!(budget.held_bytes(), 0);
            assert!(budget.peak_bytes() <= 3);
        });
    }
}
