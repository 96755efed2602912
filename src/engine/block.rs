//! Memory of one class with the state of its buffer and a reference to its pool. It moves between idle buffers, users
//! and devices.
//!
//! ```text
//!  Block ─▶ Entry (links and coarse time, for the thread cache)
//!             └─ BlockBody: pool (its core), memory, class, buffer state
//! ```
//!
//! Generic over the pool `P`, so that nothing here depends on the pool. Never acquires or releases memory.
//!
//! - **block-I1**: `memory.start()` up to `class_bytes` bytes later is memory that belongs to this block alone, and `first`
//!   is an address in it.
//! - **block-I2**: The stamp of the entry is the fork generation of its pool only while the block is a *fast-path block*: its
//!   memory is from the source, `first` is at the start of it, no copy was begun or recorded, nothing holds or claims the block,
//!   and the process has not forked since. Every call that may change one of these sets another stamp. The slow return makes the
//!   block a fast-path block again. So a hit compares two numbers and skips all checks.
//! - **block-I3**: Only a fast-path block can take the fast path of a return. Taking a block from a shard opens the block to that
//!   shard, and every call that sets another stamp closes it.

use std::ptr::NonNull;
use std::sync::Arc;

use super::cache::thread_cache::{Entry, SpareEntries};
use super::memory::BlockMemory;
use super::meter::owners::Holder;
use crate::in_flight::CopyFences;
use crate::quota::Claim;
use crate::size_class::Class;
use pinpool_os::fork;

/// Memory of one class and its pool. One pointer wide.
///
/// A block carries its own reference to the pool, in use or idle, so a hit touches no reference count. The cycle (the pool
/// keeps idle blocks, which keep the pool) is cut when the pool closes and is drained.
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
    /// Number of the waiting request that this block's request overtook; 0 if there was none.
    passed: u64,
    /// When the block's first use or its time in flight began, in the pool's microseconds plus one; 0 if unknown.
    since: u64,
    /// The record of a tagged or sampled request.
    holder: Option<Holder>,
    /// The claim of the user's partition.
    claim: Option<Claim>,
}

/// The stamp of a block that is not a fast-path block. No fork generation has this number.
pub(super) const NOT_FAST_PATH: u32 = u32::MAX;

/// The address of the first byte of a buffer.
#[derive(Debug, Clone, Copy)]
struct Address(NonNull<u8>);

// SAFETY: an address; what is behind it is reached by the rules of `buffer` alone (block-I1).
#[allow(unsafe_code)]
unsafe impl Send for Address {}

// SAFETY: as above.
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
            passed: 0,
            since: 0,
            holder: None,
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

    /// The pool, and the memory for its release.
    pub(super) fn into_parts(self, spare: &SpareEntries<BlockBody<P>>) -> (Arc<P>, BlockMemory) {
        spare.unwrap(self.0, |body| (body.pool, body.memory))
    }

    #[inline]
    pub(super) fn pool(&self) -> &Arc<P> {
        &self.0.pool
    }

    pub(crate) fn memory(&self) -> &BlockMemory {
        &self.0.memory
    }

    /// The first byte of the buffer.
    #[inline(always)]
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.0.first.0
    }

    /// The length of the buffer.
    #[inline(always)]
    pub(crate) fn len(&self) -> usize {
        self.0.len
    }

    /// A new user requests `len` bytes of this fast-path block.
    #[inline(always)]
    pub(crate) fn begin_fast_path(&mut self, len: usize) {
        debug_assert!(self.0.first.0 == self.0.memory.start() && len <= self.0.class_bytes);
        // Compare first: a loader repeats the same length, and a cache line that is not written stays shared.
        if self.0.len != len {
            self.0.len = len;
        }
    }

    /// A new user requests `len` bytes, `skip_bytes` past the start; both are within the class.
    pub(crate) fn begin(&mut self, skip_bytes: usize, len: usize) {
        if skip_bytes > 0 {
            self.end_fast_path();
        }
        let start = self.0.memory.start();
        // SAFETY: within the block's memory (block-I1), as the caller computed.
        #[allow(unsafe_code)]
        let first = unsafe { start.add(skip_bytes) };
        (self.0.first, self.0.len) = (Address(first), len);
    }

    /// Ends the buffer after its first `len` bytes, if it is longer.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.0.len = self.0.len.min(len);
    }

    /// From the start of the block to the first byte of the buffer.
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
        self.0.is_of(shard)
    }

    /// Makes this unused block a fast-path block in fork generation `generation`.
    pub(super) fn make_fast_path(&mut self, generation: u32) {
        self.begin(0, 0);
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

    /// `held_bytes` of the memory, read from the cache line that a return touches anyway.
    #[inline(always)]
    pub(super) fn entry_bytes(&self) -> usize {
        self.0.bytes()
    }

    /// Overwrites all of the memory with zeros. No copy uses it.
    #[allow(unsafe_code)]
    pub(super) fn zero(&mut self) {
        // SAFETY: block-I1, and the caller owns the block. A return comes after the last copy (core-I1).
        unsafe { self.memory().start().as_ptr().write_bytes(0, self.class_bytes()) };
    }

    pub(crate) fn copy_fences(&self) -> &CopyFences {
        &self.0.copy_fences
    }

    /// For copies that are recorded through a shared borrow. Ends the fast path of the block.
    #[cfg(feature = "cuda")]
    pub(crate) fn shared_fences(&self) -> &CopyFences {
        self.end_fast_path();
        &self.0.copy_fences
    }

    /// Ends the fast path of the block.
    pub(crate) fn copy_fences_mut(&mut self) -> &mut CopyFences {
        self.end_fast_path();
        &mut self.0.copy_fences
    }

    /// Ends the fast path of the block.
    fn end_fast_path(&self) {
        self.0.set_stamp(NOT_FAST_PATH);
        self.0.close_to_fast_path();
    }

    /// Records the block with its user, `holder`, until the block is idle again. Its return takes the slow path.
    pub(super) fn set_holder(&mut self, holder: Holder) {
        self.end_fast_path();
        self.0.holder = Some(holder);
    }

    /// No user has the block any more, and no copy uses it.
    pub(super) fn end_holding(&mut self) {
        if self.0.holder.is_some() {
            self.0.holder = None;
        }
    }

    /// Charges the block to a partition until the block is idle or released. Its return takes the slow path.
    pub(super) fn set_claim(&mut self, claim: Claim) {
        self.end_fast_path();
        self.0.claim = Some(claim);
    }

    pub(super) fn take_claim(&mut self) -> Option<Claim> {
        self.0.claim.take()
    }

    /// Returns whether a miss made the block for its present user, or it is in flight.
    pub(super) fn has_begun_time(&self) -> bool {
        self.0.since > 0
    }

    /// Number of the waiting request that this block's request overtook, if any.
    pub(super) fn passed(&self) -> u64 {
        self.0.passed
    }

    /// The first use of the block, or its time in flight, begins at `now_us`.
    pub(super) fn begin_time(&mut self, now_us: u64) {
        self.0.since = now_us.saturating_add(1);
    }

    /// Ends the first use or the time in flight, and returns when it began; `None` for the use of a hit.
    #[inline]
    pub(super) fn end_time(&mut self) -> Option<u64> {
        std::mem::take(&mut self.0.since).checked_sub(1)
    }

    pub(super) fn set_passed(&mut self, number: u64) {
        self.0.passed = number;
    }
}
