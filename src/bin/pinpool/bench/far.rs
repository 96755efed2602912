//! Where the benches copy to: the GPU if there is one, else the host sink, which says so.
#![allow(unsafe_code)] // The bare copies, which nobody tracks.

use std::time::{Duration, Instant};

#[cfg(feature = "cuda")]
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, DriverError, sys};
#[cfg(feature = "cuda")]
use pinpool::copy::cuda::RawMem;
use pinpool::copy::sink::{SinkMem, SinkStream};
use pinpool::copy::{CopyTarget, FencePurpose};
use pinpool::{Completion, Error, FenceKind, PinnedBuf};

/// One stream, and memory at its end that every copy overwrites.
#[derive(Debug)]
pub(crate) enum Far {
    Sink {
        stream: SinkStream,
        memory: SinkMem,
    },
    #[cfg(feature = "cuda")]
    Cuda {
        name: String,
        stream: std::sync::Arc<CudaStream>,
        /// The same bytes without cudarc's own events; before their owner, which goes last.
        plain: RawMem,
        address: sys::CUdeviceptr,
        memory: CudaSlice<u8>,
    },
}

/// The ways to a copy that are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// `copy_to`, into memory that only the stream orders.
    CopyTo,
    /// `copy_to` a slice of cudarc's, which records events of its own.
    #[cfg(feature = "cuda")]
    CopyToSlice,
    /// cudarc's `memcpy_htod` of the buffer, then its drop.
    #[cfg(feature = "cuda")]
    MemcpyHtod,
}

impl Way {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Way::CopyTo => "copy_to",
            #[cfg(feature = "cuda")]
            Way::CopyToSlice => "copy_to_slice",
            #[cfg(feature = "cuda")]
            Way::MemcpyHtod => "memcpy_htod",
        }
    }
}

impl Far {
    /// A far end that takes copies of up to `bytes`.
    pub(crate) fn open(bytes: usize) -> Result<Far, Error> {
        #[cfg(feature = "cuda")]
        // Asked first because cudarc panics where there is no driver.
        if pinpool::backend::CudaSource::new(0).is_ok() {
            let opened = CudaContext::new(0).and_then(|context| {
                let stream = context.new_stream()?;
                let memory = stream.alloc_zeros(bytes)?;
                stream.synchronize()?;
                let (address, _) = memory.device_ptr(&stream);
                // SAFETY: the slice lies beside it, and every copy goes through the one stream.
                let plain = unsafe { RawMem::from_raw(address, bytes, stream.clone()) };
                Ok(Far::Cuda { name: context.name()?, stream, plain, address, memory })
            });
            return opened.map_err(|error| failed(&error));
        }
        Ok(Far::Sink { stream: SinkStream::new()?, memory: SinkMem::new(bytes) })
    }

    pub(crate) fn describe(&self) -> String {
        match self {
            Far::Sink { .. } => "the host sink (no GPU: a thread that copies)".to_owned(),
            #[cfg(feature = "cuda")]
            Far::Cuda { name, .. } => name.clone(),
        }
    }

    /// Copies the buffer and gives it up.
    pub(crate) fn take(&mut self, buf: PinnedBuf) -> Result<Completion, Error> {
        match self {
            Far::Sink { stream, memory } => buf.copy_to(stream, memory),
            #[cfg(feature = "cuda")]
            Far::Cuda { stream, memory, .. } => buf.copy_to(stream, memory),
        }
    }

    /// Copies its first `len` bytes and leaves it.
    pub(crate) fn copy(&mut self, buf: &mut PinnedBuf, len: usize) -> Result<Completion, Error> {
        match self {
            Far::Sink { stream, memory } => buf.copy_range_to(0..len, stream, memory),
            #[cfg(feature = "cuda")]
            Far::Cuda { stream, memory, .. } => buf.copy_range_to(0..len, stream, memory),
        }
    }

    /// The ways there are.
    pub(crate) fn ways(&self) -> Vec<Way> {
        match self {
            Far::Sink { .. } => vec![Way::CopyTo],
            #[cfg(feature = "cuda")]
            Far::Cuda { .. } => vec![Way::CopyTo, Way::CopyToSlice, Way::MemcpyHtod],
        }
    }

    /// Copies the buffer by that way and gives it up.
    pub(crate) fn send(&mut self, way: Way, buf: PinnedBuf) -> Result<(), Error> {
        match (self, way) {
            (Far::Sink { stream, memory }, _) => buf.copy_to(stream, memory).map(drop),
            #[cfg(feature = "cuda")]
            (Far::Cuda { stream, plain, .. }, Way::CopyTo) => buf.copy_to(stream, plain).map(drop),
            #[cfg(feature = "cuda")]
            (Far::Cuda { stream, memory, .. }, Way::CopyToSlice) => buf.copy_to(stream, memory).map(drop),
            #[cfg(feature = "cuda")]
            (Far::Cuda { stream, memory, .. }, Way::MemcpyHtod) => {
                stream.memcpy_htod(&buf, memory).map_err(|error| failed(&error))
            }
        }
    }

    /// How long `times` bare calls take that enqueue a copy of the buffer; waits for the copies after that.
    pub(crate) fn send_bare(&mut self, buf: PinnedBuf, times: usize) -> Result<(PinnedBuf, Duration), Error> {
        let begun = Instant::now();
        let enqueued = (0..times).try_for_each(|_| self.enqueue_bare(&buf));
        let took = begun.elapsed();
        if let Err(error) = enqueued.and_then(|()| self.synchronize()) {
            // Somebody may still be reading it.
            std::mem::forget(buf);
            return Err(error);
        }
        Ok((buf, took))
    }

    fn enqueue_bare(&mut self, buf: &PinnedBuf) -> Result<(), Error> {
        match self {
            Far::Sink { stream, memory } => {
                // SAFETY: `send_bare` keeps the buffer, and lets nobody write to it, until the stream is done.
                let enqueued =
                    unsafe { memory.enqueue(stream, buf.as_ptr(), buf.len(), FencePurpose::Pool(FenceKind::Event)) };
                enqueued.map(drop).map_err(|failure| Error::device(format!("{failure:?}")))
            }
            #[cfg(feature = "cuda")]
            Far::Cuda { stream, address, .. } => {
                let source = buf.as_ptr().cast();
                // SAFETY: as above; the memory has room for every buffer of the bench, and the context is current.
                let enqueued = unsafe { sys::cuMemcpyHtoDAsync_v2(*address, source, buf.len(), stream.cu_stream()) };
                enqueued.result().map_err(|error| failed(&error))
            }
        }
    }

    /// Waits until all copies are over.
    pub(crate) fn synchronize(&self) -> Result<(), Error> {
        match self {
            Far::Sink { stream, .. } => stream.synchronize(),
            #[cfg(feature = "cuda")]
            Far::Cuda { stream, .. } => stream.synchronize().map_err(|error| failed(&error)),
        }
    }
}

#[cfg(feature = "cuda")]
fn failed(error: &DriverError) -> Error {
    Error::device(format!("{:?}", error.0))
}
