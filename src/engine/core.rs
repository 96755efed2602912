//! The order of steps: ask the rooms, each under its own lock, then make the slow calls under none.
//!
//! ```text
//!  get:  take ─hit─▶ block
//!          └─miss─▶ sweep ─landed─▶ block
//!                     └─▶ allocate ─▶ block
//!                            └─no room─▶ wait in line, sweep ─▶ again ─▶ pageable memory, or an error
//!  put:  keep ─▶ give up the victim, print the check, wake who waits
//!  copy: the block waits in the in-flight room; its put happens when a sweep sees that the copy is over
//! ```
//!
//! A sweep may ask a driver, which is slow when many threads do. So a hit does not: copies are looked for by a get that
//! needs the memory, by those in line, by whoever looks at the clock (a miss, [`Pool::poll`](crate::Pool::poll), each 62nd
//! hit of a thread) or at the figures.
//!
//! A get that misses goes on in `miss`, the end of the pool is in `ending`, what it says of itself in `report`.
//!
//! Has no arithmetic of its own: `policy` decides, `idle` keeps, `stats` counts, `supply` pins and unpins.

use std::cell::Cell;
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::block::Block;
use super::clock::Timekeeper;
use super::idle::{AdaptiveIdle, Aftermath, ExactIdle, Idle};
use super::maintenance::Upkeep;
use super::shortage::Episode;
use super::supply::{Memory, Reclaim, Supply};
use super::waiters::Queue;
use crate::backend::{HeapSource, PageTiers, Source};
use crate::budget::Budget;
use crate::config::Config;
use crate::diag::PoolLog;
use crate::error::{Error, ErrorKind, Result};
use crate::fork::ForkGeneration;
use crate::in_flight::{FenceKind, Fences, InFlight, Swept};
use crate::policy;
use crate::size_class::Class;
use crate::sync::process::{AtomicBool, AtomicU64, Ordering};

/// So many hits of a thread lie between two looks at the clock. Even, so that of pools that take turns each has its looks.
const HITS_BETWEEN_LOOKS: u32 = 62;
/// A get that needs memory waits so long for its turn to ask for copies: a driver answers in microseconds, and the thread
/// before may have lost its processor for a while; a driver that hangs must not hold up all others.
pub(super) const TURN_PATIENCE: Duration = Duration::from_millis(5);

thread_local! {
    static HITS_TO_LOOK: Cell<u32> = const { Cell::new(HITS_BETWEEN_LOOKS) };
}

/// What all handles and buffers of one pool share.
#[derive(Debug)]
pub(crate) struct Core {
    pub(super) generation: ForkGeneration,
    pub(super) process: u32,
    pub(super) config: Config,
    pub(super) idle: Idle,
    pub(crate) supply: Supply,
    /// The blocks of this pool alone, where pools share an arena; under a ceiling if this is a partition.
    pub(super) own: Arc<Budget>,
    /// Where pageable memory comes from when there is no room; `None` if that is an error.
    pub(super) stand_in: Option<HeapSource>,
    pub(super) in_flight: InFlight<Block>,
    pub(super) queue: Queue,
    pub(super) time: Timekeeper,
    pub(super) upkeep: Upkeep,
    pub(super) episode: Episode,
    pub(crate) log: Arc<PoolLog>,
    pub(super) counts: Counts,
}

/// What only the conductor sees.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) failed_gets: AtomicU64,
    pub(super) fallbacks: AtomicU64,
    pub(super) fallbacks_put: AtomicU64,
    pub(super) lost: AtomicU64,
    pub(super) lost_bytes: AtomicU64,
    pub(super) closed: AtomicBool,
}

impl Core {
    pub(crate) fn new(
        config: Config,
        supply: Supply,
        own: Arc<Budget>,
        stand_in: Option<HeapSource>,
        time: Timekeeper,
        log: Arc<PoolLog>,
    ) -> Arc<Self> {
        let (limit, auto_resize) = (config.pool_size_limit, config.auto_resize);
        let idle = match &supply {
            Supply::Direct(_) => Idle::Exact(ExactIdle::new(limit, auto_resize)),
            Supply::Shared(_) => Idle::Adaptive(AdaptiveIdle::new(limit, auto_resize)),
        };
        let core = Arc::new(Self {
            generation: ForkGeneration::now(),
            process: std::process::id(),
            idle,
            supply,
            own,
            stand_in,
            in_flight: InFlight::new(),
            queue: Queue::default(),
            time,
            upkeep: Upkeep::new(&config.pressure),
            episode: Episode::default(),
            log,
            counts: Counts::default(),
            config,
        });
        if let Supply::Shared(ground) = &core.supply {
            let tenant: Weak<Self> = Arc::downgrade(&core);
            ground.join(tenant);
        }
        core
    }

