//! The limits of a pool: `auto`, which a tick sets, and the limit that it shares with other members.
//!
//! The limit `auto` is a share of the memory that the process may use. It follows the cgroup limit. It does not follow free
//! memory, which changes all the time and depends on the pool itself.
//!
//! Under a shared limit, the pool publishes the demand of its requests, and releases memory for requests of other members:
//!
//! ```text
//!   refused by the process's limit ─▶ the other pools release idle memory ─▶ tries again
//!   head of the queue refused ─▶ publishes its demand ─▶ tries again, waits ─▶ served or timed out: withdraws the demand
//!   demand of others ─▶ thread ─┬─▶ the maintenance thread: idle memory is released, step by step
//!                               └─▶ slow-path flag: a return makes room, if other members have priority
//! ```
//!
//! A buffer that is returned and immediately requested again is never idle when the maintenance thread checks, so returns make
//! room as well. This pool cannot claim the released memory before the other members are served (`limit/shares.rs` in the crate
//! `shared_limit`).

use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::{Block, BlockRequest, PoolCore, Purpose};
use crate::config::Limit;
use crate::engine::memory::{AllowedCalls, PoolView, Refusal};
use crate::engine::wait_queue::deadline;
use crate::error;
use crate::in_flight::QueryScope;
use crate::maintenance_thread::Pace;
use crate::policy;
use crate::quota::BudgetUser;
use crate::size_class::Class;
use crate::stats::{EvictionReason, SharedLimitStats};
use pinpool_observe::record::Event;
use pinpool_os::fork::PerProcess;
use pinpool_os::format::Size;
use pinpool_os::host::{HostMemory, LimitOrigin, MemoryGauge};
use pinpool_os::sync::unmodeled::{Mutex, MutexGuard};
use pinpool_shared_limit::{SharedLimitReport, Want};

/// Shortest time between two readings of the system's memory, which read kernel files.
const READ_EVERY_US: u64 = 1_000_000;
/// Maximum number of bytes released for other members in one step. The other members release memory as well, so each step checks what they
/// still lack.
const STEP_BYTES: u64 = 64 << 20;
/// The pause between two attempts of a reserve or `pin` that waits for room under a shared limit.
const RETRY_PAUSE: Duration = Duration::from_millis(5);

/// The origin of the limit of a pool, and the memory of the system.
#[derive(Debug)]
pub(crate) struct HostLimit {
    /// Maximum number of bytes that the process may lock. No limit of the pool exceeds it.
    pub(crate) lock_limit_bytes: Option<u64>,
    /// `None` if the memory of the machine is unknown.
    gauge: Option<MemoryGauge>,
    /// The limit of the machine or its cgroup that `auto` was computed from.
    followed: Mutex<Option<(u64, LimitOrigin)>>,
    /// The directory below which the gauge reads.
    root: PathBuf,
    /// Number of processes that the limit `auto` is divided among.
    ranks: u64,
    /// Locked while the limit changes.
    changing: Mutex<()>,
}

/// The last reading of the system's memory, with the root of its files and its time by the clock of the process. All pools of
/// the process use it.
static LAST_READING: PerProcess<Mutex<Option<(PathBuf, u64, HostMemory)>>> = PerProcess::new(Mutex::default);

impl HostLimit {
    /// Reads the files below `root`. `ranks` processes share the limit `auto`.
    pub(crate) fn new(root: PathBuf, ranks: u64) -> Self {
        Self {
            gauge: MemoryGauge::open(&root),
            root,
            ranks,
            lock_limit_bytes: None,
            followed: Mutex::default(),
            changing: Mutex::default(),
        }
    }

