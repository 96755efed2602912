//! The order of steps when memory is needed from an arena that pools share.
//!
//! ```text
//!  acquire: [lock: carve] ─fits─▶ memory
//!                └─▶ larger than the ceiling could ever hold?  refused
//!                └─▶ a block of the class came back meanwhile?  reuse it
//!                └─▶ could the pool's idle blocks cover what is missing?  release its oldest, retry      (policy-R6)
//!                └─▶ [lock: plan under the ceiling] ─▶ steps (no lock) ─▶ [lock: settle] ─▶ memory       (policy-R5, R7, R11)
//!                          └─no space─▶ granules in transit?  wait for them, retry
//!                                       enough idle blocks, of any pool?  release the oldest, retry      (policy-R8)
//!                                       regions free under pending copies?  wait for those if configured, retry
//!                                       else: refused
//! ```
//!
//! Owns the limits of growth. Never carves, releases or waits but through [`GuardedArena`].
//!
//! - shared-arena-I1: `claimed + pending <= max` at every instant; both change under the lock, before the source is
//!   called.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::arena_state::ArenaState;
use super::executor::{GrowthShape, arena_over};
use super::gate::Gate;
use super::guarded_arena::GuardedArena;
use super::{Acquired, Reclaim, Refusal, SupplyStats};
use crate::arena::{ArenaPtr, GrowthLimits, Retention};
use crate::backend::{PageTiers, Source, SourceError};
use crate::diag::PoolLog;
use crate::size_class::Class;

/// Longest commit while copies are pending: registering this much delays other threads' enqueues by half a millisecond.
const STEP_BESIDE_COPIES_BYTES: u64 = 8 << 20;

/// An arena over a source, for one pool and its partitions.
#[derive(Debug)]
pub(crate) struct SharedArena {
    memory: GuardedArena,
    config: SharedArenaConfig,
    shape: GrowthShape,
    /// A thread is releasing what is due.
    is_releasing: AtomicBool,
}

/// Settings of a shared arena.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SharedArenaConfig {
    pub(crate) max_bytes: Option<u64>,
    pub(crate) may_grow: bool,
    /// Threads that touch the memory of a reserve.
    pub(crate) pin_threads: usize,
    pub(crate) retention: Retention,
    /// At the ceiling, wait this long for pending copies so that regions can be released; `None`: do not wait.
    pub(crate) drain_at_most: Option<Duration>,
}

impl SharedArena {
    /// An arena over `source`. Reserves addresses where the source can, pins nothing.
    pub(crate) fn new(
        source: Arc<dyn Source>,
        config: SharedArenaConfig,
        log: Arc<PoolLog>,
    ) -> Result<Self, SourceError> {
        let (arena, mappings, shape) = arena_over(&*source, config.max_bytes, config.retention)?;
        let memory = GuardedArena::new(source, ArenaState::new(arena, mappings), log);
        Ok(Self { memory, config, shape, is_releasing: AtomicBool::new(false) })
    }

    pub(super) fn source(&self) -> &dyn Source {
        self.memory.source()
    }

    #[inline]
    pub(super) fn gate(&self) -> &Gate {
        self.memory.gate()
    }

