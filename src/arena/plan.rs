//! Plans: the slow calls that the pool makes for the arena, and their outcomes.
//!
//! ```text
//!   under the lock               no lock held                 under the lock
//!   arena.plan_growth() -------> step 1, step 2, ... -------> arena.finish_plan(plan, outcomes)
//!        |                         (stops at the first failure)
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
    /// Commit these uncommitted granules, or acquire this whole region. This takes one pin call.
    Commit { extent: Extent },
}

impl Step {
    /// Returns the extent that this step decommits, or `None` for other steps.
    pub(crate) fn decommitted(&self) -> Option<Extent> {
        if let Self::Decommit { extent } = *self { Some(extent) } else { None }
    }
}

/// Steps to carry out in order, after which the plan must be finished. The granules of a dropped plan stay in transit
/// permanently.
#[derive(Debug)]
#[must_use = "a plan holds granules in transit until `Arena::finish_plan`"]
pub(crate) struct Plan {
    /// The buffer for which this plan was made.
    pub(super) buffer: Option<Extent>,
    pub(super) steps: Vec<Step>,
    /// Idle granules that the plan took, with their ages, so that a failed plan can be undone exactly.
    pub(super) idle_before: Vec<IdleRun>,
    /// The most bytes that this plan adds to the bytes that the system holds at any time.
    pub(super) claim_bytes: u64,
    pub(super) surplus_bytes: u64,
}

impl Plan {
    pub(crate) fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// Returns the bytes that the plan commits beyond what its buffer needs.
    pub(crate) fn surplus_bytes(&self) -> u64 {
        self.surplus_bytes
    }

    /// Returns whether the plan only decommits. The steps of such a plan are independent: each step is tried, even if an earlier
    /// step failed.
    pub(crate) fn is_release(&self) -> bool {
        self.steps.iter().all(|step| step.decommitted().is_some())
    }

    /// Returns the buffer, which is valid once all steps have succeeded.
    pub(crate) fn buffer(&self) -> Option<Extent> {
        self.buffer
    }
}

/// The outcome of a step. Outcomes are listed for the first steps of a plan; the other steps were not tried.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum StepOutcome {
    Made,
    /// The step changed nothing.
    Failed,
    /// A remap failed after it had decommitted its source.
    Lost,
}
