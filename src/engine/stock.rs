//! The blocks of a pool at rest: the idle ones, and the memory that new ones are made of.
//!
//! ```text
//!   take ◀── idle ◀── put ──victim──▶ release ─▶ memory
//!   acquire ◀─────────────────────────────────── memory
//! ```
//!
//! Owns the idle buffers and the supply. Releases happen outside their locks, and failures are logged here. Never waits
//! for room or handles copies.

use std::cell::Cell;
use std::sync::{Arc, OnceLock};

use super::block::{Block, BlockBody};
use super::cache::thread_cache::{Entry, SpareEntries};
use super::cache::{Evicted, Idle, LoweredLimit};
use super::classes::Classes;
use super::memory::{Adopted, BlockMemory, Memory, Place, PoolView, Refusal, SlowCalls, Stop};
use super::meter::Lifetime;
use crate::backend::{HugeTlb, SourceError, huge_bytes, too_few};
use crate::config::Config;
use crate::diag::PoolLog;
use crate::maintenance_thread::Pace;
use crate::policy;
use crate::quota::{LimitLevel, QuotaExceeded};
use crate::size_class::{Class, plain_eighths_index};
use crate::stats::{EvictionReason, Stats};
use pinpool_observe::record::{Event, Recorder};
use pinpool_os::lost;

/// Progress of a reserve is logged this often.
const RESERVE_REPORTS: u64 = 4;

/// Blocks of owner `E` at rest. `now_us` arguments are coarse times.
#[derive(Debug)]
pub(super) struct Stock<E> {
    idle: Idle<BlockBody<E>>,
    spare: SpareEntries<BlockBody<E>>,
    lifetime: Lifetime,
    classes: Classes,
    memory: Memory,
    /// Limit on what is kept idle.
    max_idle_bytes: Option<u64>,
    /// Whether `reserve` waits until the whole reserve is pinned, or only for its first step.
    reserve_wait: bool,
    hugetlb: HugeTlb,
    log: Arc<PoolLog>,
    recorder: Option<Arc<Recorder>>,
    /// Why all pinned memory is gone, once it is.
    gone: OnceLock<SourceError>,
}

impl<E> Stock<E> {
    pub(super) fn new(config: &Config, memory: Memory, log: Arc<PoolLog>, recorder: Option<Arc<Recorder>>) -> Self {
        let idle_us = policy::idle_buffer_us(config.idle_timeout);
        let idle = Idle::new(memory.has_arena(), config.pool_size_limit, config.auto_resize, idle_us);
        Self {
            idle,
            spare: SpareEntries::default(),
            lifetime: Lifetime::default(),
            classes: Classes::default(),
            memory,
            max_idle_bytes: config.max_idle_bytes,
            reserve_wait: config.reserve_wait,
            hugetlb: config.hugetlb,
            log,
            recorder,
            gone: OnceLock::new(),
        }
    }

    /// The recorder, if the pool records.
    #[inline]
    pub(super) fn recorder(&self) -> Option<&Arc<Recorder>> {
        self.recorder.as_ref()
    }

    pub(super) fn record(&self, event: Event) {
        if let Some(recorder) = &self.recorder {
            recorder.record(event);
        }
    }

    #[inline]
    pub(super) fn idle(&self) -> &Idle<BlockBody<E>> {
        &self.idle
    }

    #[inline]
    pub(super) fn memory(&self) -> &Memory {
        &self.memory
    }

    /// An idle block of `class`.
    pub(super) fn take(&self, class: Class) -> Option<Block<E>> {
        self.idle.take(class).map(Block::from_entry)
    }

