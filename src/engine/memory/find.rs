//! Memory for a get that missed: carries out the rungs of the ladder until there is some, or none can be had.

use super::ladder::{Ladder, Rung, Seen};
use super::{Domain, PoolView};
use crate::arena::GrowthLimits;
use crate::backend::SourceError;
use crate::engine::memory::{Acquired, Books, Refusal, SlowCalls, Stop};
use crate::quota::{QuotaExceeded, Room};
use crate::size_class::Class;
use crate::stats::EvictionReason;
use pinpool_os::sync::MutexGuard;

/// Longest commit while copies are pending: registering this much delays other threads' enqueues by half a millisecond.
const STEP_BESIDE_COPIES_BYTES: u64 = 8 << 20;

/// Why a climb has found no memory so far.
#[derive(Debug)]
struct Why {
    /// What the ceilings left at the last plan.
    room: Room,
    /// A claim of the last plan was refused.
    over: Option<QuotaExceeded>,
    /// The source refused.
    source: Option<SourceError>,
}

impl Domain {
    /// Memory for `class`, whole pages, or what `reuse` found meanwhile. Makes such `calls` of the source.
    pub(in crate::engine) fn serve<R>(
        &self,
        class: Class,
        (now_us, calls): (u64, SlowCalls),
        pool: &dyn PoolView,
        reuse: impl FnMut() -> Option<R>,
    ) -> Result<Acquired<R>, Stop> {
        let bytes = class.bytes as u64;
        if !matches!(calls, SlowCalls::After(..) | SlowCalls::Held(..)) {
            let (memory, recurs) = self.arena.serve_miss(bytes, now_us);
            if let Some(memory) = memory {
                self.log.carved(bytes);
                return Ok(Acquired::New(memory));
            }
            if !recurs {
                self.arena.note_scattered(bytes, pool.idle_bytes(), now_us);
            }
        }
        // A request that can never fit is no reason to release idle blocks.
        if !self.arena.could_hold(bytes) {
            return Err(self.no_space(bytes, pool, Room::UNLIMITED).into());
        }
        let _first = self.before_reserve();
        self.climb(bytes, (now_us, calls), pool, reuse)
    }

    fn climb<R>(
        &self,
        bytes: u64,
        (now_us, calls): (u64, SlowCalls),
        pool: &dyn PoolView,
        mut reuse: impl FnMut() -> Option<R>,
    ) -> Result<Acquired<R>, Stop> {
        let arena = &self.arena;
        let mut ladder = Ladder::new(pool.idle_buffers(), matches!(calls, SlowCalls::Held(..)));
        let mut why = Why { room: Room::UNLIMITED, over: None, source: None };
        // While copies run, registering much at once would delay their enqueues.
        let is_short_step = arena.source().release_waits() && pool.has_copies();
        loop {
            let idle_bytes = pool.idle_bytes();
            let mut state = arena.state();
            if let Some(memory) = state.carve(bytes) {
                return Ok(Acquired::New(memory));
            }
            // Each round may have waited, and a put may have come meanwhile.
            if let Some(reused) = reuse() {
                return Ok(Acquired::Reused(reused));
            }
            let is_covered = idle_bytes > 0 && state.could_cover(bytes, idle_bytes);
            if ladder.next(Seen::NoHole { is_covered }) == Rung::ReleaseOwn {
                drop(state);
                // If another thread was faster, the next round sees what is left.
                pool.release_oldest(EvictionReason::Reclaimed);
                continue;
            }
            why.room = state.room_for(arena.grown_bytes(bytes));
            let limits = self.limits(&state, &ladder, why.room, is_short_step, now_us);
            let no_space = match state.plan_growth(bytes, limits) {
                Ok(plan) if calls == SlowCalls::None => {
                    state.give_up(plan);
                    return Err(Stop::NeedsCall);
                }
                Ok(plan) => {
                    let was_larger = plan.surplus_bytes() > 0;
                    match arena.grow(state, plan, bytes, (now_us, calls.until().1)) {
                        Ok(memory) => {
                            if ladder.is_one_buffer() {
                                arena.note_smaller_region();
                            }
                            let no_address =
                                || Refusal::Source(SourceError::new("arena", "a place without an address"));
                            return Ok(Acquired::New(memory.ok_or_else(no_address)?));
                        }
                        Err(error) => {
                            if ladder.next(Seen::Refused { was_larger }) == Rung::Refuse {
                                return Err(Refusal::Source(error).into());
                            }
                            why.source = (!ladder.may_commit()).then_some(error);
                            continue;
                        }
                    }
                }
                Err((no_space, over)) => {
                    why.over = over;
                    no_space
                }
            };
            if ladder.next(Seen::NoPlan { in_transit: no_space.transit_bytes > 0 }) == Rung::Wait {
                if !arena.wait_settled(state, calls.until().0) {
                    return Err(self.refusal(bytes, pool, why).into());
                }
                continue;
            }
            let lacking_bytes = lacking_bytes(&state, arena.alone_bytes(bytes), limits);
            let has_regions = !limits.may_decommit_regions && state.arena().stats().idle_bytes > 0;
            drop(state);
            pool.complete_copies();
            let idle_bytes = pool.idle_bytes();
            let is_enough = idle_bytes > 0 && idle_bytes >= lacking_bytes;
            let seen = Seen::Swept { idle_blocks: pool.idle_buffers(), is_enough, has_regions };
            match ladder.next(seen) {
                Rung::ReleaseRegions => {}
                Rung::ReleaseAny => drop(pool.release_oldest(EvictionReason::Reclaimed)),
                _ => {
                    let memory = arena.state().carve_in_other_regions(bytes);
                    return memory.map(Acquired::New).ok_or_else(|| self.refusal(bytes, pool, why).into());
                }
            }
        }
    }

