//! A pool as the server of its wait queue: the search for memory, the pause until the next search, and the slow path.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::get::CALL_PATIENCE;
use super::{Block, BlockRequest, PoolCore};
use crate::engine::memory::{AllowedCalls, AttemptError, Refusal, Rules};
use crate::engine::meter::nanos;
use crate::engine::wait_queue::{Server, WaitQueue, WaitTicket, Waiter};
use crate::error::{Result, Retry};
use crate::in_flight::QueryScope;
use crate::maintenance_thread::pause_for_copies;
use pinpool_observe::record::Event;
use pinpool_os::sync::unmodeled::{AtomicBool, Mutex, Ordering, fence};

/// Shortest sleep of the head while no copy is in flight. The head does not sleep until its deadline, since other pools and
/// processes may also make room.
const IDLE_PAUSE_MIN: Duration = Duration::from_millis(5);

impl Server for PoolCore {
    type Request = BlockRequest;
    type Item = Block;
    type Refusal = Refusal;

    fn queue(&self) -> &WaitQueue<Self> {
        &self.waiters
    }

    fn on_waiting_changed(&self, _is_waiting: bool) {
        // The first request in the queue has not published a demand yet, and an empty queue has none.
        self.clear_demand();
        self.update_slow_path();
    }

    fn sweep(&self) {
        self.sweep_copies(QueryScope::Undecided);
    }

    fn serve(self: &Arc<Self>, waiter: &Waiter<Self>, until: Instant) -> std::result::Result<Block, Refusal> {
        let class = waiter.class;
        if let Some(block) = self.take(class) {
            return Ok(block);
        }
        let Some(refused) = waiter.refusal() else {
            let rules = Rules::retry(waiter.begun + CALL_PATIENCE);
            return self.attempt(&waiter.request, rules).map_err(expect_refusal);
        };
        if !self.memory.supply.could_hold(class) {
            let mut over = self.memory.budget.refusal(self.memory.supply.block_bytes(class));
            // If pageable memory could serve the request, waiting helps: such memory may be returned.
            over.could_fit |= self.memory.could_be_pageable(class);
            return self.new_pageable_block(waiter.request.len, class).ok_or(over.into());
        }
        let begun = Instant::now();
        // If nothing can serve the request any more, it fails with the refusal of a new call, not with an earlier refusal.
        let is_last = !self.is_closed() && self.is_hopeless(Some(&refused));
        let rules = Rules::retry(until);
        let acquired = if self.backoff.is_early(&refused, self.time.read_us()) && !is_last {
            // This search does not request memory from the source and may stop without a refusal, so the earlier refusal
            // remains.
            self.search(class, Rules { calls: AllowedCalls::NoAcquire, ..rules }, 0).map_err(|_| refused)
        } else {
            let attempt = |rules| self.search(class, rules, 0).map_err(expect_refusal);
            // The first search of a request counts the miss. A request behind others has not searched yet.
            match attempt(Rules { counts_miss: matches!(refused, Refusal::Queued { .. }), ..rules }) {
                Err(refusal) if self.publish_demand(&refusal, class) => attempt(rules),
                acquired => acquired,
            }
        };
        self.diagnosis.calls_while_waiting_ns.fetch_add(nanos(begun.elapsed()), Ordering::Relaxed);
        // A served request has no demand any more, and the next head publishes its own demand. If no request waits, this
        // request has ended during the search.
        if acquired.is_ok() || !self.has_waiters() {
            self.clear_demand();
        }
        acquired
    }

    fn admit(self: &Arc<Self>, waiter: &Waiter<Self>, refusal: &Refusal) -> bool {
        self.count_refusal(&waiter.request, waiter.wait, refusal)
    }

    fn finish_wait(self: &Arc<Self>, ticket: &WaitTicket<Self>, served: Option<Block>) -> Result<Block> {
        let (request, waiter, refusal) = (ticket.request(), &ticket.waiter, ticket.waiter.refusal());
        let mut timed_out = false;
        if let Some((waited, refusal)) = ticket.waited().zip(refusal.as_ref()) {
            timed_out = served.is_none() && !self.is_hopeless(Some(refusal));
            self.counters.timeouts.add(timed_out.into());
            // This event belongs to the request that this thread records next.
            self.record(Event::Waited);
            self.shortage.count_wait(self.time.coarse_us(), waited);
            self.log.waited(request.len as u64, waited, served.is_some());
        }
        let served = served.map_or_else(|| self.fall_back_or_fail(request, refusal, waiter.wait), Ok);
        let served = served.map_err(|error| error.after_wait(timed_out));
        self.record_outcome(&served, request, Some(waiter.begun));
        served
    }