    /// A new block of `class`, or an idle one that has returned meanwhile. Idle blocks of `pool` make room. Makes such `calls` of
    /// the source. A slow call.
    pub(super) fn acquire(
        &self,
        owner: &Arc<E>,
        class: Class,
        (now_us, calls): (u64, SlowCalls),
        pool: &dyn PoolView,
    ) -> Result<Block<E>, Stop> {
        if let Some(why) = self.gone.get() {
            return Err(Refusal::Source(why.clone()).into());
        }
        let mut idle = None;
        let mut take_idle = || {
            idle = self.take(class);
            idle.is_some()
        };
        let found = self.memory.find(class, (now_us, calls), pool, &mut take_idle);
        if let Some(block) = idle {
            return Ok(block);
        }
        let memory = found?;
        self.idle.count_allocated(now_us);
        self.classes.made(class);
        Ok(self.block(owner, memory, class))
    }

    /// A pageable block for a refused request, if this pool may return one.
    pub(super) fn acquire_pageable(&self, owner: &Arc<E>, class: Class) -> Option<Block<E>> {
        let memory = self.memory.find_pageable(class)?;
        self.classes.got_pageable(class);
        Some(self.block(owner, memory, class))
    }

    fn block(&self, owner: &Arc<E>, memory: BlockMemory, class: Class) -> Block<E> {
        self.lifetime.add_block();
        let block = Block::new(owner.clone(), memory, class, &self.spare);
        self.record_new(&block);
        block
    }

    /// A block over a user's memory.
    pub(super) fn adopt(&self, owner: &Arc<E>, adopted: Adopted) -> Block<E> {
        let class = Class { bytes: adopted.len, index: plain_eighths_index(adopted.len) };
        self.block(owner, BlockMemory::Adopted(adopted), class)
    }

    /// Records what becomes of a block, if that is recorded.
    pub(super) fn record_of(&self, block: &Block<E>, event: impl FnOnce(u64) -> Event) {
        if let Some(recorder) = &self.recorder
            && let Some(id) = block.recorded_id()
        {
            recorder.record(event(id));
        }
    }

    pub(super) fn record_new(&self, block: &Block<E>) {
        let (address, from_source) = (block.start().addr().get() as u64, block.is_from_source());
        let class_bytes = block.class_bytes() as u64;
        self.record_of(block, |id| Event::New { id, address, class_bytes, from_source });
    }

    /// The blocks by class.
    pub(super) fn classes(&self) -> &Classes {
        &self.classes
    }

    /// The blocks that exist, and the end of the pool.
    pub(super) fn lifetime(&self) -> &Lifetime {
        &self.lifetime
    }

    /// The memory is gone, for this reason: nothing is kept any more, and no request is served. False if that was known.
    pub(super) fn give_up(&self, why: SourceError, now_us: u64) -> bool {
        let is_new = self.gone.set(why).is_ok();
        if is_new {
            self.evict_all(self.idle.seal(), now_us, EvictionReason::Released);
        }
        is_new
    }

    pub(super) fn is_gone(&self) -> bool {
        self.gone.get().is_some()
    }

    /// Releases blocks over the count limit, which returns on the fast path do not check.
    pub(super) fn enforce_count_limit(&self, now_us: u64) {
        self.evict_over_limit(self.idle.evict_over_limit(), now_us);
    }

    /// Releases the block that was `evicted`, and others until the count limit holds.
    pub(super) fn evict_over_limit(&self, mut evicted: Option<Evicted<BlockBody<E>>>, now_us: u64) {
        while let Some(Evicted { entry, reason, check }) = evicted {
            self.evict(Block::from_entry(entry), now_us, reason);
            // After the last handle no request profits from a raise.
            if let Some(check) = check.filter(|_| !self.lifetime.is_sealed()) {
                if let Some(to) = check.raised_to {
                    self.record(Event::Limit { from: check.limit, to });
                }
                self.log.checked(check);
            }
            evicted = self.idle.evict_over_limit();
        }
    }

    /// Whether the sizes of large buffers vary (policy-R12). A load.
    pub(super) fn is_varied(&self) -> bool {
        self.memory.arena().is_some_and(|arena| arena.is_varied())
    }

    /// A pinned block leaves the pool, for this reason. A slow call.
    pub(super) fn evict(&self, block: Block<E>, now_us: u64, why: EvictionReason) {
        self.classes.left(block.class(), why);
        self.release(block, now_us);
    }

