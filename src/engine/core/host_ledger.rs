//! A pool and the ceiling that it shares: what its gets want of other owners, and what it gives for theirs.
//!
//! ```text
//!   first in line ─refused by the ledger─▶ its want ─▶ tries again, wakes the others, waits ─▶ served or late: no want
//!   others' wants ─▶ the ledger's thread ─┬─▶ the maintenance thread: idle memory goes back, step by step
//!                                         └─▶ attention: a put makes room, if the pool holds more than an even share
//! ```
//!
//! A buffer that is put and got again at once is never idle when the maintenance thread looks, so puts give as well. What a put
//! gives this process cannot claim before the others are served (`ledger::shares`).

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::super::ceiling::CeilingSource;
use super::super::memory::PoolView;
use super::super::memory::Refusal;
use super::attention::Reason;
use super::{Block, Core};
use crate::ledger::{LedgerReport, SharedCeiling, Want};
use crate::maintenance_thread::Pace;
use crate::quota::{Level, QuotaExceeded};
use crate::stats::{EvictionReason, LedgerStats};
use pinpool_os::sync::process::Ordering;

/// Released for others in one go: then what they lack is looked at again, as other owners release, too.
const STEP_BYTES: u64 = 64 << 20;
/// Between two tries of a reserve that waits for room in the ledger.
const RESERVE_PATIENCE: Duration = Duration::from_millis(5);

impl Core {
    fn host_ledger(&self) -> Option<Arc<SharedCeiling>> {
        self.backing().ledger()
    }

    /// The ceiling of the pool is `auto`, or is not any more.
    pub(super) fn bind_to_process(&self, is_auto: bool) {
        if let Some(shared) = self.host_ledger()
            && let Some(ceiling) = shared.process_ceiling()
        {
            ceiling.bind(is_auto);
        }
    }

    /// The limit of the control group has changed, which `source` reads.
    pub(super) fn follow_for_process(&self, source: &CeilingSource) {
        if let Some(shared) = self.host_ledger()
            && let Some(ceiling) = shared.process_ceiling()
        {
            ceiling.follow(|held_bytes| source.auto_of_process(held_bytes));
        }
    }

    /// From now on a thread hears of changes in the host ledger, if there is one.
    pub(crate) fn watch_ledger(self: &Arc<Self>) {
        let Some(shared) = self.host_ledger() else { return };
        // The maintenance thread looks at the pools of the process.
        let Some(ledger) = shared.host_ledger() else { return };
        let (log, name) = (self.log.clone(), ledger.name().to_owned());
        let core: Weak<Self> = Arc::downgrade(self);
        let begun = ledger.watch(move |is_wanted, news| {
            log.ledger_news(&name, news);
            let Some(core) = core.upgrade() else { return false };
            core.room_was_made();
            if is_wanted {
                core.attend_to_ledger();
                core.notice(Pace::Copies);
            }
            // Without a thread the next poll goes on.
            core.backing().domain().into_iter().for_each(|domain| domain.ledger_has_changed());
            true
        });
        self.log.no_thread(begun);
    }

    /// The first in line was refused for this reason. Returns whether to try again at once: it has just written what it wants,
    /// and nobody was notified of what was given back before.
    pub(super) fn note_want(&self, refusal: &Refusal) -> bool {
        let Refusal::Over { needed_bytes, over: QuotaExceeded { level: Level::Shared, missing_bytes, .. } } = *refusal
        else {
            // Memory of others would not help any more.
            self.end_want();
            return false;
        };
        self.want(missing_bytes, needed_bytes) < missing_bytes
    }

    /// No get of this line wants memory of others any more.
    pub(super) fn end_want(&self) {
        // A load where there is no ledger. One that changes it meanwhile has joined the line, and ends it.
        if self.wanted_of_ledger.bytes() > 0 {
            self.want(0, 0);
        }
    }

    /// Returns what was wanted before.
    fn want(&self, bytes: u64, needed_bytes: u64) -> u64 {
        self.host_ledger().map_or(bytes, |ledger| ledger.set_want(&self.wanted_of_ledger, bytes, needed_bytes))
    }

    /// A get that last was refused for this reason was served by memory of other owners, or was not.
    pub(super) fn log_want(&self, refusal: &Refusal, asked_bytes: u64, waited: Duration, is_served: bool) {
        let Some(ledger) = self.host_ledger().filter(|_| refusal.is_by_shared()) else { return };
        if is_served {
            self.log.ledger_had_room(ledger.name(), asked_bytes, waited);
        } else {
            self.log.ledger_had_no_room(ledger.name(), asked_bytes, waited, &ledger.in_words(asked_bytes).0);
        }
    }

