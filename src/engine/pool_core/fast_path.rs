//! The fast path: hits and returns in a shard that the calling thread has an entry for, and these entries.
//!
//! ```text
//!   ENTRIES     no destructor: read until the thread ends         pool │ shard        pool │ shard
//!                                                                    ▲ raw                ▲ raw
//!   REFERENCES  has a destructor: one reference for each         Arc<PoolCore>        Arc<PoolCore>
//! ```
//!
//! A hit compares its pool with the pools in `ENTRIES`. A return compares the shard that may keep its buffer (block-I3) with the
//! shards in `ENTRIES`. So neither counts a reference or looks up a shard. There are two entries, for a thread that alternates
//! between two pools. If another thread took the buffer, its return finds the pool through the block, and pushes the block to
//! the shard of the thread that took it, where the next hit takes it. The slow paths fill the entries and check everything.
//!
//! A pool that zeroes, records or samples, or has no shards (`tensorflow`), uses the slow paths and never has an entry.
//!
//! A return gives up its buffer's reference to the pool: before the return has completed, another thread may take the buffer,
//! release it and end the pool. So a return relies on a reference that its thread holds. That reference keeps only
//! bookkeeping alive: memory and addresses are released when the pool ends.
//!
//! - **fast-path-I1**: Each entry of `ENTRIES` in use names a pool to which this thread holds a reference, in `REFERENCES` or in
//!   a [`BorrowedReference`] on its stack, and a shard of that pool. The entry changes before that reference is dropped.
//! - **fast-path-I2**: In a forked child the entries are cleared before the fork returns, and only pools of this
//!   process are entered, so no fast path reaches a pool of the parent.
#![allow(unsafe_code)] // Follows the raw pointers.

use std::cell::Cell;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::ptr;
use std::sync::Arc;

use super::PoolCore;
use crate::engine::block::{Block, BlockBody};
use crate::engine::cache::thread_cache::Shard;
use crate::policy;
use crate::size_class::plain_eighths_index;
use pinpool_os::fork;
use pinpool_os::sync::unmodeled::AtomicBool;

/// Number of pools that a thread has entries for.
const ENTRY_COUNT: usize = 2;

/// A thread's shard of a pool.
type OwnShard = Shard<BlockBody<PoolCore>>;

struct ThreadEntry {
    pool: Cell<*const PoolCore>,
    shard: Cell<*const OwnShard>,
}

/// The shard of an unused entry. It is neither null, as in a block that is closed to the fast path, nor the address of any
/// shard.
const NO_SHARD: *const OwnShard = ptr::without_provenance(1);

impl ThreadEntry {
    const fn none() -> Self {
        Self { pool: Cell::new(ptr::null()), shard: Cell::new(NO_SHARD) }
    }
}

/// The references that the entries of `ENTRIES` rely on, in the same order. `None` if the entry is unused, or while a
/// [`BorrowedReference`] on the stack has the reference.
struct References {
    pools: [Cell<Option<Arc<PoolCore>>>; ENTRY_COUNT],
    /// Index of the entry that is replaced when another pool is entered.
    next: Cell<usize>,
}

thread_local! {
    static ENTRIES: [ThreadEntry; ENTRY_COUNT] = const { [const { ThreadEntry::none() }; ENTRY_COUNT] };
    static REFERENCES: References = const { References { pools: [const { Cell::new(None) }; ENTRY_COUNT], next: Cell::new(0) } };
}

impl Drop for References {
    fn drop(&mut self) {
        // The entries change before the references are dropped (fast-path-I1). `REFERENCES` is inaccessible from now on, so no
        // entry is filled again.
        clear_entries();
    }
}

extern "C" fn clear_entries() {
    ENTRIES.with(|entries| entries.iter().for_each(|entry| entry.pool.set(ptr::null())));
    ENTRIES.with(|entries| entries.iter().for_each(|entry| entry.shard.set(NO_SHARD)));
}

