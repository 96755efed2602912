//! Memory of a GPU that batches and weights are copied to.
//!
//! ```text
//!   the loader's stream   copy ─ event            copy into the same memory again
//!                                  │                ▲ waits
//!   a stream of the user           └▶ waits ─ work ─ event      recorded when the last reference ends
//! ```
//!
//! - **device-I1**: a stream that memory is handed to (DLPack names it, `record_stream` records it) waits for the copies into
//!   it, and when the last reference is gone the loader's stream waits for what that stream was given until then.
//! - **device-I2**: memory whose address was read, or whose streams cannot be asked, is freed when all work of the device is
//!   over. If that cannot be known, it is never used again.
//! - **device-I3**: no call changes which context is current on the calling thread.
#![allow(unsafe_code)] // Calls the driver.

use std::collections::BTreeSet;
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use pinpool::PinnedBuf;
use pinpool::cudarc::driver::{CudaEvent, CudaSlice, DevicePtr, DriverError};
use pinpool::unstable::backend::CudaSource;
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict, PyInt};

use crate::buffer::Buffer;
use crate::dlpack::{self, Place};
use crate::errors::{BackendError, exception};
use crate::stream::{self, Stream};
use crate::unlocked::unlocked;

mod gpu;

use gpu::{Gpu, KeepContext, locked};

/// The default stream, by the name that is the same in all threads.
const LEGACY: usize = 1;

/// A GPU with a stream of its own for copies.
#[pyclass(frozen, module = "pinpool._pinpool")]
#[derive(Clone)]
pub struct Device {
    gpu: Arc<Gpu>,
}

/// Memory of a GPU, with the streams that use it.
pub(crate) struct DeviceMemory {
    gpu: Arc<Gpu>,
    /// `None` if it is empty.
    slice: Mutex<Option<CudaSlice<u8>>>,
    /// Behind the copies into it; `None` only while it is dropped.
    ready: Option<CudaEvent>,
    /// Handles of the streams that it was handed to.
    streams: Mutex<BTreeSet<usize>>,
    /// Its address was handed out, and streams that are not known may use it.
    is_lent: AtomicBool,
    address: usize,
    pub(crate) len: usize,
}

/// Bytes in the memory of a GPU.
#[pyclass(frozen, weakref, module = "pinpool")]
pub struct DeviceBuffer {
    memory: Arc<DeviceMemory>,
}

impl Device {
    pub(crate) fn allocate_memory(&self, len: usize) -> PyResult<DeviceMemory> {
        self.gpu.check_process()?;
        let _keep = KeepContext::new();
        let slice = if len == 0 { None } else { Some(self.gpu.slice(len)?) };
        let address = match &slice {
            // The guard would record an event behind no work.
            Some(slice) => ManuallyDrop::new(slice.device_ptr(&self.gpu.stream)).0,
            None => 0,
        };
        let ready = self.gpu.stream.record_event(None).map_err(|error| self.gpu.failed("no event", error))?;
        Ok(DeviceMemory {
            gpu: self.gpu.clone(),
            slice: Mutex::new(slice),
            ready: Some(ready),
            streams: Mutex::default(),
            is_lent: AtomicBool::new(false),
            address: usize::try_from(address).unwrap_or_default(),
            len,
        })
    }

    /// The bytes of `buf` in the memory of the GPU, where they are when the loader's stream has come so far. The buffer goes
    /// back to its pool then.
    pub(crate) fn copy(&self, buf: PinnedBuf) -> PyResult<DeviceMemory> {
        let memory = self.allocate_memory(buf.len())?;
        memory.fill(buf, 0)?;
        Ok(memory)
    }
}

impl DeviceMemory {
    fn fill(&self, buf: PinnedBuf, at: usize) -> PyResult<()> {
        self.gpu.check_process()?;
        let len = buf.len();
        let end = at.checked_add(len).filter(|end| *end <= self.len);
        let Some(end) = end else {
            let size = self.len;
            return Err(PyValueError::new_err(format!("{len} B at byte {at} of memory of {size} B")));
        };
        let _keep = KeepContext::new();
        if let Some(slice) = &mut *locked(&self.slice)
            && len > 0
        {
            let mut target = slice.slice_mut(at..end);
            buf.copy_to(&**self.gpu.stream, &mut target).map_err(|error| exception(error.error()))?;
        }
        let recorded = self.ready.as_ref().map_or(Ok(()), |ready| ready.record(&self.gpu.stream));
        recorded.map_err(|error| self.gpu.failed("no event", error))
    }

