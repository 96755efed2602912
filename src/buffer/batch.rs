//! One buffer in many pieces: one get, one copy, one completion for a batch of small tensors.
//!
//! ```text
//!   | piece | piece |pad| piece |      free      |
//!   0                           taken            len      pieces are only ever added: the place of the next one is a number
//! ```
//!
//! Pieces are taken through a shared reference, so that many threads fill one batch at once; none outlives it, so the copy
//! begins when all are filled. Invariant: no two pieces share a byte, for the ranges that `taken` passes over are disjoint.
#![allow(unsafe_code)] // Makes slices of disjoint ranges.

use std::ops::{Deref, DerefMut, Range};

use super::PinnedBuf;
use crate::backend::PAGE_BYTES;
use crate::copy::{Completion, CopyTarget};
use crate::error::Result;
use crate::sync::process::{AtomicUsize, Ordering};

/// A buffer handed out in pieces, then copied as one.
///
/// ```
/// # use pinpool::copy::sink::{SinkMem, SinkStream};
/// # let pool = pinpool::Pool::builder().backend(pinpool::Backend::Heap).build()?;
/// # let (stream, mut device) = (SinkStream::new()?, SinkMem::new(1 << 16));
/// let batch = pool.batch(1 << 16)?;
/// let places: Vec<_> = [[1_u8; 100], [2; 100], [3; 100]]
///     .iter()
///     .map(|tensor| {
///         let mut piece = batch.take(tensor.len(), 64).expect("room for all");
///         piece.copy_from_slice(tensor);
///         piece.range()
///     })
///     .collect();
/// batch.copy_to(&stream, &mut device)?;
/// assert_eq!(places[2], 256..356);
/// assert_eq!(device.read()[256..356], [3; 100]);
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Debug)]
pub struct BatchBuf {
    buf: PinnedBuf,
    taken: AtomicUsize,
}

/// A part of a batch, to be filled. The bytes keep what their last user left there.
#[derive(Debug)]
pub struct BatchSlice<'a> {
    bytes: &'a mut [u8],
    offset: usize,
}

impl BatchBuf {
    pub(crate) fn over(buf: PinnedBuf) -> Self {
        Self { buf, taken: AtomicUsize::new(0) }
    }

    /// The next `len` bytes at a multiple of `align`, in the batch and in memory. `None` if no such place is left, or
    /// `align` is no power of two of at most 4096; what is behind stays for smaller pieces.
    pub fn take(&self, len: usize, align: usize) -> Option<BatchSlice<'_>> {
        if !align.is_power_of_two() || align > PAGE_BYTES {
            return None;
        }
        let place = |taken: usize| {
            let offset = taken.checked_next_multiple_of(align)?;
            let end = offset.checked_add(len)?;
            (end <= self.buf.len()).then_some((offset, end))
        };
        // Relaxed: hands out numbers; the threads that fill pieces give the batch back by means of their own.
        let before =
            self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |taken| Some(place(taken)?.1)).ok()?;
        let (offset, _) = place(before)?;
        // SAFETY: `offset + len` is inside the buffer, as just checked.
        let start = unsafe { self.buf.as_ptr().cast_mut().add(offset) };
        // SAFETY: the buffer is ours alone, initialised, used by no copy (it is fresh), and lends no slice of itself while
        // the batch lives; this range was never handed out before and never will be (the invariant).
        let bytes = unsafe { std::slice::from_raw_parts_mut(start, len) };
        Some(BatchSlice { bytes, offset })
    }

    /// Bytes up to the end of the last piece.
    pub fn taken_bytes(&self) -> usize {
        // Relaxed: a figure; exact for whoever holds the batch alone.
        self.taken.load(Ordering::Relaxed)
    }

    /// Bytes in all.
    pub fn capacity(&self) -> usize {
        self.buf.len()
    }

    /// Enqueues one copy of all pieces, with what lies between them, to the front of `target`; the buffer returns to the
    /// pool when that is over.
    ///
    /// # Errors
    ///
    /// As [`PinnedBuf::copy_to`].
    pub fn copy_to<S: ?Sized, T: CopyTarget<S> + ?Sized>(mut self, stream: &S, target: &mut T) -> Result<Completion> {
        let taken = self.taken_bytes();
        self.buf.copy_range_to(0..taken, stream, target)
    }

    /// The buffer, for copies of single pieces by [`PinnedBuf::copy_range_to`].
    pub fn into_buf(self) -> PinnedBuf {
        self.buf
    }
}

