//! The position of a load, from which a later process loads the rest.
//!
//! Knows no catalog and no options: it holds a number that represents them.

/// The next batch of a load: four numbers for the program to store.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LoadState {
    /// Epoch of the next batch, from 0.
    pub epoch: u64,
    /// Its place in that epoch, from 0.
    pub batch: u64,
    /// Its place in the whole load, from 0.
    pub number: u64,
    /// A hash of what determines the batches: the samples, the limits of a batch, seed and shard.
    pub plan: u64,
}

/// The reason why a state is refused.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{0}")]
pub struct StateError(pub(super) String);
