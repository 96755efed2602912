//! Every interleaving of copies and releases at the gate.
//!
//! Copies read a cell and releases write to it. loom reports two accesses that overlap, and also two that are not ordered
//! because an ordering is too weak. A thread that is never woken is reported as a deadlock. Each model returns whether
//! its interesting case occurred, so that none passes because that case never happens.

use super::*;
use crate::in_flight::models::Copied;
use loom::sync::Arc;
use loom::thread;
use loom::thread::JoinHandle;
use pinpool_os::sync::UnsafeCell;
use pinpool_os::sync::atomic::AtomicBool;
use std::sync::atomic::AtomicUsize;

/// A gate, and the memory that it guards.
struct Guarded {
    gate: Gate,
    memory: UnsafeCell<u32>,
}

impl Guarded {
    fn new() -> Arc<Self> {
        Arc::new(Self { gate: Gate::new(true, std::sync::Arc::new(PoolLog::silent())), memory: UnsafeCell::new(0) })
    }

    fn copy(&self) {
        self.gate.count_copy();
        self.read();
        self.gate.end_copies(1);
    }

    fn read(&self) {
        self.memory.with(|_| ());
    }

    /// Releases if the gate is closed; returns whether it is.
    fn release(&self, closed: Option<ClosedGate<'_>>) -> bool {
        closed.as_ref().inspect(|_| self.memory.with_mut(|_| ())).is_some()
    }

    /// Lets other threads run until no copy is pending.
    fn drain(&self, sweep: impl Fn()) {
        let pause = || {
            thread::yield_now();
            true
        };
        assert!(self.release(self.gate.drain_while(sweep, pause)));
    }
}

fn spawn<R: 'static>(guarded: &Arc<Guarded>, act: impl FnOnce(&Guarded) -> R + 'static) -> JoinHandle<R> {
    let guarded = guarded.clone();
    thread::spawn(move || act(&guarded))
}

/// Runs all interleavings of `check`, which must return both answers.
fn model(check: impl Fn() -> bool + Sync + Send + 'static) {
    let answers = std::sync::Arc::new([const { AtomicUsize::new(0) }; 2]);
    let counted = answers.clone();
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        counted[usize::from(check())].fetch_add(1, Ordering::Relaxed);
    });
    let [no, yes] = [0, 1].map(|answer: usize| answers[answer].load(Ordering::Relaxed));
    assert!(no > 0 && yes > 0, "the answer was {no} times no, {yes} times yes");
}

#[test]
fn loom_copies_and_a_release_never_overlap() {
    model(|| {
        let guarded = Guarded::new();
        let copies = [0, 1].map(|_| spawn(&guarded, Guarded::copy));
        let released = guarded.release(guarded.gate.close());
        copies.into_iter().for_each(|copy| copy.join().unwrap());
        assert!(guarded.gate.is_at_rest());
        released
    });
}

#[test]
fn loom_two_releases_and_a_copy_never_overlap() {
    model(|| {
        let guarded = Guarded::new();
        let copy = spawn(&guarded, Guarded::copy);
        let other = spawn(&guarded, |guarded| guarded.release(guarded.gate.close()));
        let released = guarded.release(guarded.gate.close());
        copy.join().unwrap();
        let other_released = other.join().unwrap();
        assert!(guarded.release(guarded.gate.close()), "each has opened again what it closed");
        released && other_released
    });
}

#[test]
fn loom_copies_that_found_the_gate_closed_go_on_although_it_closes_again() {
    model(|| {
        let guarded = Guarded::new();
        let closed = guarded.gate.close();
        let copies = [0, 1].map(|_| spawn(&guarded, Guarded::copy));
        assert!(guarded.release(closed));
        let again = guarded.release(guarded.gate.close());
        copies.into_iter().for_each(|copy| copy.join().unwrap());
        again
    });
}

#[test]
fn loom_releases_in_turn_and_a_copy_all_end() {
    model(|| {
        let guarded = Guarded::new();
        let closed = guarded.gate.close();
        let other = spawn(&guarded, |guarded| guarded.release(guarded.gate.close_in_turn()));
        let copy = spawn(&guarded, Guarded::copy);
        assert!(guarded.release(closed));
        let released = guarded.release(guarded.gate.close_in_turn());
        copy.join().unwrap();
        let other_released = other.join().unwrap();
        assert!(guarded.gate.is_at_rest());
        released && other_released
    });
}

#[test]
fn loom_a_release_in_turn_waits_for_another_release() {
    model(|| {
        let guarded = Guarded::new();
        let closed = guarded.gate.close();
        let other = spawn(&guarded, |guarded| {
            let must_wait = !guarded.gate.is_at_rest();
            assert!(guarded.release(guarded.gate.close_in_turn()));
            must_wait
        });
        assert!(guarded.release(closed));
        assert!(guarded.release(guarded.gate.close_in_turn()));
        other.join().unwrap()
    });
}