    /// Memory leaves the pool: that is not pinned, or at its end. A slow call.
    pub(super) fn release(&self, block: Block<E>, now_us: u64) {
        self.record_of(&block, |id| Event::Gone { id });
        // The block's own reference to its pool is dropped last.
        let (_owner, memory) = block.into_parts(&self.spare);
        self.memory.release(memory, now_us, &self.log);
        // After the release, because the pool may close on it.
        self.lifetime.remove_block();
    }

    /// Releases the block that has been idle longest, for this reason; false if none is idle.
    pub(super) fn release_oldest(&self, now_us: u64, why: EvictionReason) -> bool {
        self.idle.reclaim().map(|entry| self.evict(Block::from_entry(entry), now_us, why)).is_some()
    }

    /// Releases idle memory as [`enforce_limits`](Self::enforce_limits) does, if there is a limit on what is idle.
    pub(super) fn enforce_idle_limit(&self, pool: &dyn PoolView, now_us: u64) {
        if self.max_idle_bytes.is_some() {
            self.enforce_limits(pool, now_us);
        }
    }

    /// Releases idle memory, oldest first, that exceeds the limit, which may have been lowered, or the limit on idle
    /// memory. A hit never does, so returns since the last miss or tick may exceed both.
    pub(super) fn enforce_limits(&self, pool: &dyn PoolView, now_us: u64) {
        if let Some(arena) = self.memory.arena() {
            return self.log.release_error(arena.enforce_limits(pool, self.max_idle_bytes, now_us));
        }
        let is_over = || {
            let is_over_idle = || self.max_idle_bytes.is_some_and(|max_bytes| self.idle.bytes() > max_bytes);
            self.memory.exceeds_limit() || is_over_idle()
        };
        if is_over() {
            // Other threads may return blocks meanwhile: no more are released than were idle at the start.
            let turns = self.idle.count();
            let released =
                (0..turns).take_while(|_| is_over() && self.release_oldest(now_us, EvictionReason::Reclaimed));
            released.for_each(drop);
        }
    }

    /// Releases blocks over the count limit or idle for too long, and lowers a limit that no request has needed for long.
    pub(super) fn expire(&self, now_us: u64) {
        self.enforce_count_limit(now_us);
        self.evict_all(self.idle.expire(now_us), now_us, EvictionReason::Expired);
        if let Some(LoweredLimit { from, to, victims }) = self.idle.lower_limit(now_us) {
            self.evict_all(victims, now_us, EvictionReason::Released);
            self.record(Event::Limit { from, to });
            self.log.limit_lowered(from, to);
        }
    }

    fn evict_all(&self, entries: impl IntoIterator<Item = Box<Entry<BlockBody<E>>>>, now_us: u64, why: EvictionReason) {
        entries.into_iter().for_each(|entry| self.evict(Block::from_entry(entry), now_us, why));
    }

    /// Releases every idle block and begins a new window.
    pub(super) fn clear(&self, now_us: u64) {
        self.evict_all(self.idle.clear(), now_us, EvictionReason::Released);
        self.trim_arena(0, now_us);
    }

    /// Releases idle memory, oldest first, until at most `to_bytes` are held or nothing is idle.
    pub(super) fn trim(&self, to_bytes: u64, now_us: u64) {
        self.trim_arena(to_bytes, now_us);
        // No more than are idle now: other threads may return blocks meanwhile.
        for _ in 0..self.idle.count() {
            if self.memory.held_bytes() <= to_bytes || !self.release_oldest(now_us, EvictionReason::Released) {
                break;
            }
            self.trim_arena(to_bytes, now_us);
        }
    }

    fn trim_arena(&self, to_bytes: u64, now_us: u64) {
        if let Some(arena) = self.memory.arena() {
            self.log.release_error(arena.release_down_to(to_bytes, now_us));
        }
    }

