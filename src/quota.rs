//! Ceilings: bytes are claimed here before the source is called.
//!
//! ```text
//!   shared: host ledger, or the `auto` pools of this process
//!     └─ pool ◀─ claims of its regions, or one of its arena, which is resized; what is held beside the buffers
//!
//!   blocks of a pool, without a ceiling where the pool has an arena
//!     └─ partition ◀─ claims of its blocks, and of what it holds beside them
//!          └─ partition in it
//!
//!   claim(n) ─┬▶ Claim ──▶ the slow call ──┬─ succeeded: `held`: counted in the figures as long as the memory lives
//!             │                            └─ failed: dropping the claim returns the bytes
//!             └▶ Over: the level that refused, and how much is missing there
//! ```
//!
//! The reserves of partitions and the fallback are trees of the same kind. Never calls a source and never waits.
//!
//! - quota-I1: `claimed` is the sum of all live claims and of those kept forever, those of inner quotas included. A claim that
//!   would raise it over `max` is refused, by the first level that lacks the room, and claims nothing. So the sum is at most
//!   `max`, unless `max` was lowered meanwhile.
//! - quota-I2: a claim is returned exactly once, by its drop.
//! - quota-I3: `held` and its peak count memory that is there, and no claim whose memory was refused.

mod over;

use std::sync::{Arc, Weak};

use crate::ledger::SharedCeiling;
use crate::stats::Stats;
pub(crate) use over::{Level, Over};
use pinpool_os::fork::OfProcess;
use pinpool_os::lost;
use pinpool_os::sync::atomic::{AtomicU64, Ordering};
use pinpool_os::sync::plain;

/// The quotas of all pools of the process.
static POOLS: OfProcess<plain::Mutex<Vec<Weak<Quota>>>> = OfProcess::new(plain::Mutex::default);

/// One ceiling, and the bytes that are claimed under it.
#[derive(Debug)]
pub(crate) struct Quota {
    /// `u64::MAX` without a ceiling.
    max_bytes: AtomicU64,
    /// The highest ceiling so far.
    highest_max_bytes: AtomicU64,
    claimed_bytes: AtomicU64,
    held: Held,
    /// What of it the quotas inside this one hold.
    inner: Held,
    peak_bytes: AtomicU64,
    /// Buffers of the quotas inside this one that are never used again, and their bytes.
    inner_lost: AtomicU64,
    inner_lost_bytes: AtomicU64,
    outer: Outer,
}

/// Bytes of memory that is there.
#[derive(Debug)]
struct Held {
    all: AtomicU64,
    /// Those beside the buffers.
    outside: AtomicU64,
}

/// What a quota lies in.
#[derive(Debug)]
enum Outer {
    Nothing,
    /// The quota around it: that of the pool around a partition.
    Quota(Arc<Quota>),
    /// The ceiling that several pools share. Claims hold it, so that it is left with the last of them.
    Shared(Weak<SharedCeiling>),
}

/// What may still be claimed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Room {
    /// Under the ceilings of quotas.
    pub(crate) own_bytes: u64,
    /// Under the shared ceiling; `u64::MAX` without one.
    pub(crate) shared_bytes: u64,
}

/// Bytes of a [`Quota`], returned when this is dropped.
#[derive(Debug)]
#[must_use = "dropping a claim returns its bytes"]
pub(crate) struct Claim {
    quota: Arc<Quota>,
    shared: Option<Arc<SharedCeiling>>,
    bytes: u64,
    is_held: bool,
    /// Whether its memory lies beside the buffers.
    is_outside: bool,
}

impl Quota {
    pub(crate) fn new(max_bytes: Option<u64>) -> Arc<Self> {
        Self::with(max_bytes, Outer::Nothing)
    }

    /// A claim of no bytes under a new quota, whose claims are made in `shared` too, if there is one. The pool leaves `shared`
    /// with its last claim.
    pub(crate) fn under(shared: Option<Arc<SharedCeiling>>, max_bytes: Option<u64>) -> Claim {
        let outer = shared.as_ref().map_or(Outer::Nothing, |shared| Outer::Shared(Arc::downgrade(shared)));
        let quota = Self::with(max_bytes, outer);
        let mut pools = POOLS.get().lock();
        pools.retain(|other| other.strong_count() > 0);
        pools.push(Arc::downgrade(&quota));
        Claim { quota, shared, bytes: 0, is_held: false, is_outside: false }
    }

