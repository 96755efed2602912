//! The limit in the books: what is claimed under it, and the room that is left.

use std::sync::Arc;

use super::Books;
use crate::quota::{Budget, Claim, QuotaExceeded};

impl Books {
    /// The limits that the arena claims under.
    pub(in crate::engine) fn budget(&self) -> &Arc<Budget> {
        &self.budget
    }

    /// Bytes that may still be claimed, where at least `wanted_bytes` are of use.
    pub(in crate::engine) fn room_for(&self, wanted_bytes: u64) -> u64 {
        self.budget().room_for(wanted_bytes)
    }

    /// All that could be released is: what is left stays claimed until the process ends. Drop the result outside the lock: it may
    /// be the last claim under a shared limit, which is left then.
    pub(in crate::engine) fn end_claims(&mut self, is_all_released: bool) -> Option<Claim> {
        match self.claim.take() {
            Some(claim) if !is_all_released && claim.bytes() > 0 => {
                claim.keep_forever();
                None
            }
            claim => claim,
        }
    }

    /// Bytes that are claimed under the same limit for memory other than the buffers.
    pub(in crate::engine) fn claimed_by_others(&self) -> u64 {
        self.budget.used_bytes().saturating_sub(self.claim.as_ref().map_or(0, Claim::bytes))
    }

    /// Claims what is held and planned now.
    pub(in crate::engine) fn update_claim(&mut self) -> Result<(), QuotaExceeded> {
        let bytes = self.all_claimed_bytes();
        self.claim.as_mut().map_or(Ok(()), |claim| claim.resize(bytes))
    }

    /// Claims what is held now, which is no more than a plan claimed.
    pub(in crate::engine) fn lower_claim(&mut self) {
        let lowered = self.update_claim();
        debug_assert!(lowered.is_ok(), "a completion claims more than its plan: {lowered:?}");
    }

    fn all_claimed_bytes(&self) -> u64 {
        self.arena.stats().claimed_bytes + self.reserve_overhead_bytes + self.pending_bytes
    }
}
