//! The plan: the samples of each batch, in order, and the shuffle. Reads no file and calls no pool.
//!
//! ```text
//!   order     3  0  4           1  2       one epoch: every sample once
//!   batches  [3  0][4.0][4.1][4.2  1][2]   as many samples and bytes as the options allow; 4 is longer than a batch
//! ```
//!
//! - **plan-I1**: a batch has at least one part of a sample and no more bytes than the limit. Only a sample that is longer
//!   than the limit is split: it starts a batch, its parts lie in consecutive batches, and other samples may follow its
//!   last part. With `decode`, no sample is split, and a longer sample is alone in its batch.
//! - **plan-I2**: a batch lies within one epoch, so the last batch of an epoch may be short.
//! - **plan-I3**: the order of an epoch depends on the seed and the number of the epoch only.
//! - **plan-I4**: the ranks of an epoch are disjoint and together form the epoch (after `even` and `drop_last`): each rank takes
//!   the units with the numbers `index`, `index + world_size`, `index + 2 * world_size`, ... in the epoch's order (plan-I6).
//! - **plan-I5**: [`plan_hash`] covers everything that determines the batches of an epoch, so a state is refused if they would
//!   differ.
//! - **plan-I6**: shuffles and ranks move units. A unit is one sample, or all samples of a compressed file in their order.
//!   A shuffle mixes the samples of [`OPEN_FILES`] units at random, so that several threads decompress at once,
//!   and orders the parts of a batch with compressed samples by file.

use std::collections::HashMap;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::mpsc::{self, Receiver};

use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use xxhash_rust::xxh3::Xxh3Default;

use crate::catalog::{Catalog, DataOrigin, Sample};
use crate::compressed::{Decompressor, Turn};
use crate::failure::{Failure, FailureCause};
use crate::options::LoadOptions;
use crate::state::LoadState;
use pinpool::{Error, PinnedBuf};

/// Number of units that a shuffle mixes at a time if compressed files have several samples. Each such file keeps a decompressor.
const OPEN_FILES: usize = 8;

/// Consecutive bytes of a sample: all of them, unless the sample is longer than the limit of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SamplePart {
    /// Index into [`Catalog::samples`].
    pub(super) sample: usize,
    /// First byte, counted from the start of the sample.
    pub(super) start: u64,
    /// Number of bytes from there.
    pub(super) len_bytes: u64,
}

/// A batch before it is read.
#[derive(Debug, Default)]
pub(super) struct PlannedBatch {
    /// Index in the whole run, from 0.
    pub(super) index_overall: u64,
    /// Epoch, from 0.
    pub(super) epoch: u64,
    /// Index in the epoch, from 0.
    pub(super) index_in_epoch: u64,
    /// The parts of samples, in the order of their bytes in the batch.
    pub(super) parts: Vec<SamplePart>,
    /// Sum of the lengths of the parts.
    pub(super) len_bytes: u64,
    /// Turns at compressed files, in the order of the parts.
    pub(super) turns: Vec<Turn>,
}

/// A batch in pinned memory. Its buffer returns to the pool when it is dropped, or after the copy that takes it.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct LoadedBatch {
    /// Index in the whole load, from 0.
    pub index_overall: u64,
    /// Epoch, from 0.
    pub epoch: u64,
    /// Index in the epoch, from 0.
    pub index_in_epoch: u64,
    /// The arrays of decoded fields, then the bytes of all parts. Empty if nothing could be read.
    pub buffer: PinnedBuf,
    /// The range of the array of each field in [`LoadOptions::decode`]. An array has a row for each part.
    pub arrays: Vec<Range<usize>>,
    /// The parts that were read, in order.
    pub parts: Vec<LoadedPart>,
    /// The parts that could not be read. An unreadable sample fails in each epoch, and in each batch with a part of it.
    pub failures: Vec<Failure>,
}

