//! The arena as the supply of a pool: the attempts of a miss, in their order, returned blocks, statistics.
//!
//! - find-I1: no more idle blocks are released than were idle at the start, or when copies were swept for the first time. So a
//!   search ends although other threads return blocks meanwhile.
//! - find-I2: a request is refused for lack of room only after a sweep, and with no idle block left that would help.

use std::time::Instant;

use super::arena_supply::ArenaSupply;
use super::block_memory::{Attempt, BlockMemory, Refusal, SlowCalls, Stop};
use super::books::Books;
use super::carry_out::Executor;
use super::shape::GrowthShape;
use super::{PoolView, Supply};
use crate::arena::{GrowthLimits, Plan};
use crate::backend::SourceError;
use crate::quota::QuotaExceeded;
use crate::report::Growth;
use crate::size_class::Class;
use crate::stats::{EvictionReason, SourceCalls, Stats};
use pinpool_os::sync::MutexGuard;

/// Longest commit while copies are pending: registering this much delays other threads' enqueues by 0.7 to 0.8 ms.
const STEP_DURING_COPIES_BYTES: u64 = 8 << 20;

/// How much a plan may request from the source. Less after each refusal.
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
    attempt: Attempt,
    bytes: u64,
    pool: &'pool dyn PoolView,
    /// Commits are short, since registering much at once delays enqueues.
    is_short_step: bool,
    commit: CommitSize,
    /// Idle blocks that may still be released.
    to_release: u64,
    has_swept: bool,
    /// Nothing else has served the request: a plan may release regions, which waits for the device.
    may_release_regions: bool,
    /// The bytes that the limits left for the last plan.
    room: u64,
    /// A claim of the last plan was refused.
    over: Option<QuotaExceeded>,
    /// The source refused memory for this buffer alone.
    source: Option<SourceError>,
}

