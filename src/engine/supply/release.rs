//! Memory leaves the ground: what is due in time, what a trim asks for, everything at the end.
//!
//! Where a release waits for the device, all of it happens with the [gate](super::gate) closed, or not yet. What cannot go
//! yet stays where it is: idle in the arena, so that it is the first to be used again, counts under the ceiling, and can
//! never be more than that. `awaiting_release_bytes` says how much it is.
//!
//! | asked by | while copies are in flight |
//! | --- | --- |
//! | time (rule 9) | looked at again with the next look at the clock |
//! | `trim`, `clear`, pressure | done at the first look that finds none |
//! | a get at the ceiling | waits in line, or for the copies (`PINPOOL_RELEASE_POLICY=force`) |
//! | the end of the pool | comes after the copies; with a stuck one, nothing goes at all |
//!
//! A buffer that is lost, because nobody knows when a device is done with it, is a copy in flight for ever: from then on
//! nothing goes of what waits for the device, whoever asks.
//!
//! What is due goes on a thread of its own if a driver is asked, so that no get or put pays for it; that thread lives as
//! long as one step. Never decides what is due.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::gate::Closed;
use super::shared_arena::{ArenaState, SharedArena};
use crate::arena::Plan;
use crate::backend::SourceError;

impl SharedArena {
    /// A copy of one of the blocks is about to be enqueued.
    #[inline]
    pub(in crate::engine) fn begin_copy(&self) {
        self.gate.begin_copy();
    }

    /// So many copies of a block are over.
    pub(in crate::engine) fn end_copies(&self, copies: u64) {
        self.gate.end_copies(copies);
    }

    /// Nobody will ever know when a copy of a block is over.
    pub(in crate::engine) fn copy_lost(&self) {
        self.gate.block();
    }

    /// What is due goes back to the system (rule 9), soon.
    pub(in crate::engine) fn release_due(self: &Arc<Self>, now_us: u64) -> Result<(), SourceError> {
        // Relaxed: who sees an old answer finds the gate closed, or nothing due.
        if self.is_reclaiming.load(Ordering::Relaxed) {
            return Ok(());
        }
        {
            let land = self.land.lock();
            if land.trim_to_bytes.is_none() && !land.arena.is_release_due(now_us) {
                return Ok(());
            }
        }
        if !self.is_at_rest() {
            let mut land = self.land.lock();
            land.overdue_bytes = land.arena.due_bytes(now_us);
            return Ok(());
        }
        // Acquire and Release: one such thread after the other.
        if self.source.needs_gpu() && !self.is_reclaiming.swap(true, Ordering::Acquire) {
            let ground = self.clone();
            let reclaim = move || {
                let given_back = ground.release_now(now_us);
                ground.is_reclaiming.store(false, Ordering::Release);
                ground.log.release_error(given_back);
            };
            if std::thread::Builder::new().name("pinpool-reclaim".to_owned()).spawn(reclaim).is_ok() {
                return Ok(());
            }
            self.is_reclaiming.store(false, Ordering::Release);
        } else if self.source.needs_gpu() {
            return Ok(());
        }
        self.release_now(now_us)
    }

    /// Is no copy aboard, of any of the pools that share this memory? One that fell silent has others look for it.
    fn is_at_rest(&self) -> bool {
        self.gate.is_at_rest() || {
            self.tenants().iter().for_each(|tenant| tenant.land_copies());
            self.gate.is_at_rest()
        }
    }

    fn release_now(&self, now_us: u64) -> Result<(), SourceError> {
        let trimmed = self.release(now_us, ArenaState::trim);
        self.release(now_us, |land| land.arena.release_due(now_us)).and(trimmed)
    }

    /// Idle granules go back to the system until at most `to_bytes` are held, or nothing is idle.
    pub(in crate::engine) fn release_down_to(&self, to_bytes: u64, now_us: u64) -> Result<(), SourceError> {
        let before_bytes = {
            let mut land = self.land.lock();
            // Written down first: what cannot be done now is done by whoever closes the gate next, and what was put off
            // before is not forgotten for a trim that asks for less.
            let before_bytes = land.trim_to_bytes;
            land.trim_to_bytes = Some(before_bytes.map_or(to_bytes, |before_bytes| before_bytes.min(to_bytes)));
            before_bytes
        };
        // One look for copies that are over is enough for a trim in many steps.
        if before_bytes.is_some() || self.is_at_rest() { self.release(now_us, ArenaState::trim) } else { Ok(()) }
    }

    /// Carries a plan of releases out, unless copies are in flight that it would wait for.
    fn release(&self, now_us: u64, plan: impl FnOnce(&mut ArenaState) -> Option<Plan>) -> Result<(), SourceError> {
        self.gate.close().map_or(Ok(()), |closed| self.release_behind(&closed, now_us, plan))
    }

    /// Carries a plan of releases out. What will not go is tried again later, and said once until something goes.
    pub(super) fn release_behind(
        &self,
        _closed: &Closed<'_>,
        now_us: u64,
        plan: impl FnOnce(&mut ArenaState) -> Option<Plan>,
    ) -> Result<(), SourceError> {
        let mut land = self.land.lock();
        land.overdue_bytes = 0;
        let Some(plan) = plan(&mut land) else { return Ok(()) };
        let mut tools = land.sites.tools_for(&plan);
        drop(land);
        let begun = Instant::now();
        let (built, failed) = tools.release_each(&*self.source, &plan);
        let took = begun.elapsed();
        let mut land = self.land.lock();
        land.calls.time += took;
        let releases = built.releases;
        let error = land.note(tools, built);
        land.arena.settle_releases(&plan, &failed, now_us);
        self.settled.notify_all();
        let was_said = land.release_fails;
        land.release_fails = error.is_some() || was_said && releases == 0;
        match error {
            Some(error) if !was_said => Err(error),
            _ => Ok(()),
        }
    }
}

impl ArenaState {
    /// The trim that was asked for, if it is still to be done.
    fn trim(&mut self) -> Option<Plan> {
        let to_bytes = self.trim_to_bytes.take()?;
        self.arena.release_down_to(to_bytes)
    }

    /// Idle, and on its way out as soon as no copy is in flight.
    pub(super) fn awaiting_release_bytes(&self) -> u64 {
        let figures = self.arena.stats();
        let over = self.trim_to_bytes.map_or(0, |to_bytes| figures.committed_bytes.saturating_sub(to_bytes));
        over.max(self.overdue_bytes).min(figures.idle_bytes)
    }
}