    /// The stream waits for the copies into the memory, and is waited for at the end (device-I1).
    fn hand_to(&self, handle: usize) -> PyResult<()> {
        self.gpu.check_process()?;
        let _keep = KeepContext::new();
        let refused = |error: DriverError| {
            BackendError::new_err(format!(
                "stream {handle:#x}: the driver refused: {:?}; pass a stream of cuda:{} that is alive",
                error.0, self.gpu.ordinal
            ))
        };
        // SAFETY: the caller says that the stream is alive, and of this device.
        let stream = unsafe { stream::on_device(self.gpu.ordinal, handle) }.map_err(refused)?;
        self.ready.as_ref().map_or(Ok(()), |ready| stream.wait(ready)).map_err(refused)?;
        locked(&self.streams).insert(handle);
        Ok(())
    }

    /// Address of byte `at`, for structures of DLPack.
    pub(crate) fn pointer(&self, at: usize) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.address + at)
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let slice = self.slice.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let streams = std::mem::take(self.streams.get_mut().unwrap_or_else(PoisonError::into_inner));
        let (gpu, is_lent, ready) = (self.gpu.clone(), self.is_lent.load(Ordering::Relaxed), self.ready.take());
        if gpu.process != std::process::id() {
            return std::mem::forget((slice, ready));
        }
        unlocked(move || {
            let _keep = KeepContext::new();
            if let Some(slice) = slice {
                gpu.put(slice, &streams, is_lent);
            }
            drop(ready);
        });
    }
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceMemory({} B at {:#x} of cuda:{})", self.len, self.address, self.gpu.ordinal)
    }
}

#[pymethods]
impl Device {
    /// Opens GPU number `ordinal`.
    #[new]
    fn new(py: Python<'_>, ordinal: u32) -> PyResult<Self> {
        let failed = |what: String| {
            BackendError::new_err(format!(
                "device cuda:{ordinal}: {what}; leave `device` out for the memory of the host"
            ))
        };
        py.detach(|| {
            // First, because cudarc panics without a driver.
            CudaSource::new(ordinal).map_err(|error| failed(error.to_string()))?;
            let _keep = KeepContext::new();
            let refused = |call| move |error: DriverError| failed(format!("{call}: {:?}", error.0));
            let context = stream::context(ordinal).map_err(refused("cuDevicePrimaryCtxRetain"))?;
            let stream = context.new_stream().map_err(refused("cuStreamCreate"))?;
            let stream = ManuallyDrop::new(stream);
            let gpu = Gpu { ordinal, context, stream, idle: Mutex::default(), process: std::process::id() };
            Ok(Self { gpu: Arc::new(gpu) })
        })
    }

    /// Memory of `nbytes` bytes that is not set.
    fn allocate(&self, py: Python<'_>, nbytes: usize) -> PyResult<DeviceBuffer> {
        Ok(DeviceBuffer::over(py.detach(|| self.allocate_memory(nbytes))?))
    }

    #[getter]
    fn ordinal(&self) -> u32 {
        self.gpu.ordinal
    }
}

impl DeviceBuffer {
    pub(crate) fn over(memory: DeviceMemory) -> Self {
        Self { memory: Arc::new(memory) }
    }
}

#[pymethods]
impl DeviceBuffer {
    /// Length in bytes.
    fn __len__(&self) -> usize {
        self.memory.len
    }

