//! The limit of a process: its `auto` pools together hold at most the limit of one of them.
//!
//! So a program with a pool for each library, or for each thread, pins no more of the machine than a program with one pool. Each
//! pool may use the whole limit. If the limit refuses a request, the other pools release idle memory. Pools that wait for each
//! other are served in the order in which they began to wait: later pools release what is returned to them, and claim nothing
//! that an earlier pool wants.

use std::path::PathBuf;
use std::sync::{Arc, Weak};

use super::Budget;
use crate::maintenance_thread::MaintenanceThread;
use pinpool_os::fork::PerProcess;
use pinpool_os::format::Size;
use pinpool_os::sync::unmodeled::{AtomicBool, AtomicU64, Mutex, Ordering};
use pinpool_shared_limit::{LISTED, Want};

/// All pools of this process, in order of creation.
static LISTED_POOLS: PerProcess<Mutex<Vec<ListedPool>>> = PerProcess::new(Mutex::default);

/// The next value of [`ListedPool::order`].
static WANTS: AtomicU64 = AtomicU64::new(0);

/// A pool among the pools of its process.
#[derive(Debug, Default)]
pub(crate) struct ProcessMember {
    /// The root of the machine's files, which only tests change. Pools with different roots are counted separately.
    root: PathBuf,
    name: Option<String>,
    /// Whether the limit of the pool is `auto`. Changed under the lock of [`LISTED_POOLS`].
    is_auto: AtomicBool,
}

struct ListedPool {
    budget: Weak<Budget>,
    /// Bytes that requests of the pool want. The bytes that the pool has claimed are in `budget`.
    wanted_bytes: u64,
    /// The position of the pool in the order of the pools that want memory; `u64::MAX` if the pool wants none.
    order: u64,
}

/// The state of the process's limit, for one pool.
pub(super) struct ProcessRoom {
    room_bytes: u64,
    /// Bytes wanted by other pools that began to wait before this pool.
    pub(super) wanted_bytes: u64,
}

impl ProcessMember {
    pub(crate) fn new(root: PathBuf, name: Option<String>, is_auto: bool) -> Self {
        Self { root, name, is_auto: AtomicBool::new(is_auto) }
    }

    /// Returns the bytes that all `auto` pools with the same root have claimed.
    pub(crate) fn auto_bytes(&self) -> u64 {
        let pools = LISTED_POOLS.get().lock();
        let pools = pools.iter().filter_map(|entry| entry.budget.upgrade());
        let counted = pools.filter(|pool| pool.is_auto() && pool.member.root == self.root);
        counted.map(|pool| pool.used_bytes()).fold(0, u64::saturating_add)
    }
}

pub(super) fn add(budget: &Arc<Budget>) {
    let mut pools = LISTED_POOLS.get().lock();
    pools.retain(|other| other.budget.strong_count() > 0);
    pools.push(ListedPool { budget: Arc::downgrade(budget), wanted_bytes: 0, order: u64::MAX });
}

/// Wakes the maintenance thread, which releases idle memory of pools and wakes requests that wait for memory.
pub(super) fn wake_thread() {
    // If there is no such thread, the requests and returns of each pool do this.
    let _ = MaintenanceThread::of_process().wake(false);
}

impl ProcessRoom {
    /// Returns the bytes that this pool may claim.
    pub(super) fn claimable_bytes(&self) -> u64 {
        self.room_bytes.saturating_sub(self.wanted_bytes)
    }

    /// Returns the bytes that earlier pools want and the limit has no room for.
    pub(super) fn shortfall_bytes(&self) -> u64 {
        self.wanted_bytes.saturating_sub(self.room_bytes)
    }
}

impl Budget {
    pub(super) fn is_auto(&self) -> bool {
        // Relaxed: a concurrent change may count as earlier or later.
        self.member.is_auto.load(Ordering::Relaxed)
    }

    /// Sets whether the limit is `auto`. If it is not, or if the pool is under a host's limit, the pool is counted separately
    /// from the other pools.
    pub(crate) fn set_auto(&self, is_auto: bool) {
        let _pools = LISTED_POOLS.get().lock();
        self.member.is_auto.store(is_auto && self.shared_limit.is_none(), Ordering::Relaxed);
    }

    /// Returns the pool of `entry` if it is another pool under the same limit.
    fn other(&self, entry: &ListedPool) -> Option<Arc<Self>> {
        let is_other = |other: &Arc<Self>| other.is_auto() && other.member.root == self.member.root;
        entry.budget.upgrade().filter(|other| !std::ptr::eq(&**other, self) && is_other(other))
    }

