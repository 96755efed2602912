//! Copies from and into a buffer, and other libraries' work on it: each is recorded in the buffer, or consumes the buffer.
#![allow(unsafe_code)] // Lends the block's memory to devices.

use std::fmt;
use std::future::IntoFuture;
use std::ops::RangeBounds;
use std::time::Duration;

use super::PinnedBuf;
use super::slice::elements_in;
use crate::copy::{
    self, Completion, CompletionFuture, CopySource, CopyStream, CopyTarget, EnqueueError, Enqueued, checked_enqueue,
};
use crate::error::{Error, Result};
use crate::in_flight::{CopyFences, SharedFence, WorkId};

/// A buffer that a device is writing to. Only [`wait`](PendingBuf::wait) or `await` gives access to its bytes. Dropping the
/// `PendingBuf` drops the buffer, which returns to its pool when the copy completes.
#[derive(Debug)]
#[must_use = "the bytes are valid only after `wait`"]
pub struct PendingBuf {
    buf: PinnedBuf,
    copy: Completion,
}

impl PendingBuf {
    /// Returns whether the copy has completed. Does not wait.
    ///
    /// # Errors
    ///
    /// [`Error::is_device_failed`] if the device failed, so it is unknown whether the copy has completed.
    pub fn is_complete(&self) -> Result<bool> {
        self.copy.is_complete()
    }

    /// Waits up to `timeout` for the copy, and returns whether it has completed. If so, [`wait`](Self::wait) returns immediately.
    ///
    /// # Errors
    ///
    /// The errors of [`is_complete`](PendingBuf::is_complete).
    pub fn wait_timeout(&self, timeout: Duration) -> Result<bool> {
        self.copy.wait_timeout(timeout)
    }

    /// Waits for the copy and returns the buffer with its bytes.
    ///
    /// # Errors
    ///
    /// The errors of [`is_complete`](Self::is_complete); the memory is then quarantined until its fence confirms the end.
    pub fn wait(self) -> Result<PinnedBuf> {
        self.copy.wait()?;
        Ok(self.buf)
    }
}

/// An awaited `PendingBuf` resolves to the buffer when the copy completes, or to the error of [`wait`](PendingBuf::wait).
impl IntoFuture for PendingBuf {
    type Output = Result<PinnedBuf>;
    type IntoFuture = CompletionFuture<PinnedBuf>;

    fn into_future(self) -> Self::IntoFuture {
        CompletionFuture::new(self.copy, self.buf)
    }
}

/// Error of the calls that consume a buffer, such as [`PinnedBuf::copy_to`] and [`PinnedBuf::release_after`], with the buffer for
/// another attempt. `?` in a function that returns [`Error`] or [`std::io::Error`] drops the buffer; a `Box<dyn Error>` keeps it. If
/// the error of `release_after` is dropped, the memory is never reused. A buffer from [`into_buf`](CopyError::into_buf) is reused
/// as soon as it is dropped, so drop it only after the work has completed.
#[derive(thiserror::Error)]
#[error("{error}")]
pub struct CopyError {
    error: Error,
    buf: Option<RefusedBuf>,
}

/// A buffer that the failed call did not consume.
struct RefusedBuf {
    buf: PinnedBuf,
    /// Whether other code's work may still use the buffer. If so, dropping the error leaks the memory.
    may_be_in_use: bool,
}

impl Drop for RefusedBuf {
    fn drop(&mut self) {
        if self.may_be_in_use {
            std::mem::take(&mut self.buf).leak(&Error::device_failed("the work that uses the buffer has no fence"));
        }
    }
}

/// Prints the same text as its [`Error`].
impl fmt::Debug for CopyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl CopyError {
    /// Returns the error of a copy. It contains the buffer, unless the memory can never be reused.
    fn with_buf(error: Error, buf: PinnedBuf) -> Self {
        Self { error, buf: buf.block.is_some().then_some(RefusedBuf { buf, may_be_in_use: false }) }
    }

    /// Returns the reason for the failure.
    pub fn error(&self) -> &Error {
        &self.error
    }

    /// Returns the buffer for another attempt, or `None` if a copy may have started or `release_after` was called in a forked
    /// child. If a failed `copy_to` returns the buffer, nothing was enqueued; otherwise the memory returns to the pool when the
    /// copy completes, or never. After a failed `release_after` other code's work may still use the buffer, so do not drop the
    /// buffer before that work has completed.
    pub fn into_buf(self) -> Option<PinnedBuf> {
        self.into_parts().1
    }

