//! A supply without an arena, which makes one acquisition for each block and keeps no memory. It serves `tensorflow`, with a
//! release for each eviction, and provides pageable memory for requests without room for pinned memory.

use std::sync::Arc;

use super::block_memory::{AllowedCalls, AttemptError, BlockMemory, Refusal, Rules};
use super::metered_source::MeteredSource;
use super::{PoolView, Supply};
use crate::backend::{BuiltInSource, HeapSource, Region, Source, SourceError};
use crate::quota::{Budget, Claim};
use crate::report::PoolLog;
use crate::size_class::Class;
use crate::stats::{CallStats, EvictionReason, SourceCalls, Stats};
use pinpool_os::sync::unmodeled::Mutex;

/// A source under a limit.
pub(crate) struct RegionSupply {
    source: MeteredSource,
    pub(super) budget: Arc<Budget>,
    /// A claim of zero bytes, which keeps the shared limit joined until the pool has ended.
    base: Mutex<Option<Claim>>,
    /// Regions that the source refused to release, or that could not be released yet. Their release is tried again.
    refused: Mutex<Vec<(Region, Claim)>>,
    counts: Box<Mutex<CallCounts>>,
    /// `None` for pageable memory.
    log: Option<Arc<PoolLog>>,
}

#[derive(Debug, Clone, Copy, Default)]
struct CallCounts {
    calls: SourceCalls,
    /// Bytes of the acquired regions, and the peak of these bytes. Excludes claims for acquisitions that the source refused.
    held_bytes: u64,
    peak_bytes: u64,
}

impl RegionSupply {
    /// Creates a supply of pageable memory, at most `max_bytes` at one time.
    pub(crate) fn pageable(max_bytes: Option<u64>) -> Self {
        Self::new(MeteredSource::new(Arc::new(HeapSource::new()), None), Budget::new(max_bytes).empty_claim(), None)
    }

    pub(crate) fn new(source: MeteredSource, claim: Claim, log: Option<Arc<PoolLog>>) -> Self {
        let (budget, base) = (claim.budget().clone(), Mutex::new(Some(claim)));
        Self { source, budget, base, refused: Mutex::default(), counts: Box::default(), log }
    }

    /// Acquires `class_bytes`, if `rules` permit it. The call may be slow.
    pub(in crate::engine) fn acquire(&self, class_bytes: usize, rules: Rules) -> Result<BlockMemory, AttemptError> {
        let needed_bytes = self.source.held_bytes(class_bytes) as u64;
        let claim = || self.budget.claim(needed_bytes).map_err(Refusal::from);
        if rules.calls != AllowedCalls::All {
            // If there is room, nothing is claimed, since other requests would be refused while the claim exists.
            if self.budget.room_for(needed_bytes) < needed_bytes {
                drop(claim()?);
            }
            return Err(AttemptError::NeedsCall);
        }
        let claim = claim()?;
        let mut pin = CallStats::default();
        let acquire = |source: &dyn Source| source.acquire_until(class_bytes, rules.until);
        let acquired = self.source.acquire(class_bytes, &mut pin, acquire);
        let took = pin.time.total();
        let mut counts = self.counts.lock();
        counts.calls.pin.add(&pin);
        let region = acquired.map_err(Refusal::Source)?;
        counts.held_bytes += needed_bytes;
        counts.peak_bytes = counts.peak_bytes.max(counts.held_bytes);
        let held_bytes = counts.held_bytes;
        drop(counts);
        if let Some(log) = &self.log {
            log.acquired(class_bytes as u64, held_bytes.saturating_sub(needed_bytes), held_bytes, 1, took);
        }
        Ok(BlockMemory::Region { region, claim, is_pageable: self.log.is_none() })
    }

    /// Releases `region`. If this fails, its bytes stay held until a later release. The call may be slow.
    #[allow(unsafe_code)] // Memory leaves the pool.
    fn release(&self, region: Region, claim: Claim) -> Result<(), SourceError> {
        let mut unpin = CallStats::default();
        // SAFETY: the region came from this source (`acquire` above), and the caller gave up its block by value, so no
        // reference and no copy uses it (core-I1).
        let released = unsafe { self.source.release(&region, &mut unpin) };
        let mut counts = self.counts.lock();
        counts.calls.unpin.add(&unpin);
        if released.is_ok() {
            counts.held_bytes -= claim.bytes();
            drop(counts);
            // Dropped only now: the bytes are free for other requests once the source has released them.
            drop(claim);
        } else {
            self.refused.lock().push((region, claim));
        }
        released
    }

