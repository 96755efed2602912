//! The state that all clones of a pool share. Its core may start at the first use of the pool.
//!
//! A pool that chooses its backend starts the CUDA driver, and forked children of a process that has started it have no CUDA. A
//! launcher that builds a pool and only forks must not start it, so if no step can fail, the first call that needs the core
//! starts it. A forked child that is the first to use such a pool has its own core.
#![allow(unsafe_code)] // Finds a shard by the address of its pool.

use std::ptr;
use std::sync::{Arc, OnceLock};

use super::Pool;
use crate::engine::{CachedShard, Core, PartitionCore, Tag};
use pinpool_os::fork::ForkGeneration;
use pinpool_os::sync::process::{AtomicPtr, Ordering};

/// Shared by the clones of a pool: after its drop there are no more requests.
pub(super) struct Handle {
    /// The address of the core, once it has started.
    address: AtomicPtr<Core>,
    /// The core of the process that built the pool, and the core of a forked child that is the first to use it: a parent thread may
    /// have been initializing the first one during the fork.
    cores: [OnceLock<Arc<Core>>; 2],
    start: Box<dyn Fn() -> Arc<Core> + Send + Sync>,
    generation: ForkGeneration,
    /// `None` for the pool itself.
    pub(super) part: Option<Part>,
}

/// What requests of this handle are counted under: a partition, a tag, or both.
pub(super) struct Part {
    pub(super) partition: Option<Arc<PartitionCore>>,
    pub(super) tag: Option<Arc<Tag>>,
    pub(super) pool: Pool,
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.part.is_some() {
            return;
        }
        for core in self.cores.iter().filter_map(OnceLock::get) {
            if core.is_forked() {
                // In a forked child the locks may be held by threads that do not exist here.
                std::mem::forget(core.clone());
            } else {
                core.seal();
            }
        }
    }
}

impl Handle {
    pub(super) fn new(start: Box<dyn Fn() -> Arc<Core> + Send + Sync>) -> Self {
        // Neither null, which a thread without a cached pool has, nor the address of any core.
        let address = AtomicPtr::new(ptr::without_provenance_mut(1));
        Self { address, cores: Default::default(), start, generation: ForkGeneration::now(), part: None }
    }

    pub(super) fn for_part(part: Part) -> Self {
        let pool = part.pool.clone();
        let mut handle = Self::new(Box::new(move || pool.core().clone()));
        handle.part = Some(part);
        handle
    }

    #[inline(always)]
    pub(super) fn cached_shard(&self) -> Option<CachedShard<'_>> {
        // Relaxed: an address to compare.
        // SAFETY: the core at this address is one of `cores`.
        unsafe { Core::shard_of(self.address.load(Ordering::Relaxed), 0, self) }
    }

    #[inline]
    pub(super) fn core(&self) -> &Arc<Core> {
        self.cores[0].get().unwrap_or_else(|| self.started_core())
    }

    #[cold]
    fn started_core(&self) -> &Arc<Core> {
        self.cores[usize::from(self.generation.is_stale())].get_or_init(|| {
            let core = (self.start)();
            if self.part.is_none() {
                // Requests with a tag or partition take the slow path.
                self.address.store(Arc::as_ptr(&core).cast_mut(), Ordering::Relaxed);
            }
            core
        })
    }
}
