//! One ceiling for the pools of all processes of a host: the host ledger.
//!
//! ```text
//!   pool of process A ─┐   claim before the source is called, give back after it has released
//!   pool of process B ─┼─▶ slots in shared memory: held, being claimed, wanted, idle ──▶ sum <= ceiling
//!   pool of process C ─┘
//!   a get without room: writes what it wants ─▶ wakes the others' threads ─▶ they release idle memory ─▶ wake the get
//! ```
//!
//! An owner is one pool. What it holds stands in its own slot and nowhere else: there is no sum that a death could leave
//! wrong, and each change is one store. So an owner may die at any instruction; its slot is free from then on, and the next
//! claim that finds no room sets it to zero (`shared_memory`).
//!
//! A claim takes no lock, so that no process that is stopped in the middle holds up the others: it announces what it wants to
//! add, sums all slots, and adds it if the sum is within the ceiling. Of two that announce at once, one at least sees the
//! other (`claims`). Two may refuse each other; they try again a few times, then wait in line.
//!
//! The file lies in `/dev/shm`, under the number of the user and the name of the ledger, and only that user may open it.
//! The first pool of a ledger without a living owner sets its ceiling; the last one that ends removes the file.
//!
//! Knows no pool: it counts bytes and passes on that something has changed.
//!
//! - ledger-I1: the sum of what living owners hold never passes the ceiling: what is held rises only by a claim that found the
//!   sum of all that is held and announced within it.
//! - ledger-I2: only the process that attached changes its slot: in a child of `fork` every call does nothing.
//! - ledger-I3: an owner whose descriptor was closed by other code of its process has lost its place: it claims nothing more,
//!   and leaves the slot to who has it by then.

use std::fmt;
use std::sync::Arc;

mod claims;
mod layout;
mod name;
mod report;

use self::claims::{Outcome, Sums};
use self::layout::{
    ATTACHED, CLAIMING, EVENTS, HELD, IDLE, LAYOUT, MAX_BYTES, NAME, NAME_WORDS, NAMESPACE, OWNER, PROCESS, USED,
    WANTED,
};
pub use self::name::LedgerName;
use self::name::path_of;
pub(crate) use self::name::problem_of;
pub use self::report::{LedgerOwner, LedgerReport, names, report};
use crate::maintenance_thread::block_signals;
use crate::shared_memory::{Place, SharedFile, SharedFileError, sleep_while, wake_all};
use crate::sync::process::{AtomicBool, AtomicU64, Ordering};

/// Claims that refuse each other are tried so often.
const TRIES: u32 = 8;

/// A pool's place in a host ledger. Dropping it gives back all that it holds.
pub(crate) struct HostLedger(Arc<Attached>);

/// Outlives the ledger's place while its thread looks at it.
struct Attached {
    name: String,
    file: SharedFile,
    /// The number of this owner among all that ever attached.
    owner: u64,
    has_left: AtomicBool,
    /// The slot is another owner's, or free.
    has_lost_place: AtomicBool,
    /// Whether someone was told that.
    has_told_loss: AtomicBool,
}

impl fmt::Debug for HostLedger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostLedger").field("name", &self.0.name).finish_non_exhaustive()
    }
}

impl HostLedger {
    /// Takes a place in the ledger `name` for the pool called `pool`. Its ceiling is `max_bytes` if it has no living owner.
    pub(crate) fn attach(name: &str, pool: Option<&str>, max_bytes: u64) -> Result<Self, SharedFileError> {
        let place = Place::Named(path_of(name));
        let begin = |common: &[AtomicU64]| common[MAX_BYTES].store(max_bytes, Ordering::SeqCst);
        let (file, _) = SharedFile::attach(&place, &LAYOUT, begin)?;
        let owner = file.common()[ATTACHED].fetch_add(1, Ordering::SeqCst) + 1;
        let [has_left, has_lost_place, has_told_loss] = [const { AtomicBool::new(false) }; 3];
        let attached = Attached { name: name.to_owned(), file, owner, has_left, has_lost_place, has_told_loss };
        let own = attached.own();
        own[OWNER].store(owner, Ordering::SeqCst);
        own[PROCESS].store(u64::from(std::process::id()), Ordering::SeqCst);
        own[NAMESPACE].store(report::namespace(), Ordering::SeqCst);
        let words = own[NAME..NAME + NAME_WORDS].iter();
        words.zip(report::words_of(pool.unwrap_or_default())).for_each(|(to, word)| to.store(word, Ordering::SeqCst));
        // Before the first claim: sums are taken up to here.
        attached.file.common()[USED].fetch_max(attached.file.own_slot() as u64 + 1, Ordering::SeqCst);
        Ok(Self(Arc::new(attached)))
    }

