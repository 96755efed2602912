//! The pools that carve from one ground: they come, they make way for each other, and the last one turns off the light.
//!
//! ```text
//!  join ─▶ tenant ─▶ leave ──last, and no buffer is out──▶ dismantle: granules, then regions, then addresses
//!                      └─ buffers still out ─▶ the last give ─────────┘
//! ```
//!
//! A pool is closed when its last buffer has been counted as put, which may be a moment before that buffer's memory is
//! given back by another thread. So whoever comes last, the one that leaves or the one that gives, dismantles.

use std::sync::{Arc, Weak};

use super::executor::Mapping;
use super::shared_arena::SharedArena;
use crate::backend::SourceError;
use crate::engine::block::Block;
use crate::size_class::Class;

/// Who asks for memory, and may have to give some back first.
pub(in crate::engine) trait Reclaim: Send + Sync {
    /// Bytes of the idle buffers.
    fn idle_bytes(&self) -> u64;

    /// Gives the buffer back that has been idle longest; false if none is.
    fn give_back_oldest(&self) -> bool;

    /// A buffer of `class` that came back since the get looked for one.
    fn take_back(&self, class: Class) -> Option<Block>;

    /// Puts back the buffers whose copies are over.
    fn land_copies(&self);

    /// Gives back what has been idle for too long at `now_us`.
    fn grow_old(&self, now_us: u64);
}

impl SharedArena {
    /// One more pool carves from here.
    pub(in crate::engine) fn join(&self, tenant: Weak<dyn Reclaim>) {
        self.land.lock().tenants.push(tenant);
    }

    /// The pools that carve from here. To be dropped outside of every lock.
    pub(in crate::engine) fn tenants(&self) -> Vec<Arc<dyn Reclaim>> {
        self.land.lock().tenants.iter().filter_map(Weak::upgrade).collect()
    }

    /// A pool has closed. With the last one everything goes back to the system, at once or with the last buffer.
    pub(in crate::engine) fn leave(&self, tenant: &dyn Reclaim, now_us: u64) -> Result<(), SourceError> {
        let tenant: *const dyn Reclaim = tenant;
        let mut land = self.land.lock();
        land.tenants.retain(|other| !std::ptr::addr_eq(other.as_ptr(), tenant));
        let last = land.tenants.is_empty();
        drop(land);
        if last { self.dismantle(now_us) } else { Ok(()) }
    }

    /// Gives everything back that no buffer lies in; the addresses only if there is no buffer at all: one that was lost,
    /// or that a device may still read, keeps them for ever.
    pub(super) fn dismantle(&self, now_us: u64) -> Result<(), SourceError> {
        // A copy that never ended: a release that waits for the device would wait for it as well.
        let Some(closed) = self.gate.close_in_turn() else {
            self.log.left_pinned(self.land.lock().arena.stats().committed_bytes);
            return Ok(());
        };
        let mut released = Ok(());
        let sites: Vec<Mapping> = loop {
            released = released.and(self.release_behind(&closed, now_us, |land| land.arena.release_down_to(0)));
            let mut land = self.land.lock();
            // Another thread may be giving granules back as well.
            while land.arena.stats().transit_bytes > 0 {
                self.settled.wait(&mut land);
            }
            if !land.is_deserted() {
                break Vec::new();
            }
            // The last buffer may have come back after the release above: its granules go before their addresses.
            if land.arena.stats().idle_bytes == 0 || land.release_fails {
                break land.sites.drain().collect();
            }
        };
        // One that fails keeps none of the others.
        sites.into_iter().map(|site| self.dismantle_site(site)).fold(released, Result::and)
    }

    #[allow(unsafe_code)] // Memory and addresses leave the pool.
    pub(super) fn dismantle_site(&self, site: Mapping) -> Result<(), SourceError> {
        match site {
            Mapping::Region(region) => {
                let bytes = region.len_bytes() as u64;
                // SAFETY: the region is this source's, and no live byte is left in the arena.
                unsafe { self.source.release(region) }?;
                self.land.lock().calls.released(bytes);
                Ok(())
            }
            Mapping::Spanning(range) => match (Arc::into_inner(range), self.source.virtual_memory()) {
                // SAFETY: the range is this source's, no live byte is left in the arena, and what is still locked there
                // was given up: its release failed.
                (Some(range), Some(spans)) => unsafe { spans.unreserve(range) },
                _ => Err(SourceError::new("unreserve", "the addresses are still in use")),
            },
        }
    }
}
