//! A CUDA device as a destination: a stream and a slice of device memory for each lane.
//!
//! Owns the device memory that batches are copied to. Pins nothing and tracks no copy.

use std::sync::Arc;

use pinpool::cudarc::driver::{CudaContext, CudaSlice, CudaStream, DriverError};

use super::destination::Destination;
use pinpool::source::SourceError;
use pinpool::unstable::backend::CudaSource;
use pinpool::{Completion, Error, PinnedBuf};

/// A CUDA device.
#[derive(Debug)]
pub struct CudaDestination {
    name: String,
    lanes: Vec<(Arc<CudaStream>, CudaSlice<u8>)>,
    /// Batches are read back into this ordinary memory.
    host: Vec<u8>,
}

impl CudaDestination {
    /// Opens `lanes` streams on device number `ordinal`.
    ///
    /// # Errors
    ///
    /// If there is no driver or no such device, or the driver refuses a context, a stream or memory.
    pub fn new(ordinal: u32, lanes: usize) -> Result<CudaDestination, SourceError> {
        // Checks for a driver and the device first, because cudarc panics without a driver.
        CudaSource::new(ordinal)?;
        let refused = |call| move |error| SourceError::new(call, error_name(error));
        let context = CudaContext::new(ordinal as usize).map_err(refused("cuDevicePrimaryCtxRetain"))?;
        let lane = |_| {
            let stream = context.new_stream().map_err(refused("cuStreamCreate"))?;
            let memory = stream.alloc_zeros(1).map_err(refused("cuMemAlloc"))?;
            Ok((stream, memory))
        };
        let lanes = (0..lanes).map(lane).collect::<Result<_, SourceError>>()?;
        let name = context.name().map_err(refused("cuDeviceGetName"))?;
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
        let (stream, memory) = &mut self.lanes[lane];
        if batch.len() > memory.len() {
            *memory = stream.alloc_zeros(batch.len()).map_err(|error| {
                Error::copy_refused(batch.len(), format!("no device memory for it: {}", error_name(error)))
            })?;
        }
        Ok(batch.copy_to(stream, memory)?)
    }

    fn read_back(&mut self, lane: usize, read: &mut dyn FnMut(&[u8])) -> Result<(), Error> {
        let (stream, memory) = &self.lanes[lane];
        let len = memory.len();
        self.host.resize(len, 0);
        stream
            .memcpy_dtoh(memory, &mut self.host)
            .and_then(|_| stream.synchronize())
            .map_err(|error| Error::device_failed(format!("the batch cannot be read back: {}", error_name(error))))?;
        read(&self.host);
        Ok(())
    }
}

/// Returns the name of an error. cudarc's own text calls the driver, which may be gone.
fn error_name(error: DriverError) -> String {
    format!("{:?}", error.0)
}
