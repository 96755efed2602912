//! The buffer that a user holds: bytes that keep their address until every copy that uses them has completed.
//!
//! ```text
//!   Pool::get ──▶ PinnedBuf ──wait_slice_mut──▶ &mut PinnedSlice<u8>   host code; cudarc cannot copy from it
//!                   │  │ └─────view, view_as────▶ BufView<T>     tracked cudarc copies
//!                   │  └───copy_range_to, &buf──▶ the buffer records the fence and stays
//!                   ├──copy_to, release_after───▶ the pool takes the block with the fence
//!                   └──copy_from────────────────▶ PendingBuf ──wait──▶ PinnedBuf
//! ```
//!
//! The module owns the view of a block's memory as bytes and the record of the copies that use the block. The engine decides when
//! a block is reused: a dropped buffer passes its block and fences to the engine.
//!
//! There is no `Deref` to a slice, on purpose: a copy started from a plain slice of pinned memory is asynchronous and
//! untracked, so the pool could hand the buffer out again while the device still reads it.
//!
//! Invariants:
//!
//! - **buffer-I1**: the block's `start()` is an address inside its memory, its `len()` bytes from there are inside this memory
//!   too (`size_class` includes the room for alignment), and the block belongs to this buffer alone. Without a block the length
//!   is 0.
//! - **buffer-I2**: every tracked copy that uses the buffer is in its `CopyFences` until it is known to have completed.
//! - **buffer-I3**: the memory is initialized (source-C2).
#![allow(unsafe_code)] // Makes slices of the block's memory, and lends it to devices.

use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;

use bytemuck::Pod;

use crate::backend::PinnedBy;
use crate::engine::Block;
use crate::error::Result;
use crate::in_flight::CopyFences;

mod copies;
#[cfg(feature = "cuda")]
mod host_slice;
mod slice;

pub use copies::{CopyError, PendingBuf};
#[cfg(feature = "cuda")]
pub use host_slice::{BufView, BufViewMut, TrackedView};
pub use slice::PinnedSlice;

/// Gives the empty buffer an address that is aligned for every element.
#[repr(align(4096))]
struct Aligned;

/// A buffer of a pool. Dropping it returns the memory: immediately, or when the last copy that uses it completes.
///
/// # Which copies are tracked
///
/// The pool does not reuse the memory while a tracked copy runs. It cannot see a copy that another library starts from a
/// plain slice: the buffer would be reused and overwritten during that copy.
///
/// ```text
///   right: tracked                                          wrong: untracked, a data race
///   ─────────────────────────────────────────────────────   ──────────────────────────────────────────────────────
///   buf.copy_to(&stream, &mut dst)?                         stream.memcpy_htod(&**buf.wait_slice()?, &mut dst)
///   buf.copy_range_to(0..n, &stream, &mut dst)?             Tensor::from_raw_buffer(buf.wait_slice()?, ..)
///   // below: panics if the copy cannot be tracked          and drop(buf) before the device is synchronized
///   stream.memcpy_htod(&buf, &mut dst)?
///   stream.memcpy_htod(&buf.view(..n)?, &mut dst)?
///   stream.memcpy_htod(&buf.view_as::<f32>()?, &mut f)?
///   stream.memcpy_dtoh(&src, &mut buf)?
///   stream.memcpy_dtoh(&src, &mut buf.view_mut(..n)?)?
/// ```
///
/// [`wait_slice`](PinnedBuf::wait_slice) and [`wait_slice_mut`](PinnedBuf::wait_slice_mut) return a [`PinnedSlice`], which host
/// code uses like any other slice, but which cudarc does not accept. Methods for writing end in `_mut`, as `split_at_mut` does.
/// A `PinnedSlice` derefs to a plain slice, since host code such as `read_exact` accepts nothing else, and no type can tell
/// whether a library copies from a plain slice. Some libraries that start copies accept only `&[u8]`, such as candle with
/// `Tensor::from_raw_buffer`. Pass them [`wait_slice_untracked`](PinnedBuf::wait_slice_untracked), which is `unsafe`, and keep
/// the buffer until `device.synchronize()?` has returned. Or [copy](PinnedBuf::copy_to) into the library's device memory,
/// wrapped as `RawMemory`.
///
/// ```compile_fail,E0133
/// # let pool = pinpool::Pool::builder().backend(pinpool::Backend::Heap).build()?;
/// let buf = pool.get(8)?;
/// let bytes = buf.wait_slice_untracked()?; // requires `unsafe`
/// # Ok::<(), pinpool::Error>(())
/// ```
///
/// `copy_to` consumes the buffer, so the buffer cannot be touched while the device reads it:
///
/// ```compile_fail,E0382
/// # use pinpool_testing::{SinkMemory, SinkStream};
/// # let pool = pinpool::Pool::builder().backend(pinpool::Backend::Heap).build()?;
/// # let (stream, mut device) = (SinkStream::new()?, SinkMemory::new(8));
/// let mut buf = pool.get(8)?;
/// let copy = buf.copy_to(&stream, &mut device)?;
/// buf.wait_slice_mut()?.fill(0); // the buffer has moved into the copy
/// # Ok::<(), pinpool::Error>(())
/// ```
///
/// ```
/// # use pinpool_testing::{SinkMemory, SinkStream};
/// # let pool = pinpool::Pool::builder().backend(pinpool::Backend::Heap).build()?;
/// # let (stream, mut device) = (SinkStream::new()?, SinkMemory::new(8));
/// let mut buf = pool.get(8)?;
/// buf.wait_slice_mut()?.fill(0);
/// let copy = buf.copy_to(&stream, &mut device)?;
/// # Ok::<(), pinpool::Error>(())
/// ```
///
/// # When a device fails
///
/// After a device failure it is unknown whether a copy has completed. The memory is quarantined until the copy's fence confirms
/// that it has, and until then [`wait`](PinnedBuf::wait) returns the failure. If the copy wrote *into* the buffer, the bytes
/// may still change, so every access returns an error, and a cudarc call that copies from the buffer panics. If the copy read
/// *from* the buffer, the bytes can be read but not written. In a forked child access fails if the memory belongs to the GPU
/// driver or `PINPOOL_HUGETLB` is set, since children inherit neither driver memory nor such huge pages.
pub struct PinnedBuf {
    /// Taken only by `drop`. In a plain `Option`, the compiler would check again after `drop` whether there is a block to drop.
    pub(crate) block: ManuallyDrop<Option<Block>>,
}

