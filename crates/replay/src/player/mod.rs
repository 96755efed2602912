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
//! Owns the queue of waiting requests, and counts waits and timeouts as a program with blocking requests would. All numbers
//! about memory come from the pool. A trace of requests is replayed open-loop: it continues while requests wait. A recording
//! contains the program's threads: if requests waited, or may wait at the limit of the replay, their threads block (`steps.rs`).

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use self::steps::{Due, Schedule};
use super::replay::Replay;
use super::report::ReplayReport;
use super::sim::SimSource;
use super::workload::Workload;
use crate::format::{TraceError, UNSPECIFIED_ALIGN};
use crate::threads::{Op, Step, StepId};
use pinpool::unstable::{LogSampler, ManualClock, RateCheckReport, compact_step, maintenance_period, run_due_work};
use pinpool::{Backend, Error, Limit, PinnedBuf, Pool};
use pinpool_os::sync::unmodeled::Mutex;

mod steps;

/// A path below which there are no files, so that the replay reads nothing from the machine.
const NO_MACHINE: &str = "/dev/null";

/// Longest wait of a request if the replay sets none.
const DEFAULT_WAIT: Duration = Duration::from_millis(100);

/// Longest time between two polls of the pool.
const MAINTAIN_EVERY_US: u64 = 1_000_000;
/// Shortest time between two polls of a recording: the pace of the maintenance thread while some memory is idle.
const TICK_EVERY_US: u64 = 100_000;
/// Time after the last return at which the pinned bytes are read.
const SETTLING_US: u64 = 60_000_000;

/// Time from an event until the maintenance thread starts to compact.
const WAKE_NS: u64 = 50_000;
/// A request is slow if its remaps take longer.
const SLOW_NS: u64 = 500_000;
/// Requests before this time belong to the start of the program, which pins memory.
const STARTED_US: u64 = 1_000_000;

/// Plays a workload on a pool.
struct Player<'a> {
    pool: Pool,
    clock: ManualClock,
    source: Arc<SimSource>,
    /// Time at which the pool is polled next. For a recording, the program's maintenance thread runs then.
    next_maintenance_us: u64,
    /// Time at which the maintenance thread has finished its compaction.
    compacted_ns: u64,
    wait_us: u64,
    /// The buffer of each served request until its return.
    held: HashMap<usize, PinnedBuf>,
    /// Waiting requests in order of arrival.
    queue: VecDeque<Ticket>,
    schedule: Schedule<'a>,
    /// Time of the current event.
    now_ns: u64,
    /// The player's counters; the pool provides the rest at the end.
    report: ReplayReport,
    pinned_byte_us: u128,
    checks: Arc<Mutex<Vec<RateCheckReport>>>,
    /// Requested bytes of the held buffers.
    requested_bytes: u64,
    workload: &'a Workload,
    observe: Observe<'a>,
}

/// A function that is called with the pool after each step.
type Observe<'a> = &'a mut dyn FnMut(&Pool);

/// A request, and the step that makes it.
struct Ticket {
    name: usize,
    bytes: usize,
    since_us: u64,
    step: StepId,
}

impl Replay {
    /// Replays all of `workload` on a new pool, then lets a minute pass.
    ///
    /// # Errors
    ///
    /// If the workload requests more than any pool can provide.
    pub fn play(&self, workload: &Workload) -> Result<ReplayReport, TraceError> {
        self.play_observed(workload, &mut |_| ())
    }

    /// Replays `workload` as [`play`](Replay::play) does, and calls `observe` with the pool after each step.
    ///
    /// # Errors
    ///
    /// The errors of [`play`](Replay::play).
    pub fn play_observed(&self, workload: &Workload, observe: Observe<'_>) -> Result<ReplayReport, TraceError> {
        Ok(Player::new(self, workload, observe)?.play()?)
    }
}

