//! Keeps a pool's copies and releases that wait for copies apart.
//!
//! ```text
//!   copies aboard > 0       no release begins
//!   a release is running    no copy begins: it waits at the gate
//! ```
//!
//! `cuMemFreeHost` and `cuMemHostUnregister` wait for all work of the device, and hold up every other thread's enqueues
//! meanwhile. With the gate they find no copy of this pool. Other people's work may still be waited for; what that costs
//! shows in [`Underlying::time`](crate::Underlying::time).
//!
//! A copy is aboard from before it is enqueued until its buffer was seen to be free again: longer than it runs, never
//! shorter. One whose end nobody knows is aboard for ever, and from then on nothing is released that would wait for it.
//!
//! Invariants, held by the models below in every interleaving:
//!
//! 1. `state` is the number of copies aboard, and a bit that is set while the gate is closed. Whoever finds that bit does
//!    not count itself, so a number is a copy.
//! 2. Whoever gets a [`Closed`] saw no copy aboard, and none boards until it is dropped; and what the copies did comes
//!    before what it does, and that before the copies that come next.
//! 3. Whoever waits for the opening hears it.

use std::time::{Duration, Instant};

use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Condvar, Mutex};

const CLOSED: u64 = 1 << 63;
/// Who drains looks so often for copies that are over.
const LOOK_EVERY: Duration = Duration::from_micros(50);

/// One for all pools that share a source's memory.
#[derive(Debug)]
pub(super) struct Gate {
    /// Where no release waits for copies nobody counts them, and the gate is never in the way.
    is_needed: bool,
    state: AtomicU64,
    /// A copy aboard will never be seen to end.
    is_blocked: AtomicBool,
    waiting: Mutex<()>,
    opened: Condvar,
}

/// No copy begins while this lives.
#[derive(Debug)]
#[must_use = "the gate opens when this is dropped"]
pub(super) struct Closed<'gate>(&'gate Gate);

impl Gate {
    pub(super) fn new(is_needed: bool) -> Self {
        Self {
            is_needed,
            state: AtomicU64::new(0),
            is_blocked: AtomicBool::new(false),
            waiting: Mutex::new(()),
            opened: Condvar::default(),
        }
    }

    /// A copy is about to be enqueued. Waits while a release is running.
    #[inline]
    pub(super) fn begin_copy(&self) {
        if !self.is_needed {
            return;
        }
        // Relaxed, here and on failure: a guess, for the exchange to test.
        let mut state = self.state.load(Ordering::Relaxed);
        loop {
            if state & CLOSED != 0 {
                state = self.opening();
                continue;
            }
            // Acquire, with the Release of the opening: what the release did comes before the copy.
            match self.state.compare_exchange_weak(state, state + 1, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => state = now,
            }
        }
    }

    /// Waits until the gate is open. The state that it was seen in then, which may be another by now.
    #[cold]
    fn opening(&self) -> u64 {
        let mut waiting = self.waiting.lock();
        loop {
            // Relaxed: the opening takes the lock after it changed the state, so that either this sees it or the wait
            // hears it.
            let state = self.state.load(Ordering::Relaxed);
            if state & CLOSED == 0 {
                return state;
            }
            waiting = self.opened.wait(waiting);
        }
    }

    /// So many copies are over, and their buffers free.
    pub(super) fn end_copies(&self, copies: u64) {
        if self.is_needed {
            // ReleasePolicy, with the Acquire of the closing: the copies come before the release.
            self.state.fetch_sub(copies, Ordering::Release);
        }
    }

    /// Nobody will ever know when a copy aboard is over: who would wait for it need not.
    pub(super) fn block(&self) {
        // Relaxed: spares a wait in vain, and guards nothing.
        self.is_blocked.store(true, Ordering::Relaxed);
    }

    /// Is no copy aboard, and no release running?
    pub(super) fn is_at_rest(&self) -> bool {
        // Relaxed: a hint; who acts on it closes the gate.
        self.state.load(Ordering::Relaxed) == 0
    }

