//! Copies from and into a buffer, and work of others on it: each is recorded in the buffer, or takes the buffer along.
#![allow(unsafe_code)] // Lends the block's memory to devices.

use std::fmt;
use std::future::{Future, IntoFuture};
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use super::PinnedBuf;
use crate::copy::{self, Completion, CompletionFuture, CopyFailure, CopySource, CopyStream, CopyTarget};
use crate::error::{Error, Result};
use crate::in_flight::{CopyFences, FenceKind, SharedFence};

/// A buffer that a device is writing to; [`wait`](PendingBuf::wait) and `await` are the only ways to its bytes. Dropping it
/// drops the buffer, which returns to its pool when the copy is over.
#[derive(Debug)]
#[must_use = "the bytes are there after `wait`"]
pub struct PendingBuf {
    buf: PinnedBuf,
    copy: CompletionFuture,
}

impl PendingBuf {
    /// Whether the copy has completed. Does not wait.
    ///
    /// # Errors
    ///
    /// [`Error::is_device`] if the device failed, so that the end of the copy is unknown.
    pub fn is_done(&self) -> Result<bool> {
        self.copy.completion().is_done()
    }

    /// Waits up to `timeout` for the copy, and returns whether it has completed. If so, [`wait`](PendingBuf::wait) returns at once.
    ///
    /// # Errors
    ///
    /// The errors of [`is_done`](PendingBuf::is_done).
    pub fn wait_timeout(&self, timeout: Duration) -> Result<bool> {
        self.copy.completion().wait_timeout(timeout)
    }

    /// Waits for the copy and returns the buffer with its bytes.
    ///
    /// # Errors
    ///
    /// The errors of [`is_done`](PendingBuf::is_done); the memory is never used again then.
    pub fn wait(self) -> Result<PinnedBuf> {
        self.copy.completion().wait()?;
        Ok(self.buf)
    }
}

/// The buffer with its bytes when the copy is over, for a task; woken as [`CompletionFuture`]. Fails as
/// [`wait`](PendingBuf::wait). Polled again after that, it gives a buffer of zero bytes.
impl Future for PendingBuf {
    type Output = Result<PinnedBuf>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<PinnedBuf>> {
        let over = Pin::new(&mut self.copy).poll(context);
        over.map(|over| over.map(|()| std::mem::take(&mut self.buf)))
    }
}

/// Error of [`PinnedBuf::copy_to`], with the buffer if nothing was enqueued. `?` converts it to an [`Error`].
#[derive(thiserror::Error)]
#[error("{error}")]
pub struct CopyError {
    error: Error,
    buf: Option<PinnedBuf>,
}

/// The same as for [`Error`].
impl fmt::Debug for CopyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl CopyError {
    /// The reason of the failure.
    pub fn error(&self) -> &Error {
        &self.error
    }