impl BatchSlice<'_> {
    /// Its place in the batch, and so behind the start of whatever the batch is copied to.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.bytes.len()
    }
}

impl Deref for BatchSlice<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.bytes
    }
}

impl DerefMut for BatchSlice<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::copy::sink::{SinkMem, SinkStream};
    use crate::{Backend, Pool};

    fn batch_of(bytes: usize) -> (Pool, BatchBuf) {
        let pool = Pool::builder().without_env().backend(Backend::Heap).build().unwrap();
        let batch = pool.batch(bytes).unwrap();
        (pool, batch)
    }

    #[test]
    fn pieces_lie_one_behind_the_other_each_at_its_alignment() {
        let (_pool, batch) = batch_of(8192);
        let places = [(3, 1), (4, 8), (0, 16), (1, 4096), (4095, 1)];
        let ranges = places.map(|(len, align)| {
            let piece = batch.take(len, align).unwrap();
            assert!(piece.as_ptr().addr().is_multiple_of(align) && piece.len() == len);
            piece.range()
        });
        assert_eq!(ranges, [0..3, 8..12, 16..16, 4096..4097, 4097..8192]);
        assert!(batch.take(1, 1).is_none() && batch.taken_bytes() == batch.capacity());
    }

    #[test]
    fn what_does_not_fit_takes_nothing() {
        let (_pool, batch) = batch_of(100);
        for (len, align) in [(101, 1), (usize::MAX, 1), (usize::MAX, 4096), (1, 0), (1, 3), (1, 8192)] {
            assert!(batch.take(len, align).is_none(), "{len} at {align}");
        }
        assert_eq!(batch.taken_bytes(), 0);
        assert!(batch.take(100, 64).is_some());
    }

    #[test]
    fn many_threads_fill_it_and_one_copy_carries_it_all() {
        const PIECES: usize = if cfg!(miri) { 8 } else { 200 };
        let (pool, batch) = batch_of(1 << 20);
        let fill = |thread: usize| {
            let fill_one = |n: usize| {
                let byte = u8::try_from((thread * 83 + n) % 251).unwrap();
                let mut piece = batch.take(100 + n, 64).unwrap();
                piece.fill(byte);
                (piece.range(), byte)
            };
            (0..PIECES).map(fill_one).collect::<Vec<_>>()
        };
        let fill = &fill;
        let places: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|thread| scope.spawn(move || fill(thread))).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        let (stream, mut device) = (SinkStream::new().unwrap(), SinkMem::new(1 << 20));
        batch.copy_to(&stream, &mut device).unwrap().wait().unwrap();
        let arrived = device.read();
        for (range, byte) in places {
            assert!(arrived[range.clone()].iter().all(|&found| found == byte), "{range:?}");
        }
        pool.poll();
        let stats = pool.stats();
        assert_eq!((stats.gets, stats.puts, stats.in_flight), (1, 1, 0), "one get, one completion");
    }

    #[test]
    fn an_empty_slab_has_nothing_to_copy() {
        let (pool, batch) = batch_of(100);
        let (stream, mut device) = (SinkStream::new().unwrap(), SinkMem::new(0));
        assert!(batch.copy_to(&stream, &mut device).unwrap().is_done().unwrap());
        assert_eq!(pool.stats().puts, 1);
    }
}