#[test]
fn loom_a_release_in_turn_gives_way_to_a_pending_copy_and_not_to_a_waiting_one() {
    model(|| {
        let guarded = Guarded::new();
        let closed = guarded.gate.close();
        let copy = spawn(&guarded, |guarded| guarded.gate.count_copy());
        assert!(guarded.release(closed));
        let released = guarded.release(guarded.gate.close_in_turn());
        // The copy never ends, so a close that failed fails again.
        assert!(released || guarded.gate.close().is_none());
        copy.join().unwrap();
        assert!(guarded.gate.close().is_none());
        released
    });
}

#[test]
fn loom_a_drain_ends_with_the_pending_copies_and_lets_the_next_begin() {
    model(|| {
        let guarded = Guarded::new();
        guarded.gate.count_copy();
        let pending = spawn(&guarded, |guarded| {
            guarded.read();
            guarded.gate.end_copies(1);
        });
        let next = spawn(&guarded, Guarded::copy);
        let was_pending = !guarded.gate.is_at_rest();
        guarded.drain(|| ());
        pending.join().unwrap();
        next.join().unwrap();
        assert!(guarded.gate.is_at_rest());
        was_pending
    });
}

#[test]
fn loom_a_drain_sweeps_for_copies_that_are_over() {
    model(|| {
        let guarded = Guarded::new();
        guarded.gate.count_copy();
        let is_over = Arc::new(AtomicBool::new(false));
        let (over, seen) = (is_over.clone(), is_over);
        let device = spawn(&guarded, move |guarded| {
            guarded.read();
            over.store(true, Ordering::Release);
        });
        let sweeps = std::cell::Cell::new(0);
        // The sweep that sees it is the last, because it ends the only pending copy.
        guarded.drain(|| {
            sweeps.set(sweeps.get() + 1);
            if seen.load(Ordering::Acquire) {
                guarded.gate.end_copies(1);
            }
        });
        device.join().unwrap();
        sweeps.get() > 1
    });
}

#[test]
fn loom_a_drain_that_times_out_opens_the_gate_for_waiting_copies() {
    model(|| {
        let guarded = Guarded::new();
        guarded.gate.count_copy();
        let ending = spawn(&guarded, |guarded| guarded.gate.end_copies(1));
        let next = spawn(&guarded, Guarded::copy);
        let drained = guarded.release(guarded.gate.drain_while(|| (), || false));
        ending.join().unwrap();
        next.join().unwrap();
        assert!(guarded.gate.is_at_rest());
        drained
    });
}

#[test]
fn loom_a_drain_waits_for_the_release_that_runs() {
    model(|| {
        let guarded = Guarded::new();
        let other = spawn(&guarded, |guarded| guarded.release(guarded.gate.close()));
        let next = spawn(&guarded, Guarded::copy);
        guarded.drain(|| ());
        next.join().unwrap();
        let other_released = other.join().unwrap();
        assert!(guarded.release(guarded.gate.close()));
        other_released
    });
}

/// A copy whose fence the gate keeps: begun, enqueued, and read by the device until its fence is over.
fn copy_until_fence(gate: &Gate, copied: &std::sync::Arc<Copied>) {
    gate.begin_copy().unwrap().ends_with(copied.clone());
    copied.finish();
}

/// Fails if a copy ends when it is enqueued, or when its fence is dropped.
#[test]
fn loom_a_release_comes_after_the_fence_of_a_copy() {
    model(|| {
        let (guarded, copied) = (Guarded::new(), Copied::new());
        let same = copied.clone();
        let copy = spawn(&guarded, move |guarded| copy_until_fence(&guarded.gate, &same));
        let released = guarded.gate.close_in_turn().inspect(|_| copied.reuse()).is_some();
        copy.join().unwrap();
        assert!(guarded.gate.close_in_turn().inspect(|_| copied.reuse()).is_some(), "the fence is over");
        released
    });
}

/// Fails if `end_copies` is Relaxed: then the release is not ordered after the copy that another thread saw end.
#[test]
fn loom_a_release_comes_after_a_copy_that_another_thread_saw_end() {
    model(|| {
        let (guarded, copied) = (Guarded::new(), Copied::new());
        guarded.gate.begin_copy().unwrap().ends_with(copied.clone());
        let same = copied.clone();
        let device = thread::spawn(move || same.finish());
        let sweeping = spawn(&guarded, |guarded| guarded.gate.complete_copies());
        let released = guarded.gate.close().inspect(|_| copied.reuse()).is_some();
        device.join().unwrap();
        sweeping.join().unwrap();
        guarded.gate.complete_copies();
        assert!(guarded.gate.is_at_rest());
        released
    });
}

/// Two threads look for copies that are over at once. Fails if one copy can be counted as ended twice.
#[test]
fn loom_a_copy_ends_once_at_the_gate() {
    model(|| {
        let (guarded, copied) = (Guarded::new(), Copied::new());
        guarded.gate.begin_copy().unwrap().ends_with(copied.clone());
        let sweeping = spawn(&guarded, |guarded| guarded.gate.complete_copies());
        copied.finish();
        let released = guarded.gate.close_in_turn().inspect(|_| copied.reuse()).is_some();
        sweeping.join().unwrap();
        guarded.gate.complete_copies();
        assert!(guarded.gate.is_at_rest());
        released
    });
}
