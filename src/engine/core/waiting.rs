//! A request that is no hit: its attempts, its wait, and the return that serves it.
//!
//! ```text
//!   miss ─▶ fits in addition to the head? ─▶ acquire ─▶ block
//!             └─ no, or no room ─▶ wait queue, until served or late ─▶ block, unpinned memory, or an error in numbers
//!   return while a request waits ─▶ handed to the head, or room for it
//! ```

use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use super::super::accounts::usage_report;
use super::super::memory::{Refusal, SlowCalls, Stop};
use super::super::wait_queue::{KeepAlive, Server, WAIT_MAX, WaitTicket, Waiter, deadline};
use super::account::Wanted;
use super::{Block, Core};
use crate::diag::is_power_of_ten;
use crate::error::{ErrorKind, Result};
use crate::size_class::Class;
use crate::stats::EvictionReason;
use pinpool_os::sync::process::Ordering;

/// A request that begins waits at least this long for calls of other threads, even if it may not wait for room: they take
/// milliseconds, as its own does.
pub(super) const CALL_PATIENCE: Duration = Duration::from_millis(100);

impl Core {
    #[cold]
    pub(super) fn miss(self: &Arc<Self>, wanted: &Wanted, wait: Duration) -> Result<Block> {
        if let Some(block) = self.take_completed(wanted.class) {
            return Ok(block);
        }
        let deadline = deadline(wait);
        let calls = SlowCalls::Until(deadline, deadline.max(Instant::now() + CALL_PATIENCE));
        let refusal = match self.first_attempt(wanted, calls) {
            Ok(block) => return Ok(block),
            Err(stop) => stop.refusal(),
        };
        if !self.may_wait(wanted, wait, &refusal) {
            return self.give_up(wanted, refusal);
        }
        let waiter = Waiter::new(wanted.clone(), wanted.class, (wait, deadline), None);
        let ticket = WaitTicket::new(self, waiter, Some(refusal));
        let served = ticket.wait();
        self.end_wait(&ticket, served)
    }

    /// Begins the request of a task: a block, or its place in the wait queue. Makes no driver call.
    pub(crate) fn begin_get(
        self: &Arc<Self>,
        wanted: &Wanted,
        wait: Duration,
        keep_alive: KeepAlive,
    ) -> Result<Result<Block, WaitTicket<Self>>> {
        if let Some(block) = self.try_get_of_pool(wanted.class) {
            self.record_get(&block, wanted, None);
            return Ok(Ok(block));
        }
        // Without a wait for room it still waits for driver calls.
        let deadline = deadline(if wait.is_zero() { WAIT_MAX } else { wait });
        let waiter = Waiter::new(wanted.clone(), wanted.class, (wait, deadline), Some(keep_alive));
        let served = match self.first_attempt(wanted, SlowCalls::None) {
            Ok(block) => Ok(block),
            Err(Stop::NeedsCall) => return Ok(Err(WaitTicket::new(self, waiter, None))),
            Err(Stop::Refused(refusal)) if self.may_wait(wanted, wait, &refusal) => {
                return Ok(Err(WaitTicket::new(self, waiter, Some(refusal))));
            }
            Err(Stop::Refused(refusal)) => self.give_up(wanted, refusal),
        };
        self.record_outcome(&served, wanted, Some(waiter.begun));
        served.map(Ok)
    }

    /// Whether the request of a task was served.
    pub(crate) fn poll_get(ticket: &mut WaitTicket<Self>, context: &mut Context<'_>) -> Poll<Result<Block>> {
        let served = ready!(ticket.poll(context));
        let core = ticket.server();
        let served = core.end_wait(ticket, served);
        core.record_outcome(&served, ticket.request(), Some(ticket.waiter().begun));
        Poll::Ready(served)
    }

    /// A request waits no more: it was served, or gives up.
    fn end_wait(self: &Arc<Self>, ticket: &WaitTicket<Self>, served: Option<Block>) -> Result<Block> {
        let (wanted, refusal) = (ticket.request(), ticket.waiter().refusal());
        if let Some((waited, refusal)) = ticket.waited().zip(refusal.as_ref()) {
            let is_served = served.is_some();
            let timeouts = if is_served || self.is_hopeless(refusal) { 0 } else { self.accounts.count_timeout() };
            let asked_bytes = wanted.len as u64;
            self.record_wait_event();
            self.shortage.count_wait(self.time.coarse_us(), waited);
            self.log.waited(asked_bytes, waited, is_served);
            if is_served || is_power_of_ten(timeouts) {
                self.log_want(refusal, asked_bytes, waited, is_served);
            }
        }
        match (served, refusal) {
            (Some(block), _) => Ok(block),
            (None, Some(refusal)) => self.give_up(wanted, refusal),
            (None, None) => self.give_up_call(wanted, ticket.waiter().wait),
        }
    }

    /// The driver calls for a task have not returned within its `wait`.
    fn give_up_call(self: &Arc<Self>, wanted: &Wanted, wait: Duration) -> Result<Block> {
        self.fall_back(wanted.len, wanted.class).ok_or_else(|| {
            self.accounts.count_failed_get();
            ErrorKind::Late { asked_bytes: wanted.len as u64, waited: wait }.into()
        })
    }

