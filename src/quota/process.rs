//! The limit of a process: its `auto` pools together hold at most what one of them may.
//!
//! A program that builds a pool for each library, or for each thread, pins no more of the machine than with one. Each pool may
//! use all of it. A request that the limit refuses has the other pools release what they keep idle. While it waits, pools that
//! hold more than an even share make room of what is returned to them, as under the limit of a host (`shares`).

use pinpool_os::words::Size;
use std::path::PathBuf;
use std::sync::{Arc, Weak};

use super::{Budget, BudgetOwner};
use crate::ledger::Want;
use crate::maintenance_thread::MaintenanceThread;
use pinpool_os::fork::OfProcess;
use pinpool_os::sync::plain::Mutex;
use pinpool_os::sync::process::{AtomicBool, AtomicU64, Ordering};
use pinpool_shm::ledger::LISTED;
use pinpool_shm::ledger::shares::{self, Demand};

/// All pools that this process made, in that order.
static POOLS: OfProcess<Mutex<Vec<Entry>>> = OfProcess::new(Mutex::default);

/// For the order of wants.
static WANTS: AtomicU64 = AtomicU64::new(0);

/// A pool among the pools of its process.
#[derive(Debug, Default)]
pub(crate) struct Member {
    /// Where the memory of the machine is read from, which only tests change: pools of other roots do not count.
    root: PathBuf,
    name: Option<String>,
    /// Whether its limit is `auto`. Changed under the lock of [`POOLS`].
    is_auto: AtomicBool,
}

struct Entry {
    budget: Weak<Budget>,
    /// What its requests want; the budget counts what it holds.
    demand: Demand,
}

/// What the `auto` pools hold and want.
pub(super) struct Process {
    max_bytes: u64,
    own: Demand,
    others: Vec<Demand>,
}

impl Member {
    pub(crate) fn new(root: PathBuf, name: Option<String>, is_auto: bool) -> Self {
        Self { root, name, is_auto: AtomicBool::new(is_auto) }
    }

    fn is_auto(&self) -> bool {
        // Relaxed: a change comes before or after.
        self.is_auto.load(Ordering::Relaxed)
    }

    /// What counts under the `auto` limit of this pool.
    pub(crate) fn auto_bytes(&self) -> u64 {
        let pools = POOLS.get().lock();
        let pools = pools.iter().filter_map(|entry| entry.budget.upgrade());
        let counted = pools.filter(|pool| self.is_auto() && pool.is_auto() && pool.member.root == self.root);
        counted.map(|pool| pool.used_bytes()).fold(0, u64::saturating_add)
    }
}

pub(super) fn add(budget: &Arc<Budget>) {
    let mut pools = POOLS.get().lock();
    pools.retain(|other| other.budget.strong_count() > 0);
    pools.push(Entry { budget: Arc::downgrade(budget), demand: Demand::default() });
}

/// Whether a pool of this process has memory.
pub(super) fn has_claims() -> bool {
    POOLS.get().lock().iter().filter_map(|entry| entry.budget.upgrade()).any(|pool| pool.used_bytes() > 0)
}

/// Has the maintenance thread release idle memory of pools, and wake requests that wait for it.
pub(super) fn look_soon() {
    // The thread of another pool may be missing; then its own requests and returns do this.
    let _ = MaintenanceThread::of_process().wake(false);
}

impl Process {
    fn room_bytes(&self) -> u64 {
        let held = self.others.iter().chain([&self.own]).map(|pool| pool.held_bytes);
        self.max_bytes.saturating_sub(held.fold(0, u64::saturating_add))
    }

    pub(super) fn claimable_bytes(&self, bytes: u64) -> u64 {
        shares::claimable_bytes(&self.own, &self.others, self.max_bytes, self.room_bytes(), bytes)
    }

    /// What other pools want.
    pub(super) fn wanted_bytes(&self) -> u64 {
        self.others.iter().map(|other| other.wanted_bytes).fold(0, u64::saturating_add)
    }

    pub(super) fn others_lack(&self) -> u64 {
        match self.wanted_bytes() {
            0 => 0,
            wanted_bytes => wanted_bytes.saturating_sub(self.room_bytes()),
        }
    }

    pub(super) fn owed_bytes(&self) -> u64 {
        if shares::gives(&self.own, &self.others, self.max_bytes) { self.others_lack() } else { 0 }
    }
}

impl Budget {
    pub(super) fn is_auto(&self) -> bool {
        self.member.is_auto()
    }

    /// The limit is `auto`, or is not any more: then the pool neither counts for the others nor they for it.
    pub(crate) fn set_auto(&self, is_auto: bool) {
        let _pools = POOLS.get().lock();
        self.member.is_auto.store(is_auto && self.host.is_none(), Ordering::Relaxed);
    }

