//! The order of steps: ask the rooms, each under its own lock, then make the slow calls under none.
//!
//! ```text
//!  get:  sweep ─▶ take ─hit─▶ block
//!                   └─miss─▶ allocate ─▶ block
//!                               └─no room─▶ wait in line ─▶ again ─▶ pageable memory, or an error
//!  put:  sweep ─▶ keep ─▶ give up the victim, print the check, wake who waits
//!  copy: the block waits in the in-flight room; its put happens when a sweep sees that the copy is over
//! ```
//!
//! Has no arithmetic of its own: `policy` decides, `idle` keeps, `stats` counts, `supply` pins and unpins.

use std::cell::Cell;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use super::block::Block;
use super::clock::Timekeeper;
use super::episode::Episode;
use super::idle::{Aftermath, ExactIdle, Idle, ThreadsIdle};
use super::queue::Queue;
use super::supply::{Acquired, Borrower, Holding, Memory, Refusal, Supply};
use super::upkeep::{Upkeep, told};
use crate::backend::{HeapSource, PageTiers, Source};
use crate::budget::{Budget, Claim};
use crate::config::{Config, FenceKind};
use crate::diag::{self, Voice};
use crate::error::{Error, Holdings, Kind, Result};
use crate::fork::Born;
use crate::in_flight::{InFlight, SharedFence, Swept};
use crate::policy;
use crate::size_class::Class;
use crate::stats::Stats;
use crate::sync::process::{AtomicBool, AtomicU64, Ordering, fence};

/// So many hits of a thread lie between two looks at the clock. Even, so that of pools that take turns each has its looks.
const HITS_BETWEEN_LOOKS: u32 = 62;
/// As long as a wait gets.
const LONGEST_WAIT: Duration = Duration::from_secs(1 << 30);
/// So long a get in line sleeps at most while copies are in flight, whose end nobody announces.
const IN_FLIGHT_PATIENCE: Duration = Duration::from_micros(500);
/// And else: room may also come from other pools and processes.
const PATIENCE: Duration = Duration::from_millis(5);

thread_local! {
    static HITS_TO_LOOK: Cell<u32> = const { Cell::new(HITS_BETWEEN_LOOKS) };
}

/// What all handles and buffers of one pool share.
#[derive(Debug)]
pub(crate) struct Core {
    born: Born,
    process: u32,
    pub(super) config: Config,
    pub(super) idle: Idle,
    pub(super) supply: Supply,
    /// The blocks of this pool alone, where pools share an arena; under a ceiling if this is a partition.
    own: Arc<Budget>,
    /// Where pageable memory comes from when there is no room; `None` if that is an error.
    pub(super) stand_in: Option<HeapSource>,
    pub(super) in_flight: InFlight<Block>,
    queue: Queue,
    pub(super) time: Timekeeper,
    pub(super) upkeep: Upkeep,
    pub(super) episode: Episode,
    pub(super) voice: Voice,
    counts: Counts,
}

/// What only the conductor sees.
#[derive(Debug, Default)]
pub(super) struct Counts {
    failed_gets: AtomicU64,
    fallbacks: AtomicU64,
    fallbacks_put: AtomicU64,
    lost: AtomicU64,
    lost_bytes: AtomicU64,
    closed: AtomicBool,
}

impl Core {
    pub(super) fn new(
        config: Config,
        supply: Supply,
        own: Arc<Budget>,
        stand_in: Option<HeapSource>,
        time: Timekeeper,
        voice: Voice,
    ) -> Arc<Self> {
        let (limit, auto_resize) = (config.pool_size_limit, config.auto_resize);
        let idle = match &supply {
            Supply::Direct(_) => Idle::Exact(ExactIdle::new(limit, auto_resize)),
            Supply::Ground(_) => Idle::Threads(ThreadsIdle::new(limit, auto_resize)),
        };
        let core = Arc::new(Self {
            born: Born::now(),
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
            voice,
            counts: Counts::default(),
            config,
        });
        if let Supply::Ground(ground) = &core.supply {
            let tenant: Weak<Self> = Arc::downgrade(&core);
            ground.join(tenant);
        }
        core
    }

    /// Is it a pool that shares another's memory, under a ceiling of its own?
    pub(super) fn is_partition(&self) -> bool {
        self.own.max_bytes().is_some()
    }

