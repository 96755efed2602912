//! Keeps a pool's copies and the releases that wait for copies apart.
//!
//! ```text
//!   pending copies > 0      no release begins
//!   a release is running    no copy begins: it waits at the gate
//! ```
//!
//! `cuMemFreeHost` and `cuMemHostUnregister` wait for all work of the device, and block every other thread's enqueues
//! meanwhile. With the gate they find no copy of this pool. They may still wait for work of other code; the time that
//! costs is in [`Stats::unpin`](crate::Stats::unpin).
//!
//! A copy is pending from before it is enqueued until its fence was seen to be over: longer than it runs, never shorter.
//! Its buffer may be in use meanwhile, so a thread that keeps a buffer does not wait for itself. A copy whose fence fails
//! stays pending, and its fence is asked again; until it answers, no release that waits for copies is made. The end of a
//! copy without a fence is never known, and from then on there is no such release.
//!
//! Invariants, which the models check in every interleaving:
//!
//! - gate-I1: `state` is the number of pending copies, plus the bit CLOSED while the gate is closed. Threads that see
//!   CLOSED do not increment, so the low bits count copies exactly.
//! - gate-I2: a [`ClosedGate`] exists only after a state without pending copies, and no copy begins until it is dropped.
//!   The effects of the copies happen before what its holder does, and that happens before the next copies.
//! - gate-I3: every thread that waits for the gate to open is woken.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::diag::PoolLog;
use crate::in_flight::{Fences, InFlight, LostItem, SharedFence};
use pinpool_os::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use pinpool_os::sync::{Condvar, Mutex};

const CLOSED: u64 = 1 << 63;
/// Copies are looked through for those that are over each time so many have begun, so that their fences do not add up.
const SWEEP_EACH: u64 = 64;
/// Pause of a drain between two sweeps for completed copies.
const SWEEP_EVERY: Duration = Duration::from_micros(50);

/// One for all pools that share a source's memory.
#[derive(Debug)]
pub(in crate::engine) struct Gate {
    /// False where no release waits for copies: then no copy is counted, and the gate is always open.
    is_needed: bool,
    state: AtomicU64,
    /// The fences of the pending copies.
    running: InFlight<()>,
    /// A pending copy has no fence, or one that is not asked again: it will never be seen to end.
    has_leak: AtomicBool,
    log: Arc<PoolLog>,
    waiting: Mutex<()>,
    opened: Condvar,
}

/// A copy that is pending. If this is dropped, nothing was enqueued.
#[derive(Debug)]
pub(crate) struct BegunCopy<'gate>(&'gate Gate);

/// No copy begins while this exists.
#[derive(Debug)]
#[must_use = "the gate opens when this is dropped"]
pub(in crate::engine) struct ClosedGate<'gate>(&'gate Gate);

impl Gate {
    pub(in crate::engine) fn new(is_needed: bool, log: Arc<PoolLog>) -> Self {
        Self {
            is_needed,
            state: AtomicU64::new(0),
            running: InFlight::new(),
            has_leak: AtomicBool::new(false),
            log,
            waiting: Mutex::new(()),
            opened: Condvar::default(),
        }
    }

