//! One ceiling for the pools of a process whose own is `auto`: together they hold what one of them may.
//!
//! A program that builds a pool for each library, or for each thread, pins no more of the machine than with one. Each pool may
//! take all of it. When one lacks memory, the others give what they keep idle, and those that hold most make room of what they
//! put back: the rules of `shares`, as under a host ledger.
//!
//! The pools of one root of files, which only tests change, share one; in a child of `fork` they begin anew.
//!
//! - process-ceiling-I1: a claim of a bound pool that would raise the sum over all bound pools above the ceiling is refused.

use pinpool_os::words::Size;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use super::Want;
use crate::maintenance_thread::MaintenanceThread;
use pinpool_os::fork::{ForkGeneration, OfProcess};
use pinpool_os::sync::plain::Mutex;
use pinpool_os::sync::process::{AtomicU64, Ordering};
use pinpool_shm::ledger::LISTED;
use pinpool_shm::ledger::shares::{self, Demand};

/// The part of one pool. Dropping it gives back all that it holds.
#[derive(Debug)]
pub(crate) struct ProcessCeiling {
    common: Arc<Common>,
    number: usize,
}

/// What the pools share.
#[derive(Debug)]
struct Common {
    root: PathBuf,
    generation: ForkGeneration,
    pools: Mutex<Pools>,
    /// What all waiting gets want, for looks without the lock.
    wanted_bytes: AtomicU64,
}

#[derive(Debug, Default)]
struct Pools {
    max_bytes: u64,
    attached: usize,
    /// Wants so far, for their order.
    wants: u64,
    parts: BTreeMap<usize, Part>,
}

#[derive(Debug, Default)]
struct Part {
    pool: String,
    /// Whether the pool's own ceiling is not `auto` any more: then it counts here no longer.
    is_free: bool,
    idle_bytes: u64,
    demand: Demand,
}

impl Pools {
    fn held_bytes(&self) -> u64 {
        let bound = self.parts.values().filter(|part| !part.is_free);
        bound.map(|part| part.demand.held_bytes).fold(0, u64::saturating_add)
    }

    /// What the other pools hold and want.
    fn others(&self, number: usize) -> Vec<Demand> {
        let others = self.parts.iter().filter(|(other, part)| **other != number && !part.is_free);
        others.map(|(_, part)| part.demand).collect()
    }

    /// What the others want and have no room for. What a pool with a ceiling of its own gives is no room for them.
    fn others_lack(&self, number: usize) -> u64 {
        if self.parts.get(&number).is_none_or(|part| part.is_free) {
            return 0;
        }
        let wanted_bytes = self.others(number).iter().map(|other| other.wanted_bytes).fold(0, u64::saturating_add);
        if wanted_bytes == 0 { 0 } else { wanted_bytes.saturating_sub(self.room_bytes()) }
    }

    /// What the pool may have for a claim of `bytes`.
    fn claimable_bytes(&self, number: usize, bytes: u64) -> u64 {
        match self.parts.get(&number) {
            None => 0,
            Some(part) if part.is_free => u64::MAX,
            Some(part) => {
                shares::claimable_bytes(&part.demand, &self.others(number), self.max_bytes, self.room_bytes(), bytes)
            }
        }
    }

    fn room_bytes(&self) -> u64 {
        self.max_bytes.saturating_sub(self.held_bytes())
    }
}

impl Common {
    /// What the pools of `root` in this process have in common.
    fn of(root: &Path) -> Arc<Self> {
        static OF_ROOTS: OfProcess<Mutex<Vec<Weak<Common>>>> = OfProcess::new(Mutex::default);
        let mut roots = OF_ROOTS.get().lock();
        roots.retain(|common| common.strong_count() > 0);
        roots.iter().filter_map(Weak::upgrade).find(|common| common.root == root).unwrap_or_else(|| {
            let common = Arc::new(Self {
                root: root.to_owned(),
                generation: ForkGeneration::now(),
                pools: Mutex::default(),
                wanted_bytes: AtomicU64::new(0),
            });
            roots.push(Arc::downgrade(&common));
            common
        })
    }
}

