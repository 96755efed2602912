//! Limits in bytes: bytes are claimed here before memory is acquired for them.
//!
//! ```text
//!   account of a partition ◀─ claims of its requests, from the request until the buffer is idle or released
//!   pool                   ◀─ claims of its regions, or one of its arena, which is resized; memory that users page-locked
//!     └─ shared: host ledger, or the `auto` pools of this process
//!
//!   claim(n) ─┬▶ Claim ──▶ the slow call; dropping the claim returns the bytes
//!             └▶ QuotaExceeded: the level that refused, and how much is missing there
//! ```
//!
//! Memory that is not pinned has a budget of its own. Never calls a source and never waits.
//!
//! - quota-I1: `used` is the sum of all live claims and of those kept forever. A claim that would raise it over `max` is refused by
//!   the first level that lacks the room, and claims nothing. So the sum is at most `max`, unless `max` was lowered meanwhile.
//! - quota-I2: a claim is returned exactly once, by its drop.
//! - quota-I3: a request that waits for a budget with a watcher misses no return: it joins its queue, passes a fence and claims;
//!   a return lowers `used`, passes a fence and tells the watcher.

mod over;

use std::sync::{Arc, Weak};

use crate::ledger::SharedCeiling;
use crate::stats::Stats;
pub(crate) use over::{Level, QuotaExceeded};
use pinpool_os::fork::OfProcess;
use pinpool_os::lost;
use pinpool_os::sync::atomic::{AtomicU64, Ordering, fence};
use pinpool_os::sync::plain;

/// The budgets of all pools of the process.
static POOLS: OfProcess<plain::Mutex<Vec<Weak<Budget>>>> = OfProcess::new(plain::Mutex::default);

/// Who serves the requests that wait for a budget.
pub(crate) trait RoomWatcher: Send + Sync {
    /// Bytes were returned. Called under no lock.
    fn room_was_made(&self);
}

/// One limit, and the bytes that are claimed under it.
pub(crate) struct Budget {
    level: Level,
    /// `u64::MAX` without a limit.
    max_bytes: AtomicU64,
    used_bytes: AtomicU64,
    /// The limit that several pools share. Claims hold it, so that it is left with the last of them.
    shared: Option<Weak<SharedCeiling>>,
    watcher: Option<Weak<dyn RoomWatcher>>,
}

impl std::fmt::Debug for Budget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Budget")
            .field("max", &self.max_bytes())
            .field("used", &self.used_bytes())
            .finish_non_exhaustive()
    }
}

/// What may still be claimed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Room {
    /// Under the pool's own limit.
    pub(crate) own_bytes: u64,
    /// Under the shared limit; `u64::MAX` without one.
    pub(crate) shared_bytes: u64,
}

/// Bytes of a [`Budget`], returned when this is dropped.
#[derive(Debug)]
#[must_use = "dropping a claim returns its bytes"]
pub(crate) struct Claim {
    budget: Arc<Budget>,
    shared: Option<Arc<SharedCeiling>>,
    bytes: u64,
}

impl Budget {
    pub(crate) fn new(max_bytes: Option<u64>) -> Arc<Self> {
        Arc::new(Self::with(Level::Pool, max_bytes))
    }

    fn with(level: Level, max_bytes: Option<u64>) -> Self {
        let max_bytes = max_bytes.unwrap_or(u64::MAX);
        Self { level, max_bytes: AtomicU64::new(max_bytes), used_bytes: AtomicU64::new(0), shared: None, watcher: None }
    }

    /// The budget of an account, whose returns `watcher` is told.
    pub(crate) fn of_account(max_bytes: u64, watcher: Weak<dyn RoomWatcher>) -> Arc<Self> {
        Arc::new(Self { watcher: Some(watcher), ..Self::with(Level::Partition, Some(max_bytes)) })
    }

    /// A claim of no bytes under a new budget, whose claims are made in `shared` too, if there is one. The pool leaves `shared`
    /// with its last claim.
    pub(crate) fn under(shared: Option<Arc<SharedCeiling>>, max_bytes: Option<u64>) -> Claim {
        let weak = shared.as_ref().map(Arc::downgrade);
        let budget = Arc::new(Self { shared: weak, ..Self::with(Level::Pool, max_bytes) });
        let mut pools = POOLS.get().lock();
        pools.retain(|other| other.strong_count() > 0);
        pools.push(Arc::downgrade(&budget));
        Claim { budget, shared, bytes: 0 }
    }

