//! The ceiling: bytes are claimed here before the source is called.
//!
//! ```text
//!   claim(n) ──▶ Claim ──▶ the slow call ──┬─ succeeded: the claim lives as long as the memory
//!                                          └─ failed: dropping the claim returns the bytes
//! ```
//!
//! Never calls a source and never waits.
//!
//! - budget-I1: `held` is the sum of all live claims and of those kept forever, and at most `max`, at every instant.
//! - budget-I2: a claim is returned exactly once, by its drop.

use std::sync::Arc;

use crate::sync::atomic::{AtomicU64, Ordering};

/// Bytes held against a ceiling.
#[derive(Debug)]
pub(crate) struct Budget {
    max_bytes: u64,
    held_bytes: AtomicU64,
    peak_bytes: AtomicU64,
}

/// Bytes of a [`Budget`], returned when this is dropped.
#[derive(Debug)]
#[must_use = "dropping a claim returns its bytes"]
pub(crate) struct Claim {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Budget {
    pub(crate) fn new(max_bytes: Option<u64>) -> Arc<Self> {
        let max_bytes = max_bytes.unwrap_or(u64::MAX);
        Arc::new(Self { max_bytes, held_bytes: AtomicU64::new(0), peak_bytes: AtomicU64::new(0) })
    }

    /// Claims `bytes`; `None` if that would exceed the ceiling.
    pub(crate) fn claim(self: &Arc<Self>, bytes: u64) -> Option<Claim> {
        let fits = |held: u64| held.checked_add(bytes).filter(|&sum| sum <= self.max_bytes);
        // Relaxed: the count guards no other memory; the compare-exchange alone upholds budget-I1.
        let before = self.held_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).ok()?;
        // Relaxed: a maximum of values that were all really held.
        self.peak_bytes.fetch_max(before + bytes, Ordering::Relaxed);
        Some(Claim { budget: self.clone(), bytes })
    }

    pub(crate) fn held_bytes(&self) -> u64 {
        // Relaxed: a snapshot.
        self.held_bytes.load(Ordering::Relaxed)
    }

    /// Most bytes held at any time.
    pub(crate) fn peak_bytes(&self) -> u64 {
        // Relaxed: a snapshot.
        self.peak_bytes.load(Ordering::Relaxed)
    }

    /// `None` without a ceiling.
    pub(crate) fn max_bytes(&self) -> Option<u64> {
        (self.max_bytes != u64::MAX).then_some(self.max_bytes)
    }
}

impl Claim {
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Counts the bytes as held forever: their memory could not be released.
    pub(crate) fn keep_forever(mut self) {
        self.bytes = 0;
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // Relaxed, as in `claim`.
        self.budget.held_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_claim_over_the_ceiling_is_refused_and_claims_nothing() {
        let budget = Budget::new(Some(100));
        let first = budget.claim(60).unwrap();
        assert!(budget.claim(41).is_none());
        let second = budget.claim(40).unwrap();
        assert_eq!(budget.held_bytes(), 100);
        drop(first);
        assert_eq!((budget.held_bytes(), budget.peak_bytes()), (40, 100));
        second.keep_forever();
        assert_eq!(budget.held_bytes(), 40);
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
            let thread = loom::thread::spawn(move || other.claim(2).map(drop).is_some());
            let claimed = budget.claim(2);
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
