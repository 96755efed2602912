//! The bookkeeping of an arena: what the lock in [`ArenaSupply`](super::ArenaSupply) guards.
//!
//! ```text
//!   claimed = arena's claims + reserves' overhead + pending reserves      within the limit after each addition
//!   ended, live bytes                                                     true and 0: no pool can use this memory again
//!   overdue bytes                                                         due, but kept because a release waits for the device
//!   sizes                                                                 variation of sizes, and the length of a wanted hole
//! ```
//!
//! This module is sequential: arithmetic and tables. It never calls the source or logs, and waits only for the lock of a shared
//! limit's file.
//!
//! - **arena-state-I1**: a region leaves the mappings before it is released, and returns to them if the release fails.

use std::sync::Arc;

use super::block_memory::BlockMemory;
use super::execution::Execution;
use super::shape::{GrowthShape, Mappings};
use crate::arena::{Arena, Extent, GrowthLimits, Plan, SizeHistory};
use crate::backend::SourceError;
use crate::quota::{Budget, Claim, QuotaExceeded};
use crate::stats::{SourceCalls, Stats};

mod reserve;

use reserve::Progress;

pub(in crate::engine) struct ArenaState {
    pub(super) arena: Arena,
    pub(super) mappings: Mappings,
    pub(super) sizes: SizeHistory,
    shape: GrowthShape,
    /// Earliest time of the next step towards a compaction target, if the last step failed.
    pub(super) next_compaction_us: u64,
    /// Whether the pool has ended, so that nothing is carved any more.
    pub(super) has_ended: bool,
    /// Bytes that were due at the last tick but are kept, because their release would wait for the device.
    pub(super) overdue_bytes: u64,
    budget: Arc<Budget>,
    /// The claim of this arena; `None` once it has ended.
    claim: Option<Claim>,
    /// The bytes that the system will hold for reserves in progress.
    pending_bytes: u64,
    /// The bytes that the system holds for reserves beyond their length.
    pub(super) reserve_overhead_bytes: u64,
    largest_reserve_bytes: u64,
    /// The bytes of all requested reserves.
    pub(super) requested_reserve_bytes: u64,
    /// The progress of pinning reserves.
    pub(super) progress: Progress,
    peak_bytes: u64,
    next_id: u64,
    /// Number of regions for one buffer that were acquired because the source refused a larger region.
    pub(super) smaller_regions: u64,
    pub(super) calls: SourceCalls,
    /// Whether a release failed, and none has succeeded since.
    release_fails: bool,
}

impl ArenaState {
    pub(in crate::engine) fn new(arena: Arena, mappings: Mappings, shape: GrowthShape, claim: Claim) -> Self {
        Self {
            arena,
            mappings,
            sizes: SizeHistory::default(),
            shape,
            next_compaction_us: 0,
            has_ended: false,
            overdue_bytes: 0,
            budget: claim.budget().clone(),
            claim: Some(claim),
            pending_bytes: 0,
            reserve_overhead_bytes: 0,
            largest_reserve_bytes: 0,
            requested_reserve_bytes: 0,
            progress: Progress::default(),
            peak_bytes: 0,
            next_id: 0,
            smaller_regions: 0,
            calls: SourceCalls::default(),
            release_fails: false,
        }
    }

    /// Returns the bytes that the system holds, according to the finished plans.
    pub(in crate::engine) fn held_bytes(&self) -> u64 {
        let arena = self.arena.stats();
        arena.committed_bytes + arena.overhead_bytes + self.reserve_overhead_bytes
    }

    fn record_peak(&mut self) {
        self.peak_bytes = self.peak_bytes.max(self.held_bytes());
    }

    /// Carves `bytes` from committed memory.
    pub(in crate::engine) fn carve(&mut self, bytes: u64) -> Option<BlockMemory> {
        let buffer = self.arena.carve(bytes)?;
        self.memory_at(buffer)
    }

    /// Carves `bytes` from regions for buffers of other lengths, when nothing else serves the request (policy-R11).
    pub(in crate::engine) fn carve_in_other_regions(&mut self, bytes: u64) -> Option<BlockMemory> {
        let buffer = self.arena.carve_in_other_regions(bytes)?;
        self.memory_at(buffer)
    }

    /// Returns the memory of `extent`, which was carved or granted by a plan, under a new id.
    pub(in crate::engine) fn memory_at(&mut self, extent: Extent) -> Option<BlockMemory> {
        let start = self.mappings.address(extent)?;
        let id = self.next_id;
        self.next_id += 1;
        Some(BlockMemory::Carved { start, extent, id })
    }

    /// Records that a request for `bytes` missed, and carves the bytes if a hole is long enough. If the size does not recur, it
    /// is wanted from now on, unless the holes and the `idle_bytes` of the pool are too few for it (policy-R12).
    pub(in crate::engine) fn carve_missed(
        &mut self,
        bytes: u64,
        now_us: u64,
        idle_bytes: impl FnOnce() -> u64,
    ) -> Option<BlockMemory> {
        let recurs = self.sizes.add_miss(bytes, self.arena.stats().committed_bytes, now_us);
        let buffer = self.arena.carve(bytes);
        if !recurs && (buffer.is_some() || self.could_cover(bytes, idle_bytes())) {
            self.sizes.add_wanted(bytes, now_us);
        }
        self.memory_at(buffer?)
    }

