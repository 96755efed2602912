//! Limits in bytes: bytes are claimed here before memory is acquired for them.
//!
//! ```text
//!   partition ◀─ claims of its requests, from the request until the buffer is idle or released
//!   pool    ◀─ claims of its regions, or one claim of its arena, which is resized; memory that users pinned
//!     └─ process (the `auto` pools together) or host (`PINPOOL_LEDGER`)
//!
//!   claim(n) ─┬▶ Claim ──▶ the slow call; dropping the claim returns the bytes
//!             └▶ QuotaExceeded: the level that refused
//! ```
//!
//! Pageable memory has a separate budget. This module waits only for the lock of a shared limit's file, and calls a source only
//! through other pools that release idle memory for a claim.
//!
//! - **quota-I1**: `used` is the sum of all live claims, including claims that are kept forever. A claim that would raise it
//!   above `max` is refused by the first level without room, and claims nothing. So the sum is at most `max`, unless `max` was
//!   lowered meanwhile.
//! - **quota-I2**: a claim is returned exactly once, when it is dropped.
//! - **quota-I3**: a request that waits for a partition misses no return: it joins the queue, executes a fence and claims; a
//!   return lowers `used`, executes a fence and notifies the budget's user.
//! - **quota-I4**: the `auto` pools of a process together hold at most what the limit of one allows: they claim under one lock.

mod process;

use std::sync::{Arc, OnceLock, Weak};

use pinpool_os::format::Size;
use pinpool_os::leaked;
use pinpool_os::sync::atomic::{AtomicU64, Ordering, fence};
use pinpool_shared_limit::{Loss, SharedLimit, SharedLimitReport, Want};
pub(crate) use process::ProcessMember;
use process::ProcessRoom;

/// The user of a budget, a pool or partition, with its waiting requests and its idle memory. Its methods are called without a lock.
pub(crate) trait BudgetUser: Send + Sync {
    /// Called after bytes were returned to a partition.
    fn on_bytes_returned(&self) {}

    /// Releases idle memory until `bytes` are released or nothing is idle. Returns the number of released bytes. Makes slow
    /// calls.
    fn release_idle(&self, _bytes: u64) -> u64 {
        0
    }
}

/// The limit that refused a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LimitLevel {
    /// The limit of a partition.
    Partition,
    Pool,
    /// The limit that several pools of a process, or several processes of a host, share.
    Shared,
}

/// The refusal of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct QuotaExceeded {
    pub(crate) level: LimitLevel,
    /// The bytes of the refused claim.
    pub(crate) bytes: u64,
    /// Whether the claim would fit if nothing else were claimed.
    pub(crate) could_fit: bool,
}

/// One limit, and the bytes that are claimed under it.
#[derive(Debug)]
pub(crate) struct Budget {
    level: LimitLevel,
    /// `u64::MAX` if there is no limit.
    max_bytes: AtomicU64,
    used_bytes: AtomicU64,
    /// The pool among the pools of the process.
    member: ProcessMember,
    /// The shared limit of the host. Claims keep the shared limit alive, so the pool leaves it with its last claim.
    shared_limit: Option<Weak<SharedLimit>>,
    user: OnceLock<Weak<dyn BudgetUser>>,
}

/// Claimed bytes of a [`Budget`]. They are returned when the claim is dropped.
#[derive(Debug)]
#[must_use = "dropping a claim returns its bytes"]
pub(crate) struct Claim {
    budget: Arc<Budget>,
    shared_limit: Option<Arc<SharedLimit>>,
    bytes: u64,
}

impl Budget {
    pub(crate) fn new(max_bytes: Option<u64>) -> Arc<Self> {
        Arc::new(Self::for_level(LimitLevel::Pool, max_bytes))
    }

    fn for_level(level: LimitLevel, max_bytes: Option<u64>) -> Self {
        let max_bytes = max_bytes.unwrap_or(u64::MAX);
        Self {
            level,
            max_bytes: AtomicU64::new(max_bytes),
            used_bytes: AtomicU64::new(0),
            member: ProcessMember::default(),
            shared_limit: None,
            user: OnceLock::new(),
        }
    }

    /// Returns a budget for a partition.
    pub(crate) fn for_partition(max_bytes: Option<u64>, user: Weak<dyn BudgetUser>) -> Arc<Self> {
        Arc::new(Self { user: OnceLock::from(user), ..Self::for_level(LimitLevel::Partition, max_bytes) })
    }

