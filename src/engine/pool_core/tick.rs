//! Maintenance ticks: reads the clock, completes copies, and does what is due.
//!
//! The [maintenance thread](crate::maintenance_thread) of the process runs the ticks. Misses and returns with copies run them
//! if the pool does not use that thread, or if the thread is late by seconds, because it could not be started or is in a call
//! of another pool. A hit never runs a tick.
//!
//! One thread at a time runs a tick. A thread that finds another thread running one continues without waiting, so no thread
//! waits for the lock that is held during a tick, although slow calls are made under it.

use std::time::{Duration, Instant};

use super::PoolCore;
use crate::backend::{BuiltInSource, Source};
use crate::in_flight::{PendingGroup, QueryScope};
use crate::maintenance_thread::{MaintenanceTask, MaintenanceThread, Pace};
use crate::report;
use crate::stats::{EvictionReason, SourceCalls};
use pinpool_observe::diagnosis::STUCK_AFTER;
use pinpool_os::sync::unmodeled::{AtomicU64, AtomicUsize, Mutex, MutexGuard, Ordering};

/// Shortest time between two ticks: much shorter than any time in the policy, and much longer than a tick.
const TICK_EVERY_US: u64 = 10_000;
/// If the maintenance thread is late by this time, the next miss or return with a copy runs the tick.
const LATE_US: u64 = 3_000_000;
/// Time between two queries of fences that failed.
const QUERY_FAILED_EVERY_US: u64 = 100_000;
/// Maximum number of failed fences that a tick queries again: a lost device may have left thousands.
const QUERIED_AT_ONCE: usize = 64;
/// Growth is logged when the pool first holds this many bytes, and then each time that the bytes have doubled since the last
/// log line.
const FIRST_GROWTH_BYTES: u64 = 64 << 20;

/// The ticks of a pool.
#[derive(Debug)]
pub(super) struct Ticks {
    next_us: AtomicU64,
    /// Locked while a tick runs.
    state: Mutex<TickState>,
    /// Number of findings about the device that were logged, including those logged when the source was made.
    findings: AtomicUsize,
}

#[derive(Debug, Default)]
struct TickState {
    next_query_us: u64,
    /// How long the process had been stopped in total, as of the last tick.
    stopped_us: u64,
    /// Whether the last tick was run because the maintenance thread was late.
    was_late: bool,
    /// Whether the log says that the recording has failed.
    is_failure_logged: bool,
    /// The bytes held, and the counts of source calls, when growth was last logged.
    held_bytes: u64,
    calls: SourceCalls,
}

impl Ticks {
    pub(super) fn new(source: &dyn Source) -> Self {
        let findings = AtomicUsize::new(source.findings().len());
        let stopped_us = MaintenanceThread::of_process().stopped_us();
        let state = Mutex::new(TickState { stopped_us, ..TickState::default() });
        Self { next_us: AtomicU64::new(0), state, findings }
    }

    fn is_due(&self, now_us: u64) -> bool {
        // Relaxed: a hint.
        now_us >= self.next_us.load(Ordering::Relaxed)
    }

    /// Begins a tick if one has been due for `patience_us` and no other thread runs one.
    fn begin(&self, now_us: u64, patience_us: u64) -> Option<MutexGuard<'_, TickState>> {
        // Relaxed: a thread that sees an old value finds the lock taken, or runs a tick again that has nothing to do.
        if now_us < self.next_us.load(Ordering::Relaxed).saturating_add(patience_us) {
            return None;
        }
        let state = self.state.try_lock()?;
        self.next_us.store(now_us.saturating_add(TICK_EVERY_US), Ordering::Relaxed);
        Some(state)
    }
}

impl PoolCore {
    /// Completes copies and does what is due. If there is no maintenance thread, also compacts and pins the next part of a
    /// reserve.
    pub(crate) fn maintain_for_user(&self) {
        self.retry_failures(usize::MAX);
        self.run_due_work();
        // Done even if no tick is due. Counting the idle blocks collects blocks that other threads have returned.
        if self.idle.count() > self.config.pool_size_limit {
            self.evict_over_limit(None);
        }
        if let Some(arena) = self.memory.arena().filter(|_| self.thread.is_none()) {
            arena.compact(self.time.coarse_us());
            arena.run_reserve_step(self);
        }
    }

