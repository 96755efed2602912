//! Where a miss gets its memory, and where an evicted buffer returns it.
//!
//! | file | owns |
//! | --- | --- |
//! | `backing.rs` | the supply of one pool, with its own ceiling and its fallback |
//! | `backing/refusals.rs` | why it has no memory, and what helps, in words |
//! | `adopted.rs` | memory of a user, lent to the pool for one buffer |
//! | `fallback.rs` | memory that is not pinned, in place of memory for which there is no room |
//! | `direct.rs` | preset `tensorflow`: each miss is an acquisition, each victim a release |
//! | `shared_arena.rs` | preset `adaptive`: a lock around an arena, and the order of steps when memory is needed or released |
//! | `shared_arena/acquire.rs` | the steps of a get that missed |
//! | `arena_state.rs` | what that lock guards: sequential bookkeeping |
//! | `arena_state/claims.rs` | what is claimed under the ceiling |
//! | `node_arenas.rs` | the arenas of one pool on several memory nodes, under one ceiling |
//! | `attached.rs` | what the pools that share the arena can give |
//! | `mapping_watch.rs` | how near the process is to the most mappings that it may have |
//! | `executor.rs` | addresses of the arena's ranges, and the source calls of a plan |
//! | `called_source.rs` | the slow calls of a source: recorded, and failed if they panic |
//! | `gate.rs` | keeps copies and releases that wait for copies apart |
//!
//! `Direct` releases at once, as TensorFlow does, and with `cuda` each release waits for the device. `SharedArena` never
//! makes such a release while a copy of its pools is in flight.
//!
//! Bytes are claimed under the ceiling before the source is called, and returned on every failing path. No lock is held
//! during a source call. Never decides which buffer is reused or evicted.

mod adopted;
mod arena_state;
mod attached;
mod backing;
mod called_source;
mod direct;
mod executor;
mod fallback;
mod gate;
mod mapping_watch;
mod node_arenas;
mod shared_arena;

use std::ptr::NonNull;
use std::time::Duration;

use crate::arena::ArenaPtr;
use crate::backend::{Region, SourceError};
use crate::quota::{Claim, Level, Over, Quota};
use crate::stats::EvictionReason;

pub(crate) use adopted::Adopted;
pub(super) use backing::PoolUsage;
pub(crate) use backing::{Backing, OutsideClaim, Supply};
pub(crate) use called_source::CalledSource;
pub(crate) use direct::Direct;
pub(crate) use fallback::Fallback;
pub(crate) use gate::BegunCopy;
pub(super) use gate::Gate;
pub(super) use shared_arena::ReserveWait;
pub(crate) use shared_arena::{SharedArena, SharedArenaConfig};

/// Memory of one block.
#[derive(Debug)]
pub(super) enum BlockMemory {
    /// A region of its own, with its claim under the ceiling.
    Region { region: Region, claim: Claim },
    /// Carved from the arena, with its claim under the ceiling of its own pool.
    Carved { start: NonNull<u8>, ptr: ArenaPtr, bytes: u64, id: u64, claim: Option<Claim> },
    /// Ordinary memory, given out when there is no room, with its claim under the limit of the fallback. Never kept.
    Pageable { region: Region, claim: Claim },
    /// A user's, who has it back when the buffer is put.
    Adopted(Adopted),
}

// SAFETY: the bytes belong to one block alone (source-C1, arena-I1) and are bound to no thread.
#[allow(unsafe_code)]
unsafe impl Send for BlockMemory {}
// SAFETY: a shared reference gives out an address and numbers.
#[allow(unsafe_code)]
unsafe impl Sync for BlockMemory {}

/// What serves a miss.
#[derive(Debug)]
pub(super) enum Acquired<R> {
    New(BlockMemory),
    /// An idle block that was put back while memory was being acquired.
    Reused(R),
}

/// Why there is no memory.
#[derive(Debug, Clone)]
pub(super) enum Refusal {
    /// A block of this much would exceed a ceiling.
    Over { needed_bytes: u64, over: Over },
    /// Others wait for memory, the first of them for this much, and there is no room beside it.
    Line { needed_bytes: u64, waiting: u64, first_bytes: u64 },
    /// The source failed.
    Source(SourceError),
}

impl Refusal {
    /// Whether the ceiling that several pools share has no room.
    pub(super) fn is_by_shared(&self) -> bool {
        matches!(self, Self::Over { over: Over { level: Level::Shared, .. }, .. })
    }
}

/// A pool as its supply sees it: it asks for memory, and may have to give idle memory back.
pub(super) trait Reclaim: Send + Sync {
    /// Bytes of the idle blocks.
    fn idle_bytes(&self) -> u64;

