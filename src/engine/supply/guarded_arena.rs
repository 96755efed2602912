//! The lock around a shared arena, with its source and its gate: carries plans out, and releases memory.
//!
//! ```text
//!   [lock: plan] ─▶ source calls (no lock) ─▶ [lock: settle] ─▶ wake threads that wait for a settlement
//!
//!   last pool detached, or the last block given back after that
//!     └─▶ teardown: granules, then regions, then addresses
//! ```
//!
//! Where a release waits for the device, it happens only while the [gate](super::gate) is closed. What cannot be released
//! yet stays free in the arena: it is used again first, counts under the ceiling, and is reported as
//! `awaiting_release_bytes`.
//!
//! | release asked by | while copies are pending |
//! | --- | --- |
//! | time (policy-R9) | tried again at the next tick |
//! | `trim`, `clear`, pressure | done at the first tick that finds none |
//! | a get at the ceiling | waits in line, or for the copies (`PINPOOL_RELEASE_POLICY=force`) |
//! | the end of the pool | comes after the copies; with a stuck copy, nothing is released |
//!
//! A leaked block counts as a copy that never ends: from then on nothing is released that waits for the device.
//!
//! Never decides what is due or which pool makes room. No source call happens under the lock.

use std::ptr::NonNull;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::arena_state::ArenaState;
use super::executor::Mapping;
use super::gate::{ClosedGate, Gate};
use super::{BlockMemory, Reclaim, Refusal};
use crate::arena::{ArenaPtr, Plan};
use crate::backend::{PageTiers, Source, SourceError};
use crate::diag::PoolLog;
use crate::sync::plain::{Condvar, Mutex, MutexGuard};

/// An arena over a source, behind a lock.
#[derive(Debug)]
pub(super) struct GuardedArena {
    source: Arc<dyn Source>,
    log: Arc<PoolLog>,
    gate: Gate,
    state: Mutex<ArenaState>,
    /// Notified when a plan is settled.
    settled: Condvar,
}

impl GuardedArena {
    pub(super) fn new(source: Arc<dyn Source>, state: ArenaState, log: Arc<PoolLog>) -> Self {
        Self { gate: Gate::new(source.release_waits()), source, log, state: Mutex::new(state), settled: Condvar::new() }
    }

    pub(super) fn source(&self) -> &dyn Source {
        &*self.source
    }

    pub(super) fn log(&self) -> &PoolLog {
        &self.log
    }

    #[inline]
    pub(super) fn gate(&self) -> &Gate {
        &self.gate
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, ArenaState> {
        self.state.lock()
    }

    /// Waits until another thread's plan is settled.
    pub(super) fn wait_for_settlement(&self, state: &mut MutexGuard<'_, ArenaState>) {
        self.settled.wait(state);
    }

    /// The pages of all committed memory.
    pub(super) fn page_tiers(&self) -> PageTiers {
        let extents = self.lock().extents();
        let tiers = extents.into_iter().map(|(start, len_bytes)| self.source.page_tiers(start, len_bytes));
        tiers.fold(PageTiers::default(), PageTiers::add)
    }

    /// Carries out a plan for a block of `bytes` and returns its memory. The gate opens after the last release.
    pub(super) fn grow(
        &self,
        mut state: MutexGuard<'_, ArenaState>,
        plan: Plan,
        bytes: u64,
        closed: Option<ClosedGate<'_>>,
        now_us: u64,
    ) -> Result<Option<BlockMemory>, SourceError> {
        let ptr = plan.ptr();
        let closed = closed.filter(|_| plan.decommits());
        let mut executor = state.executor(&plan);
        drop(state);
        let begun = Instant::now();
        let executed = executor.execute(&*self.source, &plan, closed);
        let took = begun.elapsed();
        let settled = self.lock().settle_growth(plan, executor, executed, took, now_us);
        self.settled.notify_all();
        settled?;
        Ok(ptr.and_then(|ptr| self.lock().memory_at(ptr, bytes)))
    }

    /// Pins a reserve of `bytes` (policy-R10) and returns where it lies.
    pub(super) fn add_reserve(
        &self,
        bytes: u64,
        max_bytes: Option<u64>,
        threads: usize,
        progress: &dyn Fn(u64),
    ) -> Result<(NonNull<u8>, usize), Refusal> {
        let len = self.lock().claim_reserve(bytes, max_bytes)?;
        let begun = Instant::now();
        let acquired = self.source.acquire_fast(len, threads, &|done: usize| progress(done as u64));
        let took = begun.elapsed();
        let settled = self.lock().settle_reserve(len, acquired, took).map_err(Refusal::Source)?;
        let no_range = |region| {
            let refusal = Refusal::Source(SourceError::new("arena", "no range is left for a reserve"));
            self.release_mapping(Mapping::Region(region)).map_err(Refusal::Source).and(Err(refusal))
        };
        settled.or_else(no_range).map(|start| (start, len))
    }

    pub(super) fn attach(&self, pool: Weak<dyn Reclaim>) {
        self.lock().attach(pool);
    }

    pub(super) fn attached(&self) -> Vec<Arc<dyn Reclaim>> {
        self.lock().attached()
    }

    /// Detaches a closed pool. After the last one everything is released, now or with the last block.
    pub(super) fn detach(&self, pool: &dyn Reclaim, now_us: u64) -> Result<(), SourceError> {
        let is_last = self.lock().detach(std::ptr::from_ref(pool).cast());
        if is_last { self.teardown(now_us) } else { Ok(()) }
    }

    /// Takes a block's bytes back. A pool is closed once its last block is counted as put, which may be before that
    /// block's memory is given back by another thread; so the last of the two, `detach` or `give`, tears down.
    pub(super) fn give(&self, ptr: ArenaPtr, bytes: u64, now_us: u64) -> Result<(), SourceError> {
        let is_deserted = self.lock().give(ptr, bytes, now_us);
        if is_deserted { self.teardown(now_us) } else { Ok(()) }
    }

    /// Whether no copy of any attached pool is pending. Looks for completed copies of pools that are not in use.
    pub(super) fn is_at_rest(&self) -> bool {
        self.gate.is_at_rest() || {
            complete_copies(&self.attached());
            self.gate.is_at_rest()
        }
    }

    /// Closes the gate after the release that is running and, with a `patience`, after the pending copies.
    pub(super) fn close_late(&self, pools: &[Arc<dyn Reclaim>], patience: Option<Duration>) -> Option<ClosedGate<'_>> {
        // Completed copies may belong to a pool that is not in use.
        let sweep = || complete_copies(pools);
        let Some(patience) = patience else {
            sweep();
            return self.gate.close_in_turn();
        };
        self.lock().count_drain();
        self.gate.drain(patience, sweep)
    }