    /// Completes copies and does what is due, except compaction and the steps of a reserve.
    pub(crate) fn run_due_work(&self) {
        self.sweep_copies(QueryScope::All);
        self.release_idle_for_others();
        self.tick_after(0);
        self.watch_device();
        self.publish_idle();
        self.enforce_limits();
    }

    /// Remaps a few granules towards the compaction target (policy-R13). Returns whether any were remapped.
    pub(crate) fn compact_step(&self) -> bool {
        self.memory.arena().is_some_and(|arena| arena.compact_step(self.time.coarse_us()))
    }

    /// Reads the clock and returns the time. Does what is due. If that is the task of the maintenance thread or of the
    /// caller of `maintain`, does it only if they are late by [`LATE_US`].
    pub(super) fn tick_if_overdue(&self) -> u64 {
        let maintained = self.thread.is_some() || self.config.code_only.maintained_by_caller;
        self.tick_after(if maintained { LATE_US } else { 0 })
    }

    /// Reads the clock and returns the time. Does what has been due for `patience_us`, so the call may be slow.
    fn tick_after(&self, patience_us: u64) -> u64 {
        let now_us = self.time.now_us();
        if let Some(cache) = &self.idle.cache {
            cache.advance_age(now_us, self.time.latest_put_us(now_us));
        }
        let Some(mut state) = self.ticks.begin(now_us, patience_us) else { return now_us };
        // A log sink may call the pool, so log lines are delivered after the tick.
        let _deferral = report::defer();
        match self.thread {
            Some(thread) if patience_us > 0 => {
                thread.wake(false).unwrap_or_else(|error| self.log.no_maintenance_thread(&error))
            }
            Some(_) => {}
            // Without a maintenance thread. With one, `run_due_work` does this in every round.
            None => self.watch_device(),
        }
        if now_us >= state.next_query_us {
            state.next_query_us = now_us.saturating_add(QUERY_FAILED_EVERY_US);
            self.retry_failures(QUERIED_AT_ONCE);
        }
        if !self.has_waiters() {
            self.shortage.end_if_calm(&self.log, now_us);
        }
        self.discount_pause(&mut state, now_us);
        // If the process was stopped, this thread may run a tick before the maintenance thread has measured the stop. So the
        // first late tick reports nothing.
        let may_report = std::mem::replace(&mut state.was_late, patience_us > 0) || patience_us == 0;
        if may_report {
            self.report_stuck_copies(now_us);
        }
        if let Some(arena) = self.memory.arena() {
            self.expire(now_us);
            self.tear_down_if_unused();
            arena.tick(self, now_us, || self.trim(0));
        }
        self.report_growth(&mut state);
        self.report_recording(&mut state.is_failure_logged);
        drop(state);
        if may_report {
            self.report_diagnosis(now_us);
        }
        self.follow_limit(now_us);
        self.enforce_limits();
        self.publish_idle();
        now_us
    }

    /// Excludes the time in which the process did not run from waits and from the ages of copies. If the process is stopped
    /// during a call by the maintenance thread, the stop counts, since it cannot be distinguished from a slow call.
    fn discount_pause(&self, state: &mut TickState, now_us: u64) {
        let before_us = state.stopped_us;
        state.stopped_us = self.thread.map_or(0, MaintenanceThread::stopped_us);
        if state.stopped_us > before_us {
            let stopped_us = state.stopped_us - before_us;
            self.in_flight.discount_pause(stopped_us, now_us);
            let stopped = Duration::from_micros(stopped_us);
            self.waiters.discount_pause(stopped);
            self.live_partitions().iter().for_each(|partition| partition.waiters.discount_pause(stopped));
        }
    }

    fn report_stuck_copies(&self, now_us: u64) {
        if self.in_flight.count() == 0 {
            return;
        }
        for PendingGroup { buffers, age, stream, bytes } in self.in_flight.newly_stuck(now_us, STUCK_AFTER) {
            self.log.stuck(buffers, bytes, age, stream);
        }
    }

    /// Logs the growth since the last log line, if the held bytes have doubled.
    fn report_growth(&self, state: &mut TickState) {
        let held_bytes = self.memory.supply.held_bytes();
        if held_bytes < state.held_bytes.saturating_mul(2).max(FIRST_GROWTH_BYTES) {
            return;
        }
        let calls = self.memory.supply.calls();
        let pin_calls = calls.pin.count.saturating_sub(state.calls.pin.count);
        let took = calls.time().saturating_sub(state.calls.time());
        self.log.grew(state.held_bytes, held_bytes, self.memory.budget.max_bytes(), pin_calls, took);
        (state.held_bytes, state.calls) = (held_bytes, calls);
    }