    /// Returns the other `auto` pools of this process, or none if this pool is not `auto`.
    fn others(&self) -> Vec<Arc<Self>> {
        let find = || LISTED_POOLS.get().lock().iter().filter_map(|entry| self.other(entry)).collect();
        if self.is_auto() { find() } else { Vec::new() }
    }

    /// Calls `act` with the state of the process. For an `auto` pool, this happens under the lock under which all `auto` pools
    /// claim.
    pub(super) fn with_process_room<R>(&self, act: impl FnOnce(&ProcessRoom) -> R) -> R {
        if !self.is_auto() {
            return act(&ProcessRoom { room_bytes: u64::MAX, wanted_bytes: 0 });
        }
        let pools = LISTED_POOLS.get().lock();
        let own = pools.iter().find(|entry| std::ptr::eq(entry.budget.as_ptr(), self));
        let own_order = own.map_or(u64::MAX, |own| own.order);
        let mut process = ProcessRoom { room_bytes: self.own_room_bytes(), wanted_bytes: 0 };
        for (other, entry) in pools.iter().filter_map(|entry| Some((self.other(entry)?, entry))) {
            process.room_bytes = process.room_bytes.saturating_sub(other.used_bytes());
            process.wanted_bytes += if entry.order < own_order { entry.wanted_bytes } else { 0 };
        }
        act(&process)
    }

    /// Returns whether any pool of this process with the same root, or any member under the limit of the host, has claimed bytes.
    pub(crate) fn has_claims_nearby(&self) -> bool {
        let has_claims = |pool: Arc<Self>| pool.member.root == self.member.root && pool.used_bytes() > 0;
        let of_process = LISTED_POOLS.get().lock().iter().filter_map(|entry| entry.budget.upgrade()).any(has_claims);
        of_process || self.shared_limit().is_some_and(|shared| shared.report().held_bytes > 0)
    }

    /// Returns the bytes that count under the `auto` limit of this pool, or the bytes of this pool alone if it is not `auto`.
    pub(crate) fn auto_bytes(&self) -> u64 {
        if self.is_auto() { self.member.auto_bytes() } else { self.used_bytes() }
    }

    pub(super) fn set_want_in_process(&self, want: &Want, bytes: u64) -> u64 {
        let mut pools = LISTED_POOLS.get().lock();
        let before_bytes = want.replace(bytes);
        if before_bytes == bytes {
            return bytes;
        }
        if let Some(own) = pools.iter_mut().find(|entry| std::ptr::eq(entry.budget.as_ptr(), self)) {
            own.wanted_bytes = (own.wanted_bytes + bytes).saturating_sub(before_bytes);
            own.order = match own.wanted_bytes {
                0 => u64::MAX,
                _ => own.order.min(WANTS.fetch_add(1, Ordering::Relaxed)),
            };
        }
        drop(pools);
        // Other pools may use what this pool no longer wants.
        wake_thread();
        before_bytes
    }

    /// Makes the other `auto` pools release idle memory until there is room for `bytes`. Returns whether there is room. Makes
    /// slow calls, so the caller must hold no lock.
    pub(crate) fn reclaim_from_others(&self, bytes: u64) -> bool {
        let shortfall_bytes = || bytes.saturating_sub(self.shared_room_for(bytes));
        self.others().iter().filter_map(|other| other.user()).any(|user| {
            user.release_idle(shortfall_bytes());
            shortfall_bytes() == 0
        })
    }

    /// Returns a description of the bytes of the `auto` pools, for an error.
    pub(super) fn describe_process(&self) -> String {
        let mut others = self.others();
        others.retain(|other| other.used_bytes() > 0);
        others.sort_by_key(|other| std::cmp::Reverse(other.used_bytes()));
        let (listed, rest) = others.split_at(others.len().min(LISTED));
        let name = |other: &Self| other.member.name.clone().unwrap_or_else(|| "an unnamed pool".to_owned());
        let mut words: Vec<_> =
            listed.iter().map(|other| format!("{} holds {}", name(other), Size(other.used_bytes()))).collect();
        if !rest.is_empty() {
            let bytes: u64 = rest.iter().map(|other| other.used_bytes()).sum();
            words.push(format!("{} others hold {}", rest.len(), Size(bytes)));
        }
        let others = if words.is_empty() { "no other pool holds any".to_owned() } else { words.join(", ") };
        format!(
            "exceeds the limit of {} that this process's pools with PINPOOL_MAX_BYTES=auto share; {} are held ({others})",
            Size(self.limit()),
            Size(self.auto_bytes())
        )
    }
}
