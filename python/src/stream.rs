//! Streams of other libraries, and fences for the work on them.
#![allow(unsafe_code)] // Calls the driver.

use std::sync::Arc;

use pinpool::copy::CopyStream;
use pinpool::copy::Fence;
use pinpool::copy::cuda::RawStream;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyInt};

use crate::errors::{DeviceError, RequestError, with_text};

/// The error of a stream for which no fence could be recorded.
pub(crate) struct Unfenced {
    pub(crate) error: PyErr,
    /// Whether the stream may have work that ends at an unknown time.
    pub(crate) may_run: bool,
}

/// A stream that the caller has passed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stream {
    pub(crate) handle: usize,
    /// Ordinal of the GPU, if the object has it.
    pub(crate) device: Option<u32>,
}

fn handle(value: &Bound<'_, PyAny>) -> PyResult<usize> {
    value.extract().map_err(|_| {
        RequestError::new_err(format!("{value} is not a CUDA stream handle: pass 0, 1, 2 or the address of a stream"))
    })
}

impl Stream {
    /// Reads a number, a stream of torch, CuPy or Numba, or an object with `__cuda_stream__`.
    pub(crate) fn of(stream: &Bound<'_, PyAny>) -> PyResult<Self> {
        let attribute = |name| stream.getattr_opt(name);
        let device = |name| attribute(name).ok().flatten().and_then(|device| device.extract().ok());
        if stream.is_instance_of::<PyInt>() && !stream.is_instance_of::<PyBool>() {
            return Ok(Self { handle: handle(stream)?, device: None });
        }
        // `torch.cuda.Stream`, or the `torch.Stream` of `torch.accelerator`.
        if let Some(from_torch) = attribute("cuda_stream")?.or(attribute("native_handle")?) {
            return Ok(Self { handle: handle(&from_torch)?, device: device("device_index") });
        }
        if let Some(protocol) = attribute("__cuda_stream__")? {
            let answer = if protocol.is_callable() { protocol.call0()? } else { protocol };
            return Ok(Self { handle: handle(&answer.get_item(1)?)?, device: None });
        }
        if let (Some(from_cupy), Some(_)) = (attribute("ptr")?, attribute("synchronize")?) {
            return Ok(Self { handle: handle(&from_cupy)?, device: device("device_id") });
        }
        if let Some(from_numba) = attribute("handle")? {
            let value = from_numba.getattr_opt("value")?.unwrap_or(from_numba);
            // ctypes represents the default stream by None.
            return Ok(Self { handle: if value.is_none() { 0 } else { handle(&value)? }, device: None });
        }
        Err(PyTypeError::new_err(format!(
            "a {} is not a stream: pass a CUDA stream handle as an int, a stream of torch, CuPy or Numba, or an object with \
             __cuda_stream__",
            stream.get_type().name()?
        )))
    }

    /// Records a fence for all work enqueued so far. `pool_device` is the GPU of the pool.
    pub(crate) fn fence(self, pool_device: u32) -> Result<Arc<dyn Fence>, Unfenced> {
        // SAFETY: the documentation of the Python methods requires a live stream.
        let stream = unsafe { raw(self.handle) };
        let stream = match self.device {
            Some(device) => stream.on_device(device),
            None => stream.or_on_device(pool_device),
        };
        stream.record_fence().map_err(|error| {
            let may_run = !error.is_backend();
            let remedy = if !may_run {
                "; no copy can run on a stream: release the buffer without one"
            } else if error.is_capturing_stream() {
                ". The memory of this buffer is never reused"
            } else {
                "; pass a live stream. The memory is never reused, because work on this stream may still run"
            };
            let text = format!("stream {:#x}: {error}{remedy}", self.handle);
            let error = if may_run { DeviceError::new_err(text) } else { with_text(&error, text) };
            Unfenced { error, may_run }
        })
    }
}

/// Returns the stream with this handle.
///
/// # Safety
///
/// The stream must stay alive while the result is used.
pub(crate) unsafe fn raw(handle: usize) -> RawStream {
    // SAFETY: the stream stays alive while the result is used, as the caller promises.
    unsafe { RawStream::new(std::ptr::with_exposed_provenance_mut(handle)) }
}
