//! Memory of one class with the state of its buffer and a reference to its pool. It moves between idle buffers, users
//! and devices.
//!
//! ```text
//!  Block ─▶ Entry (links and coarse time, for the thread cache)
//!             └─ BlockBody: pool (its core), memory, class, buffer state
//! ```
//!
//! Generic over the pool `P`, so that nothing here depends on the pool. This module never acquires or releases memory.
//!
//! - **block-I1**: the `class_bytes` bytes from `memory.start()` on belong to this block alone, and `first` is an address among
//!   them.
//! - **block-I2**: The stamp of the entry is the fork generation of its pool only while the block is a *fast-path block*: its
//!   memory is from the source, `first` is at its start, no copy has begun or was recorded, the block has neither a tag row nor
//!   a claim, and the process has not forked since. Every call that may change one of these conditions sets another stamp. The
//!   slow return makes the block a fast-path block again. So an access to the bytes compares two numbers and skips all other
//!   checks of the block.
//! - **block-I3**: Only a fast-path block can take the fast path of a return. Taking an idle block opens it to the shard of the
//!   thread that takes it, and every call that ends the fast path of the block closes it again.

use std::ptr::NonNull;
use std::sync::Arc;

use super::cache::thread_cache::{Entry, SpareEntries};
use super::memory::BlockMemory;
use super::meter::holders::TagRow;
use crate::in_flight::CopyFences;
use crate::quota::Claim;
use crate::size_class::Class;
use pinpool_os::fork;

/// Memory of one class with a reference to its pool. A block is as large as one pointer.
///
/// A block carries its own reference to the pool, in use or idle, so a hit touches no reference count. The cycle (the pool
/// keeps idle blocks, which keep the pool) is cut when the pool ends and is drained.
pub(crate) struct Block<P>(Box<Entry<BlockBody<P>>>);

/// The contents of a block, behind the header by which the thread cache links idle blocks.
#[repr(C)] // The first two fields share the header's cache line, which is all that a hit touches.
pub(super) struct BlockBody<P> {
    first: Address,
    len: usize,
    pool: Arc<P>,
    memory: BlockMemory,
    class_bytes: usize,
    copy_fences: CopyFences,
    /// Number of the head of the wait queue that this block's request has overtaken; 0 if it has overtaken none.
    overtaken_head: u64,
    /// When the block's first use or its time in flight began: the pool's time in microseconds, plus one; 0 if unknown.
    since_us: u64,
    /// The record of a tagged or sampled request.
    tag_row: Option<TagRow>,
    /// The block's claim in the partition of its user.
    claim: Option<Claim>,
}

/// The stamp of a block that is not a fast-path block. It is never a fork generation.
pub(super) const NOT_FAST_PATH: u32 = u32::MAX;

/// The address of the first byte of a buffer.
#[derive(Debug, Clone, Copy)]
struct Address(NonNull<u8>);

// SAFETY: only an address. Its memory belongs to one block (block-I1), and is accessed under the rules of `buffer` alone.
#[allow(unsafe_code)]
unsafe impl Send for Address {}

// SAFETY: as for `Send`: only an address.
#[allow(unsafe_code)]
unsafe impl Sync for Address {}

impl<P> Block<P> {
    pub(super) fn new(pool: Arc<P>, memory: BlockMemory, class: Class, spare: &SpareEntries<BlockBody<P>>) -> Self {
        let held_bytes = usize::try_from(memory.held_bytes()).unwrap_or(usize::MAX);
        let body = || BlockBody {
            first: Address(memory.start()),
            len: 0,
            pool,
            memory,
            class_bytes: class.bytes,
            copy_fences: CopyFences::default(),
            overtaken_head: 0,
            since_us: 0,
            tag_row: None,
            claim: None,
        };
        let entry = spare.wrap(class.index, held_bytes, body);
        entry.set_stamp(NOT_FAST_PATH);
        Self(entry)
    }

    #[inline]
    pub(super) fn from_entry(entry: Box<Entry<BlockBody<P>>>) -> Self {
        Self(entry)
    }

    #[inline]
    pub(super) fn into_entry(self) -> Box<Entry<BlockBody<P>>> {
        self.0
    }

    /// Returns the pool, and the memory, which the caller must release.
    pub(super) fn into_parts(self, spare: &SpareEntries<BlockBody<P>>) -> (Arc<P>, BlockMemory) {
        spare.unwrap(self.0, |body| (body.pool, body.memory))
    }

    #[inline]
    pub(crate) fn pool(&self) -> &Arc<P> {
        &self.0.pool
    }

    pub(crate) fn memory(&self) -> &BlockMemory {
        &self.0.memory
    }