    /// Whether a pool of this process, or another owner of the host ledger, has memory.
    pub(crate) fn has_claims_nearby(&self) -> bool {
        let in_ledger = || self.shared()?.host_ledger().map(|ledger| ledger.report().held_bytes);
        let in_pools = POOLS.get().lock().iter().filter_map(Weak::upgrade).any(|pool| pool.claimed_bytes() > 0);
        in_pools || in_ledger().is_some_and(|bytes| bytes > 0)
    }

    /// A quota inside `outer`.
    pub(crate) fn inside(outer: &Arc<Self>, max_bytes: Option<u64>) -> Arc<Self> {
        Self::with(max_bytes, Outer::Quota(outer.clone()))
    }

    fn with(max_bytes: Option<u64>, outer: Outer) -> Arc<Self> {
        let max_bytes = max_bytes.unwrap_or(u64::MAX);
        let none = || AtomicU64::new(0);
        Arc::new(Self {
            max_bytes: AtomicU64::new(max_bytes),
            highest_max_bytes: AtomicU64::new(max_bytes),
            claimed_bytes: none(),
            held: Held { all: none(), outside: none() },
            inner: Held { all: none(), outside: none() },
            peak_bytes: none(),
            inner_lost: none(),
            inner_lost_bytes: none(),
            outer,
        })
    }

    /// Claims `bytes`.
    ///
    /// # Errors
    ///
    /// A ceiling has no room for them, here or further out: the first that could never have it, else the first that has none
    /// now.
    pub(crate) fn claim(self: &Arc<Self>, bytes: u64) -> Result<Claim, Over> {
        let mut claim = self.nothing();
        claim.resize(bytes)?;
        Ok(claim)
    }

    /// A claim of no bytes.
    pub(crate) fn nothing(self: &Arc<Self>) -> Claim {
        Claim { quota: self.clone(), shared: self.shared(), bytes: 0, is_held: false, is_outside: false }
    }

    /// This quota and those around it, from the inside out.
    fn chain(&self) -> impl Iterator<Item = &Self> {
        std::iter::successors(Some(self), |quota| match &quota.outer {
            Outer::Quota(outer) => Some(&**outer),
            _ => None,
        })
    }

    /// The ceiling that several pools share, if this quota or one around it lies under one.
    pub(crate) fn shared(&self) -> Option<Arc<SharedCeiling>> {
        self.chain().find_map(|quota| if let Outer::Shared(shared) = &quota.outer { shared.upgrade() } else { None })
    }

    /// Claims `bytes` at every level and in `shared`, or nowhere.
    fn grow(&self, bytes: u64, shared: Option<&SharedCeiling>) -> Result<(), Over> {
        for (depth, quota) in self.chain().enumerate() {
            if let Err(missing_bytes) = quota.add_claim(bytes) {
                self.chain().take(depth).for_each(|inner| inner.end_claim(bytes));
                return Err(self.never(bytes).unwrap_or_else(|| quota.over(depth, missing_bytes, true)));
            }
        }
        if let Some(shared) = shared
            && !shared.claim(bytes)
        {
            self.chain().for_each(|quota| quota.end_claim(bytes));
            return Err(Over::shared(shared, bytes));
        }
        Ok(())
    }

