//! The account of a reserve that is pinned step by step: what was asked for, what is there, the next step.

use super::super::carry_out::Executed;
use super::Books;
use crate::arena::{Plan, PlanOutcome};
use crate::backend::SourceError;

/// What reserves that are pinned step by step asked for.
#[derive(Debug, Default, Clone, Copy)]
pub(in crate::engine) struct BackgroundReserve {
    asked_bytes: u64,
    /// Bytes of the reserve that are pinned as regions of their own, where the source has no virtual memory. The arena
    /// counts the others.
    region_bytes: u64,
}

/// The next step of a reserve.
#[derive(Debug)]
pub(in crate::engine) enum NextStep {
    /// All of it is there.
    Done,
    /// The ceiling leaves no room for so much.
    NoRoom(u64),
    /// No addresses are left.
    NoAddresses,
    Plan(Plan),
}

impl Books {
    /// Asks for a reserve of `bytes` more. False, and nothing is asked for, if the ceiling has no room for all reserves.
    pub(in crate::engine) fn ask_reserve(&mut self, bytes: u64) -> bool {
        let asked_bytes = self.asked_reserve_bytes().saturating_add(self.pending_bytes).saturating_add(bytes);
        let fits = self.budget().max_bytes().is_none_or(|max_bytes| asked_bytes <= max_bytes);
        self.background.asked_bytes += if fits { bytes } else { 0 };
        fits
    }

    /// Asks no more for `bytes` of what is not there yet.
    pub(in crate::engine) fn ask_less(&mut self, bytes: u64) {
        self.background.asked_bytes -= bytes.min(self.reserve_to_come());
    }

    /// All that reserves asked for, pinned or not.
    pub(in crate::engine) fn asked_reserve_bytes(&self) -> u64 {
        let BackgroundReserve { asked_bytes, region_bytes } = self.background;
        self.reserve_bytes - region_bytes + asked_bytes
    }

    /// Bytes of reserves that are pinned.
    pub(in crate::engine) fn pinned_reserve_bytes(&self) -> u64 {
        self.reserve_bytes + self.arena.kept_bytes()
    }

    /// Bytes that are asked for step by step and not there yet.
    pub(in crate::engine) fn reserve_to_come(&self) -> u64 {
        let BackgroundReserve { asked_bytes, region_bytes } = self.background;
        asked_bytes.saturating_sub(region_bytes + self.arena.kept_bytes())
    }

    /// Bytes of a buffer that the reserve, once it is there, could hold.
    pub(in crate::engine) fn background_reserve_bytes(&self) -> u64 {
        self.background.asked_bytes.saturating_sub(self.background.region_bytes)
    }

    /// Plans the next step, of about `step_bytes`. What is committed counts where the ceiling has no room for more.
    pub(in crate::engine) fn plan_reserve_step(&mut self, step_bytes: u64) -> NextStep {
        let to_come = self.reserve_to_come();
        // After the last pool its addresses may be gone.
        if to_come == 0 || self.is_closed() {
            return NextStep::Done;
        }
        match self.arena.commit_next(step_bytes.min(to_come), self.room_for(step_bytes.min(to_come)).bytes()) {
            Ok(plan) if self.update_claim().is_ok() => NextStep::Plan(plan),
            Ok(plan) => {
                // Another claimant was faster.
                self.undo(plan);
                NextStep::NoRoom(step_bytes)
            }
            Err(0) => NextStep::NoAddresses,
            Err(granule_bytes) => self.without_room(granule_bytes),
        }
    }

    /// There is no room for a granule of `granule_bytes`: what is committed for buffers is the reserve.
    pub(in crate::engine) fn without_room(&mut self, granule_bytes: u64) -> NextStep {
        self.arena.keep(self.reserve_to_come());
        // What other owners of the host ledger hold may come back.
        let is_held_by_others = self.budget().is_shared() && self.budget().own_room_bytes() >= self.reserve_to_come();
        let is_over = self.budget().over_bytes() > 0 || self.arena.stats().transit_bytes > 0 || is_held_by_others;
        if !is_over && self.reserve_to_come() < granule_bytes {
            // A part of a granule at the ceiling can never come.
            self.ask_less(self.reserve_to_come());
        }
        if self.reserve_to_come() == 0 { NextStep::Done } else { NextStep::NoRoom(granule_bytes) }
    }

    /// Settles a plan of [`plan_reserve_step`](Self::plan_reserve_step).
    pub(in crate::engine) fn settle_reserve_step(
        &mut self,
        plan: Plan,
        (executed, outcome): (Executed, PlanOutcome),
        now_us: u64,
    ) -> Result<(), SourceError> {
        let before_bytes = self.arena.committed_outside_reserves();
        let error = self.count(executed);
        self.arena.settle(plan, outcome, now_us);
        self.keep_committed_since(before_bytes);
        self.note_peak();
        self.lower_claim();
        error.map_or(Ok(()), Err)
    }

    /// A region of `bytes`, in its range by now, is a part of what is pinned step by step.
    pub(in crate::engine) fn note_reserve_region(&mut self, bytes: u64) {
        self.background.region_bytes += bytes;
        self.background.asked_bytes = self.background.asked_bytes.max(self.background.region_bytes);
    }

    /// What was committed since `before_bytes` were is a part of the reserve, as far as that is not there yet.
    pub(in crate::engine) fn keep_committed_since(&mut self, before_bytes: u64) {
        let more_bytes = self.arena.committed_outside_reserves().saturating_sub(before_bytes);
        self.arena.keep(more_bytes.min(self.reserve_to_come()));
    }

    /// Whether some of the reserve is still to come and the ceiling has room for `bytes`.
    pub(in crate::engine) fn could_go_on(&self, bytes: u64) -> bool {
        let step_bytes = bytes.min(self.reserve_to_come());
        step_bytes > 0 && self.room_for(step_bytes).bytes() >= step_bytes
    }
}