    /// The pool of `entry`, if it is another one that counts under the same limit.
    fn other(&self, entry: &Entry) -> Option<Arc<Self>> {
        let is_other = |other: &Arc<Self>| other.is_auto() && other.member.root == self.member.root;
        entry.budget.upgrade().filter(|other| !std::ptr::eq(&**other, self) && is_other(other))
    }

    /// The other `auto` pools of this process; none if this one is not `auto`.
    fn others(&self) -> Vec<Arc<Self>> {
        let find = || POOLS.get().lock().iter().filter_map(|entry| self.other(entry)).collect();
        if self.is_auto() { find() } else { Vec::new() }
    }

    /// What `act` makes of the `auto` pools while none of them claims; of `None` if this is not one of them.
    pub(super) fn in_process<R>(&self, act: impl FnOnce(Option<&Process>) -> R) -> R {
        if !self.is_auto() {
            return act(None);
        }
        let pools = POOLS.get().lock();
        let demand = |pool: &Self, entry: &Entry| Demand { held_bytes: pool.used_bytes(), ..entry.demand };
        // None in a forked child.
        let own = pools.iter().find(|entry| std::ptr::eq(entry.budget.as_ptr(), self));
        let others = || pools.iter().filter_map(|entry| Some(demand(&*self.other(entry)?, entry))).collect();
        let process = own.map(|own| Process { max_bytes: self.limit(), own: demand(self, own), others: others() });
        act(process.as_ref())
    }

    /// What counts under an `auto` limit of this pool.
    pub(crate) fn auto_bytes(&self) -> u64 {
        if self.is_auto() { self.member.auto_bytes() } else { self.used_bytes() }
    }

    pub(super) fn set_want_in_process(&self, want: &Want, bytes: u64, needed_bytes: u64) -> u64 {
        let mut pools = POOLS.get().lock();
        let before_bytes = want.replace(bytes);
        let own = pools.iter_mut().find(|entry| std::ptr::eq(entry.budget.as_ptr(), self));
        if let Some(own) = own.filter(|_| before_bytes != bytes) {
            let now = WANTS.fetch_add(1, Ordering::Relaxed);
            own.demand.change_want(before_bytes, bytes, needed_bytes, (now, 0));
        }
        drop(pools);
        if before_bytes != bytes {
            // Of what it does not want any more others may have some.
            look_soon();
        }
        before_bytes
    }

    /// The owners of the other `auto` pools.
    fn other_owners(&self) -> Vec<Arc<dyn BudgetOwner>> {
        self.others().iter().filter_map(|other| other.owner()).collect()
    }

    /// What the other `auto` pools keep idle.
    pub(crate) fn others_idle_bytes(&self) -> u64 {
        self.other_owners().iter().map(|owner| owner.releasable_bytes()).fold(0, u64::saturating_add)
    }

    /// Has the other `auto` pools release idle memory until there is room for `bytes`. Returns whether there is. A slow call,
    /// under no lock.
    pub(crate) fn ask_others(&self, bytes: u64) -> bool {
        let lacking_bytes = || bytes.saturating_sub(self.shared_room_for(bytes));
        self.other_owners().iter().any(|owner| {
            let released_bytes = owner.release_idle(lacking_bytes());
            released_bytes > 0 && lacking_bytes() == 0
        })
    }

    /// What the `auto` pools hold, for an error.
    pub(super) fn process_in_words(&self) -> String {
        let mut others = self.others();
        let held_bytes = self.auto_bytes();
        others.retain(|other| other.used_bytes() > 0);
        others.sort_by_key(|other| std::cmp::Reverse(other.used_bytes()));
        let listed = others.iter().take(LISTED).map(|other| {
            let (name, held_bytes) = (other.member.name.as_deref().unwrap_or("an unnamed pool"), other.used_bytes());
            match other.owner().map_or(0, |owner| owner.releasable_bytes()) {
                0 => format!("{name} holds {}", Size(held_bytes)),
                idle_bytes => format!("{name} holds {}, {} idle", Size(held_bytes), Size(idle_bytes)),
            }
        });
        let mut words: Vec<_> = listed.collect();
        let rest = others.get(LISTED..).unwrap_or_default();
        if !rest.is_empty() {
            let bytes: u64 = rest.iter().map(|other| other.used_bytes()).sum();
            words.push(format!("{} others hold {}", rest.len(), Size(bytes)));
        }
        let others = if words.is_empty() { "no other pool holds any".to_owned() } else { words.join(", ") };
        let max_bytes = self.limit();
        format!(
            "exceeds the limit of {} that this process's pools with PINPOOL_MAX_BYTES=auto share; {} are held ({others})",
            Size(max_bytes),
            Size(held_bytes)
        )
    }
}
