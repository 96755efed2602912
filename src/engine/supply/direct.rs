//! Each miss is an acquisition of its own, each victim a release: TensorFlow's way.

use std::sync::Arc;
use std::time::Instant;

use super::{Memory, Refusal, SupplyStats};
use crate::backend::{Region, Source, SourceError};
use crate::budget::{Budget, Claim};
use crate::stats::Underlying;
use crate::sync::plain::Mutex;

/// A source under a ceiling.
#[derive(Debug)]
pub(crate) struct Direct {
    source: Arc<dyn Source>,
    budget: Arc<Budget>,
    meter: Mutex<Meter>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Meter {
    calls: Underlying,
    stuck_bytes: u64,
}

impl Direct {
    pub(crate) fn new(source: Arc<dyn Source>, max_bytes: Option<u64>) -> Self {
        Self { source, budget: Budget::new(max_bytes), meter: Mutex::default() }
    }

    pub(in crate::engine) fn source(&self) -> &Arc<dyn Source> {
        &self.source
    }

    /// Could a block of `class_bytes` ever exist under the ceiling?
    pub(in crate::engine) fn could_hold(&self, class_bytes: usize) -> bool {
        self.budget.max_bytes().is_none_or(|max_bytes| self.source.held_bytes(class_bytes) as u64 <= max_bytes)
    }

    /// Acquires `class_bytes`. A slow call.
    pub(in crate::engine) fn acquire(&self, class_bytes: usize) -> Result<Memory, Refusal> {
        let needed_bytes = self.source.held_bytes(class_bytes) as u64;
        let claim = self.budget.claim(needed_bytes).ok_or(Refusal::Ceiling { needed_bytes })?;
        let begun = Instant::now();
        let acquired = self.source.acquire(class_bytes);
        let mut meter = self.meter.lock();
        meter.calls.time += begun.elapsed();
        match acquired {
            Ok(region) => {
                meter.calls.acquired(class_bytes as u64);
                Ok(Memory::Whole { region, claim })
            }
            Err(error) => {
                meter.calls.failures += 1;
                Err(Refusal::Source(error))
            }
        }
    }

    /// Gives `region` back; on failure its bytes stay held, and their number is returned with the reason. A slow call.
    #[allow(unsafe_code)] // Memory leaves the pool.
    pub(in crate::engine) fn release(&self, region: Region, claim: Claim) -> Result<(), (u64, SourceError)> {
        let class_bytes = region.len_bytes() as u64;
        let begun = Instant::now();
        // SAFETY: the region came from this source (`acquire` above), and whoever gives up its `Memory` by value is the
        // only one who had it: an idle block, or a buffer that no device reads (in_flight invariants 1 and 2).
        let released = unsafe { self.source.release(region) };
        let mut meter = self.meter.lock();
        meter.calls.time += begun.elapsed();
        match released {
            Ok(()) => {
                meter.calls.released(class_bytes);
                // The bytes are free for others only now that the source has them back.
                drop(claim);
                Ok(())
            }
            Err(error) => {
                meter.calls.failures += 1;
                meter.stuck_bytes += claim.bytes();
                let held_bytes = claim.bytes();
                claim.keep_for_ever();
                Err((held_bytes, error))
            }
        }
    }

    pub(in crate::engine) fn holding(&self) -> SupplyStats {
        let meter = *self.meter.lock();
        let held_bytes = self.budget.held_bytes();
        SupplyStats {
            held_bytes,
            peak_bytes: self.budget.peak_bytes(),
            block_bytes: held_bytes.saturating_sub(meter.stuck_bytes),
            stuck_bytes: meter.stuck_bytes,
            max_bytes: self.budget.max_bytes(),
            calls: meter.calls,
            ..SupplyStats::default()
        }
    }
}
