//! Unpinned memory for requests without room for pinned memory, under a separate limit.
//!
//! Never keeps memory: each buffer is an acquisition, released when the buffer is returned.

use std::sync::Arc;

use super::block_memory::BlockMemory;
use crate::backend::{HeapSource, Region, Source, SourceError};
use crate::quota::{Budget, Claim};
use crate::size_class::Class;
use crate::stats::Stats;
use pinpool_os::sync::process::{AtomicU64, Ordering};

/// The fallback of one pool.
#[derive(Debug)]
pub(crate) struct Pageable {
    source: HeapSource,
    /// Its limit is the limit of the pool, even after that was changed.
    budget: Arc<Budget>,
    /// Bytes of memory that exists. Relaxed: a statistic.
    held_bytes: AtomicU64,
}

impl Pageable {
    /// At most `max_bytes` at one time.
    pub(crate) fn new(max_bytes: Option<u64>) -> Self {
        Self { source: HeapSource::new(), budget: Budget::new(max_bytes), held_bytes: AtomicU64::new(0) }
    }

    /// The pool's limit has changed.
    pub(in crate::engine) fn follow(&self, limit_bytes: Option<u64>) {
        self.budget.set_max_bytes(limit_bytes);
    }

    /// Whether a block of `class` fits when nothing else is held.
    pub(in crate::engine) fn could_hold(&self, class: Class) -> bool {
        self.budget.could_hold(self.source.held_bytes(class.bytes) as u64)
    }

    /// `None` over the limit, or if the system refuses. A slow call.
    pub(in crate::engine) fn acquire(&self, class: Class) -> Option<BlockMemory> {
        let claim = self.budget.claim(self.source.held_bytes(class.bytes) as u64).ok()?;
        let region = self.source.acquire(class.bytes).ok()?;
        self.held_bytes.fetch_add(claim.bytes(), Ordering::Relaxed);
        Some(BlockMemory::Pageable { region, claim })
    }

    /// On failure the bytes stay held; returns their number with the reason. A slow call.
    #[allow(unsafe_code)] // Memory leaves the pool.
    pub(in crate::engine) fn release(&self, region: Region, claim: Claim) -> Result<(), (u64, SourceError)> {
        // SAFETY: the region came from this source, and its block was given up by value, so nothing uses it (core-I1).
        let released = unsafe { self.source.release(region) };
        let bytes = claim.bytes();
        match released {
            Ok(()) => {
                self.held_bytes.fetch_sub(bytes, Ordering::Relaxed);
                Ok(())
            }
            Err(error) => {
                claim.keep_forever();
                Err((bytes, error))
            }
        }
    }

    pub(in crate::engine) fn fill(&self, stats: &mut Stats) {
        stats.memory.fallback_bytes = self.held_bytes();
    }

    pub(in crate::engine) fn held_bytes(&self) -> u64 {
        self.held_bytes.load(Ordering::Relaxed)
    }
}