    /// Returns the buffer for another attempt, or `None` if the copy may have started. Its memory then returns to the pool once the
    /// copy has completed, or is never reused.
    pub fn into_buf(self) -> Option<PinnedBuf> {
        self.buf
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

impl PinnedBuf {
    /// Enqueues a copy of the whole buffer to the front of `target` and gives the buffer up: it returns to the pool when
    /// the copy is over. Waits for earlier copies into the buffer. `E` is the target's element and is inferred.
    ///
    /// # Errors
    ///
    /// - [`Error::is_copy`]: the target is too small, or the stream is capturing a graph; [`CopyError::into_buf`] returns the
    ///   buffer,
    /// - [`Error::is_device`]: the device failed; if the copy may be running, the memory is never used again.
    pub fn copy_to<S, E, T>(mut self, stream: &S, target: &mut T) -> Result<Completion, CopyError>
    where
        S: ?Sized,
        T: CopyTarget<S, E> + ?Sized,
    {
        let Some(block) = self.block.as_ref().filter(|block| block.bytes().1 > 0) else {
            return Ok(Completion::already());
        };
        let checked = block.begin_read().map_err(CopyFailure::Refused);
        let checked = checked.and_then(|()| copy::check_len(self.len(), "target", target.capacity_bytes()));
        // SAFETY: the length was checked. The engine gets the block with this copy's fence and keeps it from every other use until
        // the copy is over (in-flight-I1); on a refusal nothing was enqueued.
        let enqueue = |()| unsafe { target.enqueue(stream, self.start().as_ptr(), self.len(), block.fence_kind()) };
        match checked.and_then(enqueue) {
            Ok(fence) => {
                let keeper = Some(block.keeper());
                if let Some(block) = self.block.take() {
                    block.put_after(fence.clone());
                }
                Ok(Completion::of(fence, keeper))
            }
            Err(CopyFailure::Refused(error)) => Err(CopyError { error, buf: Some(self) }),
            Err(failed) => self.track(Err(failed), CopyFences::record).map_err(|error| CopyError { error, buf: None }),
        }
    }

    /// Enqueues a copy of `range` to the front of `target` and keeps the buffer, for another copy or another target.
    /// Until the copy is over, [`wait_slice_mut`](PinnedBuf::wait_slice_mut) waits; a buffer dropped meanwhile returns to the
    /// pool when all of its copies are over.
    ///
    /// # Errors
    ///
    /// The errors of [`copy_to`](PinnedBuf::copy_to), and [`Error::is_copy`] if `range` is not inside the buffer. If the
    /// copy may be running and its end is unknown, the memory is taken out of use: the length of the buffer is 0 from then
    /// on.
    pub fn copy_range_to<S, E, T>(&mut self, range: Range<usize>, stream: &S, target: &mut T) -> Result<Completion>
    where
        S: ?Sized,
        T: CopyTarget<S, E> + ?Sized,
    {
        let len = range.end.saturating_sub(range.start);
        if range.start > range.end || range.end > self.len() {
            let why = format!("range {}..{} is not inside a buffer of {} B", range.start, range.end, self.len());
            return Err(Error::copy(len, why));
        }
        let Some(block) = self.block.as_ref().filter(|_| len > 0) else { return Ok(Completion::already()) };
        block.begin_read()?;
        let checked = copy::check_len(len, "target", target.capacity_bytes());
        // SAFETY: `range.start` is at most `len`, so the sum stays inside the block (buffer-I1).
        let source = unsafe { self.start().add(range.start) };
        // SAFETY: the length was checked. The fence is recorded below, and from then on nothing writes to the memory, nor does it
        // return to the pool, until the copy is over (buffer-I2); on a refusal nothing was enqueued.
        let enqueue = |()| unsafe { target.enqueue(stream, source.as_ptr(), len, FenceKind::Timeline) };
        self.track(checked.and_then(enqueue), CopyFences::record)
    }

    /// Enqueues a copy of as many bytes as the buffer has from the front of `source` into it, behind earlier copies of the
    /// buffer. [`PendingBuf::wait`] returns the buffer when the bytes are there.
    ///
    /// ```
    /// # use pinpool::copy::sink::{SinkMem, SinkStream};
    /// # let pool = pinpool::Pool::builder().backend(pinpool::Backend::Heap).build()?;
    /// let (stream, device) = (SinkStream::new()?, SinkMem::new(8));
    /// let pending = pool.get(8)?.copy_from(&stream, &device)?;
    /// let buf = pending.wait()?;
    /// assert_eq!(*buf.wait_slice()?, [0; 8]);
    /// # Ok::<(), pinpool::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors of [`copy_to`](PinnedBuf::copy_to), where the source holds too little.
    pub fn copy_from<S, E, T>(mut self, stream: &S, source: &T) -> Result<PendingBuf>
    where
        S: ?Sized,
        T: CopySource<S, E> + ?Sized,
    {
        let Some(block) = self.block.as_mut().filter(|block| block.bytes().1 > 0) else {
            return Ok(PendingBuf { buf: self, copy: Completion::already().into_future() });
        };
        block.check_process()?;
        // Earlier copies must not see the new bytes, lent ones included. A failure stays recorded, and leaks the block at its
        // return.
        let _failures_stay = block.state_mut().copy_fences.wait_for_all();
        let (start, len) = block.bytes();
        let checked = copy::check_len(len, "source", source.available_bytes());
        // SAFETY: the length was checked. The fence is recorded below, and from then on nothing touches the memory, nor does it
        // return to the pool, until the copy is over (buffer-I2); on a refusal nothing was enqueued.
        let fetch = |()| unsafe { source.fetch(stream, start.as_ptr(), len) };
        let copy = self.track(checked.and_then(fetch), CopyFences::record_write)?;
        Ok(PendingBuf { buf: self, copy: copy.into_future() })
    }

    /// Gives the buffer up: it returns to the pool when all work enqueued on `stream` so far is over. For work that others
    /// enqueued: a kernel that reads the memory by its device pointer, a copy of another library.
    ///
    /// # Errors
    ///
    /// [`Error::is_device`] if no fence can be put on the stream, or it is capturing a graph: the memory is never used
    /// again.
    pub fn release_after<S: CopyStream + ?Sized>(self, stream: &S) -> Result<()> {
        self.release_behind(|| stream.mark().map(Some))
    }

    /// Gives the buffer up as [`release_after`](PinnedBuf::release_after) does, for the work that `event` covers now: all work
    /// enqueued before its last record. The caller may record or drop the event at once. An event that was never recorded
    /// covers nothing.
    ///
    /// # Errors
    ///
    /// The errors of [`release_after`](PinnedBuf::release_after), and one if the event was last recorded on a stream that
    /// captured a graph.
    #[cfg(feature = "cuda")]
    pub fn release_after_event(self, event: &cudarc::driver::CudaEvent) -> Result<()> {
        // What the driver refuses once it may do the next time.
        let fence = || copy::cuda::fence_behind_event(event);
        self.release_behind(|| fence().or_else(|_| fence()))
    }

    /// Records that work enqueued on a stream of other code so far uses the buffer: it returns to the pool when that work, too,
    /// is over. For callers that have the handle alone, of the driver or the runtime (`cudaStream_t` is the same); null is
    /// the default stream of the current context. [`release_after`](PinnedBuf::release_after) is the same for cudarc's streams.
    ///
    /// # Errors
    ///
    /// - [`Error::is_request`]: the driver knows no such stream, or null without a current context,
    /// - [`Error::is_backend`]: there is no driver,
    /// - [`Error::is_device`]: no fence can be put on the stream, or it is capturing a graph.
    ///
    /// Nothing is recorded then: keep the buffer until that work is over.
    ///
    /// # Safety
    ///
    /// The stream is not destroyed during the call, nor its context before the work is over.
    #[cfg(feature = "cuda")]
    pub unsafe fn record_stream(&mut self, stream: cudarc::driver::sys::CUstream) -> Result<()> {
        // SAFETY: the caller's promise.
        self.record_work(|| unsafe { copy::cuda::fence_behind_stream(stream) }.map(Some))
    }

    /// Records work as [`record_stream`](PinnedBuf::record_stream) does: the work that an event of other code covers now: all
    /// work enqueued before its last record. The caller may record or destroy the event at once. An event that was never
    /// recorded covers nothing. A context must be current on this thread, the event's or another.
    ///
    /// # Errors
    ///
    /// The errors of [`record_stream`](PinnedBuf::record_stream).
    ///
    /// # Safety
    ///
    /// The event is not destroyed during the call, nor its context before the work is over.
    #[cfg(feature = "cuda")]
    pub unsafe fn record_event(&mut self, event: cudarc::driver::sys::CUevent) -> Result<()> {
        if event.is_null() {
            copy::cuda::require_driver()?;
            return Err(crate::error::ErrorKind::Handle { why: "the event is null".to_owned() }.into());
        }
        // SAFETY: the caller's promise.
        self.record_work(|| unsafe { copy::cuda::fence_behind_event_handle(event) })
    }

    /// Records the fence that `mark` makes as one of work that may write to the buffer.
    #[cfg(feature = "cuda")]
    fn record_work(&mut self, mark: impl FnOnce() -> Result<Option<SharedFence>>) -> Result<()> {
        let Some(block) = &mut *self.block else { return Ok(()) };
        block.check_process()?;
        let (fence, refused) = match mark() {
            Ok(None) => return Ok(()),
            // Without a driver there is no such work.
            Err(error) if error.is_backend() => return Err(error),
            Ok(Some(fence)) => (fence, Ok(())),
            Err(error) => {
                let fence: SharedFence = std::sync::Arc::new(copy::UnknownEnd(error.to_string()));
                (fence, Err(error))
            }
        };
        let fences = &mut block.state_mut().copy_fences;
        fences.forget_completed();
        fences.record_write(fence);
        refused
    }

    /// Gives the buffer up behind the fence that `mark` makes; `None` if there is nothing to wait for.
    fn release_behind(mut self, mark: impl FnOnce() -> Result<Option<SharedFence>>) -> Result<()> {
        // Not by the length: others may still use the memory of a buffer that was truncated to nothing.
        let Some(block) = &*self.block else { return Ok(()) };
        block.check_process()?;
        match mark() {
            Ok(Some(fence)) => {
                if let Some(block) = self.block.take() {
                    block.put_after(fence);
                }
                Ok(())
            }
            Ok(None) => Ok(()),
            Err(error) => {
                self.leak(&error);
                Err(error)
            }
        }
    }

    /// Where devices see the first byte, for kernels that read the memory in place. Their work is not tracked: give the
    /// buffer up by [`release_after`](PinnedBuf::release_after).
    ///
    /// # Errors
    ///
    /// [`Error::is_copy`] if the memory is not mapped for the device of this context: it is not pinned, or not by CUDA.
    #[cfg(feature = "cuda")]
    pub fn device_ptr(&self, context: &std::sync::Arc<cudarc::driver::CudaContext>) -> Result<u64> {
        copy::cuda::mapped_address(context, self.start().as_ptr(), self.len())
    }

    /// Records a copy by `record`. If its end is unknown, the memory goes out of use.
    fn track(
        &mut self,
        enqueued: Result<SharedFence, CopyFailure>,
        record: fn(&mut CopyFences, SharedFence),
    ) -> Result<Completion> {
        match enqueued {
            Ok(fence) => {
                if let Some(block) = &mut *self.block {
                    record(&mut block.state_mut().copy_fences, fence.clone());
                }
                Ok(Completion::of(fence, None))
            }
            Err(CopyFailure::Refused(error)) => Err(error),
            Err(CopyFailure::Failed(error, fence)) => {
                if let Some(block) = &mut *self.block {
                    record(&mut block.state_mut().copy_fences, fence);
                }
                Err(error)
            }
            Err(CopyFailure::Unknown(error)) => {
                std::mem::take(self).leak(&error);
                Err(error)
            }
        }
    }

    /// Takes the memory out of use permanently.
    fn leak(mut self, error: &Error) {
        if let Some(mut block) = self.block.take() {
            drop(block.state_mut().copy_fences.take());
            block.leak(error);
        }
    }
}