    /// Returns the reason for the failure, and the buffer of [`into_buf`](Self::into_buf).
    pub fn into_parts(self) -> (Error, Option<PinnedBuf>) {
        (self.error, self.buf.map(|mut refused| std::mem::take(&mut refused.buf)))
    }
}

impl From<CopyError> for Error {
    fn from(error: CopyError) -> Self {
        error.error
    }
}

impl From<CopyError> for std::io::Error {
    fn from(error: CopyError) -> Self {
        error.error.into()
    }
}

/// Calls `make_fence`, which creates a fence after work that may be running. A panic counts as a device failure:
/// unwinding would drop the buffer, and the memory would be reused.
fn catch_fence_panic<F>(make_fence: impl FnOnce() -> Result<F>) -> Result<F> {
    pinpool_os::unwind::catch_panic(make_fence)
        .unwrap_or_else(|| Err(Error::device_failed("recording a fence panicked")))
}

impl PinnedBuf {
    /// Enqueues a copy of the whole buffer to the start of `target` and consumes the buffer, which returns to the pool when the
    /// copy completes. Blocks the calling thread until earlier copies into the buffer have completed, even copies on `stream`;
    /// `stream.memcpy_htod(&buf, ..)` does not wait for those. `E` is the element type of the target and is inferred.
    ///
    /// # Errors
    ///
    /// - [`Error::is_copy_refused`], [`Error::is_capturing_stream`]: the target is too small or the driver refused the copy, or the
    ///   stream is capturing a graph; [`CopyError::into_buf`] returns the buffer,
    /// - [`Error::is_invalid_handle`], [`Error::is_unavailable`]: a raw stream is invalid, or there is no driver; `into_buf`
    ///   returns the buffer,
    /// - [`Error::is_device_failed`]: the device failed; if the copy may be running, the memory returns to the pool when the copy has
    ///   completed, or is never reused; otherwise `into_buf` returns the buffer,
    /// - [`Error::is_forked`]: the pool was created before this process was forked.
    pub fn copy_to<S, E, T>(mut self, stream: &S, target: &mut T) -> Result<Completion, CopyError>
    where
        S: ?Sized,
        T: CopyTarget<S, E> + ?Sized,
    {
        let Some(block) = self.block.as_ref().filter(|block| block.len() > 0) else {
            return Ok(Completion::completed());
        };
        let capacity_bytes = target.capacity_bytes();
        // SAFETY: the length is checked first. The engine gets the block with this copy's fence and keeps it from every other use
        // until the copy has completed (in-flight-I1); on a refusal nothing was enqueued.
        let enqueue = || unsafe { target.enqueue_write(stream, self.start().as_ptr(), self.len()) };
        let ready = block.begin_read().map_err(EnqueueError::Refused);
        match ready.and_then(|()| checked_enqueue(self.len(), "target", capacity_bytes, enqueue)) {
            Ok(fence) => {
                let listener = Some(block.copy_end_listener());
                if let Some(block) = self.block.take() {
                    block.put_after(fence.clone());
                }
                Ok(Completion::tracked(fence, listener))
            }
            Err(EnqueueError::Refused(error)) => Err(CopyError::with_buf(error, self)),
            Err(failed) => {
                self.track(Err(failed), CopyFences::record_read).map_err(|error| CopyError { error, buf: None })
            }
        }
    }

    /// Enqueues a copy of `range` to the start of `target` and keeps the buffer, for another copy or another target.
    /// [`wait_slice_mut`](PinnedBuf::wait_slice_mut) waits until the copy completes; a buffer dropped before that returns to the
    /// pool when all of its copies have completed.
    ///
    /// # Errors
    ///
    /// The errors of [`copy_to`](PinnedBuf::copy_to), and [`Error::is_invalid_request`] if `range` is not inside the buffer. If
    /// the copy may be running and cannot be tracked, the memory is never reused, and the length of the buffer becomes 0. After
    /// all other errors the buffer is unchanged.
    pub fn copy_range_to<S, E, T, R>(&mut self, range: R, stream: &S, target: &mut T) -> Result<Completion>
    where
        R: RangeBounds<usize>,
        S: ?Sized,
        T: CopyTarget<S, E> + ?Sized,
    {
        let range = elements_in(range, self.len())?;
        let len = range.len();
        let Some(block) = self.block.as_ref().filter(|_| len > 0) else { return Ok(Completion::completed()) };
        block.begin_read()?;
        // SAFETY: `range.start` is at most `len`, so the sum stays inside the block (buffer-I1).
        let (source, capacity_bytes) = (unsafe { self.start().add(range.start) }, target.capacity_bytes());
        // SAFETY: the length is checked first. The fence is recorded below, and from then on nothing writes to the memory, nor
        // does it return to the pool, until the copy has completed (buffer-I2); on a refusal nothing was enqueued.
        let enqueue = || unsafe { target.enqueue_write(stream, source.as_ptr(), len) };
        self.track(checked_enqueue(len, "target", capacity_bytes, enqueue), CopyFences::record_read)
    }

