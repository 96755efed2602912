//! The shared limit: one limit for the pools of all processes of a host.
//!
//! ```text
//!   pool of process A ─┐   claim before the source is called, release after it has released
//!   pool of process B ─┼─▶ slots in shared memory: held, wanted, idle ──▶ sum of held <= limit
//!   pool of process C ─┘
//!   a request without room: writes what it wants ─▶ wakes the others' threads ─▶ they release memory ─▶ wake the request
//! ```
//!
//! A member is one pool. Only its own slot contains its bytes, and each change is one store, so a member may die at any
//! instruction without leaving a wrong total. Its slot is then free, and the next claim that finds no room sets it to zero.
//!
//! A claim sums all slots and writes its own slot under the file's lock, which the kernel drops when its holder dies. If the
//! holder is stopped (SIGSTOP) in these microseconds, claims of other processes are refused after 50 ms.
//!
//! While the members together want more than the limit, members above an even share release the memory that is returned to
//! them, and claim nothing that other members wait for (`shares`). So a request is served even if other processes constantly
//! use the whole limit.
//!
//! The file is in `/dev/shm`, named after the user and the shared limit, and only that user may open it. The first pool that
//! attaches while no member is alive sets the limit; the last member removes the file. If another program removes the file, its
//! members keep their memory but claim nothing more (`Loss`). New processes then create another file with a separate limit.
//!
//! | file | contains |
//! | --- | --- |
//! | `slots` | the file, the shared words and their lock |
//! | `segment` | the memory of the words |
//! | `shares` | who releases memory, and who may claim it, if all members want more than the limit |
//! | `name`, `report` | the names of shared limits; their contents, for people and programs |
//!
//! This module does not know pools: it counts bytes and reports changes.
//!
//! - **shared-limit-I1**: the sum of the bytes in owned slots never exceeds the limit. The bytes of members without a slot
//!   (shared-limit-I3) come in addition.
//! - **shared-limit-I2**: only the process that attached changes its slot: in a forked child every call does nothing.
//! - **shared-limit-I3**: a member with a descriptor that other code has closed claims nothing more, and leaves its slot to
//!   the next member.
//! - **shared-limit-I4**: the wanted bytes of a member are the sum of what its requests and reserves want now.

use std::sync::Arc;
use std::time::Duration;

mod name;
mod report;
mod segment;
pub mod shares;
mod slots;

pub use self::name::{names, problem_of};
pub use self::report::{LISTED, SharedLimitMember, SharedLimitReport, report};
use self::shares::Demand;
pub use self::slots::Loss;
use self::slots::{HELD, IDLE, NAME, NAMESPACE, NEEDED, PROCESS, SINCE, Slots, WANTED};
use crate::file::sleep_while;
use pinpool_os::fork::ForkGeneration;
use pinpool_os::sync::unmodeled::{AtomicU64, Mutex, Ordering};

/// The longest time between two checks of the file by a member's thread.
const CHECK_EVERY: Duration = Duration::from_secs(1);

/// Bytes that one request or reserve of a member wants. Changed only under the lock that protects the sum of the member's wants,
/// so the sum is exact.
#[derive(Debug, Default)]
pub struct Want(AtomicU64);

impl Want {
    pub fn bytes(&self) -> u64 {
        // Relaxed: the value is only a statistic.
        self.0.load(Ordering::Relaxed)
    }

    /// Sets the bytes and returns the previous value. The caller has the lock that protects the sum of the member's wants.
    pub fn replace(&self, bytes: u64) -> u64 {
        self.0.swap(bytes, Ordering::Relaxed)
    }
}

/// A pool's slot in a shared limit. Dropping it returns all bytes of the pool to the limit.
#[derive(Debug)]
pub struct SharedLimit(Arc<Attached>);

/// The state of a [`SharedLimit`], which may outlive it while the thread of [`SharedLimit::watch`] uses the state.
#[derive(Debug)]
struct Attached {
    name: String,
    generation: ForkGeneration,
    slots: Slots,
    slot: usize,
    /// Locked while the slots are scanned. In a forked child, a thread that does not exist there may hold the lock.
    state: Mutex<MemberState>,
}

/// The state of this member.
#[derive(Debug, Default)]
struct MemberState {
    /// The bytes that this member holds, and the sum of its wants (shared-limit-I4).
    demand: Demand,
    loss: Option<Loss>,
    /// The loss, until the thread of [`SharedLimit::watch`] reports it.
    unreported_loss: Option<Loss>,
    has_left: bool,
}

