//! Memory leaves the shared arena: when it is due, when a user or a limit asks, and at the end.
//!
//! Every release is a plan: made under the lock, carried out without it and behind the closed gate, settled under it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::super::arena_state::ArenaState;
use super::super::attached::complete_copies;
use super::super::executor::{Mapping, held};
use super::super::gate::ClosedGate;
use super::SharedArena;
use super::late_release::LateRelease;
use crate::arena::Plan;
use crate::backend::{PAGE_BYTES, SourceError};
use crate::maintenance_thread::MaintenanceThread;
use crate::stats::EvictionReason;
use pinpool_os::threads;

/// Longest wait at the end of a pool for threads that count copies as ended.
const COUNTING_PATIENCE: Duration = Duration::from_secs(1);
/// Longest wait at the end of a pool for a moment at which the device is seen idle. A release that does not wait for it would
/// wait for the same work, and hold up every enqueue meanwhile.
const DEVICE_PATIENCE: Duration = Duration::from_secs(1);

impl SharedArena {
    /// Releases what is due (policy-R9), soon: where a driver is called, a thread of its own does it, so that no get or
    /// put pays for it. That thread ends after one round.
    pub(in crate::engine) fn release_due(self: &Arc<Self>, now_us: u64) -> Result<(), SourceError> {
        let by_time = self.may_release_by_time();
        // Relaxed: a thread that sees an old value finds the gate closed, or nothing due.
        if self.is_releasing.load(Ordering::Relaxed) || !self.state.lock().is_release_due(now_us, by_time) {
            return Ok(());
        }
        if !self.is_at_rest() {
            if by_time {
                self.state.lock().note_overdue(now_us);
            }
            return Ok(());
        }
        if !self.source().needs_gpu() {
            return self.release_now(now_us);
        }
        // Acquire, with the Release below: the threads of two rounds run one after the other.
        if self.is_releasing.swap(true, Ordering::Acquire) {
            return Ok(());
        }
        let arena = self.clone();
        let release = move || {
            // `None`: the process exits.
            let call = MaintenanceThread::of_process().enter();
            let released = if call.is_some() { arena.release_now(now_us) } else { Ok(()) };
            drop(call);
            arena.is_releasing.store(false, Ordering::Release);
            arena.log.release_error(released);
        };
        if threads::spawn(c"pinpool-reclaim", release).is_ok() {
            return Ok(());
        }
        self.is_releasing.store(false, Ordering::Release);
        self.release_now(now_us)
    }

    /// Whether memory is released because it has been idle for long. Where a release waits for the device it holds up every
    /// enqueue, which memory that nobody misses is not worth: there only if memory is short.
    pub(super) fn may_release_by_time(&self) -> bool {
        // Relaxed: written and read by ticks, which come one after the other.
        !self.source().release_waits() || self.is_short.load(Ordering::Relaxed)
    }

    /// Whether no copy of any attached pool is pending. Looks for completed copies of pools that are not in use.
    pub(super) fn is_at_rest(&self) -> bool {
        self.gate.is_at_rest() || {
            complete_copies(&self.attached());
            self.gate.complete_copies();
            self.gate.is_at_rest()
        }
    }

    /// Releases what is due, unless copies are pending that it would wait for.
    fn release_now(&self, now_us: u64) -> Result<(), SourceError> {
        let trimmed = self.release(now_us, ArenaState::plan_trim);
        if !self.may_release_by_time() {
            return trimmed;
        }
        self.release(now_us, |state| state.plan_due(now_us)).and(trimmed)
    }

    /// Releases free granules until at most `to_bytes` are held or nothing is free.
    pub(in crate::engine) fn release_down_to(&self, to_bytes: u64, now_us: u64) -> Result<(), SourceError> {
        // Recorded first: what cannot be released now is released by the next thread that closes the gate, and a later
        // trim with a higher target does not undo this one.
        let was_requested = self.state.lock().request_trim(to_bytes);
        // A trim in many steps sweeps for completed copies once.
        if was_requested || self.is_at_rest() { self.release(now_us, ArenaState::plan_trim) } else { Ok(()) }
    }

