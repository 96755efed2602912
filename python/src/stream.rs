//! Streams of other libraries, and fences behind the work on them.
#![allow(unsafe_code)] // Calls the driver.

use std::sync::{Arc, Mutex, PoisonError};

use pinpool::Fence;
use pinpool::copy::CopyStream;
use pinpool::cudarc::driver::{CudaContext, CudaStream, DriverError, result, sys};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyInt};

use crate::errors::{BackendError, exception};

/// No fence behind the work of a stream.
pub(crate) struct Unfenced {
    pub(crate) error: PyErr,
    /// There is a driver that may run such work, so that its end is unknown.
    pub(crate) may_run: bool,
}

/// The largest handle that stands for a stream of the calling context or thread.
const PER_THREAD: usize = 2;

/// A stream as the caller names it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stream {
    handle: usize,
    /// Ordinal of its GPU, if the object says so.
    device: Option<u32>,
}

fn handle(value: &Bound<'_, PyAny>) -> PyResult<usize> {
    value
        .extract()
        .map_err(|_| PyValueError::new_err(format!("{value} is no handle of a CUDA stream: 0, or its address")))
}

impl Stream {
    /// Reads a number, a stream of torch, CuPy or Numba, or an object with `__cuda_stream__`.
    pub(crate) fn of(stream: &Bound<'_, PyAny>) -> PyResult<Self> {
        let attribute = |name| stream.getattr_opt(name);
        let device = |name| attribute(name).ok().flatten().and_then(|device| device.extract().ok());
        if stream.is_instance_of::<PyInt>() && !stream.is_instance_of::<PyBool>() {
            return Ok(Self { handle: handle(stream)?, device: None });
        }
        if let Some(torchs) = attribute("cuda_stream")? {
            return Ok(Self { handle: handle(&torchs)?, device: device("device_index") });
        }
        if let Some(protocol) = attribute("__cuda_stream__")? {
            let answer = if protocol.is_callable() { protocol.call0()? } else { protocol };
            return Ok(Self { handle: handle(&answer.get_item(1)?)?, device: None });
        }
        if let (Some(cupys), Some(_)) = (attribute("ptr")?, attribute("synchronize")?) {
            return Ok(Self { handle: handle(&cupys)?, device: device("device_id") });
        }
        if let Some(numbas) = attribute("handle")? {
            let value = numbas.getattr_opt("value")?.unwrap_or(numbas);
            // The handle of the default stream is None in ctypes.
            return Ok(Self { handle: if value.is_none() { 0 } else { handle(&value)? }, device: None });
        }
        Err(PyTypeError::new_err(format!(
            "a {} is no stream: pass the handle of a CUDA stream as an int, a stream of torch, CuPy or Numba, or an object \
             with __cuda_stream__",
            stream.get_type().name()?
        )))
    }

    /// The stream as the driver names it.
    pub(crate) fn handle(self) -> usize {
        self.handle
    }

    /// A fence behind all work enqueued so far. `pools` is the GPU of the pool.
    pub(crate) fn fence(self, pools: u32) -> Result<Arc<dyn Fence>, Unfenced> {
        let idle = |text| Unfenced { error: BackendError::new_err(text), may_run: false };
        // SAFETY: loads the driver's library, as its first user in the process would.
        if !unsafe { sys::is_culib_present() } {
            return Err(idle(format!(
                "stream {:#x}: there is no CUDA driver (libcuda.so.1) on this machine, so no copy can run on a stream: \
                 release the buffer without one",
                self.handle
            )));
        }
        let failed = |error: DriverError| Unfenced {
            error: BackendError::new_err(format!(
                "stream {:#x}: the driver refused: {error:?}; pass a stream that is alive. The memory of this buffer is lost: \
                 the end of work on that stream is unknown",
                self.handle
            )),
            may_run: true,
        };
        result::init().map_err(|error| {
            idle(format!(
                "stream {:#x}: the CUDA driver does not start: {error:?}; `pinpool doctor` says why",
                self.handle
            ))
        })?;
        let device = match self.device {
            Some(device) => device,
            None => self.device_of().map_err(failed)?.unwrap_or(pools),
        };
        // SAFETY: the caller says that the stream is alive; it is not kept beyond this call.
        let stream = unsafe { on_device(device, self.handle) }.map_err(failed)?;
        stream.mark().map_err(|error| Unfenced { error: exception(&error), may_run: true })
    }

    /// The GPU of the stream; `None` for one that is named without its context where the thread has none.
    fn device_of(self) -> Result<Option<u32>, DriverError> {
        let mut context: sys::CUcontext = std::ptr::null_mut();
        if self.handle > PER_THREAD {
            let stream = std::ptr::with_exposed_provenance_mut(self.handle);
            // SAFETY: memory for a handle; the caller says that the stream is alive.
            unsafe { sys::cuStreamGetCtx(stream, &raw mut context) }.result()?;
        } else {
            // SAFETY: memory for a handle.
            unsafe { sys::cuCtxGetCurrent(&raw mut context) }.result()?;
        }
        if context.is_null() {
            return Ok(None);
        }
        let mut device = 0;
        // SAFETY: a live context, which the next calls take away again.
        unsafe { sys::cuCtxPushCurrent_v2(context) }.result()?;
        // SAFETY: memory for a number.
        let found = unsafe { sys::cuCtxGetDevice(&raw mut device) };
        // SAFETY: memory for a handle.
        let popped = unsafe { sys::cuCtxPopCurrent_v2(&raw mut context) };
        found.result()?;
        popped.result()?;
        Ok(u32::try_from(device).ok())
    }
}

/// The stream with this handle, as the crate takes it.
///
/// # Safety
///
/// The stream is alive, and of that GPU, as long as the result.
pub(crate) unsafe fn on_device(device: u32, handle: usize) -> Result<Arc<CudaStream>, DriverError> {
    let handle = std::ptr::with_exposed_provenance_mut(handle);
    // SAFETY: the caller's promise.
    Ok(unsafe { context(device)?.wrap_borrowed_stream(handle) })
}

/// Whether the stream with this handle captures a graph; `false` if the driver does not tell.
///
/// # Safety
///
/// The stream is alive, and of that GPU.
pub(crate) unsafe fn is_capturing(device: u32, handle: usize) -> bool {
    // SAFETY: loads the driver's library, as its first user in the process would.
    if !unsafe { sys::is_culib_present() } {
        return false;
    }
    // SAFETY: the caller's promise. It holds a reference to its context alone.
    let Ok(stream) = (unsafe { on_device(device, handle) }) else { return false };
    stream.context().bind_to_thread().is_ok()
        && match stream.capture_status() {
            // One that was spoiled captures until it ends, too.
            Ok(status) => status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE,
            // The default stream while one that waits for it captures.
            Err(error) => (900..=908).contains(&(error.0 as u32)),
        }
}

/// The primary context of a GPU, made once.
pub(crate) fn context(device: u32) -> Result<Arc<CudaContext>, DriverError> {
    static CONTEXTS: Mutex<Vec<(u32, Arc<CudaContext>)>> = Mutex::new(Vec::new());
    let contexts = || CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner);
    let known = contexts().iter().find(|(known, _)| *known == device).map(|(_, context)| context.clone());
    if let Some(context) = known {
        return Ok(context);
    }
    let context = CudaContext::new(usize::try_from(device).unwrap_or(usize::MAX))?;
    contexts().push((device, context.clone()));
    Ok(context)
}