    /// Returns the bytes of regions that were not released yet, because the source refused or would have waited for copies.
    fn stuck_bytes(&self) -> u64 {
        self.refused.lock().iter().map(|(_, claim)| claim.bytes()).sum()
    }
}

impl Supply for RegionSupply {
    fn find(
        &self,
        class: Class,
        _now_us: u64,
        rules: Rules,
        pool: &dyn PoolView,
        take_idle: &dyn Fn() -> bool,
    ) -> Result<Option<BlockMemory>, AttemptError> {
        // No more blocks are released than were idle at first, even if other threads keep returning blocks.
        let mut evictable_blocks = None;
        loop {
            if take_idle() {
                return Ok(None);
            }
            let refusal = match self.acquire(class.bytes, rules) {
                // A request that can never fit is no reason to release idle blocks.
                Err(AttemptError::Refused(Refusal::Limit(over))) if over.could_fit => Refusal::from(over),
                acquired => return acquired.map(Some),
            };
            let left = evictable_blocks.get_or_insert_with(|| pool.idle_buffers());
            if rules.calls == AllowedCalls::None && *left > 0 {
                return Err(AttemptError::NeedsCall);
            }
            if *left == 0 || !pool.give_oldest(EvictionReason::Reclaimed) {
                return Err(refusal.into());
            }
            *left -= 1;
        }
    }

    fn give(&self, memory: BlockMemory, _: u64, may_wait: bool) {
        // This supply makes only regions.
        let BlockMemory::Region { region, claim, .. } = memory else { return };
        if !may_wait {
            return self.refused.lock().push((region, claim));
        }
        let held_bytes = claim.bytes();
        if let (Err(error), Some(log)) = (self.release(region, claim), &self.log) {
            log.release_failed(held_bytes, &error);
        }
    }

    fn release_refused(&self) {
        let refused = std::mem::take(&mut *self.refused.lock());
        refused.into_iter().for_each(|(region, claim)| drop(self.release(region, claim)));
    }

    /// Ends all claims of the pool, except for quarantined blocks and for regions that the source still refuses to release.
    fn end(&self, _: u64) {
        self.release_refused();
        self.refused.lock().drain(..).for_each(|(_, claim)| claim.leak());
        let base = self.base.lock().take();
        drop(base);
    }

    fn could_hold(&self, class: Class) -> bool {
        self.budget.could_hold(self.block_bytes(class))
    }

    fn room_to_overtake(&self, first: Class, most_bytes: u64) -> u64 {
        most_bytes.saturating_sub(self.block_bytes(first))
    }

    fn bytes_to_overtake(&self, class: Class) -> u64 {
        self.block_bytes(class)
    }

    fn block_bytes(&self, class: Class) -> u64 {
        self.source.held_bytes(class.bytes) as u64
    }

    /// Excludes regions that the source refused to release or could not release yet.
    fn all_block_bytes(&self) -> u64 {
        self.counts.lock().held_bytes - self.stuck_bytes()
    }

    fn held_bytes(&self) -> u64 {
        self.budget.used_bytes()
    }

    fn unused_bytes(&self, pool: &dyn PoolView) -> u64 {
        pool.idle_buffer_bytes()
    }

    fn calls(&self) -> SourceCalls {
        self.counts.lock().calls
    }

    fn fill(&self, stats: &mut Stats) {
        let CallCounts { calls, held_bytes, peak_bytes } = *self.counts.lock();
        stats.limits.max_bytes = self.budget.max_bytes();
        (stats.memory.held_bytes, stats.memory.peak_held_bytes) = (held_bytes, peak_bytes);
        stats.memory.quarantined_bytes += self.stuck_bytes();
        stats.memory.mappings = calls.pin.count.saturating_sub(calls.unpin.count);
    }
}
