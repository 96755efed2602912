//! A pool and the limit that it shares with other owners: what its requests want, and what it releases for requests of others.
//!
//! ```text
//!   refused by the process's limit ─▶ the other pools release idle memory ─▶ tries again
//!   head of the queue refused ─▶ its want ─▶ tries again, wakes the others, waits ─▶ served or timed out: no want
//!   others' wants ─▶ a thread ─┬─▶ the maintenance thread: idle memory is released, step by step
//!                              └─▶ slow-path flag: a return makes room, if the others come first
//! ```
//!
//! A buffer that is returned and requested again at once is never idle when the maintenance thread checks, so returns make room as
//! well. What a return released this pool cannot claim before the others are served (`shared_limit::shares`).

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::super::memory::{PoolView, Refusal, SlowCalls};
use super::queue::Reason;
use super::{Block, Core};
use crate::maintenance_thread::Pace;
use crate::quota::{Budget, BudgetOwner};
use crate::shared_limit::{SharedLimitReport, Want};
use crate::stats::{EvictionReason, SharedLimitStats};

/// Most bytes released for others in one step; other owners release, too, so each step checks what is still lacking.
const STEP_BYTES: u64 = 64 << 20;
/// The pause between two attempts of a reserve that waits for room under a shared limit.
const RESERVE_PATIENCE: Duration = Duration::from_millis(5);

impl BudgetOwner for Core {
    fn release_idle(&self, bytes: u64) -> u64 {
        self.complete_copies();
        let released_bytes = self.memory().release_idle(bytes, self, self.time.coarse_us());
        if released_bytes > 0 {
            self.log.released_for_others(&self.shared_name(), released_bytes);
        }
        released_bytes
    }
}

impl Core {
    fn budget(&self) -> &Arc<Budget> {
        self.memory().budget()
    }

    fn shared_name(&self) -> String {
        self.budget().host().map_or_else(|| "(this process)".to_owned(), |host| host.name().to_owned())
    }

    /// From now on a thread is notified of changes of the shared limit, if there is one.
    pub(crate) fn watch_shared_limit(self: &Arc<Self>) {
        let Some(limit) = self.budget().host() else { return };
        let (log, name) = (self.log.clone(), limit.name().to_owned());
        let core: Weak<Self> = Arc::downgrade(self);
        let begun = limit.watch(move |is_wanted, loss| {
            if let Some(loss) = loss {
                log.shared_limit_lost(&name, loss);
            }
            let Some(core) = core.upgrade() else { return false };
            core.room_was_made();
            if is_wanted {
                core.update_slow_path();
                core.notice(Pace::Copies);
            }
            // Without a thread the next poll continues.
            core.memory().arena().into_iter().for_each(|arena| arena.shared_limit_has_changed());
            true
        });
        self.log.no_thread(begun);
    }

    /// The head of the queue was refused for this reason. Returns whether to try again at once: it has just recorded what it
    /// wants, and nobody was notified of what was released before.
    pub(super) fn publish_demand(&self, refusal: &Refusal) -> bool {
        let Some((needed_bytes, shortfall)) = refusal.by_shared_limit() else {
            // Memory of other owners would not help any more.
            self.clear_demand();
            return false;
        };
        self.budget().set_want(&self.wanted_of_shared_limit, shortfall, needed_bytes) < shortfall
    }

    /// No request of this queue wants memory of other owners any more.
    pub(super) fn clear_demand(&self) {
        // A load without a shared limit. A request that changes it meanwhile has joined the queue, and ends it.
        if self.wanted_of_shared_limit.bytes() > 0 {
            self.budget().set_want(&self.wanted_of_shared_limit, 0, 0);
        }
    }

    /// Has the other pools of the process release idle memory for a request that was refused for this reason. Returns whether it
    /// has room now; or whether it may have, if no such `calls` may be made. A slow call.
    pub(super) fn others_make_room(&self, refusal: &Refusal, calls: SlowCalls) -> bool {
        let shared = refusal.by_shared_limit().filter(|_| !matches!(calls, SlowCalls::Held(..)));
        shared.is_some_and(|(_, shortfall)| calls == SlowCalls::None || self.budget().ask_others(shortfall))
    }

