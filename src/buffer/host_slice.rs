//! Tracked copies that cudarc starts: `stream.memcpy_htod(&buf, &mut device)`, and the same with views of a range or of
//! elements.
//!
//! Each `HostSlice` records the fence of its copy in the buffer before it lends the bytes. A view borrows the buffer for its
//! whole life, so the fence outlives every borrow of the view (host-slice-I1).
#![allow(unsafe_code)] // Implements an unsafe interface of cudarc.

use std::marker::PhantomData;
use std::ops::{Bound, Range, RangeBounds};

use bytemuck::Pod;
use cudarc::driver::{CudaStream, HostSlice, SyncOnDrop};

use super::PinnedBuf;
use super::slice::check_cast;
use crate::copy::cuda::{HostSliceFence, let_reach, refuse_host_slice};
use crate::error::{ErrorKind, Result};

/// A part of a [`PinnedBuf`] as elements of `T`, to copy from: `stream.memcpy_htod(&buf.slice(..n)?, &mut device)`. The
/// buffer records the copy.
#[derive(Debug)]
pub struct BufView<'a, T = u8> {
    buf: &'a PinnedBuf,
    part: Part<T>,
}

/// A part of a [`PinnedBuf`] as elements of `T`, to copy into: `stream.memcpy_dtoh(&device, &mut buf.slice_mut(..n)?)`. The
/// buffer records the copy.
#[derive(Debug)]
pub struct BufViewMut<'a, T = u8> {
    buf: &'a mut PinnedBuf,
    part: Part<T>,
}

/// `len` elements from `start_bytes` on. They are inside the buffer and aligned.
#[derive(Debug)]
struct Part<T> {
    start_bytes: usize,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Pod> Part<T> {
    fn all(buf: &PinnedBuf) -> Result<Self> {
        check_cast::<T>(buf.start().as_ptr(), buf.len())?;
        Ok(Self { start_bytes: 0, len: buf.len() / size_of::<T>(), element: PhantomData })
    }

    fn range(self, range: impl RangeBounds<usize>) -> Result<Self> {
        let Range { start, end } = elements_in(range, self.len)?;
        Ok(Self { start_bytes: self.start_bytes + start * size_of::<T>(), len: end - start, element: PhantomData })
    }

    /// The elements of `buf`.
    ///
    /// # Safety
    ///
    /// No copy is writing to them, or they are read behind it, on its stream.
    unsafe fn of<'a>(&self, buf: &'a PinnedBuf) -> &'a [T] {
        // SAFETY: inside the buffer.
        let start = unsafe { buf.start().add(self.start_bytes) };
        // SAFETY: inside the buffer and aligned; any bytes are a `Pod`, and they are initialised (buffer-I3). `&PinnedBuf`
        // excludes writers in this process; the caller excludes device writes.
        unsafe { std::slice::from_raw_parts(start.cast().as_ptr(), self.len) }
    }

    /// The elements of `buf`, to write to.
    ///
    /// # Safety
    ///
    /// No copy is using them, or they are written behind it, on its stream.
    unsafe fn of_mut<'a>(&self, buf: &'a mut PinnedBuf) -> &'a mut [T] {
        // SAFETY: inside the buffer.
        let start = unsafe { buf.start().add(self.start_bytes) };
        // SAFETY: as in `of`, and `&mut PinnedBuf` makes it the only slice.
        unsafe { std::slice::from_raw_parts_mut(start.cast().as_ptr(), self.len) }
    }
}

