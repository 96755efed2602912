//! The steps of one request's search for memory in the arena: growing, making room, computing what the limits permit, and
//! finding the reason for a refusal. [`ArenaSupply::find`](super::Supply::find) runs them in a loop.
//!
//! - **search-I1**: until its first sweep of copies, a search releases no more idle blocks than were idle at its start;
//!   afterwards, no more than were idle after that sweep. So a search ends even if other threads keep returning blocks.
//! - **search-I2**: a request is refused for lack of room only after a sweep, and only if no idle block is left that would
//!   help.

use std::time::Instant;

use super::PoolView;
use super::arena_state::ArenaState;
use super::arena_supply::ArenaSupply;
use super::block_memory::{AllowedCalls, BlockMemory, Refusal, Rules};
use super::execution::Execution;
use crate::arena::{GrowthLimits, Plan};
use crate::backend::SourceError;
use crate::quota::QuotaExceeded;
use crate::stats::EvictionReason;
use pinpool_os::format::Size;
use pinpool_os::sync::MutexGuard;

/// Longest commit while copies are pending (policy-R11): registering this much delays other threads' enqueues by 0.7 to 0.8 ms.
const STEP_DURING_COPIES_BYTES: u64 = 8 << 20;

/// How much a plan may request from the source. Each refusal reduces it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CommitSize {
    /// The memory of this buffer, and memory for later requests.
    Ample,
    /// Only the memory of this buffer.
    OneBuffer,
    /// No memory: the plan may use only what is committed already.
    Nothing,
}

/// The search for memory of one request.
pub(super) struct Search<'pool> {
    bytes: u64,
    now_us: u64,
    rules: Rules,
    pool: &'pool dyn PoolView,
    commit: CommitSize,
    /// Idle blocks that may still be released.
    pub(super) evictable_blocks: u64,
    has_swept: bool,
    /// Set once nothing else has served the request: a plan may then release regions, which waits for the device.
    may_release_regions: bool,
    /// The refusal of the last plan's claim, if it was refused.
    pub(super) claim_refusal: Option<QuotaExceeded>,
    /// The source's error, if it refused memory for this buffer alone.
    source_error: Option<SourceError>,
}

