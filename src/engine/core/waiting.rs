//! A get without room, and the put that serves it.
//!
//! ```text
//!   miss ─▶ beside the line? ─▶ acquire ─▶ block
//!             └─ no, or no room ─▶ in line until it is served or late ─▶ block, pageable memory, or an error in numbers
//!   put while a get waits ─▶ handed to the first in line, or room for it
//! ```

use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use super::super::accounts::usage_report;
use super::super::memory::{CALL_PATIENCE, Refusal, SlowCalls, Stop};
use super::super::waiters::{Look, Offer, Pass, Server, Turn, WAIT_MAX, deadline};
use super::account::Wanted;
use super::side_thread::SideCall;
use super::{Block, Core};
use crate::diag::is_power_of_ten;
use crate::error::{ErrorKind, Result};
use crate::maintenance_thread::{MaintenanceThread, Reminder};
use crate::size_class::Class;
use crate::stats::EvictionReason;
use pinpool_os::sync::process::Ordering;

/// A get in progress that may wait.
#[derive(Debug)]
pub(crate) struct WaitingGet {
    wanted: Wanted,
    refusal: Refusal,
    turn: Turn<Core>,
    /// When it joined the line.
    begun: Instant,
    /// Has a task look again.
    reminder: Option<Reminder>,
    /// Calls were made for it and gave nothing: it asks for others no sooner. By the clock of the pool.
    rests_until_us: Option<u64>,
}

impl WaitingGet {
    pub(crate) fn wanted(&self) -> &Wanted {
        &self.wanted
    }

    /// Leaves the line.
    pub(crate) fn into_wanted(self) -> Wanted {
        self.wanted
    }
}

/// How far a get came without waiting.
pub(crate) enum Begun {
    Served(Block),
    Waits(WaitingGet),
}

/// What a task that looks for its get finds.
pub(crate) enum Polled {
    Over(Result<Block>),
    Pending,
    /// [`Core::call_for`] is to be called for it.
    NeedsCall,
}

impl Core {
    #[cold]
    pub(super) fn miss(self: &Arc<Self>, wanted: &Wanted, wait: Duration) -> Result<Block> {
        self.search(wanted, wait).inspect(|_| self.accounts.count_request(wanted.len, wanted.class.bytes))
    }

    fn search(self: &Arc<Self>, wanted: &Wanted, wait: Duration) -> Result<Block> {
        let class = wanted.class;
        if let Some(block) = self.take_completed(class) {
            return Ok(block);
        }
        let deadline = deadline(wait);
        let calls = SlowCalls::Until(deadline, deadline.max(Instant::now() + CALL_PATIENCE));
        let refusal = match self.acquire_in_turn(class, calls) {
            Ok(block) => return Ok(block),
            Err(stop) => stop.refusal(),
        };
        match self.join_line(wanted, wait, deadline, refusal) {
            Ok(Begun::Served(block)) => Ok(block),
            Ok(Begun::Waits(WaitingGet { mut refusal, turn, begun, .. })) => {
                let block = turn.wait(&mut refusal);
                self.end_wait(&refusal, wanted, begun, block.is_some());
                block.map_or_else(|| self.give_up(wanted, refusal), Ok)
            }
            Err(refusal) => self.give_up(wanted, refusal),
        }
    }

    /// Begins the get of a task at `now`, on its thread. `None` if the back-end would have to be called: then
    /// [`begin_get_with_calls`](Self::begin_get_with_calls) begins it, on another thread.
    pub(crate) fn begin_get(self: &Arc<Self>, wanted: &Wanted, wait: Duration, now: Instant) -> Result<Option<Begun>> {
        if let Some(block) = self.try_get_of_pool(wanted.class) {
            self.record_get(&block, wanted, None);
            return Ok(Some(Begun::Served(block)));
        }
        match self.acquire_in_turn(wanted.class, SlowCalls::None) {
            Err(Stop::NeedsCall) => Ok(None),
            Err(Stop::Refused(refusal)) => self.end_begin(wanted, wait, now, Err(refusal)).map(Some),
            Ok(block) => self.end_begin(wanted, wait, now, Ok(block)).map(Some),
        }
    }