impl PinnedBuf {
    /// A range of the bytes as the source of a tracked cudarc copy.
    ///
    /// # Errors
    ///
    /// [`Error::is_request`](crate::Error::is_request) if the range is not inside the buffer.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<BufView<'_>> {
        self.elements()?.slice(range)
    }

    /// A range of the bytes as the destination of a tracked cudarc copy. cudarc copies as many bytes as the view has, so the view
    /// must not be longer than the source.
    ///
    /// # Errors
    ///
    /// The errors of [`slice`](PinnedBuf::slice).
    pub fn slice_mut(&mut self, range: impl RangeBounds<usize>) -> Result<BufViewMut<'_>> {
        self.elements_mut()?.slice(range)
    }

    /// The buffer as elements of `T`, the source of a tracked cudarc copy.
    ///
    /// ```no_run
    /// # use std::sync::Arc;
    /// # use pinpool::cudarc::driver::{CudaSlice, CudaStream};
    /// # fn send(buf: &pinpool::PinnedBuf, stream: &Arc<CudaStream>, device: &mut CudaSlice<f32>)
    /// # -> Result<(), Box<dyn std::error::Error>> {
    /// stream.memcpy_htod(&buf.elements::<f32>()?, device)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::is_request`](crate::Error::is_request) if the length is not a multiple of the element's size, or the
    /// address is not aligned for it.
    pub fn elements<T: Pod>(&self) -> Result<BufView<'_, T>> {
        Ok(BufView { part: Part::all(self)?, buf: self })
    }

    /// The buffer as elements of `T`, the destination of a tracked cudarc copy.
    ///
    /// # Errors
    ///
    /// The errors of [`elements`](PinnedBuf::elements).
    pub fn elements_mut<T: Pod>(&mut self) -> Result<BufViewMut<'_, T>> {
        Ok(BufViewMut { part: Part::all(self)?, buf: self })
    }

    fn lend<'a, T: Pod>(&'a self, part: &Part<T>, stream: &'a CudaStream) -> (&'a [T], SyncOnDrop<'a>) {
        let nothing = (&[][..], SyncOnDrop::Record(None));
        let Some(block) = &*self.block else { return nothing };
        let reached = || let_reach(stream.context().ordinal(), self.start().as_ptr(), self.len());
        if block.check_process().and_then(|()| reached()).is_err() {
            refuse_host_slice(stream);
            return nothing;
        }
        let Some(fence) = HostSliceFence::new(stream) else {
            refuse_host_slice(stream);
            return nothing;
        };
        // Writes of this very stream are over before the copy begins (host-slice-I3).
        let copy_fences = block.shared_fences();
        let written = copy_fences.wait_for_writes(fence.shared.stream_id());
        copy_fences.lend(fence.shared.clone());
        // SAFETY: the fence outlives `'a` (host-slice-I1): it is in the buffer's list, which lets go of it through `&mut`.
        let guard = unsafe { fence.guard() };
        if written.is_err() {
            refuse_host_slice(stream);
            return (&[], guard);
        }
        // SAFETY: cudarc's contract: the bytes are used on `stream` only, behind the writes that this waited for.
        (unsafe { part.of(self) }, guard)
    }

    fn lend_mut<'a, T: Pod>(&'a mut self, part: &Part<T>, stream: &'a CudaStream) -> (&'a mut [T], SyncOnDrop<'a>) {
        let reached = || let_reach(stream.context().ordinal(), self.start().as_ptr(), self.len());
        let Some(block) = &*self.block else { return (&mut [], SyncOnDrop::Record(None)) };
        if block.check_process().and_then(|()| reached()).is_err() {
            refuse_host_slice(stream);
            return (&mut [], SyncOnDrop::Record(None));
        }
        let Some(fence) = HostSliceFence::new(stream) else {
            refuse_host_slice(stream);
            return (&mut [], SyncOnDrop::Record(None));
        };
        let Some(block) = &mut *self.block else { return (&mut [], SyncOnDrop::Record(None)) };
        let copy_fences = &mut block.state_mut().copy_fences;
        let written = copy_fences.wait_for_others(fence.shared.stream_id());
        copy_fences.record_write(fence.shared.clone());
        // SAFETY: as in `lend`.
        let guard = unsafe { fence.guard() };
        if written.is_err() {
            refuse_host_slice(stream);
            return (&mut [], guard);
        }
        // SAFETY: as in `lend`, behind every copy that this waited for.
        (unsafe { part.of_mut(self) }, guard)
    }
}

