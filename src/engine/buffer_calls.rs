//! The calls that a buffer makes on its block: copies begin and end, and the block returns to its pool.
//!
//! ```text
//!   fill ─▶ begin_read ─▶ enqueue ─▶ put_after(fence) ─▶ in flight ─▶ idle
//!     └───────────────────────────▶ put ───────────────────────────▶ idle
//!                └─ completion can never be known ─▶ leak
//! ```
//!
//! `put` is in `pool_core::fast_path`.

use std::sync::{Arc, Weak};

use super::pool_core::{Block, BorrowedReference, PoolCore};
use crate::backend::{HugeTlb, PinnedBy};
use crate::copy::CopyEndListener;
use crate::error::{Error, Result};
use crate::in_flight::SharedFence;

impl Block {
    pub(crate) fn pinned_by(&self) -> Option<PinnedBy> {
        match self.memory().adopted() {
            Some(adopted) => adopted.pinned_by,
            None => self.pool().memory().source().pinned_by().filter(|_| self.memory().is_from_source()),
        }
    }

    pub(crate) fn numa_node(&self) -> Option<u32> {
        self.pool().memory().source().numa_node().filter(|_| self.memory().is_from_source())
    }

    /// Returns whether this process is a forked child of the process that owns the memory.
    #[inline]
    pub(crate) fn is_forked(&self) -> bool {
        self.pool().is_forked()
    }

    /// Returns whether this process is a forked child in which the memory may be unmapped: a child does not inherit memory
    /// that a GPU driver pinned, or explicit huge pages.
    #[inline]
    pub(crate) fn is_inaccessible(&self) -> bool {
        let is_kept_from_children = || match self.memory().adopted() {
            Some(adopted) => adopted.pinned_by == Some(PinnedBy::Driver),
            None => {
                let (source, config) = (self.pool().memory().source(), self.pool().config());
                self.memory().is_from_source() && (source.needs_gpu() || config.hugetlb != HugeTlb::Off)
            }
        };
        self.is_forked() && is_kept_from_children()
    }

    pub(crate) fn check_process(&self) -> Result<()> {
        self.pool().check_process()
    }

    /// Prepares a copy from the buffer; call it before each such copy. Waits for the copies into the buffer. Fails in a forked
    /// child, or if a copy into the buffer failed, since its bytes are unknown then.
    pub(crate) fn begin_read(&self) -> Result<()> {
        self.check_process()?;
        let fences = self.copy_fences();
        if fences.was_used() { fences.wait_for_writes(None) } else { Ok(()) }
    }

    /// Returns a buffer that a copy consumed. The copy ends with `fence`.
    pub(crate) fn put_after(mut self, fence: SharedFence) {
        let mut fences = self.copy_fences_mut().take();
        fences.push(fence);
        BorrowedReference::take(&self).put_after(self, fences);
    }

    /// Returns what a user notifies of the end of the copy that consumed the block: its pool.
    pub(crate) fn copy_end_listener(&self) -> Weak<dyn CopyEndListener> {
        Arc::<PoolCore>::downgrade(self.pool())
    }

    /// Never uses the block again, because the pool cannot know whether a device still uses it.
    pub(crate) fn leak(self, error: &Error) {
        BorrowedReference::take(&self).quarantine_or_leak(self, None, error);
    }
}
