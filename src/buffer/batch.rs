//! One buffer in many slices: one get, one copy, one completion for a batch of small tensors.
//!
//! ```text
//!   | slice | slice |pad| slice |      free      |
//!   0                           taken            len      a bump allocator: `taken` only grows until `reset`
//! ```
//!
//! Slices are taken through a shared reference, so that many threads fill one batch at once; none outlives that reference,
//! so the copy begins when all are filled.
//!
//! **batch-buf-I1**: no two slices share a byte: `taken` passes over disjoint ranges, and goes back only through `&mut`, when
//! no slice is left.
#![allow(unsafe_code)] // Makes slices of disjoint ranges.

use std::io;
use std::ops::{Deref, DerefMut, Range};

use super::{Pinned, PinnedBuf};
use crate::backend::PAGE_BYTES;
use crate::copy::{Completion, CopyTarget};
use crate::error::Result;
use pinpool_os::sync::process::{AtomicUsize, Ordering};

/// A buffer handed out in slices, then copied as one.
///
/// ```
/// # use pinpool::copy::sink::{SinkMem, SinkStream};
/// # let pool = pinpool::Pool::builder().backend(pinpool::Backend::Heap).build()?;
/// # let (stream, mut device) = (SinkStream::new()?, SinkMem::new(1 << 16));
/// let batch = pool.batch(1 << 16)?;
/// let ranges: Vec<_> = [[1_u8; 100], [2; 100], [3; 100]]
///     .iter()
///     .map(|tensor| {
///         let mut slice = batch.take(tensor.len(), 64).expect("the batch is large enough");
///         slice.copy_from_slice(tensor);
///         slice.range()
///     })
///     .collect();
/// batch.copy_to(&stream, &mut device)?;
/// assert_eq!(ranges[2], 256..356);
/// assert_eq!(device.read()[256..356], [3; 100]);
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Debug)]
pub struct BatchBuf {
    buf: PinnedBuf,
    taken: AtomicUsize,
}

/// A part of a batch, to be filled: by slice, or by [`io::Write`] from its start. The bytes keep what their last user left
/// there.
#[derive(Debug)]
pub struct BatchSlice<'a> {
    bytes: &'a mut Pinned<u8>,
    offset: usize,
    /// Bytes filled by `io::Write`.
    written: usize,
}

impl BatchBuf {
    pub(crate) fn over(buf: PinnedBuf) -> Self {
        Self { buf, taken: AtomicUsize::new(0) }
    }

    /// The next `len` bytes at a multiple of `align`, in the batch and in memory. `None` if so many are not left, or
    /// `align` is no power of two of at most 4096; the bytes left stay for shorter slices.
    pub fn take(&self, len: usize, align: usize) -> Option<BatchSlice<'_>> {
        if !align.is_power_of_two() || align > PAGE_BYTES {
            return None;
        }
        let range_after = |taken: usize| {
            let offset = taken.checked_next_multiple_of(align)?;
            let end = offset.checked_add(len)?;
            (end <= self.buf.len()).then_some(offset..end)
        };
        // Relaxed: only hands out disjoint ranges; threads that fill slices synchronize when they give the batch back.
        let before = self
            .taken
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |taken| Some(range_after(taken)?.end))
            .ok()?;
        let offset = range_after(before)?.start;
        // SAFETY: `offset + len` is inside the buffer, as just checked.
        let start = unsafe { self.buf.start().as_ptr().add(offset) };
        // SAFETY: the batch owns the buffer, which is initialised, used by no copy (it is fresh) and lends no slice of
        // itself while the batch lives; no other slice has this range (batch-buf-I1).
        let bytes = unsafe { std::slice::from_raw_parts_mut(start, len) };
        Some(BatchSlice { bytes: Pinned::from_mut(bytes), offset, written: 0 })
    }

    /// Starts again from the front of the buffer, for another batch.
    pub fn reset(&mut self) {
        *self.taken.get_mut() = 0;
    }

    /// Bytes up to the end of the last slice.
    pub fn taken_bytes(&self) -> usize {
        // Relaxed: a statistic while other threads take slices; exact for the only holder of the batch.
        self.taken.load(Ordering::Relaxed)
    }

    /// Bytes in all.
    pub fn capacity(&self) -> usize {
        self.buf.len()
    }

    /// Enqueues one copy of all slices, and of the padding between them, to the front of `target`; the buffer returns to
    /// the pool when that is over.
    ///
    /// # Errors
    ///
    /// The errors of [`PinnedBuf::copy_to`].
    pub fn copy_to<S, E, T>(mut self, stream: &S, target: &mut T) -> Result<Completion>
    where
        S: ?Sized,
        T: CopyTarget<S, E> + ?Sized,
    {
        let taken = self.taken_bytes();
        self.buf.copy_range_to(0..taken, stream, target)
    }

    /// The buffer, for copies of single slices by [`PinnedBuf::copy_range_to`].
    pub fn into_buf(self) -> PinnedBuf {
        self.buf
    }
}

impl BatchSlice<'_> {
    /// Its place in the batch, and so behind the start of the memory that the batch is copied to.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.bytes.len()
    }
}

impl Deref for BatchSlice<'_> {
    type Target = Pinned<u8>;

    fn deref(&self) -> &Pinned<u8> {
        self.bytes
    }
}

impl DerefMut for BatchSlice<'_> {
    fn deref_mut(&mut self) -> &mut Pinned<u8> {
        self.bytes
    }
}

/// Fills the slice from its start on; at its end writes nothing and returns `Ok(0)`.
impl io::Write for BatchSlice<'_> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let free = &mut self.bytes[self.written..];
        let written = data.len().min(free.len());
        free[..written].copy_from_slice(&data[..written]);
        self.written += written;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
