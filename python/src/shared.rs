//! The classes behind `pinpool.SharedPool`. Worker processes fill its buffers.
#![allow(unsafe_code)] // Fills in the structure of the buffer protocol.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pinpool::{HugeTlb, PinnedBy};
use pinpool_shared_buffers::{self as buffers, Error, SharedBuf, SharedPool, Ticket};
use pyo3::exceptions::{PyBufferError, PyOSError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::arguments::{seconds, size};
use crate::buffer::Buffer;
use crate::errors::{ClosedError, ReleasedError, TimeoutError, shared_exception};
use crate::interrupts::wait_interruptibly;
use crate::log;
use crate::memory::{BufferOrigin, Memory};
use crate::pool::PoolCore;
use crate::without_gil::without_gil;

/// The shared buffers in the trainer.
#[pyclass(frozen, module = "pinpool._pinpool")]
pub struct SharedPoolCore {
    /// `None` after `close`.
    shared: Mutex<Option<Arc<SharedPool>>>,
    origin: Arc<BufferOrigin>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SharedPoolCore {
    fn shared(&self) -> PyResult<Arc<SharedPool>> {
        locked(&self.shared).clone().ok_or_else(|| ClosedError::new_err("the shared pool was closed"))
    }

    fn received(&self, buf: pinpool::PinnedBuf) -> Buffer {
        Buffer::over(Memory::of(buf, self.origin.clone()))
    }

    fn call<T: Send>(&self, py: Python<'_>, call: impl FnOnce(&SharedPool) -> Result<T, Error> + Send) -> PyResult<T> {
        let shared = self.shared()?;
        let outcome = py.detach(|| {
            let outcome = call(&shared);
            drop(shared);
            outcome
        });
        log::flush(py)?;
        outcome.map_err(shared_exception)
    }
}

#[pymethods]
impl SharedPoolCore {
    #[new]
    fn new(
        py: Python<'_>,
        pool: &PoolCore,
        buffer_bytes: &Bound<'_, PyAny>,
        num_buffers: usize,
        hugetlb: Option<bool>,
    ) -> PyResult<Self> {
        // Imports the exception: an import would abort the process if a loop ends while the interpreter exits.
        drop(py.get_type::<ClosedError>());
        let (pool, buffer_bytes) = (pool.pool()?.clone(), size("buffer_bytes", buffer_bytes)?);
        let hugetlb = hugetlb.map_or(HugeTlb::Auto, |is_on| if is_on { HugeTlb::Pages2MiB } else { HugeTlb::Off });
        let made = py.detach(move || SharedPool::with_hugetlb(&pool, buffer_bytes, num_buffers, hugetlb));
        log::flush(py)?;
        let shared = made.map_err(shared_exception)?;
        let origin = Arc::new(BufferOrigin::of_shared(shared.pool(), shared.pinned_by() == Some(PinnedBy::Driver)));
        Ok(Self { shared: Mutex::new(Some(Arc::new(shared))), origin })
    }

    fn fileno(&self) -> PyResult<RawFd> {
        let shared = self.shared()?;
        // SAFETY: only the number leaves this call. The documentation of `fileno` forbids other writes to the memory.
        Ok(unsafe { shared.descriptor() }.as_raw_fd())
    }

    fn receive(&self, py: Python<'_>, ticket: &[u8]) -> PyResult<Buffer> {
        Ok(self.received(self.call(py, |shared| shared.receive(&Ticket::from_bytes(ticket)?))?))
    }

    /// The oldest unreceived buffer and its `user_data`; None after `timeout` seconds.
    fn receive_next(&self, py: Python<'_>, timeout: Option<&Bound<'_, PyAny>>) -> PyResult<Option<(u64, Buffer)>> {
        // Each step takes the shared pool again, so that `close` takes effect.
        let next = |wait| self.shared()?.receive_next(wait).map_err(shared_exception);
        let next = wait_interruptibly(py, timeout.map(seconds).transpose()?, next)??;
        Ok(next.map(|(ticket, buf)| (ticket.user_data(), self.received(buf))))
    }

    fn receive_from_dead_worker(&self, py: Python<'_>) -> PyResult<Option<(u64, Buffer)>> {
        let sent = self.call(py, SharedPool::receive_from_dead_worker)?;
        Ok(sent.map(|(ticket, buf)| (ticket.user_data(), self.received(buf))))
    }

    fn recover(&self, py: Python<'_>) -> PyResult<usize> {
        self.call(py, SharedPool::recover)
    }

    /// While `is_refusing`, sends of workers, and requests that would wait for a buffer, fail immediately.
    fn refuse_workers(&self, py: Python<'_>, is_refusing: bool) -> PyResult<()> {
        self.call(py, |shared| shared.set_accepting_workers(!is_refusing))
    }

    /// Workers; buffers that are free, being filled, sent, received or in flight, and kept by the program.
    fn counts(&self) -> PyResult<(usize, usize, usize, usize, usize, usize)> {
        let (counts, unreturned) = (self.shared()?.counts(), self.origin.num_unreturned.load(Ordering::Relaxed));
        Ok((self.shared()?.worker_count(), counts.free, counts.filling, counts.sent, counts.received, unreturned))
    }

    /// The bytes of a buffer, and the number of buffers.
    fn size(&self) -> PyResult<(usize, usize)> {
        self.shared().map(|shared| (shared.buffer_bytes(), shared.buffer_count()))
    }

    /// What pins the memory, and whether it consists of huge pages.
    fn pages(&self) -> PyResult<(Option<&'static str>, bool)> {
        self.shared().map(|shared| (shared.pinned_by().map(PinnedBy::name), shared.is_hugetlb()))
    }

    fn close(&self) {
        let shared = locked(&self.shared).take();
        without_gil(move || drop(shared));
    }
}

impl Drop for SharedPoolCore {
    fn drop(&mut self) {
        self.close();
    }
}

/// The shared buffers in a worker.
#[pyclass(frozen, module = "pinpool._pinpool")]
pub struct SharedWorker {
    worker: buffers::SharedWorker,
}

#[pymethods]
impl SharedWorker {
    /// Attaches to the memory of a descriptor, without taking ownership of it.
    #[new]
    fn new(descriptor: RawFd) -> PyResult<Self> {
        log::start();
        let failed = |error: std::io::Error| PyOSError::new_err(format!("descriptor {descriptor}: {error}"));
        if descriptor < 0 {
            return Err(PyOSError::new_err(format!("descriptor must be 0 or more, not {descriptor}")));
        }
        // SAFETY: the descriptor is borrowed for this call only, and the kernel refuses a closed descriptor.
        let own = unsafe { BorrowedFd::borrow_raw(descriptor) }.try_clone_to_owned().map_err(failed)?;
        // SAFETY: the documentation of `fileno` forbids other writes to the memory.
        let worker = unsafe { buffers::SharedWorker::attach(own) }.map_err(shared_exception)?;
        Ok(Self { worker })
    }

    fn get(&self, py: Python<'_>, n: &Bound<'_, PyAny>, timeout: Option<&Bound<'_, PyAny>>) -> PyResult<SharedBuffer> {
        let (len, timeout) = (size("nbytes", n)?, timeout.map(seconds).transpose()?);
        let begun = Instant::now();
        let has_timed_out = || timeout.is_some_and(|timeout| begun.elapsed() >= timeout);
        let served = wait_interruptibly(py, None, |wait| {
            let remaining = timeout.map_or(wait, |timeout| wait.min(timeout.saturating_sub(begun.elapsed())));
            match self.worker.get_since(begun, len, remaining) {
                Err(error) if error.is_limit() && !has_timed_out() => Ok(None),
                ended => ended.map(Some),
            }
        })?;
        let waited = timeout != Some(Duration::ZERO);
        let served = served.map_err(|error| {
            if error.is_limit() && waited { TimeoutError::new_err(error.to_string()) } else { shared_exception(error) }
        })?;
        // `wait_interruptibly` has no timeout, so there is a buffer or an error.
        let buf = served.unwrap_or_else(|| unreachable!("it waits until the request ends"));
        Ok(SharedBuffer { len: buf.len(), state: Mutex::new(Filling { buf: Some(buf), views: 0 }) })
    }

    /// The bytes of a buffer, and the number of buffers.
    fn size(&self) -> (usize, usize) {
        (self.worker.buffer_bytes(), self.worker.buffer_count())
    }
}

struct Filling {
    /// `None` after the buffer was sent or released.
    buf: Option<SharedBuf>,
    views: usize,
}

/// A buffer of a `SharedPool` that this process fills, from `SharedPool.get`.
///
/// `memoryview(buf)` and `np.frombuffer(buf)` are writable views. `np.ndarray(shape, buffer=buf)` and `torch.frombuffer(buf)`
/// make views that are not counted and can overwrite the bytes after `send()`: pass `memoryview(buf)` to them. `send()` passes
/// the buffer to the trainer and returns its ticket. A buffer that is not sent becomes free when it and its views are gone.
/// Pickling a buffer, or copying it with the module `copy`, sends it; the receiver unpickles its ticket.
#[pyclass(frozen, module = "pinpool")]
pub struct SharedBuffer {
    len: usize,
    state: Mutex<Filling>,
}

impl SharedBuffer {
    fn gone(&self) -> PyErr {
        ReleasedError::new_err(format!("the shared buffer of {} bytes was sent or released: get another one", self.len))
    }

    fn take(&self) -> PyResult<SharedBuf> {
        let mut state = locked(&self.state);
        if state.buf.is_some() && state.views > 0 {
            let (views, s) = (state.views, if state.views == 1 { "view" } else { "views" });
            return Err(PyBufferError::new_err(format!(
                "this shared buffer has {views} {s} (memoryview, NumPy array), which could change what the trainer reads: \
                 delete them first"
            )));
        }
        state.buf.take().ok_or_else(|| self.gone())
    }
}

#[pymethods]
impl SharedBuffer {
    /// Length in bytes.
    fn __len__(&self) -> usize {
        self.len
    }

    /// Length in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.len
    }

    /// Passes the buffer to the trainer and returns its ticket: 40 bytes, for `SharedPool.receive`.
    ///
    /// Args:
    ///     user_data: an int from 0 to 2**64 - 1 with any meaning; `SharedPool.receive_next` returns it with the buffer.
    ///
    /// Raises:
    ///     BufferError: the buffer has views, which could change what the trainer reads.
    ///     ReleasedError: the buffer was sent or released before.
    ///     TrainerUnavailableError: the trainer has ended, has closed the shared pool, or is ending a loop over `batches`. The
    ///         buffer becomes free.
    #[pyo3(signature = (user_data=0))]
    fn send<'py>(&self, py: Python<'py>, user_data: u64) -> PyResult<Bound<'py, PyBytes>> {
        let buf = self.take()?;
        let ticket = buf.send(user_data).map_err(shared_exception)?;
        Ok(PyBytes::new(py, &ticket.to_bytes()))
    }

    /// Makes the buffer free without sending it. Raises BufferError while it has views.
    fn release(&self) -> PyResult<()> {
        match self.take() {
            Err(error) if locked(&self.state).buf.is_some() => Err(error),
            _ => Ok(()),
        }
    }

    /// # Safety
    ///
    /// `view` is the structure to fill in, as the interpreter passes it.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let buffer = slf.get();
        let mut state = locked(&buffer.state);
        let start = state.buf.as_mut().ok_or_else(|| buffer.gone())?.as_mut_ptr();
        let len = isize::try_from(buffer.len).unwrap_or(isize::MAX);
        // SAFETY: `view` is the interpreter's structure. This process may write the memory until the last view is gone.
        let filled = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start.cast(), len, 0, flags) };
        if filled != 0 {
            return Err(PyErr::fetch(slf.py()));
        }
        state.views += 1;
        Ok(())
    }

    /// # Safety
    ///
    /// `_view` is a structure that `__getbuffer__` filled in, as the interpreter passes it.
    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {
        let mut state = locked(&self.state);
        state.views = state.views.saturating_sub(1);
    }

    fn __reduce_ex__<'py>(
        &self,
        py: Python<'py>,
        _protocol: &Bound<'py, PyAny>,
    ) -> PyResult<(Bound<'py, PyAny>, (Bound<'py, PyBytes>,))> {
        let bytes = py.import("builtins")?.getattr("bytes")?;
        Ok((bytes, (self.send(py, 0)?,)))
    }

    fn __repr__(&self) -> String {
        let gone = if locked(&self.state).buf.is_none() { ", sent or released" } else { "" };
        format!("<pinpool.SharedBuffer of {} bytes{gone}>", self.len)
    }
}