    /// Resolves the limit `max_bytes` for pools that hold `held_bytes`. Returns it in bytes, and a text that states its origin. If it
    /// is `auto`, changes of the system's limit are followed from now on.
    pub(crate) fn resolve(&self, max_bytes: Limit, held_bytes: u64) -> (Option<u64>, String) {
        let mut followed = self.followed.lock();
        *followed = None;
        let (bytes, words) = match max_bytes {
            Limit::Unlimited => (None, "none".to_owned()),
            Limit::Bytes(bytes) => (Some(bytes), Size(bytes).to_string()),
            Limit::Auto => match self.gauge.as_ref().and_then(MemoryGauge::read) {
                None => (None, "none (the machine's memory is unknown)".to_owned()),
                Some(memory) => {
                    let (bytes, words) = self.share(&memory, held_bytes);
                    *followed = Some((memory.total_bytes, memory.origin));
                    (Some(bytes), format!("{} ({words})", Size(bytes)))
                }
            },
        };
        (self.within_lock_limit(bytes), words)
    }

    /// Returns the new limit and the reason, if the limit is `auto` and the limit of the machine or its cgroup has changed.
    fn change(&self, now_us: u64, held_bytes: impl FnOnce() -> u64) -> Option<(Option<u64>, String)> {
        // One thread at a time is enough.
        let mut followed = self.followed.try_lock()?;
        let followed = followed.as_mut()?;
        let memory = self.memory(now_us)?;
        if (memory.total_bytes, &memory.origin) == (followed.0, &followed.1) {
            return None;
        }
        let (bytes, words) = self.share(&memory, held_bytes());
        *followed = (memory.total_bytes, memory.origin);
        Some((self.within_lock_limit(Some(bytes)), words))
    }

    /// Returns the memory of the system, as it was at most [`READ_EVERY_US`] ago.
    pub(super) fn memory(&self, now_us: u64) -> Option<HostMemory> {
        let last = LAST_READING.get().lock().clone();
        if let Some((root, read_us, memory)) = last
            && root == self.root
            && now_us.wrapping_sub(read_us) < READ_EVERY_US
        {
            return Some(memory);
        }
        let memory = self.gauge.as_ref()?.read()?;
        *LAST_READING.get().lock() = Some((self.root.clone(), now_us, memory.clone()));
        Some(memory)
    }

    fn within_lock_limit(&self, max_bytes: Option<u64>) -> Option<u64> {
        self.lock_limit_bytes.into_iter().chain(max_bytes).min()
    }

    /// Returns the limit `auto` for pools that hold `held_bytes`, and a text that states its origin. These bytes count as available,
    /// since the pools can use them.
    fn share(&self, memory: &HostMemory, held_bytes: u64) -> (u64, String) {
        let [total_bytes, free_bytes] = [memory.total_bytes, memory.available_bytes].map(|bytes| bytes / self.ranks);
        let bytes = policy::default_limit(total_bytes, free_bytes.saturating_add(held_bytes));
        let part = if bytes < policy::default_limit(total_bytes, u64::MAX) { "what is free" } else { "a quarter" };
        let among = if self.ranks > 1 { format!(" for {} ranks", self.ranks) } else { String::new() };
        (bytes, format!("{part} of {}{among}, {}", Size(memory.total_bytes), memory.origin))
    }
}

impl PoolCore {
    /// Changes the limit; see [`Pool::set_max_bytes`](crate::Pool::set_max_bytes).
    pub(crate) fn set_limit(&self, limit: Limit) {
        let (budget, changing) = (&self.memory.budget, self.host_limit.changing.lock());
        budget.set_auto(limit == Limit::Auto);
        let (max_bytes, _) = self.host_limit.resolve(limit, budget.auto_bytes());
        self.apply_limit(max_bytes, if limit == Limit::Auto { "auto" } else { "set_max_bytes" }, changing);
    }

    /// Sets the limit again, if it is `auto` and the limit of the machine or its cgroup has changed.
    pub(super) fn follow_limit(&self, now_us: u64) {
        let (held_bytes, changing) = (|| self.memory.budget.auto_bytes(), self.host_limit.changing.lock());
        if let Some((max_bytes, why)) = self.host_limit.change(self.time.to_process_us(now_us), held_bytes) {
            self.apply_limit(max_bytes, &why, changing);
        }
    }

