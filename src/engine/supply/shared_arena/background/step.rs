//! One step of a reserve that is not waited for.

use std::thread;
use std::time::Instant;

use super::super::super::Refusal;
use super::super::super::arena_state::NextStep;
use super::super::SharedArena;
use super::{BackgroundPinning, PATIENCE_FOR_GETS};
use crate::backend::SourceError;
use crate::diag::{self, Growth};
use crate::maintenance_thread::MaintenanceThread;

/// A step pins about so much: 2 to 3 ms on `mlock` and `vmm`. Larger granules are pinned one by one.
const STEP_BYTES: u64 = 8 << 20;
/// Length of a region of the reserve where the source has no virtual memory, while no copy is in flight: no buffer is longer.
const REGION_BYTES: u64 = 64 << 20;

/// What became of a step.
pub(super) enum Step {
    Made,
    /// The pool or the process ends, or another thread makes one.
    NotNow,
    /// All is there.
    Done,
    NoRoom(u64),
}

impl SharedArena {
    /// Makes one step, unless another thread makes one, the pool ends, or the process does.
    pub(super) fn step(&self, now_us: u64) -> Result<Step, SourceError> {
        // Until the step has ended: a log sink may end the pool.
        let _deferral = diag::defer();
        let call = MaintenanceThread::of_process().enter();
        let mut progress = self.background.progress.lock();
        progress.is_cancelled |= call.is_none();
        if progress.is_cancelled || progress.stepper.is_some() {
            return Ok(Step::NotNow);
        }
        progress.stepper = Some(thread::current().id());
        drop(progress);
        let _end = EndOfStep(&self.background);
        if self.shape.is_discrete { self.region_step(now_us) } else { self.granule_step(now_us) }
    }

    fn granule_step(&self, now_us: u64) -> Result<Step, SourceError> {
        let mut state = self.state.lock();
        let plan = match state.plan_reserve_step(STEP_BYTES) {
            NextStep::Plan(plan) => plan,
            NextStep::Done => return Ok(Step::Done),
            NextStep::NoRoom(lacks_bytes) => return Ok(Step::NoRoom(lacks_bytes)),
            NextStep::NoAddresses => {
                let remedy = self.shape.address_remedy.unwrap_or("reserve less, or raise PINPOOL_MAX_BYTES");
                return Err(SourceError::new("arena", "no addresses are left for the reserve").with_remedy(remedy));
            }
        };
        let executor = state.executor(&plan);
        drop(state);
        let executed = executor.execute(&self.source, &plan, Instant::now() + PATIENCE_FOR_GETS, None);
        let took = executed.0.calls.underlying().time;
        let mut state = self.state.lock();
        let held_before_bytes = state.held_bytes();
        let settled = state.settle_reserve_step(plan, executed, now_us);
        let (held_bytes, max_bytes) = (state.held_bytes(), state.quota().max_bytes());
        let mappings = state.arena().stats().mappings;
        drop(state);
        self.settled.notify_all();
        let asked_bytes = held_bytes.saturating_sub(held_before_bytes);
        let growth = Growth { asked_bytes, held_before_bytes, held_bytes, page_locks: 1, took, max_bytes };
        self.log.page_locked(&growth);
        settled?;
        self.watch_mappings(mappings);
        Ok(Step::Made)
    }

    /// A region of the reserve. Short while copies are in flight, whose enqueues it would hold up.
    fn region_step(&self, now_us: u64) -> Result<Step, SourceError> {
        let state = self.state.lock();
        let (to_come, is_first) = (state.reserve_to_come(), state.pinned_reserve_bytes() == 0);
        let is_unused = state.is_detached();
        drop(state);
        if to_come == 0 || is_unused {
            return Ok(Step::Done);
        }
        let longest_bytes = if is_first || !self.gate.is_at_rest() { STEP_BYTES } else { REGION_BYTES };
        let bytes = to_come.min(longest_bytes);
        match self.add_reserve(bytes, &|_| ()) {
            Ok((_, len)) => self.state.lock().note_reserve_region(len as u64),
            Err(Refusal::Source(error)) => return Err(error),
            Err(Refusal::Over { .. } | Refusal::Line { .. }) => {
                let next = self.state.lock().without_room(bytes);
                return Ok(if matches!(next, NextStep::Done) { Step::Done } else { Step::NoRoom(bytes) });
            }
        }
        if self.state.lock().is_unused() {
            // The pool has ended meanwhile, and found this region on its way.
            self.teardown(now_us);
        }
        Ok(Step::Made)
    }
}

/// Ends a step when it is dropped, also by a panic of a log sink.
struct EndOfStep<'arena>(&'arena BackgroundPinning);

impl Drop for EndOfStep<'_> {
    fn drop(&mut self) {
        self.0.progress.lock().stepper = None;
        self.0.changed.notify_all();
    }
}