    /// Length in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.memory.len
    }

    /// Where the memory is: "cuda:0".
    #[getter]
    fn device(&self) -> String {
        format!("cuda:{}", self.memory.gpu.ordinal)
    }

    /// Address of the first byte. Work that uses it is not known to the loader: `record_stream` makes it known.
    #[getter]
    fn ptr(&self) -> usize {
        self.memory.is_lent.store(true, Ordering::Relaxed);
        self.memory.address
    }

    /// Handle of the stream on which the bytes are copied: what is enqueued behind it finds them.
    #[getter]
    fn stream(&self) -> usize {
        self.memory.gpu.stream.cu_stream().expose_provenance()
    }

    /// `stream` waits until the bytes are there, and the memory has no other use before all that is enqueued on `stream` by
    /// the end of its last reference is over.
    fn record_stream(&self, py: Python<'_>, stream: &Bound<'_, PyAny>) -> PyResult<()> {
        let handle = Stream::of(stream)?.handle();
        py.detach(|| self.memory.hand_to(handle))
    }

    /// Copies `buffer`, and gives it up, to byte `at`.
    fn _fill(&self, py: Python<'_>, buffer: &Bound<'_, Buffer>, at: usize) -> PyResult<()> {
        let buf = buffer.get().take()?;
        py.detach(|| self.memory.fill(buf, at))
    }

    /// Address of byte `at` for the array interface, whose users are not known.
    fn _address(&self, at: usize) -> usize {
        self.memory.is_lent.store(true, Ordering::Relaxed);
        if self.memory.len == 0 { 0 } else { self.memory.address + at }
    }

    /// An array of DLPack in the memory, from byte `at` on, ordered for `stream`.
    #[allow(clippy::too_many_arguments)] // The fields of the structure.
    fn _dlpack<'py>(
        &self,
        py: Python<'py>,
        at: usize,
        shape: Vec<i64>,
        code: u8,
        bits: u8,
        stream: Option<&Bound<'py, PyAny>>,
        has_version: bool,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        let handle = match stream {
            None => Some(LEGACY),
            Some(number) if number.is_instance_of::<PyInt>() => match number.extract::<i64>()? {
                -1 => None,
                0 => return Err(PyBufferError::new_err("stream=0 is ambiguous: pass 1 (legacy) or 2 (per thread)")),
                _ => Some(Stream::of(number)?.handle()),
            },
            Some(stream) => Some(Stream::of(stream)?.handle()),
        };
        match handle {
            Some(handle) => py.detach(|| self.memory.hand_to(handle))?,
            // The importer orders the work itself, on a stream that it does not name.
            None => self.memory.is_lent.store(true, Ordering::Relaxed),
        }
        let ordinal = i32::try_from(self.memory.gpu.ordinal).unwrap_or(i32::MAX);
        let place = Place { kind: dlpack::CUDA, ordinal, data: self.memory.pointer(at), code, bits };
        dlpack::capsule_of(py, Box::new(self.memory.clone()), &place, shape, has_version)
    }

    /// The bytes as a capsule of DLPack (kDLCUDA), ordered for `stream`.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, u32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        if copy == Some(true) || dl_device.is_some_and(|device| device != self.__dlpack_device__()) {
            return Err(PyBufferError::new_err(format!(
                "memory of {} is exported there, without a copy: import it, and copy",
                self.device()
            )));
        }
        let len = i64::try_from(self.memory.len).unwrap_or(i64::MAX);
        let has_version = max_version.is_some_and(|(major, _)| major >= 1);
        self._dlpack(py, 0, vec![len], dlpack::UNSIGNED, 8, stream, has_version)
    }

    /// The bytes for users of the CUDA array interface, version 3, with the stream of the copy.
    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let interface = PyDict::new(py);
        interface.set_item("shape", (self.memory.len,))?;
        interface.set_item("typestr", "|u1")?;
        interface.set_item("data", (self._address(0), false))?;
        interface.set_item("version", 3)?;
        interface.set_item("strides", py.None())?;
        interface.set_item("stream", self.stream())?;
        Ok(interface)
    }

    fn __dlpack_device__(&self) -> (i32, u32) {
        (dlpack::CUDA, self.memory.gpu.ordinal)
    }

    fn __repr__(&self) -> String {
        let DeviceMemory { gpu, address, len, .. } = &*self.memory;
        format!("<pinpool.DeviceBuffer of {len} B at {address:#x} of cuda:{}>", gpu.ordinal)
    }
}
