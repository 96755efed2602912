//! What serves the misses of one pool: its supply, its own ceiling, and its pageable fallback.
//!
//! Owns which memory goes back where. Never waits for room, and reaches idle buffers only through
//! [`Reclaim`].

use std::sync::Arc;

use super::{Acquired, BlockMemory, Direct, Gate, Reclaim, Refusal, SharedArena, SupplyStats};
use crate::backend::{HeapSource, PageTiers, Source};
use crate::budget::{Budget, Claim};
use crate::diag::PoolLog;
use crate::error::{Error, ErrorKind, UsageReport};
use crate::size_class::Class;

/// Where pinned memory comes from.
#[derive(Debug)]
pub(crate) enum Supply {
    /// Preset `tensorflow`.
    Direct(Direct),
    /// Preset `adaptive`; partitions share it.
    Shared(Arc<SharedArena>),
}

/// The supply of one pool.
#[derive(Debug)]
pub(crate) struct Backing {
    supply: Supply,
    /// The blocks of this pool alone, where pools share an arena. Has a ceiling in a partition and nowhere else.
    own: Arc<Budget>,
    /// Serves gets for which there is no room; `None` if those are errors.
    fallback: Option<HeapSource>,
}

/// What a pool holds.
#[derive(Debug, Clone, Copy)]
pub(in crate::engine) struct PoolUsage {
    /// Of the whole supply, or the share of a partition.
    pub(in crate::engine) supply: SupplyStats,
    /// In blocks of this pool.
    pub(in crate::engine) own_bytes: u64,
    /// In blocks of its partitions.
    pub(in crate::engine) partition_bytes: u64,
}

impl Backing {
    pub(crate) fn new(supply: Supply, fallback: Option<HeapSource>) -> Self {
        Self { supply, own: Budget::new(None), fallback }
    }

    /// The same arena under an own ceiling; `None` for a supply that cannot be shared.
    pub(in crate::engine) fn partition(&self, max_bytes: u64) -> Option<Self> {
        let arena = self.arena()?.clone();
        let fallback = self.fallback.as_ref().map(|_| HeapSource::new());
        Some(Self { supply: Supply::Shared(arena), own: Budget::new(Some(max_bytes)), fallback })
    }

    pub(in crate::engine) fn is_partition(&self) -> bool {
        self.own.max_bytes().is_some()
    }

    /// Whether buffers are carved from an arena, which can hold a reserve and be shared.
    pub(crate) fn has_arena(&self) -> bool {
        self.arena().is_some()
    }

    /// The pages of all that is held, where that is known.
    pub(crate) fn page_tiers(&self) -> Option<PageTiers> {
        self.arena().map(|arena| arena.page_tiers())
    }

    #[inline]
    pub(in crate::engine) fn arena(&self) -> Option<&Arc<SharedArena>> {
        match &self.supply {
            Supply::Direct(_) => None,
            Supply::Shared(arena) => Some(arena),
        }
    }

    /// Where copies are counted; `None` if no release has to wait for them.
    #[inline]
    pub(in crate::engine) fn gate(&self) -> Option<&Gate> {
        self.arena().map(|arena| arena.gate())
    }

    pub(in crate::engine) fn source(&self) -> &dyn Source {
        match &self.supply {
            Supply::Direct(direct) => direct.source(),
            Supply::Shared(arena) => arena.source(),
        }
    }

    pub(in crate::engine) fn has_fallback(&self) -> bool {
        self.fallback.is_some()
    }

    /// Memory for `class`, or what `reuse` found meanwhile. Idle blocks of `pool` make room. A slow call.
    pub(in crate::engine) fn acquire<R>(
        &self,
        class: Class,
        now_us: u64,
        pool: &dyn Reclaim,
        mut reuse: impl FnMut() -> Option<R>,
    ) -> Result<Acquired<R>, Refusal> {
        match &self.supply {
            Supply::Direct(direct) => loop {
                if let Some(reused) = reuse() {
                    return Ok(Acquired::Reused(reused));
                }
                match direct.acquire(class.bytes) {
                    // A request that can never fit is no reason to release idle blocks.
                    Err(Refusal::Ceiling { .. }) if direct.could_hold(class.bytes) && pool.release_oldest() => {}
                    acquired => return acquired.map(Acquired::New),
                }
            },
            Supply::Shared(arena) => {
                let own_claim = self.claim_own(class.bytes as u64, pool)?;
                let mut acquired = arena.acquire(class, now_us, pool, reuse)?;
                if let Acquired::New(BlockMemory::Carved { claim, .. }) = &mut acquired {
                    *claim = Some(own_claim);
                }
                Ok(acquired)
            }
        }
    }

