//! The claim of bytes under a ceiling by owners that share nothing but words: no lock, and no sum that is stored.
//!
//! ```text
//!   claim(n):  claiming += n ─▶ sum over all owners of claiming, then held ──┬─ within: held += n, claiming -= n
//!                                                                            └─ over: claiming -= n, refused
//! ```
//!
//! All accesses are in one order (SeqCst). Of two owners that announce at once, the later one's sum has the earlier one's
//! announcement, or what became of it: an owner raises `held` before it lowers `claiming`, and a sum reads `claiming` first. So
//! what is summed is never less than what is held or announced, though it may be more for a moment.

use pinpool_os::sync::process::{AtomicU64, Ordering};

/// A word that all owners see: that of a processor, or of a model.
pub(super) trait Word {
    fn read(&self) -> u64;
    fn add(&self, bytes: u64);
    fn subtract(&self, bytes: u64);
}

impl Word for AtomicU64 {
    fn read(&self) -> u64 {
        self.load(Ordering::SeqCst)
    }

    fn add(&self, bytes: u64) {
        self.fetch_add(bytes, Ordering::SeqCst);
    }

    fn subtract(&self, bytes: u64) {
        self.fetch_sub(bytes, Ordering::SeqCst);
    }
}

/// What counts of one owner.
#[derive(Debug)]
pub(super) struct Sums<'a, W> {
    pub(super) held: &'a W,
    pub(super) claiming: &'a W,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    Claimed,
    /// There would be room without claims that are being made.
    Contended,
    Full,
}

/// Bytes that the owners hold or are claiming, at least.
pub(super) fn sum<'a, W: Word + 'a>(all: impl Iterator<Item = Sums<'a, W>>) -> u64 {
    let (held_bytes, claiming_bytes) = sums(all);
    held_bytes.saturating_add(claiming_bytes)
}

fn sums<'a, W: Word + 'a>(all: impl Iterator<Item = Sums<'a, W>>) -> (u64, u64) {
    all.fold((0_u64, 0_u64), |(held_bytes, claiming_bytes), owner| {
        // In this order: what is read as claimed no more is held by then.
        let claiming = owner.claiming.read();
        (held_bytes.saturating_add(owner.held.read()), claiming_bytes.saturating_add(claiming))
    })
}

/// Claims `bytes` for the owner `own`, one of `all`.
pub(super) fn claim<'a, W: Word + 'a>(
    own: &Sums<'a, W>,
    all: impl Iterator<Item = Sums<'a, W>>,
    max_bytes: u64,
    bytes: u64,
) -> Outcome {
    own.claiming.add(bytes);
    let (held_bytes, claiming_bytes) = sums(all);
    let outcome = if held_bytes.saturating_add(claiming_bytes) <= max_bytes {
        own.held.add(bytes);
        Outcome::Claimed
    } else if held_bytes.saturating_add(bytes) <= max_bytes {
        Outcome::Contended
    } else {
        Outcome::Full
    };
    own.claiming.subtract(bytes);
    outcome
}

#[cfg(all(test, not(pinpool_loom)))]
mod tests {
    use std::cell::{Cell, RefCell};

    use super::*;