    /// Whether a pool of this process, or another owner of the host ledger, has memory.
    pub(crate) fn has_claims_nearby(&self) -> bool {
        let in_ledger = || self.shared()?.host_ledger().map(|ledger| ledger.report().held_bytes);
        let in_pools = POOLS.get().lock().iter().filter_map(Weak::upgrade).any(|pool| pool.used_bytes() > 0);
        in_pools || in_ledger().is_some_and(|bytes| bytes > 0)
    }

    /// Claims `bytes`.
    ///
    /// # Errors
    ///
    /// A limit has no room for them, here or further out: the first that could never have it, else the first that has none now.
    pub(crate) fn claim(self: &Arc<Self>, bytes: u64) -> Result<Claim, QuotaExceeded> {
        let mut claim = self.nothing();
        claim.resize(bytes)?;
        Ok(claim)
    }

    /// A claim of no bytes.
    pub(crate) fn nothing(self: &Arc<Self>) -> Claim {
        Claim { budget: self.clone(), shared: self.shared(), bytes: 0 }
    }

    /// The limit that several pools share, if this pool is under one.
    pub(crate) fn shared(&self) -> Option<Arc<SharedCeiling>> {
        self.shared.as_ref()?.upgrade()
    }

    /// Claims `bytes` here and in `shared`, or nowhere.
    fn grow(&self, bytes: u64, shared: Option<&SharedCeiling>) -> Result<(), QuotaExceeded> {
        // Relaxed: the count guards no other memory; the compare-exchange alone upholds quota-I1.
        let max_bytes = self.max_bytes.load(Ordering::Relaxed);
        let fits = |used: u64| used.checked_add(bytes).filter(|&sum| sum <= max_bytes);
        if let Err(used) = self.used_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits) {
            // A sum that overflows is missing something, even without a limit.
            let missing_bytes = used.saturating_add(bytes).saturating_sub(max_bytes).max(1);
            return Err(self.never(bytes).unwrap_or_else(|| self.full(missing_bytes)));
        }
        if let Some(shared) = shared
            && !shared.claim(bytes)
        {
            self.give_back(bytes);
            return Err(QuotaExceeded::shared(shared, bytes));
        }
        Ok(())
    }

    fn give_back(&self, bytes: u64) {
        // Relaxed, as in `grow`.
        self.used_bytes.fetch_sub(bytes, Ordering::Relaxed);
        if let Some(watcher) = &self.watcher {
            fence(Ordering::SeqCst);
            watcher.upgrade().iter().for_each(|watcher| watcher.room_was_made());
        }
    }

    /// Why `bytes` can never be claimed: the first limit that is lower.
    pub(crate) fn never(&self, bytes: u64) -> Option<QuotaExceeded> {
        let over_bytes = bytes.saturating_sub(self.limit());
        let here = (over_bytes > 0).then_some(QuotaExceeded { could_ever: false, ..self.full(over_bytes) });
        here.or_else(|| {
            self.shared().map(|shared| QuotaExceeded::shared(&shared, bytes)).filter(|over| !over.could_ever)
        })
    }

    /// Whether `bytes` could be claimed if nothing else were.
    pub(crate) fn could_hold(&self, bytes: u64) -> bool {
        self.never(bytes).is_none()
    }

    /// Why `bytes` do not fit into `room`, which was found here.
    pub(crate) fn lacking(&self, room: Room, bytes: u64) -> QuotaExceeded {
        let shared = self.lacking_shared(room, bytes).filter(|_| bytes <= room.own_bytes);
        shared.unwrap_or_else(|| self.full(bytes.saturating_sub(room.own_bytes)))
    }

    /// Whether the shared limit has no room for `bytes`, or had none when `room` was found.
    pub(crate) fn lacking_shared(&self, room: Room, bytes: u64) -> Option<QuotaExceeded> {
        let shared = self.shared().filter(|shared| room.shared_bytes < bytes || shared.room_for(bytes) < bytes)?;
        Some(QuotaExceeded::shared(&shared, bytes))
    }

    /// The most that one claim could have.
    pub(crate) fn highest_claim_bytes(&self) -> u64 {
        self.limit().min(self.shared().map_or(u64::MAX, |shared| shared.max_bytes()))
    }

    /// This budget has no room now.
    pub(crate) fn full(&self, missing_bytes: u64) -> QuotaExceeded {
        QuotaExceeded { level: self.level, max_bytes: self.limit(), missing_bytes, could_ever: true }
    }

    fn limit(&self) -> u64 {
        // Relaxed, here and below: a snapshot.
        self.max_bytes.load(Ordering::Relaxed)
    }

    /// What may still be claimed, where at least `wanted_bytes` are of use.
    pub(crate) fn room_for(&self, wanted_bytes: u64) -> Room {
        Room {
            own_bytes: self.own_room_bytes(),
            shared_bytes: self.shared().map_or(u64::MAX, |shared| shared.room_for(wanted_bytes)),
        }
    }

    /// What may still be claimed, the shared limit aside.
    pub(crate) fn own_room_bytes(&self) -> u64 {
        self.limit().saturating_sub(self.used_bytes())
    }

    /// Bytes claimed beyond the limit, since it was lowered.
    pub(crate) fn over_bytes(&self) -> u64 {
        self.used_bytes().saturating_sub(self.limit())
    }

    /// Sets the limit. What is claimed above a lower one stays claimed until it is returned.
    pub(crate) fn set_max_bytes(&self, max_bytes: Option<u64>) {
        // Relaxed: a claim that is made at the same time comes before or after.
        self.max_bytes.store(max_bytes.unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// All bytes that are claimed.
    pub(crate) fn used_bytes(&self) -> u64 {
        self.used_bytes.load(Ordering::Relaxed)
    }

    /// Sets the limit.
    pub(crate) fn fill(&self, stats: &mut Stats) {
        stats.limits.max_bytes = self.max_bytes();
    }

    /// `None` without a limit.
    pub(crate) fn max_bytes(&self) -> Option<u64> {
        unless_max(self.limit())
    }
}

/// A limit, where `u64::MAX` stands for none.
fn unless_max(max_bytes: u64) -> Option<u64> {
    Some(max_bytes).filter(|&max_bytes| max_bytes != u64::MAX)
}

impl Room {
    pub(crate) const UNLIMITED: Self = Self { own_bytes: u64::MAX, shared_bytes: u64::MAX };

    pub(crate) fn bytes(self) -> u64 {
        self.own_bytes.min(self.shared_bytes)
    }
}

impl Claim {
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Claims `bytes` in place of what was claimed. Less is never refused.
    ///
    /// # Errors
    ///
    /// As [`Budget::claim`]; then nothing changes.
    pub(crate) fn resize(&mut self, bytes: u64) -> Result<(), QuotaExceeded> {
        match bytes.checked_sub(self.bytes) {
            // Refused by no limit, also by one that was lowered.
            Some(0) => {}
            Some(more) => self.budget.grow(more, self.shared.as_deref())?,
            None => self.give_back(self.bytes - bytes),
        }
        self.bytes = bytes;
        Ok(())
    }

    fn give_back(&self, bytes: u64) {
        self.budget.give_back(bytes);
        self.shared.iter().for_each(|shared| shared.give_back(bytes));
    }

    /// The budget under which it is made.
    pub(crate) fn budget(&self) -> &Arc<Budget> {
        &self.budget
    }

    /// Counts the bytes as claimed until the process ends: their memory could not be released.
    pub(crate) fn keep_forever(self) {
        // The pool may end before the process does, and the shared limit goes on counting them.
        if self.bytes > 0 {
            lost::keep(self);
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // A claim that was refused tells nobody.
        if self.bytes > 0 {
            self.give_back(self.bytes);
        }
    }
}

#[cfg(all(test, not(pinpool_loom)))]
mod tests {
    use std::path::Path;
    use std::sync::atomic::AtomicUsize;

    use super::*;
    use crate::ledger::ProcessCeiling;

    #[test]
    fn a_claim_over_the_limit_is_refused_and_claims_nothing() {
        let budget = Budget::new(Some(100));
        let first = budget.claim(60).unwrap();
        assert!(budget.claim(41).is_err());
        let second = budget.claim(40).unwrap();
        assert_eq!(budget.used_bytes(), 100);
        drop(first);
        second.keep_forever();
        assert_eq!(budget.used_bytes(), 40);
    }

    #[test]
    fn a_limit_that_is_lowered_refuses_until_enough_came_back() {
        let budget = Budget::new(None);
        let held = budget.claim(60).unwrap();
        budget.set_max_bytes(Some(50));
        assert!(budget.claim(1).is_err() && budget.claim(0).is_ok(), "nothing fits everywhere");
        assert_eq!((budget.used_bytes(), budget.max_bytes(), budget.over_bytes()), (60, Some(50), 10));
        drop(held);
        assert!(budget.claim(51).is_err());
        assert!(budget.claim(50).is_ok());
    }

    #[derive(Default)]
    struct Counting(AtomicUsize);

    impl RoomWatcher for Counting {
        fn room_was_made(&self) {
            self.0.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        }
    }

    #[test]
    fn a_refusal_names_the_level_and_what_is_missing_there_and_a_return_tells_the_watcher() {
        let told = Arc::new(Counting::default());
        let watcher: Weak<Counting> = Arc::downgrade(&told);
        let (pool, account) = (Budget::new(Some(100)), Budget::of_account(50, watcher));
        let over = |budget: &Arc<Budget>, bytes| budget.claim(bytes).map(drop).unwrap_err();
        let held = account.claim(30).unwrap();
        let expected =
            |level, max_bytes, missing_bytes, could_ever| QuotaExceeded { level, max_bytes, missing_bytes, could_ever };
        assert_eq!(over(&account, 25), expected(Level::Partition, 50, 5, true));
        assert_eq!(over(&account, 51), expected(Level::Partition, 50, 1, false));
        assert_eq!(over(&pool, 101), expected(Level::Pool, 100, 1, false));
        let told = || told.0.load(std::sync::atomic::Ordering::SeqCst);
        assert_eq!(told(), 0, "a claim that was refused tells nobody");
        drop(held);
        assert_eq!(told(), 1);
    }

    #[test]
    fn a_claim_is_resized_as_a_whole_or_not_at_all() {
        let pool = Budget::new(Some(100));
        let (mut first, mut second) = (pool.nothing(), pool.nothing());
        first.resize(60).unwrap();
        second.resize(40).unwrap();
        assert_eq!(second.resize(41).unwrap_err().missing_bytes, 1);
        assert_eq!((first.bytes(), second.bytes(), pool.used_bytes()), (60, 40, 100));
        first.resize(50).unwrap();
        second.resize(50).unwrap();
        pool.set_max_bytes(Some(10));
        assert_eq!(pool.over_bytes(), 90);
        second.resize(50).unwrap();
        second.resize(30).unwrap();
        assert!(second.resize(31).is_err(), "above a lowered limit nothing grows");
        drop(first);
        drop(second);
        assert_eq!(pool.used_bytes(), 0);
    }

    /// A ceiling of `max_bytes` for the pools of a root of files that nothing else has, and one part in it.
    fn shared(root: &str, max_bytes: u64) -> Arc<SharedCeiling> {
        let part = ProcessCeiling::attach(Path::new(root), None, |_| max_bytes);
        Arc::new(SharedCeiling::OfProcess(part))
    }

    #[test]
    fn a_ceiling_that_pools_share_is_the_outermost_level() {
        let (first, second) = (shared("unit-outermost", 100), shared("unit-outermost", 100));
        let mut pool = Budget::under(Some(first.clone()), Some(80));
        let beside = Budget::under(Some(second), None);
        pool.resize(70).unwrap();
        let over = |quota: &Arc<Budget>, bytes| quota.claim(bytes).map(drop).unwrap_err();
        let expected = |max_bytes, missing_bytes, could_ever| QuotaExceeded {
            level: Level::Shared,
            max_bytes,
            missing_bytes,
            could_ever,
        };
        assert_eq!(over(beside.budget(), 31), expected(100, 31, true));
        assert_eq!(over(beside.budget(), 101), expected(100, 101, false));
        assert_eq!((beside.budget().used_bytes(), pool.budget().used_bytes()), (0, 70));
        // Its own ceiling refuses first, and then nothing is claimed of what is shared.
        assert_eq!(over(pool.budget(), 11).level, Level::Pool);
        let claim = beside.budget().claim(30).unwrap();
        assert_eq!(beside.budget().room_for(1), Room { own_bytes: u64::MAX - 30, shared_bytes: 0 });
        assert_eq!(pool.budget().room_for(1), Room { own_bytes: 10, shared_bytes: 0 });
        assert_eq!(pool.budget().room_for(1).bytes(), 0);
        assert_eq!(pool.resize(75).unwrap_err(), expected(100, 5, true));
        assert_eq!((pool.bytes(), pool.budget().used_bytes()), (70, 70));
        drop(claim);
        assert_eq!(pool.budget().room_for(10), Room { own_bytes: 10, shared_bytes: 30 });
        assert_eq!(pool.budget().room_for(10).bytes(), 10);
        pool.resize(60).unwrap();
        assert_eq!(first.room_for(1), 40, "what was given back is there for others");
    }

    #[test]
    fn what_lacked_the_room_is_named_by_the_room_that_was_found() {
        let pool = Budget::under(Some(shared("unit-lacking", 100)), Some(80));
        let quota = pool.budget();
        let found = |own_bytes, shared_bytes| Room { own_bytes, shared_bytes };
        assert_eq!(quota.lacking(found(50, 20), 30).level, Level::Shared, "though it has room by now");
        assert_eq!(quota.lacking(found(50, 20), 60).level, Level::Pool);
        assert_eq!(quota.lacking(found(20, 50), 30).missing_bytes, 10);
        assert_eq!(quota.lacking_shared(found(80, 30), 30), None);
        assert_eq!(quota.lacking_shared(found(80, 200), 100), None, "it has just enough");
        assert_eq!(quota.lacking_shared(found(80, 29), 30).map(|over| over.missing_bytes), Some(30));
        assert!(quota.lacking_shared(found(80, 200), 101).is_some(), "it has none now");
        assert_eq!((quota.highest_claim_bytes(), quota.never(81).map(|over| over.level)), (80, Some(Level::Pool)));
        quota.set_max_bytes(None);
        assert_eq!((quota.highest_claim_bytes(), quota.never(101).map(|over| over.level)), (100, Some(Level::Shared)));
        assert!(quota.never(100).is_none() && quota.could_hold(100) && !quota.could_hold(101));
    }

    #[test]
    fn a_pool_leaves_what_is_shared_with_its_last_claim() {
        let ceiling = shared("unit-leaves", 100);
        let left = Arc::downgrade(&ceiling);
        let pool = Budget::under(Some(ceiling), None);
        let quota = pool.budget().clone();
        let claim = quota.claim(10).unwrap();
        drop(pool);
        quota.nothing().keep_forever();
        assert!(left.upgrade().is_some() && quota.shared().is_some());
        drop(claim);
        assert!(left.upgrade().is_none() && quota.shared().is_none());
    }

    #[test]
    fn bytes_that_are_kept_for_ever_stay_claimed_and_keep_what_is_shared() {
        let ceiling = shared("unit-kept", 100);
        let left = Arc::downgrade(&ceiling);
        let pool = Budget::under(Some(ceiling), Some(100));
        let quota = pool.budget().clone();
        quota.nothing().keep_forever();
        quota.claim(30).unwrap().keep_forever();
        drop(pool);
        assert_eq!(quota.used_bytes(), 30);
        assert_eq!(left.upgrade().map(|shared| shared.room_for(100)), Some(70));
    }

    #[test]
    fn sums_that_overflow_are_refused() {
        let quota = Budget::new(None);
        let _held = quota.claim(u64::MAX - 1).unwrap();
        assert!(quota.claim(2).is_err());
        assert_eq!(quota.max_bytes(), None);
    }
}

#[cfg(all(test, pinpool_loom))]
mod models {
    use super::*;

    #[test]
    fn two_claims_never_pass_the_ceiling_together() {
        loom::model(|| {
            let quota = Budget::new(Some(3));
            let other = quota.clone();
            let thread = loom::thread::spawn(move || other.claim(2).is_ok());
            let claimed = quota.claim(2);
            assert!(quota.used_bytes() <= 3);
            let mine = claimed.is_ok();
            drop(claimed);
            let theirs = thread.join().unwrap();
            assert!(mine || theirs, "a refusal needs another claim");
            assert_eq!(quota.used_bytes(), 0);
        });
    }

    /// A queue of one request.
    #[derive(Default)]
    struct Queue {
        is_waiting: loom::sync::atomic::AtomicBool,
        is_told: loom::sync::Mutex<bool>,
        told: loom::sync::Condvar,
    }

    impl RoomWatcher for Queue {
        fn room_was_made(&self) {
            if self.is_waiting.load(Ordering::Relaxed) {
                *self.is_told.lock().unwrap() = true;
                self.told.notify_one();
            }
        }
    }

    /// Fails without either fence: loom reports a request that nobody wakes as a deadlock.
    #[test]
    fn loom_a_request_that_waits_is_told_of_the_return_that_makes_its_room() {
        loom::model(|| {
            let queue = Arc::new(Queue::default());
            let watcher: Weak<Queue> = Arc::downgrade(&queue);
            let budget = Budget::of_account(3, watcher);
            let held = budget.claim(2).unwrap();
            let returning = loom::thread::spawn(move || drop(held));
            queue.is_waiting.store(true, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            while budget.claim(2).map(|claim| assert_eq!(claim.bytes(), 2)).is_err() {
                let mut is_told = queue.is_told.lock().unwrap();
                while !*is_told {
                    is_told = queue.told.wait(is_told).unwrap();
                }
                *is_told = false;
            }
            returning.join().unwrap();
            assert_eq!(budget.used_bytes(), 0);
        });
    }
}