    #[inline]
    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    /// Is this a child of the process that made the pool?
    #[inline]
    pub(crate) fn is_forked(&self) -> bool {
        self.born.before_fork()
    }

    /// The error that it is, in a child.
    #[inline]
    pub(crate) fn check_process(&self) -> Result<()> {
        if self.is_forked() { Err(self.forked()) } else { Ok(()) }
    }

    #[cold]
    fn forked(&self) -> Error {
        Kind::Forked { parent: self.process, child: std::process::id() }.into()
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
            Supply::Ground(ground) => Some(ground.page_tiers()),
        }
    }

    fn source(&self) -> &dyn Source {
        match &self.supply {
            Supply::Direct(direct) => &**direct.source(),
            Supply::Ground(ground) => &**ground.source(),
        }
    }

    /// A block of `class`, idle or new; `len` is what the user asked for.
    #[inline]
    pub(crate) fn get(self: &Arc<Self>, len: usize, class: Class, wait: Duration) -> Result<Block> {
        self.land_copies();
        match self.take_idle(class) {
            Some(block) => Ok(block),
            None => self.miss(len, class, wait),
        }
    }

    /// An idle block of `class`; never asks the back-end, never waits.
    pub(crate) fn try_get(&self, class: Class) -> Option<Block> {
        self.land_copies();
        self.take_idle(class)
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
                self.look_after();
            }
        });
    }

    #[cold]
    fn miss(self: &Arc<Self>, len: usize, class: Class, wait: Duration) -> Result<Block> {
        let now_us = self.look_after();
        if let Idle::Threads(idle) = &self.idle {
            idle.missed(now_us);
        }
        // Those in line come first.
        let refusal = if self.queue.is_waiting() {
            Refusal::Ceiling { needed_bytes: class.bytes as u64 }
        } else {
            match self.allocate(class) {
                Ok(block) => {
                    self.episode.over(now_us);
                    return Ok(block);
                }
                Err(refusal) => refusal,
            }
        };
        self.without_room(len, class, wait, refusal)
    }

    /// The rest of the ladder: wait in line, then pageable memory or an error.
    fn without_room(self: &Arc<Self>, len: usize, class: Class, wait: Duration, mut refusal: Refusal) -> Result<Block> {
        let could_hold = self.could_hold(class);
        // A request that can never be served is no want of room, unless it is served otherwise.
        if could_hold || self.stand_in.is_some() {
            self.begin_episode(len, &refusal);
        }
        if could_hold && !wait.is_zero() {
            let deadline = Instant::now() + wait.min(LONGEST_WAIT);
            let patience = || if self.in_flight.count() > 0 { IN_FLIGHT_PATIENCE } else { PATIENCE };
            let served = self.queue.wait(deadline, patience, || {
                self.land_copies();
                self.idle.take(class).or_else(|| self.allocate(class).map_err(|later| refusal = later).ok())
            });
            if let Some(block) = served {
                return Ok(block);
            }
        }
        if let Some(block) = self.stand_in(class) {
            // Relaxed, here and below: counts on their own.
            self.counts.fallbacks.fetch_add(1, Ordering::Relaxed);
            self.episode.fell_back();
            return Ok(block);
        }
        self.counts.failed_gets.fetch_add(1, Ordering::Relaxed);
        Err(self.refused(len, refusal))
    }

    fn begin_episode(&self, len: usize, refusal: &Refusal) {
        let why = || match refusal {
            Refusal::Ceiling { .. } => ("the ceiling is reached".to_owned(), self.holdings()),
            Refusal::Source(error) => (error.to_string(), self.holdings()),
        };
        self.episode.begun(len as u64, self.time.coarse_us(), why);
    }

    fn stand_in(self: &Arc<Self>, class: Class) -> Option<Block> {
        let region = self.stand_in.as_ref()?.acquire(class.bytes).ok()?;
        Some(Block::new(self.clone(), Memory::Pageable { region }, class))
    }

    /// Could a block of `class` ever exist under the ceilings?
    fn could_hold(&self, class: Class) -> bool {
        self.could_own(class.bytes as u64)
            && match &self.supply {
                Supply::Direct(direct) => direct.could_hold(class.bytes),
                Supply::Ground(ground) => ground.could_hold(class.bytes as u64),
            }
    }

    fn could_own(&self, bytes: u64) -> bool {
        self.own.max_bytes().is_none_or(|max_bytes| bytes <= max_bytes)
    }

    fn allocate(self: &Arc<Self>, class: Class) -> Result<Block, Refusal> {
        let memory = match &self.supply {
            Supply::Direct(direct) => loop {
                // Since the last look a put may have come.
                if let Some(block) = self.idle.take(class) {
                    return Ok(block);
                }
                match direct.acquire(class.bytes) {
                    // What could never fit is no reason to empty the pool.
                    Err(Refusal::Ceiling { .. }) if direct.could_hold(class.bytes) && self.give_back_oldest() => {}
                    acquired => break acquired?,
                }
            },
            Supply::Ground(ground) => {
                let own = self.claim_own(class.bytes as u64)?;
                let mut memory = match ground.acquire(class, self.time.coarse_us(), &**self)? {
                    Acquired::New(memory) => memory,
                    Acquired::CameBack(block) => return Ok(block),
                };
                if let Memory::Carved { claim, .. } = &mut memory {
                    *claim = Some(own);
                }
                memory
            }
        };
        self.idle.count_allocated();
        Ok(Block::new(self.clone(), memory, class))
    }

    /// A partition's own ceiling: idle buffers of its own make way.
    fn claim_own(&self, bytes: u64) -> Result<Claim, Refusal> {
        let refusal = Refusal::Ceiling { needed_bytes: bytes };
        if !self.could_own(bytes) {
            return Err(refusal);
        }
        loop {
            match self.own.claim(bytes) {
                Some(claim) => return Ok(claim),
                None if self.give_back_oldest() => {}
                None => return Err(refusal),
            }
        }
    }

    /// The user is done with `block`, and so is every device. The caller keeps a reference to this pool until it returns.
    #[inline]
    pub(crate) fn put(&self, block: Block) {
        self.land_copies();
        self.put_home(block);
    }

    /// The user is done with `block`; devices may be reading it until all `fences` are over.
    pub(crate) fn put_after(&self, block: Block, fences: Vec<SharedFence>) {
        let bytes = block.held_bytes();
        self.in_flight.arrive(block, bytes, fences, self.time.now_us());
        // No sweep: what was just enqueued is not over, and the next get or put asks.
        self.close_if_unused();
    }

    /// Nobody will ever know when the device is done with `block`: it is never used again.
    pub(crate) fn lose(&self, block: Block, error: &Error) {
        let held_bytes = block.held_bytes();
        // The memory stays as it is, and with it the pool that it belongs to.
        std::mem::forget(block);
        self.counts.lost.fetch_add(1, Ordering::Relaxed);
        self.counts.lost_bytes.fetch_add(held_bytes, Ordering::Relaxed);
        diag::completion_unknown(held_bytes, error);
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
            FenceKind::Auto if self.in_flight.is_crowded() => FenceKind::Timeline,
            FenceKind::Auto => FenceKind::Event,
            chosen => chosen,
        }
    }

    /// Costs one load when nothing is in flight.
    #[inline]
    fn land_copies(&self) {
        if self.in_flight.count() > 0 {
            self.land(self.in_flight.sweep());
        }
    }

    fn land(&self, swept: Swept<Block>) {
        swept.landed.into_iter().for_each(|block| self.put_home(block));
        swept.lost.into_iter().for_each(|(block, error)| self.lose(block, &error));
    }

    /// A copy of a block is about to be enqueued: waits while memory goes back to a driver that waits for copies.
    #[inline]
    pub(super) fn board(&self) {
        if let Supply::Ground(ground) = &self.supply {
            ground.board();
        }
    }

    /// So many copies of one block are over.
    pub(super) fn disembark(&self, copies: u64) {
        if let Supply::Ground(ground) = &self.supply {
            ground.disembark(copies);
        }
    }

    #[inline]
    fn put_home(&self, block: Block) {
        block.disembark();
        if !block.is_from_source() {
            self.put_stand_in(block);
            return;
        }
        let Aftermath { victim, unkept, check } = self.idle.put(block, self.time.coarse_us());
        if victim.is_some() || unkept.is_some() || check.is_some() {
            self.clean_up(victim, unkept, check);
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
            self.voice.checked(check);
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
            (Memory::Carved { place, bytes, claim, .. }, Supply::Ground(ground)) => {
                told(ground.give(place, bytes, core.time.coarse_us()));
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
            diag::release_failed(held_bytes, &error);
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
        if let Supply::Ground(ground) = &self.supply {
            told(ground.release_down_to(to_bytes, self.time.coarse_us()));
        }
    }

    /// No handle is left. What is idle goes now; what is in use goes when it comes back.
    pub(crate) fn seal(&self) {
        let idle = self.idle.seal();
        // Where a release waits for the device, it would wait for a stuck copy for ever: those in flight come first.
        if self.source().release_waits() {
            self.await_copies();
        }
        idle.into_iter().for_each(|block| self.give_up(block));
        self.close_if_unused();
    }

    fn close_if_unused(&self) {
        if !self.idle.is_sealed() {
            return;
        }
        // SeqCst: of two last puts at once, each counted before this line, one at least sees both.
        fence(Ordering::SeqCst);
        // In flight is no use: those copies are what `close` waits for.
        let handed_out = self.handed_out();
        // AcqRel: one closes, and sees all that was put before.
        if handed_out <= self.in_flight.count() && !self.counts.closed.swap(true, Ordering::AcqRel) {
            self.close();
        }
    }

    fn handed_out(&self) -> u64 {
        let total = self.idle.figures().total;
        let [fallbacks, fallbacks_put, lost] = [&self.counts.fallbacks, &self.counts.fallbacks_put, &self.counts.lost]
            .map(|count| count.load(Ordering::Relaxed));
        // While other threads run, a get may be counted here whose put is not, and the other way round.
        (total.gets() + fallbacks).saturating_sub(total.put + fallbacks_put + lost)
    }

    /// Waits until nothing is in flight, at most as long as configured.
    fn await_copies(&self) {
        let begun = Instant::now();
        // Short copies are over at once; a stuck one is not worth a busy processor.
        let mut pause = Duration::from_micros(20);
        while self.in_flight.count() > 0 {
            self.land(self.in_flight.sweep());
            if begun.elapsed() >= self.config.close_wait {
                return;
            }
            thread::sleep(pause.min(self.config.close_wait));
            pause = (pause * 2).min(Duration::from_millis(10));
        }
    }

    /// Ends the pool: waits for the copies in flight, and leaves alone what does not end.
    fn close(&self) {
        let begun = Instant::now();
        self.await_copies();
        let (copies, bytes) = (self.in_flight.count(), self.in_flight.bytes());
        let abandoned = self.in_flight.abandon();
        if !abandoned.is_empty() {
            diag::closed_in_flight(copies, bytes, begun.elapsed());
        }
        // Where a release waits for the device, it would wait for a stuck copy for ever.
        let may_leave = abandoned.is_empty() || !self.source().release_waits();
        // Nothing is freed on a guess.
        abandoned.into_iter().for_each(std::mem::forget);
        if let Supply::Ground(ground) = &self.supply
            && may_leave
        {
            told(ground.leave(self, self.time.coarse_us()));
        }
    }

    pub(super) fn refused(&self, len: usize, refusal: Refusal) -> Error {
        let asked_bytes = len as u64;
        let holdings = self.holdings();
        match refusal {
            Refusal::Ceiling { needed_bytes } => {
                Kind::Limit { asked_bytes, needed_bytes, holdings, remedy: self.remedy(needed_bytes) }.into()
            }
            Refusal::Source(source) => {
                Kind::Backend { backend: self.source().name(), asked_bytes, holdings, source }.into()
            }
        }
    }

    /// What stands in the way of `needed_bytes`, and what to change.
    fn remedy(&self, needed_bytes: u64) -> &'static str {
        if !self.could_own(needed_bytes) {
            return "this partition can never hold that much: give it more";
        }
        match &self.supply {
            Supply::Ground(ground) if !ground.may_grow() => {
                "the reserve is all there is (PINPOOL_GROWTH=0): put buffers back first or raise PINPOOL_RESERVE"
            }
            Supply::Ground(ground) if !ground.could_hold(needed_bytes) => {
                "it has no room for that even when empty: ask for less or raise PINPOOL_MAX_BYTES"
            }
            _ => "put buffers back first or raise PINPOOL_MAX_BYTES",
        }
    }

    pub(super) fn holdings(&self) -> Holdings {
        let stats = self.stats();
        Holdings {
            held_bytes: stats.pinned_bytes,
            in_use_bytes: stats.in_use_bytes,
            idle_bytes: stats.idle_bytes,
            in_flight_bytes: stats.in_flight_bytes,
            max_bytes: stats.max_bytes,
        }
    }

    pub(super) fn holding(&self) -> Holding {
        match &self.supply {
            Supply::Direct(direct) => direct.holding(),
            Supply::Ground(ground) => ground.holding(),
        }
    }

    pub(crate) fn stats(&self) -> Stats {
        let (preset, backend, is_pinned) = (self.config.preset.name(), self.source().name(), self.is_pinned());
        if self.is_forked() {
            return Stats { preset, backend, is_pinned, ..Stats::default() };
        }
        let (figures, holding) = (self.idle.figures(), self.holding());
        let own_bytes = match &self.supply {
            Supply::Direct(_) => holding.block_bytes,
            Supply::Ground(_) => self.own.held_bytes(),
        };
        let partition_bytes = holding.block_bytes.saturating_sub(own_bytes);
        // A partition sees what is its own; what lies free belongs to all.
        let (holding, partition_bytes) =
            if self.is_partition() { (holding.of(&self.own), 0) } else { (holding, partition_bytes) };
        let (in_flight, in_flight_bytes) = (self.in_flight.count(), self.in_flight.bytes());
        let (lost, lost_bytes) =
            (self.counts.lost.load(Ordering::Relaxed), self.counts.lost_bytes.load(Ordering::Relaxed));
        let oldest = self.in_flight.oldest(self.time.now_us());
        let handed_out = self.handed_out();
        let fallbacks = self.counts.fallbacks.load(Ordering::Relaxed);
        Stats {
            preset,
            backend,
            is_pinned,
            pool_size_limit: figures.limit,
            window: figures.window,
            gets: figures.total.gets() + fallbacks,
            hits: figures.total.get_from_pool,
            misses: figures.total.allocated + fallbacks,
            failed_gets: self.counts.failed_gets.load(Ordering::Relaxed),
            waits: self.queue.stood(),
            fallbacks,
            puts: figures.total.put + self.counts.fallbacks_put.load(Ordering::Relaxed),
            evicted: figures.total.evicted,
            reclaimed: figures.reclaimed,
            aged: figures.aged,
            checks: figures.checks,
            raises: figures.raises,
            lowers: figures.lowers,
            buffers_in_pool: figures.buffers,
            idle_bytes: figures.bytes,
            // Copies land between the readings while other threads run; at rest the differences are exact.
            in_use: handed_out.saturating_sub(in_flight),
            in_use_bytes: own_bytes.saturating_sub(figures.bytes + in_flight_bytes + lost_bytes),
            in_flight,
            in_flight_bytes,
            oldest_in_flight: oldest.map(|waiting| waiting.age),
            oldest_in_flight_stream: oldest.map(|waiting| waiting.stream),
            lost,
            lost_bytes: lost_bytes + holding.stuck_bytes,
            partition_bytes,
            arena_free_bytes: holding.free_bytes,
            arena_transit_bytes: holding.transit_bytes,
            awaiting_release_bytes: holding.awaiting_release_bytes,
            drains: holding.drains,
            reserve_bytes: holding.reserve_bytes,
            moves: holding.moves,
            pinned_bytes: holding.held_bytes,
            peak_pinned_bytes: holding.peak_bytes,
            max_bytes: holding.max_bytes,
            underlying: holding.calls,
        }
    }
}

impl Borrower for Core {
    fn idle_bytes(&self) -> u64 {
        self.idle.bytes()
    }

    fn give_back_oldest(&self) -> bool {
        self.idle.reclaim().map(|block| self.give_up(block)).is_some()
    }

    fn take_back(&self, class: Class) -> Option<Block> {
        self.idle.take(class)
    }

    fn land_copies(&self) {
        Self::land_copies(self);
    }

    fn grow_old(&self, now_us: u64) {
        self.age(now_us);
    }
}