impl PoolCore {
    /// Returns the calling thread's shard, if this pool is in the thread's first entry.
    #[inline(always)]
    pub(crate) fn thread_shard(&self) -> Option<ThreadShard<'_>> {
        // SAFETY: the pool is alive as long as it is borrowed.
        unsafe { Self::shard_of(self, 0, self) }
    }

    /// Returns the calling thread's shard, if the pool at `address` is in the entry `index`.
    ///
    /// # Safety
    ///
    /// `address` must not be null: an unused entry contains null, so it would match, and has no shard. If there is a pool at
    /// `address`, it must live as long as its `holder`.
    #[inline(always)]
    pub(crate) unsafe fn shard_of<T>(address: *const Self, index: usize, _holder: &T) -> Option<ThreadShard<'_>> {
        // A small closure: a large one would not be inlined, and then each access calls through a pointer.
        let (pool, shard) = ENTRIES.with(|entries| (entries[index].pool.get(), entries[index].shard.get()));
        // SAFETY: (fast-path-I1) `address` is not null, so the entry is in use and its pool is alive. It is the pool at `address`,
        // so it lives, with its shard, as long as the holder is borrowed (the caller's contract).
        ptr::eq(pool, address).then(|| ThreadShard(unsafe { &*shard }))
    }

    /// Serves a request of `len` bytes that the first entry did not serve: takes a block from this pool's shard, if this pool is in
    /// the second entry, or a block that another thread has returned to this thread's shard.
    pub(crate) fn take_by_second_entry_or_remote(&self, len: usize) -> Option<Block<PoolCore>> {
        let take_remote =
            |shard: ThreadShard<'_>| shard.0.take_remote_fast(plain_eighths_index(len)).map(Block::from_entry);
        match self.thread_shard() {
            Some(first) => take_remote(first),
            None => {
                // SAFETY: the pool is alive as long as it is borrowed.
                let second = unsafe { Self::shard_of(self, 1, self) }?;
                second.take(len).or_else(|| take_remote(second))
            }
        }
    }

    /// Returns whether the calling thread may use the fast path of this pool now.
    pub(crate) fn has_fast_path(&self) -> bool {
        self.fast_shard().is_some_and(|shard| !shard.requires_slow_path())
    }

    /// Enters this pool for the calling thread, if the pool may use the fast path.
    pub(crate) fn enter_for_thread(self: &Arc<Self>) {
        if entry_of(Arc::as_ptr(self)).is_none() && self.fast_shard().is_some() {
            store_reference(self.clone());
        }
    }
}

/// Returns the index of the entry of `pool`, if there is one.
fn entry_of(pool: *const PoolCore) -> Option<usize> {
    ENTRIES.with(|entries| entries.iter().position(|entry| ptr::eq(entry.pool.get(), pool)))
}

/// The calling thread's shard of a pool.
#[derive(Clone, Copy)]
pub(crate) struct ThreadShard<'a>(&'a OwnShard);

impl ThreadShard<'_> {
    /// Takes an idle fast-path block for a request for `len` bytes without options, if the shard has one. The caller sets the
    /// block's length.
    #[inline(always)]
    pub(crate) fn take(self, len: usize) -> Option<Block<PoolCore>> {
        // SAFETY: the index of every length is below the number of classes of the pool's cache.
        unsafe { self.0.take_fast(plain_eighths_index(len)) }.map(Block::from_entry)
    }

    /// Puts `block` into the shard. Fails with the block if the shard cannot take it by the fast path now.
    ///
    /// # Safety
    ///
    /// `block` must be open to the shard.
    #[inline(always)]
    unsafe fn put(self, block: Block<PoolCore>) -> Result<(), Block<PoolCore>> {
        // SAFETY: the block, and so its entry, is open to the shard (the caller's contract).
        unsafe { self.0.put_fast(block.into_entry()) }.map_err(Block::from_entry)
    }
}

impl Block<PoolCore> {
    /// Puts the buffer back: into the shard in an entry that the buffer is open to, or into the shard of another thread that
    /// took the buffer. If the shard is not free or the return has more to do, calls [`put_slow`](Self::put_slow).
    #[inline(always)]
    pub(crate) fn put(self) {
        // `put_by_second_entry_or_remote` is a tail call, so this function need not save registers for it.
        // SAFETY: the shard is used by `put` alone, which changes no entry.
        let Some(shard) = (unsafe { shard_for(&self, 0) }) else { return put_by_second_entry_or_remote(self) };
        // SAFETY: the block is open to the shard that `shard_for` returns.
        if let Err(block) = unsafe { shard.put(self) } {
            block.put_slow();
        }
    }
}

/// Puts back a block that is not open to the shard in the first entry. Tries the shard in the second entry, then another thread's
/// shard, then the slow path.
#[inline(never)]
fn put_by_second_entry_or_remote(block: Block<PoolCore>) {
    // SAFETY: as in `Block::put`.
    let outcome = match unsafe { shard_for(&block, 1) } {
        // SAFETY: the block is open to the shard that `shard_for` returns.
        Some(shard) => unsafe { shard.put(block) },
        None => put_remote(block),
    };
    if let Err(block) = outcome {
        block.put_slow();
    }
}

/// Puts `block`, which another thread took, into that thread's shard, if the pool has an entry and the return has nothing else to
/// do. Writes only the header of the block, which is on a cache line that the next hit needs anyway.
fn put_remote(block: Block<PoolCore>) -> Result<(), Block<PoolCore>> {
    let pool = Arc::as_ptr(block.pool());
    let Some(index) = entry_of(pool).filter(|_| block.is_fast_path()) else { return Err(block) };
    // SAFETY: (fast-path-I1) the pool has an entry, so it is alive until this thread changes its entry.
    let core = unsafe { &*pool };
    let for_arena = policy::goes_to_arena(block.entry_bytes(), || core.sizes_vary());
    if for_arena || core.has_waiters() || core.slow_path_flag.is_for_shared_limit() {
        return Err(block);
    }
    core.idle.put_remote(block.into_entry()).map_err(Block::from_entry)?;
    if core.has_waiters() {
        wake_waiters(core, index);
    }
    Ok(())
}