    /// Claims `bytes` under the pool's own ceiling, where its own idle blocks make room.
    fn claim_own(&self, bytes: u64, pool: &dyn Reclaim) -> Result<Claim, Refusal> {
        let refusal = Refusal::Ceiling { needed_bytes: bytes };
        if !self.could_own(bytes) {
            return Err(refusal);
        }
        loop {
            match self.own.claim(bytes) {
                Some(claim) => return Ok(claim),
                None if pool.release_oldest() => {}
                None => return Err(refusal),
            }
        }
    }

    /// Pageable memory for `class`, if this pool may give it out.
    pub(in crate::engine) fn acquire_pageable(&self, class: Class) -> Option<BlockMemory> {
        let region = self.fallback.as_ref()?.acquire(class.bytes).ok()?;
        Some(BlockMemory::Pageable { region })
    }

    /// Memory leaves the pool, to the arena or to the system. Logs a failure. A slow call.
    #[allow(unsafe_code)] // Releases pageable memory.
    pub(in crate::engine) fn release(&self, memory: BlockMemory, now_us: u64, log: &PoolLog) {
        let released = match (memory, &self.supply) {
            (BlockMemory::Carved { ptr, bytes, claim, .. }, Supply::Shared(arena)) => {
                log.release_error(arena.give(ptr, bytes, now_us));
                drop(claim);
                Ok(())
            }
            (BlockMemory::Region { region, claim }, Supply::Direct(direct)) => direct.release(region, claim),
            (BlockMemory::Pageable { region }, _) => match &self.fallback {
                // SAFETY: the region came from this source, and its block was given up by value, so nothing uses it
                // (core-I1).
                Some(fallback) => unsafe { fallback.release(region) }.map_err(|error| (0, error)),
                None => Ok(()),
            },
            // A block is made by the supply of its own pool.
            (BlockMemory::Carved { .. } | BlockMemory::Region { .. }, _) => Ok(()),
        };
        if let Err((held_bytes, error)) = released {
            log.release_failed(held_bytes, &error);
        }
    }

    /// Whether a block of `class` fits under all ceilings when nothing else is held.
    pub(in crate::engine) fn could_hold(&self, class: Class) -> bool {
        self.could_own(class.bytes as u64)
            && match &self.supply {
                Supply::Direct(direct) => direct.could_hold(class.bytes),
                Supply::Shared(arena) => arena.could_hold(class.bytes as u64),
            }
    }

    fn could_own(&self, bytes: u64) -> bool {
        self.own.max_bytes().is_none_or(|max_bytes| bytes <= max_bytes)
    }

    /// The error of a get of `len` bytes that was refused while the pool held `usage`.
    pub(in crate::engine) fn error(&self, len: usize, refusal: Refusal, usage: UsageReport) -> Error {
        let asked_bytes = len as u64;
        let kind = match refusal {
            Refusal::Ceiling { needed_bytes } => {
                ErrorKind::Limit { asked_bytes, needed_bytes, usage, remedy: self.remedy(needed_bytes) }
            }
            Refusal::Source(source) => ErrorKind::Backend { backend: self.source().name(), asked_bytes, usage, source },
        };
        kind.into()
    }

    /// What prevents `needed_bytes`, and which setting helps.
    fn remedy(&self, needed_bytes: u64) -> &'static str {
        if !self.could_own(needed_bytes) {
            return "this partition can never hold that much: give it more";
        }
        match &self.supply {
            Supply::Shared(arena) if !arena.may_grow() => {
                "the reserve is all there is (PINPOOL_GROWTH=0): put buffers back first or raise PINPOOL_RESERVE"
            }
            Supply::Shared(arena) if !arena.could_hold(needed_bytes) => {
                "it has no room for that even when empty: ask for less or raise PINPOOL_MAX_BYTES"
            }
            _ => "put buffers back first or raise PINPOOL_MAX_BYTES",
        }
    }

    /// What the whole supply holds.
    pub(in crate::engine) fn stats(&self) -> SupplyStats {
        match &self.supply {
            Supply::Direct(direct) => direct.stats(),
            Supply::Shared(arena) => arena.stats(),
        }
    }

    /// What this pool holds. A partition sees its own blocks; free memory belongs to all pools.
    pub(in crate::engine) fn usage(&self) -> PoolUsage {
        let supply = self.stats();
        let own_bytes = match &self.supply {
            Supply::Direct(_) => supply.block_bytes,
            Supply::Shared(_) => self.own.held_bytes(),
        };
        if self.is_partition() {
            return PoolUsage { supply: supply.of_partition(&self.own), own_bytes, partition_bytes: 0 };
        }
        PoolUsage { supply, own_bytes, partition_bytes: supply.block_bytes.saturating_sub(own_bytes) }
    }
}