    /// Pins a reserve of `bytes` (policy-R10), for which idle memory makes room. Does nothing without an arena. A slow call.
    pub(super) fn add_reserve(&self, bytes: u64, now_us: u64, make_room: impl FnOnce(u64)) -> Result<(), Refusal> {
        let Some(arena) = self.memory.arena().filter(|_| bytes > 0) else { return Ok(()) };
        if !self.reserve_wait {
            return arena.begin_reserve(bytes, now_us);
        }
        let reported = Cell::new(0);
        let progress = |done_bytes: u64| {
            let part = u128::from(done_bytes) * u128::from(RESERVE_REPORTS) / u128::from(bytes);
            if part > reported.get() {
                reported.set(part);
                self.log.reserving(done_bytes, bytes, None);
            }
        };
        let length = |places: &[Place]| places.iter().map(|&Place(_, len)| len as u64).sum::<u64>();
        let slice_bytes = self.memory.source().reserve_slice_bytes();
        let mut added = arena.add_reserve((bytes, slice_bytes), &progress);
        let to_bytes = match &added {
            // What is idle here makes room there.
            Err(Refusal::QuotaExceeded {
                over: QuotaExceeded { level: LimitLevel::Shared, shortfall, .. }, ..
            }) => Some(self.memory.held_bytes().saturating_sub(*shortfall)),
            Err(Refusal::QuotaExceeded { needed_bytes, .. }) => {
                self.memory.max_bytes().and_then(|max_bytes| max_bytes.checked_sub(*needed_bytes))
            }
            _ => None,
        };
        if let Some(to_bytes) = to_bytes {
            make_room(to_bytes);
            added = arena.add_reserve((bytes, slice_bytes), &progress);
        }
        let places = added?;
        let source = self.memory.source();
        let huge = || {
            let each = places.iter().map(|&Place(start, len)| huge_bytes(start, len));
            each.fold([0; 2], |[hugetlb, transparent], more| [hugetlb + more[0], transparent + more[1]])
        };
        if self.hugetlb.is_required() {
            too_few(self.hugetlb, huge()[0], length(&places)).iter().for_each(|lack| self.log.few_huge_pages(lack));
        }
        self.log.reserved(bytes.min(length(&places)), || huge().iter().sum(), source.numa_node());
        Ok(())
    }

    /// How soon time alone may change something here: an idle buffer grows old, free memory falls due. Under `tensorflow`
    /// nothing ages.
    pub(super) fn pace(&self) -> Pace {
        let idle_bytes = self.idle.bytes();
        let Some(arena) = self.memory.arena() else {
            // Here a return can only exceed a limit.
            let may_pass_limit = self.max_idle_bytes.is_some() || self.memory.exceeds_limit();
            return match (may_pass_limit, idle_bytes, self.memory.all_block_bytes() > 0) {
                (false, ..) | (true, 0, false) => Pace::Never,
                (true, 0, true) => Pace::Quiet,
                (true, ..) => Pace::Active,
            };
        };
        if arena.is_compacting() {
            return Pace::Compaction;
        }
        if idle_bytes > 0 || arena.ages() {
            return if self.memory.own_bytes() > idle_bytes { Pace::Active } else { Pace::Quiet };
        }
        // A kept return notifies nobody, and makes a buffer idle. Free memory is released if memory is short.
        let may_change = arena.has_free() || arena.reserve_waits();
        if self.memory.all_block_bytes() > 0 || may_change { Pace::Quiet } else { Pace::Never }
    }

    pub(super) fn fill(&self, stats: &mut Stats) {
        self.memory.fill_stats(stats);
        self.idle.fill(stats);
        self.classes.fill(stats);
        self.lifetime.fill(stats);
    }

    /// From now on nothing is kept. Returns what is idle.
    pub(super) fn seal(&self) -> Vec<Block<E>> {
        self.idle.seal().into_iter().map(Block::from_entry).collect()
    }
}

impl<E: Send + Sync + 'static> Stock<E> {
    /// Never uses `block` again; keeps its memory, and with it the pool that it belongs to.
    pub(super) fn leak(&self, block: Block<E>) {
        lost::keep(block);
        self.lifetime.remove_block();
    }
}