/// Wakes the head of the wait queue of `core`, which is in the entry `index`.
#[cold]
fn wake_waiters(core: &PoolCore, index: usize) {
    // A waker is user code: it may return a buffer of another pool, which then replaces the entry. If the reference is not in
    // `REFERENCES`, a `BorrowedReference` further up this stack has it.
    let _kept = kept_reference(index).map(|core| BorrowedReference(ManuallyDrop::new(core)));
    core.wake_waiters();
}

/// Returns the shard in the entry `index`, if it may keep `block` by the fast path.
///
/// # Safety
///
/// This thread must change no entry while the shard is in use.
#[inline(always)]
unsafe fn shard_for<'a>(block: &Block<PoolCore>, index: usize) -> Option<ThreadShard<'a>> {
    let shard = ENTRIES.with(|entries| entries[index].shard.get());
    let open = block.is_open_to(shard) && !policy::goes_to_arena(block.entry_bytes(), || sizes_vary(index));
    // SAFETY: (fast-path-I1) the block is open to the shard, so the shard is not `NO_SHARD` and the entry is in use. Its pool
    // is alive until this thread changes the entry.
    open.then(|| ThreadShard(unsafe { &*shard }))
}

/// Returns whether large buffers of the pool in the entry `index` return to the arena, by the slow path (policy-R3). Costs one
/// load.
#[inline(always)]
fn sizes_vary(index: usize) -> bool {
    let pool = ENTRIES.with(|entries| entries[index].pool.get());
    // SAFETY: (fast-path-I1) the pointer is null, or the pool is alive.
    unsafe { pool.as_ref() }.is_some_and(PoolCore::sizes_vary)
}

/// A thread's reference to the pool of a block. Its drop returns the reference to `REFERENCES`, even while the thread unwinds,
/// since an entry of `ENTRIES` may rely on it.
pub(in crate::engine) struct BorrowedReference(ManuallyDrop<Arc<PoolCore>>);

impl BorrowedReference {
    /// Takes the thread's reference to the pool of `block` out of `REFERENCES`, until the drop. A nested return (a listener
    /// that drops a buffer) finds no reference there and makes another, as does a thread that is exiting.
    pub(in crate::engine) fn take(block: &Block<PoolCore>) -> Self {
        let core = block.pool();
        // The reference that the entry relies on may be in use further up the stack, with a reference to another pool in its
        // place, so compare.
        let kept = entry_of(Arc::as_ptr(core)).and_then(kept_reference).filter(|kept| Arc::ptr_eq(kept, core));
        Self(ManuallyDrop::new(kept.unwrap_or_else(|| core.clone())))
    }
}

impl Deref for BorrowedReference {
    type Target = PoolCore;

    fn deref(&self) -> &PoolCore {
        &self.0
    }
}

impl Drop for BorrowedReference {
    fn drop(&mut self) {
        // SAFETY: the value is being dropped, so nothing uses the field again.
        store_reference(unsafe { ManuallyDrop::take(&mut self.0) });
    }
}

/// Takes the reference that the entry `index` relies on out of `REFERENCES`.
fn kept_reference(index: usize) -> Option<Arc<PoolCore>> {
    REFERENCES.try_with(|references| references.pools[index].take()).ok().flatten()
}

/// Stores the reference `core` in `REFERENCES`, and enters its pool, if the pool may use the fast path. Otherwise drops `core`.
fn store_reference(core: Arc<PoolCore>) {
    static REGISTERED: AtomicBool = AtomicBool::new(false);
    if let Some(index) = entry_of(Arc::as_ptr(&core)) {
        // The pool has an entry already. A replaced reference is dropped outside the access, as below.
        drop(REFERENCES.try_with(|references| references.pools[index].replace(Some(core))));
        return;
    }
    let Some(shard) = core.fast_shard().filter(|_| !core.is_forked()) else { return };
    // SAFETY: the handler only stores to thread-locals without a destructor.
    unsafe { fork::call_in_children(&REGISTERED, clear_entries) };
    let (pool, shard) = (Arc::as_ptr(&core), ptr::from_ref(shard));
    let replaced = REFERENCES.try_with(|references| {
        let index = references.next.replace((references.next.get() + 1) % ENTRY_COUNT);
        // The entry changes before the reference that it relied on is dropped (fast-path-I1).
        ENTRIES.with(|entries| {
            entries[index].pool.set(pool);
            entries[index].shard.set(shard);
        });
        references.pools[index].replace(Some(core))
    });
    // Outside the access, because the drop may be the last of an ended pool and drop user code, such as a custom source, that
    // calls this function. An exiting thread keeps no reference.
    drop(replaced);
}