    /// Call before a copy is enqueued. Waits while a release is running. `None` where no copy is counted.
    #[inline]
    pub(in crate::engine) fn begin_copy(&self) -> Option<BegunCopy<'_>> {
        self.is_needed.then(|| {
            self.count_copy();
            BegunCopy(self)
        })
    }

    fn count_copy(&self) {
        // Relaxed, here and on failure: a guess, which the exchange checks.
        let mut state = self.state.load(Ordering::Relaxed);
        loop {
            if state & CLOSED != 0 {
                state = self.wait_until_open(None).unwrap_or(CLOSED);
                continue;
            }
            // Acquire, with the Release that opens the gate: the release happens before the copy (gate-I2).
            match self.state.compare_exchange_weak(state, state + 1, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => state = now,
            }
        }
    }

    /// Returns an open state of the gate, which may have changed since; `None` if the gate is still closed at `until`.
    #[cold]
    fn wait_until_open(&self, until: Option<Instant>) -> Option<u64> {
        let mut waiting = self.waiting.lock();
        loop {
            // Relaxed: the thread that opens takes the lock after it changes the state, so either this load sees the
            // change or the wait is woken (gate-I3).
            let state = self.state.load(Ordering::Relaxed);
            if state & CLOSED == 0 {
                return Some(state);
            }
            let timed_out;
            (waiting, timed_out) = match until {
                Some(until) => self.opened.wait_until(waiting, until),
                None => (self.opened.wait(waiting), false),
            };
            if timed_out {
                return None;
            }
        }
    }

    /// Looks for copies that are over. Queries fences.
    pub(in crate::engine) fn complete_copies(&self) {
        if self.running.count() == 0 {
            return;
        }
        let swept = self.running.sweep();
        self.end_copies(swept.completed.len() as u64);
        for LostItem { error, fences, .. } in swept.lost {
            // One failed device ends no copy of many.
            if (self.unanswered() + 1).is_power_of_two() {
                self.log.gate_waits_for_an_answer(&error, fences.is_some());
            }
            match fences {
                Some(fences) => self.running.suspend((), fences),
                None => self.note_leak(),
            }
        }
    }

    /// Asks the fences that failed again, at most so many.
    pub(in crate::engine) fn ask_again(&self, most: usize) {
        let over = self.running.ask_again(most);
        if !over.is_empty() {
            self.end_copies(over.len() as u64);
        }
    }

    /// Pending copies whose fences failed and are asked again.
    pub(in crate::engine) fn unanswered(&self) -> u64 {
        self.running.unanswered()
    }

    /// That many copies are over.
    fn end_copies(&self, copies: u64) {
        // Release, with the Acquire that closes the gate: the copies happen before the release (gate-I2).
        self.state.fetch_sub(copies, Ordering::Release);
    }

    /// The end of a pending copy will never be known, so waiting for it is useless.
    pub(in crate::engine) fn note_leak(&self) {
        // Relaxed: saves a useless wait, and guards nothing.
        self.has_leak.store(true, Ordering::Relaxed);
    }

    /// Whether it is useless to wait for the pending copies now.
    pub(in crate::engine) fn has_leak(&self) -> bool {
        // Relaxed: see `note_leak`.
        self.has_leak.load(Ordering::Relaxed) || self.unanswered() > 0
    }

    /// Whether no copy is pending and no release is running.
    pub(in crate::engine) fn is_at_rest(&self) -> bool {
        // Relaxed: a hint; a thread that acts on it closes the gate.
        self.state.load(Ordering::Relaxed) == 0
    }

    /// Closes the gate if no copy is pending. `None` also while another release is running.
    pub(in crate::engine) fn close(&self) -> Option<ClosedGate<'_>> {
        if !self.is_needed {
            return Some(ClosedGate(self));
        }
        // Acquire: see `end_copies`. Relaxed on failure, which gains nothing.
        let closing = self.state.compare_exchange(0, CLOSED, Ordering::Acquire, Ordering::Relaxed);
        // Made only on success: dropping one opens the gate.
        closing.is_ok().then(|| ClosedGate(self))
    }

    /// Closes the gate after the release that is running, if any. `None` if a copy is pending.
    pub(in crate::engine) fn close_in_turn(&self) -> Option<ClosedGate<'_>> {
        self.close_in_turn_until(None)
    }

    /// Closes the gate as [`close_in_turn`](Self::close_in_turn) does; `None` also if a release still runs at `until`.
    pub(in crate::engine) fn close_in_turn_until(&self, until: Option<Instant>) -> Option<ClosedGate<'_>> {
        loop {
            self.complete_copies();
            if let Some(closed) = self.close() {
                return Some(closed);
            }
            if self.wait_until_open(until) != Some(0) {
                return None;
            }
        }
    }

    /// Lets no copy begin, and waits for running releases and for the pending copies; at most for `patience`. `sweep` puts
    /// back the buffers whose copies are over.
    pub(in crate::engine) fn drain(&self, patience: Duration, sweep: impl Fn()) -> Option<ClosedGate<'_>> {
        let begun = Instant::now();
        let sweep = || {
            sweep();
            self.complete_copies();
        };
        self.drain_while(sweep, || {
            let is_patient = begun.elapsed() < patience;
            if is_patient {
                std::thread::sleep(SWEEP_EVERY);
            }
            is_patient
        })
    }

    fn drain_while(&self, sweep: impl Fn(), pause: impl Fn() -> bool) -> Option<ClosedGate<'_>> {
        if !self.is_needed {
            return Some(ClosedGate(self));
        }
        let mut closed = None;
        loop {
            sweep();
            // Relaxed: the load below orders. A bit that is set already belongs to another release.
            if closed.is_none() && self.state.fetch_or(CLOSED, Ordering::Relaxed) & CLOSED == 0 {
                closed = Some(ClosedGate(self));
            }
            // Acquire: see `end_copies`.
            if closed.is_some() && self.state.load(Ordering::Acquire) == CLOSED {
                return closed;
            }
            if self.has_leak() || !pause() {
                return None;
            }
        }
    }
}

impl BegunCopy<'_> {
    /// The copy is enqueued, or is about to be, and ends with `fence`.
    pub(crate) fn ends_with(self, fence: SharedFence) {
        let gate = std::mem::ManuallyDrop::new(self).0;
        // The time is of no interest: the buffer's own record has it.
        gate.running.insert((), 0, Fences::from_buf([fence]), 0);
        if gate.running.count().is_multiple_of(SWEEP_EACH) {
            gate.complete_copies();
        }
    }

    /// The copy may be running, and its end will never be known.
    pub(crate) fn never_ends(self) {
        std::mem::ManuallyDrop::new(self).0.note_leak();
    }
}

impl Drop for BegunCopy<'_> {
    fn drop(&mut self) {
        self.0.end_copies(1);
    }
}

impl Drop for ClosedGate<'_> {
    fn drop(&mut self) {
        if self.0.is_needed {
            // Release: see `begin_copy`.
            self.0.state.fetch_and(!CLOSED, Ordering::Release);
            // Locked and unlocked: every thread that saw the gate closed is waiting now, and is woken (gate-I3).
            drop(self.0.waiting.lock());
            self.0.opened.notify_all();
        }
    }
}

