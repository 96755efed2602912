//! The pool and its alternatives, behind one trait.
//!
//! Each baseline writes one byte to every buffer. The alternatives have every advantage: they know the size class, and have
//! no limit and no counters.

use crossbeam::queue::ArrayQueue;
use pinpool::{PinnedBuf, Pool};

/// Sizes of `mix`, each in a separate class: 4 KiB to 64 KiB.
pub(super) const SIZES: usize = 16;

/// Length of a queue: more buffers of one class than are idle at any time.
const QUEUE_LEN: usize = 1024;

/// Returns the length in bytes of the buffers with size number `size`.
fn bytes_of(size: usize) -> usize {
    (size + 1) * 4096
}

/// A source of buffers.
pub(super) trait Baseline: Sync {
    type Buffer: Send;

    /// Returns a buffer of `bytes_of(size)`, with one byte written.
    fn get(&self, size: usize) -> Self::Buffer;

    fn put(&self, buffer: Self::Buffer);
}

/// A failed request returns `None`. The pool's counters report it.
impl Baseline for Pool {
    type Buffer = Option<PinnedBuf>;

    #[inline]
    fn get(&self, size: usize) -> Option<PinnedBuf> {
        let mut buffer = Pool::get(self, bytes_of(size)).ok()?;
        buffer.wait_slice_mut().ok()?[0] = 1;
        Some(buffer)
    }

    #[inline]
    fn put(&self, buffer: Option<PinnedBuf>) {
        drop(buffer);
    }
}

/// A lock-free queue for each size.
pub(super) struct ArrayQueues(Box<[ArrayQueue<Box<[u8]>>]>);

impl Default for ArrayQueues {
    fn default() -> Self {
        Self((0..SIZES).map(|_| ArrayQueue::new(QUEUE_LEN)).collect())
    }
}

impl Baseline for ArrayQueues {
    type Buffer = Box<[u8]>;

    #[inline]
    fn get(&self, size: usize) -> Box<[u8]> {
        let mut buffer = self.0[size].pop().unwrap_or_else(|| vec![0; bytes_of(size)].into());
        buffer[0] = 1;
        buffer
    }

    #[inline]
    fn put(&self, buffer: Box<[u8]>) {
        // If the queue is full, this frees the buffer.
        let _ = self.0[buffer.len() / bytes_of(0) - 1].push(buffer);
    }
}

/// The allocator of the process.
pub(super) struct Malloc;

impl Baseline for Malloc {
    type Buffer = Vec<u8>;

    #[inline]
    fn get(&self, size: usize) -> Vec<u8> {
        let mut buffer = Vec::with_capacity(bytes_of(size));
        buffer.push(1);
        buffer
    }

    #[inline]
    fn put(&self, buffer: Vec<u8>) {
        drop(std::hint::black_box(buffer));
    }
}