    /// Memory for `class`, whole pages, or what `reuse` found meanwhile. May call the source.
    pub(super) fn acquire<R>(
        &self,
        class: Class,
        now_us: u64,
        pool: &dyn Reclaim,
        mut reuse: impl FnMut() -> Option<R>,
    ) -> Result<Acquired<R>, Refusal> {
        let bytes = class.bytes as u64;
        if let Some(memory) = self.memory.lock().carve(bytes) {
            return Ok(Acquired::New(memory));
        }
        // A request that can never fit is no reason to release idle blocks.
        if !self.could_hold(bytes) {
            return Err(self.no_space(bytes));
        }
        let attached = self.memory.attached();
        let mut source_error = None;
        let (mut closed_late, mut may_wait) = (None, true);
        loop {
            let idle_bytes = pool.idle_bytes();
            let mut state = self.memory.lock();
            if let Some(memory) = state.carve(bytes) {
                return Ok(Acquired::New(memory));
            }
            // Each round may have waited, and a put may have come meanwhile.
            if let Some(reused) = reuse() {
                return Ok(Acquired::Reused(reused));
            }
            let by_sum = source_error.is_some() || self.shape.is_discrete;
            if idle_bytes > 0 && state.could_cover(bytes, idle_bytes, by_sum) {
                drop(state);
                // If another thread was faster, the next round sees what is left.
                pool.release_oldest();
                continue;
            }
            // Regions are released only behind the closed gate, which opens again at once unless the plan releases one.
            let closed = closed_late.take().or_else(|| self.memory.gate().close());
            let limits = self.growth_limits(&state, source_error.is_none(), closed.is_some());
            let plan = match state.plan_growth(bytes, limits) {
                Ok(plan) => plan,
                Err(no_space) if no_space.transit_bytes > 0 => {
                    drop(closed);
                    self.memory.wait_for_settlement(&mut state);
                    continue;
                }
                Err(_) => {
                    let available_bytes = state.free_bytes().saturating_add(limits.commit_bytes);
                    let is_held_by_copies = closed.is_none() && state.idle_bytes() > 0;
                    drop(closed);
                    drop(state);
                    if make_room(pool, &attached, bytes.saturating_sub(available_bytes)) {
                        continue;
                    }
                    if is_held_by_copies && std::mem::take(&mut may_wait) {
                        closed_late = self.memory.close_late(&attached, self.config.drain_at_most);
                        continue;
                    }
                    return Err(source_error.map_or_else(|| self.no_space(bytes), Refusal::Source));
                }
            };
            match self.memory.grow(state, plan, bytes, closed, now_us) {
                Ok(memory) => {
                    let no_address = || Refusal::Source(SourceError::new("arena", "a place without an address"));
                    return memory.map(Acquired::New).ok_or_else(no_address);
                }
                // Two attempts are enough: what other threads put back meanwhile is found by waiting in line.
                Err(error) if source_error.is_some() => return Err(Refusal::Source(error)),
                // After a failure of the source, only committed granules can help.
                Err(error) => source_error = Some(error),
            }
        }
    }

    fn growth_limits(&self, state: &ArenaState, may_commit: bool, at_rest: bool) -> GrowthLimits {
        let commit_bytes = if self.config.may_grow && may_commit { state.room_bytes(self.config.max_bytes) } else { 0 };
        let step_bytes = if at_rest { u64::MAX } else { STEP_BESIDE_COPIES_BYTES };
        GrowthLimits { commit_bytes, may_decommit_regions: at_rest, step_bytes }
    }

    /// Whether a block of `bytes` fits when everything else is released.
    pub(super) fn could_hold(&self, bytes: u64) -> bool {
        let state = self.memory.lock();
        if bytes <= state.largest_reserve_bytes() {
            return true;
        }
        let room_bytes = self.config.max_bytes.map_or(u64::MAX, |max| max.saturating_sub(state.reserve_bytes()));
        let GrowthShape { granule_bytes, longest_bytes, .. } = self.shape;
        self.config.may_grow && bytes <= longest_bytes && bytes.div_ceil(granule_bytes) <= room_bytes / granule_bytes
    }

    pub(in crate::engine) fn max_bytes(&self) -> Option<u64> {
        self.config.max_bytes
    }

    /// Whether it may pin more than its reserve.
    pub(super) fn may_grow(&self) -> bool {
        self.config.may_grow
    }

    fn no_space(&self, bytes: u64) -> Refusal {
        if self.config.max_bytes.is_some() || !self.config.may_grow {
            return Refusal::Ceiling { needed_bytes: bytes };
        }
        let what = format!("no {bytes} B in one piece are left of the addresses reserved");
        Refusal::Source(SourceError::new("arena", what).with_remedy("ask for less at once, or put buffers back first"))
    }

