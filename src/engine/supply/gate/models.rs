//! Every interleaving of copies and releases at the gate.
//!
//! Copies read a cell and releases write to it, and loom watches that cell: it reports two that overlap, and as well two
//! that only look as if they came one after the other, because an ordering is too weak. Who is never woken is reported as
//! a deadlock. Each model says whether its interesting case came, so that none passes because it never did.

use super::*;
use crate::sync::UnsafeCell;
use crate::sync::atomic::AtomicBool;
use loom::sync::Arc;
use loom::thread;
use loom::thread::JoinHandle;
use std::sync::atomic::AtomicUsize;

/// A gate, and what it guards.
struct Harbour {
    gate: Gate,
    memory: UnsafeCell<u32>,
}

impl Harbour {
    fn new() -> Arc<Self> {
        Arc::new(Self { gate: Gate::new(true), memory: UnsafeCell::new(0) })
    }

    fn copy(&self) {
        self.gate.begin_copy();
        self.read();
        self.gate.end_copies(1);
    }

    fn read(&self) {
        self.memory.with(|_| ());
    }

    /// Says whether it was one.
    fn release(&self, closed: Option<Closed<'_>>) -> bool {
        closed.as_ref().inspect(|_| self.memory.with_mut(|_| ())).is_some()
    }

    /// Lets others run until no copy is aboard.
    fn drain(&self, look: impl Fn()) {
        let pause = || {
            thread::yield_now();
            true
        };
        assert!(self.release(self.gate.drain_while(look, pause)));
    }
}

fn beside<R: 'static>(harbour: &Arc<Harbour>, act: impl FnOnce(&Harbour) -> R + 'static) -> JoinHandle<R> {
    let harbour = harbour.clone();
    thread::spawn(move || act(&harbour))
}

/// Runs all of them. The answers of `check` must differ.
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
fn loom_copies_and_a_release_never_meet() {
    model(|| {
        let harbour = Harbour::new();
        let copies = [0, 1].map(|_| beside(&harbour, Harbour::copy));
        let released = harbour.release(harbour.gate.close());
        copies.into_iter().for_each(|copy| copy.join().unwrap());
        assert!(harbour.gate.is_at_rest());
        released
    });
}

#[test]
fn loom_two_releases_and_a_copy_never_meet() {
    model(|| {
        let harbour = Harbour::new();
        let copy = beside(&harbour, Harbour::copy);
        let other = beside(&harbour, |harbour| harbour.release(harbour.gate.close()));
        let released = harbour.release(harbour.gate.close());
        copy.join().unwrap();
        let other_released = other.join().unwrap();
        assert!(harbour.release(harbour.gate.close()), "each has opened again what it closed");
        released && other_released
    });
}

#[test]
fn loom_copies_that_found_it_closed_get_on_although_it_closes_again() {
    model(|| {
        let harbour = Harbour::new();
        let closed = harbour.gate.close();
        let copies = [0, 1].map(|_| beside(&harbour, Harbour::copy));
        assert!(harbour.release(closed));
        let again = harbour.release(harbour.gate.close());
        copies.into_iter().for_each(|copy| copy.join().unwrap());
        again
    });
}

#[test]
fn loom_releases_in_turn_and_a_copy_all_come_to_an_end() {
    model(|| {
        let harbour = Harbour::new();
        let closed = harbour.gate.close();
        let other = beside(&harbour, |harbour| harbour.release(harbour.gate.close_in_turn()));
        let copy = beside(&harbour, Harbour::copy);
        assert!(harbour.release(closed));
        let released = harbour.release(harbour.gate.close_in_turn());
        copy.join().unwrap();
        let other_released = other.join().unwrap();
        assert!(harbour.gate.is_at_rest());
        released && other_released
    });
}

#[test]
fn loom_a_release_in_turn_gives_up_for_no_other_release() {
    model(|| {
        let harbour = Harbour::new();
        let closed = harbour.gate.close();
        let other = beside(&harbour, |harbour| {
            let must_wait = !harbour.gate.is_at_rest();
            assert!(harbour.release(harbour.gate.close_in_turn()));
            must_wait
        });
        assert!(harbour.release(closed));
        assert!(harbour.release(harbour.gate.close_in_turn()));
        other.join().unwrap()
    });
}

#[test]
fn loom_a_release_in_turn_gives_up_for_a_copy_and_not_for_one_that_waits() {
    model(|| {
        let harbour = Harbour::new();
        let closed = harbour.gate.close();
        let copy = beside(&harbour, |harbour| harbour.gate.begin_copy());
        assert!(harbour.release(closed));
        let released = harbour.release(harbour.gate.close_in_turn());
        // The copy never ends: who was told of it would be told so again.
        assert!(released || harbour.gate.close().is_none());
        copy.join().unwrap();
        assert!(harbour.gate.close().is_none());
        released
    });
}

#[test]
fn loom_a_drain_ends_with_the_copies_aboard_and_lets_the_next_on() {
    model(|| {
        let harbour = Harbour::new();
        harbour.gate.begin_copy();
        let aboard = beside(&harbour, |harbour| {
            harbour.read();
            harbour.gate.end_copies(1);
        });
        let next = beside(&harbour, Harbour::copy);
        let was_aboard = !harbour.gate.is_at_rest();
        harbour.drain(|| ());
        aboard.join().unwrap();
        next.join().unwrap();
        assert!(harbour.gate.is_at_rest());
        was_aboard
    });
}

#[test]
fn loom_a_drain_finds_out_itself_that_copies_are_over() {
    model(|| {
        let harbour = Harbour::new();
        harbour.gate.begin_copy();
        let is_over = Arc::new(AtomicBool::new(false));
        let (over, seen) = (is_over.clone(), is_over);
        let device = beside(&harbour, move |harbour| {
            harbour.read();
            over.store(true, Ordering::Release);
        });
        let looks = std::cell::Cell::new(0);
        // The look that sees it is the last: what it takes off is all that was aboard.
        harbour.drain(|| {
            looks.set(looks.get() + 1);
            if seen.load(Ordering::Acquire) {
                harbour.gate.end_copies(1);
            }
        });
        device.join().unwrap();
        looks.get() > 1
    });
}

#[test]
fn loom_a_drain_that_loses_patience_opens_for_those_who_wait() {
    model(|| {
        let harbour = Harbour::new();
        harbour.gate.begin_copy();
        let leaving = beside(&harbour, |harbour| harbour.gate.end_copies(1));
        let next = beside(&harbour, Harbour::copy);
        let drained = harbour.release(harbour.gate.drain_while(|| (), || false));
        leaving.join().unwrap();
        next.join().unwrap();
        assert!(harbour.gate.is_at_rest());
        drained
    });
}

#[test]
fn loom_a_drain_waits_for_the_release_that_runs() {
    model(|| {
        let harbour = Harbour::new();
        let other = beside(&harbour, |harbour| harbour.release(harbour.gate.close()));
        let next = beside(&harbour, Harbour::copy);
        harbour.drain(|| ());
        next.join().unwrap();
        let other_released = other.join().unwrap();
        assert!(harbour.release(harbour.gate.close()));
        other_released
    });
}
