//! The lock that all enqueues share, as unfair as it was measured to be.
//!
//! ```text
//!   A, in a loop   ██████ ██████ ██████ ██████ · ·       held long, released, wanted again at once: A has it again
//!   B              ·····wait··················████       gets in at the first pause of at least WAKE_UP
//! ```
//!
//! A thread that waited long sleeps, and one that comes back at once is faster than it wakes up: measured, a loop of
//! page-locking and freeing 64 MiB kept another thread's copy waiting for 0.9 to 6 s, and pauses of 50 us ended that. Locks
//! that were held for a moment go to the next thread at once.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::sync::lock;

/// Threads that wait longer than this sleep.
const LONG: Duration = Duration::from_micros(100);
/// A sleeping thread gets the lock so long after its release.
const WAKE_UP: Duration = Duration::from_micros(30);

/// A thread, for as long as it runs.
type ThreadMark = usize;

thread_local! {
    /// Its address is the mark of its thread. Without a destructor, so that it can be asked for at the end of a thread.
    static MARK: u8 = const { 0 };
}

/// Who holds the lock, and who may take it next.
#[derive(Debug)]
struct Turns {
    /// The holder, and since when.
    held: Option<(ThreadMark, Instant)>,
    last: ThreadMark,
    /// When threads other than the last holder may take it.
    others_from: Option<Instant>,
    waiting: u64,
}

static TURNS: Mutex<Turns> = Mutex::new(Turns { held: None, last: 0, others_from: None, waiting: 0 });
static RELEASED: Condvar = Condvar::new();

#[derive(Debug, PartialEq, Eq)]
enum Answer {
    Taken,
    /// Until it is released.
    Wait,
    /// It is free, but this thread has not woken up yet.
    WaitUntil(Instant),
}

impl Turns {
    fn take(&mut self, thread: ThreadMark, now: Instant) -> Answer {
        if self.held.is_some() {
            return Answer::Wait;
        }
        match self.others_from {
            Some(from) if thread != self.last && now < from => Answer::WaitUntil(from),
            _ => {
                (self.held, self.last) = (Some((thread, now)), thread);
                Answer::Taken
            }
        }
    }

    fn release(&mut self, now: Instant) {
        let held_for = self.held.take().map_or(Duration::ZERO, |(_, since)| now.saturating_duration_since(since));
        self.others_from = (held_for > LONG && self.waiting > 0).then(|| now + WAKE_UP);
    }
}

/// The lock, held until this is dropped.
#[must_use = "the lock is released when this is dropped"]
pub(crate) struct Turn(());

/// Takes the lock.
pub(crate) fn take() -> Turn {
    let thread = MARK.with(|mark| std::ptr::from_ref(mark).addr());
    let mut turns = lock(&TURNS);
    loop {
        turns.waiting += 1;
        turns = match turns.take(thread, Instant::now()) {
            Answer::Taken => {
                turns.waiting -= 1;
                return Turn(());
            }
            Answer::Wait => RELEASED.wait(turns).unwrap_or_else(PoisonError::into_inner),
            Answer::WaitUntil(from) => {
                let left = from.saturating_duration_since(Instant::now());
                RELEASED.wait_timeout(turns, left).unwrap_or_else(PoisonError::into_inner).0
            }
        };
        turns.waiting -= 1;
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut turns = lock(&TURNS);
        turns.release(Instant::now());
        if turns.waiting > 0 {
            RELEASED.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: Duration = Duration::from_micros(1);

    fn turns() -> Turns {
        Turns { held: None, last: 0, others_from: None, waiting: 0 }
    }

    #[test]
    fn a_thread_that_held_it_long_and_returns_at_once_overtakes_those_that_wait() {
        let (mut turns, mut now) = (turns(), Instant::now());
        turns.waiting = 1;
        for _ in 0..100 {
            assert_eq!(turns.take(1, now), Answer::Taken);
            assert_eq!(turns.take(2, now), Answer::Wait);
            now += 1_000 * US;
            turns.release(now);
            assert_eq!(turns.take(2, now + 5 * US), Answer::WaitUntil(now + WAKE_UP));
            now += 10 * US;
        }
        // A pause lets the other in.
        now += 50 * US;
        assert_eq!(turns.take(2, now), Answer::Taken);
    }

    #[test]
    fn a_lock_that_was_held_for_a_moment_or_that_nobody_waits_for_is_free_at_once() {
        for (held_for, waiting) in [(US, 1), (1_000 * US, 0)] {
            let (mut turns, now) = (turns(), Instant::now());
            turns.waiting = waiting;
            assert_eq!(turns.take(1, now), Answer::Taken);
            turns.release(now + held_for);
            assert_eq!(turns.take(2, now + held_for), Answer::Taken);
        }
    }
}
