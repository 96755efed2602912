//! Parts of shared memory as buffers of a pool, so that copies and fences work as for every other buffer.
//!
//! ```text
//!   lend(offset, len) ──▶ PinnedBuf ──copies──▶ in flight ──all fences over──▶ `returned(offset)`
//! ```
//!
//! The mapping is gone, its pin call and its bytes under the limit with it, once the lender is dropped and every part that it
//! lent has come back. A part is never returned, and keeps the mapping, if the end of its copies cannot be determined.
//!
//! - lend-I1: a part is lent once at a time. The caller of [`Lender::lend`] has the part for itself, until `returned`.
#![allow(unsafe_code)] // Lends memory to a pool.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use pinpool::{PinnedBuf, PinnedMemory, Pool};

use crate::error::Result;
use crate::memory_file::SharedMemory;

/// What happens to a part after its last use.
pub(super) type Returned = Box<dyn Fn(&SharedMemory, usize) + Send + Sync>;

/// Lends parts of a mapping.
#[derive(Debug)]
pub(super) struct Lender {
    pool: Pool,
    parts: Arc<Parts>,
}

/// The mapping, until its last user is gone.
struct Parts {
    memory: PinnedMemory<SharedMemory>,
    returned: Returned,
}

impl fmt::Debug for Parts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Parts").field("memory", &self.memory).finish_non_exhaustive()
    }
}

impl Lender {
    /// Pins `memory` as the memory of `pool` is, under its limit, and lends parts of it.
    pub(super) fn new(pool: &Pool, memory: SharedMemory, returned: Returned) -> Result<Self> {
        let bytes = NonNull::slice_from_raw_parts(memory.at(0), memory.len());
        // SAFETY: whole pages that stay mapped as long as `memory` (memory-file-I1). The pin ends with the last of `Parts`, of
        // which each lent part has one until its copies are over.
        let memory = unsafe { pool.pin(bytes, memory) }?;
        Ok(Self { pool: pool.clone(), parts: Arc::new(Parts { memory, returned }) })
    }

    pub(super) fn memory(&self) -> &SharedMemory {
        self.parts.memory.owner()
    }

    /// The pool that the lent buffers are of.
    pub(super) fn pool(&self) -> &Pool {
        &self.pool
    }

    pub(super) fn locked_by(&self) -> &'static str {
        self.parts.memory.pinned_by().unwrap_or("none")
    }

    /// The `len` bytes at `offset` as a buffer.
    pub(super) fn lend(&self, offset: usize, len: usize) -> Result<PinnedBuf> {
        let parts = self.parts.clone();
        let bytes = NonNull::slice_from_raw_parts(self.memory().at(offset), len);
        let release = move || (parts.returned)(parts.memory.owner(), offset);
        // SAFETY: pages of a file are initialised, and these are the caller's alone until `returned` (lend-I1). They are mapped and
        // pinned as long as `parts`, which ends with the call.
        Ok(unsafe { self.pool.adopt(bytes, self.parts.memory.pinned_by().is_some(), release) }?)
    }
}
