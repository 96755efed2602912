//! The header of a shared file: what it is for, which version of its layout, how long. Numbers alone.

use std::ops::Range;

/// Bytes of the header, which is all of the file; its words are those of the processor, as the file never leaves its machine.
pub(super) const HEADER_BYTES: usize = 64;
/// Words that say what the file is for. Those that follow say where the memory is.
const LAYOUT_WORDS: usize = 6;
/// The first word of a file of pinpool.
pub(super) const MAGIC: u64 = u64::from_ne_bytes(*b"pinpool\x01");

/// What a shared file is for and how it is divided. Sizes are in words of 8 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// Tells files of one purpose from others.
    pub kind: [u8; 8],
    /// Number of the meaning of the words, raised by each change of it.
    pub version: u32,
    /// Words that all owners share.
    pub common_words: usize,
    pub slots: usize,
    /// Words of one slot.
    pub slot_words: usize,
}

/// Where the words are that the owners share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Memory {
    /// Number of the segment.
    pub(super) id: i32,
    /// Its first word, which no other segment has.
    pub(super) cookie: u64,
}

/// What a header says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Nothing is there, or its creator has not come to its end.
    Empty,
    Ours(Memory),
    OtherVersion(u32),
    /// Ours, but not as it was written.
    Damaged(String),
    /// A file of another program or for another purpose.
    Foreign(String),
}

impl Layout {
    /// Where the words of all owners are, behind the cookie.
    pub(super) fn common_words(&self) -> Range<usize> {
        1..1 + self.common_words
    }

    /// Where the words of slot `index` are; empty for a number that no slot has.
    pub(super) fn slot_words(&self, index: usize) -> Range<usize> {
        if index >= self.slots {
            return 0..0;
        }
        let start = 1 + self.common_words + index * self.slot_words;
        start..start + self.slot_words
    }

    /// All words, with the cookie.
    pub(super) fn words(&self) -> usize {
        1 + self.common_words + self.slots * self.slot_words
    }

    fn header(&self) -> [u64; LAYOUT_WORDS] {
        let [kind, version] = [u64::from_ne_bytes(self.kind), u64::from(self.version)];
        let [common_words, slots, slot_words] =
            [self.common_words, self.slots, self.slot_words].map(|size| size as u64);
        [MAGIC, kind, version, common_words, slots, slot_words]
    }
}

/// The header of a file of `layout` whose words are in `memory`.
pub(super) fn bytes_of(layout: &Layout, memory: Memory) -> [u8; HEADER_BYTES] {
    let mut bytes = [0; HEADER_BYTES];
    let memory = [u64::from(memory.id.cast_unsigned()), memory.cookie];
    for (place, word) in bytes.chunks_exact_mut(8).zip(layout.header().into_iter().chain(memory)) {
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
    let words = layout.header();
    if bytes.len() < HEADER_BYTES {
        return Verdict::Damaged(format!("has {len_bytes} bytes in place of {HEADER_BYTES}"));
    }
    if word(1) == 0 {
        return Verdict::Damaged("was cut".to_owned());
    }
    if word(1) != words[1] {
        let [found, own] = [word(1), words[1]].map(|kind| String::from_utf8_lossy(&kind.to_ne_bytes()).into_owned());
        return Verdict::Foreign(format!("is a file of pinpool for `{}`, not for `{}`", found.trim(), own.trim()));
    }
    if word(2) != words[2] {
        return Verdict::OtherVersion(u32::try_from(word(2)).unwrap_or(u32::MAX));
    }
    if (3..LAYOUT_WORDS).any(|index| word(index) != words[index]) {
        return Verdict::Damaged("has a header with other sizes than this version writes".to_owned());
    }
    if len_bytes != HEADER_BYTES as u64 {
        return Verdict::Damaged(format!("has {len_bytes} bytes in place of {HEADER_BYTES}"));
    }
    let [id, cookie] = [word(LAYOUT_WORDS), word(LAYOUT_WORDS + 1)];
    u32::try_from(id).map_or_else(
        |_| Verdict::Damaged("names no segment".to_owned()),
        |id| Verdict::Ours(Memory { id: id.cast_signed(), cookie }),
    )
}

fn foreign() -> Verdict {
    Verdict::Foreign("is no file of pinpool".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYOUT: Layout = Layout { kind: *b"test    ", version: 3, common_words: 4, slots: 2, slot_words: 8 };
    const MEMORY: Memory = Memory { id: 7, cookie: 99 };

    fn whole(layout: &Layout) -> [u8; HEADER_BYTES] {
        bytes_of(layout, MEMORY)
    }

    #[test]
    fn a_header_is_ours_only_as_it_was_written() {
        let len = HEADER_BYTES as u64;
        assert_eq!(check(&whole(&LAYOUT), len, &LAYOUT), Verdict::Ours(MEMORY));
        for empty in [&[][..], &[0; 3], &[0; HEADER_BYTES]] {
            assert_eq!(check(empty, empty.len() as u64, &LAYOUT), Verdict::Empty);
        }
        let other = Layout { version: 4, slots: 9, ..LAYOUT };
        assert_eq!(check(&whole(&other), len, &LAYOUT), Verdict::OtherVersion(4));
        assert!(matches!(check(&whole(&Layout { slots: 9, ..LAYOUT }), len, &LAYOUT), Verdict::Damaged(_)));
        assert!(matches!(check(&whole(&LAYOUT), len + 1, &LAYOUT), Verdict::Damaged(_)));
        assert!(matches!(check(&whole(&LAYOUT)[..20], 20, &LAYOUT), Verdict::Damaged(_)));
        assert!(matches!(check(&whole(&Layout { kind: *b"another ", ..LAYOUT }), len, &LAYOUT), Verdict::Foreign(_)));
        assert!(matches!(check(b"#!/bin/sh\n", 10, &LAYOUT), Verdict::Foreign(_)));
        assert!(matches!(check(b"a", 1, &LAYOUT), Verdict::Foreign(_)));
        let mut no_segment = whole(&LAYOUT);
        no_segment[LAYOUT_WORDS * 8..][..8].copy_from_slice(&u64::MAX.to_ne_bytes());
        assert!(matches!(check(&no_segment, len, &LAYOUT), Verdict::Damaged(_)));
    }

    #[test]
    fn the_words_of_slots_lie_behind_those_of_all_and_beside_each_other() {
        assert_eq!((LAYOUT.common_words(), LAYOUT.slot_words(0), LAYOUT.slot_words(1)), (1..5, 5..13, 13..21));
        assert_eq!((LAYOUT.slot_words(2), LAYOUT.words()), (0..0, 21));
    }
}
