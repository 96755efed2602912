//! The generation of a slot's pool and the phase of its life, in one word.
//!
//! Each change passes the expected generation, and fails if the slot contains another pool by then. So a thread may check a
//! slot, sleep while its pool ends and later pools use the slot, and then try a change, which fails.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Number of bits of the word that contain the phase; the bits above them contain the generation.
const PHASE_BITS: u32 = 3;

/// The phase of a slot's pool; the module `slots` has a diagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub(crate) enum Phase {
    Free,
    Opening,
    Open,
    Destroyed,
    Ending,
    Ended,
}

/// The generation of a slot's pool (the first pool has 1) and its phase.
#[derive(Debug, Default)]
pub(crate) struct SlotState(AtomicUsize);

impl SlotState {
    #[inline]
    pub(crate) fn is_in(&self, generation: usize, phase: Phase) -> bool {
        self.0.load(Ordering::SeqCst) == word(generation, phase)
    }

    #[inline]
    pub(crate) fn generation(&self) -> usize {
        self.0.load(Ordering::SeqCst) >> PHASE_BITS
    }

    /// Returns the generation of the slot if it is in this phase.
    #[inline]
    pub(crate) fn generation_in(&self, phase: Phase) -> Option<usize> {
        let generation = self.generation();
        self.is_in(generation, phase).then_some(generation)
    }

    /// Changes Free to Opening with the next generation and returns that generation. Returns `None` if the slot is not free.
    pub(crate) fn claim(&self) -> Option<usize> {
        let generation = self.generation();
        let (free, opening) = (word(generation, Phase::Free), word(generation + 1, Phase::Opening));
        self.0.compare_exchange(free, opening, Ordering::SeqCst, Ordering::SeqCst).ok().map(|_| generation + 1)
    }

    /// Changes the phase from `from` to `to`. Returns whether the slot had this generation and was in `from`; otherwise nothing
    /// changes.
    pub(crate) fn change(&self, generation: usize, from: Phase, to: Phase) -> bool {
        let (from, to) = (word(generation, from), word(generation, to));
        self.0.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }
}

#[inline]
fn word(generation: usize, phase: Phase) -> usize {
    generation << PHASE_BITS | phase as usize
}
