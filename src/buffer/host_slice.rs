//! Tracked copies that cudarc starts: `stream.memcpy_htod(&buf, &mut device)`, and the same call with a view of a range or of
//! elements in place of the buffer.
//!
//! Each `HostSlice` records the fence of its copy in the buffer before it lends the bytes. A view borrows the buffer for its
//! whole life, so the fence outlives every borrow of the view (host-slice-I1).
#![allow(unsafe_code)] // Implements an unsafe interface of cudarc.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Range, RangeBounds};

use bytemuck::Pod;
use cudarc::driver::{CudaStream, HostSlice, SyncOnDrop};

use super::PinnedBuf;
use super::slice::{check_cast, elements_in};
use crate::copy::cuda::{HostSliceFence, ensure_access};
use crate::error::Result;

/// A part of a [`PinnedBuf`] as elements of `T`, to copy from: `stream.memcpy_htod(&buf.view(..n)?, &mut device)`. The
/// buffer records the copy. Only a source: as a destination use a [`BufViewMut`].
pub type BufView<'a, T = u8> = TrackedView<&'a PinnedBuf, T>;

/// A part of a [`PinnedBuf`] as elements of `T`, to copy into: `stream.memcpy_dtoh(&device, &mut buf.view_mut(..n)?)`. The
/// buffer records the copy.
pub type BufViewMut<'a, T = u8> = TrackedView<&'a mut PinnedBuf, T>;

/// A part of the buffer that `B` borrows.
#[derive(Debug, Clone)]
pub struct TrackedView<B, T> {
    buf: B,
    /// The range of the part in the buffer: whole and aligned elements of `T`.
    bytes: Range<usize>,
    element: PhantomData<T>,
}

impl PinnedBuf {
    /// Returns a range of the bytes as the source of a tracked cudarc copy.
    ///
    /// # Errors
    ///
    /// [`Error::is_invalid_request`](crate::Error::is_invalid_request) if the range is not inside the buffer.
    pub fn view(&self, range: impl RangeBounds<usize>) -> Result<BufView<'_>> {
        self.view_as()?.slice(range)
    }

    /// Returns a range of the bytes as the destination of a tracked cudarc copy. The view must be as long as the source: cudarc
    /// panics if it is shorter, and copies as many bytes as the view has if it is longer.
    ///
    /// # Errors
    ///
    /// The errors of [`view`](PinnedBuf::view).
    pub fn view_mut(&mut self, range: impl RangeBounds<usize>) -> Result<BufViewMut<'_>> {
        self.view_as_mut()?.slice(range)
    }

    /// Returns the buffer as elements of `T`, the source of a tracked cudarc copy.
    ///
    /// ```no_run
    /// # use std::sync::Arc;
    /// # use pinpool::cudarc::driver::{CudaSlice, CudaStream};
    /// # fn send(buf: &pinpool::PinnedBuf, stream: &Arc<CudaStream>, device: &mut CudaSlice<f32>)
    /// # -> Result<(), Box<dyn std::error::Error>> {
    /// stream.memcpy_htod(&buf.view_as::<f32>()?, device)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::is_invalid_request`](crate::Error::is_invalid_request) if the length is not a multiple of the element's size, or
    /// the address is not aligned for it.
    pub fn view_as<T: Pod>(&self) -> Result<BufView<'_, T>> {
        check_cast::<T>(self.start().as_ptr(), self.len())?;
        Ok(TrackedView { bytes: 0..self.len(), buf: self, element: PhantomData })
    }

    /// Returns the buffer as elements of `T`, the destination of a tracked cudarc copy.
    ///
    /// # Errors
    ///
    /// The errors of [`view_as`](PinnedBuf::view_as).
    pub fn view_as_mut<T: Pod>(&mut self) -> Result<BufViewMut<'_, T>> {
        check_cast::<T>(self.start().as_ptr(), self.len())?;
        Ok(TrackedView { bytes: 0..self.len(), buf: self, element: PhantomData })
    }

    /// Creates the fence of a copy that cudarc starts on `stream`. Returns `None` for an empty buffer. Panics if the device cannot
    /// access the memory, or no fence can be created.
    fn fence_on(&self, stream: &CudaStream) -> Option<HostSliceFence> {
        self.block.as_ref()?.check_process().unwrap_or_else(|error| refuse(&error));
        let accessible = ensure_access(stream.context().ordinal(), self.start().as_ptr(), self.len());
        accessible.unwrap_or_else(|why| refuse(&why));
        Some(HostSliceFence::new(stream).unwrap_or_else(|failed| refuse(&failed)))
    }

    fn lend<'a, T: Pod>(&'a self, part: Range<usize>, stream: &'a CudaStream) -> (&'a [T], SyncOnDrop<'a>) {
        let (Some(block), Some(fence)) = (&*self.block, self.fence_on(stream)) else {
            return (&[], SyncOnDrop::Record(None));
        };
        // Writes on `stream` itself need no wait: they complete before the copy begins (host-slice-I3).
        let copy_fences = block.shared_fences();
        let earlier_copies = copy_fences.wait_for_writes(fence.shared.stream_id());
        copy_fences.lend(fence.shared.clone());
        // SAFETY: the fence outlives `'a` (host-slice-I1): it is in the buffer's list, which drops it only through `&mut`.
        let guard = unsafe { fence.guard() };
        earlier_copies.unwrap_or_else(|error| refuse(&error));
        // SAFETY: by cudarc's contract the bytes are used only on `stream`, so after its own writes; the call above has waited
        // for all other writes.
        let bytes = unsafe { self.bytes() };
        (bytemuck::cast_slice(&bytes[part]), guard)
    }

    fn lend_mut<'a, T: Pod>(&'a mut self, part: Range<usize>, stream: &'a CudaStream) -> (&'a mut [T], SyncOnDrop<'a>) {
        let fence = self.fence_on(stream);
        let (Some(block), Some(fence)) = (&mut *self.block, fence) else {
            return (&mut [], SyncOnDrop::Record(None));
        };
        let copy_fences = block.copy_fences_mut();
        let earlier_copies = copy_fences.wait_for_others(fence.shared.stream_id());
        copy_fences.record_write(fence.shared.clone());
        // SAFETY: as in `lend`.
        let guard = unsafe { fence.guard() };
        earlier_copies.unwrap_or_else(|error| refuse(&error));
        // SAFETY: by cudarc's contract the bytes are used only on `stream`, so after its own copies; the call above has waited
        // for all other copies.
        let bytes = unsafe { self.bytes_mut() };
        (bytemuck::cast_slice_mut(&mut bytes[part]), guard)
    }
}

