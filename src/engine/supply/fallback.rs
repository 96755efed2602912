//! Ordinary memory in place of page-locked memory, where there is no room for that, under a limit of its own.
//!
//! Never keeps memory: each buffer is an acquisition, and goes back when it is put.

use std::sync::Arc;

use super::BlockMemory;
use crate::backend::{HeapSource, Region, Source, SourceError};
use crate::quota::{Claim, Quota};
use crate::stats::Stats;

use crate::size_class::Class;

/// The fallback of one pool.
#[derive(Debug)]
pub(crate) struct Fallback {
    source: HeapSource,
    /// Its limit is the limit of the pool, even after that was changed.
    quota: Arc<Quota>,
}

impl Fallback {
    /// At most `max_bytes` at one time.
    pub(crate) fn new(max_bytes: Option<u64>) -> Self {
        Self { source: HeapSource::new(), quota: Quota::new(max_bytes) }
    }

    /// The fallback of a partition under `ceiling_bytes`: within the limit of its parent's.
    pub(in crate::engine) fn partition(&self, ceiling_bytes: Option<u64>) -> Self {
        Self { source: HeapSource::new(), quota: Quota::inside(&self.quota, ceiling_bytes) }
    }

    /// The pool's ceiling has changed.
    pub(in crate::engine) fn follow(&self, ceiling_bytes: Option<u64>) {
        self.quota.set_max_bytes(ceiling_bytes);
    }

    /// Whether a block of `class` fits when nothing else is held.
    pub(in crate::engine) fn could_hold(&self, class: Class) -> bool {
        self.quota.could_hold(self.source.held_bytes(class.bytes) as u64)
    }

    /// `None` over the limit, or if the system refuses. A slow call.
    pub(in crate::engine) fn acquire(&self, class: Class) -> Option<BlockMemory> {
        let claim = self.quota.claim(self.source.held_bytes(class.bytes) as u64).ok()?;
        let region = self.source.acquire(class.bytes).ok()?;
        Some(BlockMemory::Pageable { region, claim: claim.held() })
    }

    /// On failure the bytes stay held; returns their number with the reason. A slow call.
    #[allow(unsafe_code)] // Memory leaves the pool.
    pub(in crate::engine) fn release(&self, region: Region, claim: Claim) -> Result<(), (u64, SourceError)> {
        // SAFETY: the region came from this source, and its block was given up by value, so nothing uses it (core-I1).
        let released = unsafe { self.source.release(region) };
        released.map_err(|error| {
            let held_bytes = claim.bytes();
            claim.keep_forever();
            (held_bytes, error)
        })
    }

    pub(in crate::engine) fn fill(&self, stats: &mut Stats) {
        stats.fallback_bytes = self.quota.held_bytes();
        stats.peak_fallback_bytes = self.quota.peak_bytes();
        stats.max_fallback_bytes = self.quota.max_bytes();
    }

    pub(in crate::engine) fn quota(&self) -> &Quota {
        &self.quota
    }
}