/// A sample in a batch, or a part of a sample that is longer than the limit of a batch.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LoadedPart {
    /// Index into [`Catalog::samples`].
    pub sample: usize,
    /// Range of the part's bytes in the batch, without the decoded fields (see [`Sample::kept_fields`]).
    pub range: Range<usize>,
    /// Offset of the first byte in the sample: 0 unless the sample began in an earlier batch.
    pub sample_offset: u64,
    /// XXH3 checksum of the bytes as they were read, with [`LoadOptions::verify`].
    pub checksum: Option<u64>,
}

impl LoadedBatch {
    /// Returns the failure of the whole batch, which counts for the files of all `samples`.
    pub(super) fn failure(&self, catalog: &Catalog, samples: &[usize], error: Error) -> Failure {
        let first = samples.first().map_or_else(String::new, |&sample| catalog.name(sample));
        let name = match samples.len() {
            1 => first,
            many => format!("batch {} ({many} samples, the first {first})", self.index_overall),
        };
        let files = samples.iter().map(|&sample| catalog.samples()[sample].file).collect();
        Failure { files, ..Failure::new(name, FailureCause::Pool(error)) }
    }
}

/// The batches of a run, in order.
#[derive(Debug, Default)]
pub(super) struct BatchPlan {
    catalog: Catalog,
    options: LoadOptions,
    epoch: u64,
    /// Number of batches of this epoch so far.
    index_in_epoch: u64,
    index_overall: u64,
    order: Vec<usize>,
    /// Number of samples of this epoch that are completely in earlier batches.
    taken: usize,
    /// Bytes of the next sample that are in earlier batches.
    taken_bytes: u64,
    /// For each compressed file, the channel by which its next batch receives the decompressor.
    turns: HashMap<usize, Receiver<Decompressor>>,
}

impl BatchPlan {
    /// Creates the batches from `start` on.
    pub(super) fn new(catalog: &Catalog, options: &LoadOptions, start: &LoadState) -> Self {
        let mut batches = Self {
            catalog: catalog.clone(),
            options: options.clone(),
            epoch: start.epoch.min(options.epochs),
            ..Self::default()
        };
        batches.start_epoch();
        (0..start.index_in_epoch).for_each(|_| drop(batches.next_in_epoch()));
        batches.index_overall = start.index_overall;
        batches
    }

    /// Returns the number of batches of `epoch`.
    pub(super) fn count(catalog: &Catalog, options: &LoadOptions, epoch: u64) -> u64 {
        let options = LoadOptions { epochs: epoch.saturating_add(1), ..options.clone() };
        let mut batches = Self::new(catalog, &options, &LoadState { epoch, ..LoadState::default() });
        while batches.next_in_epoch().is_some() {}
        batches.index_in_epoch
    }

    fn start_epoch(&mut self) {
        (self.taken, self.index_in_epoch) = (0, 0);
        if self.epoch == self.options.epochs {
            return;
        }
        // Shuffles the catalog's order, not the order of the previous epoch (plan-I3).
        let mut units = units(&self.catalog);
        let mut rng = self.options.shuffle_seed.map(ChaCha8Rng::seed_from_u64);
        if let Some(rng) = &mut rng {
            rng.set_stream(self.epoch);
            units.shuffle(rng);
        }
        let world = self.options.rank.map_or(1, |rank| usize::try_from(rank.world_size()).unwrap_or(usize::MAX));
        if self.options.even {
            let missing = units.len().checked_next_multiple_of(world).map_or(0, |len| len - units.len());
            let repeated: Vec<_> = units.iter().cloned().cycle().take(missing).collect();
            units.extend(repeated);
        }
        if let Some(batch) = self.options.batch_samples.filter(|_| self.options.drop_last) {
            let step = usize::try_from(batch.get()).unwrap_or(usize::MAX).saturating_mul(world);
            units.truncate(units.len() / step * step);
        }
        if let Some(rank) = self.options.rank {
            let index = usize::try_from(rank.index()).unwrap_or(usize::MAX);
            units = units.into_iter().skip(index).step_by(world).collect();
        }
        self.order = samples_of(units, rng.as_mut());
    }

