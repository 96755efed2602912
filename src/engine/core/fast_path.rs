//! The fast path: hits and returns in a shard that the thread has cached, and that cache.
//!
//! ```text
//!   CACHED      no destructor: read until the thread ends         pool │ shard        pool │ shard
//!                                                                    ▲ raw                ▲ raw
//!   REFERENCES  has a destructor: one reference for each         Arc<Core>            Arc<Core>
//! ```
//!
//! A hit compares its pool with the pools in `CACHED`, and a return compares the shard that may keep its buffer (block-I3) with
//! the shards. So neither counts a reference or computes an index. There are two entries, for a thread that alternates between
//! two pools. If another thread took the buffer, its return finds the pool by the block, and pushes the block to the shard of
//! that thread, where the next hit takes it. The slow paths fill the entries and check everything.
//!
//! A pool that records or samples uses the slow paths and is never cached.
//!
//! A return gives up its buffer's reference to the pool: another thread may take the buffer, release it and close the pool before
//! the return has completed. So a return uses a reference of its thread. That reference keeps only bookkeeping alive: memory and
//! addresses are released when the pool closes.
//!
//! - **fast-path-I1**: Each entry of `CACHED` is a pool to which this thread holds a reference, in `REFERENCES` or in a
//!   [`KeptCore`] on its stack, and a shard of that pool. An entry changes before the reference is dropped.
//! - **fast-path-I2**: In a child of `fork` the entries are cleared before the fork returns, and only pools of this process are
//!   entered, so no fast path reaches a pool of a parent.
#![allow(unsafe_code)] // Follows the raw pointers.

use std::cell::Cell;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::ptr;
use std::sync::Arc;

use super::Core;
use crate::engine::block::{Block, BlockBody};
use crate::engine::cache::thread_cache::Shard;
use crate::policy;
use crate::size_class::plain_eighths_index;
use pinpool_os::fork;
use pinpool_os::sync::process::AtomicBool;

/// Cached pools.
const POOLS: usize = 2;

/// A thread's shard of a pool.
type OwnShard = Shard<BlockBody<Core>>;

struct CachedPool {
    pool: Cell<*const Core>,
    shard: Cell<*const OwnShard>,
}

/// The shard of no pool: neither null, as in a block that is closed to the fast path, nor the address of any shard.
const NO_SHARD: *const OwnShard = ptr::without_provenance(1);

impl CachedPool {
    const fn none() -> Self {
        Self { pool: Cell::new(ptr::null()), shard: Cell::new(NO_SHARD) }
    }
}

/// The references behind `CACHED`, entry by entry. An empty one is in a [`KeptCore`] on the stack.
struct References {
    pools: [Cell<Option<Arc<Core>>>; POOLS],
    /// The entry that the next other pool replaces.
    next: Cell<usize>,
}

thread_local! {
    static CACHED: [CachedPool; POOLS] = const { [const { CachedPool::none() }; POOLS] };
    static REFERENCES: References = const { References { pools: [const { Cell::new(None) }; POOLS], next: Cell::new(0) } };
}

impl Drop for References {
    fn drop(&mut self) {
        // Before the references are dropped (fast-path-I1). `REFERENCES` is inaccessible from now on, so no entry is filled
        // again.
        clear();
    }
}

extern "C" fn clear() {
    CACHED.with(|cached| cached.iter().for_each(|entry| entry.pool.set(ptr::null())));
    CACHED.with(|cached| cached.iter().for_each(|entry| entry.shard.set(NO_SHARD)));
}

