//! How far a stream has come, from 32 bits that it writes: arithmetic, no driver.
//!
//! Numbers are 64 bits wide here and never wrap; the stream writes the low half of each. Where a reading belongs is found
//! from the last progress seen, which is less than 2^32 numbers behind as long as [`Sequence::next`] gives out none that
//! is 2^31 ahead of it.

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

    /// Looks at the word and says which number it stands for. The word is read by `read`, after `seen`: so it is never
    /// the older of the two, which would pass for a turn of the wheel.
    pub(super) fn look(&self, read: impl FnOnce() -> u32) -> u64 {
        let seen = self.seen();
        #[allow(clippy::cast_possible_truncation)] // The low half is what is meant.
        let ahead = read().wrapping_sub(seen as u32);
        let now = seen + u64::from(ahead);
        // AcqRel: as in `seen`. A maximum: another thread may have looked later.
        self.seen.fetch_max(now, Ordering::AcqRel).max(now)
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
        assert_eq!(sequence.look(|| 2), (2 << 32) + 2, "a word never goes back, so this is another turn");
    }

    #[test]
    fn no_number_is_given_out_that_a_reading_could_not_tell() {
        let sequence = Sequence::new(10);
        assert_eq!(sequence.next(10, || 10), Some(11));
        assert_eq!(sequence.next(9 + WINDOW, || 10), None, "2^31 ahead of a stream that stands still");
        assert_eq!(sequence.next(9 + WINDOW, || 11), Some(10 + WINDOW));
    }
}
