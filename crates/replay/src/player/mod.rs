//! Plays a workload through the public pool on simulated memory, in virtual time.
//!
//! ```text
//!  get      poll the pool ─▶ Pool::get ─▶ held
//!                              └─ at the limit ─▶ wait at the end of the queue; a fallback if larger than the limit
//!  put      poll the pool ─▶ return the buffer, or leave the queue ─▶ serve
//!  advance  in steps of at most a second: advance the clock ─▶ poll the pool ─▶ compact ─▶ serve
//!  poll     run what is due; for a recording only as often as the maintenance thread does
//!  compact  run the compaction steps that the maintenance thread had time for
//!  serve    retry the head of the queue until it must wait; a request that timed out becomes a fallback
//! ```
//!
//! Owns the queue of waiting requests, and counts waits and fallbacks as a program with blocking requests would. All numbers about
//! memory come from the pool. A trace of requests is replayed open-loop: it continues while requests wait. A recording contains the
//! program's threads: if requests waited, or may wait at the limit of the replay, their threads block (`steps.rs`).

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use super::priced::CallSums;
use super::report::ReplayReport;
use super::sim::SourceKind;
use super::workload::Workload;
use crate::format::DEFAULT_ALIGN;
use pinpool::unstable::{ManualClock, compaction_step, maintenance_period, run_due};
use pinpool::{Error, PinnedBuf, Pool};

mod steps;

/// Longest time between two polls of the pool.
const POLL_EVERY_US: u64 = 1_000_000;
/// Shortest time between two polls in which anything may be due.
const TICK_EVERY_US: u64 = 10_000;
/// Time after the last return at which the pinned bytes are read.
const SETTLING_US: u64 = 60_000_000;

/// Time from an event until the maintenance thread starts to compact.
const WAKE_NS: u64 = 50_000;
/// A request is slow if its remaps take longer.
const SLOW_NS: u64 = 500_000;
/// Earlier requests belong to the start of the program, which pins memory.
const STARTED_US: u64 = 1_000_000;

/// Plays a workload on a pool.
pub(super) struct Player<'a> {
    pool: Pool,
    clock: ManualClock,
    sums: Arc<CallSums>,
    /// The workload is a recording, of a program with a maintenance thread, which polls next at this time.
    is_recording: bool,
    next_poll_us: u64,
    /// When the maintenance thread has finished its compaction.
    compacted_ns: u64,
    max_bytes: Option<u64>,
    wait_us: u64,
    held: HashMap<u64, GetState>,
    /// Waiting requests in order of arrival.
    queue: BTreeMap<u64, Ticket>,
    next_ticket: u64,
    /// Names of waiting requests that were served since the last check.
    served: Vec<u64>,
    /// The player's counters; the pool provides the rest at the end.
    report: ReplayReport,
    half_gets: u64,
    page_locks_at_half: u64,
    pinned_byte_us: u128,
    /// Requested bytes of the held buffers.
    requested_bytes: u64,
    /// Bytes pinned a minute after the last return; `None` until that minute has passed.
    pinned_after_settling: Option<u64>,
    observe: Observe<'a>,
}

/// Called with the pool after each step.
pub(super) type Observe<'a> = &'a mut dyn FnMut(&Pool);

/// State of a request until its buffer is returned.
enum GetState {
    /// Served.
    Pinned(PinnedBuf),
    Waiting {
        ticket: u64,
    },
    Fallback,
}

struct Ticket {
    name: u64,
    bytes: usize,
    since_us: u64,
}

impl<'a> Player<'a> {
    pub(super) fn new(
        pool: Pool,
        clock: ManualClock,
        sums: Arc<CallSums>,
        (source, max_bytes, wait): (SourceKind, Option<u64>, Duration),
        workload: &Workload,
        observe: Observe<'a>,
    ) -> Self {
        Self {
            pool,
            clock,
            sums,
            is_recording: workload.is_closed,
            next_poll_us: 0,
            compacted_ns: 0,
            max_bytes,
            wait_us: u64::try_from(wait.as_micros()).unwrap_or(u64::MAX),
            held: HashMap::new(),
            queue: BTreeMap::new(),
            next_ticket: 0,
            served: Vec::new(),
            report: ReplayReport { source: source.name(), ..ReplayReport::default() },
            half_gets: workload.gets / 2,
            page_locks_at_half: 0,
            pinned_byte_us: 0,
            requested_bytes: 0,
            pinned_after_settling: None,
            observe,
        }
    }