impl SharedLimit {
    /// Takes a slot in the shared limit `name` for the pool called `pool`. Sets the limit to `max_bytes` if it has no living
    /// member.
    ///
    /// # Errors
    ///
    /// A text with the reason and the remedy.
    pub fn attach(name: &str, pool: Option<&str>, max_bytes: u64) -> Result<Self, String> {
        let (slots, slot) = Slots::attach(&name::path_of(name), max_bytes)?;
        let (name, generation) = (name.to_owned(), ForkGeneration::now());
        let own = Attached { name, generation, slots, slot, state: Mutex::default() };
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

    /// Claims `bytes` unless that would exceed the limit or take memory that other members wait for. Returns whether the bytes
    /// were claimed; they are not after a loss, or if another process keeps the file locked.
    pub fn claim(&self, bytes: u64) -> bool {
        let own = &self.0;
        own.with(|state| {
            let held_bytes = state.demand.held_bytes.saturating_add(bytes);
            // Most refusals do not need the lock.
            if own.room_for(state, bytes) < bytes {
                return false;
            }
            let claim = || own.claimable_bytes(state, bytes) >= bytes && own.write(state, HELD, held_bytes);
            let is_claimed = own.slots.locked(claim).unwrap_or(false);
            if is_claimed {
                state.demand.held_bytes = held_bytes;
            }
            is_claimed
        })
    }

    /// Returns `bytes` to the limit after they were released to the system.
    pub fn release(&self, bytes: u64) {
        let own = &self.0;
        own.with(|state| {
            state.demand.held_bytes = state.demand.held_bytes.saturating_sub(bytes);
            own.check(state);
            own.write(state, HELD, state.demand.held_bytes);
            // SeqCst: this member stores its bytes and then reads the wants, and a waiting member stores its want before it checks
            // for room a last time. So at least one of the two members sees the other's store.
            if own.wanted_by_others(state) > 0 {
                own.slots.notify_members();
            }
        });
    }

    /// Returns how many bytes can be claimed now, for a claim of `bytes`; the result may exceed `bytes`. If there is too little
    /// room, reclaims the bytes of dead members first.
    pub fn room_for(&self, bytes: u64) -> u64 {
        self.0.with(|state| self.0.room_for(state, bytes))
    }

    /// Records that a request or reserve of this member, which needs `needed_bytes` in all, now wants `bytes` of room. Wakes the
    /// other members if it wants more than before. Returns the bytes that it wanted before.
    pub fn set_want(&self, want: &Want, bytes: u64, needed_bytes: u64) -> u64 {
        let own = &self.0;
        own.with(|state| {
            let before_bytes = want.replace(bytes);
            if before_bytes == bytes && [0, state.demand.needed_bytes].contains(&needed_bytes) {
                return before_bytes;
            }
            let now = (own.slots.events().load(Ordering::SeqCst), own.slot);
            state.demand.change_want(before_bytes, bytes, needed_bytes, now);
            if own.check(state).is_none() {
                // The want is stored last: a member that sees it sees the other two words.
                own.write(state, SINCE, state.demand.since.0);
                own.write(state, NEEDED, state.demand.needed_bytes);
                own.write(state, WANTED, state.demand.wanted_bytes);
                if bytes > before_bytes {
                    own.slots.notify_members();
                }
            }
            before_bytes
        })
    }

    /// Returns whether other members want memory; some of them may be dead.
    pub fn is_wanted(&self) -> bool {
        self.0.with(|state| self.0.wanted_by_others(state) > 0)
    }

    /// Returns the bytes that other living members want and the limit has no room for.
    pub fn others_lacking_bytes(&self) -> u64 {
        self.0.with(|state| {
            if self.0.wanted_by_others(state) > 0 {
                self.0.clear_dead();
            }
            self.0.others_lacking_bytes(state)
        })
    }

    /// Returns the bytes that other members lack, if this member has more than an even share and must therefore release a buffer
    /// that is returned to it; otherwise 0.
    pub fn owed_bytes(&self) -> u64 {
        let Attached { slots, slot, .. } = &*self.0;
        self.0.with(|state| match self.0.others_lacking_bytes(state) {
            0 => 0,
            bytes if shares::owes(&state.demand, &slots.demands_of_others(*slot), slots.max_bytes()) => bytes,
            _ => 0,
        })
    }

    /// Returns why this member can no longer claim, if it cannot.
    pub fn loss(&self) -> Option<Loss> {
        self.0.with(|state| self.0.check(state))
    }

    /// Records how many of this member's bytes are idle, for reports.
    pub fn publish_idle(&self, bytes: u64) {
        self.0.with(|state| {
            self.0.check(state);
            self.0.write(state, IDLE, bytes)
        });
    }

    /// Starts a thread that calls `notice` now, whenever members want or return memory, and at least once a second. The arguments
    /// of `notice` are whether other members want memory, and, in one call only, why this member can no longer claim. The thread
    /// ends when `notice` returns false or the `SharedLimit` is dropped.
    pub fn watch(&self, notice: impl Fn(bool, Option<Loss>) -> bool + Send + 'static) -> std::io::Result<()> {
        let own = self.0.clone();
        let news = move |state: &mut MemberState| {
            own.check(state);
            (!state.has_left).then(|| (own.wanted_by_others(state) > 0, state.unreported_loss.take()))
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

    /// Reports the bytes of all members. The report is empty in a forked child.
    pub fn report(&self) -> SharedLimitReport {
        let is_own = self.0.with(|state| Some(self.0.check(state) != Some(Loss::Closed)));
        let report = |is_own: bool| SharedLimitReport::of(&self.0.name, &self.0.slots, is_own.then_some(self.0.slot));
        is_own.map(report).unwrap_or_default()
    }
}

impl Drop for SharedLimit {
    fn drop(&mut self) {
        let own = &self.0;
        own.with(|state| {
            state.has_left = true;
            if own.check(state) != Some(Loss::Closed) {
                own.slots.leave(own.slot);
            }
            // Wakes the other members, which have more room now, and this member's thread, which ends.
            own.slots.notify_members();
        });
    }
}

impl Attached {
    /// Calls `act` with the state of this member. In a forked child, only returns the default (shared-limit-I2).
    fn with<R: Default>(&self, act: impl FnOnce(&mut MemberState) -> R) -> R {
        if self.generation.is_stale() { R::default() } else { act(&mut self.state.lock()) }
    }

    /// Checks that the file is not removed and its descriptor is open. Returns the loss if not. A loss is permanent.
    fn check(&self, state: &mut MemberState) -> Option<Loss> {
        if state.loss.is_none() {
            state.loss = self.slots.loss();
            state.unreported_loss = state.loss;
            if state.loss.is_some() {
                // This member cannot claim any more, so memory that other members release would not help it.
                self.write(state, WANTED, 0);
                self.slots.notify_members();
            }
        }
        state.loss
    }

    /// Stores `value` if this member still has its slot, and returns whether it has. Once its lock is lost, the slot is free for
    /// other members.
    fn write(&self, state: &MemberState, word: usize, value: u64) -> bool {
        let is_own = state.loss != Some(Loss::Closed);
        if is_own {
            self.slots.slot(self.slot)[word].store(value, Ordering::SeqCst);
        }
        is_own
    }

    fn room_for(&self, state: &mut MemberState, bytes: u64) -> u64 {
        if self.check(state).is_some() {
            return 0;
        }
        match self.claimable_bytes(state, bytes) {
            less_bytes if less_bytes < bytes && self.clear_dead() => self.claimable_bytes(state, bytes),
            claimable_bytes => claimable_bytes,
        }
    }

    /// Returns the bytes that this member may claim without taking memory that other members have priority for.
    fn claimable_bytes(&self, state: &MemberState, bytes: u64) -> u64 {
        let room_bytes = self.slots.room_bytes();
        if self.slots.wanted_by_others(self.slot) == 0 {
            return room_bytes;
        }
        let others = self.slots.demands_of_others(self.slot);
        shares::claimable_bytes(&state.demand, &others, self.slots.max_bytes(), room_bytes, bytes)
    }

    fn clear_dead(&self) -> bool {
        let has_cleared = self.slots.clear_dead(self.slot);
        if has_cleared && self.slots.wanted_by_others(self.slot) > 0 {
            self.slots.notify_members();
        }
        has_cleared
    }

    /// Returns the bytes that other members want, including dead members; 0 after a loss, since other members cannot claim the bytes
    /// of this member then.
    fn wanted_by_others(&self, state: &MemberState) -> u64 {
        if state.loss.is_some() { 0 } else { self.slots.wanted_by_others(self.slot) }
    }

    /// Returns the bytes that other members want and the limit has no room for.
    fn others_lacking_bytes(&self, state: &MemberState) -> u64 {
        match self.wanted_by_others(state) {
            0 => 0,
            wanted_bytes => wanted_bytes.saturating_sub(self.slots.room_bytes()),
        }
    }
}

#[cfg(all(test, target_os = "linux", not(miri), not(pinpool_loom)))] // Shared memory.
mod tests;