    /// Sets the user, if there is none yet.
    pub(crate) fn set_user(&self, user: Weak<dyn BudgetUser>) {
        let _ = self.user.set(user);
    }

    fn user(&self) -> Option<Arc<dyn BudgetUser>> {
        self.user.get()?.upgrade()
    }

    /// Claims `bytes`.
    ///
    /// # Errors
    ///
    /// The refusal by the first limit that is lower than `bytes`, else by the first limit that has no room now.
    pub(crate) fn claim(self: &Arc<Self>, bytes: u64) -> Result<Claim, QuotaExceeded> {
        let mut claim = self.empty_claim();
        claim.resize(bytes)?;
        Ok(claim)
    }

    /// Returns a claim of zero bytes.
    pub(crate) fn empty_claim(self: &Arc<Self>) -> Claim {
        Claim { budget: self.clone(), shared_limit: self.shared_limit(), bytes: 0 }
    }

    /// Returns the limit of the host, if the pool is under such a limit and still has a claim.
    pub(crate) fn shared_limit(&self) -> Option<Arc<SharedLimit>> {
        self.shared_limit.as_ref()?.upgrade()
    }

    /// Returns whether other pools or processes may be under the same limit.
    pub(crate) fn is_shared(&self) -> bool {
        self.is_auto() || self.shared_limit().is_some()
    }

    /// Claims `bytes` at each level, or at none.
    fn add(&self, bytes: u64, shared_limit: Option<&SharedLimit>) -> Result<(), QuotaExceeded> {
        self.with_process_room(|process| {
            self.add_own(bytes)?;
            if process.claimable_bytes() >= bytes && shared_limit.is_none_or(|shared| shared.claim(bytes)) {
                return Ok(());
            }
            // Relaxed, for the reason given in `add_own`.
            self.used_bytes.fetch_sub(bytes, Ordering::Relaxed);
            Err(self.shared_refusal(bytes))
        })
    }

