//! One ceiling for the pools of all processes of a host: the host ledger.
//!
//! ```text
//!   pool of process A ─┐   claim before the source is called, give back after it has released
//!   pool of process B ─┼─▶ slots in shared memory: held, being claimed, wanted, idle ──▶ sum <= ceiling
//!   pool of process C ─┘
//!   a get without room: writes what it wants ─▶ wakes the others' threads ─▶ they release memory ─▶ wake the get
//! ```
//!
//! An owner is one pool. What it holds stands in its own slot and nowhere else: there is no sum that a death could leave
//! wrong, and each change is one store. So an owner may die at any instruction; its slot is free from then on, and the next
//! claim that finds no room sets it to zero (`shared_memory`).
//!
//! A claim takes no lock of other processes, so that none that is stopped in the middle holds up the others: it announces what
//! it wants to add, sums all slots, and adds it if the sum is within the ceiling. Of two that announce at once, one at least
//! sees the other (`claims`). Two may refuse each other; they try again a few times, then wait in line.
//!
//! While owners want more than there is, those above an even share make room of what they put back, and claim nothing that
//! others wait for (`shares`). So a get is served although other processes use all of the ledger without a pause.
//!
//! The file lies in `/dev/shm`, under the number of the user and the name of the ledger, and only that user may open it.
//! The first pool of a ledger without a living owner sets its ceiling; the last one that ends removes the file.
//!
//! A file can be removed or cut under its owners. Each looks before a claim, and a thread of each once in a second, which then
//! moves to the file that has the name by then, with all that the owner holds (`place`). Until all have moved nobody claims more, so
//! the ceiling holds meanwhile; the locks that tell are on the directory (`shared_memory`).
//!
//! | file | owns |
//! | --- | --- |
//! | `layout` | which word means what |
//! | `claims` | claims of bytes under a ceiling, by words alone |
//! | `shares` | who makes room, and who may claim, while all want more than there is: numbers in, numbers out |
//! | `words` | what the words of all owners say together |
//! | `place` | what one owner holds and wants, and where that stands |
//! | `name`, `report` | the names of ledgers; what they say, for people and programs |
//!
//! Knows no pool: it counts bytes and passes on that something has changed. What a pool makes of it is in the module `ledger` of the
//! pool's crate, which says the same of the pools of one process by the rules of `shares`.
//!
//! - ledger-I1: the sum of what living owners hold never passes the ceiling: what is held rises only by a claim that found the
//!   sum of all that is held and announced within it, while no owner used another file of the name.
//! - ledger-I2: only the process that attached changes its slot: in a child of `fork` every call does nothing.
//! - ledger-I3: an owner whose descriptor was closed by other code of its process has lost its place: it claims nothing more,
//!   and leaves the slot to who has it by then.
//! - ledger-I4: what an owner wants is the sum of what its gets and reserves want now.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

mod claims;
mod layout;
mod name;
mod place;
mod report;
pub mod shares;
mod words;

pub use self::name::problem_of;
use self::place::Place;
pub use self::place::{LedgerNews, Want};
pub use self::report::{LISTED, LedgerOwner, LedgerReport, names, report};
use self::words::Words;
use crate::file::{SharedFile, SharedFileError, sleep_while};
use pinpool_os::fork::ForkGeneration;
use pinpool_os::sync::plain::Mutex;
use pinpool_os::sync::process::{AtomicBool, Ordering};
use pinpool_os::threads;

/// The thread of an owner looks at the file so often.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// A pool's place in a host ledger. Dropping it gives back all that it holds.
pub struct HostLedger(Arc<Attached>);

/// Outlives the ledger's place while its thread looks at it.
struct Attached {
    name: String,
    generation: ForkGeneration,
    has_left: AtomicBool,
    /// Locked for a few words, and while it moves to another file. In a child of `fork` a thread that is not there may have it.
    place: Mutex<Place>,
}

impl fmt::Debug for HostLedger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostLedger").field("name", &self.0.name).finish_non_exhaustive()
    }
}

impl HostLedger {
    /// Takes a place in the ledger `name` for the pool called `pool`. Its ceiling is `max_bytes` if it has no living owner.
    pub fn attach(name: &str, pool: Option<&str>, max_bytes: u64) -> Result<Self, SharedFileError> {
        let place = Mutex::new(Place::take(name, pool.unwrap_or_default(), max_bytes)?);
        let (generation, has_left) = (ForkGeneration::now(), AtomicBool::new(false));
        Ok(Self(Arc::new(Attached { name: name.to_owned(), generation, has_left, place })))
    }

    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// 0 in a child of `fork`.
    pub fn max_bytes(&self) -> u64 {
        self.0.with(|place| Words(place.file()).max_bytes())
    }

    /// Claims `bytes`; false if that would exceed the ceiling, or use what others wait for.
    pub fn claim(&self, bytes: u64) -> bool {
        self.0.with(|place| place.claim(bytes))
    }

