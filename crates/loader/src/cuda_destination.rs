//! A CUDA device as a destination: a stream and a slice of device memory for each lane.
//!
//! Owns the device memory that batches are copied to. Pins nothing and tracks no copy.

use std::sync::Arc;

use pinpool::cudarc::driver::{CudaContext, CudaSlice, CudaStream, DriverError};

use crate::batch_plan::LoadedBatch;
use crate::destination::Destination;
use pinpool::{Completion, Error, PinnedBuf};

/// A CUDA device that receives batches and keeps none, to measure and to verify: each batch overwrites an earlier one. To use the
/// data, iterate over [`Loader::batches`](crate::Loader::batches), or implement [`Destination`].
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
    /// [`Error::is_unavailable`] if there is no driver or no such device; [`Error::is_device_failed`] if the driver refuses a context, a
    /// stream or memory.
    pub fn new(ordinal: u32, lanes: usize) -> Result<Self, Error> {
        // cudarc panics without a driver.
        pinpool::check_cuda_device(ordinal)?;
        let refused = |call| move |error| Error::device_failed(format!("{call} failed: {}", error_name(error)));
        let context = CudaContext::new(ordinal as usize).map_err(refused("cuDevicePrimaryCtxRetain"))?;
        let lane = |_| {
            let stream = context.new_stream().map_err(refused("cuStreamCreate"))?;
            let memory = stream.alloc_zeros(1).map_err(refused("cuMemAlloc"))?;
            Ok((stream, memory))
        };
        let lanes = (0..lanes).map(lane).collect::<Result<_, Error>>()?;
        let name = context.name().map_err(refused("cuDeviceGetName"))?;
        Ok(Self { name: format!("CUDA device {ordinal} ({name})"), lanes, host: Vec::new() })
    }
}

impl Destination for CudaDestination {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn lanes(&self) -> usize {
        self.lanes.len()
    }

    fn send(&mut self, lane: usize, _: &LoadedBatch, buffer: PinnedBuf) -> Result<Completion, Error> {
        let (stream, memory) = &mut self.lanes[lane];
        if buffer.len() > memory.len() {
            *memory = stream.alloc_zeros(buffer.len()).map_err(|error| {
                Error::copy_refused(buffer.len(), format!("no device memory for it: {}", error_name(error)))
            })?;
        }
        Ok(buffer.copy_to(stream, memory)?)
    }

    fn read_back(&mut self, lane: usize, read: &mut dyn FnMut(&[u8])) -> Result<(), Error> {
        let (stream, memory) = &self.lanes[lane];
        self.host.resize(memory.len(), 0);
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
