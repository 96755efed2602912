//! Memory that is released after the end of its pool, when the device is seen idle: a release made at once would hold up every
//! enqueue until all work of the device is over. It stays claimed until it is released.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use super::super::CalledSource;
use super::super::executor::Mapping;
use crate::diag::PoolLog;
use crate::maintenance_thread::MaintenanceThread;
use crate::quota::Claim;
use pinpool_os::sync::plain::Mutex;
use pinpool_os::threads;

/// Between two looks at a device that has work.
const IDLE_PAUSE: Duration = Duration::from_millis(1);

/// Memory of a pool that has ended.
#[derive(Debug)]
pub(in crate::engine) struct LateRelease {
    pub(in crate::engine) source: CalledSource,
    pub(in crate::engine) mappings: Vec<Mapping>,
    pub(in crate::engine) bytes: u64,
    /// What the memory claims; `None` if more of the pool stays pinned, and claimed with it.
    pub(in crate::engine) claim: Option<Claim>,
    pub(in crate::engine) log: Arc<PoolLog>,
}

impl LateRelease {
    /// Has a thread of its own release the memory. Where there is none, releases it now. A slow call.
    pub(in crate::engine) fn begin(self) {
        let shared = Arc::new(Mutex::new(Some(self)));
        let taken = shared.clone();
        let release = move || {
            let release = taken.lock().take();
            release.into_iter().for_each(Self::release_when_idle);
        };
        if threads::spawn(c"pinpool-reclaim", release).is_err() {
            let release = shared.lock().take();
            release.into_iter().for_each(Self::release);
        }
    }

    fn release_when_idle(self) {
        loop {
            let Some(call) = MaintenanceThread::of_process().enter() else {
                // The process exits, and its memory with it.
                return std::mem::forget(self);
            };
            if !self.source.release_fast_would_wait() {
                return self.release();
            }
            drop(call);
            thread::sleep(IDLE_PAUSE);
        }
    }

    #[allow(unsafe_code)] // Memory leaves the pool.
    fn release(self) {
        let Self { source, mappings, bytes, claim, log } = self;
        let mut released = Ok(());
        for mapping in mappings {
            // SAFETY: the mapping is of this source, and left the table when no block was left in the arena
            // (arena-state-I1).
            released = released.and(unsafe { mapping.release(&source) });
        }
        // What could not be released stays claimed until the process ends.
        claim.filter(|_| released.is_err()).into_iter().for_each(Claim::keep_forever);
        if let Err(error) = released {
            log.left_by_refusal(bytes, &error);
        }
    }
}
