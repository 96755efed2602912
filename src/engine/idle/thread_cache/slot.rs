//! Thread slots: each living thread leases the lowest free number and returns it when it ends.
//!
//! The numbers belong to the process, not to a pool, and stay dense: a pool used by four threads uses four shards. A
//! thread's slot selects its own shard, and that shard's lock is biased to it. Compare `Tid` of sharded-slab.
//!
//! - **slot-I1**: No two living threads lease one number. A thread that leases it next has seen what the previous one
//!   did. Numbers from [`LEASED_MAX`] up are shared by threads that got no lease, and own no shard.

use crate::sync::process::{AtomicU64, Ordering};
use std::cell::Cell;
use std::marker::PhantomData;

const WORDS: usize = 16;
const LEASED_MAX: u32 = 64 * 16;
const UNSET: u32 = u32::MAX;

/// A bit for each number that is leased.
static LEASED: [AtomicU64; WORDS] = [const { AtomicU64::new(0) }; WORDS];

thread_local! {
    /// No destructor, so it can be read until the thread ends.
    static NUMBER: Cell<u32> = const { Cell::new(UNSET) };
    static LEASE: Cell<Option<Lease>> = const { Cell::new(None) };
}

/// The calling thread's number; cannot leave the thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ThreadSlot {
    number: u32,
    not_send: PhantomData<*const ()>,
}

impl ThreadSlot {
    #[inline(always)]
    pub(super) fn number(self) -> u32 {
        self.number
    }

    /// Whether the shard of this number belongs to the calling thread alone.
    #[inline(always)]
    pub(super) fn owns(self, shard: usize) -> bool {
        self.number as usize == shard && self.number < LEASED_MAX
    }

    /// A slot of any number, for tests and models.
    ///
    /// # Safety
    ///
    /// The caller ensures that no two threads use `number` at the same time (slot-I1).
    #[cfg(test)]
    #[allow(unsafe_code)] // Declares a contract, does nothing.
    pub(super) unsafe fn fake(number: u32) -> Self {
        Self { number, not_send: PhantomData }
    }
}

/// Returns the number when the thread ends.
struct Lease(u32);

impl Drop for Lease {
    fn drop(&mut self) {
        // Destructors that run later in this thread use a shared number.
        NUMBER.set(LEASED_MAX + self.0);
        if let Some(word) = LEASED.get(self.0 as usize / 64) {
            // Release: the next thread with this number sees what this one did (slot-I1).
            word.fetch_and(!(1 << (self.0 % 64)), Ordering::Release);
        }
    }
}

/// The slot of the calling thread.
#[inline(always)]
pub(super) fn current() -> ThreadSlot {
    // All threads of a model run on one system thread: its thread-locals are no thread's own.
    #[cfg(loom)]
    NUMBER.set(LEASED_MAX);
    let number = NUMBER.get();
    ThreadSlot { number: if number == UNSET { lease() } else { number }, not_send: PhantomData }
}

#[cold]
fn lease() -> u32 {
    let Some(number) = claim_lowest() else {
        // More than a thousand threads: any shared number will do.
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let next = NEXT.fetch_add(1, Ordering::Relaxed) % u64::from(LEASED_MAX);
        let shared = LEASED_MAX + u32::try_from(next).unwrap_or(0);
        NUMBER.set(shared);
        return shared;
    };
    NUMBER.set(number);
    // In a thread that is ending, `Lease` is dropped at once and replaces the number.
    let _ = LEASE.try_with(|lease| lease.set(Some(Lease(number))));
    NUMBER.get()
}

fn claim_lowest() -> Option<u32> {
    for (first, word) in (0u32..).step_by(64).zip(&LEASED) {
        // Relaxed: a guess that the exchange confirms.
        let mut leased = word.load(Ordering::Relaxed);
        while leased != u64::MAX {
            let bit = leased.trailing_ones();
            // Acquire: sees what the previous thread of this number did. Relaxed on failure: another guess.
            match word.compare_exchange_weak(leased, leased | 1 << bit, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Some(first + bit),
                Err(now) => leased = now,
            }
        }
    }
    None
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::Barrier;

    #[test]
    fn living_threads_have_distinct_slots_and_return_them() {
        let all_leased = Barrier::new(4);
        let mut slots: Vec<u32> = std::thread::scope(|scope| {
            let lease = || {
                let slot = current();
                all_leased.wait();
                assert_eq!(current(), slot);
                slot.number()
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
            let leased = std::thread::spawn(|| current().number() < LEASED_MAX).join().unwrap();
            assert!(leased);
        }
    }

    #[test]
    fn a_thread_that_is_ending_owns_no_slot() {
        struct Late(std::sync::mpsc::Sender<bool>);
        impl Drop for Late {
            fn drop(&mut self) {
                let slot = current();
                self.0.send(slot.owns(slot.number() as usize)).unwrap();
            }
        }
        thread_local! {
            static EARLY: Cell<Option<Late>> = const { Cell::new(None) };
            static LATE: Cell<Option<Late>> = const { Cell::new(None) };
        }
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            EARLY.set(Some(Late(sender.clone())));
            let slot = current();
            assert!(slot.owns(slot.number() as usize));
            LATE.set(Some(Late(sender)));
        });
        // In whatever order destructors run, one of the two comes after the lease's.
        assert!(receiver.iter().any(|owned| !owned));
    }
}
