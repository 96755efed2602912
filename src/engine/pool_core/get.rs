//! A miss (policy-R2): its attempts, its wait, and the returns that serve it.
//!
//! ```text
//!   miss ─▶ sweep ─▶ fits in addition to the head? ─▶ search ─▶ block
//!             └─ no, or no room ─▶ wait queue, until served or late ─▶ block, pageable memory, or an error with numbers
//!   return while a request waits ─▶ handed to the head, or room for it
//! ```

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Block, BlockRequest, PoolCore};
use crate::backend::BuiltInSource;
use crate::engine::memory::{AllowedCalls, AttemptError, Refusal, Rules};
use crate::engine::wait_queue::{FirstAttempt, KeepAlive, WaitTicket, Waiter, deadline};
use crate::error::{Error, ErrorKind, NoMemory, Result};
use crate::in_flight::QueryScope;
use crate::quota::{Claim, LimitLevel};
use crate::report::{FailedRequest, is_power_of_ten, usage_text};
use crate::size_class::Class;
use crate::stats::EvictionReason;
use pinpool_os::sync::unmodeled::Ordering;

/// A new request waits at least this long for other threads' driver calls, even if it may not wait for room: such calls take
/// milliseconds, and the request's own call would take as long.
pub(super) const CALL_PATIENCE: Duration = Duration::from_millis(100);

/// The purpose for which memory is claimed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    Request,
    Reserve,
    UserMemory,
}

impl PoolCore {
    /// Makes the first attempt at a request of the pool. The request of a partition already has its claim. The request of a
    /// task has a `keep_alive`, and its first attempt makes no source call.
    pub(crate) fn begin_get(
        self: &Arc<Self>,
        request: &BlockRequest,
        wait: Duration,
        keep_alive: Option<KeepAlive>,
    ) -> Result<FirstAttempt<Self>> {
        if let Some(block) = self.take(request.class) {
            self.record_get(&block, request, None);
            return Ok(FirstAttempt::Served(block));
        }
        let begun = Instant::now();
        let calls = if keep_alive.is_some() { AllowedCalls::None } else { AllowedCalls::All };
        let until = if keep_alive.is_some() { begun } else { deadline(begun, wait.max(CALL_PATIENCE)) };
        let served = match self.attempt(request, Rules { calls, counts_miss: true, until }) {
            Ok(block) => Ok(block),
            Err(error) => {
                let refusal = error.refusal();
                if refusal.as_ref().is_none_or(|refusal| self.count_refusal(request, wait, refusal)) {
                    let waiter = Waiter::new(request.clone(), request.class, (begun, wait), keep_alive);
                    return Ok(FirstAttempt::Waiting(WaitTicket::new(self, waiter, refusal)));
                }
                self.fall_back_or_fail(request, refusal, wait)
            }
        };
        self.record_outcome(&served, request, Some(begun));
        served.map(FirstAttempt::Served)
    }

    /// Returns an idle block of the class or a block with completed copies, and the claim in the partition of the request. Pins
    /// nothing and never waits for room.
    pub(crate) fn try_get(&self, request: &BlockRequest) -> Option<(Block, Option<Claim>)> {
        // Checked before the claim: a claim for a request that then finds no block would make other requests of the partition
        // fail meanwhile.
        if request.partition.is_some() && self.in_flight.count() == 0 && self.idle.count_of(request.class) == 0 {
            return None;
        }
        let claim = request.partition.as_ref().map(|partition| partition.try_claim(request.class)).transpose().ok()?;
        let block = self.take(request.class).or_else(|| self.take_completed(request.class))?;
        self.record_get(&block, request, None);
        Some((block, claim))
    }

    /// Returns an idle block of `class`.
    pub(super) fn take(&self, class: Class) -> Option<Block> {
        self.idle.take(class).map(Block::from_entry)
    }

    /// Sweeps completed copies until an idle block of `class` is found or nothing more completes, and returns the block.
    fn take_completed(&self, class: Class) -> Option<Block> {
        while self.in_flight.count() > 0 {
            let swept = self.in_flight.sweep(QueryScope::Undecided);
            let found_none = swept.completed.is_empty();
            self.complete(swept);
            let block = self.take(class);
            // Another thread may take the completed block first. Then another sweep may find more.
            if block.is_some() || found_none {
                return block;
            }
        }
        None
    }