    pub(crate) fn name(&self) -> &str {
        &self.0.name
    }

    pub(crate) fn max_bytes(&self) -> u64 {
        self.0.max_bytes()
    }

    /// Claims `bytes`; false if that would exceed the ceiling.
    pub(crate) fn claim(&self, bytes: u64) -> bool {
        let attached = &*self.0;
        if !attached.has_place() {
            return false;
        }
        let mut tries = 0;
        loop {
            match claims::claim(&attached.own_sums(), attached.all_sums(), attached.max_bytes(), bytes) {
                Outcome::Claimed => return true,
                Outcome::Contended if tries < TRIES => {
                    tries += 1;
                    // Owners that meet again and again would do so in step.
                    for _ in 0..=attached.file.own_slot() % 7 {
                        std::thread::yield_now();
                    }
                }
                Outcome::Contended | Outcome::Full if attached.clear_dead() => {}
                Outcome::Contended | Outcome::Full => return false,
            }
        }
    }

    /// `bytes` that were claimed are with the system again.
    pub(crate) fn give_back(&self, bytes: u64) {
        let attached = &*self.0;
        if bytes == 0 || !attached.has_place() {
            return;
        }
        lower(&attached.own()[HELD], bytes);
        // SeqCst: an owner writes what it wants before it looks for room a last time, so one of the two sees the other.
        if attached.others_want_bytes() > 0 {
            attached.tell();
        }
    }

    /// Bytes that may still be claimed. If these are fewer than `bytes`, the shares of dead owners are taken back first.
    pub(crate) fn room_for(&self, bytes: u64) -> u64 {
        let attached = &*self.0;
        if attached.has_lost_place.load(Ordering::SeqCst) {
            return 0;
        }
        let room_bytes = attached.room_bytes();
        if room_bytes >= bytes || attached.file.is_forked() || !attached.clear_dead() {
            return room_bytes;
        }
        attached.room_bytes()
    }

    /// A get of this owner that wanted `before` bytes of room now wants `now`. Wakes the other owners if that is more.
    pub(crate) fn change_want(&self, before: u64, now: u64) {
        let attached = &*self.0;
        if before == now || !attached.has_place() {
            return;
        }
        let wanted = &attached.own()[WANTED];
        if now < before {
            lower(wanted, before - now);
        } else {
            wanted.fetch_add(now - before, Ordering::SeqCst);
            attached.tell();
        }
    }

    /// What other owners want and the ledger has no room for; some of them may be dead.
    pub(crate) fn others_lack(&self) -> u64 {
        self.0.others_lack()
    }

    /// As [`others_lack`](Self::others_lack), of living owners.
    pub(crate) fn living_others_lack(&self) -> u64 {
        if self.0.others_lack() == 0 || !self.0.has_place() {
            return 0;
        }
        self.0.clear_dead();
        self.0.others_lack()
    }

    /// So much of what this owner holds is idle: for those who look.
    pub(crate) fn note_idle(&self, bytes: u64) {
        if self.0.has_place() {
            self.0.own()[IDLE].store(bytes, Ordering::SeqCst);
        }
    }

    /// Whether the place is lost; true once.
    pub(crate) fn loses_place(&self) -> bool {
        !self.0.file.is_forked() && !self.0.has_place() && !self.0.has_told_loss.swap(true, Ordering::SeqCst)
    }

    /// Sleeps until something changes in the ledger, at most for `limit`.
    pub(crate) fn sleep(&self, limit: std::time::Duration) {
        let events = &self.0.file.common()[EVENTS];
        sleep_while(events, events.load(Ordering::SeqCst), Some(limit));
    }

    /// Starts the thread that calls `notice` whenever owners ask for memory or give memory back, with whether others lack any,
    /// until it returns false or this is dropped.
    pub(crate) fn watch(&self, notice: impl Fn(bool) -> bool + Send + 'static) -> std::io::Result<()> {
        let attached = self.0.clone();
        let watch = move || {
            block_signals();
            let events = &attached.file.common()[EVENTS];
            loop {
                let seen = events.load(Ordering::SeqCst);
                if attached.has_left.load(Ordering::SeqCst) || !notice(attached.others_lack() > 0) {
                    return;
                }
                sleep_while(events, seen, None);
            }
        };
        std::thread::Builder::new().name("pinpool-ledger".to_owned()).spawn(watch).map(drop)
    }