    /// Releases what is due, unless copies are pending that it would wait for.
    pub(super) fn release_now(&self, now_us: u64) -> Result<(), SourceError> {
        let trimmed = self.release(now_us, ArenaState::plan_trim);
        self.release(now_us, |state| state.plan_due(now_us)).and(trimmed)
    }

    /// Releases free granules until at most `to_bytes` are held or nothing is free.
    pub(super) fn release_down_to(&self, to_bytes: u64, now_us: u64) -> Result<(), SourceError> {
        // Recorded first: what cannot be released now is released by the next thread that closes the gate, and a later
        // trim with a higher target does not undo this one.
        let was_requested = self.lock().request_trim(to_bytes);
        // A trim in many steps sweeps for completed copies once.
        if was_requested || self.is_at_rest() { self.release(now_us, ArenaState::plan_trim) } else { Ok(()) }
    }

    /// Carries out a plan of releases, unless copies are pending that it would wait for.
    fn release(&self, now_us: u64, plan: impl FnOnce(&mut ArenaState) -> Option<Plan>) -> Result<(), SourceError> {
        self.gate.close().map_or(Ok(()), |closed| self.release_behind(&closed, now_us, plan))
    }

    fn release_behind(
        &self,
        _closed: &ClosedGate<'_>,
        now_us: u64,
        plan: impl FnOnce(&mut ArenaState) -> Option<Plan>,
    ) -> Result<(), SourceError> {
        let mut state = self.lock();
        let Some(plan) = plan(&mut state) else { return Ok(()) };
        let mut executor = state.executor(&plan);
        drop(state);
        let begun = Instant::now();
        let executed = executor.release_each(&*self.source, &plan);
        let took = begun.elapsed();
        let settled = self.lock().settle_releases(&plan, executor, executed, took, now_us);
        self.settled.notify_all();
        settled
    }

    /// Releases everything without a block in it; the addresses only if there is no block at all. A leaked or abandoned
    /// block keeps them until the process ends.
    fn teardown(&self, now_us: u64) -> Result<(), SourceError> {
        // A release that waits for the device would wait for a copy that never ends.
        let Some(closed) = self.gate.close_in_turn() else {
            self.log.left_pinned(self.lock().held_bytes());
            return Ok(());
        };
        let mut released = Ok(());
        let mappings = loop {
            released = released.and(self.release_behind(&closed, now_us, ArenaState::plan_release_all));
            let mut state = self.lock();
            // Another thread may be releasing granules as well.
            while state.has_transit() {
                self.settled.wait(&mut state);
            }
            // `None`: the last block came back after the release above, and its granules go before their addresses.
            if let Some(mappings) = state.take_mappings() {
                break mappings;
            }
        };
        // One that fails does not keep the others.
        mappings.into_iter().map(|mapping| self.release_mapping(mapping)).fold(released, Result::and)
    }

    #[allow(unsafe_code)] // Memory and addresses leave the pool.
    fn release_mapping(&self, mapping: Mapping) -> Result<(), SourceError> {
        let region_bytes = mapping.region_bytes();
        // SAFETY: the mapping is of this source, and left the table when no block was left in the arena, or before the
        // arena had a range for it (arena-state-I1).
        unsafe { mapping.release(&*self.source) }?;
        region_bytes.into_iter().for_each(|bytes| self.lock().count_released_region(bytes));
        Ok(())
    }
}

/// Puts back the blocks of `pools` whose copies are over.
fn complete_copies(pools: &[Arc<dyn Reclaim>]) {
    pools.iter().for_each(|pool| pool.complete_copies());
}
