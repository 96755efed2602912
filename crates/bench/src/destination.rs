//! The target of copies: the GPU, or the host sink if there is none.
#![allow(unsafe_code)] // For untracked copies, the baseline of tracked copies.

use std::time::{Duration, Instant};

use pinpool::copy::CopyTarget;
#[cfg(feature = "cuda")]
use pinpool::cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, DriverError, sys};
use pinpool::{Completion, Error, PinnedBuf};
use pinpool_testing::{SinkMemory, SinkStream};

/// A stream and the memory that every copy on it overwrites.
#[derive(Debug)]
pub(super) enum BenchTarget {
    Sink {
        stream: SinkStream,
        memory: SinkMemory,
    },
    #[cfg(feature = "cuda")]
    Cuda {
        name: String,
        stream: std::sync::Arc<CudaStream>,
        /// Memory that cudarc does not track with events.
        raw: CudaSlice<u8>,
        address: sys::CUdeviceptr,
        memory: CudaSlice<u8>,
    },
}

impl BenchTarget {
    /// Opens a destination for copies of up to `bytes`.
    pub(super) fn open(bytes: usize) -> Result<BenchTarget, Error> {
        #[cfg(feature = "cuda")]
        // Checked first because cudarc panics without a driver.
        if pinpool::check_cuda_device(0).is_ok() {
            let opened = CudaContext::new(0).and_then(|context| {
                let stream = context.new_stream()?;
                let memory = stream.alloc_zeros(bytes)?;
                // SAFETY: all uses of `raw` are on the one stream.
                unsafe { context.disable_event_tracking() };
                let raw = stream.alloc_zeros(bytes)?;
                // SAFETY: all uses of `raw` are on the one stream.
                unsafe { context.enable_event_tracking() };
                stream.synchronize()?;
                let (address, _) = memory.device_ptr(&stream);
                Ok(BenchTarget::Cuda { name: context.name()?, stream, raw, address, memory })
            });
            return opened.map_err(|error| driver_error(&error));
        }
        Ok(BenchTarget::Sink { stream: SinkStream::new()?, memory: SinkMemory::new(bytes) })
    }

    pub(super) fn describe(&self) -> String {
        match self {
            BenchTarget::Sink { .. } => "the host sink (no GPU: a thread that copies)".to_owned(),
            #[cfg(feature = "cuda")]
            BenchTarget::Cuda { name, .. } => name.clone(),
        }
    }

    /// Copies the first `len` bytes of the buffer.
    pub(super) fn copy(&mut self, buf: &mut PinnedBuf, len: usize) -> Result<Completion, Error> {
        match self {
            BenchTarget::Sink { stream, memory } => buf.copy_range_to(0..len, stream, memory),
            #[cfg(feature = "cuda")]
            BenchTarget::Cuda { stream, memory, .. } => buf.copy_range_to(0..len, stream, memory),
        }
    }

    /// Copies the buffer into `raw`, which only the stream orders, and returns the buffer to its pool.
    pub(super) fn copy_raw(&mut self, buf: PinnedBuf) -> Result<(), Error> {
        match self {
            #[cfg(feature = "cuda")]
            BenchTarget::Cuda { stream, raw, .. } => Ok(buf.copy_to(stream, raw).map(drop)?),
            BenchTarget::Sink { stream, memory } => Ok(buf.copy_to(stream, memory).map(drop)?),
        }
    }

    /// Times `count` untracked calls that enqueue a copy of the buffer, then waits for the copies.
    pub(super) fn time_untracked(&mut self, buf: PinnedBuf, count: usize) -> Result<(PinnedBuf, Duration), Error> {
        let begun = Instant::now();
        let enqueued = (0..count).try_for_each(|_| self.enqueue_untracked(&buf));
        let took = begun.elapsed();
        if let Err(error) = enqueued.and_then(|()| self.synchronize()) {
            // The buffer is leaked, because a copy may still read it.
            std::mem::forget(buf);
            return Err(error);
        }
        Ok((buf, took))
    }

    fn enqueue_untracked(&mut self, buf: &PinnedBuf) -> Result<(), Error> {
        match self {
            BenchTarget::Sink { stream, memory } => {
                // SAFETY: `time_untracked` keeps the buffer, unchanged, until the stream is synchronized.
                let enqueued = unsafe { memory.enqueue_write(stream, buf.as_ptr(), buf.len()) };
                enqueued.map(drop).map_err(|failure| Error::device_failed(format!("{failure:?}")))
            }
            #[cfg(feature = "cuda")]
            BenchTarget::Cuda { stream, address, .. } => {
                let source = buf.as_ptr().cast();
                // SAFETY: `time_untracked` keeps the buffer, as above. `memory` has as many bytes as every buffer, and the
                // context is current.
                let enqueued = unsafe { sys::cuMemcpyHtoDAsync_v2(*address, source, buf.len(), stream.cu_stream()) };
                enqueued.result().map_err(|error| driver_error(&error))
            }
        }
    }

    /// Waits for all copies.
    pub(super) fn synchronize(&self) -> Result<(), Error> {
        match self {
            BenchTarget::Sink { stream, .. } => stream.synchronize(),
            #[cfg(feature = "cuda")]
            BenchTarget::Cuda { stream, .. } => stream.synchronize().map_err(|error| driver_error(&error)),
        }
    }
}

#[cfg(feature = "cuda")]
fn driver_error(error: &DriverError) -> Error {
    Error::device_failed(format!("{:?}", error.0))
}
