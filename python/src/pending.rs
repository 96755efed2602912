//! A request that an asyncio task awaits: `pinpool/_asyncio.py` polls it when its socket is readable.

use std::future::Future;
use std::io::Read;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

use pinpool::GetFuture;
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;

use crate::buffer::Buffer;
use crate::handle::{PoolHandle, buffer};
use crate::without_gil::without_gil;
use crate::{errors, log};

/// Wakes the event loop by writing a byte to its socket, without the GIL.
struct Bell(UnixStream);

impl Wake for Bell {
    #[allow(unsafe_code)]
    fn wake(self: Arc<Self>) {
        let byte = 1_u8;
        // Unlike `write`, this call raises no SIGPIPE if the request has ended. If the socket is full, the loop is awake
        // already.
        // SAFETY: the socket is open, and the pointer refers to one byte.
        let _ = unsafe { libc::send(self.0.as_raw_fd(), (&raw const byte).cast(), 1, libc::MSG_NOSIGNAL) };
    }
}

/// A waiting request. Only the event loop polls it.
#[pyclass(frozen, module = "pinpool._pinpool")]
pub struct PendingRequest {
    future: Mutex<Option<GetFuture>>,
    handle: Arc<PoolHandle>,
    waker: Waker,
    socket: UnixStream,
}

impl PendingRequest {
    pub(crate) fn new(future: GetFuture, handle: Arc<PoolHandle>) -> PyResult<Self> {
        let failed = |error: std::io::Error| {
            PyOSError::new_err(format!(
                "cannot create a socket to wait for memory: {error}; raise the limit on files (`ulimit -n`)"
            ))
        };
        let (socket, bell) = UnixStream::pair().map_err(failed)?;
        socket.set_nonblocking(true).map_err(failed)?;
        bell.set_nonblocking(true).map_err(failed)?;
        let waker = Waker::from(Arc::new(Bell(bell)));
        Ok(Self { future: Mutex::new(Some(future)), handle, waker, socket })
    }

    fn future(&self) -> MutexGuard<'_, Option<GetFuture>> {
        self.future.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl PendingRequest {
    /// The socket that becomes readable when `poll` should be called again.
    fn fileno(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    /// The buffer, or None if the request still waits.
    fn poll(&self, py: Python<'_>) -> PyResult<Option<Buffer>> {
        // The future is moved out, because no lock may be held during a pool call.
        let Some(mut future) = self.future().take() else { return Ok(None) };
        let (future, polled) = py.detach(|| {
            let mut rung = [0; 64];
            while (&self.socket).read(&mut rung).is_ok_and(|count| count == rung.len()) {}
            let polled = Pin::new(&mut future).poll(&mut Context::from_waker(&self.waker));
            (future, polled)
        });
        let polled = match polled {
            Poll::Pending => {
                *self.future() = Some(future);
                Ok(None)
            }
            Poll::Ready(Ok(buf)) => Ok(Some(buffer(buf, &self.handle))),
            Poll::Ready(Err(error)) => Err(errors::exception(&error)),
        };
        log::flush(py)?;
        polled
    }

    /// Leaves the queue. A buffer that has already been handed over goes to the next request.
    fn close(&self) {
        let future = self.future().take();
        without_gil(move || drop(future));
    }
}

impl Drop for PendingRequest {
    fn drop(&mut self) {
        self.close();
    }
}