impl<'a> Player<'a> {
    /// Creates a player with a new pool, which is independent of the machine, the environment and the system clock, so that
    /// replays are repeatable.
    fn new(replay: &Replay, workload: &'a Workload, observe: Observe<'a>) -> Result<Self, Error> {
        let Replay { source: kind, max_bytes, wait, .. } = *replay;
        let source = Arc::new(SimSource::of(kind, SimSource::DEFAULT_TOTAL_BYTES));
        let (clock, checks) = (ManualClock::default(), Arc::<Mutex<Vec<RateCheckReport>>>::default());
        let checked = checks.clone();
        let builder = replay
            .builder()
            .unstable_host_root(NO_MACHINE)
            .unstable_log_sampler(LogSampler::new())
            .unstable_clock(clock.clone())
            .unstable_settings(|only| only.maintained_by_caller = workload.is_closed)
            .unstable_on_check(move |check| checked.lock().push(*check))
            .unstable_settings(|only| only.pressure = Some(NO_MACHINE.into()))
            .backend(Backend::Source(source.clone()))
            .max_bytes(max_bytes.map_or(Limit::Unlimited, Limit::Bytes))
            // The player queues requests: no virtual time passes while a thread sleeps.
            .wait(Duration::ZERO);
        let is_closed = workload.is_closed && (workload.has_waited || max_bytes.is_some());
        Ok(Self {
            pool: builder.build()?,
            clock,
            source,
            next_maintenance_us: 0,
            compacted_ns: 0,
            wait_us: u64::try_from(wait.unwrap_or(DEFAULT_WAIT).as_micros()).unwrap_or(u64::MAX),
            held: HashMap::new(),
            queue: VecDeque::new(),
            schedule: Schedule::new(&workload.threads, is_closed),
            now_ns: 0,
            report: ReplayReport { source: kind, max_bytes, ..ReplayReport::default() },
            pinned_byte_us: 0,
            checks,
            requested_bytes: 0,
            workload,
            observe,
        })
    }

    /// Performs all of the workload.
    fn play(mut self) -> Result<ReplayReport, Error> {
        while let Some(next_us) = self.next_event_us() {
            let now_us = self.clock.now_us();
            if let Some((at_ns, due)) = self.schedule.pop(now_us) {
                self.now_ns = at_ns;
                self.perform(due)?;
                (self.observe)(&self.pool);
                continue;
            }
            self.now_ns = next_us * 1_000;
            if next_us > now_us { self.advance_to(next_us)? } else { self.serve()? }
        }
        if self.schedule.is_closed {
            // Without a timeout, requests may be left that no return will serve.
            self.report.timeouts += self.queue.len() as u64;
            self.queue.clear();
        } else {
            self.advance_to(self.workload.duration_us)?;
        }
        self.finish()
    }

    /// Returns the time at which an event is due or the head of the queue times out; `None` at the end. If only waiting
    /// requests are left, lets idle threads return buffers.
    fn next_event_us(&mut self) -> Option<u64> {
        match (self.schedule.next_us(), self.schedule.is_closed) {
            (None, false) => return None,
            (None, true) if !self.queue.is_empty() => self.schedule.return_held(self.clock.now_us() * 1_000),
            _ => {}
        }
        let events_us = [self.schedule.next_us(), self.expires_us()].into_iter().flatten();
        events_us.filter(|&event_us| event_us < u64::MAX).min()
    }

    /// Ends a request with a buffer, or without one as a fallback. Its thread continues.
    fn end_request(&mut self, ticket: &Ticket, buffer: Option<PinnedBuf>) {
        if self.schedule.is_closed {
            self.schedule.served(ticket.step, ticket.name, self.now_ns);
        }
        let report = &mut self.report;
        let Some(buffer) = buffer else {
            report.timeouts += 1;
            return;
        };
        self.requested_bytes += ticket.bytes as u64;
        self.held.insert(ticket.name, buffer);
        let sums = self.source.sums.lock();
        if sums.peak_bytes > report.peak_pinned_bytes {
            (report.peak_pinned_bytes, report.asked_at_peak_bytes) = (sums.peak_bytes, self.requested_bytes);
        } else if sums.pinned_bytes == sums.peak_bytes {
            report.asked_at_peak_bytes = report.asked_at_peak_bytes.max(self.requested_bytes);
        }
    }

