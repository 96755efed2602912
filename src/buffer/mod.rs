//! What a user holds: bytes that stay put until every copy from them is over.
//!
//! There is no `Deref` to a slice, on purpose: a copy started from a plain slice of pinned memory is asynchronous and
//! unguarded, so the buffer could be recycled and overwritten while the device still reads it. Copies go through
//! [`PinnedBuf::copy_to`] and its kin, which keep the buffer until the device is done.
//!
//! Invariants:
//!
//! 1. `skip_bytes` of the state is inside the block's memory with at least `len` bytes behind it (`size_class` leaves the
//!    room), and the block belongs to this buffer alone; without a block the length is 0.
//! 2. Every copy that uses the buffer is in the state's `uses` until it was seen to be over.
//! 3. The memory is initialised (source contract C2).
#![allow(unsafe_code)] // Makes slices of the block's memory, and lends it to devices.

pub(crate) mod batch;
mod copies;
mod pending;

pub use batch::{BatchBuf, BatchSlice};
pub use pending::PendingBuf;

use std::io;
use std::ptr::NonNull;

use crate::engine::{Block, BufferState};
use crate::in_flight::CopyFences;

/// A buffer of a pool. Dropping it puts it back: at once, or when the last copy from it is over.
///
/// A copy consumes the buffer, so it cannot be touched while the device reads it:
///
/// ```compile_fail,E0382
/// # use pinpool::copy::sink::{SinkMem, SinkStream};
/// # let pool = pinpool::Pool::builder().backend(pinpool::Backend::Heap).build()?;
/// # let (stream, mut device) = (SinkStream::new()?, SinkMem::new(8));
/// let mut buf = pool.get(8)?;
/// let copy = buf.copy_to(&stream, &mut device)?;
/// buf.as_mut_slice().fill(0); // the buffer is the device's now
/// # Ok::<(), pinpool::Error>(())
/// ```
///
/// ```
/// # use pinpool::copy::sink::{SinkMem, SinkStream};
/// # let pool = pinpool::Pool::builder().backend(pinpool::Backend::Heap).build()?;
/// # let (stream, mut device) = (SinkStream::new()?, SinkMem::new(8));
/// let mut buf = pool.get(8)?;
/// buf.as_mut_slice().fill(0);
/// let copy = buf.copy_to(&stream, &mut device)?;
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Debug)]
pub struct PinnedBuf {
    block: Option<Block>,
}

impl PinnedBuf {
    /// Of zero bytes: belongs to no pool and counts for nothing.
    #[inline]
    pub(crate) fn empty() -> Self {
        Self { block: None }
    }

    /// The first `len` bytes of `block` at a multiple of `align`; its class was made for that (invariant 1).
    #[inline]
    pub(crate) fn over(mut block: Block, len: usize, align: usize) -> Self {
        // Less than `align`, and the class has `align` bytes more than `len` wherever the page-aligned base is not aligned
        // already (`size_class`).
        let skip_bytes = block.start().as_ptr().align_offset(align);
        let end = skip_bytes.checked_add(len);
        debug_assert!(end.is_some_and(|end| end <= block.class_bytes()), "size_class left no room");
        block.state_mut().begin(skip_bytes, len);
        Self { block: Some(block) }
    }

    #[inline]
    fn state(&self) -> Option<&BufferState> {
        self.block.as_ref().map(Block::state)
    }

    #[inline]
    fn start(&self) -> NonNull<u8> {
        match &self.block {
            None => NonNull::dangling(),
            // SAFETY: invariant 1.
            Some(block) => unsafe { block.start().add(block.state().skip_bytes) },
        }
    }

    /// Bytes asked for.
    #[inline]
    pub fn len(&self) -> usize {
        self.state().map_or(0, |state| state.len)
    }

    /// Was it a get of zero bytes?
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of the class behind the first one: at least [`len`](PinnedBuf::len).
    pub fn capacity(&self) -> usize {
        self.block.as_ref().map_or(0, |block| block.class_bytes() - block.state().skip_bytes)
    }

    /// Is the memory page-locked? False for `heap` and `sim`, for memory that stands in when the pool is full, and for a
    /// buffer of zero bytes.
    pub fn is_pinned(&self) -> bool {
        self.block.as_ref().is_some_and(Block::is_pinned)
    }

    /// Memory node that it was placed on; `None` where the machine has one only, or nobody knows.
    pub fn numa_node(&self) -> Option<u32> {
        self.block.as_ref().and_then(Block::numa_node)
    }

    /// Number of the acquisition that made this buffer: the same whenever it is reused, never that of another of its
    /// source. `None` for zero bytes.
    pub fn id(&self) -> Option<u64> {
        self.block.as_ref().map(|block| block.id())
    }

    /// The bytes, after waiting until no recorded copy uses them.
    ///
    /// If a device failed, nobody will know when its copies are over, and the wait ends with the failure; the buffer will
    /// not be reused then. If it failed in a copy *into* the buffer, the slice is empty: there are no bytes to trust. It is
    /// empty also in a child of `fork`, if the memory came from a GPU's driver: children do not inherit that.
    ///
    /// Do not start a copy from this slice by other means than this crate's: the buffer would not know of it, and its
    /// memory would be handed out again while the device still reads it.
    #[inline]
    pub fn as_slice(&self) -> &[u8] {
        if self.is_out_of_reach() || !self.wait_for_uses() {
            return &[];
        }
        // SAFETY: no copy writes here any more (2), as the wait said.
        unsafe { self.bytes() }
    }

