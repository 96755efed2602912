//! A miss: its attempts, its wait, and the return that serves it.
//!
//! ```text
//!   miss ─▶ fits in addition to the head? ─▶ acquire ─▶ block
//!             └─ no, or no room ─▶ wait queue, until served or late ─▶ block, pageable memory, or an error with numbers
//!   return while a request waits ─▶ handed to the head, or room for it
//! ```

use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use super::{Block, BlockRequest, Core};
use crate::diag::is_power_of_ten;
use crate::engine::memory::{Refusal, SlowCalls, Stop};
use crate::engine::meter::usage_report;
use crate::engine::wait_queue::{KeepAlive, Server, WaitTicket, Waiter, deadline};
use crate::error::{ErrorKind, Result};
use crate::in_flight::QueryScope;
use crate::size_class::Class;
use crate::stats::EvictionReason;
use pinpool_os::sync::process::Ordering;

/// A new request waits at least this long for driver calls of other threads, even if it may not wait for room: they take
/// milliseconds, as its own call would.
pub(super) const CALL_PATIENCE: Duration = Duration::from_millis(100);

impl Core {
    /// A block, idle or new, for a request of the pool; a partition's request has its claim.
    pub(crate) fn get(self: &Arc<Self>, wanted: &BlockRequest, wait: Duration) -> Result<Block> {
        match self.begin_get(wanted, wait, None)? {
            Ok(block) => Ok(block),
            Err(ticket) => self.end_wait(&ticket, ticket.wait()),
        }
    }

    /// Begins a request: a block, or its place in the wait queue. The request of a task has a `keep_alive` and makes no driver
    /// call.
    pub(crate) fn begin_get(
        self: &Arc<Self>,
        wanted: &BlockRequest,
        wait: Duration,
        keep_alive: Option<KeepAlive>,
    ) -> Result<Result<Block, WaitTicket<Self>>> {
        if let Some(block) = self.stock.take(wanted.class) {
            self.record_get(&block, wanted, None);
            return Ok(Ok(block));
        }
        let begun = Instant::now();
        let first = match self.take_completed(wanted.class) {
            Some(block) => Ok(block),
            None if keep_alive.is_some() => self.acquire_in_turn(wanted, SlowCalls::None),
            None => {
                let deadline = deadline(begun, wait);
                self.acquire_in_turn(wanted, SlowCalls::Until(deadline, deadline.max(begun + CALL_PATIENCE)))
            }
        };
        let served = match first {
            Ok(block) => Ok(block),
            Err(Stop::Refused(refusal)) if !self.may_wait(wanted, wait, &refusal) => {
                self.give_up(wanted, Some(refusal), wait)
            }
            Err(stop) => {
                let waiter = Waiter::new(wanted.clone(), wanted.class, (begun, wait), keep_alive);
                return Ok(Err(WaitTicket::new(self, waiter, stop.refusal())));
            }
        };
        self.record_outcome(&served, wanted, Some(begun));
        served.map(Ok)
    }

    /// Whether the request of a task was served.
    pub(crate) fn poll_get(ticket: &mut WaitTicket<Self>, context: &mut Context<'_>) -> Poll<Result<Block>> {
        let served = ready!(ticket.poll(context));
        Poll::Ready(ticket.server().end_wait(ticket, served))
    }

    /// A request has stopped waiting: it was served, or it failed.
    fn end_wait(self: &Arc<Self>, ticket: &WaitTicket<Self>, served: Option<Block>) -> Result<Block> {
        let (wanted, waiter, refusal) = (ticket.request(), ticket.waiter(), ticket.waiter().refusal());
        if let Some((waited, refusal)) = ticket.waited().zip(refusal.as_ref()) {
            if served.is_none() && !self.is_hopeless(refusal) {
                self.counters.timeouts.add(1);
            }
            self.record_wait_event();
            self.shortage.count_wait(self.time.coarse_us(), waited);
            self.log.waited(wanted.len as u64, waited, served.is_some());
        }
        let served = served.map_or_else(|| self.give_up(wanted, refusal, waiter.wait), Ok);
        self.record_outcome(&served, wanted, Some(waiter.begun));
        served
    }

    /// An idle block of the class, or a block with completed copies; makes no driver call and never waits.
    pub(crate) fn try_get(&self, wanted: &BlockRequest) -> Option<Block> {
        match &wanted.partition {
            None => self.try_get_of_pool(wanted.class),
            Some(partition) => partition.try_get(wanted),
        }
    }

    pub(super) fn try_get_of_pool(&self, class: Class) -> Option<Block> {
        self.stock.take(class).or_else(|| self.take_completed(class))
    }

    /// A block of `class` with completed copies, found by sweeping.
    fn take_completed(&self, class: Class) -> Option<Block> {
        while self.in_flight.count() > 0 {
            let swept = self.in_flight.sweep(QueryScope::Unknown);
            let found_none = swept.completed.is_empty();
            self.complete(swept);
            let block = self.stock.take(class);
            // Another thread may take it first; then there may be more.
            if block.is_some() || found_none {
                return block;
            }
        }
        None
    }