    /// Counts the source calls of one request.
    fn count_calls(&mut self, now_us: u64) {
        let (calls, report) = (self.source.take_calls(), &mut self.report);
        report.moved_bytes += calls.moved_bytes;
        report.moving_ns += calls.moving_ns;
        if now_us >= STARTED_US && calls.pins == 0 {
            report.slow_requests += u64::from(calls.waited_ns > SLOW_NS);
            report.worst_moves_us = report.worst_moves_us.max(calls.waited_ns / 1_000);
        }
    }

    /// Runs the pool's work that is due. For a recording, runs it at the pace of the maintenance thread.
    fn maintain(&mut self) {
        let (now_us, is_recording) = (self.clock.now_us(), self.workload.is_closed);
        if is_recording && now_us < self.next_maintenance_us {
            return;
        }
        run_due_work(&self.pool);
        let period = maintenance_period(&self.pool).filter(|_| is_recording);
        let period_us = period.and_then(|period| u64::try_from(period.as_micros()).ok()).unwrap_or(MAINTAIN_EVERY_US);
        self.next_maintenance_us = now_us + period_us.clamp(TICK_EVERY_US, MAINTAIN_EVERY_US);
    }

    fn get(&mut self, name: usize, bytes: u64, step: StepId) -> Result<(), Error> {
        self.maintain();
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        let ticket = Ticket { name, bytes, since_us: self.clock.now_us(), step };
        let buffer = if self.queue.is_empty() { self.try_get(bytes)? } else { None };
        self.count_calls(ticket.since_us);
        self.report.gets += 1;
        if self.report.gets == self.workload.requests / 2 {
            self.report.pin_calls = self.pool.stats().memory.pin.count;
        }
        // A request that an empty pool could not serve under the limit does not wait.
        let class_bytes = self.pool.unstable_config().rounding.class_bytes(bytes, UNSPECIFIED_ALIGN)? as u64;
        let fits_limit = self.report.max_bytes.is_none_or(|max_bytes| class_bytes <= max_bytes);
        let waits = buffer.is_none() && self.wait_us > 0 && fits_limit;
        if !self.schedule.is_closed {
            self.schedule.served(step, name, self.now_ns);
        }
        if waits {
            self.report.waits += 1;
            self.queue.push_back(ticket);
        } else {
            self.end_request(&ticket, buffer);
        }
        Ok(())
    }

    fn put(&mut self, name: usize) -> Result<(), Error> {
        self.maintain();
        if let Some(buffer) = self.held.remove(&name) {
            self.requested_bytes -= buffer.len() as u64;
        } else if let Some(at) = self.queue.iter().position(|ticket| ticket.name == name)
            && let Some(ticket) = self.queue.remove(at)
        {
            self.report.waited_us += self.clock.now_us() - ticket.since_us;
        }
        self.report.ended_us = self.clock.now_us();
        self.serve()
    }

    /// Returns the time at which the head of the queue times out.
    fn expires_us(&self) -> Option<u64> {
        self.queue.front().map(|first| first.since_us.saturating_add(self.wait_us))
    }

    fn advance_to(&mut self, end_us: u64) -> Result<(), Error> {
        while self.clock.now_us() < end_us {
            let (now_us, settled_us) = (self.clock.now_us(), self.report.ended_us + SETTLING_US);
            let stops_us = [Some(self.next_maintenance_us), Some(settled_us), self.expires_us()].into_iter().flatten();
            let step_us = stops_us.filter(|&stop_us| stop_us > now_us).fold(end_us, u64::min) - now_us;
            self.pinned_byte_us += u128::from(self.pool.stats().memory.held_bytes) * u128::from(step_us);
            self.clock.advance_us(step_us);
            self.maintain();
            self.compact(now_us);
            self.serve()?;
            (self.observe)(&self.pool);
            if self.clock.now_us() == settled_us {
                self.report.pinned_after_60s_bytes = self.pool.stats().memory.held_bytes;
            }
        }
        Ok(())
    }

