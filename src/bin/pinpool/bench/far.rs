//! Where the benches copy to: the GPU if there is one, else the host sink, which says so.

use pinpool::copy::sink::{SinkMem, SinkStream};
use pinpool::{Completion, Error, PinnedBuf};

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
        stream: std::sync::Arc<cudarc::driver::CudaStream>,
        memory: cudarc::driver::CudaSlice<u8>,
    },
}

impl Far {
    /// A far end that takes copies of up to `bytes`.
    pub(crate) fn open(bytes: usize) -> Result<Far, Error> {
        #[cfg(feature = "cuda")]
        // Asked first because cudarc panics where there is no driver.
        if pinpool::backend::CudaSource::new(0).is_ok() {
            let opened = cudarc::driver::CudaContext::new(0).and_then(|context| {
                let stream = context.new_stream()?;
                let memory = stream.alloc_zeros(bytes)?;
                stream.synchronize()?;
                Ok(Far::Cuda { name: context.name()?, stream, memory })
            });
            return opened.map_err(|error| Error::device(format!("{:?}", error.0)));
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
}