impl Core {
    /// The calling thread's shard, if this pool is its first cached pool.
    #[inline(always)]
    pub(crate) fn cached_shard(&self) -> Option<CachedShard<'_>> {
        // SAFETY: alive as long as it is borrowed.
        unsafe { Self::shard_of(self, 0, self) }
    }

    /// The calling thread's shard, if the pool at this address is cached at `at`.
    ///
    /// # Safety
    ///
    /// A pool at this address, if there is one, lives as long as its `owner`.
    #[inline(always)]
    pub(crate) unsafe fn shard_of<T>(address: *const Self, at: usize, _owner: &T) -> Option<CachedShard<'_>> {
        // A small closure: a large one would not be inlined, and then each access calls through a pointer.
        let (pool, shard) = CACHED.with(|cached| (cached[at].pool.get(), cached[at].shard.get()));
        // SAFETY: (fast-path-I1) the entry's pool is alive, so its shard is as long as the owner is borrowed.
        ptr::eq(pool, address).then(|| CachedShard(unsafe { &*shard }))
    }

    /// A block for a request of `len` bytes that missed in the first cached pool: from this pool if it is the second one, or a
    /// block that another thread has returned to this thread's shard.
    pub(crate) fn take_remote_or_second(&self, len: usize) -> Option<Block<Core>> {
        let take_remote =
            |shard: CachedShard<'_>| shard.0.take_remote_fast(plain_eighths_index(len)).map(Block::from_entry);
        match self.cached_shard() {
            Some(first) => take_remote(first),
            None => {
                // SAFETY: as above.
                let second = unsafe { Self::shard_of(self, 1, self) }?;
                second.take(len).or_else(|| take_remote(second))
            }
        }
    }

    /// Returns whether the calling thread may use the fast path.
    pub(crate) fn has_fast_path(&self) -> bool {
        self.fast_shard().is_some_and(|shard| !shard.requires_slow_path())
    }

    /// Caches this pool for the calling thread.
    pub(crate) fn enter(self: &Arc<Self>) {
        if position(Arc::as_ptr(self)).is_none() && self.fast_shard().is_some() {
            keep(self.clone());
        }
    }
}

/// The entry of `pool`.
fn position(pool: *const Core) -> Option<usize> {
    CACHED.with(|cached| cached.iter().position(|entry| ptr::eq(entry.pool.get(), pool)))
}

/// The calling thread's shard of a pool.
#[derive(Clone, Copy)]
pub(crate) struct CachedShard<'a>(&'a OwnShard);

impl CachedShard<'_> {
    /// An idle fast-path block for a request for `len` bytes without options, if the shard has one. The caller sets the
    /// block's length.
    #[inline(always)]
    pub(crate) fn take(self, len: usize) -> Option<Block<Core>> {
        // SAFETY: the index of every length is below the number of classes of the pool's cache.
        unsafe { self.0.take_fast(plain_eighths_index(len)) }.map(Block::from_entry)
    }

    /// Returns `block`, which is open to the shard, to the shard if that is free.
    #[inline(always)]
    fn put(self, block: Block<Core>) -> Result<(), Block<Core>> {
        self.0.put_fast(block.into_entry()).map_err(Block::from_entry)
    }
}

impl Block<Core> {
    /// Returns the buffer: by the fast path if the shard that it came from is cached and free, else by
    /// [`put_slow`](Self::put_slow).
    #[inline(always)]
    pub(crate) fn put(self) {
        // A tail call: a hit saves no registers for it.
        // SAFETY: the shard is used by `put` alone, which changes no entry.
        let Some(shard) = (unsafe { shard_for(&self, 0) }) else { return put_remote_or_second(self) };
        if let Err(block) = shard.put(self) {
            block.put_slow();
        }
    }
}

/// Returns `block`, which is not of the first cached shard, to the second one, to another thread's shard, or by the slow path.
#[inline(never)]
fn put_remote_or_second(block: Block<Core>) {
    // SAFETY: as in `Block::put`.
    let kept = match unsafe { shard_for(&block, 1) } {
        Some(shard) => shard.put(block),
        None => put_remote(block),
    };
    if let Err(block) = kept {
        block.put_slow();
    }
}

/// Returns `block`, which another thread took, to that thread's shard, if its pool is cached and nothing else remains to be done.
/// Writes only the header of the block; the next hit needs its cache line anyway.
fn put_remote(block: Block<Core>) -> Result<(), Block<Core>> {
    let pool = Arc::as_ptr(block.pool());
    let Some(at) = position(pool).filter(|_| block.is_fast_path()) else { return Err(block) };
    // SAFETY: (fast-path-I1) the cached pool is alive; it is until the next change of its entry, by this thread.
    let core = unsafe { &*pool };
    let for_arena = policy::goes_to_arena(block.entry_bytes(), || core.is_varied());
    if for_arena || core.has_waiters() || core.slow_path_flag.is_for_shared_limit() {
        return Err(block);
    }
    core.idle.put_remote(block.into_entry()).map_err(Block::from_entry)?;
    if core.has_waiters() {
        wake_waiters(core, at);
    }
    Ok(())
}

