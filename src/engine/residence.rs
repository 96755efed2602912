//! Keeps a pool's bookkeeping alive while a thread is inside it, without a shared count on each put.
//!
//! A put gives its block away, and with it the block's reference to the pool: another thread may take the block, release
//! it and close the pool while the first is still on its way out of the store. So each thread keeps one reference of its
//! own to the pool that it last put into; as long as that pool is the same, a put compares two pointers and counts
//! nothing. What lingers with a thread is bookkeeping alone: memory and addresses go when the pool closes.

use std::cell::Cell;
use std::sync::Arc;

use super::block::Block;
use super::core::Core;

thread_local! {
    static RESIDENT: Cell<Option<Arc<Core>>> = const { Cell::new(None) };
}

/// Gives `block` to `act`, with its pool, which this thread holds until the end.
#[inline]
pub(super) fn inside<R>(block: Block, act: impl FnOnce(&Core, Block) -> R) -> R {
    // Taken out meanwhile: a put inside a put (a listener that drops a buffer) finds nothing and counts one of its own. So
    // does a thread that is ending.
    let resident = RESIDENT.try_with(Cell::take).ok().flatten();
    let kept = resident.filter(|last| Arc::ptr_eq(last, block.core())).unwrap_or_else(|| block.core().clone());
    let result = act(&kept, block);
    let _ = RESIDENT.try_with(|resident| resident.set(Some(kept)));
    result
}
