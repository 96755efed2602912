//! The inputs of a run: pool, catalog, options with their defaults, start and stop flag.

use std::num::{NonZeroU64, NonZeroUsize};
use std::thread;

use super::catalog::Catalog;
use super::decode::DecodedField;
use super::state::LoadState;
use super::stop::StopFlag;
use pinpool::Pool;

/// Options of a load.
///
/// ```
/// let mut options = pinpool_loader::LoadOptions::default();
/// options.epochs = 3;
/// options.shuffle_seed = Some(7);
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct LoadOptions {
    /// Threads that read. Default: one for each core that the process may use.
    pub workers: NonZeroUsize,
    /// Largest number of batches that are read ahead of the copies. Default: `None`, two for each worker.
    pub prefetch: Option<NonZeroUsize>,
    /// Largest number of samples in a batch. Default: `None`, any number.
    pub batch_samples: Option<NonZeroU64>,
    /// Largest number of bytes in a batch; a longer sample is read in parts of this many bytes, so that no file is too large
    /// for the pool. `None`: no limit, and each sample is in one batch. Default: 16 MiB.
    pub batch_bytes: Option<NonZeroU64>,
    /// Passes over the catalog. Default: 1.
    pub epochs: u64,
    /// Seed of a new order for each epoch; `None`, the default, keeps the order of the catalog.
    pub shuffle_seed: Option<u64>,
    /// The part of each epoch that this process loads, of several that load the same catalog with the same options. Default:
    /// `None`, all of it.
    pub shard: Option<Shard>,
    /// Gives all shards the same number of samples: each epoch repeats its first samples until `world` divides their number. A
    /// compressed archive counts as one sample, so with archives the shards may still differ. Default: no.
    pub even: bool,
    /// Ends an epoch with its last complete batch of `batch_samples` samples, after the same number of batches in all shards.
    /// Needs `batch_samples`, no `batch_bytes`, and no compressed archives. Default: no.
    pub drop_last: bool,
    /// Reads each sample back from the destination and compares its checksum. Default: no.
    pub verify: bool,
    /// Ends a [`Loader::run`](Loader::run) at the first failure. Default: no.
    pub strict: bool,
    /// The fields to decode, each into an array of the batch. Then each sample lies in one batch, `verify` checks nothing, and
    /// `batch_bytes` limits the encoded bytes of a batch, unless the batch has only one sample. Default: none, and a batch has
    /// the bytes of its samples.
    pub decode: Vec<DecodedField>,
}

impl Default for LoadOptions {
    fn default() -> LoadOptions {
        LoadOptions {
            workers: thread::available_parallelism().unwrap_or(NonZeroUsize::MIN),
            prefetch: None,
            batch_samples: None,
            batch_bytes: NonZeroU64::new(16 << 20),
            epochs: 1,
            shuffle_seed: None,
            shard: None,
            even: false,
            drop_last: false,
            verify: false,
            strict: false,
            decode: Vec::new(),
        }
    }
}

/// One of several disjoint parts of each epoch: every `world`-th sample (or whole compressed file) of its order, from number
/// `rank` on. All parts together are the epoch; they differ by one sample (or file) at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shard {
    rank: u64,
    world: NonZeroU64,
}

impl Shard {
    /// Returns part `rank` of `world`, or `None` if `rank` is not below `world`.
    #[must_use]
    pub fn new(rank: u64, world: u64) -> Option<Shard> {
        let world = NonZeroU64::new(world).filter(|world| rank < world.get())?;
        Some(Shard { rank, world })
    }

    /// Returns the number of the part, from 0.
    #[must_use]
    pub fn rank(&self) -> u64 {
        self.rank
    }

    /// Returns the number of parts.
    #[must_use]
    pub fn world(&self) -> u64 {
        self.world.get()
    }
}

/// Loads a [`Catalog`] through a [`Pool`].
#[derive(Debug, Clone)]
pub struct Loader {
    pub(super) pool: Pool,
    pub(super) catalog: Catalog,
    pub(super) options: LoadOptions,
    pub(super) start: LoadState,
    pub(super) stop: StopFlag,
}

impl Loader {
    /// Creates a loader of `catalog` that takes every buffer from `pool`.
    #[must_use]
    pub fn new(pool: &Pool, catalog: &Catalog, options: LoadOptions) -> Loader {
        let start = LoadState::default();
        Loader { pool: pool.clone(), catalog: catalog.clone(), options, start, stop: StopFlag::new() }
    }

    /// Ends a run early when `stop` is raised.
    #[must_use]
    pub fn stop_on(mut self, stop: &StopFlag) -> Loader {
        self.stop = stop.clone();
        self
    }
}
