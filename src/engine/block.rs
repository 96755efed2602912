//! Memory of one class with the state of its buffer and a reference to its owner: what moves between idle buffers, users
//! and devices.
//!
//! ```text
//!  Block ─▶ Entry (links and coarse time, for the thread cache)
//!             └─ BlockBody: owner (the pool's core), memory, class, buffer state
//! ```
//!
//! Generic over the owner `E`, so that nothing here knows a pool. Never acquires or releases memory.
//!
//! - block-I1: `start` up to `class_bytes` bytes later is memory that belongs to this block alone.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use super::idle::thread_cache::Entry;
use super::supply::BlockMemory;
use crate::in_flight::CopyFences;
use crate::size_class::Class;

/// Memory of one class and its owner. One pointer wide.
///
/// A block carries its own reference to the pool, in use or idle, so a hit touches no reference count. The cycle (the pool
/// keeps idle blocks, which keep the pool) is cut when the pool closes and is drained.
pub(crate) struct Block<E>(Box<Entry<BlockBody<E>>>);

/// What a block holds, behind the header by which the thread cache links idle blocks.
pub(super) struct BlockBody<E> {
    owner: Arc<E>,
    memory: BlockMemory,
    class_bytes: usize,
    state: BufferState,
}

/// Without the owner, whose idle blocks would lead back here.
impl<E> fmt::Debug for BlockBody<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Block")
            .field("class_bytes", &self.class_bytes)
            .field("memory", &self.memory)
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}

impl<E> fmt::Debug for Block<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        BlockBody::fmt(&self.0, f)
    }
}

/// The user's view of a block. It is kept with the block, so a buffer is one pointer, which a get returns in a register.
#[derive(Debug, Default)]
pub(crate) struct BufferState {
    /// From the start of the block to the first byte of the buffer.
    pub(crate) skip_bytes: usize,
    pub(crate) len: usize,
    /// Offset of the next `io::Write`.
    pub(crate) position: usize,
    pub(crate) copy_fences: CopyFences,
}

impl BufferState {
    /// A new user asks for `len` bytes. Writes only what differs: a loader asks for the same length again and again, and
    /// a cache line that is not written need not move to the core that puts the buffer back.
    #[inline]
    pub(crate) fn begin(&mut self, skip_bytes: usize, len: usize) {
        for (field, value) in [(&mut self.skip_bytes, skip_bytes), (&mut self.len, len), (&mut self.position, 0)] {
            if *field != value {
                *field = value;
            }
        }
    }
}

impl<E> Block<E> {
    pub(super) fn new(owner: Arc<E>, memory: BlockMemory, class: Class) -> Self {
        let held_bytes = usize::try_from(memory.held_bytes()).unwrap_or(usize::MAX);
        let body = BlockBody { owner, memory, class_bytes: class.bytes, state: BufferState::default() };
        Self(Entry::new(class.index, held_bytes, body))
    }

    #[inline]
    pub(super) fn from_entry(entry: Box<Entry<BlockBody<E>>>) -> Self {
        Self(entry)
    }

    #[inline]
    pub(super) fn into_entry(self) -> Box<Entry<BlockBody<E>>> {
        self.0
    }

    /// The owner, and the memory for its release.
    pub(super) fn into_parts(self) -> (Arc<E>, BlockMemory) {
        let body = self.0.into_value();
        (body.owner, body.memory)
    }

    #[inline]
    pub(super) fn owner(&self) -> &Arc<E> {
        &self.0.owner
    }

    #[inline]
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.0.memory.start()
    }

    #[inline]
    pub(crate) fn class_bytes(&self) -> usize {
        self.0.class_bytes
    }

    #[inline]
    pub(super) fn class(&self) -> Class {
        Class { bytes: self.0.class_bytes, index: self.0.class() }
    }

    /// Number of the acquisition or of the carve that made this block; never reused by its source.
    pub(crate) fn id(&self) -> u64 {
        self.0.memory.id()
    }

    /// False for pageable memory, which replaces the source's memory when there is no room.
    #[inline]
    pub(super) fn is_from_source(&self) -> bool {
        self.0.memory.is_from_source()
    }

    pub(super) fn held_bytes(&self) -> u64 {
        self.0.memory.held_bytes()
    }

    /// Overwrites all of the memory with zeros. No copy uses it.
    #[allow(unsafe_code)]
    pub(super) fn zero(&mut self) {
        // SAFETY: block-I1, and the caller owns the block. A put comes after the last copy (core-I1).
        unsafe { self.start().as_ptr().write_bytes(0, self.class_bytes()) };
    }

    #[inline]
    pub(crate) fn state(&self) -> &BufferState {
        &self.0.state
    }

    #[inline]
    pub(crate) fn state_mut(&mut self) -> &mut BufferState {
        &mut self.0.state
    }
}
