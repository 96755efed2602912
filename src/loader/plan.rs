//! Which samples go together, and in what order.
//!
//! Owns the cut into batches and the shuffle. Never reads, never asks the pool: numbers in, numbers out.
//!
//! ```text
//!   order   3  0  4  1  2       one epoch: every sample once
//!   cut    [3  0][4][1  2]      as many samples and as many bytes as a batch may have
//! ```
//!
//! I1. A batch has at least one sample, so one that is longer than a batch may be has a batch of its own.
//! I2. A batch lies within one epoch; the last of an epoch is short.
//! I3. The order of an epoch depends on the seed and the number of the epoch alone.

use std::num::NonZeroU64;

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

use super::catalog::Catalog;

/// When a batch is full: at whichever bound is met first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cut {
    /// Samples in a batch at most.
    pub max_samples: Option<NonZeroU64>,
    /// Bytes in a batch at most, except for I1.
    pub max_bytes: Option<NonZeroU64>,
}

impl Cut {
    fn is_full(&self, samples: u64, bytes: u64, next_bytes: u64) -> bool {
        let over = |bound: Option<NonZeroU64>, value: u64| bound.is_some_and(|bound| value > bound.get());
        over(self.max_samples, samples.saturating_add(1)) || over(self.max_bytes, bytes.saturating_add(next_bytes))
    }
}

/// What a batch will hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Planned {
    /// Counted over the whole run.
    pub number: u64,
    /// Counted from 0.
    pub epoch: u64,
    /// Indices into [`Catalog::samples`], in the order their bytes are laid.
    pub samples: Vec<usize>,
    /// Sum of their lengths.
    pub len_bytes: u64,
}

/// The batches of a run, one after the other.
#[derive(Debug)]
pub struct Batches<'a> {
    catalog: &'a Catalog,
    cut: Cut,
    shuffle_seed: Option<u64>,
    epochs: u64,
    epoch: u64,
    number: u64,
    order: Vec<usize>,
    /// Samples of this epoch already handed out.
    taken: usize,
}

impl<'a> Batches<'a> {
    /// Plans `epochs` passes over `catalog`, in its own order or shuffled anew for each.
    #[must_use]
    pub fn new(catalog: &'a Catalog, cut: Cut, epochs: u64, shuffle_seed: Option<u64>) -> Batches<'a> {
        let order = (0..catalog.samples.len()).collect();
        let mut batches = Batches { catalog, cut, shuffle_seed, epochs, epoch: 0, number: 0, order, taken: 0 };
        batches.start_epoch();
        batches
    }

    fn start_epoch(&mut self) {
        self.taken = 0;
        if let Some(seed) = self.shuffle_seed {
            // From the catalogue's order each time, so that an epoch does not depend on those before it (I3).
            self.order.sort_unstable();
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            rng.set_stream(self.epoch);
            self.order.shuffle(&mut rng);
        }
    }
}

impl Iterator for Batches<'_> {
    type Item = Planned;

    fn next(&mut self) -> Option<Planned> {
        if self.taken == self.order.len() {
            self.epoch = (self.epoch + 1).min(self.epochs);
            self.start_epoch();
        }
        if self.epoch == self.epochs || self.order.is_empty() {
            return None;
        }
        let mut samples = Vec::new();
        let mut len_bytes = 0u64;
        for &sample in &self.order[self.taken..] {
            let next_bytes = self.catalog.samples[sample].len_bytes;
            if !samples.is_empty() && self.cut.is_full(samples.len() as u64, len_bytes, next_bytes) {
                break;
            }
            samples.push(sample);
            len_bytes = len_bytes.saturating_add(next_bytes);
        }
        self.taken += samples.len();
        let planned = Planned { number: self.number, epoch: self.epoch, samples, len_bytes };
        self.number += 1;
        Some(planned)
    }
}

#[cfg(test)]
mod tests {
    use super::super::catalog::{Extent, Origin, Sample, Source};
    use super::*;

    fn catalog(lengths: &[u64]) -> Catalog {
        let mut catalog = Catalog::default();
        for (source, &len_bytes) in lengths.iter().enumerate() {
            catalog.sources.push(Source { origin: Origin::Seeded { seed: 0, stream: 0 }, samples: 1 });
            catalog.samples.push(Sample::new(source, None, vec![Extent { offset: 0, len_bytes }]));
        }
        catalog
    }

    fn cut(max_samples: u64, max_bytes: u64) -> Cut {
        Cut { max_samples: NonZeroU64::new(max_samples), max_bytes: NonZeroU64::new(max_bytes) }
    }

    fn samples(batches: Batches<'_>) -> Vec<Vec<usize>> {
        batches.map(|planned| planned.samples).collect()
    }

    #[test]
    fn by_files_the_last_batch_of_each_epoch_is_short() {
        let catalog = catalog(&[1; 5]);
        let batches: Vec<_> = Batches::new(&catalog, cut(2, 0), 2, None).collect();
        let held: Vec<_> = batches.iter().map(|planned| planned.samples.clone()).collect();
        assert_eq!(held, [vec![0, 1], vec![2, 3], vec![4], vec![0, 1], vec![2, 3], vec![4]]);
        assert_eq!(batches.iter().map(|planned| planned.number).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
        assert_eq!(batches.iter().map(|planned| planned.epoch).collect::<Vec<_>>(), [0, 0, 0, 1, 1, 1]);
    }

    #[test]
    fn by_bytes_a_long_sample_has_a_batch_of_its_own() {
        let catalog = catalog(&[40, 60, 1, 500, 0, 100, 0]);
        let held = samples(Batches::new(&catalog, cut(0, 100), 1, None));
        assert_eq!(held, [vec![0, 1], vec![2], vec![3], vec![4, 5, 6]]);
        let both = samples(Batches::new(&catalog, cut(2, 100), 1, None));
        assert_eq!(both, [vec![0, 1], vec![2], vec![3], vec![4, 5], vec![6]]);
    }

    #[test]
    fn lengths_that_overflow_stay_apart() {
        let catalog = catalog(&[u64::MAX, u64::MAX, 3]);
        assert_eq!(samples(Batches::new(&catalog, cut(0, 8), 1, None)), [vec![0], vec![1], vec![2]]);
    }

    #[test]
    fn a_shuffled_epoch_has_every_sample_once_in_an_order_of_its_own() {
        let catalog = catalog(&[1; 100]);
        let epoch = |seed, number| -> Vec<usize> {
            let batches = Batches::new(&catalog, cut(7, 0), 3, Some(seed));
            batches.filter(|planned| planned.epoch == number).flat_map(|planned| planned.samples).collect()
        };
        for number in 0..3 {
            let mut sorted = epoch(1, number);
            sorted.sort_unstable();
            assert_eq!(sorted, (0..100).collect::<Vec<_>>());
        }
        assert_eq!(epoch(1, 1), epoch(1, 1));
        assert_ne!(epoch(1, 0), epoch(1, 1));
        assert_ne!(epoch(1, 0), epoch(2, 0));
    }

    #[test]
    fn nothing_to_load_or_no_epochs_is_no_batch() {
        assert_eq!(Batches::new(&catalog(&[]), cut(1, 0), 1 << 60, Some(1)).count(), 0);
        assert_eq!(Batches::new(&catalog(&[1]), cut(1, 0), 0, None).count(), 0);
    }
}