impl<'a, T: Pod> BufView<'a, T> {
    /// Narrows the view to `range`, in elements.
    ///
    /// # Errors
    ///
    /// [`Error::is_request`](crate::Error::is_request) if the range is not inside the view.
    pub fn slice(self, range: impl RangeBounds<usize>) -> Result<BufView<'a, T>> {
        Ok(Self { part: self.part.range(range)?, buf: self.buf })
    }
}

impl<'a, T: Pod> BufViewMut<'a, T> {
    /// Narrows the view to `range`, in elements.
    ///
    /// # Errors
    ///
    /// The errors of [`BufView::slice`].
    pub fn slice(self, range: impl RangeBounds<usize>) -> Result<BufViewMut<'a, T>> {
        Ok(Self { part: self.part.range(range)?, buf: self.buf })
    }
}

/// cudarc copies from and to the buffer are tracked: a buffer dropped after `stream.memcpy_htod(&buf, &mut device)` returns to its
/// pool when the copy completes, and after `stream.memcpy_dtoh(&device, &mut buf)` the bytes are valid once
/// [`wait_slice`](PinnedBuf::wait_slice) returns. This holds for every stream, whether or not the context tracks events.
///
/// If an earlier copy into the buffer failed, or in a forked child, cudarc gets an empty slice, and its context gets the error
/// `CUDA_ERROR_NOT_PERMITTED`, which its next call returns.
impl HostSlice<u8> for PinnedBuf {
    fn len(&self) -> usize {
        PinnedBuf::len(self)
    }

    unsafe fn stream_synced_slice<'a>(&'a self, stream: &'a CudaStream) -> (&'a [u8], SyncOnDrop<'a>) {
        self.lend(&Part { start_bytes: 0, len: self.len(), element: PhantomData }, stream)
    }

    unsafe fn stream_synced_mut_slice<'a>(&'a mut self, stream: &'a CudaStream) -> (&'a mut [u8], SyncOnDrop<'a>) {
        let part = Part { start_bytes: 0, len: self.len(), element: PhantomData };
        self.lend_mut(&part, stream)
    }
}

/// A source only. As a destination it accepts no bytes, and the context gets the error `CUDA_ERROR_NOT_PERMITTED`.
impl<T: Pod> HostSlice<T> for BufView<'_, T> {
    fn len(&self) -> usize {
        self.part.len
    }

    unsafe fn stream_synced_slice<'a>(&'a self, stream: &'a CudaStream) -> (&'a [T], SyncOnDrop<'a>) {
        self.buf.lend(&self.part, stream)
    }

    unsafe fn stream_synced_mut_slice<'a>(&'a mut self, stream: &'a CudaStream) -> (&'a mut [T], SyncOnDrop<'a>) {
        refuse_host_slice(stream);
        (&mut [], SyncOnDrop::Record(None))
    }
}

impl<T: Pod> HostSlice<T> for BufViewMut<'_, T> {
    fn len(&self) -> usize {
        self.part.len
    }

    unsafe fn stream_synced_slice<'a>(&'a self, stream: &'a CudaStream) -> (&'a [T], SyncOnDrop<'a>) {
        self.buf.lend(&self.part, stream)
    }

    unsafe fn stream_synced_mut_slice<'a>(&'a mut self, stream: &'a CudaStream) -> (&'a mut [T], SyncOnDrop<'a>) {
        self.buf.lend_mut(&self.part, stream)
    }
}

/// `range` of `len` elements.
fn elements_in(range: impl RangeBounds<usize>, len: usize) -> Result<Range<usize>> {
    let start = match range.start_bound() {
        Bound::Included(&start) => Some(start),
        Bound::Excluded(&before) => before.checked_add(1),
        Bound::Unbounded => Some(0),
    };
    let end = match range.end_bound() {
        Bound::Included(&last) => last.checked_add(1),
        Bound::Excluded(&end) => Some(end),
        Bound::Unbounded => Some(len),
    };
    match (start, end) {
        (Some(start), Some(end)) if start <= end && end <= len => Ok(start..end),
        _ => {
            let why = format!("{:?} to {:?} is not inside {len} elements", range.start_bound(), range.end_bound());
            Err(ErrorKind::View { why }.into())
        }
    }
}