impl ProcessCeiling {
    /// Takes a part for the pool called `pool`. What all of them may hold is what `ceiling` makes of what they hold now.
    pub(crate) fn attach(root: &Path, pool: Option<&str>, ceiling: impl FnOnce(u64) -> u64) -> Self {
        let common = Common::of(root);
        let mut pools = common.pools.lock();
        pools.attached += 1;
        let number = pools.attached;
        let pool = pool.map_or_else(|| format!("pool {number}"), str::to_owned);
        pools.parts.insert(number, Part { pool, ..Part::default() });
        drop(pools);
        let attached = Self { common, number };
        attached.follow(ceiling);
        attached
    }

    /// What `change` makes of this pool's part and the others; the default in a child of `fork`, which inherits no memory.
    fn with<R: Default>(&self, change: impl FnOnce(&mut Pools, usize) -> R) -> R {
        if self.common.generation.is_stale() {
            return R::default();
        }
        change(&mut self.common.pools.lock(), self.number)
    }

    fn with_part<R: Default>(&self, change: impl FnOnce(&mut Part) -> R) -> R {
        self.with(|pools, number| pools.parts.get_mut(&number).map(change).unwrap_or_default())
    }

    /// What all pools may hold, where this one's ceiling is `auto`.
    pub(super) fn max_bytes(&self) -> u64 {
        self.with(|pools, number| if pools.parts[&number].is_free { u64::MAX } else { pools.max_bytes })
    }

    /// The control group has another limit: what all pools may hold is what `ceiling` makes of what they hold now.
    pub(crate) fn follow(&self, ceiling: impl FnOnce(u64) -> u64) {
        // Under no lock: it reads files.
        let max_bytes = ceiling(self.with(|pools, _| pools.held_bytes()));
        self.with(|pools, _| pools.max_bytes = max_bytes);
    }

    /// The ceiling of the pool is `auto`, or is not any more.
    pub(crate) fn bind(&self, is_auto: bool) {
        self.with_part(|part| part.is_free = !is_auto);
    }

    pub(super) fn claim(&self, bytes: u64) -> bool {
        self.with(|pools, number| {
            let fits = bytes <= pools.claimable_bytes(number, bytes);
            if let Some(part) = pools.parts.get_mut(&number).filter(|_| fits) {
                part.demand.held_bytes = part.demand.held_bytes.saturating_add(bytes);
            }
            fits
        })
    }

    pub(super) fn give_back(&self, bytes: u64) {
        self.with_part(|part| part.demand.held_bytes = part.demand.held_bytes.saturating_sub(bytes));
        if self.is_wanted() {
            // It wakes the requests of other pools that wait for this.
            MaintenanceThread::of_process().look_soon();
        }
    }

    pub(super) fn room_for(&self, bytes: u64) -> u64 {
        self.with(|pools, number| pools.claimable_bytes(number, bytes))
    }

    pub(super) fn set_want(&self, want: &Want, bytes: u64, needed_bytes: u64) -> u64 {
        let before_bytes = self.with(|pools, number| {
            let before_bytes = want.replace(bytes);
            pools.wants += 1;
            let now = (pools.wants, number);
            if let Some(part) = pools.parts.get_mut(&number).filter(|_| before_bytes != bytes) {
                part.demand.change_want(before_bytes, bytes, needed_bytes, now);
            }
            let wanted_bytes = pools.parts.values().map(|part| part.demand.wanted_bytes).fold(0, u64::saturating_add);
            self.common.wanted_bytes.store(wanted_bytes, Ordering::SeqCst);
            before_bytes
        });
        if bytes > before_bytes {
            // It looks at the other pools, which give what they keep idle; without it their own polls do.
            MaintenanceThread::of_process().look_soon();
        }
        before_bytes
    }

    pub(super) fn is_wanted(&self) -> bool {
        let is_wanted_by = |pools: &mut Pools, number| {
            // A pool with a ceiling of its own gives nothing.
            let is_bound = pools.parts.get(&number).is_some_and(|part| !part.is_free);
            is_bound && pools.others(number).iter().any(|other| other.wanted_bytes > 0)
        };
        self.common.wanted_bytes.load(Ordering::SeqCst) > 0 && self.with(is_wanted_by)
    }

