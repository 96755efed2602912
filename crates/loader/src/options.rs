//! The options of a load, with their defaults.

use std::num::{NonZeroU64, NonZeroUsize};
use std::thread;

use crate::decode::DecodedField;

/// Options of a load.
///
/// ```
/// use pinpool_loader::LoadOptions;
///
/// let options = LoadOptions { epochs: 3, shuffle_seed: Some(7), ..LoadOptions::default() };
/// ```
///
/// A later version may have more options, so complete a literal with `..LoadOptions::default()`.
#[derive(Debug, Clone)]
pub struct LoadOptions {
    /// Threads that read. Default: one for each core that the process may use.
    pub threads: NonZeroUsize,
    /// Largest number of batches that are read ahead of the copies. Default: `None`, two for each thread.
    pub read_ahead: Option<NonZeroUsize>,
    /// Largest number of samples in a batch. Default: `None`, any number.
    pub batch_samples: Option<NonZeroU64>,
    /// Largest number of bytes in a batch; a longer sample is read in parts of this many bytes, so that no file is too large
    /// for the pool. `None`: no limit, and each sample is in one batch. Default: 16 MiB.
    pub batch_bytes: Option<NonZeroU64>,
    /// Passes over the catalog. Default: 1.
    pub epochs: u64,
    /// Seed of a new order for each epoch; `None`, the default, keeps the order of the catalog.
    pub shuffle_seed: Option<u64>,
    /// Which of several processes this is. Each loads a part of each epoch, from the same catalog with the same options. Default:
    /// `None`, this process loads everything.
    pub rank: Option<Rank>,
    /// Gives all ranks the same number of samples: each epoch repeats its first samples until `world_size` divides their number.
    /// A compressed archive counts as one sample, so with archives the ranks may still differ. Default: `false`.
    pub even: bool,
    /// Ends an epoch with its last complete batch of `batch_samples` samples, after the same number of batches in all ranks.
    /// No effect without `batch_samples`. With `batch_bytes` (by default 16 MiB) or compressed archives, batches may be
    /// incomplete and differ in number. Default: `false`.
    pub drop_last: bool,
    /// Reads each sample back from the destination and compares its checksum. Default: `false`.
    pub verify: bool,
    /// Ends a [`Loader::run`](crate::Loader::run) at the first failure. Default: `false`.
    pub stop_at_failure: bool,
    /// The fields to decode, each into an array of the batch. Then each sample lies in one batch, `verify` checks nothing, and
    /// `batch_bytes` limits the encoded bytes of a batch, unless the batch has only one sample. Default: none, and a batch has
    /// the bytes of its samples.
    pub decode: Vec<DecodedField>,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self {
            threads: thread::available_parallelism().unwrap_or(NonZeroUsize::MIN),
            read_ahead: None,
            batch_samples: None,
            batch_bytes: NonZeroU64::new(16 << 20),
            epochs: 1,
            shuffle_seed: None,
            rank: None,
            even: false,
            drop_last: false,
            verify: false,
            stop_at_failure: false,
            decode: Vec::new(),
        }
    }
}

/// One of `world_size` processes that share each epoch: it loads every `world_size`-th sample (or whole compressed file) of the
/// epoch's order, from number `index` on. All ranks together load the epoch; they differ by one sample (or file) at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rank {
    index: u64,
    world_size: NonZeroU64,
}

impl Rank {
    /// Returns rank `index` of `world_size`, or `None` if `index` is not below `world_size`.
    pub fn new(index: u64, world_size: u64) -> Option<Self> {
        let world_size = NonZeroU64::new(world_size).filter(|size| index < size.get())?;
        Some(Self { index, world_size })
    }

    /// Returns the index of the process, from 0.
    pub fn index(&self) -> u64 {
        self.index
    }

    /// Returns the number of processes.
    pub fn world_size(&self) -> u64 {
        self.world_size.get()
    }
}
