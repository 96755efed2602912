//! Memory comes into the shared arena: a plan is carried out without the lock, and settled under it.

use std::time::Instant;

use super::super::BlockMemory;
use super::super::books::Books;
use super::SharedArena;
use crate::arena::Plan;
use crate::backend::SourceError;
use crate::diag::Growth;
use pinpool_os::sync::MutexGuard;

impl SharedArena {
    /// Carries out a plan for a block of `bytes` and returns its memory.
    pub(in crate::engine) fn grow(
        &self,
        mut state: MutexGuard<'_, Books>,
        plan: Plan,
        bytes: u64,
        (now_us, until): (u64, Instant),
    ) -> Result<Option<BlockMemory>, SourceError> {
        let ptr = plan.ptr();
        let executor = state.executor(&plan);
        drop(state);
        let executed = executor.execute(&self.source, &plan, until);
        let (page_locks, took) = (executed.0.calls.pin.count, executed.0.calls.underlying().time);
        let mut state = self.state.lock();
        let held_before_bytes = state.held_bytes();
        let settled = state.settle_growth(plan, executed, now_us);
        let (mappings, held_bytes) = (state.arena().stats().mappings, state.held_bytes());
        let max_bytes = state.budget().max_bytes();
        self.note_holes(&state, now_us);
        drop(state);
        self.settled.notify_all();
        self.note_old_places();
        if page_locks > 0 {
            let asked_bytes = bytes;
            self.log.page_locked(&Growth { asked_bytes, held_before_bytes, held_bytes, page_locks, took, max_bytes });
        }
        settled?;
        self.watch_mappings(mappings);
        Ok(ptr.and_then(|ptr| self.state.lock().memory_at(ptr, bytes)))
    }

    /// Grows by larger granules where the process, of which `own_mappings` are this pool's, has few mappings left.
    pub(in crate::engine) fn watch_mappings(&self, own_mappings: u64) {
        let Some(found) = self.mappings.few_left(own_mappings) else { return };
        let larger = self.state.lock().grow_in_larger_granules();
        larger.into_iter().for_each(|bytes| self.log.few_mappings(found.used, found.limit, own_mappings, bytes));
    }
}
