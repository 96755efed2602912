//! Behind the store: each miss is an acquisition of its own, each eviction a release.
//!
//! Claims the ceiling before the source is asked, meters every call, and counts what a source failed to take back. Takes
//! no lock but its meter's, and that never around a slow call.

use std::sync::Arc;
use std::time::Instant;

use crate::backend::{Region, Source, SourceError};
use crate::budget::{Budget, Claim};
use crate::stats::Underlying;
use crate::sync::plain::Mutex;

/// The underlying allocator: a source under a ceiling.
#[derive(Debug)]
pub(crate) struct Supply {
    source: Arc<dyn Source>,
    budget: Arc<Budget>,
    meter: Mutex<Meter>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Meter {
    calls: Underlying,
    lost_bytes: u64,
}

/// A region with its share of the ceiling.
#[derive(Debug)]
pub(crate) struct Memory {
    region: Region,
    claim: Claim,
}

/// Why there is no memory.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// The ceiling is in the way: this much was needed.
    Ceiling(u64),
    Source(SourceError),
}

impl Memory {
    pub(crate) fn region(&self) -> &Region {
        &self.region
    }

    /// Bytes that the source really holds for it.
    pub(crate) fn held_bytes(&self) -> u64 {
        self.claim.bytes()
    }
}

impl Supply {
    pub(crate) fn new(source: Arc<dyn Source>, max_bytes: Option<u64>) -> Self {
        Self { source, budget: Budget::new(max_bytes), meter: Mutex::default() }
    }

    pub(crate) fn source(&self) -> &dyn Source {
        &*self.source
    }

    pub(crate) fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Could a buffer of `class_bytes` ever exist under the ceiling?
    pub(crate) fn could_hold(&self, class_bytes: usize) -> bool {
        self.budget.max_bytes().is_none_or(|max_bytes| self.source.held_bytes(class_bytes) as u64 <= max_bytes)
    }

    /// Acquires `class_bytes`. A slow call: no lock may be held.
    pub(crate) fn acquire(&self, class_bytes: usize) -> Result<Memory, Refusal> {
        let held_bytes = self.source.held_bytes(class_bytes) as u64;
        let claim = self.budget.claim(held_bytes).ok_or(Refusal::Ceiling(held_bytes))?;
        let begun = Instant::now();
        let acquired = self.source.acquire(class_bytes);
        let mut meter = self.meter.lock();
        meter.calls.time += begun.elapsed();
        match acquired {
            Ok(region) => {
                meter.calls.allocs += 1;
                meter.calls.alloc_bytes += class_bytes as u64;
                let live_bytes = meter.calls.alloc_bytes - meter.calls.free_bytes;
                meter.calls.peak_bytes = meter.calls.peak_bytes.max(live_bytes);
                Ok(Memory { region, claim })
            }
            Err(error) => {
                meter.calls.failures += 1;
                Err(Refusal::Source(error))
            }
        }
    }

    /// Gives `memory` back; on failure its bytes stay held, and their number is returned with the reason. A slow call: no
    /// lock may be held.
    #[allow(unsafe_code)] // The one place where memory leaves the pool.
    pub(crate) fn release(&self, memory: Memory) -> Result<(), (u64, SourceError)> {
        let Memory { region, claim } = memory;
        let class_bytes = region.len_bytes() as u64;
        let begun = Instant::now();
        // SAFETY: the region came from this source (`acquire` above), and whoever gives up its `Memory` by value is the
        // only one who had it: an idle block, or a buffer that no device reads (in_flight invariants 1 and 2).
        let released = unsafe { self.source.release(region) };
        let mut meter = self.meter.lock();
        meter.calls.time += begun.elapsed();
        match released {
            Ok(()) => {
                meter.calls.frees += 1;
                meter.calls.free_bytes += class_bytes;
                // The bytes are free for others only now that the source has them back.
                drop(claim);
                Ok(())
            }
            Err(error) => {
                meter.calls.failures += 1;
                meter.lost_bytes += claim.bytes();
                let held_bytes = claim.bytes();
                claim.keep_for_ever();
                Err((held_bytes, error))
            }
        }
    }

    pub(crate) fn calls(&self) -> Underlying {
        self.meter.lock().calls
    }

    /// Bytes that the source failed to take back.
    pub(crate) fn lost_bytes(&self) -> u64 {
        self.meter.lock().lost_bytes
    }
}
