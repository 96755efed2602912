//! What a hit needs of its thread: the pools that it used last, and its own shards there.
//!
//! ```text
//!   RECENT   no destructor: read until the thread ends         pool │ shard        pool │ shard
//!                                                                    ▲ raw                ▲ raw
//!   KEPT     has a destructor: one reference for each           Arc<Core>           Arc<Core>
//! ```
//!
//! A get finds the own shard by comparing its pool with `RECENT`, a put by comparing the shard that its buffer came from; so
//! neither counts a reference or computes an index. Two pools, so that a thread that uses both in turn has both at hand. The
//! slow paths fill the entries. A thread that has none takes the slow path, which checks everything.
//!
//! A put gives its buffer away, and with it the buffer's reference to the pool: another thread may take the buffer, release
//! it and close the pool before the put has returned. So a put runs on a reference of its thread. It keeps bookkeeping alone:
//! memory and addresses are released when the pool closes.
//!
//! - **recent-I1**: Each entry of `RECENT` is a pool to which this thread holds a reference, in `KEPT` or in a frame of
//!   [`with_core_alive`] on its stack, and a shard of that pool. An entry changes before the reference goes.
//! - **recent-I2**: In a child of `fork` the entries are cleared before the fork returns, and only pools of this process are
//!   entered, so no short path reaches a pool of a parent.
#![allow(unsafe_code)] // Follows the raw pointers.

use std::cell::Cell;
use std::ptr;
use std::sync::Arc;

use super::block::{Block, BlockBody};
use super::core::Core;
use super::idle::thread_cache::{self, Shard};
use crate::fork;
use crate::size_class::plain_eighths_index;
use crate::sync::process::AtomicBool;

/// Pools at hand.
const POOLS: usize = 2;

struct Recent {
    pool: Cell<*const Core>,
    shard: Cell<*const Shard<BlockBody<Core>>>,
}

impl Recent {
    const fn none() -> Self {
        Self { pool: Cell::new(ptr::null()), shard: Cell::new(ptr::null()) }
    }
}

/// References behind `RECENT`, entry by entry. An empty one is in use by a frame on the stack.
struct Kept {
    pools: [Cell<Option<Arc<Core>>>; POOLS],
    /// The entry that the next other pool replaces.
    next: Cell<usize>,
}

thread_local! {
    static RECENT: [Recent; POOLS] = const { [Recent::none(), Recent::none()] };
    static KEPT: Kept = const { Kept { pools: [const { Cell::new(None) }; POOLS], next: Cell::new(0) } };
}

impl Drop for Kept {
    fn drop(&mut self) {
        // Before the references go (recent-I1). From now on `KEPT` cannot be had, so no entry is filled again.
        clear();
    }
}

fn clear() {
    RECENT.with(|recent| recent.iter().for_each(|entry| entry.pool.set(ptr::null())));
    RECENT.with(|recent| recent.iter().for_each(|entry| entry.shard.set(ptr::null())));
}

impl Core {
    /// A plain idle block for a plain get of `len` bytes, if this pool is at hand and the calling thread's shard has one. Its
    /// length is yet to be set.
    #[inline(always)]
    pub(crate) fn take_at_once(&self, len: usize) -> Option<Block<Self>> {
        // A small closure: a large one would not be inlined, and then each access calls through a pointer.
        let of_pool = |at: &Recent| ptr::eq(at.pool.get(), self).then(|| at.shard.get());
        let shard = RECENT.with(|[first, second]| of_pool(first).or_else(|| of_pool(second)))?;
        // SAFETY: (recent-I1) the entry's pool is alive, so its shard is.
        let shard = unsafe { &*shard };
        // SAFETY: the index of every length is below the number of classes that `AdaptiveIdle` makes its cache with.
        unsafe { shard.take_at_once(plain_eighths_index(len)) }.map(Block::from_entry)
    }

    /// The thread uses this pool: its next gets and puts may take the short path.
    pub(crate) fn enter(self: &Arc<Self>) {
        if position(Arc::as_ptr(self)).is_none() {
            keep(self.clone());
        }
    }
}

/// The entry of `pool`.
fn position(pool: *const Core) -> Option<usize> {
    RECENT.with(|recent| recent.iter().position(|entry| ptr::eq(entry.pool.get(), pool)))
}

/// Puts `block`, on which nothing is recorded, if the shard that it came from is at hand and free.
#[inline(always)]
pub(super) fn put_at_once(block: Block<Core>) -> Result<(), Block<Core>> {
    let [first, second] = RECENT.with(|recent| [recent[0].shard.get(), recent[1].shard.get()]);
    let entry = block.into_entry();
    let shard = if entry.is_of(first) { first } else { second };
    if !entry.is_of(shard) {
        return Err(Block::from_entry(entry));
    }
    // SAFETY: (recent-I1) the shard is not null, so its pool is alive.
    unsafe { &*shard }.put_at_once(entry).map_err(Block::from_entry)
}

/// Passes `block` to `act` with its core, which this thread keeps alive until the end.
pub(super) fn with_core_alive<R>(block: Block<Core>, act: impl FnOnce(&Core, Block<Core>) -> R) -> R {
    let frame = Frame(take_reference(block.owner()));
    act(&frame.0, block)
}

/// The reference of a frame on the stack. Kept by its end, also where the frame unwinds: an entry may rest on it.
struct Frame(Arc<Core>);

impl Drop for Frame {
    fn drop(&mut self) {
        keep(self.0.clone());
    }
}

/// The thread's reference to `core`. Taken out meanwhile: a nested put (a listener that drops a buffer) finds nothing and
/// counts a reference of its own, as does a thread that is ending.
fn take_reference(core: &Arc<Core>) -> Arc<Core> {
    let kept = position(Arc::as_ptr(core)).and_then(|at| KEPT.try_with(|kept| kept.pools[at].take()).ok().flatten());
    // An entry and its reference agree, but for a frame on the stack: compare.
    kept.filter(|kept| Arc::ptr_eq(kept, core)).unwrap_or_else(|| core.clone())
}

/// Keeps a reference to `core`, and `core` at hand.
fn keep(core: Arc<Core>) {
    static REGISTERED: AtomicBool = AtomicBool::new(false);
    let Some(shard) = core.short_path() else { return };
    fork::call_in_children(&REGISTERED, forget_in_child);
    let (pool, shard) = (Arc::as_ptr(&core), ptr::from_ref(shard));
    let replaced = KEPT.try_with(|kept| {
        let at = position(pool).unwrap_or_else(|| kept.next.replace((kept.next.get() + 1) % POOLS));
        // Before the reference that it replaces goes (recent-I1).
        RECENT.with(|recent| {
            recent[at].pool.set(pool);
            recent[at].shard.set(shard);
        });
        kept.pools[at].replace(Some(core))
    });
    // Outside the access, because it may end a pool, whose drop may come here. A thread that is ending keeps nothing.
    drop(replaced);
}

extern "C" fn forget_in_child() {
    clear();
    thread_cache::forget_other_threads();
}
