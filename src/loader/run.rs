//! The inputs of a run: pool, catalog, options and the flag that stops it.
//!
//! Owns the defaults. Starts no thread and reads nothing.

use std::num::{NonZeroU64, NonZeroUsize};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use super::catalog::Catalog;
use crate::Pool;

/// How a catalog is loaded.
///
/// ```
/// let mut options = pinpool::loader::LoadOptions::default();
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
    /// Whether each sample is read back from the destination and compared by checksum. Default: no.
    pub verify: bool,
    /// Whether the first failure ends the run. Default: no.
    pub strict: bool,
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
            verify: false,
            strict: false,
        }
    }
}

/// Loads a [`Catalog`] through a [`Pool`].
#[derive(Debug)]
pub struct Loader<'a> {
    pub(super) pool: &'a Pool,
    pub(super) catalog: &'a Catalog,
    pub(super) options: LoadOptions,
    pub(super) stop: StopFlag,
}

impl<'a> Loader<'a> {
    /// A loader of `catalog` whose every buffer comes from `pool`.
    #[must_use]
    pub fn new(pool: &'a Pool, catalog: &'a Catalog, options: LoadOptions) -> Loader<'a> {
        Loader { pool, catalog, options, stop: StopFlag::new() }
    }

    /// Ends a run early when `stop` is raised.
    #[must_use]
    pub fn stop_on(mut self, stop: &StopFlag) -> Loader<'a> {
        self.stop = stop.clone();
        self
    }
}

/// A flag, shared by its clones, that any thread may raise to end a listing or a run early.
#[derive(Debug, Clone, Default)]
pub struct StopFlag(Arc<AtomicBool>);

impl StopFlag {
    /// A flag that is not raised.
    #[must_use]
    pub fn new() -> StopFlag {
        StopFlag::default()
    }

    /// Raises the flag. Returns whether it was raised before.
    pub fn raise(&self) -> bool {
        // Relaxed: the flag publishes no other data.
        self.0.swap(true, Ordering::Relaxed)
    }

    /// Whether the flag is raised.
    #[must_use]
    pub fn is_raised(&self) -> bool {
        // Relaxed: a thread that sees the flag late reads one more chunk.
        self.0.load(Ordering::Relaxed)
    }
}