impl fmt::Debug for PinnedBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedBuf")
            .field("len", &self.len())
            .field("pinned_by", &self.pinned_by())
            .finish_non_exhaustive()
    }
}

/// A buffer of zero bytes, which belongs to no pool and is not counted.
impl Default for PinnedBuf {
    fn default() -> Self {
        Self { block: ManuallyDrop::new(None) }
    }
}

impl PinnedBuf {
    /// Creates a buffer of `len` bytes that begins at the first multiple of `align` in `block`. The block's class was
    /// computed for `len` and `align` (buffer-I1).
    pub(crate) fn from_block(mut block: Block, len: usize, align: usize) -> Self {
        // This is 0 if `align` is at most a page, and otherwise at most `align` minus a page. The class has room for these bytes
        // in addition to `len` (`size_class`).
        let skip_bytes = block.memory().start().as_ptr().align_offset(align);
        let end = skip_bytes.checked_add(len);
        assert!(end.is_some_and(|end| end <= block.class_bytes()), "the class is too small for the alignment");
        block.set_range(skip_bytes, len);
        Self { block: ManuallyDrop::new(Some(block)) }
    }

    /// Creates a buffer of the first `len` bytes of a fast-path block in the size class of `len`.
    #[inline(always)]
    pub(crate) fn from_fast_path_block(mut block: Block, len: usize) -> Self {
        block.set_len_on_fast_path(len);
        Self { block: ManuallyDrop::new(Some(block)) }
    }

    #[inline(always)]
    fn start(&self) -> NonNull<u8> {
        self.block.as_ref().map_or(NonNull::<Aligned>::dangling().cast(), |block| block.start())
    }