    /// The first attempt of a miss, which makes such `calls`. While others wait, it must fit in addition to the
    /// head.
    pub(super) fn acquire_in_turn(self: &Arc<Self>, wanted: &BlockRequest, calls: SlowCalls) -> Result<Block, Stop> {
        let class = wanted.class;
        let now_us = self.tick_if_alone();
        self.stock.enforce_count_limit(now_us);
        let needed_bytes = || self.memory().beside_bytes(class);
        let pass = self.waiters.try_pass(|first| (self.memory().room_beside_bytes(first), needed_bytes()));
        let acquired = match pass {
            Ok(0) => self.acquire(class, calls).inspect(|_| {
                self.shortage.end_if_calm(&self.log, now_us);
                self.stock.enforce_idle_limit(&**self, now_us);
            }),
            Ok(passed) => match self.acquire(class, calls.without_waiting()) {
                Ok(mut block) => {
                    block.set_passed(passed);
                    Ok(block)
                }
                Err(stop) => {
                    self.waiters.end_pass(passed, needed_bytes());
                    Err(stop)
                }
            },
            Err((waiting, first_bytes)) => {
                Err(Refusal::Queued { needed_bytes: class.bytes as u64, waiting, first_bytes }.into())
            }
        };
        match acquired {
            // What exceeds the limit need not wait for room under it.
            Err(Stop::Refused(refusal)) if !self.memory().could_hold(class) => {
                self.fall_back(wanted.len, class).ok_or(Stop::Refused(refusal))
            }
            acquired => acquired,
        }
    }

    /// New memory for a request of `class`.
    pub(super) fn acquire(self: &Arc<Self>, class: Class, calls: SlowCalls) -> Result<Block, Stop> {
        let at = (self.time.coarse_us(), calls);
        let attempt = || self.stock.acquire(self, class, at, &**self);
        let acquired = match attempt() {
            Err(Stop::Refused(refusal)) if self.others_make_room(&refusal, calls) => {
                if calls == SlowCalls::None {
                    return Err(Stop::NeedsCall);
                }
                attempt()
            }
            acquired => acquired,
        };
        // Relaxed: a statistic.
        let mut block = acquired.inspect_err(|stop| match stop {
            Stop::Refused(Refusal::Source(_)) => {
                self.diagnosis.is_by_source.store(true, Ordering::Relaxed);
                self.backoff.refused(self.time.read_us());
                self.watch_device(at.0);
            }
            Stop::Refused(_) if !matches!(calls, SlowCalls::Held(..)) => {
                self.diagnosis.is_by_source.store(false, Ordering::Relaxed);
            }
            _ => {}
        })?;
        if self.config.zero {
            // The memory may contain data of an earlier use by this process.
            block.zero();
        }
        block.begin_time(self.time.read_us());
        self.notice(self.pace_of_change());
        Ok(block)
    }

    /// Whether a refused request waits. Counts a shortage.
    pub(super) fn may_wait(&self, wanted: &BlockRequest, wait: Duration, refusal: &Refusal) -> bool {
        let &BlockRequest { len, class, .. } = wanted;
        let could_hold = self.memory().could_hold(class);
        // A request that can never be served is no shortage, unless pageable memory serves it.
        let is_servable = could_hold || self.memory().could_be_pageable(class);
        let may_wait = is_servable && !wait.is_zero() && !self.stock.is_gone();
        if is_servable {
            self.record_need(class);
            // A full pool is ordinary.
            let is_ordinary = may_wait && could_hold && !matches!(refusal, Refusal::Source(_));
            let why = || (is_ordinary, self.memory().explain(refusal, class).to_string(), usage_report(&self.stats()));
            self.shortage.count_refused(&self.log, len as u64, self.time.coarse_us(), why);
        }
        if may_wait {
            self.log.began_to_wait(len as u64, class.bytes as u64);
        }
        may_wait
    }

    /// Unpinned memory, or an error. Without a refusal the driver calls for a task have not returned within its `wait`.
    fn give_up(self: &Arc<Self>, wanted: &BlockRequest, refusal: Option<Refusal>, wait: Duration) -> Result<Block> {
        if let Some(block) = self.fall_back(wanted.len, wanted.class) {
            return Ok(block);
        }
        let nth = self.counters.failed_requests.add(1);
        let late = || ErrorKind::Late { asked_bytes: wanted.len as u64, waited: wait }.into();
        Err(refusal.map_or_else(late, |refusal| self.refused(wanted, refusal, nth)))
    }

    /// A pageable block, if this pool may return one and its limit leaves room.
    pub(super) fn fall_back(self: &Arc<Self>, len: usize, class: Class) -> Option<Block> {
        if self.is_closed() {
            return None;
        }
        let mut block = self.stock.acquire_pageable(self, class)?;
        block.begin_time(self.time.read_us());
        let nth = self.counters.pageable.add(1);
        self.shortage.count_pageable();
        if is_power_of_ten(nth) {
            let stats = self.stats();
            self.log.got_pageable(len as u64, nth, stats.memory.pageable_bytes, stats.limits.max_bytes);
        }
        Some(block)
    }

    /// Hands `block` to the waiting head, or makes room of it. Returns `block` if no request waits.
    pub(super) fn offer_to_head(&self, block: Block) -> Option<Block> {
        // Under a limit of 0 no buffer is used twice.
        if !self.has_waiters() || self.config.pool_size_limit == 0 {
            return Some(block);
        }
        let class = block.class();
        let passed = (block.passed(), self.memory().beside_bytes(class));
        // Counted when the request takes it.
        let block = self.waiters.offer(self, block, class, passed)?;
        if !self.has_waiters() {
            // The request that wanted memory of others may have been a task that is late.
            self.clear_demand();
            return Some(block);
        }
        self.counters.made_room.add(1);
        self.stock.evict(block, self.time.coarse_us(), EvictionReason::Reclaimed);
        if !self.memory().has_arena() {
            self.backoff.end();
        }
        self.waiters.wake_head();
        self.close_if_unused();
        None
    }
}
