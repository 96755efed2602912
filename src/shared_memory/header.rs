//! The header of a shared file: what it is for, which version of its layout, how long. Numbers alone.

use std::ops::Range;

/// Bytes of the header; its words are those of the processor, as the file never leaves its machine.
pub(super) const HEADER_BYTES: usize = 64;
const HEADER_WORDS: usize = HEADER_BYTES / 8;
/// The first word of a file whose header is complete.
pub(super) const MAGIC: u64 = u64::from_ne_bytes(*b"pinpool\x01");

/// What a shared file is for and how it is divided. Sizes are in words of 8 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Tells files of one purpose from others.
    pub(crate) kind: [u8; 8],
    /// Of the meaning of the words. Raised by each change of it.
    pub(crate) version: u32,
    /// Words that all owners share.
    pub(crate) common_words: usize,
    pub(crate) slots: usize,
    /// Words of one slot.
    pub(crate) slot_words: usize,
}

/// What a header says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Nothing is there, or its creator has not come to its end.
    Empty,
    Ours,
    OtherVersion(u32),
    /// Ours, but not as it was written.
    Damaged(String),
    /// Of another program or for another purpose.
    Foreign(String),
}

impl Layout {
    /// Where the words of all owners are.
    pub(super) fn common_words(&self) -> Range<usize> {
        HEADER_WORDS..HEADER_WORDS + self.common_words
    }

    /// Where the words of slot `index` are; empty for a number that no slot has.
    pub(super) fn slot_words(&self, index: usize) -> Range<usize> {
        if index >= self.slots {
            return 0..0;
        }
        let start = HEADER_WORDS + self.common_words + index * self.slot_words;
        start..start + self.slot_words
    }

    pub(super) fn file_bytes(&self) -> usize {
        (HEADER_WORDS + self.common_words + self.slots * self.slot_words) * 8
    }

    fn words(&self) -> [u64; HEADER_WORDS] {
        let [kind, version] = [u64::from_ne_bytes(self.kind), u64::from(self.version)];
        let sizes = [self.common_words, self.slots, self.slot_words, self.file_bytes()].map(|size| size as u64);
        [MAGIC, kind, version, sizes[0], sizes[1], sizes[2], sizes[3], 0]
    }
}

/// The header of `layout`, but for its magic, which is written last.
pub(super) fn without_magic(layout: &Layout) -> [u8; HEADER_BYTES] {
    let mut bytes = [0; HEADER_BYTES];
    for (place, word) in bytes.chunks_exact_mut(8).zip(layout.words()).skip(1) {
        place.copy_from_slice(&word.to_ne_bytes());
    }
    bytes
}

/// Compares the first `bytes` of a file of `len_bytes` with `layout`.
pub(super) fn check(bytes: &[u8], len_bytes: u64, layout: &Layout) -> Verdict {
    let word = |index: usize| {
        let bytes = bytes.get(index * 8..index * 8 + 8).and_then(|bytes| bytes.try_into().ok());
        bytes.map_or(0, u64::from_ne_bytes)
    };
    if word(0) == 0 {
        // Whatever else there is, its creator was killed before it wrote the magic.
        return if bytes.iter().take(8).all(|&byte| byte == 0) { Verdict::Empty } else { foreign() };
    }
    if word(0) != MAGIC {
        return foreign();
    }
    if bytes.len() < HEADER_BYTES {
        return Verdict::Damaged(format!("has {len_bytes} bytes in place of {}", layout.file_bytes()));
    }
    let words = layout.words();
    if word(1) != words[1] {
        let [found, own] = [word(1), words[1]].map(|kind| String::from_utf8_lossy(&kind.to_ne_bytes()).into_owned());
        return Verdict::Foreign(format!("is a file of pinpool for `{}`, not for `{}`", found.trim(), own.trim()));
    }
    if word(2) != words[2] {
        return Verdict::OtherVersion(u32::try_from(word(2)).unwrap_or(u32::MAX));
    }
    if (3..HEADER_WORDS).any(|index| word(index) != words[index]) {
        return Verdict::Damaged("has a header with other sizes than this version writes".to_owned());
    }
    if len_bytes != layout.file_bytes() as u64 {
        return Verdict::Damaged(format!("has {len_bytes} bytes in place of {}", layout.file_bytes()));
    }
    Verdict::Ours
}

fn foreign() -> Verdict {
    Verdict::Foreign("is no file of pinpool".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYOUT: Layout = Layout { kind: *b"test    ", version: 3, common_words: 4, slots: 2, slot_words: 8 };

    fn whole(layout: &Layout) -> [u8; HEADER_BYTES] {
        let mut bytes = without_magic(layout);
        bytes[..8].copy_from_slice(&MAGIC.to_ne_bytes());
        bytes
    }

    #[test]
    fn a_header_is_ours_only_as_it_was_written() {
        let len = LAYOUT.file_bytes() as u64;
        assert_eq!(check(&whole(&LAYOUT), len, &LAYOUT), Verdict::Ours);
        for empty in [&[][..], &[0; 3], &[0; HEADER_BYTES], &without_magic(&LAYOUT)] {
            assert_eq!(check(empty, empty.len() as u64, &LAYOUT), Verdict::Empty);
        }
        let other = Layout { version: 4, slots: 9, ..LAYOUT };
        assert_eq!(check(&whole(&other), len, &LAYOUT), Verdict::OtherVersion(4));
        assert!(matches!(check(&whole(&Layout { slots: 9, ..LAYOUT }), len, &LAYOUT), Verdict::Damaged(_)));
        assert!(matches!(check(&whole(&LAYOUT), len - 1, &LAYOUT), Verdict::Damaged(_)));
        assert!(matches!(check(&whole(&LAYOUT)[..20], 20, &LAYOUT), Verdict::Damaged(_)));
        assert!(matches!(check(&whole(&Layout { kind: *b"another ", ..LAYOUT }), len, &LAYOUT), Verdict::Foreign(_)));
        assert!(matches!(check(b"#!/bin/sh\n", 10, &LAYOUT), Verdict::Foreign(_)));
        assert!(matches!(check(b"a", 1, &LAYOUT), Verdict::Foreign(_)));
    }

    #[test]
    fn the_words_of_slots_lie_behind_those_of_all_and_beside_each_other() {
        assert_eq!((LAYOUT.common_words(), LAYOUT.slot_words(0), LAYOUT.slot_words(1)), (8..12, 12..20, 20..28));
        assert_eq!((LAYOUT.slot_words(2), LAYOUT.file_bytes()), (0..0, 28 * 8));
    }
}