    /// Performs all of `workload`.
    pub(super) fn play(mut self, workload: &Workload) -> Result<ReplayReport, Error> {
        let is_closed = workload.is_closed && (workload.has_waited || self.max_bytes.is_some());
        self.play_steps(&workload.threads, is_closed)?;
        if !is_closed {
            self.advance(workload.duration_us.saturating_sub(self.clock.now_us()))?;
        }
        self.finish(workload.peak_requested_bytes())
    }

    /// Counts a served request of this many bytes.
    fn count_served(&mut self, bytes: usize) {
        self.requested_bytes += bytes as u64;
        let (now, peak) = self.sums.pinned();
        let report = &mut self.report;
        if peak > report.peak_pinned_bytes {
            (report.peak_pinned_bytes, report.asked_at_peak_bytes) = (peak, self.requested_bytes);
        } else if now == peak {
            report.asked_at_peak_bytes = report.asked_at_peak_bytes.max(self.requested_bytes);
        }
    }

    /// Counts the source calls of one request.
    fn count_calls(&mut self, now_us: u64) {
        let (calls, report) = (self.sums.take(), &mut self.report);
        report.moved_bytes += calls.moved_bytes;
        report.moving_ns += calls.moving_ns;
        if now_us >= STARTED_US && calls.commits == 0 {
            report.slow_gets += u64::from(calls.waited_ns > SLOW_NS);
            report.worst_moves_us = report.worst_moves_us.max(calls.waited_ns / 1_000);
        }
    }

    /// Runs what is due: for a recording, at the pace of the maintenance thread.
    fn poll(&mut self) {
        let now_us = self.clock.now_us();
        if now_us < self.next_poll_us {
            return;
        }
        run_due(&self.pool);
        if self.is_recording {
            let period = maintenance_period(&self.pool).and_then(|period| u64::try_from(period.as_micros()).ok());
            self.next_poll_us = now_us + period.unwrap_or(POLL_EVERY_US).clamp(TICK_EVERY_US, POLL_EVERY_US);
        }
    }

    fn get(&mut self, name: u64, bytes: usize) -> Result<(), Error> {
        self.poll();
        let ticket = Ticket { name, bytes, since_us: self.clock.now_us() };
        let pinned = if self.queue.is_empty() { self.try_get(&ticket)? } else { None };
        self.count_calls(ticket.since_us);
        let held = match pinned {
            Some(buffer) => {
                self.count_served(bytes);
                GetState::Pinned(buffer)
            }
            None if self.wait_us == 0 || !self.fits_limit(&ticket)? => {
                self.report.fallbacks += 1;
                GetState::Fallback
            }
            None => {
                self.report.waits += 1;
                self.next_ticket += 1;
                self.queue.insert(self.next_ticket, ticket);
                GetState::Waiting { ticket: self.next_ticket }
            }
        };
        self.held.insert(name, held);
        self.report.gets += 1;
        if self.report.gets == self.half_gets {
            self.page_locks_at_half = self.pool.stats().memory.pin.count;
        }
        Ok(())
    }

    fn put(&mut self, name: u64) -> Result<(), Error> {
        self.poll();
        match self.held.remove(&name) {
            Some(GetState::Pinned(buffer)) => self.requested_bytes -= buffer.len() as u64,
            Some(GetState::Waiting { ticket }) => {
                let waited_us = self.queue.remove(&ticket).map(|ticket| self.clock.now_us() - ticket.since_us);
                self.report.waited_us += waited_us.unwrap_or(0);
            }
            Some(GetState::Fallback) | None => {}
        }
        self.report.ended_us = self.clock.now_us();
        self.pinned_after_settling = None;
        self.serve()
    }

    fn advance(&mut self, micros: u64) -> Result<(), Error> {
        let end_us = self.clock.now_us() + micros;
        loop {
            let now_us = self.clock.now_us();
            if now_us >= end_us {
                return Ok(());
            }
            let settled_us = self.report.ended_us + SETTLING_US;
            let expires_us = self.queue.values().next().map(|first| first.since_us.saturating_add(self.wait_us));
            let polls_us = if self.is_recording { self.next_poll_us } else { now_us + POLL_EVERY_US };
            let stops_us = [Some(polls_us), Some(settled_us), expires_us].into_iter().flatten();
            let next_us = stops_us.filter(|&stop_us| stop_us > now_us).fold(end_us, u64::min);
            let step_us = next_us - now_us;
            self.pinned_byte_us += u128::from(self.pool.stats().memory.held_bytes) * u128::from(step_us);
            self.clock.advance_us(step_us);
            self.poll();
            self.compact(now_us);
            self.serve()?;
            (self.observe)(&self.pool);
            if self.clock.now_us() == settled_us {
                self.pinned_after_settling = Some(self.pool.stats().memory.held_bytes);
            }
        }
    }

