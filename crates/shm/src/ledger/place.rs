//! The place of one owner: what it holds and wants, which it alone writes to its slot, and the file that the slot is in.
//!
//! ```text
//!   file whole ──removed, or cut──▶ attach to the file that has the name now, or make it ─▶ write all that is held there
//!        └──descriptor closed, or slot another owner's──▶ lost: the slot is left alone, and nothing more is claimed
//! ```

use std::sync::Arc;
use std::time::Duration;

use super::claims::{self, Outcome};
use super::layout::{
    HELD, IDLE, LAYOUT, MAX_BYTES, NAME, NAME_WORDS, NAMESPACE, NEEDED, OWNER, PROCESS, SINCE, WANTED,
};
use super::name::path_of;
use super::report;
use super::shares::{self, Demand};
use super::words::Words;
use crate::file::{FileState, PATIENCE, SharedFile, SharedFileError, random};
use pinpool_os::sync::process::{AtomicU64, Ordering};

/// Claims that refuse each other are tried so often.
const TRIES: u32 = 8;
/// Longest wait for the lock of a file to move to, while which this owner claims nothing.
const MOVE_PATIENCE: Duration = Duration::from_millis(100);

/// What became of a place, to be logged once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LedgerNews {
    /// Other code of this process has closed the descriptor.
    Closed,
    /// The words of the slot are another owner's.
    Taken,
    /// The file was this, and the owner has moved to another with all that it holds.
    Moved { what: &'static str },
    /// The file was this, and no other can be had.
    NotMoved { what: &'static str, why: String },
}

/// What one get or reserve of an owner wants: changed under the lock of the owner's place alone, so the sum is exact.
#[derive(Debug, Default)]
pub struct Want(AtomicU64);

impl Want {
    pub fn bytes(&self) -> u64 {
        // Relaxed: a figure.
        self.0.load(Ordering::Relaxed)
    }

    /// Returns what it was before. The caller holds the lock of the owner's place.
    pub fn replace(&self, bytes: u64) -> u64 {
        self.0.swap(bytes, Ordering::Relaxed)
    }
}

pub(super) struct Place {
    ledger: String,
    file: Arc<SharedFile>,
    /// Who owns the slot: a number that no other owner has.
    owner: u64,
    name: [u64; NAME_WORDS],
    idle_bytes: u64,
    /// With the sum of all wants.
    demand: Demand,
    is_lost: bool,
    has_failed_to_move: bool,
    news: Option<LedgerNews>,
}

impl Place {
    pub(super) fn take(ledger: &str, pool: &str, max_bytes: u64) -> Result<Self, SharedFileError> {
        let place = Self {
            ledger: ledger.to_owned(),
            file: Arc::new(attach(ledger, max_bytes, PATIENCE)?),
            owner: random(),
            name: report::words_of(pool),
            idle_bytes: 0,
            demand: Demand::default(),
            is_lost: false,
            has_failed_to_move: false,
            news: None,
        };
        place.write_to(&place.file);
        Ok(place)
    }

    pub(super) fn file(&self) -> &Arc<SharedFile> {
        &self.file
    }

    fn words(&self) -> Words<'_> {
        Words(&self.file)
    }

    fn write_to(&self, file: &SharedFile) {
        let words = Words(file);
        let own = words.own();
        let Demand { held_bytes, wanted_bytes, needed_bytes, since: (since, _) } = self.demand;
        let process = u64::from(std::process::id());
        let values = [
            (HELD, held_bytes),
            (WANTED, wanted_bytes),
            (NEEDED, needed_bytes),
            (SINCE, since),
            (IDLE, self.idle_bytes),
            (OWNER, self.owner),
            (PROCESS, process),
            (NAMESPACE, report::namespace()),
        ];
        values.into_iter().for_each(|(word, value)| own[word].store(value, Ordering::SeqCst));
        own[NAME..NAME + NAME_WORDS].iter().zip(self.name).for_each(|(to, word)| to.store(word, Ordering::SeqCst));
        words.use_own();
    }

    fn write(&self, word: usize, value: u64) {
        if !self.is_lost {
            self.words().own()[word].store(value, Ordering::SeqCst);
        }
    }

    /// Whether the slot is this owner's, in a whole file. If the file is not, a thread is woken that looks after it.
    pub(super) fn is_there(&mut self) -> bool {
        let is_there = !self.is_lost && self.check() == Some(FileState::Whole);
        // A thread that could not move tries again by itself.
        if !is_there && !self.is_lost && !self.has_failed_to_move {
            self.words().tell();
        }
        is_there
    }

    /// Looks after the place: moves to the file that has the name, if its own was removed or cut. A slow call then.
    pub(super) fn look(&mut self) {
        if self.is_lost {
            return;
        }
        match self.check() {
            Some(FileState::Removed) => self.move_to_name("removed"),
            Some(FileState::Cut) => self.move_to_name("cut"),
            _ => {}
        }
    }

    /// `None` if the place is lost.
    fn check(&mut self) -> Option<FileState> {
        let news = match self.file.state() {
            FileState::Closed => LedgerNews::Closed,
            FileState::Whole if self.words().own()[OWNER].load(Ordering::SeqCst) != self.owner => LedgerNews::Taken,
            state => return Some(state),
        };
        self.is_lost = true;
        self.news = Some(news);
        self.file.abandon();
        None
    }

    fn move_to_name(&mut self, what: &'static str) {
        if what == "cut" {
            self.file.remove_cut(MOVE_PATIENCE);
        }
        let file = match attach(&self.ledger, self.words().max_bytes(), MOVE_PATIENCE) {
            Ok(file) => Arc::new(file),
            Err(error) => {
                if !std::mem::replace(&mut self.has_failed_to_move, true) {
                    self.news = Some(LedgerNews::NotMoved { what, why: error.to_string() });
                }
                return;
            }
        };
        // Times of the old file mean nothing in this one.
        self.demand.since = (0, file.own_slot());
        // Before the old place is left: until then nobody claims anything in the new file (`claim`).
        self.write_to(&file);
        let old = std::mem::replace(&mut self.file, file);
        old.detach();
        self.has_failed_to_move = false;
        self.news = Some(LedgerNews::Moved { what });
        // Threads sleep on words of the old memory, and claims of the new one have waited for this owner.
        Words(&old).tell();
        self.words().tell();
    }

    pub(super) fn take_news(&mut self) -> Option<LedgerNews> {
        self.news.take()
    }

    pub(super) fn claim(&mut self, bytes: u64) -> bool {
        // A newer file knows nothing of what owners of an older one hold, until they have moved.
        if !self.is_there() || self.file.has_owners_elsewhere() {
            return false;
        }
        let mut tries = 0;
        loop {
            let words = self.words();
            let claim = || claims::claim(&words.own_sums(), words.all_sums(), words.max_bytes(), bytes);
            let outcome = if self.claimable_bytes(bytes) < bytes { Outcome::Full } else { claim() };
            match outcome {
                Outcome::Claimed if !self.is_there() || self.file.has_owners_elsewhere() => {
                    // An owner has moved meanwhile with all that it holds, which the sum may lack.
                    self.write(HELD, self.demand.held_bytes);
                    return false;
                }
                Outcome::Claimed => {
                    self.demand.held_bytes += bytes;
                    return true;
                }
                Outcome::Contended if tries < TRIES => {
                    tries += 1;
                    // Owners that meet again and again would do so in step.
                    for _ in 0..=self.file.own_slot() % 7 {
                        std::thread::yield_now();
                    }
                }
                Outcome::Contended | Outcome::Full if self.words().clear_dead() => {}
                Outcome::Contended | Outcome::Full => return false,
            }
        }
    }

    /// Bytes that this owner may claim, beside what others want.
    fn claimable_bytes(&self, bytes: u64) -> u64 {
        let words = self.words();
        let room_bytes = words.room_bytes();
        if words.others_want_bytes() == 0 {
            return room_bytes;
        }
        shares::claimable_bytes(&self.demand, &words.others(), words.max_bytes(), room_bytes, bytes)
    }

    /// Returns [`claimable_bytes`](Self::claimable_bytes). If these are fewer than `bytes`, takes back the shares of dead
    /// owners first.
    pub(super) fn room_for(&mut self, bytes: u64) -> u64 {
        if !self.is_there() || self.file.has_owners_elsewhere() {
            return 0;
        }
        let claimable_bytes = self.claimable_bytes(bytes);
        if claimable_bytes >= bytes || !self.words().clear_dead() {
            return claimable_bytes;
        }
        self.claimable_bytes(bytes)
    }

    pub(super) fn give_back(&mut self, bytes: u64) {
        self.demand.held_bytes = self.demand.held_bytes.saturating_sub(bytes);
        if self.is_there() {
            self.write(HELD, self.demand.held_bytes);
            // SeqCst: an owner writes what it wants before it looks for room a last time, so one of the two sees the other.
            if self.words().others_want_bytes() > 0 {
                self.words().tell();
            }
        }
    }

    /// Returns what `want` was before.
    pub(super) fn set_want(&mut self, want: &Want, bytes: u64, needed_bytes: u64) -> u64 {
        let before_bytes = want.replace(bytes);
        if before_bytes == bytes {
            return before_bytes;
        }
        let is_there = self.is_there();
        let events = self.words().events().load(Ordering::SeqCst);
        self.demand.change_want(before_bytes, bytes, needed_bytes, (events, self.file.own_slot()));
        if is_there {
            let Demand { wanted_bytes, needed_bytes, since: (since, _), .. } = self.demand;
            // The want last: who sees it sees the rest.
            self.write(SINCE, since);
            self.write(NEEDED, needed_bytes);
            self.write(WANTED, wanted_bytes);
            if bytes > before_bytes {
                self.words().tell();
            }
        }
        before_bytes
    }

    /// What living owners want and the ledger has no room for.
    pub(super) fn others_lack(&mut self) -> u64 {
        if self.words().others_want_bytes() > 0 && self.is_there() {
            self.words().clear_dead();
        }
        self.words().others_lack_bytes()
    }

    /// What a put of this owner is to make room for; 0 if it may keep its buffer.
    pub(super) fn owed_bytes(&self) -> u64 {
        let words = self.words();
        match words.others_lack_bytes() {
            0 => 0,
            lacking_bytes if shares::gives(&self.demand, &words.others(), words.max_bytes()) => lacking_bytes,
            _ => 0,
        }
    }

    pub(super) fn note_idle(&mut self, bytes: u64) {
        self.idle_bytes = bytes;
        self.write(IDLE, bytes);
    }

    /// Leaves the ledger.
    pub(super) fn leave(&mut self) {
        if !self.is_lost && self.check().is_some() {
            self.file.detach();
        }
        // The others have more room, and the own thread ends.
        self.words().tell();
    }
}

fn attach(ledger: &str, max_bytes: u64, patience: Duration) -> Result<SharedFile, SharedFileError> {
    let begin = |common: &[AtomicU64]| common[MAX_BYTES].store(max_bytes, Ordering::SeqCst);
    SharedFile::attach(&path_of(ledger), &LAYOUT, patience, begin).map(|(file, _)| file)
}
