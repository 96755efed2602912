//! A data set from a seed, for machines without data.
//!
//! Owns the distribution of the lengths and the generator of the bytes. Never touches a file. The lengths are a model, not a
//! measurement: log-normal, with the mean of the ImageNet training photographs (114,660 bytes) and a similar spread.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::LogNormal;

use super::catalog::{Catalog, DataOrigin};

const MEAN_BYTES: f64 = 114_660.0;
/// Standard deviation of the logarithm; one photograph in forty is then longer than 300 kB.
const SIGMA: f64 = 0.6;
const BOUNDS_BYTES: std::ops::RangeInclusive<f64> = 1024.0..=16_777_216.0;
/// Stream of the lengths, apart from those of the files.
const LENGTHS_STREAM: u64 = u64::MAX;

impl Catalog {
    /// A synthetic data set of `files` files of one sample each, 1 KiB to 16 MiB long. A seed gives the same bytes on every
    /// machine.
    #[must_use]
    pub fn synthetic(files: u64, seed: u64) -> Catalog {
        let mut lengths = stream_of(seed, LENGTHS_STREAM);
        // The mean of a log-normal is exp(mu + sigma^2 / 2).
        let mu = MEAN_BYTES.ln() - SIGMA * SIGMA / 2.0;
        let distribution = LogNormal::new(mu, SIGMA).ok();
        let mut catalog = Catalog::default();
        for stream in 0..files {
            let length = distribution.map_or(MEAN_BYTES, |distribution| lengths.sample(distribution));
            // In bounds and positive, so the cast only drops the fraction.
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
            let len_bytes = length.clamp(*BOUNDS_BYTES.start(), *BOUNDS_BYTES.end()) as u64;
            catalog.push_plain(DataOrigin::Synthetic { seed, stream }, len_bytes);
        }
        catalog
    }
}

/// A generator of the bytes of one synthetic file, from its start and without an end.
pub(super) fn stream_of(seed: u64, stream: u64) -> ChaCha8Rng {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(stream);
    rng
}
