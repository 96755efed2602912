//! Memory for a get that missed: the order of steps until there is some, or none can be had.

use std::time::Instant;

use super::super::arena_state::ArenaState;
use super::super::attached::{complete_copies, idle_buffers, make_room};
use super::super::{Acquired, Reclaim, Refusal};
use super::SharedArena;
use crate::arena::GrowthLimits;
use crate::backend::SourceError;
use crate::diag;
use crate::quota::Room;
use crate::size_class::Class;
use crate::stats::EvictionReason;

/// Longest commit while copies are pending: registering this much delays other threads' enqueues by half a millisecond.
const STEP_BESIDE_COPIES_BYTES: u64 = 8 << 20;

impl SharedArena {
    /// Memory for `class`, whole pages, or what `reuse` found meanwhile. May call the source; waits for such calls of other
    /// threads no longer than `until`.
    pub(in crate::engine::supply) fn acquire<R>(
        &self,
        class: Class,
        (now_us, until): (u64, Instant),
        pool: &dyn Reclaim,
        mut reuse: impl FnMut() -> Option<R>,
    ) -> Result<Acquired<R>, Refusal> {
        let bytes = class.bytes as u64;
        let mut state = self.state.lock();
        let (memory, recurs) = state.serve_miss(bytes, now_us);
        self.note_demand(&state, now_us);
        self.note_holes(&state, now_us);
        drop(state);
        if let Some(memory) = memory {
            return Ok(Acquired::New(memory));
        }
        if !recurs {
            let idle_bytes = pool.idle_bytes();
            let mut state = self.state.lock();
            state.note_scattered(bytes, idle_bytes, now_us);
            self.note_demand(&state, now_us);
        }
        // A request that can never fit is no reason to release idle blocks.
        if !self.could_hold(bytes) {
            return Err(self.no_space(bytes, Room::UNLIMITED));
        }
        let _first = self.before_reserve();
        let attached = self.attached();
        // Fences are queried under no lock.
        self.gate.complete_copies();
        // After a refusal a region or a run for this one buffer may still fit; after a second one only committed memory can
        // help.
        let (mut source_error, mut is_one_buffer) = (None, false);
        // Outlives the closed gate: behind it copies are swept, and their puts may log or call a listener.
        let mut deferral = None;
        let (mut closed_late, mut may_wait, mut may_sweep, mut may_ask_nodes) = (None, true, true, true);
        // No more than are idle now, whatever other threads put back meanwhile.
        let mut to_release = idle_buffers(pool, &attached);
        loop {
            let idle_bytes = pool.idle_bytes();
            let mut state = self.state.lock();
            if let Some(memory) = state.carve(bytes) {
                return Ok(Acquired::New(memory));
            }
            // Each round may have waited, and a put may have come meanwhile.
            if let Some(reused) = reuse() {
                return Ok(Acquired::Reused(reused));
            }
            if to_release > 0 && idle_bytes > 0 && state.could_cover(bytes, idle_bytes) {
                drop(state);
                to_release -= 1;
                // If another thread was faster, the next round sees what is left.
                pool.release_oldest(EvictionReason::Reclaimed);
                continue;
            }
            // Regions are released only behind the closed gate, which opens again at once unless the plan releases one.
            let closed = closed_late.take().or_else(|| self.gate.close());
            // Nor while another thread's acquisition would be waited for.
            let closed = closed.filter(|_| !self.source.is_acquiring());
            let room = state.room_for(self.grown_bytes(bytes));
            let mut limits = self.limits(&state, room, source_error.is_none(), closed.is_some(), now_us);
            if is_one_buffer {
                limits = GrowthLimits { step_bytes: 0, largest_bytes: 0, ..limits };
            }
            let plan = match state.plan_growth(bytes, limits) {
                Ok(plan) => plan,
                Err((no_space, _)) if no_space.transit_bytes > 0 => {
                    drop(closed);
                    let (state, timed_out) = self.settled.wait_until(state, until);
                    drop(state);
                    if timed_out {
                        return Err(source_error.map_or_else(|| self.no_space(bytes, room), Refusal::Source));
                    }
                    continue;
                }
                Err((_, over)) => {
                    let arena = state.arena().stats();
                    // With a region goes what the source adds to it.
                    let available_bytes = (arena.hole_bytes + arena.overhead_bytes).saturating_add(limits.commit_bytes);
                    let is_held_by_copies = closed.is_none() && arena.idle_bytes > 0;
                    drop(closed);
                    drop(state);
                    // Copies of pools that nobody uses at the moment may be over; what they used is idle then.
                    complete_copies(&attached);
                    if std::mem::take(&mut may_sweep) {
                        to_release = idle_buffers(pool, &attached);
                    }
                    if to_release > 0
                        && make_room(pool, &attached, self.held_bytes(bytes).saturating_sub(available_bytes))
                    {
                        to_release -= 1;
                        continue;
                    }
                    if std::mem::take(&mut may_ask_nodes) && self.ask_other_nodes(bytes, now_us) {
                        continue;
                    }
                    if is_held_by_copies && std::mem::take(&mut may_wait) {
                        deferral.get_or_insert_with(diag::defer);
                        closed_late = self.close_late(&attached, until);
                        to_release = idle_buffers(pool, &attached);
                        continue;
                    }
                    let no_space = || {
                        over.map_or_else(
                            || self.no_space(bytes, room),
                            |over| Refusal::Over { needed_bytes: bytes, over },
                        )
                    };
                    return Err(source_error.map_or_else(no_space, Refusal::Source));
                }
            };
            let is_larger = plan.surplus_bytes() > 0;
            match self.grow(state, plan, bytes, closed, (now_us, until)) {
                Ok(memory) => {
                    if is_one_buffer && self.shape.is_discrete {
                        self.state.lock().count_smaller_region();
                    }
                    let no_address = || Refusal::Source(SourceError::new("arena", "a place without an address"));
                    return memory.map(Acquired::New).ok_or_else(no_address);
                }
                // Two attempts are enough: what other threads put back meanwhile is found by waiting in line.
                Err(error) if source_error.is_some() => return Err(Refusal::Source(error)),
                Err(_) if is_larger => is_one_buffer = true,
                Err(error) => source_error = Some(error),
            }
        }
    }

    fn limits(&self, state: &ArenaState, room: Room, may_commit: bool, at_rest: bool, now_us: u64) -> GrowthLimits {
        let commit_bytes = match (may_commit, self.config.may_grow) {
            (false, _) => 0,
            (true, true) => room.bytes(),
            // What of the reserve is still to come.
            (true, false) => room.bytes().min(state.reserve_to_come()),
        };
        let step_bytes = if at_rest { u64::MAX } else { STEP_BESIDE_COPIES_BYTES };
        let (over_bytes, largest_bytes) = (self.quota.over_bytes(), state.largest_missed_bytes(now_us));
        GrowthLimits { commit_bytes, over_bytes, may_decommit_regions: at_rest, step_bytes, largest_bytes }
    }
}
