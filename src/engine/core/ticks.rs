//! Looks at the clock and at the copies in flight: what is due then, by whichever thread looks.

use super::Core;
use crate::diag;
use crate::engine::maintenance::LATE_US;
use crate::in_flight::PendingGroup;
use pinpool_observe::judge::STUCK_AFTER;

/// Lost buffers whose fences a tick asks again: a device that is lost may have left thousands.
const ASKED_AT_ONCE: usize = 64;

impl Core {
    /// Completes copies and does what is due; what the maintenance thread prepares only where there is none.
    pub(crate) fn maintain(&self) {
        self.ask_again(usize::MAX);
        self.backing().release_refused();
        self.look();
        if let Some(arena) = self.backing().arena().filter(|_| self.thread.is_none()) {
            arena.prepare_hole(self.time.coarse_us());
            arena.reserve_turn(self.time.coarse_us());
        }
    }

    /// Completes copies and does what is due.
    pub(crate) fn look(&self) {
        self.ask_copies();
        self.give_to_others();
        self.note_idle();
        let now_us = self.tick_after(0);
        self.watch_device(now_us);
        self.stock.enforce_limits(self, now_us);
    }

    /// Moves a few granules to where a get will want them (policy-R13). Returns whether there were any to move.
    pub(crate) fn prepare_step(&self) -> bool {
        self.backing().arena().is_some_and(|arena| arena.prepare_step(self.time.coarse_us()))
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
            self.log.no_thread(thread.note_late());
        }
        // Where a thread looks, it asks each time that it looks.
        if self.thread.is_none() {
            self.watch_device(now_us);
        }
        if tick.may_ask_again(now_us) {
            self.ask_again(ASKED_AT_ONCE);
            self.backing().release_refused();
        }
        if !self.has_waiters() {
            self.shortage.end_if_calm(&self.log, now_us);
        }
        if self.in_flight.count() > 0 {
            // The thread looks several times a second: while it did not, the process was stopped, and no copy was seen to end.
            if self.thread.is_some() && tick.late_us > LATE_US {
                self.in_flight.leave_out(tick.late_us, now_us);
            }
            let stuck = self.in_flight.newly_stuck(now_us, STUCK_AFTER);
            let log = |PendingGroup { buffers, age, stream, bytes }| self.log.stuck(buffers, bytes, age, stream);
            stuck.into_iter().for_each(log);
        }
        if let Some(arena) = self.backing().arena() {
            self.stock.expire(now_us);
            self.close_if_unused();
            arena.tick(self, now_us, || self.trim(0));
        }
        self.stock.report_growth(&mut tick);
        drop(tick);
        self.report_verdict(now_us);
        if let Some((max_bytes, why)) = self.limit.change(now_us, || self.backing().budget().auto_bytes()) {
            self.apply_ceiling(max_bytes, &why);
        }
        self.stock.enforce_limits(self, now_us);
        self.note_idle();
        now_us
    }
}