/// Wakes the head of the wait queue of `core`, which is cached at `at`.
#[cold]
fn wake_waiters(core: &Core, at: usize) {
    // A waker is user code: it may return a buffer of another pool, which then replaces the entry. If the reference is not here,
    // a `KeptCore` further up this stack has it.
    let _kept = kept_reference(at).map(|core| KeptCore(ManuallyDrop::new(core)));
    core.wake_waiters();
}

/// The shard that is cached at `at`, if it may keep `block` by the fast path.
///
/// # Safety
///
/// This thread changes no entry while the shard is in use.
#[inline(always)]
unsafe fn shard_for<'a>(block: &Block<Core>, at: usize) -> Option<CachedShard<'a>> {
    let shard = CACHED.with(|cached| cached[at].shard.get());
    let open = block.is_open_to(shard) && !policy::goes_to_arena(block.entry_bytes(), || is_varied(at));
    // SAFETY: (fast-path-I1) a block's shard is not `NO_SHARD`, so the pool of the entry is alive, until this thread changes the
    // entry.
    open.then(|| CachedShard(unsafe { &*shard }))
}

/// Returns whether large buffers of a cached pool go to the arena, by the slow path (policy-R3). Costs one load.
#[inline(always)]
fn is_varied(at: usize) -> bool {
    let pool = CACHED.with(|cached| cached[at].pool.get());
    // SAFETY: (fast-path-I1) null, or a pool that is alive.
    unsafe { pool.as_ref() }.is_some_and(Core::is_varied)
}

/// The pool of a block, which a thread keeps alive until the drop. The drop returns the reference to `REFERENCES`, also while the
/// thread unwinds, since an entry may depend on it.
pub(in crate::engine) struct KeptCore(ManuallyDrop<Arc<Core>>);

impl KeptCore {
    /// Takes the thread's reference to the pool of `block` until the drop. A nested return (a listener that drops a buffer) finds
    /// none and counts its own reference, as does an exiting thread.
    pub(in crate::engine) fn take(block: &Block<Core>) -> Self {
        let core = block.pool();
        // The reference of an entry may be in use further up the stack, with a reference to another pool in its place, so
        // compare.
        let kept = position(Arc::as_ptr(core)).and_then(kept_reference).filter(|kept| Arc::ptr_eq(kept, core));
        Self(ManuallyDrop::new(kept.unwrap_or_else(|| core.clone())))
    }
}

impl Deref for KeptCore {
    type Target = Core;

    fn deref(&self) -> &Core {
        &self.0
    }
}

impl Drop for KeptCore {
    fn drop(&mut self) {
        // SAFETY: the value ends here, so nothing uses the field again.
        keep(unsafe { ManuallyDrop::take(&mut self.0) });
    }
}

/// Takes the thread's reference behind the entry at `at`.
fn kept_reference(at: usize) -> Option<Arc<Core>> {
    REFERENCES.try_with(|references| references.pools[at].take()).ok().flatten()
}

/// Keeps a reference to `core`, and caches `core`.
fn keep(core: Arc<Core>) {
    static REGISTERED: AtomicBool = AtomicBool::new(false);
    if let Some(at) = position(Arc::as_ptr(&core)) {
        // Already cached. Dropped outside the access, as below.
        drop(REFERENCES.try_with(|references| references.pools[at].replace(Some(core))));
        return;
    }
    let Some(shard) = core.fast_shard().filter(|_| !core.is_forked()) else { return };
    fork::call_in_children(&REGISTERED, clear);
    let (pool, shard) = (Arc::as_ptr(&core), ptr::from_ref(shard));
    let replaced = REFERENCES.try_with(|references| {
        let at = references.next.replace((references.next.get() + 1) % POOLS);
        // Before the reference that it replaces is dropped (fast-path-I1).
        CACHED.with(|cached| {
            cached[at].pool.set(pool);
            cached[at].shard.set(shard);
        });
        references.pools[at].replace(Some(core))
    });
    // Outside the access, because it may end a pool, and the pool's drop may come here. An exiting thread keeps nothing.
    drop(replaced);
}
