//! Preset `tensorflow`: each miss is an acquisition of its own, each victim a release.
//!
//! Owns the source, its ceiling and the counts of its calls. Keeps no memory.

use std::sync::Arc;
use std::time::Instant;

use super::{BlockMemory, CalledSource, Refusal, SlowCalls, Stop};
use crate::backend::{Region, Source, SourceError};
use crate::diag::{Growth, PoolLog};
use crate::quota::{Budget, Claim};
use crate::stats::{SourceCalls, Stats};
use pinpool_os::sync::plain::Mutex;

/// A source under a ceiling.
#[derive(Debug)]
pub(crate) struct OneEach {
    source: CalledSource,
    budget: Arc<Budget>,
    /// Of no bytes: keeps the ceiling that several pools share until the pool is closed.
    base: Mutex<Option<Claim>>,
    /// Regions that the source refused to release: it is asked again.
    refused: Mutex<Vec<(Region, Claim)>>,
    counts: Box<Mutex<CallCounts>>,
    log: Arc<PoolLog>,
}

#[derive(Debug, Clone, Copy, Default)]
struct CallCounts {
    calls: SourceCalls,
    /// Bytes of memory that is there, and the most at any time: no claim whose memory was refused.
    held_bytes: u64,
    peak_bytes: u64,
    stuck_bytes: u64,
}

impl OneEach {
    pub(crate) fn new(source: CalledSource, claim: Claim, log: Arc<PoolLog>) -> Self {
        let (budget, base) = (claim.budget().clone(), Mutex::new(Some(claim)));
        Self { source, budget, base, refused: Mutex::default(), counts: Box::default(), log }
    }

    /// The pool has closed, and claims no more than its blocks do that are lost, and the regions that are never released.
    pub(in crate::engine) fn close(&self) {
        self.release_refused();
        self.refused.lock().drain(..).for_each(|(_, claim)| claim.keep_forever());
        let base = self.base.lock().take();
        drop(base);
    }

    /// Releases what the source refused to release before. Slow calls.
    pub(in crate::engine) fn release_refused(&self) {
        let refused = std::mem::take(&mut *self.refused.lock());
        for (region, claim) in refused {
            self.counts.lock().stuck_bytes -= claim.bytes();
            let _refused_again = self.release(region, claim);
        }
    }

    pub(in crate::engine) fn source(&self) -> &dyn Source {
        &*self.source
    }

    pub(in crate::engine) fn budget(&self) -> &Arc<Budget> {
        &self.budget
    }

    /// What the ceiling leaves beside a block of `class_bytes`.
    pub(in crate::engine) fn room_beside_bytes(&self, class_bytes: usize) -> u64 {
        self.budget.max_bytes().map_or(0, |max_bytes| max_bytes.saturating_sub(self.held_bytes(class_bytes)))
    }

    /// Bytes held for a block of `class_bytes`.
    pub(in crate::engine) fn held_bytes(&self, class_bytes: usize) -> u64 {
        self.source.held_bytes(class_bytes) as u64
    }

    /// Acquires `class_bytes`, as far as `calls` allow. A slow call.
    pub(in crate::engine) fn acquire(&self, class_bytes: usize, calls: SlowCalls) -> Result<BlockMemory, Stop> {
        let needed_bytes = self.source.held_bytes(class_bytes) as u64;
        let claim = self.budget.claim(needed_bytes).map_err(|over| Refusal::Over { needed_bytes, over })?;
        if matches!(calls, SlowCalls::None | SlowCalls::Held(..)) {
            return Err(Stop::NeedsCall);
        }
        let begun = Instant::now();
        let acquired = self.source.acquire(class_bytes, Some(calls.until().1));
        let took = begun.elapsed();
        let mut counts = self.counts.lock();
        counts.calls.pinned(class_bytes as u64, took, acquired.is_ok());
        let region = acquired.map_err(Refusal::Source)?;
        counts.held_bytes += needed_bytes;
        counts.peak_bytes = counts.peak_bytes.max(counts.held_bytes);
        let held_bytes = counts.held_bytes;
        drop(counts);
        self.log.page_locked(&Growth {
            asked_bytes: class_bytes as u64,
            held_before_bytes: held_bytes.saturating_sub(needed_bytes),
            held_bytes,
            page_locks: 1,
            took,
            max_bytes: self.budget.max_bytes(),
        });
        Ok(BlockMemory::Region { region, claim })
    }

    /// Releases `region`. On failure its bytes stay held until a later release; returns their number with the reason. A slow
    /// call.
    #[allow(unsafe_code)] // Memory leaves the pool.
    pub(in crate::engine) fn release(&self, region: Region, claim: Claim) -> Result<(), (u64, SourceError)> {
        let class_bytes = region.len_bytes() as u64;
        let again = Region::new(region.start(), region.len_bytes(), region.id());
        let begun = Instant::now();
        // SAFETY: the region came from this source (`acquire` above), and the caller gave up its block by value, so no
        // reference and no copy uses it (core-I1).
        let released = unsafe { self.source.release(region) };
        let mut counts = self.counts.lock();
        counts.calls.unpin.record(class_bytes, begun.elapsed(), released.is_ok());
        match released {
            Ok(()) => {
                counts.held_bytes -= claim.bytes();
                drop(counts);
                // Only now: the bytes are free for other gets after the source has them back.
                drop(claim);
                Ok(())
            }
            Err(error) => {
                let held_bytes = claim.bytes();
                counts.stuck_bytes += held_bytes;
                self.refused.lock().push((again, claim));
                Err((held_bytes, error))
            }
        }
    }

    pub(in crate::engine) fn calls(&self) -> SourceCalls {
        self.counts.lock().calls
    }

    /// Bytes of blocks: without those of regions that the source failed to release.
    pub(in crate::engine) fn block_bytes(&self) -> u64 {
        let counts = self.counts.lock();
        counts.held_bytes - counts.stuck_bytes
    }

    pub(in crate::engine) fn fill(&self, stats: &mut Stats) {
        let CallCounts { calls, stuck_bytes, held_bytes, peak_bytes } = *self.counts.lock();
        self.budget.fill(stats);
        (stats.pinned_bytes, stats.peak_pinned_bytes) = (held_bytes, peak_bytes);
        stats.lost_bytes += stuck_bytes;
        stats.mappings = calls.pin.count.saturating_sub(calls.unpin.count);
    }
}
