//! The streams and memories that buffers are copied to and from.
//!
//! | stream `S` | device memory | element `E` | who copies |
//! | --- | --- | --- | --- |
//! | `CudaStream` of cudarc, or an `Arc` of one | any `DevicePtr<E>` and `DevicePtrMut<E>`: `CudaSlice<f32>`, `CudaViewMut<u8>` | any `bytemuck::Pod` | the GPU's copy engine |
//! | `RawStream` | `RawMemory` | `u8` | the GPU's copy engine |
//! | `SinkStream` of the crate `pinpool-testing` | `SinkMemory` | `u8` | a thread in place of a device |
//!
//! Copies on one stream run in order, and copies over pinned memory are asynchronous. Each implementation returns a [`Fence`], so that
//! [`PinnedBuf::copy_to`](crate::PinnedBuf::copy_to) is the same code with and without a GPU.
//!
//! [`CopyTarget`], [`CopySource`], [`CopyStream`] and [`Fence`] may be implemented by other crates, for another driver or for
//! tests.

use std::sync::Arc;

use crate::error::{Error, Result};

pub(crate) mod completion;
#[cfg(feature = "cuda")]
pub mod cuda;

pub use crate::in_flight::{Fence, StreamId};
pub(crate) use completion::{Completion, CompletionFuture, CopyEndListener};

/// The fence of work that cannot be tracked because the driver refused a fence. The memory is leaked unless a later call for
/// the work succeeds.
#[derive(Debug)]
pub(crate) struct UnknownEnd(pub(crate) String);

// SAFETY: never reports completion.
#[allow(unsafe_code)]
unsafe impl Fence for UnknownEnd {
    fn is_complete(&self) -> Result<bool> {
        Err(Error::device_failed(format!("the end of work that uses the buffer is unknown: {}", self.0)))
    }

    fn wait(&self) -> Result<()> {
        self.is_complete().map(drop)
    }
}

/// Returns the bytes that the timelines of this process have pinned, which belong to no pool.
pub(crate) fn timeline_bytes() -> u64 {
    #[cfg(feature = "cuda")]
    return cuda::timeline_bytes();
    #[cfg(not(feature = "cuda"))]
    0
}

/// Memory that can be copied into on a stream `S`. `E`, the element type of the memory, only selects the implementation; all sizes
/// are in bytes.
///
/// # Safety
///
/// On `Ok` and [`EnqueueError::Failed`], the returned fence must satisfy the contract of [`Fence`] for this copy; on
/// [`EnqueueError::Refused`] nothing may have been enqueued that reads the source. A panic is not caught, and the buffer
/// may be reused immediately, so the function must not panic once something is enqueued.
#[allow(unsafe_code)]
pub unsafe trait CopyTarget<S: ?Sized, E = u8> {
    /// Returns the length of this memory in bytes.
    fn capacity_bytes(&self) -> usize;

    /// Enqueues a copy of `len` bytes from `source` to the front of this memory and returns immediately, with a fence.
    ///
    /// # Errors
    ///
    /// An [`EnqueueError`], which says whether the stream may be reading the source.
    ///
    /// # Safety
    ///
    /// The `len` bytes at `source` must stay readable and unchanged until the fence returns `Ok(true)`, and `len` must be at most
    /// [`capacity_bytes`](CopyTarget::capacity_bytes).
    unsafe fn enqueue_write(&mut self, stream: &S, source: *const u8, len: usize) -> Enqueued;
}

/// Memory that can be copied from on a stream `S`; `E` as for [`CopyTarget`].
///
/// # Safety
///
/// The contract of [`CopyTarget`], for the buffer that is written to.
#[allow(unsafe_code)]
pub unsafe trait CopySource<S: ?Sized, E = u8> {
    /// Returns the number of bytes that can be copied.
    fn available_bytes(&self) -> usize;

    /// Enqueues a copy of `len` bytes from the front of this memory to `target` and returns immediately, with a fence.
    ///
    /// # Errors
    ///
    /// An [`EnqueueError`], which says whether the stream may be writing to the target.
    ///
    /// # Safety
    ///
    /// Nothing else may touch the `len` bytes at `target` until the fence returns `Ok(true)`, and `len` must be at most
    /// [`available_bytes`](CopySource::available_bytes).
    unsafe fn enqueue_read(&self, stream: &S, target: *mut u8, len: usize) -> Enqueued;
}

/// An in-order queue of work in which a fence can be recorded.
///
/// # Safety
///
/// The fence must satisfy the contract of [`Fence`] for all work enqueued before the call. A panic counts as
/// [`Error::is_device_failed`].
#[allow(unsafe_code)]
pub unsafe trait CopyStream {
    /// Records a fence that is complete once all work enqueued so far has completed.
    ///
    /// # Errors
    ///
    /// [`Error::is_device_failed`] if no fence can be recorded, [`Error::is_capturing_stream`] if the stream is capturing a graph. A
    /// [`RawStream`](cuda::RawStream) also returns [`Error::is_invalid_handle`] for an invalid handle, and [`Error::is_unavailable`]
    /// without a driver.
    fn record_fence(&self) -> Result<Arc<dyn Fence>>;
}

/// A copy that was enqueued, with its fence.
pub type Enqueued = Result<Arc<dyn Fence>, EnqueueError>;

/// Why a copy was not enqueued, failed, or cannot be tracked.
#[derive(Debug)]
#[non_exhaustive]
pub enum EnqueueError {
    /// Nothing was enqueued: the buffer may be reused.
    Refused(Error),
    /// The copy failed and part of it may be running: the buffer may be reused once the fence is complete.
    Failed(Error, Arc<dyn Fence>),
    /// A copy may be running and cannot be tracked: the buffer must never be reused.
    Unknown(Error),
}

/// Calls `enqueue` for a copy of `len` bytes, unless `len` exceeds the `bytes` of the device memory.
pub(crate) fn checked_enqueue(len: usize, what: &str, bytes: usize, enqueue: impl FnOnce() -> Enqueued) -> Enqueued {
    let why = || format!("the {what} has only {bytes}B; make it larger or request a shorter buffer");
    if len <= bytes { enqueue() } else { Err(EnqueueError::Refused(Error::copy_refused(len, why()))) }
}
