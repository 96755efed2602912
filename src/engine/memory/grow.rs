//! Plans are carried out: without the lock, between two accesses to the books.

use std::time::Instant;

use super::arena_supply::ArenaSupply;
use super::block_memory::BlockMemory;
use super::books::Books;
use super::carry_out::{Executed, Executor};
use crate::arena::{Plan, PlanOutcome};
use crate::backend::SourceError;
use crate::diag::Growth;
use pinpool_os::sync::MutexGuard;

impl ArenaSupply {
    /// Carries out `plan` and has `finish` enter the outcome in the books. Waits for calls of other threads until `until`. Logs
    /// what was pinned, for `asked_bytes` if that is known. Slow calls.
    pub(super) fn carry_out<R>(
        &self,
        mut books: MutexGuard<'_, Books>,
        plan: Plan,
        (asked_bytes, until): (Option<u64>, Instant),
        finish: impl FnOnce(&mut Books, Plan, (Executed, PlanOutcome)) -> R,
    ) -> R {
        let executor = Executor::new(&mut books.mappings, &plan);
        drop(books);
        let executed = executor.execute(&self.source, &plan, until);
        let (pin_calls, took) = (executed.0.calls.pin.count, executed.0.calls.time());
        let mut books = self.books();
        let held_before_bytes = books.held_bytes();
        let finished = finish(&mut books, plan, executed);
        let (held_bytes, max_bytes) = (books.held_bytes(), books.budget().max_bytes());
        let mappings = books.arena().stats().mappings;
        drop(books);
        self.finished.notify_all();
        if pin_calls > 0 {
            let asked_bytes = asked_bytes.unwrap_or(held_bytes.saturating_sub(held_before_bytes));
            self.log.grew(&Growth { asked_bytes, held_before_bytes, held_bytes, pin_calls, took, max_bytes });
            self.watch_mappings(mappings);
        }
        finished
    }

    /// Carries out a plan for a block of `bytes` and returns its memory.
    pub(super) fn grow(
        &self,
        books: MutexGuard<'_, Books>,
        plan: Plan,
        bytes: u64,
        (now_us, until): (u64, Instant),
    ) -> Result<Option<BlockMemory>, SourceError> {
        let ptr = plan.ptr();
        let finished = self.carry_out(books, plan, (Some(bytes), until), |books, plan, executed| {
            let finished = books.finish_growth(plan, executed, now_us);
            self.record_holes(books, now_us);
            finished
        });
        self.record_old_places();
        finished?;
        Ok(ptr.and_then(|ptr| self.books().memory_at(ptr, bytes)))
    }

    /// Grows by larger granules if the process has few mappings left; `own_mappings` of its mappings are this pool's.
    fn watch_mappings(&self, own_mappings: u64) {
        let Some(found) = self.mappings.few_left(own_mappings) else { return };
        let larger = self.books().grow_in_larger_granules();
        larger.into_iter().for_each(|bytes| self.log.few_mappings(found.used, found.limit, own_mappings, bytes));
    }
}