    /// Makes a first attempt at `request`: returns a block with completed copies or, as far as `rules` permit, a block of new
    /// memory. While other requests wait, it searches for memory only if `request` fits in addition to the head of the queue. A
    /// request that exceeds the limit may receive pageable memory. The call may be slow.
    pub(super) fn attempt(self: &Arc<Self>, request: &BlockRequest, rules: Rules) -> Result<Block, AttemptError> {
        let class = request.class;
        if let Some(block) = self.take_completed(class) {
            return Ok(block);
        }
        let block = self.overtake_head(class).map_err(AttemptError::Refused).and_then(|overtaken| {
            let until = if overtaken > 0 { Instant::now() } else { rules.until };
            let block = self.search(class, Rules { until, ..rules }, overtaken);
            if block.is_err() {
                self.waiters.end_overtaking(overtaken, self.memory.supply.bytes_to_overtake(class));
            } else if overtaken == 0 {
                self.shortage.end_if_calm(&self.log, self.time.coarse_us());
                self.enforce_max_idle_bytes();
            }
            block
        });
        block.or_else(|error| {
            // Waiting cannot help a request that exceeds the limit, so it falls back to pageable memory immediately.
            let too_large = matches!(error, AttemptError::Refused(_)) && !self.memory.supply.could_hold(class);
            let pageable = if too_large { self.new_pageable_block(request.len, class) } else { None };
            pageable.ok_or(error)
        })
    }

    /// Returns a block of new memory for `class`, or an idle block that was returned during the search. `head` is the number of
    /// the head of the queue if the request overtakes it, and 0 otherwise. The call may be slow.
    pub(super) fn search(self: &Arc<Self>, class: Class, rules: Rules, head: u64) -> Result<Block, AttemptError> {
        let (now_us, calls) = (self.time.coarse_us(), rules.calls);
        let idle = Cell::new(None);
        let take_idle = || self.take(class).map(|block| idle.set(Some(block))).is_some();
        let find = |rules| match (self.is_closed(), self.device_lost.get()) {
            (true, _) => Err(Refusal::Closed.into()),
            (false, Some(why)) => Err(Refusal::Source(why.clone()).into()),
            (false, None) => self.memory.supply.find(class, now_us, rules, &**self, &take_idle),
        };
        let found = match find(rules) {
            Err(AttemptError::Refused(refusal)) if self.reclaim_from_other_pools(&refusal, calls) => match calls {
                AllowedCalls::None => Err(AttemptError::NeedsCall),
                _ => find(Rules { counts_miss: false, ..rules }),
            },
            found => found,
        };
        let new_block = |memory| {
            self.idle.count_allocated(now_us);
            self.classes.count_miss(class);
            let mut block = self.new_block(memory, class);
            if self.config.zero {
                // The memory may contain data of an earlier use by this process.
                self.memory.source().while_mapped(&mut || block.zero());
            }
            block.start_timing(self.time.read_us());
            block
        };
        let memory = found.inspect_err(|error| self.record_failed_attempt(error, calls))?;
        let block = memory.map(new_block).or_else(|| idle.take());
        let mut block = block.unwrap_or_else(|| unreachable!("without memory, `take_idle` has taken a block"));
        block.set_overtaken_head(head);
        self.request_pace(self.pace_of_change());
        Ok(block)
    }

    /// Permits a miss to search for memory. Returns 0 if no request waits, or the number of the head of the queue if the miss
    /// fits in addition to the head.
    fn overtake_head(&self, class: Class) -> Result<u64, Refusal> {
        self.tick_if_overdue();
        self.evict_over_limit(None);
        if !self.has_waiters() {
            return Ok(0);
        }
        let (supply, budget) = (&self.memory.supply, &self.memory.budget);
        // Other members of a shared limit, user memory and quarantined blocks reduce the bytes that blocks may hold.
        let (used_bytes, max_bytes) = (budget.used_bytes(), budget.max_bytes().unwrap_or(0));
        let share_bytes = used_bytes.saturating_add(budget.room_for(max_bytes.saturating_sub(used_bytes)));
        let lost_bytes = self.counters.user_memory_bytes.get() + self.counters.quarantined_bytes.get();
        let most_bytes = max_bytes.min(share_bytes).saturating_sub(lost_bytes);
        let needed_bytes = supply.bytes_to_overtake(class);
        let overtaken = self.waiters.try_overtake(|first| (supply.room_to_overtake(first, most_bytes), needed_bytes));
        overtaken.map_err(|(waiting, first_bytes)| Refusal::Queued { level: LimitLevel::Pool, waiting, first_bytes })
    }

    fn record_failed_attempt(&self, error: &AttemptError, calls: AllowedCalls) {
        let AttemptError::Refused(refusal) = error else { return };
        let by_source = matches!(refusal, Refusal::Source(_));
        if by_source {
            self.backoff.record_refusal(self.time.read_us());
            self.watch_device();
        }
        if by_source || calls != AllowedCalls::NoAcquire {
            // Relaxed: a statistic.
            self.diagnosis.is_by_source.store(by_source, Ordering::Relaxed);
        }
    }