impl ArenaSupply {
    pub(super) fn begin_search<'pool>(
        &self,
        bytes: u64,
        now_us: u64,
        rules: Rules,
        pool: &'pool dyn PoolView,
    ) -> Search<'pool> {
        Search {
            bytes,
            now_us,
            rules,
            pool,
            commit: if rules.calls == AllowedCalls::NoAcquire { CommitSize::Nothing } else { CommitSize::Ample },
            evictable_blocks: pool.idle_buffers(),
            has_swept: false,
            may_release_regions: false,
            claim_refusal: None,
            source_error: None,
        }
    }

    /// Carries out `plan` for a block, and returns its memory. If the source refuses, returns `None`, and the next plan
    /// requests less: memory for this buffer alone, and then none. If the source refuses even that plan, the request is
    /// refused, since a buffer that other threads return is found in the wait queue.
    pub(super) fn carry_out_growth(
        &self,
        state: MutexGuard<'_, ArenaState>,
        plan: Plan,
        search: &mut Search<'_>,
    ) -> Result<Option<BlockMemory>, Refusal> {
        let Search { bytes, now_us, rules, .. } = *search;
        let (buffer, surplus_bytes) = (plan.buffer(), plan.surplus_bytes());
        let finished = self.carry_out(state, plan, now_us, rules.until, Some(bytes));
        self.request_unmap();
        let mut state = self.state();
        self.update_needs_compaction(&state, now_us);
        let error = match finished {
            Ok(is_granted) => {
                state.smaller_regions += u64::from(search.commit == CommitSize::OneBuffer && self.shape.has_regions);
                let memory = buffer.filter(|_| is_granted).and_then(|buffer| state.memory_at(buffer));
                // Does not happen: a plan with a buffer commits or remaps, and without an error all its steps were made.
                let not_granted = || Refusal::Source(SourceError::new("allocation", "the plan was not granted"));
                return memory.map(Some).ok_or_else(not_granted);
            }
            Err(error) => error,
        };
        search.commit = match search.commit {
            CommitSize::Nothing => return Err(Refusal::Source(error)),
            CommitSize::Ample if surplus_bytes > 0 => CommitSize::OneBuffer,
            CommitSize::Ample | CommitSize::OneBuffer => {
                search.source_error = Some(error);
                CommitSize::Nothing
            }
        };
        Ok(None)
    }

    /// Makes room if there is no plan: completes copies, then releases the oldest idle block, or else permits the release of
    /// regions (policy-R8). Returns whether the search should plan again.
    pub(super) fn make_room(
        &self,
        state: MutexGuard<'_, ArenaState>,
        limits: GrowthLimits,
        search: &mut Search<'_>,
    ) -> bool {
        let arena = state.arena.stats();
        // Bytes that the source adds to a region are released with it.
        let available_bytes = (arena.hole_bytes + arena.overhead_bytes).saturating_add(limits.commit_bytes);
        let lacking_bytes = state.arena.held_bytes(search.bytes).saturating_sub(available_bytes);
        let could_release_regions = !limits.may_decommit_regions && arena.free_granule_bytes > 0;
        drop(state);
        search.pool.sweep_in_flight();
        let idle_bytes = search.pool.idle_buffer_bytes();
        if !std::mem::replace(&mut search.has_swept, true) {
            search.evictable_blocks = search.pool.idle_buffers();
        }
        if search.evictable_blocks > 0 && idle_bytes > 0 && idle_bytes >= lacking_bytes {
            search.give_oldest();
            return true;
        }
        could_release_regions && !std::mem::replace(&mut search.may_release_regions, true)
    }

    /// Returns the reason that the search found nothing.
    pub(super) fn refusal(&self, search: Search<'_>) -> Refusal {
        match search {
            Search { source_error: Some(error), .. } => Refusal::Source(error),
            Search { claim_refusal: Some(refusal), .. } => refusal.into(),
            Search { bytes, pool, .. } => self.no_space(bytes, pool.idle_buffer_bytes()),
        }
    }

    /// Returns the limits of the next plan.
    pub(super) fn limits(&self, state: &ArenaState, search: &Search<'_>) -> GrowthLimits {
        let room_bytes = self.budget.room_for(state.arena.grown_bytes(search.bytes));
        let commit_bytes = match search.commit {
            CommitSize::Nothing => 0,
            _ if self.settings.may_grow => room_bytes,
            // The part of the reserve that is still to come.
            _ => room_bytes.min(state.unpinned_reserve_bytes()),
        };
        let (step_bytes, largest_miss_bytes) = match search.commit {
            CommitSize::OneBuffer | CommitSize::Nothing => (0, 0),
            CommitSize::Ample => {
                // A long registration delays enqueues.
                let in_short_steps = self.source.blocks_on_release() && search.pool.has_copies();
                let step_bytes = if in_short_steps { STEP_DURING_COPIES_BYTES } else { u64::MAX };
                (step_bytes, state.sizes.missed.largest(search.now_us))
            }
        };
        let nothing_else = search.may_release_regions || search.commit == CommitSize::Nothing;
        GrowthLimits {
            commit_bytes,
            over_bytes: self.budget.over_bytes(),
            may_decommit_regions: !self.source.blocks_on_release() || nothing_else && !self.may_never_release(),
            step_bytes,
            largest_miss_bytes,
            known_bytes: state.sizes.held.largest(search.now_us),
        }
    }

    /// Carries out `plan`. Waits for other threads' calls until `until`. Logs what was pinned, for `requested_bytes` if
    /// they are known. Returns whether the plan's block was granted. The call may be slow.
    pub(super) fn carry_out(
        &self,
        mut state: MutexGuard<'_, ArenaState>,
        plan: Plan,
        now_us: u64,
        until: Instant,
        requested_bytes: Option<u64>,
    ) -> Result<bool, SourceError> {
        let mut execution = Execution::new(&mut state.mappings, &plan, until);
        drop(state);
        execution.execute(&self.source, &plan);
        let (pin_calls, took) = (execution.calls.pin.count, execution.calls.time());
        let mut state = self.state();
        let held_before_bytes = state.held_bytes();
        let finished = state.finish_plan(plan, execution, now_us);
        let held_bytes = state.held_bytes();
        drop(state);
        self.finished.notify_all();
        if pin_calls > 0 {
            let requested_bytes = requested_bytes.unwrap_or(held_bytes.saturating_sub(held_before_bytes));
            self.log.acquired(requested_bytes, held_before_bytes, held_bytes, pin_calls, took);
        }
        finished
    }

    /// Returns whether a block of `bytes` could be held if everything else were released.
    pub(super) fn could_hold_bytes(&self, bytes: u64) -> bool {
        self.fits(bytes) && (bytes <= self.shape.longest_bytes || bytes <= self.state().reserve_bytes().1)
    }

    /// Returns whether the limit would leave room for a block of `bytes` if everything else were released.
    fn fits(&self, bytes: u64) -> bool {
        let state = self.state();
        let (reserve_bytes, largest_reserve_bytes) = state.reserve_bytes();
        let room_bytes = self.budget.highest_claim_bytes().saturating_sub(reserve_bytes);
        let grown_bytes = state.arena.grown_bytes(bytes);
        let in_reserve = !self.shape.has_regions && grown_bytes <= state.reserve_in_granules();
        let may_grow = self.settings.may_grow || in_reserve;
        bytes <= largest_reserve_bytes || may_grow && grown_bytes <= room_bytes
    }

    /// Returns the reason that no plan gives memory to a block of `bytes` while `idle_bytes` are idle in the pool.
    pub(super) fn no_space(&self, bytes: u64, idle_bytes: u64) -> Refusal {
        if !self.settings.may_grow {
            return self.budget.own_refusal(bytes).into();
        }
        let state = self.state();
        // Idle memory of this pool is used first, and is claimed already.
        let arena = state.arena.stats();
        let reusable_bytes = idle_bytes.saturating_add(arena.free_granule_bytes);
        // Regions that contain only idle buffers have holes, too, which are released with them.
        let hole_bytes = if self.shape.has_regions { arena.hole_bytes - arena.reserve_hole_bytes } else { 0 };
        let (missing_bytes, grown_bytes) = (state.arena.missing_bytes(bytes), state.arena.grown_bytes(bytes));
        drop(state);
        let addressable = missing_bytes.is_some() && bytes <= self.shape.longest_bytes;
        let has_limit = self.budget.max_bytes().is_some() || self.budget.is_shared();
        let fits = self.fits(bytes);
        if fits && !(addressable && has_limit) {
            let (size, longest) = (Size(bytes), Size(self.shape.longest_bytes));
            let what = format!("no contiguous {size} are left in the {longest} of reserved addresses");
            let remedy = self.shape.address_remedy.unwrap_or("request a smaller buffer, or return buffers first");
            return Refusal::Source(SourceError::new("allocation", what).with_remedy(remedy));
        }
        // A part of the best place may be committed already. Idle granules from elsewhere are remapped to the rest of it.
        let missing_bytes = missing_bytes.filter(|_| !self.shape.has_regions).unwrap_or(grown_bytes);
        let claimed_bytes =
            if fits { missing_bytes.min(grown_bytes.saturating_sub(reusable_bytes)) } else { grown_bytes };
        let (own_bytes, rest_bytes) = (self.budget.own_room_bytes(), claimed_bytes.saturating_sub(hole_bytes));
        // Each claim with its room: the missing bytes, those without the hole, and the whole buffer in place of reusable memory,
        // because the limit may have room even if no plan was found: idle memory may be at other addresses.
        let most_bytes = own_bytes.saturating_add(reusable_bytes);
        let wanted = [(claimed_bytes, own_bytes), (rest_bytes, own_bytes), (grown_bytes, most_bytes)];
        let shared = wanted.iter().filter(|(bytes, own_bytes)| bytes <= own_bytes);
        let over = shared.filter_map(|&(bytes, _)| self.budget.current_shared_refusal(bytes)).next();
        over.unwrap_or_else(|| self.budget.own_refusal(claimed_bytes)).into()
    }
}

impl Search<'_> {
    /// Gives the memory of the block that has been idle longest to the arena, unless another thread was faster.
    pub(super) fn give_oldest(&mut self) {
        self.evictable_blocks -= 1;
        self.pool.give_oldest(EvictionReason::Reclaimed);
    }
}
