//! Returns of blocks by users and after completed copies, evictions, blocks that are never reused, and the end of a pool. A
//! pool ends after its last handle is dropped and its last block outside a copy is returned.

use std::thread;
use std::time::{Duration, Instant};

use super::fast_path::BorrowedReference;
use super::{Block, PoolCore};
use crate::backend::BuiltInSource;
use crate::copy::CopyEndListener;
use crate::engine::block::BlockBody;
use crate::engine::cache::{Eviction, Victims};
use crate::error::Error;
use crate::in_flight::{FailedItem, Fences, FinalSweep, QueryScope, SweepResult};
use crate::maintenance_thread::Pace;
use crate::policy;
use crate::stats::EvictionReason;
use pinpool_observe::record::Event;
use pinpool_os::leaked;
use pinpool_os::sync::unmodeled::{Ordering, fence};

/// How long an ending pool waits for its copies: longer than any working copy takes, and shorter than a person waits
/// for a process to end.
const END_WAIT: Duration = Duration::from_secs(30);

/// After [`END_WAIT`], the longest time without a completed copy before the remaining copies count as stuck.
const BETWEEN_COPIES: Duration = Duration::from_secs(1);

impl CopyEndListener for PoolCore {
    fn on_copy_ended(&self) {
        if !self.is_forked() {
            self.sweep_copies(QueryScope::Undecided);
        }
    }
}

impl Block {
    /// Puts the buffer back with all checks. Devices may use it until the copies recorded on it have completed. In a forked child
    /// the block leaks.
    #[inline(never)]
    pub(super) fn put_slow(mut self) {
        if self.is_forked() {
            return std::mem::forget(self);
        }
        let core = BorrowedReference::take(&self);
        let fences = self.copy_fences_mut();
        if !fences.is_empty() {
            let fences = fences.take();
            return core.put_after(self, fences);
        }
        core.record_put(&self, false);
        // Under `PINPOOL_ZERO` the block waits for a sweep, so that the maintenance thread zeroes it instead of its user. Other
        // memory is never kept, so it does not wait.
        if core.config.zero && core.thread.is_some() && self.memory().is_from_source() {
            core.begin_flight(self, Fences::new());
        } else {
            core.finish_put(self);
        }
    }
}

impl PoolCore {
    /// Puts `block` back for its user. Devices may use it until all `fences` have completed.
    pub(in crate::engine) fn put_after(&self, block: Block, fences: Fences) {
        self.record_put(&block, true);
        self.begin_flight(block, fences);
    }

    /// Keeps `block` in flight until a sweep finds that `fences` have completed.
    fn begin_flight(&self, mut block: Block, fences: Fences) {
        let bytes = block.memory().held_bytes();
        let now_us = self.tick_if_overdue();
        self.end_use(&mut block, || now_us);
        block.start_timing(now_us);
        self.in_flight.insert(block, bytes, fences, now_us);
        self.announce_copy();
        self.request_pace(self.pace_of_copies());
        self.tear_down_if_unused();
    }

    /// Records how long the user had `block`, if the start time is known.
    pub(super) fn end_use(&self, block: &mut Block, now_us: impl FnOnce() -> u64) {
        if let Some(since_us) = block.stop_timing() {
            self.counters.uses.record_us(since_us, now_us());
        }
    }

    /// Finishes the return of `block`, which nothing uses any more: the block serves a waiting request, becomes idle, or leaves
    /// the pool.
    pub(super) fn finish_put(&self, mut block: Block) {
        self.end_use(&mut block, || self.time.read_us());
        block.end_holding();
        // The claim ends last, so that requests that wait for memory of the pool come before the next request of the partition.
        let _claim = block.take_claim();
        if self.config.zero && block.memory().adopted().is_none() {
            // If the device was reset, the memory may no longer be mapped.
            self.watch_device();
            if !self.has_ended() {
                self.memory.source().while_mapped(&mut || block.zero());
            }
        }
        if !block.memory().is_from_source() {
            return self.put_not_reusable(block);
        }
        block.make_fast_path(self.generation.number());
        if self.has_waiters() {
            self.mark_return_during_wait();
            self.waiters.end_overtaking(block.overtaken_head(), self.memory.supply.bytes_to_overtake(block.class()));
        }
        let Some(block) = self.give_block_for_others(block).and_then(|block| self.offer_to_head(block)) else {
            return;
        };
        let class = block.class();
        if policy::goes_to_arena(block.class_bytes(), || self.sizes_vary()) {
            // In the arena the memory merges with adjacent free memory (policy-R3).
            self.idle.count_put();
            self.evict(block, EvictionReason::Other);
            self.request_pace(self.pace_of_change());
        } else {
            let evicted = self.idle.put(block.into_entry(), class);
            if evicted.is_none() {
                return self.wake_waiters();
            }
            self.evict_over_limit(evicted);
        }
        self.enforce_max_idle_bytes();
        self.tear_down_if_unused();
        self.wake_waiters();
    }