    /// Blocks the calling thread until earlier copies of the buffer have completed, even copies on `stream`, then enqueues a copy
    /// that fills it from the start of `source`. [`PendingBuf::wait`] returns the buffer when the copy completes.
    ///
    /// ```
    /// # use pinpool_testing::{SinkMemory, SinkStream};
    /// # let pool = pinpool::Pool::builder().backend(pinpool::Backend::Heap).build()?;
    /// let (stream, device) = (SinkStream::new()?, SinkMemory::from(vec![7; 8]));
    /// let pending = pool.get(8)?.copy_from(&stream, &device)?;
    /// let buf = pending.wait()?;
    /// assert_eq!(*buf.wait_slice()?, [7; 8]);
    /// # Ok::<(), pinpool::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors of [`copy_to`](PinnedBuf::copy_to); [`Error::is_copy_refused`] also if the source is too small.
    /// [`CopyError::into_buf`] returns the buffer unless it is unknown whether a copy is running. If an earlier copy is running,
    /// the methods that return slices wait for that copy.
    pub fn copy_from<S, E, T>(mut self, stream: &S, source: &T) -> Result<PendingBuf, CopyError>
    where
        S: ?Sized,
        T: CopySource<S, E> + ?Sized,
    {
        let mut begin = || {
            let Some(block) = self.block.as_mut().filter(|block| block.len() > 0) else {
                return Ok(Completion::completed());
            };
            block.check_process()?;
            // Earlier copies, including copies of lent slices, must not see the new bytes.
            block.copy_fences_mut().wait_for_all()?;
            let (start, len) = (block.start(), block.len());
            // SAFETY: the length is checked first. The fence is recorded below, and from then on nothing touches the memory, nor
            // does it return to the pool, until the copy has completed (buffer-I2); on a refusal nothing was enqueued.
            let enqueue = || unsafe { source.enqueue_read(stream, start.as_ptr(), len) };
            self.track(checked_enqueue(len, "source", source.available_bytes(), enqueue), CopyFences::record_write)
        };
        match begin() {
            Ok(copy) => Ok(PendingBuf { buf: self, copy }),
            Err(error) => Err(CopyError::with_buf(error, self)),
        }
    }

    /// Consumes the buffer, which returns to the pool when all work enqueued on `stream` so far has completed. Use it for work
    /// that the pool cannot see: a kernel that reads the memory through its device pointer, or a copy by another library.
    ///
    /// # Errors
    ///
    /// The errors of [`CopyStream::record_fence`], and [`Error::is_forked`]. The memory is never reused, unless
    /// [`CopyError::into_buf`] takes the buffer out of the error.
    pub fn release_after<S: CopyStream + ?Sized>(self, stream: &S) -> Result<(), CopyError> {
        self.release_with_fence(|| stream.record_fence().map(Some))
    }

    /// Records that the work enqueued so far on `stream` uses the buffer, which stays with the caller: a kernel that uses the memory
    /// through its device pointer, or a copy by another library. The buffer returns to the pool only when that work, too, has
    /// completed. For several streams, call it for each. [`release_after`](PinnedBuf::release_after) also consumes the buffer.
    ///
    /// ```
    /// # use pinpool_testing::SinkStream;
    /// # let pool = pinpool::Pool::builder().backend(pinpool::Backend::Heap).build()?;
    /// # let (stream, mut buf) = (SinkStream::new()?, pool.get(8)?);
    /// // Other code has enqueued work on `stream` that uses `buf.as_ptr()`.
    /// buf.record_stream(&stream)?;
    /// drop(buf); // reused when the work has completed
    /// # Ok::<(), pinpool::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors of [`CopyStream::record_fence`]: the memory is then never reused. [`Error::is_forked`]: this is a forked child, and
    /// nothing is recorded.
    pub fn record_stream<S: CopyStream + ?Sized>(&mut self, stream: &S) -> Result<()> {
        self.record_work(|| None, || stream.record_fence().map(Some))
    }