    /// Begins the get of a task, which looked without calls at `begun`. A slow call.
    pub(crate) fn begin_get_with_calls(
        self: &Arc<Self>,
        wanted: &Wanted,
        wait: Duration,
        begun: Instant,
    ) -> Result<Begun> {
        if let Some(block) = self.try_get_of_pool(wanted.class) {
            self.record_get(&block, wanted, None);
            return Ok(Begun::Served(block));
        }
        let acquired = self.acquire_in_turn(wanted.class, SlowCalls::After(begun, begun + CALL_PATIENCE));
        self.end_begin(wanted, wait, begun, acquired.map_err(Stop::refusal))
    }

    fn end_begin(
        self: &Arc<Self>,
        wanted: &Wanted,
        wait: Duration,
        begun: Instant,
        acquired: Result<Block, Refusal>,
    ) -> Result<Begun> {
        let served = match acquired {
            Ok(block) => Ok(block),
            Err(refusal) => match self.join_line(wanted, wait, begun + wait.min(WAIT_MAX), refusal) {
                Ok(Begun::Served(block)) => Ok(block),
                Ok(waits) => return Ok(waits),
                Err(refusal) => self.give_up(wanted, refusal),
            },
        };
        self.record_outcome(&served, wanted, Some(begun));
        served.inspect(|_| self.accounts.count_request(wanted.len, wanted.class.bytes)).map(Begun::Served)
    }

    /// A task looks whether its get was served.
    pub(crate) fn poll_get(self: &Arc<Self>, get: &mut WaitingGet, context: &mut Context<'_>) -> Polled {
        // The reminder is of the last poll.
        get.reminder = None;
        match get.turn.poll(context, &mut get.refusal) {
            Look::Over(served) => return Polled::Over(self.end_get(get, served)),
            Look::NeedsCall if get.rests_until_us.is_none_or(|until_us| self.time.read_us() >= until_us) => {
                return Polled::NeedsCall;
            }
            Look::NeedsCall | Look::Pending => {}
        }
        get.reminder = self.remind(get.turn.next_look(), context.waker());
        Polled::Pending
    }

    /// Has `waker` woken at that time, also if the program alone polls the pool: a deadline is not the program's to watch.
    pub(crate) fn remind(&self, at: Instant, waker: &Waker) -> Option<Reminder> {
        let reminder = MaintenanceThread::of_process().remind(Some(at), None, waker).ok();
        if reminder.is_none() {
            // There is no thread: the executor polls again and again.
            waker.wake_by_ref();
        }
        reminder
    }

    /// The calls for the get of a task have not returned within its `wait`.
    pub(crate) fn give_up_call(self: &Arc<Self>, wanted: &Wanted, wait: Duration) -> Result<Block> {
        let served = self.fall_back(wanted.len, wanted.class).ok_or_else(|| {
            self.accounts.count_failed_get();
            ErrorKind::Late { asked_bytes: wanted.len as u64, waited: wait }.into()
        });
        self.record_outcome(&served, wanted, None);
        served.inspect(|_| self.accounts.count_request(wanted.len, wanted.class.bytes))
    }

    /// Makes the calls that a look of a task needs. A slow call.
    pub(crate) fn call_for(self: &Arc<Self>, mut get: WaitingGet) -> Result<Begun> {
        match get.turn.call(&mut get.refusal) {
            Look::Over(served) => self.end_get(&get, served).map(Begun::Served),
            Look::Pending | Look::NeedsCall => {
                get.rests_until_us =
                    Some(self.time.read_us().saturating_add(u64::from(get.turn.call_patience().subsec_micros())));
                Ok(Begun::Waits(get))
            }
        }
    }

