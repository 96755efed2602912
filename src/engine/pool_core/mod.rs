//! The order of the steps of requests, returns, ticks and the end of a pool. Each module decides under its own lock. Slow calls
//! are made outside these locks, except
//! - under locks that other threads only try: if one is taken, they skip the step,
//! - for claims under a shared limit, which wait for the lock of its file,
//! - for the kernel's files that the limit `auto` is computed from.
//!
//! | file | contents |
//! | --- | --- |
//! | `mod.rs` | the state of a pool; trim, clear, reserve, user memory under the limit |
//! | `get.rs`, `queue.rs` | a request and its wait; the pool as the server of its wait queue |
//! | `put.rs` | a return, completed copies, evictions, blocks that are never reused, the end |
//! | `fast_path.rs` | hits and returns in a cached shard |
//! | `tick.rs` | periodic work |
//! | `pool_view.rs` | the pool, as its memory sees it |
//! | `limits.rs`, `partition.rs` | the limit `auto` and the shared limit; a partition |
//! | `report.rs`, `record.rs` | statistics, dump, diagnosis; recordings and call stacks |
//!
//! ```text
//!  request idle ─hit─▶ block
//!           └─miss─▶ sweep ─completed─▶ block
//!                     └─▶ tick, acquire ─▶ block
//!                          └─no room─▶ wait queue (`get.rs`)
//!  return  a request waits? ─yes─▶ hand over, or make room; otherwise keep idle ─▶ release the victim, report the check
//!  copy    the block waits in `in_flight`; a sweep that finds its fences complete returns it
//!  end     last handle dropped ──▶ seal: release idle blocks; later returns release their block
//!          last buffer returned ─▶ tear down: wait for copies, abandon those that do not end, release the memory
//! ```
//!
//! A sweep may query a driver, which is slow if many threads do so, so hits do not sweep. Sweeps are run by misses, `try_get`,
//! waiting requests, waits for a copy, the maintenance thread, [`Pool::maintain`](crate::Pool::maintain), `trim`, `clear`,
//! `close`, a changed limit and the end of the pool. `stats` completes copies by loads alone.
//!
//! Under `PINPOOL_ZERO`, if the pool uses the maintenance thread, a returned block waits in `in_flight` without a fence until a
//! sweep returns it. A block is zeroed when its return is finished and when a miss finds it, so idle blocks and free memory contain
//! zeros.
//!
//! This module connects the other modules: `policy` decides, `cache` keeps idle blocks, `memory` pins and unpins, `meter`
//! counts.
//!
//! - **core-I1**: a block is released only if it was idle, its return is complete, or no user ever had it. Then no reference
//!   and no copy uses its memory: a return with copies goes through `in_flight`, which returns the block only after its fences.
//! - **core-I2**: memory is leaked, never released, if it cannot be known whether its copies have completed.
//! - **core-I3**: the pool is torn down once, after `seal`, when every buffer handed out was returned, is in flight or was
//!   leaked.

use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

use super::block::{self, BlockBody};
use super::cache::IdleBuffers;
use super::cache::thread_cache::{Shard, SpareEntries};
use super::classes::Classes;
use super::memory::{Adopted, BlockMemory, Memory, PoolView, Refusal};
use super::meter::clock::Timekeeper;
use super::meter::holders::Holders;
use super::meter::{Counters, Lifetime, Shortage};
use super::wait_queue::WaitQueue;
use crate::backend::SourceError;
use crate::config::Config;
use crate::error::{Error, ErrorKind, Result};
use crate::in_flight::{InFlight, QueryScope};
use crate::maintenance_thread::{MaintenanceThread, Pace};
use crate::policy;
use crate::quota::Claim;
use crate::report::PoolLog;
use crate::size_class::{Class, plain_eighths_index};
use crate::stats::EvictionReason;
use pinpool_observe::record::{Event, Recorder};
use pinpool_os::fork::ForkGeneration;
use pinpool_os::sync::unmodeled::{AtomicBool, AtomicU64, Mutex, Ordering};
use pinpool_shared_limit::Want;

mod fast_path;
mod get;
mod limits;
mod partition;
mod pool_view;
mod put;
mod queue;
mod record;
mod report;
mod tick;

pub(super) use fast_path::BorrowedReference;
pub(crate) use fast_path::ThreadShard;
use get::Purpose;
pub(crate) use limits::HostLimit;
pub(crate) use partition::{BlockRequest, PartitionCore};
use queue::{SlowPathFlag, SourceBackoff};
use report::DiagnosisState;
use tick::Ticks;

/// A block of a pool.
pub(crate) type Block = block::Block<PoolCore>;

