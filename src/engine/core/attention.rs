//! Why hits and puts of a pool take the slow path: a get waits here, or other processes want memory of the host ledger.

use pinpool_os::sync::plain::Mutex;
use pinpool_os::sync::process::{AtomicBool, Ordering};

#[derive(Debug, Default)]
pub(super) struct Attention {
    /// One for each [`Reason`]. Locked while the shards are set, so that they are set in order.
    reasons: Mutex<[bool; 2]>,
    is_for_ledger: AtomicBool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reason {
    Line,
    Ledger,
}

impl Attention {
    /// `reason` holds from now on if `holds` says so, which is asked in the order of these calls. Calls `tell` if that changes
    /// whether hits and puts take the slow path.
    pub(super) fn change(&self, reason: Reason, holds: impl FnOnce() -> bool, tell: impl FnOnce(bool)) {
        let mut reasons = self.reasons.lock();
        let before = reasons.contains(&true);
        reasons[reason as usize] = holds();
        // Relaxed: a put that takes the slow path because of this finds it by the lock of its shard.
        self.is_for_ledger.store(reasons[Reason::Ledger as usize], Ordering::Relaxed);
        let now = reasons.contains(&true);
        if before != now {
            tell(now);
        }
    }

    #[inline]
    pub(super) fn is_for_ledger(&self) -> bool {
        self.is_for_ledger.load(Ordering::Relaxed)
    }
}

#[cfg(all(test, not(pinpool_loom)))]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn the_shards_are_told_when_the_first_reason_comes_and_the_last_one_goes() {
        let (attention, told) = (Attention::default(), RefCell::new(Vec::new()));
        let change = |reason, holds| attention.change(reason, || holds, |now| told.borrow_mut().push(now));
        change(Reason::Line, true);
        change(Reason::Ledger, true);
        assert!(attention.is_for_ledger());
        change(Reason::Line, false);
        change(Reason::Ledger, true);
        assert_eq!(*told.borrow(), [true]);
        change(Reason::Ledger, false);
        assert!(!attention.is_for_ledger());
        assert_eq!(*told.borrow(), [true, false]);
    }
}
