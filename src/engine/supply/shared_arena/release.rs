//! Memory leaves the shared arena: when it is due, when a user or a limit asks, and at the end.
//!
//! Every release is a plan: made under the lock, carried out without it and behind the closed gate, settled under it.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::super::arena_state::ArenaState;
use super::super::executor::{Mapping, held};
use super::super::gate::ClosedGate;
use super::SharedArena;
use super::late_release::LateRelease;
use crate::arena::Plan;
use crate::backend::SourceError;

/// Longest wait at the end of a pool for threads that count copies as ended.
const COUNTING_PATIENCE: Duration = Duration::from_secs(1);
/// Longest wait at the end of a pool for a moment at which the device is seen idle. A release that does not wait for it would
/// wait for the same work, and hold up every enqueue meanwhile.
const DEVICE_PATIENCE: Duration = Duration::from_secs(1);

impl SharedArena {
    /// Whether memory is released because it has been idle for long. Where a release waits for the device it holds up every
    /// enqueue, which memory that nobody misses is not worth: there only if memory is short.
    pub(in crate::engine) fn may_release_by_time(&self) -> bool {
        // Relaxed: written and read by ticks, which come one after the other.
        !self.source().release_waits() || self.is_short.load(Ordering::Relaxed)
    }

    /// Releases what is due, unless copies are pending that it would wait for.
    pub(in crate::engine) fn release_now(&self, now_us: u64) -> Result<(), SourceError> {
        let trimmed = self.release(now_us, ArenaState::plan_trim);
        if !self.may_release_by_time() {
            return trimmed;
        }
        self.release(now_us, |state| state.plan_due(now_us)).and(trimmed)
    }

    /// Carries out a plan of releases, unless copies are pending or the device has other work that it would wait for.
    pub(in crate::engine) fn release(
        &self,
        now_us: u64,
        plan: impl FnOnce(&mut ArenaState) -> Option<Plan>,
    ) -> Result<(), SourceError> {
        let closed = self.close_on_idle_device();
        closed.map_or(Ok(()), |closed| self.release_behind(&closed, now_us, plan))
    }

    /// Closes the gate, unless copies are pending or the device is seen to have other work.
    pub(in crate::engine) fn close_on_idle_device(&self) -> Option<ClosedGate<'_>> {
        if self.source().release_waits() {
            if !self.gate.is_at_rest() {
                self.gate.complete_copies();
            }
            // Asked with the gate open: copies need not wait for the answer.
            if !self.gate.is_at_rest() || self.source().release_would_wait() {
                return None;
            }
        }
        self.gate.close()
    }

    pub(in crate::engine) fn release_behind(
        &self,
        _closed: &ClosedGate<'_>,
        now_us: u64,
        plan: impl FnOnce(&mut ArenaState) -> Option<Plan>,
    ) -> Result<(), SourceError> {
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
        self.gate.ask_again(usize::MAX);
        // A release that waits for the device would wait for a copy that never ends.
        let Some(closed) = self.gate.close_in_turn().or_else(|| self.close_at_last()) else {
            let state = self.state.lock();
            // Else a thread has seen a copy to be over and not yet put its block back; the last such put comes here again.
            let stays = self.gate.has_leak() || state.is_unused();
            let held_bytes = state.held_bytes();
            drop(state);
            if stays {
                let ended = self.state.lock().end_claims(false);
                drop(ended);
                self.log.left_pinned(held_bytes);
            }
            return;
        };
        self.await_idle_device();
        let mut released = Ok(());
        let mappings = loop {
            released = released.and(self.release_behind(&closed, now_us, ArenaState::plan_release_all));
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
        // A reserve of registered memory under `vmm`, whose release alone may wait there.
        let waits = !self.source().release_waits() && self.source().release_fast_would_wait();
        let (later, now): (Vec<_>, Vec<_>) =
            mappings.into_iter().partition(|mapping| waits && mapping.region_bytes().is_some());
        // One that fails does not keep the others.
        let released = now.into_iter().map(|mapping| self.release_mapping(mapping)).fold(released, Result::and);
        let mut state = self.state.lock();
        let is_all_released = released.is_ok() && state.is_unused();
        let later_bytes = later.iter().filter_map(Mapping::region_bytes);
        let later_bytes = later_bytes.map(|bytes| held(bytes, |len| self.source.held_bytes_fast(len))).sum();
        let keeps_some = is_all_released && !later.is_empty();
        let claim = if keeps_some { state.end_claims_but(later_bytes) } else { None };
        // A block that another thread is giving back comes here again.
        let is_last = state.is_unused() || self.gate.has_leak();
        let ended = if is_last { state.end_claims(is_all_released) } else { None };
        let held_bytes = state.held_bytes();
        drop(state);
        drop(ended);
        if !later.is_empty() {
            let (source, log) = (self.source.clone(), self.log.clone());
            LateRelease { source, mappings: later, bytes: later_bytes, claim, log }.begin();
        }
        if let Err(error) = released {
            self.log.left_by_refusal(held_bytes, &error);
        }
    }

    /// Waits a while for a moment at which the device is seen idle.
    fn await_idle_device(&self) {
        let begun = Instant::now();
        while self.source().release_would_wait() && begun.elapsed() < DEVICE_PATIENCE {
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Closes the gate when every block is back: its copies are over, though a thread may still be counting one.
    fn close_at_last(&self) -> Option<ClosedGate<'_>> {
        let is_unused = self.state.lock().is_unused();
        is_unused.then(|| self.gate.drain(COUNTING_PATIENCE, || self.gate.complete_copies())).flatten()
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