    /// The first attempt of a request that is no hit.
    pub(super) fn first_attempt(self: &Arc<Self>, wanted: &Wanted, calls: SlowCalls) -> Result<Block, Stop> {
        let &Wanted { len, class, .. } = wanted;
        self.acquire_in_turn(class, calls).or_else(|stop| match stop {
            // What is over the limit need not wait for room under it.
            Stop::Refused(refusal) if !self.backing().could_hold(class) => {
                self.fall_back(len, class).ok_or(Stop::Refused(refusal))
            }
            stop => Err(stop),
        })
    }

    /// Memory for a miss. While others wait, only beside the first of them. Makes such `calls`.
    fn acquire_in_turn(self: &Arc<Self>, class: Class, calls: SlowCalls) -> Result<Block, Stop> {
        let now_us = self.tick_if_alone();
        self.stock.enforce_count_limit(now_us);
        let needed_bytes = || self.backing().beside_bytes(class);
        match self.waiters.try_pass(|first| (self.backing().room_beside_bytes(first), needed_bytes())) {
            Ok(0) => {
                let block = self.acquire(class, calls)?;
                self.shortage.end_if_calm(&self.log, now_us);
                self.stock.enforce_idle_limit(&**self, now_us);
                Ok(block)
            }
            Ok(passed) => {
                let acquired = self.acquire(class, calls.without_waiting());
                let acquired = acquired.inspect_err(|_| self.waiters.end_pass(passed, needed_bytes()));
                acquired.map(|mut block| {
                    block.note_passed(passed);
                    block
                })
            }
            Err((waiting, first_bytes)) => {
                Err(Refusal::Line { needed_bytes: class.bytes as u64, waiting, first_bytes }.into())
            }
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
        // Relaxed: a figure.
        let mut block = acquired.inspect_err(|stop| match stop {
            Stop::Refused(Refusal::Source(_)) => {
                self.verdicts.is_by_source.store(true, Ordering::Relaxed);
                self.backoff.refused();
                self.watch_device(at.0);
            }
            Stop::Refused(_) if !matches!(calls, SlowCalls::Held(..)) => {
                self.verdicts.is_by_source.store(false, Ordering::Relaxed);
            }
            _ => {}
        })?;
        if self.config.zero {
            // A source may give what earlier use by this process left.
            block.zero();
        }
        block.begin_time(self.time.read_us());
        self.notice(self.pace_of_change());
        Ok(block)
    }

    /// Whether a refused request waits. Counts a shortage.
    pub(super) fn may_wait(&self, wanted: &Wanted, wait: Duration, refusal: &Refusal) -> bool {
        let &Wanted { len, class, .. } = wanted;
        let could_hold = self.backing().could_hold(class);
        // A request that can never be served is no shortage, unless unpinned memory serves it.
        let is_servable = could_hold || self.backing().could_fall_back(class);
        let may_wait = is_servable && !wait.is_zero() && !self.stock.is_gone();
        if is_servable {
            self.note_need(class);
            // A full pool is ordinary.
            let is_ordinary = may_wait && could_hold && !matches!(refusal, Refusal::Source(_));
            let why = || (is_ordinary, self.backing().explain(refusal, class).to_string(), usage_report(&self.stats()));
            self.shortage.count_get(&self.log, len as u64, self.time.coarse_us(), why);
        }
        if may_wait {
            self.log.began_to_wait(len as u64, class.bytes as u64);
        }
        may_wait
    }

    /// Pageable memory, or an error.
    fn give_up(self: &Arc<Self>, wanted: &Wanted, refusal: Refusal) -> Result<Block> {
        if let Some(block) = self.fall_back(wanted.len, wanted.class) {
            return Ok(block);
        }
        let nth = self.accounts.count_failed_get();
        Err(self.refused(wanted, refusal, nth))
    }

    /// A block that is not pinned, if this pool may give one out and its limit leaves room.
    pub(super) fn fall_back(self: &Arc<Self>, len: usize, class: Class) -> Option<Block> {
        if self.is_closed() {
            return None;
        }
        let mut block = self.stock.acquire_pageable(self, class)?;
        block.begin_time(self.time.read_us());
        let nth = self.accounts.count_fallback();
        self.shortage.count_fallback();
        if is_power_of_ten(nth) {
            let stats = self.stats();
            self.log.fell_back(len as u64, nth, stats.memory.fallback_bytes, stats.limits.max_bytes);
        }
        Some(block)
    }

    /// What is returned while a request waits goes to the head, or is room for it. Returns `block` if nobody waits.
    pub(super) fn offer_to_head(&self, block: Block) -> Option<Block> {
        // Under a limit of 0 no buffer is used twice.
        if !self.has_waiters() || self.config.pool_size_limit == 0 {
            return Some(block);
        }
        let class = block.class();
        let passed = (block.passed(), self.backing().beside_bytes(class));
        // Counted when the request takes it.
        let block = self.waiters.offer(self, block, class, passed)?;
        if !self.has_waiters() {
            // The request that wanted memory of others may have been a task that is late.
            self.end_want();
            return Some(block);
        }
        self.accounts.count_made_room();
        self.stock.evict(block, self.time.coarse_us(), EvictionReason::Reclaimed);
        if !self.backing().has_arena() {
            self.backoff.end();
        }
        self.waiters.wake_head();
        self.close_if_unused();
        None
    }
}
