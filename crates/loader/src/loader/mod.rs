//! A load: its inputs, and the run or the batches that it makes.

use crate::batch_plan::{BatchPlan, plan_hash};
use crate::catalog::Catalog;
use crate::destination::Destination;
use crate::options::LoadOptions;
use crate::state::{LoadState, StateError};
use crate::stop::StopFlag;
use crate::summary::{LoadError, LoadOutcome, LoadSummary, Observer};
use pinpool::Pool;

mod reader_threads;
mod sample_reader;
mod transfer;

use reader_threads::ReaderThreads;
pub use reader_threads::{BatchReader, TimedOut};
use transfer::Transfer;

/// Loads a [`Catalog`] through a [`Pool`].
#[derive(Debug, Clone)]
pub struct Loader {
    pool: Pool,
    catalog: Catalog,
    options: LoadOptions,
    start: LoadState,
    stop: StopFlag,
}

impl Loader {
    /// Creates a loader of `catalog` that takes every buffer from `pool`.
    pub fn new(pool: &Pool, catalog: &Catalog, options: LoadOptions) -> Self {
        Self { pool: pool.clone(), catalog: catalog.clone(), options, start: Default::default(), stop: StopFlag::new() }
    }

    /// Sets the flag that ends a run early when it is raised.
    #[must_use]
    pub fn with_stop_flag(self, stop: &StopFlag) -> Self {
        Self { stop: stop.clone(), ..self }
    }

    /// Loads the catalog into `destination` and reports to `observer`.
    ///
    /// The calling thread copies; [`LoadOptions::threads`] threads read and end with this call. An error that ends the run is
    /// in the summary ([`LoadSummary::into_result`]). The failures of the catalog are reported first.
    pub fn run(&self, destination: &mut dyn Destination, observer: &mut dyn Observer) -> LoadSummary {
        let listing_failures = self.catalog.failures();
        let stops_now = self.options.stop_at_failure && !listing_failures.is_empty();
        let listing_failures = if stops_now { &listing_failures[..1] } else { listing_failures };
        listing_failures.iter().for_each(|failure| observer.on_failure(failure));
        let started = if stops_now { Err(LoadError::StoppedAtFailure) } else { ReaderThreads::start(self) };
        let mut summary = match started {
            Ok(threads) => Transfer::new(self, threads, destination, observer).run(),
            Err(error) => LoadSummary { outcome: LoadOutcome::Failed(error), ..LoadSummary::default() },
        };
        // Returns the buffers of the last copies to the pool; there may be no later request that does so.
        self.pool.maintain();
        summary.failed_files += listing_failures.len() as u64;
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
    pub fn resume_at(mut self, state: LoadState) -> Result<Self, StateError> {
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
    /// epochs only if they are shuffled and either `batch_bytes` limits the batches or a rank has compressed archives.
    pub fn batches_in_epoch(&self, epoch: u64) -> u64 {
        BatchPlan::count(&self.catalog, &self.options, epoch)
    }
}
