//! What is measured: the pool through its public interface, and beside it what else one could keep buffers in.
//!
//! Each writes one byte to what it got. A baseline is given what makes it fast: it is told the class, it keeps no limit,
//! counts nothing and frees nothing.

use std::collections::HashMap;

use crossbeam::queue::ArrayQueue;
use parking_lot::Mutex;
use pinpool::{PinnedBuf, Pool};

/// Sizes that are asked for, each a class of its own; 4 KiB to 64 KiB, so that malloc does not ask the system.
pub(crate) const SIZES: usize = 16;
/// More buffers of one class than are ever idle at once.
const QUEUE_LEN: usize = 1024;

/// Bytes of size number `size`.
pub(crate) fn bytes_of(size: usize) -> usize {
    (size + 1) * 4096
}

/// One way to have buffers.
pub(crate) trait Keeper: Sync {
    type Item: Send;

    /// A buffer of `bytes_of(size)`, with one byte written to it.
    fn get(&self, size: usize) -> Self::Item;

    fn put(&self, item: Self::Item);
}

/// The pool; a get that fails is seen in its figures.
impl Keeper for Pool {
    type Item = Option<PinnedBuf>;

    #[inline]
    fn get(&self, size: usize) -> Option<PinnedBuf> {
        let mut buffer = Pool::get(self, bytes_of(size)).ok()?;
        buffer.as_mut_slice()[0] = 1;
        Some(buffer)
    }

    #[inline]
    fn put(&self, buffer: Option<PinnedBuf>) {
        drop(buffer);
    }
}

/// One lock around everything, as TensorFlow's and PyTorch's pools have it.
#[derive(Debug, Default)]
pub(crate) struct MutexHashMap(Mutex<HashMap<usize, Vec<Box<[u8]>>>>);

impl Keeper for MutexHashMap {
    type Item = Box<[u8]>;

    #[inline]
    fn get(&self, size: usize) -> Box<[u8]> {
        let idle = self.0.lock().get_mut(&bytes_of(size)).and_then(Vec::pop);
        let mut buffer = idle.unwrap_or_else(|| vec![0; bytes_of(size)].into());
        buffer[0] = 1;
        buffer
    }

    #[inline]
    fn put(&self, buffer: Box<[u8]>) {
        self.0.lock().entry(buffer.len()).or_default().push(buffer);
    }
}

/// A queue without locks for each size.
#[derive(Debug)]
pub(crate) struct ArrayQueues([ArrayQueue<Box<[u8]>>; SIZES]);

impl Default for ArrayQueues {
    fn default() -> Self {
        Self(std::array::from_fn(|_| ArrayQueue::new(QUEUE_LEN)))
    }
}

impl Keeper for ArrayQueues {
    type Item = Box<[u8]>;

    #[inline]
    fn get(&self, size: usize) -> Box<[u8]> {
        let mut buffer = self.0[size].pop().unwrap_or_else(|| vec![0; bytes_of(size)].into());
        buffer[0] = 1;
        buffer
    }

    #[inline]
    fn put(&self, buffer: Box<[u8]>) {
        // What finds no room is freed.
        let _ = self.0[buffer.len() / bytes_of(0) - 1].push(buffer);
    }
}

/// No pool: the allocator of the process.
#[derive(Debug)]
pub(crate) struct Malloc;

impl Keeper for Malloc {
    type Item = Vec<u8>;

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

/// Nothing: what the measuring itself costs.
#[derive(Debug)]
pub(crate) struct Empty;

impl Keeper for Empty {
    type Item = usize;

    #[inline]
    fn get(&self, size: usize) -> usize {
        std::hint::black_box(size)
    }

    #[inline]
    fn put(&self, item: usize) {
        std::hint::black_box(item);
    }
}