#[cfg(all(test, pinpool_loom))]
mod models;

#[cfg(all(test, not(pinpool_loom)))]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    use std::thread;

    use super::*;
    use crate::in_flight::ScriptedFence;

    fn gate() -> Gate {
        Gate::new(true, Arc::new(PoolLog::silent()))
    }

    #[test]
    fn no_release_begins_while_a_copy_is_pending_and_no_copy_while_a_release_runs() {
        let gate = gate();
        gate.count_copy();
        gate.count_copy();
        assert!(gate.close().is_none() && !gate.is_at_rest());
        gate.end_copies(2);
        let closed = gate.close().expect("no copy is pending");
        assert!(gate.close().is_none(), "one release at a time");
        assert_eq!(gate.state.load(Ordering::SeqCst), CLOSED, "and the gate stays closed");
        let (is_waiting, has_begun) = (AtomicBool::new(false), AtomicBool::new(false));
        thread::scope(|scope| {
            scope.spawn(|| {
                is_waiting.store(true, Ordering::SeqCst);
                gate.count_copy();
                has_begun.store(true, Ordering::SeqCst);
            });
            while !is_waiting.load(Ordering::SeqCst) {
                thread::yield_now();
            }
            // Many chances to pass the gate.
            (0..if cfg!(miri) { 20 } else { 1000 }).for_each(|_| thread::yield_now());
            assert!(gate.close().is_none() && !has_begun.load(Ordering::SeqCst));
            drop(closed);
        });
        assert!(gate.close().is_none(), "the copy is pending");
        gate.end_copies(1);
        assert!(gate.is_at_rest());
    }

    #[test]
    fn a_drain_waits_for_the_pending_copies_or_times_out_and_opens_the_gate() {
        let gate = gate();
        gate.count_copy();
        assert!(gate.drain(Duration::ZERO, || ()).is_none());
        assert_eq!(gate.state.load(Ordering::SeqCst), 1, "open again");
        let end_if_pending = || gate.end_copies(u64::from(gate.state.load(Ordering::SeqCst) != CLOSED));
        assert!(gate.drain(Duration::MAX, end_if_pending).is_some());
    }

    #[test]
    fn a_drain_does_not_wait_for_a_leaked_copy() {
        let gate = gate();
        gate.count_copy();
        gate.note_leak();
        assert!(gate.drain(Duration::MAX, || ()).is_none());
        assert_eq!(gate.state.load(Ordering::SeqCst), 1, "open again");
    }

    #[test]
    fn a_copy_is_pending_until_its_fence_is_over_or_it_was_not_enqueued() {
        let gate = gate();
        drop(gate.begin_copy());
        assert!(gate.is_at_rest(), "it was refused");
        let fence = Arc::new(ScriptedFence::on(1));
        gate.begin_copy().unwrap().ends_with(fence.clone());
        gate.complete_copies();
        assert!(gate.close_in_turn().is_none());
        fence.finish();
        assert!(gate.close_in_turn().is_some());
        gate.begin_copy().unwrap().never_ends();
        gate.complete_copies();
        assert!(gate.drain(Duration::MAX, || ()).is_none(), "nothing to wait for");
        assert!(gate.close().is_none());
    }

    #[test]
    fn a_copy_whose_fence_failed_ends_when_the_fence_answers_again() {
        let gate = gate();
        let fence = Arc::new(ScriptedFence::on(1));
        gate.begin_copy().unwrap().ends_with(fence.clone());
        fence.fail();
        gate.complete_copies();
        assert!(gate.drain(Duration::MAX, || ()).is_none(), "nothing to wait for");
        gate.ask_again(1);
        assert_eq!((gate.unanswered(), gate.close().is_some()), (1, false));
        fence.finish();
        gate.complete_copies();
        assert!(gate.close().is_none(), "it is asked by those who ask again alone");
        gate.ask_again(1);
        assert_eq!((gate.unanswered(), gate.close().is_some()), (0, true));
    }

    #[test]
    fn the_fences_of_copies_that_are_over_do_not_add_up() {
        let gate = gate();
        for _ in 0..if cfg!(miri) { 2 } else { 10 } * SWEEP_EACH {
            let fence = Arc::new(ScriptedFence::on(1));
            fence.finish();
            gate.begin_copy().unwrap().ends_with(fence);
        }
        assert!(gate.running.count() < SWEEP_EACH);
    }

    #[test]
    fn a_gate_that_is_not_needed_is_always_open() {
        let gate = Gate::new(false, Arc::new(PoolLog::silent()));
        assert!(gate.begin_copy().is_none());
        let both = (gate.close(), gate.close());
        assert!(both.0.is_some() && both.1.is_some());
    }

    #[test]
    fn copies_and_releases_of_many_threads_never_overlap() {
        const ROUNDS: u32 = if cfg!(miri) { 20 } else { 2000 };
        let gate = gate();
        let (copies, releases) = (AtomicU64::new(0), AtomicU64::new(0));
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..ROUNDS {
                        gate.count_copy();
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
