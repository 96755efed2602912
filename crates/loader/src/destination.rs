//! The destination of batches: a device, or a host sink in its place.
//!
//! A destination has lanes, each with a stream and the memory that its copies write to. It never waits for a copy; the
//! [`Completion`] that [`Destination::send`] returns does.
//!
//! - **lane-I1**: a lane gets its next batch only after its previous copy is done, so its memory may be read back and
//!   replaced in between.

use crate::batch_plan::LoadedBatch;
use pinpool::copy::CopyTarget;
use pinpool::{Completion, Error, PinnedBuf};
use pinpool_testing::{SinkMemory, SinkStream};

/// A device with several lanes. Each lane copies one batch at a time.
pub trait Destination {
    /// Returns the name for reports, such as the name of the device. Default: `custom destination`.
    fn name(&self) -> String {
        "custom destination".to_string()
    }

    /// Returns the number of batches that may be in flight at once.
    fn lanes(&self) -> usize;

    /// Starts the copy of `buffer` on `lane`, which is below [`Destination::lanes`] and idle. `batch` describes the bytes of
    /// the buffer: samples, ranges and arrays. Its own buffer is empty.
    ///
    /// # Errors
    ///
    /// If the copy cannot be started or the device has no memory for it. The buffer has returned to its pool then, unless the
    /// device failed ([`Error::is_device_failed`]) and the copy may be running.
    fn send(&mut self, lane: usize, batch: &LoadedBatch, buffer: PinnedBuf) -> Result<Completion, Error>;

    /// Calls `read` with the device memory of `lane`, which begins with the bytes of the last copy and may be longer. That copy must
    /// be complete.
    ///
    /// # Errors
    ///
    /// If the memory of the device cannot be read.
    fn read_back(&mut self, lane: usize, read: &mut dyn FnMut(&[u8])) -> Result<(), Error>;
}

/// A host sink in place of a device, to measure and to verify: threads instead of streams, and ordinary memory.
#[derive(Debug)]
pub struct SinkDestination {
    lanes: Vec<(SinkStream, SinkMemory)>,
}

impl SinkDestination {
    /// Creates a sink of `lanes` lanes, each with a thread.
    ///
    /// # Errors
    ///
    /// [`Error::is_unavailable`] if the system cannot start a thread.
    pub fn new(lanes: usize) -> Result<Self, Error> {
        let lane = |_| Ok((SinkStream::new()?, SinkMemory::new(0)));
        Ok(Self { lanes: (0..lanes).map(lane).collect::<Result<_, Error>>()? })
    }
}

impl Destination for SinkDestination {
    fn name(&self) -> String {
        "host sink (no GPU)".to_string()
    }

    fn lanes(&self) -> usize {
        self.lanes.len()
    }

    fn send(&mut self, lane: usize, _: &LoadedBatch, buffer: PinnedBuf) -> Result<Completion, Error> {
        let (stream, memory) = &mut self.lanes[lane];
        if buffer.len() > memory.capacity_bytes() {
            *memory = SinkMemory::new(buffer.len());
        }
        Ok(buffer.copy_to(stream, memory)?)
    }

    fn read_back(&mut self, lane: usize, read: &mut dyn FnMut(&[u8])) -> Result<(), Error> {
        read(self.lanes[lane].1.read());
        Ok(())
    }
}