    fn add_own(&self, bytes: u64) -> Result<(), QuotaExceeded> {
        // Relaxed: the count guards no other memory; the compare-exchange alone upholds quota-I1.
        let max_bytes = self.max_bytes.load(Ordering::Relaxed);
        let fits = |used: u64| used.checked_add(bytes).filter(|&sum| sum <= max_bytes);
        let added = self.used_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits);
        added.map(drop).map_err(|_| self.refusal(bytes))
    }

    fn release(&self, bytes: u64) {
        // Relaxed, for the reason given in `add_own`.
        self.used_bytes.fetch_sub(bytes, Ordering::Relaxed);
        if self.level == LimitLevel::Partition {
            fence(Ordering::SeqCst);
            if let Some(user) = self.user() {
                user.on_bytes_returned();
            }
        } else if self.is_auto() && self.is_wanted() {
            // The caller holds locks of the pool, so another thread wakes other pools' requests.
            process::wake_thread();
        }
    }

    /// Returns the refusal of `bytes`, for which this budget has no room now: by the first limit that is lower than `bytes`, else
    /// by this budget.
    pub(crate) fn refusal(&self, bytes: u64) -> QuotaExceeded {
        let is_lower = bytes > self.limit();
        if is_lower || self.could_hold(bytes) {
            return QuotaExceeded { could_fit: !is_lower, ..self.own_refusal(bytes) };
        }
        self.shared_refusal(bytes)
    }

    /// Returns whether `bytes` could be claimed if nothing else were.
    pub(crate) fn could_hold(&self, bytes: u64) -> bool {
        bytes <= self.highest_claim_bytes()
    }

    /// Returns the refusal of `bytes` by the shared limit, if that has no room for them now.
    pub(crate) fn current_shared_refusal(&self, bytes: u64) -> Option<QuotaExceeded> {
        (self.shared_room_for(bytes) < bytes).then(|| self.shared_refusal(bytes))
    }

    /// Returns the bytes of the largest possible claim.
    pub(crate) fn highest_claim_bytes(&self) -> u64 {
        self.limit().min(self.shared_limit().map_or(u64::MAX, |shared| shared.max_bytes()))
    }

    /// Returns the refusal of `bytes` by this budget, which has no room now.
    pub(crate) fn own_refusal(&self, bytes: u64) -> QuotaExceeded {
        QuotaExceeded { level: self.level, bytes, could_fit: true }
    }

    /// Returns the refusal of `bytes` by the shared limit, which has no room for them.
    fn shared_refusal(&self, bytes: u64) -> QuotaExceeded {
        QuotaExceeded { level: LimitLevel::Shared, bytes, could_fit: self.could_hold(bytes) }
    }

    fn limit(&self) -> u64 {
        // Relaxed, here and below: the value is a snapshot.
        self.max_bytes.load(Ordering::Relaxed)
    }

    /// Returns the bytes that may still be claimed. If there are fewer than `wanted_bytes`, a host's limit first reclaims the
    /// bytes of dead members.
    pub(crate) fn room_for(&self, wanted_bytes: u64) -> u64 {
        self.own_room_bytes().min(self.shared_room_for(wanted_bytes))
    }

    /// Returns the bytes that may still be claimed under this limit alone, without the shared limit.
    pub(crate) fn own_room_bytes(&self) -> u64 {
        self.limit().saturating_sub(self.used_bytes())
    }

    /// Returns the bytes by which the claims exceed the limit, which happens only after the limit was lowered.
    pub(crate) fn over_bytes(&self) -> u64 {
        self.used_bytes().saturating_sub(self.limit())
    }

    /// Sets the limit. Claims above a lower limit remain until they are returned.
    pub(crate) fn set_max_bytes(&self, max_bytes: Option<u64>) {
        // Relaxed: a concurrent claim may count as earlier or later.
        self.max_bytes.store(max_bytes.unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Returns all claimed bytes.
    pub(crate) fn used_bytes(&self) -> u64 {
        self.used_bytes.load(Ordering::Relaxed)
    }

    /// Returns the limit, or `None` if there is none.
    pub(crate) fn max_bytes(&self) -> Option<u64> {
        Some(self.limit()).filter(|&max_bytes| max_bytes != u64::MAX)
    }

    /// Returns the result of `of_shared` for the shared limit if there is one, else the result of `of_process` for the `auto` pools.
    fn shared(&self, of_shared: impl FnOnce(&SharedLimit) -> u64, of_process: impl FnOnce(&ProcessRoom) -> u64) -> u64 {
        self.shared_limit().map_or_else(|| self.with_process_room(of_process), |shared| of_shared(&shared))
    }

    fn shared_room_for(&self, bytes: u64) -> u64 {
        self.shared(|shared| shared.room_for(bytes), ProcessRoom::claimable_bytes)
    }

    /// Records that a request or reserve of this pool that needs `needed_bytes` now wants `bytes` of the shared limit. Notifies
    /// the other members of a change; under a host's limit only if `bytes` is more than before. Returns the previous value, or
    /// `bytes` if there is no shared limit.
    pub(crate) fn set_want(&self, want: &Want, bytes: u64, needed_bytes: u64) -> u64 {
        match self.shared_limit() {
            Some(shared) => shared.set_want(want, bytes, needed_bytes),
            None if self.is_auto() || want.bytes() > 0 => self.set_want_in_process(want, bytes),
            None => bytes,
        }
    }

    /// Returns whether other members want memory.
    pub(crate) fn is_wanted(&self) -> bool {
        self.shared(|shared| shared.is_wanted().into(), |process| process.wanted_bytes) > 0
    }

    /// Returns the bytes that other members want and the shared limit has no room for.
    pub(crate) fn others_lacking_bytes(&self) -> u64 {
        self.shared(SharedLimit::others_lacking_bytes, ProcessRoom::shortfall_bytes)
    }

    /// Returns the bytes that returned buffers must release for other members with priority, or 0 if there are none.
    pub(crate) fn owed_bytes(&self) -> u64 {
        self.shared(SharedLimit::owed_bytes, ProcessRoom::shortfall_bytes)
    }

    /// Returns whether other processes hold more of the shared limit than this one.
    pub(crate) fn is_held_by_others(&self) -> bool {
        let report = self.shared_limit().map(|shared| shared.report()).unwrap_or_default();
        let own_bytes: u64 = report.members.iter().filter(|member| member.is_own).map(|member| member.held_bytes).sum();
        report.held_bytes - own_bytes > own_bytes
    }

    /// Returns the reason that the shared limit has no room for `needed_bytes`, and a remedy.
    pub(crate) fn describe_shared(&self, needed_bytes: u64) -> (String, &'static str) {
        let too_large = needed_bytes > self.highest_claim_bytes();
        let Some(shared) = self.shared_limit() else {
            let remedy = if too_large {
                "request a smaller buffer, or set PINPOOL_MAX_BYTES to a size"
            } else {
                "return buffers in these pools, wait longer (PINPOOL_WAIT), or set PINPOOL_MAX_BYTES to a size, which applies \
                 to each pool"
            };
            return (self.describe_process(), remedy);
        };
        if let Some(loss) = shared.loss() {
            let name = shared.name();
            let why = describe_loss(loss);
            let found = format!("PINPOOL_LEDGER={name}: {why}, so this pool can no longer grow");
            return (found, "return buffers to this pool, or restart all processes that share the limit");
        }
        let report = shared.report();
        let SharedLimitReport { name, max_bytes, held_bytes, .. } = &report;
        let (max, held) = (Size(max_bytes.unwrap_or(u64::MAX)), Size(*held_bytes));
        let others = report.describe_others();
        if too_large {
            let found = format!("exceeds the shared limit {name} of {max}; {held} are held ({others})");
            return (found, "request a smaller buffer, or restart all its processes with a larger PINPOOL_MAX_BYTES");
        }
        let remedy = "return buffers in these processes, wait longer (PINPOOL_WAIT), or restart them with a larger PINPOOL_MAX_BYTES";
        (format!("the shared limit {name} of {max} is reached; {held} are held ({others})"), remedy)
    }
}

impl Claim {
    /// Returns a claim of zero bytes under a new budget for a pool. Claims are also made in `shared_limit`, if there is one; the
    /// pool leaves it with its last claim.
    pub(crate) fn under_new_budget(max_bytes: Option<u64>, member: ProcessMember, shared: Option<SharedLimit>) -> Self {
        let shared_limit = shared.map(Arc::new);
        let weak = shared_limit.as_ref().map(Arc::downgrade);
        let budget = Arc::new(Budget { member, shared_limit: weak, ..Budget::for_level(LimitLevel::Pool, max_bytes) });
        process::add(&budget);
        Self { budget, shared_limit, bytes: 0 }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Changes the claim to `bytes`. A smaller claim is never refused.
    ///
    /// # Errors
    ///
    /// The errors of [`Budget::claim`]. The claim is then unchanged.
    pub(crate) fn resize(&mut self, bytes: u64) -> Result<(), QuotaExceeded> {
        match bytes.checked_sub(self.bytes) {
            // Not refused, even if the limit was lowered.
            Some(0) => {}
            Some(more) => self.budget.add(more, self.shared_limit.as_deref())?,
            None => self.release(self.bytes - bytes),
        }
        self.bytes = bytes;
        Ok(())
    }

    fn release(&self, bytes: u64) {
        self.budget.release(bytes);
        if let Some(shared) = &self.shared_limit {
            shared.release(bytes);
        }
    }

    /// Returns the budget under which the claim was made.
    pub(crate) fn budget(&self) -> &Arc<Budget> {
        &self.budget
    }

    /// Counts the bytes as claimed until the process ends, because their memory could not be released.
    pub(crate) fn leak(self) {
        // The pool may end before the process does. The shared limit then continues to count the bytes.
        if self.bytes > 0 {
            leaked::leak(self);
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // Notifies no user for a claim that was refused.
        if self.bytes > 0 {
            self.release(self.bytes);
        }
    }
}

/// Returns why a pool can no longer grow under its shared limit, as text.
pub(crate) fn describe_loss(loss: Loss) -> &'static str {
    match loss {
        Loss::Removed => "its file in /dev/shm was removed",
        Loss::Closed => "this process has closed its descriptor",
    }
}

#[cfg(all(test, not(pinpool_loom)))]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn a_limit_that_is_lowered_refuses_until_enough_came_back() {
        let budget = Budget::new(None);
        let held = budget.claim(60).unwrap();
        budget.set_max_bytes(Some(50));
        assert!(budget.claim(1).is_err() && budget.claim(0).is_ok(), "a claim of nothing always fits");
        assert_eq!((budget.used_bytes(), budget.max_bytes(), budget.over_bytes()), (60, Some(50), 10));
        drop(held);
        assert!(budget.claim(51).is_err());
        assert!(budget.claim(50).is_ok());
    }

    #[derive(Default)]
    struct Counting(AtomicUsize);

    impl BudgetUser for Counting {
        fn on_bytes_returned(&self) {
            self.0.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        }
    }

    #[test]
    fn a_refusal_names_its_level_and_a_return_notifies() {
        let returns = Arc::new(Counting::default());
        let user: Weak<Counting> = Arc::downgrade(&returns);
        let (pool, partition) = (Budget::new(Some(100)), Budget::for_partition(Some(50), user));
        let over = |budget: &Arc<Budget>, bytes| budget.claim(bytes).map(drop).unwrap_err();
        let held = partition.claim(30).unwrap();
        let expected = |level, bytes, could_fit| QuotaExceeded { level, bytes, could_fit };
        assert_eq!(over(&partition, 25), expected(LimitLevel::Partition, 25, true));
        assert_eq!(over(&partition, 51), expected(LimitLevel::Partition, 51, false));
        assert_eq!(over(&pool, 101), expected(LimitLevel::Pool, 101, false));
        let notified = || returns.0.load(std::sync::atomic::Ordering::SeqCst);
        assert_eq!(notified(), 0, "a refused claim notifies no user");
        drop(held);
        assert_eq!(notified(), 1);
    }

    #[test]
    fn a_claim_is_resized_as_a_whole_or_not_at_all() {
        let budget = Budget::new(Some(100));
        let (mut first, mut second) = (budget.claim(60).unwrap(), budget.claim(40).unwrap());
        assert_eq!(second.resize(41).unwrap_err().bytes, 1);
        assert_eq!((first.bytes(), second.bytes(), budget.used_bytes()), (60, 40, 100));
        first.resize(50).unwrap();
        second.resize(50).unwrap();
        budget.set_max_bytes(Some(10));
        assert_eq!(budget.over_bytes(), 90);
        second.resize(50).unwrap();
        second.resize(30).unwrap();
        assert!(second.resize(31).is_err(), "no claim grows above a lowered limit");
        drop((first, second));
        assert_eq!(budget.used_bytes(), 0);
    }

    /// Returns the claim of an `auto` pool with a limit of `max_bytes`, below a root that no other test uses.
    fn automatic(root: &str, max_bytes: u64) -> Claim {
        Claim::under_new_budget(Some(max_bytes), ProcessMember::new(root.into(), None, true), None)
    }

    #[test]
    fn the_level_that_lacks_room_is_named() {
        let (pool, mut other) = (automatic("unit-lacking", 80), automatic("unit-lacking", 80));
        let budget = pool.budget();
        let over = |bytes| budget.claim(bytes).unwrap_err();
        assert_eq!((budget.highest_claim_bytes(), over(81).bytes), (80, 81));
        let never = QuotaExceeded { level: LimitLevel::Pool, bytes: 81, could_fit: false };
        assert_eq!((budget.refusal(81), budget.could_hold(81), budget.could_hold(80)), (never, false, true));
        assert!(budget.refusal(80).could_fit && budget.is_shared());
        other.resize(50).unwrap();
        assert_eq!((over(81).level, over(31).level), (LimitLevel::Pool, LimitLevel::Shared));
        assert_eq!(budget.current_shared_refusal(30), None);
        assert_eq!(budget.current_shared_refusal(31).unwrap().bytes, 31);
    }

    #[test]
    fn pools_of_a_process_are_served_in_order_of_request() {
        let [mut held, first, second] = [(); 3].map(|()| automatic("unit-order", 100));
        held.resize(70).unwrap();
        let (held, first, second) = (held.budget(), first.budget(), second.budget());
        let wants: [Want; 2] = Default::default();
        let rooms = || [first, second, held].map(|budget| budget.room_for(100));
        assert_eq!((first.set_want(&wants[0], 50, 50), second.set_want(&wants[1], 20, 20)), (0, 0));
        assert_eq!(rooms(), [30, 0, 0], "30 are free, and the first wants more");
        assert_eq!(
            [first, second, held].map(|budget| (budget.is_wanted(), budget.owed_bytes())),
            [(false, 0), (true, 20), (true, 40)]
        );
        assert_eq!((first.set_want(&wants[0], 25, 25), first.set_want(&wants[0], 25, 25)), (50, 25));
        assert_eq!(rooms(), [30, 5, 0], "a changed want keeps its place");
        assert_eq!((first.set_want(&wants[0], 0, 0), first.set_want(&wants[0], 10, 10)), (25, 0));
        assert_eq!(rooms(), [10, 30, 0], "a new want comes last");
    }

    #[test]
    fn bytes_that_are_kept_forever_count_for_the_other_pools_of_the_process() {
        let (pool, other) = (automatic("unit-kept", 100), automatic("unit-kept", 100));
        let elsewhere = automatic("unit-elsewhere", 100);
        let budget = pool.budget().clone();
        budget.empty_claim().leak();
        budget.claim(30).unwrap().leak();
        drop(pool);
        assert_eq!((budget.used_bytes(), other.budget().room_for(100)), (30, 70));
        assert!(other.budget().has_claims_nearby() && !elsewhere.budget().has_claims_nearby());
    }

    #[cfg(all(target_os = "linux", not(miri)))] // Shared memory.
    #[test]
    fn a_pool_leaves_the_limit_of_the_host_with_its_last_claim() {
        let name = format!("unit-{}-outlives", std::process::id());
        let shared = SharedLimit::attach(&name, None, 100).unwrap();
        let pool = Claim::under_new_budget(None, ProcessMember::default(), Some(shared));
        let budget = pool.budget().clone();
        let claim = budget.claim(30).unwrap();
        assert_eq!(budget.claim(71).map(drop).unwrap_err().level, LimitLevel::Shared);
        let never = QuotaExceeded { level: LimitLevel::Shared, bytes: 101, could_fit: false };
        assert_eq!((budget.refusal(101), budget.could_hold(101), budget.could_hold(100)), (never, false, true));
        drop(pool);
        assert_eq!(pinpool_shared_limit::report(&name).unwrap().unwrap().held_bytes, 30);
        drop(claim);
        assert!(pinpool_shared_limit::report(&name).unwrap().is_none() && !budget.is_shared());
    }

    #[test]
    fn sums_that_overflow_are_refused() {
        let budget = Budget::new(None);
        let _held = budget.claim(u64::MAX - 1).unwrap();
        assert!(budget.claim(2).is_err());
        assert_eq!(budget.max_bytes(), None);
    }
}

