//! The attempts of a miss, in their order.
//!
//! - find-I1: no more idle blocks are released than were idle at the start, or when copies were swept for the first time. So a
//!   search ends, whatever other threads put back meanwhile.
//! - find-I2: a request is refused for lack of room only after a sweep, and with no idle block left that would help.

use std::time::Instant;

use super::arena_supply::ArenaSupply;
use super::block_memory::{BlockMemory, Refusal, SlowCalls, Stop};
use super::books::Books;
use super::carry_out::{Executed, Executor};
use super::{PoolView, Supply};
use crate::arena::{GrowthLimits, Plan, PlanOutcome};
use crate::backend::SourceError;
use crate::diag::Growth;
use crate::quota::QuotaExceeded;
use crate::stats::EvictionReason;
use pinpool_os::sync::MutexGuard;

/// Longest commit while copies are pending: registering this much delays other threads' enqueues by half a millisecond.
const STEP_BESIDE_COPIES_BYTES: u64 = 8 << 20;

/// How much a plan may request of the source. Less after each refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CommitSize {
    /// Memory for later requests too.
    Ample,
    /// This one buffer alone.
    OneBuffer,
    /// Only what is committed already.
    Nothing,
}

/// The search for memory of one request.
struct Search<'pool> {
    bytes: u64,
    now_us: u64,
    calls: SlowCalls,
    pool: &'pool dyn PoolView,
    /// Registering much at once would delay the enqueues of running copies.
    is_short_step: bool,
    commit: CommitSize,
    /// Idle blocks that may still be released.
    to_release: u64,
    has_swept: bool,
    /// Nothing else has served the request: a plan may release regions, which waits for the device.
    may_release_regions: bool,
    /// What the limits left at the last plan.
    room: u64,
    /// A claim of the last plan was refused.
    over: Option<QuotaExceeded>,
    /// The source refused this one buffer.
    source: Option<SourceError>,
}

impl ArenaSupply {
    /// Memory for `bytes`, whole pages, as far as `calls` allow. Stops if `take_idle` finds an idle block meanwhile.
    pub(super) fn find_memory(
        &self,
        bytes: u64,
        (now_us, calls): (u64, SlowCalls),
        pool: &dyn PoolView,
        take_idle: &mut dyn FnMut() -> bool,
    ) -> Result<BlockMemory, Stop> {
        if !matches!(calls, SlowCalls::After(..) | SlowCalls::Held(..))
            && let Some(memory) = self.carve_first(bytes, pool, now_us)
        {
            return Ok(memory);
        }
        // A request that can never fit is no reason to release idle blocks.
        if !self.could_hold_bytes(bytes) {
            return Err(self.no_space(bytes, pool.idle_bytes()).into());
        }
        let _first = self.before_reserve();
        let mut search = Search::new(bytes, (now_us, calls), pool);
        search.is_short_step = self.source.release_waits() && pool.has_copies();
        loop {
            let idle_bytes = pool.idle_bytes();
            let mut books = self.books();
            if let Some(memory) = books.carve(bytes) {
                return Ok(memory);
            }
            // Each round may have waited, and a buffer may have returned meanwhile.
            if take_idle() {
                return Err(Stop::FoundIdle);
            }
            if search.to_release > 0 && idle_bytes > 0 && books.could_cover(bytes, idle_bytes) {
                drop(books);
                search.release_oldest();
                continue;
            }
            search.room = books.room_for(self.grown_bytes(bytes));
            let limits = self.limits(&books, &search);
            match books.plan_growth(bytes, limits) {
                Ok(plan) if calls == SlowCalls::None => {
                    books.give_up(plan);
                    return Err(Stop::NeedsCall);
                }
                Ok(plan) => {
                    if let Some(memory) = self.grow_or_request_less(books, plan, &mut search)? {
                        return Ok(memory);
                    }
                }
                Err((no_space, over)) => {
                    search.over = over;
                    if no_space.transit_bytes > 0 {
                        if !self.wait_finished(books, calls.until().0) {
                            return Err(self.refusal(search).into());
                        }
                    } else if !self.make_room(books, limits, &mut search) {
                        let memory = self.books().carve_in_other_regions(bytes);
                        return memory.ok_or_else(|| self.refusal(search).into());
                    }
                }
            }
        }
    }

    /// The first attempt: a hole that is long enough. Counts the miss.
    fn carve_first(&self, bytes: u64, pool: &dyn PoolView, now_us: u64) -> Option<BlockMemory> {
        let mut books = self.books();
        let (memory, recurs) = books.serve_miss(bytes, now_us);
        let mut changed = self.record_demand(&books, now_us);
        self.record_holes(&books, now_us);
        drop(books);
        if memory.is_none() && !recurs {
            let idle_bytes = pool.idle_bytes();
            let mut books = self.books();
            books.record_scattered(bytes, idle_bytes, now_us);
            changed = self.record_demand(&books, now_us).or(changed);
        }
        self.log.sizes_changed(changed);
        memory.inspect(|_| self.log.carved(bytes))
    }

