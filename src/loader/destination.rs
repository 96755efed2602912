//! Where batches go: a GPU, or a host sink that stands for one.
//!
//! Owns the lanes (a stream and the memory its copies land in) and the way back from them. Never waits for a copy: that is
//! what the [`Completion`] it hands out is for.
//!
//! I1. A lane takes its next batch only when the one before is done: the memory may be read back in between, and grown.

#[cfg(feature = "cuda")]
mod cuda;
mod sink;

#[cfg(feature = "cuda")]
pub use cuda::CudaDestination;
pub use sink::SinkDestination;

use crate::{Completion, Error, PinnedBuf};

/// A place with several lanes, each of which takes one batch at a time.
///
/// The loader needs no more than this of a GPU; a test puts itself in between and damages what arrives.
pub trait Destination {
    /// What the bytes are copied to, for people: a device's name, or what stands for one.
    fn describe(&self) -> String;

    /// How many batches may be under way at once.
    fn lanes(&self) -> usize;

    /// Starts the copy of `batch` on `lane`, which is below [`Destination::lanes`] and idle (I1).
    ///
    /// # Errors
    ///
    /// When the copy could not be started, or there is no memory at the far end. The buffer is back in its pool then.
    fn send(&mut self, lane: usize, batch: PinnedBuf) -> Result<Completion, Error>;

    /// Lets `read` see what the last copy on `lane` brought, from the far end's own memory. The copy is done.
    ///
    /// # Errors
    ///
    /// When the far end cannot be read.
    fn read_back(&mut self, lane: usize, read: &mut dyn FnMut(&[u8])) -> Result<(), Error>;
}
