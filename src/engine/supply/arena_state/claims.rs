//! The ceiling in the books: what is claimed under it, and the room that is left.

use std::sync::Arc;

use super::super::Refusal;
use super::super::common_ceiling::CeilingShare;
use super::ArenaState;
use crate::ledger::SharedCeiling;

impl ArenaState {
    pub(in crate::engine::supply) fn max_bytes(&self) -> Option<u64> {
        self.max_bytes
    }

    /// What is held above a lower ceiling stays held until it is released.
    pub(in crate::engine::supply) fn set_max_bytes(&mut self, max_bytes: Option<u64>) {
        self.max_bytes = max_bytes;
        // `None` is the highest of all.
        self.highest_max_bytes = self.highest_max_bytes.zip(max_bytes).map(|(highest, max)| highest.max(max));
    }

    /// Bytes that may still be claimed under the ceiling, and under the host ledger, where at least `wanted_bytes` are of use.
    pub(in crate::engine::supply) fn room_bytes(&self, wanted_bytes: u64) -> u64 {
        let ledger = self.share.ledger();
        self.own_room_bytes().min(ledger.map_or(u64::MAX, |ledger| ledger.room_for(wanted_bytes)))
    }

    /// Bytes that may still be claimed under the ceiling of the pool.
    pub(in crate::engine::supply) fn own_room_bytes(&self) -> u64 {
        self.max_bytes.map_or(u64::MAX, |max_bytes| max_bytes.saturating_sub(self.claimed_under_ceiling()))
    }

    /// Why there is no room for `needed_bytes`, of which `missing_bytes` would have to be claimed: the host ledger, if the pool's
    /// own ceiling leaves room for them.
    pub(in crate::engine::supply) fn refusal(&self, needed_bytes: u64, missing_bytes: u64) -> Refusal {
        if missing_bytes <= self.own_room_bytes() {
            self.refusal_by_ledger(needed_bytes, missing_bytes)
        } else {
            Refusal::Ceiling { needed_bytes }
        }
    }

    /// Why a claim of `needed_bytes` has just failed: by the host ledger, if the pool's own ceiling leaves room for them. The ledger is
    /// not asked again, since it may have room by now.
    pub(in crate::engine::supply) fn refusal_of_claim(&self, needed_bytes: u64) -> Refusal {
        match self.share.ledger() {
            Some(_) if needed_bytes <= self.own_room_bytes() => {
                Refusal::Ledger { needed_bytes, missing_bytes: needed_bytes }
            }
            _ => Refusal::Ceiling { needed_bytes },
        }
    }

    /// Why there is no room for `needed_bytes`: the host ledger, if it has no room for `missing_bytes`.
    pub(in crate::engine::supply) fn refusal_by_ledger(&self, needed_bytes: u64, missing_bytes: u64) -> Refusal {
        match self.share.ledger() {
            Some(ledger) if ledger.room_for(missing_bytes) < missing_bytes => {
                Refusal::Ledger { needed_bytes, missing_bytes }
            }
            _ => Refusal::Ceiling { needed_bytes },
        }
    }

    /// Claims under `ledger` as well, from now on.
    pub(in crate::engine::supply) fn join_ledger(&mut self, ledger: Arc<SharedCeiling>) {
        self.share.join(ledger);
    }

    pub(in crate::engine::supply) fn ledger(&self) -> Option<&Arc<SharedCeiling>> {
        self.share.ledger()
    }

    /// All that could be released is: what is left stays until the process ends. Returns the ledger, to be dropped outside of
    /// the lock.
    pub(in crate::engine::supply) fn end_claims(&mut self, is_all_released: bool) -> Option<Arc<SharedCeiling>> {
        if is_all_released {
            self.share.record(0, None);
        }
        self.share.end()
    }

    /// All is released but what a thread releases later: that stays claimed by the result.
    pub(in crate::engine::supply) fn end_claims_but(&mut self, later_bytes: u64) -> CeilingShare {
        // Less than before is always recorded.
        self.share.record(later_bytes, None);
        std::mem::take(&mut self.share)
    }

    /// Bytes claimed beyond the ceiling, since it was lowered.
    pub(in crate::engine::supply) fn over_bytes(&self) -> u64 {
        self.max_bytes.map_or(0, |max_bytes| self.claimed_under_ceiling().saturating_sub(max_bytes))
    }

    /// A share of the ceiling for another arena.
    pub(in crate::engine::supply) fn share_beside(&self) -> CeilingShare {
        self.share.beside()
    }

    /// Claims nothing yet: takes its share of a ceiling.
    pub(in crate::engine::supply) fn take_share(&mut self, share: CeilingShare) {
        self.share = share;
    }

    fn claimed_under_ceiling(&self) -> u64 {
        self.all_claimed_bytes().saturating_add(self.claimed_by_others())
    }

    /// Bytes that others claim under the same ceiling.
    pub(in crate::engine::supply) fn claimed_by_others(&self) -> u64 {
        self.share.of_others()
    }

    /// Records what is claimed now. False if another arena has taken that room.
    pub(super) fn record_claims(&mut self) -> bool {
        self.share.record(self.all_claimed_bytes(), self.max_bytes)
    }

    fn all_claimed_bytes(&self) -> u64 {
        self.arena.stats().claimed_bytes + self.reserve_overhead_bytes + self.pending_bytes
    }
}