    /// Carries out `plan`. If the source refuses, the next plan requests less; after two refusals the request is refused, since a
    /// buffer that other threads return is found in the wait queue.
    fn grow_or_request_less(
        &self,
        books: MutexGuard<'_, Books>,
        plan: Plan,
        search: &mut Search<'_>,
    ) -> Result<Option<BlockMemory>, Refusal> {
        let was_larger = plan.surplus_bytes() > 0;
        let error = match self.grow(books, plan, search.bytes, (search.now_us, search.calls.until().1)) {
            Ok(memory) => {
                if search.commit == CommitSize::OneBuffer && self.shape.is_discrete {
                    self.books().count_smaller_region();
                }
                let no_address = || Refusal::Source(SourceError::new("arena", "a place without an address"));
                return memory.map(Some).ok_or_else(no_address);
            }
            Err(error) => error,
        };
        search.commit = match search.commit {
            CommitSize::Nothing => return Err(Refusal::Source(error)),
            CommitSize::Ample if was_larger => CommitSize::OneBuffer,
            CommitSize::Ample | CommitSize::OneBuffer => {
                search.source = Some(error);
                CommitSize::Nothing
            }
        };
        Ok(None)
    }

    /// There is no plan: completes copies, then releases the oldest idle block, then permits the release of regions (policy-R8).
    /// False if nothing is left to do.
    fn make_room(&self, books: MutexGuard<'_, Books>, limits: GrowthLimits, search: &mut Search<'_>) -> bool {
        let arena = books.arena().stats();
        // What the source adds to a region is released with it.
        let available_bytes = (arena.hole_bytes + arena.overhead_bytes).saturating_add(limits.commit_bytes);
        let lacking_bytes = self.alone_bytes(search.bytes).saturating_sub(available_bytes);
        let has_regions = !limits.may_decommit_regions && arena.idle_bytes > 0;
        drop(books);
        search.pool.complete_copies();
        let idle_bytes = search.pool.idle_bytes();
        if !std::mem::replace(&mut search.has_swept, true) {
            search.to_release = search.pool.idle_buffers();
        }
        if search.to_release > 0 && idle_bytes > 0 && idle_bytes >= lacking_bytes {
            search.release_oldest();
            return true;
        }
        has_regions && !std::mem::replace(&mut search.may_release_regions, true)
    }

    /// Why the search has found nothing.
    fn refusal(&self, search: Search<'_>) -> Refusal {
        match search {
            Search { source: Some(error), .. } => Refusal::Source(error),
            Search { over: Some(over), bytes, .. } => Refusal::QuotaExceeded { needed_bytes: bytes, over },
            Search { bytes, pool, .. } => self.no_space(bytes, pool.idle_bytes()),
        }
    }

    /// How far the next plan may go.
    fn limits(&self, books: &Books, search: &Search<'_>) -> GrowthLimits {
        let room_bytes = search.room;
        let commit_bytes = match search.commit {
            CommitSize::Nothing => 0,
            _ if self.may_grow() => room_bytes,
            // What of the reserve is still to come.
            _ => room_bytes.min(books.reserve_to_come()),
        };
        let (step_bytes, largest_bytes) = match search.commit {
            CommitSize::OneBuffer | CommitSize::Nothing => (0, 0),
            _ if search.is_short_step => (STEP_BESIDE_COPIES_BYTES, books.largest_missed_bytes(search.now_us)),
            _ => (u64::MAX, books.largest_missed_bytes(search.now_us)),
        };
        let nothing_else = search.may_release_regions || search.commit == CommitSize::Nothing;
        GrowthLimits {
            commit_bytes,
            over_bytes: self.budget().over_bytes(),
            may_decommit_regions: !self.source.release_waits() || nothing_else && !self.may_never_release(),
            step_bytes,
            largest_bytes,
            known_bytes: books.largest_held_bytes(search.now_us),
        }
    }
}

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
        drop(books);
        self.finished.notify_all();
        if pin_calls > 0 {
            let asked_bytes = asked_bytes.unwrap_or(held_bytes.saturating_sub(held_before_bytes));
            self.log.grew(&Growth { asked_bytes, held_before_bytes, held_bytes, pin_calls, took, max_bytes });
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
}

impl<'pool> Search<'pool> {
    fn new(bytes: u64, (now_us, calls): (u64, SlowCalls), pool: &'pool dyn PoolView) -> Self {
        Self {
            bytes,
            now_us,
            calls,
            pool,
            is_short_step: false,
            commit: if matches!(calls, SlowCalls::Held(..)) { CommitSize::Nothing } else { CommitSize::Ample },
            to_release: pool.idle_buffers(),
            has_swept: false,
            may_release_regions: false,
            room: u64::MAX,
            over: None,
            source: None,
        }
    }

    /// Releases the block that has been idle longest. If another thread was faster, the next round sees what is left.
    fn release_oldest(&mut self) {
        self.to_release -= 1;
        self.pool.release_oldest(EvictionReason::Reclaimed);
    }
}