    /// What other pools want and have no room for.
    pub(super) fn others_lack(&self) -> u64 {
        if self.common.wanted_bytes.load(Ordering::SeqCst) == 0 {
            return 0;
        }
        self.with(|pools, number| pools.others_lack(number))
    }

    pub(super) fn owed_bytes(&self) -> u64 {
        self.with(|pools, number| {
            let gives =
                |part: &&Part| !part.is_free && shares::gives(&part.demand, &pools.others(number), pools.max_bytes);
            pools.parts.get(&number).filter(gives).map_or(0, |_| pools.others_lack(number))
        })
    }

    pub(super) fn note_idle(&self, bytes: u64) {
        self.with_part(|part| part.idle_bytes = bytes);
    }

    /// What there is and who has it, for an error.
    pub(super) fn in_words(&self) -> String {
        self.with(|pools, number| {
            let (max_bytes, held_bytes) = (pools.max_bytes, pools.held_bytes());
            let mut others: Vec<_> =
                pools.parts.iter().filter(|(other, part)| **other != number && part.demand.held_bytes > 0 && !part.is_free).collect();
            others.sort_by_key(|(_, part)| std::cmp::Reverse(part.demand.held_bytes));
            let listed = others.iter().take(LISTED).map(|(_, Part { pool, demand: Demand { held_bytes, .. }, idle_bytes, .. })| match idle_bytes {
                0 => format!("{pool} holds {}", Size(*held_bytes)),
                idle_bytes => format!("{pool} holds {}, {} idle", Size(*held_bytes), Size(*idle_bytes)),
            });
            let mut words: Vec<_> = listed.collect();
            let rest = others.get(LISTED..).unwrap_or_default();
            if !rest.is_empty() {
                let bytes: u64 = rest.iter().map(|(_, part)| part.demand.held_bytes).sum();
                words.push(format!("{} others hold {}", rest.len(), Size(bytes)));
            }
            let others = if words.is_empty() { "no other pool holds any".to_owned() } else { words.join(", ") };
            format!(
                "exceeds the limit of {} that this process's pools with PINPOOL_MAX_BYTES=auto share; {} are held ({others})",
                Size(max_bytes),
                Size(held_bytes)
            )
        })
    }
}

impl Drop for ProcessCeiling {
    fn drop(&mut self) {
        self.with(|pools, number| pools.parts.remove(&number).map(drop));
    }
}

#[cfg(all(test, not(miri), not(pinpool_loom)))]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::maintenance_thread::{Maintained, Pace};

    #[derive(Default)]
    struct Counted(AtomicUsize);

    impl Maintained for Counted {
        fn maintain(&self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }

        fn pace(&self) -> Pace {
            Pace::Never
        }
    }

    #[test]
    fn room_that_a_pool_makes_while_another_wants_it_is_looked_at_at_once() {
        let (thread, pool) = (MaintenanceThread::of_process(), Arc::new(Counted::default()));
        let counted: Weak<Counted> = Arc::downgrade(&pool);
        thread.add(counted, false);
        let looks = || pool.0.load(Ordering::SeqCst);
        let until_after = |before: usize| {
            let begun = Instant::now();
            while looks() <= before {
                assert!(begun.elapsed() < Duration::from_secs(20), "nobody looks");
                thread::sleep(Duration::from_millis(1));
            }
        };
        thread.notice(Pace::Active).unwrap();
        until_after(0);
        let root = Path::new("/the pools of this test");
        let [full, lacking] = ["full", "lacking"].map(|name| ProcessCeiling::attach(root, Some(name), |_| 10));
        assert!(full.claim(10));
        lacking.set_want(&Want::default(), 5, 5);
        // The look that the want caused is over.
        thread::sleep(Duration::from_millis(200));
        let before = looks();
        full.give_back(5);
        until_after(before);
        assert!(lacking.claim(5));
        thread.remove(Arc::as_ptr(&pool).cast());
    }
}