    /// Releases idle memory while other owners lack it.
    pub(super) fn give_to_others(&self) {
        let Some(ledger) = self.host_ledger() else { return };
        let mut given_bytes = 0;
        loop {
            let lacking_bytes = ledger.others_lack();
            if lacking_bytes == 0 {
                break;
            }
            if given_bytes == 0 {
                self.complete_copies();
            }
            match self.backing().give_room(lacking_bytes.min(STEP_BYTES), self, self.time.coarse_us()) {
                0 => break,
                bytes => given_bytes += bytes,
            }
        }
        if given_bytes > 0 {
            self.log.ledger_was_given(ledger.name(), given_bytes);
        }
        self.attend_to_ledger();
    }

    /// Says in the ledger how much of what is held is idle.
    pub(super) fn note_idle(&self) {
        if let Some(ledger) = self.host_ledger() {
            ledger.note_idle(self.backing().idle_bytes(self));
        }
    }

    /// Hits and puts take the slow path as long as other processes want memory.
    pub(super) fn attend_to_ledger(&self) {
        let is_wanted = || self.host_ledger().is_some_and(|ledger| ledger.is_wanted());
        self.attention.change(Reason::Ledger, is_wanted, |attends| self.stock.idle().set_slow_path(attends));
    }

    /// A put while other processes want memory: makes room of `block` if this one holds more than an even share. Returns it
    /// otherwise. A slow call if it does.
    #[inline]
    pub(super) fn give_put(&self, block: Block) -> Option<Block> {
        if self.attention.is_for_ledger() { self.give_put_if_owed(block) } else { Some(block) }
    }

    #[cold]
    fn give_put_if_owed(&self, block: Block) -> Option<Block> {
        let Some(ledger) = self.host_ledger().filter(|_| self.begin_giving()) else { return Some(block) };
        let is_owed = ledger.owed_bytes() > 0;
        let kept = if is_owed {
            self.accounts.count_made_room();
            let now_us = self.time.coarse_us();
            self.stock.evict(block, now_us, EvictionReason::Reclaimed);
            match ledger.others_lack() {
                // A region of its own went back with the block.
                0 => {}
                lacking_bytes => drop(self.backing().give_room(lacking_bytes, self, now_us)),
            }
            None
        } else {
            Some(block)
        };
        self.is_giving.store(false, Ordering::Release);
        if is_owed {
            self.wake_waiters();
            self.close_if_unused();
        } else {
            self.attend_to_ledger();
        }
        kept
    }

    /// False while another put makes room: what that one gives may be enough.
    fn begin_giving(&self) -> bool {
        // Acquire, with the Release that ends it: what was given is seen.
        !self.is_giving.swap(true, Ordering::Acquire)
    }

    /// How soon to look again because other owners lack memory: a put that is kept tells nobody.
    pub(super) fn pace_of_ledger(&self) -> Pace {
        let is_wanted = || self.host_ledger().is_some_and(|ledger| ledger.is_wanted());
        if self.backing().held_bytes() > 0 && is_wanted() { Pace::Copies } else { Pace::Never }
    }

    /// What `add` pins or claims; while the ledger refuses it, waits for other owners as a get would.
    pub(super) fn add_within_ledger<R>(&self, mut add: impl FnMut() -> Result<R, Refusal>) -> Result<R, Refusal> {
        let Some(ledger) = self.host_ledger() else { return add() };
        let until = Instant::now() + self.config.longest_wait().min(Duration::from_secs(1 << 30));
        let own = OwnWant { ledger: &ledger, want: Want::default() };
        loop {
            let added = add();
            let Err(Refusal::Over { needed_bytes, over: QuotaExceeded { level: Level::Shared, missing_bytes, .. } }) =
                &added
            else {
                return added;
            };
            // What can never fit is not worth that others release what they have.
            if *needed_bytes > ledger.max_bytes() || Instant::now() >= until || self.is_closed() {
                return added;
            }
            if ledger.set_want(&own.want, *missing_bytes, *needed_bytes) >= *missing_bytes {
                std::thread::sleep(RESERVE_PATIENCE);
            }
        }
    }

    /// What the ledger says.
    pub(super) fn ledger_stats(&self) -> Option<LedgerStats> {
        let LedgerReport { name, max_bytes, held_bytes, owners, .. } = self.host_ledger()?.host_ledger()?.report();
        let own_bytes = owners.iter().filter(|owner| owner.is_own).map(|owner| owner.held_bytes).sum::<u64>();
        let others = || owners.iter().filter(|owner| !owner.is_own);
        Some(LedgerStats {
            owners: owners.len() as u64,
            own_bytes,
            others_bytes: held_bytes.saturating_sub(own_bytes),
            others_idle_bytes: others().map(|owner| owner.idle_bytes).fold(0, u64::saturating_add),
            others_wanted_bytes: others().map(|owner| owner.wanted_bytes).fold(0, u64::saturating_add),
            name,
            max_bytes,
            held_bytes,
        })
    }
}

/// A want beside those of gets; ends when it is dropped.
struct OwnWant<'ledger> {
    ledger: &'ledger SharedCeiling,
    want: Want,
}

impl Drop for OwnWant<'_> {
    fn drop(&mut self) {
        self.ledger.set_want(&self.want, 0, 0);
    }
}