    /// Is it a pool that shares another's memory, under a ceiling of its own?
    pub(crate) fn is_partition(&self) -> bool {
        self.own.max_bytes().is_some()
    }

    #[inline]
    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    /// Is this a child of the process that made the pool?
    #[inline]
    pub(crate) fn is_forked(&self) -> bool {
        self.generation.is_stale()
    }

    /// The error that it is, in a child.
    #[inline]
    pub(crate) fn check_process(&self) -> Result<()> {
        if self.is_forked() { Err(self.forked()) } else { Ok(()) }
    }

    #[cold]
    pub(super) fn forked(&self) -> Error {
        ErrorKind::Forked { parent: self.process, child: std::process::id() }.into()
    }

    pub(crate) fn is_pinned(&self) -> bool {
        self.source().is_pinned()
    }

    pub(crate) fn numa_node(&self) -> Option<u32> {
        self.source().numa_node()
    }

    pub(crate) fn page_tiers(&self) -> Option<PageTiers> {
        match &self.supply {
            Supply::Direct(_) => None,
            Supply::Shared(ground) => Some(ground.page_tiers()),
        }
    }

    pub(super) fn source(&self) -> &dyn Source {
        match &self.supply {
            Supply::Direct(direct) => &**direct.source(),
            Supply::Shared(ground) => &**ground.source(),
        }
    }

    /// A block of `class`, idle or new; `len` is what the user asked for.
    #[inline]
    pub(crate) fn get(self: &Arc<Self>, len: usize, class: Class, wait: Duration) -> Result<Block> {
        match self.take_idle(class) {
            Some(block) => Ok(block),
            None => self.miss(len, class, wait),
        }
    }

    /// An idle block of `class`, or one whose copy is over; never asks the back-end, never waits.
    pub(crate) fn try_get(&self, class: Class) -> Option<Block> {
        self.take_idle(class).or_else(|| self.take_landed(class, Duration::ZERO))
    }

    /// A block of `class` whose copy is over, though nobody looked since.
    pub(super) fn take_landed(&self, class: Class, patience: Duration) -> Option<Block> {
        while self.in_flight.count() > 0 {
            let swept = self.in_flight.sweep_until(patience, |block| block.class() == class);
            let nothing_landed = swept.completed.is_empty();
            self.land(swept);
            // Another thread may have been quicker to take it; then there may be more.
            let block = self.idle.take(class);
            if block.is_some() || nothing_landed {
                return block;
            }
        }
        None
    }

    #[inline]
    fn take_idle(&self, class: Class) -> Option<Block> {
        let block = self.idle.take(class)?;
        self.look_at_the_clock_now_and_then();
        Some(block)
    }

    #[inline]
    fn look_at_the_clock_now_and_then(&self) {
        // A thread that is ending has no count left, and no need of one.
        let _ = HITS_TO_LOOK.try_with(|hits| match hits.get().checked_sub(1) {
            Some(left) => hits.set(left),
            None => {
                hits.set(HITS_BETWEEN_LOOKS);
                self.poll();
            }
        });
    }

    /// The user is done with `block`, and so is every device. The caller keeps a reference to this pool until it returns.
    #[inline]
    pub(crate) fn put(&self, block: Block) {
        self.put_home(block);
    }

    /// The user is done with `block`; devices may be reading it until all `fences` are over.
    pub(crate) fn put_after(&self, block: Block, fences: Fences) {
        let bytes = block.held_bytes();
        self.in_flight.insert(block, bytes, fences, self.time.now_us());
        self.close_if_unused();
    }

    /// Nobody will ever know when the device is done with `block`: it is never used again.
    pub(crate) fn leak(&self, block: Block, error: &Error) {
        let held_bytes = block.held_bytes();
        // The memory stays as it is, and with it the pool that it belongs to.
        std::mem::forget(block);
        if let Supply::Shared(ground) = &self.supply {
            ground.copy_lost();
        }
        let lost = self.counts.lost.fetch_add(1, Ordering::Relaxed) + 1;
        self.counts.lost_bytes.fetch_add(held_bytes, Ordering::Relaxed);
        let keeps_all = matches!(self.supply, Supply::Shared(_)) && self.source().release_waits();
        self.log.completion_unknown(held_bytes, lost, keeps_all, error);
        self.close_if_unused();
    }

