//! The position of a load, from which a later process loads the rest. A hash represents its catalog and options.

/// The next batch of a load: four numbers for the program to store.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LoadState {
    /// Epoch of the next batch, from 0.
    pub epoch: u64,
    /// Index in that epoch, from 0.
    pub index_in_epoch: u64,
    /// Index in the whole load, from 0.
    pub index_overall: u64,
    /// A hash of the samples, the limits of a batch, the seed and the rank, which determine the batches.
    pub plan_hash: u64,
}

/// The reason why a state is refused.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{0}")]
pub struct StateError(pub(super) String);
