//! Plans: the slow calls that the pool makes for the arena, and how they ended.
//!
//! ```text
//!   under the lock        no lock held                 under the lock
//!   arena.grow() -------> step 1, step 2, ... -------> arena.finish_plan(plan, outcomes)
//!        |                  (stops at the first that fails)
//!        +-- from here on the bytes belong to the buffer and the granules are in transit: in no index, so no other
//!            call can carve, commit, remap or decommit them
//! ```

use super::extent::Extent;
use super::retain::IdleRun;

/// One driver or kernel call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Step {
    /// Decommit these idle granules, or release this whole region.
    Decommit { extent: Extent },
    /// Move the memory of the idle granules `from` to the uncommitted granules `to`, which have the same length.
    Remap { from: Extent, to: Extent },
    /// Commit these uncommitted granules, or acquire this whole region: one pin call.
    Commit { extent: Extent },
}

impl Step {
    /// The extent that a decommit returns; `None` for other steps.
    pub(crate) fn decommitted(&self) -> Option<Extent> {
        if let Self::Decommit { extent } = *self { Some(extent) } else { None }
    }
}

/// Steps to make in order and then finish. A plan that is dropped leaves its granules in transit.
#[derive(Debug)]
#[must_use = "a plan holds granules in transit until `Arena::finish_plan`"]
pub(crate) struct Plan {
    /// The buffer that this plan is for.
    pub(super) buffer: Option<Extent>,
    pub(super) steps: Vec<Step>,
    /// Idle granules that the plan took, with their ages, so that a failed plan can be undone exactly.
    pub(super) idle_before: Vec<IdleRun>,
    /// Bytes that this plan adds to what is held, at its worst moment.
    pub(super) claim_bytes: u64,
    pub(super) surplus_bytes: u64,
}

impl Plan {
    pub(crate) fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// Bytes that it commits beyond what the buffer needs.
    pub(crate) fn surplus_bytes(&self) -> u64 {
        self.surplus_bytes
    }

    /// Returns whether it only releases. Its steps are independent: each is tried, also after another has failed.
    pub(crate) fn is_release(&self) -> bool {
        self.steps.iter().all(|step| step.decommitted().is_some())
    }

    /// The buffer, valid once all steps are done.
    pub(crate) fn buffer(&self) -> Option<Extent> {
        self.buffer
    }
}

/// How a step ended. A plan has the outcomes of its first steps; the other steps were not tried.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum StepOutcome {
    Made,
    /// It changed nothing.
    Failed,
    /// A remap that failed after it had decommitted its source.
    Lost,
}