    /// Releases free memory, then idle blocks of all pools, the oldest first, until no more is held than the ceiling and no
    /// more is idle than `max_idle_bytes`. While copies are pending that a release would wait for, leaves it to the next call.
    pub(in crate::engine) fn enforce_limits(
        &self,
        max_idle_bytes: Option<u64>,
        now_us: u64,
    ) -> Result<(), SourceError> {
        let pools = self.attached();
        let idle_bytes = || pools.iter().map(|pool| pool.idle_bytes()).sum::<u64>();
        // Other threads may put blocks meanwhile: no more are released than were idle at the start.
        let mut turns = idle_bytes() / PAGE_BYTES as u64;
        let mut released = Ok(());
        loop {
            let excess_bytes = self.state.lock().excess_bytes(idle_bytes(), max_idle_bytes);
            if excess_bytes == 0 || released.is_err() {
                return released;
            }
            let Some(closed) = self.close_on_idle_device() else { return released };
            released = self.release_behind(&closed, now_us, |state| state.plan_release_of(excess_bytes));
            drop(closed);
            if self.state.lock().excess_bytes(idle_bytes(), max_idle_bytes) == 0 {
                return released;
            }
            if turns == 0 || !pools.iter().any(|pool| pool.release_oldest(EvictionReason::OverBytes)) {
                return released;
            }
            turns -= 1;
        }
    }

    /// Has the arenas of other memory nodes release idle memory, so that there is room for `bytes` here. Returns whether they
    /// released any.
    pub(super) fn ask_other_nodes(&self, bytes: u64, now_us: u64) -> bool {
        let mut lacking_bytes = bytes;
        for other in self.nodes.beside(self) {
            lacking_bytes = lacking_bytes.saturating_sub(other.give_room(lacking_bytes, now_us));
        }
        lacking_bytes < bytes
    }

    /// This arena, and those of the same pool on other memory nodes.
    pub(in crate::engine) fn of_all_nodes(self: &Arc<Self>) -> Vec<Arc<Self>> {
        std::iter::once(self.clone()).chain(self.nodes.beside(self)).collect()
    }

    /// Releases free memory and idle blocks, the oldest first, until `bytes` are released or nothing is idle. Returns how many
    /// were.
    pub(in crate::engine) fn give_room(&self, bytes: u64, now_us: u64) -> u64 {
        let before_bytes = self.state.lock().held_bytes();
        let pools = self.attached();
        complete_copies(&pools);
        let mut turns: u64 = pools.iter().map(|pool| pool.idle_buffers()).sum();
        while turns > 0 && self.state.lock().arena().releasable_bytes() < bytes {
            turns = if pools.iter().any(|pool| pool.release_oldest(EvictionReason::Reclaimed)) { turns - 1 } else { 0 };
        }
        self.log.release_error(self.release(now_us, |state| state.plan_release_of(bytes)));
        before_bytes.saturating_sub(self.state.lock().held_bytes())
    }

    /// Carries out a plan of releases, unless copies are pending or the device has other work that it would wait for.
    fn release(&self, now_us: u64, plan: impl FnOnce(&mut ArenaState) -> Option<Plan>) -> Result<(), SourceError> {
        let closed = self.close_on_idle_device();
        closed.map_or(Ok(()), |closed| self.release_behind(&closed, now_us, plan))
    }

    /// Closes the gate, unless copies are pending or the device is seen to have other work.
    fn close_on_idle_device(&self) -> Option<ClosedGate<'_>> {
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

    fn release_behind(
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
    pub(super) fn teardown(&self, now_us: u64) {
        self.gate.ask_again(usize::MAX);
        // A release that waits for the device would wait for a copy that never ends.
        let Some(closed) = self.gate.close_in_turn().or_else(|| self.close_at_last()) else {
            let state = self.state.lock();
            // Else a thread has seen a copy to be over and not yet put its block back; the last such put comes here again.
            let stays = self.gate.has_leak() || state.is_unused();
            let held_bytes = state.held_bytes();
            drop(state);
            if stays {
                self.state.lock().end_claims(false);
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
        let claim = (is_all_released && !later.is_empty()).then(|| state.end_claims_but(later_bytes));
        state.end_claims(is_all_released);
        let held_bytes = state.held_bytes();
        drop(state);
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
    pub(super) fn release_mapping(&self, mapping: Mapping) -> Result<(), SourceError> {
        let (region_bytes, begun) = (mapping.region_bytes(), Instant::now());
        // SAFETY: the mapping is of this source, and left the table when no block was left in the arena, or before the
        // arena had a range for it (arena-state-I1).
        let released = unsafe { mapping.release(&self.source) };
        let (took, has_succeeded) = (begun.elapsed(), released.is_ok());
        region_bytes.into_iter().for_each(|bytes| self.state.lock().count_region_release(bytes, took, has_succeeded));
        released
    }
}
