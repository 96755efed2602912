//! Parts of shared memory as buffers of a pool, so that copies and fences work as for every other buffer.
//!
//! ```text
//!   lend(offset, len) ──▶ PinnedBuf ──copies──▶ in flight ──all fences complete──▶ `returned(offset)`
//! ```
//!
//! Once the lender is dropped and every lent part has been returned, the memory is unpinned and unmapped, and its bytes return to
//! the limit. If the end of a part's copies cannot be determined, the part is never returned and keeps the mapping.
//!
//! - **lend-I1**: a part is lent once at a time. The caller of [`Lender::lend`] is its only user until `returned`.
#![allow(unsafe_code)] // Lends memory to a pool.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use pinpool::{PinnedBuf, PinnedBy, Pool, UserMemory};

use crate::error::Result;
use crate::memory_file::SharedMemory;

/// A function that is called with the offset of a part after the part's last use.
pub(super) type Returned = Box<dyn Fn(&SharedMemory, usize) + Send + Sync>;

/// Lends parts of a mapping.
#[derive(Debug)]
pub(super) struct Lender {
    pool: Pool,
    parts: Arc<Parts>,
}

/// The mapping, shared by the lender and the lent parts.
struct Parts {
    memory: UserMemory<SharedMemory>,
    returned: Returned,
}

impl fmt::Debug for Parts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Parts").field("memory", &self.memory).finish_non_exhaustive()
    }
}

impl Lender {
    /// Pins `memory` with the backend of `pool`, within its limit, and lends parts of it.
    pub(super) fn new(pool: &Pool, memory: SharedMemory, returned: Returned) -> Result<Self> {
        let bytes = NonNull::slice_from_raw_parts(memory.at(0), memory.len());
        // SAFETY: `bytes` are whole pages that stay mapped as long as `memory` (memory-file-I1). They stay pinned until the last
        // reference to `Parts` is dropped, and each lent part has a reference until its copies have completed.
        let memory = unsafe { pool.pin(bytes, memory) }?;
        Ok(Self { pool: pool.clone(), parts: Arc::new(Parts { memory, returned }) })
    }

    pub(super) fn memory(&self) -> &SharedMemory {
        self.parts.memory.owner()
    }

    /// Returns the pool of the lent buffers.
    pub(super) fn pool(&self) -> &Pool {
        &self.pool
    }

    pub(super) fn pinned_by(&self) -> Option<PinnedBy> {
        self.parts.memory.pinned_by()
    }

    /// Lends the `len` bytes at `offset` as a buffer.
    pub(super) fn lend(&self, offset: usize, len: usize) -> Result<PinnedBuf> {
        let parts = self.parts.clone();
        let bytes = NonNull::slice_from_raw_parts(self.memory().at(offset), len);
        let release = move || (parts.returned)(parts.memory.owner(), offset);
        // SAFETY: pages of a file are initialized, and nothing but the caller uses these until `returned` (lend-I1). They are
        // mapped and pinned as long as `parts`, which the `on_release` call drops.
        Ok(unsafe { self.pool.adopt(bytes, self.pinned_by(), release) }?)
    }
}