/// The state that all handles and buffers of one pool share.
pub(crate) struct PoolCore {
    generation: ForkGeneration,
    process: u32,
    config: Config,
    log: Arc<PoolLog>,
    idle: IdleBuffers<BlockBody<Self>>,
    spare: SpareEntries<BlockBody<Self>>,
    /// The number of existing blocks, and the end of the pool.
    lifetime: Lifetime,
    classes: Classes,
    memory: Memory,
    recorder: Option<Arc<dyn Recorder>>,
    /// The error of all requests once the device was reset. No block is kept any more.
    device_lost: OnceLock<SourceError>,
    pub(super) in_flight: InFlight<Block>,
    waiters: WaitQueue<Self>,
    time: Timekeeper,
    ticks: Ticks,
    /// The thread that runs the maintenance ticks; `None` if the pool does not use that thread.
    thread: Option<&'static MaintenanceThread>,
    slow_path_flag: SlowPathFlag,
    /// The bytes that the head of the wait queue needs from other members of the shared limit.
    wanted_of_shared_limit: Want,
    /// Locked while a return makes room for other members of the shared limit.
    making_room: Mutex<()>,
    /// Whether [`Pool::close`](crate::Pool::close) was called.
    is_closed: AtomicBool,
    shortage: Shortage,
    backoff: SourceBackoff,
    counters: Counters,
    /// The partitions of this pool. Some may have ended.
    partitions: Mutex<Vec<Weak<PartitionCore>>>,
    /// Number of partitions in which requests wait.
    waiting_partitions: AtomicU64,
    holders: Holders,
    diagnosis: DiagnosisState,
    /// The origin of the limit, and the memory of the system.
    host_limit: HostLimit,
    /// The pool's entry at the socket that serves statistics.
    #[cfg(feature = "observe")]
    served_pool: std::sync::OnceLock<pinpool_observe::stats_socket::ServedPool>,
}

impl PoolCore {
    pub(crate) fn new(
        config: Config,
        memory: Memory,
        time: Timekeeper,
        log: Arc<PoolLog>,
        recorder: Option<Arc<dyn Recorder>>,
        host_limit: HostLimit,
    ) -> Arc<Self> {
        let idle_us = policy::max_buffer_idle_us(config.idle_timeout);
        let core = Arc::new(Self {
            generation: ForkGeneration::now(),
            process: std::process::id(),
            ticks: Ticks::new(memory.source()),
            idle: IdleBuffers::new(memory.arena().is_some(), config.pool_size_limit, config.auto_resize, idle_us),
            spare: SpareEntries::default(),
            lifetime: Lifetime::default(),
            classes: Classes::default(),
            memory,
            recorder,
            device_lost: OnceLock::new(),
            in_flight: InFlight::new(),
            waiters: WaitQueue::new(!cfg!(miri) && !time.is_manual()),
            time,
            // Not under Miri, which reports a thread that does not end as a leak. The wait queue starts no thread there for the
            // same reason.
            thread: (config.code_only.maintenance_thread != Some(false) && !cfg!(miri))
                .then(MaintenanceThread::of_process),
            slow_path_flag: SlowPathFlag::default(),
            wanted_of_shared_limit: Want::default(),
            making_room: Mutex::default(),
            is_closed: AtomicBool::new(false),
            shortage: Shortage::default(),
            backoff: SourceBackoff::default(),
            counters: Counters::default(),
            partitions: Mutex::default(),
            waiting_partitions: AtomicU64::new(0),
            holders: Holders::default(),
            diagnosis: DiagnosisState::default(),
            host_limit,
            #[cfg(feature = "observe")]
            served_pool: std::sync::OnceLock::new(),
            log,
            config,
        });
        core.memory().budget.set_user(Arc::<Self>::downgrade(&core));
        core.record(Event::MaxBytes { bytes: core.memory().budget.max_bytes().unwrap_or(u64::MAX) });
        if let Some(thread) = core.thread {
            thread.add(Arc::<Self>::downgrade(&core), core.memory().source().needs_gpu());
        }
        core
    }

    /// Requests ticks at `pace` from now on. Costs one load if the thread already runs that often, except for [`Pace::Copies`],
    /// which always wakes the thread.
    fn request_pace(&self, pace: Pace) {
        if let Some(thread) = self.thread {
            thread.request_pace(pace).unwrap_or_else(|error| self.log.no_maintenance_thread(&error));
        }
    }

    /// Returns the pace that is needed after memory was carved or returned.
    fn pace_of_change(&self) -> Pace {
        match self.memory.arena() {
            Some(arena) if arena.needs_compaction() => Pace::Steps,
            _ => Pace::Quiet,
        }
    }

    #[inline]
    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the name in log lines.
    pub(crate) fn name(&self) -> Option<&str> {
        self.log.name.as_deref()
    }

    /// Returns whether this process is a forked child of the process that made the pool.
    #[inline]
    pub(crate) fn is_forked(&self) -> bool {
        self.generation.is_stale()
    }

    /// Checks that this is not a forked child.
    ///
    /// # Errors
    ///
    /// Fails in a forked child of the process that made the pool.
    #[inline]
    pub(crate) fn check_process(&self) -> Result<()> {
        if self.is_forked() { Err(self.forked_error()) } else { Ok(()) }
    }