    fn apply_limit(&self, max_bytes: Option<u64>, why: &str, changing: MutexGuard<'_, ()>) {
        let before = self.memory.budget.max_bytes();
        if before == max_bytes {
            return;
        }
        self.memory.set_max_bytes(max_bytes);
        self.record(Event::MaxBytes { bytes: max_bytes.unwrap_or(u64::MAX) });
        drop(changing);
        self.log.limit_changed(before, max_bytes, why);
        self.sweep_copies(QueryScope::Undecided);
        self.enforce_limits();
        self.resume_reserve(max_bytes.unwrap_or(u64::MAX) > before.unwrap_or(u64::MAX));
        self.request_pace(Pace::Active);
        self.on_room_made();
    }

    /// Resumes a reserve that waits for room, since there may be more room: the maintenance thread, or the next `maintain`
    /// call, continues it. If the limit `is_raised`, this includes a reserve that was complete before the limit was
    /// lowered.
    pub(super) fn resume_reserve(&self, is_raised: bool) {
        let Some(arena) = self.memory.arena() else { return };
        arena.resume_reserve(is_raised);
        self.request_pace(arena.reserve_pace());
    }

    /// Starts a thread that is notified of changes of the shared limit of the host, if there is one.
    pub(crate) fn watch_shared_limit(self: &Arc<Self>) {
        let Some(limit) = self.memory.budget.shared_limit() else { return };
        let (log, name) = (self.log.clone(), limit.name().to_owned());
        let core: Weak<Self> = Arc::downgrade(self);
        let begun = limit.watch(move |is_wanted, loss| {
            if let Some(loss) = loss {
                log.shared_limit_lost(&name, loss);
            }
            let Some(core) = core.upgrade() else { return false };
            // The pause after a refusal by the source continues: bytes that other members returned give the source no memory.
            core.wake_waiters();
            if is_wanted {
                core.update_slow_path();
                core.request_pace(Pace::Copies);
            }
            core.resume_reserve(false);
            true
        });
        begun.unwrap_or_else(|error| self.log.no_maintenance_thread(&error));
    }

    /// Publishes the demand of the head of the queue, which was refused with `refusal`. Returns whether to try again
    /// immediately: if the demand was published only now, earlier releases by other members notified no request.
    pub(super) fn publish_demand(&self, refusal: &Refusal, class: Class) -> bool {
        let Some(shortfall) = refusal.by_shared_limit() else {
            // More memory from other members would not help.
            self.clear_demand();
            return false;
        };
        let needed_bytes = self.memory.supply.block_bytes(class);
        self.memory.budget.set_want(&self.wanted_of_shared_limit, shortfall, needed_bytes) < shortfall
    }

    /// Withdraws the demand, since no request of this queue wants memory from other members any more.
    pub(super) fn clear_demand(&self) {
        // Costs one load if there is no demand. A request that publishes a demand meanwhile has joined the queue, and later
        // withdraws the demand itself.
        if self.wanted_of_shared_limit.bytes() > 0 {
            self.memory.budget.set_want(&self.wanted_of_shared_limit, 0, 0);
        }
    }

    /// Lets the other pools of the process release idle memory for a request that was refused with `refusal`. Returns whether
    /// the request has room now. If `calls` is `None`, nothing is released, and the result is whether the request
    /// may have room after such a release. Always false for [`AllowedCalls::NoAcquire`]. The call may be slow.
    pub(super) fn reclaim_from_other_pools(&self, refusal: &Refusal, calls: AllowedCalls) -> bool {
        let shared = refusal.by_shared_limit().filter(|_| calls != AllowedCalls::NoAcquire);
        shared.is_some_and(|shortfall| calls == AllowedCalls::None || self.memory.budget.reclaim_from_others(shortfall))
    }

    /// Releases idle memory while other members of the shared limit lack memory.
    pub(super) fn release_idle_for_others(&self) {
        loop {
            let lacking_bytes = self.memory.budget.others_lacking_bytes();
            if lacking_bytes == 0 || self.release_idle(lacking_bytes.min(STEP_BYTES)) == 0 {
                break;
            }
        }
        self.update_slow_path();
    }

