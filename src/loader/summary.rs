//! What a run did, in numbers, and how it ended.
//!
//! Owns the figures of the loader's own; the pool's are in its [`Stats`](crate::Stats). Never prints.

use std::time::Duration;

/// The figures of a run. Files, samples and bytes are those that arrived, over all epochs.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct Outcome {
    /// Epochs that ran to their end.
    pub epochs: u64,
    /// Files all of whose samples arrived, counted anew in each epoch; a container is one.
    pub files: u64,
    /// Samples that arrived: a plain file is one, a container has any number.
    pub samples: u64,
    /// Files and paths of which something was lost, each counted once.
    pub failed_files: u64,
    /// Bytes that arrived.
    pub bytes: u64,
    /// Batches that arrived, whole or in part.
    pub batches: u64,
    /// Batches of which every sample was the same at the destination as when it was read.
    pub verified_batches: u64,
    /// Copies under way at once, at most.
    pub max_in_flight_batches: u64,
    /// From the first claim of a batch to the last arrival.
    pub elapsed: Duration,
    /// How it ended.
    pub ended: Ended,
}

/// How a run ended.
#[derive(Debug, Default)]
#[non_exhaustive]
pub enum Ended {
    /// With the last batch of the last epoch.
    #[default]
    Complete,
    /// Someone asked for it ([`Stop`](super::Stop)).
    Stopped,
    /// At the first failure, as a strict run does.
    Strict,
    /// The destination or the system refused to go on.
    Broken(String),
}

impl Outcome {
    /// Whether everything that was asked for arrived.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.failed_files == 0 && matches!(self.ended, Ended::Complete)
    }

    /// Billions of bytes a second; zero for a run that took no time.
    #[must_use]
    pub fn gb_per_s(&self) -> f64 {
        let seconds = self.elapsed.as_secs_f64();
        if seconds > 0.0 { self.bytes as f64 / 1e9 / seconds } else { 0.0 }
    }
}