    /// The bytes, with no wait.
    ///
    /// # Safety
    ///
    /// No copy is writing to them, or they are read behind it, on its stream.
    pub(crate) unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: invariants 1 and 3; `&self` keeps writers of this process away, the caller those of devices.
        unsafe { std::slice::from_raw_parts(self.start().as_ptr(), self.len()) }
    }

    /// The bytes to fill, after waiting until no recorded copy reads them. What is said of
    /// [`as_slice`](PinnedBuf::as_slice) holds here too.
    #[inline]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        let was_free = self.is_free();
        if self.is_out_of_reach() || !was_free && !self.wait_for_uses() {
            return &mut [];
        }
        // A device that failed ends the wait, and its copies are aboard for ever.
        if was_free || self.is_free() {
            self.disembark();
        }
        // SAFETY: no copy uses the bytes, as the wait said.
        unsafe { self.bytes_for_device() }
    }

    /// The bytes to fill, or `None` while a recorded copy may be using them.
    pub fn try_as_mut_slice(&mut self) -> Option<&mut [u8]> {
        // It does not wait: nothing uses the bytes.
        self.is_free().then(|| self.as_mut_slice())
    }

    /// The bytes to write to, with no wait.
    ///
    /// # Safety
    ///
    /// No copy is using them, or they are written behind it, on its stream.
    pub(crate) unsafe fn bytes_for_device(&mut self) -> &mut [u8] {
        // SAFETY: invariants 1 and 3, and `&mut self` makes it the only slice.
        unsafe { std::slice::from_raw_parts_mut(self.start().as_ptr(), self.len()) }
    }

    /// See [`as_slice`](PinnedBuf::as_slice).
    #[inline]
    fn is_out_of_reach(&self) -> bool {
        self.block.as_ref().is_some_and(Block::is_out_of_reach)
    }

    /// Is no recorded copy using the bytes? Forgets those that are over.
    #[inline]
    fn is_free(&mut self) -> bool {
        let is_free = |uses: &mut CopyFences| uses.is_empty() || uses.are_over().unwrap_or(false);
        self.block.as_mut().is_none_or(|block| is_free(&mut block.state_mut().copy_fences))
    }

    /// False if a copy into the buffer failed. Any other failure of a device shows where it can be returned: in `Completion`
    /// and at the next copy; bytes that a device only reads are sound to touch all the same.
    #[inline]
    fn wait_for_uses(&self) -> bool {
        self.block.as_ref().is_none_or(|block| {
            // No device uses a forked child's copy, and who would say when the parent's is over is not there.
            !block.state().copy_fences.any() || block.is_forked() || block.state().copy_fences.wait()
        })
    }

    /// `None` for a buffer of zero bytes, which nobody copies.
    #[cfg(feature = "cuda")]
    pub(crate) fn uses(&self) -> Option<&CopyFences> {
        self.state().map(|state| &state.copy_fences)
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn uses_mut(&mut self) -> Option<&mut CopyFences> {
        self.block.as_mut().map(|block| &mut block.state_mut().copy_fences)
    }

    /// Address of the first byte; page-aligned, or as `get_aligned` was asked. Does not wait for copies.
    pub fn as_ptr(&self) -> *const u8 {
        self.start().as_ptr()
    }

    /// Before each copy: it may have to wait for memory that goes back to the driver.
    pub(crate) fn board(&self) {
        self.block.iter().for_each(Block::begin_copy);
    }

    /// No copy uses it any more, and that need not wait for the put to be said.
    #[inline]
    fn disembark(&self) {
        self.block.iter().for_each(Block::end_copies);
    }

    /// Where the next [`io::Write`] goes; starts at 0.
    pub fn position(&self) -> usize {
        self.state().map_or(0, |state| state.position)
    }

    /// Moves the place of the next [`io::Write`]; past the end nothing can be written.
    pub fn set_position(&mut self, position: usize) {
        if let Some(block) = &mut self.block {
            block.state_mut().position = position;
        }
    }
}

impl Drop for PinnedBuf {
    #[inline]
    fn drop(&mut self) {
        let Some(mut block) = self.block.take() else { return };
        if block.is_forked() {
            std::mem::forget(block);
            return;
        }
        let uses = &mut block.state_mut().copy_fences;
        if uses.is_empty() {
            block.put_back();
        } else {
            let fences = uses.take();
            block.put_back_after(fences);
        }
    }
}

/// Fills the buffer from [`position`](PinnedBuf::position) on; at the end of the buffer writes nothing and says so with
/// `Ok(0)`, which `write_all` turns into [`io::ErrorKind::WriteZero`].
impl io::Write for PinnedBuf {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let position = self.position().min(self.len());
        // No room at all if a copy into the buffer failed.
        let room = self.as_mut_slice().get_mut(position..).unwrap_or_default();
        let written = data.len().min(room.len());
        room[..written].copy_from_slice(&data[..written]);
        self.set_position(position + written);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