    /// Counts a refused request towards a shortage if pinned or pageable memory could ever serve it, and logs the shortage.
    /// Returns whether the request may wait.
    pub(super) fn count_refusal(&self, request: &BlockRequest, wait: Duration, refusal: &Refusal) -> bool {
        let &BlockRequest { len, class, .. } = request;
        let could_hold = self.memory.supply.could_hold(class);
        // A request that can never be served is not a sign of a shortage.
        let servable = !self.is_closed() && (could_hold || self.memory.could_be_pageable(class));
        let may_wait = servable && !wait.is_zero() && !self.has_ended();
        if servable {
            self.count_short_request(class);
            // A full pool is an ordinary event if the request can wait for room, and is logged as such.
            let ordinary = may_wait && could_hold && !matches!(refusal, Refusal::Source(_));
            let why = || (ordinary, self.memory.explain(refusal, class).to_string(), self.stats());
            self.shortage.count_refused(&self.log, len as u64, self.time.coarse_us(), why);
        }
        if may_wait {
            self.log.waiting(len as u64, class.bytes as u64);
        }
        may_wait
    }

    /// Returns pageable memory, or an error. Without a `refusal`, the driver calls for a task did not return within its `wait`.
    pub(super) fn fall_back_or_fail(
        self: &Arc<Self>,
        request: &BlockRequest,
        refusal: Option<Refusal>,
        wait: Duration,
    ) -> Result<Block> {
        if let Some(block) = self.new_pageable_block(request.len, request.class) {
            return Ok(block);
        }
        if let Some(partition) = &request.partition {
            partition.failed.add(1);
        }
        self.counters.failed_requests.add(1);
        let late = || ErrorKind::Late { requested_bytes: request.len as u64, waited: wait }.into();
        Err(refusal.map_or_else(late, |refusal| self.refusal_error(request, refusal, Purpose::Request)))
    }

    /// Returns the error of a refused request, reserve or claim. Logs the first request that fails and each power of ten.
    pub(super) fn refusal_error(&self, request: &BlockRequest, refusal: Refusal, purpose: Purpose) -> Error {
        if self.is_closed() {
            return ErrorKind::Closed.into();
        }
        let partition = request.partition.as_ref().filter(|_| refusal.is_by_partition());
        let stats = partition.map_or_else(|| self.stats(), |partition| partition.stats());
        let requested_bytes = request.len as u64;
        let refused = self.memory.explain(&refusal, request.class);
        let tag = request.tag.as_ref().map(|tag| tag.name().to_owned());
        let failed =
            FailedRequest { requested_bytes, tag, is_reserve: purpose == Purpose::Reserve, refused: refused.clone() };
        let mut dump = self.dump_of(&stats, Some(failed));
        if refusal.is_by_partition() {
            dump.limit = self.memory.limit_name(LimitLevel::Partition);
        }
        if purpose == Purpose::Request {
            *self.diagnosis.failure.lock() = dump.likely_cause().map(|likely| (refused.cause(), likely));
            if is_power_of_ten(self.counters.refused_requests.add(1)) {
                self.log.out_of_memory(&dump);
            }
        }
        let no_memory = NoMemory { requested_bytes, refused, usage: usage_text(&stats), report: dump.body() };
        let by_source = matches!(refusal, Refusal::Source(_));
        if by_source { ErrorKind::Backend(no_memory) } else { ErrorKind::Limit(no_memory) }.into()
    }

    /// Returns a pageable block, if this pool may return one and the limit leaves room.
    pub(super) fn new_pageable_block(self: &Arc<Self>, len: usize, class: Class) -> Option<Block> {
        let pageable = self.memory.pageable.as_ref().filter(|_| !self.is_closed())?;
        let memory = pageable.acquire(class.bytes, Rules::retry(Instant::now())).ok()?;
        self.classes.count_pageable(class);
        let mut block = self.new_block(memory, class);
        block.start_timing(self.time.read_us());
        let nth = self.counters.pageable.add(1);
        self.shortage.count_pageable();
        if is_power_of_ten(nth) {
            let stats = self.stats();
            self.log.pageable(len as u64, nth, stats.memory.pageable_bytes, stats.limits.max_bytes);
        }
        Some(block)
    }

    /// Hands `block` to the head of the queue, or releases it to make room. Returns `block` if no request waits, or if the pool
    /// reuses no blocks: it has ended, or its limit on idle buffers is 0.
    pub(super) fn offer_to_head(&self, block: Block) -> Option<Block> {
        // Under a limit of 0 no buffer is used twice.
        if !self.has_waiters() || self.has_ended() || self.config.pool_size_limit == 0 {
            return Some(block);
        }
        let class = block.class();
        // A block that is handed over is counted when the request takes it.
        let block = self.waiters.offer(self, block, class)?;
        if !self.has_waiters() {
            return Some(block);
        }
        self.counters.made_room.add(1);
        self.evict(block, EvictionReason::Reclaimed);
        if self.memory.arena().is_none() {
            self.backoff.end();
        }
        self.waiters.wake_head();
        self.tear_down_if_unused();
        None
    }
}