    /// Makes the pool refuse requests and keep no blocks if a device reset has invalidated its memory. Logs new findings about
    /// the device. The call may be slow.
    pub(super) fn watch_device(&self) {
        let source = self.memory.source();
        if !self.has_ended()
            && let Some(why) = source.device_lost()
            && self.device_lost.set(why.clone()).is_ok()
        {
            self.evict_all(self.idle.stop_keeping(), EvictionReason::Other);
            self.log.device_lost(&why);
        }
        let findings = source.findings();
        // Relaxed: a thread that sees an old value logs a finding twice.
        let logged = self.ticks.findings.swap(findings.len(), Ordering::Relaxed);
        findings.iter().skip(logged).for_each(|finding| self.log.found(finding));
    }

    /// Returns the time until the maintenance thread would check again; `None` if nothing would need a check.
    pub(crate) fn maintenance_period(&self) -> Option<Duration> {
        self.pace().period(Instant::now())
    }

    /// Returns the pace for events that only time causes: an idle buffer expires, or free memory becomes due for release. Under
    /// `tensorflow` nothing expires.
    fn pace_of_idle(&self) -> Pace {
        let idle_bytes = self.idle.bytes();
        let supply = &self.memory.supply;
        let Some(arena) = self.memory.arena() else {
            // Under `tensorflow` ticks are needed only if a return may exceed a limit.
            let may_exceed_limit = self.config.max_idle_bytes.is_some() || self.memory.budget.over_bytes() > 0;
            return match (may_exceed_limit, idle_bytes, supply.all_block_bytes() > 0) {
                (false, ..) | (true, 0, false) => Pace::Never,
                (true, 0, true) => Pace::Quiet,
                (true, ..) => Pace::Active,
            };
        };
        if arena.is_compacting() {
            return Pace::Steps;
        }
        if idle_bytes > 0 || arena.has_aging_memory() {
            return if self.memory.own_bytes() > idle_bytes { Pace::Active } else { Pace::Quiet };
        }
        // A return that keeps its buffer wakes no thread, although it makes a buffer idle. Free memory is released if the
        // system is short of memory. So both need occasional checks.
        if supply.all_block_bytes() > 0 || arena.has_free() { Pace::Quiet } else { Pace::Never }
    }

    /// Returns the pace for copies in flight: faster if users may wait for adopted memory, or if other members want memory of
    /// this pool.
    pub(super) fn pace_of_copies(&self) -> Pace {
        if self.counters.adopted.get() > 0 || self.slow_path_flag.is_for_shared_limit() {
            Pace::Copies
        } else {
            Pace::Active
        }
    }
}

impl MaintenanceTask for PoolCore {
    fn maintain(&self) {
        let wanted_bytes = self.wanted_of_shared_limit.bytes();
        let budget = &self.memory.budget;
        if wanted_bytes > 0 && budget.shared_limit().is_none() && budget.room_for(wanted_bytes) >= wanted_bytes {
            // Another pool of the process has made room, and has woken this thread only.
            self.wake_waiters();
        }
        let compacting = self.memory.arena().is_some_and(|arena| {
            arena.run_reserve_step(self);
            arena.compact(self.time.now_us()) || arena.reserve_pace() == Pace::Steps
        });
        // While it compacts or pins a reserve, this thread calls more often than other work is due.
        if !compacting || self.counters.adopted.get() > 0 || self.ticks.is_due(self.time.coarse_us()) {
            self.run_due_work();
        } else {
            self.release_idle_for_others();
        }
    }

    fn pace(&self) -> Pace {
        let of_copies = if self.in_flight.count_with_quarantined() > 0 { self.pace_of_copies() } else { Pace::Never };
        let of_reserve = self.memory.arena().map_or(Pace::Never, |arena| arena.reserve_pace());
        // A return that keeps its buffer does not notify the other members, so the thread checks for idle memory often.
        let is_wanted = self.memory.supply.held_bytes() > 0 && self.memory.budget.is_wanted();
        let of_shared_limit = if is_wanted { Pace::Copies } else { Pace::Never };
        self.pace_of_idle().max(of_copies).max(of_reserve).max(of_shared_limit)
    }
}
