//! Varied sizes (policy-R12), and the compaction target (policy-R13).
//!
//! A miss, a return to the arena and a growth plan set a flag if no hole has the wanted length. The maintenance thread then remaps
//! a few granules at a time, until a request would have almost nothing to remap. Each step is a separate plan, so that most
//! granules stay available to requests. Before it remaps, the thread unmaps the old addresses of granules that requests have
//! remapped.

use std::sync::atomic::Ordering;
use std::time::Instant;

use super::arena_state::ArenaState;
use super::arena_supply::ArenaSupply;
use crate::backend::{BuiltInSource, VirtualMemory};

/// Maximum number of steps of one call, so that other pools do not wait long for the maintenance thread.
const STEPS_AT_ONCE: usize = 16;
/// Pause between a step that failed and the next step.
const PAUSE_AFTER_FAILURE_US: u64 = 1_000_000;
/// After this many polls without demand, the thread sleeps until the next demand wakes it.
const IDLE_POLLS: u32 = 16;

impl ArenaSupply {
    /// Returns whether sizes vary, so that a large buffer goes to the arena when it is returned (policy-R3). Costs one load.
    #[inline]
    pub(in crate::engine) fn sizes_vary(&self) -> bool {
        // Relaxed: a hint; both paths of a return are correct.
        self.sizes_vary.load(Ordering::Relaxed)
    }

    /// Returns whether compaction has something to do. Costs one load.
    #[inline]
    pub(in crate::engine) fn needs_compaction(&self) -> bool {
        // Relaxed: a hint; the lock decides.
        self.needs_compaction.load(Ordering::Relaxed)
    }

    /// Clears `sizes_vary` if sizes no longer vary at `now_us`, because the misses with wanted sizes are too long ago.
    pub(in crate::engine) fn refresh_sizes_vary(&self, now_us: u64) {
        if self.sizes_vary() {
            let changed = self.update_sizes_vary(&self.state(), now_us);
            self.log.sizes_changed(changed);
        }
    }

    /// Updates whether sizes vary. Returns the new value if it has changed, for the log once the lock is released.
    #[must_use]
    pub(in crate::engine) fn update_sizes_vary(&self, state: &ArenaState, now_us: u64) -> Option<bool> {
        let sizes_vary = state.sizes_vary(now_us);
        // Compare first: the cache line stays shared while nothing changes.
        if self.sizes_vary() == sizes_vary {
            return None;
        }
        self.sizes_vary.store(sizes_vary, Ordering::Relaxed);
        Some(sizes_vary)
    }

    pub(in crate::engine) fn update_needs_compaction(&self, state: &ArenaState, now_us: u64) {
        if self.sizes_vary() && !self.needs_compaction() && state.needs_compaction(now_us) {
            self.needs_compaction.store(true, Ordering::Relaxed);
        }
    }

    /// Lets the maintenance of the pool unmap old addresses, if a request has remapped granules.
    pub(in crate::engine) fn request_unmap(&self) {
        if self.source.virtual_memory().is_some_and(VirtualMemory::has_old_places) {
            self.needs_compaction.store(true, Ordering::Relaxed);
        }
    }

    /// Unmaps the old addresses of remapped granules. Returns whether it unmapped any. If the source refuses, they are left for
    /// later. The call may be slow.
    fn unmap_old_places(&self) -> bool {
        if !self.source.virtual_memory().is_some_and(VirtualMemory::has_old_places) {
            return false;
        }
        let Err(error) = self.source.unmap_old_places() else { return true };
        let reported = self.state().record_not_unmapped(error);
        reported.unwrap_or_else(|error| self.log.release_delayed(&error));
        false
    }

    /// Remaps granules to make a wanted hole. Returns whether the caller should call again soon. The call may be slow.
    pub(in crate::engine) fn compact(&self, now_us: u64) -> bool {
        // Cleared first: later changes set the flag again.
        if self.needs_compaction.swap(false, Ordering::Relaxed) {
            self.idle_polls.store(0, Ordering::Relaxed);
            if (0..STEPS_AT_ONCE).all(|_| self.compact_step(now_us)) {
                self.needs_compaction.store(true, Ordering::Relaxed);
            }
        } else if self.is_compacting() {
            self.idle_polls.fetch_add(1, Ordering::Relaxed);
        }
        self.is_compacting()
    }

    /// Returns whether `needs_compaction` is set so often that polling it costs less than a wake-up each time.
    pub(in crate::engine) fn is_compacting(&self) -> bool {
        self.needs_compaction() || self.idle_polls.load(Ordering::Relaxed) < IDLE_POLLS
    }

    /// Unmaps the old addresses of remapped granules, or else makes one step towards the compaction target. Returns whether
    /// there was something to do. The call may be slow.
    pub(in crate::engine) fn compact_step(&self, now_us: u64) -> bool {
        if self.unmap_old_places() {
            return true;
        }
        let mut state = self.state();
        let Some(plan) = state.plan_compaction(now_us) else { return false };
        if self.carry_out(state, plan, now_us, Instant::now(), None).is_err() {
            self.state().next_compaction_us = now_us.saturating_add(PAUSE_AFTER_FAILURE_US);
        }
        true
    }
}
