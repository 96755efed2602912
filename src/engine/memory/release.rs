//! Releases of memory: when it is due, when a user or a limit requires it, for other pools and processes, and at the end.
//!
//! Every release is a plan, which is made under the lock, carried out without the lock, and finished under the lock. The
//! exception is the last release of a pool that ends.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::arena_state::ArenaState;
use super::arena_supply::ArenaSupply;
use super::shape::Mappings;
use super::{Memory, PoolView, give_while};
use crate::arena::Plan;
use crate::backend::{AddressRange, Region, SourceError};
use crate::maintenance_thread::MaintenanceThread;
use crate::stats::{CallStats, EvictionReason};
use pinpool_os::host::Pressure;
use pinpool_os::threads;

/// While memory is short, free memory is kept for a quarter of the time.
const RETENTION_DIVISOR: u64 = 4;

impl Memory {
    /// Releases idle memory of `pool` until at most `to_bytes` are held or nothing is idle.
    pub(in crate::engine) fn trim(&self, to_bytes: u64, pool: &dyn PoolView, now_us: u64) {
        let plan =
            |state: &mut ArenaState| state.arena.release_down_to(to_bytes.saturating_sub(state.reserve_overhead_bytes));
        give_while(pool, EvictionReason::Other, || {
            self.release_free(now_us, plan);
            self.supply.held_bytes() > to_bytes
        });
        self.release_free(now_us, plan);
    }

    /// Releases idle memory of `pool` until held memory is within the limit and idle memory within `max_idle_bytes`, or nothing
    /// is idle.
    pub(in crate::engine) fn enforce_limits(&self, pool: &dyn PoolView, max_idle_bytes: Option<u64>, now_us: u64) {
        let over_idle = |max_bytes| self.supply.unused_bytes(pool).saturating_sub(max_bytes);
        let excess_bytes = || self.budget.over_bytes().max(max_idle_bytes.map_or(0, over_idle));
        let must_evict = || {
            let bytes = excess_bytes();
            if bytes > 0 {
                self.release_free(now_us, |state| state.plan_release_of(bytes));
            }
            self.lacks_free(excess_bytes())
        };
        give_while(pool, EvictionReason::Reclaimed, must_evict);
        must_evict();
    }

    /// Releases idle memory of `pool` until `bytes` are released or nothing is idle. Returns how many bytes were released.
    /// The call may be slow.
    pub(in crate::engine) fn release_idle(&self, bytes: u64, pool: &dyn PoolView, now_us: u64) -> u64 {
        let before_bytes = self.supply.held_bytes();
        let released_bytes = || before_bytes.saturating_sub(self.supply.held_bytes());
        pool.sweep_in_flight();
        give_while(pool, EvictionReason::Reclaimed, || self.lacks_free(bytes.saturating_sub(released_bytes())));
        self.release_free(now_us, |state| state.plan_release_of(bytes));
        released_bytes()
    }

    /// Returns whether the release of `bytes` requires another eviction. Memory that the driver refuses to release stays free,
    /// so it causes no further evictions.
    fn lacks_free(&self, bytes: u64) -> bool {
        self.arena.as_ref().map_or(bytes > 0, |arena| arena.state().lacks_free(bytes))
    }

    /// Releases the free memory that `plan` selects, if there is an arena.
    fn release_free(&self, now_us: u64, plan: impl FnOnce(&mut ArenaState) -> Option<Plan>) {
        if let Some(arena) = &self.arena {
            arena.release(now_us, plan).unwrap_or_else(|error| self.log.release_delayed(&error));
        }
    }
}

impl ArenaSupply {
    /// Runs a tick of `pool` for the arena: follows the pressure on memory, and releases what is due. While the pressure is
    /// severe, releases everything idle, and calls `trim_all` to release free memory. The call may be slow.
    pub(in crate::engine) fn tick(self: &Arc<Self>, pool: &dyn PoolView, now_us: u64, trim_all: impl FnOnce()) {
        let Some(mut watch) = self.pressure.try_lock() else { return };
        if let Some(pressure) = watch.pressure_change(now_us) {
            self.shorten_retention((pressure != Pressure::Calm).then_some(RETENTION_DIVISOR));
            if pressure == Pressure::Calm { self.log.pressure_ended() } else { self.log.memory_pressure() }
        }
        if watch.pressure == Pressure::Severe {
            give_while(pool, EvictionReason::Reclaimed, || true);
            trim_all();
        }
        self.refresh_sizes_vary(now_us);
        self.release_due(now_us).unwrap_or_else(|error| self.log.release_delayed(&error));
        self.resume_reserve(false);
    }