    /// Returns whether a batch of `samples` samples and `len_bytes` bytes is over a limit.
    fn is_over_limit(&self, samples: usize, len_bytes: u64) -> bool {
        self.options.batch_samples.is_some_and(|max| samples as u64 > max.get())
            || self.options.batch_bytes.is_some_and(|max| len_bytes > max.get())
    }

    fn next_in_epoch(&mut self) -> Option<PlannedBatch> {
        if self.epoch == self.options.epochs || self.taken == self.order.len() {
            return None;
        }
        let max_bytes = self.options.batch_bytes.filter(|_| self.options.decode.is_empty());
        let max_bytes = max_bytes.map_or(u64::MAX, NonZeroU64::get);
        let (index_overall, epoch, index_in_epoch) = (self.index_overall, self.epoch, self.index_in_epoch);
        let mut batch = PlannedBatch { index_overall, epoch, index_in_epoch, ..PlannedBatch::default() };
        while let Some(&sample) = self.order.get(self.taken) {
            let rest = self.catalog.samples()[sample].len_bytes - self.taken_bytes;
            let is_first = batch.parts.is_empty();
            if !is_first && self.is_over_limit(batch.parts.len() + 1, batch.len_bytes.saturating_add(rest)) {
                break;
            }
            // Parts after the first one fit completely.
            let len_bytes = if is_first { rest.min(max_bytes) } else { rest };
            batch.parts.push(SamplePart { sample, start: self.taken_bytes, len_bytes });
            batch.len_bytes = batch.len_bytes.saturating_add(len_bytes);
            if len_bytes < rest {
                self.taken_bytes += len_bytes;
                break;
            }
            self.taken += 1;
            self.taken_bytes = 0;
        }
        if self.options.shuffle_seed.is_some() && batch.parts.iter().any(|part| self.is_compressed(part)) {
            // A thread finishes a file before it starts the next, so that another thread can continue with the file.
            batch.parts.sort_by_key(|part| self.catalog.samples()[part.sample].file);
        }
        self.index_overall += 1;
        self.index_in_epoch += 1;
        Some(batch)
    }

    fn is_compressed(&self, part: &SamplePart) -> bool {
        self.catalog.files()[self.catalog.samples()[part.sample].file].compression.is_some()
    }

    /// Assigns the batch its turns at compressed files, after the turns of all earlier batches.
    fn take_turns(&mut self, batch: &mut PlannedBatch) {
        for part in &batch.parts {
            if !self.is_compressed(part) {
                continue;
            }
            let sample = &self.catalog.samples()[part.sample];
            let ends_file = self.catalog.samples().get(part.sample + 1).is_none_or(|next| next.file != sample.file);
            let is_last = ends_file && part.start + part.len_bytes == sample.len_bytes;
            if batch.turns.last().is_none_or(|turn| turn.file != sample.file) {
                let (next, receiver) = mpsc::channel();
                batch.turns.push(Turn { file: sample.file, previous: self.turns.insert(sample.file, receiver), next });
            }
            if is_last {
                self.turns.remove(&sample.file);
            }
        }
    }
}

/// Returns the range of samples of each unit.
fn units(catalog: &Catalog) -> Vec<Range<usize>> {
    let samples = catalog.samples();
    let mut units: Vec<Range<usize>> = Vec::new();
    for (at, Sample { file, .. }) in samples.iter().enumerate() {
        let is_compressed = catalog.files()[*file].compression.is_some();
        match units.last_mut().filter(|unit| is_compressed && samples[unit.start].file == *file) {
            Some(unit) => unit.end += 1,
            None => units.push(at..at + 1),
        }
    }
    units
}

/// Returns the samples of the units in the order of an epoch. Without `rng`, or if each unit has one sample, the units
/// follow each other.
fn samples_of(units: Vec<Range<usize>>, rng: Option<&mut ChaCha8Rng>) -> Vec<usize> {
    let has_long = units.iter().any(|unit| unit.len() > 1);
    let mut units = units.into_iter();
    let Some(rng) = rng.filter(|_| has_long) else { return units.flatten().collect() };
    let mut open: Vec<_> = units.by_ref().take(OPEN_FILES).collect();
    let mut order = Vec::new();
    while !open.is_empty() {
        let at = rng.random_range(0..open.len());
        order.extend(open[at].next());
        if open[at].is_empty() {
            open.swap_remove(at);
            open.extend(units.next());
        }
    }
    order
}