    /// Returns whether sizes vary (policy-R12).
    pub(in crate::engine) fn sizes_vary(&self, now_us: u64) -> bool {
        self.sizes.wanted_bytes(now_us) > self.shape.varied_above_bytes
    }

    /// Returns whether a hole of the wanted length is more than a step of compaction away (policy-R13).
    pub(in crate::engine) fn needs_compaction(&self, now_us: u64) -> bool {
        self.sizes_vary(now_us) && self.arena.lacks_hole(self.sizes.wanted_bytes(now_us))
    }

    /// Plans a step towards a compaction target (policy-R13).
    pub(in crate::engine) fn plan_compaction(&mut self, now_us: u64) -> Option<Plan> {
        if now_us < self.next_compaction_us || !self.sizes_vary(now_us) {
            return None;
        }
        self.arena.compact(self.sizes.wanted_bytes(now_us))
    }

    /// Returns whether `idle_bytes` of idle blocks and the holes together make up a block of `bytes` (policy-R6).
    pub(in crate::engine) fn could_cover(&self, bytes: u64, idle_bytes: u64) -> bool {
        idle_bytes + self.arena.stats().hole_bytes >= bytes
    }

    /// Plans a block of `bytes` within `limits`, and claims the bytes that the plan may commit. Without a plan, returns the limit
    /// that refused the claim, if one did.
    pub(super) fn plan_growth(&mut self, bytes: u64, limits: GrowthLimits) -> Result<Plan, Option<QuotaExceeded>> {
        let plan = self.arena.plan_growth(bytes, limits).ok_or(None)?;
        Ok(self.claim_plan(plan)?)
    }

    /// Claims the bytes that `plan` may commit. If that is refused, abandons the plan.
    fn claim_plan(&mut self, plan: Plan) -> Result<Plan, QuotaExceeded> {
        let Err(over) = self.update_claim() else { return Ok(plan) };
        // Another claim was faster.
        self.abandon(plan);
        Err(over)
    }

    /// Abandons a plan before its first step. The caller has held the lock since the plan was made.
    pub(in crate::engine) fn abandon(&mut self, plan: Plan) {
        let _not_granted = self.arena.finish_plan(plan, &[], 0);
        self.lower_claim();
    }

    /// Finishes a plan that was carried out: counts its calls and records the regions that it acquired or kept. Returns whether
    /// its block was granted, or the error of a call that failed. After the error of a release, further errors of releases are
    /// not returned until releases succeed again.
    pub(super) fn finish_plan(&mut self, plan: Plan, execution: Execution, now_us: u64) -> Result<bool, SourceError> {
        let Execution { regions, calls, mut error, outcomes, .. } = execution;
        self.mappings.regions.extend(regions);
        self.calls.add(&calls);
        if plan.is_release() {
            error = self.unreported(error, calls.unpin.count);
        } else if error.is_none() {
            self.sizes.add_growth(plan.surplus_bytes());
        }
        let before_bytes = self.arena.committed_outside_reserves();
        let granted = self.arena.finish_plan(plan, &outcomes, now_us);
        // Memory that requests commit becomes part of the reserve while the reserve is incomplete.
        let more_bytes = self.arena.committed_outside_reserves().saturating_sub(before_bytes);
        self.arena.keep(more_bytes.min(self.unpinned_reserve_bytes()));
        self.record_peak();
        self.lower_claim();
        error.map_or(Ok(granted), Err)
    }

    /// Returns the `error` of a plan of releases, unless an earlier error was returned and no plan has released memory without
    /// an error since. `releases` is the number of releases that succeeded.
    fn unreported(&mut self, error: Option<SourceError>, releases: u64) -> Option<SourceError> {
        let was_reported = self.release_fails;
        self.release_fails = error.is_some() || was_reported && releases == 0;
        error.filter(|_| !was_reported)
    }

    /// Records that granules could not be unmapped at their old addresses after a remap. Returns the error under the same
    /// condition as for a release.
    pub(in crate::engine) fn record_not_unmapped(&mut self, error: SourceError) -> Result<(), SourceError> {
        self.calls.remap.failures += 1;
        self.unreported(Some(error), 0).map_or(Ok(()), Err)
    }

    /// Takes back the bytes of a block. Returns whether that was the last block and the arena has ended.
    pub(in crate::engine) fn give(&mut self, buffer: Extent, now_us: u64) -> bool {
        self.arena.free(buffer, now_us);
        self.sizes.add_return(buffer.bytes(), self.arena.stats().hole_bytes);
        self.is_unused()
    }