impl Supply for ArenaSupply {
    fn find(&self, attempt: Attempt, pool: &dyn PoolView, take_idle: &dyn Fn() -> bool) -> Result<BlockMemory, Stop> {
        let Attempt { class, now_us, calls } = attempt;
        let bytes = class.bytes as u64;
        if !matches!(calls, SlowCalls::After(..) | SlowCalls::Held(..)) {
            let mut books = self.books();
            let memory = books.carve_missed(bytes, now_us, || pool.idle_bytes());
            let changed = self.record_demand(&books, now_us);
            self.record_holes(&books, now_us);
            drop(books);
            self.log.sizes_changed(changed);
            if let Some(memory) = memory {
                self.log.carved(bytes);
                return Ok(memory);
            }
        }
        // A request that can never fit is no reason to release idle blocks.
        if !self.could_hold(class) {
            return Err(self.no_space(bytes, pool.idle_bytes()).into());
        }
        let _first = self.before_reserve();
        let mut search = Search::new(attempt, pool);
        search.is_short_step = self.source.release_waits() && pool.has_copies();
        loop {
            let idle_bytes = pool.idle_bytes();
            let mut books = self.books();
            if let Some(memory) = books.carve(bytes) {
                return Ok(memory);
            }
            // The last round may have waited, and a buffer may have been returned meanwhile.
            if take_idle() {
                return Err(Stop::FoundIdle);
            }
            if search.to_release > 0 && idle_bytes > 0 && books.could_cover(bytes, idle_bytes) {
                drop(books);
                search.release_oldest();
                continue;
            }
            search.room = self.budget.room_for(self.grown_bytes(bytes));
            let limits = self.limits(&books, &search);
            match books.plan_growth(bytes, limits) {
                Ok(plan) if calls == SlowCalls::None => {
                    books.give_up(plan);
                    return Err(Stop::NeedsCall);
                }
                Ok(plan) => {
                    if let Some(memory) = self.grow(books, plan, &mut search)? {
                        return Ok(memory);
                    }
                }
                Err((no_space, over)) => {
                    search.over = over;
                    if no_space.transit_bytes > 0 {
                        if !self.wait_finished(books, calls.deadlines().plans) {
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

    /// A pool closes once its last block is counted as returned, which may be before another thread returns that block's memory.
    /// So the later of `close` and this call tears down.
    fn give(&self, memory: BlockMemory, now_us: u64) -> Result<(), (u64, SourceError)> {
        // A block is made by the supply of its pool.
        let BlockMemory::Carved { ptr, bytes, .. } = memory else { return Ok(()) };
        let mut books = self.books();
        let is_unused = books.give(ptr, bytes, now_us);
        self.record_holes(&books, now_us);
        drop(books);
        if is_unused {
            self.teardown(now_us);
        }
        Ok(())
    }

    fn release_idle(&self, bytes: u64, pool: &dyn PoolView, now_us: u64) -> u64 {
        self.release_for_others(bytes, pool, now_us)
    }

    fn close(&self, now_us: u64) {
        self.books().is_closed = true;
        self.teardown(now_us);
    }

    fn could_hold(&self, class: Class) -> bool {
        self.could_hold_bytes(class.bytes as u64)
    }

    fn may_grow(&self) -> bool {
        self.settings.may_grow
    }

    /// In whole granules.
    fn room_to_pass(&self, first: Class) -> u64 {
        let GrowthShape { ample_bytes: granule_bytes, is_discrete, .. } = self.shape;
        match self.budget.max_bytes().filter(|_| !is_discrete && self.settings.may_grow) {
            Some(max_bytes) => {
                let granules = (max_bytes / granule_bytes).saturating_sub((first.bytes as u64).div_ceil(granule_bytes));
                granules * granule_bytes
            }
            None => 0,
        }
    }

    /// All the granules that it may touch.
    fn bytes_to_pass(&self, class: Class) -> u64 {
        let granule_bytes = self.shape.ample_bytes;
        ((class.bytes as u64).div_ceil(granule_bytes) + 1).saturating_mul(granule_bytes)
    }

    fn block_bytes(&self, class: Class) -> u64 {
        class.bytes as u64
    }

    fn all_block_bytes(&self) -> u64 {
        self.books().arena.stats().live_bytes
    }

    fn held_bytes(&self) -> u64 {
        self.books().held_bytes()
    }

    fn claimed_by_others(&self) -> u64 {
        self.books().claimed_by_others()
    }

    fn idle_bytes(&self, pool: &dyn PoolView) -> u64 {
        let buffer_bytes = pool.idle_bytes();
        let books = self.books();
        let arena = books.arena.stats();
        let free_bytes = arena.hole_bytes.saturating_sub(arena.reserve_hole_bytes);
        let kept_bytes = books.arena.kept_bytes();
        (free_bytes + buffer_bytes).min(books.arena.committed_outside_reserves().saturating_sub(kept_bytes))
    }

    fn longest_free_bytes(&self) -> u64 {
        self.books().arena.longest_hole_bytes()
    }

    fn calls(&self) -> SourceCalls {
        self.books().calls
    }

    fn fill(&self, stats: &mut Stats) {
        self.books().fill(stats);
        stats.memory.reserve_eta = self.reserve_eta();
    }
}

impl ArenaSupply {
    /// Carries out `plan` for a block. If the source refuses, the next plan requests less; after two refusals the request is
    /// refused, since a buffer that other threads return is found in the wait queue.
    fn grow(
        &self,
        books: MutexGuard<'_, Books>,
        plan: Plan,
        search: &mut Search<'_>,
    ) -> Result<Option<BlockMemory>, Refusal> {
        let Search { bytes, attempt: Attempt { now_us, calls, .. }, .. } = *search;
        let (ptr, surplus_bytes) = (plan.ptr(), plan.surplus_bytes());
        let finished = self.carry_out(books, plan, now_us, calls.deadlines().calls, Some(bytes));
        self.record_old_places();
        let mut books = self.books();
        self.record_holes(&books, now_us);
        let error = match finished {
            Ok(is_granted) => {
                books.smaller_regions += u64::from(search.commit == CommitSize::OneBuffer && self.shape.is_discrete);
                let memory = ptr.filter(|_| is_granted).and_then(|ptr| books.memory_at(ptr, bytes));
                let not_granted = || Refusal::Source(SourceError::new("arena", "a plan was made and not granted"));
                return memory.map(Some).ok_or_else(not_granted);
            }
            Err(error) => error,
        };
        search.commit = match search.commit {
            CommitSize::Nothing => return Err(Refusal::Source(error)),
            CommitSize::Ample if surplus_bytes > 0 => CommitSize::OneBuffer,
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
        let arena = books.arena.stats();
        // Bytes that the source adds to a region are released with it.
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

    /// The reason that the search found nothing.
    fn refusal(&self, search: Search<'_>) -> Refusal {
        match search {
            Search { source: Some(error), .. } => Refusal::Source(error),
            Search { over: Some(over), bytes, .. } => Refusal::QuotaExceeded { needed_bytes: bytes, over },
            Search { bytes, pool, .. } => self.no_space(bytes, pool.idle_bytes()),
        }
    }

    /// The limits of the next plan.
    fn limits(&self, books: &Books, search: &Search<'_>) -> GrowthLimits {
        let room_bytes = search.room;
        let commit_bytes = match search.commit {
            CommitSize::Nothing => 0,
            _ if self.settings.may_grow => room_bytes,
            // The part of the reserve that is still to come.
            _ => room_bytes.min(books.reserve_to_come()),
        };
        let (step_bytes, largest_bytes) = match search.commit {
            CommitSize::OneBuffer | CommitSize::Nothing => (0, 0),
            _ if search.is_short_step => {
                (STEP_DURING_COPIES_BYTES, books.demand.largest_missed_bytes(search.attempt.now_us))
            }
            _ => (u64::MAX, books.demand.largest_missed_bytes(search.attempt.now_us)),
        };
        let nothing_else = search.may_release_regions || search.commit == CommitSize::Nothing;
        GrowthLimits {
            commit_bytes,
            over_bytes: self.budget.over_bytes(),
            may_decommit_regions: !self.source.release_waits() || nothing_else && !self.may_never_release(),
            step_bytes,
            largest_bytes,
            known_bytes: books.demand.largest_held_bytes(search.attempt.now_us),
        }
    }
}

impl ArenaSupply {
    /// Carries out `plan`. Waits for calls of other threads until `until`. Logs what was pinned, for `asked_bytes` if that is known.
    /// Returns whether the plan's block was granted. Slow calls.
    pub(super) fn carry_out(
        &self,
        mut books: MutexGuard<'_, Books>,
        plan: Plan,
        now_us: u64,
        until: Instant,
        asked_bytes: Option<u64>,
    ) -> Result<bool, SourceError> {
        let executor = Executor::new(&mut books.mappings, &plan);
        drop(books);
        let executed = executor.execute(&self.source, &plan, until);
        let (pin_calls, took) = (executed.0.calls.pin.count, executed.0.calls.time());
        let mut books = self.books();
        let held_before_bytes = books.held_bytes();
        let finished = books.finish_plan(plan, executed, now_us);
        let (held_bytes, max_bytes) = (books.held_bytes(), self.budget.max_bytes());
        drop(books);
        self.finished.notify_all();
        if pin_calls > 0 {
            let asked_bytes = asked_bytes.unwrap_or(held_bytes.saturating_sub(held_before_bytes));
            self.log.acquired(&Growth { asked_bytes, held_before_bytes, held_bytes, pin_calls, took, max_bytes });
        }
        finished
    }
}

impl<'pool> Search<'pool> {
    fn new(attempt: Attempt, pool: &'pool dyn PoolView) -> Self {
        Self {
            attempt,
            bytes: attempt.class.bytes as u64,
            pool,
            is_short_step: false,
            commit: if matches!(attempt.calls, SlowCalls::Held(..)) { CommitSize::Nothing } else { CommitSize::Ample },
            to_release: pool.idle_buffers(),
            has_swept: false,
            may_release_regions: false,
            room: u64::MAX,
            over: None,
            source: None,
        }
    }

    /// Releases the block that has been idle longest, unless another thread was faster.
    fn release_oldest(&mut self) {
        self.to_release -= 1;
        self.pool.release_oldest(EvictionReason::Reclaimed);
    }
}