    /// A word whose owner dies before its change number `lives`.
    struct Mortal<'a> {
        value: Cell<u64>,
        lives: &'a RefCell<u64>,
    }

    impl Mortal<'_> {
        fn change(&self, value: u64) {
            let mut lives = self.lives.borrow_mut();
            if *lives > 0 {
                *lives -= 1;
                self.value.set(value);
            }
        }
    }

    impl Word for Mortal<'_> {
        fn read(&self) -> u64 {
            self.value.get()
        }

        fn add(&self, bytes: u64) {
            self.change(self.read() + bytes);
        }

        fn subtract(&self, bytes: u64) {
            self.change(self.read().saturating_sub(bytes));
        }
    }

    #[test]
    fn a_claim_is_refused_over_the_ceiling_and_leaves_nothing() {
        let words: [AtomicU64; 4] = std::array::from_fn(|_| AtomicU64::new(0));
        let owner = |index: usize| Sums { held: &words[2 * index], claiming: &words[2 * index + 1] };
        let all = || (0..2).map(owner);
        assert_eq!(claim(&owner(0), all(), 100, 60), Outcome::Claimed);
        assert_eq!(claim(&owner(1), all(), 100, 41), Outcome::Full);
        assert_eq!(claim(&owner(1), all(), 100, 40), Outcome::Claimed);
        assert_eq!(claim(&owner(0), all(), 100, 1), Outcome::Full);
        assert_eq!(claim(&owner(0), all(), u64::MAX, u64::MAX - 100), Outcome::Claimed);
        assert_eq!(words.each_ref().map(Word::read), [u64::MAX - 40, 0, 40, 0]);
        words[0].store(0, Ordering::SeqCst);
        words[1].store(50, Ordering::SeqCst);
        assert_eq!(claim(&owner(1), all(), 100, 20), Outcome::Contended);
        assert_eq!(sum(all()), 90);
    }

    #[test]
    fn an_owner_that_dies_at_any_change_leaves_its_own_words_alone_wrong() {
        for lives in 0..8 {
            let left = RefCell::new(lives);
            let forever = RefCell::new(u64::MAX);
            let word = |lives| Mortal { value: Cell::new(0), lives };
            let (other_held, other_claiming) = (word(&forever), word(&forever));
            let (held, claiming) = (word(&left), word(&left));
            let other = || Sums { held: &other_held, claiming: &other_claiming };
            let own = || Sums { held: &held, claiming: &claiming };
            let all = || [own(), other()].into_iter();
            claim(&other(), all(), 100, 30);
            let first = claim(&own(), all(), 100, 70);
            if first == Outcome::Claimed {
                held.subtract(70);
                claim(&own(), all(), 100, 20);
            }
            // Never more than the ceiling is held, whatever the dead one announced.
            assert!(held.read() + other_held.read() <= 100, "after {lives}");
            // Who clears the slot sets its words to zero: nothing else has to be made right.
            held.value.set(0);
            claiming.value.set(0);
            assert_eq!(sum(all()), 30);
            assert_eq!(claim(&other(), all(), 100, 70), Outcome::Claimed);
        }
    }
}

#[cfg(all(test, pinpool_loom))]
mod models {
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicU64, Ordering, fence};

    use super::*;

    /// loom treats SeqCst accesses as weaker ones, so a barrier stands beside each.
    struct Modelled(AtomicU64);

    impl Word for Modelled {
        fn read(&self) -> u64 {
            fence(Ordering::SeqCst);
            self.0.load(Ordering::SeqCst)
        }

        fn add(&self, bytes: u64) {
            self.0.fetch_add(bytes, Ordering::SeqCst);
            fence(Ordering::SeqCst);
        }

        fn subtract(&self, bytes: u64) {
            self.0.fetch_sub(bytes, Ordering::SeqCst);
            fence(Ordering::SeqCst);
        }
    }

    fn run(words: &[Modelled; 4], index: usize, bytes: u64) -> Outcome {
        let owner = |index: usize| Sums { held: &words[2 * index], claiming: &words[2 * index + 1] };
        claim(&owner(index), (0..2).map(owner), 3, bytes)
    }

    #[test]
    fn two_owners_never_hold_more_than_the_ceiling() {
        loom::model(|| {
            let words: Arc<[Modelled; 4]> = Arc::new(std::array::from_fn(|_| Modelled(AtomicU64::new(0))));
            let others = words.clone();
            let thread = loom::thread::spawn(move || run(&others, 1, 2));
            let own = run(&words, 0, 2);
            let other = thread.join().unwrap();
            let claimed = [own, other].iter().filter(|&&outcome| outcome == Outcome::Claimed).count();
            assert!(claimed <= 1, "two claims of 2 under a ceiling of 3");
            assert_eq!(words[0].read() + words[2].read(), 2 * claimed as u64);
            assert_eq!(words[1].read() + words[3].read(), 0);
        });
    }
}
