//! The class `Buffer`.
#![allow(unsafe_code)] // Fills in the structure of the buffer protocol.

use std::ffi::c_int;
use std::sync::Arc;

use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};

use crate::dlpack::{self, Device};
use crate::memory::{Memory, View};
use crate::stream;

/// Bytes in pinned memory, from `Pool.get`.
///
///     array = np.asarray(buf).view(np.float32)    # also np.frombuffer(buf, np.float32) and memoryview(buf)
///     tensor = torch.from_dlpack(buf)             # uint8, one dimension
///
/// These are writable views without a copy. The memory returns to the pool after `release()`, at the end of `with`, or when the
/// object is garbage-collected, but never before the last view is gone and the work on the recorded streams has completed.
///
/// `np.ndarray(shape, buffer=buf)` and `torch.frombuffer(buf)` make views that the pool cannot count: after `release()`, the
/// memory is reused under them, without an error. Pass `memoryview(buf)` instead. A buffer cannot be pickled.
#[pyclass(frozen, weakref, module = "pinpool")]
pub struct Buffer {
    memory: Arc<Memory>,
}

impl Buffer {
    pub(crate) fn over(memory: Memory) -> Self {
        Self { memory: Arc::new(memory) }
    }
}

fn record(py: Python<'_>, memory: &Memory, stream: &Bound<'_, PyAny>) -> PyResult<()> {
    let stream = stream::Stream::of(stream)?;
    py.detach(|| memory.record_stream(stream))
}

/// Records `stream` on the buffer that contains `address`, and returns the address of the buffer; None if there is none.
#[pyfunction]
pub(crate) fn _record_stream(py: Python<'_>, address: usize, stream: &Bound<'_, PyAny>) -> PyResult<Option<usize>> {
    let Some(memory) = Memory::containing(address) else { return Ok(None) };
    record(py, &memory, stream).map(|()| Some(memory.address))
}

#[pymethods]
impl Buffer {
    /// Length in bytes.
    fn __len__(&self) -> usize {
        self.memory.len
    }

