//! Pin calls of one source, one at a time: the driver serves only one at a time.

use std::time::Instant;

use pinpool_os::sync::{Condvar, Mutex};

#[derive(Debug, Default)]
pub(super) struct PinPermits {
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct State {
    is_taken: bool,
    last_end: Option<Instant>,
}

/// Permits one thread to pin, until this is dropped.
#[derive(Debug)]
pub(super) struct PinPermit<'a> {
    permits: &'a PinPermits,
    /// When the permit before ended.
    pub(super) last_end: Option<Instant>,
}

impl PinPermits {
    /// Waits for the permit, at most until `until`; `None` if that has passed.
    pub(super) fn take(&self, until: Option<Instant>) -> Option<PinPermit<'_>> {
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
        Some(PinPermit { permits: self, last_end: state.last_end })
    }
}

impl Drop for PinPermit<'_> {
    fn drop(&mut self) {
        let mut state = self.permits.state.lock();
        *state = State { is_taken: false, last_end: Some(Instant::now()) };
        drop(state);
        self.permits.ended.notify_one();
    }
}

#[cfg(all(test, not(pinpool_loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_permit_is_waited_for_until_a_deadline_and_the_next_knows_when_it_ended() {
        let permits = PinPermits::default();
        let permit = permits.take(None).unwrap();
        assert_eq!(permit.last_end, None);
        assert!(permits.take(Some(Instant::now())).is_none());
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| permits.take(None).unwrap().last_end.is_some());
            drop(permit);
            assert!(waiting.join().unwrap());
        });
    }
}