    fn return_unused(&self, block: Block) {
        self.finish_put(block);
    }

    fn longest_sleep(&self, since: Instant) -> Duration {
        // Pairs with the fence in `announce_copy`: the request sees the copy, or the copy sees the request and wakes it.
        fence(Ordering::SeqCst);
        let has_copies = self.in_flight.count() > 0;
        let pause = pause_for_copies(since);
        if has_copies { pause } else { pause.max(IDLE_PAUSE_MIN) }
    }

    fn is_hopeless(&self, refusal: Option<&Refusal>) -> bool {
        let Some(Refusal::Source(error)) = refusal else {
            return self.is_closed() || refusal.is_some_and(Refusal::is_too_large);
        };
        self.has_ended() || !self.memory.may_recover(error)
    }

    fn on_handover_taken(&self) {
        self.clear_demand();
        self.counters.handed_over.add(1);
    }

    fn count_wait(&self, waited: Duration) {
        self.counters.waits.record(waited);
    }
}

/// Returns the refusal of an attempt that was allowed to make driver calls.
fn expect_refusal(error: AttemptError) -> Refusal {
    error.refusal().unwrap_or_else(|| unreachable!("an attempt that may make driver calls needs one"))
}

/// Whether hits and returns of a pool take the slow path: while a request waits, or other members want memory.
#[derive(Debug, Default)]
pub(super) struct SlowPathFlag {
    /// Whether the shards have the flag. Locked while the flag is set in the shards, so that two updates cannot overlap.
    is_required: Mutex<bool>,
    is_for_shared_limit: AtomicBool,
}

impl SlowPathFlag {
    #[inline]
    pub(super) fn is_for_shared_limit(&self) -> bool {
        self.is_for_shared_limit.load(Ordering::Relaxed)
    }
}

impl PoolCore {
    /// Sets or clears the flag in the shards if the reasons for it have changed.
    pub(super) fn update_slow_path(&self) {
        let mut was_required = self.slow_path_flag.is_required.lock();
        let is_wanted = self.memory.budget.is_wanted();
        // Relaxed: a return that finds the flag set in the lock of its shard sees this value, since the flag is set after this
        // store.
        self.slow_path_flag.is_for_shared_limit.store(is_wanted, Ordering::Relaxed);
        let is_required = is_wanted || self.has_waiters();
        if is_required != std::mem::replace(&mut *was_required, is_required)
            && let Some(cache) = &self.idle.cache
        {
            cache.set_slow_path(is_required);
        }
    }
}

const FIRST_PAUSE_US: u64 = 5_000;
const PAUSE_US_MAX: u64 = 1_000_000;

/// The time by the pool's clock at which the source may be called again, and the pause until then, in microseconds. `None` if
/// the source has not refused a call since memory was last released to it.
#[derive(Debug, Default)]
pub(super) struct SourceBackoff(Mutex<Option<(u64, u64)>>);

impl SourceBackoff {
    /// Ends the pause, since memory was released to the source.
    pub(super) fn end(&self) {
        *self.0.lock() = None;
    }

    pub(super) fn record_refusal(&self, now_us: u64) {
        let mut last = self.0.lock();
        if last.is_some_and(|(until, _)| now_us < until) {
            return;
        }
        let recent = last.filter(|&(until, _)| now_us < until + PAUSE_US_MAX);
        // A single failure causes no pause.
        let pause = recent.map_or(0, |(_, pause)| (pause * 2).clamp(FIRST_PAUSE_US, PAUSE_US_MAX));
        *last = Some((now_us.saturating_add(pause), pause));
    }

    /// Returns whether it is too early to repeat a call that failed with `refused`.
    pub(super) fn is_early(&self, refused: &Refusal, now_us: u64) -> bool {
        let Refusal::Source(error) = refused else { return false };
        match error.retry {
            Retry::Soon => false,
            Retry::Later => self.0.lock().is_some_and(|(until, _)| now_us < until),
            Retry::Never => true,
        }
    }
}
