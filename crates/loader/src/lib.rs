//! The reference loader: reads files into batches in pinned memory and copies them to a device. It uses only
//! the pool's public API.
//!
//! [`Loader::batches`] iterates over batches in host memory; [`Loader::run`] copies them to a [`Destination`]. The loader never
//! pins memory or prints, and copies bytes on the host only with [`LoadOptions::decode`]. The feature `cuda` (default) adds
//! `CudaDestination`, and `decode` adds `ImageDecoder`.
//!
//! ```text
//!                       Catalog            files, containers and their samples
//!                          |
//!                      batch_plan          the samples of each batch, in order
//!                          |
//!   +-------------- one batch at a time -----------+
//!   |  thread 0         thread 1         thread 2  |     pool.get(len): a pinned buffer
//!   |  pread            pread            pread     |     file -> buffer.wait_slice_mut(), checksum on the way
//!   +----------------------------------------------+
//!                    reader_threads                      in order, at most `prefetch` ahead
//!               +----------+----------+
//!               |                  transfer              buffer.copy_to(stream, memory): takes the buffer
//!               |                lane 0 | lane 1         completion.wait(): the buffer has returned
//!               |                     |
//!          BatchReader           Destination             a GPU or a host sink; checksums of the copied bytes
//! ```
//!
//! ```
//! use pinpool::Pool;
//! use pinpool_loader::{Catalog, Failure, LoadOptions, Loader, Observer, SinkDestination};
//!
//! struct PrintFailures;
//!
//! impl Observer for PrintFailures {
//!     fn on_failure(&mut self, failure: &Failure) {
//!         eprintln!("{failure}");
//!     }
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let pool = Pool::builder().build()?;
//! let catalog = Catalog::from_paths(&["src"]);
//! let mut options = LoadOptions::default();
//! options.verify = true;
//! // With the feature `cuda` and a GPU: `CudaDestination::new(0, 2)?`.
//! let mut destination = SinkDestination::new(2)?;
//! let summary = Loader::new(&pool, &catalog, options).run(&mut destination, &mut PrintFailures);
//! assert!(summary.is_complete());
//! assert_eq!(summary.bytes, catalog.len_bytes());
//! println!("{} files, {:.1} GB/s", summary.files, summary.gb_per_s());
//! # Ok(())
//! # }
//! ```
//!
//! Batches in host memory, and the state from which a later process can continue:
//!
//! ```
//! use pinpool::Pool;
//! use pinpool_loader::{Catalog, LoadOptions, Loader};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let catalog = Catalog::from_paths(&["src"]);
//! let loader = Loader::new(&Pool::builder().build()?, &catalog, LoadOptions::default());
//! let mut batches = loader.batches()?;
//! while let Some(batch) = batches.next() {
//!     for part in &batch.parts {
//!         let bytes = &batch.buffer.wait_slice()?[part.range.clone()];
//!         println!("{}: {} bytes", catalog.name(part.sample), bytes.len());
//!     }
//!     println!("{:?}", batches.state()); // `loader.resume_at(state)?` loads the rest
//! }
//! # Ok(())
//! # }
//! ```
//!
//! - **loader-I1**: with `batch_bytes` and without `decode`, a run holds at most `(prefetch + lanes) * batch_bytes` of the
//!   pool, for files of any length: `prefetch` buffers ahead of the copies and one for each lane of the destination, each
//!   rounded up to a size class (by less than an eighth; above 16 MiB by less than 2 MiB or a 64th). The destination allocates
//!   another `lanes * batch_bytes`. A [`BatchReader`] holds at most `prefetch` buffers that it has not returned. Each open
//!   compressed file adds a decompressor.
//! - **loader-I2**: a sample that cannot be loaded is skipped. [`Loader::run`] reports the first failure of each file to the
//!   [`Observer`]. A [`BatchReader`] returns each failure with its batch, in [`LoadedBatch::failures`].

mod batch_plan;
mod catalog;
mod compressed;
mod container;
#[cfg(feature = "cuda")]
mod cuda_destination;
mod decode;
mod destination;
mod failure;
mod listing;
mod reader_threads;
mod run;
mod sample_reader;
mod state;
mod stop;
mod summary;
mod synthetic;
mod transfer;