    /// Announces that a copy has begun. Threads that wait for memory, here or in a partition, query the copies immediately and at
    /// short intervals from now on, since the end of the copy wakes no request.
    fn announce_copy(&self) {
        // Pairs with the fence in `longest_sleep`.
        fence(Ordering::SeqCst);
        self.wake_waiters();
        self.wake_partitions();
    }

    pub(in crate::engine) fn has_waiters(&self) -> bool {
        self.waiters.has_waiters()
    }

    /// Wakes the head of the queue, if a request waits. Called after a return, because a request that joined the queue
    /// meanwhile may have searched before the buffer was idle.
    pub(in crate::engine) fn wake_waiters(&self) {
        if self.has_waiters() {
            self.waiters.wake_head();
        }
    }

    /// Finishes the return of a block that is never reused: pageable memory, or a user's memory.
    #[cold]
    fn put_not_reusable(&self, block: Block) {
        if block.memory().adopted().is_some() {
            self.counters.adopted.subtract(1);
        } else {
            self.counters.pageable_returns.add(1);
        }
        self.give_block(block);
        self.tear_down_if_unused();
        self.wake_waiters();
    }

    /// Finishes the returns of blocks with completed copies, except blocks of a stream that another thread is querying. Costs
    /// one load while nothing is in flight.
    pub(super) fn sweep_copies(&self, scope: QueryScope) {
        if self.in_flight.count() > 0 {
            self.complete(self.in_flight.sweep(scope));
        }
    }

    /// Finishes the returns of blocks with copies that are complete according to their timelines. Uses only loads. Does
    /// nothing without an arena, since an eviction would then call the backend. With an arena, a return calls the backend only if
    /// a limit is exceeded, if other members of a shared limit want memory, or to check the device under `PINPOOL_ZERO`.
    pub(crate) fn sweep_by_loads(&self) {
        if self.memory.arena().is_some() {
            self.sweep_copies(QueryScope::LoadsOnly);
        }
    }

    pub(super) fn complete(&self, SweepResult { mut completed, failed }: SweepResult<Block>) {
        if completed.is_empty() && failed.is_empty() {
            return;
        }
        self.end_flights(&mut completed);
        for block in completed {
            self.record_of(&block, |id| Event::Completed { id });
            self.finish_put(block);
        }
        for FailedItem { item, error, fences } in failed {
            self.quarantine_or_leak(item, fences, &error);
        }
    }

    /// Records how long each of `blocks`, which have completed their copies, was in flight.
    fn end_flights(&self, blocks: &mut [Block]) {
        let now_us = self.time.read_us();
        let begun = blocks.iter_mut().filter_map(Block::stop_timing);
        begun.for_each(|since_us| self.counters.flights.record_us(since_us, now_us));
    }

    /// Quarantines `block` until `fences` report that its copies have completed. Leaks it if there are no fences, or if the
    /// pool has ended (core-I2).
    pub(in crate::engine) fn quarantine_or_leak(&self, mut block: Block, fences: Option<Fences>, error: &Error) {
        block.end_holding();
        self.record_of(&block, |id| Event::Leaked { id });
        let bytes = self.counters.quarantined_bytes.add(block.memory().held_bytes());
        let buffers = self.memory.quarantined.add(1);
        self.classes.count_quarantined(&block, 1);
        let keeps_all = self.memory.arena().is_some_and(|arena| arena.may_never_release());
        let leaked = match fences {
            Some(fences) => self.in_flight.quarantine(block, fences).err(),
            None => Some(block),
        };
        let is_leaked = leaked.is_some();
        match leaked {
            Some(block) => self.leak_block(block),
            None => self.request_pace(Pace::Active),
        }
        // Logged last, because a log line may be slow, and at powers of two, because one failed device affects many blocks.
        if self.counters.quarantines[usize::from(is_leaked)].add(1).is_power_of_two() {
            if is_leaked {
                self.log.leaked(bytes, buffers, keeps_all, error);
            } else {
                self.log.quarantined(bytes, buffers, keeps_all, error);
            }
        }
        self.tear_down_if_unused();
    }

