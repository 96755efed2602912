//! The reports of a run: batches and failures while it runs, statistics at its end.

use std::io;
use std::time::Duration;

use crate::failure::Failure;

/// Receives the events of a run, on the thread that called [`Loader::run`](crate::Loader::run). `()` ignores them.
pub trait Observer {
    /// Called when a batch has arrived, completely or in part.
    fn on_batch(&mut self, _batch: &ArrivedBatch) {}

    /// Called when a sample, file or batch is skipped, but not again for files that were reported before.
    fn on_failure(&mut self, _failure: &Failure) {}
}

impl Observer for () {}

/// A batch that arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ArrivedBatch {
    /// Index in the run, from 0.
    pub index_overall: u64,
    /// Samples that are complete with this batch.
    pub samples: u64,
    /// Bytes that arrived.
    pub bytes: u64,
}

/// The statistics of a run. Samples and bytes are those that arrived, over all epochs.
#[must_use = "the run may have failed: see `into_result` and `is_complete`"]
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct LoadSummary {
    /// Epochs completed.
    pub epochs: u64,
    /// Files with all samples delivered, each counted once over all epochs; an archive is one file.
    pub files: u64,
    /// Samples that arrived completely: one for a plain file, any number for an archive; counted again in each epoch.
    pub samples: u64,
    /// Files and paths with skipped samples, each counted once.
    pub failed_files: u64,
    /// Bytes that arrived, including partial samples.
    pub bytes: u64,
    /// Batches that arrived, completely or in part.
    pub batches: u64,
    /// Batches with the same checksum on the destination as when they were read.
    pub verified_batches: u64,
    /// Largest number of copies in flight at once.
    pub max_in_flight_batches: u64,
    /// Time from the start of the copying to the end of the last copy.
    pub elapsed: Duration,
    /// The outcome.
    pub outcome: LoadOutcome,
}

/// The outcome of a run.
#[derive(Debug, Default)]
#[non_exhaustive]
pub enum LoadOutcome {
    /// The run ended after the last batch of the last epoch.
    #[default]
    Complete,
    /// The [`StopFlag`](crate::StopFlag) was raised.
    Stopped,
    /// The run ended at an error after which no batch can be loaded, or at the first failed sample if
    /// [`LoadOptions::stop_at_failure`](crate::LoadOptions::stop_at_failure) is set.
    Failed(LoadError),
}

/// An error that ends a run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The system cannot start a thread.
    #[error(
        "cannot start a thread to read with: {0}; raise the limit on processes (`ulimit -u`) or on memory (`ulimit -v`)"
    )]
    NoThread(#[source] io::Error),
    /// [`Destination::lanes`](crate::Destination::lanes) is 0.
    #[error("the destination has no lanes")]
    NoLanes,
    /// The destination refused a copy, a copy failed, or what arrived could not be read back.
    #[error(transparent)]
    Copy(pinpool::Error),
    /// A sample failed, and [`LoadOptions::stop_at_failure`](crate::LoadOptions::stop_at_failure) is set.
    #[error("stopped at the first failure")]
    StoppedAtFailure,
}

impl LoadSummary {
    /// Returns the summary, or the error that ended the run. A run that was stopped by its
    /// [`StopFlag`](crate::StopFlag), and a run with skipped samples, are not errors.
    ///
    /// # Errors
    ///
    /// The error in [`LoadOutcome::Failed`].
    pub fn into_result(self) -> Result<Self, LoadError> {
        if let LoadOutcome::Failed(error) = self.outcome { Err(error) } else { Ok(self) }
    }

    /// Returns whether the whole catalog arrived.
    pub fn is_complete(&self) -> bool {
        self.failed_files == 0 && matches!(self.outcome, LoadOutcome::Complete)
    }

    /// Returns the throughput in 10^9 bytes per second; 0 for a run that took no time.
    pub fn gb_per_s(&self) -> f64 {
        let seconds = self.elapsed.as_secs_f64();
        if seconds > 0.0 { self.bytes as f64 / 1e9 / seconds } else { 0.0 }
    }
}
