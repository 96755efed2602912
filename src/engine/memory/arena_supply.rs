//! Preset `adaptive`: an arena over a source, and the lock around its state.
//!
//! Only completely free memory is released. No copy uses it, so a release needs no lock against copies. If a release waits for
//! the device ([`Source::blocks_on_release`](crate::backend::Source::blocks_on_release)), it blocks every enqueue during the wait. Such a
//! release happens only:
//!
//! - in `trim`, `clear` and `close`, and when a limit is lowered or exceeded
//! - at the limit, if a request cannot be served otherwise, or a request of another pool or process under a shared limit
//! - under memory pressure
//! - at the end of the pool
//!
//! Until then idle memory is reused, and memory that is due counts as `awaiting_release_bytes`. While it is unknown
//! whether a copy will ever end, nothing is released at all, because a release could wait for that copy forever.
//!
//! - **arena-supply-I1**: the claim includes all bytes that the system adds
//!   ([`Source::held_bytes`](crate::backend::Source::held_bytes)). It changes only under the lock, and rises only within the
//!   limits and before the source is called.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Instant;

use super::arena_state::ArenaState;
use super::block_memory::{AllowedCalls, AttemptError, BlockMemory, Rules};
use super::metered_source::MeteredSource;
use super::pressure::PressureWatch;
use super::shape::{GrowthShape, arena_over};
use super::{PoolView, Supply};
use crate::arena::Retention;
use crate::backend::{HugeTlb, SourceError};
use crate::engine::meter::Counter;
use crate::quota::{Budget, Claim};
use crate::report::PoolLog;
use crate::size_class::Class;
use crate::stats::{SourceCalls, Stats};
use pinpool_os::sync::{Condvar, Mutex, MutexGuard, unmodeled};

/// An arena over a source.
pub(crate) struct ArenaSupply {
    pub(super) source: MeteredSource,
    pub(super) budget: Arc<Budget>,
    pub(super) log: Arc<PoolLog>,
    pub(super) settings: ArenaSettings,
    pub(super) shape: GrowthShape,
    state: Mutex<ArenaState>,
    /// Notified when a plan is finished.
    pub(super) finished: Condvar,
    /// Whether memory was short at the last tick.
    pub(super) is_short: AtomicBool,
    /// Blocks with copies that end at an unknown time, or never.
    pub(super) quarantined: Arc<Counter>,
    /// Whether the log has reported that idle memory stays pinned.
    pub(super) has_logged_idle: AtomicBool,
    /// Whether sizes varied at the last miss or tick (policy-R12).
    pub(super) sizes_vary: AtomicBool,
    /// Whether the maintenance thread should compact: the holes changed and no hole has the wanted length (policy-R13), or old
    /// addresses of remapped granules are still mapped. Cleared when a compaction begins.
    pub(super) needs_compaction: AtomicBool,
    /// Number of polls since the last poll that found `needs_compaction` set.
    pub(super) idle_polls: AtomicU32,
    /// Locked during a tick; only one tick runs at a time.
    pub(super) pressure: unmodeled::Mutex<PressureWatch>,
    /// Whether a dedicated thread is releasing the memory that is due.
    pub(super) is_releasing: AtomicBool,
    /// Locked while a thread makes a step of a reserve.
    pub(super) reserve_step: unmodeled::Mutex<()>,
}

/// Settings of an arena.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ArenaSettings {
    pub(crate) may_grow: bool,
    /// Number of threads that touch the memory of a reserve.
    pub(crate) pin_threads: usize,
    /// The huge pages that should back the memory of a reserve.
    pub(crate) hugetlb: HugeTlb,
    pub(crate) retention: Retention,
}

impl Supply for ArenaSupply {
    fn find(
        &self,
        class: Class,
        now_us: u64,
        rules: Rules,
        pool: &dyn PoolView,
        take_idle: &dyn Fn() -> bool,
    ) -> Result<Option<BlockMemory>, AttemptError> {
        let bytes = class.bytes as u64;
        if rules.counts_miss {
            let mut state = self.state();
            let memory = state.carve_missed(bytes, now_us, || pool.idle_buffer_bytes());
            let changed = self.update_sizes_vary(&state, now_us);
            self.update_needs_compaction(&state, now_us);
            drop(state);
            self.log.sizes_changed(changed);
            if let Some(memory) = memory {
                self.log.carved(bytes);
                return Ok(Some(memory));
            }
        }
        // A request that can never fit is no reason to release idle blocks.
        if !self.could_hold(class) {
            return Err(self.no_space(bytes, pool.idle_buffer_bytes()).into());
        }
        let mut search = self.begin_search(bytes, now_us, rules, pool);
        loop {
            let idle_bytes = pool.idle_buffer_bytes();
            let mut state = self.state();
            if let Some(memory) = state.carve(bytes) {
                return Ok(Some(memory));
            }
            // The last round may have waited, and another thread may have returned a buffer during the wait.
            if take_idle() {
                return Ok(None);
            }
            if search.evictable_blocks > 0 && idle_bytes > 0 && state.could_cover(bytes, idle_bytes) {
                drop(state);
                search.give_oldest();
                continue;
            }
            let limits = self.limits(&state, &search);
            match state.plan_growth(bytes, limits) {
                Ok(plan) if rules.calls == AllowedCalls::None => {
                    state.abandon(plan);
                    return Err(AttemptError::NeedsCall);
                }
                Ok(plan) => {
                    if let Some(memory) = self.carry_out_growth(state, plan, &mut search)? {
                        return Ok(Some(memory));
                    }
                }
                Err(refusal) => {
                    search.claim_refusal = refusal;
                    // A plan of another thread may make room.
                    let may_wait = || rules.until > Instant::now();
                    if refusal.is_none() && state.arena.stats().transit_bytes > 0 && may_wait() {
                        drop(self.finished.wait_until(state, rules.until));
                    } else if !self.make_room(state, limits, &mut search) {
                        let memory = self.state().carve_in_other_regions(bytes);
                        return memory.map(Some).ok_or_else(|| self.refusal(search).into());
                    }
                }
            }
        }
    }

