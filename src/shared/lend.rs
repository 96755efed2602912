//! Parts of shared memory as buffers of a pool, so that copies and their fences are those of every buffer.
//!
//! ```text
//!   lend(offset, len) ──▶ PinnedBuf ──copies──▶ in flight ──all fences over──▶ `returned(offset)`
//! ```
//!
//! The pool is one of its own that keeps nothing idle (preset `tensorflow`, a limit of 0): each get is an acquisition of this
//! source, and each put, once its copies are over, a release. Memory whose copies cannot be known to be over is not released, and then the mapping
//! stays until the process ends.
//!
//! - lend-I1: a part is lent once at a time. The caller of [`Lender::lend`] has the part for itself, until `returned`.
#![allow(unsafe_code)] // Implements the unsafe `Source`.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::memory_file::{PageLock, SharedMemory};
use crate::backend::{Backend, PAGE_BYTES, Region, Source};
use crate::buffer::PinnedBuf;
use crate::config::{Ceiling, OnFull, Preset};
use crate::engine::{Core, OutsideClaim, Wanted};
use crate::error::{Result, SourceError};
use crate::pool::Pool;
use crate::size_class::{Class, DEFAULT_ALIGN, Rounding, plain_eighths_index};
use pinpool_os::sync::plain::Mutex;
use pinpool_os::sync::process::{AtomicU64, Ordering};
use pinpool_shm::file::LockFile;

/// Where a part goes when its last use is over.
pub(super) type Returned = Box<dyn Fn(&SharedMemory, usize) + Send + Sync>;

/// Lends parts of a mapping.
pub(super) struct Lender {
    pool: Pool,
    parts: Arc<Parts>,
    /// Held from the choice of a part until the pool has taken it.
    lending: Mutex<()>,
    lock: PageLock,
}

/// The mapping as a source, which gives the part that is to be lent next.
struct Parts {
    /// `None` only while it is dropped.
    memory: Option<SharedMemory>,
    next: Mutex<Option<(usize, usize)>>,
    returned: Returned,
    ids: AtomicU64,
    /// Parts that are lent, and 1 as long as there is a `Lender`.
    out: AtomicU64,
    /// Under whose ceiling the memory is.
    claimed: Claimed,
    /// Keeps other processes out, until `out` is 0.
    held: Mutex<Option<LockFile>>,
}

impl fmt::Debug for Parts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Parts").field("memory", &self.memory).finish_non_exhaustive()
    }
}

impl fmt::Debug for Lender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lender").field("parts", &self.parts).field("pool", &self.pool).finish_non_exhaustive()
    }
}

// SAFETY: source-C1: a part of a mapping that stays as long as this (memory-file-I1), lent once at a time (lend-I1); a release
// always succeeds. source-C2: pages of a file are initialised. source-C3: parts begin on pages. source-C4: `ids`. source-C5: the
// mapping is counted once and by its owner; whole pages. source-C6: `next` is held for an exchange.
unsafe impl Source for Parts {
    fn name(&self) -> &'static str {
        "shared"
    }

    fn is_pinned(&self) -> bool {
        self.memory.as_ref().is_some_and(SharedMemory::is_locked)
    }

    /// A driver's page-lock, and the mapping under it, are not inherited by children of `fork`.
    fn needs_gpu(&self) -> bool {
        self.memory.as_ref().is_some_and(SharedMemory::is_of_driver)
    }

    fn acquire(&self, len_bytes: usize) -> std::result::Result<Region, SourceError> {
        let none = || SourceError::new("lend", "no part of the shared memory is to be lent");
        let memory = self.memory.as_ref().ok_or_else(none)?;
        let (offset, bytes) = self.next.lock().take().ok_or_else(none)?;
        if len_bytes > bytes || offset % PAGE_BYTES != 0 {
            return Err(SourceError::new("lend", format!("{len_bytes} B of a part of {bytes} B at {offset}")));
        }
        self.out.fetch_add(1, Ordering::Relaxed);
        Ok(Region::new(memory.at(offset), len_bytes, self.ids.fetch_add(1, Ordering::Relaxed)))
    }

    unsafe fn release(&self, region: Region) -> std::result::Result<(), SourceError> {
        if let Some(memory) = &self.memory {
            (self.returned)(memory, region.start().addr().get() - memory.at(0).addr().get());
        }
        self.leave();
        Ok(())
    }
}

impl Parts {
    /// One use less; the last one lets other processes have the memory.
    fn leave(&self) {
        // AcqRel: what all uses did is done before the lock ends.
        if self.out.fetch_sub(1, Ordering::AcqRel) == 1 {
            let held = self.held.lock().take();
            drop(held);
        }
    }
}

