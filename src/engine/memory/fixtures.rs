//! A source that counts, and a pool that holds nothing.
#![allow(unsafe_code)] // Implements the unsafe `Source`.

use std::path::Path;
use std::sync::Arc;

use super::PoolView;
use crate::arena::Retention;
use crate::backend::{HeapSource, Region, Source, SourceError};
use crate::diag::{LogSampler, PoolLog};
use crate::engine::memory::{ArenaSettings, ArenaSupply, CalledSource};
use crate::quota::Budget;
use crate::stats::EvictionReason;
// In a model another thread may run before each call.
use pinpool_os::sync::atomic::{AtomicU64, Ordering};

/// A heap of separate regions. Releases wait for copies or not.
#[derive(Debug)]
pub(super) struct CountedHeap {
    heap: HeapSource,
    release_waits: bool,
    acquired: AtomicU64,
    released: AtomicU64,
}

impl CountedHeap {
    pub(super) fn new(release_waits: bool) -> Self {
        Self { heap: HeapSource::new(), release_waits, acquired: AtomicU64::new(0), released: AtomicU64::new(0) }
    }

    #[cfg(pinpool_loom)]
    pub(super) fn acquired(&self) -> u64 {
        self.acquired.load(Ordering::Relaxed)
    }

    pub(super) fn released(&self) -> u64 {
        self.released.load(Ordering::Relaxed)
    }
}

// SAFETY: passes every call on.
unsafe impl Source for CountedHeap {
    fn name(&self) -> &'static str {
        "counted heap"
    }
    fn is_pinned(&self) -> bool {
        false
    }
    fn release_waits(&self) -> bool {
        self.release_waits
    }
    fn acquire(&self, len_bytes: usize) -> Result<Region, SourceError> {
        self.acquired.fetch_add(1, Ordering::Relaxed);
        self.heap.acquire(len_bytes)
    }
    unsafe fn release(&self, region: Region) -> Result<(), SourceError> {
        self.released.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { self.heap.release(region) }
    }
}

/// A pool without idle blocks.
#[derive(Default)]
pub(super) struct NoBlocks;

impl PoolView for NoBlocks {
    fn idle_bytes(&self) -> u64 {
        0
    }
    fn idle_buffers(&self) -> u64 {
        0
    }
    fn release_oldest(&self, _: EvictionReason) -> bool {
        false
    }
    fn complete_copies(&self) {}
}

/// An arena over this source, with or without a limit.
pub(super) fn arena(source: Arc<CountedHeap>, name: &str, max_bytes: Option<u64>) -> ArenaSupply {
    let log = PoolLog { name: Some(name.to_owned()), log_sampler: LogSampler::new(), ..PoolLog::new() };
    let (log, claim) = (Arc::new(log), Budget::new(max_bytes).nothing());
    let config =
        ArenaSettings { may_grow: true, pin_threads: 1, background_thread: false, retention: Retention::default() };
    let files = ("/".into(), Some(Path::new("/dev/null")));
    ArenaSupply::new(CalledSource::new(source, None), claim, config, log, files).unwrap()
}
