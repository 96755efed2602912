//! A data set generated from a seed, for machines without data. The lengths are log-normal, with the mean of the ImageNet
//! training images (114,660 bytes) and a similar spread.

use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::LogNormal;

use crate::catalog::{Catalog, CatalogLists, DataOrigin, FileContent};

const MEAN_BYTES: f64 = 114_660.0;
/// Standard deviation of the logarithm; one image in forty is then longer than 300 kB.
const SIGMA: f64 = 0.6;
const BOUNDS_BYTES: std::ops::RangeInclusive<f64> = 1024.0..=16_777_216.0;
/// Stream of the lengths, separate from the streams of the files.
const LENGTHS_STREAM: u64 = u64::MAX;
/// Bytes that the generator produces at once.
const WORD_BYTES: usize = 4;

impl Catalog {
    /// Creates a synthetic data set of `files` files of one sample each, 1 KiB to 16 MiB long. A seed gives the same bytes on
    /// every machine.
    pub fn synthetic(files: u64, seed: u64) -> Self {
        let mut lengths = stream_of(seed, LENGTHS_STREAM);
        // The mean of a log-normal is exp(mu + sigma^2 / 2).
        let distribution = LogNormal::new(MEAN_BYTES.ln() - SIGMA * SIGMA / 2.0, SIGMA).ok();
        let mut lists = CatalogLists::default();
        for stream in 0..files {
            let length = distribution.map_or(MEAN_BYTES, |distribution| lengths.sample(distribution));
            // The length is within the bounds and positive, so the cast only drops the fraction.
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
            let len_bytes = length.clamp(*BOUNDS_BYTES.start(), *BOUNDS_BYTES.end()) as u64;
            lists.push(DataOrigin::Synthetic { seed, stream }, FileContent { len_bytes, ..FileContent::default() });
        }
        lists.finish()
    }
}

/// Returns an endless generator of the bytes of one synthetic file, from the first byte on.
fn stream_of(seed: u64, stream: u64) -> ChaCha8Rng {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(stream);
    rng
}

/// A generator of the bytes of one synthetic file, from any byte on.
#[derive(Debug)]
pub(super) struct SyntheticBytes {
    rng: ChaCha8Rng,
    at: u64,
}

impl SyntheticBytes {
    /// Creates a generator of the bytes from number `start` on.
    pub(super) fn new(seed: u64, stream: u64, start: u64) -> Self {
        Self { rng: stream_of(seed, stream), at: start }
    }

    /// Fills `into` with the next bytes.
    pub(super) fn fill(&mut self, into: &mut [u8]) {
        // The generator continues at whole words only.
        let (word, skip) = (self.at / WORD_BYTES as u64, usize::try_from(self.at % WORD_BYTES as u64).unwrap_or(0));
        self.at += into.len() as u64;
        self.rng.set_word_pos(u128::from(word));
        let mut rest = into;
        if skip > 0 {
            let mut word = [0; WORD_BYTES];
            self.rng.fill_bytes(&mut word);
            for (to, byte) in rest.iter_mut().zip(&word[skip..]) {
                *to = *byte;
            }
            let filled = rest.len().min(word.len() - skip);
            rest = &mut rest[filled..];
        }
        self.rng.fill_bytes(rest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_do_not_depend_on_where_reading_starts_or_on_its_steps() {
        let mut whole = vec![0; 1000];
        stream_of(3, 5).fill_bytes(&mut whole);
        for (start, step) in [(0, 1), (0, 7), (1, 4), (2, 64), (3, 1), (63, 65), (64, 256), (999, 1)] {
            let mut bytes = SyntheticBytes::new(3, 5, start as u64);
            let mut read = vec![0; whole.len() - start];
            read.chunks_mut(step).for_each(|chunk| bytes.fill(chunk));
            assert_eq!(read, whole[start..], "from {start} in steps of {step}");
        }
    }
}