    /// Pins `bytes` and keeps them until the end (policy-R10): a range of its own in the arena. Returns where it lies. A
    /// slow call.
    pub(in crate::engine) fn add_reserve(
        &self,
        bytes: u64,
        progress: &dyn Fn(u64),
    ) -> Result<(NonNull<u8>, usize), Refusal> {
        self.memory.add_reserve(bytes, self.config.max_bytes, self.config.pin_threads, progress)
    }

    /// Gives a block's bytes back. With the last one of detached pools everything is released.
    pub(super) fn give(&self, ptr: ArenaPtr, bytes: u64, now_us: u64) -> Result<(), SourceError> {
        self.memory.give(ptr, bytes, now_us)
    }

    pub(in crate::engine) fn attach(&self, pool: Weak<dyn Reclaim>) {
        self.memory.attach(pool);
    }

    /// A pool has closed. After the last one everything is released.
    pub(in crate::engine) fn detach(&self, pool: &dyn Reclaim, now_us: u64) -> Result<(), SourceError> {
        self.memory.detach(pool, now_us)
    }

    /// The attached pools.
    pub(in crate::engine) fn attached(&self) -> Vec<Arc<dyn Reclaim>> {
        self.memory.attached()
    }

    /// Divides the time that free memory is kept; `None` restores the setting.
    pub(in crate::engine) fn shorten_retention(&self, divisor: Option<u64>) {
        let idle_timeout_us = self.config.retention.idle_timeout_us.map(|us| us / divisor.unwrap_or(1).max(1));
        self.memory.lock().set_retention(Retention { idle_timeout_us, ..self.config.retention });
    }

    /// Releases what is due (policy-R9), soon: where a driver is called, a thread of its own does it, so that no get or
    /// put pays for it. That thread ends after one round.
    pub(in crate::engine) fn release_due(self: &Arc<Self>, now_us: u64) -> Result<(), SourceError> {
        // Relaxed: a thread that sees an old value finds the gate closed, or nothing due.
        if self.is_releasing.load(Ordering::Relaxed) || !self.memory.lock().is_release_due(now_us) {
            return Ok(());
        }
        if !self.memory.is_at_rest() {
            self.memory.lock().note_overdue(now_us);
            return Ok(());
        }
        if !self.source().needs_gpu() {
            return self.memory.release_now(now_us);
        }
        // Acquire, with the Release below: the threads of two rounds run one after the other.
        if self.is_releasing.swap(true, Ordering::Acquire) {
            return Ok(());
        }
        let arena = self.clone();
        let release = move || {
            let released = arena.memory.release_now(now_us);
            arena.is_releasing.store(false, Ordering::Release);
            arena.memory.log().release_error(released);
        };
        if std::thread::Builder::new().name("pinpool-reclaim".to_owned()).spawn(release).is_ok() {
            return Ok(());
        }
        self.is_releasing.store(false, Ordering::Release);
        self.memory.release_now(now_us)
    }

    /// Releases free memory until at most `to_bytes` are held or nothing is free.
    pub(in crate::engine) fn release_down_to(&self, to_bytes: u64, now_us: u64) -> Result<(), SourceError> {
        self.memory.release_down_to(to_bytes, now_us)
    }

    /// The pages of all that is held.
    pub(in crate::engine) fn page_tiers(&self) -> PageTiers {
        self.memory.page_tiers()
    }

    pub(super) fn stats(&self) -> SupplyStats {
        self.memory.lock().stats(self.config.max_bytes)
    }
}

/// Releases the oldest idle block: of `pool`, else of another attached pool. False if none is idle, or all of them would
/// not make up `lacking_bytes`.
fn make_room(pool: &dyn Reclaim, attached: &[Arc<dyn Reclaim>], lacking_bytes: u64) -> bool {
    let idle_bytes: u64 = attached.iter().map(|other| other.idle_bytes()).sum();
    idle_bytes > 0
        && idle_bytes >= lacking_bytes
        && (pool.release_oldest() || attached.iter().any(|other| other.release_oldest()))
}