    /// Closes the gate if no copy is aboard. `None` also while another release is running.
    pub(super) fn close(&self) -> Option<Closed<'_>> {
        if !self.is_needed {
            return Some(Closed(self));
        }
        // Acquire: see `end_copies`. Relaxed where nothing was gained.
        let closing = self.state.compare_exchange(0, CLOSED, Ordering::Acquire, Ordering::Relaxed);
        // Made only now: the drop of one that was not closed would open the gate for others.
        closing.is_ok().then(|| Closed(self))
    }

    /// The same after the release that is running, if one is. `None` if a copy is aboard.
    pub(super) fn close_in_turn(&self) -> Option<Closed<'_>> {
        loop {
            if let Some(closed) = self.close() {
                return Some(closed);
            }
            if self.opening() != 0 {
                return None;
            }
        }
    }

    /// Lets no copy board and waits until those aboard are over, which `look` finds out, and for its turn among releases;
    /// at most for `patience`.
    pub(super) fn drain(&self, patience: Duration, look: impl Fn()) -> Option<Closed<'_>> {
        let begun = Instant::now();
        self.drain_while(look, || {
            let is_patient = begun.elapsed() < patience;
            if is_patient {
                std::thread::sleep(LOOK_EVERY);
            }
            is_patient
        })
    }

    fn drain_while(&self, look: impl Fn(), pause: impl Fn() -> bool) -> Option<Closed<'_>> {
        if !self.is_needed {
            return Some(Closed(self));
        }
        let mut closed = None;
        loop {
            look();
            // Relaxed: the load below orders. Set already, it is another release's.
            if closed.is_none() && self.state.fetch_or(CLOSED, Ordering::Relaxed) & CLOSED == 0 {
                closed = Some(Closed(self));
            }
            // Acquire: see `end_copies`.
            if closed.is_some() && self.state.load(Ordering::Acquire) == CLOSED {
                return closed;
            }
            // Relaxed: as in `block`.
            if self.is_blocked.load(Ordering::Relaxed) || !pause() {
                return None;
            }
        }
    }
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        if self.0.is_needed {
            // Release: see `begin_copy`.
            self.0.state.fetch_and(!CLOSED, Ordering::Release);
            // Taken and let go: whoever saw the gate closed is asleep by now, and hears it.
            drop(self.0.waiting.lock());
            self.0.opened.notify_all();
        }
    }
}

#[cfg(all(test, loom))]
mod models;

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::thread;

    use super::*;

    #[test]
    fn no_release_begins_with_a_copy_aboard_and_none_boards_while_it_runs() {
        let gate = Gate::new(true);
        gate.begin_copy();
        gate.begin_copy();
        assert!(gate.close().is_none() && !gate.is_at_rest());
        gate.end_copies(2);
        let closed = gate.close().expect("nothing is aboard");
        assert!(gate.close().is_none(), "one release at a time");
        assert_eq!(gate.state.load(Ordering::SeqCst), CLOSED, "and the gate stays closed");
        let (has_come, has_boarded) = (AtomicBool::new(false), AtomicBool::new(false));
        thread::scope(|scope| {
            scope.spawn(|| {
                has_come.store(true, Ordering::SeqCst);
                gate.begin_copy();
                has_boarded.store(true, Ordering::SeqCst);
            });
            while !has_come.load(Ordering::SeqCst) {
                thread::yield_now();
            }
            // As many chances as it likes.
            (0..if cfg!(miri) { 20 } else { 1000 }).for_each(|_| thread::yield_now());
            assert!(gate.close().is_none() && !has_boarded.load(Ordering::SeqCst));
            drop(closed);
        });
        assert!(gate.close().is_none(), "the copy is aboard");
        gate.end_copies(1);
        assert!(gate.is_at_rest());
    }

    #[test]
    fn a_drain_waits_for_the_copies_aboard_or_gives_up_and_opens() {
        let gate = Gate::new(true);
        gate.begin_copy();
        assert!(gate.drain(Duration::ZERO, || ()).is_none());
        assert_eq!(gate.state.load(Ordering::SeqCst), 1, "open again");
        let closed =
            gate.drain(Duration::MAX, || gate.end_copies(u64::from(gate.state.load(Ordering::SeqCst) != CLOSED)));
        assert!(closed.is_some());
    }

    #[test]
    fn a_drain_waits_for_no_copy_whose_end_nobody_will_know() {
        let gate = Gate::new(true);
        gate.begin_copy();
        gate.block();
        assert!(gate.drain(Duration::MAX, || ()).is_none());
        assert_eq!(gate.state.load(Ordering::SeqCst), 1, "open again");
    }

    #[test]
    fn where_no_release_waits_the_gate_is_never_in_the_way() {
        let gate = Gate::new(false);
        gate.begin_copy();
        let both = (gate.close(), gate.close());
        assert!(both.0.is_some() && both.1.is_some());
    }

    #[test]
    fn copies_and_releases_of_many_threads_never_meet() {
        const ROUNDS: u32 = if cfg!(miri) { 20 } else { 2000 };
        let gate = Gate::new(true);
        let (copies, releases) = (AtomicU64::new(0), AtomicU64::new(0));
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..ROUNDS {
                        gate.begin_copy();
                        copies.fetch_add(1, Ordering::SeqCst);
                        assert_eq!(releases.load(Ordering::SeqCst), 0);
                        copies.fetch_sub(1, Ordering::SeqCst);
                        gate.end_copies(1);
                    }
                });
                scope.spawn(|| {
                    for _ in 0..ROUNDS {
                        if let Some(_closed) = gate.close() {
                            releases.fetch_add(1, Ordering::SeqCst);
                            assert_eq!(copies.load(Ordering::SeqCst), 0);
                            releases.fetch_sub(1, Ordering::SeqCst);
                        }
                    }
                });
            }
        });
        assert!(gate.is_at_rest());
    }
}