    /// Reports the idle bytes to the shared limit of the host, if there is one.
    pub(super) fn publish_idle(&self) {
        if let Some(host) = self.memory.budget.shared_limit() {
            host.publish_idle(self.memory.supply.unused_bytes(self));
        }
    }

    /// Gives a returned `block` to the supply, which is a slow call, if other members want memory and have priority. Otherwise
    /// returns `block`.
    pub(super) fn give_block_for_others(&self, block: Block) -> Option<Block> {
        if !self.slow_path_flag.is_for_shared_limit() {
            return Some(block);
        }
        // Another return is making room, which may be enough.
        let Some(_making_room) = self.making_room.try_lock() else { return Some(block) };
        if self.memory.budget.owed_bytes() == 0 {
            self.update_slow_path();
            return Some(block);
        }
        self.counters.made_room.add(1);
        self.evict(block, EvictionReason::Reclaimed);
        // Without an arena, the eviction has released the region of the block, which may be enough.
        self.release_idle_for_others();
        self.wake_waiters();
        self.tear_down_if_unused();
        None
    }

    /// Calls `add`, which pins or claims `bytes` in addition to buffers. If `add` is refused, releases idle memory of this pool
    /// and calls `add` again. While a shared limit refuses, waits for other members as a request would. The call may be slow.
    pub(super) fn add_within_limits<R>(
        &self,
        bytes: u64,
        purpose: Purpose,
        mut add: impl FnMut() -> Result<R, Refusal>,
    ) -> error::Result<R> {
        let until = deadline(Instant::now(), self.config.longest_wait());
        let want = Want::default();
        // A reserve in the background is refused because of the size of all reserves, and not because of held bytes, so
        // trimming cannot help.
        let may_trim = purpose != Purpose::Reserve || self.config.reserve_wait;
        let added = loop {
            let mut added = add();
            let refusal = added.as_ref().err().filter(|_| may_trim);
            if let Some(to_bytes) = refusal.and_then(|refusal| self.memory.room_next_to(refusal)) {
                self.trim(to_bytes);
                added = add();
            }
            // A request that can never fit is no reason for others to release memory.
            let refused = added.as_ref().err().and_then(Refusal::by_shared_limit);
            let Some(shortfall) = refused.filter(|_| Instant::now() < until && !self.is_closed()) else {
                break added;
            };
            let is_told = self.memory.budget.set_want(&want, shortfall, shortfall) >= shortfall;
            if !self.memory.budget.reclaim_from_others(shortfall) && is_told {
                std::thread::sleep(RETRY_PAUSE);
            }
        };
        if want.bytes() > 0 {
            self.memory.budget.set_want(&want, 0, 0);
        }
        added.map_err(|refusal| self.refusal_error(&BlockRequest::of(bytes), refusal, purpose))
    }

    /// Returns the statistics of the shared limit of the host, if there is one.
    pub(super) fn shared_limit_stats(&self) -> Option<SharedLimitStats> {
        let report = self.memory.budget.shared_limit()?.report();
        let SharedLimitReport { name, max_bytes, held_bytes, members, .. } = report;
        let others = || members.iter().filter(|member| !member.is_own);
        Some(SharedLimitStats {
            pools: members.len() as u64,
            own_bytes: members.iter().filter(|member| member.is_own).map(|member| member.held_bytes).sum(),
            others_idle_bytes: others().map(|member| member.idle_bytes).fold(0, u64::saturating_add),
            others_wanted_bytes: others().map(|member| member.wanted_bytes).fold(0, u64::saturating_add),
            name,
            max_bytes,
            held_bytes,
        })
    }
}

impl BudgetUser for PoolCore {
    fn release_idle(&self, bytes: u64) -> u64 {
        let released_bytes = self.memory.release_idle(bytes, self, self.time.coarse_us());
        if released_bytes > 0 {
            let host = self.memory.budget.shared_limit();
            let name = host.as_ref().map_or("(this process)", |host| host.name());
            self.log.shared_limit_released(name, released_bytes);
        }
        released_bytes
    }
}