/// Panics, because a slice cannot be refused in another way: without bytes, cudarc's call would succeed and copy nothing.
fn refuse(why: &dyn fmt::Display) -> ! {
    panic!("cannot track this copy of cudarc: {why}; `PinnedBuf::copy_to` and `copy_from` return such an error")
}

impl<B, T: Pod> TrackedView<B, T> {
    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.bytes.len() / size_of::<T>()
    }

    /// Returns whether the view has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Narrows the view to `range`, in elements.
    ///
    /// # Errors
    ///
    /// [`Error::is_invalid_request`](crate::Error::is_invalid_request) if the range is not inside the view.
    pub fn slice(self, range: impl RangeBounds<usize>) -> Result<Self> {
        let Range { start, end } = elements_in(range, self.len())?;
        let byte = |element: usize| self.bytes.start + element * size_of::<T>();
        Ok(Self { bytes: byte(start)..byte(end), ..self })
    }
}

/// cudarc copies from and to the buffer are tracked: a buffer dropped after `stream.memcpy_htod(&buf, &mut device)` returns to
/// its pool when the copy completes, and after `stream.memcpy_dtoh(&device, &mut buf)` the bytes are valid once
/// [`wait_slice`](PinnedBuf::wait_slice) returns. This holds for every stream, whether or not the context tracks events, except
/// while the stream captures a graph: the copy is captured, and the memory is never reused. cudarc's call first waits for
/// earlier copies into the buffer on other streams. A call that writes to the buffer waits for all earlier copies on other
/// streams.
///
/// # Panics
///
/// cudarc's call panics, and copies nothing, if the copy cannot be tracked: in a forked child, after the failure of an earlier
/// copy that the new copy must wait for, if the device cannot reach the memory, or if the driver refuses what the fence needs
/// (the context, the capture query or a new event). [`copy_to`](PinnedBuf::copy_to) and [`copy_from`](PinnedBuf::copy_from)
/// return the error instead.
impl HostSlice<u8> for PinnedBuf {
    fn len(&self) -> usize {
        PinnedBuf::len(self)
    }

    unsafe fn stream_synced_slice<'a>(&'a self, stream: &'a CudaStream) -> (&'a [u8], SyncOnDrop<'a>) {
        self.lend(0..self.len(), stream)
    }

    unsafe fn stream_synced_mut_slice<'a>(&'a mut self, stream: &'a CudaStream) -> (&'a mut [u8], SyncOnDrop<'a>) {
        self.lend_mut(0..self.len(), stream)
    }
}

/// Only a source: cudarc's call panics if a `BufView` is the destination.
impl<T: Pod> HostSlice<T> for BufView<'_, T> {
    fn len(&self) -> usize {
        self.len()
    }

    unsafe fn stream_synced_slice<'a>(&'a self, stream: &'a CudaStream) -> (&'a [T], SyncOnDrop<'a>) {
        self.buf.lend(self.bytes.clone(), stream)
    }

    unsafe fn stream_synced_mut_slice<'a>(&'a mut self, _: &'a CudaStream) -> (&'a mut [T], SyncOnDrop<'a>) {
        panic!("a `BufView` is only a source of copies; copy into a `BufViewMut`")
    }
}

impl<T: Pod> HostSlice<T> for BufViewMut<'_, T> {
    fn len(&self) -> usize {
        self.len()
    }

    unsafe fn stream_synced_slice<'a>(&'a self, stream: &'a CudaStream) -> (&'a [T], SyncOnDrop<'a>) {
        self.buf.lend(self.bytes.clone(), stream)
    }

    unsafe fn stream_synced_mut_slice<'a>(&'a mut self, stream: &'a CudaStream) -> (&'a mut [T], SyncOnDrop<'a>) {
        self.buf.lend_mut(self.bytes.clone(), stream)
    }
}
