//! What the words of a ledger say together.

use super::claims::{self, Sums};
use super::layout::{CLAIMING, EVENTS, HELD, MAX_BYTES, NEEDED, SINCE, USED, WANTED};
use super::shares::Demand;
use crate::file::{SharedFile, wake_all};
use pinpool_os::sync::process::{AtomicU64, Ordering};

/// The words as the owner of one slot sees them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Words<'a>(pub(super) &'a SharedFile);

impl<'a> Words<'a> {
    pub(super) fn max_bytes(self) -> u64 {
        self.0.common()[MAX_BYTES].load(Ordering::SeqCst)
    }

    pub(super) fn events(self) -> &'a AtomicU64 {
        &self.0.common()[EVENTS]
    }

    /// Wakes the threads of all owners.
    pub(super) fn tell(self) {
        self.events().fetch_add(1, Ordering::SeqCst);
        wake_all(self.events());
    }

    /// Sums are taken over the slots below this.
    pub(super) fn used(self) -> usize {
        usize::try_from(self.0.common()[USED].load(Ordering::SeqCst)).unwrap_or(usize::MAX).min(self.0.slots())
    }

    /// Before the first claim.
    pub(super) fn use_own(self) {
        self.0.common()[USED].fetch_max(self.0.own_slot() as u64 + 1, Ordering::SeqCst);
    }

    pub(super) fn own(self) -> &'a [AtomicU64] {
        self.0.slot(self.0.own_slot())
    }

    pub(super) fn own_sums(self) -> Sums<'a, AtomicU64> {
        self.sums(self.0.own_slot())
    }

    fn sums(self, index: usize) -> Sums<'a, AtomicU64> {
        let slot = self.0.slot(index);
        Sums { held: &slot[HELD], claiming: &slot[CLAIMING] }
    }

    pub(super) fn all_sums(self) -> impl Iterator<Item = Sums<'a, AtomicU64>> {
        (0..self.used()).map(move |index| self.sums(index))
    }

    pub(super) fn room_bytes(self) -> u64 {
        self.max_bytes().saturating_sub(claims::sum(self.all_sums()))
    }

    /// What the others hold and want.
    pub(super) fn others(self) -> Vec<Demand> {
        let others = (0..self.used()).filter(|&index| index != self.0.own_slot());
        others.map(|index| self.demand(index)).filter(|demand| *demand != Demand::default()).collect()
    }

    fn demand(self, index: usize) -> Demand {
        let word = |word: usize| self.0.slot(index)[word].load(Ordering::SeqCst);
        let (held_bytes, wanted_bytes) = (word(HELD), word(WANTED));
        if held_bytes == 0 && wanted_bytes == 0 {
            return Demand::default();
        }
        Demand { held_bytes, wanted_bytes, needed_bytes: word(NEEDED), since: (word(SINCE), index) }
    }

    pub(super) fn others_want_bytes(self) -> u64 {
        let others = (0..self.used()).filter(|&index| index != self.0.own_slot());
        others.map(|index| self.0.slot(index)[WANTED].load(Ordering::SeqCst)).fold(0, u64::saturating_add)
    }

    /// What the others want and the ledger has no room for.
    pub(super) fn others_lack_bytes(self) -> u64 {
        match self.others_want_bytes() {
            0 => 0,
            wanted_bytes => wanted_bytes.saturating_sub(self.room_bytes()),
        }
    }

    /// Takes the shares of dead owners back. Returns whether there were any.
    pub(super) fn clear_dead(self) -> bool {
        let has_words = |index: usize| {
            let slot = self.0.slot(index);
            [HELD, CLAIMING, WANTED].iter().any(|&word| slot[word].load(Ordering::SeqCst) > 0)
        };
        let cleared = (0..self.used()).filter(|&index| has_words(index) && self.0.clear_if_dead(index));
        let has_cleared = cleared.count() > 0;
        if has_cleared && self.others_want_bytes() > 0 {
            self.tell();
        }
        has_cleared
    }
}
