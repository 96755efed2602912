//! A stream by its handle alone, as programs in C and other frameworks name it.
#![allow(unsafe_code)] // Calls the driver.

use std::ffi::c_void;

use cudarc::driver::sys;

use super::handle::{fence_behind_stream, require_driver};
use super::stream::is_default;
use crate::copy::CopyStream;
use crate::driver::device::Device;
use crate::driver::{CurrentContext, calls};
use crate::error::{Error, ErrorKind, Result, SourceError};
use crate::in_flight::SharedFence;

/// A stream of other code, which has no object of cudarc.
///
/// ```no_run
/// use pinpool::{PinnedBuf, copy::cuda::RawStream};
///
/// /// `stream` is a `cudaStream_t` or a `CUstream` with work that uses the buffer.
/// fn release(buf: PinnedBuf, stream: *mut std::ffi::c_void) -> pinpool::Result<()> {
///     // SAFETY: the caller keeps the stream until its work is over.
///     buf.release_after(&unsafe { RawStream::new(stream) })
/// }
/// ```
#[derive(Debug, Clone, Copy)]
pub struct RawStream {
    handle: sys::CUstream,
    device: Option<u32>,
}

impl RawStream {
    /// The stream with this handle, of the driver or the runtime. Null and the other default-stream handles refer to the
    /// context that is current on the thread that uses this.
    ///
    /// # Safety
    ///
    /// The stream is not destroyed while this is used. Its context, unless it is a primary one, is not destroyed
    /// (`cuCtxDestroy`) before the pool has seen the end of the work: until [`Pool::maintain`](crate::Pool::maintain) after it, the pool may
    /// query the context.
    #[must_use]
    pub unsafe fn new(handle: *mut c_void) -> Self {
        Self { handle: handle.cast(), device: None }
    }

    /// Names the GPU of a default stream by its ordinal: the one of its primary context, whatever context is current.
    #[must_use]
    pub fn on_device(self, ordinal: u32) -> Self {
        Self { device: Some(ordinal), ..self }
    }

    /// Whether the stream captures a graph, or one that waits for it does. `false` if the driver does not tell.
    #[must_use]
    pub fn is_capturing(self) -> bool {
        let Ok(_entered) = self.enter() else { return false };
        // SAFETY: alive (`new`).
        unsafe { calls::is_capturing(self.handle) }.unwrap_or_else(|code| (900..=908).contains(&code.number()))
    }

    pub(super) fn handle(self) -> sys::CUstream {
        self.handle
    }

    /// Makes the context current that a default stream is of.
    pub(super) fn enter(self) -> Result<Option<CurrentContext>> {
        let Some(ordinal) = self.device.filter(|_| is_default(self.handle)) else { return Ok(None) };
        require_driver()?;
        if calls::current_device().is_ok_and(|current| u32::try_from(current) == Ok(ordinal)) {
            return Ok(None);
        }
        let entered = Device::known(ordinal).and_then(|device| device.enter());
        let refused = |error: SourceError| Error::from(ErrorKind::Handle { why: error.to_string() });
        entered.map(|(context, _relaxed)| Some(context)).map_err(refused)
    }
}

// SAFETY: the fence follows all work enqueued so far (event-I1).
unsafe impl CopyStream for RawStream {
    fn mark(&self) -> Result<SharedFence> {
        let _entered = self.enter()?;
        // SAFETY: alive (`new`).
        unsafe { fence_behind_stream(self.handle) }
    }
}