    /// Adds `bytes` to what is claimed here, or says how many are missing.
    fn add_claim(&self, bytes: u64) -> Result<(), u64> {
        // Relaxed: the counts guard no other memory; the compare-exchange alone upholds quota-I1.
        let max_bytes = self.max_bytes.load(Ordering::Relaxed);
        let fits = |claimed: u64| claimed.checked_add(bytes).filter(|&sum| sum <= max_bytes);
        let added = self.claimed_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits);
        // A sum that overflows is missing something, even without a ceiling.
        added.map(drop).map_err(|claimed| claimed.saturating_add(bytes).saturating_sub(max_bytes).max(1))
    }

    fn end_claim(&self, bytes: u64) {
        // Relaxed, as in `add_claim`.
        self.claimed_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Why `bytes` can never be claimed: the first ceiling that is lower.
    pub(crate) fn never(&self, bytes: u64) -> Option<Over> {
        let mut lower = self.chain().enumerate().filter(|(_, quota)| bytes > quota.ceiling());
        let lower = lower.next().map(|(depth, quota)| quota.over(depth, bytes - quota.ceiling(), false));
        lower.or_else(|| self.shared().map(|shared| Over::shared(&shared, bytes)).filter(|over| !over.could_ever))
    }

    /// What would refuse `bytes` now, the room under a shared ceiling aside.
    pub(crate) fn refusing(&self, bytes: u64) -> Option<Over> {
        self.never(bytes).or_else(|| {
            let mut full = self.chain().enumerate().filter(|(_, quota)| bytes > quota.room_here());
            full.next().map(|(depth, quota)| quota.over(depth, bytes.saturating_sub(quota.room_here()), true))
        })
    }

    /// Whether `bytes` could be claimed if nothing else were.
    pub(crate) fn could_hold(&self, bytes: u64) -> bool {
        self.never(bytes).is_none()
    }

    /// Why `bytes` do not fit into `room`, which was found here.
    pub(crate) fn lacking(&self, room: Room, bytes: u64) -> Over {
        let shared = self.lacking_shared(room, bytes).filter(|_| bytes <= room.own_bytes);
        shared.unwrap_or_else(|| self.full(bytes.saturating_sub(room.own_bytes)))
    }

    /// Whether the shared ceiling has no room for `bytes`, or had none when `room` was found.
    pub(crate) fn lacking_shared(&self, room: Room, bytes: u64) -> Option<Over> {
        let shared = self.shared().filter(|shared| room.shared_bytes < bytes || shared.room_for(bytes) < bytes)?;
        Some(Over::shared(&shared, bytes))
    }

    /// The most that one claim could have.
    pub(crate) fn highest_claim_bytes(&self) -> u64 {
        let shared_bytes = self.shared().map_or(u64::MAX, |shared| shared.max_bytes());
        self.chain().map(Self::ceiling).fold(shared_bytes, u64::min)
    }

    /// This quota has no room, for another reason than the bytes that are claimed.
    pub(crate) fn full(&self, missing_bytes: u64) -> Over {
        self.over(0, missing_bytes, true)
    }

    fn over(&self, depth: usize, missing_bytes: u64, could_ever: bool) -> Over {
        let is_partition = matches!(self.outer, Outer::Quota(_));
        let level = if is_partition { Level::Partition { depth } } else { Level::Pool };
        Over { level, max_bytes: self.ceiling(), missing_bytes, could_ever }
    }

    fn ceiling(&self) -> u64 {
        // Relaxed, here and below: a snapshot.
        self.max_bytes.load(Ordering::Relaxed)
    }

    fn room_here(&self) -> u64 {
        self.ceiling().saturating_sub(self.claimed_bytes.load(Ordering::Relaxed))
    }

    /// What may still be claimed, where at least `wanted_bytes` are of use.
    pub(crate) fn room_for(&self, wanted_bytes: u64) -> Room {
        Room {
            own_bytes: self.own_room_bytes(),
            shared_bytes: self.shared().map_or(u64::MAX, |shared| shared.room_for(wanted_bytes)),
        }
    }

    /// What may still be claimed, the shared ceiling aside.
    pub(crate) fn own_room_bytes(&self) -> u64 {
        self.chain().map(Self::room_here).min().unwrap_or(0)
    }

    /// Bytes claimed beyond the ceiling, since it was lowered.
    pub(crate) fn over_bytes(&self) -> u64 {
        self.claimed_bytes.load(Ordering::Relaxed).saturating_sub(self.ceiling())
    }

    /// Sets the ceiling. What is held above a lower one stays held until it is given back.
    pub(crate) fn set_max_bytes(&self, max_bytes: Option<u64>) {
        // Relaxed: a claim that is made at the same time comes before or after.
        let max_bytes = max_bytes.unwrap_or(u64::MAX);
        self.highest_max_bytes.fetch_max(max_bytes, Ordering::Relaxed);
        self.max_bytes.store(max_bytes, Ordering::Relaxed);
    }

    /// A buffer of `bytes` that was claimed here is lost. The quotas around this one remember it for longer than this one may
    /// live.
    pub(crate) fn note_lost(&self, bytes: u64) {
        for quota in self.chain().skip(1) {
            quota.inner_lost.fetch_add(1, Ordering::Relaxed);
            quota.inner_lost_bytes.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    /// A lost buffer of `bytes` is used again.
    pub(crate) fn note_recovered(&self, bytes: u64) {
        for quota in self.chain().skip(1) {
            quota.inner_lost.fetch_sub(1, Ordering::Relaxed);
            quota.inner_lost_bytes.fetch_sub(bytes, Ordering::Relaxed);
        }
    }

    /// Buffers of the quotas inside this one that are lost, and their bytes.
    pub(crate) fn inner_lost(&self) -> (u64, u64) {
        (self.inner_lost.load(Ordering::Relaxed), self.inner_lost_bytes.load(Ordering::Relaxed))
    }

    /// All bytes that are claimed.
    pub(crate) fn claimed_bytes(&self) -> u64 {
        self.claimed_bytes.load(Ordering::Relaxed)
    }

    /// Bytes of memory that is there.
    pub(crate) fn held_bytes(&self) -> u64 {
        self.held.all.load(Ordering::Relaxed)
    }

    /// Those of them that lie beside the buffers.
    pub(crate) fn outside_bytes(&self) -> u64 {
        self.held.outside.load(Ordering::Relaxed)
    }

    /// Bytes held by the quotas inside this one, which count as held by this one, and those beside buffers.
    pub(crate) fn inner_bytes(&self) -> (u64, u64) {
        (self.inner.all.load(Ordering::Relaxed), self.inner.outside.load(Ordering::Relaxed))
    }

    /// Most bytes held at any time.
    pub(crate) fn peak_bytes(&self) -> u64 {
        self.peak_bytes.load(Ordering::Relaxed)
    }

    /// The bytes held, and the ceiling on them.
    pub(crate) fn fill(&self, stats: &mut Stats) {
        (stats.pinned_bytes, stats.peak_pinned_bytes) = (self.held_bytes(), self.peak_bytes());
        stats.max_bytes = self.max_bytes();
        stats.highest_max_bytes = unless_max(self.highest_max_bytes.load(Ordering::Relaxed));
    }

    /// `None` without a ceiling.
    pub(crate) fn max_bytes(&self) -> Option<u64> {
        unless_max(self.ceiling())
    }
}

/// A ceiling, where `u64::MAX` stands for none.
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
    /// As [`Quota::claim`]; then nothing changes.
    pub(crate) fn resize(&mut self, bytes: u64) -> Result<(), Over> {
        match bytes.checked_sub(self.bytes) {
            // Refused by no ceiling, also by one that was lowered.
            Some(0) => {}
            Some(more) => self.quota.grow(more, self.shared.as_deref())?,
            None => self.give_back(self.bytes - bytes),
        }
        self.bytes = bytes;
        Ok(())
    }

    fn give_back(&self, bytes: u64) {
        self.quota.chain().for_each(|quota| quota.end_claim(bytes));
        self.shared.iter().for_each(|shared| shared.give_back(bytes));
    }

    /// The quota under which it is made.
    pub(crate) fn quota(&self) -> &Arc<Quota> {
        &self.quota
    }

    /// The memory that was claimed for is there.
    pub(crate) fn held(mut self) -> Self {
        if !std::mem::replace(&mut self.is_held, true) {
            self.count_held(true);
        }
        self
    }

    /// The memory that was claimed for is there, beside the buffers.
    pub(crate) fn held_outside(mut self) -> Self {
        self.is_outside = true;
        self.held()
    }

    /// Adds the bytes to the figures of what is held, at every level, or subtracts them.
    fn count_held(&self, is_added: bool) {
        let change = |counter: &AtomicU64| match is_added {
            true => counter.fetch_add(self.bytes, Ordering::Relaxed),
            false => counter.fetch_sub(self.bytes, Ordering::Relaxed),
        };
        for (depth, quota) in self.quota.chain().enumerate() {
            let before_bytes = change(&quota.held.all);
            if is_added {
                // Relaxed: a maximum of sums that were all really held (quota-I3).
                quota.peak_bytes.fetch_max(before_bytes + self.bytes, Ordering::Relaxed);
            }
            if self.is_outside {
                change(&quota.held.outside);
            }
            if depth > 0 {
                change(&quota.inner.all);
            }
            if depth > 0 && self.is_outside {
                change(&quota.inner.outside);
            }
        }
    }

    /// Counts the bytes as claimed until the process ends: their memory could not be released.
    pub(crate) fn keep_forever(self) {
        // The pool may end before the process does, and the shared ceiling goes on counting them.
        if self.bytes > 0 {
            lost::keep(self.held());
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if self.is_held {
            // Relaxed, as in `held`; before the claim ends, so that no more is ever held than claimed.
            self.count_held(false);
        }
        self.give_back(self.bytes);
    }
}

#[cfg(all(test, not(pinpool_loom)))]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::ledger::ProcessCeiling;

    #[test]
    fn a_claim_over_the_ceiling_is_refused_and_claims_nothing() {
        let quota = Quota::new(Some(100));
        let first = quota.claim(60).unwrap().held();
        assert!(quota.claim(41).is_err());
        let second = quota.claim(40).unwrap().held();
        assert_eq!(quota.held_bytes(), 100);
        drop(first);
        assert_eq!((quota.held_bytes(), quota.peak_bytes()), (40, 100));
        second.keep_forever();
        assert_eq!(quota.held_bytes(), 40);
    }

    #[test]
    fn a_claim_whose_memory_was_refused_is_in_no_figure() {
        let quota = Quota::new(Some(100));
        let claim = quota.claim(90).unwrap();
        assert!(quota.claim(11).is_err(), "it counts against the ceiling");
        assert_eq!((quota.held_bytes(), quota.peak_bytes()), (0, 0));
        drop(claim);
        let held = quota.claim(30).unwrap().held().held();
        assert_eq!((quota.held_bytes(), quota.peak_bytes()), (30, 30));
        drop(held);
        assert!(quota.claim(100).is_ok());
    }

    #[test]
    fn a_claim_counts_in_every_quota_around_its_own() {
        let outer = Quota::new(Some(100));
        let (inner, other) = (Quota::inside(&outer, Some(80)), Quota::inside(&outer, None));
        let held = inner.claim(60).unwrap().held();
        assert!(inner.claim(30).is_err(), "over its own ceiling");
        assert!(other.claim(41).is_err(), "over the ceiling around it");
        assert!(outer.claim(41).is_err());
        assert_eq!((inner.held_bytes(), outer.held_bytes(), outer.inner_bytes().0), (60, 60, 60));
        let beside = outer.claim(40).unwrap().held();
        assert_eq!((outer.held_bytes(), outer.inner_bytes().0, outer.peak_bytes()), (100, 60, 100));
        assert!(inner.could_hold(80) && !inner.could_hold(81) && other.could_hold(100) && !other.could_hold(101));
        drop(held);
        drop(beside);
        assert_eq!((inner.held_bytes(), outer.held_bytes(), outer.inner_bytes().0), (0, 0, 0));
        assert!(inner.claim(80).is_ok());
    }

    #[test]
    fn lost_buffers_are_remembered_by_the_quotas_around_theirs() {
        let outer = Quota::new(Some(100));
        let middle = Quota::inside(&outer, None);
        let inner = Quota::inside(&middle, None);
        inner.note_lost(30);
        middle.note_lost(12);
        inner.note_lost(5);
        inner.note_recovered(5);
        assert_eq!((inner.inner_lost(), middle.inner_lost(), outer.inner_lost()), ((0, 0), (1, 30), (2, 42)));
        let claim = inner.claim(25).unwrap();
        assert_eq!(claim.bytes(), 25);
    }

    #[test]
    fn the_highest_ceiling_is_remembered() {
        let highest = |quota: &Quota| {
            let mut stats = Stats::default();
            quota.fill(&mut stats);
            stats.highest_max_bytes
        };
        let quota = Quota::new(Some(50));
        assert_eq!((quota.max_bytes(), highest(&quota)), (Some(50), Some(50)));
        quota.set_max_bytes(Some(80));
        quota.set_max_bytes(Some(20));
        assert_eq!((quota.max_bytes(), highest(&quota)), (Some(20), Some(80)));
        quota.set_max_bytes(None);
        quota.set_max_bytes(Some(20));
        assert_eq!((quota.max_bytes(), highest(&quota)), (Some(20), None));
    }

    #[test]
    fn a_ceiling_that_is_lowered_refuses_until_enough_came_back() {
        let quota = Quota::new(None);
        let held = quota.claim(60).unwrap().held();
        quota.set_max_bytes(Some(50));
        assert!(quota.claim(1).is_err() && quota.claim(0).is_ok(), "nothing fits everywhere");
        assert_eq!((quota.held_bytes(), quota.max_bytes()), (60, Some(50)));
        drop(held);
        assert!(quota.claim(51).is_err());
        assert!(quota.claim(50).is_ok());
    }

    #[test]
    fn a_refusal_names_the_level_and_what_is_missing_there() {
        let pool = Quota::new(Some(100));
        let middle = Quota::inside(&pool, Some(80));
        let inner = Quota::inside(&middle, Some(50));
        let over = |quota: &Arc<Quota>, bytes| quota.claim(bytes).map(drop).unwrap_err();
        let _held = inner.claim(30).unwrap();
        let expected =
            |level, max_bytes, missing_bytes, could_ever| Over { level, max_bytes, missing_bytes, could_ever };
        assert_eq!(over(&inner, 25), expected(Level::Partition { depth: 0 }, 50, 5, true));
        assert_eq!(over(&inner, 51), expected(Level::Partition { depth: 0 }, 50, 1, false));
        assert_eq!(over(&middle, 51), expected(Level::Partition { depth: 0 }, 80, 1, true));
        assert_eq!(over(&pool, 101), expected(Level::Pool, 100, 1, false));
        let _beside = pool.claim(60).unwrap();
        // Its own ceiling would let it pass.
        assert_eq!(over(&inner, 15), expected(Level::Pool, 100, 5, true));
        assert_eq!(inner.refusing(15), Some(over(&inner, 15)));
        assert_eq!(inner.refusing(10), None);
        // What can never fit comes before what does not fit now.
        assert_eq!(over(&inner, 90), expected(Level::Partition { depth: 0 }, 50, 40, false));
        assert_eq!((inner.claimed_bytes(), middle.claimed_bytes(), pool.claimed_bytes()), (30, 30, 90));
        assert_eq!(inner.room_for(20), Room { own_bytes: 10, shared_bytes: u64::MAX });
        assert_eq!((inner.highest_claim_bytes(), middle.highest_claim_bytes()), (50, 80));
    }

    #[test]
    fn a_claim_is_resized_as_a_whole_or_not_at_all() {
        let pool = Quota::new(Some(100));
        let (mut first, mut second) = (pool.nothing(), pool.nothing());
        first.resize(60).unwrap();
        second.resize(40).unwrap();
        assert_eq!(second.resize(41).unwrap_err().missing_bytes, 1);
        assert_eq!((first.bytes(), second.bytes(), pool.claimed_bytes()), (60, 40, 100));
        first.resize(50).unwrap();
        second.resize(50).unwrap();
        pool.set_max_bytes(Some(10));
        assert_eq!(pool.over_bytes(), 90);
        second.resize(50).unwrap();
        second.resize(30).unwrap();
        assert!(second.resize(31).is_err(), "above a lowered ceiling nothing grows");
        drop(first);
        drop(second);
        assert_eq!(pool.claimed_bytes(), 0);
    }

    /// A ceiling of `max_bytes` for the pools of a root of files that nothing else has, and one part in it.
    fn shared(root: &str, max_bytes: u64) -> Arc<SharedCeiling> {
        let part = ProcessCeiling::attach(Path::new(root), None, |_| max_bytes);
        Arc::new(SharedCeiling::OfProcess(part))
    }

    #[test]
    fn a_ceiling_that_pools_share_is_the_outermost_level() {
        let (first, second) = (shared("unit-outermost", 100), shared("unit-outermost", 100));
        let mut pool = Quota::under(Some(first.clone()), Some(80));
        let beside = Quota::under(Some(second), None);
        pool.resize(70).unwrap();
        let over = |quota: &Arc<Quota>, bytes| quota.claim(bytes).map(drop).unwrap_err();
        let expected =
            |max_bytes, missing_bytes, could_ever| Over { level: Level::Shared, max_bytes, missing_bytes, could_ever };
        assert_eq!(over(beside.quota(), 31), expected(100, 31, true));
        assert_eq!(over(beside.quota(), 101), expected(100, 101, false));
        assert_eq!((beside.quota().claimed_bytes(), pool.quota().claimed_bytes()), (0, 70));
        // Its own ceiling refuses first, and then nothing is claimed of what is shared.
        assert_eq!(over(pool.quota(), 11).level, Level::Pool);
        let claim = beside.quota().claim(30).unwrap();
        assert_eq!(beside.quota().room_for(1), Room { own_bytes: u64::MAX - 30, shared_bytes: 0 });
        assert_eq!(pool.quota().room_for(1), Room { own_bytes: 10, shared_bytes: 0 });
        assert_eq!(pool.quota().room_for(1).bytes(), 0);
        assert_eq!(pool.resize(75).unwrap_err(), expected(100, 5, true));
        assert_eq!((pool.bytes(), pool.quota().claimed_bytes()), (70, 70));
        drop(claim);
        assert_eq!(pool.quota().room_for(10), Room { own_bytes: 10, shared_bytes: 30 });
        assert_eq!(pool.quota().room_for(10).bytes(), 10);
        pool.resize(60).unwrap();
        assert_eq!(first.room_for(1), 40, "what was given back is there for others");
    }

    #[test]
    fn what_lacked_the_room_is_named_by_the_room_that_was_found() {
        let pool = Quota::under(Some(shared("unit-lacking", 100)), Some(80));
        let quota = pool.quota();
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
        let pool = Quota::under(Some(ceiling), None);
        let quota = pool.quota().clone();
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
        let pool = Quota::under(Some(ceiling), Some(100));
        let quota = pool.quota().clone();
        quota.nothing().keep_forever();
        quota.claim(30).unwrap().keep_forever();
        drop(pool);
        assert_eq!((quota.claimed_bytes(), quota.held_bytes()), (30, 30));
        assert_eq!(left.upgrade().map(|shared| shared.room_for(100)), Some(70));
    }

    #[test]
    fn what_lies_beside_the_buffers_is_counted_apart() {
        let outer = Quota::new(None);
        let inner = Quota::inside(&outer, None);
        let block = inner.claim(10).unwrap().held();
        let outside = inner.claim(5).unwrap().held_outside();
        let beside = outer.claim(2).unwrap().held_outside();
        assert_eq!((inner.held_bytes(), inner.outside_bytes(), inner.inner_bytes()), (15, 5, (0, 0)));
        assert_eq!((outer.held_bytes(), outer.outside_bytes(), outer.inner_bytes()), (17, 7, (15, 5)));
        drop((block, outside, beside));
        assert_eq!((outer.held_bytes(), outer.outside_bytes(), outer.inner_bytes()), (0, 0, (0, 0)));
        assert_eq!(outer.peak_bytes(), 17);
    }

    #[test]
    fn sums_that_overflow_are_refused() {
        let quota = Quota::new(None);
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
            let quota = Quota::new(Some(3));
            let other = quota.clone();
            let thread = loom::thread::spawn(move || other.claim(2).map(|claim| drop(claim.held())).is_ok());
            let claimed = quota.claim(2).map(Claim::held);
            assert!(quota.held_bytes() <= 3);
            let mine = claimed.is_ok();
            drop(claimed);
            let theirs = thread.join().unwrap();
            assert!(mine || theirs, "a refusal needs another claim");
            assert_eq!(quota.held_bytes(), 0);
            assert!(quota.peak_bytes() <= 3);
        });
    }

    /// A pool, a partition, and a partition in it.
    #[test]
    fn claims_at_three_levels_never_pass_a_ceiling_and_leave_nothing_behind() {
        loom::model(|| {
            let pool = Quota::new(Some(4));
            let middle = Quota::inside(&pool, Some(3));
            let inner = Quota::inside(&middle, Some(2));
            let (of_inner, of_middle) = (inner.clone(), middle.clone());
            let thread = loom::thread::spawn(move || {
                let claimed = of_inner.claim(2);
                assert!(of_middle.held_bytes() <= 3);
                claimed.map(|claim| drop(claim.held())).map_err(|over| over.level)
            });
            let mut claim = middle.nothing();
            let grown = claim.resize(2);
            assert!(pool.claimed_bytes() <= 4 && middle.claimed_bytes() <= 3);
            if let Err(over) = grown {
                assert_eq!((over.level, over.max_bytes), (Level::Partition { depth: 0 }, 3));
            }
            let theirs = thread.join().unwrap();
            assert!(grown.is_ok() || theirs.is_ok(), "a refusal needs another claim");
            // The partition around it refuses, not its own: that one has room.
            assert!(matches!(theirs, Ok(()) | Err(Level::Partition { depth: 1 })), "{theirs:?}");
            drop(claim);
            for quota in [&inner, &middle, &pool] {
                assert_eq!((quota.claimed_bytes(), quota.held_bytes()), (0, 0));
            }
            assert!(pool.claim(4).is_ok());
        });
    }
}
