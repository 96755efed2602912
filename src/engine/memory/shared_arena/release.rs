//! Memory leaves the shared arena: when it is due, when a user or a limit asks, and at the end.
//!
//! Every release is a plan: made under the lock, carried out without it, settled under it.

use std::sync::atomic::Ordering;
use std::time::Instant;

use super::super::books::Books;
use super::super::carry_out::Mapping;
use super::SharedArena;
use crate::arena::Plan;
use crate::backend::SourceError;

impl SharedArena {
    /// Whether memory is released because it has been idle for long. Where a release waits for the device it blocks every
    /// enqueue, which memory that nobody misses is not worth: there only if memory is short.
    pub(in crate::engine) fn may_release_by_time(&self) -> bool {
        // Relaxed: written and read by ticks, which come one after the other.
        !self.source().release_waits() || self.is_short.load(Ordering::Relaxed)
    }

    /// The copies of a block end at an unknown time, or never.
    pub(in crate::engine) fn count_quarantined(&self) {
        // Relaxed, here and below: a copy that is seen late only makes a release wait.
        self.quarantined.fetch_add(1, Ordering::Relaxed);
    }

    /// The copies of so many such blocks are over.
    pub(in crate::engine) fn count_recovered(&self, blocks: u64) {
        self.quarantined.fetch_sub(blocks, Ordering::Relaxed);
    }

    fn has_quarantined(&self) -> bool {
        self.quarantined.load(Ordering::Relaxed) > 0
    }

    /// Whether a release would wait for a copy that may never end.
    pub(in crate::engine) fn may_never_release(&self) -> bool {
        self.source().release_waits() && self.has_quarantined()
    }

    /// Counts the memory that is due and stays, since its release would wait for the device.
    pub(in crate::engine) fn count_overdue(&self, now_us: u64) {
        let overdue_bytes = self.state.lock().count_overdue(now_us);
        if overdue_bytes > 0 && !self.told_idle.swap(true, Ordering::Relaxed) {
            self.log.idle_memory_stays(overdue_bytes, self.source().name());
        }
    }

    /// Carries out a plan of releases. Slow calls, which may wait for the device.
    pub(in crate::engine) fn release(
        &self,
        now_us: u64,
        plan: impl FnOnce(&mut Books) -> Option<Plan>,
    ) -> Result<(), SourceError> {
        if self.may_never_release() {
            return Ok(());
        }
        let mut state = self.state.lock();
        let Some(plan) = plan(&mut state) else { return Ok(()) };
        let executor = state.executor(&plan);
        drop(state);
        let executed = executor.release_each(&self.source, &plan);
        let settled = self.state.lock().settle_releases(&plan, executed, now_us);
        self.settled.notify_all();
        settled
    }

    /// Releases everything without a block in it; the addresses only if there is no block at all. A leaked or abandoned
    /// block keeps them until the process ends, and so does a release that fails: nothing tries it again.
    pub(in crate::engine) fn teardown(&self, now_us: u64) {
        if self.may_never_release() {
            let mut state = self.state.lock();
            let (held_bytes, ended) = (state.held_bytes(), state.end_claims(false));
            drop(state);
            drop(ended);
            return self.log.left_pinned(held_bytes);
        }
        let mut released = Ok(());
        let mappings = loop {
            released = released.and(self.release(now_us, Books::plan_release_all));
            let mut state = self.state.lock();
            // Another thread may be releasing granules as well.
            while state.arena().stats().transit_bytes > 0 {
                state = self.settled.wait(state);
            }
            // `None`: the last block came back after the release above, and its granules go before their addresses.
            if let Some(mappings) = state.take_mappings() {
                break mappings;
            }
        };
        // One that fails does not keep the others.
        let released = mappings.into_iter().map(|mapping| self.release_mapping(mapping)).fold(released, Result::and);
        let mut state = self.state.lock();
        let is_all_released = released.is_ok() && state.is_unused();
        // A block that another thread is giving back comes here again.
        let is_last = state.is_unused() || self.has_quarantined();
        let ended = if is_last { state.end_claims(is_all_released) } else { None };
        let held_bytes = state.held_bytes();
        drop(state);
        drop(ended);
        if let Err(error) = released {
            self.log.left_by_refusal(held_bytes, &error);
        }
    }

    #[allow(unsafe_code)] // Memory and addresses leave the pool.
    pub(in crate::engine) fn release_mapping(&self, mapping: Mapping) -> Result<(), SourceError> {
        let (region_bytes, begun) = (mapping.region_bytes(), Instant::now());
        // SAFETY: the mapping is of this source, and left the table when no block was left in the arena, or before the
        // arena had a range for it (arena-state-I1).
        let released = unsafe { mapping.release(&self.source) };
        let (took, has_succeeded) = (begun.elapsed(), released.is_ok());
        region_bytes.into_iter().for_each(|bytes| self.state.lock().count_region_release(bytes, took, has_succeeded));
        released
    }
}