    /// What all owners hold.
    pub(crate) fn report(&self) -> LedgerReport {
        let attached = &*self.0;
        let own = Some(attached.file.own_slot()).filter(|_| attached.has_place());
        let words = |index| attached.file.slot(index).iter().map(|word| word.load(Ordering::SeqCst)).collect();
        let is_owned = |index: &usize| attached.file.is_owned(*index);
        let slots: Vec<_> =
            (0..attached.used()).filter(is_owned).map(|index| (Some(index) == own, words(index))).collect();
        LedgerReport::of(&attached.name, attached.max_bytes(), &slots)
    }
}

impl Drop for HostLedger {
    fn drop(&mut self) {
        if self.0.file.is_forked() {
            return;
        }
        self.0.has_left.store(true, Ordering::SeqCst);
        if self.0.has_place() {
            self.0.file.detach();
        } else {
            self.0.file.abandon();
        }
        // The others have more room, and the own thread ends.
        self.0.tell();
    }
}

/// Lowers `word` by `bytes`, at most to zero.
fn lower(word: &AtomicU64, bytes: u64) {
    let less = |now: u64| Some(now.saturating_sub(bytes));
    let _always = word.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
}

impl Attached {
    /// Whether the slot is this owner's still (ledger-I2, ledger-I3).
    fn has_place(&self) -> bool {
        if self.file.is_forked() || self.has_lost_place.load(Ordering::SeqCst) {
            return false;
        }
        let has_place = self.own()[OWNER].load(Ordering::SeqCst) == self.owner && self.file.is_open();
        self.has_lost_place.fetch_or(!has_place, Ordering::SeqCst);
        has_place
    }

    fn max_bytes(&self) -> u64 {
        self.file.common()[MAX_BYTES].load(Ordering::SeqCst)
    }

    fn own(&self) -> &[AtomicU64] {
        self.file.slot(self.file.own_slot())
    }

    fn used(&self) -> usize {
        usize::try_from(self.file.common()[USED].load(Ordering::SeqCst)).unwrap_or(usize::MAX).min(self.file.slots())
    }

    fn own_sums(&self) -> Sums<'_, AtomicU64> {
        self.sums(self.file.own_slot())
    }

    fn sums(&self, index: usize) -> Sums<'_, AtomicU64> {
        let slot = self.file.slot(index);
        Sums { held: &slot[HELD], claiming: &slot[CLAIMING] }
    }

    fn all_sums(&self) -> impl Iterator<Item = Sums<'_, AtomicU64>> {
        (0..self.used()).map(|index| self.sums(index))
    }

    fn room_bytes(&self) -> u64 {
        self.max_bytes().saturating_sub(claims::sum(self.all_sums()))
    }

    fn others_want_bytes(&self) -> u64 {
        let others = (0..self.used()).filter(|&index| index != self.file.own_slot());
        others.map(|index| self.file.slot(index)[WANTED].load(Ordering::SeqCst)).fold(0, u64::saturating_add)
    }

    fn others_lack(&self) -> u64 {
        match self.others_want_bytes() {
            0 => 0,
            wanted_bytes => wanted_bytes.saturating_sub(self.room_bytes()),
        }
    }

    /// Takes the shares of dead owners back. Returns whether there were any.
    fn clear_dead(&self) -> bool {
        if !self.has_place() {
            return false;
        }
        let has_words = |index: usize| {
            let slot = self.file.slot(index);
            [HELD, CLAIMING, WANTED].iter().any(|&word| slot[word].load(Ordering::SeqCst) > 0)
        };
        let cleared = (0..self.used()).filter(|&index| has_words(index) && self.file.clear_if_dead(index));
        let has_cleared = cleared.count() > 0;
        if has_cleared && self.others_want_bytes() > 0 {
            self.tell();
        }
        has_cleared
    }

    /// Wakes the threads of all owners.
    fn tell(&self) {
        let events = &self.file.common()[EVENTS];
        events.fetch_add(1, Ordering::SeqCst);
        wake_all(events);
    }
}

#[cfg(all(test, target_os = "linux", not(miri), not(loom)))] // Shared memory.
mod tests;
