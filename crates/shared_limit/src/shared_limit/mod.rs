//! The shared limit: one limit for the pools of all processes of a host.
//!
//! ```text
//!   pool of process A ─┐   claim before the source is called, release after it has released
//!   pool of process B ─┼─▶ slots in shared memory: held, wanted, idle ──▶ sum of held <= limit
//!   pool of process C ─┘
//!   a request without room: writes what it wants ─▶ wakes the others' threads ─▶ they release memory ─▶ wake the request
//! ```
//!
//! An owner is one pool. Only its own slot contains its bytes, and each change is one store, so an owner may die at any
//! instruction and no total is left wrong. Its slot is then free, and the next claim that finds no room sets it to zero.
//!
//! A claim sums all slots and writes its own slot under the file's lock, which the kernel drops when its holder dies. If the
//! holder is stopped (SIGSTOP) in these microseconds, claims of other processes are refused after 50 ms.
//!
//! While the owners together want more than the limit, owners above an even share release what is returned to them, and claim
//! nothing that others wait for (`shares`). So a request is served even if other processes constantly use the whole limit.
//!
//! The file is in `/dev/shm`, named after the user and the shared limit, and only that user may open it. The first pool that
//! attaches while no owner is alive sets the limit; the last owner removes the file. If another program removes the file, its
//! owners keep their memory but claim nothing more (`Loss`). New processes then create another file with a separate limit.
//!
//! | file | contains |
//! | --- | --- |
//! | `slots` | the file, the shared words and their lock |
//! | `segment` | the memory of the words |
//! | `shares` | who releases memory, and who may claim it, if all owners want more than the limit |
//! | `name`, `report` | the names of shared limits; their contents, for people and programs |
//!
//! This module does not know pools: it counts bytes and reports changes.
//!
//! - shared-limit-I1: the sum of the bytes of living owners never exceeds the limit.
//! - shared-limit-I2: only the process that attached changes its slot: in a forked child every call does nothing.
//! - shared-limit-I3: an owner with a descriptor that other code has closed claims nothing more, and leaves its slot to the next
//!   owner.
//! - shared-limit-I4: the wanted bytes of an owner are the sum of what its requests and reserves want now.

use std::sync::Arc;
use std::time::Duration;

mod name;
mod report;
mod segment;
pub mod shares;
mod slots;

pub use self::name::{names, problem_of};
pub use self::report::{LISTED, SharedLimitOwner, SharedLimitReport, report};
use self::shares::Demand;
pub use self::slots::Loss;
use self::slots::{HELD, IDLE, NAME, NAMESPACE, NEEDED, PROCESS, SINCE, Slots, WANTED};
use crate::file::sleep_while;
use pinpool_os::fork::ForkGeneration;
use pinpool_os::sync::plain::Mutex;
use pinpool_os::sync::process::{AtomicU64, Ordering};

/// How often the thread of an owner checks the file.
const CHECK_EVERY: Duration = Duration::from_secs(1);

/// Bytes that one request or reserve of an owner wants. Changed only under the lock of the owner's slot, so the sum is exact.
#[derive(Debug, Default)]
pub struct Want(AtomicU64);

impl Want {
    pub fn bytes(&self) -> u64 {
        // Relaxed: a statistic.
        self.0.load(Ordering::Relaxed)
    }

    /// Returns the previous value. The caller holds the lock of the owner's place.
    pub fn replace(&self, bytes: u64) -> u64 {
        self.0.swap(bytes, Ordering::Relaxed)
    }
}

/// A pool's slot in a shared limit. Dropping it releases all of its bytes.
#[derive(Debug)]
pub struct SharedLimit(Arc<Attached>);

/// Outlives the pool's slot while its thread uses it.
#[derive(Debug)]
struct Attached {
    name: String,
    generation: ForkGeneration,
    slots: Slots,
    slot: usize,
    /// Locked for a scan of the slots. In a forked child a thread that does not exist may have it.
    place: Mutex<Place>,
}

/// The state of this owner.
#[derive(Debug, Default)]
struct Place {
    /// With the sum of all wants.
    demand: Demand,
    loss: Option<Loss>,
    /// The loss until it is reported.
    news: Option<Loss>,
    has_left: bool,
}

