//! The content of a buffer: a sequence of words determined by a seed, so that every byte can be checked without a copy.

/// Distance of two neighbouring words: odd, so that no word of a buffer occurs twice.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
const WORD_BYTES: usize = size_of::<u64>();

/// Fills `bytes` with the content of `seed`.
pub(super) fn fill(bytes: &mut [u8], seed: u64) {
    let mut word = seed;
    let mut words = bytes.chunks_exact_mut(WORD_BYTES);
    for chunk in &mut words {
        chunk.copy_from_slice(&word.to_le_bytes());
        word = word.wrapping_add(STEP);
    }
    let rest = words.into_remainder();
    let len = rest.len();
    rest.copy_from_slice(&word.to_le_bytes()[..len]);
}

/// Whether `bytes` are exactly the content of `seed`.
pub(super) fn is_intact(bytes: &[u8], seed: u64) -> bool {
    let mut word = seed;
    let mut differ = 0;
    let words = bytes.chunks_exact(WORD_BYTES);
    let rest = words.remainder();
    for chunk in words {
        let mut found = [0; WORD_BYTES];
        found.copy_from_slice(chunk);
        differ |= u64::from_le_bytes(found) ^ word;
        word = word.wrapping_add(STEP);
    }
    differ == 0 && rest == &word.to_le_bytes()[..rest.len()]
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