    /// `bytes` that were claimed are with the system again.
    pub fn give_back(&self, bytes: u64) {
        if bytes > 0 {
            self.0.with(|place| place.give_back(bytes));
        }
    }

    /// Bytes that a claim of `bytes` may have. If these are fewer, the shares of dead owners are taken back first.
    pub fn room_for(&self, bytes: u64) -> u64 {
        self.0.with(|place| place.room_for(bytes))
    }

    /// A get or reserve of this owner that needs `needed_bytes` wants `bytes` of room from now on. Wakes the other owners if that
    /// is more than before. Returns what it wanted before.
    pub fn set_want(&self, want: &Want, bytes: u64, needed_bytes: u64) -> u64 {
        self.0.with(|place| place.set_want(want, bytes, needed_bytes))
    }

    /// Whether other owners want memory; some of them may be dead.
    pub fn is_wanted(&self) -> bool {
        self.0.with(|place| Words(place.file()).others_want_bytes() > 0)
    }

    /// What living owners want and the ledger has no room for. A slow call if the place has to move.
    pub fn others_lack(&self) -> u64 {
        self.0.with(|place| {
            place.look();
            place.others_lack()
        })
    }

    /// What a put of this owner is to make room for, because others lack it and this owner holds more than an even share; else 0.
    pub fn owed_bytes(&self) -> u64 {
        self.0.with(|place| place.owed_bytes())
    }

    /// Whether owners have not moved yet from a file of this name that was removed: until then nothing is claimed.
    pub fn has_owners_elsewhere(&self) -> bool {
        self.0.with(|place| place.is_there() && place.file().has_owners_elsewhere())
    }

    /// So much of what this owner holds is idle: for those who look.
    pub fn note_idle(&self, bytes: u64) {
        self.0.with(|place| place.note_idle(bytes));
    }

    /// Sleeps until something changes in the ledger, at most for `limit`.
    pub fn sleep(&self, limit: Duration) {
        let Some(file) = self.0.file() else { return };
        let events = Words(&file).events();
        sleep_while(events, events.load(Ordering::SeqCst), Some(limit));
    }

    /// Starts the thread that calls `notice` whenever owners ask for memory or give memory back, with whether others want any and
    /// what became of the place, until it returns false or this is dropped.
    pub fn watch(&self, notice: impl Fn(bool, Option<LedgerNews>) -> bool + Send + 'static) -> std::io::Result<()> {
        let attached = self.0.clone();
        let watch = move || {
            while let Some(file) = attached.file() {
                let seen = Words(&file).events().load(Ordering::SeqCst);
                if attached.has_left.load(Ordering::SeqCst) {
                    return;
                }
                let (is_wanted, news) = attached.look();
                if !notice(is_wanted, news) {
                    return;
                }
                // A place that has moved meanwhile is in other memory, which the next round looks at.
                sleep_while(Words(&file).events(), seen, Some(LOOK_EVERY));
            }
        };
        threads::spawn(c"pinpool-ledger", watch)
    }

    /// What all owners hold.
    pub fn report(&self) -> LedgerReport {
        let seen = self.0.with(|place| Some((place.file().clone(), place.is_there())));
        let Some((file, is_there)) = seen else { return LedgerReport::default() };
        let own = Some(file.own_slot()).filter(|_| is_there);
        let words = |index| file.slot(index).iter().map(|word| word.load(Ordering::SeqCst)).collect();
        let is_owned = |index: &usize| file.is_owned(*index);
        let used = 0..Words(&file).used();
        let slots: Vec<_> = used.filter(is_owned).map(|index| (Some(index) == own, words(index))).collect();
        LedgerReport::of(&self.0.name, Words(&file).max_bytes(), &slots)
    }
}

impl Drop for HostLedger {
    fn drop(&mut self) {
        self.0.has_left.store(true, Ordering::SeqCst);
        self.0.with(Place::leave);
    }
}

impl Attached {
    /// Nothing in a child of `fork` (ledger-I2).
    fn with<R: Default>(&self, act: impl FnOnce(&mut Place) -> R) -> R {
        if self.generation.is_stale() { R::default() } else { act(&mut self.place.lock()) }
    }

    fn file(&self) -> Option<Arc<SharedFile>> {
        self.with(|place| Some(place.file().clone()))
    }

    /// Looks after the place. Returns whether others want memory, and what became of it.
    fn look(&self) -> (bool, Option<LedgerNews>) {
        self.with(|place| {
            if !self.has_left.load(Ordering::SeqCst) {
                place.look();
            }
            (Words(place.file()).others_want_bytes() > 0, place.take_news())
        })
    }
}

#[cfg(all(test, target_os = "linux", not(miri), not(pinpool_loom)))] // Shared memory.
mod tests;