impl Drop for Parts {
    fn drop(&mut self) {
        // A device may use what was not returned.
        if self.out.load(Ordering::Relaxed) > 0 {
            self.memory.take().into_iter().for_each(SharedMemory::keep);
            self.claimed.keep();
            self.held.lock().take().into_iter().for_each(std::mem::forget);
        }
        // The memory is gone before its bytes are another's.
        drop(self.memory.take());
    }
}

/// The bytes of a file, claimed under the ceiling of a pool.
#[derive(Debug)]
pub(super) struct Claimed {
    of: Arc<Core>,
    claim: Option<OutsideClaim>,
}

impl Claimed {
    /// Claims `bytes` under the ceiling of `of`, whose idle memory makes room.
    pub(super) fn new(of: &Pool, bytes: usize) -> Result<Self> {
        of.core().check_process()?;
        Ok(Self { of: of.core().clone(), claim: Some(of.core().claim_outside(bytes as u64)?) })
    }

    /// The bytes stay claimed until the process ends.
    fn keep(&mut self) {
        self.claim.take().into_iter().for_each(std::mem::forget);
    }
}

impl Drop for Claimed {
    fn drop(&mut self) {
        if let Some(claim) = self.claim.take().filter(|_| !self.of.is_forked()) {
            self.of.end_outside_claim(claim);
        }
    }
}

impl Lender {
    /// Page-locks `memory` from `offset` on as `claimed.of` locks its memory, and lends parts of it. The locks of `held` end once no
    /// buffer and no copy uses the memory.
    pub(super) fn new(
        claimed: Claimed,
        held: Option<LockFile>,
        name: &str,
        mut memory: SharedMemory,
        offset: usize,
        is_fresh: bool,
        returned: Returned,
    ) -> Result<Self> {
        let of = claimed.of.clone();
        let config = of.config().clone();
        let lock = PageLock::like(of.backing().source().name(), config.device);
        memory
            .lock(offset, lock, config.pin_threads_on_host(), is_fresh)
            .map_err(super::layout::failed("page-lock of shared memory"))?;
        let parts = Arc::new(Parts {
            memory: Some(memory),
            next: Mutex::new(None),
            returned,
            ids: AtomicU64::new(0),
            out: AtomicU64::new(0),
            claimed,
            held: Mutex::new(held),
        });
        let name = of.name().map_or_else(|| name.to_owned(), |of| format!("{of}/{name}"));
        let pool = Pool::builder()
            .without_env()
            .name(name)
            .backend(Backend::Source(parts.clone()))
            .preset(Preset::Tensorflow)
            .pool_size_limit(0_u64)
            .auto_resize(false)
            .rounding(Rounding::Exact)
            .max_bytes(Ceiling::None)
            .on_full(OnFull::Error)
            .device(config.device)
            .fence(config.fence)
            .background_poll(config.background_poll)
            .close_wait(config.close_wait)
            .build()?;
        // A worker may wait for the buffer whose copy ends next.
        pool.core().watch_copies();
        parts.out.fetch_add(1, Ordering::Relaxed);
        Ok(Self { pool, parts, lending: Mutex::new(()), lock })
    }

    pub(super) fn memory(&self) -> Option<&SharedMemory> {
        self.parts.memory.as_ref()
    }

    /// The pool that the lent buffers are of: its copies, its statistics.
    pub(super) fn pool(&self) -> &Pool {
        &self.pool
    }

    pub(super) fn lock_name(&self) -> &'static str {
        self.lock.name()
    }

    /// The `len` bytes at `offset` as a buffer.
    pub(super) fn lend(&self, offset: usize, len: usize) -> Result<PinnedBuf> {
        let core = self.pool.core();
        core.check_process()?;
        // An empty buffer has no memory, so its part would not come back.
        let bytes = len.max(1).next_multiple_of(PAGE_BYTES);
        let class = Class { bytes, index: plain_eighths_index(bytes) };
        core.enter();
        let _lending = self.lending.lock();
        *self.parts.next.lock() = Some((offset, bytes));
        let block = core.get(&Wanted { len, class, ledger: None }, Duration::ZERO);
        *self.parts.next.lock() = None;
        Ok(PinnedBuf::over(block?, len, DEFAULT_ALIGN))
    }
}

impl Drop for Lender {
    fn drop(&mut self) {
        if !self.pool.core().is_forked() {
            self.pool.core().unwatch_copies();
        }
        self.parts.leave();
    }
}
