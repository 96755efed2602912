//! Where a buffer is copied to and from: a CUDA stream, or the host sink that stands for one.
//!
//! | stream `S` | device memory | who copies |
//! | --- | --- | --- |
//! | `CudaStream` of cudarc, or an `Arc` of one | any `DevicePtr<u8>` and `DevicePtrMut<u8>`: `CudaSlice<u8>`, `CudaViewMut<u8>` | the GPU's copy engine |
//! | [`sink::SinkStream`] | [`sink::SinkMem`] | a worker thread of the host |
//!
//! Both are asynchronous and in order, both give a [`Fence`], so that
//! [`PinnedBuf::copy_to`](crate::PinnedBuf::copy_to) and all that follows from it is the same code with and without a
//! GPU.

use std::sync::Arc;

use crate::config::FenceKind;
use crate::error::{Error, Result};
use crate::in_flight::{Fence, SharedFence};

#[cfg(feature = "cuda")]
pub mod cuda;
pub mod sink;

/// Who asks for the end of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FencePurpose {
    /// The buffer, which its user keeps and may copy again: the fence says on which [stream](Fence::stream_id) it is, if
    /// that is known.
    Buffer,
    /// The pool, which gets the buffer when the copy is over: a fence of this kind, if there are several.
    Pool(FenceKind),
}

/// Memory that can be copied into on a stream `S`.
///
/// # Safety
///
/// On `Ok`, the returned fence must satisfy the contract of [`Fence`] for this copy; on
/// [`CopyFailure::Refused`] nothing may have been enqueued that reads the source. A panic counts as a refusal: it may not
/// come once something is enqueued.
#[allow(unsafe_code)]
pub unsafe trait CopyTarget<S: ?Sized> {
    /// Bytes that fit.
    fn capacity_bytes(&self) -> usize;

    /// Enqueues a copy of `len` bytes from `source` to the front of this memory and returns at once, with a fence for
    /// `purpose`.
    ///
    /// # Errors
    ///
    /// [`CopyFailure`], by whether the stream may be reading the source.
    ///
    /// # Safety
    ///
    /// The `len` bytes at `source` stay readable and unchanged until the fence says that the copy is over, and `len` is
    /// at most [`capacity_bytes`](CopyTarget::capacity_bytes).
    unsafe fn enqueue(
        &mut self,
        stream: &S,
        source: *const u8,
        len: usize,
        purpose: FencePurpose,
    ) -> Result<Arc<dyn Fence>, CopyFailure>;
}

/// Memory that can be copied from on a stream `S`.
///
/// # Safety
///
/// As for [`CopyTarget`], of the buffer that is written to.
#[allow(unsafe_code)]
pub unsafe trait CopySource<S: ?Sized> {
    /// Bytes that are there.
    fn available_bytes(&self) -> usize;

    /// Enqueues a copy of `len` bytes from the front of this memory to `target` and returns at once, with a fence for the
    /// [buffer](FencePurpose::Buffer).
    ///
    /// # Errors
    ///
    /// [`CopyFailure`], by whether the stream may be writing to the target.
    ///
    /// # Safety
    ///
    /// Nobody else touches the `len` bytes at `target` until the fence says that the copy is over, and `len` is at most
    /// [`available_bytes`](CopySource::available_bytes).
    unsafe fn fetch(&self, stream: &S, target: *mut u8, len: usize) -> Result<Arc<dyn Fence>, CopyFailure>;
}

/// An in-order queue of work that can be marked.
///
/// # Safety
///
/// The fence must satisfy the contract of [`Fence`] for all work enqueued before the call.
#[allow(unsafe_code)]
pub unsafe trait CopyStream {
    /// A fence behind all that was enqueued so far.
    ///
    /// # Errors
    ///
    /// [`Error::is_device`] if that cannot be known.
    fn mark(&self) -> Result<Arc<dyn Fence>>;
}

/// Why a copy was not enqueued, or is not tracked.
#[derive(Debug)]
pub enum CopyFailure {
    /// Nothing was enqueued: the source is free again.
    Refused(Error),
    /// A copy may be running and nobody will know when it ends: the source must never be used again.
    Unknown(Error),
}

/// Enqueues a copy after the checks that need no driver.
///
/// # Safety
///
/// As [`CopyTarget::enqueue`], except that `len` may be anything.
#[allow(unsafe_code)]
pub(crate) unsafe fn enqueue<S: ?Sized, T: CopyTarget<S> + ?Sized>(
    stream: &S,
    target: &mut T,
    source: *const u8,
    len: usize,
    purpose: FencePurpose,
) -> Result<SharedFence, CopyFailure> {
    let capacity_bytes = target.capacity_bytes();
    if len > capacity_bytes {
        let why = format!("the target holds only {capacity_bytes} B; allocate it larger or get a shorter buffer");
        return Err(CopyFailure::Refused(Error::copy(len, why)));
    }
    // SAFETY: the caller's promise; the length was checked above.
    unsafe { target.enqueue(stream, source, len, purpose) }
}

/// Enqueues a copy into host memory after the checks that need no driver.
///
/// # Safety
///
/// As [`CopySource::fetch`], except that `len` may be anything.
#[allow(unsafe_code)]
pub(crate) unsafe fn fetch<S: ?Sized, T: CopySource<S> + ?Sized>(
    stream: &S,
    source: &T,
    target: *mut u8,
    len: usize,
) -> Result<SharedFence, CopyFailure> {
    let available_bytes = source.available_bytes();
    if len > available_bytes {
        let why = format!("the source holds only {available_bytes} B; get a shorter buffer");
        return Err(CopyFailure::Refused(Error::copy(len, why)));
    }
    // SAFETY: the caller's promise; the length was checked above.
    unsafe { source.fetch(stream, target, len) }
}

/// A copy on its way, for whoever wants to know when it is over. Dropping it forgets nothing: the pool keeps the buffer
/// until then all the same.
#[derive(Debug, Clone)]
pub struct Completion(Option<SharedFence>);

impl Completion {
    pub(crate) fn of(fence: SharedFence) -> Self {
        Self(Some(fence))
    }

    /// Of a copy of nothing.
    pub(crate) fn already() -> Self {
        Self(None)
    }

    /// Is the copy over? Does not wait.
    ///
    /// # Errors
    ///
    /// [`Error::is_device`] if the device failed, so that nobody will ever know.
    pub fn is_done(&self) -> Result<bool> {
        self.0.as_ref().map_or(Ok(true), |fence| fence.is_done())
    }

    /// Waits until the copy is over.
    ///
    /// # Errors
    ///
    /// As [`is_done`](Completion::is_done).
    pub fn wait(&self) -> Result<()> {
        self.0.as_ref().map_or(Ok(()), |fence| fence.wait())
    }
}
