//! The host sink: threads with queues in the place of streams, ordinary memory in the place of the device's.

use super::Destination;
use crate::copy::sink::{SinkMem, SinkStream};
use crate::{Completion, Error, PinnedBuf};

/// Stands for a GPU where there is none.
#[derive(Debug)]
pub struct SinkDestination {
    lanes: Vec<Lane>,
}

#[derive(Debug)]
struct Lane {
    stream: SinkStream,
    memory: SinkMem,
    memory_bytes: usize,
}

impl SinkDestination {
    /// A sink with as many lanes, each with a thread of its own.
    ///
    /// # Errors
    ///
    /// When the system has no thread to give.
    pub fn new(lanes: usize) -> Result<SinkDestination, Error> {
        let lane = |_| Ok(Lane { stream: SinkStream::new()?, memory: SinkMem::new(0), memory_bytes: 0 });
        Ok(SinkDestination { lanes: (0..lanes).map(lane).collect::<Result<_, Error>>()? })
    }
}

impl Destination for SinkDestination {
    fn describe(&self) -> String {
        "host sink (no GPU)".to_string()
    }

    fn lanes(&self) -> usize {
        self.lanes.len()
    }

    fn send(&mut self, lane: usize, batch: PinnedBuf) -> Result<Completion, Error> {
        let lane = &mut self.lanes[lane];
        if batch.len() > lane.memory_bytes {
            lane.memory = SinkMem::new(batch.len());
            lane.memory_bytes = batch.len();
        }
        batch.copy_to(&lane.stream, &mut lane.memory)
    }

    fn read_back(&mut self, lane: usize, read: &mut dyn FnMut(&[u8])) -> Result<(), Error> {
        read(self.lanes[lane].memory.read());
        Ok(())
    }
}
