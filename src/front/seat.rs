//! A small number for each living thread: the lowest that is free, given back when the thread ends.
//!
//! The numbers are those of the process, whatever the number of pools, and stay dense, so that a pool used by four
//! threads uses four shards. A seat says where a thread looks first and nothing else: two threads on one seat, or a
//! buffer whose home is the seat of a thread long gone, cost a little time and never a buffer.

use crate::sync::process::{AtomicU64, Ordering};
use std::cell::Cell;

const WORDS: usize = 16;
const SEATS: u32 = 64 * 16;
const NONE: u32 = u32::MAX;

/// A bit for each seat that is taken. Relaxed throughout: the numbers guard nothing.
static TAKEN: [AtomicU64; WORDS] = [const { AtomicU64::new(0) }; WORDS];

thread_local! {
    /// No destructor, so it can be read for as long as the thread runs.
    static SEAT: Cell<u32> = const { Cell::new(NONE) };
    static LEASE: Cell<Option<Lease>> = const { Cell::new(None) };
}

/// Gives the seat back when the thread ends.
struct Lease(u32);

impl Drop for Lease {
    fn drop(&mut self) {
        stand_up(self.0);
    }
}

/// The seat of the calling thread.
#[inline(always)]
pub(super) fn current() -> u32 {
    let seat = SEAT.get();
    if seat == NONE { sit_down() } else { seat }
}

#[cold]
fn sit_down() -> u32 {
    let seat = lowest_free();
    SEAT.set(seat);
    // A thread that is ending already keeps the number for its last moments without owning it.
    if LEASE.try_with(|lease| lease.set(Some(Lease(seat)))).is_err() {
        stand_up(seat);
    }
    seat
}

fn lowest_free() -> u32 {
    for (first, word) in (0u32..).step_by(64).zip(&TAKEN) {
        let mut taken = word.load(Ordering::Relaxed);
        while taken != u64::MAX {
            let bit = taken.trailing_ones();
            match word.compare_exchange_weak(taken, taken | 1 << bit, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return first + bit,
                Err(now) => taken = now,
            }
        }
    }
    // More than a thousand threads: they share numbers anyway, and these need no lease.
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let shared = NEXT.fetch_add(1, Ordering::Relaxed) % u64::from(SEATS);
    SEATS + u32::try_from(shared).unwrap_or(0)
}

fn stand_up(seat: u32) {
    if let Some(word) = TAKEN.get(seat as usize / 64) {
        word.fetch_and(!(1 << (seat % 64)), Ordering::Relaxed);
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
                seat
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
            let seat = std::thread::spawn(current).join().unwrap();
            assert!((seat as usize) < WORDS * 64);
        }
    }
}
