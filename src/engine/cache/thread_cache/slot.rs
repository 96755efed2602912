//! Thread slots: each living thread leases the lowest free number and returns it when it ends.
//!
//! The numbers belong to the process, not to a pool, and stay dense: a pool used by four threads uses four shards. A
//! thread's slot selects its own shard. Two threads with one number share a shard and are as correct, only slower, so
//! threads without a lease share the numbers from [`LEASED_MAX`] up. Compare `Tid` of sharded-slab.

use pinpool_os::sync::process::{AtomicU64, Ordering};
use std::cell::Cell;

const WORDS: usize = 16;
const LEASED_MAX: u16 = 64 * 16;
const UNSET: u16 = u16::MAX;

/// A bit for each number that is leased.
static LEASED: [AtomicU64; WORDS] = [const { AtomicU64::new(0) }; WORDS];

thread_local! {
    /// No destructor, so it can be read until the thread ends.
    static NUMBER: Cell<u16> = const { Cell::new(UNSET) };
    static LEASE: Cell<Option<Lease>> = const { Cell::new(None) };
}

/// Returns the number when the thread ends.
struct Lease(u16);

impl Drop for Lease {
    fn drop(&mut self) {
        // Destructors that run later in this thread use a shared number.
        NUMBER.set(LEASED_MAX + self.0);
        if let Some(word) = LEASED.get(usize::from(self.0) / 64) {
            // Relaxed, here and below: numbers select shards and guard nothing.
            word.fetch_and(!(1 << (self.0 % 64)), Ordering::Relaxed);
        }
    }
}

/// The slot of the calling thread.
#[inline]
pub(super) fn current() -> u16 {
    let number = NUMBER.get();
    if number == UNSET { lease() } else { number }
}

/// In a child of `fork`: of the parent's threads only this one exists.
pub(super) fn keep_own_lease_only() {
    let own = NUMBER.get();
    for (first, word) in (0u16..).step_by(64).zip(&LEASED) {
        let is_own = own.checked_sub(first).filter(|&bit| own < LEASED_MAX && bit < 64);
        word.store(is_own.map_or(0, |bit| 1 << bit), Ordering::Relaxed);
    }
}

#[cold]
fn lease() -> u16 {
    let Some(number) = claim_lowest() else {
        // More than a thousand threads: any shared number will do.
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let next = NEXT.fetch_add(1, Ordering::Relaxed) % u64::from(LEASED_MAX);
        let shared = LEASED_MAX + u16::try_from(next).unwrap_or(0);
        NUMBER.set(shared);
        return shared;
    };
    NUMBER.set(number);
    // A thread cannot keep the lease once its thread-locals are destroyed: then `Lease` is dropped at once, or not at all if
    // the closure does not run, and the number is returned here.
    if LEASE.try_with(|lease| lease.set(Some(Lease(number)))).is_err() {
        drop(Lease(number));
    }
    NUMBER.get()
}

fn claim_lowest() -> Option<u16> {
    for (first, word) in (0u16..).step_by(64).zip(&LEASED) {
        let mut leased = word.load(Ordering::Relaxed);
        while leased != u64::MAX {
            let bit = leased.trailing_ones();
            match word.compare_exchange_weak(leased, leased | 1 << bit, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Some(first + u16::try_from(bit).unwrap_or(0)),
                Err(now) => leased = now,
            }
        }
    }
    None
}

#[cfg(all(test, not(pinpool_loom)))]
mod tests {
    use super::*;
    use std::sync::Barrier;

    #[test]
    fn living_threads_have_distinct_slots_and_return_them() {
        let all_leased = Barrier::new(4);
        let mut slots: Vec<u16> = std::thread::scope(|scope| {
            let lease = || {
                let slot = current();
                all_leased.wait();
                assert_eq!(current(), slot);
                slot
            };
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(lease)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        slots.sort_unstable();
        slots.dedup();
        assert_eq!(slots.len(), 4);
        // Other tests lease slots meanwhile, but a thousand threads in turn fit only if slots are returned.
        let in_turn = if cfg!(miri) { 20 } else { 1100 };
        for _ in 0..in_turn {
            assert!(std::thread::spawn(|| current() < LEASED_MAX).join().unwrap());
        }
    }

    #[test]
    fn a_thread_that_is_ending_shares_a_slot() {
        struct Late(std::sync::mpsc::Sender<bool>);
        impl Drop for Late {
            fn drop(&mut self) {
                self.0.send(current() < LEASED_MAX).unwrap();
            }
        }
        thread_local! {
            static EARLY: Cell<Option<Late>> = const { Cell::new(None) };
            static LATE: Cell<Option<Late>> = const { Cell::new(None) };
        }
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            EARLY.set(Some(Late(sender.clone())));
            assert!(current() < LEASED_MAX);
            LATE.set(Some(Late(sender)));
        });
        // In whatever order destructors run, one of the two comes after the lease's.
        assert!(receiver.iter().any(|leased| !leased));
    }
}
