//! The state of one shared buffer: a word that processes change by compare-and-exchange.
//!
//! ```text
//!   free ──take──▶ filling ──send──▶ sent ──receive──▶ received ──release──▶ free
//!    ▲                │ dropped, or its worker died                            │
//!    └────────────────┴─────────────────────────────────────────────────────────┘
//! ```
//!
//! The word contains the state, the slot of the worker that fills or has sent the buffer, and a generation that increases with
//! each take. Each step compares the whole word, so only one of two concurrent processes succeeds, and a ticket of an earlier use
//! never matches. A process that dies between two steps leaves a valid state.
//!
//! - **state-I1**: a word is changed only by the compare-and-exchange of [`StateWord::change`], so a buffer has one user at a
//!   time: the worker that set it to `Filling`, then the trainer that set it to `Received`.

use pinpool_os::sync::atomic::{AtomicU64, Ordering};

const STATE_BITS: u32 = 3;
const SLOT_BITS: u32 = 16;
/// The largest generation. After it, which takes years, generations restart at 1.
const GENERATION_MAX: u64 = (1 << (64 - STATE_BITS - SLOT_BITS)) - 1;

/// The use of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Usage {
    Free,
    /// The worker in this slot is filling the buffer.
    Filling(u16),
    /// The worker in this slot has sent the buffer, and the trainer has not received it.
    Sent(u16),
    /// The trainer has received the buffer and has not released it.
    Received,
}

/// The contents of a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BufferState {
    pub(super) usage: Usage,
    pub(super) generation: u64,
}

impl BufferState {
    fn pack(self) -> u64 {
        let (state, slot) = match self.usage {
            Usage::Free => (0, 0),
            Usage::Filling(slot) => (1, slot),
            Usage::Sent(slot) => (2, slot),
            Usage::Received => (3, 0),
        };
        (self.generation & GENERATION_MAX) << (STATE_BITS + SLOT_BITS) | u64::from(slot) << STATE_BITS | state
    }

    /// Returns the state that `word` contains; `None` for an invalid word.
    fn unpack(word: u64) -> Option<Self> {
        let slot = u16::try_from(word >> STATE_BITS & ((1 << SLOT_BITS) - 1)).ok()?;
        let usage = match word & ((1 << STATE_BITS) - 1) {
            0 => Usage::Free,
            1 => Usage::Filling(slot),
            2 => Usage::Sent(slot),
            3 => Usage::Received,
            _ => return None,
        };
        Some(Self { usage, generation: word >> (STATE_BITS + SLOT_BITS) })
    }

    fn with(self, usage: Usage) -> Self {
        Self { usage, ..self }
    }

    /// Returns the first state of the next use, in which the worker in `slot` fills the buffer.
    pub(super) fn taken_by(self, slot: u16) -> Self {
        let generation = if self.generation >= GENERATION_MAX { 1 } else { self.generation + 1 };
        Self { usage: Usage::Filling(slot), generation }
    }
}

/// The word in shared memory: 0 in a new file, which is free with generation 0.
#[derive(Debug)]
#[repr(transparent)]
pub(super) struct StateWord(AtomicU64);

impl StateWord {
    #[cfg(test)]
    pub(super) fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Returns the current state; `None` if the word is damaged.
    pub(super) fn read(&self) -> Option<BufferState> {
        // Acquire: pairs with the Release of the process that set this state.
        BufferState::unpack(self.0.load(Ordering::Acquire))
    }

    /// Changes the state `from`, which was read before, to `to`. Returns whether it did: if another process was faster, nothing
    /// changes.
    pub(super) fn change(&self, from: BufferState, to: BufferState) -> bool {
        // SeqCst, for two reasons. A process that reads the new state must see the bytes that were written before it. And a
        // waiting process announces itself and then checks this word, while a process that changes the word then checks for
        // waiting processes, so at least one of them must see the other's store.
        self.0.compare_exchange(from.pack(), to.pack(), Ordering::SeqCst, Ordering::Relaxed).is_ok()
    }

    /// Takes the buffer for the worker in `slot`; `None` if the buffer is not free, or another worker was faster.
    pub(super) fn take(&self, slot: u16) -> Option<BufferState> {
        let free = self.read().filter(|state| state.usage == Usage::Free)?;
        let taken = free.taken_by(slot);
        self.change(free, taken).then_some(taken)
    }

    /// Changes the use: `Filling` to `Sent`, `Sent` to `Received`, or any use to `Free`. Returns whether it did, as
    /// [`change`](Self::change) does.
    pub(super) fn step(&self, from: BufferState, usage: Usage) -> bool {
        self.change(from, from.with(usage))
    }