impl SharedLimit {
    /// Takes a slot in the shared limit `name` for the pool called `pool`. Its limit is `max_bytes` if it has no living owner.
    ///
    /// # Errors
    ///
    /// The reason and the remedy.
    pub fn attach(name: &str, pool: Option<&str>, max_bytes: u64) -> Result<Self, String> {
        let (slots, slot) = Slots::attach(&name::path_of(name), max_bytes)?;
        let (name, generation) = (name.to_owned(), ForkGeneration::now());
        let own = Attached { name, generation, slots, slot, place: Mutex::default() };
        let set = |word: usize, value| own.slots.slot(slot)[word].store(value, Ordering::SeqCst);
        (NAME..).zip(report::words_of(pool.unwrap_or_default())).for_each(|(word, value)| set(word, value));
        set(NAMESPACE, report::namespace());
        set(PROCESS, std::process::id().into());
        Ok(Self(Arc::new(own)))
    }

    pub fn name(&self) -> &str {
        &self.0.name
    }

    pub fn max_bytes(&self) -> u64 {
        self.0.slots.max_bytes()
    }

    /// Claims `bytes`. Returns false if that would exceed the limit, or take what others wait for.
    pub fn claim(&self, bytes: u64) -> bool {
        let own = &self.0;
        own.with(|place| {
            let held_bytes = place.demand.held_bytes.saturating_add(bytes);
            // Mostly refused without the lock.
            if own.room_for(place, bytes) < bytes {
                return false;
            }
            let claim = || own.claimable_bytes(place, bytes) >= bytes && own.write(place, HELD, held_bytes);
            let is_claimed = own.slots.locked(claim).unwrap_or(false);
            if is_claimed {
                place.demand.held_bytes = held_bytes;
            }
            is_claimed
        })
    }

    /// Returns `bytes` to the limit after they were released to the system.
    pub fn release(&self, bytes: u64) {
        let own = &self.0;
        own.with(|place| {
            place.demand.held_bytes = place.demand.held_bytes.saturating_sub(bytes);
            own.check(place);
            own.write(place, HELD, place.demand.held_bytes);
            // SeqCst: an owner writes what it wants before it looks for room a last time, so one of the two sees the other.
            if own.wanted_by_others(place) > 0 {
                own.slots.tell();
            }
        });
    }

    /// How much of `bytes` can be claimed. If not all of them, the bytes of dead owners are reclaimed first.
    pub fn room_for(&self, bytes: u64) -> u64 {
        self.0.with(|place| self.0.room_for(place, bytes))
    }

    /// A request or reserve of this owner that needs `needed_bytes` wants `bytes` of room from now on. Wakes the other owners if
    /// that is more than before. Returns what it wanted before.
    pub fn set_want(&self, want: &Want, bytes: u64, needed_bytes: u64) -> u64 {
        let own = &self.0;
        own.with(|place| {
            let before_bytes = want.replace(bytes);
            if before_bytes == bytes && [0, place.demand.needed_bytes].contains(&needed_bytes) {
                return before_bytes;
            }
            let now = (own.slots.events().load(Ordering::SeqCst), own.slot);
            place.demand.change_want(before_bytes, bytes, needed_bytes, now);
            if own.check(place).is_none() {
                // The want last: who sees it sees the rest.
                own.write(place, SINCE, place.demand.since.0);
                own.write(place, NEEDED, place.demand.needed_bytes);
                own.write(place, WANTED, place.demand.wanted_bytes);
                if bytes > before_bytes {
                    own.slots.tell();
                }
            }
            before_bytes
        })
    }

    /// Returns whether other owners want memory; some of them may be dead.
    pub fn is_wanted(&self) -> bool {
        self.0.with(|place| self.0.wanted_by_others(place) > 0)
    }

    /// The bytes that other living owners want and the limit has no room for.
    pub fn others_lack(&self) -> u64 {
        self.0.with(|place| {
            if self.0.wanted_by_others(place) > 0 {
                self.0.clear_dead();
            }
            self.0.others_lack(place)
        })
    }

    /// The bytes that a returned buffer of this owner must make room for, because others lack it and this owner has more than an
    /// even share; else 0.
    pub fn owed_bytes(&self) -> u64 {
        let Attached { slots, slot, .. } = &*self.0;
        self.0.with(|place| match self.0.others_lack(place) {
            0 => 0,
            bytes if shares::gives(&place.demand, &slots.demands_of_others(*slot), slots.max_bytes()) => bytes,
            _ => 0,
        })
    }

    /// Why this owner can no longer claim, if it cannot.
    pub fn loss(&self) -> Option<Loss> {
        self.0.with(|place| self.0.check(place))
    }

    /// Records how many of this owner's bytes are idle, for reports.
    pub fn record_idle(&self, bytes: u64) {
        self.0.with(|place| {
            self.0.check(place);
            self.0.write(place, IDLE, bytes)
        });
    }

