//! A CUDA device: a stream and a slice of device memory for each lane.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream};

use super::Destination;
use crate::error::ErrorKind;
use crate::{Completion, Error, PinnedBuf, driver};

/// The device that the pool pins for.
#[derive(Debug)]
pub struct CudaDestination {
    name: String,
    lanes: Vec<Lane>,
    /// Where a lane is read back to; ordinary memory, since this is a check and not the job.
    host: Vec<u8>,
}

#[derive(Debug)]
struct Lane {
    stream: Arc<CudaStream>,
    memory: CudaSlice<u8>,
}

impl CudaDestination {
    /// Opens `lanes` streams on device number `ordinal`.
    ///
    /// # Errors
    ///
    /// When there is no driver or no such device, or the driver refuses a stream.
    pub fn new(ordinal: u32, lanes: usize) -> Result<CudaDestination, Error> {
        // Asked first because cudarc panics where there is no driver.
        if !driver::is_present() {
            return Err(unavailable("no CUDA driver (libcuda.so.1) on this machine"));
        }
        let refused = |error| unavailable(driver::error_name(error));
        let context = CudaContext::new(ordinal as usize).map_err(refused)?;
        let lane = |_| {
            let stream = context.new_stream()?;
            let memory = stream.alloc_zeros(1)?;
            Ok(Lane { stream, memory })
        };
        let lanes = (0..lanes).map(lane).collect::<Result<_, _>>().map_err(refused)?;
        let name = context.name().map_err(refused)?;
        Ok(CudaDestination { name: format!("CUDA device {ordinal} ({name})"), lanes, host: Vec::new() })
    }
}

impl Destination for CudaDestination {
    fn describe(&self) -> String {
        self.name.clone()
    }

    fn lanes(&self) -> usize {
        self.lanes.len()
    }

    fn send(&mut self, lane: usize, batch: PinnedBuf) -> Result<Completion, Error> {
        let lane = &mut self.lanes[lane];
        if batch.len() > lane.memory.len() {
            lane.memory = lane.stream.alloc_zeros(batch.len()).map_err(|error| {
                Error::copy(batch.len(), format!("no device memory for it: {}", driver::error_name(error)))
            })?;
        }
        batch.copy_to(&lane.stream, &mut lane.memory)
    }

    fn read_back(&mut self, lane: usize, read: &mut dyn FnMut(&[u8])) -> Result<(), Error> {
        let Lane { stream, memory } = &self.lanes[lane];
        let len = memory.len();
        self.host.resize(len, 0);
        stream
            .memcpy_dtoh(memory, &mut self.host)
            .and_then(|_| stream.synchronize())
            .map_err(|error| Error::copy(len, format!("cannot be read back: {}", driver::error_name(error))))?;
        read(&self.host);
        Ok(())
    }
}

fn unavailable(why: impl Into<String>) -> Error {
    ErrorKind::Unavailable { backend: "cuda", why: why.into() }.into()
}
