//! The calls of a buffer on its block: copies begin and end, and the block goes back to its pool.
//!
//! ```text
//!   fill ─▶ begin_copy ─▶ enqueue ─▶ put_back_after(fences) ─▶ in flight ─▶ idle
//!     └───────────────────────────▶ put_back ────────────────────────────▶ idle
//!                └─ completion can never be known ─▶ leak
//! ```
//!
//! A plain block goes back by the short path (`recent`), if that is open.

use super::block;
use super::core::Core;
use super::recent;
use super::supply::{BegunCopy, Gate};
use crate::backend::HugeTlb;
use crate::error::{Error, Result};
use crate::in_flight::{FenceKind, Fences};

/// A block of a pool.
pub(crate) type Block = block::Block<Core>;

impl Block {
    /// Whether the memory is page-locked.
    pub(crate) fn is_pinned(&self) -> bool {
        match self.adopted() {
            Some(adopted) => adopted.is_pinned,
            None => self.is_from_source() && self.owner().backing().source().is_pinned(),
        }
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
        let is_kept_from_children = || match self.adopted() {
            // By a driver, as far as the pool can know.
            Some(adopted) => adopted.is_pinned,
            None => {
                let (source, config) = (self.owner().backing().source(), self.owner().config());
                self.is_from_source() && (source.needs_gpu() || config.hugetlb != HugeTlb::Off)
            }
        };
        self.is_forked() && is_kept_from_children()
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

    /// The end of a buffer: by the short path if that is open, else once all recorded copies are over. In a child of `fork`
    /// the block stays where it is.
    #[inline(always)]
    pub(crate) fn end_use(self) {
        recent::put(self);
    }

    /// Ends the use as `end_use` does, by the path that checks everything.
    #[inline(never)]
    pub(super) fn end_use_slowly(mut self) {
        if self.is_forked() {
            std::mem::forget(self);
            return;
        }
        let fences = &mut self.state_mut().copy_fences;
        if fences.is_empty() {
            self.put_back();
        } else {
            let fences = fences.take();
            self.put_back_after(fences);
        }
    }

    /// The put: nothing uses the block any more.
    fn put_back(self) {
        recent::with_core_alive(self, |core, block| {
            core.record_put(&block, false);
            core.put(block);
        });
    }

    /// The put of a plain block, which is recorded already.
    #[inline(never)]
    pub(super) fn put_back_recorded(self) {
        recent::with_core_alive(self, |core, block| core.put(block));
    }

    /// The put, once all `fences` are over.
    pub(crate) fn put_back_after(self, fences: Fences) {
        recent::with_core_alive(self, |core, block| {
            core.record_put(&block, true);
            core.put_after(block, fences);
        });
    }

    /// Never uses the block again: whether a device still uses it cannot be known.
    pub(crate) fn leak(self, error: &Error) {
        recent::with_core_alive(self, |core, block| core.leak(block, error));
    }
}