    /// Returns the address of the buffer's first byte.
    #[inline(always)]
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.0.first.0
    }

    /// Returns the length of the buffer.
    #[inline(always)]
    pub(crate) fn len(&self) -> usize {
        self.0.len
    }

    /// Begins the use of this fast-path block by a new user, for a request of `len` bytes.
    #[inline(always)]
    pub(crate) fn set_len_on_fast_path(&mut self, len: usize) {
        debug_assert!(self.0.first.0 == self.0.memory.start() && len <= self.0.class_bytes);
        // Compare first: a loader requests the same length repeatedly, and a cache line that is not written stays shared.
        if self.0.len != len {
            self.0.len = len;
        }
    }

    /// Begins the use of this block by a new user, for `len` bytes that begin `skip_bytes` after the start of the memory. Both
    /// are within the class.
    pub(crate) fn set_range(&mut self, skip_bytes: usize, len: usize) {
        if skip_bytes > 0 {
            self.end_fast_path();
        }
        let start = self.0.memory.start();
        // SAFETY: the result is within the block's memory (block-I1), since the caller keeps `skip_bytes` within the class.
        #[allow(unsafe_code)]
        let first = unsafe { start.add(skip_bytes) };
        (self.0.first, self.0.len) = (Address(first), len);
    }

    /// Ends the buffer after its first `len` bytes, if it is longer.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.0.len = self.0.len.min(len);
    }

    /// Returns the distance from the start of the block to the first byte of the buffer.
    pub(crate) fn skip_bytes(&self) -> usize {
        self.0.first.0.addr().get() - self.0.memory.start().addr().get()
    }

    /// Returns whether this is a fast-path block (block-I2).
    #[inline(always)]
    pub(crate) fn is_fast_path(&self) -> bool {
        self.0.stamp() == fork::current()
    }

    /// Returns whether the shard at `shard` may keep the block by the fast path (block-I3).
    #[inline(always)]
    pub(super) fn is_open_to<S>(&self, shard: *const S) -> bool {
        self.0.is_open_to(shard)
    }

    /// Makes this unused block a fast-path block in fork generation `generation`.
    pub(super) fn make_fast_path(&mut self, generation: u32) {
        self.set_range(0, 0);
        self.0.set_stamp(generation);
    }

    #[inline]
    pub(crate) fn class_bytes(&self) -> usize {
        self.0.class_bytes
    }

    #[inline]
    pub(super) fn class(&self) -> Class {
        Class { bytes: self.0.class_bytes, index: self.0.class() }
    }

    /// Returns the `held_bytes` of the memory, read from the cache line that a return touches anyway.
    #[inline(always)]
    pub(super) fn entry_bytes(&self) -> usize {
        self.0.bytes()
    }

    /// Overwrites all of the memory with zeros. No copy may be using it.
    #[allow(unsafe_code)]
    pub(super) fn zero(&mut self) {
        // SAFETY: block-I1, and the caller owns the block. No copy uses it: a return is finished after the last copy (core-I1).
        unsafe { self.memory().start().as_ptr().write_bytes(0, self.class_bytes()) };
    }

    pub(crate) fn copy_fences(&self) -> &CopyFences {
        &self.0.copy_fences
    }

    /// Returns the fences for copies that are recorded through a shared borrow. Ends the fast path of the block.
    #[cfg(feature = "cuda")]
    pub(crate) fn shared_fences(&self) -> &CopyFences {
        self.end_fast_path();
        &self.0.copy_fences
    }

    /// Returns the fences for changes. Ends the fast path of the block.
    pub(crate) fn copy_fences_mut(&mut self) -> &mut CopyFences {
        self.end_fast_path();
        &mut self.0.copy_fences
    }

    /// Ends the fast path of the block: sets another stamp, and closes the block to every shard (block-I2, block-I3).
    fn end_fast_path(&self) {
        self.0.set_stamp(NOT_FAST_PATH);
        self.0.close_to_fast_path();
    }

    /// Sets the row of the block's tag, which lasts until the block is idle again. The return takes the slow path.
    pub(super) fn set_tag_row(&mut self, tag_row: TagRow) {
        self.end_fast_path();
        self.0.tag_row = Some(tag_row);
    }

    /// Removes the row, since no user has the block any more.
    pub(super) fn end_holding(&mut self) {
        if self.0.tag_row.is_some() {
            self.0.tag_row = None;
        }
    }

    /// Charges the block to a partition until the block is idle or released. The return takes the slow path.
    pub(super) fn set_claim(&mut self, claim: Claim) {
        self.end_fast_path();
        self.0.claim = Some(claim);
    }

    pub(super) fn take_claim(&mut self) -> Option<Claim> {
        self.0.claim.take()
    }

    /// Returns whether a miss found the block for its present user, or the block is in flight.
    pub(super) fn is_timed(&self) -> bool {
        self.0.since_us > 0
    }

    /// Returns the number of the head of the wait queue that this block's request has overtaken; 0 if it has overtaken none.
    pub(super) fn overtaken_head(&self) -> u64 {
        self.0.overtaken_head
    }

    /// Records that the first use of the block, or its time in flight, begins at `now_us`.
    pub(super) fn start_timing(&mut self, now_us: u64) {
        self.0.since_us = now_us.saturating_add(1);
    }

    /// Ends the first use or the time in flight, and returns when it began; `None` if a hit began the use.
    #[inline]
    pub(super) fn stop_timing(&mut self) -> Option<u64> {
        std::mem::take(&mut self.0.since_us).checked_sub(1)
    }

    pub(super) fn set_overtaken_head(&mut self, number: u64) {
        self.0.overtaken_head = number;
    }
}