    /// Releases idle memory while other owners lack it.
    pub(super) fn release_to_others(&self) {
        loop {
            let lacking_bytes = self.budget().others_lack();
            if lacking_bytes == 0 || self.release_idle(lacking_bytes.min(STEP_BYTES)) == 0 {
                break;
            }
        }
        self.update_slow_path();
    }

    /// Tells the host's limit how much of what is held is idle.
    pub(super) fn record_idle(&self) {
        self.budget().host().iter().for_each(|host| host.record_idle(self.memory().idle_bytes(self)));
    }

    /// Hits and returns take the slow path as long as other owners want memory.
    pub(super) fn update_slow_path(&self) {
        let is_wanted = || self.budget().is_wanted();
        self.slow_path_flag.change(Reason::SharedLimit, is_wanted, |attends| self.stock.idle().set_slow_path(attends));
    }

    /// A return while other owners want memory: makes room of `block` if they come first. Otherwise returns it. A slow call if it
    /// makes room.
    #[inline]
    pub(super) fn release_for_others(&self, block: Block) -> Option<Block> {
        if self.slow_path_flag.is_for_shared_limit() { self.release_if_owed(block) } else { Some(block) }
    }

    #[cold]
    fn release_if_owed(&self, block: Block) -> Option<Block> {
        // While another return makes room: that may be enough.
        let Some(_giving) = self.giving.try_lock() else { return Some(block) };
        if self.budget().owed_bytes() == 0 {
            self.update_slow_path();
            return Some(block);
        }
        self.counters.made_room.add(1);
        let now_us = self.time.coarse_us();
        self.stock.evict(block, now_us, EvictionReason::Reclaimed);
        // The block's own region was released with it.
        let lacking_bytes = self.budget().others_lack();
        if lacking_bytes > 0 {
            self.memory().release_idle(lacking_bytes, self, now_us);
        }
        self.wake_waiters();
        self.close_if_unused();
        None
    }

    /// How soon to poll again because other owners lack memory: a return that is kept notifies nobody.
    pub(super) fn pace_of_shared_limit(&self) -> Pace {
        if self.memory().held_bytes() > 0 && self.budget().is_wanted() { Pace::Copies } else { Pace::Never }
    }

    /// What `add` pins or claims; while a shared limit refuses it, waits for other owners as a request would.
    pub(super) fn add_within_shared_limit<R>(&self, mut add: impl FnMut() -> Result<R, Refusal>) -> Result<R, Refusal> {
        let until = Instant::now() + self.config.longest_wait().min(Duration::from_secs(1 << 30));
        let want = Want::default();
        let added = loop {
            let added = add();
            // What can never fit is no reason for others to release what they have.
            let refused = added.as_ref().err().and_then(Refusal::by_shared_limit);
            let Some((needed_bytes, shortfall)) = refused.filter(|_| Instant::now() < until && !self.is_closed())
            else {
                break added;
            };
            let is_told = self.budget().set_want(&want, shortfall, needed_bytes) >= shortfall;
            if !self.budget().ask_others(shortfall) && is_told {
                std::thread::sleep(RESERVE_PATIENCE);
            }
        };
        if want.bytes() > 0 {
            self.budget().set_want(&want, 0, 0);
        }
        added
    }

    /// The report of the shared limit.
    pub(super) fn shared_limit_stats(&self) -> Option<SharedLimitStats> {
        let SharedLimitReport { name, max_bytes, held_bytes, owners, .. } = self.budget().host()?.report();
        let own_bytes = owners.iter().filter(|owner| owner.is_own).map(|owner| owner.held_bytes).sum::<u64>();
        let others = || owners.iter().filter(|owner| !owner.is_own);
        Some(SharedLimitStats {
            owners: owners.len() as u64,
            own_bytes,
            others_idle_bytes: others().map(|owner| owner.idle_bytes).fold(0, u64::saturating_add),
            others_wanted_bytes: others().map(|owner| owner.wanted_bytes).fold(0, u64::saturating_add),
            name,
            max_bytes,
            held_bytes,
        })
    }
}
