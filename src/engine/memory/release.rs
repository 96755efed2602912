//! Idle memory is released: when it is due, when a limit asks, and for those who lack it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{Domain, PoolView};
use crate::backend::{PAGE_BYTES, SourceError};
use crate::maintenance_thread::MaintenanceThread;
use crate::stats::EvictionReason;
use pinpool_os::threads;

impl Domain {
    /// Releases what is due (policy-R9), soon: where a driver is called, a thread of its own does it, so that no get or
    /// put pays for it. That thread ends after one round.
    pub(in crate::engine) fn release_due(self: &Arc<Self>, now_us: u64) -> Result<(), SourceError> {
        if !self.arena.may_release_by_time() {
            self.arena.count_overdue(now_us);
            return Ok(());
        }
        // Relaxed: a thread that sees an old value finds nothing due.
        if self.is_releasing.load(Ordering::Relaxed) || !self.arena.state().arena().is_release_due(now_us) {
            return Ok(());
        }
        if !self.arena.source().needs_gpu() {
            return self.arena.release(now_us, |state| state.plan_due(now_us));
        }
        // Acquire, with the Release below: the threads of two rounds run one after the other.
        if self.is_releasing.swap(true, Ordering::Acquire) {
            return Ok(());
        }
        let domain = self.clone();
        let release = move || {
            // `None`: the process exits.
            let call = MaintenanceThread::of_process().enter();
            let release = || domain.arena.release(now_us, |state| state.plan_due(now_us));
            let released = if call.is_some() { release() } else { Ok(()) };
            drop(call);
            domain.is_releasing.store(false, Ordering::Release);
            domain.log.release_error(released);
        };
        if threads::spawn(c"pinpool-reclaim", release).is_ok() {
            return Ok(());
        }
        self.is_releasing.store(false, Ordering::Release);
        self.arena.release(now_us, |state| state.plan_due(now_us))
    }

    /// Releases free granules until at most `to_bytes` are held or nothing is free.
    pub(in crate::engine) fn release_down_to(&self, to_bytes: u64, now_us: u64) -> Result<(), SourceError> {
        self.arena.release(now_us, |state| state.plan_trim(to_bytes))
    }

    /// Releases free memory, then idle blocks, the oldest first, until no more is held than the ceiling and no
    /// more is idle than `max_idle_bytes`.
    pub(in crate::engine) fn enforce_limits(
        &self,
        pool: &dyn PoolView,
        max_idle_bytes: Option<u64>,
        now_us: u64,
    ) -> Result<(), SourceError> {
        let idle_bytes = || pool.idle_bytes();
        // Other threads may put blocks meanwhile: no more are released than were idle at the start.
        let mut turns = idle_bytes() / PAGE_BYTES as u64;
        let mut released = Ok(());
        loop {
            let excess_bytes = self.arena.state().excess_bytes(idle_bytes(), max_idle_bytes);
            if excess_bytes == 0 || released.is_err() {
                return released;
            }
            released = self.arena.release(now_us, |state| state.plan_release_of(excess_bytes));
            if self.arena.state().excess_bytes(idle_bytes(), max_idle_bytes) == 0 {
                return released;
            }
            if turns == 0 || !pool.release_oldest(EvictionReason::OverBytes) {
                return released;
            }
            turns -= 1;
        }
    }

    /// Releases free memory and idle blocks, the oldest first, until `bytes` are released or nothing is idle. Returns how many
    /// were.
    pub(in crate::engine) fn give_room(&self, pool: &dyn PoolView, bytes: u64, now_us: u64) -> u64 {
        let before_bytes = self.arena.state().held_bytes();
        pool.complete_copies();
        let mut turns = pool.idle_buffers();
        while turns > 0 && self.arena.state().arena().releasable_bytes() < bytes {
            turns = if pool.release_oldest(EvictionReason::Reclaimed) { turns - 1 } else { 0 };
        }
        self.log.release_error(self.arena.release(now_us, |state| state.plan_release_of(bytes)));
        before_bytes.saturating_sub(self.arena.state().held_bytes())
    }

    /// Bytes of idle buffers, and of free memory, that are no reserve.
    pub(in crate::engine) fn idle_bytes(&self, pool: &dyn PoolView) -> u64 {
        self.arena.idle_bytes(pool.idle_bytes())
    }
}