    /// Runs the compaction steps that the maintenance thread had time for since `since_us`.
    fn compact(&mut self, since_us: u64) {
        let now_ns = self.clock.now_us() * 1_000;
        self.compacted_ns = self.compacted_ns.max(since_us * 1_000 + WAKE_NS);
        self.sums.take();
        while self.compacted_ns < now_ns && compaction_step(&self.pool) {
            let calls = self.sums.take();
            self.compacted_ns += calls.moving_ns;
            self.report.moving_ns += calls.moving_ns;
            self.report.prepared_bytes += calls.moved_bytes;
        }
    }

    fn serve(&mut self) -> Result<(), Error> {
        while let Some((_, first)) = self.queue.first_key_value() {
            let waited_us = self.clock.now_us() - first.since_us;
            let buffer = self.try_get(first)?;
            if buffer.is_none() && waited_us < self.wait_us {
                return Ok(());
            }
            let Some((_, Ticket { name, bytes, .. })) = self.queue.pop_first() else { return Ok(()) };
            let held = match buffer {
                Some(buffer) => {
                    self.count_served(bytes);
                    GetState::Pinned(buffer)
                }
                None => {
                    self.report.fallbacks += 1;
                    GetState::Fallback
                }
            };
            self.held.insert(name, held);
            self.served.push(name);
            self.report.waited_us += waited_us;
            self.count_calls(self.clock.now_us());
        }
        Ok(())
    }

    /// A buffer; `None` if the limit leaves no memory for it.
    fn try_get(&self, ticket: &Ticket) -> Result<Option<PinnedBuf>, Error> {
        match self.pool.get(ticket.bytes) {
            Ok(buffer) => Ok(Some(buffer)),
            Err(error) if error.is_limit() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns whether an empty pool could serve the request under the limit.
    fn fits_limit(&self, ticket: &Ticket) -> Result<bool, Error> {
        let class_bytes = self.pool.config().rounding.class_bytes(ticket.bytes, DEFAULT_ALIGN)? as u64;
        Ok(self.max_bytes.is_none_or(|max_bytes| class_bytes <= max_bytes))
    }

    /// Advances to a minute after the last return, unless the trace did, and completes the report.
    fn finish(mut self, peak_requested_bytes: u64) -> Result<ReplayReport, Error> {
        let lasted_us = u128::from(self.clock.now_us());
        let mean_pinned_bytes = match self.pinned_byte_us.checked_div(lasted_us) {
            Some(bytes) => u64::try_from(bytes).unwrap_or(u64::MAX),
            None => self.pool.stats().memory.held_bytes,
        };
        let pinned_after_60s_bytes = match self.pinned_after_settling {
            Some(bytes) => bytes,
            None => {
                self.advance(self.report.ended_us + SETTLING_US - self.clock.now_us())?;
                self.pool.stats().memory.held_bytes
            }
        };
        let stats = self.pool.stats();
        let page_locks = stats.memory.pin.count;
        Ok(ReplayReport {
            preset: stats.preset,
            rounding: self.pool.config().rounding.to_string(),
            page_locks,
            late_page_locks: page_locks - self.page_locks_at_half,
            bytes_locked: stats.memory.pin.bytes,
            peak_pinned_bytes: stats.memory.peak_held_bytes,
            peak_requested_bytes,
            mean_pinned_bytes,
            pinned_after_60s_bytes,
            front_hits: stats.requests.hits,
            evicted: stats.memory.evictions.over_limit,
            reclaimed: stats.memory.evictions.reclaimed,
            raises: stats.limits.raises,
            lowers: stats.limits.lowers,
            pool_size_limit: stats.limits.max_idle_buffers,
            max_bytes: self.max_bytes,
            releases: stats.memory.unpin.count,
            released_bytes: stats.memory.unpin.bytes,
            ..self.report
        })
    }
}