#[cfg(all(test, pinpool_loom))]
mod models {
    use super::*;

    #[test]
    fn two_claims_never_exceed_the_limit_together() {
        loom::model(|| {
            let budget = Budget::new(Some(3));
            let other = budget.clone();
            let thread = loom::thread::spawn(move || other.claim(2).is_ok());
            let claimed = budget.claim(2);
            assert!(budget.used_bytes() <= 3);
            let mine = claimed.is_ok();
            drop(claimed);
            let theirs = thread.join().unwrap();
            assert!(mine || theirs, "a claim is refused only because of another claim");
            assert_eq!(budget.used_bytes(), 0);
        });
    }

    /// A wait queue with one request.
    #[derive(Default)]
    struct Queue {
        is_waiting: loom::sync::atomic::AtomicBool,
        is_notified: loom::sync::Mutex<bool>,
        notified: loom::sync::Condvar,
    }

    impl BudgetUser for Queue {
        fn on_bytes_returned(&self) {
            if self.is_waiting.load(Ordering::Relaxed) {
                *self.is_notified.lock().unwrap() = true;
                self.notified.notify_one();
            }
        }
    }

    /// Fails without either fence: loom reports a request that no thread wakes as a deadlock.
    #[test]
    fn loom_a_request_that_waits_is_notified_of_the_return_that_makes_its_room() {
        loom::model(|| {
            let queue = Arc::new(Queue::default());
            let user: Weak<Queue> = Arc::downgrade(&queue);
            let budget = Budget::for_partition(Some(3), user);
            let held = budget.claim(2).unwrap();
            let returning = loom::thread::spawn(move || drop(held));
            queue.is_waiting.store(true, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            while budget.claim(2).map(|claim| assert_eq!(claim.bytes(), 2)).is_err() {
                let mut is_notified = queue.is_notified.lock().unwrap();
                while !*is_notified {
                    is_notified = queue.notified.wait(is_notified).unwrap();
                }
                *is_notified = false;
            }
            returning.join().unwrap();
            assert_eq!(budget.used_bytes(), 0);
        });
    }
}