    /// Takes back a block's memory. A pool ends once its last block is counted as returned, which may be before another
    /// thread returns that block's memory here. So the later of this call and `end` tears down.
    fn give(&self, memory: BlockMemory, now_us: u64, _may_wait: bool) {
        // This supply provides only carved blocks.
        let BlockMemory::Carved { extent, .. } = memory else { return };
        let mut state = self.state();
        let unused = state.give(extent, now_us);
        self.update_needs_compaction(&state, now_us);
        drop(state);
        if unused {
            self.tear_down(now_us);
        }
    }

    fn end(&self, now_us: u64) {
        self.state().has_ended = true;
        self.tear_down(now_us);
    }

    fn could_hold(&self, class: Class) -> bool {
        self.could_hold_bytes(class.bytes as u64)
    }

    /// Counts whole granules. Also returns 0 if the pool may not grow.
    fn room_to_overtake(&self, first: Class, most_bytes: u64) -> u64 {
        let GrowthShape { largest_granule_bytes: granule_bytes, has_regions, .. } = self.shape;
        if has_regions || !self.settings.may_grow {
            return 0;
        }
        let granules = (most_bytes / granule_bytes).saturating_sub((first.bytes as u64).div_ceil(granule_bytes));
        granules * granule_bytes
    }

    /// Counts all granules that the block may touch.
    fn bytes_to_overtake(&self, class: Class) -> u64 {
        let granule_bytes = self.shape.largest_granule_bytes;
        ((class.bytes as u64).div_ceil(granule_bytes) + 1).saturating_mul(granule_bytes)
    }

    fn block_bytes(&self, class: Class) -> u64 {
        class.bytes as u64
    }

    fn all_block_bytes(&self) -> u64 {
        self.state().arena.stats().live_bytes
    }

    fn held_bytes(&self) -> u64 {
        self.state().held_bytes()
    }

    fn unused_bytes(&self, pool: &dyn PoolView) -> u64 {
        let buffer_bytes = pool.idle_buffer_bytes();
        self.state().unused_bytes(buffer_bytes)
    }

    fn calls(&self) -> SourceCalls {
        self.state().calls
    }

    fn fill(&self, stats: &mut Stats) {
        self.state().fill(stats);
    }
}

impl ArenaSupply {
    /// Creates an arena over `source` that claims bytes through `claim`. Reserves addresses if the source has virtual memory;
    /// pins nothing. Reads memory pressure from the file `pressure` if there is one, otherwise from the kernel's files.
    pub(crate) fn new(
        source: MeteredSource,
        claim: Claim,
        settings: ArenaSettings,
        log: Arc<PoolLog>,
        pressure: Option<&Path>,
    ) -> Result<Self, SourceError> {
        let (arena, mappings, shape) = arena_over(&source, claim.budget().max_bytes(), settings.retention)?;
        Ok(Self {
            source,
            log,
            settings,
            shape,
            budget: claim.budget().clone(),
            state: Mutex::new(ArenaState::new(arena, mappings, shape, claim)),
            finished: Condvar::default(),
            is_short: AtomicBool::new(false),
            quarantined: Arc::default(),
            has_logged_idle: AtomicBool::new(false),
            sizes_vary: AtomicBool::new(false),
            needs_compaction: AtomicBool::new(false),
            idle_polls: AtomicU32::new(u32::MAX),
            pressure: unmodeled::Mutex::new(PressureWatch::new(pressure)),
            is_releasing: AtomicBool::new(false),
            reserve_step: unmodeled::Mutex::default(),
        })
    }

    pub(in crate::engine) fn state(&self) -> MutexGuard<'_, ArenaState> {
        self.state.lock()
    }

    /// Divides the time for which free memory is kept by `divisor`, because memory is short. `None` restores the configured
    /// time.
    pub(super) fn shorten_retention(&self, divisor: Option<u64>) {
        // Relaxed: see `may_release_by_time`.
        self.is_short.store(divisor.is_some(), Ordering::Relaxed);
        let idle_timeout_us = self.settings.retention.idle_timeout_us.map(|us| us / divisor.unwrap_or(1).max(1));
        self.state().arena.retention = Retention { idle_timeout_us, ..self.settings.retention };
    }

    /// Returns whether time alone will change the state of some free memory: it will be released, or become overdue.
    pub(in crate::engine) fn has_aging_memory(&self) -> bool {
        let state = self.state();
        let releasable_bytes = state.arena.releasable_bytes();
        let aging = releasable_bytes > 0 && state.arena.retention.idle_timeout_us.is_some();
        aging && (self.may_release_by_time() || state.overdue_bytes < releasable_bytes)
    }

    /// Returns the length of the longest piece of free memory.
    pub(in crate::engine) fn longest_free_bytes(&self) -> u64 {
        self.state().arena.longest_hole_bytes()
    }

    /// Returns whether there is free memory that would be released if memory became short.
    pub(in crate::engine) fn has_free(&self) -> bool {
        self.state().arena.releasable_bytes() > 0
    }
}
