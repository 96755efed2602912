//! Memory of one block, attempts to find it, and refusals.

use std::fmt;
use std::ptr::NonNull;
use std::time::Instant;

use crate::arena::Extent;
use crate::backend::{PinnedBy, Region, SourceError};
use crate::quota::{Claim, LimitLevel, QuotaExceeded};
use pinpool_os::unwind::catch_panic;

/// Memory of one block.
#[derive(Debug)]
pub(crate) enum BlockMemory {
    /// A dedicated region, with its claim. Pageable memory serves requests when there is no room for pinned memory. It is
    /// claimed under a separate limit, and never kept.
    Region { region: Region, claim: Claim, is_pageable: bool },
    /// Memory that was carved from the arena.
    Carved { start: NonNull<u8>, extent: Extent, id: u64 },
    /// A user's memory, which is returned to the user with the buffer.
    Adopted(Adopted),
}

// SAFETY: the bytes belong to one block alone (source-C1, arena-I1) and are bound to no thread.
#[allow(unsafe_code)]
unsafe impl Send for BlockMemory {}
// SAFETY: a shared reference exposes only an address and numbers.
#[allow(unsafe_code)]
unsafe impl Sync for BlockMemory {}

/// The source calls that an attempt may make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AllowedCalls {
    /// No calls, because a task polls the attempt.
    None,
    /// All calls except for more memory, since the source refused a call too recently.
    NoAcquire,
    All,
}

/// What one attempt at a request may do.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rules {
    pub(crate) calls: AllowedCalls,
    /// Whether the attempt counts as a miss, because it is the first one of its request.
    pub(crate) counts_miss: bool,
    /// The end of the wait for other threads' calls.
    pub(crate) until: Instant,
}

impl Rules {
    /// Permits all calls to an attempt after the first one.
    pub(crate) fn retry(until: Instant) -> Self {
        Self { calls: AllowedCalls::All, counts_miss: false, until }
    }
}

/// The reason that an attempt ended without memory.
#[derive(Debug)]
pub(crate) enum AttemptError {
    /// The next attempt needs a source call, which the caller may not make.
    NeedsCall,
    Refused(Refusal),
}

impl AttemptError {
    pub(crate) fn refusal(self) -> Option<Refusal> {
        if let Self::Refused(refusal) = self { Some(refusal) } else { None }
    }
}

impl From<Refusal> for AttemptError {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

/// The reason that there is no memory: numbers from the claim or call that failed. [`Memory::explain`](super::Memory::explain)
/// turns it into text only when the refusal is shown, since the head of the queue fails repeatedly.
#[derive(Debug, Clone)]
pub(crate) enum Refusal {
    /// A limit has no room.
    Limit(QuotaExceeded),
    /// Earlier requests are waiting, the first for `first_bytes`, and there is no room in addition to this first request.
    Queued { level: LimitLevel, waiting: u64, first_bytes: u64 },
    /// The source failed.
    Source(SourceError),
    /// The pool is closed.
    Closed,
}

impl Refusal {
    /// Returns the bytes of the refused claim, if a shared limit refused it only for lack of room.
    pub(crate) fn by_shared_limit(&self) -> Option<u64> {
        match *self {
            Self::Limit(QuotaExceeded { level: LimitLevel::Shared, bytes, could_fit: true }) => Some(bytes),
            _ => None,
        }
    }

    /// Returns whether a partition refused the request.
    pub(crate) fn is_by_partition(&self) -> bool {
        let (Self::Limit(QuotaExceeded { level, .. }) | Self::Queued { level, .. }) = self else { return false };
        *level == LimitLevel::Partition
    }

    /// Returns whether the claim exceeds a limit, so that it can never fit.
    pub(crate) fn is_too_large(&self) -> bool {
        matches!(self, Self::Limit(over) if !over.could_fit)
    }
}

impl From<QuotaExceeded> for Refusal {
    fn from(over: QuotaExceeded) -> Self {
        Self::Limit(over)
    }
}

impl BlockMemory {
    #[inline]
    pub(crate) fn start(&self) -> NonNull<u8> {
        match self {
            Self::Region { region, .. } => region.start(),
            Self::Carved { start, .. } => *start,
            Self::Adopted(adopted) => adopted.start,
        }
    }

    /// Returns the id of the memory; `None` for adopted memory.
    pub(crate) fn id(&self) -> Option<u64> {
        match self {
            Self::Region { region, .. } => Some(region.id()),
            Self::Carved { id, .. } => Some(*id),
            Self::Adopted(_) => None,
        }
    }

    /// Returns the id for a recording. Ids of pageable memory, which comes from another source, have the highest bit set.
    /// `None` for adopted memory, which no setting of the pool changes.
    pub(crate) fn recorded_id(&self) -> Option<u64> {
        self.id().map(|id| if self.is_from_source() { id } else { id | 1 << 63 })
    }

    #[inline]
    pub(crate) fn is_from_source(&self) -> bool {
        matches!(self, Self::Region { is_pageable: false, .. } | Self::Carved { .. })
    }

    /// Returns the user's memory, if this is adopted memory.
    pub(crate) fn adopted(&self) -> Option<&Adopted> {
        if let Self::Adopted(adopted) = self { Some(adopted) } else { None }
    }

    /// Returns the bytes that count as held for this memory.
    pub(crate) fn held_bytes(&self) -> u64 {
        match self {
            Self::Region { claim, .. } => claim.bytes(),
            Self::Carved { extent, .. } => extent.bytes(),
            // The pool holds none of the user's memory.
            Self::Adopted(_) => 0,
        }
    }
}

/// Memory of a user for one buffer.
pub(crate) struct Adopted {
    pub(crate) start: NonNull<u8>,
    pub(crate) len: usize,
    pub(crate) pinned_by: Option<PinnedBy>,
    /// Called once no copy uses the memory any more; never called if that cannot be known.
    pub(crate) on_release: Box<dyn FnOnce() + Send>,
}

impl Adopted {
    /// Returns the memory, which no copy uses any more, to its user. Calls user code, so the caller must hold no lock.
    pub(in crate::engine) fn release(self) {
        let _panicked = catch_panic(self.on_release);
    }
}

impl fmt::Debug for Adopted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Adopted").field("start", &self.start).field("len", &self.len).finish_non_exhaustive()
    }
}