    /// Returns whether the arena has ended and every block has been returned.
    pub(in crate::engine) fn is_unused(&self) -> bool {
        self.has_ended && self.arena.stats().live_bytes == 0
    }

    /// Counts and returns the bytes that are due but kept.
    pub(in crate::engine) fn count_overdue(&mut self, now_us: u64) -> u64 {
        self.overdue_bytes = self.arena.due_bytes(now_us);
        self.overdue_bytes
    }

    /// Returns whether evictions could and must add to the free memory so that `bytes` can be released. Kept memory is released
    /// only if the limit is exceeded, and reserved regions never.
    pub(in crate::engine) fn lacks_free(&self, bytes: u64) -> bool {
        let over_bytes = self.budget.over_bytes().min(bytes);
        let committed_bytes = self.arena.committed_outside_reserves();
        let most_bytes = committed_bytes.saturating_sub(self.arena.kept_bytes()).max(over_bytes.min(committed_bytes));
        bytes.min(most_bytes) > self.arena.releasable_bytes().max(over_bytes.min(self.arena.stats().free_granule_bytes))
    }

    /// Plans the release of `bytes` of free memory.
    pub(in crate::engine) fn plan_release_of(&mut self, bytes: u64) -> Option<Plan> {
        let over_bytes = self.budget.over_bytes().min(bytes);
        if over_bytes > self.arena.releasable_bytes() {
            return self.arena.release_idle_of_kept(over_bytes);
        }
        self.arena.release_idle(bytes)
    }

    /// Returns the bytes of free memory and of the pool's idle buffers, which have `buffer_bytes`, without the reserve.
    pub(in crate::engine) fn unused_bytes(&self, buffer_bytes: u64) -> u64 {
        let arena = self.arena.stats();
        let own_bytes = self.arena.committed_outside_reserves().saturating_sub(self.arena.kept_bytes());
        (buffer_bytes + arena.hole_bytes - arena.reserve_hole_bytes).min(own_bytes)
    }

    /// Plans the release of everything that is free, including memory that is kept for the reserve.
    pub(in crate::engine) fn plan_release_all(&mut self) -> Option<Plan> {
        self.requested_reserve_bytes = self.arena.stats().reserve_bytes;
        self.arena.release_idle_of_kept(u64::MAX)
    }

    /// Takes the remaining mappings after the last release. Returns empty mappings if a block still exists, which keeps its
    /// memory. Returns `None` while a granule must still be released before its addresses, unless releases fail.
    pub(in crate::engine) fn take_mappings(&mut self) -> Option<Mappings> {
        if !self.is_unused() {
            return Some(Mappings::default());
        }
        (self.arena.stats().free_granule_bytes == 0 || self.release_fails).then(|| std::mem::take(&mut self.mappings))
    }

    pub(in crate::engine) fn fill(&self, stats: &mut Stats) {
        let arena = self.arena.stats();
        stats.limits.max_bytes = self.budget.max_bytes();
        stats.memory.held_bytes = self.held_bytes();
        stats.memory.peak_held_bytes = self.peak_bytes;
        stats.memory.free_bytes = arena.hole_bytes;
        stats.memory.transit_bytes = arena.transit_bytes;
        stats.memory.overhead_bytes = arena.overhead_bytes + self.reserve_overhead_bytes;
        (stats.memory.reserve_bytes, stats.memory.reserve_target_bytes) = self.reserve_progress();
        stats.memory.reserve_eta = self.reserve_eta();
        stats.memory.awaiting_release_bytes = self.overdue_bytes.min(self.arena.releasable_bytes());
        stats.memory.smaller_regions = self.smaller_regions;
        stats.memory.mappings = arena.mappings;
    }

    /// Ends the claim. Memory that could not be released stays claimed until the process ends. Drop the result outside the lock:
    /// it may be the last claim under a shared limit, which the pool then leaves.
    pub(in crate::engine) fn end_claims(&mut self, is_all_released: bool) -> Option<Claim> {
        match self.claim.take() {
            Some(claim) if !is_all_released && claim.bytes() > 0 => {
                claim.leak();
                None
            }
            claim => claim,
        }
    }

    /// Returns the bytes that are claimed under the same limit for memory outside this arena.
    pub(in crate::engine) fn claimed_by_others(&self) -> u64 {
        self.budget.used_bytes().saturating_sub(self.claim.as_ref().map_or(0, Claim::bytes))
    }

    /// Changes the claim to the bytes that are held and planned now.
    pub(in crate::engine) fn update_claim(&mut self) -> Result<(), QuotaExceeded> {
        let bytes = self.arena.stats().claimed_bytes + self.reserve_overhead_bytes + self.pending_bytes;
        self.claim.as_mut().map_or(Ok(()), |claim| claim.resize(bytes))
    }

    /// Lowers the claim to the bytes that are held and planned now. They are no more than a plan claimed.
    pub(in crate::engine) fn lower_claim(&mut self) {
        let lowered = self.update_claim();
        debug_assert!(lowered.is_ok(), "a completion claims more than its plan: {lowered:?}");
    }
}
