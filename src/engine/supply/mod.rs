//! Behind the idle ones: where a miss gets its memory and a victim leaves it.
//!
//! | preset | supply | a miss | a victim |
//! | --- | --- | --- | --- |
//! | `tensorflow` | [`Direct`] | an acquisition of its own | a release of its own |
//! | `adaptive` | [`SharedArena`] | carved from the arena, which locks granules if it must | back to the arena, which gives granules back in time |
//!
//! `Direct` releases at once, as TensorFlow does, and with `cuda` each release waits for the device. `SharedArena` never asks for
//! such a release while a copy of its pools is in flight ([`give_back`]).
//!
//! Bytes are claimed under the ceiling before the source is asked, and given back on every failing path. No slow call
//! happens under a lock.

mod addresses;
mod attached;
mod direct;
mod executor;
mod gate;
mod release;
mod reserve;
mod shared_arena;

use std::ptr::NonNull;
use std::sync::Arc;

use crate::arena::ArenaPtr;
use crate::backend::{Region, SourceError};
use crate::budget::{Budget, Claim};
use crate::stats::Underlying;

pub(super) use attached::Reclaim;
pub(crate) use direct::Direct;
pub(super) use shared_arena::Acquired;
pub(crate) use shared_arena::{SharedArena, SharedArenaConfig};

/// What serves the misses of a pool.
#[derive(Debug)]
pub(crate) enum Supply {
    Direct(Direct),
    Shared(Arc<SharedArena>),
}

/// Memory for one block.
#[derive(Debug)]
pub(super) enum Memory {
    /// A region of its own, with its share of the ceiling.
    Whole { region: Region, claim: Claim },
    /// A piece of the arena, with its share of what its own pool may have.
    Carved { start: NonNull<u8>, place: ArenaPtr, bytes: u64, id: u64, claim: Option<Claim> },
    /// Ordinary memory that stands in when there is no room: counts against no ceiling, is never kept.
    Pageable { region: Region },
}

// SAFETY: memory is a right to bytes that nobody else has (source C1, arena I1), bound to no thread.
#[allow(unsafe_code)]
unsafe impl Send for Memory {}
// SAFETY: shared memory gives out its address and numbers.
#[allow(unsafe_code)]
unsafe impl Sync for Memory {}

/// Why there is no memory.
#[derive(Debug)]
pub(super) enum Refusal {
    /// The ceiling is in the way: this much was needed.
    Ceiling { needed_bytes: u64 },
    /// The source said no.
    Source(SourceError),
}

/// Bytes held, in whatever state.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct SupplyStats {
    pub(super) held_bytes: u64,
    pub(super) peak_bytes: u64,
    /// Of those held, in blocks: in use, in flight, idle or lost.
    pub(super) block_bytes: u64,
    /// Of those held, free in the arena.
    pub(super) free_bytes: u64,
    /// Of those held, on their way in or out.
    pub(super) transit_bytes: u64,
    pub(super) reserve_bytes: u64,
    /// Of those held, in regions that the source failed to take back.
    pub(super) stuck_bytes: u64,
    /// Of those free, waiting for copies in flight to go back to the system.
    pub(super) awaiting_release_bytes: u64,
    /// Gets that waited for copies in flight so that regions could go.
    pub(super) drains: u64,
    pub(super) max_bytes: Option<u64>,
    pub(super) moves: u64,
    pub(super) calls: Underlying,
}

impl SupplyStats {
    /// What of it is in blocks under the ceiling of `own`, and nothing else.
    pub(super) fn of(self, own: &Budget) -> Self {
        Self {
            held_bytes: own.held_bytes(),
            peak_bytes: own.peak_bytes(),
            block_bytes: own.held_bytes(),
            max_bytes: own.max_bytes(),
            calls: self.calls,
            ..Self::default()
        }
    }
}

impl Memory {
    #[inline]
    pub(super) fn start(&self) -> NonNull<u8> {
        match self {
            Self::Whole { region, .. } | Self::Pageable { region } => region.start(),
            Self::Carved { start, .. } => *start,
        }
    }

    pub(super) fn id(&self) -> u64 {
        match self {
            Self::Whole { region, .. } | Self::Pageable { region } => region.id(),
            Self::Carved { id, .. } => *id,
        }
    }

    #[inline]
    pub(super) fn is_from_source(&self) -> bool {
        !matches!(self, Self::Pageable { .. })
    }

    /// Bytes that count as held for it.
    pub(super) fn held_bytes(&self) -> u64 {
        match self {
            Self::Whole { claim, .. } => claim.bytes(),
            Self::Carved { bytes, .. } => *bytes,
            Self::Pageable { .. } => 0,
        }
    }
}