    /// Why a climb for `bytes` has ended.
    fn refusal(&self, bytes: u64, pool: &dyn PoolView, why: Why) -> Refusal {
        match why {
            Why { source: Some(error), .. } => Refusal::Source(error),
            Why { over: Some(over), .. } => Refusal::Over { needed_bytes: bytes, over },
            Why { room, .. } => self.no_space(bytes, pool, room),
        }
    }

    fn no_space(&self, bytes: u64, pool: &dyn PoolView, room: Room) -> Refusal {
        self.arena.no_space(bytes, pool.idle_bytes(), room)
    }

    fn limits(&self, state: &Books, ladder: &Ladder, room: Room, is_short_step: bool, now_us: u64) -> GrowthLimits {
        let commit_bytes = match (ladder.may_commit(), self.arena.may_grow()) {
            (false, _) => 0,
            (true, true) => room.bytes(),
            // What of the reserve is still to come.
            (true, false) => room.bytes().min(state.reserve_to_come()),
        };
        let (step_bytes, largest_bytes) = match (ladder.is_one_buffer(), is_short_step) {
            (true, _) => (0, 0),
            (false, false) => (u64::MAX, state.largest_missed_bytes(now_us)),
            (false, true) => (STEP_BESIDE_COPIES_BYTES, state.largest_missed_bytes(now_us)),
        };
        let may_decommit_regions = match self.arena.source().release_waits() {
            true => ladder.may_release_regions() && !self.arena.may_never_release(),
            false => true,
        };
        let over_bytes = self.arena.budget().over_bytes();
        let known_bytes = state.largest_held_bytes(now_us);
        GrowthLimits { commit_bytes, over_bytes, may_decommit_regions, step_bytes, largest_bytes, known_bytes }
    }
}

/// What idle blocks would have to make up for `needed_bytes`. With a region goes what the source adds to it.
fn lacking_bytes(state: &MutexGuard<'_, Books>, needed_bytes: u64, limits: GrowthLimits) -> u64 {
    let arena = state.arena().stats();
    let available_bytes = (arena.hole_bytes + arena.overhead_bytes).saturating_add(limits.commit_bytes);
    needed_bytes.saturating_sub(available_bytes)
}