    /// Length in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.memory.len
    }

    /// Address of the first byte, aligned to a page. The pool cannot track copies started from it: call `record_stream`.
    #[getter]
    fn ptr(&self) -> PyResult<usize> {
        self.memory.check()?;
        Ok(self.memory.address)
    }

    /// True if the driver pinned the memory, so that copies can be asynchronous. True on the backends vmm, register and cuda,
    /// except for empty and pageable buffers (`on_full="pageable"`). torch's method `is_pinned()` returns the same value.
    #[getter]
    fn is_pinned(&self) -> bool {
        self.memory.is_pinned
    }

    /// NUMA node of the memory, or None if there is only one or it is unknown.
    #[getter]
    fn numa_node(&self) -> Option<u32> {
        self.memory.numa_node
    }

    /// True if the buffer was released and can no longer be used.
    #[getter]
    fn is_released(&self) -> bool {
        self.memory.is_released()
    }

    /// Number of existing memoryviews, arrays and tensors that were made directly from the buffer, by the buffer protocol or
    /// DLPack.
    #[getter]
    fn num_views(&self) -> usize {
        self.memory.num_views()
    }

    /// Releases the buffer. Its memory returns to the pool once the work already enqueued on `stream` and on the recorded streams
    /// has completed.
    ///
    /// A second call does nothing.
    ///
    /// Args:
    ///     stream: as for `record_stream`.
    ///
    /// Raises:
    ///     BufferError: the buffer has views. It is not released.
    ///     TypeError, BackendError, DeviceError, RequestError: as for `record_stream`. The buffer is not released.
    #[pyo3(signature = (stream=None))]
    fn release(&self, py: Python<'_>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        if self.memory.is_released() {
            return Ok(());
        }
        if let Some(stream) = stream {
            self.memory.check_release()?;
            self.record_stream(py, stream)?;
        }
        self.memory.release()
    }

    /// Delays the reuse of the memory until all work enqueued on `stream` so far has completed. The buffer stays in use.
    ///
    /// Call it after each asynchronous copy that another library starts from the buffer. Unlike torch's `Tensor.record_stream`,
    /// it covers only the work that is already enqueued, so a call before the copy does not protect the memory.
    ///
    /// Args:
    ///     stream: a stream of torch, CuPy or Numba, an object with `__cuda_stream__`, or a CUDA stream handle as an int. Handles
    ///         0 and 1 (legacy) belong to the current context, and 2 also to the calling thread, so call on the thread that
    ///         enqueued the copy.
    ///
    /// Raises:
    ///     TypeError, RequestError: `stream` is not a stream, or an int that cannot be a handle. The call has no effect.
    ///     BackendError: there is no CUDA driver, so no copy can run on a stream.
    ///     DeviceError: the driver refuses the stream or its handle, or the stream captures a graph. The end of its work is
    ///         unknown, so the memory is never reused, even if a later call with the same stream succeeds. Once the buffer is
    ///         released, the memory is counted in `stats()["memory"]["quarantined"]`.
    ///     ReleasedError: the buffer was released.
    fn record_stream(&self, py: Python<'_>, stream: &Bound<'_, PyAny>) -> PyResult<()> {
        self.memory.check()?;
        record(py, &self.memory, stream)
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyResult<PyRef<'_, Self>> {
        slf.memory.check()?;
        Ok(slf)
    }

    /// The memory stays with the views of the buffer, if there are any.
    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, pyo3::types::PyTuple>) {
        self.memory.close();
    }

    /// # Safety
    ///
    /// `view` is the structure to fill in, as the interpreter passes it.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let memory = &slf.get().memory;
        memory.begin_view()?;
        let len = isize::try_from(memory.len).unwrap_or(isize::MAX);
        // SAFETY: `view` is the interpreter's structure. The memory is writable and stays until `__releasebuffer__`
        // (memory-I1).
        let filled = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), memory.pointer().cast(), len, 0, flags) };
        if filled != 0 {
            memory.end_view();
            return Err(PyErr::fetch(slf.py()));
        }
        Ok(())
    }

    /// # Safety
    ///
    /// `_view` is a structure that `__getbuffer__` filled in, as the interpreter passes it.
    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {
        self.memory.end_view();
    }

    /// The bytes through NumPy's array interface. The pool cannot count arrays made from it, so `release()` fails from then on,
    /// and the memory returns when the buffer is gone.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.memory.expose()?;
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("shape", (self.memory.len,))?;
        interface.set_item("typestr", "|u1")?;
        interface.set_item("data", (self.memory.address, false))?;
        Ok(interface)
    }

    /// The bytes as a DLPack capsule: kDLCPU, or kDLCUDAHost if `dl_device` requests it.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        let _ = stream; // Host memory needs no synchronization.
        if copy == Some(true) {
            return Err(PyBufferError::new_err("a buffer is exported without a copy: omit `copy`, and copy the array"));
        }
        let device = dl_device.map_or(Ok(Device::Cpu), |(kind, _)| Device::of(kind))?;
        if device == Device::CudaHost && !self.memory.is_pinned {
            return Err(PyBufferError::new_err(
                "CUDA has not pinned the memory of this buffer, so it cannot be exported as kDLCUDAHost: export it as kDLCPU, or use \
                 the backend vmm, register or cuda (Pool(backend=\"gpu\") raises with the reasons if none works)",
            ));
        }
        let has_version = max_version.is_some_and(|(major, _)| major >= 1);
        dlpack::capsule(py, View::of(&self.memory)?, device, has_version)
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        (Device::Cpu as i32, 0)
    }

    fn __repr__(&self) -> String {
        self.memory.to_string()
    }

    fn __reduce_ex__(&self, _protocol: &Bound<'_, PyAny>) -> PyResult<()> {
        Err(PyTypeError::new_err(
            "a pinpool.Buffer cannot be pickled or copied by the module copy, since its memory belongs to this process: pass \
             bytes(buf) or an array copied from it, or copy the bytes to another buffer of a pool, memoryview(other)[:] = buf",
        ))
    }
}