    /// Checks that the pool accepts requests.
    ///
    /// # Errors
    ///
    /// Fails in a forked child of the process that made the pool, and after [`Pool::close`](crate::Pool::close).
    pub(crate) fn check_open(&self) -> Result<()> {
        self.check_process()?;
        if self.is_closed() { Err(ErrorKind::Closed.into()) } else { Ok(()) }
    }

    fn is_closed(&self) -> bool {
        // Relaxed: `close` sets the flag, locks the queue and wakes its requests. A request that joins later locks
        // the queue after that, so it sees the flag.
        self.is_closed.load(Ordering::Relaxed)
    }

    /// Returns whether no block is kept and no request is served any more: the device was reset, or the pool is closed.
    fn has_ended(&self) -> bool {
        self.is_closed() || self.device_lost.get().is_some()
    }

    #[cold]
    fn forked_error(&self) -> Error {
        ErrorKind::Forked { parent: self.process, child: std::process::id() }.into()
    }

    #[inline]
    pub(crate) fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Returns the calling thread's shard, if this pool may use the fast path.
    pub(super) fn fast_shard(&self) -> Option<&Shard<BlockBody<Self>>> {
        // Only the slow paths zero blocks, record events and draw samples.
        let needs_slow = self.config.zero || self.recorder().is_some() || self.config.code_only.call_stacks > 0;
        if needs_slow { None } else { Some(self.idle.cache.as_ref()?.own_shard()) }
    }

    /// Returns whether the sizes of large buffers vary (policy-R12).
    pub(super) fn sizes_vary(&self) -> bool {
        self.memory.arena().is_some_and(|arena| arena.sizes_vary())
    }

    /// Returns a block over a user's memory. Such blocks are counted separately and never kept.
    pub(crate) fn adopt(self: &Arc<Self>, adopted: Adopted) -> Result<Block> {
        self.check_open()?;
        self.counters.adopted.add(1);
        let class = Class { bytes: adopted.len, index: plain_eighths_index(adopted.len) };
        Ok(self.new_block(BlockMemory::Adopted(adopted), class))
    }

    fn new_block(self: &Arc<Self>, memory: BlockMemory, class: Class) -> Block {
        self.lifetime.add_block();
        let block = Block::new(self.clone(), memory, class, &self.spare);
        self.record_new(&block);
        block
    }

    /// Releases every idle block, and begins a new window of TensorFlow's counters.
    pub(crate) fn clear(&self) {
        self.sweep_copies(QueryScope::All);
        self.retry_failures(usize::MAX);
        self.record(Event::Cleared);
        self.evict_all(self.idle.clear(), EvictionReason::Other);
        self.memory.trim(0, self, self.time.coarse_us());
        self.tear_down_if_unused();
    }

    /// Releases idle memory, oldest first, until at most `to_bytes` are held or nothing is idle.
    pub(crate) fn trim(&self, to_bytes: u64) {
        self.sweep_copies(QueryScope::All);
        self.retry_failures(usize::MAX);
        self.memory.trim(to_bytes, self, self.time.coarse_us());
        self.tear_down_if_unused();
    }

    /// Pins `bytes` and keeps them (policy-R10). The call may be slow.
    pub(crate) fn reserve(&self, bytes: u64) -> Result<()> {
        let Some(arena) = self.memory.arena().filter(|_| bytes > 0) else { return Ok(()) };
        self.add_within_limits(bytes, Purpose::Reserve, || {
            if self.config.reserve_wait { arena.reserve_now(bytes, self) } else { arena.begin_reserve(bytes, self) }
        })?;
        self.resume_reserve(false);
        Ok(())
    }

    /// Waits until the whole reserve is pinned, at most until `until`. Returns whether it is pinned.
    pub(crate) fn wait_for_reserve(&self, until: Instant) -> Result<bool> {
        let Some(arena) = self.memory.arena() else { return Ok(true) };
        let unthreaded = self.thread.is_none().then_some(self as &dyn PoolView);
        let bytes = || self.stats().memory.reserve_target_bytes;
        let refused = |error| self.refusal_error(&BlockRequest::of(bytes()), Refusal::Source(error), Purpose::Reserve);
        arena.wait_for_reserve(until, unthreaded).map_err(refused)
    }

    /// Claims `bytes` of user memory, which is memory outside buffers, under the limits. The call may be slow.
    pub(crate) fn claim_user_memory(&self, bytes: u64) -> Result<Claim> {
        let claim = self.add_within_limits(bytes, Purpose::UserMemory, || Ok(self.memory.budget.claim(bytes)?))?;
        self.counters.user_memory_bytes.add(bytes);
        Ok(claim)
    }

    /// Returns the error for a source that refused to pin `bytes` of a user's memory.
    pub(crate) fn user_memory_error(&self, bytes: u64, error: SourceError) -> Error {
        self.refusal_error(&BlockRequest::of(bytes), Refusal::Source(error), Purpose::UserMemory)
    }

    /// Releases `claim`, which makes room for waiting requests.
    pub(crate) fn end_user_memory_claim(&self, claim: Claim) {
        self.counters.user_memory_bytes.subtract(claim.bytes());
        drop(claim);
        self.on_room_made();
    }
}