    /// Starts a thread that calls `notice` whenever owners want or return memory: with whether others want any and, once, why
    /// this owner can no longer claim. It ends when `notice` returns false or this is dropped.
    pub fn watch(&self, notice: impl Fn(bool, Option<Loss>) -> bool + Send + 'static) -> std::io::Result<()> {
        let own = self.0.clone();
        let news = move |place: &mut Place| {
            own.check(place);
            (!place.has_left).then(|| (own.wanted_by_others(place) > 0, place.news.take()))
        };
        let own = self.0.clone();
        pinpool_os::threads::spawn(c"pinpool-limit", move || {
            let events = own.slots.events();
            loop {
                let seen = events.load(Ordering::SeqCst);
                match own.with(&news) {
                    Some((is_wanted, news)) if notice(is_wanted, news) => sleep_while(events, seen, CHECK_EVERY),
                    _ => return,
                }
            }
        })
    }

    /// The bytes of all owners. Empty in a forked child.
    pub fn report(&self) -> SharedLimitReport {
        let is_own = self.0.with(|place| Some(self.0.check(place) != Some(Loss::Closed)));
        let report = |is_own: bool| SharedLimitReport::of(&self.0.name, &self.0.slots, is_own.then_some(self.0.slot));
        is_own.map(report).unwrap_or_default()
    }
}

impl Drop for SharedLimit {
    fn drop(&mut self) {
        let own = &self.0;
        own.with(|place| {
            place.has_left = true;
            if own.check(place) != Some(Loss::Closed) {
                own.slots.leave(own.slot);
            }
            // The others have more room, and the own thread ends.
            own.slots.tell();
        });
    }
}

impl Attached {
    /// Nothing in a forked child (shared-limit-I2).
    fn with<R: Default>(&self, act: impl FnOnce(&mut Place) -> R) -> R {
        if self.generation.is_stale() { R::default() } else { act(&mut self.place.lock()) }
    }

    /// Checks whether the file and its descriptor are unchanged. A loss is permanent.
    fn check(&self, place: &mut Place) -> Option<Loss> {
        if place.loss.is_none() {
            place.loss = self.slots.loss();
            place.news = place.loss;
            if place.loss.is_some() {
                // Memory of others would not help any more.
                self.write(place, WANTED, 0);
                self.slots.tell();
            }
        }
        place.loss
    }

    /// Returns whether this owner still has its slot: without its lock the slot is free for others.
    fn write(&self, place: &Place, word: usize, value: u64) -> bool {
        let is_own = place.loss != Some(Loss::Closed);
        if is_own {
            self.slots.slot(self.slot)[word].store(value, Ordering::SeqCst);
        }
        is_own
    }

    fn room_for(&self, place: &mut Place, bytes: u64) -> u64 {
        if self.check(place).is_some() {
            return 0;
        }
        match self.claimable_bytes(place, bytes) {
            less_bytes if less_bytes < bytes && self.clear_dead() => self.claimable_bytes(place, bytes),
            claimable_bytes => claimable_bytes,
        }
    }

    /// The bytes that this owner may claim, leaving what others want.
    fn claimable_bytes(&self, place: &Place, bytes: u64) -> u64 {
        let room_bytes = self.slots.room_bytes();
        if self.slots.wanted_by_others(self.slot) == 0 {
            return room_bytes;
        }
        let others = self.slots.demands_of_others(self.slot);
        shares::claimable_bytes(&place.demand, &others, self.slots.max_bytes(), room_bytes, bytes)
    }

    fn clear_dead(&self) -> bool {
        let has_cleared = self.slots.clear_dead(self.slot);
        if has_cleared && self.slots.wanted_by_others(self.slot) > 0 {
            self.slots.tell();
        }
        has_cleared
    }

    /// The bytes that other owners want, dead ones included; 0 after a loss, since they cannot claim this owner's.
    fn wanted_by_others(&self, place: &Place) -> u64 {
        if place.loss.is_some() { 0 } else { self.slots.wanted_by_others(self.slot) }
    }

    /// The bytes that other owners want and the limit has no room for.
    fn others_lack(&self, place: &Place) -> u64 {
        match self.wanted_by_others(place) {
            0 => 0,
            wanted_bytes => wanted_bytes.saturating_sub(self.slots.room_bytes()),
        }
    }
}

#[cfg(all(test, target_os = "linux", not(miri), not(pinpool_loom)))] // Shared memory.
mod tests;
