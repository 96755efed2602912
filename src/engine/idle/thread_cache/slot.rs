//! A small number for each living thread: the lowest that is free, given back when the thread ends.
//!
//! The numbers are those of the process, whatever the number of pools, and stay dense, so that a pool used by four
//! threads uses four shards. A thread finds its own shard by its seat, and the lock there leans towards it.
//!
//! - (seat I1) No two threads have one leased number at the same time; one that takes it over has seen what the last one
//!   did. Numbers from [`LEASED`] up are shared by threads that got none, and are nobody's own.

use crate::sync::process::{AtomicU64, Ordering};
use std::cell::Cell;
use std::marker::PhantomData;

const WORDS: usize = 16;
const LEASED: u32 = 64 * 16;
const NONE: u32 = u32::MAX;

/// A bit for each number that is leased.
static TAKEN: [AtomicU64; WORDS] = [const { AtomicU64::new(0) }; WORDS];

thread_local! {
    /// No destructor, so it can be read for as long as the thread runs.
    static NUMBER: Cell<u32> = const { Cell::new(NONE) };
    static LEASE: Cell<Option<Lease>> = const { Cell::new(None) };
}

/// The calling thread's number; cannot leave the thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ThreadSlot {
    number: u32,
    here: PhantomData<*const ()>,
}

impl ThreadSlot {
    #[inline(always)]
    pub(super) fn number(self) -> u32 {
        self.number
    }

    /// Whether the shard of this number is the calling thread's and no other's.
    #[inline(always)]
    pub(super) fn owns(self, shard: usize) -> bool {
        self.number as usize == shard && self.number < LEASED
    }

    /// Another seat, for tests and models.
    ///
    /// # Safety
    ///
    /// (seat I1) is the caller's affair: no two threads have it at the same time.
    #[cfg(test)]
    #[allow(unsafe_code)] // Declares a contract, does nothing.
    pub(super) unsafe fn pretend(number: u32) -> Self {
        Self { number, here: PhantomData }
    }
}

/// Gives the number back when the thread ends.
struct Lease(u32);

impl Drop for Lease {
    fn drop(&mut self) {
        // What the thread still does, in destructors that come later, it does as one of many.
        NUMBER.set(LEASED + self.0);
        stand_up(self.0);
    }
}

/// The seat of the calling thread.
#[inline(always)]
pub(super) fn current() -> ThreadSlot {
    // The threads of a model are one thread to the system: nothing is their own but what the model hands out.
    #[cfg(loom)]
    NUMBER.set(LEASED);
    let number = NUMBER.get();
    ThreadSlot { number: if number == NONE { sit_down() } else { number }, here: PhantomData }
}

#[cold]
fn sit_down() -> u32 {
    let Some(number) = lowest_free() else {
        // More than a thousand threads. Any shared number will do.
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let next = NEXT.fetch_add(1, Ordering::Relaxed) % u64::from(LEASED);
        let shared = LEASED + u32::try_from(next).unwrap_or(0);
        NUMBER.set(shared);
        return shared;
    };
    NUMBER.set(number);
    // A thread that is ending already cannot keep a lease; `Lease` is dropped right here then, and changes the number.
    let _ = LEASE.try_with(|lease| lease.set(Some(Lease(number))));
    NUMBER.get()
}

fn lowest_free() -> Option<u32> {
    for (first, word) in (0u32..).step_by(64).zip(&TAKEN) {
        // Relaxed: a guess that the exchange confirms.
        let mut taken = word.load(Ordering::Relaxed);
        while taken != u64::MAX {
            let bit = taken.trailing_ones();
            // Acquire: sees what the last thread on this seat did. Relaxed on failure: another guess.
            match word.compare_exchange_weak(taken, taken | 1 << bit, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Some(first + bit),
                Err(now) => taken = now,
            }
        }
    }
    None
}

fn stand_up(number: u32) {
    if let Some(word) = TAKEN.get(number as usize / 64) {
        // Release: what this thread did is there for the next on the seat.
        word.fetch_and(!(1 << (number % 64)), Ordering::Release);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::Barrier;

    #[test]
    fn living_threads_have_seats_of_their_own_and_leave_them() {
        let all_seated = Barrier::new(4);
        let mut seats: Vec<u32> = std::thread::scope(|scope| {
            let sit = || {
                let seat = current();
                all_seated.wait();
                assert_eq!(current(), seat);
                seat.number()
            };
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(sit)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        seats.sort_unstable();
        seats.dedup();
        assert_eq!(seats.len(), 4);
        // Other tests come and go meanwhile, but a thousand threads in turn can only fit if seats are given back.
        let in_turn = if cfg!(miri) { 20 } else { 1100 };
        for _ in 0..in_turn {
            let leased = std::thread::spawn(|| current().number() < LEASED).join().unwrap();
            assert!(leased);
        }
    }

    #[test]
    fn a_thread_that_is_ending_has_no_seat_of_its_own() {
        struct Late(std::sync::mpsc::Sender<bool>);
        impl Drop for Late {
            fn drop(&mut self) {
                let seat = current();
                self.0.send(seat.owns(seat.number() as usize)).unwrap();
            }
        }
        thread_local! {
            static EARLY: Cell<Option<Late>> = const { Cell::new(None) };
            static LATE: Cell<Option<Late>> = const { Cell::new(None) };
        }
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            EARLY.set(Some(Late(sender.clone())));
            let seat = current();
            assert!(seat.owns(seat.number() as usize));
            LATE.set(Some(Late(sender)));
        });
        // In whatever order destructors run, one of the two comes after the lease's.
        assert!(receiver.iter().any(|owned| !owned));
    }
}