impl Iterator for BatchPlan {
    type Item = PlannedBatch;

    fn next(&mut self) -> Option<PlannedBatch> {
        // If one epoch has no samples, no epoch has any.
        while self.epoch < self.options.epochs && !self.order.is_empty() {
            if let Some(mut batch) = self.next_in_epoch() {
                self.take_turns(&mut batch);
                return Some(batch);
            }
            self.epoch += 1;
            self.start_epoch();
        }
        None
    }
}

/// Returns a hash of everything that determines the batches of an epoch, except the number of the epoch (plan-I5). Excludes
/// the directory that contains all files, so that they may be moved together.
pub(super) fn plan_hash(catalog: &Catalog, options: &LoadOptions) -> u64 {
    let mut hasher = Xxh3Default::new();
    let mut number = |number: Option<u64>| {
        hasher.update(&[u8::from(number.is_some())]);
        hasher.update(&number.unwrap_or(0).to_le_bytes());
    };
    [options.batch_samples, options.batch_bytes].into_iter().for_each(|limit| number(limit.map(NonZeroU64::get)));
    number(options.shuffle_seed);
    number(options.rank.map(|rank| rank.index()));
    number(options.rank.map(|rank| rank.world_size()));
    number(Some(u64::from(options.even) + 2 * u64::from(options.drop_last) + 4 * options.decode.len().min(1) as u64));
    let path_of = |file: usize| match &catalog.files()[file].origin {
        DataOrigin::File(path) => path,
        DataOrigin::Synthetic { .. } => Path::new(""),
    };
    let directories = (0..catalog.files().len()).filter_map(|file| path_of(file).parent());
    let common =
        directories.reduce(|root, other| root.ancestors().find(|&root| other.starts_with(root)).unwrap_or(root));
    let common = common.unwrap_or(Path::new(""));
    for sample in catalog.samples() {
        hasher.update(&sample.len_bytes.to_le_bytes());
        let path = path_of(sample.file);
        let file = path.strip_prefix(common).unwrap_or(path).as_os_str().as_bytes();
        for name in [file, sample.member.as_deref().unwrap_or_default().as_bytes()] {
            hasher.update(&(name.len() as u64).to_le_bytes());
            hasher.update(name);
        }
    }
    hasher.digest()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::{CatalogLists, DataOrigin, FileContent};

    fn catalog(lengths: &[u64]) -> Catalog {
        let mut catalog = CatalogLists::default();
        for &len_bytes in lengths {
            let content = FileContent { len_bytes, ..FileContent::default() };
            catalog.push(DataOrigin::Synthetic { seed: 0, stream: 0 }, content);
        }
        catalog.finish()
    }

    #[test]
    fn by_files_the_last_batch_of_each_epoch_is_short() {
        let catalog = catalog(&[1; 5]);
        let options = LoadOptions { epochs: 2, batch_samples: NonZeroU64::new(2), ..LoadOptions::default() };
        let batches: Vec<_> = BatchPlan::new(&catalog, &options, &LoadState::default()).collect();
        let held: Vec<_> = batches.iter().map(samples).collect();
        assert_eq!(held, [vec![0, 1], vec![2, 3], vec![4], vec![0, 1], vec![2, 3], vec![4]]);
        assert_eq!(batches.iter().map(|batch| batch.index_overall).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
        assert_eq!(batches.iter().map(|batch| batch.epoch).collect::<Vec<_>>(), [0, 0, 0, 1, 1, 1]);
    }

    #[test]
    fn ranks_have_equal_batches_with_even_or_drop_last() {
        let counts = |samples: usize, world, even, drop_last| {
            let ranks = (0..world).map(|rank| {
                let (rank, batch_samples) = (crate::Rank::new(rank, world), NonZeroU64::new(10));
                let options = LoadOptions { batch_samples, rank, even, drop_last, ..LoadOptions::default() };
                let planned: Vec<_> =
                    BatchPlan::new(&catalog(&vec![1; samples]), &options, &LoadState::default()).collect();
                assert_eq!(planned.len() as u64, BatchPlan::count(&catalog(&vec![1; samples]), &options, 0));
                planned.iter().map(|batch| batch.parts.len()).collect::<Vec<_>>()
            });
            ranks.collect::<Vec<_>>()
        };
        for samples in 99..=102 {
            for world in 1..=3 {
                for (even, drop_last) in [(true, false), (false, true), (true, true)] {
                    let ranks = counts(samples, world, even, drop_last);
                    assert!(ranks.iter().all(|one| *one == ranks[0]), "{samples} {world} {even} {drop_last} {ranks:?}");
                    assert!(!drop_last || ranks[0].iter().all(|len| *len == 10), "{ranks:?}");
                }
            }
        }
        assert_eq!(counts(21, 2, false, false), [[10, 1].as_slice(), [10].as_slice()]);
        assert_eq!(counts(1, 3, true, false), [[1], [1], [1]], "fewer samples than ranks");
    }

    fn samples(batch: &PlannedBatch) -> Vec<usize> {
        batch.parts.iter().map(|part| part.sample).collect()
    }

    /// Returns the parts of each batch, as sample, start and length.
    fn parts(lengths: &[u64], max_bytes: u64, max_samples: u64) -> Vec<Vec<(usize, u64, u64)>> {
        let options = LoadOptions {
            batch_bytes: NonZeroU64::new(max_bytes),
            batch_samples: NonZeroU64::new(max_samples),
            ..LoadOptions::default()
        };
        let catalog = catalog(lengths);
        let batches = BatchPlan::new(&catalog, &options, &LoadState::default()).map(|batch| {
            assert_eq!(batch.len_bytes, batch.parts.iter().map(|part| part.len_bytes).sum::<u64>());
            batch.parts.iter().map(|part| (part.sample, part.start, part.len_bytes)).collect()
        });
        batches.collect()
    }

    #[test]
    fn a_sample_longer_than_a_batch_is_split_and_shares_its_last_batch() {
        let split = parts(&[3, 20, 2, 8, 0, 9], 8, 0);
        let expected: [&[_]; 6] =
            [&[(0, 0, 3)], &[(1, 0, 8)], &[(1, 8, 8)], &[(1, 16, 4), (2, 0, 2)], &[(3, 0, 8), (4, 0, 0)], &[(5, 0, 8)]];
        assert_eq!(split[..6], expected);
        assert_eq!(split[6..], [[(5, 8, 1)]]);
        assert_eq!(parts(&[20, 1], 8, 1), [[(0, 0, 8)], [(0, 8, 8)], [(0, 16, 4)], [(1, 0, 1)]]);
    }

    #[test]
    fn without_a_limit_on_bytes_no_sample_is_split() {
        assert_eq!(parts(&[1 << 50, 1], 0, 1), [[(0, 0, 1 << 50)], [(1, 0, 1)]]);
    }

    #[test]
    fn every_byte_of_an_epoch_is_planned_once_in_order() {
        for max_bytes in 1..40 {
            let lengths = [0, 17, 39, 1, 0, 40, 41, 5, 120, 0];
            let mut at = vec![0; lengths.len()];
            for batch in parts(&lengths, max_bytes, 0) {
                assert!(batch.iter().map(|part| part.2).sum::<u64>() <= max_bytes);
                for (sample, start, len_bytes) in batch {
                    assert_eq!(at[sample], start);
                    at[sample] += len_bytes;
                }
            }
            assert_eq!(at, lengths);
        }
    }

    #[test]
    fn lengths_near_the_largest_number_do_not_overflow() {
        let max = 1 << 63;
        assert_eq!(parts(&[u64::MAX, 3], max, 0), [vec![(0, 0, max)], vec![(0, max, max - 1)], vec![(1, 0, 3)]]);
        assert_eq!(parts(&[u64::MAX, u64::MAX], 0, 1), [[(0, 0, u64::MAX)], [(1, 0, u64::MAX)]]);
    }
}
