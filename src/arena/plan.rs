//! Plans: the slow calls that the pool makes for the arena, and what became of them.
//!
//! ```text
//!   under the lock        no lock held                 under the lock
//!   arena.grow() -------> step 1, step 2, ... -------> arena.settle(plan, outcome)
//!        |                  (stops at the first that fails)      |
//!        +-- from here on the bytes are the buffer's, and the granules are in transit: in no index,
//!            so nobody else can carve, lock, move or release them
//! ```

use super::extent::{ArenaPtr, Extent};
use super::retain::IdleRun;

/// One slow call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// Give these granules (or this whole region) back. What they hold is nobody's.
    Decommit {
        /// What goes.
        extent: Extent,
    },
    /// Take the locked memory away from `from` and put it at `to`, which is as long.
    Remap {
        /// IdleGranules granules.
        from: Extent,
        /// Uncommitted granules.
        to: Extent,
    },
    /// Lock this run of bare granules, or acquire this whole region: one page-lock.
    Commit {
        /// What is locked.
        extent: Extent,
    },
}

impl Step {
    /// Bytes that a move takes elsewhere.
    pub(crate) fn remapped_bytes(&self) -> u64 {
        if let Self::Remap { from, .. } = *self { from.bytes() } else { 0 }
    }

    /// What a release gives back; `None` for other steps.
    pub(super) fn released(&self) -> Option<Extent> {
        if let Self::Decommit { extent } = *self { Some(extent) } else { None }
    }
}

/// Steps to be made in order, then settled. A plan that is dropped keeps its granules in transit for ever.
#[derive(Debug)]
#[must_use = "a plan holds granules in transit until `Arena::settle`"]
pub struct Plan {
    /// The bytes of the buffer that this plan is for.
    pub(super) buffer: Option<Extent>,
    pub(super) steps: Vec<Step>,
    /// IdleGranules granules that the plan took, for the buffer or for its steps, with their ages: to undo it exactly.
    pub(super) idle_before: Vec<IdleRun>,
}

impl Plan {
    /// The slow calls, in the order in which they are to be made.
    #[must_use]
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// Does any of them give memory back?
    #[must_use]
    pub fn decommits(&self) -> bool {
        self.steps.iter().any(|step| matches!(step, Step::Decommit { .. }))
    }

    /// Where the buffer lies, once all steps are done.
    #[must_use]
    pub fn ptr(&self) -> Option<ArenaPtr> {
        self.buffer.map(Extent::ptr)
    }

    /// Bytes by which this plan raises what is locked, at its worst moment.
    pub(super) fn claim_bytes(&self) -> u64 {
        let sum = |pick: fn(&Step) -> u64| self.steps.iter().map(pick).sum::<u64>();
        let locks = sum(|step| if let Step::Commit { extent } = step { extent.bytes() } else { 0 });
        let releases = sum(|step| if let Step::Decommit { extent } = step { extent.bytes() } else { 0 });
        locks.saturating_sub(releases)
    }
}

/// How far the pool came with a plan.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PlanOutcome {
    /// Every step was made.
    Done,
    /// The first `done` steps were made, the next failed and changed nothing, the others were not tried.
    Failed {
        /// Steps made.
        done: usize,
    },
    /// The same, but what failed was one or several moves that gave up their granules and could not lock others.
    Lost {
        /// Steps made.
        done: usize,
        /// Moves that failed.
        remaps: usize,
    },
}

impl PlanOutcome {
    pub(super) fn steps_done(self) -> usize {
        match self {
            PlanOutcome::Done => usize::MAX,
            PlanOutcome::Failed { done } | PlanOutcome::Lost { done, .. } => done,
        }
    }

    /// Is this step a move whose granules are lost?
    pub(super) fn has_lost(self, step: usize) -> bool {
        matches!(self, PlanOutcome::Lost { done, remaps } if (done..done + remaps).contains(&step))
    }
}
