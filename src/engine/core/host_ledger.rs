//! A pool and the host ledger: what its gets want of other processes, and what it gives for theirs.
//!
//! ```text
//!   first in line ─refused by the ledger─▶ its want ─▶ tries again, wakes the others, waits ─▶ served or late: no want
//!   others' wants ─▶ the ledger's thread wakes the maintenance thread ─▶ idle memory goes back, step by step
//! ```

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::super::supply::{Reclaim, Refusal};
use super::Core;
use crate::ledger::{HostLedger, LedgerReport};
use crate::maintenance_thread::Pace;
use crate::stats::LedgerStats;
use crate::sync::process::Ordering;

/// Released for others in one go: then what they lack is looked at again, as other owners release, too.
const STEP_BYTES: u64 = 64 << 20;
/// Longest sleep of a reserve that waits for room in the ledger.
const RESERVE_PATIENCE: Duration = Duration::from_millis(5);

impl Core {
    fn host_ledger(&self) -> Option<Arc<HostLedger>> {
        self.backing().ledger()
    }

    /// From now on a thread hears of changes in the host ledger, if there is one.
    pub(crate) fn watch_ledger(self: &Arc<Self>) {
        let Some(ledger) = self.host_ledger() else { return };
        let begun = match self.backing().arena().map(Arc::downgrade) {
            Some(arena) => {
                ledger.watch(move |is_wanted| {
                    let arenas = arena.upgrade().map(|arena| arena.of_all_nodes()).unwrap_or_default();
                    notice(arenas.iter().flat_map(|arena| arena.attached()).collect(), is_wanted);
                    // Without a thread the next poll goes on.
                    arenas.iter().for_each(|arena| arena.ledger_has_changed());
                    !arenas.is_empty()
                })
            }
            None => {
                let core: Weak<Self> = Arc::downgrade(self);
                ledger.watch(move |is_wanted| {
                    let pool = core.upgrade().map(|core| -> Arc<dyn Reclaim> { core });
                    pool.map(|pool| notice(vec![pool], is_wanted)).is_some()
                })
            }
        };
        self.log.no_thread(begun);
    }

    /// The first in line was refused for this reason. Returns whether to try again at once: it has just written what it wants,
    /// and what was given back before was told nobody.
    pub(super) fn note_want(&self, refusal: &Refusal) -> bool {
        let Refusal::Ledger { missing_bytes, .. } = *refusal else { return false };
        if let Some(ledger) = self.host_ledger().filter(|ledger| ledger.loses_place()) {
            self.log.ledger_place_is_lost(ledger.name());
        }
        self.want(missing_bytes) < missing_bytes
    }

    /// No get of this line wants memory of others any more.
    pub(super) fn end_want(&self) {
        self.want(0);
    }

    /// Returns what was wanted before.
    fn want(&self, bytes: u64) -> u64 {
        // SeqCst: two gets that change it in turn tell the ledger what each changed.
        let before_bytes = self.wanted_of_ledger.swap(bytes, Ordering::SeqCst);
        if before_bytes != bytes {
            self.host_ledger().iter().for_each(|ledger| ledger.change_want(before_bytes, bytes));
        }
        before_bytes
    }

    /// A get that last was refused for this reason was served by memory of other owners, or was not.
    pub(super) fn log_want(&self, refusal: &Refusal, asked_bytes: u64, waited: Duration, is_served: bool) {
        let Refusal::Ledger { .. } = refusal else { return };
        let Some(ledger) = self.host_ledger() else { return };
        if is_served {
            self.log.ledger_had_room(ledger.name(), asked_bytes, waited);
        } else {
            self.log.ledger_had_no_room(ledger.name(), asked_bytes, waited, &ledger.report().others_in_words());
        }
    }

    /// Releases idle memory while other owners lack it, and says in the ledger how much is idle.
    pub(super) fn give_to_others(&self) {
        let Some(ledger) = self.host_ledger() else { return };
        if ledger.loses_place() {
            self.log.ledger_place_is_lost(ledger.name());
        }
        let mut given_bytes = 0;
        loop {
            let lacking_bytes = ledger.living_others_lack();
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
        ledger.note_idle(self.backing().idle_bytes(self));
    }

    /// How soon to look again because other owners lack memory: a put that is kept tells nobody.
    pub(super) fn pace_of_ledger(&self) -> Pace {
        let is_wanted = || self.host_ledger().is_some_and(|ledger| ledger.others_lack() > 0);
        if self.backing().stats().held_bytes > 0 && is_wanted() { Pace::Copies } else { Pace::Never }
    }

    /// What `add` pins or claims; while the ledger refuses it, waits for other owners as a get would.
    pub(super) fn add_within_ledger<R>(&self, mut add: impl FnMut() -> Result<R, Refusal>) -> Result<R, Refusal> {
        let until = Instant::now() + self.config.wait.min(Duration::from_secs(1 << 30));
        loop {
            let added = add();
            let (Err(refusal @ Refusal::Ledger { .. }), Some(ledger)) = (&added, self.host_ledger()) else {
                self.end_want();
                return added;
            };
            if Instant::now() >= until {
                self.end_want();
                return added;
            }
            if !self.note_want(refusal) {
                ledger.sleep(RESERVE_PATIENCE);
            }
        }
    }

    /// What the ledger says.
    pub(super) fn ledger_stats(&self) -> Option<LedgerStats> {
        let LedgerReport { name, max_bytes, held_bytes, owners } = self.host_ledger()?.report();
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

fn notice(pools: Vec<Arc<dyn Reclaim>>, is_wanted: bool) {
    for pool in pools {
        pool.room_was_made();
        if is_wanted {
            pool.room_is_wanted();
        }
    }
}