    /// Has the thread of this pool make `call` for a task.
    pub(crate) fn aside<T: Send + 'static>(&self, call: impl FnOnce() -> T + Send + 'static) -> SideCall<T> {
        self.side.begin(call, self.time.is_manual())
    }

    /// A get of a task has left the line, or is about to: with memory, or without.
    fn end_get(self: &Arc<Self>, get: &WaitingGet, served: Option<Block>) -> Result<Block> {
        let WaitingGet { wanted, refusal, begun, .. } = get;
        self.end_wait(refusal, wanted, *begun, served.is_some());
        let served = served.map_or_else(|| self.give_up(wanted, refusal.clone()), Ok);
        self.record_outcome(&served, wanted, Some(*begun));
        served.inspect(|_| self.accounts.count_request(wanted.len, wanted.class.bytes))
    }

    /// A get has left the line; `refusal` is that of its last attempt that was refused.
    fn end_wait(&self, refusal: &Refusal, wanted: &Wanted, begun: Instant, is_served: bool) {
        let timeouts = if is_served || self.is_hopeless(refusal) { 0 } else { self.accounts.count_timeout() };
        let (asked_bytes, waited) = (wanted.len as u64, begun.elapsed());
        self.record_wait();
        self.shortage.count_wait(self.time.coarse_us(), waited);
        self.log.waited(asked_bytes, waited, is_served);
        if is_served || is_power_of_ten(timeouts) {
            self.log_want(refusal, asked_bytes, waited, is_served);
        }
    }

    /// Memory for a miss. While others wait, only beside the first of them. Makes such `calls`.
    fn acquire_in_turn(self: &Arc<Self>, class: Class, calls: SlowCalls) -> Result<Block, Stop> {
        let now_us = self.tick_if_alone();
        self.stock.enforce_count_limit(now_us);
        match self.waiters.pass(|first| self.backing().beside(first, class)) {
            Pass::Free => {
                let block = self.acquire(class, calls)?;
                self.shortage.end_if_calm(&self.log, now_us);
                self.stock.enforce_idle_limit(&**self, now_us);
                Ok(block)
            }
            Pass::Beside { number } => match self.acquire(class, calls.without_waiting()) {
                Ok(mut block) => {
                    block.note_passed(number);
                    Ok(block)
                }
                Err(stop) => {
                    self.waiters.end_pass(number, self.backing().beside_bytes(class));
                    Err(stop)
                }
            },
            Pass::Behind { waiting, first_bytes } => {
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

    /// Counts a shortage and joins the line; hands `refusal` back if there is nothing to wait for.
    fn join_line(
        self: &Arc<Self>,
        wanted: &Wanted,
        wait: Duration,
        deadline: Instant,
        refusal: Refusal,
    ) -> Result<Begun, Refusal> {
        let &Wanted { len, class, .. } = wanted;
        let could_hold = self.backing().could_hold(class);
        // A request that can never be served is no shortage, unless it is served otherwise.
        let is_servable = could_hold || self.backing().could_fall_back(class);
        let is_to_wait = is_servable && !wait.is_zero() && !self.stock.is_gone();
        if is_servable {
            self.note_need(class);
            // A full pool is ordinary.
            let is_ordinary = is_to_wait && could_hold && !matches!(refusal, Refusal::Source(_));
            let why =
                || (is_ordinary, self.backing().explain(&refusal, class).to_string(), usage_report(&self.stats()));
            self.shortage.count_get(&self.log, len as u64, self.time.coarse_us(), why);
        }
        // What is over the ceiling need not wait for room under it.
        if !could_hold && let Some(block) = self.fall_back(len, class) {
            return Ok(Begun::Served(block));
        }
        if !is_to_wait {
            return Err(refusal);
        }
        self.log.began_to_wait(len as u64, class.bytes as u64);
        let begun = Instant::now();
        let turn = Turn::join(self, class, deadline);
        Ok(Begun::Waits(WaitingGet {
            wanted: wanted.clone(),
            refusal,
            turn,
            begun,
            reminder: None,
            rests_until_us: None,
        }))
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

    /// What comes back while a get waits is the first's, or room for it. Returns `block` if no get has use for it.
    pub(super) fn offer_to_line(&self, block: Block) -> Option<Block> {
        // Under a limit of 0 no buffer is used twice.
        if !self.has_waiters() || self.config.pool_size_limit == 0 {
            return Some(block);
        }
        let class = block.class();
        let passed = (block.passed(), self.backing().beside_bytes(class));
        match self.waiters.offer(block, class, passed, |is_waiting| self.attend(is_waiting)) {
            // Counted when the get takes it.
            Offer::HandedOver => None,
            Offer::MakeRoom(block) => {
                self.accounts.count_made_room();
                self.stock.evict(block, self.time.coarse_us(), EvictionReason::Reclaimed);
                if !self.backing().has_arena() {
                    self.backoff.end();
                }
                self.waiters.wake_first();
                self.close_if_unused();
                None
            }
            Offer::Keep(block) => {
                // The get that wanted memory of others may have been a task that is late.
                if !self.has_waiters() {
                    self.end_want();
                }
                Some(block)
            }
        }
    }
}
