//! The content of a buffer: a sequence of words determined by a seed, so that every byte can be checked without a copy.

/// Difference between two neighboring words. It is odd, so that no word of a buffer occurs twice.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
const WORD_BYTES: usize = size_of::<u64>();

fn words(seed: u64) -> impl Iterator<Item = [u8; WORD_BYTES]> {
    std::iter::successors(Some(seed), |word| Some(word.wrapping_add(STEP))).map(u64::to_le_bytes)
}

/// Fills `bytes` with the content of `seed`.
pub(super) fn fill(bytes: &mut [u8], seed: u64) {
    let chunks = bytes.chunks_mut(WORD_BYTES).zip(words(seed));
    chunks.for_each(|(chunk, word)| chunk.copy_from_slice(&word[..chunk.len()]));
}

/// Returns whether `bytes` are exactly the content of `seed`.
pub(super) fn is_intact(bytes: &[u8], seed: u64) -> bool {
    bytes.chunks(WORD_BYTES).zip(words(seed)).all(|(chunk, word)| *chunk == word[..chunk.len()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flipped_bit_anywhere_and_another_seed_are_found() {
        for len in [0, 1, 7, 8, 9, 63, 200] {
            let mut bytes = vec![0; len];
            fill(&mut bytes, 7);
            assert!(is_intact(&bytes, 7));
            assert!(len == 0 || !is_intact(&bytes, 8));
            for at in 0..len {
                bytes[at] ^= 0x10;
                assert!(!is_intact(&bytes, 7), "{at} of {len}");
                bytes[at] ^= 0x10;
            }
        }
    }
}
