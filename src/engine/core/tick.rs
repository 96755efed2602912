//! Periodic work: reads the clock, completes copies, and does what is due. Run by the maintenance thread, or by requests.

use super::super::memory::PoolView;
use super::Core;
use crate::backend::Source;
use crate::diag;
use crate::engine::meter::maintenance::LATE_US;
use crate::in_flight::PendingGroup;
use crate::maintenance_thread::{Maintained, Pace};
use crate::stats::EvictionReason;
use pinpool_observe::judge::STUCK_AFTER;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Failed fences that a tick queries again: a lost device may have left thousands.
const QUERIED_AT_ONCE: usize = 64;

impl Core {
    /// Completes copies and does what is due; without a maintenance thread also its compaction and its reserve.
    pub(crate) fn maintain(&self) {
        self.query_failed(usize::MAX);
        self.memory().release_refused();
        self.check();
        // Also if no tick is due. Counting collects what other threads have put back.
        if self.stock.idle().count() > self.config.pool_size_limit {
            self.stock.enforce_count_limit(self.time.coarse_us());
        }
        if let Some(arena) = self.memory().arena().filter(|_| self.thread.is_none()) {
            arena.prepare_hole(self.time.coarse_us());
            arena.reserve_turn(self.time.coarse_us());
        }
    }

    /// Completes copies and does what is due.
    pub(crate) fn check(&self) {
        self.query_copies();
        self.release_to_others();
        self.record_idle();
        let now_us = self.tick_after(0);
        self.watch_device(now_us);
        self.stock.enforce_limits(self, now_us);
    }

    /// Moves a few granules to the compaction target (policy-R13). Returns whether any were moved.
    pub(crate) fn prepare_step(&self) -> bool {
        self.memory().arena().is_some_and(|arena| arena.prepare_step(self.time.coarse_us()))
    }

    /// Reads the clock.
    pub(super) fn now_us(&self) -> u64 {
        let now_us = self.time.now_us();
        self.stock.idle().tick(now_us, self.time.latest_put_us(now_us));
        now_us
    }

    /// Reads the clock and returns the time. Does what is due if the maintenance thread does not.
    pub(super) fn tick_if_alone(&self) -> u64 {
        self.tick_after(if self.thread.is_some() { LATE_US } else { 0 })
    }

    /// Reads the clock and returns the time. Does what has been due for `patience_us`; that may be slow calls.
    pub(super) fn tick_after(&self, patience_us: u64) -> u64 {
        let now_us = self.now_us();
        let Some(mut tick) = self.maintenance.begin_tick(now_us, patience_us) else { return now_us };
        // Until the tick has ended: a log sink may call the pool.
        let _deferral = diag::defer();
        if let Some(thread) = self.thread.filter(|_| patience_us > 0) {
            self.log.no_thread(thread.wake(false));
        }
        // The maintenance thread does this at every tick.
        if self.thread.is_none() {
            self.watch_device(now_us);
        }
        if tick.may_query_failed(now_us) {
            self.query_failed(QUERIED_AT_ONCE);
            self.memory().release_refused();
        }
        if !self.has_waiters() {
            self.shortage.end_if_calm(&self.log, now_us);
        }
        if self.in_flight.count() > 0 {
            // The thread runs several times a second: if it did not, the process was stopped, and no copy was seen to complete.
            if self.thread.is_some() && tick.late_us > LATE_US {
                self.in_flight.leave_out(tick.late_us, now_us);
            }
            let stuck = self.in_flight.newly_stuck(now_us, STUCK_AFTER);
            let log = |PendingGroup { buffers, age, stream, bytes }| self.log.stuck(buffers, bytes, age, stream);
            stuck.into_iter().for_each(log);
        }
        if let Some(arena) = self.memory().arena() {
            self.stock.expire(now_us);
            self.close_if_unused();
            arena.tick(self, now_us, || self.trim(0));
        }
        self.stock.report_growth(&mut tick);
        drop(tick);
        self.report_verdict(now_us);
        if let Some((max_bytes, why)) = self.limit.change(now_us, || self.memory().budget().auto_bytes()) {
            self.apply_limit(max_bytes, &why);
        }
        self.stock.enforce_limits(self, now_us);
        self.record_idle();
        now_us
    }
}

/// Findings about the device that were logged.
#[derive(Debug)]
pub(super) struct DeviceWatch {
    findings: AtomicUsize,
}

impl DeviceWatch {
    /// Earlier findings were logged when the source was made.
    pub(super) fn new(source: &dyn Source) -> Self {
        Self { findings: AtomicUsize::new(source.findings().len()) }
    }
}

impl Core {
    /// After a device reset the pool hands out no memory that the reset has invalidated. A slow call.
    pub(super) fn watch_device(&self, now_us: u64) {
        let source = self.memory().source();
        if !self.stock.is_gone()
            && let Some(why) = source.gone()
            && self.stock.give_up(why.clone(), now_us)
        {
            self.log.memory_gone(&why);
        }
        let findings = source.findings();
        // Relaxed: one tick at a time.
        let told = self.device.findings.swap(findings.len(), Ordering::Relaxed);
        findings.iter().skip(told).for_each(|finding| self.log.found(finding));
    }
}

impl PoolView for Core {
    fn idle_bytes(&self) -> u64 {
        self.stock.idle().bytes()
    }

    fn idle_buffers(&self) -> u64 {
        self.stock.idle().count()
    }

    fn release_oldest(&self, why: EvictionReason) -> bool {
        let released = self.stock.release_oldest(self.time.coarse_us(), why);
        self.close_if_unused();
        released
    }

    fn has_copies(&self) -> bool {
        self.in_flight.count() > 0
    }

    fn complete_copies(&self) {
        Self::complete_copies(self);
    }

    fn waiting_bytes(&self) -> Vec<u64> {
        self.waiters.waiting_bytes()
    }

    fn room_was_made(&self) {
        self.backoff.end();
        self.wake_waiters();
    }
}

impl Maintained for Core {
    fn maintain(&self) {
        self.release_to_others();
        let (wanted, budget) = (self.wanted_of_shared_limit.bytes(), self.memory().budget());
        if wanted > 0 && budget.host().is_none() && budget.room_for(wanted) >= wanted {
            // Another pool of the process has made room, and has woken this thread only.
            self.wake_waiters();
        }
        let is_preparing = self.memory().arena().is_some_and(|arena| arena.prepare_hole(self.time.now_us()));
        // During compaction the thread runs more often than anything else is due.
        if !is_preparing || self.counters.adopted.get() > 0 || self.maintenance.is_tick_due(self.time.coarse_us()) {
            self.query_copies();
            let now_us = self.tick_after(0);
            self.watch_device(now_us);
        }
    }

    fn pace(&self) -> Pace {
        let of_copies = if self.in_flight.held() > 0 { self.pace_of_copies() } else { Pace::Never };
        self.stock.pace().max(of_copies).max(self.pace_of_shared_limit())
    }
}

impl Core {
    /// The pace for copies in flight: users may wait for adopted memory, and other pools for memory of this one.
    pub(super) fn pace_of_copies(&self) -> Pace {
        if self.counters.adopted.get() > 0 || self.slow_path_flag.is_for_shared_limit() {
            Pace::Copies
        } else {
            Pace::Active
        }
    }
}
