//! The state that all clones of a pool share. Its core may start at the first use of the pool.
//!
//! Choosing a backend starts the CUDA driver, and forked children of a process that has started the driver cannot use CUDA. A
//! launcher that builds a pool and then only forks must not start the driver. So if no step of the start can fail, the core
//! starts in the first call that needs it. Reading the name or the settings does not start the core. A forked child that is the
//! first to use such a pool starts its own core.
#![allow(unsafe_code)] // Finds a shard by the address of its pool.

use std::ptr;
use std::sync::{Arc, OnceLock};

use super::Pool;
use super::start::PoolStart;
use crate::engine::{PartitionCore, PoolCore, Tag, ThreadShard};
use pinpool_os::fork::ForkGeneration;
use pinpool_os::sync::unmodeled::{AtomicPtr, Ordering};

/// The state that the clones of a pool share. After its drop there are no more requests.
pub(super) struct Handle {
    /// The address of the core, once the core has started. A handle with a scope never stores it, so its requests take the slow
    /// path.
    address: AtomicPtr<PoolCore>,
    /// The core of the process that built the pool, and the core of a forked child that is the first to use the pool. The child
    /// needs a separate cell, because a thread of the parent may have been initializing the first cell during the fork.
    cores: [OnceLock<Arc<PoolCore>>; 2],
    pub(super) start: Arc<PoolStart>,
    generation: ForkGeneration,
    /// `None` in a handle of the whole pool.
    pub(super) scope: Option<RequestScope>,
}

/// The partition, the tag, or both, under which requests of this handle are counted.
pub(super) struct RequestScope {
    pub(super) partition: Option<Arc<PartitionCore>>,
    pub(super) tag: Option<Arc<Tag>>,
    /// A clone of the pool, so that the pool is not sealed while this handle exists.
    pub(super) _pool: Pool,
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.scope.is_some() {
            return;
        }
        for core in self.cores.iter().filter_map(OnceLock::get) {
            if core.is_forked() {
                // In a forked child, threads that do not exist here may hold the core's locks, so its drop must not run.
                std::mem::forget(core.clone());
            } else {
                core.seal();
            }
        }
    }
}

impl Handle {
    pub(super) fn new(start: Arc<PoolStart>, scope: Option<RequestScope>) -> Self {
        // The address 1 is neither null, which a thread without an entry has, nor the address of any core.
        let address = AtomicPtr::new(ptr::without_provenance_mut(1));
        Self { address, cores: Default::default(), start, generation: ForkGeneration::now(), scope }
    }

    /// Returns the core, if it has started.
    pub(super) fn existing_core(&self) -> Option<&Arc<PoolCore>> {
        self.cores.iter().find_map(OnceLock::get)
    }

    #[inline(always)]
    pub(super) fn thread_shard(&self) -> Option<ThreadShard<'_>> {
        // Relaxed: the address is compared and never dereferenced.
        // SAFETY: not null (`new`); the core at this address, if there is one, is one of `cores`, so it lives as long as `self`.
        unsafe { PoolCore::shard_of(self.address.load(Ordering::Relaxed), 0, self) }
    }

    /// Returns the core. If it has not started, starts it by `start`.
    #[inline]
    pub(super) fn core_or_start(&self, start: impl FnOnce(&PoolStart) -> Arc<PoolCore>) -> &Arc<PoolCore> {
        self.cores[0].get().unwrap_or_else(|| self.start_core_once(|| start(&self.start)))
    }

    #[cold]
    pub(super) fn start_core_once(&self, start: impl FnOnce() -> Arc<PoolCore>) -> &Arc<PoolCore> {
        // A logger may call this pool, which cannot be used before the start has ended, so the lines are logged after the
        // start.
        let _deferral = crate::report::defer();
        self.cores[usize::from(self.generation.is_stale())].get_or_init(|| {
            let core = start();
            if self.scope.is_none() {
                // Requests with a tag or partition take the slow path.
                self.address.store(Arc::as_ptr(&core).cast_mut(), Ordering::Relaxed);
            }
            core
        })
    }
}
