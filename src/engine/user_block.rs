//! The calls of a buffer on its block: copies begin and end, and the block goes back to its pool.
//!
//! ```text
//!   fill ─▶ begin_copy ─▶ enqueue ─▶ put_back_after(fences) ─▶ in flight ─▶ idle
//!     └───────────────────────────▶ put_back ────────────────────────────▶ idle
//!                └─ completion can never be known ─▶ leak
//! ```
//!
//! Owns one reference per thread that keeps the engine's bookkeeping alive. A put gives its block away, and with it the
//! block's reference to the pool: another thread may take the block, release it and close the pool before the put has
//! returned. So each thread keeps a reference to the pool that it last put into. As long as that pool is the same, a put
//! compares two pointers and changes no count. The reference keeps bookkeeping alone: memory and addresses are released
//! when the pool closes.

use std::cell::Cell;
use std::sync::Arc;

use super::block;
use super::core::Core;
use super::supply::{BegunCopy, Gate};
use crate::error::{Error, Result};
use crate::in_flight::{FenceKind, Fences};

/// A block of a pool.
pub(crate) type Block = block::Block<Core>;

thread_local! {
    static LAST_CORE: Cell<Option<Arc<Core>>> = const { Cell::new(None) };
}

/// Passes `block` to `act` with its core, which this thread keeps alive until the end.
#[inline]
fn with_core_alive<R>(block: Block, act: impl FnOnce(&Core, Block) -> R) -> R {
    // Taken out meanwhile: a nested put (a listener that drops a buffer) finds nothing and counts a reference of its own,
    // as does a thread that is ending.
    let last = LAST_CORE.try_with(Cell::take).ok().flatten();
    let core = last.filter(|last| Arc::ptr_eq(last, block.owner())).unwrap_or_else(|| block.owner().clone());
    let result = act(&core, block);
    let _ = LAST_CORE.try_with(|last| last.set(Some(core)));
    result
}

impl Block {
    /// Whether the memory is page-locked.
    pub(crate) fn is_pinned(&self) -> bool {
        self.is_from_source() && self.owner().backing().source().is_pinned()
    }

    pub(crate) fn numa_node(&self) -> Option<u32> {
        self.owner().backing().source().numa_node().filter(|_| self.is_from_source())
    }

    /// Whether this process is a child of the one that owns the memory.
    #[inline]
    pub(crate) fn is_forked(&self) -> bool {
        self.owner().is_forked()
    }

    /// Whether this is a child process, which a GPU's driver may not have given the memory to.
    #[inline]
    pub(crate) fn is_inaccessible(&self) -> bool {
        self.is_forked() && self.is_from_source() && self.owner().backing().source().needs_gpu()
    }

    pub(crate) fn check_process(&self) -> Result<()> {
        self.owner().check_process()
    }

    /// How the end of a copy that takes the block is best learnt.
    pub(crate) fn fence_kind(&self) -> FenceKind {
        self.owner().fence_kind()
    }

    /// Call before each copy is enqueued. May wait, while memory is released to a driver that would wait for the copy. `None`
    /// where no release waits for copies.
    #[inline]
    pub(crate) fn begin_copy(&self) -> Option<BegunCopy<'_>> {
        self.owner().backing().gate().and_then(Gate::begin_copy)
    }

    /// The put: nothing uses the block any more.
    #[inline]
    pub(crate) fn put_back(self) {
        with_core_alive(self, Core::put);
    }

    /// The put, once all `fences` are over.
    pub(crate) fn put_back_after(self, fences: Fences) {
        with_core_alive(self, |core, block| core.put_after(block, fences));
    }

    /// Never uses the block again: whether a device still uses it cannot be known.
    pub(crate) fn leak(self, error: &Error) {
        with_core_alive(self, |core, block| core.leak(block, error));
    }
}
