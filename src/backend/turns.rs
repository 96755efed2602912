//! Page-locks of one source, one at a time: the driver makes one at a time too.

use std::time::Instant;

use pinpool_os::sync::{Condvar, Mutex};

#[derive(Debug, Default)]
pub(super) struct Turns {
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct State {
    is_taken: bool,
    last_end: Option<Instant>,
}

/// The right to page-lock, until this is dropped.
#[derive(Debug)]
pub(super) struct Turn<'a> {
    turns: &'a Turns,
    /// When the turn before ended.
    pub(super) last_end: Option<Instant>,
}

impl Turns {
    /// Waits for a turn, at most until `until`; `None` if it is not there then.
    pub(super) fn take(&self, until: Option<Instant>) -> Option<Turn<'_>> {
        let mut state = self.state.lock();
        let mut is_late = false;
        while state.is_taken {
            if is_late {
                return None;
            }
            (state, is_late) = match until {
                Some(until) => self.ended.wait_until(state, until),
                None => (self.ended.wait(state), false),
            };
        }
        state.is_taken = true;
        Some(Turn { turns: self, last_end: state.last_end })
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = self.turns.state.lock();
        *state = State { is_taken: false, last_end: Some(Instant::now()) };
        drop(state);
        self.turns.ended.notify_one();
    }
}

#[cfg(all(test, not(pinpool_loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_turn_is_waited_for_until_a_deadline_and_the_next_knows_when_it_ended() {
        let turns = Turns::default();
        let turn = turns.take(None).unwrap();
        assert_eq!(turn.last_end, None);
        assert!(turns.take(Some(Instant::now())).is_none());
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| turns.take(None).unwrap().last_end.is_some());
            drop(turn);
            assert!(waiting.join().unwrap());
        });
    }
}