    /// Puts back what devices have finished with, and looks after time.
    pub(crate) fn poll(&self) {
        self.land_copies();
        self.look_after();
    }

    pub(super) fn fence_kind(&self) -> FenceKind {
        match self.config.fence {
            // One thread at a time asks, and an event is the cheaper one to set. Where many threads come to ask, each
            // question would be one to a busy driver.
            FenceKind::Auto if self.in_flight.is_contended() => FenceKind::Timeline,
            FenceKind::Auto => FenceKind::Event,
            chosen => chosen,
        }
    }

    /// Puts back all that devices have finished with. Costs one load when nothing is in flight.
    pub(super) fn land_copies(&self) {
        if self.in_flight.count() > 0 {
            self.land(self.in_flight.sweep());
        }
    }

    pub(super) fn land(&self, swept: Swept<Block>) {
        swept.completed.into_iter().for_each(|block| self.put_home(block));
        swept.lost.into_iter().for_each(|(block, error)| self.leak(block, &error));
    }

    /// A copy of a block is about to be enqueued: waits while memory goes back to a driver that waits for copies.
    #[inline]
    pub(super) fn begin_copy(&self) {
        if let Supply::Shared(ground) = &self.supply {
            ground.begin_copy();
        }
    }

    /// So many copies of one block are over.
    pub(super) fn end_copies(&self, copies: u64) {
        if let Supply::Shared(ground) = &self.supply {
            ground.end_copies(copies);
        }
    }

    #[inline]
    fn put_home(&self, block: Block) {
        block.end_copies();
        if !block.is_from_source() {
            self.put_stand_in(block);
            return;
        }
        let Aftermath { victim, unkept, check } = self.idle.put(block, self.time.coarse_us());
        if victim.is_some() || unkept.is_some() || check.is_some() {
            self.clean_up(victim, unkept, check);
        }
        if self.idle.was_sealed_meanwhile() {
            self.close_if_unused();
        }
        if self.queue.is_waiting() {
            self.queue.wake();
        }
    }

    #[cold]
    fn clean_up(&self, victim: Option<Block>, unkept: Option<Block>, check: Option<policy::Check>) {
        let sealed = unkept.is_some();
        victim.into_iter().chain(unkept).for_each(|block| self.give_up(block));
        if let Some(check) = check {
            self.log.checked(check);
        }
        if sealed {
            self.close_if_unused();
        }
    }

    #[cold]
    fn put_stand_in(&self, block: Block) {
        self.counts.fallbacks_put.fetch_add(1, Ordering::Relaxed);
        self.give_up(block);
        self.close_if_unused();
    }

    /// Memory leaves the pool: to the arena, or to the system. A slow call.
    #[allow(unsafe_code)] // Gives back the memory that stood in.
    pub(super) fn give_up(&self, block: Block) {
        // The block's own reference to this pool goes last.
        let (core, memory) = block.into_parts();
        let failed = match (memory, &core.supply) {
            (Memory::Carved { place, bytes, claim, .. }, Supply::Shared(ground)) => {
                self.log.release_error(ground.give(place, bytes, core.time.coarse_us()));
                drop(claim);
                Ok(())
            }
            (Memory::Whole { region, claim }, Supply::Direct(direct)) => direct.release(region, claim),
            (Memory::Pageable { region }, _) => match &core.stand_in {
                // SAFETY: the region came from this stand-in, and its block was given up by value: nobody has it.
                Some(stand_in) => unsafe { stand_in.release(region) }.map_err(|error| (0, error)),
                None => Ok(()),
            },
            // A block is made by the supply of its own pool.
            (Memory::Carved { .. } | Memory::Whole { .. }, _) => Ok(()),
        };
        if let Err((held_bytes, error)) = failed {
            self.log.release_failed(held_bytes, &error);
        }
    }

    /// Releases every idle block and begins a new window.
    pub(crate) fn clear(&self) {
        self.land_copies();
        self.idle.clear().into_iter().for_each(|block| self.give_up(block));
        self.trim_ground(0);
    }

    /// Gives idle memory back, oldest first, until at most `to_bytes` are held or nothing is idle.
    pub(crate) fn trim(&self, to_bytes: u64) {
        self.land_copies();
        self.trim_ground(to_bytes);
        while self.holding().held_bytes > to_bytes && self.give_back_oldest() {
            self.trim_ground(to_bytes);
        }
    }

    fn trim_ground(&self, to_bytes: u64) {
        if let Supply::Shared(ground) = &self.supply {
            self.log.release_error(ground.release_down_to(to_bytes, self.time.coarse_us()));
        }
    }
}