    /// Frees the buffer if the dead worker in `slot` was filling it, and returns whether it did. The caller has read `seen`
    /// before it detected the worker's death, or has itself locked the slot and taken no buffer. So if a later worker in the slot
    /// has taken the buffer, it has increased the generation, and nothing changes.
    pub(super) fn recover(&self, seen: BufferState, slot: u16) -> bool {
        seen.usage == Usage::Filling(slot) && self.step(seen, Usage::Free)
    }
}

#[cfg(all(test, not(pinpool_loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_word_holds_state_slot_and_generation() {
        for usage in [Usage::Free, Usage::Received, Usage::Filling(0), Usage::Filling(u16::MAX), Usage::Sent(7)] {
            for generation in [0, 1, GENERATION_MAX] {
                let state = BufferState { usage, generation };
                assert_eq!(BufferState::unpack(state.pack()), Some(state));
            }
        }
        assert_eq!(BufferState::unpack(0), Some(BufferState { usage: Usage::Free, generation: 0 }));
        assert_eq!(BufferState::unpack(7), None);
    }

    #[test]
    fn a_buffer_has_one_user_at_a_time_and_no_earlier_use_comes_back() {
        let word = StateWord::new();
        let filling = word.take(3).unwrap();
        assert_eq!(word.take(4), None);
        assert!(word.step(filling, Usage::Sent(3)) && !word.step(filling, Usage::Sent(3)));
        let sent = word.read().unwrap();
        assert!(word.step(sent, Usage::Received) && !word.step(sent, Usage::Received), "received once");
        assert!(word.step(word.read().unwrap(), Usage::Free));
        let again = word.take(3).unwrap();
        assert_eq!(again.generation, filling.generation + 1);
        assert!(!word.step(filling, Usage::Free) && !word.step(sent, Usage::Received), "states of an earlier use");
        assert_eq!(BufferState { usage: Usage::Free, generation: GENERATION_MAX }.taken_by(1).generation, 1);
    }

    #[test]
    fn what_a_dead_worker_was_filling_is_freed_once_and_nothing_else() {
        let word = StateWord::new();
        let dead = word.take(3).unwrap();
        assert!(!word.recover(dead, 4), "a worker in another slot");
        assert!(word.recover(dead, 3) && !word.recover(dead, 3));
        let alive = word.take(3).unwrap();
        assert!(!word.recover(dead, 3), "the slot has a worker again");
        assert!(word.step(alive, Usage::Sent(3)));
        assert!(!word.recover(word.read().unwrap(), 3), "a sent buffer is not freed");
    }
}

/// loom tries every order of the steps of several processes.
#[cfg(all(test, pinpool_loom))]
mod models {
    use loom::sync::Arc;

    use super::*;

    #[test]
    fn two_workers_never_fill_one_buffer() {
        loom::model(|| {
            let word = Arc::new(StateWord::new());
            let other = word.clone();
            let taken = loom::thread::spawn(move || other.take(1));
            let own = word.take(2);
            assert_eq!(usize::from(own.is_some()) + usize::from(taken.join().unwrap().is_some()), 1);
        });
    }

    #[test]
    fn a_send_and_the_recovery_of_its_worker_never_both_succeed() {
        loom::model(|| {
            let word = Arc::new(StateWord::new());
            let filling = word.take(1).unwrap();
            let other = word.clone();
            let recovered = loom::thread::spawn(move || other.recover(filling, 1));
            let is_sent = word.step(filling, Usage::Sent(1));
            assert_ne!(is_sent, recovered.join().unwrap());
            assert_eq!(word.read().unwrap().usage, if is_sent { Usage::Sent(1) } else { Usage::Free });
        });
    }

    #[test]
    fn a_late_recovery_does_not_take_the_buffer_of_the_next_worker() {
        loom::model(|| {
            let word = Arc::new(StateWord::new());
            let seen = word.take(1).unwrap();
            let other = word.clone();
            let late = loom::thread::spawn(move || other.recover(seen, 1));
            // The next worker in the slot recovers the buffer, then takes it.
            let own = word.read().map(|seen| word.recover(seen, 1)).unwrap_or(false);
            let taken = word.take(1);
            let late = late.join().unwrap();
            assert!(own != late, "freed once");
            if let Some(taken) = taken {
                assert_eq!(word.read(), Some(taken));
            }
        });
    }
}
