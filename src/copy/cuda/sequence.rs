//! How far a stream has come, from 32 bits that it writes: arithmetic, no driver.
//!
//! Numbers are 64 bits wide here and never wrap; the stream writes the low half of each. Where a reading belongs is found
//! from the last progress seen: it is less than 2^31 ahead of that, for [`Sequence::next`] gives out no number that is not.
//! A reading that would be further ahead is behind, and tells nothing.

use crate::sync::process::{AtomicU64, Ordering};

/// Most numbers given out and not seen.
const WINDOW: u64 = 1 << 31;
/// Shortly before the first wrap, so that every program goes through one.
pub(super) const FIRST: u64 = (1 << 32) - 64;

/// Numbers of one stream.
#[derive(Debug)]
pub(super) struct Sequence {
    seen: AtomicU64,
}

impl Sequence {
    pub(super) fn new(seen: u64) -> Self {
        Self { seen: AtomicU64::new(seen) }
    }

    /// The last number seen, without a look at the word.
    pub(super) fn seen(&self) -> u64 {
        // Acquire: who read the word before let everybody else see what it stands for.
        self.seen.load(Ordering::Acquire)
    }

    /// Looks at the word and says which number was reached. The word is read by `read`, after `seen`, so it is the newer
    /// of the two; should it ever not be, it changes nothing.
    pub(super) fn look(&self, read: impl FnOnce() -> u32) -> u64 {
        let seen = self.seen();
        #[allow(clippy::cast_possible_truncation)] // The low half is what is meant.
        let ahead = u64::from(read().wrapping_sub(seen as u32));
        if ahead >= WINDOW {
            return seen;
        }
        let now = seen + ahead;
        // AcqRel: as in `seen`. A maximum, since another thread may have looked later; by exchange, since ThreadSanitizer
        // sees no other.
        let newer = |before: u64| (before < now).then_some(now);
        self.seen.fetch_update(Ordering::AcqRel, Ordering::Acquire, newer).map_or_else(|later| later, |_| now)
    }

    /// The number after `last`, if it is not too far ahead of what was seen.
    pub(super) fn next(&self, last: u64, read: impl FnOnce() -> u32) -> Option<u64> {
        let next = last + 1;
        (next - self.look(read) < WINDOW).then_some(next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readings_go_on_through_the_wrap() {
        let sequence = Sequence::new(u64::from(u32::MAX) - 1);
        assert_eq!(sequence.look(|| u32::MAX - 1), u64::from(u32::MAX) - 1);
        assert_eq!(sequence.look(|| u32::MAX), u64::from(u32::MAX));
        assert_eq!(sequence.look(|| 3), (1 << 32) + 3);
        assert_eq!(sequence.look(|| 3), (1 << 32) + 3);
    }

    #[test]
    fn a_reading_from_behind_is_no_turn_of_the_wheel() {
        let sequence = Sequence::new(1000);
        assert_eq!(sequence.look(|| 999), 1000);
        #[allow(clippy::cast_possible_truncation)] // 2^31 fits.
        let edge = 1000 + WINDOW as u32;
        assert_eq!(sequence.look(|| edge), 1000, "a number this far ahead is never given out");
        assert_eq!(sequence.look(|| edge - 1), 999 + WINDOW);
    }

    #[test]
    fn no_number_is_given_out_that_a_reading_could_not_tell() {
        let sequence = Sequence::new(10);
        assert_eq!(sequence.next(10, || 10), Some(11));
        assert_eq!(sequence.next(9 + WINDOW, || 10), None, "2^31 ahead of a stream that stands still");
        assert_eq!(sequence.next(9 + WINDOW, || 11), Some(10 + WINDOW));
    }
}