    /// Queries at most `max_items` failed fences again. Reuses blocks with completed copies, leaks blocks with fences that can no
    /// longer answer, and repeats refused releases.
    pub(super) fn retry_failures(&self, max_items: usize) {
        let (recovered, lost) = self.in_flight.query_quarantined(max_items);
        lost.into_iter().for_each(|block| self.leak_block(block));
        self.recover(recovered);
        if !self.would_release_wait() {
            self.memory.supply.release_refused();
        }
    }

    /// Leaks `block`: it is never used again, and it keeps its memory and its reference to this pool.
    fn leak_block(&self, block: Block) {
        leaked::leak(block);
        self.lifetime.remove_block();
    }

    /// Ends the quarantine of `blocks`, since their copies have completed.
    pub(super) fn recover(&self, mut blocks: Vec<Block>) {
        if blocks.is_empty() {
            return;
        }
        self.end_flights(&mut blocks);
        let buffers = blocks.len() as u64;
        let bytes = blocks.iter().map(|block| block.memory().held_bytes()).sum();
        self.memory.quarantined.subtract(buffers);
        self.counters.quarantined_bytes.subtract(bytes);
        self.log.quarantine_ended(buffers, bytes);
        for block in blocks {
            self.classes.count_quarantined(&block, -1);
            self.record_new(&block);
            self.finish_put(block);
        }
    }

    /// Evicts a pinned block, and counts `why`. The call may be slow.
    pub(super) fn evict(&self, block: Block, why: EvictionReason) {
        self.classes.count_eviction(block.class(), why);
        self.give_block(block);
    }

    pub(super) fn evict_all(&self, entries: Victims<BlockBody<Self>>, why: EvictionReason) {
        entries.into_iter().for_each(|entry| self.evict(Block::from_entry(entry), why));
    }

    /// Gives the memory of a block to the supply. If that would wait for copies, it is postponed until the pool ends. The
    /// call may be slow.
    fn give_block(&self, block: Block) {
        self.record_of(&block, |id| Event::Gone { id });
        // The block's own reference to its pool is dropped last.
        let (_pool, memory) = block.into_parts(&self.spare);
        self.memory.give(memory, self.time.coarse_us(), !self.would_release_wait());
        // After the release, because the pool may end once its last block is removed.
        self.lifetime.remove_block();
    }

    /// Returns whether no handle is left and a release would wait for copies, which may be stuck. False if there is an arena: a
    /// block then returns to the arena without a source call, and the end releases the memory.
    fn would_release_wait(&self) -> bool {
        let ending = self.lifetime.is_sealed() && self.memory.arena().is_none();
        ending && self.memory.source().blocks_on_release() && self.in_flight.count() + self.memory.quarantined.get() > 0
    }

    /// Releases the `evicted` block, if any, and further idle blocks until no more are idle than the limit allows. Returns on
    /// the fast path do not check that limit.
    pub(super) fn evict_over_limit(&self, evicted: Option<Eviction<BlockBody<Self>>>) {
        let mut evicted = evicted.or_else(|| self.idle.evict_over_limit());
        while let Some(Eviction { entry, reason, check }) = evicted {
            self.evict(Block::from_entry(entry), reason);
            // After the last handle is dropped, no request benefits from a raised limit.
            if let Some(check) = check.filter(|_| !self.lifetime.is_sealed()) {
                if let Some(to) = check.raised_to {
                    self.record(Event::Limit { from: check.limit, to });
                }
                self.log.rate_check(check);
            }
            evicted = self.idle.evict_over_limit();
        }
    }

    /// Releases blocks that exceed the limit on idle buffers or have been idle for too long, and lowers a limit on idle buffers
    /// that no request has needed for a long time.
    pub(super) fn expire(&self, now_us: u64) {
        self.evict_over_limit(None);
        self.evict_all(self.idle.expire(now_us), EvictionReason::Expired);
        if let Some((from, to, victims)) = self.idle.lower_limit(now_us) {
            self.evict_all(victims, EvictionReason::Other);
            self.record(Event::Limit { from, to });
            self.log.pool_size_limit_lowered(from, to);
        }
    }

    /// Calls [`enforce_limits`](Self::enforce_limits) if there is a limit on idle memory.
    pub(super) fn enforce_max_idle_bytes(&self) {
        if self.config.max_idle_bytes.is_some() {
            self.enforce_limits();
        }
    }

    /// Releases idle memory, oldest first, while the pool exceeds its limit, which may have been lowered, or the limit on idle
    /// memory. Returns on the fast path since the last miss or tick have not checked either limit.
    pub(super) fn enforce_limits(&self) {
        self.memory.enforce_limits(self, self.config.max_idle_bytes, self.time.coarse_us());
    }