    /// Records the fence that `make_fence` returns for the work of a stream or event. If there is no fence, records the work as
    /// unfenced, so that the memory is not reused unless a later call for work with the same `id` succeeds. No later call helps
    /// after a capture, or for work without an id.
    fn record_work(
        &mut self,
        id: impl FnOnce() -> Option<WorkId>,
        make_fence: impl Fn() -> Result<Option<SharedFence>>,
    ) -> Result<()> {
        let Some(block) = &mut *self.block else { return Ok(()) };
        block.check_process()?;
        let id = id();
        // The driver may accept the second attempt.
        let make = || catch_fence_panic(&make_fence);
        let fence = make().or_else(|error| if error.is_capturing_stream() { Err(error) } else { make() });
        let fences = block.copy_fences_mut();
        fences.forget_completed();
        match fence {
            Ok(fence) => {
                id.into_iter().for_each(|id| fences.forget_unfenced(id));
                fence.into_iter().for_each(|fence| fences.record_write(fence));
                Ok(())
            }
            // Without a driver there is no such work. But a stream without an id may still have work.
            Err(error) if id.is_some() && error.is_unavailable() => Err(error),
            Err(error) => {
                // Each launch of a captured graph uses the buffer again, so no later call may forget this entry.
                let id = id.filter(|_| !error.is_capturing_stream());
                fences.record_unfenced(id, std::sync::Arc::new(copy::UnknownEnd(error.to_string())));
                Err(error)
            }
        }
    }

    /// Consumes the buffer. Its memory is reused once the fence that `make_fence` returns is complete, or immediately if there
    /// is no fence.
    fn release_with_fence(mut self, make_fence: impl FnOnce() -> Result<Option<SharedFence>>) -> Result<(), CopyError> {
        // The length is not checked: other code may still use the memory of a buffer that was truncated to zero bytes.
        let Some(block) = &*self.block else { return Ok(()) };
        block.check_process().map_err(|error| CopyError { error, buf: None })?;
        match catch_fence_panic(make_fence) {
            Ok(Some(fence)) => {
                if let Some(block) = self.block.take() {
                    block.put_after(fence);
                }
                Ok(())
            }
            Ok(None) => Ok(()),
            Err(error) => Err(CopyError { error, buf: Some(RefusedBuf { buf: self, may_be_in_use: true }) }),
        }
    }

    /// Records an enqueued copy with `record`. If the copy may be running and has no fence, leaks the memory.
    fn track(&mut self, enqueued: Enqueued, record: fn(&mut CopyFences, SharedFence)) -> Result<Completion> {
        let (fence, failure) = match enqueued {
            Ok(fence) => (fence, None),
            Err(EnqueueError::Failed(error, fence)) => (fence, Some(error)),
            Err(EnqueueError::Refused(error)) => return Err(error),
            Err(EnqueueError::Unknown(error)) => {
                std::mem::take(self).leak(&error);
                return Err(error);
            }
        };
        if let Some(block) = &mut *self.block {
            record(block.copy_fences_mut(), fence.clone());
        }
        failure.map_or_else(|| Ok(Completion::tracked(fence, None)), Err)
    }

    /// Takes the memory out of use permanently.
    fn leak(mut self, error: &Error) {
        if let Some(mut block) = self.block.take() {
            drop(block.copy_fences_mut().take());
            block.leak(error);
        }
    }
}

#[cfg(feature = "cuda")]
impl PinnedBuf {
    /// Consumes the buffer, which returns to the pool when the work that `event` covers now has completed: all work enqueued
    /// before the event was last recorded. The caller may record or drop the event immediately. An event that was never
    /// recorded covers nothing. If the driver refuses a fence after the event, the call waits for the event.
    ///
    /// # Errors
    ///
    /// The errors of [`release_after`](Self::release_after); [`Error::is_capturing_stream`] for an event recorded in a capture.
    pub fn release_after_event(self, event: &cudarc::driver::CudaEvent) -> Result<(), CopyError> {
        self.release_with_fence(|| crate::driver::with_one_retry(|| copy::cuda::fence_after_event(event)))
    }

