//! The pool as its domain and the maintenance thread see it.

use super::super::memory::PoolView;
use super::Core;
use crate::maintenance_thread::{Maintained, Pace};
use crate::stats::EvictionReason;

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
        self.give_to_others();
        let (wanted, budget) = (self.wanted_of_ledger.bytes(), self.backing().budget());
        if wanted > 0 && budget.host().is_none() && budget.room_for(wanted) >= wanted {
            // Another pool of the process has made it, which wakes this thread alone.
            self.wake_waiters();
        }
        let is_preparing = self.backing().arena().is_some_and(|arena| arena.prepare_hole(self.time.now_us()));
        // While holes are prepared, a look comes more often than anything else is due.
        if !is_preparing || self.accounts.adopted() > 0 || self.maintenance.is_tick_due(self.time.coarse_us()) {
            self.ask_copies();
            let now_us = self.tick_after(0);
            self.watch_device(now_us);
        }
    }

    fn pace(&self) -> Pace {
        self.own_pace().min(self.pace_of_ledger())
    }
}

impl Core {
    fn own_pace(&self) -> Pace {
        if self.in_flight.held() > 0 {
            return self.pace_of_copies().min(self.stock.pace());
        }
        self.stock.pace()
    }

    /// The pace that copies in flight ask for: somebody may wait for adopted memory, and other pools for what this one releases.
    pub(super) fn pace_of_copies(&self) -> Pace {
        if self.accounts.adopted() > 0 || self.attention.is_for_ledger() { Pace::Copies } else { Pace::Active }
    }
}
