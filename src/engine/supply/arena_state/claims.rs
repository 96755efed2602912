//! The ceiling in the books: what is claimed under it, and the room that is left.

use std::sync::Arc;

use super::ArenaState;
use crate::quota::{Claim, Over, Quota, Room};

impl ArenaState {
    /// The ceilings that the arena claims under.
    pub(in crate::engine::supply) fn quota(&self) -> &Arc<Quota> {
        self.claim.quota()
    }

    /// Bytes that may still be claimed, where at least `wanted_bytes` are of use.
    pub(in crate::engine::supply) fn room_for(&self, wanted_bytes: u64) -> Room {
        self.quota().room_for(wanted_bytes)
    }

    /// All that could be released is: what is left stays until the process ends.
    pub(in crate::engine::supply) fn end_claims(&mut self, is_all_released: bool) {
        let claim = self.take_claim();
        if !is_all_released {
            claim.keep_forever();
        }
    }

    /// All is released but what a thread releases later: that stays claimed by the result.
    pub(in crate::engine::supply) fn end_claims_but(&mut self, later_bytes: u64) -> Claim {
        let mut claim = self.take_claim();
        // Less than before is never refused.
        let _ = claim.resize(later_bytes);
        claim
    }

    fn take_claim(&mut self) -> Claim {
        let nothing = self.quota().nothing();
        std::mem::replace(&mut self.claim, nothing)
    }

    /// Bytes that others claim under the same ceiling: the arenas of other memory nodes, and what is held beside buffers.
    pub(in crate::engine::supply) fn claimed_by_others(&self) -> u64 {
        self.quota().claimed_bytes().saturating_sub(self.claim.bytes())
    }

    /// Claims what is held and planned now.
    pub(super) fn update_claim(&mut self) -> Result<(), Over> {
        self.claim.resize(self.all_claimed_bytes())
    }

    /// Claims what is held now, which is no more than a plan claimed.
    pub(super) fn lower_claim(&mut self) {
        let lowered = self.update_claim();
        debug_assert!(lowered.is_ok(), "a settlement claims more than its plan: {lowered:?}");
    }

    fn all_claimed_bytes(&self) -> u64 {
        self.arena.stats().claimed_bytes + self.reserve_overhead_bytes + self.pending_bytes
    }
}
