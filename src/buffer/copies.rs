//! Copies from and into a buffer, and work of others on it: whatever may use its memory is recorded, or takes it along.
#![allow(unsafe_code)] // Lends the block's memory to devices.

use std::ops::Range;

use super::{PendingBuf, PinnedBuf};
use crate::copy::{self, Completion, CopyFailure, CopySource, CopyStream, CopyTarget, FencePurpose};
use crate::engine::Block;
use crate::error::{Error, Result};
use crate::in_flight::SharedFence;

impl PinnedBuf {
    /// Enqueues a copy of the whole buffer to the front of `target` and gives the buffer up: it returns to the pool when
    /// the copy is over.
    ///
    /// ```
    /// # use pinpool::copy::sink::{SinkMem, SinkStream};
    /// # let pool = pinpool::Pool::builder().backend(pinpool::Backend::Heap).build()?;
    /// let (stream, mut device) = (SinkStream::new()?, SinkMem::new(8));
    /// let copy = pool.get(8)?.copy_to(&stream, &mut device)?;
    /// copy.wait()?;
    /// # Ok::<(), pinpool::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// - [`Error::is_copy`]: the target is too small, or the stream is capturing a graph; the buffer is back in the pool,
    /// - [`Error::is_device`]: the device failed; if the copy may be running, the buffer is never used again.
    pub fn copy_to<S: ?Sized, T: CopyTarget<S> + ?Sized>(mut self, stream: &S, target: &mut T) -> Result<Completion> {
        if self.is_empty() {
            return Ok(Completion::already());
        }
        self.check_process()?;
        self.board();
        // SAFETY: the block goes to the in-flight room below with this copy's fence, which keeps it from every other use
        // until the copy is over; on a refusal nothing was enqueued.
        let enqueued = unsafe { copy::enqueue(stream, target, self.start().as_ptr(), self.len(), self.purpose()) };
        match enqueued {
            Ok(fence) => {
                self.give_up_behind(fence.clone());
                Ok(Completion::of(fence))
            }
            refused => self.track(refused),
        }
    }

    /// Enqueues a copy of `range` to the front of `target` and keeps the buffer, for another copy or another target.
    /// Until the copy is over, [`as_mut_slice`](PinnedBuf::as_mut_slice) waits; a buffer dropped meanwhile returns to the
    /// pool when all of its copies are over.
    ///
    /// # Errors
    ///
    /// As [`copy_to`](PinnedBuf::copy_to), and [`Error::is_copy`] if `range` is not inside the buffer. If the copy may be
    /// running with nobody knowing when it ends, the buffer is taken out of use: it is empty from then on.
    pub fn copy_range_to<S: ?Sized, T: CopyTarget<S> + ?Sized>(
        &mut self,
        range: Range<usize>,
        stream: &S,
        target: &mut T,
    ) -> Result<Completion> {
        let len = range.end.saturating_sub(range.start);
        if range.start > range.end || range.end > self.len() {
            let why = format!("range {}..{} is not inside a buffer of {} B", range.start, range.end, self.len());
            return Err(Error::copy(len, why));
        }
        if len == 0 {
            return Ok(Completion::already());
        }
        self.check_process()?;
        // SAFETY: `range.start` is at most `len`, so the sum stays inside the block (invariant 1).
        let source = unsafe { self.start().add(range.start) };
        self.board();
        // SAFETY: the fence is recorded below, and from then on nothing writes to the memory, nor does it return to the
        // pool, until the copy is over (invariant 2); on a refusal nothing was enqueued.
        let enqueued = unsafe { copy::enqueue(stream, target, source.as_ptr(), len, FencePurpose::Buffer) };
        self.track(enqueued)
    }