    /// Ends the pool after its last handle was dropped. Gives idle blocks to their supply now, and other blocks when they are returned.
    /// While there are other blocks, releases the free memory of an arena except the reserve, unless that would wait for copies.
    pub(crate) fn seal(&self) {
        self.memory.arena().into_iter().for_each(|arena| arena.cancel_reserve());
        self.thread.into_iter().for_each(|thread| thread.remove(std::ptr::from_ref(self).cast()));
        self.report_end();
        self.lifetime.seal();
        // From now on returns release their blocks, so no block becomes idle.
        let (idle, begun) = (self.idle.stop_keeping(), Instant::now());
        // A release that waits for the device would wait for a stuck copy, so this thread first waits for the copies in flight.
        let is_stuck = self.memory.source().blocks_on_release() && !self.await_copies();
        idle.into_iter().for_each(|entry| self.give_block(Block::from_entry(entry)));
        if self.lifetime.begin_tear_down(|| self.in_flight.count_with_quarantined()) {
            self.tear_down(begun, is_stuck);
        } else if !self.memory.source().blocks_on_release() {
            self.memory.trim(0, self, self.time.coarse_us());
        }
    }

    /// Makes waiting and later requests fail. Gives idle blocks to their supply now, and other blocks when they are returned.
    pub(crate) fn close(&self) {
        self.is_closed.store(true, Ordering::Relaxed);
        // Before the releases, which may wait for the device.
        self.waiters.wake_all();
        self.live_partitions().iter().for_each(|partition| partition.close());
        self.memory.arena().into_iter().for_each(|arena| arena.cancel_reserve());
        self.evict_all(self.idle.stop_keeping(), EvictionReason::Other);
        self.trim(0);
    }

    /// Tears down a sealed pool once every block is in flight, released or leaked.
    pub(super) fn tear_down_if_unused(&self) {
        // Blocks in flight do not delay this: `tear_down` waits for their copies.
        if self.lifetime.begin_tear_down(|| self.in_flight.count_with_quarantined()) {
            self.tear_down(Instant::now(), false);
        }
    }

    /// Waits until nothing is in flight. After the configured time, gives up once no copy has completed for [`BETWEEN_COPIES`].
    /// Returns whether nothing is in flight any more.
    fn await_copies(&self) -> bool {
        let begun = Instant::now();
        let patience = self.config.code_only.copies_wait.unwrap_or(END_WAIT);
        // Short copies complete soon; waiting for a stuck copy should not keep a processor busy.
        let mut pause = Duration::from_micros(20);
        let (mut left, mut last) = (self.in_flight.count(), begun);
        while left > 0 {
            // Queries all fences, to detect a failed device instead of waiting for it. A sweep may find only the oldest copy of
            // each stream.
            self.sweep_copies(QueryScope::All);
            let before = std::mem::replace(&mut left, self.in_flight.count());
            if left != before {
                last = Instant::now();
            } else if begun.elapsed() >= patience && last.elapsed() >= patience.min(BETWEEN_COPIES) {
                return false;
            }
            thread::sleep(pause.min(patience));
            pause = (pause * 2).min(Duration::from_millis(10));
        }
        true
    }

    /// Releases the memory of the pool. Waits for the copies in flight and abandons those that do not end. With `is_stuck` a wait has
    /// just failed, so this call does not wait again.
    fn tear_down(&self, begun: Instant, is_stuck: bool) {
        if !is_stuck {
            self.await_copies();
        }
        self.recorder().into_iter().for_each(|recorder| recorder.snapshot(self.time.now_us(), self.snapshot()));
        let FinalSweep { swept, abandoned, recovered, lost } = self.in_flight.end();
        // Counted first, so that no release waits for the abandoned copies.
        self.memory.quarantined.add(abandoned.len() as u64);
        abandoned.iter().for_each(|block| self.classes.count_quarantined(block, 1));
        self.complete(swept);
        self.recover(recovered);
        lost.into_iter().for_each(leaked::leak);
        if !abandoned.is_empty() {
            let bytes = abandoned.iter().map(|block| block.memory().held_bytes()).sum();
            self.log.end_in_flight(abandoned.len() as u64, bytes, begun.elapsed());
        }
        // Leaked, since a device may still use the memory (core-I2).
        abandoned.into_iter().for_each(leaked::leak);
        // A release that waits for the device would wait for a stuck copy. An arena checks this itself, and logs it.
        let would_release_wait = self.memory.quarantined.get() > 0 && self.memory.source().blocks_on_release();
        if self.memory.arena().is_some() || !would_release_wait {
            self.memory.supply.end(self.time.coarse_us());
        }
        self.end_recording();
    }
}
