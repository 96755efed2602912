//! Which samples form a batch, and in what order.
//!
//! Owns the division into batches and the shuffle. Never reads a file and never asks the pool.
//!
//! ```text
//!   order     3  0  4  1  2       one epoch: every sample once
//!   batches  [3  0][4][1  2]      as many samples and bytes as the options allow
//! ```
//!
//! - **plan-I1**: a batch has at least one sample, so a sample longer than the limit has a batch of its own.
//! - **plan-I2**: a batch lies within one epoch; the last one of an epoch is short.
//! - **plan-I3**: the order of an epoch depends on the seed and the number of the epoch only.

use std::sync::Arc;

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

use super::catalog::Catalog;
use super::failure::{Failure, FailureCause};
use super::run::LoadOptions;
use crate::Error;

/// A batch before it is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PlannedBatch {
    /// Counted over the whole run, from 0.
    pub(super) number: u64,
    /// Counted from 0.
    pub(super) epoch: u64,
    /// Indices into [`Catalog::samples`], in the order of their bytes in the batch.
    pub(super) samples: Vec<usize>,
    /// Sum of their lengths.
    pub(super) len_bytes: u64,
}

/// A failure and the files of which it skips samples.
#[derive(Debug)]
pub(super) struct Skipped {
    pub(super) files: Vec<usize>,
    pub(super) failure: Failure,
}

impl PlannedBatch {
    /// The whole batch is skipped: one failure for all of its files.
    pub(super) fn skipped(&self, catalog: &Catalog, error: &Arc<Error>) -> Skipped {
        let first = self.samples.first().map_or_else(String::new, |&sample| catalog.name(sample));
        let name = match self.samples.len() {
            1 => first,
            many => format!("batch {} ({many} samples, the first {first})", self.number),
        };
        let files = self.samples.iter().map(|&sample| catalog.samples[sample].file).collect();
        Skipped { files, failure: Failure::new(name, FailureCause::Pool(error.clone())) }
    }
}

/// The batches of a run, in order.
#[derive(Debug)]
pub(super) struct Batches<'a> {
    catalog: &'a Catalog,
    options: &'a LoadOptions,
    epoch: u64,
    number: u64,
    order: Vec<usize>,
    /// Samples of this epoch that are in earlier batches.
    taken: usize,
}

impl<'a> Batches<'a> {
    pub(super) fn new(catalog: &'a Catalog, options: &'a LoadOptions) -> Batches<'a> {
        let order = (0..catalog.samples.len()).collect();
        let mut batches = Batches { catalog, options, epoch: 0, number: 0, order, taken: 0 };
        batches.start_epoch();
        batches
    }

    fn start_epoch(&mut self) {
        self.taken = 0;
        if let Some(seed) = self.options.shuffle_seed {
            // Shuffles the catalog's order, not that of the epoch before (plan-I3).
            self.order.sort_unstable();
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            rng.set_stream(self.epoch);
            self.order.shuffle(&mut rng);
        }
    }

    /// Whether a batch of `samples` samples and `len_bytes` bytes is over a limit.
    fn is_over_limit(&self, samples: usize, len_bytes: u64) -> bool {
        self.options.batch_samples.is_some_and(|max| samples as u64 > max.get())
            || self.options.batch_bytes.is_some_and(|max| len_bytes > max.get())
    }
}

impl Iterator for Batches<'_> {
    type Item = PlannedBatch;

    fn next(&mut self) -> Option<PlannedBatch> {
        if self.taken == self.order.len() {
            self.epoch = (self.epoch + 1).min(self.options.epochs);
            self.start_epoch();
        }
        if self.epoch == self.options.epochs || self.order.is_empty() {
            return None;
        }
        let mut batch = PlannedBatch { number: self.number, epoch: self.epoch, samples: Vec::new(), len_bytes: 0 };
        for &sample in &self.order[self.taken..] {
            let len_bytes = batch.len_bytes.saturating_add(self.catalog.samples[sample].len_bytes);
            if !batch.samples.is_empty() && self.is_over_limit(batch.samples.len() + 1, len_bytes) {
                break;
            }
            batch.samples.push(sample);
            batch.len_bytes = len_bytes;
        }
        self.taken += batch.samples.len();
        self.number += 1;
        Some(batch)
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use super::super::catalog::DataOrigin;
    use super::*;

    fn catalog(lengths: &[u64]) -> Catalog {
        let mut catalog = Catalog::default();
        for &len_bytes in lengths {
            catalog.push_plain(DataOrigin::Synthetic { seed: 0, stream: 0 }, len_bytes);
        }
        catalog
    }

    #[test]
    fn by_files_the_last_batch_of_each_epoch_is_short() {
        let catalog = catalog(&[1; 5]);
        let options = LoadOptions { epochs: 2, batch_samples: NonZeroU64::new(2), ..LoadOptions::default() };
        let batches: Vec<_> = Batches::new(&catalog, &options).collect();
        let held: Vec<_> = batches.iter().map(|batch| batch.samples.clone()).collect();
        assert_eq!(held, [vec![0, 1], vec![2, 3], vec![4], vec![0, 1], vec![2, 3], vec![4]]);
        assert_eq!(batches.iter().map(|batch| batch.number).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
        assert_eq!(batches.iter().map(|batch| batch.epoch).collect::<Vec<_>>(), [0, 0, 0, 1, 1, 1]);
    }

    #[test]
    fn lengths_that_overflow_stay_apart() {
        let catalog = catalog(&[u64::MAX, u64::MAX, 3]);
        let options = LoadOptions { batch_bytes: NonZeroU64::new(8), ..LoadOptions::default() };
        let held: Vec<_> = Batches::new(&catalog, &options).map(|batch| batch.samples).collect();
        assert_eq!(held, [vec![0], vec![1], vec![2]]);
    }
}