    /// Releases the memory that is due (policy-R9). If this calls a driver, a dedicated thread does it soon, so that no request
    /// or return pays for the calls. That thread ends after one round.
    pub(in crate::engine) fn release_due(self: &Arc<Self>, now_us: u64) -> Result<(), SourceError> {
        if !self.may_release_by_time() {
            // Memory that is due is kept, because its release would wait for the device.
            let overdue_bytes = self.state().count_overdue(now_us);
            if overdue_bytes > 0 && !self.has_logged_idle.swap(true, Ordering::Relaxed) {
                self.log.idle_kept(overdue_bytes, self.source.name());
            }
            return Ok(());
        }
        // Relaxed: a thread that sees an old value finds nothing due.
        if self.is_releasing.load(Ordering::Relaxed) || !self.state().arena.is_release_due(now_us) {
            return Ok(());
        }
        let plan_due = move |state: &mut ArenaState| {
            state.overdue_bytes = 0;
            state.arena.release_due(now_us)
        };
        let release = move |supply: &Self| supply.release(now_us, plan_due);
        if !self.source.needs_gpu() {
            return release(self);
        }
        // Acquire, with the Release below: the threads of two rounds run one after the other.
        if self.is_releasing.swap(true, Ordering::Acquire) {
            return Ok(());
        }
        let supply = self.clone();
        let round = move || {
            // `None` if the process is exiting.
            let call = MaintenanceThread::of_process().enter();
            let released = if call.is_some() { release(&supply) } else { Ok(()) };
            drop(call);
            supply.is_releasing.store(false, Ordering::Release);
            released.unwrap_or_else(|error| supply.log.release_delayed(&error));
        };
        if threads::spawn(c"pinpool-reclaim", round).is_ok() {
            return Ok(());
        }
        self.is_releasing.store(false, Ordering::Release);
        release(self)
    }

    /// Returns whether idle memory is released because of its age. A release that waits for the device blocks every enqueue, so
    /// memory with such releases is released only while memory is short.
    pub(in crate::engine) fn may_release_by_time(&self) -> bool {
        // Relaxed: only ticks write it, one at a time. To other readers it is a hint.
        !self.source.blocks_on_release() || self.is_short.load(Ordering::Relaxed)
    }

    /// Returns whether a release would wait for a copy that may never end.
    pub(in crate::engine) fn may_never_release(&self) -> bool {
        // An out-of-date count only makes a release wait.
        self.source.blocks_on_release() && self.quarantined.get() > 0
    }

    /// Plans releases by `plan` and carries them out, unless a release might never return. The call may be slow, and may
    /// wait for the device.
    pub(in crate::engine) fn release(
        &self,
        now_us: u64,
        plan: impl FnOnce(&mut ArenaState) -> Option<Plan>,
    ) -> Result<(), SourceError> {
        if self.may_never_release() {
            return Ok(());
        }
        let mut state = self.state();
        let Some(plan) = plan(&mut state) else { return Ok(()) };
        self.carry_out(state, plan, now_us, Instant::now(), None).map(drop)
    }

    /// Releases all memory without a block in it, and the addresses only if there is no block at all. A leaked or abandoned
    /// block keeps the addresses until the process ends. If a release fails, its memory or addresses stay until then, since
    /// nothing tries it again. If a release might never return, releases nothing.
    pub(in crate::engine) fn tear_down(&self, now_us: u64) {
        if self.may_never_release() && self.state().held_bytes() > 0 {
            let mut state = self.state();
            let (held_bytes, ended) = (state.held_bytes(), state.end_claims(false));
            drop(state);
            drop(ended);
            return self.log.end_left_pinned(held_bytes);
        }
        let mut released = Ok(());
        let Mappings { addresses, regions } = loop {
            released = released.and(self.release(now_us, ArenaState::plan_release_all));
            let mut state = self.state();
            // Another thread may be releasing granules, too.
            while state.arena.stats().transit_bytes > 0 {
                state = self.finished.wait(state);
            }
            // `None`: the last block was returned after the release above. Its granules must be released before their
            // addresses.
            if let Some(mappings) = state.take_mappings() {
                break mappings;
            }
        };
        // A failure does not prevent the other releases.
        let released = released.and(addresses.map_or(Ok(()), |(_, addresses)| self.release_addresses(addresses)));
        let released = regions.into_values().map(|region| self.release_region(&region)).fold(released, Result::and);
        let mut state = self.state();
        let all_released = released.is_ok() && state.is_unused();
        // A thread that is still returning a block calls this function again afterwards.
        let is_last = state.is_unused() || self.quarantined.get() > 0;
        let (held_bytes, ended) = (state.held_bytes(), is_last.then(|| state.end_claims(all_released)).flatten());
        drop(state);
        drop(ended);
        if let Err(error) = released {
            self.log.end_unreleased(held_bytes, &error);
        }
    }

    #[allow(unsafe_code)] // Memory leaves the pool.
    pub(in crate::engine) fn release_region(&self, region: &Region) -> Result<(), SourceError> {
        let mut unpin = CallStats::default();
        // SAFETY: the region is of this source. It left the mappings when no block was left in the arena (arena-state-I1), or the
        // arena never had a range for it and so no block in it.
        let released = unsafe { self.source.release(region, &mut unpin) };
        self.state().calls.unpin.add(&unpin);
        released
    }

    #[allow(unsafe_code)] // Addresses leave the pool.
    fn release_addresses(&self, addresses: Arc<AddressRange>) -> Result<(), SourceError> {
        let in_use = || SourceError::new("release_addresses", "the addresses are still in use");
        let range = Arc::into_inner(addresses).ok_or_else(in_use)?;
        // SAFETY: the range is of this source, and left the mappings when no block was left in the arena. Granules are still
        // committed only if their release failed.
        unsafe { self.source.release_addresses(range) }
    }
}