    /// Returns the length in bytes: the requested length, or what [`truncate`](PinnedBuf::truncate) left of it. After a failed
    /// `copy_range_to` with a copy that may be running, the length is 0.
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.block.as_ref().map_or(0, |block| block.len())
    }

    #[inline(always)]
    fn is_fast_path(&self) -> bool {
        self.block.as_ref().is_some_and(Block::is_fast_path)
    }

    /// Returns whether the length is zero.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Shortens the buffer to its first `len` bytes; does nothing if it is shorter already. Copies, slices and views then
    /// end there.
    pub fn truncate(&mut self, len: usize) {
        if let Some(block) = &mut *self.block {
            block.truncate(len);
        }
    }

    /// Returns the bytes from the first byte to the end of the size class. Slices, views and copies end earlier, at
    /// [`len`](PinnedBuf::len).
    pub fn capacity(&self) -> usize {
        self.block.as_ref().map_or(0, |block| block.class_bytes() - block.skip_bytes())
    }

    /// Returns the component that pinned the memory: copies can be asynchronous if it is [`PinnedBy::Driver`]. `None` for `heap`, for
    /// pageable memory of a full pool, and for empty buffers.
    pub fn pinned_by(&self) -> Option<PinnedBy> {
        self.block.as_ref().and_then(Block::pinned_by)
    }

    /// Returns the NUMA node that the backend requests for the memory; pages come from another node if it is full. `None` if the machine
    /// has only one node, or the node is unknown.
    pub fn numa_node(&self) -> Option<u32> {
        self.block.as_ref().and_then(Block::numa_node)
    }

    /// Returns the number of the memory, for tests; `None` for empty buffers and [adopted](crate::Pool::adopt) memory.
    #[doc(hidden)]
    pub fn unstable_id(&self) -> Option<u64> {
        self.block.as_ref().and_then(|block| block.memory().id())
    }

    /// Returns the address of the first byte, page-aligned or aligned as [requested](crate::Request::align). Does not wait for
    /// copies.
    ///
    /// The pool cannot track copies that other code starts from this address.
    pub fn as_ptr(&self) -> *const u8 {
        self.start().as_ptr()
    }

    /// Returns the address of the first byte, like [`as_ptr`](PinnedBuf::as_ptr), for code that writes through the address,
    /// such as `O_DIRECT` reads and io_uring. A device may be using the bytes until [`wait`](PinnedBuf::wait) has
    /// returned.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.as_ptr().cast_mut()
    }

    /// Waits for all copies that use the buffer, including copies enqueued through cudarc. In a forked child the call returns
    /// immediately, since no device uses the child's copy of the memory.
    ///
    /// # Errors
    ///
    /// [`Error::is_device_failed`](crate::Error::is_device_failed) if a device failed, so it is unknown whether a copy has completed. The
    /// memory is quarantined until its fence confirms that.
    pub fn wait(&mut self) -> Result<()> {
        let Some(block) = self.block.as_mut().filter(|block| !block.is_forked()) else { return Ok(()) };
        block.copy_fences_mut().wait_for_all()
    }

    /// Waits for copies into the buffer, and returns the bytes for reading. Copies that only read the buffer delay nothing.
    ///
    /// # Errors
    ///
    /// - [`Error::is_device_failed`](crate::Error::is_device_failed): a copy into the buffer failed, and may still be writing to it,
    /// - [`Error::is_forked`](crate::Error::is_forked): this is a forked child, and the memory belongs to a driver or
    ///   `PINPOOL_HUGETLB` is set.
    #[inline]
    pub fn wait_slice(&self) -> Result<&PinnedSlice<u8>> {
        if !self.is_fast_path() {
            self.check_reachable()?;
            self.recorded_copies().map_or(Ok(()), |copies| copies.wait_for_writes(None))?;
        }
        // SAFETY: no copy writes here: none was recorded (block-I2), or the wait returned `Ok` (buffer-I2).
        Ok(PinnedSlice::from_ref(unsafe { self.bytes() }))
    }

    /// Waits like [`wait_slice`](PinnedBuf::wait_slice), but returns a plain slice, for a library that starts a copy
    /// from a slice. [`PinnedBuf`](PinnedBuf#which-copies-are-tracked) lists the tracked copies.
    ///
    /// # Errors
    ///
    /// The errors of [`wait_slice`](PinnedBuf::wait_slice).
    ///
    /// # Safety
    ///
    /// The pool cannot track a copy that is started from this slice. Until each such copy has completed, the buffer must be
    /// neither dropped nor written to.
    #[inline]
    pub unsafe fn wait_slice_untracked(&self) -> Result<&[u8]> {
        self.wait_slice().map(|bytes| &**bytes)
    }

    /// Waits for copies that use the buffer, and returns the bytes for writing.
    ///
    /// # Errors
    ///
    /// - [`Error::is_device_failed`](crate::Error::is_device_failed): a copy failed, and may still use the bytes,
    /// - [`Error::is_forked`](crate::Error::is_forked): this is a forked child, and the memory belongs to a driver or
    ///   `PINPOOL_HUGETLB` is set.
    #[inline]
    pub fn wait_slice_mut(&mut self) -> Result<&mut PinnedSlice<u8>> {
        if !self.is_fast_path() {
            self.end_recorded_copies()?;
        }
        // SAFETY: no copy uses the bytes: none was recorded (block-I2), or the call above returned `Ok`.
        Ok(PinnedSlice::from_mut(unsafe { self.bytes_mut() }))
    }

    /// Waits until no recorded copy uses the bytes.
    #[inline(never)]
    fn end_recorded_copies(&mut self) -> Result<()> {
        self.check_reachable()?;
        if self.is_free() { Ok(()) } else { self.wait() }
    }

    /// Returns the bytes for reading, or `None` while a copy into the buffer may be writing to them. Does not wait.
    ///
    /// # Errors
    ///
    /// The errors of [`wait_slice`](PinnedBuf::wait_slice).
    pub fn try_slice(&self) -> Result<Option<&PinnedSlice<u8>>> {
        self.check_reachable()?;
        let is_written = self.recorded_copies().map_or(Ok(true), CopyFences::are_writes_complete)?;
        // SAFETY: no copy writes here: none is recorded, or all have completed (buffer-I2).
        Ok(is_written.then(|| PinnedSlice::from_ref(unsafe { self.bytes() })))
    }

    /// Returns the bytes for writing, or `None` while a copy may be using them. Does not wait.
    ///
    /// # Errors
    ///
    /// The errors of [`wait_slice_mut`](PinnedBuf::wait_slice_mut).
    pub fn try_slice_mut(&mut self) -> Result<Option<&mut PinnedSlice<u8>>> {
        self.check_reachable()?;
        let block = self.block.as_mut().filter(|block| !block.is_forked());
        let is_free = block.map_or(Ok(true), |block| block.copy_fences_mut().remove_completed())?;
        // Does not wait: no copy uses the bytes.
        if is_free { self.wait_slice_mut().map(Some) } else { Ok(None) }
    }

    /// Waits like [`wait_slice`](PinnedBuf::wait_slice), and returns the bytes as elements of type `T`.
    ///
    /// # Errors
    ///
    /// The errors of [`wait_slice`](PinnedBuf::wait_slice), and [`Error::is_invalid_request`](crate::Error::is_invalid_request)
    /// if the length is not a multiple of the element's size, or the address is not aligned for it.
    pub fn wait_slice_as<T: Pod>(&self) -> Result<&PinnedSlice<T>> {
        slice::cast(self.wait_slice()?)
    }

    /// Waits like [`wait_slice_mut`](PinnedBuf::wait_slice_mut), and returns the bytes as elements of type `T`.
    ///
    /// ```
    /// # let pool = pinpool::Pool::builder().backend(pinpool::Backend::Heap).build()?;
    /// let mut buf = pool.get(16)?;
    /// buf.wait_slice_as_mut::<f32>()?.copy_from_slice(&[1.0, 2.0, 3.0, 4.0]);
    /// assert_eq!(buf.wait_slice_as::<f32>()?[3], 4.0);
    /// assert!(pool.get(15)?.wait_slice_as_mut::<f32>().is_err(), "15 bytes are not a whole number of f32");
    /// # Ok::<(), pinpool::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors of [`wait_slice_mut`](PinnedBuf::wait_slice_mut) and [`wait_slice_as`](PinnedBuf::wait_slice_as).
    pub fn wait_slice_as_mut<T: Pod>(&mut self) -> Result<&mut PinnedSlice<T>> {
        slice::cast_mut(self.wait_slice_mut()?)
    }

    /// Returns the bytes without waiting.
    ///
    /// # Safety
    ///
    /// No copy may be writing to the bytes, unless they are read on the stream of that copy, after the copy.
    #[inline(always)]
    unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: buffer-I1 and buffer-I3; `&self` excludes writers in this process; the caller excludes device writes.
        unsafe { std::slice::from_raw_parts(self.start().as_ptr(), self.len()) }
    }

    /// Returns the bytes for writing, without waiting.
    ///
    /// # Safety
    ///
    /// No copy may be using the bytes, unless they are written on the stream of that copy, after the copy.
    #[inline(always)]
    unsafe fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: buffer-I1 and buffer-I3; `&mut self` makes it the only slice; the caller excludes copies that use the bytes.
        unsafe { std::slice::from_raw_parts_mut(self.start().as_ptr(), self.len()) }
    }

    /// Fails in a forked child if the memory belongs to a driver, since it may not be mapped there.
    #[inline]
    fn check_reachable(&self) -> Result<()> {
        match &*self.block {
            Some(block) if block.is_inaccessible() => block.check_process(),
            _ => Ok(()),
        }
    }

    /// Returns whether no recorded copy uses the bytes. Forgets completed copies.
    #[inline]
    fn is_free(&mut self) -> bool {
        let is_free = |fences: &mut CopyFences| fences.is_empty() || fences.remove_completed().unwrap_or(false);
        self.block.as_mut().filter(|block| !block.is_forked()).is_none_or(|block| is_free(block.copy_fences_mut()))
    }

    /// Returns the recorded copies. Returns `None` in a forked child: no device uses the child's copy of the memory, and the
    /// child lacks the threads that complete fences.
    #[inline]
    fn recorded_copies(&self) -> Option<&CopyFences> {
        let block = self.block.as_ref()?;
        (block.copy_fences().was_used() && !block.is_forked()).then(|| block.copy_fences())
    }
}

impl Drop for PinnedBuf {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the buffer ends here, so nothing uses the field again.
        if let Some(block) = unsafe { ManuallyDrop::take(&mut self.block) } {
            block.put();
        }
    }
}
