//! Returns of blocks by their users and by completed copies, evictions, blocks that are never reused, and the end of a pool,
//! after its last handle and its last block outside a copy.

use std::thread;
use std::time::{Duration, Instant};

use super::fast_path::KeptCore;
use super::{Block, Core};
use crate::backend::SourceError;
use crate::copy::CopyKeeper;
use crate::engine::block::BlockBody;
use crate::engine::cache::{Evicted, Victims};
use crate::error::Error;
use crate::in_flight::{Ended, FailedItem, Fences, QueryScope, Swept};
use crate::maintenance_thread::Pace;
use crate::policy;
use crate::stats::EvictionReason;
use pinpool_observe::record::Event;
use pinpool_os::leaked;
use pinpool_os::sync::process::{Ordering, fence};

/// Longest wait of a closing pool for its copies: longer than any working copy, and shorter than a person waits for a process to
/// end.
const CLOSE_WAIT: Duration = Duration::from_secs(30);

impl CopyKeeper for Core {
    fn copy_ended(&self) {
        if !self.is_forked() {
            self.sweep_copies(QueryScope::Unknown);
        }
    }
}

impl Block {
    /// Returns the buffer, and checks everything. Devices may use it until the copies recorded on it have completed. In a forked
    /// child the block leaks.
    #[inline(never)]
    pub(super) fn put_slow(mut self) {
        if self.is_forked() {
            return std::mem::forget(self);
        }
        let core = KeptCore::take(&self);
        let fences = self.copy_fences_mut();
        if !fences.is_empty() {
            let fences = fences.take();
            return core.put_after(self, fences);
        }
        core.record_put(&self, false);
        // Under `PINPOOL_ZERO` the block waits for a sweep, so that its user need not zero it. Memory of another origin is never
        // kept.
        if core.config.zero && core.thread.is_some() && self.memory().is_from_source() {
            core.begin_flight(self, Fences::new());
        } else {
            core.finish_put(self);
        }
    }
}

impl Core {
    /// Returns `block` for its user; devices may use it until all `fences` have completed.
    pub(in crate::engine) fn put_after(&self, block: Block, fences: Fences) {
        self.record_put(&block, true);
        self.begin_flight(block, fences);
    }

    /// `block` waits for `fences`.
    fn begin_flight(&self, mut block: Block, fences: Fences) {
        let bytes = block.memory().held_bytes();
        let now_us = self.tick_if_alone();
        self.end_use(&mut block, || now_us);
        block.begin_time(now_us);
        self.in_flight.insert(block, bytes, fences, now_us);
        self.announce_copy();
        self.request_pace(self.pace_of_copies());
        self.close_if_unused();
    }

    /// Records how long the user had `block`, if that is known.
    pub(super) fn end_use(&self, block: &mut Block, now_us: impl FnOnce() -> u64) {
        if let Some(since_us) = block.end_time() {
            self.counters.uses.record_us(since_us, now_us());
        }
    }

    /// Nothing uses `block` any more. It serves a waiting request, becomes idle, or leaves the pool.
    pub(super) fn finish_put(&self, mut block: Block) {
        self.end_use(&mut block, || self.time.read_us());
        block.end_holding();
        // Ends last: requests that wait for memory of the pool precede the partition's next request.
        let _claim = block.take_claim();
        if self.config.zero && block.memory().adopted().is_none() {
            // After a reset of the device the memory may be gone.
            self.watch_device();
            self.ended.get().map_or_else(|| block.zero(), |_| ());
        }
        if !block.memory().is_from_source() {
            return self.put_foreign(block);
        }
        block.make_fast_path(self.generation.number());
        if self.has_waiters() {
            self.record_return();
        }
        let Some(block) = self.release_for_others(block).and_then(|block| self.offer_to_head(block)) else { return };
        let class = block.class();
        if policy::goes_to_arena(block.class_bytes(), || self.is_varied()) {
            // It merges with adjacent free memory (policy-R3).
            self.idle.count_put();
            self.evict(block, EvictionReason::Released);
            self.request_pace(self.pace_of_change());
        } else {
            let evicted = self.idle.put(block.into_entry(), class);
            if evicted.is_none() {
                return self.wake_waiters();
            }
            self.evict_over_limit(evicted);
        }
        self.enforce_max_idle_bytes();
        self.close_if_unused();
        self.wake_waiters();
    }

    /// Announces that a copy has begun. Requests that wait for its memory, here or in a partition, poll immediately and at short
    /// intervals from now on.
    fn announce_copy(&self) {
        // Pairs with the fence in `patience`.
        fence(Ordering::SeqCst);
        self.wake_waiters();
        self.wake_partitions();
    }

    pub(in crate::engine) fn has_waiters(&self) -> bool {
        self.waiters.has_waiters()
    }