    /// Records, as [`record_stream`](PinnedBuf::record_stream) does, the work that `event` covers now: all work enqueued before the
    /// event was last recorded. [`release_after_event`](PinnedBuf::release_after_event) describes the event.
    ///
    /// # Errors
    ///
    /// The errors of [`record_stream`](Self::record_stream); [`Error::is_capturing_stream`] for an event recorded in a capture.
    pub fn record_event(&mut self, event: &cudarc::driver::CudaEvent) -> Result<()> {
        self.record_work(|| None, || copy::cuda::fence_after_event(event))
    }

    /// Returns the device address of the first byte, for kernels that read the memory in place. Their work is not tracked:
    /// release the buffer with [`release_after`](PinnedBuf::release_after).
    ///
    /// # Errors
    ///
    /// - [`Error::is_unmapped`]: the memory is not mapped for the device of this context, since it was not pinned by CUDA,
    /// - [`Error::is_forked`]: this is a forked child.
    pub fn device_ptr(&self, context: &std::sync::Arc<cudarc::driver::CudaContext>) -> Result<u64> {
        self.check_reachable()?;
        copy::cuda::mapped_address(context, self.start().as_ptr(), self.len())
    }

    /// Records the work on a stream that is known by its handle alone: `stream` is a `CUstream` or a `cudaStream_t`. The legacy
    /// stream (null) belongs to the current context, and the per-thread stream also to this thread. Unlike after
    /// [`record_stream`](PinnedBuf::record_stream), a second call can correct a failure, as callers from C and Python need. In Rust
    /// use `record_stream` with a [`RawStream`](crate::copy::cuda::RawStream).
    ///
    /// # Errors
    ///
    /// - [`Error::is_unavailable`]: there is no driver, so no work uses the buffer,
    /// - [`Error::is_forked`]: this is a forked child; nothing is recorded,
    /// - [`Error::is_invalid_handle`]: the driver knows no such stream, or it is a default stream and no context is current,
    /// - [`Error::is_device_failed`], [`Error::is_capturing_stream`]: no fence can be recorded on the stream, or it is capturing a graph.
    ///
    /// After the last two, the memory is never reused unless a later call for the same stream succeeds (if no context was current:
    /// a call on this thread with the context of the work current); after a capture, never.
    ///
    /// # Safety
    ///
    /// The stream must not be destroyed during the call, nor between a failed call and the next call for this stream. Its
    /// context, unless it is a primary context, must not be destroyed before the pool has ended: until the last handle and
    /// buffer are dropped, another thread may query the context, even if the work has completed.
    #[doc(hidden)]
    pub unsafe fn unstable_record_stream(&mut self, stream: *mut std::ffi::c_void) -> Result<()> {
        let id = || Some(copy::cuda::work_id(stream.addr()));
        // SAFETY: the caller promises that the stream is not destroyed during the call.
        let stream = unsafe { copy::cuda::RawStream::new(stream) };
        self.record_work(id, || stream.record_fence().map(Some))
    }

    /// Records, as [`unstable_record_stream`](Self::unstable_record_stream) does, the work that an event covers now: all work
    /// enqueued before the event was last recorded. `event` is a `CUevent` or a `cudaEvent_t`. The caller may record or destroy the event
    /// immediately. An event that was never recorded covers nothing. If the work has not completed, a context (the event's or
    /// another) must be current on this thread. If the driver refuses a fence after the event, the call waits for the event.
    ///
    /// # Errors
    ///
    /// The errors of [`unstable_record_stream`](Self::unstable_record_stream). An event that was recorded in a capture is
    /// [`Error::is_capturing_stream`], and a null event is [`Error::is_invalid_handle`].
    ///
    /// # Safety
    ///
    /// The event must not be destroyed during the call, nor destroyed or recorded between a failed call and the next call for
    /// this event. The requirement of [`unstable_record_stream`](Self::unstable_record_stream) for the stream's context applies
    /// to the contexts of the event and of this thread.
    #[doc(hidden)]
    pub unsafe fn unstable_record_event(&mut self, event: *mut std::ffi::c_void) -> Result<()> {
        // The event's inverted address identifies its work, because no stream has such a handle. A null event, if not
        // inverted, would be mistaken for a default stream.
        let id = || Some(copy::cuda::work_id(!event.addr()));
        // SAFETY: the caller promises that the event is not destroyed during the call.
        self.record_work(id, || unsafe { copy::cuda::fence_after_event_handle(event.cast()) })
    }
}