pub use self::batch_plan::{LoadedBatch, LoadedPart};
pub use self::catalog::{Catalog, DataFile, DataOrigin, FileRange, Sample};
pub use self::compressed::Compression;
#[cfg(feature = "cuda")]
pub use self::cuda_destination::CudaDestination;
pub use self::decode::{Decode, DecodedField};
#[cfg(feature = "decode")]
pub use self::decode::{Fit, ImageDecoder, Layout, MAX_PIXELS};
pub use self::destination::{Destination, SinkDestination};
pub use self::failure::{Failure, FailureCause};
pub use self::listing::ListOptions;
pub use self::reader_threads::{BatchReader, TimedOut};
pub use self::run::{LoadOptions, Loader, Rank};
pub use self::state::{LoadState, StateError};
pub use self::stop::StopFlag;
pub use self::summary::{ArrivedBatch, LoadError, LoadOutcome, LoadSummary, Observer};

use self::batch_plan::{BatchPlan, plan_hash};
use self::reader_threads::ReaderThreads;
use self::transfer::Transfer;

impl Loader {
    /// Loads the catalog into `destination` and reports to `observer`.
    ///
    /// The calling thread copies; [`LoadOptions::threads`] threads read and end with this call. An error that ends the run is
    /// in [`LoadSummary::outcome`]. The failures of the catalog are reported first.
    pub fn run(&self, destination: &mut dyn Destination, observer: &mut dyn Observer) -> LoadSummary {
        let unlisted = self.catalog.failures();
        let is_refused = self.options.stop_at_failure && !unlisted.is_empty();
        let unlisted = if is_refused { &unlisted[..1] } else { unlisted };
        unlisted.iter().for_each(|failure| observer.on_failure(failure));
        let refused = is_refused.then_some(LoadOutcome::StoppedAtFailure);
        let started = refused.map_or_else(|| ReaderThreads::start(self).map_err(LoadOutcome::Failed), Err);
        let mut summary = match started {
            Ok(threads) => Transfer::new(self, threads, destination, observer).run(),
            Err(outcome) => LoadSummary { outcome, ..LoadSummary::default() },
        };
        // Returns the buffers of the last copies to the pool; there may be no later request that does so.
        self.pool.maintain();
        summary.failed_files += unlisted.len() as u64;
        summary
    }

    /// Returns an iterator over the batches of the catalog, in pinned memory. [`LoadOptions::threads`] threads read ahead until
    /// it is dropped. The failures of the catalog are only in [`Catalog::failures`].
    ///
    /// # Errors
    ///
    /// [`LoadError::NoThread`]: the system cannot start a thread.
    pub fn batches(&self) -> Result<BatchReader, LoadError> {
        Ok(BatchReader::new(ReaderThreads::start(self)?, self.start_state()))
    }

    /// Returns the state before the first batch of this loader.
    pub fn start_state(&self) -> LoadState {
        LoadState { plan_hash: plan_hash(&self.catalog, &self.options), ..self.start }
    }

    /// Returns a loader of the remaining batches, which an uninterrupted load would yield after `state`.
    ///
    /// # Errors
    ///
    /// If this loader's batches differ from the batches of the load that saved `state`.
    pub fn resume_at(mut self, state: LoadState) -> Result<Loader, StateError> {
        let here = plan_hash(&self.catalog, &self.options);
        if state.plan_hash != here {
            return Err(StateError(format!(
                "the state belongs to another load (plan {:016x}, here {here:016x}): resume with the same files, of the same names \
                 and lengths, and the same limits of a batch, seed, rank, `even`, `drop_last` and `decode`",
                state.plan_hash
            )));
        }
        let LoadState { epoch, index_in_epoch, .. } = state;
        let batches = self.batches_in_epoch(epoch);
        if index_in_epoch > batches {
            let place = format!("batch {index_in_epoch} of epoch {epoch}, which has {batches}");
            return Err(StateError(format!("the state is after {place}: it was changed or belongs to another load")));
        }
        self.start = state;
        Ok(self)
    }

    /// Returns the number of batches of an epoch. Recomputes it from all samples on each call. The number differs between
    /// epochs only if they are shuffled and, in addition, batches are limited by bytes or a rank has compressed archives.
    pub fn batches_in_epoch(&self, epoch: u64) -> u64 {
        BatchPlan::count(&self.catalog, &self.options, epoch)
    }
}