    /// After a return: a request that joined the queue meanwhile may have searched before the buffer was idle.
    pub(in crate::engine) fn wake_waiters(&self) {
        if self.has_waiters() {
            self.waiters.wake_head();
        }
    }

    /// Returns memory that is not kept: pageable memory, or a user's memory.
    #[cold]
    fn put_foreign(&self, block: Block) {
        if block.memory().adopted().is_some() {
            self.counters.adopted.subtract(1);
        } else {
            self.counters.pageable_returns.add(1);
        }
        self.release_block(block);
        self.close_if_unused();
        self.wake_waiters();
    }

    /// Returns the blocks with completed copies, except blocks of a stream that another thread is querying. A load while
    /// nothing is in flight.
    pub(super) fn sweep_copies(&self, scope: QueryScope) {
        if self.in_flight.count() > 0 {
            self.complete(self.in_flight.sweep(scope));
        }
    }

    /// Returns the blocks with copies that are complete according to their timelines. Calls no fence and no backend.
    pub(crate) fn complete_by_loads(&self) {
        if self.memory.arena().is_some() {
            self.sweep_copies(QueryScope::Nothing);
        }
    }

    pub(super) fn complete(&self, Swept { mut completed, failed }: Swept<Block>) {
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

    /// The copies of `blocks` have completed: records how long each was in flight.
    fn end_flights(&self, blocks: &mut [Block]) {
        let now_us = self.time.read_us();
        let begun = blocks.iter_mut().filter_map(Block::end_time);
        begun.for_each(|since_us| self.counters.flights.record_us(since_us, now_us));
    }

    /// Does not use `block` until `fences` report that its copies have completed; never again without fences (core-I2).
    pub(in crate::engine) fn quarantine_or_leak(&self, mut block: Block, fences: Option<Fences>, error: &Error) {
        block.end_holding();
        self.record_of(&block, |id| Event::Leaked { id });
        let bytes = self.counters.quarantined_bytes.add(block.memory().held_bytes());
        let buffers = self.memory.quarantined.add(1);
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
        self.close_if_unused();
    }

    /// Queries at most `most` failed fences again, reuses the blocks with completed copies, and repeats refused releases.
    pub(super) fn retry_failures(&self, most: usize) {
        let (completed, lost) = self.in_flight.query_quarantined(most);
        lost.into_iter().for_each(|block| self.leak_block(block));
        self.recover(completed);
        if !self.would_wait() {
            self.memory.supply.release_refused();
        }
    }

    /// Never uses `block` again; keeps its memory, and with it this pool.
    fn leak_block(&self, block: Block) {
        leaked::leak(block);
        self.lifetime.remove_block();
    }

    /// The copies of quarantined `blocks` have completed.
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
            self.record_new(&block);
            self.finish_put(block);
        }
    }

    /// Evicts a pinned block, and counts `why`. Makes slow calls.
    pub(super) fn evict(&self, block: Block, why: EvictionReason) {
        self.classes.left(block.class(), why);
        self.release_block(block);
    }

    pub(super) fn evict_all(&self, entries: Victims<BlockBody<Self>>, why: EvictionReason) {
        entries.into_iter().for_each(|entry| self.evict(Block::from_entry(entry), why));
    }

    /// Releases a block, or postpones that to the close of the pool while a release would wait for copies. Makes slow calls.
    fn release_block(&self, block: Block) {
        self.record_of(&block, |id| Event::Gone { id });
        // The block's own reference to its pool is dropped last.
        let (_pool, memory) = block.into_parts(&self.spare);
        self.memory.release(memory, self.time.coarse_us(), !self.would_wait());
        // After the release, because the pool may close on it.
        self.lifetime.remove_block();
    }

    /// Returns whether no handle is left, and a release would wait for copies, which may be stuck. An arena releases nothing
    /// before it closes.
    fn would_wait(&self) -> bool {
        let ending = self.lifetime.is_sealed() && self.memory.arena().is_none();
        ending && self.memory.source().release_waits() && self.in_flight.count() + self.memory.quarantined.get() > 0
    }

    /// Releases the `evicted` block, if any, and others until the limit on idle buffers holds. Returns on the fast path do not
    /// check it.
    pub(super) fn evict_over_limit(&self, evicted: Option<Evicted<BlockBody<Self>>>) {
        let mut evicted = evicted.or_else(|| self.idle.evict_over_limit());
        while let Some(Evicted { entry, reason, check }) = evicted {
            self.evict(Block::from_entry(entry), reason);
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

    /// Releases blocks over the limit on idle buffers or idle for too long, and lowers a limit that no request has needed for
    /// long.
    pub(super) fn expire(&self, now_us: u64) {
        self.evict_over_limit(None);
        self.evict_all(self.idle.expire(now_us), EvictionReason::Expired);
        if let Some((from, to, victims)) = self.idle.lower_limit(now_us) {
            self.evict_all(victims, EvictionReason::Released);
            self.record(Event::Limit { from, to });
            self.log.pool_size_limit_lowered(from, to);
        }
    }

    /// Releases idle memory, oldest first, that exceeds the limit on idle memory, if there is one.
    pub(super) fn enforce_max_idle_bytes(&self) {
        if self.config.max_idle_bytes.is_some() {
            self.enforce_limits();
        }
    }

    /// Releases idle memory, oldest first, that exceeds the limit, which may have been lowered, or the limit on idle memory. Fast
    /// returns since the last miss or tick may exceed both.
    pub(super) fn enforce_limits(&self) {
        self.memory.enforce_limits(self, self.config.max_idle_bytes, self.time.coarse_us());
    }

    /// No handle is left. Idle blocks are released now, others when they are returned.
    pub(crate) fn seal(&self) {
        self.memory.arena().into_iter().for_each(|arena| arena.cancel_reserve());
        self.thread.into_iter().for_each(|thread| thread.remove(std::ptr::from_ref(self).cast()));
        self.report_end();
        self.lifetime.seal();
        // From now on returns release their blocks, and nothing is idle.
        let idle = self.idle.seal();
        // A release that waits for the device would wait for a stuck copy, so copies in flight come first.
        let is_stuck = self.memory.source().release_waits() && !self.await_copies();
        idle.into_iter().for_each(|entry| self.release_block(Block::from_entry(entry)));
        if self.lifetime.begin_close(|| self.in_flight.held()) {
            self.close(is_stuck);
        }
    }

    /// Waiting and later requests fail. Idle blocks are released now, others when they are returned.
    pub(crate) fn refuse_requests(&self) {
        self.is_closed.store(true, Ordering::Relaxed);
        let _earlier = self.ended.set(SourceError::new("the request", "the pool is closed"));
        // Before releases, which may wait for the device.
        self.waiters.wake_all();
        self.existing_partitions().iter().for_each(|partition| partition.close());
        self.memory.arena().into_iter().for_each(|arena| arena.cancel_reserve());
        self.evict_all(self.idle.seal(), EvictionReason::Released);
        self.trim(0);
    }

    /// Closes a sealed pool once every block is in flight, released or leaked.
    pub(super) fn close_if_unused(&self) {
        // Blocks in flight do not keep the pool open: `close` waits for their copies.
        if self.lifetime.begin_close(|| self.in_flight.held()) {
            self.close(false);
        }
    }

    /// Waits until nothing is in flight, as long as configured, or longer while copies complete. Returns whether that is so.
    fn await_copies(&self) -> bool {
        let begun = Instant::now();
        let longest_wait = self.config.code.close_wait.unwrap_or(CLOSE_WAIT);
        // Short copies complete soon; waiting for a stuck copy should not keep a processor busy.
        let mut pause = Duration::from_micros(20);
        let mut left = self.in_flight.count();
        while left > 0 {
            // A device that failed is not waited for. Of each stream a sweep may find only the oldest copy.
            self.sweep_copies(QueryScope::All);
            let before = std::mem::replace(&mut left, self.in_flight.count());
            if left == before && begun.elapsed() >= longest_wait {
                return false;
            }
            thread::sleep(pause.min(longest_wait));
            pause = (pause * 2).min(Duration::from_millis(10));
        }
        true
    }

    /// Ends the pool: waits for the copies in flight, unless a wait has just found that one `is_stuck`, and abandons those that
    /// do not end.
    fn close(&self, is_stuck: bool) {
        let begun = Instant::now();
        if !is_stuck {
            self.await_copies();
        }
        self.recorder().into_iter().for_each(|recorder| recorder.snapshot(self.time.now_us(), self.snapshot()));
        let Ended { swept, abandoned, recovered, failed } = self.in_flight.end();
        // First, so that no release waits for what is abandoned.
        self.memory.quarantined.add(abandoned.len() as u64);
        self.complete(swept);
        self.recover(recovered);
        failed.into_iter().for_each(leaked::leak);
        if !abandoned.is_empty() {
            let bytes = abandoned.iter().map(|block| block.memory().held_bytes()).sum();
            self.log.close_in_flight(abandoned.len() as u64, bytes, begun.elapsed());
        }
        // A release that waits for the device would wait for a stuck copy.
        let may_release = abandoned.is_empty() || !self.memory.source().release_waits();
        // Never freed on a guess (core-I2).
        abandoned.into_iter().for_each(leaked::leak);
        if may_release {
            self.memory.supply.close(self.time.coarse_us());
        }
        self.end_recording();
    }
}