    /// Enqueues a copy of as many bytes as the buffer has from the front of `source` into it. The bytes can be read when it
    /// is over, and that is what [`PendingBuf`] waits for.
    ///
    /// ```
    /// # use pinpool::copy::sink::{SinkMem, SinkStream};
    /// # let pool = pinpool::Pool::builder().backend(pinpool::Backend::Heap).build()?;
    /// let (stream, device) = (SinkStream::new()?, SinkMem::new(8));
    /// let arriving = pool.get(8)?.copy_from(&stream, &device)?;
    /// let buf = arriving.wait()?;
    /// assert_eq!(buf.as_slice(), [0; 8]);
    /// # Ok::<(), pinpool::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`copy_to`](PinnedBuf::copy_to), where the source holds too little.
    pub fn copy_from<S: ?Sized, T: CopySource<S> + ?Sized>(mut self, stream: &S, source: &T) -> Result<PendingBuf> {
        if self.is_empty() {
            return Ok(PendingBuf::new(self, Completion::already()));
        }
        self.check_process()?;
        // What earlier copies use must not be overwritten. A copy into it that failed shows when this buffer is put back.
        let _failures_stay = self.wait_for_uses();
        self.board();
        // SAFETY: the fence is recorded below, and from then on nothing touches the memory, nor does it return to the pool,
        // until the copy is over (invariant 2); on a refusal nothing was enqueued.
        let fetched = unsafe { copy::fetch(stream, source, self.start().as_ptr(), self.len()) };
        match fetched {
            Ok(fence) => {
                self.record_write(fence.clone());
                Ok(PendingBuf::new(self, Completion::of(fence)))
            }
            Err(CopyFailure::Refused(error)) => Err(error),
            Err(CopyFailure::Unknown(error)) => {
                self.lose(&error);
                Err(error)
            }
        }
    }

    /// Gives the buffer up: it returns to the pool when all that was enqueued on `stream` so far is over. For work that
    /// others enqueued: a kernel that reads the memory by its [device pointer](PinnedBuf::device_ptr), a copy of another
    /// library.
    ///
    /// # Errors
    ///
    /// [`Error::is_device`] if nothing can be marked on the stream, or it is capturing a graph: the buffer is never used
    /// again.
    pub fn release_after<S: CopyStream + ?Sized>(self, stream: &S) -> Result<()> {
        self.release_behind(|| stream.mark().map(Some))
    }

    /// As [`release_after`](PinnedBuf::release_after), for what `event` stands for now: all that was enqueued before its
    /// last record. The event is the caller's again at once. One never recorded stands for nothing.
    ///
    /// # Errors
    ///
    /// As [`release_after`](PinnedBuf::release_after); also if the event was last recorded on a stream that captured a graph.
    #[cfg(feature = "cuda")]
    pub fn release_after_event(self, event: &cudarc::driver::CudaEvent) -> Result<()> {
        self.release_behind(|| copy::cuda::mark_behind(event))
    }

    /// `None` if there is nothing to wait for.
    fn release_behind(self, mark: impl FnOnce() -> Result<Option<SharedFence>>) -> Result<()> {
        if self.is_empty() {
            return Ok(());
        }
        self.check_process()?;
        // What others enqueued is known from here on.
        self.board();
        match mark() {
            Ok(fence) => {
                if let Some(fence) = fence {
                    self.give_up_behind(fence);
                }
                Ok(())
            }
            Err(error) => {
                self.lose(&error);
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

    /// For a copy that gives the buffer up.
    fn purpose(&self) -> FencePurpose {
        self.block.as_ref().map_or(FencePurpose::Buffer, |block| FencePurpose::Pool(block.fence_kind()))
    }

    /// Remembers a copy that reads the buffer. If it may be running with nobody knowing when it ends, the buffer goes out of
    /// use.
    fn track(&mut self, enqueued: Result<SharedFence, CopyFailure>) -> Result<Completion> {
        match enqueued {
            Ok(fence) => {
                self.record(fence.clone());
                Ok(Completion::of(fence))
            }
            Err(CopyFailure::Refused(error)) => Err(error),
            Err(CopyFailure::Unknown(error)) => {
                std::mem::replace(self, Self::empty()).lose(&error);
                Err(error)
            }
        }
    }

    pub(crate) fn check_process(&self) -> Result<()> {
        self.block.as_ref().map_or(Ok(()), Block::check_process)
    }

    /// The put, when `fence` and those of earlier copies are over.
    fn give_up_behind(mut self, fence: SharedFence) {
        let Some(mut block) = self.block.take() else { return };
        let mut fences = block.state_mut().copy_fences.take();
        fences.push(fence);
        block.put_back_after(fences);
    }

    fn record(&mut self, fence: SharedFence) {
        if let Some(block) = &mut self.block {
            block.state_mut().copy_fences.record(fence);
        }
    }

    fn record_write(&mut self, fence: SharedFence) {
        if let Some(block) = &mut self.block {
            block.state_mut().copy_fences.record_write(fence);
        }
    }

    /// Takes the memory out of use for good.
    fn lose(mut self, error: &Error) {
        if let Some(mut block) = self.block.take() {
            drop(block.state_mut().copy_fences.take());
            block.leak(error);
        }
    }
}
