//! Bytes that differ between batches and between offsets, and the search for the first wrong one.

use std::fmt::Display;

const WORD: usize = size_of::<u64>();

/// A batch, with bytes that are derived from its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Batch {
    pub(crate) number: u64,
    pub(crate) len: usize,
}

impl Batch {
    pub(crate) fn new(number: u64, len: usize) -> Self {
        Self { number, len }
    }

    pub(crate) fn write(self, to: &mut [u8]) {
        assert_eq!(to.len(), self.len);
        let mut words = to.chunks_exact_mut(WORD);
        let mut index = 0;
        for word in &mut words {
            word.copy_from_slice(&self.word(index));
            index += 1;
        }
        let rest = words.into_remainder();
        rest.copy_from_slice(&self.word(index)[..rest.len()]);
    }

    fn word(self, index: u64) -> [u8; WORD] {
        let mixed = (self.number << 32 | index).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (mixed ^ mixed >> 29).to_le_bytes()
    }

    /// Compares every byte. `origin` names the backend and the stream.
    pub(crate) fn check(self, found: &[u8], origin: impl Display) {
        let mut sent = vec![0; self.len];
        self.write(&mut sent);
        let wrong = (sent != found).then(|| sent.iter().zip(found).position(|(sent, found)| sent != found));
        assert_eq!(wrong, None, "{origin}: offset of the first wrong byte in {self:?}");
    }
}