    /// Number of the idle blocks.
    fn idle_buffers(&self) -> u64;

    /// Releases the block that has been idle longest, for this reason; false if none is idle.
    fn release_oldest(&self, why: EvictionReason) -> bool;

    /// Puts back the blocks whose copies are over.
    fn complete_copies(&self);

    /// Bytes that its waiting gets ask for, in the order of the line.
    fn waiting_bytes(&self) -> Vec<u64> {
        Vec::new()
    }

    /// There is more room than before: waiting gets try again.
    fn room_was_made(&self) {}

    /// Other owners of the host ledger want memory: what is idle is to be released soon.
    fn room_is_wanted(&self) {}

    /// Releases the blocks that have been idle too long at `now_us`.
    fn expire_idle(&self, now_us: u64);
}

/// Bytes held, by state.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct SupplyStats {
    pub(super) held_bytes: u64,
    pub(super) peak_bytes: u64,
    /// Held bytes in blocks: in use, in flight, idle or leaked.
    pub(super) block_bytes: u64,
    /// Held bytes that are free in the arena.
    pub(super) free_bytes: u64,
    /// Held bytes that are being committed or released.
    pub(super) transit_bytes: u64,
    /// Held bytes beyond those of regions and reserves.
    pub(super) overhead_bytes: u64,
    pub(super) reserve_bytes: u64,
    /// What reserves asked for, pinned or not.
    pub(super) reserve_asked_bytes: u64,
    /// When all of it will be there, at the rate so far.
    pub(super) reserve_eta: Option<Duration>,
    /// Held bytes in regions that the source failed to release.
    pub(super) stuck_bytes: u64,
    /// Free bytes that wait for copies in flight before they can be released.
    pub(super) awaiting_release_bytes: u64,
    /// Gets that waited for copies in flight so that regions could be released.
    pub(super) drains: u64,
    pub(super) max_bytes: Option<u64>,
    /// The highest ceiling so far.
    pub(super) highest_max_bytes: Option<u64>,
    pub(super) moves: u64,
    /// Granules, regions and reserves held.
    pub(super) mappings: u64,
    pub(super) descriptors: u64,
    /// Regions for one buffer, acquired where the source refused a larger one.
    pub(super) smaller_regions: u64,
}

impl SupplyStats {
    /// Without `bytes` of users, which count under the same ceiling.
    fn without(self, bytes: u64) -> Self {
        let (held_bytes, block_bytes) = (self.held_bytes.saturating_sub(bytes), self.block_bytes.saturating_sub(bytes));
        Self { held_bytes, block_bytes, ..self }
    }

    /// The part that a partition sees: its own blocks under its own ceiling.
    fn of_partition(self, own: &Quota) -> Self {
        Self {
            held_bytes: own.held_bytes(),
            peak_bytes: own.peak_bytes(),
            block_bytes: own.held_bytes(),
            max_bytes: own.max_bytes(),
            highest_max_bytes: own.highest_max_bytes(),
            ..Self::default()
        }
    }
}

impl BlockMemory {
    #[inline]
    pub(super) fn start(&self) -> NonNull<u8> {
        match self {
            Self::Region { region, .. } | Self::Pageable { region, .. } => region.start(),
            Self::Carved { start, .. } => *start,
            Self::Adopted(adopted) => adopted.start,
        }
    }

    /// `None` of adopted memory.
    pub(super) fn id(&self) -> Option<u64> {
        match self {
            Self::Region { region, .. } | Self::Pageable { region, .. } => Some(region.id()),
            Self::Carved { id, .. } => Some(*id),
            Self::Adopted(_) => None,
        }
    }

    /// The id in a recording: that of pageable memory, which comes from another source, has its highest bit set. `None` of
    /// adopted memory, which no setting of the pool changes.
    pub(super) fn recorded_id(&self) -> Option<u64> {
        self.id().map(|id| if self.is_from_source() { id } else { id | 1 << 63 })
    }

    #[inline]
    pub(super) fn is_from_source(&self) -> bool {
        matches!(self, Self::Region { .. } | Self::Carved { .. })
    }

    /// The memory of a user, if it is that.
    pub(super) fn adopted(&self) -> Option<&Adopted> {
        match self {
            Self::Adopted(adopted) => Some(adopted),
            _ => None,
        }
    }

    /// Bytes that count as held for it.
    pub(super) fn held_bytes(&self) -> u64 {
        match self {
            Self::Region { claim, .. } | Self::Pageable { claim, .. } => claim.bytes(),
            Self::Carved { bytes, .. } => *bytes,
            // The pool holds none of it.
            Self::Adopted(_) => 0,
        }
    }
}