    /// Runs the compaction steps that the maintenance thread had time for since `since_us`.
    fn compact(&mut self, since_us: u64) {
        let now_ns = self.clock.now_us() * 1_000;
        self.compacted_ns = self.compacted_ns.max(since_us * 1_000 + WAKE_NS);
        self.source.take_calls();
        while self.compacted_ns < now_ns && compact_step(&self.pool) {
            let calls = self.source.take_calls();
            self.compacted_ns += calls.moving_ns;
            self.report.moving_ns += calls.moving_ns;
            self.report.prepared_bytes += calls.moved_bytes;
        }
    }

    fn serve(&mut self) -> Result<(), Error> {
        while let Some(first) = self.queue.front() {
            let waited_us = self.clock.now_us() - first.since_us;
            let buffer = self.try_get(first.bytes)?;
            if buffer.is_none() && waited_us < self.wait_us {
                break;
            }
            let Some(ticket) = self.queue.pop_front() else { break };
            self.report.waited_us += waited_us;
            self.count_calls(self.clock.now_us());
            self.end_request(&ticket, buffer);
        }
        Ok(())
    }

    /// Requests a buffer. Returns `None` if the limit leaves no memory for it.
    fn try_get(&self, bytes: usize) -> Result<Option<PinnedBuf>, Error> {
        match self.pool.get(bytes) {
            Err(error) if error.is_limit() => Ok(None),
            outcome => outcome.map(Some),
        }
    }

    /// Advances to a minute after the last return, unless the trace lasts longer, and completes the report.
    fn finish(mut self) -> Result<ReplayReport, Error> {
        let (lasted_us, held_bytes) = (self.clock.now_us(), self.pool.stats().memory.held_bytes);
        let mean_pinned_bytes = self.pinned_byte_us.checked_div(lasted_us.into()).unwrap_or(held_bytes.into());
        self.advance_to(self.report.ended_us + SETTLING_US)?;
        let stats = self.pool.stats();
        let pin_calls = stats.memory.pin.count;
        let checks = self.checks.lock();
        Ok(ReplayReport {
            preset: stats.preset,
            rounding: self.pool.unstable_config().rounding.to_string(),
            pin_calls,
            // So far the report contains the pin calls of the first half.
            late_pin_calls: pin_calls - self.report.pin_calls,
            pinned_bytes_total: stats.memory.pin.bytes,
            peak_pinned_bytes: stats.memory.peak_held_bytes,
            peak_requested_bytes: self.workload.peak_requested_bytes(),
            mean_pinned_bytes: u64::try_from(mean_pinned_bytes).unwrap_or(u64::MAX),
            hits: stats.requests.hits,
            evicted: stats.memory.evictions.over_limit,
            reclaimed: stats.memory.evictions.reclaimed,
            raises: stats.limits.raises,
            reductions: stats.limits.reductions,
            pool_size_limit: stats.limits.pool_size_limit,
            releases: stats.memory.unpin.count,
            released_bytes: stats.memory.unpin.bytes,
            checks: checks.len() as u64,
            last_lines: checks.last().map(ToString::to_string),
            ..self.report
        })
    }

    fn perform(&mut self, due: Due) -> Result<(), Error> {
        let step = match due {
            Due::Free(name) => return self.put(name),
            Due::Ready(step) => {
                self.schedule.ready(step, self.now_ns);
                return Ok(());
            }
            Due::Step(step) => step,
        };
        let Step { line, operation, free_after_ns, .. } = self.schedule.threads[step.0].steps[step.1];
        match (operation, free_after_ns) {
            (Op::Get { name, bytes }, _) => return self.get(name, bytes, step),
            (Op::Put { name }, Some(0)) => self.put(name)?,
            (Op::Put { name }, Some(after_ns)) => self.schedule.free_later(self.now_ns + after_ns, line, name),
            (Op::Put { .. }, None) => {}
            (Op::Clear, _) => {
                self.pool.clear();
                self.serve()?;
            }
        }
        self.schedule.finish(step, self.now_ns);
        Ok(())
    }
}
